//! Locks on images, as QEMU takes them, so that the two keep each other out.
//!
//! QEMU describes what a program does with an image by permissions, and what it lets others do by the permissions it
//! shares. Each permission has a byte in the image's lock space: a program holds a read lock on `PERMISSION + n` while
//! it uses permission `n`, and on `UNSHARED + n` while it does not let others use it. A write lock is never taken;
//! to find out whether another program stands in the way one asks whether a write lock would be possible. The locks
//! belong to the open file description, so two disks of one process exclude each other too. Programs that know nothing of
//! these bytes take a write lock of the whole file, and stand in everybody's way.
//!
//! They outlive a process that was killed by as long as the kernel is still busy with what it had asked of the image:
//! each request of an io_uring holds on to the description. This is as it should be. A write that is still on its way
//! must not come after what the next daemon writes, nor a read into memory that a guest has had back from the next
//! daemon. So whoever comes next waits a while for locks, and who has them knows that nothing of the kind is left.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::OpenCause;
use crate::options::Locking;

/// Lock bytes of permissions in use.
const PERMISSION: i64 = 100;
/// Lock bytes of permissions that are not shared.
const UNSHARED: i64 = 200;

/// A permission by QEMU's number, with the word that its messages use.
type Permission = (i64, &'static str);
const CONSISTENT_READ: Permission = (0, "consistent read");
const WRITE: Permission = (1, "write");
const RESIZE: Permission = (3, "resize");

/// What a disk's guest never lets others do.
const UNSHARED_BY_US: [Permission; 2] = [WRITE, RESIZE];

/// What is done with an image, as far as its locks tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) read_only: bool,
    pub(crate) locking: Locking,
}

impl Usage {
    fn permissions(self) -> &'static [Permission] {
        if self.read_only { &[CONSISTENT_READ] } else { &[CONSISTENT_READ, WRITE] }
    }

    /// The bytes that show it to others.
    fn bytes(self) -> Vec<i64> {
        if self.locking == Locking::Off {
            return Vec::new();
        }
        let used = self.permissions().iter().map(|(n, _)| PERMISSION + n);
        used.chain(UNSHARED_BY_US.iter().map(|(n, _)| UNSHARED + n)).collect()
    }
}

/// How long an image may be locked before that is an error. Long enough for what a dead daemon's disk has to end, and for
/// a supervisor that counts how often the next one fails.
pub const LOCK_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 3000 });
/// How often one looks meanwhile.
pub const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Takes the locks of a reader, or of a writer; a disk's guest lets others read, and nothing else. Waits for them, but not
/// for ever.
pub(crate) fn lock(file: &File, path: &Path, usage: Usage) -> Result<(), OpenCause> {
    let patience_ends = Instant::now() + LOCK_PATIENCE;
    loop {
        match try_lock(file, path, usage) {
            Err(OpenCause::Locked { .. }) if Instant::now() < patience_ends => thread::sleep(LOOK_AGAIN),
            locked => return locked,
        }
    }
}

/// As [`lock`], without waiting.
pub(crate) fn try_lock(file: &File, path: &Path, usage: Usage) -> Result<(), OpenCause> {
    // Lock first, look for other locks then: of two programs that come at once at least one sees the other.
    let locked = show(file, path, usage, &usage.bytes());
    let locked = locked.and_then(|can_lock| if can_lock { look(file, path, usage) } else { Ok(()) });
    if locked.is_err() {
        unlock(file);
    }
    locked
}

/// Takes the locks for an image that is open already, as `old`, and may come to be used otherwise. Nothing that either
/// of the two shows is ever hidden meanwhile.
pub(crate) fn take_over(old: &File, was: Usage, file: &File, path: &Path, usage: Usage) -> Result<(), OpenCause> {
    let mut more = usage.bytes();
    more.retain(|byte| !was.bytes().contains(byte));
    // What is new is shown on the old description, because one's own locks are not in the way of looking.
    let taken = show(old, path, usage, &more).and_then(|can_lock| {
        if can_lock {
            look(old, path, usage)?;
            show(file, path, usage, &usage.bytes())?;
        }
        Ok(())
    });
    more.into_iter().for_each(|byte| release(old, byte, 1));
    taken
}

