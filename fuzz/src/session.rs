//! A vhost-user session over a socketpair, and the queues that it starts.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Once};
use std::thread;

use egret_disk::{Disk, Driver, EngineOptions, EngineSet, Options};
use egret_event_loop::{LoopHandle, LoopOptions, MonitorChoice, Nanos, spawn};
use egret_export::{Access, Address, ErrorPolicy, Export, ExportConfig, Keeping, Rings, Worker};
use egret_polling::{Parameters, PolicyKind};
use egret_vring::memory::MemoryRules;
use egret_vring::ring::{DriverConfig, InflightConfig};
use egret_vring::vhost_user::flag::NEED_REPLY;
use egret_vring::vhost_user::protocol_feature::{
    CONFIG, CONFIGURE_MEM_SLOTS, DEVICE_STATE, INFLIGHT_SHMFD, LOG_SHMFD, MQ, REPLY_ACK,
};
use egret_vring::vhost_user::request::*;
use egret_vring::vhost_user::{F_LOG_ALL, VRING_LOG};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::blk_ring::{REGIONS, configuration, descriptor};
use crate::input::Input;
use crate::seeds::CAPACITY;

/// What the peer's memory is called, and nobody else's.
const MEMORY: &str = "fuzz-session";
/// The name of every thread that serves it begins so.
const THREAD: &str = "fuzz";
const QUEUES: u16 = 2;
/// The length of its dirty log, which is enough for its memory.
const LOG: u64 = 0x1000;
/// How far the peer has its memory mapped above where its guest has it.
const USER: u64 = 0x7f00_0000_0000;

/// Requests by what their payload is.
const OF_NOTHING: &[u32] =
    &[GET_FEATURES, SET_OWNER, RESET_OWNER, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, RESET_DEVICE, GET_MAX_MEM_SLOTS];
const OF_A_NUMBER: &[u32] =
    &[SET_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR, SET_BACKEND_REQ_FD];
const OF_A_STATE: &[u32] = &[SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE];
const OF_A_REGION: &[u32] = &[ADD_MEM_REG, REM_MEM_REG];

/// One I/O thread for all inputs of a process.
static IO: LazyLock<LoopHandle<Worker>> = LazyLock::new(|| {
    let options = LoopOptions {
        name: format!("{THREAD}-io"),
        monitor: MonitorChoice::Auto,
        policy: egret_polling::build(PolicyKind::Off, &Parameters::default()).expect("a policy"),
        window_max: Nanos::ZERO,
        idle_after: Nanos::from_millis(1),
        clock_reads: egret_event_loop::ClockReads::default(),
    };
    let engines = |ring| EngineSet::new(EngineOptions { ring, ..EngineOptions::default() });
    spawn(options, engines, |error| panic!("{error}")).expect("an I/O thread").0
});

/// A thread that serves the peer has panicked.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// A program: messages that mean something or nothing, descriptors of every kind, and what a driver writes to rings that
/// may run.
///
/// # Panics
/// When a thread that serves the session panics, or anything of the peer's is left when it has gone.
pub fn session(data: &[u8]) {
    watch_for_panics();
    let mut input = Input(data);
    let (mut peer, export) = begin(&mut input);
    while !input.is_over() {
        peer.step(&mut input);
    }
    drop(peer);
    // Returns when its thread has ended, and with it all that the session started.
    drop(export);
    IO.call(|_| ()).expect("the I/O thread is there");
    assert!(!PANICKED.load(Ordering::Relaxed), "a thread that serves the peer has panicked");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    assert!(!maps.contains(MEMORY), "the peer's memory is still mapped");
}

/// An export, and the client that it has.
fn begin(input: &mut Input<'_>) -> (Peer, Export) {
    let (ours, theirs) = UnixStream::pair().expect("a socketpair");
    // Of requests that take their time some are in flight when a queue breaks or the peer leaves.
    let latency = input.one_of(&[Nanos::ZERO, Nanos::from_millis(2)]);
    let driver = Driver::Null { size: CAPACITY, latency, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options::new("null", driver)).expect("no disk at all"));
    let device = configuration(input.u8(), QUEUES);
    let config = ExportConfig {
        id: format!("{THREAD}-e0"),
        address: Address::Fd(theirs.into()),
        access: Access::default(),
        memory: MemoryRules::default(),
        rings: Rings::default(),
        errors: ErrorPolicy::default(),
        keeping: Keeping::default(),
    };
    let export = Export::start(config, device, disk, vec![IO.clone()]).expect("an export");
    (Peer::new(ours, input), export)
}

