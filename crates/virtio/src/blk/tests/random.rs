//! Random bytes for rings and requests: nothing panics, and nothing outside the map is ever named.

use egret_vring::ring::{Chain, DriverConfig};
use egret_vring::testing::{DATA, DATA_LEN, Guest, RING, descriptor};
use proptest::prelude::*;

use egret_disk::Completion;

use crate::blk::{Blk, BlkConfig, DiscardLimits, WriteZeroesLimits};
use crate::{Next, RequestModel};

/// An address that is rather in memory than not, and rather near one of its ends.
fn address() -> impl Strategy<Value = u64> {
    let end = DATA + DATA_LEN;
    prop_oneof![
        6 => DATA..DATA + 0x2000,
        2 => RING..RING + 0x2000,
        1 => end - 0x40..end + 0x40,
        1 => RING - 0x40..RING + 0x40,
        1 => any::<u64>(),
        1 => u64::MAX - 0x100..=u64::MAX,
    ]
}

fn length() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => prop::sample::select(vec![0, 1, 15, 16, 17, 32, 512, 513, 4096]),
        2 => 0u32..0x4000,
        1 => any::<u32>(),
    ]
}

/// A descriptor that is rather valid than not.
fn any_descriptor() -> impl Strategy<Value = [u8; 16]> {
    let flags = prop_oneof![8 => 0u16..4, 2 => 4u16..8, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0u16..32, 1 => any::<u16>()];
    (address(), length(), flags, next).prop_map(|(addr, len, flags, next)| descriptor(addr, len, flags, next))
}

/// The same in a packed ring, rather available than not.
fn in_packed_ring(descriptor: [u8; 16], is_available: bool) -> [u8; 16] {
    let [flags, id] = [&descriptor[12..14], &descriptor[14..16]];
    let available = if is_available { 0x80 } else { 0 };
    [&descriptor[..12], id, &[flags[0] & 0x7f | available, flags[1] & 0x7f]].concat().try_into().unwrap()
}

/// A request's beginning that is rather of a known type than not.
fn header() -> impl Strategy<Value = [u8; 16]> {
    let request = prop_oneof![8 => prop::sample::select(vec![0u32, 1, 4, 8, 11, 13]), 1 => any::<u32>()];
    let sector = prop_oneof![8 => 0u64..1100, 1 => any::<u64>()];
    (request, sector).prop_map(|(request, sector)| {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&request.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_bytes_make_anything_panic_or_name_memory_outside_the_map(
        packed: bool,
        available in prop::collection::vec(prop::bool::weighted(0.95), 32),
        event_idx: bool,
        read_only: bool,
        table in prop::collection::vec(any_descriptor(), 32),
        data in prop::collection::vec(prop_oneof![header(), any_descriptor(), any::<[u8; 16]>()], 64),
        heads in prop::collection::vec(prop_oneof![9 => 0u16..32, 1 => any::<u16>()], 32),
        ahead in prop_oneof![9 => 0u16..=32, 1 => any::<u16>()],
        fails: bool,
    ) {
        let base = if packed { 0x8000 } else { 0 };
        let mut guest = Guest::new(DriverConfig { size: 32, packed, event_idx, indirect: None, base });
        let config = guest.driver.queue();
        guest.write(DATA, &data.concat());
        if packed {
            let table = table.into_iter().zip(available).map(|(descriptor, is)| in_packed_ring(descriptor, is));
            guest.write(config.desc, &table.collect::<Vec<_>>().concat());
            guest.write(config.avail, &ahead.to_le_bytes());
            guest.write(config.avail + 2, &heads[0].to_le_bytes());
        } else {
            guest.write(config.desc, &table.concat());
            let heads: Vec<u8> = heads.iter().flat_map(|head| head.to_le_bytes()).collect();
            guest.write(config.avail + 4, &heads);
            guest.write(config.avail + 2, &ahead.to_le_bytes());
        }

        let blk = Blk::new(BlkConfig {
            capacity_bytes: 1000 * 512,
            queue_size: 32,
            read_only,
            serial: "random".into(),
            discard: Some(DiscardLimits { max_sectors: 1000, alignment: 1 }),
            write_zeroes: Some(WriteZeroesLimits { max_sectors: 1000, may_unmap: true }),
            ..BlkConfig::default()
        }).unwrap();
        let mut model = blk.queue(32);
        let (mut chain, mut out) = (Chain::new(), Vec::new());
        let memory = guest.memory.clone();
        for _ in 0..64 {
            match guest.queue.pop(&mut chain) {
                Ok(true) => {}
                Ok(false) | Err(_) => break,
            }
            for piece in chain.readable().iter().chain(chain.writable()) {
                prop_assert!(memory.holds(piece) && !piece.is_empty());
            }
            let head = chain.head();
            let room: u64 = chain.writable().iter().map(|piece| piece.len() as u64).sum();
            match model.begin(&memory, &mut chain, 0) {
                Ok(Next::Submit(_, request)) => {
                    prop_assert!(request.buffers.iter().all(|piece| memory.holds(piece)));
                    prop_assert!(request.offset + request.len <= 1000 * 512);
                    let sum: u64 = request.buffers.iter().map(|piece| piece.len() as u64).sum();
                    prop_assert!(request.buffers.is_empty() || sum == request.len);
                    out.push((request, room));
                }
                Ok(Next::Complete(ended)) => {
                    prop_assert_eq!(ended.head, head);
                    prop_assert!(u64::from(ended.written) <= room);
                    guest.queue.add_used(ended.head, ended.written);
                }
                Ok(Next::Wait) => prop_assert!(false, "nothing to wait for"),
                Err(_) => guest.queue.abandon(head),
            }
        }
        prop_assert_eq!(usize::from(guest.queue.in_flight()), out.len());
        for (request, room) in out {
            let result = if fails { Err(rustix::io::Errno::IO) } else { Ok(()) };
            let completion = Completion { token: request.token, result, buffers: request.buffers };
            let Next::Complete(ended) = model.end(&memory, completion) else { panic!("a request is one operation") };
            prop_assert!(u64::from(ended.written) <= room);
            guest.queue.add_used(ended.head, ended.written);
        }
        prop_assert_eq!(guest.queue.in_flight(), 0);
        guest.queue.publish_used();
        guest.queue.arm_kicks();
    }
}
