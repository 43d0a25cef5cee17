//! An image as a disk: opened, locked, measured, resized and closed, within the patience that its options have.

#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::linux::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use egret_disk::{BlockLimits, Blocks, Engine, EngineError, FlushError, Locking, OpenCause, Remote, RemoteKind, Shape};
use egret_event_loop::EventNotifier;
use rustix::io::Errno;

use crate::calls::{Hung, call, last_call, run};
use crate::cluster::ClusterOptions;
use crate::engine::Shared;
use crate::error::RbdError;
use crate::image::{Image, ImageOptions, Kept};

/// How long a disk that is closed is waited for: its lock is given back by then, or must be broken by the next who wants it.
const CLOSING: Duration = Duration::from_secs(5);
/// What an OSD allocates at least (`bluestore_min_alloc_size`).
const PHYSICAL: u32 = 4096;

/// Under which name the holder of the lock is kept with an image.
const HOLDER: &std::ffi::CStr = c"egret.lock";

/// How to open an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdOptions {
    /// Who uses it: another disk with the same image is another client's, and has no part in the lock.
    pub node_name: String,
    /// Where.
    pub cluster: ClusterOptions,
    /// Which.
    pub image: ImageOptions,
    /// Whether to keep other clients from writing to it.
    pub locking: Locking,
}

impl RbdOptions {
    /// Whether the image is to be locked at all.
    fn is_for_locks(&self) -> bool {
        !self.image.read_only && self.locking != Locking::Off
    }
}

/// An image in a cluster. It is opened by [`open`](Remote::open); disks with the same options share it, so that one that is
/// reopened need not give its lock back.
#[derive(Debug)]
pub struct RbdDisk {
    options: RbdOptions,
    name: String,
    opened: OnceLock<Arc<Opened>>,
    /// Whether it is one of those who want the image locked.
    has_lock: Mutex<bool>,
}

/// An image that is open.
struct Opened {
    options: RbdOptions,
    shared: Option<Arc<Shared>>,
    shape: Shape,
    closed: Mutex<Receiver<()>>,
    locks: Mutex<Locks>,
    /// Held by whatever changes who has the lock, since a call that took too long goes on.
    order: Arc<Mutex<()>>,
    news: Arc<News>,
    /// Calls of it that hang: those of others are no reason not to ask it.
    hung: Hung,
}

/// Calls that open images, and hang.
static OPENING: Hung = Hung::new();

/// Who has an image locked.
#[derive(Default)]
struct Locks {
    /// How many want it.
    users: usize,
    /// What was noted with the image when it was locked, as long as it is.
    note: Option<String>,
    /// The same of the one that was lost, and whose place this one takes with its next lock.
    lost: Option<String>,
}

/// What its cluster says of an image.
#[derive(Default)]
struct News {
    /// Bytes; 0 where nothing is new.
    size: AtomicU64,
    /// Held while the size is asked for, so that the last answer to be kept is the newest.
    asking: Mutex<()>,
    bell: Mutex<Option<EventNotifier>>,
}

impl News {
    /// Asks for the size, and keeps what it is. This waits for the cluster.
    fn ask_size(&self, ask: impl FnOnce() -> Result<u64, RbdError>) -> Result<u64, RbdError> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        ask().inspect(|size| self.size.store(*size, Ordering::Release))
    }

    fn bell(&self) -> MutexGuard<'_, Option<EventNotifier>> {
        self.bell.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Those that there are.
static OPENED: Mutex<Vec<Weak<Opened>>> = Mutex::new(Vec::new());

impl RbdDisk {
    /// An image that is not open yet.
    pub fn new(options: RbdOptions) -> Self {
        Self { name: options.image.spec(), options, opened: OnceLock::new(), has_lock: Mutex::default() }
    }

    fn opened(&self) -> &Arc<Opened> {
        self.opened.get().expect("the disk is open")
    }