fn watch_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |about| {
            if thread::current().name().is_some_and(|name| name.starts_with(THREAD)) {
                PANICKED.store(true, Ordering::Relaxed);
            }
            before(about);
        }));
    });
}

/// A front end, and what it shares.
struct Peer {
    socket: UnixStream,
    memory: [File; 2],
    record: File,
    log: File,
    signals: [OwnedFd; 3],
    config: DriverConfig,
    index: u16,
}

impl Peer {
    fn new(socket: UnixStream, input: &mut Input<'_>) -> Self {
        socket.set_nonblocking(true).expect("our own socket");
        let packed = input.u8().is_multiple_of(2);
        let config = DriverConfig {
            size: input.one_of(&[16, 32, 8]),
            packed,
            event_idx: input.u8().is_multiple_of(2),
            indirect: None,
            base: if packed { 0x8000 } else { 0 },
        };
        let place = InflightConfig { queues: QUEUES, queue_size: 32, packed };
        Self {
            socket,
            memory: REGIONS.map(|(_, len)| memory(len)),
            record: memory(place.bytes()),
            log: memory(LOG),
            signals: [(); 3].map(|()| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")),
            config,
            index: config.base,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 16 {
            0 => drop(self.send(input.bytes(64), &[])),
            1 | 2 => self.boot(input),
            3 => self.message(input.one_of(OF_NOTHING), &[], input),
            4 | 5 => {
                let number = self.number(input);
                self.message(input.one_of(OF_A_NUMBER), &number.to_ne_bytes(), input);
            }
            6 | 7 => {
                let value = input.one_of(&[0, 1, 16, 32, 1024, 3, u32::MAX, 0x8000_8000]);
                self.message(input.one_of(OF_A_STATE), &state(index(input), value), input);
            }
            8 => {
                let region = self.region(input);
                self.message(input.one_of(OF_A_REGION), &[vec![0; 8], region].concat(), input);
            }
            9 => {
                let count = input.u8() % 4;
                let regions: Vec<u8> = (0..count).flat_map(|_| self.region(input)).collect();
                let head = [u32::from(count).to_ne_bytes(), [0; 4]].concat();
                self.message(SET_MEM_TABLE, &[head, regions].concat(), input);
            }
            10 => {
                let at = REGIONS[0].0 + u64::from(input.u16() % 0x2000) + input.one_of(&[USER, USER, 0]);
                let log = input.one_of(&[None, None, Some(0), Some(at.wrapping_sub(USER)), Some(u64::MAX)]);
                self.message(SET_VRING_ADDR, &self.addresses(index(input), at, log), input);
            }
            11 => {
                let (queues, size) = (input.u16() % 4, input.one_of(&[32_u16, 16, 1, 0, 1024, u16::MAX]));
                let len = self.record.metadata().expect("our own memory").len();
                let (len, offset) =
                    (input.one_of(&[len, len, 64, u64::MAX]), input.one_of(&[0_u64, 0, 8, 4, u64::MAX]));
                let shape = u64::from(size) << 16 | u64::from(queues);
                let body: Vec<u8> = [len, offset, shape].into_iter().flat_map(u64::to_ne_bytes).collect();
                self.message(input.one_of(&[GET_INFLIGHT_FD, SET_INFLIGHT_FD, SET_INFLIGHT_FD]), &body, input);
            }
            12 => {
                let (offset, size) = (u32::from(input.u16() % 0x200), input.u8() % 80);
                let head: Vec<u8> = [offset, size.into(), 0].into_iter().flat_map(u32::to_ne_bytes).collect();
                let bytes = input.bytes(size.into());
                let bytes: Vec<u8> = (0..usize::from(size)).map(|at| bytes.get(at).copied().unwrap_or(0)).collect();
                self.message(input.one_of(&[GET_CONFIG, SET_CONFIG]), &[head, bytes].concat(), input);
            }
            13 => self.drive(input),
            14 => {
                let at = u64::from(input.u16() % 0x800);
                self.record.write_all_at(input.bytes(32), at).expect("our own memory");
            }
            _ => match input.u8() % 8 {
                4 => self.log(input),
                5 => {
                    let state = state(input.one_of(&[0, 1, 1, 2]), input.one_of(&[0, 0, 0, 1]));
                    self.message(SET_DEVICE_STATE_FD, &state, input);
                }
                6 => {
                    let len = input.one_of(&[0_u16, 0x1000, 0x800]);
                    self.log.set_len(len.into()).expect("our own memory");
                }
                0 => {
                    let len = u64::from(input.one_of(&[0_u16, 0x1000, 0x4000]));
                    self.memory[usize::from(input.u8() % 2)].set_len(len).expect("our own memory");
                }
                1 => self.memory[usize::from(input.u8() % 2)] = memory(0x4000),
                _ => self.hear(),
            },
        }
    }

    fn features(&self) -> u64 {
        let has = |feature: bool, bit: u32| u64::from(feature) << bit;
        has(self.config.packed, 34) | has(self.config.event_idx, 29) | 1 << 32 | 1 << 30 | 1 << 28
    }

    /// Sends what begins a migration, or ends one: all of it, or a part.
    fn log(&mut self, input: &mut Input<'_>) {
        let what = input.u8();
        if what & 1 == 0 {
            let (len, offset) = (input.one_of(&[LOG, LOG, 16, 0, u64::MAX]), input.one_of(&[0, 0, 0, 8, u64::MAX]));
            let body = [len, offset].map(u64::to_ne_bytes).concat();
            let _ = self.send(&message(SET_LOG_BASE, 0, &body), &[self.log.as_fd()]);
        }
        if what & 2 == 0 {
            let all = if what & 16 == 0 { F_LOG_ALL } else { 0 };
            let _ = self.send(&message(SET_FEATURES, NEED_REPLY, &(self.features() | all).to_ne_bytes()), &[]);
        }
        if what & 4 == 0 {
            let _ = self.send(&message(SET_LOG_FD, 0, &[]), &[self.signals[0].as_fd()]);
        }
        if what & 8 == 0 {
            let (at, log) = (REGIONS[0].0, (what & 16 == 0).then_some(self.config.queue(REGIONS[0].0).used));
            let body = self.addresses(index(input), at + USER, log);
            let _ = self.send(&message(SET_VRING_ADDR, NEED_REPLY, &body), &[]);
        }
    }

    /// Sends all that starts a queue, as a monitor does.
    fn boot(&mut self, input: &mut Input<'_>) {
        let _ = self.send(&message(SET_FEATURES, 0, &self.features().to_ne_bytes()), &[]);
        let protocol_features =
            CONFIGURE_MEM_SLOTS | INFLIGHT_SHMFD | CONFIG | REPLY_ACK | MQ | LOG_SHMFD | DEVICE_STATE;
        let _ = self.send(&message(SET_PROTOCOL_FEATURES, 0, &protocol_features.to_ne_bytes()), &[]);
        let regions = REGIONS.iter().flat_map(|&(at, len)| region(at, len, at + USER, 0));
        let table: Vec<u8> = [2_u32, 0].into_iter().flat_map(u32::to_ne_bytes).chain(regions).collect();
        let files = self.memory.each_ref().map(AsFd::as_fd);
        let _ = self.send(&message(SET_MEM_TABLE, 0, &table), &files);
        let index = index(input);
        let base = self.config.queue(REGIONS[0].0).base;
        let _ = self.send(&message(SET_VRING_NUM, 0, &state(index, self.config.size.into())), &[]);
        let _ = self.send(&message(SET_VRING_BASE, 0, &state(index, base)), &[]);
        let _ = self.send(&message(SET_VRING_ADDR, 0, &self.addresses(index, REGIONS[0].0 + USER, None)), &[]);
        for (request, signal) in [14, 13, 12].into_iter().zip(&self.signals) {
            let _ = self.send(&message(request, 0, &u64::from(index).to_ne_bytes()), &[signal.as_fd()]);
        }
        let _ = self.send(&message(SET_VRING_ENABLE, NEED_REPLY, &state(index, 1)), &[]);
        self.index = self.config.base;
    }

    /// What a driver does.
    fn drive(&mut self, input: &mut Input<'_>) {
        let Self { memory, config, .. } = self;
        let mut put = |at: u64, bytes: &[u8]| {
            for (file, (start, len)) in memory.iter().zip(REGIONS) {
                if (start..start + len).contains(&at) {
                    file.write_all_at(bytes, at - start).expect("our own memory");
                }
            }
        };
        for _ in 0..input.u8() % 4 {
            descriptor(&mut put, config, input);
        }
        if !config.packed {
            let at = config.queue(REGIONS[0].0);
            self.index = self.index.wrapping_add(u16::from(input.u8() % 4));
            put(at.avail + 2, &self.index.to_le_bytes());
        }
        // All of them: which is the kick is the peer's to know.
        for signal in &self.signals {
            let _ = rustix::io::write(signal, &1_u64.to_ne_bytes());
        }
        if input.u8().is_multiple_of(4) {
            self.hear();
        }
    }

    /// A message with a body of its kind; sometimes it wants an answer, sometimes its length is a lie.
    fn message(&mut self, request: u32, body: &[u8], input: &mut Input<'_>) {
        let how = input.u8();
        let flags = if how & 1 != 0 { NEED_REPLY } else { 0 };
        let mut bytes = message(request, flags, body);
        if how & 0xf0 == 0xf0 {
            bytes[8] = bytes[8].wrapping_add(how);
        }
        let all = [&self.memory[0], &self.memory[1], &self.record].map(AsFd::as_fd);
        let all = all.into_iter().chain(self.signals.iter().map(AsFd::as_fd)).chain([self.socket.as_fd()]);
        let all: Vec<_> = all.collect();
        let natural = match request {
            SET_VRING_KICK..=SET_VRING_ERR | SET_BACKEND_REQ_FD => 1,
            SET_MEM_TABLE => usize::from(body[0]),
            SET_INFLIGHT_FD | ADD_MEM_REG | SET_DEVICE_STATE_FD => 1,
            _ => 0,
        };
        let count = if how & 6 == 6 { usize::from(how >> 4) } else { natural };
        let fds: Vec<_> = (0..count).map(|_| all[usize::from(input.u8()) % all.len()]).collect();
        let _ = self.send(&bytes, &fds);
        if how & 8 != 0 {
            self.hear();
        }
    }

    fn number(&self, input: &mut Input<'_>) -> u64 {
        match input.u8() % 4 {
            0 => u64::from_ne_bytes(input.array()),
            1 => u64::from(index(input)) | 1 << 8,
            _ => index(input).into(),
        }
    }

    fn region(&self, input: &mut Input<'_>) -> Vec<u8> {
        let (at, len) = input.one_of(&REGIONS);
        match input.u8() % 8 {
            0 => region(u64::from_ne_bytes(input.array()), len, at + USER, 0),
            1 => region(at, u64::from_ne_bytes(input.array()), at + USER, 0),
            2 => region(at, len, u64::from_ne_bytes(input.array()), 0),
            3 => region(at, len, at + USER, u64::from_ne_bytes(input.array())),
            4 => region(at + 0x10_0000 * u64::from(input.u8()), 0x1000, at + USER, 0x1000),
            _ => region(at, len, at + USER, 0),
        }
    }

    fn addresses(&self, index: u32, at: u64, log: Option<u64>) -> Vec<u8> {
        let ring = self.config.queue(at);
        let head = state(index, if log.is_some() { VRING_LOG } else { 0 });
        let rest = [ring.desc, ring.used, ring.avail, log.unwrap_or(0)].into_iter().flat_map(u64::to_ne_bytes);
        head.into_iter().chain(rest).collect()
    }

    /// Waits until all that was sent is answered, unless the session is over.
    fn hear(&mut self) {
        if self.send(&message(GET_FEATURES, 0, &[]), &[]).is_err() {
            return;
        }
        // In the middle of a message it is not a question: nobody waits for what may never come.
        let mut bytes = [0; 512];
        for _ in 0..20 {
            match self.socket.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => return,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => thread::yield_now(),
                Err(_) => return,
            }
        }
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is space for them");
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
    }
}

fn memory(len: u64) -> File {
    let file = File::from(memfd_create(MEMORY, MemfdFlags::CLOEXEC).expect("a memfd"));
    file.set_len(len).expect("its length");
    file
}

fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let head = [request, 1 | flags, body.len() as u32].into_iter().flat_map(u32::to_ne_bytes);
    head.chain(body.iter().copied()).collect()
}

