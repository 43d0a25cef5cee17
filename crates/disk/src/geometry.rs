//! What an open image is like: its size, its blocks, how direct I/O wants its memory, what can be discarded.

#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{AtFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::buffers::Aligned;
use crate::disk::Extent;

/// The unit of every size and offset, in bytes: virtio and SCSI know nothing smaller.
pub(crate) const SECTOR: u32 = 512;
/// The most that is discarded or zeroed by one request, in bytes; more keeps a worker busy for too long.
const MAX_EXTENT: u64 = 1 << 30;

// From linux/fs.h; libc does not have them everywhere.
const BLKROGET: u32 = 0x125e;
const BLKSSZGET: u32 = 0x1268;
const BLKDISCARD: u32 = 0x1277;
const BLKPBSZGET: u32 = 0x127b;
const BLKGETSIZE64: u32 = 0x8008_1272;

/// What direct I/O asks for, in bytes; 1 where nothing is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of memory addresses.
    pub(crate) memory: u32,
    /// Of offsets, and of the length of every buffer.
    pub(crate) offset: u32,
}

impl Alignment {
    /// Of I/O through the page cache.
    pub(crate) const NONE: Self = Self { memory: 1, offset: 1 };
}

/// Block sizes as a guest should be told them, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The smallest that can be read or written.
    pub logical: u32,
    /// What a guest should align to; at least the logical one.
    pub physical: u32,
}

/// What a discard or a write of zeroes may ask for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Zero where nothing can be discarded.
    pub max_discard: u64,
    /// What a discard should be a multiple of to be of use.
    pub discard_granularity: u32,
    /// The most that one write of zeroes should ask for.
    pub max_write_zeroes: u64,
    /// What long requests should best be multiples of; zero where there is nothing to say.
    pub optimal_io: u32,
}

impl Limits {
    /// Of a disk that takes anything.
    pub const fn unlimited(granularity: u32) -> Self {
        Self { max_discard: MAX_EXTENT, discard_granularity: granularity, max_write_zeroes: MAX_EXTENT, optimal_io: 0 }
    }
}

/// The size in bytes.
pub(crate) fn size(file: &File, device: bool) -> io::Result<u64> {
    if device { ioctl_get(file, BLKGETSIZE64) } else { Ok(file.metadata()?.len()) }
}

/// Whether two descriptors are of one file, or of one device.
pub(crate) fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino(), one.rdev()) == (other.dev(), other.ino(), other.rdev()))
}

/// Whether a device refuses to be written; opening it for writing does not always say so.
pub(crate) fn is_read_only_device(file: &File) -> bool {
    ioctl_get::<libc::c_int>(file, BLKROGET).is_ok_and(|read_only| read_only != 0)
}

/// The block sizes of a file or a device.
pub(crate) fn blocks(file: &File, device: bool) -> io::Result<Blocks> {
    if device {
        let logical: libc::c_int = ioctl_get(file, BLKSSZGET)?;
        let logical = u32::try_from(logical).unwrap_or(SECTOR).max(SECTOR);
        let physical = ioctl_get::<libc::c_uint>(file, BLKPBSZGET).unwrap_or(logical).max(logical);
        return Ok(Blocks { logical, physical });
    }
    // A file has no sectors of its own. What it is allocated in is what partitions and file systems should align to.
    let allocation = u32::try_from(file.metadata()?.blksize()).unwrap_or(SECTOR);
    let sensible = allocation.is_power_of_two() && (SECTOR..=65536).contains(&allocation);
    Ok(Blocks { logical: SECTOR, physical: if sensible { allocation } else { SECTOR } })
}