    fn has_lock(&self) -> MutexGuard<'_, bool> {
        self.has_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Opened {
    /// One that is open with these options, and was fenced off or was not.
    fn find(options: &RbdOptions, is_lost: bool) -> Option<Arc<Self>> {
        let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|opened| opened.strong_count() > 0);
        let is_it = |opened: &Arc<Self>| opened.options == *options && opened.shared().is_lost() == is_lost;
        // The newest: of several that were lost the one that had it last.
        all.iter().rev().filter_map(Weak::upgrade).find(is_it)
    }

    fn new(name: &str, options: &RbdOptions) -> Result<Arc<Self>, RbdError> {
        let lost = Self::find(options, true).and_then(|lost| lost.locks().last_note());
        let RbdOptions { cluster, image, .. } = options.clone();
        // What waits in librbd is ended by its own limit, and says more.
        let patience = cluster.connect_timeout + Duration::from_secs(2);
        // Who is told of a change may not wait, and to ask for the size is to wait.
        let (news, place) = (Arc::<News>::default(), Arc::new(OnceLock::<Weak<Shared>>::new()));
        let (teller, known) = (Arc::clone(&news), Arc::clone(&place));
        let changed = move || {
            let (teller, known) = (Arc::clone(&teller), Arc::clone(&known));
            run(move || {
                let Some(shared) = known.get().and_then(Weak::upgrade) else { return };
                if teller.ask_size(|| shared.image.size()).is_ok()
                    && let Some(bell) = &*teller.bell()
                {
                    bell.set();
                }
            });
        };
        let opened = call(&OPENING, "opening an image", patience, move || {
            let image = Image::open(&cluster, &image, changed)?;
            let shape = (image.size()?, image.object_size()?);
            Ok((Kept::new(image), shape))
        });
        let ((kept, closed), (size, object)) = opened?;
        let granularity = u32::try_from(object).unwrap_or(PHYSICAL);
        let shape = Shape {
            size,
            blocks: Blocks { logical: 512, physical: PHYSICAL },
            // One object, as the kernel says of images that it has mapped.
            limits: BlockLimits { optimal_io: granularity, ..BlockLimits::unlimited(granularity) },
        };
        let shared = Arc::new(Shared::new(name.to_owned(), kept));
        let _ = place.set(Arc::downgrade(&shared));
        let new = Arc::new(Self {
            options: options.clone(),
            shared: Some(shared),
            shape,
            closed: Mutex::new(closed),
            locks: Mutex::new(Locks { lost, ..Locks::default() }),
            order: Arc::default(),
            news,
            hung: Hung::default(),
        });
        OPENED.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&new));
        Ok(new)
    }

    fn shared(&self) -> &Arc<Shared> {
        self.shared.as_ref().expect("it is there until this is dropped")
    }

    /// Runs a call on the image, within the disk's patience.
    fn ask<R: Send + 'static>(
        &self,
        what: &'static str,
        ask: impl FnOnce(&Image) -> Result<R, RbdError> + Send + 'static,
    ) -> Result<R, RbdError> {
        let image = Arc::clone(&self.shared().image);
        self.look_at(call(&self.hung, what, self.options.cluster.connect_timeout, move || ask(&image)))
    }

    /// The same of what comes last, however many calls hang.
    fn ask_last(
        &self,
        what: &'static str,
        ask: impl FnOnce(&Image) -> Result<(), RbdError> + Send + 'static,
    ) -> Result<(), RbdError> {
        let image = Arc::clone(&self.shared().image);
        self.look_at(last_call(&self.hung, what, self.options.cluster.connect_timeout, move || ask(&image)))
    }

    fn look_at<R>(&self, asked: Result<R, RbdError>) -> Result<R, RbdError> {
        asked.inspect_err(|e| self.shared().look_for_block(e.errno()))
    }

    fn locks(&self) -> MutexGuard<'_, Locks> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks it if it is to be, and forgets what was in it. Returns what was noted with it.
    fn lock(&self, lost: Option<String>) -> Result<Option<String>, RbdError> {
        let (order, needed) = (Arc::clone(&self.order), self.options.locking == Locking::On);
        let name = self.options.is_for_locks().then(|| self.options.image.spec());
        // By whoever is first: the call when it is done, or this thread when it waits no longer.
        let settled = Arc::<AtomicBool>::default();
        let is_late = Arc::clone(&settled);
        let locked = self.ask("locking an image", move |image| {
            let _order = order.lock().unwrap_or_else(PoisonError::into_inner);
            let take = || {
                let note =
                    name.as_deref().map(|name| lock(image, needed, name, lost.as_deref())).transpose()?.flatten();
                image.invalidate_cache()?;
                Ok(note)
            };
            let give_back = || name.iter().for_each(|name| give_back(image, name));
            take_whole(take, &is_late, give_back)
        });
        if matches!(locked, Err(RbdError::NoAnswer { .. })) && settled.swap(true, Ordering::AcqRel) {
            self.unlock()?;
        }
        locked
    }

    fn unlock(&self) -> Result<(), RbdError> {
        let order = Arc::clone(&self.order);
        self.ask_last("unlocking an image", move |image| {
            let _order = order.lock().unwrap_or_else(PoisonError::into_inner);
            image.release_lock()
        })
    }
}

