//! A virtio-scsi device, all of its queues, and a driver that sends anything.

use std::collections::HashMap;
use std::sync::Arc;

use egret_disk::{Completion, Request};
use egret_scsi::LogicalUnit;
use egret_virtio::scsi::{LunAddress, Scsi, ScsiConfig};
use egret_virtio::{Device, Model, Next};
use egret_vring::memory::{Buffers, GuestMemory, Region};
use egret_vring::ring::{Chain, Driver, DriverConfig, Piece, Queue};
use rustix::io::Errno;

use crate::input::Input;
use crate::seeds;
use crate::woken::Woken;

const BASE: u64 = 0x10_0000;
/// Where buffers are: readable, and behind them writable.
const BUFFERS: u64 = BASE + 0x4_0000;
const BYTES: u64 = 0x6_0000;
const ADDRESSES: [LunAddress; 3] =
    [LunAddress { target: 0, lun: 0 }, LunAddress { target: 0, lun: 1 }, LunAddress { target: 9, lun: 300 }];
const REQUESTS: usize = 2;
const PATIENCE: usize = 1 << 20;

/// A queue, its driver, and its chains that are under way.
struct Line {
    driver: Driver,
    queue: Queue,
    model: Model,
    chain: Chain,
    /// Room for the answer of each chain, by the driver's name for it.
    rooms: HashMap<u64, u32>,
    named: u64,
    out: Vec<Request<Buffers>>,
    woken: Arc<Woken>,
    broken: bool,
}

/// A program: chains that are made available, requests of the disk that end, units that come and go.
///
/// # Panics
/// When the device does what it must not.
pub fn scsi_queues(data: &[u8]) {
    let mut input = Input(data);
    let memory = GuestMemory::empty().with(Region::anonymous(BASE, BYTES).expect("memory")).expect("a map");
    let memory = Arc::new(memory);
    let scsi = Scsi::new(ScsiConfig { num_queues: 2, queue_size: 16 }, "guest").expect("a device");
    let kind = input.u8();
    scsi.set_features(scsi.features()).expect("they were offered");
    for (at, value) in [(20, u32::from(input.u8())), (24, u32::from(input.u8()))] {
        // Refused where it makes no sense.
        let _ = scsi.write_config(at, &value.to_le_bytes());
    }
    let mut lines: Vec<Line> = (0..4).map(|index| Line::new(&memory, &scsi, index)).collect();
    while !input.is_over() {
        match input.u8() % 12 {
            0..6 => {
                let index = if input.u8().is_multiple_of(4) { input.u8() % 4 } else { 2 + input.u8() % 2 };
                lines[usize::from(index)].offer(index.into(), &mut input);
            }
            6..8 => {
                let line = &mut lines[REQUESTS + usize::from(input.u8() % 2)];
                line.end(input.u8().into(), if input.u8().is_multiple_of(4) { Err(Errno::IO) } else { Ok(()) });
            }
            8 => lines.iter_mut().for_each(Line::resume),
            9 => {
                let unit = LogicalUnit::new(seeds::unit(kind ^ input.u8(), "s")).expect("the configuration is good");
                if let Ok(lun) = scsi.prepare(input.one_of(&ADDRESSES), Arc::new(unit)) {
                    // Somebody else may be there.
                    let _ = scsi.add(lun);
                }
            }
            10 => drop(scsi.remove(input.one_of(&ADDRESSES))),
            _ => drop(scsi.resize(input.one_of(&ADDRESSES), seeds::CAPACITY / u64::from(input.u8() % 4 + 1))),
        }
        lines.iter_mut().for_each(Line::serve);
    }
    drain(&mut lines);
}

/// Everything ends, if every request of the disk does: queues go on with what waits when they are woken, and not before.
fn drain(lines: &mut [Line]) {
    let mut is_over = false;
    for turn in 0.. {
        // A second look: in the last turn a queue may have woken one that had had its turn.
        let was_over = is_over;
        is_over = lines.iter().all(|line| line.out.is_empty());
        for line in &mut *lines {
            line.end(turn, Ok(()));
            is_over &= !line.woken.is_set();
            line.resume();
            line.serve();
        }
        if was_over && is_over {
            break;
        }
        assert!(turn < PATIENCE, "requests never end");
    }
    assert!(lines.iter().all(|line| line.queue.in_flight() == 0), "a chain waits, and nobody wakes its queue");
}

impl Line {
    fn new(memory: &Arc<GuestMemory>, scsi: &Arc<Scsi>, index: u16) -> Self {
        // The control queue and the second request queue have packed rings.
        let packed = index.is_multiple_of(3);
        let base = if packed { 0x8000 } else { 0 };
        let config = DriverConfig { size: 16, packed, event_idx: index.is_multiple_of(2), indirect: None, base };
        let driver = Driver::new(memory, BASE + u64::from(index) * 0x1_0000, config).expect("a ring");
        let queue = driver.queue().start(memory).expect("a queue");
        let mut model = Arc::clone(scsi).model(index, 16);
        let woken = Arc::<Woken>::default();
        model.set_waker(Some(Arc::clone(&woken).into()));
        let (chain, rooms) = (Chain::new(), HashMap::new());
        Self { driver, queue, model, chain, rooms, named: 0, out: Vec::new(), woken, broken: false }
    }