fn state(index: u32, value: u32) -> Vec<u8> {
    [index.to_ne_bytes(), value.to_ne_bytes()].concat()
}

/// A queue, or none.
fn index(input: &mut Input<'_>) -> u32 {
    u32::from(input.one_of(&[0_u8, 0, 0, 1, 1, 2, 255]))
}

fn region(guest: u64, len: u64, user: u64, offset: u64) -> Vec<u8> {
    [guest, len, user, offset].into_iter().flat_map(u64::to_ne_bytes).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use super::*;

    /// Where requests lie.
    const HEADER: u16 = 0x2000;

    /// A descriptor, as [`descriptor`] takes it.
    fn bytes(packed: bool, place: u16, addr: u16, len: u16, flags: u8, next: u16) -> Vec<u8> {
        let [place, addr, len, next] = [place, addr - HEADER, len, next].map(u16::to_le_bytes);
        // Of the first lap, where that is said; a read of the first sector.
        let rest = [0; 4];
        [&place[..], &addr, &len, &[flags], &next, &rest[usize::from(!packed)..]].concat()
    }

    /// A read that takes its time, and behind it, while it is in flight, a chain that leads outside the memory.
    fn broken_in_flight(packed: bool) -> Vec<u8> {
        let (next, write) = (1, 2);
        let begin = [1, 0, u8::from(!packed), 0, 1];
        let chain = [(HEADER, 16, next), (0x3000, 512, next | write), (0x4000, 1, write)];
        // A packed ring has one ID for the chain, and looks at the first descriptor's flags first of all.
        let chain = chain
            .into_iter()
            .zip(0_u16..)
            .map(|((addr, len, flags), at)| bytes(packed, at, addr, len, flags, if packed { 0 } else { at + 1 }));
        let mut chain: Vec<_> = chain.collect();
        if packed {
            // The first descriptor makes the chain available, and the queue may be looked at before it is kicked.
            chain.reverse();
        }
        let chain = chain.concat();
        let [read, bad] = if packed {
            [vec![13, 3], [vec![13, 1], bytes(packed, 3, 0x7fff, 512, write, 1)].concat()]
        } else {
            [vec![13, 3], [vec![13, 1], bytes(packed, 0, 0x7fff, 512, next | write, 1)].concat()]
        };
        let ends: &[u8] = if packed { &[0] } else { &[1, 0] };
        [&begin[..], &[1, 0], &read, &chain, ends, &bad, ends].concat()
    }

    /// A queue that is logged, while it breaks and when the log is gone.
    fn logged(packed: bool) -> Vec<u8> {
        let program = broken_in_flight(packed);
        // What begins it, and its first step.
        let (begin, rest) = program.split_at(7);
        let (log, torn) = ([15, 4, 0, 0, 0, 0], [15, 6, 0]);
        [begin, &log, rest, &torn, &[1, 0], &log].concat()
    }

    #[test]
    fn the_corpus_has_queues_that_are_logged() {
        for (packed, name) in [(false, "logged-split"), (true, "logged-packed")] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/session").join(name);
            if std::env::var_os("EGRET_BLESS").is_some() {
                std::fs::write(&path, logged(packed)).unwrap();
            }
            assert!(std::fs::read(&path).unwrap() == logged(packed), "run this with EGRET_BLESS=1");
        }
    }

    fn await_that(mut holds: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !holds() {
            assert!(begin.elapsed() < Duration::from_secs(30));
            thread::yield_now();
        }
    }

    #[test]
    fn a_program_can_break_a_queue_with_a_request_in_flight() {
        for packed in [false, true] {
            let program = broken_in_flight(packed);
            let mut input = Input(&program);
            let (mut peer, export) = begin(&mut input);
            peer.step(&mut input);
            peer.socket.set_nonblocking(false).unwrap();
            let mut answer = [0; 20];
            peer.socket.read_exact(&mut answer).unwrap();
            assert_eq!(answer[12..], 0_u64.to_ne_bytes(), "the queue is enabled");
            let counts = || export.queues()[0].read();
            peer.step(&mut input);
            // On a busy machine it may have ended before anybody looks.
            await_that(|| counts().in_flight == 1 || counts().total().requests == 1);
            peer.step(&mut input);
            assert!(input.is_over());
            await_that(|| counts().broken == 1);
            drop((peer, export));
            session(&program);
        }
    }

    #[test]
    fn the_corpus_has_a_queue_that_breaks_with_a_request_in_flight() {
        for (packed, name) in [(false, "broken-in-flight-split"), (true, "broken-in-flight-packed")] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/session").join(name);
            if std::env::var_os("EGRET_BLESS").is_some() {
                std::fs::write(&path, broken_in_flight(packed)).unwrap();
            }
            assert!(std::fs::read(&path).unwrap() == broken_in_flight(packed), "run this with EGRET_BLESS=1");
        }
    }
}