/// What direct I/O on the file asks for; `None` if it is not possible at all.
pub(crate) fn alignment(file: &File, device: bool) -> io::Result<Option<Alignment>> {
    if let Ok(stat) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
        return Ok((offset != 0).then_some(Alignment { memory: memory.max(1), offset }));
    }
    // Kernels before 6.1, and file systems that do not say. The device below knows. Reading tells least, because a hole
    // reads at any alignment.
    let below = if device {
        Some(blocks(file, true)?.logical)
    } else {
        queue_limit(file.metadata()?.dev(), "logical_block_size").and_then(|size| u32::try_from(size).ok())
    };
    if let Some(sector) = below {
        return Ok(Some(Alignment { memory: sector, offset: sector }));
    }
    let candidates = [512, 1024, 2048, 4096].map(|block| Alignment { memory: block, offset: block });
    Ok(candidates.into_iter().find(|&candidate| reads_directly(file, candidate).is_ok()))
}

/// Reads one block; `EINVAL` is how a file system that opened with `O_DIRECT` refuses it.
pub(crate) fn reads_directly(file: &File, alignment: Alignment) -> io::Result<()> {
    let mut memory = Aligned::zeroed(alignment.offset as usize, alignment.memory as usize);
    file.read_at(memory.bytes(), 0).map(drop)
}