    /// Makes a chain available, if there is room for one.
    fn offer(&mut self, index: u64, input: &mut Input<'_>) {
        let header = match index {
            0 => control(input),
            1 => Vec::new(),
            _ => request(input),
        };
        let how = input.u8();
        let (out, room) = (u32::from(input.u16() % 4096), u32::from(input.u16() % 8192));
        let at = BUFFERS + index * 0x8000;
        let cut = if how & 0x80 != 0 { header.len() } else { header.len().min(usize::from(how) % 64) };
        let pieces = |at: u64, lens: &[u32]| {
            let mut at = at;
            let mut pieces = Vec::new();
            for &len in lens.iter().filter(|len| **len > 0) {
                pieces.push(Piece { addr: at, len });
                at += u64::from(len);
            }
            pieces
        };
        let payload = input.bytes(usize::MAX);
        assert!(
            self.driver.memory().write(at, &header) && self.driver.memory().write(at + header.len() as u64, payload)
        );
        // A header that is cut short goes without what belongs to it.
        let is_whole = !input.u8().is_multiple_of(16);
        let readable = if is_whole {
            pieces(at, &[cut as u32, (header.len() - cut) as u32, out])
        } else {
            pieces(at, &[cut as u32])
        };
        let response = if input.u8().is_multiple_of(16) { u32::from(input.u8()) } else { 108 };
        let writable = pieces(at + 0x4000, &[response, if how & 0x40 != 0 { room } else { 0 }]);
        let space = writable.iter().map(|piece| piece.len).sum();
        if (readable.is_empty() && writable.is_empty()) || self.driver.add(&readable, &writable, self.named).is_err() {
            return;
        }
        self.rooms.insert(self.named, space);
        self.named += 1;
        self.driver.publish();
    }

    /// The worker's part: takes in what there is.
    fn serve(&mut self) {
        while !self.broken && self.model.takes_chains() {
            if !self.queue.pop(&mut self.chain).expect("the driver keeps to the rules of the ring") {
                break;
            }
            let head = self.chain.head();
            match self.model.begin(self.queue.memory(), &mut self.chain, 7) {
                Ok(next) => self.go_on(next),
                Err(_) => {
                    self.queue.abandon(head);
                    self.broken = true;
                }
            }
        }
        self.show();
    }

    fn go_on(&mut self, next: Next) {
        match next {
            Next::Wait => {}
            Next::Submit(_, request) => {
                self.check(&request);
                assert_eq!(request.token.source(), 7);
                self.out.push(request);
            }
            Next::Complete(ended) => self.queue.add_used(ended.head, ended.written),
        }
    }

    fn check(&self, request: &Request<Buffers>) {
        let Request { offset, len, buffers, .. } = request;
        assert!(offset.checked_add(*len).is_some_and(|end| end <= seeds::CAPACITY), "{request:?} is outside the disk");
        let sum: usize = buffers.iter().map(|piece| piece.len()).sum();
        assert!(buffers.is_empty() || sum as u64 == *len, "{request:?} has {sum} bytes");
        // A single piece may be the command's own memory.
        let is_theirs = buffers.iter().all(|piece| self.queue.memory().holds(piece));
        assert!(is_theirs || buffers.len() == 1, "{request:?} is outside the guest's memory");
    }

    fn end(&mut self, which: usize, result: Result<(), Errno>) {
        if self.out.is_empty() {
            return;
        }
        let Request { token, buffers, .. } = self.out.swap_remove(which % self.out.len());
        let next = self.model.end(self.queue.memory(), Completion { token, result, buffers });
        self.go_on(next);
    }

    /// The worker's part: goes on with what waits, when woken.
    fn resume(&mut self) {
        if self.woken.take() {
            let mut resumed = Vec::new();
            self.model.resume(self.queue.memory(), &mut resumed);
            resumed.into_iter().for_each(|next| self.go_on(next));
        }
    }

    /// Shows the driver what was done.
    fn show(&mut self) {
        self.queue.publish_used();
        self.model.caught_up();
        while let Some(used) = self.driver.reap().expect("the device keeps to the rules of the ring") {
            let room = self.rooms.remove(&used.token).expect("a chain is used once");
            assert!(used.written <= room, "{} bytes written to {room}", used.written);
        }
    }
}

fn lun(input: &mut Input<'_>) -> [u8; 8] {
    let how = input.u8();
    if how.is_multiple_of(16) {
        return input.array();
    }
    let at = input.one_of(&ADDRESSES);
    let [high, low] = at.lun.to_be_bytes();
    [1, at.target, if how & 0x10 != 0 { 0x40 | high } else { high }, low, 0, 0, 0, 0]
}

/// `struct virtio_scsi_req_cmd` up to its data.
fn request(input: &mut Input<'_>) -> Vec<u8> {
    let mut header = lun(input).to_vec();
    header.extend(u64::from(input.u8() % 4).to_le_bytes());
    header.extend(input.array::<3>());
    header.extend(seeds::cdb(input));
    header
}

/// `struct virtio_scsi_ctrl_tmf`, or `struct virtio_scsi_ctrl_an`.
fn control(input: &mut Input<'_>) -> Vec<u8> {
    let (kind, function) = (input.u8() % 4, input.u8() % 10);
    let mut header = u32::from(kind).to_le_bytes().to_vec();
    if kind == 0 {
        header.extend(u32::from(function).to_le_bytes());
    }
    header.extend(lun(input));
    header.extend(u64::from(input.u8() % 4).to_le_bytes());
    header
}
