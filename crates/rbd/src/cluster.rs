//! Connections to clusters, each of which a few images share.
//!
//! A connection costs fifteen threads with Ceph 16.2, and one that serves many images is itself what they wait for: so there are as
//! many as [`ClusterOptions::images`] asks for.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::error::{RbdError, check};
use crate::sys::{Ceph, Handle, ceph};

/// Text that no message shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// How to find a cluster, and who to be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterOptions {
    /// Its configuration file, if it is not where Ceph looks for it.
    pub conf: Option<String>,
    /// The user, without `client.`.
    pub user: Option<String>,
    /// The user's key, in base64 as a keyring has it.
    pub key: Option<Secret>,
    /// The monitors, where they are not the configuration file's: `host:port`.
    pub monitors: Vec<String>,
    /// How it may be asked who it is, where that is not the file's to say.
    pub auth: Vec<String>,
    /// Settings over those of the file, by their names.
    pub settings: Vec<(String, String)>,
    /// How long it may take to answer.
    pub connect_timeout: Duration,
    /// How many images have one connection at most.
    pub images: u32,
}

/// A connection to a cluster.
pub(crate) struct Cluster {
    ceph: &'static Ceph,
    handle: Handle,
    options: ClusterOptions,
    /// Whether the cluster has it on its block list.
    is_lost: AtomicBool,
}

// SAFETY: librados locks by itself; a handle may be used by any threads.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

/// What is set before the users' own settings, where this Ceph has it: a setting's name, its value, and what Ceph's own is if
/// only that gives way.
///
/// - A request goes from the I/O thread to its OSD's connection, and is not handed to a thread of librbd's first. That is right
///   only if nothing makes the I/O thread wait, as librados does where more is in flight than so many requests and bytes:
///   0 lifts both limits. Engines have one of their own.
/// - A few images have enough to do for one thread that completes their requests; two hand it to each other.
const OURS: [(&CStr, &str, Option<&str>); 4] = [
    (c"rbd_non_blocking_aio", "false", None),
    (c"objecter_inflight_ops", "0", None),
    (c"objecter_inflight_op_bytes", "0", None),
    (c"librados_thread_count", "1", Some("2")),
];

/// Those that there are.
static CLUSTERS: Mutex<Vec<Weak<Cluster>>> = Mutex::new(Vec::new());

