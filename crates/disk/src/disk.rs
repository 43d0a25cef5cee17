//! An open image.

#![forbid(unsafe_code)]

use std::fmt;
use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use egret_confine::{Use, refusal};
use egret_event_loop::Nanos;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;

use crate::error::{OpenCause, OpenError};
use crate::failure::{Failure, Failures};
use crate::gate::Gate;
use crate::geometry::{self, Alignment, Blocks, Limits, SECTOR};
use crate::lock::{self, Usage};
use crate::options::{Aio, DetectZeroes, Discard, Driver, Options};
use crate::request::Op;
use crate::throttle::{Direction, Throttle, ThrottleGroup};

/// An open image: what it is, and what was learnt about it.
///
/// Every I/O thread that serves it shares it, and runs its requests on an [`EngineSet`](crate::EngineSet) of its own.
pub struct Disk {
    pub(crate) options: Options,
    pub(crate) backing: Backing,
    size: AtomicU64,
    blocks: Blocks,
    pub(crate) alignment: Alignment,
    limits: Limits,
    /// Present where a sector is less than what direct I/O moves.
    pub(crate) gate: Option<Gate>,
    pub(crate) able: Able,
    pub(crate) throttle: Throttle,
    pub(crate) failures: Failures,
    /// Why the page cache has lost writes, if it has.
    lost: OnceLock<Errno>,
}

/// Where the data is.
pub(crate) enum Backing {
    File(File),
    Device(File),
    Null { latency: Nanos, read_zeroes: bool },
}

/// What is believed possible until the kernel says otherwise.
pub(crate) struct Able {
    pub(crate) punch_hole: AtomicBool,
    pub(crate) zero_range: AtomicBool,
    pub(crate) discard: AtomicBool,
    /// Writes that are on stable storage when they complete (`RWF_DSYNC`).
    pub(crate) write_through: AtomicBool,
}

impl Able {
    fn everything() -> Self {
        let yes = || AtomicBool::new(true);
        Self { punch_hole: yes(), zero_range: yes(), discard: yes(), write_through: yes() }
    }
}

impl Disk {
    /// Opens the image, locks it and finds out what it is like.
    ///
    /// # Errors
    ///
    /// One line that names the disk, what is wrong with it and what would be right.
    pub fn open(options: &Options) -> Result<Self, OpenError> {
        Self::open_handed(options, None)
    }

