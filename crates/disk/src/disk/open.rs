//! How an image is opened: checked, read, locked, measured, and what is said where that fails.
//!
//! What may wait for a disk that hangs comes first, as an [`Image`] of its own. Whoever has no time for that leaves it to
//! somebody else, and what is opened in the end, when nobody wants it any more, has no locks.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

use egret_confine::{Use, refusal};
use egret_event_loop::Nanos;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::predecessor::Predecessor;
use super::{Able, Backing, Disk, Standing};
use crate::blkdebug::Blkdebug;
use crate::block_range_lock::BlockRangeLock;
use crate::error::{OpenCause, OpenError};
use crate::format;
use crate::geometry::{self, Alignment, Blocks, Limits, SECTOR};
use crate::lock::{self, Usage};
use crate::options::{Aio, DetectZeroes, Discard, Driver, Options};
use crate::remote::{RemoteDisk, Shape};
use crate::syncs::Syncs;
use crate::throttle::Throttle;

impl Disk {
    /// Opens the image, locks it unless that is for [`activate`](Self::activate), and finds out what it is like.
    ///
    /// # Errors
    ///
    /// One line that names the disk, what is wrong with it and what would be right.
    pub fn open(options: &Options) -> Result<Self, OpenError> {
        Self::of(options, Image::open(options, None)?)
    }

    /// As [`open`](Self::open), with the image that was opened as the same options say.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn of(options: &Options, image: Image) -> Result<Self, OpenError> {
        let usage = usage(options);
        let opened = Self::with_backing(options, image, |file, path| match options.allow_inactive {
            true => Ok(()),
            false => lock::lock(file, path, usage),
        });
        opened.map_err(|cause| OpenError { node_name: options.node_name.clone(), cause })
    }

    /// Opens the same image once more, as `options` say, to take this one's place: with the size that this one has, and
    /// with locks of its own before this one's are given back, unless they are for
    /// [`share_locks_of`](Self::share_locks_of). No request should be in flight on both.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); and another image has taken the place of the one that is open, or one on another machine has
    /// become smaller, or has larger blocks.
    pub fn reopen(&self, options: &Options) -> Result<Self, OpenError> {
        self.reopen_as(options, Image::open(options, None)?)
    }

    /// As [`reopen`](Self::reopen), with the image that was opened as the same options say: with another open file
    /// description than this disk's.
    ///
    /// # Errors
    ///
    /// As [`reopen`](Self::reopen).
    pub fn reopen_as(&self, options: &Options, image: Image) -> Result<Self, OpenError> {
        let opened = Self::with_backing(options, image, |file, path| {
            let Some(old) = self.file() else { return lock::lock(file, path, usage(options)) };
            let same = geometry::is_same(old, file);
            match same.map_err(|source| OpenCause::Io { what: "identify", path: path.to_owned(), source })? {
                true if options.allow_inactive => Ok(()),
                true => lock::take_over(old, usage(&self.options), file, path, usage(options)),
                false => Err(OpenCause::Replaced(path.to_owned())),
            }
        });
        let opened = opened.and_then(|new| new.can_follow(self)?.with_size(self.size()));
        opened.map_err(|cause| OpenError { node_name: options.node_name.clone(), cause })
    }

    /// The same, if it takes what guests of `old` may ask for. Of files and devices that is known: they are the same ones.
    fn can_follow(self, old: &Self) -> Result<Self, OpenCause> {
        let Driver::Remote(remote) = &self.options.driver else { return Ok(self) };
        let why = if self.size() < old.size() {
            format!("it has {} bytes now, and had {}", self.size(), old.size())
        } else if self.blocks.logical > old.blocks.logical {
            format!("it has blocks of {} bytes now, and had blocks of {}", self.blocks.logical, old.blocks.logical)
        } else {
            return Ok(self);
        };
        let why =
            format!("{why}: it is another disk to its guests; let it be as it was, or delete it and add it again");
        Err(OpenCause::Remote { name: remote.name().to_owned(), why })
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
                self.set_size(size);
                Ok(self)
            }
        }
    }

    fn with_backing(
        options: &Options,
        image: Image,
        take_locks: impl FnOnce(&File, &Path) -> Result<(), OpenCause>,
    ) -> Result<Self, OpenCause> {
        let (path, device, Image(opened)) = match &options.driver {
            &Driver::Null { size, latency, read_zeroes } => return Self::null(options, size, latency, read_zeroes),
            Driver::File { filename } => (filename, false, image),
            Driver::HostDevice { filename } => (filename, true, image),
            Driver::Remote(remote) => return Self::remote(options, remote),
        };
        let (file, alignment) = opened.unwrap_or_else(|| unreachable!("it was opened as the same options say"));
        let failed = |what| move |source| OpenCause::Io { what, path: path.clone(), source };
        if device && !options.read_only && geometry::is_read_only_device(&file) {
            return Err(OpenCause::ReadOnly(path.clone()));
        }
        take_locks(&file, path)?;
        let measure = || {
            let blocks = geometry::blocks(&file, device).map_err(failed("find the block size of"))?;
            let size = geometry::size(&file, device).map_err(failed("find the size of"))?;
            let block = alignment.offset.max(SECTOR);
            if size == 0 {
                let path = path.clone();
                return Err(if device { OpenCause::NoMedium(path) } else { OpenCause::Empty(path) });
            }
            if !size.is_multiple_of(block.into()) {
                return Err(OpenCause::OddSize { path: path.clone(), size, block });
            }
            let limits = geometry::limits(&file, device, blocks).map_err(failed("find the limits of"))?;
            Ok((size, blocks, limits))
        };
        // One that was handed over others have as well, and its locks with it.
        let (size, blocks, limits) = measure().inspect_err(|_| lock::unlock(&file))?;
        let backing = if device { Backing::Device(file) } else { Backing::File(file) };
        Ok(Self::new(options, backing, size, blocks, alignment, limits))
    }

    fn null(options: &Options, size: u64, latency: Nanos, read_zeroes: bool) -> Result<Self, OpenCause> {
        if size == 0 || !size.is_multiple_of(SECTOR.into()) {
            return Err(OpenCause::NullSize(size));
        }
        let blocks = Blocks { logical: SECTOR, physical: SECTOR };
        let limits = Limits::unlimited(SECTOR);
        Ok(Self::new(options, Backing::Null { latency, read_zeroes }, size, blocks, Alignment::NONE, limits))
    }

    fn remote(options: &Options, remote: &RemoteDisk) -> Result<Self, OpenCause> {
        let Shape { size, blocks, limits } = remote.open()?;
        // What is too little for a block cannot be used.
        let size = size - size % u64::from(blocks.logical);
        if size == 0 {
            let why = format!("it has no whole block of {} bytes; give it a size", blocks.logical);
            return Err(OpenCause::Remote { name: remote.name().to_owned(), why });
        }
        if !options.allow_inactive {
            remote.lock()?;
        }
        Ok(Self::new(options, Backing::Remote(remote.clone()), size, blocks, Alignment::NONE, limits))
    }

    fn new(
        options: &Options,
        backing: Backing,
        size: u64,
        blocks: Blocks,
        alignment: Alignment,
        limits: Limits,
    ) -> Self {
        Self {
            options: options.clone(),
            backing,
            size: AtomicU64::new(size),
            blocks,
            alignment,
            limits,
            block_range_lock: (alignment.offset > SECTOR).then(BlockRangeLock::default),
            able: Able::everything(),
            throttle: Throttle::default(),
            failures: OnceLock::new(),
            blkdebug: Blkdebug::new(&options.blkdebug).map(Box::new),
            syncs: Syncs::default(),
            predecessor: Predecessor::default(),
            users: Mutex::default(),
            standing: Arc::new(Standing { size: size.into(), is_active: (!options.allow_inactive).into() }),
        }
    }
}

