//! An image that is open. All of these calls but [`poll`](Image::poll) may wait for the cluster.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::mem::size_of;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use egret_event_loop::EventNotifier;
use rustix::io::{DupFlags, Errno, dup3};

use crate::calls;
use crate::cluster::{Cluster, ClusterOptions, Pool, Secret, buffer, from_buffer, text};
use crate::error::{RbdError, check};
use crate::sys::{Ceph, EVENTFD, EXCLUSIVE, FEATURE_EXCLUSIVE_LOCK, Handle, ImageInfo, LuksOptions, Watcher, ceph};

/// Which image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageOptions {
    /// The pool that it is in.
    pub pool: String,
    /// The pool's namespace; empty for none.
    pub namespace: String,
    /// Its name.
    pub image: String,
    /// The snapshot of it, if not itself.
    pub snapshot: Option<String>,
    /// Whether nothing is to be written to it.
    pub read_only: bool,
    /// How it is encrypted, if librbd is to undo that.
    pub encryption: Option<(Luks, Secret)>,
}

/// Formats of encryption, as librbd numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Luks {
    /// LUKS.
    One = 0,
    /// LUKS2.
    Two = 1,
}

impl ImageOptions {
    /// As the `rbd` command names it.
    pub fn spec(&self) -> String {
        let Self { pool, namespace, image, snapshot, .. } = self;
        let namespace = if namespace.is_empty() { String::new() } else { format!("{namespace}/") };
        let snapshot = snapshot.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
        format!("{pool}/{namespace}{image}{snapshot}")
    }
}

/// An open image.
pub(crate) struct Image {
    pub(crate) ceph: &'static Ceph,
    pub(crate) handle: Handle,
    watch: Option<u64>,
    /// What librbd's watch calls. Boxed twice, because librbd has its address.
    changed: Box<Box<dyn Fn() + Send + Sync>>,
    /// What librbd announces completions on, by its number. Which eventfd that is may change.
    event: Mutex<OwnedFd>,
    pool: Pool,
}

// SAFETY: librbd locks by itself; an image may be used by any threads.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

/// What librbd calls on a thread of its own when an image's header has changed.
unsafe extern "C" fn header_changed(changed: *mut c_void) {
    // SAFETY: it is the box of an image whose watch has not ended.
    let changed = unsafe { &*changed.cast::<Box<dyn Fn() + Send + Sync>>() };
    changed();
}

/// What librbd calls to say how far it is.
unsafe extern "C" fn go_on(_done: u64, _of: u64, _arg: *mut c_void) -> c_int {
    0
}

impl Image {
    /// Opens it; `changed` is called whenever its size may have changed, on a thread that must not wait.
    pub(crate) fn open(
        cluster: &ClusterOptions,
        options: &ImageOptions,
        changed: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, RbdError> {
        let ceph = ceph()?;
        let ImageOptions { pool, namespace, image, snapshot, read_only, encryption } = options;
        let pool = Cluster::get(cluster)?.pool(pool, namespace)?;
        let (name, snapshot) = (text(image), snapshot.as_deref().map(text));
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let mut handle = ptr::null_mut();
        let open = if *read_only { ceph.rbd.rbd_open_read_only } else { ceph.rbd.rbd_open };
        // SAFETY: the pool is open, both names end with a zero and outlive the call, and the handle is written.
        let opened = unsafe { open(pool.handle, name.as_ptr(), &raw mut handle, snapshot) };
        let hint = match -opened {
            libc::ENOENT => "; check pool, namespace, image and snapshot (rbd ls, rbd snap ls)",
            libc::EPERM | libc::EACCES => "; the user's capabilities do not allow it",
            _ => "",
        };
        check(opened, || ("open it".to_owned(), hint))?;
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|errno| RbdError::Call { what: "eventfd".to_owned(), errno, hint: "" })?;
        let mut new =
            Self { ceph, handle, watch: None, changed: Box::new(Box::new(changed)), event: Mutex::new(event), pool };
        if let Some((format, secret)) = encryption {
            new.load_encryption(*format, secret)?;
        }
        let event = new.event.lock().unwrap_or_else(PoisonError::into_inner).as_raw_fd();
        // SAFETY: the image is open. The descriptor stays open until it is closed.
        let set = unsafe { (ceph.rbd.rbd_set_image_notification)(handle, event, EVENTFD) };
        check(set, || ("have completions announced".to_owned(), ""))?;
        if !read_only {
            let mut watch = 0;
            let arg = (&raw const *new.changed).cast_mut().cast();
            // SAFETY: the box stays where it is until the watch has ended, before the image is closed.
            let watching = unsafe { (ceph.rbd.rbd_update_watch)(handle, &raw mut watch, header_changed, arg) };
            check(watching, || ("watch its size".to_owned(), ""))?;
            new.watch = Some(watch);
        }
        Ok(new)
    }

