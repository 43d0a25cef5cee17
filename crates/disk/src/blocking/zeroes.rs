//! Discards, and zeroes that are asked for or, where they cannot be, written.

#![forbid(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::bounce::{Scratch, write_by_copy};
use super::part::{first_part, up_to_multiple};
use super::transfer::{Way, is_unsupported};
use crate::block_range_lock::BlockRangeLock;
use crate::disk::{Backing, Disk};
use crate::geometry::{self, SECTOR};

/// Bytes that the kernel is asked to discard or to zero in one go. Mostly that is a note in a table, and a trim of
/// gigabytes should not be cut into crumbs; but a device that cannot do it has the kernel write the zeroes, and that
/// should be over in a fraction of a second.
const EXTENT: u64 = 64 << 20;

/// Discards the beginning of `bytes`, and returns how many it was. It is a hint: what cannot be discarded is left as it is.
pub(super) fn discard(disk: &Disk, bytes: Range<u64>) -> Result<u64, Errno> {
    let part = first_part(bytes, EXTENT);
    BlockRangeLock::shared(&disk.block_range_lock, &part, || discard_blocks(disk, &part))?;
    Ok(part.end - part.start)
}

fn discard_blocks(disk: &Disk, bytes: &Range<u64>) -> Result<(), Errno> {
    let (able, block) = (&disk.able.discard, whole_block(disk));
    let blocks = bytes.start.div_ceil(block) * block..bytes.end / block * block;
    if !able.load(Ordering::Relaxed) || blocks.is_empty() {
        return Ok(());
    }
    let result = match &disk.backing {
        Backing::File(file) => fallocate(file, FallocateFlags::PUNCH_HOLE, &blocks),
        Backing::Device(file) => geometry::discard_device(file, blocks.start, blocks.end - blocks.start)
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO)),
        // No worker runs a remote disk's jobs.
        Backing::Null { .. } | Backing::Remote(_) => Ok(()),
    };
    match result {
        Err(e) if is_unsupported(e) => {
            able.store(false, Ordering::Relaxed);
            Ok(())
        }
        // See `zero_blocks`.
        Err(Errno::BUSY) => Ok(()),
        other => other,
    }
}

/// Zeroes the beginning of `bytes`, and returns how many it was.
pub(super) fn write_zeroes(disk: &Disk, bytes: Range<u64>, unmap: bool, scratch: &mut Scratch) -> Result<u64, Errno> {
    // What sticks out of blocks is written.
    let block = whole_block(disk);
    let aligned = bytes.start.is_multiple_of(block);
    let mut whole = first_part(bytes.clone(), EXTENT);
    whole.end -= whole.end % block;
    if aligned && !whole.is_empty() && zero_blocks(disk, &whole, unmap)? {
        return Ok(whole.end - whole.start);
    }
    let written = if aligned { scratch.copied(bytes) } else { up_to_multiple(bytes, block) };
    write_by_copy(disk, Way::Write { through: false }, None, written, scratch)
}

/// What the kernel is asked to discard or to zero is made of these, in bytes. A device has none that are smaller. A part of a
/// file system's would be zeroed in the page cache, where direct I/O is to leave as little as it can: what cannot be written from
/// there is lost. Where the file system does not say what its blocks are (XFS with `largeio` says how
/// wide its stripes are), they are as large as most are.
fn whole_block(disk: &Disk) -> u64 {
    let block = match &disk.backing {
        Backing::Device(_) => disk.logical_block_size(),
        Backing::File(_) if disk.options.direct && disk.physical_block_size() == SECTOR => 4096,
        Backing::File(_) if disk.options.direct => disk.physical_block_size(),
        _ => SECTOR,
    };
    block.into()
}

/// Zeroes by asking the kernel to; false if it cannot.
fn zero_blocks(disk: &Disk, bytes: &Range<u64>, unmap: bool) -> Result<bool, Errno> {
    let Some(file) = disk.file() else { return Ok(true) };
    let try_one = |able: &AtomicBool, flags| {
        if !able.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match BlockRangeLock::shared(&disk.block_range_lock, bytes, || fallocate(file, flags, bytes)) {
            Ok(()) => Ok(true),
            Err(e) if is_unsupported(e) => {
                able.store(false, Ordering::Relaxed);
                Ok(false)
            }
            // Some file systems refuse some ranges only, and Linux those of a device of which the page cache has something to
            // write, as long as somebody else has the device for himself (a volume group or an array of the host's, `O_EXCL`).
            Err(Errno::INVAL | Errno::BUSY) => Ok(false),
            Err(e) => Err(e),
        }
    };
    let zeroed = (unmap && try_one(&disk.able.punch_hole, FallocateFlags::PUNCH_HOLE)?)
        || try_one(&disk.able.zero_range, FallocateFlags::ZERO_RANGE)?;
    // Of a device that has become smaller Linux zeroes what is left, and says that all went well.
    if zeroed && disk.has_shrunk_below(bytes.end) { Err(Errno::IO) } else { Ok(zeroed) }
}

fn fallocate(file: &File, flags: FallocateFlags, bytes: &Range<u64>) -> Result<(), Errno> {
    rustix::fs::fallocate(file, flags | FallocateFlags::KEEP_SIZE, bytes.start, bytes.end - bytes.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Image;

    #[test]
    fn blocks_are_a_file_systems_past_the_page_cache_a_devices_own_and_sectors_elsewhere() {
        let image = Image::new(1 << 20);
        let mut disk = Disk::open(&image.options()).unwrap();
        for (direct, physical, block) in
            [(false, 512, 512), (false, 4096, 512), (true, 512, 4096), (true, 4096, 4096), (true, 16384, 16384)]
        {
            (disk.options.direct, disk.blocks.physical) = (direct, physical);
            assert_eq!(whole_block(&disk), block, "{direct} {physical}");
        }
        disk.become_a_device();
        disk.blocks.logical = 2048;
        assert_eq!(whole_block(&disk), 2048);
    }

    #[test]
    fn a_discard_that_the_kernel_has_no_way_for_succeeds_and_is_asked_for_no_more() {
        let image = Image::new(1 << 20);
        let mut disk = Disk::open(&image.options()).unwrap();
        // A file does not know what is asked of devices.
        disk.become_a_device();
        assert_eq!(discard(&disk, 0..4096), Ok(4096));
        assert!(!disk.able.discard.load(Ordering::Relaxed));
    }
}
