//! The parts in which a request is run: which bytes are next, and where their memory is.

#![forbid(unsafe_code)]

use std::ops::Range;

use egret_vring::memory::IoVec;

use crate::buffers;
use crate::disk::Disk;

/// Bytes that are moved in one go, by a worker or inside an engine's submission: more than Linux puts into one request
/// (1280 KiB), and little enough for others to wait for.
pub(crate) const PART: u64 = 2 << 20;

/// The same for the parts of what is larger, where several disks share the workers: a worker that copies for one
/// of them soon gives its core to the others.
pub(crate) const SHARED_PART: u64 = 256 << 10;

/// All of `bytes` if they are not more than `most`, or else up to the next multiple of that, where blocks meet.
pub(super) fn first_part(bytes: Range<u64>, most: u64) -> Range<u64> {
    if bytes.end - bytes.start <= most { bytes } else { up_to_multiple(bytes, most) }
}

/// The beginning of `bytes`, up to a multiple of `of`: blocks that have a part of it are in between as well.
pub(super) fn up_to_multiple(bytes: Range<u64>, of: u64) -> Range<u64> {
    bytes.start..bytes.end.min((bytes.start / of + 1) * of)
}

/// The part of `bytes` that is moved next, and its memory, which begins `done` bytes into `buffers`.
pub(super) fn next_part<'a>(
    buffers: &'a [IoVec],
    done: u64,
    bytes: &Range<u64>,
    step: u64,
    list: &'a mut Vec<IoVec>,
) -> (Range<u64>, &'a [IoVec]) {
    let part = first_part(bytes.clone(), step);
    if done == 0 && part == *bytes {
        return (part, buffers);
    }
    buffers::cut(buffers, done, part.end - part.start, list);
    (part, list)
}

/// The blocks around `bytes`.
pub(super) fn whole_blocks(disk: &Disk, bytes: &Range<u64>) -> Range<u64> {
    let block = u64::from(disk.alignment.offset);
    bytes.start / block * block..bytes.end.div_ceil(block) * block
}

/// Where `bytes` are in memory that holds `blocks`.
pub(super) fn within(bytes: &Range<u64>, blocks: &Range<u64>) -> Range<usize> {
    (bytes.start - blocks.start) as usize..(bytes.end - blocks.start) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_longer_than_a_part_is_one_and_others_end_where_blocks_meet() {
        for (bytes, part) in [
            (0..4096, 0..4096),
            (512..4608, 512..4608),
            (0..4608, 0..4096),
            (512..5120, 512..4096),
            (4096..12288, 4096..8192),
        ] {
            assert_eq!(first_part(bytes.clone(), 4096), part, "{bytes:?}");
        }
    }
}