    fn load_encryption(&self, format: Luks, Secret(passphrase): &Secret) -> Result<(), RbdError> {
        let mut options =
            LuksOptions { algorithm: 0, passphrase: passphrase.as_ptr().cast(), length: passphrase.len() };
        // SAFETY: both formats have these options, which outlive the call, as does the passphrase.
        let loaded = unsafe {
            let options = (&raw mut options).cast();
            (self.ceph.rbd.rbd_encryption_load)(self.handle, format as c_int, options, size_of::<LuksOptions>())
        };
        let hint = match -loaded {
            libc::EPERM => "; the passphrase of encrypt.key-secret does not open it",
            libc::EINVAL => "; it is not encrypted by this encrypt.format",
            _ => "",
        };
        check(loaded, || ("load its encryption".to_owned(), hint)).map(drop)
    }

    /// Has completions announced on this eventfd from here on.
    pub(crate) fn announce_on(&self, bell: &EventNotifier) -> Result<(), Errno> {
        let mut event = self.event.lock().unwrap_or_else(PoisonError::into_inner);
        dup3(bell.as_fd(), &mut event, DupFlags::CLOEXEC)
    }

    /// Bytes of each of its objects.
    pub(crate) fn object_size(&self) -> Result<u64, RbdError> {
        let mut info = ImageInfo::NONE;
        // SAFETY: the image is open, and the structure is as long as is said.
        let asked = unsafe { (self.ceph.rbd.rbd_stat)(self.handle, &raw mut info, size_of::<ImageInfo>()) };
        check(asked, || ("ask what it is like".to_owned(), "")).map(|_| info.object_size)
    }

    pub(crate) fn size(&self) -> Result<u64, RbdError> {
        let mut size = 0;
        // SAFETY: the image is open.
        let asked = unsafe { (self.ceph.rbd.rbd_get_size)(self.handle, &raw mut size) };
        check(asked, || ("ask for its size".to_owned(), "")).map(|_| size)
    }

    /// Makes it longer, and never shorter: that is an error.
    pub(crate) fn grow(&self, bytes: u64) -> Result<(), RbdError> {
        const MAY_SHRINK: bool = false;
        // SAFETY: the image is open, and the function looks at nothing.
        let grown = unsafe { (self.ceph.rbd.rbd_resize2)(self.handle, bytes, MAY_SHRINK, go_on, ptr::null_mut()) };
        check(grown, || ("make it longer".to_owned(), "")).map(drop)
    }

    pub(crate) fn flush(&self) -> Result<(), RbdError> {
        // SAFETY: the image is open.
        let flushed = unsafe { (self.ceph.rbd.rbd_flush)(self.handle) };
        check(flushed, || ("flush it".to_owned(), "")).map(drop)
    }

