//! One suite for all engines, run by a small loop over real files and devices.

#![allow(unsafe_code)]

mod active;
mod blocks;
mod cached;
mod data;
mod flow;
mod large;
mod limits;
mod losses;
mod opening;
pub(crate) mod pinned;
mod remote;
mod triage;
mod zeroes;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use egret_event_loop::ring::{Ring, SharedRing};
use egret_event_loop::{Backend, Nanos, clock};
use egret_faultdisk::{FaultDisk, Order};
use egret_vring::memory::{IoVec, Lent};
use io_uring::{opcode, types};
use rustix::event::epoll;
use rustix::io::Errno;

use crate::disk::Backing;
use crate::{
    Aio, Completion, Disk, DiskSlot, Driver, EngineOptions, EngineSet, FailedRequest, Op, Options, Request,
    RequestToken,
};

/// Long enough for any machine; what takes longer hangs.
const HANGS: Duration = Duration::from_secs(60);

/// Memory of a request, in pieces of chosen lengths and alignment.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    pieces: Vec<(usize, usize)>,
}

impl Memory {
    /// One piece at a multiple of 4096 plus `shift`.
    pub(crate) fn new(len: usize, shift: usize) -> Self {
        Self::pieces(&[len], shift)
    }

    /// Pieces of these lengths, one behind the other.
    fn pieces(lens: &[usize], shift: usize) -> Self {
        let total: usize = lens.iter().sum();
        let bytes = vec![0xee; total + 8192];
        let mut at = bytes.as_ptr().align_offset(4096) + shift;
        let pieces = lens
            .iter()
            .map(|&len| {
                at += len;
                (at - len, len)
            })
            .collect();
        Self { bytes, pieces }
    }

    fn filled(mut self, data: &[u8]) -> Self {
        let start = self.pieces[0].0;
        self.bytes[start..start + data.len()].copy_from_slice(data);
        self
    }

    fn len(&self) -> usize {
        self.pieces.iter().map(|&(_, len)| len).sum()
    }

    fn data(&self) -> &[u8] {
        let start = self.pieces[0].0;
        &self.bytes[start..start + self.len()]
    }

    pub(crate) fn iovecs(&mut self) -> Lent {
        let base = self.bytes.as_mut_ptr();
        // SAFETY: within the vector, whose memory stays where it is until the rig that keeps it gives it back.
        unsafe { Lent::assume(self.pieces.iter().map(|&(at, len)| IoVec::new(base.add(at), len)).collect()) }
    }
}

/// Plays the loop for one disk: pushes, submits, waits as the loop does, reaps.
pub(crate) struct Rig {
    engines: EngineSet,
    slot: DiskSlot,
    disk: Arc<Disk>,
    /// The loop's ring, if the engine shares one.
    ring: Option<SharedRing>,
    epoll: OwnedFd,
    watched: Vec<RawFd>,
    memory: HashMap<u64, Memory>,
    done: HashMap<u64, Result<(), Errno>>,
    /// What failed in its engine.
    failed: Vec<FailedRequest>,
    next: u64,
}

impl Rig {
    fn new(options: &Options) -> Self {
        Self::with(options, EngineOptions::default())
    }

    fn with(options: &Options, engine_options: EngineOptions) -> Self {
        let disk = Disk::open(options).unwrap_or_else(|e| panic!("{e}"));
        Self::over(Arc::new(disk), engine_options)
    }

    fn over(disk: Arc<Disk>, engine_options: EngineOptions) -> Self {
        let ring = engine_options.ring.clone();
        let mut engines = EngineSet::new(engine_options);
        let slot = engines.attach(&disk).unwrap_or_else(|e| panic!("{e}"));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let mut rig = Self {
            engines,
            slot,
            disk,
            ring,
            epoll,
            watched: Vec::new(),
            memory: HashMap::new(),
            done: HashMap::new(),
            failed: Vec::new(),
            next: 0,
        };
        rig.watch();
        rig
    }

