//! Disks that another crate brings, by one whose other side is a vector.

use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};

use egret_event_loop::EventNotifier;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::blocking::PART;
use crate::buffers;
use crate::engine::{Engine, Remotes, SharedEngine};
use crate::error::{EngineError, OpenCause};
use crate::remote::{Remote, RemoteDisk, Shape};
use crate::{BlockLimits, Blocks, DetectZeroes, Discard, FlushError, Job, Jobs, RemoteKind};

const SIZE: u64 = 4 << 20;

/// What all of it has seen.
#[derive(Debug, Default)]
struct Seen {
    bytes: Vec<u8>,
    jobs: Vec<(Op, u64, u64)>,
    engines: usize,
    locked: Vec<bool>,
    announced: usize,
    /// How many of its flushes fail that no engine runs.
    failing: usize,
    /// Whether those lose what was written.
    loses: bool,
    flushed: usize,
    /// Why it does not say its size until it is flushed.
    keeps_size: Option<io::ErrorKind>,
    /// Its engine does nothing of what it is given.
    is_sick: bool,
    /// A size that its driver was told of and nobody has taken yet.
    new_size: Option<u64>,
    watched: usize,
    is_lost: bool,
    cannot_discard: bool,
    /// When its engine has something to do by itself.
    deadline: Option<Nanos>,
    suppressed: usize,
    /// What it is, where it has the options of every other.
    alike: Option<RemoteKind>,
}

const LIMITS: BlockLimits =
    BlockLimits { max_discard: 8 << 20, discard_granularity: 2048, max_write_zeroes: 4 << 20, optimal_io: 65536 };

#[derive(Debug)]
struct Vector {
    blocks: Blocks,
    seen: Arc<Mutex<Seen>>,
}

impl Remote for Vector {
    fn kind(&self) -> RemoteKind {
        self.seen.lock().unwrap().alike.unwrap_or(RemoteKind::Nbd)
    }

    fn is_like(&self, _other: &dyn Any) -> bool {
        self.seen.lock().unwrap().alike.is_some()
    }

    fn name(&self) -> &str {
        "vector"
    }

    fn open(&self) -> Result<Shape, OpenCause> {
        let seen = self.seen.lock().unwrap();
        let max_discard = if seen.cannot_discard { 0 } else { LIMITS.max_discard };
        let limits = BlockLimits { max_discard, ..LIMITS };
        Ok(Shape { size: seen.bytes.len() as u64, blocks: self.blocks, limits })
    }

    fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
        self.seen.lock().unwrap().engines += 1;
        let bell = eventfd(0, EventfdFlags::NONBLOCK).map_err(|e| EngineError::Event(e.into()))?;
        Ok(Box::new(VectorEngine { seen: Arc::clone(&self.seen), bell, pushed: Vec::new(), done: Vec::new() }))
    }

    fn ask_size(&self) -> io::Result<u64> {
        let seen = self.seen.lock().unwrap();
        seen.keeps_size.map_or(Ok(seen.bytes.len() as u64), |why| Err(why.into()))
    }

    fn watch(&self, _bell: &EventNotifier) {
        self.seen.lock().unwrap().watched += 1;
    }

    fn take_new_size(&self) -> Option<u64> {
        self.seen.lock().unwrap().new_size.take()
    }

    fn is_lost(&self) -> bool {
        self.seen.lock().unwrap().is_lost
    }

    fn can_resize(&self) -> bool {
        true
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.seen.lock().unwrap().bytes.resize(bytes as usize, 0);
        Ok(())
    }

    fn flush(&self) -> Result<(), FlushError> {
        let mut seen = self.seen.lock().unwrap();
        seen.jobs.push((Op::Flush, 0, 0));
        seen.flushed += 1;
        if seen.flushed <= seen.failing {
            return Err(FlushError { errno: Errno::IO, is_loss: seen.loses });
        }
        seen.keeps_size = None;
        Ok(())
    }

    fn lock(&self) -> Result<(), OpenCause> {
        self.seen.lock().unwrap().locked.push(true);
        Ok(())
    }

    fn unlock(&self) {
        self.seen.lock().unwrap().locked.push(false);
    }
}

struct VectorEngine {
    seen: Arc<Mutex<Seen>>,
    bell: OwnedFd,
    pushed: Jobs,
    done: Jobs,
}

impl Drop for VectorEngine {
    fn drop(&mut self) {
        self.seen.lock().unwrap().engines -= 1;
    }
}

impl Engine for VectorEngine {
    fn push(&mut self, job: Box<Job>) {
        self.pushed.push(job);
    }

