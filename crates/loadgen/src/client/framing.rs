//! The layout of a request: the header before its data, and the place of the device's response.
//!
//! | device | header | answer | in a read, the data comes |
//! |---|---|---|---|
//! | virtio-blk (virtio 1.3, 5.2.6) | kind and sector, 16 bytes | a status byte | before the answer |
//! | virtio-scsi (5.6.6.1) | a LUN and a CDB, 51 bytes | a response and sense data, 108 bytes | after the answer |

use egret_vring::ring::Piece;
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::bindings::virtio_scsi::{VIRTIO_SCSI_CDB_DEFAULT_SIZE, VIRTIO_SCSI_SENSE_DEFAULT_SIZE};

use super::Op;
use super::info::SECTOR;

/// Headers begin on cache lines, and no two requests share one.
pub(super) const LINE: u64 = 64;

/// `struct virtio_blk_req` up to its data: type, reserved, sector.
const BLK_HEADER: usize = 16;
/// `struct virtio_scsi_req_cmd` up to its CDB: lun, id, task_attr, prio, crn.
const BEFORE_CDB: usize = 19;
const SCSI_HEADER: usize = BEFORE_CDB + VIRTIO_SCSI_CDB_DEFAULT_SIZE as usize;
/// The response up to its sense data.
const RESPONSE: usize = 12;
const SCSI_ANSWER: usize = RESPONSE + VIRTIO_SCSI_SENSE_DEFAULT_SIZE as usize;
/// Target 0, LUN 0, in flat space addressing, as Linux has it.
const FIRST_LUN: [u8; 8] = [1, 0, 0x40, 0, 0, 0, 0, 0];

pub(super) const TEST_UNIT_READY: [u8; 16] = [0; 16];
/// READ CAPACITY (16), with room for 32 bytes.
pub(super) const READ_CAPACITY: [u8; 16] = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];

/// The framing that a device type needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Blk,
    /// Of a logical unit with blocks of so many bytes.
    Scsi {
        block: u32,
    },
}

/// The memory of a request without its data: the header, and a response that no device gives. A device that writes no
/// response would otherwise look as if the request had succeeded.
pub(super) struct Frame {
    bytes: [u8; LINE as usize + RESPONSE],
    len: usize,
}

impl Frame {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Framing {
    /// How many queues come before the first request queue.
    pub(super) fn first_queue(self) -> u16 {
        match self {
            Self::Blk => 0,
            Self::Scsi { .. } => 2,
        }
    }

    /// How much memory a request's frame takes.
    pub(super) fn stride(self) -> u64 {
        let Piece { addr, len } = self.answer(0);
        (addr + u64::from(len)).next_multiple_of(LINE)
    }

    /// The header of the request whose frame is at `at`.
    #[inline]
    pub(super) fn header(self, at: u64) -> Piece {
        let len = match self {
            Self::Blk => BLK_HEADER,
            Self::Scsi { .. } => SCSI_HEADER,
        };
        Piece { addr: at, len: len as u32 }
    }

    /// The room for its answer.
    #[inline]
    pub(super) fn answer(self, at: u64) -> Piece {
        match self {
            Self::Blk => Piece { addr: at + BLK_HEADER as u64, len: 1 },
            Self::Scsi { .. } => Piece { addr: at + LINE, len: SCSI_ANSWER as u32 },
        }
    }

    /// What the device writes when it reads.
    #[inline]
    pub(super) fn read(self, data: Piece, answer: Piece) -> [Piece; 2] {
        match self {
            Self::Blk => [data, answer],
            Self::Scsi { .. } => [answer, data],
        }
    }

    /// The frame of a request of `len` bytes at byte `offset`.
    #[inline]
    pub(super) fn frame(self, op: Op, offset: u64, len: u32) -> Frame {
        match self {
            Self::Blk => blk(op, offset),
            Self::Scsi { block } => Self::command(&cdb(op, offset / u64::from(block), len / block)),
        }
    }

    /// The frame of any SCSI command.
    #[inline]
    pub(super) fn command(cdb: &[u8; 16]) -> Frame {
        let mut bytes = [u8::MAX; LINE as usize + RESPONSE];
        bytes[..SCSI_HEADER].fill(0);
        bytes[..8].copy_from_slice(&FIRST_LUN);
        bytes[BEFORE_CDB..BEFORE_CDB + 16].copy_from_slice(cdb);
        Frame { bytes, len: LINE as usize + RESPONSE }
    }

    /// Where the response is, and its length.
    #[inline]
    pub(super) fn verdict(self, at: u64) -> (u64, usize) {
        match self {
            Self::Blk => (at + BLK_HEADER as u64, 1),
            // The status and the response behind it.
            Self::Scsi { .. } => (at + LINE + 10, 2),
        }
    }

    /// The response as one number, 0 for success: for virtio-scsi the transport's response, or, if that is 0, the
    /// command's status.
    #[inline]
    pub(super) fn status(self, verdict: [u8; 2]) -> u8 {
        match self {
            Self::Blk => verdict[0],
            Self::Scsi { .. } if verdict[1] == 0 => verdict[0],
            Self::Scsi { .. } => verdict[1],
        }
    }
}

fn blk(op: Op, offset: u64) -> Frame {
    let kind = match op {
        Op::Read => VIRTIO_BLK_T_IN,
        Op::Write => VIRTIO_BLK_T_OUT,
        Op::Flush => VIRTIO_BLK_T_FLUSH,
    };
    let mut bytes = [u8::MAX; LINE as usize + RESPONSE];
    bytes[..8].copy_from_slice(&u64::from(kind).to_le_bytes());
    bytes[8..16].copy_from_slice(&(offset / SECTOR).to_le_bytes());
    Frame { bytes, len: BLK_HEADER + 8 }
}

/// A CDB of ten bytes where that reaches, and of 16 beyond, as Linux has it.
#[inline]
fn cdb(op: Op, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    let (ten, sixteen) = match op {
        Op::Read => (0x28, 0x88),
        Op::Write => (0x2a, 0x8a),
        // SYNCHRONIZE CACHE (10), of everything.
        Op::Flush => return [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    };
    if let (Ok(lba), Ok(blocks)) = (u32::try_from(lba), u16::try_from(blocks)) {
        cdb[0] = ten;
        cdb[2..6].copy_from_slice(&lba.to_be_bytes());
        cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    } else {
        cdb[0] = sixteen;
        cdb[2..10].copy_from_slice(&lba.to_be_bytes());
        cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    }
    cdb
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_says_what_it_is_in_each_device_s_words() {
        let frame = Framing::Blk.frame(Op::Write, 8 * 512, 4096);
        assert_eq!(frame.bytes()[..17], [1, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0xff]);
        let scsi = Framing::Scsi { block: 4096 };
        let frame = scsi.frame(Op::Read, 7 * 4096, 8192);
        assert_eq!(frame.bytes()[..20], [1, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x28]);
        assert_eq!(frame.bytes()[19..35], [0x28, 0, 0, 0, 0, 7, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        let far = scsi.frame(Op::Write, 4096 << 32, 4096);
        assert_eq!(far.bytes()[19..35], [0x8a, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(frame.bytes()[64..], [0xff; 12], "no answer yet");
    }

    #[test]
    fn a_status_is_zero_only_where_transport_and_command_have_nothing_to_say() {
        let scsi = Framing::Scsi { block: 512 };
        assert_eq!([[0, 0], [2, 0], [0, 3], [0xff, 0xff]].map(|read| scsi.status(read)), [0, 2, 3, 0xff]);
        assert_eq!(Framing::Blk.status([1, 0]), 1);
    }
}
