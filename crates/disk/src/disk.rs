//! An open image: what it is, and what was learnt about it.

#![forbid(unsafe_code)]

mod active;
mod open;
mod predecessor;

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use egret_event_loop::{EventNotifier, Nanos, clock};
use rustix::io::Errno;

use crate::blkdebug::Blkdebug;
use crate::block_range_lock::BlockRangeLock;
use crate::engine_kind::EngineKind;
use crate::failure::{Failure, FailureLog};
use crate::geometry::{self, Alignment, Blocks, Limits, SECTOR};
use crate::lock;
use crate::options::{Aio, Discard, Options};
use crate::remote::RemoteDisk;
use crate::request::Op;
use crate::syncs::{FlushError, Syncs};
use crate::throttle::{Debt, Direction, Throttle, ThrottleGroup};
pub use predecessor::Loss;
use predecessor::Predecessor;

pub use active::{Active, LockedForNow, Standing};
pub use open::Image;

/// An open image: what it is, and what was learnt about it.
///
/// Every I/O thread that serves it shares it, and runs its requests on an [`EngineSet`](crate::EngineSet) of its own.
pub struct Disk {
    pub(crate) options: Options,
    pub(crate) backing: Backing,
    size: AtomicU64,
    pub(crate) blocks: Blocks,
    pub(crate) alignment: Alignment,
    limits: Limits,
    /// Present where a sector is less than what direct I/O moves.
    pub(crate) block_range_lock: Option<BlockRangeLock>,
    pub(crate) able: Able,
    pub(crate) throttle: Throttle,
    failures: OnceLock<Arc<FailureLog>>,
    /// Errors that are injected on purpose.
    pub(crate) blkdebug: Option<Box<Blkdebug>>,
    /// Those of what [may be cached](Self::may_be_cached), and of a remote disk; and what was lost, wherever requests go.
    syncs: Syncs,
    /// The one whose place it has taken.
    predecessor: Predecessor,
    /// Those who have it active.
    users: Mutex<active::Users>,
    standing: Arc<Standing>,
}

/// Where the data is.
pub(crate) enum Backing {
    File(File),
    Device(File),
    Null { latency: Nanos, read_zeroes: bool },
    Remote(RemoteDisk),
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

/// A part of a disk that is alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its length in bytes.
    pub len: u64,
    /// Nothing is allocated for it, and it reads as zeroes.
    pub is_hole: bool,
}

