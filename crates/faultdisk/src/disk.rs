//! The file system of one file, and what becomes of requests for it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BackgroundSession, FUSE_ROOT_ID, FileAttr, FileType, Filesystem, KernelConfig, MountOption, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, consts, spawn_mount2,
};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use serde::{Deserialize, Serialize};

use crate::faults::{Asked, Effect, Fault, Faults, IoType};
use crate::record::{Ran, Record};
use crate::store::{Store, Survivors};

const DISK: u64 = FUSE_ROOT_ID + 1;
const NAME: &str = "disk";
/// `FOPEN_PARALLEL_DIRECT_WRITES` (Linux 6.0), which fuser does not name.
const PARALLEL_WRITES: u32 = 1 << 6;
/// How long [`Effect::Reordered`] waits for company.
const COMPANY: Duration = Duration::from_secs(2);
/// Requests that the kernel hands over at a time, and keeps beyond.
const MOST_IN_FLIGHT: u16 = 1024;

/// What a disk is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// Has requests fail.
    Inject(Fault),
    /// Forgets what was injected. What waits goes on waiting.
    Clear,
    /// Runs what never was to be run, as if nothing had happened.
    Release,
    /// Takes the power away: requests end with EIO, those that wait too, and nothing is changed any more.
    PowerOff,
    /// Brings it back. Of what was not flushed, this much is there.
    PowerOn(Survivors),
    /// Asks how things are.
    Status,
}

/// How things are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    /// Whether there is power.
    pub is_on: bool,
    /// Requests so far, whatever became of them.
    pub reads: u64,
    /// Likewise.
    pub writes: u64,
    /// Likewise.
    pub flushes: u64,
    /// Likewise.
    pub discards: u64,
    /// Requests that a fault has struck.
    pub struck: u64,
    /// Requests that wait, for ever or for a while.
    pub waiting: u64,
    /// Sectors whose last write a loss of power may take back.
    pub unflushed: u64,
    /// Faults that are still to happen.
    pub faults: Vec<Fault>,
}

/// A disk that fails as it is told to: a file in a file system of its own, until it is dropped.
#[derive(Debug)]
pub struct FaultDisk {
    shared: Shared,
    folder: PathBuf,
    /// Never dropped: that would wait for everybody who has the file.
    _session: ManuallyDrop<BackgroundSession>,
}

impl FaultDisk {
    /// Mounts a file system over `folder` whose one file is the disk. `image` has what is on it.
    ///
    /// # Errors
    /// When `image` is no disk's, or FUSE or the right to mount is not there.
    pub fn mount(image: File, folder: &Path) -> io::Result<Self> {
        let shared = Shared(Arc::new(Mutex::new(State::new(Store::new(image)?))));
        // A daemon that gives up root is another user than who mounts.
        let options = [MountOption::RW, MountOption::FSName("egret-faultdisk".into()), MountOption::AllowOther];
        let session = spawn_mount2(shared.clone(), folder, &options)?;
        Ok(Self { shared, folder: folder.to_owned(), _session: ManuallyDrop::new(session) })
    }

    /// The disk.
    pub fn path(&self) -> PathBuf {
        self.folder.join(NAME)
    }

    /// Tells it something. Returns how things are then.
    ///
    /// # Errors
    /// When the image fails while the power comes back.
    pub fn tell(&self, order: Order) -> io::Result<Status> {
        self.shared.lock().obey(order)
    }

    /// Has requests of a kind go wrong, from the next one on: so many, or all.
    pub fn inject(&self, iotype: IoType, times: Option<u64>, effect: Effect) {
        self.shared.lock().faults.add(Fault { iotype: Some(iotype), sectors: None, after: 0, times, effect });
    }

    /// Records what it runs, from here on.
    pub fn record(&self) {
        self.shared.lock().record.begin();
    }

    /// What it has run since it was told to [`record`](Self::record), in order.
    pub fn recorded(&self) -> Vec<Ran> {
        self.shared.lock().record.ran().to_vec()
    }

    /// Unmounts it. Whoever waits is answered, and who still has the file goes on with it.
    pub fn close(&self) {
        let mut state = self.shared.lock();
        state.faults.clear();
        state.release();
        drop(state);
        let _ = unmount(&self.folder, UnmountFlags::DETACH);
    }
}

