//! A front-end of a virtio-scsi device: its memory, its rings, and what it sends through them.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use egret_disk::{Disk, Driver, Options};
use egret_event_loop::Nanos;
use egret_export::{Address, ErrorPolicy, Export, ExportConfig, ExportError, Keeping, LogicalUnit, LunConfig, OnError};
use egret_virtio::scsi::{LunAddress, ScsiConfig};
use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{self, DriverConfig, PACKED_BASE, Piece, Used};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::peer::gate::Gate;
use crate::peer::{
    GET_QUEUE_NUM, GET_VRING_BASE, IoThread, Peer, RING_EVENT_IDX, RING_PACKED, SET_MEM_TABLE, SET_VRING_ADDR,
    SET_VRING_BASE, SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_ERR, SET_VRING_KICK, SET_VRING_NUM, await_that,
    export_config, longs, words,
};

pub const MIB: u64 = 1 << 20;
const MEMORY: u64 = 0x10_0000;
pub const DATA: u64 = MEMORY + 0x10_0000;

pub const CONTROL: u32 = 0;
pub const EVENTS: u32 = 1;
pub const REQUESTS: u32 = 2;

pub const FIRST: LunAddress = LunAddress { target: 0, lun: 0 };
pub const LATE: LunAddress = LunAddress { target: 3, lun: 400 };

pub fn disk(latency: Nanos) -> Arc<Disk> {
    let driver = Driver::Null { size: 64 * MIB, latency, read_zeroes: true };
    Arc::new(Disk::open(&Options::new("null", driver)).unwrap())
}

pub fn unit(serial: &str) -> Arc<LogicalUnit> {
    let config = LunConfig { capacity_bytes: 64 * MIB, serial: serial.into(), ..LunConfig::default() };
    Arc::new(LogicalUnit::new(config).unwrap())
}

/// Adds the unit that comes late.
pub fn add_late(export: &Export, disk: Arc<Disk>) -> Result<(), ExportError> {
    let activate = |disk: &Arc<Disk>| disk.activate().map_err(|e| ExportError::Disk("late".to_owned(), e.into()));
    export.add_lun(LATE, unit("late"), disk, activate)
}

/// A ring of the front-end's, and the descriptors beside it.
pub struct Ring {
    pub driver: ring::Driver,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub err: OwnedFd,
}

impl Ring {
    /// Calls the device for no reason.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }
}

/// What the rings are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Split,
    Packed,
}

/// Waits until a descriptor has been signalled.
pub fn await_signal(fd: &OwnedFd) {
    let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
    let signalled = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&patience)).unwrap();
    assert_eq!(signalled, 1, "nobody signalled");
}

/// A front-end that drives control, event and request queues.
pub struct Machine {
    pub peer: Peer,
    pub memory: Arc<GuestMemory>,
    pub rings: Vec<Ring>,
}

impl Machine {
    pub fn boot(stream: UnixStream, layout: Layout) -> Self {
        let mut machine = Self::new(stream, layout);
        machine.start_rings();
        machine
    }

    /// One that has handed over nothing but its memory.
    pub fn new(stream: UnixStream, layout: Layout) -> Self {
        Self::with(stream, layout, true)
    }

    /// Likewise, whose rings have event indices or have none.
    pub fn with(stream: UnixStream, layout: Layout, event_idx: bool) -> Self {
        let mut peer = Peer(stream);
        let (packed, base) = match layout {
            Layout::Split => (false, 0),
            Layout::Packed => (true, PACKED_BASE as u16),
        };
        let unwanted = [(RING_PACKED, packed), (RING_EVENT_IDX, event_idx)];
        peer.agree_but(unwanted.into_iter().filter(|(_, is_wanted)| !is_wanted).map(|(feature, _)| feature).sum());
        let queues = peer.ask_u64(GET_QUEUE_NUM) as u32;
        assert!(queues > REQUESTS);
        let region = Region::anonymous(MEMORY, 0x20_0000).unwrap();
        let table = [words(&[1, 0]), longs(&[MEMORY, region.size, MEMORY, 0])].concat();
        peer.say(SET_MEM_TABLE, 0, &table, &[region.file.as_fd()]);
        let memory = Arc::new(GuestMemory::empty().with(region).unwrap());
        let mut rings = Vec::new();
        for index in 0..queues {
            let config = DriverConfig { size: 16, packed, event_idx, indirect: None, base };
            let at = MEMORY + u64::from(index) * 0x1_0000;
            let driver = ring::Driver::new(&memory, at, config).unwrap();
            let fd = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
            let err = fd();
            // Once for each connection, as QEMU does.
            peer.say(SET_VRING_ERR, 0, &longs(&[index.into()]), &[err.as_fd()]);
            rings.push(Ring { driver, kick: fd(), call: fd(), err });
        }
        Self { peer, memory, rings }
    }