impl Locks {
    fn last_note(&self) -> Option<String> {
        self.note.clone().or_else(|| self.lost.clone())
    }
}

impl Remote for RbdDisk {
    fn kind(&self) -> RemoteKind {
        RemoteKind::Rbd
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn is_like(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<Self>().is_some_and(|other| other.options == self.options)
    }

    fn open(&self) -> Result<Shape, OpenCause> {
        let opened = match Opened::find(&self.options, false) {
            Some(opened) => opened,
            None => Opened::new(&self.name, &self.options).map_err(|e| refused(&self.name, &e))?,
        };
        let shape = opened.shape;
        let _ = self.opened.set(opened);
        Ok(Shape { size: self.ask_size().unwrap_or(shape.size), ..shape })
    }

    fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
        Ok(Box::new(self.opened().shared().engine()?))
    }

    fn ask_size(&self) -> io::Result<u64> {
        let news = Arc::clone(&self.opened().news);
        self.opened().ask("asking for a size", move |image| news.ask_size(|| image.size())).map_err(io::Error::other)
    }

    fn watch(&self, bell: &EventNotifier) {
        let news = &self.opened().news;
        *news.bell() = Some(bell.clone());
        // What it was when it was opened, or has become since: that may be another size than this disk's, and nobody was told.
        if news.size.load(Ordering::Acquire) != 0 {
            bell.set();
        }
    }

    fn take_new_size(&self) -> Option<u64> {
        let size = self.opened().news.size.swap(0, Ordering::AcqRel);
        (size > 0).then_some(size)
    }

    fn can_resize(&self) -> bool {
        // librbd's sizes of encrypted images are not those that their guests see.
        !self.options.image.read_only && self.options.image.encryption.is_none()
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.opened().ask("resizing an image", move |image| image.grow(bytes)).map_err(io::Error::other)
    }

    fn flush(&self) -> Result<(), FlushError> {
        let flushed = self.opened().ask_last("flushing an image", Image::flush).map_err(|e| e.errno());
        // One whose lock was given back was written out then, and librbd flushes it no more.
        let is_given_back =
            flushed == Err(Errno::ROFS) && self.options.is_for_locks() && self.opened().locks().users == 0;
        // librbd says each time how it went.
        if is_given_back { Ok(()) } else { flushed.map_err(FlushError::again) }
    }

    fn lock(&self) -> Result<(), OpenCause> {
        let mut has_lock = self.has_lock();
        let mut locks = self.opened().locks();
        if !*has_lock && locks.users == 0 {
            locks.note = self.opened().lock(locks.lost.clone()).map_err(|e| refused(&self.name, &e))?;
            locks.lost = None;
        }
        locks.users += usize::from(!*has_lock);
        *has_lock = true;
        Ok(())
    }

    fn unlock(&self) {
        let mut has_lock = self.has_lock();
        if !std::mem::take(&mut *has_lock) {
            return;
        }
        let mut locks = self.opened().locks();
        locks.users -= 1;
        if locks.users == 0
            && !self.is_lost()
            && locks.note.take().is_some()
            && let Err(e) = self.opened().unlock()
        {
            tracing::warn!("'{}' stays locked: {e}", self.name);
        }
    }

