//! An image as a disk: opened, locked, measured, resized and closed, within the patience that its options have.

#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::linux::fs::MetadataExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use egret_disk::{BlockLimits, Blocks, Engine, EngineError, Locking, OpenCause, Remote, RemoteKind, Shape};
use egret_event_loop::EventNotifier;
use rustix::io::Errno;

use crate::calls::{call, run};
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

/// An image in a cluster. It is opened by [`open`](Remote::open); disks with the same options share it, so that one that is
/// reopened need not give its lock back.
#[derive(Debug)]
pub struct RbdDisk {
    options: RbdOptions,
    name: String,
    opened: OnceLock<Arc<Opened>>,
}

/// An image that is open.
struct Opened {
    options: RbdOptions,
    shared: Option<Arc<Shared>>,
    shape: Shape,
    closed: Mutex<Receiver<()>>,
    /// How many want it locked.
    locks: Mutex<usize>,
    news: Arc<News>,
}

/// What its cluster says of an image.
#[derive(Default)]
struct News {
    /// Bytes; 0 where nothing is new.
    size: AtomicU64,
    bell: Mutex<Option<EventNotifier>>,
}

/// Those that there are.
static OPENED: Mutex<Vec<Weak<Opened>>> = Mutex::new(Vec::new());

impl RbdDisk {
    /// An image that is not open yet.
    pub fn new(options: RbdOptions) -> Self {
        Self { name: options.image.spec(), options, opened: OnceLock::new() }
    }

    fn opened(&self) -> &Arc<Opened> {
        self.opened.get().expect("the disk is open")
    }
}

impl Opened {
    fn find(options: &RbdOptions) -> Option<Arc<Self>> {
        let mut all = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|opened| opened.strong_count() > 0);
        let found = { all.iter().filter_map(Weak::upgrade) }.find(|opened| opened.options == *options);
        // One that was fenced off is not what somebody wants who opens it anew.
        found.filter(|opened| !opened.shared().is_lost())
    }

    fn new(name: &str, options: &RbdOptions) -> Result<Arc<Self>, RbdError> {
        let RbdOptions { cluster, image, .. } = options.clone();
        // What waits in librbd is ended by its own limit, and says more.
        let patience = cluster.connect_timeout + Duration::from_secs(2);
        // Who is told of a change may not wait, and to ask for the size is to wait.
        let (news, place) = (Arc::<News>::default(), Arc::new(OnceLock::<Weak<Shared>>::new()));
        let (teller, known) = (Arc::clone(&news), Arc::clone(&place));
        let changed = move || {
            let (teller, known) = (Arc::clone(&teller), Arc::clone(&known));
            run(move || {
                let Some(Ok(size)) = known.get().and_then(Weak::upgrade).map(|shared| shared.image.size()) else {
                    return;
                };
                teller.size.store(size, Ordering::Release);
                if let Some(bell) = &*teller.bell.lock().unwrap_or_else(PoisonError::into_inner) {
                    bell.set();
                }
            });
        };
        let opened = call("opening an image", patience, move || {
            let image = Image::open(&cluster, &image, changed)?;
            let shape = (image.size()?, image.object_size()?);
            Ok((Kept::new(image), shape))
        });
        let ((kept, closed), (size, object)) = opened?;
        let granularity = u32::try_from(object).unwrap_or(PHYSICAL);
        let shape = Shape {
            size,
            blocks: Blocks { logical: 512, physical: PHYSICAL },
            limits: BlockLimits::unlimited(granularity),
        };
        let shared = Arc::new(Shared::new(name.to_owned(), kept));
        let _ = place.set(Arc::downgrade(&shared));
        let (closed, locks) = (Mutex::new(closed), Mutex::new(0));
        let new = Arc::new(Self { options: options.clone(), shared: Some(shared), shape, closed, locks, news });
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
        call(what, self.options.cluster.connect_timeout, move || ask(&image))
    }

    fn locks(&self) -> Option<MutexGuard<'_, usize>> {
        let wanted = !self.options.image.read_only && self.options.locking != Locking::Off;
        wanted.then(|| self.locks.lock().unwrap_or_else(PoisonError::into_inner))
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
        let opened = match Opened::find(&self.options) {
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
        self.opened().ask("asking for a size", Image::size).map_err(io::Error::other)
    }

    fn watch(&self, bell: &EventNotifier) {
        *self.opened().news.bell.lock().unwrap_or_else(PoisonError::into_inner) = Some(bell.clone());
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
        self.opened().ask("resizing an image", move |image| image.resize(bytes)).map_err(io::Error::other)
    }

    fn flush(&self) -> Result<(), Errno> {
        self.opened().ask("flushing an image", Image::flush).map_err(|e| e.errno())
    }

    fn lock(&self) -> Result<(), OpenCause> {
        let Some(mut locks) = self.opened().locks() else { return Ok(()) };
        if *locks == 0 {
            let (needed, name) = (self.options.locking == Locking::On, self.options.image.image.clone());
            let locked = self.opened().ask("locking an image", move |image| lock(image, needed, &name));
            locked.map_err(|e| refused(&self.name, &e))?;
        }
        *locks += 1;
        Ok(())
    }

    fn unlock(&self) {
        let Some(mut locks) = self.opened.get().and_then(|opened| opened.locks()) else { return };
        if *locks == 1
            && let Err(e) = self.opened().ask("unlocking an image", Image::release_lock)
        {
            tracing::warn!("'{}' stays locked: {e}", self.name);
        }
        *locks = locks.saturating_sub(1);
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
    OpenCause::Remote { name: name.to_owned(), why: error.to_string() }
}

/// Takes an image's exclusive lock. If a client that is dead has it, that client is put on the cluster's block list first,
/// so that what it has sent and what has not arrived yet is never written.
fn lock(image: &Image, needed: bool, name: &str) -> Result<(), RbdError> {
    if !image.has_lock()? {
        return if needed { Err(RbdError::Unlockable { image: name.to_owned() }) } else { Ok(()) };
    }
    if let Some(owner) = image.owner()? {
        let is_dead = || -> Result<bool, RbdError> {
            let note = image.note(HOLDER)?;
            let ours = note.as_deref().and_then(|note| Holder::of(note, &owner));
            // The cluster itself takes half a minute to notice.
            Ok(ours.is_some_and(|holder| holder.is_dead()) || !image.is_watched_by(&owner)?)
        };
        if !is_dead()? {
            return Err(RbdError::Locked { owner });
        }
        tracing::warn!("'{name}': breaking the exclusive lock of {owner}, which has ended without giving it back");
        image.break_lock(&owner)?;
    }
    image.acquire_lock()?;
    // Who comes next knows by it that we are dead. Without it half a minute goes by.
    let noted = image.owner().and_then(|owner| {
        let owner = owner.unwrap_or_default();
        image.set_note(HOLDER, &format!("{owner} {}", *THIS_PROCESS))
    });
    if let Err(e) = noted {
        tracing::warn!("'{name}': who locked it cannot be kept with it: {e}");
    }
    Ok(())
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
    use super::*;

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