impl Disk {
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
            Backing::Remote(remote) => self.ask_size(remote)?,
        };
        Ok(self.adopt_size(size))
    }

    /// Another size, if somebody else has changed it and its driver was told; requests are checked against it from then
    /// on. Does not wait.
    pub fn take_new_size(&self) -> Option<u64> {
        let Backing::Remote(remote) = &self.backing else { return None };
        // What a driver is told may be another change than one of the size.
        let before = self.size();
        remote.take_new_size().map(|size| self.adopt_size(size)).filter(|size| *size != before)
    }

    fn adopt_size(&self, size: u64) -> u64 {
        // What is too little for a block cannot be used.
        let block = if let Backing::Remote(_) = self.backing { self.blocks.logical } else { SECTOR };
        let size = size - size % u64::from(self.alignment.offset.max(block));
        self.set_size(size);
        size
    }

    fn set_size(&self, bytes: u64) {
        self.size.store(bytes, Ordering::Relaxed);
        self.standing.size.store(bytes, Ordering::Relaxed);
    }

    /// Makes a regular file or a remote disk at least `bytes` long, and asks for the size as [`refresh_size`](Self::refresh_size)
    /// does; a device has the size that it has.
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
        // Somebody else may have made it longer than is known here.
        if let Backing::Remote(remote) = &self.backing
            && self.ask_size(remote)? < bytes
        {
            remote.resize(bytes)?;
        }
        self.refresh_size()
    }

    /// Asks for the size of a remote disk, which may have to be flushed before.
    fn ask_size(&self, remote: &RemoteDisk) -> io::Result<u64> {
        loop {
            match remote.ask_size() {
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy => self.sync_unasked()?,
                asked => return asked,
            }
        }
    }

    /// Whether it is a device that has less than `bytes` now, whatever it had: one that was taken away has none.
    pub(crate) fn has_shrunk_below(&self, bytes: u64) -> bool {
        let Backing::Device(file) = &self.backing else { return false };
        geometry::size(file, true).map_or(true, |size| size < bytes)
    }

    /// Makes everything written so far stable; blocks until it is. For others than guests: what is found lost is told to the
    /// next of them that flushes.
    ///
    /// # Errors
    ///
    /// What `fdatasync` or a server says, or said before where that [lost writes](Self::has_lost_writes).
    pub fn flush(&self) -> io::Result<()> {
        let synced = if self.ignores_flushes() { self.settle() } else { self.sync_unasked() };
        synced.map_err(io::Error::from)
    }

    pub(crate) fn ignores_flushes(&self) -> bool {
        self.options.read_only || self.options.no_flush
    }

    /// Has the kernel make stable what was written, through the disk before as well, for a guest, which is told how that went.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        self.told(self.sync_unasked())
    }

    /// The same where no guest has asked, and none is told.
    fn sync_unasked(&self) -> Result<(), Errno> {
        self.settle()?;
        if matches!(self.backing, Backing::Remote(_)) || self.may_be_cached() {
            // Before anybody can see that there is a loss.
            return self.syncs.run(|| self.sync_once().inspect_err(|_| self.keep_untold()));
        }
        self.sync_once().map_err(|e| e.errno)
    }

    /// The same, whatever was lost before.
    fn sync_once(&self) -> Result<(), FlushError> {
        match &self.backing {
            Backing::File(file) | Backing::Device(file) => {
                // Who was interrupted was not told yet.
                let failed = |errno| FlushError { errno, is_loss: errno != Errno::INTR };
                rustix::fs::fdatasync(file).map_err(failed)
            }
            Backing::Null { .. } => Ok(()),
            Backing::Remote(remote) => remote.flush(),
        }
    }

    /// Notes a failure in its [log](Self::log_failures), if it has one.
    #[cold]
    pub fn note_failure(&self, failure: Failure) {
        if let Some(log) = self.failures.get() {
            log.note(failure);
        }
    }

    /// Whether writes are lost, because a flush failed where the page cache may have had them, or a server, or that of a disk in whose place this
    /// one is: no flush succeeds until the disk is [reopened](Self::reopen).
    pub fn has_lost_writes(&self) -> bool {
        self.syncs.lost().is_some()
    }

    /// Whether somebody else has taken a remote disk's lock away: what fails has not been done, and waits until the disk is
    /// [reopened](Self::reopen). Asked about requests that failed.
    pub fn is_lost(&self) -> bool {
        matches!(&self.backing, Backing::Remote(remote) if remote.is_lost())
    }

    /// What limits it, together with other disks perhaps.
    pub fn throttle_group(&self) -> Option<Arc<ThrottleGroup>> {
        self.throttle.group()
    }

    /// What drains have let go past its limits, since it is in its [group](Self::throttle_group). Who may have it drained as
    /// often as they like, as clients may, are not to begin anew again and again before that has been made up for.
    pub fn limits_debt(&self) -> Debt {
        self.throttle.debt(clock::now())
    }

    /// Limits what guests do with it from here on, or no longer does. Requests that wait under other limits go as soon
    /// as the loops that run the disk [restart them](crate::EngineSet::restart_throttled).
    pub fn set_throttle_group(&self, group: Option<&Arc<ThrottleGroup>>) {
        self.throttle.set_group(group);
    }

    /// Has a notifier set when somebody else has [changed its size](Self::take_new_size), from here on, and at once if that
    /// may have happened before.
    pub fn watch_size(&self, bell: &EventNotifier) {
        if let Backing::Remote(remote) = &self.backing {
            remote.watch(bell);
        }
    }

    /// Has failures [noted](Self::note_failure) there from here on; the first log to be named is its log.
    pub fn log_failures(&self, log: Arc<FailureLog>) {
        let _ = self.failures.set(log);
    }

    /// The name that messages call it.
    pub fn node_name(&self) -> &str {
        &self.options.node_name
    }

    /// Whether io_uring runs its requests, if it can.
    pub fn runs_on_io_uring(&self) -> bool {
        EngineKind::of(self) == EngineKind::Aio(Aio::IoUring)
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

    /// Bytes that long requests should best be multiples of; zero where there is nothing to say.
    pub fn optimal_io_size(&self) -> u32 {
        self.limits.optimal_io
    }

    /// Bytes that offsets and the lengths of buffers should be multiples of, to be moved without a copy.
    pub fn offset_alignment(&self) -> u32 {
        self.alignment.offset
    }

    /// What is allocated of a range, from its beginning: at most so many extents, of which there is one at least, and which
    /// may end before the range does. A file system may take its time to say, and a disk that does not say is allocated.
    pub fn extents(&self, range: Range<u64>, most: usize) -> Vec<Extent> {
        let whole = |is_hole| vec![Extent { len: range.end - range.start, is_hole }];
        match &self.backing {
            Backing::File(file) => geometry::extents(file, range.clone(), most).unwrap_or_else(|_| whole(false)),
            Backing::Null { read_zeroes: true, .. } => whole(true),
            Backing::Null { .. } | Backing::Device(_) | Backing::Remote(_) => whole(false),
        }
    }

    /// Whether zeroes that may, or may not, be unmapped are believed to take less time than data does. A device that is not to
    /// unmap them may have the kernel write them out, and nobody learns of it.
    pub fn zeroes_fast(&self, unmap: bool) -> bool {
        let unmaps = unmap && self.options.discard == Discard::Unmap && self.able.punch_hole.load(Ordering::Relaxed);
        match &self.backing {
            Backing::File(_) => unmaps || self.able.zero_range.load(Ordering::Relaxed),
            Backing::Device(_) => unmaps,
            Backing::Null { .. } => true,
            Backing::Remote(_) => false,
        }
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

    /// Gives back what locks it has.
    fn unlock(&self) {
        match &self.backing {
            Backing::File(file) | Backing::Device(file) => lock::unlock(file),
            Backing::Remote(remote) => remote.unlock(),
            Backing::Null { .. } => {}
        }
    }

    /// Whether a discard does anything at all.
    pub(crate) fn discards(&self) -> bool {
        self.options.discard == Discard::Unmap && self.able.discard.load(Ordering::Relaxed)
    }

    /// Whether some of its requests are for workers.
    pub(crate) fn needs_workers(&self) -> bool {
        match self.backing {
            Backing::File(_) | Backing::Device(_) => true,
            Backing::Null { read_zeroes, .. } => read_zeroes,
            Backing::Remote(_) => self.is_owed(),
        }
    }

    /// Whether what was written may be in the page cache, to be lost there. Of a file that is so with direct I/O, too: its file
    /// system may take any write through the cache, and says so to nobody. btrfs does wherever there are checksums, XFS with
    /// what is less than a shared block, ext4 where data goes through the journal, and each of them where somebody else's
    /// reading holds a page at that moment.
    pub(crate) fn may_be_cached(&self) -> bool {
        match self.backing {
            Backing::File(_) => true,
            Backing::Device(_) => !self.options.direct,
            Backing::Null { .. } | Backing::Remote(_) => false,
        }
    }

    /// The image; `None` for a disk without one.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.backing {
            Backing::File(file) | Backing::Device(file) => Some(file),
            Backing::Null { .. } | Backing::Remote(_) => None,
        }
    }

    /// The image's descriptor; -1 for a disk without one, which no engine gives to the kernel.
    pub(crate) fn fd(&self) -> RawFd {
        self.file().map_or(-1, AsRawFd::as_raw_fd)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.unlock();
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