    /// Watches, edge by edge, what the engines say now.
    fn watch(&mut self) {
        for fd in self.engines.descriptors() {
            if !self.watched.contains(&fd) {
                self.watched.push(fd);
                if let Some(ring) = &self.ring {
                    let poll = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
                    // SAFETY: it refers to no memory. Its number is nobody's place in the engine's table.
                    unsafe { ring.borrow_mut().push(poll, u64::from(u32::MAX)) };
                }
                // SAFETY: the engines keep it open.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
                epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), flags).unwrap();
            }
        }
    }

    fn push(&mut self, op: Op, offset: u64, len: u64, memory: Option<Memory>) -> u64 {
        let token = self.next;
        self.next += 1;
        let mut buffers = Lent::default();
        if let Some(memory) = memory {
            let memory = self.memory.entry(token).or_insert(memory);
            buffers = memory.iovecs();
        }
        self.engines.push(self.slot, Request { op, offset, len, buffers, token: RequestToken(token) });
        token
    }

    fn push_read(&mut self, offset: u64, memory: Memory) -> u64 {
        self.push(Op::Read, offset, memory.len() as u64, Some(memory))
    }

    fn push_write(&mut self, offset: u64, memory: Memory) -> u64 {
        self.push(Op::Write { fua: false }, offset, memory.len() as u64, Some(memory))
    }

    /// Reaps what there is.
    fn reap(&mut self) {
        let Self { done, failed, .. } = self;
        self.engines.reap(clock::now(), &mut |ended| {
            failed.extend(ended.failed.map(|failed| *failed));
            let Completion { token, result, .. } = ended.completion;
            assert!(done.insert(token.0, result).is_none(), "{token:?} completes once");
        });
    }

    /// One turn: reap, submit, and if there is nothing to do, block as the loop does.
    fn turn(&mut self) {
        self.engines.suppress();
        self.reap();
        self.engines.submit(clock::now());
        if self.engines.in_flight() == 0 || !self.engines.arm() {
            return;
        }
        let limit = self.engines.deadline().map_or(HANGS, |at| Duration::from(at - clock::now()).min(HANGS));
        if let Some(ring) = &self.ring {
            let begun = clock::now();
            ring.borrow_mut().wait(Some(limit.into())).unwrap();
            assert!(clock::now() - begun < HANGS.into(), "nothing was announced: {:?}", self.engines.counters().read());
            return;
        }
        let limit = rustix::event::Timespec { tv_sec: limit.as_secs() as _, tv_nsec: limit.subsec_nanos() as _ };
        let mut events = [epoll::Event { flags: epoll::EventFlags::IN, data: epoll::EventData::new_u64(0) }; 4];
        let found = epoll::wait(&self.epoll, &mut events, Some(&limit)).unwrap_or(1);
        assert!(
            found > 0 || self.engines.deadline().is_some(),
            "nothing was announced: {:?}",
            self.engines.counters().read()
        );
    }

    /// Turns until nothing is in flight.
    fn settle(&mut self) {
        while self.engines.in_flight() > 0 {
            self.turn();
        }
    }

    /// Runs what was pushed, and returns how one of it ended, with its memory.
    fn finish(&mut self, token: u64) -> (Result<(), Errno>, Option<Memory>) {
        self.settle();
        (self.done.remove(&token).expect("it has ended"), self.memory.remove(&token))
    }

    fn run(&mut self, op: Op, offset: u64, len: u64) -> Result<(), Errno> {
        let token = self.push(op, offset, len, None);
        self.finish(token).0
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let token = self.push_write(offset, Memory::new(data.len(), 0).filled(data));
        self.finish(token).0
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let token = self.push_read(offset, Memory::new(len, 0));
        let (result, memory) = self.finish(token);
        assert_eq!(result, Ok(()));
        memory.unwrap().data().to_vec()
    }

    fn requests_of(&self, engine: &str) -> u64 {
        self.engines
            .counters()
            .read()
            .engines
            .iter()
            .find(|stats| stats.engine == engine)
            .map_or(0, |stats| stats.requests)
    }
}

/// An image in a directory of its own.
pub(crate) struct Image {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Image {
    pub(crate) fn new(size: u64) -> Self {
        Self::of(&vec![0; size as usize])
    }

    fn of(content: &[u8]) -> Self {
        Self::within(tempfile::tempdir().unwrap(), content)
    }

    /// One where the build is. Files in memory, where the others may be, stay there, and have no reads that do not wait.
    fn beside_the_build(content: &[u8]) -> Self {
        let test = std::env::current_exe().unwrap();
        Self::within(tempfile::tempdir_in(test.parent().unwrap()).unwrap(), content)
    }

    fn within(dir: tempfile::TempDir, content: &[u8]) -> Self {
        let path = dir.path().join("disk.img");
        std::fs::write(&path, content).unwrap();
        Self { _dir: dir, path }
    }

    pub(crate) fn options(&self) -> Options {
        Options::new("disk0", Driver::File { filename: self.path.clone() })
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }
}

impl Disk {
    /// Takes its file for a device, of which direct I/O leaves nothing in the page cache.
    pub(crate) fn become_a_device(&mut self) {
        let file = self.file().unwrap().try_clone().unwrap();
        self.backing = Backing::Device(file);
    }
}

/// A block device over a file in memory, for as long as it lives.
pub(crate) struct LoopDevice {
    pub(crate) path: PathBuf,
    file: tempfile::NamedTempFile,
}

impl LoopDevice {
    /// `None`, and a line that says so, where no such device can be made.
    fn new(size: u64, sector: u32) -> Option<Self> {
        Self::with(size, sector, &[])
    }