impl Drop for FaultDisk {
    fn drop(&mut self) {
        self.close();
    }
}

/// How a request is to end.
#[derive(Clone, Copy)]
enum Fate {
    Runs,
    Fails(Errno),
    /// It moves so many bytes at most.
    Short(u32),
    /// Likewise, and then it fails.
    Torn(u32),
}

/// What runs a request and answers it.
type Run = Box<dyn FnOnce(&mut Store, Fate) + Send>;

/// A request that can be run.
struct Task {
    asked: Asked,
    begun: Instant,
    run: Run,
}

struct State {
    store: Store,
    faults: Faults,
    status: Status,
    /// How often there was power: what waits from before is not run.
    boots: u64,
    /// What waits for a release.
    held: Vec<Task>,
    /// What waits for company.
    company: Vec<Task>,
    /// How many such groups have been run.
    companies: u64,
    record: Record,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("store", &self.store).field("status", &self.status).finish_non_exhaustive()
    }
}

impl State {
    fn new(store: Store) -> Self {
        let status = Status { is_on: true, ..Status::default() };
        let (held, company) = (Vec::new(), Vec::new());
        Self {
            store,
            faults: Faults::default(),
            status,
            boots: 0,
            held,
            company,
            companies: 0,
            record: Record::default(),
        }
    }

    fn obey(&mut self, order: Order) -> io::Result<Status> {
        match order {
            Order::Inject(fault) => self.faults.add(fault),
            Order::Clear => self.faults.clear(),
            Order::Release => self.release(),
            Order::PowerOff => self.power_off(),
            Order::PowerOn(survivors) => {
                self.power_off();
                self.store.lose_power(survivors)?;
                self.boots += 1;
                self.status.is_on = true;
            }
            Order::Status => {}
        }
        let (unflushed, faults) = (self.store.unflushed() as u64, self.faults.list().to_vec());
        Ok(Status { unflushed, faults, ..self.status.clone() })
    }

    fn release(&mut self) {
        for task in std::mem::take(&mut self.held) {
            self.end_wait(task);
        }
        self.run_company();
    }

    fn power_off(&mut self) {
        self.status.is_on = false;
        self.release();
    }

    /// Has a request wait for others, until there are so many. Returns the number of its group if it has begun that: who is
    /// told ends its wait.
    fn join_company(&mut self, task: Task, count: u32) -> Option<u64> {
        self.status.waiting += 1;
        self.company.push(task);
        if self.company.len() >= count as usize {
            self.run_company();
            return None;
        }
        (self.company.len() == 1).then_some(self.companies)
    }

    /// Runs what there is of a group, unless it has been run, and those that wait are others.
    fn end_company(&mut self, number: u64) {
        if self.companies == number {
            self.run_company();
        }
    }

    /// The last first.
    fn run_company(&mut self) {
        self.companies += 1;
        for task in std::mem::take(&mut self.company).into_iter().rev() {
            self.end_wait(task);
        }
    }

    fn end_wait(&mut self, task: Task) {
        self.status.waiting -= 1;
        self.run(task, Fate::Runs);
    }

    fn run(&mut self, task: Task, fate: Fate) {
        let fate = if self.status.is_on { fate } else { Fate::Fails(Errno::IO) };
        let Task { asked, begun, run } = task;
        if let Fate::Runs = fate {
            // Before it is answered. What comes from now on is run later, because this has the lock.
            self.record.note(asked, begun);
        }
        run(&mut self.store, fate);
    }
}