    /// As [`open`](Self::open), with a descriptor of the image if somebody has handed one over: the path is then a name in
    /// messages, and leads nowhere.
    ///
    /// The open file description is to be this disk's alone for as long as it is open: locks and O_DIRECT belong to it.
    /// It must be open for writing if the disk is. What it was opened with otherwise, O_APPEND say, is taken back.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_handed(options: &Options, handed: Option<File>) -> Result<Self, OpenError> {
        let usage = usage(options);
        let opened = Self::open_backing(options, handed, |file, path| lock::lock(file, path, usage));
        opened.map_err(|cause| OpenError { node_name: options.node_name.clone(), cause })
    }

    /// Opens the same image once more, as `options` say, to take this one's place: with the size that this one has, and
    /// with locks of its own before this one's are given back. No request should be in flight on both.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); and another image has taken the place of the one that is open.
    pub fn reopen(&self, options: &Options) -> Result<Self, OpenError> {
        self.reopen_handed(options, None)
    }

    /// As [`reopen`](Self::reopen), with a descriptor that somebody has handed over, as with
    /// [`open_handed`](Self::open_handed): of another open file description than this disk's.
    ///
    /// # Errors
    ///
    /// As [`reopen`](Self::reopen).
    pub fn reopen_handed(&self, options: &Options, handed: Option<File>) -> Result<Self, OpenError> {
        let opened = Self::open_backing(options, handed, |file, path| {
            let Some(old) = self.file() else { return lock::lock(file, path, usage(options)) };
            let same = geometry::is_same(old, file);
            match same.map_err(|source| OpenCause::Io { what: "identify", path: path.to_owned(), source })? {
                true => lock::take_over(old, usage(&self.options), file, path, usage(options)),
                false => Err(OpenCause::Replaced(path.to_owned())),
            }
        });
        let opened = opened.and_then(|new| new.with_size(self.size()));
        opened.map_err(|cause| OpenError { node_name: options.node_name.clone(), cause })
    }

    /// The same, as long as it was said to be before.
    fn with_size(self, size: u64) -> Result<Self, OpenCause> {
        let block = self.alignment.offset.max(SECTOR);
        match &self.options.driver {
            Driver::File { filename: path } | Driver::HostDevice { filename: path }
                if !size.is_multiple_of(block.into()) =>
            {
                Err(OpenCause::OddSize { path: path.clone(), size, block })
            }
            _ => {
                self.size.store(size, Ordering::Relaxed);
                Ok(self)
            }
        }
    }

    fn open_backing(
        options: &Options,
        handed: Option<File>,
        take_locks: impl FnOnce(&File, &Path) -> Result<(), OpenCause>,
    ) -> Result<Self, OpenCause> {
        if options.detect_zeroes == DetectZeroes::Unmap && options.discard != Discard::Unmap {
            return Err(OpenCause::DetectZeroesNeedsUnmap);
        }
        let (path, device) = match &options.driver {
            &Driver::Null { size, latency, read_zeroes } => return Self::null(options, size, latency, read_zeroes),
            Driver::File { filename } => (filename, false),
            Driver::HostDevice { filename } => (filename, true),
        };
        if options.aio == Aio::Native && !options.direct {
            return Err(OpenCause::NativeNeedsDirect);
        }
        let file = match handed {
            None => {
                // Before it is opened: opening a pipe would wait for its other end.
                let found = std::fs::metadata(path).map_err(|e| explain(e, path, true))?;
                check_kind(found.file_type(), path, device)?;
                open_file(path, options)?
            }
            Some(file) => {
                let found = file.metadata().map_err(|e| explain(e, path, true))?;
                check_kind(found.file_type(), path, device)?;
                set_flags(&file, path, options)?;
                file
            }
        };
        let failed = |what| move |source| OpenCause::Io { what, path: path.clone(), source };
        if device && !options.read_only && geometry::is_read_only_device(&file) {
            return Err(OpenCause::ReadOnly(path.clone()));
        }
        take_locks(&file, path)?;
        let blocks = geometry::blocks(&file, device).map_err(failed("find the block size of"))?;
        let alignment = if options.direct { direct_alignment(&file, path, device)? } else { Alignment::NONE };
        let size = geometry::size(&file, device).map_err(failed("find the size of"))?;
        let block = alignment.offset.max(SECTOR);
        if size == 0 {
            return Err(OpenCause::Empty(path.clone()));
        }
        if !size.is_multiple_of(block.into()) {
            return Err(OpenCause::OddSize { path: path.clone(), size, block });
        }
        let limits = geometry::limits(&file, device, blocks).map_err(failed("find the limits of"))?;
        Ok(Self {
            options: options.clone(),
            backing: if device { Backing::Device(file) } else { Backing::File(file) },
            size: AtomicU64::new(size),
            blocks,
            alignment,
            limits,
            gate: (alignment.offset > SECTOR).then(Gate::default),
            able: Able::everything(),
            throttle: Throttle::default(),
            failures: Failures::default(),
            lost: OnceLock::new(),
        })
    }

    fn null(options: &Options, size: u64, latency: Nanos, read_zeroes: bool) -> Result<Self, OpenCause> {
        if size == 0 || !size.is_multiple_of(SECTOR.into()) {
            return Err(OpenCause::NullSize(size));
        }
        Ok(Self {
            options: options.clone(),
            backing: Backing::Null { latency, read_zeroes },
            size: AtomicU64::new(size),
            blocks: Blocks { logical: SECTOR, physical: SECTOR },
            alignment: Alignment::NONE,
            limits: Limits::unlimited(SECTOR),
            gate: None,
            able: Able::everything(),
            throttle: Throttle::default(),
            failures: Failures::default(),
            lost: OnceLock::new(),
        })
    }

    /// Bytes; a multiple of 512, and with direct I/O of [`offset_alignment`](Self::offset_alignment).
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Asks again for the size, which somebody may have changed, and returns it in bytes. Requests are checked against
    /// it from then on.
    ///
    /// # Errors
    ///
    /// What the kernel says; the size stays what it was.
    pub fn refresh_size(&self) -> io::Result<u64> {
        let size = match &self.backing {
            Backing::File(file) => geometry::size(file, false)?,
            Backing::Device(file) => geometry::size(file, true)?,
            Backing::Null { .. } => return Ok(self.size()),
        };
        // What is too little for a block cannot be used.
        let size = size - size % u64::from(self.alignment.offset.max(SECTOR));
        self.size.store(size, Ordering::Relaxed);
        Ok(size)
    }

    /// Makes a regular file at least `bytes` long, and asks for the size as [`refresh_size`](Self::refresh_size) does;
    /// a device has the size that it has.
    ///
    /// # Errors
    ///
    /// What the kernel says; the size stays what it was.
    pub fn grow(&self, bytes: u64) -> io::Result<u64> {
        if let Backing::File(file) = &self.backing
            && file.metadata()?.len() < bytes
        {
            file.set_len(bytes)?;
        }
        self.refresh_size()
    }

    /// Makes everything written so far stable; blocks until it is.
    ///
    /// # Errors
    ///
    /// What `fdatasync` says, or said before where that [lost writes](Self::has_lost_writes).
    pub fn flush(&self) -> io::Result<()> {
        if self.options.read_only || self.options.no_flush { Ok(()) } else { self.sync().map_err(io::Error::from) }
    }

    /// Has the kernel make stable what was written.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        let Some(file) = self.file() else { return Ok(()) };
        if let Some(errno) = self.lost.get() {
            return Err(*errno);
        }
        let synced = rustix::fs::fdatasync(file);
        if let Err(errno) = synced
            && errno != Errno::INTR
        {
            self.lose_writes(errno);
        }
        synced
    }

    /// Notes that a request of a guest's failed.
    #[cold]
    pub(crate) fn note_failure(&self, op: Op, errno: Errno) {
        // It may have been told of what other writes had lost.
        if (op, errno) == (Op::Write { fua: true }, Errno::IO) {
            self.lose_writes(errno);
        }
        self.failures.note(op, errno);
    }

    /// Linux marks pages clean that it could not write, and says so to each file once: the next flush would succeed, and
    /// nobody would ever write them again. So no flush succeeds from here on. QEMU does the same (block/file-posix.c,
    /// handle_aiocb_flush). Direct I/O leaves nothing in the page cache.
    fn lose_writes(&self, errno: Errno) {
        if !self.options.direct {
            let _ = self.lost.set(errno);
        }
    }

    /// Whether the page cache has lost writes, because a flush failed: no flush succeeds until the disk is
    /// [reopened](Self::reopen).
    pub fn has_lost_writes(&self) -> bool {
        self.lost.get().is_some()
    }

    /// What limits it, together with other disks perhaps.
    pub fn throttle_group(&self) -> Option<Arc<ThrottleGroup>> {
        self.throttle.group()
    }

    /// Limits what guests do with it from here on, or no longer does. Requests that wait under other limits go as soon
    /// as the loops that run the disk [restart them](crate::EngineSet::restart_throttled).
    pub fn set_throttle_group(&self, group: Option<&Arc<ThrottleGroup>>) {
        self.throttle.set_group(group);
    }

    /// Has an eventfd told when a request fails in its engine, from here on; the first one to be named is.
    pub fn watch_failures(&self, bell: &Arc<OwnedFd>) {
        self.failures.watch(bell);
    }

    /// The newest failure since this was last asked.
    pub fn take_failure(&self) -> Option<Failure> {
        self.failures.take()
    }

    /// The name that messages call it.
    pub fn node_name(&self) -> &str {
        &self.options.node_name
    }

    /// The options it was opened with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Bytes of the smallest block that a guest should be offered: a device's own, and 512 for a file. Smaller ones
    /// work too, by reading and writing back whole blocks.
    pub fn logical_block_size(&self) -> u32 {
        self.blocks.logical
    }

    /// Bytes of the block that a guest should align to; at least the logical block size.
    pub fn physical_block_size(&self) -> u32 {
        self.blocks.physical
    }

    /// Whether everything that changes the image is refused.
    pub fn read_only(&self) -> bool {
        self.options.read_only
    }

    /// Whether a discard gives storage back; where it does not it still succeeds.
    pub fn supports_discard(&self) -> bool {
        self.options.discard == Discard::Unmap && self.limits.max_discard > 0
    }

    /// The most that one discard should ask for, in bytes; zero where nothing can be discarded.
    pub fn max_discard_bytes(&self) -> u64 {
        self.limits.max_discard
    }

    /// Bytes that a discard should be a multiple of to be of use.
    pub fn discard_granularity(&self) -> u32 {
        self.limits.discard_granularity
    }

    /// The most that one write of zeroes should ask for, in bytes.
    pub fn max_write_zeroes_bytes(&self) -> u64 {
        self.limits.max_write_zeroes
    }

    /// Bytes that the addresses of buffers should be multiples of, to be moved without a copy.
    pub fn memory_alignment(&self) -> u32 {
        self.alignment.memory
    }

    /// Bytes that offsets and the lengths of buffers should be multiples of, to be moved without a copy.
    pub fn offset_alignment(&self) -> u32 {
        self.alignment.offset
    }

    /// The direction in which a request counts; `None` if it is not limited. As with QEMU's `throttle` driver: zeroes and
    /// discards keep a disk as busy as writes do, where they do anything; flushes are left alone.
    pub(crate) fn throttled(&self, op: Op) -> Option<Direction> {
        match op {
            Op::Read => Some(Direction::Read),
            Op::Write { .. } | Op::WriteZeroes { .. } => Some(Direction::Write),
            Op::Discard => self.discards().then_some(Direction::Write),
            Op::Flush => None,
        }
    }

    /// Whether a discard does anything at all.
    pub(crate) fn discards(&self) -> bool {
        self.options.discard == Discard::Unmap && self.able.discard.load(Ordering::Relaxed)
    }

    /// Whether some of its requests are for workers.
    pub(crate) fn needs_workers(&self) -> bool {
        !matches!(self.backing, Backing::Null { read_zeroes: false, .. })
    }

    /// The image; `None` for a null disk.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.backing {
            Backing::File(file) | Backing::Device(file) => Some(file),
            Backing::Null { .. } => None,
        }
    }

    /// The image's descriptor; -1 for a null disk, which no engine gives to the kernel.
    pub(crate) fn fd(&self) -> RawFd {
        self.file().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some(file) = self.file() {
            lock::unlock(file);
        }
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("options", &self.options)
            .field("size", &self.size())
            .field("blocks", &self.blocks)
            .field("alignment", &self.alignment)
            .finish_non_exhaustive()
    }
}

