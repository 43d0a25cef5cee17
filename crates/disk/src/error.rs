//! Why a disk did not open, or an engine did not start.

#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;

use egret_event_loop::aio::AioError;
use egret_event_loop::ring::RingError;

/// Why a disk could not be opened: one line that names the disk, what is wrong and what would be right.
#[derive(Debug, thiserror::Error)]
#[error("blockdev '{node_name}': {cause}")]
pub struct OpenError {
    /// The disk that was asked for.
    pub node_name: String,
    /// What is wrong with it.
    pub cause: OpenCause,
}

impl OpenError {
    /// Whether somebody else has the image locked.
    pub const fn is_locked(&self) -> bool {
        matches!(self.cause, OpenCause::Locked { .. } | OpenCause::RemoteLocked { .. })
    }
}

/// What stands in the way of opening a disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenCause {
    /// No such file.
    #[error("'{0}' does not exist; check the name, or create an image with: truncate -s 10G '{0}'")]
    Missing(PathBuf),
    /// No such device.
    #[error("'{0}' does not exist; check the name, and whether the device is there and activated")]
    NoDevice(PathBuf),
    /// A directory where an image should be.
    #[error("'{0}' is a directory; name the image file in it")]
    Directory(PathBuf),
    /// `driver=file` with a block device.
    #[error("'{0}' is a block device, not a regular file; use driver=host_device")]
    IsDevice(PathBuf),
    /// `driver=host_device` with a regular file.
    #[error("'{0}' is a regular file, not a block device; use driver=file")]
    IsFile(PathBuf),
    /// A socket, a pipe, a character device.
    #[error("'{0}' is neither a regular file nor a block device")]
    NotADisk(PathBuf),
    /// No permission.
    #[error("no permission to open '{path}' for {access}; change its owner or mode{hint}")]
    Permission {
        /// The image.
        path: PathBuf,
        /// Reading, or reading and writing.
        access: &'static str,
        /// What else would help.
        hint: &'static str,
    },
    /// Outside of what the sandbox leaves.
    #[error("cannot open '{0}': {1}")]
    Confined(PathBuf, String),
    /// A read-only medium.
    #[error("'{0}' is read-only; use read-only=on")]
    ReadOnly(PathBuf),
    /// In use by a kernel subsystem (mounted, part of a RAID, ...), or a running program.
    #[error("'{0}' is busy: mounted, or in use by another program")]
    Busy(PathBuf),
    /// Locked by another process (or by another disk of this one).
    #[error(
        "'{path}' is locked: another process, or another blockdev of this one, holds its {lock} lock; stop it{hint}"
    )]
    Locked {
        /// The image.
        path: PathBuf,
        /// Which of QEMU's locks.
        lock: &'static str,
        /// What else would help.
        hint: &'static str,
    },
    /// `locking=on` where there are no locks.
    #[error("'{path}' cannot be locked ({source}); use locking=auto or locking=off")]
    LockingUnsupported {
        /// The image.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file system refuses `O_DIRECT`.
    #[error("the file system of '{0}' does not support direct I/O; use cache.direct=off")]
    DirectUnsupported(PathBuf),
    /// A descriptor that was handed over with `O_SYNC` or `O_DSYNC`.
    #[error(
        "the descriptor of '{0}' was opened with O_SYNC or O_DSYNC, which cannot be taken back; open it without, and use \
         writethrough=on of its export where each write is to be stable"
    )]
    Synchronous(PathBuf),
    /// `aio=native` without `O_DIRECT`.
    #[error(
        "aio=native needs cache.direct=on (without it io_submit blocks); set it, or use aio=io_uring or aio=threads"
    )]
    NativeNeedsDirect,
    /// `detect-zeroes=unmap` without `discard=unmap`.
    #[error("detect-zeroes=unmap needs discard=unmap; set it, or use detect-zeroes=on")]
    DetectZeroesNeedsUnmap,
    /// Another file bears the name of the one that is open.
    #[error("'{0}' is not the file that is open: another has taken its place")]
    Replaced(PathBuf),
    /// Nothing in it.
    #[error("'{0}' is empty; give it a size, e.g. with: truncate -s 10G '{0}'")]
    Empty(PathBuf),
    /// A device with nothing in it.
    #[error("'{0}' has no medium, or nothing is attached to it")]
    NoMedium(PathBuf),
    /// What a remote disk's driver says.
    #[error("cannot open '{name}': {why}")]
    Remote {
        /// The disk's [name](crate::Remote::name).
        name: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A remote disk that another client of its other side has locked.
    #[error("cannot open '{name}': {why}")]
    RemoteLocked {
        /// The disk's [name](crate::Remote::name).
        name: String,
        /// Who has, and what would help.
        why: String,
    },
    /// A size that no whole number of blocks makes.
    #[error(
        "'{path}' has {size} bytes, not a multiple of its block size {block}; if it is a raw image, round it up with: truncate -s %{block} '{path}'"
    )]
    OddSize {
        /// The image.
        path: PathBuf,
        /// Bytes.
        size: u64,
        /// Bytes.
        block: u32,
    },
    /// A null disk of an impossible size.
    #[error("size must be a positive multiple of 512, got {0}")]
    NullSize(u64),
    /// Anything else.
    #[error("cannot {what} '{path}': {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// The image.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Why an engine could not be started.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// `aio=io_uring`.
    #[error("aio=io_uring: {0}")]
    IoUring(#[from] RingError),
    /// `aio=native`.
    #[error("aio=native: {0}; or use aio=io_uring or aio=threads")]
    Native(#[from] AioError),
    /// No event descriptor.
    #[error("eventfd: {0}; raise the limit of open files (ulimit -n)")]
    Event(#[source] io::Error),
    /// What a remote disk's driver says.
    #[error("{0}")]
    Remote(String),
}