    pub fn start_rings(&mut self) {
        for index in 0..self.rings.len() as u32 {
            assert_eq!(self.start_ring(index), Some(0));
        }
    }

    /// As QEMU does: all are started before the first is enabled.
    pub fn start_rings_and_enable_them_then(&mut self) {
        let rings = 0..self.rings.len() as u32;
        rings.clone().for_each(|index| self.start_ring_disabled(index));
        rings.for_each(|index| assert_eq!(self.enable_ring(index), Some(0)));
    }

    pub fn start_ring(&mut self, index: u32) -> Option<u64> {
        self.start_ring_disabled(index);
        self.enable_ring(index)
    }

    fn enable_ring(&mut self, index: u32) -> Option<u64> {
        self.peer.order(SET_VRING_ENABLE, &words(&[index, 1]))
    }

    /// Starts it, and leaves it disabled.
    pub fn start_ring_disabled(&self, index: u32) {
        let (peer, ring) = (&self.peer, &self.rings[index as usize]);
        let queue = ring.driver.queue();
        peer.say(SET_VRING_NUM, 0, &words(&[index, queue.size.into()]), &[]);
        peer.say(SET_VRING_BASE, 0, &words(&[index, queue.base]), &[]);
        let place = [words(&[index, 0]), longs(&[queue.desc, queue.used, queue.avail, 0])].concat();
        peer.say(SET_VRING_ADDR, 0, &place, &[]);
        let name = longs(&[index.into()]);
        peer.say(SET_VRING_CALL, 0, &name, &[ring.call.as_fd()]);
        peer.say(SET_VRING_KICK, 0, &name, &[ring.kick.as_fd()]);
    }

    /// Starts a ring that GET_VRING_BASE has stopped, where it was.
    pub fn start_ring_again(&self, index: u32) {
        let (name, ring) = (longs(&[index.into()]), &self.rings[index as usize]);
        // The kick starts it: what it has done by then nobody would be told of.
        self.peer.say(SET_VRING_CALL, 0, &name, &[ring.call.as_fd()]);
        self.peer.say(SET_VRING_KICK, 0, &name, &[ring.kick.as_fd()]);
    }

    pub fn offer(&mut self, queue: u32, readable: &[Piece], writable: &[Piece]) {
        let ring = &mut self.rings[queue as usize];
        ring.driver.add(readable, writable, 0).unwrap();
        if ring.driver.publish() {
            ring.kick();
        }
    }

    pub fn reap(&mut self, queue: u32) -> Used {
        let ring = &mut self.rings[queue as usize];
        loop {
            if let Some(used) = ring.driver.reap().unwrap() {
                return used;
            }
            if ring.driver.arm_calls() {
                await_signal(&ring.call);
                let _ = rustix::io::read(&ring.call, &mut [0; 8]);
            }
        }
    }

    pub fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(self.memory.read(at, &mut bytes));
        bytes
    }

    /// Makes a command available.
    pub fn send(&mut self, at: LunAddress, cdb: &[u8], room: u32) {
        self.send_with(at, cdb, &[], room);
    }

    /// Likewise one that gives data.
    pub fn send_with(&mut self, at: LunAddress, cdb: &[u8], out: &[u8], room: u32) {
        let mut header = [0; 51];
        let [high, low] = at.lun.to_be_bytes();
        header[..4].copy_from_slice(&[1, at.target, 0x40 | high, low]);
        header[8] = 9;
        header[19..19 + cdb.len()].copy_from_slice(cdb);
        assert!(self.memory.write(DATA, &[&header, out].concat()));
        let writable = [Piece { addr: DATA + 0x800, len: 108 }, Piece { addr: DATA + 0x1000, len: room }];
        self.offer(
            REQUESTS,
            &[Piece { addr: DATA, len: 51 + out.len() as u32 }],
            &writable[..if room > 0 { 2 } else { 1 }],
        );
    }

    /// Response, status, and additional sense code.
    pub fn answer(&mut self) -> (u8, u8, u8) {
        self.reap(REQUESTS);
        let response: [u8; 108] = self.read(DATA + 0x800);
        (response[11], response[10], response[24])
    }

    pub fn command(&mut self, at: LunAddress, cdb: &[u8], room: u32) -> (u8, u8, u8) {
        self.send(at, cdb, room);
        self.answer()
    }

    /// A buffer for an event. What it was filled with: kind, target, reason.
    pub fn event(&mut self) -> (u32, u8, u32) {
        assert_eq!(self.reap(EVENTS).written, 16);
        let bytes: [u8; 16] = self.read(DATA + 0x3000);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        (word(0), bytes[5], word(12))
    }

    /// Makes a task management function available, about the first unit.
    pub fn manage(&mut self, function: u8) {
        let mut request = [0; 24];
        (request[4], request[8], request[10], request[16]) = (function, 1, 0x40, 9);
        assert!(self.memory.write(DATA + 0x4000, &request));
        let (readable, writable) = (Piece { addr: DATA + 0x4000, len: 24 }, Piece { addr: DATA + 0x4100, len: 1 });
        self.offer(CONTROL, &[readable], &[writable]);
    }

    /// What became of a task management function.
    pub fn managed(&mut self) -> u8 {
        assert_eq!(self.reap(CONTROL).written, 1);
        self.read::<1>(DATA + 0x4100)[0]
    }

    pub fn offer_event(&mut self) {
        self.offer(EVENTS, &[], &[Piece { addr: DATA + 0x3000, len: 16 }]);
    }
}