fn usage(options: &Options) -> Usage {
    Usage { read_only: options.read_only, locking: options.locking }
}

/// Refuses what is not what the driver serves.
fn check_kind(kind: FileType, path: &Path, device: bool) -> Result<(), OpenCause> {
    let path = || path.to_owned();
    match (device, kind) {
        (_, kind) if kind.is_dir() => Err(OpenCause::Directory(path())),
        (false, kind) if kind.is_file() => Ok(()),
        (true, kind) if kind.is_block_device() => Ok(()),
        (false, kind) if kind.is_block_device() => Err(OpenCause::IsDevice(path())),
        (true, kind) if kind.is_file() => Err(OpenCause::IsFile(path())),
        _ => Err(OpenCause::NotADisk(path())),
    }
}

fn open_file(path: &Path, options: &Options) -> Result<File, OpenCause> {
    let flags = if options.direct { libc::O_DIRECT } else { 0 };
    let opened = OpenOptions::new().read(true).write(!options.read_only).custom_flags(flags).open(path);
    opened.map_err(|e| match e.raw_os_error() {
        Some(libc::EINVAL) if options.direct => OpenCause::DirectUnsupported(path.to_owned()),
        _ => explain(e, path, options.read_only),
    })
}

/// Makes of a descriptor what [`open_file`] would have opened: a write at an offset must not go to the end of the file.
fn set_flags(file: &File, path: &Path, options: &Options) -> Result<(), OpenCause> {
    let flags = if options.direct { OFlags::DIRECT } else { OFlags::empty() };
    fcntl_setfl(file, flags).map_err(|e| match e {
        Errno::INVAL if options.direct => OpenCause::DirectUnsupported(path.to_owned()),
        e => explain(e.into(), path, options.read_only),
    })
}