impl Cluster {
    /// A connection for one more image: one that has room for it, or a new one. Waits for the cluster.
    ///
    /// # Errors
    ///
    /// The library cannot be had, a setting is refused, or the cluster does not answer or does not know us.
    pub(crate) fn get(options: &ClusterOptions) -> Result<Arc<Self>, RbdError> {
        let mut clusters = CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner);
        clusters.retain(|cluster| cluster.strong_count() > 0);
        let most = options.images.max(1) as usize;
        let shared = clusters.iter().filter(|cluster| cluster.strong_count() < most + 1).filter_map(Weak::upgrade);
        let is_it = |cluster: &Self| cluster.options == *options && !cluster.is_lost.load(Ordering::Relaxed);
        // The one that was upgraded counts.
        let found = { shared }.find(|cluster| is_it(cluster) && Arc::strong_count(cluster) <= most);
        if let Some(found) = found {
            return Ok(found);
        }
        drop(clusters);
        let new = Arc::new(Self::connect(options)?);
        CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&new));
        Ok(new)
    }

    /// No more images are to have this connection.
    pub(crate) fn give_up(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }

    /// A client that is not connected and has read no configuration.
    fn new(options: &ClusterOptions) -> Result<Self, RbdError> {
        let ceph = ceph()?;
        let name = text(&format!("client.{}", options.user.as_deref().unwrap_or("admin")));
        let mut handle = ptr::null_mut();
        // SAFETY: both names end with a zero; the handle is written.
        let made = unsafe { (ceph.rados.rados_create2)(&raw mut handle, c"ceph".as_ptr(), name.as_ptr(), 0) };
        check(made, || ("make a client of Ceph".to_owned(), ""))?;
        Ok(Self { ceph, handle, options: options.clone(), is_lost: AtomicBool::new(false) })
    }

    /// Reads the file that `conf` names, or what there is where Ceph looks; returns what the function does.
    fn read_conf(&self) -> c_int {
        let conf = self.options.conf.as_deref().map(text);
        let path = conf.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // SAFETY: the handle is ours; the path is null, or ends with a zero and outlives the call.
        unsafe { (self.ceph.rados.rados_conf_read_file)(self.handle, path) }
    }

    fn connect(options: &ClusterOptions) -> Result<Self, RbdError> {
        let ClusterOptions { conf, user: _, key, monitors, auth, settings, connect_timeout, images: _ } = options;
        let new = Self::new(options)?;
        let read = new.read_conf();
        // To find nothing where Ceph looks is no error of ours.
        if let Some(path) = conf {
            check(read, || (format!("read '{path}'"), "; conf names the cluster's ceph.conf"))?;
        }
        // As long as the first answer may take; whoever sets it themselves knows better.
        new.set("client_mount_timeout", &connect_timeout.as_secs().to_string())?;
        if !monitors.is_empty() {
            new.set("mon_host", &monitors.join(";"))?;
        }
        if !auth.is_empty() {
            new.set("auth_client_required", &auth.join(";"))?;
        }
        if let Some(Secret(key)) = key {
            new.set("key", &String::from_utf8_lossy(key))?;
        }
        for (name, value, cephs) in OURS {
            let now = new.setting(name);
            if !now.is_empty() && cephs.is_none_or(|cephs| now == cephs) {
                new.set(&name.to_string_lossy(), value)?;
            }
        }
        for (name, value) in settings {
            new.set(name, value)?;
        }
        // SAFETY: the handle was made and is not connected.
        let connected = unsafe { (new.ceph.rados.rados_connect)(new.handle) };
        let hint = match -connected {
            libc::EACCES | libc::EPERM => "; check user and its key (key-secret, or the keyring that conf names)",
            libc::ETIMEDOUT => "; see that its monitors can be reached",
            libc::ENOENT => "; check conf, and that its keyring can be read",
            _ => "",
        };
        check(connected, || ("connect to the cluster".to_owned(), hint))?;
        Ok(new)
    }

    fn set(&self, name: &str, value: &str) -> Result<(), RbdError> {
        let (key, setting) = (text(name), text(value));
        // SAFETY: the handle is ours, and both texts end with a zero.
        let set = unsafe { (self.ceph.rados.rados_conf_set)(self.handle, key.as_ptr(), setting.as_ptr()) };
        let hint = if set == -libc::ENOENT { "; this Ceph has no such setting" } else { "" };
        check(set, || (format!("set {name}"), hint)).map(drop)
    }

    /// What is set under a name; nothing if there is no such setting.
    pub(crate) fn setting(&self, name: &CStr) -> String {
        let mut value = [0; 4096];
        // SAFETY: the handle is ours, the name ends with a zero, and the buffer is as long as is said.
        let got =
            unsafe { (self.ceph.rados.rados_conf_get)(self.handle, name.as_ptr(), buffer(&mut value), value.len()) };
        if got >= 0 { from_buffer(&value) } else { String::new() }
    }

    /// A pool, by its name, as images in one of its namespaces see it.
    pub(crate) fn pool(self: &Arc<Self>, name: &str, namespace: &str) -> Result<Pool, RbdError> {
        let (ceph, pool, namespace) = (self.ceph, text(name), text(namespace));
        let mut handle = ptr::null_mut();
        // SAFETY: the cluster is connected, and the name ends with a zero.
        let made = unsafe { (ceph.rados.rados_ioctx_create)(self.handle, pool.as_ptr(), &raw mut handle) };
        let hint = if made == -libc::ENOENT { "; ceph osd pool ls lists those that there are" } else { "" };
        check(made, || (format!("open the pool '{name}'"), hint))?;
        // SAFETY: the pool's handle is new, and the name ends with a zero.
        unsafe { (ceph.rados.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        Ok(Pool { handle, cluster: Arc::clone(self) })
    }

    /// Waits until the cluster's newest map is known here: requests that are made from then on carry it, and an OSD
    /// serves none before it has the map as well.
    pub(crate) fn wait_for_latest_map(&self) -> Result<(), RbdError> {
        // SAFETY: the cluster is connected.
        let waited = unsafe { (self.ceph.rados.rados_wait_for_latest_osdmap)(self.handle) };
        check(waited, || ("get the cluster's newest map".to_owned(), "")).map(drop)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nobody has the handle any more. It is shut down whether or not it was connected.
        unsafe { (self.ceph.rados.rados_shutdown)(self.handle) };
    }
}

/// A pool that is open.
pub(crate) struct Pool {
    pub(crate) handle: Handle,
    pub(crate) cluster: Arc<Cluster>,
}

// SAFETY: librados locks by itself; a handle may be used by any threads.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: its image is closed, and nobody has the handle any more.
        unsafe { (self.cluster.ceph.rados.rados_ioctx_destroy)(self.handle) };
    }
}

/// Text as a function takes it.
pub(crate) fn text(text: &str) -> CString {
    // What an option holds has no zero; what has one names nothing.
    CString::new(text).unwrap_or_default()
}

/// What a function wrote to a buffer as text.
pub(crate) fn from_buffer(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

/// A buffer as a function takes it.
pub(crate) fn buffer(bytes: &mut [u8]) -> *mut c_char {
    bytes.as_mut_ptr().cast()
}

impl ClusterOptions {
    /// The files that a client would read to connect: its configuration, and the keyrings that this names. Starts no thread.
    ///
    /// # Errors
    ///
    /// The library cannot be had.
    pub fn files(&self) -> Result<Vec<String>, RbdError> {
        let trial = Cluster::new(self)?;
        let _ = trial.read_conf();
        let keyrings = trial.setting(c"keyring");
        let usual = ["/etc/ceph/ceph.conf".to_owned()];
        let conf = self.conf.clone().into_iter().chain(std::env::var("CEPH_CONF").ok());
        Ok(conf.chain(usual).chain(keyrings.split([',', ';']).map(|path| path.trim().to_owned())).collect())
    }
}