    fn submit(&mut self, _now: Nanos) {
        for job in self.pushed.drain(..) {
            let Request { op, offset, len, buffers, .. } = &job.request;
            let mut seen = self.seen.lock().unwrap();
            seen.jobs.push((*op, *offset, *len));
            let bytes = *offset as usize..(*offset + *len) as usize;
            match op {
                Op::Read => buffers::scatter(buffers, 0, &seen.bytes[bytes]),
                Op::Write { .. } => buffers::gather(buffers, 0, &mut seen.bytes[bytes]),
                Op::WriteZeroes { .. } => seen.bytes[bytes].fill(0),
                Op::Flush | Op::Discard => {}
            }
            self.done.push(job);
            rustix::io::write(&self.bell, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    fn has_completions(&mut self) -> bool {
        !self.done.is_empty()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        let result = if self.seen.lock().unwrap().is_sick { Err(Errno::IO) } else { Ok(()) };
        self.done.drain(..).for_each(|job| done(job.ended(result)));
    }

    fn deadline(&self) -> Option<Nanos> {
        self.seen.lock().unwrap().deadline
    }

    fn suppress(&mut self) {
        self.seen.lock().unwrap().suppressed += 1;
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.bell.as_raw_fd())
    }

    fn announced(&mut self) {
        self.seen.lock().unwrap().announced += 1;
    }

    fn end(mut self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        self.pushed.drain(..).for_each(left);
    }
}

fn vector(logical: u32) -> (Options, Arc<Mutex<Seen>>) {
    let seen = Arc::new(Mutex::new(Seen { bytes: vec![0; SIZE as usize], ..Seen::default() }));
    let blocks = Blocks { logical, physical: 4096 };
    let disk = RemoteDisk::new(Vector { blocks, seen: Arc::clone(&seen) });
    (Options::new("disk0", Driver::Remote(disk)), seen)
}

#[test]
fn a_remote_disk_runs_all_of_its_requests_itself() {
    let (options, seen) = vector(512);
    let mut rig = Rig::new(&Options { discard: Discard::Unmap, ..options });
    let data: Vec<u8> = (0..8192_u32).map(|at| at as u8).collect();
    assert_eq!(rig.write(512, &data), Ok(()));
    assert_eq!(rig.read(512, 8192), data);
    let ops = [Op::Flush, Op::Discard, Op::WriteZeroes { unmap: true, fua: true }, Op::Write { fua: true }, Op::Flush];
    for (op, (offset, len)) in ops.into_iter().zip([(0, 0), (0, 4096), (512, 512), (0, 0), (0, 0)]) {
        assert_eq!(rig.run(op, offset, len), Ok(()));
    }
    assert_eq!(rig.read(512, 1024), [vec![0; 512], data[512..1024].to_vec()].concat());
    let jobs = seen.lock().unwrap().jobs.iter().map(|job| job.0).collect::<Vec<_>>();
    let expected = [
        Op::Write { fua: false },
        Op::Read,
        Op::Flush,
        Op::Discard,
        Op::WriteZeroes { unmap: true, fua: true },
        Op::Flush,
        Op::Read,
    ];
    assert_eq!(jobs, expected, "and what moves nothing is answered");
    assert_eq!((rig.requests_of("nbd"), rig.requests_of("threads")), (7, 0));
    let engines = rig.engines.counters().read().engines;
    assert!(engines.iter().all(|stats| stats.submissions == stats.requests), "one for each that came alone");
}

#[test]
fn a_remote_disk_is_spared_what_its_options_rule_out() {
    let (options, seen) = vector(512);
    let detect_zeroes = DetectZeroes::On;
    let mut rig = Rig::new(&Options { no_flush: true, detect_zeroes, ..options });
    for (op, len) in [(Op::Flush, 0), (Op::Discard, 4096), (Op::WriteZeroes { unmap: true, fua: true }, 4096)] {
        assert_eq!(rig.run(op, 0, len), Ok(()));
    }
    assert_eq!(rig.write(4096, &[0; 4096]), Ok(()));
    let zeroes = Op::WriteZeroes { unmap: false, fua: false };
    assert_eq!(seen.lock().unwrap().jobs, [(zeroes, 0, 4096), (zeroes, 4096, 4096)]);
}

#[test]
fn a_remote_disk_makes_stable_what_is_to_be_unless_flushes_are_ignored() {
    for no_flush in [false, true] {
        let (options, seen) = vector(512);
        let mut rig = Rig::new(&Options { no_flush, ..options });
        let token = rig.push(Op::Write { fua: true }, 0, 512, Some(Memory::new(512, 0)));
        assert_eq!(rig.finish(token).0, Ok(()));
        assert_eq!(seen.lock().unwrap().jobs, [(Op::Write { fua: !no_flush }, 0, 512)]);
    }
}

#[test]
fn what_a_remote_disk_failed_to_write_comes_back_as_it_was_asked_for() {
    for no_flush in [false, true] {
        let (options, seen) = vector(512);
        seen.lock().unwrap().is_sick = true;
        let mut rig = Rig::new(&Options { no_flush, ..options });
        let asked = [true, false].map(|fua| [Op::Write { fua }, Op::WriteZeroes { unmap: false, fua }]).concat();
        for op in &asked {
            let memory = matches!(op, Op::Write { .. }).then(|| Memory::new(512, 0));
            let token = rig.push(*op, 0, 512, memory);
            assert_eq!(rig.finish(token).0, Err(Errno::IO));
        }
        assert!(rig.failed.iter().map(|failed| failed.op).eq(asked), "no_flush={no_flush}: {:?}", rig.failed);
    }
}

#[test]
fn zeroes_are_looked_for_in_what_a_remote_disk_is_to_write_as_far_as_the_loop_has_time_for_it() {
    let (options, seen) = vector(512);
    let mut rig = Rig::new(&Options { detect_zeroes: DetectZeroes::On, ..options });
    for len in [PART, PART + 512] {
        assert_eq!(rig.write(0, &vec![0; len as usize]), Ok(()));
    }
    let zeroes = Op::WriteZeroes { unmap: false, fua: false };
    assert_eq!(seen.lock().unwrap().jobs, [(zeroes, 0, PART), (Op::Write { fua: false }, 0, PART + 512)]);
}

#[test]
fn a_request_must_be_made_of_a_remote_disks_own_blocks() {
    let (options, seen) = vector(4096);
    let mut rig = Rig::new(&options);
    assert_eq!(rig.run(Op::Discard, 512, 4096), Err(Errno::INVAL));
    assert_eq!(rig.write(4096, &[1; 512]), Err(Errno::INVAL));
    assert_eq!(rig.write(4096, &[1; 4096]), Ok(()));
    assert_eq!(seen.lock().unwrap().jobs.len(), 1);
}

#[test]
fn the_queues_of_a_thread_share_a_remote_disks_engine_until_the_last_has_left() {
    let (options, seen) = vector(512);
    let engines = || seen.lock().unwrap().engines;
    let mut rig = Rig::new(&options);
    let disk = Arc::clone(&rig.disk);
    let (other, others) = vector(512);
    let other = Arc::new(Disk::open(&other).unwrap());
    let more = [&disk, &other].map(|disk| rig.engines.attach(disk).unwrap());
    assert_eq!((engines(), others.lock().unwrap().engines, rig.engines.descriptors().len()), (1, 1, 2));
    rig.engines.detach(more[0]);
    rig.engines.detach(more[1]);
    assert_eq!(rig.engines.descriptors().len(), 1, "it is not watched any more");
    assert_eq!(others.lock().unwrap().engines, 1, "and gone when nobody watches it");
    assert_eq!(rig.engines.deadline(), Some(Nanos::ZERO), "at once, also where the loop spins");
    rig.engines.submit(clock::now());
    assert_eq!(rig.engines.deadline(), None);
    assert_eq!((engines(), others.lock().unwrap().engines), (1, 0));
    let once_more = rig.engines.attach(&other).unwrap();
    rig.engines.detach(once_more);
    assert!(rig.engines.arm());
    assert_eq!(others.lock().unwrap().engines, 0, "or before the loop sleeps");
    rig.engines.suppress();
    assert_eq!(rig.write(0, &[7; 512]), Ok(()));
    drop(rig);
    assert_eq!(engines(), 0);
}

#[test]
fn a_remote_disks_engine_is_told_when_its_own_descriptor_announces_something() {
    let ((options, seen), (other, others)) = (vector(512), vector(512));
    let mut rig = Rig::new(&options);
    rig.engines.attach(&Arc::new(Disk::open(&other).unwrap())).unwrap();
    let fds = rig.engines.descriptors();
    rig.engines.announced(fds[1]);
    let announced = |seen: &Mutex<Seen>| seen.lock().unwrap().announced;
    assert_eq!((announced(&seen), announced(&others)), (0, 1));
}

#[test]
fn what_a_remote_disks_engine_has_and_waits_for_is_what_its_thread_has_and_waits_for() {
    let [(options, seen), (other, others)] = [vector(512), vector(512)];
    let mut rig = Rig::new(&options);
    rig.engines.attach(&Arc::new(Disk::open(&other).unwrap())).unwrap();
    assert_eq!(rig.engines.deadline(), None);
    others.lock().unwrap().deadline = Some(Nanos(9));
    assert_eq!(rig.engines.deadline(), Some(Nanos(9)));
    seen.lock().unwrap().deadline = Some(Nanos(5));
    assert_eq!(rig.engines.deadline(), Some(Nanos(5)));
    let read = rig.push_read(0, Memory::new(512, 0));
    assert!(!rig.engines.has_completions() && rig.engines.arm());
    rig.engines.submit(clock::now());
    assert!(rig.engines.has_completions());
    let suppressed = || [&seen, &others].map(|seen| seen.lock().unwrap().suppressed);
    let before = suppressed();
    assert!(!rig.engines.arm());
    assert_eq!(suppressed(), before.map(|count| count + 1), "what was armed with it is armed no more");
    assert_eq!(rig.finish(read).0, Ok(()));
}

#[test]
fn a_remote_disks_engine_that_ends_gives_back_what_it_has() {
    let (options, seen) = vector(512);
    let disk = Arc::new(Disk::open(&options).unwrap());
    let mut remotes = Box::new(Remotes::new(Arc::default()));
    remotes.attach(0, &disk).unwrap();
    let request = Request { op: Op::Flush, offset: 0, len: 0, buffers: Lent::default(), token: RequestToken(7) };
    remotes.push(Job::new(0, request));
    let mut left = Vec::new();
    remotes.end(&mut |job| left.push(job.request.token));
    assert_eq!((left, seen.lock().unwrap().engines), (vec![RequestToken(7)], 0));
}

/// A disk whose driver says no more than it must.
#[derive(Debug)]
struct Plain;

impl Remote for Plain {
    fn kind(&self) -> RemoteKind {
        RemoteKind::Rbd
    }

    fn name(&self) -> &str {
        "plain"
    }

    fn open(&self) -> Result<Shape, OpenCause> {
        Ok(Shape { size: SIZE, blocks: Blocks { logical: 512, physical: 512 }, limits: LIMITS })
    }

    fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
        Err(EngineError::Remote("nobody runs it".to_owned()))
    }

    fn ask_size(&self) -> io::Result<u64> {
        Ok(SIZE)
    }

    fn flush(&self) -> Result<(), FlushError> {
        Ok(())
    }
}

#[test]
fn a_remote_disk_whose_driver_says_nothing_of_it_is_not_lost_has_no_news_and_is_like_no_other() {
    let plain = RemoteDisk::new(Plain);
    let options = Options { allow_inactive: true, ..Options::new("disk0", Driver::Remote(plain.clone())) };
    let disk = Arc::new(Disk::open(&options).unwrap());
    assert_eq!((disk.is_lost(), disk.take_new_size()), (false, None));
    disk.watch_size(&EventNotifier::new().unwrap());
    drop(disk.activate().unwrap());
    assert!(plain == plain.clone() && plain != RemoteDisk::new(Plain));
    let refused = EngineSet::new(EngineOptions::default()).attach(&disk).unwrap_err();
    assert_eq!(refused.to_string(), "nobody runs it");
    assert!(!plain.can_resize() && disk.grow(2 * SIZE).is_err() && disk.size() == SIZE);
    assert_eq!(disk.grow(SIZE).unwrap(), SIZE, "it need not be made longer for that");
}

#[test]
fn a_remote_disk_is_locked_grown_and_flushed_by_its_driver() {
    let (options, seen) = vector(512);
    let disk = Arc::new(Disk::open(&Options { allow_inactive: true, ..options }).unwrap());
    assert!(seen.lock().unwrap().locked.is_empty());
    drop(disk.activate().unwrap());
    assert_eq!(seen.lock().unwrap().locked, [true, false]);
    assert_eq!(disk.grow(SIZE + 700).unwrap(), SIZE + 512);
    assert_eq!(disk.size(), SIZE + 512);
    disk.flush().unwrap();
    assert_eq!(seen.lock().unwrap().jobs, [(Op::Flush, 0, 0)]);
}

#[test]
fn a_remote_disk_that_somebody_else_has_made_longer_still_keeps_what_it_has() {
    let (options, seen) = vector(512);
    let disk = Disk::open(&options).unwrap();
    seen.lock().unwrap().bytes.resize(3 * SIZE as usize, 7);
    assert_eq!(disk.size(), SIZE, "nobody has said so yet");
    assert_eq!(disk.grow(2 * SIZE).unwrap(), 3 * SIZE);
    assert_eq!(seen.lock().unwrap().bytes[2 * SIZE as usize..], [7; SIZE as usize]);
}

#[test]
fn a_remote_disk_is_what_its_driver_says() {
    let (options, seen) = vector(1024);
    let options = Options { discard: Discard::Unmap, ..options };
    let disk = Disk::open(&options).unwrap();
    assert_eq!((disk.size(), disk.logical_block_size(), disk.physical_block_size()), (SIZE, 1024, 4096));
    assert_eq!((disk.max_discard_bytes(), disk.discard_granularity()), (8 << 20, 2048));
    assert_eq!((disk.max_write_zeroes_bytes(), disk.optimal_io_size()), (4 << 20, 65536));
    assert!(disk.supports_discard() && !disk.zeroes_fast(true) && !disk.runs_on_io_uring());
    assert!(!disk.is_lost());
    seen.lock().unwrap().is_lost = true;
    assert!(disk.is_lost());
    seen.lock().unwrap().cannot_discard = true;
    let disk = Disk::open(&options).unwrap();
    assert!(!disk.supports_discard() && disk.max_discard_bytes() == 0);
}

#[test]
fn a_remote_disk_is_not_reopened_when_it_has_become_smaller_or_has_larger_blocks() {
    let (options, seen) = vector(1024);
    let disk = Disk::open(&options).unwrap();
    let reopened = |logical: u32, len: u64| {
        seen.lock().unwrap().bytes.resize(len as usize, 0);
        let now = Vector { blocks: Blocks { logical, physical: 4096 }, seen: Arc::clone(&seen) };
        let options = Options { driver: Driver::Remote(RemoteDisk::new(now)), ..options.clone() };
        disk.reopen(&options).map(|disk| disk.size()).map_err(|e| e.cause.to_string())
    };
    for (logical, len, line) in [
        (1024, SIZE - 1024, "cannot open 'vector': it has 4193280 bytes now, and had 4194304: "),
        (2048, SIZE, "cannot open 'vector': it has blocks of 2048 bytes now, and had blocks of 1024: "),
    ] {
        let refused = reopened(logical, len).unwrap_err();
        assert!(refused.starts_with(line), "{refused}");
    }
    // Of more nobody knows before somebody asks.
    for (logical, len) in [(1024, SIZE), (512, SIZE), (1024, 2 * SIZE)] {
        assert_eq!(reopened(logical, len), Ok(SIZE), "{logical}, {len}");
    }
    // What was refused has no lock any more.
    let locked = seen.lock().unwrap().locked.iter().map(|locks| if *locks { 1 } else { -1 }).sum::<i32>();
    assert_eq!(locked, 1, "the disk's own");
}

#[test]
fn a_remote_disk_of_no_whole_block_does_not_open() {
    for (logical, len, size) in
        [(4096, 4095, None), (4096, 4096, Some(4096)), (4096, 9000, Some(8192)), (512, 700, Some(512))]
    {
        let (options, seen) = vector(logical);
        seen.lock().unwrap().bytes.truncate(len);
        let opened = Disk::open(&options);
        assert_eq!(opened.as_ref().ok().map(Disk::size), size);
        let whys = opened.err().map(|e| e.to_string());
        assert!(whys.is_none_or(|why| why.contains("no whole block of 4096 bytes")));
    }
}

#[test]
fn a_size_that_a_remote_disks_driver_was_told_of_is_taken_once_and_if_it_is_another() {
    let (options, seen) = vector(4096);
    let disk = Disk::open(&options).unwrap();
    disk.watch_size(&EventNotifier::new().unwrap());
    assert_eq!(seen.lock().unwrap().watched, 1);
    assert_eq!(disk.take_new_size(), None);
    for (told, taken) in [(SIZE + 9000, Some(SIZE + 8192)), (SIZE + 8192, None), (SIZE - 1, Some(SIZE - 4096))] {
        seen.lock().unwrap().new_size = Some(told);
        assert_eq!(disk.take_new_size(), taken);
        assert_eq!(disk.take_new_size(), None);
        let size = told / 4096 * 4096;
        assert_eq!((disk.size(), disk.standing().size()), (size, size));
    }
}

#[test]
fn what_ignores_flushes_is_written_out_all_the_same_and_what_only_reads_has_nothing_to_write() {
    for (no_flush, read_only, flushes) in [(false, false, 2), (true, false, 1), (false, true, 0), (true, true, 0)] {
        let (options, seen) = vector(512);
        let disk = Disk::open(&Options { no_flush, read_only, ..options }).unwrap();
        disk.flush().unwrap();
        disk.write_out().unwrap();
        assert_eq!(seen.lock().unwrap().flushed, flushes, "no_flush={no_flush} read_only={read_only}");
    }
}

#[test]
fn a_remote_disk_that_is_closed_gives_back_its_lock() {
    let (options, seen) = vector(512);
    let disk = Disk::open(&options).unwrap();
    assert_eq!(seen.lock().unwrap().locked, [true]);
    drop(disk);
    assert_eq!(seen.lock().unwrap().locked, [true, false]);
}

#[test]
fn a_remote_disk_is_locked_for_one_that_is_active_if_it_may_be_inactive_itself() {
    for (may_be_inactive, is_active) in [(true, true), (true, false), (false, true)] {
        let [(old, _), (new, seen)] = [vector(512), vector(512)];
        let old = Arc::new(Disk::open(&Options { allow_inactive: true, ..old }).unwrap());
        let active = is_active.then(|| old.activate().unwrap());
        let new = Disk::open(&Options { allow_inactive: may_be_inactive, ..new }).unwrap();
        new.share_locks_of(&old).unwrap();
        // One that may not be inactive has it from the beginning.
        let expected = is_active || !may_be_inactive;
        assert_eq!((new.is_active(), seen.lock().unwrap().locked.len()), (expected, usize::from(expected)));
        drop(active);
    }
}

#[test]
fn a_flush_that_failed_at_a_remote_disk_may_be_tried_again() {
    let (options, seen) = vector(512);
    seen.lock().unwrap().failing = 1;
    let disk = Disk::open(&options).unwrap();
    assert_eq!(disk.flush().unwrap_err().kind(), io::Error::from(Errno::IO).kind());
    assert!(!disk.has_lost_writes());
    disk.flush().unwrap();
}

#[test]
fn what_a_remote_disk_has_lost_is_told_to_the_guest_that_has_it_already_and_lifted_by_who_opens_it_after_that() {
    let asks: [fn(&Disk) -> io::Result<()>; 4] =
        [Disk::flush, Disk::write_out, |disk| disk.refresh_size().map(drop), |disk| disk.grow(SIZE).map(drop)];
    for ask in asks {
        let (options, seen) = vector(512);
        let mut rig = Rig::new(&options);
        let opened = |before: &Arc<Disk>| {
            let disk = Arc::new(Disk::open(&vector(512).0).unwrap());
            disk.follow(before);
            disk
        };
        (seen.lock().unwrap().failing, seen.lock().unwrap().loses) = (1, true);
        seen.lock().unwrap().keeps_size = Some(io::ErrorKind::ResourceBusy);
        for _ in 0..2 {
            assert_eq!(ask(&rig.disk).unwrap_err().raw_os_error(), Some(libc::EIO));
        }
        assert!(rig.disk.has_lost_writes() && opened(&rig.disk).flush().is_err());
        seen.lock().unwrap().jobs.clear();
        assert_eq!([(); 2].map(|()| rig.run(Op::Flush, 0, 0)), [Err(Errno::IO); 2]);
        assert!(seen.lock().unwrap().jobs.is_empty() && rig.requests_of("threads") == 0, "nobody is asked");
        assert_eq!(
            rig.failed.iter().map(|failed| (failed.op, failed.errno)).collect::<Vec<_>>(),
            [(Op::Flush, Errno::IO); 2]
        );
        assert_eq!(rig.write(0, &[7; 512]), Ok(()));
        opened(&rig.disk).flush().unwrap();
        assert_eq!(seen.lock().unwrap().jobs.last(), Some(&(Op::Flush, 0, 0)), "of what was written since");
    }
}

#[test]
fn what_a_remote_disk_has_lost_is_told_to_a_guest_that_never_flushes_by_what_is_to_be_stable() {
    for op in [Op::Write { fua: true }, Op::WriteZeroes { unmap: false, fua: true }] {
        let (options, seen) = vector(512);
        seen.lock().unwrap().bytes[..512].fill(7);
        let mut rig = Rig::new(&options);
        (seen.lock().unwrap().failing, seen.lock().unwrap().loses) = (1, true);
        rig.disk.flush().unwrap_err();
        seen.lock().unwrap().jobs.clear();
        let memory = |op| matches!(op, Op::Write { .. }).then(|| Memory::new(512, 7));
        assert_eq!(rig.run(op, 0, 0), Ok(()), "there is nothing to be stable");
        assert!(rig.disk.loss().is_some_and(|loss| loss.is_untold()));
        let token = rig.push(op, 0, 512, memory(op));
        assert_eq!(rig.finish(token).0, Err(Errno::IO));
        let jobs = seen.lock().unwrap().jobs.clone();
        let bytes = seen.lock().unwrap().bytes[..512].to_vec();
        assert_eq!((jobs, rig.requests_of("threads")), (vec![(op, 0, 512)], 0));
        let written = if memory(op).is_some() { 0xee } else { 0 };
        assert_eq!(bytes, [written; 512], "it is done, for who ignores that it failed");
        assert_eq!(rig.failed.iter().map(|failed| failed.op).collect::<Vec<_>>(), [op]);
        assert_eq!(rig.write(0, &[7; 512]), Ok(()), "nobody asks for that to be stable");
        // The guest was told.
        let disk = Arc::new(Disk::open(&vector(512).0).unwrap());
        disk.follow(&rig.disk);
        disk.flush().unwrap();
        let mut rig = Rig::over(disk, EngineOptions::default());
        let token = rig.push(op, 0, 512, memory(op));
        assert_eq!(rig.finish(token).0, Ok(()));
    }
}

#[test]
fn what_a_remote_disk_has_lost_is_told_to_nobody_whose_flushes_are_ignored() {
    let (options, seen) = vector(512);
    let mut rig = Rig::new(&Options { no_flush: true, ..options });
    (seen.lock().unwrap().failing, seen.lock().unwrap().loses) = (1, true);
    rig.disk.write_out().unwrap_err();
    let token = rig.push(Op::Write { fua: true }, 0, 512, Some(Memory::new(512, 0)));
    assert_eq!(rig.finish(token).0, Ok(()));
    assert_eq!(rig.run(Op::Flush, 0, 0), Ok(()));
    assert!(rig.disk.loss().is_some_and(|loss| loss.is_untold()));
}

#[test]
fn what_is_to_be_stable_does_not_wait_for_what_was_written_through_the_disk_before() {
    let [(old, olds), (new, news)] = [vector(512), vector(512)];
    let disk = Arc::new(Disk::open(&new).unwrap());
    disk.follow(&Arc::new(Disk::open(&old).unwrap()));
    let mut rig = Rig::over(disk, EngineOptions::default());
    let token = rig.push(Op::Write { fua: true }, 0, 512, Some(Memory::new(512, 7)));
    assert_eq!(rig.finish(token).0, Ok(()));
    assert_eq!(news.lock().unwrap().jobs, [(Op::Write { fua: true }, 0, 512)]);
    assert!(olds.lock().unwrap().jobs.is_empty());
}

#[test]
fn a_remote_disk_that_cannot_be_flushed_after_it_is_asked_for_its_size_is_flushed_before_and_no_other_is() {
    let (options, seen) = vector(512);
    let disk = Disk::open(&options).unwrap();
    let asks: [fn(&Disk) -> io::Result<u64>; 2] = [Disk::refresh_size, |disk| disk.grow(SIZE)];
    for ask in asks {
        let ask = |why| {
            *seen.lock().unwrap() = Seen { keeps_size: Some(why), bytes: vec![0; SIZE as usize], ..Seen::default() };
            (ask(&disk).map_err(|e| e.kind()), seen.lock().unwrap().flushed)
        };
        assert_eq!(ask(io::ErrorKind::ResourceBusy), (Ok(SIZE), 1));
        assert_eq!(ask(io::ErrorKind::TimedOut), (Err(io::ErrorKind::TimedOut), 0));
    }
}

#[test]
fn an_engine_whose_disk_was_about_to_leave_is_used_again_unless_its_disk_was_lost() {
    for is_lost in [false, true] {
        let (options, seen) = vector(512);
        let mut rig = Rig::new(&options);
        rig.engines.detach(rig.slot);
        seen.lock().unwrap().is_lost = is_lost;
        let engines = || seen.lock().unwrap().engines;
        let disk = Arc::clone(&rig.disk);
        rig.slot = rig.engines.attach(&disk).unwrap();
        assert_eq!(engines(), 1 + usize::from(is_lost));
        assert_eq!(rig.write(0, &[7; 512]), Ok(()));
        assert_eq!(engines(), 1);
    }
}

#[test]
fn an_engine_whose_disk_is_about_to_leave_is_no_other_disks() {
    let [(options, seen), (other, others)] = [vector(512), vector(512)];
    let mut rig = Rig::new(&options);
    rig.engines.detach(rig.slot);
    rig.slot = rig.engines.attach(&Arc::new(Disk::open(&other).unwrap())).unwrap();
    assert_eq!(rig.write(0, &[7; 512]), Ok(()));
    assert_eq!((seen.lock().unwrap().jobs.len(), others.lock().unwrap().jobs.len()), (0, 1));
}

#[test]
fn an_image_of_a_cluster_that_is_opened_anew_has_the_engine_that_is_about_to_leave_and_a_servers_disk_one_of_its_own() {
    for (kind, expected) in [(RemoteKind::Nbd, [0, 1]), (RemoteKind::Rbd, [1, 0])] {
        let [(options, seen), (other, others)] = [vector(512), vector(512)];
        [&seen, &others].into_iter().for_each(|seen| seen.lock().unwrap().alike = Some(kind));
        assert_eq!(options, other, "they were made with the same options");
        let mut rig = Rig::new(&options);
        rig.engines.detach(rig.slot);
        rig.slot = rig.engines.attach(&Arc::new(Disk::open(&other).unwrap())).unwrap();
        assert_eq!(rig.write(0, &[7; 512]), Ok(()));
        let served = [seen, others].map(|seen| seen.lock().unwrap().jobs.len());
        assert_eq!(served, expected, "{kind:?}");
    }
}

#[test]
fn a_flush_is_for_what_was_written_through_the_disk_before_as_well() {
    let [(old, olds), (new, news)] = [vector(512), vector(512)];
    let mut rig = Rig::new(&old);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    let old = Arc::clone(&rig.disk);
    drop(rig);
    let disk = Arc::new(Disk::open(&new).unwrap());
    disk.follow(&old);
    let mut rig = Rig::over(Arc::clone(&disk), EngineOptions::default());
    assert_eq!(rig.write(0, &[2; 512]), Ok(()));
    let jobs = |seen: &Mutex<Seen>| seen.lock().unwrap().jobs.iter().map(|job| job.0).collect::<Vec<_>>();
    assert_eq!((jobs(&olds).len(), jobs(&news).len()), (1, 1), "a write is for itself alone");
    for flushes in 1..3 {
        assert_eq!(rig.run(Op::Flush, 0, 0), Ok(()));
        assert_eq!(jobs(&olds), [Op::Write { fua: false }, Op::Flush], "once");
        assert_eq!(jobs(&news).len(), 1 + flushes, "and each by its own engine");
    }
    assert_eq!((rig.requests_of("nbd"), rig.requests_of("threads")), (3, 1));
    // It goes with who has opened the new one.
    assert_eq!(Arc::strong_count(&old), 2);
    disk.let_go_of_predecessor().unwrap();
    assert_eq!((Arc::strong_count(&old), jobs(&olds).len()), (1, 2));
}

#[test]
fn what_the_disk_before_cannot_make_stable_is_lost_until_somebody_who_was_told_opens_it_again() {
    let opened = |before: &Arc<Disk>| {
        let (options, seen) = vector(512);
        let disk = Arc::new(Disk::open(&options).unwrap());
        disk.follow(before);
        (Rig::over(Arc::clone(&disk), EngineOptions::default()), disk, seen)
    };
    for asks_itself in [false, true] {
        let (old, olds) = vector(512);
        olds.lock().unwrap().failing = 1;
        let (mut rig, mut disk, mut seen) = opened(&Arc::new(Disk::open(&old).unwrap()));
        if !asks_itself {
            // Who lets go of it is not who asks for a flush.
            disk.let_go_of_predecessor().unwrap_err();
            assert!(disk.has_lost_writes());
            (rig, disk, seen) = opened(&disk);
        }
        for _ in 0..2 {
            assert_eq!(rig.run(Op::Flush, 0, 0), Err(Errno::IO));
        }
        assert_eq!(rig.write(0, &[2; 512]), Ok(()));
        assert_eq!(seen.lock().unwrap().jobs, [(Op::Write { fua: false }, 0, 512)]);
        assert!(disk.has_lost_writes() && disk.flush().is_err());
        let (mut rig, disk, _) = opened(&disk);
        assert_eq!(rig.run(Op::Flush, 0, 0), Ok(()));
        assert!(!disk.has_lost_writes());
        assert_eq!(seen.lock().unwrap().jobs.last(), Some(&(Op::Flush, 0, 0)), "of what was written since");
    }
}

#[test]
fn what_a_disk_still_owes_that_has_lost_writes_the_one_after_it_owes_too() {
    let [(zeroth, zeroths), (first, firsts), (second, seconds), (third, _)] =
        [(); 4].map(|()| vector(512)).map(|(options, seen)| (Arc::new(Disk::open(&options).unwrap()), seen));
    zeroths.lock().unwrap().failing = 1;
    first.follow(&zeroth);
    first.let_go_of_predecessor().unwrap_err();
    // Nobody has come to let go of the first yet.
    second.follow(&first);
    third.follow(&second);
    let mut rig = Rig::over(third, EngineOptions::default());
    assert_eq!(rig.run(Op::Flush, 0, 0), Err(Errno::IO), "of what was lost before");
    let flushes = [firsts, seconds].map(|seen| seen.lock().unwrap().jobs.clone());
    assert_eq!(flushes, [[(Op::Flush, 0, 0)]; 2]);
}
