//! A split or packed ring that its driver writes anything to, with a virtio-blk device behind it.

use std::sync::Arc;

use egret_disk::{Completion, Op, Request};
use egret_virtio::blk::{Blk, BlkConfig, BlkQueue, DiscardLimits, WriteZeroesLimits};
use egret_virtio::{Next, RequestModel};
use egret_vring::memory::{Buffers, GuestMemory, Region};
use egret_vring::ring::{Chain, DriverConfig, Queue};
use rustix::io::Errno;

use crate::input::Input;
use crate::seeds::CAPACITY;

/// Two regions with a hole between them. The first has the ring at its beginning.
pub(crate) const REGIONS: [(u64, u64); 2] = [(0x1000, 0x4000), (0x8000, 0x2000)];

/// A program: what is written where, and when the device looks.
///
/// # Panics
/// When the device does what it must not.
pub fn blk_ring(data: &[u8]) {
    let mut input = Input(data);
    let memory = memory();
    let config = ring(&mut input);
    let queue = config.queue(REGIONS[0].0);
    if !config.packed {
        assert!(memory.write(queue.avail + 2, &config.base.to_le_bytes()));
    }
    let available = queue.avail;
    let mut queue = queue.start(&memory).expect("a queue");
    let mut model = device(input.u8()).queue(config.size);
    let (mut chain, mut out, mut index) = (Chain::new(), Vec::new(), config.base);
    while !input.is_over() {
        match input.u8() % 4 {
            0 => {
                let (at, len) = (REGIONS[0].0 + u64::from(input.u16() % 0x1000), input.u8() % 64);
                memory.write(at, input.take(len.into()));
            }
            1 => descriptor(&mut |at, bytes| _ = memory.write(at, bytes), &config, &mut input),
            2 => {
                if !config.packed {
                    index = index.wrapping_add(u16::from(input.u8() % 8));
                    memory.write(available + 2, &index.to_le_bytes());
                }
                serve(&mut queue, &mut model, &mut chain, &mut out);
            }
            _ => end(&mut queue, &mut model, &mut out, input.u8()),
        }
        queue.publish_used();
    }
    while !out.is_empty() {
        end(&mut queue, &mut model, &mut out, 0);
    }
    assert_eq!(queue.in_flight(), 0, "every chain comes back");
}

pub(crate) fn memory() -> Arc<GuestMemory> {
    let memory = REGIONS.into_iter().fold(GuestMemory::empty(), |memory, (at, len)| {
        memory.with(Region::anonymous(at, len).expect("memory")).expect("a map")
    });
    Arc::new(memory)
}

/// A ring of any layout and size, at any index.
pub(crate) fn ring(input: &mut Input<'_>) -> DriverConfig {
    let size = input.one_of(&[1, 2, 8, 32]);
    let (event_idx, packed) = input.one_of(&[(true, false), (false, false), (true, true), (false, true)]);
    let start = input.one_of(&[0, 1, u16::MAX]);
    // A place in the ring and a wrap counter, or any index.
    let base = if packed { (start & 0x8000) | (start % size) } else { start };
    DriverConfig { size, packed, event_idx, indirect: None, base }
}

pub(crate) fn device(kind: u8) -> Arc<Blk> {
    Blk::new(configuration(kind, 1)).expect("the configuration is good")
}

/// What a device is, by the bits of `kind`.
pub(crate) fn configuration(kind: u8, num_queues: u16) -> BlkConfig {
    let has = |bit: u8| kind & 1 << bit != 0;
    BlkConfig {
        capacity_bytes: CAPACITY,
        logical_block_size: 512,
        physical_block_size: 4096,
        optimal_io_size: 0,
        num_queues,
        queue_size: 32,
        read_only: has(0) && has(1),
        serial: "s".to_owned(),
        writethrough: has(2),
        discard: has(3).then_some(DiscardLimits { max_sectors: 64, alignment: 8 }),
        write_zeroes: has(4).then_some(WriteZeroesLimits { max_sectors: 64, may_unmap: has(5) }),
    }
}

/// Writes a descriptor that may mean something, and what it points at.
pub(crate) fn descriptor(put: &mut dyn FnMut(u64, &[u8]), config: &DriverConfig, input: &mut Input<'_>) {
    let size = config.size;
    let (place, addr) = (u64::from(input.u16() % size), 0x2000 + u64::from(input.u16() % 0x8000));
    let (len, flags, next) = (u32::from(input.u16() % 0x2000), u16::from(input.u8() % 8), input.u16() % size);
    let mut bytes = addr.to_le_bytes().to_vec();
    bytes.extend(len.to_le_bytes());
    if config.packed {
        // Of this lap or the other.
        let owner = if input.u8().is_multiple_of(2) { 1 << 7 } else { 1 << 15 };
        bytes.extend(next.to_le_bytes());
        bytes.extend((flags | owner).to_le_bytes());
    } else {
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
    }
    put(REGIONS[0].0 + 16 * place, &bytes);
    // A request's header: its kind and its sector.
    let mut header = u64::from(input.one_of(&[0_u8, 1, 4, 8, 11, 13, 99])).to_le_bytes().to_vec();
    header.extend((u64::from(input.u16()) % (CAPACITY / 400)).to_le_bytes());
    put(addr, &header);
}

/// Takes in what there is, for as long as the driver keeps to the rules.
pub(crate) fn serve(queue: &mut Queue, model: &mut BlkQueue, chain: &mut Chain, out: &mut Vec<Request<Buffers>>) {
    for _ in 0..queue.size() {
        // A ring that breaks the rules stays broken.
        let Ok(true) = queue.pop(chain) else { return };
        let pieces = || chain.readable().iter().chain(chain.writable());
        assert!(pieces().all(|piece| queue.memory().holds(piece)), "a piece is outside the guest's memory");
        let head = chain.head();
        match model.begin(queue.memory(), chain, 0) {
            Ok(Next::Submit(_, request)) => {
                check(queue.memory(), &request);
                out.push(request);
            }
            Ok(Next::Complete(ended)) => queue.add_used(ended.head, ended.written),
            Ok(Next::Wait) => panic!("no request of virtio-blk waits"),
            Err(_) => queue.abandon(head),
        }
    }
}

fn check(memory: &GuestMemory, request: &Request<Buffers>) {
    let Request { op, offset, len, buffers, .. } = request;
    assert!(offset.checked_add(*len).is_some_and(|end| end <= CAPACITY), "{request:?} is outside the disk");
    let sum: usize = buffers.iter().map(|piece| piece.len()).sum();
    let expected = if matches!(op, Op::Read | Op::Write { .. }) { *len } else { 0 };
    assert_eq!(sum as u64, expected, "{request:?}");
    assert!(buffers.iter().all(|piece| memory.holds(piece)), "{request:?} is outside the guest's memory");
}

/// Ends one request of those that are under way.
pub(crate) fn end(queue: &mut Queue, model: &mut BlkQueue, out: &mut Vec<Request<Buffers>>, which: u8) {
    if out.is_empty() {
        return;
    }
    let Request { token, buffers, .. } = out.swap_remove(usize::from(which) % out.len());
    let result = if which.is_multiple_of(4) { Err(Errno::IO) } else { Ok(()) };
    match model.end(queue.memory(), Completion { token, result, buffers }) {
        Next::Complete(ended) => queue.add_used(ended.head, ended.written),
        other => panic!("not done: {other:?}"),
    }
}