    fn is_lost(&self) -> bool {
        self.opened.get().is_some_and(|opened| opened.shared().is_lost())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.shared = None;
        // An error is what it is told when all is done.
        let closed = self.closed.get_mut().unwrap_or_else(PoisonError::into_inner);
        if closed.recv_timeout(CLOSING) == Err(RecvTimeoutError::Timeout) {
            let name = self.options.image.spec();
            tracing::warn!("'{name}' is left behind open: the cluster does not answer, or requests are still there");
        }
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("options", &self.options).finish_non_exhaustive()
    }
}

fn refused(name: &str, error: &RbdError) -> OpenCause {
    let (name, why) = (name.to_owned(), error.to_string());
    match error {
        RbdError::Locked { .. } => OpenCause::RemoteLocked { name, why },
        _ => OpenCause::Remote { name, why },
    }
}

/// Has all of what `take` takes, if somebody waits for it still: `is_late` is set by whoever comes first, this or who waits no
/// longer. What was taken otherwise, a part of it perhaps, is given back, for nobody else would.
fn take_whole<T>(
    take: impl FnOnce() -> Result<T, RbdError>,
    is_late: &AtomicBool,
    give_back: impl FnOnce(),
) -> Result<T, RbdError> {
    let taken = take();
    if taken.is_err() || is_late.swap(true, Ordering::AcqRel) {
        give_back();
    }
    taken
}

/// Gives back an image's exclusive lock, if it is this client's.
fn give_back(image: &Image, name: &str) {
    let released = if matches!(image.is_lock_owner(), Ok(false)) { Ok(()) } else { image.release_lock() };
    if let Err(e) = released {
        tracing::warn!("'{name}' stays locked: {e}");
    }
}

/// Takes an image's exclusive lock, and says what it has noted with it. If a client that is dead has it, that client is put
/// on the cluster's block list first, so that what it has sent and what has not arrived yet is never written.
///
/// `lost` is what was noted for a client of this daemon's whose place this one takes, and which has lost the lock. Requests
/// that it was refused were not acknowledged, and are about to be made again, as after a crash. That is safe if nobody has
/// written meanwhile. Another daemon that had the lock has left its own note; of other programs the cluster keeps nothing,
/// and whoever asks for this knows what they did.
fn lock(image: &Image, needed: bool, name: &str, lost: Option<&str>) -> Result<Option<String>, RbdError> {
    if !image.has_lock()? {
        return if needed { Err(RbdError::Unlockable { image: name.to_owned() }) } else { Ok(None) };
    }
    if lost.is_some() && image.is_cached()? {
        return Err(RbdError::CacheLost);
    }
    if !image.is_lock_owner()?
        && let Some(owner) = image.owner()?
    {
        let note = image.note(HOLDER)?;
        let holder = note.as_deref().and_then(|note| Holder::of(note, &owner));
        let is_lost = lost.is_some_and(|lost| Holder::of(lost, &owner).is_some());
        // The cluster itself takes half a minute to notice.
        let is_dead = is_lost || holder.as_ref().is_some_and(Holder::is_dead) || !image.is_watched_by(&owner)?;
        match holder {
            _ if is_dead => {}
            Some(holder) if holder == *THIS_PROCESS => return Err(RbdError::LockedHere),
            _ => return Err(RbdError::Locked { owner }),
        }
        tracing::warn!("'{name}': breaking the exclusive lock of {owner}, which has ended without giving it back");
        image.break_lock(&owner)?;
    }
    image.acquire_lock()?;
    if lost.is_some() && image.note(HOLDER)?.as_deref() != lost {
        image.release_lock()?;
        return Err(RbdError::Overtaken);
    }
    // Who comes next knows by it that we are dead. Without it half a minute goes by.
    let note = format!("{} {}", image.owner()?.unwrap_or_default(), *THIS_PROCESS);
    if let Err(e) = image.set_note(HOLDER, &note) {
        tracing::warn!("'{name}': who locked it cannot be kept with it: {e}");
    }
    Ok(Some(note))
}