fn explain(e: io::Error, path: &Path, read_only: bool) -> OpenCause {
    let owned = path.to_owned();
    match e.raw_os_error() {
        Some(libc::ENOENT) => OpenCause::Missing(owned),
        Some(libc::EISDIR) => OpenCause::Directory(owned),
        Some(libc::EROFS) => OpenCause::ReadOnly(owned),
        Some(libc::EBUSY | libc::ETXTBSY) => OpenCause::Busy(owned),
        Some(libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM) => OpenCause::Empty(owned),
        Some(libc::EACCES | libc::EPERM) => {
            if let Some(why) = refusal(path, Use::Image) {
                return OpenCause::Confined(owned, why);
            }
            // A device that is write-protected says EACCES, like one that is somebody else's.
            let protected =
                || OpenOptions::new().read(true).open(path).is_ok_and(|f| geometry::is_read_only_device(&f));
            if !read_only && protected() {
                return OpenCause::ReadOnly(owned);
            }
            OpenCause::Permission {
                path: owned,
                access: if read_only { "reading" } else { "reading and writing" },
                hint: if read_only { "" } else { ", or use read-only=on" },
            }
        }
        _ => OpenCause::Io { what: "open", path: owned, source: e },
    }
}

fn direct_alignment(file: &File, path: &Path, device: bool) -> Result<Alignment, OpenCause> {
    let unsupported = || OpenCause::DirectUnsupported(path.to_owned());
    let alignment = geometry::alignment(file, device)
        .map_err(|source| OpenCause::Io { what: "find the alignment of", path: path.to_owned(), source })?
        .ok_or_else(unsupported)?;
    match geometry::reads_directly(file, alignment) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Err(unsupported()),
        // A disk whose first block is bad may still be served.
        _ => Ok(alignment),
    }
}
