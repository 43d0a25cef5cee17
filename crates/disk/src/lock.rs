//! Locks on images, as QEMU takes them, so that the two keep each other out.
//!
//! QEMU describes what a program does with an image by permissions, and what it lets others do by the permissions it
//! shares. Each permission has a byte in the image's lock space: a program holds a read lock on `PERMISSION + n` while
//! it uses permission `n`, and on `UNSHARED + n` while it does not let others use it. Nobody ever takes a write lock;
//! to find out whether another program stands in the way one asks whether a write lock would be possible. The locks
//! belong to the open file description, so two disks of one process exclude each other too.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

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

/// Takes the locks of a reader, or of a writer; a disk's guest lets others read, and nothing else.
pub(crate) fn lock(file: &File, path: &Path, read_only: bool, locking: Locking) -> Result<(), OpenCause> {
    if locking == Locking::Off {
        return Ok(());
    }
    let uses: &[Permission] = if read_only { &[CONSISTENT_READ] } else { &[CONSISTENT_READ, WRITE] };
    let unshared = [WRITE, RESIZE];
    // First show what we do, then look who is there: of two that come at once at least one sees the other.
    let shown = uses.iter().map(|(n, _)| PERMISSION + n).chain(unshared.iter().map(|(n, _)| UNSHARED + n));
    for byte in shown {
        if let Err(source) = take(file, byte) {
            if locking == Locking::On {
                return Err(OpenCause::LockingUnsupported { path: path.to_owned(), source });
            }
            tracing::warn!("'{}' cannot be locked ({source}): nothing keeps other programs from it", path.display());
            return Ok(());
        }
    }
    let clash = |lock, hint| Err(OpenCause::Locked { path: path.to_owned(), lock, hint });
    // A reader that meets a writer gains nothing by reading only; a writer that meets a reader does.
    for (n, name) in unshared {
        if taken_by_another(file, PERMISSION + n) {
            return clash(name, " or use locking=off");
        }
    }
    for &(n, name) in uses {
        if taken_by_another(file, UNSHARED + n) {
            return clash(name, if read_only { " or use locking=off" } else { ", or use read-only=on or locking=off" });
        }
    }
    Ok(())
}

/// Gives the locks back. They end with the last use of the file description too, but that may be a moment later than
/// its closing: the kernel's own users, io_uring's workers among them, let go of it in their own time.
pub(crate) fn unlock(file: &File) {
    let mut all = byte_lock(libc::F_UNLCK, 0);
    all.l_len = 0;
    // SAFETY: the descriptor is open and the argument is the structure that this command reads.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const all) };
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