/// A number from a block device's queue directory; a partition's is its disk's.
fn queue_limit(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
        fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

/// What may be discarded and zeroed.
pub(crate) fn limits(file: &File, device: bool, blocks: Blocks) -> io::Result<Limits> {
    if !device {
        return Ok(Limits::unlimited(blocks.physical));
    }
    let number = file.metadata()?.rdev();
    Ok(device_limits(blocks.logical, |name| queue_limit(number, name)))
}

/// Likewise, of a device of which `told` says what its queue directory has.
fn device_limits(block: u32, told: impl Fn(&str) -> Option<u64>) -> Limits {
    let most = told("discard_max_bytes").unwrap_or(0).min(MAX_EXTENT);
    let granularity = told("discard_granularity").and_then(|g| u32::try_from(g).ok()).unwrap_or(0);
    Limits { max_discard: most - most % u64::from(block), ..Limits::unlimited(granularity.max(block)) }
}

/// What of a range of a file is holes: at most so many extents. A sector is data if some of it is.
pub(crate) fn extents(file: &File, range: Range<u64>, most: usize) -> Result<Vec<Extent>, Errno> {
    extents_by(|to| rustix::fs::seek(file, to), range, most)
}

/// Likewise, of a file in which `seek` looks.
fn extents_by(
    mut seek: impl FnMut(SeekFrom) -> Result<u64, Errno>,
    range: Range<u64>,
    most: usize,
) -> Result<Vec<Extent>, Errno> {
    let sector = u64::from(SECTOR);
    // What somebody has cut off is no hole: to read it is an error.
    let len = seek(SeekFrom::End(0))?;
    let end = range.end.min(len - len % sector);
    let mut find = |what: SeekFrom| match seek(what) {
        // There is no more of it.
        Err(Errno::NXIO) => Ok(None),
        found => found.map(Some),
    };
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = range.start;
    while at < end && extents.len() < most {
        let found = find(SeekFrom::Data(at))?;
        let data = found.map_or(end, |data| data - data % sector).max(at);
        let (len, is_hole) = if data > at {
            (data.min(end) - at, true)
        } else {
            // Before it was found, in its sector, there may be a hole.
            let hole = find(SeekFrom::Hole(found.unwrap_or(at)))?.map_or(end, |hole| hole.next_multiple_of(sector));
            (hole.min(end) - at, false)
        };
        // Whoever discards at the same time may have made it of no length, which nobody is told of.
        if len == 0 {
            break;
        }
        match extents.last_mut() {
            Some(last) if last.is_hole == is_hole => last.len += len,
            _ => extents.push(Extent { len, is_hole }),
        }
        at += len;
    }
    if at == range.start { Err(Errno::AGAIN) } else { Ok(extents) }
}

/// Discards a part of a device, in multiples of its logical block size.
pub(crate) fn discard_device(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let range = [offset, len];
    // SAFETY: the argument is the pair of numbers that this request reads.
    match unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// An ioctl that fills in one number.
fn ioctl_get<T: Default>(file: &File, request: u32) -> io::Result<T> {
    let mut value = T::default();
    // SAFETY: each caller asks for the type that its request writes.
    match unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw mut value) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_device_has_none_of_a_devices_numbers() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert_eq!(size(&file, false).unwrap(), 4096);
        assert!(size(&file, true).is_err() && blocks(&file, true).is_err() && !is_read_only_device(&file));
        assert!(discard_device(&file, 0, 4096).is_err());
    }

    #[test]
    fn a_device_discards_as_many_whole_blocks_as_it_says_up_to_what_keeps_a_worker_busy() {
        for (block, most, granularity, expected) in [
            (512, None, None, (0, 512)),
            (4096, Some(0), Some(0), (0, 4096)),
            (512, Some((1 << 25) - 512), Some(1 << 20), ((1 << 25) - 512, 1 << 20)),
            (4096, Some((1 << 25) - 512), Some(512), ((1 << 25) - 4096, 4096)),
            (4096, Some(u64::MAX), Some(u64::MAX), (MAX_EXTENT, 4096)),
        ] {
            let limits = device_limits(block, |name| if name == "discard_max_bytes" { most } else { granularity });
            assert_eq!((limits.max_discard, limits.discard_granularity), expected, "{block} {most:?} {granularity:?}");
        }
    }

    /// What is told of a file of 8192 bytes, as from whence there is data up to where.
    fn told(data: &[(u64, u64)], range: Range<u64>, most: usize) -> Result<Vec<(u64, bool)>, Errno> {
        let seek = |to| match to {
            SeekFrom::Data(at) => {
                data.iter().find(|(_, end)| *end > at).map(|(start, _)| at.max(*start)).ok_or(Errno::NXIO)
            }
            SeekFrom::Hole(at) => {
                Ok(data.iter().find(|(start, end)| (*start..*end).contains(&at)).map_or(at, |(_, end)| *end))
            }
            _ => Ok(8192),
        };
        let extents = extents_by(seek, range, most)?;
        Ok(extents.into_iter().map(|Extent { len, is_hole }| (len, is_hole)).collect())
    }

    #[test]
    fn a_sector_of_which_some_is_data_is_no_hole_and_what_is_alike_is_one_extent() {
        assert_eq!(told(&[], 0..8192, 9), Ok(vec![(8192, true)]));
        assert_eq!(told(&[(600, 700)], 0..8192, 9), Ok(vec![(512, true), (512, false), (7168, true)]));
        let parts = [(1023, 1025), (1537, 1600), (4096, 5120)];
        let all = [(512, true), (1536, false), (2048, true), (1024, false), (3072, true)];
        assert_eq!(told(&parts, 0..8192, 9), Ok(all.to_vec()));
        assert_eq!(
            told(&parts, 0..8192, 2),
            Ok(vec![(512, true), (1024, false)]),
            "no more than so many are looked for"
        );
        assert_eq!(told(&parts, 1024..4608, 9), Ok(vec![(1024, false), (2048, true), (512, false)]));
        // Of data that begins where data ended there is one piece; of what was cut off there is none.
        assert_eq!(told(&[(0, 1000), (1024, 1536)], 0..10240, 9), Ok(vec![(1536, false), (6656, true)]));
        assert_eq!(told(&[], 8192..10240, 9), Err(Errno::AGAIN));
    }

    #[test]
    fn what_is_discarded_while_it_is_looked_at_is_no_extent_without_length() {
        // It was data a moment ago.
        let seek = |to| match to {
            SeekFrom::Data(at) => Ok(4096.max(at)),
            SeekFrom::Hole(at) => Ok(at),
            _ => Ok(8192),
        };
        assert_eq!(extents_by(seek, 0..8192, 9), Ok(vec![Extent { len: 4096, is_hole: true }]));
        assert_eq!(extents_by(seek, 4096..8192, 9), Err(Errno::AGAIN));
    }
}