    /// The same, with more arguments for `losetup`.
    pub(crate) fn with(size: u64, sector: u32, extra: &[&str]) -> Option<Self> {
        let dir = if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
        let file = tempfile::Builder::new().prefix("egret-disk-test-").tempfile_in(dir).unwrap();
        file.as_file().set_len(size).unwrap();
        let sector = sector.to_string();
        let made = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector])
            .args(extra)
            .arg(file.path())
            .output();
        match made {
            Ok(made) if made.status.success() => {
                let path = PathBuf::from(String::from_utf8_lossy(&made.stdout).trim());
                Some(Self { path, file })
            }
            other => {
                let why =
                    other.map_or_else(|e| e.to_string(), |o| String::from_utf8_lossy(&o.stderr).trim().to_owned());
                egret_needs::this_test_lacks(format_args!("losetup, and root, for a loop device: {why}"));
                None
            }
        }
    }

    fn options(&self) -> Options {
        Options::new("disk0", Driver::HostDevice { filename: self.path.clone() })
    }

    fn resize(&self, size: u64) {
        self.file.as_file().set_len(size).unwrap();
        assert!(Command::new("losetup").arg("--set-capacity").arg(&self.path).status().unwrap().success());
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

/// Every way of running requests on an image: engine, through the cache or past it, with the loop's ring or without.
pub(crate) fn ways(options: &Options) -> Vec<(String, Options, bool)> {
    let mut ways = Vec::new();
    for &aio in Aio::ALL {
        let of_engine: &[(bool, bool)] = match aio {
            Aio::Threads => &[(false, false), (true, false)],
            Aio::Native => &[(true, false)],
            Aio::IoUring => &[(false, false), (true, false), (true, true)],
        };
        for &(direct, shared) in of_engine {
            let name = format!("{:?} aio={aio} direct={direct} shared={shared}", options.driver);
            ways.push((name, Options { aio, direct, ..options.clone() }, shared));
        }
    }
    ways
}

/// Runs a test in all [`ways`] over a fresh image each time, on files and on devices with small and large sectors.
pub(crate) fn everywhere(size: u64, test: impl Fn(&mut Rig)) {
    everywhere_with(size, |_| {}, test);
}

/// [`everywhere`], with options of the test's own.
pub(crate) fn everywhere_with(size: u64, adjust: impl Fn(&mut Options), test: impl Fn(&mut Rig)) {
    let run = |options: &Options| {
        for (name, mut options, shared) in ways(options) {
            println!("{name}");
            adjust(&mut options);
            let ring = shared.then(shared_ring);
            test(&mut Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() }));
        }
    };
    run(&Image::new(size).options());
    for sector in [512, 4096] {
        if let Some(device) = LoopDevice::new(size, sector) {
            run(&device.options());
        }
    }
}

/// Runs a test in all [`ways`] on a disk that tells how many of its sectors were written and are not stable: none at first.
pub(crate) fn on_a_disk_that_tells(
    size: u64,
    adjust: impl Fn(&mut Options),
    test: impl Fn(&mut Rig, &dyn Fn() -> u64),
) {
    let Some((_folder, disk)) = fault_disk(size) else { return };
    for (name, mut options, shared) in ways(&Options::new("disk0", Driver::File { filename: disk.path() })) {
        println!("{name}");
        adjust(&mut options);
        File::open(disk.path()).unwrap().sync_all().unwrap();
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        test(&mut rig, &|| disk.tell(Order::Status).unwrap().unflushed);
    }
}

/// A disk that fails as it is told to, in a folder of its own. `None`, and a line that says so, where there can be none.
fn fault_disk(size: u64) -> Option<(tempfile::TempDir, FaultDisk)> {
    let (image, folder) = (tempfile::tempfile().unwrap(), tempfile::tempdir().unwrap());
    image.set_len(size).unwrap();
    match FaultDisk::mount(image, folder.path()) {
        Ok(disk) => Some((folder, disk)),
        Err(why) => {
            egret_needs::this_test_lacks(format_args!("root and FUSE, for a disk that tells: {why}"));
            None
        }
    }
}

/// [`everywhere_with`], and [`on_a_disk_that_tells`] the test whether all of it is stable; the others say that they are.
pub(crate) fn everywhere_and_stably(
    size: u64,
    adjust: impl Fn(&mut Options),
    test: impl Fn(&mut Rig, &dyn Fn() -> bool),
) {
    everywhere_with(size, &adjust, |rig| test(rig, &|| true));
    on_a_disk_that_tells(size, &adjust, |rig, unflushed| test(rig, &|| unflushed() == 0));
}

fn shared_ring() -> SharedRing {
    std::rc::Rc::new(std::cell::RefCell::new(Ring::new().unwrap()))
}

/// Bytes that differ everywhere and from seed to seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8 | 1
    };
    (0..len).map(|_| next()).collect()
}

/// Blocks that a file takes up, in bytes.
fn allocated(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    File::open(path).and_then(|f| f.metadata()).map_or(0, |m| m.blocks() * 512)
}