/// Shows what is done with an image; false where there are no locks, and that is to do.
fn show(file: &File, path: &Path, usage: Usage, bytes: &[i64]) -> Result<bool, OpenCause> {
    for &byte in bytes {
        match take(file, byte) {
            Ok(()) => {}
            // There are locks, then, and somebody has taken a write lock. POSIX would have EACCES say so, too: Linux says that
            // where a security module lets nobody lock the file.
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {
                let path = path.to_owned();
                return Err(OpenCause::Locked { path, lock: "exclusive", hint: " or use locking=off" });
            }
            Err(source) if usage.locking == Locking::On => {
                return Err(OpenCause::LockingUnsupported { path: path.to_owned(), source });
            }
            Err(source) => {
                tracing::warn!(
                    "'{}' cannot be locked ({source}): nothing keeps other programs from it",
                    path.display()
                );
                return Ok(false);
            }
        }
    }
    Ok(usage.locking != Locking::Off)
}

/// Looks for locks of others that do not go with ours.
fn look(file: &File, path: &Path, usage: Usage) -> Result<(), OpenCause> {
    let clash = |lock, hint| Err(OpenCause::Locked { path: path.to_owned(), lock, hint });
    // A reader that meets a writer gains nothing by reading only; a writer that meets a reader does.
    for (n, name) in UNSHARED_BY_US {
        if taken_by_another(file, PERMISSION + n) {
            return clash(name, " or use locking=off");
        }
    }
    let hint = if usage.read_only { " or use locking=off" } else { ", or use read-only=on or locking=off" };
    for &(n, name) in usage.permissions() {
        if taken_by_another(file, UNSHARED + n) {
            return clash(name, hint);
        }
    }
    Ok(())
}

/// Gives the locks back. They end with the last use of the file description too, but that may be a moment later than
/// its closing: the kernel's own users, io_uring's workers among them, let go of it in their own time, and so does a child between
/// its fork and its exec.
pub(crate) fn unlock(file: &File) {
    release(file, 0, 0);
}

/// Gives `count` bytes back from `first` on; 0 stands for all that there are.
fn release(file: &File, first: i64, count: i64) {
    let mut bytes = byte_lock(libc::F_UNLCK, first);
    bytes.l_len = count as _;
    // SAFETY: the descriptor is open and the argument is the structure that this command reads.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const bytes) };
}

fn byte_lock(kind: libc::c_int, byte: i64) -> libc::flock {
    // SAFETY: plain integers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = byte as _;
    lock.l_len = 1;
    lock
}

