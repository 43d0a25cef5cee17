//! Moves what direct I/O refuses as it is through memory of our own.

use std::ops::Range;

use egret_vring::memory::IoVec;
use rustix::io::Errno;

use super::part::{up_to_multiple, whole_blocks, within};
use super::transfer::{Way, transfer};
use crate::block_range_lock::BlockRangeLock;
use crate::buffers::{self, Aligned};
use crate::disk::Disk;

/// The most memory that a worker keeps for copies, in bytes; what is copied goes in parts of that.
pub(super) const SCRATCH: u64 = 1 << 20;

/// What a worker keeps from one part of a request to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    copy: Option<Aligned>,
    /// Bytes of the request that is run that are moved in one go.
    pub(super) step: u64,
    /// The pieces of a part, where that is not all of its request.
    pub(super) part: Vec<IoVec>,
    pub(super) rest: Vec<IoVec>,
}

impl Scratch {
    /// As much of `bytes` as goes through memory of ours in one go.
    pub(super) fn copied(&self, bytes: Range<u64>) -> Range<u64> {
        up_to_multiple(bytes, self.step.min(SCRATCH))
    }

    /// Aligned memory of at least `len` bytes (at most [`SCRATCH`]), with anything in it.
    fn copy(&mut self, disk: &Disk, len: u64) -> (&mut Aligned, &mut Vec<IoVec>) {
        debug_assert!(len <= SCRATCH);
        let len = len.next_power_of_two() as usize;
        let align = disk.alignment.memory.max(disk.alignment.offset).max(4096) as usize;
        if self.copy.as_ref().is_some_and(|copy| copy.len() < len || copy.align() < align) {
            self.copy = None;
        }
        (self.copy.get_or_insert_with(|| Aligned::zeroed(len, align)), &mut self.rest)
    }
}

/// Reads whole blocks to memory of ours and copies from there, to what is `at` bytes into `buffers`. The blocks are not
/// more than a worker's memory holds. Returns how many bytes were wanted.
pub(super) fn read_by_copy(
    disk: &Disk,
    buffers: &[IoVec],
    at: u64,
    wanted: Range<u64>,
    scratch: &mut Scratch,
) -> Result<u64, Errno> {
    let blocks = whole_blocks(disk, &wanted);
    let len = blocks.end - blocks.start;
    let (copy, rest) = scratch.copy(disk, len);
    let memory = &mut copy.bytes()[..len as usize];
    read_blocks(disk, blocks.start, memory, rest)?;
    buffers::scatter(buffers, at, &memory[within(&wanted, &blocks)]);
    Ok(wanted.end - wanted.start)
}

/// Copies to memory of ours, around which the blocks' old content is read first, and writes whole blocks from there.
/// `from` says how many bytes into which buffers the data begins; without it zeroes are written. The blocks are not more
/// than a worker's memory holds. Returns how many bytes were wanted.
pub(super) fn write_by_copy(
    disk: &Disk,
    way: Way,
    from: Option<(&[IoVec], u64)>,
    wanted: Range<u64>,
    scratch: &mut Scratch,
) -> Result<u64, Errno> {
    let blocks = whole_blocks(disk, &wanted);
    let block = disk.alignment.offset as usize;
    let len = blocks.end - blocks.start;
    let (copy, rest) = scratch.copy(disk, len);
    let memory = &mut copy.bytes()[..len as usize];
    let patch = || {
        if wanted.start > blocks.start {
            read_blocks(disk, blocks.start, &mut memory[..block], rest)?;
        }
        // The last block may be the first one, with both its ends kept.
        if wanted.end < blocks.end && (memory.len() > block || wanted.start == blocks.start) {
            let last = memory.len() - block;
            read_blocks(disk, blocks.end - block as u64, &mut memory[last..], rest)?;
        }
        let new = &mut memory[within(&wanted, &blocks)];
        match from {
            Some((buffers, at)) => buffers::gather(buffers, at, new),
            None => new.fill(0),
        }
        transfer(disk, way, blocks.start, &[piece(memory)], rest)
    };
    if blocks == wanted {
        BlockRangeLock::shared(&disk.block_range_lock, &blocks, patch)
    } else {
        BlockRangeLock::exclusive(&disk.block_range_lock, &blocks, patch)
    }?;
    Ok(wanted.end - wanted.start)
}