/// A process, among all that there are and have been.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holder {
    /// The running kernel.
    boot: String,
    /// Whose numbers of processes these are.
    namespace: u64,
    pid: i32,
    /// A number that it has made up.
    token: u64,
}

static THIS_PROCESS: LazyLock<Holder> = LazyLock::new(|| Holder {
    boot: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned(),
    namespace: std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.st_ino()),
    pid: std::process::id() as i32,
    token: RandomState::new().hash_one(0),
});

impl Holder {
    /// What a note says of the client at `owner`; nothing if it is another's.
    fn of(note: &str, owner: &str) -> Option<Self> {
        let mut words = note.split(' ');
        if words.next() != Some(owner) {
            return None;
        }
        let (boot, namespace) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
        Some(Self { boot, namespace, pid: words.next()?.parse().ok()?, token: words.next()?.parse().ok()? })
    }

    /// Whether it was a process of this machine's, and is none any more.
    fn is_dead(&self) -> bool {
        let this = &*THIS_PROCESS;
        if self.boot.is_empty() || (&self.boot, self.namespace) != (&this.boot, this.namespace) {
            return false;
        }
        if self.pid == this.pid {
            return self.token != this.token;
        }
        let Some(pid) = rustix::process::Pid::from_raw(self.pid) else { return false };
        let found = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
        found.is_err_and(|e| e == Errno::SRCH)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { boot, namespace, pid, token } = self;
        write!(f, "{boot} {namespace} {pid} {token}")
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn of_two_answers_that_say_how_long_an_image_is_the_one_that_was_asked_for_last_is_kept() {
        let news = News::default();
        let (answered, other_answer) = channel();
        thread::scope(|scope| {
            let first = || {
                scope.spawn(|| answered.send(news.ask_size(|| Ok(2))).unwrap());
                // The other one has asked later, and waits for as long as this answer takes.
                assert!(other_answer.recv_timeout(Duration::from_millis(200)).is_err());
                Ok(1)
            };
            assert_eq!(news.ask_size(first).ok(), Some(1));
        });
        assert_eq!(news.size.into_inner(), 2);
    }

    #[test]
    fn what_was_taken_before_something_failed_or_when_nobody_waits_any_more_is_given_back() {
        for (fails, gives_up) in [(false, false), (true, false), (false, true), (true, true)] {
            let (settled, given_back) = (AtomicBool::new(gives_up), Cell::new(0));
            let taken = if fails { Err(RbdError::Overtaken) } else { Ok(7) };
            let taken = take_whole(|| taken, &settled, || given_back.set(given_back.get() + 1));
            assert_eq!((taken.ok(), given_back.get() == 1), ((!fails).then_some(7), fails || gives_up));
            // Who gives up now has something to give back if it was taken.
            assert_eq!(settled.into_inner(), gives_up || !fails);
        }
    }

    #[test]
    fn a_process_of_this_machine_that_has_ended_is_dead_and_no_other_is() {
        let this = THIS_PROCESS.clone();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Holder { pid: child.id() as i32, token: 1, ..this.clone() };
        child.wait().unwrap();
        assert!(ended.is_dead());
        assert!(Holder { token: this.token ^ 1, ..this.clone() }.is_dead(), "one that had our number before us");
        for alive in [
            this.clone(),
            Holder { pid: 1, ..this.clone() },
            Holder { boot: "another".to_owned(), ..ended.clone() },
            Holder { namespace: 0, ..ended.clone() },
        ] {
            assert!(!alive.is_dead(), "{alive:?}");
        }
        let note = format!("10.0.0.1:0/7 {ended}");
        assert_eq!(Holder::of(&note, "10.0.0.1:0/7"), Some(ended));
        assert_eq!(Holder::of(&note, "10.0.0.1:0/8"), None);
        assert_eq!(Holder::of("10.0.0.1:0/7", "10.0.0.1:0/7"), None);
    }
}