/// What the file system's thread, those that wait for late requests, and who tells the disk what to do share.
#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides what becomes of a request, and sees to it.
    fn ask(&self, asked: Asked, run: Run) {
        let task = Task { asked, begun: Instant::now(), run };
        let mut state = self.lock();
        let counted = match asked.iotype {
            IoType::Read => &mut state.status.reads,
            IoType::Write => &mut state.status.writes,
            IoType::Flush => &mut state.status.flushes,
            IoType::Discard => &mut state.status.discards,
        };
        *counted += 1;
        let effect = if state.status.is_on { state.faults.strike(&asked) } else { None };
        let Some(effect) = effect else { return state.run(task, Fate::Runs) };
        state.status.struck += 1;
        match effect {
            Effect::Errno(name) => state.run(task, Fate::Fails(name.into())),
            Effect::Short(len) => state.run(task, Fate::Short(len)),
            Effect::Torn(len) => state.run(task, Fate::Torn(len)),
            Effect::PowerOff => {
                state.power_off();
                state.run(task, Fate::Runs);
            }
            Effect::Never => {
                state.status.waiting += 1;
                state.held.push(task);
            }
            Effect::LateMs(late) => {
                state.status.waiting += 1;
                let (shared, boots) = (self.clone(), state.boots);
                // A thread for each: there are as many as requests in flight, and nobody is in a hurry here.
                thread::spawn(move || {
                    thread::sleep(Duration::from_millis(late));
                    let mut state = shared.lock();
                    state.status.waiting -= 1;
                    let fate = if state.boots == boots { Fate::Runs } else { Fate::Fails(Errno::IO) };
                    state.run(task, fate);
                });
            }
            Effect::Reordered(count) => {
                if let Some(company) = state.join_company(task, count) {
                    let shared = self.clone();
                    thread::spawn(move || {
                        thread::sleep(COMPANY);
                        shared.lock().end_company(company);
                    });
                }
            }
        }
    }

    fn attributes(&self, inode: u64) -> FileAttr {
        attributes(inode, self.lock().store.size())
    }
}