fn read_blocks(disk: &Disk, offset: u64, memory: &mut [u8], rest: &mut Vec<IoVec>) -> Result<(), Errno> {
    transfer(disk, Way::Read, offset, &[piece(memory)], rest)
}

fn piece(memory: &mut [u8]) -> IoVec {
    // SAFETY: memory of ours, borrowed mutably by each caller for as long as the piece is used.
    unsafe { IoVec::new(memory.as_mut_ptr(), memory.len()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use egret_event_loop::Nanos;

    use super::*;
    use crate::geometry::Alignment;
    use crate::tests::pattern;
    use crate::{Driver, Options};

    #[test]
    fn a_worker_s_memory_is_used_again_until_more_is_needed() {
        let driver = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
        let mut disk = Disk::open(&Options::new("null", driver)).unwrap();
        let mut scratch = Scratch::default();
        scratch.copy(&disk, 8192).0.bytes().fill(7);
        for (len, has, byte) in [(8192, 8192, 7), (512, 8192, 7), (8193, 16384, 0)] {
            let memory = scratch.copy(&disk, len).0.bytes();
            assert_eq!((memory.len(), memory[0]), (has, byte), "{len}");
        }
        // Another disk may want it elsewhere.
        disk.alignment.memory = 1 << 16;
        assert_eq!(scratch.copy(&disk, 512).0.align(), 1 << 16);
    }

    #[test]
    fn what_is_copied_is_what_was_wanted_and_what_is_around_it_stays() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let data = pattern(65536, 1);
        std::fs::write(image.path(), &data).unwrap();
        let driver = Driver::File { filename: image.path().to_owned() };
        let mut disk = Disk::open(&Options::new("disk0", driver)).unwrap();
        disk.alignment = Alignment { memory: 512, offset: 4096 };
        // What it holds is of the copies before.
        let mut scratch = Scratch::default();
        for (start, end) in
            [(4608, 5120), (4096, 5120), (4608, 8192), (4608, 12800), (4096, 12800), (4608, 16384), (4096, 16384)]
        {
            std::fs::write(image.path(), &data).unwrap();
            let mut memory = vec![0; end - start];
            let wanted = start as u64..end as u64;
            let moved = read_by_copy(&disk, &[piece(&mut memory)], 0, wanted.clone(), &mut scratch);
            assert_eq!(moved, Ok(wanted.end - wanted.start));
            assert!(memory == data[start..end], "{wanted:?}");
            let moved = write_by_copy(&disk, Way::Write { through: false }, None, wanted.clone(), &mut scratch);
            assert_eq!(moved, Ok(wanted.end - wanted.start));
            let mut expected = data.clone();
            expected[start..end].fill(0);
            assert!(std::fs::read(image.path()).unwrap() == expected, "{wanted:?}");
        }
    }

    #[test]
    fn of_blocks_that_are_copied_those_are_read_of_which_something_is_kept_and_no_others() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(65536).unwrap();
        let driver = Driver::File { filename: image.path().to_owned() };
        let mut disk = Disk::open(&Options::new("disk0", driver)).unwrap();
        disk.alignment = Alignment { memory: 512, offset: 4096 };
        // Behind the disk's back its descriptor becomes one that cannot be read.
        let writable = File::options().write(true).open(image.path()).unwrap();
        // SAFETY: replaces a descriptor that stays open; nobody else knows it.
        assert!(unsafe { libc::dup2(writable.as_raw_fd(), disk.fd()) } >= 0);
        for (wanted, is_whole) in [
            (4096..8192, true),
            (4096..16384, true),
            (4096..4608, false),
            (4608..8192, false),
            (4608..5120, false),
            (4096..12800, false),
            (4608..16384, false),
        ] {
            let written =
                write_by_copy(&disk, Way::Write { through: false }, None, wanted.clone(), &mut Scratch::default());
            let expected = if is_whole { Ok(wanted.end - wanted.start) } else { Err(Errno::BADF) };
            assert_eq!(written, expected, "{wanted:?}");
        }
    }
}