pub fn started(io: &IoThread, latency: Nanos) -> (Machine, Export) {
    started_with(io, disk(latency), Layout::Split)
}

pub fn started_with(io: &IoThread, disk: Arc<Disk>, layout: Layout) -> (Machine, Export) {
    let (ours, export) = listening(io, disk);
    (Machine::boot(ours, layout), export)
}

/// All queues have stopped but one, which stops while it waits for a read that this gate keeps.
pub fn stopping(io: &IoThread) -> (Gate, Arc<Disk>, Machine, Export) {
    let gate = Gate::new();
    let slow = gate.disk();
    let (mut machine, export) = started_with(io, Arc::clone(&slow), Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    for queue in [CONTROL, EVENTS] {
        assert!(machine.peer.ask(GET_VRING_BASE, &words(&[queue, 0])).is_some());
    }
    machine.send(FIRST, &READ, 4096);
    gate.await_kept(1);
    machine.peer.say(GET_VRING_BASE, 0, &words(&[REQUESTS, 0]), &[]);
    await_that("the last queue to be stopping", || !export.has_running_queues());
    (gate, slow, machine, export)
}

pub fn listening(io: &IoThread, disk: Arc<Disk>) -> (UnixStream, Export) {
    listening_on(&[io], 1, disk)
}

/// With that many request queues, dealt out to these threads.
pub fn listening_on(io: &[&IoThread], num_queues: u16, disk: Arc<Disk>) -> (UnixStream, Export) {
    listening_with(OnError::Stop, io, num_queues, disk)
}

/// With that done about errors.
pub fn listening_with(on: OnError, io: &[&IoThread], num_queues: u16, disk: Arc<Disk>) -> (UnixStream, Export) {
    let errors = ErrorPolicy { rerror: on, werror: on, timeout: None };
    let config = |address| ExportConfig { errors, ..export_config(address) };
    listening_as(config, io, num_queues, unit("first"), disk)
}

/// Of a session that is kept when it ends, or was.
pub fn listening_and(keeping: Keeping, io: &IoThread, disk: Arc<Disk>) -> (UnixStream, Export) {
    listening_of(unit("first"), keeping, io, disk)
}

/// Likewise, of this unit.
pub fn listening_of(unit: Arc<LogicalUnit>, keeping: Keeping, io: &IoThread, disk: Arc<Disk>) -> (UnixStream, Export) {
    listening_as(|address| ExportConfig { keeping, ..export_config(address) }, &[io], 1, unit, disk)
}

fn listening_as(
    config: impl FnOnce(Address) -> ExportConfig,
    io: &[&IoThread],
    num_queues: u16,
    unit: Arc<LogicalUnit>,
    disk: Arc<Disk>,
) -> (UnixStream, Export) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = config(Address::Fd(theirs.into()));
    let (device, luns) = (ScsiConfig { num_queues, queue_size: 128 }, vec![(FIRST, unit, disk)]);
    let loops = io.iter().map(|io| io.0.clone()).collect();
    (ours, Export::start_scsi(config, device, luns, loops).unwrap())
}

pub const ABORT_TASK: u8 = 0;
pub const ABORT_TASK_SET: u8 = 1;
pub const UNIT_RESET: u8 = 5;
pub const QUERY_TASK: u8 = 6;
pub const QUERY_TASK_SET: u8 = 7;
pub const TEST_UNIT_READY: [u8; 6] = [0; 6];
pub const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
pub const POWER_ON: (u8, u8, u8) = (0, 2, 0x29);
pub const GOOD: (u8, u8, u8) = (0, 0, 0);
pub const BAD_TARGET: (u8, u8, u8) = (3, 0, 0);