/// The image of a disk, open, and read once where direct I/O is to be tried: all of opening a disk that may wait for a disk
/// that hangs.
#[derive(Debug)]
pub struct Image(
    /// Nothing, of a disk that has neither a file nor a device.
    Option<(File, Alignment)>,
);

impl Image {
    /// Opens the image of a disk, unlocked. If somebody has handed over a descriptor of it, that is what is open: the path is
    /// then a name in messages, and leads nowhere.
    ///
    /// The open file description is to be this disk's alone for as long as it is open: locks and O_DIRECT belong to it.
    /// It must be open for writing if the disk is. What it was opened with otherwise, O_APPEND say, is taken back, but for O_SYNC
    /// and O_DSYNC, which cannot be.
    ///
    /// # Errors
    ///
    /// As [`Disk::open`].
    pub fn open(options: &Options, handed: Option<File>) -> Result<Self, OpenError> {
        Self::open_file(options, handed).map_err(|cause| OpenError { node_name: options.node_name.clone(), cause })
    }

    fn open_file(options: &Options, handed: Option<File>) -> Result<Self, OpenCause> {
        if options.detect_zeroes == DetectZeroes::Unmap && options.discard != Discard::Unmap {
            return Err(OpenCause::DetectZeroesNeedsUnmap);
        }
        let (path, device) = match &options.driver {
            Driver::Null { .. } | Driver::Remote(_) => return Ok(Self(None)),
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
        let alignment = if options.direct { direct_alignment(&file, path, device)? } else { Alignment::NONE };
        Ok(Self(Some((file, alignment))))
    }
}

pub(super) fn usage(options: &Options) -> Usage {
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
///
/// What makes each write stable Linux does not take back. Each would be told of what others have lost, and nobody but a sync
/// is to be: see [`Syncs`].
fn set_flags(file: &File, path: &Path, options: &Options) -> Result<(), OpenCause> {
    // What rustix calls so is O_SYNC, which has O_DSYNC in it.
    if fcntl_getfl(file).map_err(|e| explain(e.into(), path, options.read_only))?.intersects(OFlags::DSYNC) {
        return Err(OpenCause::Synchronous(path.to_owned()));
    }
    let flags = if options.direct { OFlags::DIRECT } else { OFlags::empty() };
    fcntl_setfl(file, flags).map_err(|e| match e {
        Errno::INVAL if options.direct => OpenCause::DirectUnsupported(path.to_owned()),
        e => explain(e.into(), path, options.read_only),
    })
}

fn explain(e: io::Error, path: &Path, read_only: bool) -> OpenCause {
    let owned = path.to_owned();
    match e.raw_os_error() {
        Some(libc::ENOENT) if format::is_place_of_devices(path) => OpenCause::NoDevice(owned),
        Some(libc::ENOENT) => OpenCause::Missing(owned),
        Some(libc::EISDIR) => OpenCause::Directory(owned),
        Some(libc::EROFS) => OpenCause::ReadOnly(owned),
        Some(libc::EBUSY | libc::ETXTBSY) => OpenCause::Busy(owned),
        Some(libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM) => OpenCause::NoMedium(owned),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::LoopDevice;

    #[test]
    fn a_disk_has_the_size_that_it_was_said_to_have_if_that_is_a_number_of_its_blocks() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        let options = Options::new("disk0", Driver::File { filename: image.path().to_owned() });
        for (block, size, is_right) in
            [(1, 1536, true), (1, 1000, false), (512, 1536, true), (4096, 1536, false), (4096, 8192, true)]
        {
            let mut disk = Disk::open(&options).unwrap();
            disk.alignment.offset = block;
            let sized = disk.with_size(size);
            assert_eq!(sized.as_ref().ok().map(Disk::size), is_right.then_some(size), "{size} of {block}");
            assert!(is_right || matches!(sized, Err(OpenCause::OddSize { .. })));
        }
    }

    #[test]
    fn why_an_image_does_not_open_is_said_by_what_helps_against_it() {
        let said = |errno, read_only| {
            let path = Path::new("/nowhere/disk.img");
            explain(io::Error::from_raw_os_error(errno), path, read_only).to_string()
        };
        for (errno, what) in [
            (libc::ENOENT, "does not exist; check the name, or create an image with: truncate"),
            (libc::EISDIR, "is a directory"),
            (libc::EROFS, "is read-only; use read-only=on"),
            (libc::EBUSY, "is busy"),
            (libc::ETXTBSY, "is busy"),
            (libc::ENXIO, "has no medium"),
            (libc::ENODEV, "has no medium"),
            (libc::ENOMEDIUM, "has no medium"),
            (libc::EIO, "cannot open '/nowhere/disk.img'"),
        ] {
            assert!(said(errno, false).contains(what), "{errno}: {}", said(errno, false));
        }
        let in_dev = explain(Errno::NOENT.into(), Path::new("/dev/vg/lv"), false).to_string();
        assert_eq!(
            in_dev,
            "'/dev/vg/lv' does not exist; check the name, and whether the device is there and activated"
        );
        assert!(!said(libc::ENXIO, false).contains("truncate"), "{}", said(libc::ENXIO, false));
        for errno in [libc::EACCES, libc::EPERM] {
            let writing = "for reading and writing; change its owner or mode, or use read-only=on";
            assert!(said(errno, false).ends_with(writing), "{}", said(errno, false));
            assert!(said(errno, true).ends_with("for reading; change its owner or mode"), "{}", said(errno, true));
        }
    }

    #[test]
    fn a_device_that_is_write_protected_is_said_to_be_that_to_who_wants_to_write() {
        let Some(device) = LoopDevice::with(1 << 20, 512, &["--read-only"]) else { return };
        let said = |read_only| explain(Errno::ACCESS.into(), &device.path, read_only).to_string();
        assert!(said(false).contains("is read-only; use read-only=on"), "{}", said(false));
        assert!(said(true).contains("no permission to open"), "{}", said(true));
    }
}
