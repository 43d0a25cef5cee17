//! The header of a request (virtio 1.3, 5.6.6.1).

use egret_vring::memory::{GuestMemory, IoVec};

use crate::scsi::config;

/// `struct virtio_scsi_req_cmd` up to its CDB: lun, id, task_attr, prio, crn.
pub(super) const FIXED: usize = 19;
/// As much of a CDB as is looked at: no command is longer, and a header has room for no less.
pub(super) const CDB: usize = *config::CDB_SIZES.start() as usize;

/// What a header says, as far as it is looked at.
pub(super) struct Header {
    pub(super) lun: [u8; 8],
    pub(super) tag: u64,
    pub(super) cdb: [u8; CDB],
}

impl Header {
    /// Words that have all of it.
    const WORDS: usize = (FIXED + CDB).div_ceil(8);

    /// Reads the header at the beginning of `iovecs`. In words, and from where it nearly always is: a copy of it would have
    /// to be waited for, because its fields are wider than what a copy stores at a time.
    #[inline(always)]
    pub(super) fn read(memory: &GuestMemory, iovecs: &[IoVec]) -> Option<Self> {
        let words = iovecs.first().and_then(|iovec| memory.words(iovec));
        let [lun, tag, a, b, c] = match words {
            Some(words) => words,
            None => Self::gather(memory, iovecs)?,
        };
        // The CDB begins at the fourth byte of the third word.
        let cdb = u128::from(a >> 24) | u128::from(b) << 40 | u128::from(c) << 104;
        Some(Self { lun: lun.to_le_bytes(), tag, cdb: cdb.to_le_bytes() })
    }

    #[cold]
    fn gather(memory: &GuestMemory, iovecs: &[IoVec]) -> Option<[u64; Self::WORDS]> {
        let mut bytes = [0; 8 * Self::WORDS];
        let header = &mut bytes[..FIXED + CDB];
        if memory.gather(iovecs, header) != header.len() {
            return None;
        }
        let (words, _) = bytes.as_chunks();
        Some(std::array::from_fn(|at| u64::from_le_bytes(words[at])))
    }
}