/// The attributes of the folder, by FUSE's number for the root, or of the one file in it, which has `size` bytes.
pub fn attributes(inode: u64, size: u64) -> FileAttr {
    let (kind, perm, size) =
        if inode == FUSE_ROOT_ID { (FileType::Directory, 0o755, 0) } else { (FileType::RegularFile, 0o666, size) };
    let time = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: inode,
        size,
        blocks: size / 512,
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// What a fate leaves of a request: how many of `len` bytes are moved, and the error that comes then.
fn fated(fate: Fate, len: usize) -> (usize, Option<Errno>) {
    match fate {
        Fate::Runs => (len, None),
        Fate::Fails(errno) => (0, Some(errno)),
        Fate::Short(most) => (len.min(most as usize), None),
        Fate::Torn(most) => (len.min(most as usize), Some(Errno::IO)),
    }
}

fn number(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or_else(|| match error.kind() {
        io::ErrorKind::StorageFull => libc::ENOSPC,
        _ => libc::EIO,
    })
}

fn answer(reply: ReplyEmpty, result: Result<(), i32>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Shared {
    fn init(&mut self, _: &Request<'_>, config: &mut KernelConfig) -> Result<(), i32> {
        // Else the kernel hands over twelve at a time, and one direct request of a file.
        let _ = config.set_max_background(MOST_IN_FLIGHT);
        let _ = config.add_capabilities(consts::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&mut self, _: &Request<'_>, _: u64, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&Duration::ZERO, &self.attributes(DISK), 0);
        } else {
            reply.error(libc::ENOENT);
        }
    }

    fn getattr(&mut self, _: &Request<'_>, inode: u64, _: Option<u64>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attributes(inode));
    }

    /// The disk stays as long as it is.
    fn setattr(
        &mut self,
        _: &Request<'_>,
        inode: u64,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<u64>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<u32>,
        reply: ReplyAttr,
    ) {
        let now = self.attributes(inode);
        if size.is_some_and(|size| size != now.size) {
            reply.error(libc::EPERM);
        } else {
            reply.attr(&Duration::ZERO, &now);
        }
    }

    fn open(&mut self, _: &Request<'_>, _: u64, _: i32, reply: ReplyOpen) {
        // Without the kernel's cache, which would hide from readers what a loss of power took; and with several writes at a
        // time, as disks have them.
        reply.opened(0, consts::FOPEN_DIRECT_IO | PARALLEL_WRITES);
    }

    fn readdir(&mut self, _: &Request<'_>, _: u64, _: u64, offset: i64, mut reply: ReplyDirectory) {
        let all = [(FUSE_ROOT_ID, FileType::Directory, "."), (DISK, FileType::RegularFile, NAME)];
        for (at, (inode, kind, name)) in all.into_iter().enumerate().skip(offset as usize) {
            if reply.add(inode, at as i64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn read(
        &mut self,
        _: &Request<'_>,
        _: u64,
        _: u64,
        offset: i64,
        size: u32,
        _: i32,
        _: Option<u64>,
        reply: ReplyData,
    ) {
        let (at, len) = (offset as u64, size as usize);
        let run = move |store: &mut Store, fate| match (fated(fate, len), store.read(at, len)) {
            ((_, Some(errno)), _) => reply.error(errno.raw_os_error()),
            ((_, None), Err(error)) => reply.error(number(&error)),
            ((most, None), Ok(data)) => reply.data(&data[..data.len().min(most)]),
        };
        self.ask(Asked { iotype: IoType::Read, at, len: len as u64, is_stable: false }, Box::new(run));
    }

    fn write(
        &mut self,
        _: &Request<'_>,
        _: u64,
        _: u64,
        offset: i64,
        data: &[u8],
        _: u32,
        flags: i32,
        _: Option<u64>,
        reply: ReplyWrite,
    ) {
        let (at, data) = (offset as u64, data.to_vec());
        // The kernel tells of RWF_DSYNC by the same flag. O_SYNC has it in it.
        let is_stable = flags & libc::O_DSYNC != 0;
        let asked = Asked { iotype: IoType::Write, at, len: data.len() as u64, is_stable };
        let run = move |store: &mut Store, fate| {
            let (moved, errno) = fated(fate, data.len());
            let written = if moved > 0 { store.write(at, &data[..moved], is_stable) } else { Ok(()) };
            match (written, errno) {
                (Err(error), _) => reply.error(number(&error)),
                (Ok(()), Some(errno)) => reply.error(errno.raw_os_error()),
                (Ok(()), None) => reply.written(moved as u32),
            }
        };
        self.ask(asked, Box::new(run));
    }

    /// What closing a file calls: no request of the disk's.
    fn flush(&mut self, _: &Request<'_>, _: u64, _: u64, _: u64, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&mut self, _: &Request<'_>, _: u64, _: u64, _: bool, reply: ReplyEmpty) {
        let run = move |store: &mut Store, fate| {
            let (_, errno) = fated(fate, 0);
            if errno.is_none() {
                store.flush();
            }
            answer(reply, errno.map_or(Ok(()), |errno| Err(errno.raw_os_error())));
        };
        self.ask(Asked { iotype: IoType::Flush, at: 0, len: 0, is_stable: false }, Box::new(run));
    }

    fn fallocate(&mut self, _: &Request<'_>, _: u64, _: u64, offset: i64, length: i64, mode: i32, reply: ReplyEmpty) {
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) == 0 {
            return reply.error(libc::EOPNOTSUPP);
        }
        let (at, len) = (offset as u64, length as u64);
        let run = move |store: &mut Store, fate| {
            let (_, errno) = fated(fate, 0);
            answer(
                reply,
                match errno {
                    Some(errno) => Err(errno.raw_os_error()),
                    None => store.zero(at, len).map_err(|error| number(&error)),
                },
            );
        };
        self.ask(Asked { iotype: IoType::Discard, at, len, is_stable: false }, Box::new(run));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_group_that_is_reordered_waits_as_long_as_it_may_whatever_became_of_those_before_it() {
        let image = tempfile::tempfile().unwrap();
        image.set_len(4096).unwrap();
        let mut state = State::new(Store::new(image).unwrap());
        let (ran, order) = channel();
        let join = |state: &mut State, number: u32| {
            let ran = ran.clone();
            let run: Run = Box::new(move |_, _| ran.send(number).unwrap());
            let asked = Asked { iotype: IoType::Flush, at: 0, len: 0, is_stable: false };
            state.join_company(Task { asked, begun: Instant::now(), run }, 2)
        };
        let first = join(&mut state, 0).expect("it has begun a group");
        assert_eq!(join(&mut state, 1), None);
        let second = join(&mut state, 2).expect("it has begun another");
        // The first one's wait is over.
        state.end_company(first);
        assert_eq!((order.try_iter().collect::<Vec<_>>(), state.status.waiting), (vec![1, 0], 1));
        assert_eq!(join(&mut state, 3), None);
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [3, 2]);
        let third = join(&mut state, 4).expect("it has begun one more");
        state.end_company(second);
        assert_eq!(state.status.waiting, 1);
        state.end_company(third);
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [4]);
    }
}
