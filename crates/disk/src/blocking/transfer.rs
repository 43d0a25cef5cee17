//! Moves whole blocks between a disk and memory by a blocking system call.

use egret_vring::memory::IoVec;
use rustix::io::Errno;

use crate::buffers;
use crate::disk::Disk;

/// As much as one system call takes (`UIO_MAXIOV`).
pub(crate) const MAX_IOVECS: usize = 1024;

/// Whether direct I/O takes these buffers at this offset as they are; anything fits the page cache.
pub(crate) fn fits(disk: &Disk, offset: u64, buffers: &[IoVec]) -> bool {
    let block = disk.alignment.offset as usize - 1;
    let memory = disk.alignment.memory as usize - 1;
    // Both are powers of two: a bit that is set below them anywhere is an odd address or an odd length.
    let (odd_len, odd_base) = buffers
        .iter()
        .fold((offset as usize, 0), |(lens, bases), piece| (lens | piece.len(), bases | piece.base() as usize));
    odd_len & block == 0 && odd_base & memory == 0
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Read,
    Write { through: bool },
}

/// Moves all of the buffers' bytes, continuing what the kernel does by halves.
pub(super) fn transfer(
    disk: &Disk,
    way: Way,
    offset: u64,
    buffers: &[IoVec],
    rest: &mut Vec<IoVec>,
) -> Result<(), Errno> {
    let fd = disk.fd();
    let total: u64 = buffers.iter().map(|piece| piece.len() as u64).sum();
    let mut moved = 0;
    let mut left = buffers;
    while moved < total {
        let count = left.len().min(MAX_IOVECS) as libc::c_int;
        let iovecs = left.as_ptr().cast::<libc::iovec>();
        let at = (offset + moved) as libc::off_t;
        // SAFETY: `IoVec` is a transparent iovec, each of memory that stays mapped until the request completes, which
        // is after this call.
        let result = unsafe {
            match way {
                Way::Read => libc::preadv(fd, iovecs, count, at),
                Way::Write { through: false } => libc::pwritev(fd, iovecs, count, at),
                Way::Write { through: true } => libc::pwritev2(fd, iovecs, count, at, libc::RWF_DSYNC),
            }
        };
        let now = match result {
            -1 => match last_error() {
                Errno::INTR => continue,
                e => return Err(e),
            },
            now => now as u64,
        };
        moved += now;
        // Direct I/O stops in the middle of a block only where the image ends.
        let ended = now == 0 || !now.is_multiple_of(disk.alignment.offset.into());
        if ended && moved < total {
            return Err(cut_off(way == Way::Read));
        }
        if moved < total {
            buffers::cut(buffers, moved, u64::MAX, rest);
            left = rest;
        }
    }
    Ok(())
}

/// Why no more was moved of a request that the disk should have had. A disk that was taken away ends at its beginning, and
/// zeroes there would be data that nobody wrote.
pub(crate) const fn cut_off(is_read: bool) -> Errno {
    if is_read { Errno::IO } else { Errno::NOSPC }
}

/// Fills buffers with what is in the page cache, as far as that goes, and returns how many bytes it was. The one call
/// here that does not wait for the storage.
///
/// # Errors
///
/// `EAGAIN` if not even the first byte is there; `EOPNOTSUPP` if the file system cannot read without waiting; whatever
/// else the kernel says, `EFAULT` for memory that its owner has taken away among it.
pub(crate) fn read_cached(disk: &Disk, offset: u64, buffers: &[IoVec]) -> Result<u64, Errno> {
    let (iovecs, count) = (buffers.as_ptr().cast::<libc::iovec>(), buffers.len() as libc::c_int);
    // SAFETY: as in `transfer`.
    match unsafe { libc::preadv2(disk.fd(), iovecs, count, offset as libc::off_t, libc::RWF_NOWAIT) } {
        -1 => Err(last_error()),
        moved => Ok(moved as u64),
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Whether an error says that a thing cannot be done here, rather than that it failed.
pub(crate) fn is_unsupported(e: Errno) -> bool {
    matches!(e, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY)
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut;

    use super::*;
    use crate::geometry::Alignment;
    use crate::{Driver, Options};

    #[test]
    fn buffers_fit_if_their_place_and_each_length_are_whole_blocks_and_each_address_is_where_memory_has_to_be() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(4096).unwrap();
        let driver = Driver::File { filename: image.path().to_owned() };
        let mut disk = Disk::open(&Options::new("disk0", driver)).unwrap();
        let at = |base: usize, len: usize| {
            // SAFETY: nobody touches what is there.
            unsafe { IoVec::new(without_provenance_mut(base), len) }
        };
        for (offset, pieces, is_right) in [
            (0, vec![at(0x8000, 4096)], true),
            (4096, vec![at(0x8200, 8192), at(0x1_0000, 4096)], true),
            (512, vec![at(0x8000, 4096)], false),
            (512, vec![at(0x8000, 512), at(0x1_0000, 3072)], false),
            (0, vec![at(0x8000, 512), at(0x1_0000, 3584)], false),
            (0, vec![at(0x8000, 4096), at(0x1_0000, 512)], false),
            (0, vec![at(0x8100, 4096)], false),
            (0, vec![at(0x8000, 4096), at(0x1_0001, 4096)], false),
            (0, vec![at(0x8001, 4096), at(0x1_0000, 4096)], false),
        ] {
            disk.alignment = Alignment { memory: 512, offset: 4096 };
            assert_eq!(fits(&disk, offset, &pieces), is_right, "{offset}");
            disk.alignment = Alignment::NONE;
            assert!(fits(&disk, offset, &pieces), "anything fits the page cache");
        }
    }
}