    /// Whether it can be locked.
    pub(crate) fn has_lock(&self) -> Result<bool, RbdError> {
        let mut features = 0;
        // SAFETY: the image is open.
        let asked = unsafe { (self.ceph.rbd.rbd_get_features)(self.handle, &raw mut features) };
        check(asked, || ("ask for its features".to_owned(), ""))?;
        Ok(features & FEATURE_EXCLUSIVE_LOCK != 0)
    }

    /// The address of the client that has its lock.
    pub(crate) fn owner(&self) -> Result<Option<String>, RbdError> {
        let (mut mode, mut owners, mut count) = (0, [ptr::null_mut(); 8], 8);
        // SAFETY: the image is open, and there is room for as many owners as is said.
        let asked = unsafe {
            (self.ceph.rbd.rbd_lock_get_owners)(self.handle, &raw mut mode, owners.as_mut_ptr(), &raw mut count)
        };
        if asked == -libc::ENOENT {
            return Ok(None);
        }
        check(asked, || ("ask who has its lock".to_owned(), ""))?;
        // SAFETY: the first owner is text, which is valid until the list is cleaned up.
        let owner = (count > 0).then(|| unsafe { CStr::from_ptr(owners[0]) }.to_string_lossy().into_owned());
        // SAFETY: this many were filled in.
        unsafe { (self.ceph.rbd.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(owner)
    }

    /// Whether a client has it open, and has been heard of within the last half minute.
    pub(crate) fn is_watched_by(&self, address: &str) -> Result<bool, RbdError> {
        const NOBODY: Watcher = Watcher { address: ptr::null_mut(), id: 0, cookie: 0 };
        let mut watchers = vec![NOBODY; 16];
        loop {
            let mut count = watchers.len();
            // SAFETY: the image is open, and there is room for as many watchers as is said.
            let asked =
                unsafe { (self.ceph.rbd.rbd_watchers_list)(self.handle, watchers.as_mut_ptr(), &raw mut count) };
            if asked == -libc::ERANGE && count > watchers.len() {
                watchers.resize(count, NOBODY);
                continue;
            }
            check(asked, || ("ask who has it open".to_owned(), ""))?;
            let known = watchers[..count].iter();
            // SAFETY: the address is text, which is valid until the list is cleaned up.
            let mut known = known.map(|watcher| unsafe { CStr::from_ptr(watcher.address) }.to_bytes());
            let is_there = known.any(|known| known == address.as_bytes());
            // SAFETY: this many were filled in.
            unsafe { (self.ceph.rbd.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
            return Ok(is_there);
        }
    }

    /// Whether it is we who have its lock.
    pub(crate) fn is_lock_owner(&self) -> Result<bool, RbdError> {
        let mut is_owner = 0;
        // SAFETY: the image is open.
        let asked = unsafe { (self.ceph.rbd.rbd_is_exclusive_lock_owner)(self.handle, &raw mut is_owner) };
        check(asked, || ("ask whether its lock is ours".to_owned(), "")).map(|_| is_owner != 0)
    }

    /// Forgets what librbd's cache has of it, which somebody else may have changed.
    pub(crate) fn invalidate_cache(&self) -> Result<(), RbdError> {
        // SAFETY: the image is open.
        let invalidated = unsafe { (self.ceph.rbd.rbd_invalidate_cache)(self.handle) };
        check(invalidated, || ("empty its cache".to_owned(), "")).map(drop)
    }

    /// Whether librbd may have acknowledged writes that no OSD has.
    pub(crate) fn is_cached(&self) -> Result<bool, RbdError> {
        // An image may have a setting of its own.
        let own = self.note(c"conf_rbd_cache")?;
        Ok(own.unwrap_or_else(|| self.pool.cluster.setting(c"rbd_cache")) != "false")
    }

    /// Has whoever opens an image from here on connect anew: the cluster lets this connection do nothing any more.
    pub(crate) fn give_connection_up(&self) {
        self.pool.cluster.give_up();
    }

    /// Takes the lock, and keeps it from everybody who asks for it.
    pub(crate) fn acquire_lock(&self) -> Result<(), RbdError> {
        // SAFETY: the image is open.
        let acquired = unsafe { (self.ceph.rbd.rbd_lock_acquire)(self.handle, EXCLUSIVE) };
        check(acquired, || ("take its exclusive lock".to_owned(), "")).map(drop)
    }

    /// Gives the lock back.
    pub(crate) fn release_lock(&self) -> Result<(), RbdError> {
        // SAFETY: the image is open.
        let released = unsafe { (self.ceph.rbd.rbd_lock_release)(self.handle) };
        check(released, || ("give its exclusive lock back".to_owned(), "")).map(drop)
    }

    /// Takes the lock away from an owner that is gone, and has all OSDs refuse whatever of its requests is still on the
    /// way: returns when none of it can be served any more after a request that is made here from then on.
    pub(crate) fn break_lock(&self, owner: &str) -> Result<(), RbdError> {
        let name = text(owner);
        // SAFETY: the image is open, and the name ends with a zero.
        let broken = unsafe { (self.ceph.rbd.rbd_lock_break)(self.handle, EXCLUSIVE, name.as_ptr()) };
        // Somebody else may have done it.
        if broken != -libc::ENOENT {
            let hint = "; the user needs the capability: mon 'profile rbd'";
            check(broken, || (format!("break the exclusive lock of {owner}, which is gone"), hint))?;
        }
        self.pool.cluster.wait_for_latest_map()
    }

    /// What is kept with it under a name.
    pub(crate) fn note(&self, name: &CStr) -> Result<Option<String>, RbdError> {
        let mut value = [0; 512];
        let mut len = value.len();
        // SAFETY: the image is open, the name ends with a zero, and the buffer is as long as is said.
        let asked =
            unsafe { (self.ceph.rbd.rbd_metadata_get)(self.handle, name.as_ptr(), buffer(&mut value), &raw mut len) };
        if asked == -libc::ENOENT || asked == -libc::ERANGE {
            return Ok(None);
        }
        check(asked, || ("read what is kept with it".to_owned(), ""))?;
        Ok(Some(from_buffer(&value)))
    }

    /// Keeps something with it.
    pub(crate) fn set_note(&self, name: &CStr, value: &str) -> Result<(), RbdError> {
        let value = text(value);
        // SAFETY: the image is open, and both texts end with a zero.
        let set = unsafe { (self.ceph.rbd.rbd_metadata_set)(self.handle, name.as_ptr(), value.as_ptr()) };
        check(set, || ("keep something with it".to_owned(), "")).map(drop)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Some(watch) = self.watch {
            // SAFETY: the watch is one of this image's, and returns when its callback has.
            unsafe { (self.ceph.rbd.rbd_update_unwatch)(self.handle, watch) };
        }
        // SAFETY: nobody has the handle any more. It waits for requests in flight.
        let closed = unsafe { (self.ceph.rbd.rbd_close)(self.handle) };
        if closed < 0 {
            tracing::warn!(
                "an image in a cluster was not closed as it should be: {}",
                Errno::from_raw_os_error(-closed)
            );
        }
    }
}

/// An image that is closed when nobody has it any more: by a thread for calls, since that waits for the cluster.
pub(crate) struct Kept {
    image: Option<Image>,
    /// Dropped when it is closed.
    closed: Option<Sender<()>>,
}

impl Kept {
    /// Keeps an image; the receiver is told, by an error, when it is closed.
    pub(crate) fn new(image: Image) -> (Self, Receiver<()>) {
        let (closed, receiver) = channel();
        (Self { image: Some(image), closed: Some(closed) }, receiver)
    }
}

impl Deref for Kept {
    type Target = Image;

    fn deref(&self) -> &Image {
        self.image.as_ref().expect("it is there until this is dropped")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let (image, closed) = (self.image.take(), self.closed.take());
        calls::run(move || {
            drop(image);
            drop(closed);
        });
    }
}