fn take(file: &File, byte: i64) -> io::Result<()> {
    let lock = byte_lock(libc::F_RDLCK, byte);
    // SAFETY: the descriptor is open and the argument is the structure that this command reads.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Whether somebody else holds the byte; where a lock could be taken it can be asked for.
fn taken_by_another(file: &File, byte: i64) -> bool {
    let mut lock = byte_lock(libc::F_WRLCK, byte);
    // SAFETY: the descriptor is open and the argument is the structure that this command reads and writes.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    asked != -1 && libc::c_int::from(lock.l_type) != libc::F_UNLCK
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refuse::refuse;

    const fn usage(read_only: bool, locking: Locking) -> Usage {
        Usage { read_only, locking }
    }

    /// The bytes that somebody else finds locked.
    fn shown(by: &File) -> Vec<i64> {
        (0..300).filter(|byte| taken_by_another(by, *byte)).collect()
    }

    // The numbers are those of QEMU's block/file-posix.c and include/block/block-common.h.

    #[test]
    fn what_a_disk_shows_is_what_qemu_looks_for_and_is_gone_when_it_is_given_back() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let [ours, others] = [(); 2].map(|()| image.reopen().unwrap());
        for (read_only, locking, bytes) in [
            (false, Locking::Auto, &[100, 101, 201, 203][..]),
            (true, Locking::On, &[100, 201, 203]),
            (false, Locking::Off, &[]),
        ] {
            lock(&ours, image.path(), usage(read_only, locking)).unwrap();
            assert_eq!((shown(&others), shown(&ours)), (bytes.to_vec(), vec![]), "one's own are in nobody's way");
            unlock(&ours);
            assert!(shown(&others).is_empty());
        }
    }

    #[test]
    fn who_writes_resizes_or_does_not_share_what_is_done_keeps_others_out_and_nothing_else_does() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let [ours, others] = [(); 2].map(|()| image.reopen().unwrap());
        for byte in 90..220 {
            take(&others, byte).unwrap();
            let locked = |read_only, locking| {
                let tried = try_lock(&ours, image.path(), usage(read_only, locking));
                assert_eq!(tried.is_ok() && locking != Locking::Off, !shown(&others).is_empty());
                unlock(&ours);
                tried.is_ok()
            };
            let (in_all_ways, in_a_writers) = ([101, 103, 200].contains(&byte), byte == 201);
            assert_eq!(locked(true, Locking::On), !in_all_ways, "{byte}");
            assert_eq!(locked(false, Locking::On), !in_all_ways && !in_a_writers, "{byte}");
            assert!(locked(false, Locking::Off));
            release(&others, byte, 1);
        }
    }

    #[test]
    fn a_write_lock_of_whoever_knows_no_others_keeps_everybody_out_and_is_waited_for() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let [ours, before, others] = [(); 3].map(|()| image.reopen().unwrap());
        let reader = usage(true, Locking::Auto);
        try_lock(&before, image.path(), reader).unwrap();
        let set = |kind| {
            let byte = byte_lock(kind, 101);
            // SAFETY: the descriptor is open and the argument is the structure that this command reads.
            assert_eq!(unsafe { libc::fcntl(others.as_raw_fd(), libc::F_OFD_SETLK, &raw const byte) }, 0);
        };
        set(libc::F_WRLCK);
        for locking in [Locking::Auto, Locking::On] {
            let writer = usage(false, locking);
            for tried in [
                try_lock(&ours, image.path(), writer),
                lock(&ours, image.path(), writer),
                take_over(&before, reader, &ours, image.path(), writer),
            ] {
                assert!(matches!(tried, Err(OpenCause::Locked { lock: "exclusive", .. })), "{tried:?}");
                assert_eq!(shown(&others), [100, 201, 203], "what there was before is there");
            }
        }
        set(libc::F_UNLCK);
        unlock(&before);
        try_lock(&ours, image.path(), usage(false, Locking::On)).unwrap();
    }

    #[test]
    fn where_there_are_no_locks_only_who_insists_on_them_is_refused() {
        let image = tempfile::NamedTempFile::new().unwrap();
        // A lock to read by is not to be had of a file that is not open for that.
        let ours = File::options().write(true).open(image.path()).unwrap();
        let tried = |locking| try_lock(&ours, image.path(), usage(false, locking));
        assert!(matches!(tried(Locking::On), Err(OpenCause::LockingUnsupported { .. })));
        tried(Locking::Auto).unwrap();
        tried(Locking::Off).unwrap();
        // Nor of any where a security module says so.
        let ours = image.reopen().unwrap();
        refuse(libc::SYS_fcntl, libc::EACCES);
        let tried = |locking| try_lock(&ours, image.path(), usage(false, locking));
        assert!(matches!(tried(Locking::On), Err(OpenCause::LockingUnsupported { .. })));
        tried(Locking::Auto).unwrap();
    }

    #[test]
    fn an_image_that_is_locked_is_waited_for_before_it_is_refused() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let [ours, others] = [(); 2].map(|()| image.reopen().unwrap());
        take(&others, UNSHARED + WRITE.0).unwrap();
        let begun = Instant::now();
        let locked = lock(&ours, image.path(), usage(false, Locking::Auto));
        assert!(matches!(locked, Err(OpenCause::Locked { .. })));
        assert!(begun.elapsed() >= LOCK_PATIENCE);
        assert!(shown(&others).is_empty(), "nothing of it stays");
    }
}
