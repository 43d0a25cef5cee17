//! One queue of a virtio-blk device: chains in, disk requests out (virtio 1.3, 5.2.6).

use std::mem;
use std::sync::Arc;

use egret_disk::{Completion, Op, Request, RequestToken};
use egret_vring::memory::{Buffers, GuestMemory, IoVec, iovecs};
use egret_vring::ring::Chain;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_BARRIER, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::{Blk, SECTOR};
use crate::model::{Completed, DiskKey, Malformed, Next, RequestModel, RequestType, Status, keep};

/// `struct virtio_blk_req` up to its data: type, reserved, sector.
const HEADER: usize = 16;
/// `struct virtio_blk_discard_write_zeroes`: sector, num_sectors, flags.
const SEGMENT: usize = 16;
/// What `VIRTIO_BLK_T_FLUSH` was before it was that: illumos and others ask for it.
const FLUSH_OUT: u32 = 5;

/// The one disk.
const DISK: DiskKey = DiskKey(0);

/// A request that the disk has.
#[derive(Clone, Copy)]
struct Pending {
    /// Where its status goes.
    status: IoVec,
    request_type: RequestType,
    bytes: u64,
}

/// What a chain asks for, once it is understood.
enum Asked {
    /// Something of the disk.
    Disk { request_type: RequestType, op: Op, offset: u64, len: u64 },
    /// Nothing more; this many bytes of data were written.
    Nothing { request_type: RequestType, bytes: u64, written: u32 },
}

/// Why a chain does not get what it asks for.
struct Refused {
    request_type: RequestType,
    bytes: u64,
    status: Status,
}

/// The model of one queue. Its worker owns it.
pub struct BlkQueue {
    blk: Arc<Blk>,
    /// By head.
    pending: Box<[Option<Pending>]>,
    /// Buffers of completed requests, for the next ones.
    spare: Vec<Vec<IoVec>>,
}

impl BlkQueue {
    pub(super) fn new(blk: Arc<Blk>, size: u16) -> Self {
        let size = usize::from(size);
        Self { blk, pending: vec![None; size].into(), spare: Vec::with_capacity(size) }
    }

    /// Understands a chain whose status byte is off its writable end already.
    #[inline]
    fn understand(&self, memory: &GuestMemory, chain: &Chain, header: [u8; HEADER]) -> Result<Asked, Refused> {
        let word = u128::from_le_bytes(header);
        // Drivers older than the standard, and SLOF to this day, set the barrier's bit though nobody offers barriers.
        let (request, sector) = (word as u32 & !VIRTIO_BLK_T_BARRIER, (word >> 64) as u64);
        match request {
            VIRTIO_BLK_T_IN => {
                let len = u64::from(chain.writable_len() - 1);
                self.transfer(RequestType::Read, Op::Read, sector, len)
            }
            VIRTIO_BLK_T_OUT => {
                let len = u64::from(chain.readable_len()) - HEADER as u64;
                let op = Op::Write { fua: self.blk.is_write_through() };
                if self.blk.config.read_only {
                    return Err(Refused { request_type: RequestType::Write, bytes: len, status: Status::IoError });
                }
                self.transfer(RequestType::Write, op, sector, len)
            }
            VIRTIO_BLK_T_FLUSH | FLUSH_OUT => {
                Ok(Asked::Disk { request_type: RequestType::Flush, op: Op::Flush, offset: 0, len: 0 })
            }
            VIRTIO_BLK_T_GET_ID => {
                let written = memory.scatter(chain.writable(), &self.blk.serial) as u32;
                Ok(Asked::Nothing { request_type: RequestType::Other, bytes: 0, written })
            }
            VIRTIO_BLK_T_DISCARD => self.discard(memory, chain),
            VIRTIO_BLK_T_WRITE_ZEROES => self.write_zeroes(memory, chain),
            _ => Err(Refused { request_type: RequestType::Other, bytes: 0, status: Status::Unsupported }),
        }
    }

    /// A read or a write of whole sectors that the disk has.
    #[inline]
    fn transfer(&self, request_type: RequestType, op: Op, sector: u64, len: u64) -> Result<Asked, Refused> {
        match self.range(sector, len) {
            Some(_) if len == 0 => Ok(Asked::Nothing { request_type, bytes: 0, written: 0 }),
            Some(offset) => Ok(Asked::Disk { request_type, op, offset, len }),
            None => Err(Refused { request_type, bytes: len, status: Status::IoError }),
        }
    }

    /// Where `len` bytes from `sector` on begin, in bytes, if they are whole sectors of the disk.
    #[inline]
    fn range(&self, sector: u64, len: u64) -> Option<u64> {
        let end = sector.checked_add(len / SECTOR)?;
        (len.is_multiple_of(SECTOR) && end <= self.blk.sectors()).then(|| sector * SECTOR)
    }

    fn discard(&self, memory: &GuestMemory, chain: &Chain) -> Result<Asked, Refused> {
        let request_type = RequestType::Discard;
        let limits = self.blk.config.discard.filter(|_| !self.blk.config.read_only);
        let max = limits.ok_or(Refused { request_type, bytes: 0, status: Status::Unsupported })?.max_sectors;
        // `unmap` is write-zeroes' alone.
        let (offset, len, _) = self.segment(memory, chain, request_type, max, 0)?;
        Ok(match len {
            0 => Asked::Nothing { request_type, bytes: 0, written: 0 },
            _ => Asked::Disk { request_type, op: Op::Discard, offset, len },
        })
    }

    fn write_zeroes(&self, memory: &GuestMemory, chain: &Chain) -> Result<Asked, Refused> {
        let request_type = RequestType::WriteZeroes;
        let limits = self.blk.config.write_zeroes.filter(|_| !self.blk.config.read_only);
        let limits = limits.ok_or(Refused { request_type, bytes: 0, status: Status::Unsupported })?;
        let known = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
        let (offset, len, flags) = self.segment(memory, chain, request_type, limits.max_sectors, known)?;
        // 5.2.6.2: with `unmap` the device may give the range back, and it reads as zeroes either way.
        let unmap = limits.may_unmap && flags & known != 0;
        Ok(match len {
            0 => Asked::Nothing { request_type, bytes: 0, written: 0 },
            _ => Asked::Disk {
                request_type,
                op: Op::WriteZeroes { unmap, fua: self.blk.is_write_through() },
                offset,
                len,
            },
        })
    }

    /// The one segment of a discard or write-zeroes: where it begins and its length, in bytes, and its flags.
    ///
    /// More than one and flags that are not `known` are unsupported, and that comes first: it is all that the
    /// specification insists on.
    fn segment(
        &self,
        memory: &GuestMemory,
        chain: &Chain,
        request_type: RequestType,
        max_sectors: u32,
        known: u32,
    ) -> Result<(u64, u64, u32), Refused> {
        let data = chain.readable_len() as usize - HEADER;
        let mut both = [0; HEADER + SEGMENT];
        if !data.is_multiple_of(SEGMENT) || memory.gather(chain.readable(), &mut both) != both.len() {
            return Err(Refused { request_type, bytes: 0, status: Status::IoError });
        }
        let word = u128::from_le_bytes(both[HEADER..].try_into().expect("a segment is 16 bytes"));
        let (sector, sectors, flags) = (word as u64, (word >> 64) as u32, (word >> 96) as u32);
        let len = u64::from(sectors) * SECTOR;
        if data > SEGMENT || flags & !known != 0 {
            return Err(Refused { request_type, bytes: len, status: Status::Unsupported });
        }
        match self.range(sector, len) {
            Some(offset) if sectors <= max_sectors => Ok((offset, len, flags)),
            _ => Err(Refused { request_type, bytes: len, status: Status::IoError }),
        }
    }
}

impl RequestModel for BlkQueue {
    #[inline]
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, source: u32) -> Result<Next, Malformed> {
        let head = chain.head();
        // The last writable byte is the status, wherever it lies (5.2.6; 2.7.4 leaves the framing to the driver).
        let Some(status) = iovecs::take_last_byte(chain.writable_mut()) else {
            return Err(Malformed::NoStatus);
        };
        let mut header = [0; HEADER];
        if memory.gather(chain.readable(), &mut header) != HEADER {
            return Err(Malformed::ShortHeader { len: chain.readable_len(), needed: HEADER as u32 });
        }
        Ok(match self.understand(memory, chain, header) {
            Ok(Asked::Disk { request_type, op, offset, len }) => {
                let mut buffers = self.spare.pop().unwrap_or_default();
                match op {
                    Op::Read => mem::swap(&mut buffers, chain.writable_mut()),
                    Op::Write { .. } => iovecs::append_after(chain.readable(), HEADER, &mut buffers),
                    Op::Flush | Op::Discard | Op::WriteZeroes { .. } => {}
                }
                let slot = &mut self.pending[usize::from(head)];
                debug_assert!(slot.is_none(), "a queue pops no head twice");
                *slot = Some(Pending { status, request_type, bytes: len });
                Next::Submit(
                    DISK,
                    Request { op, offset, len, buffers: buffers.into(), token: RequestToken::new(source, head) },
                )
            }
            Ok(Asked::Nothing { request_type, bytes, written }) => {
                set_status(memory, status, Status::Ok);
                Next::Complete(Completed {
                    head,
                    written: written + 1,
                    request_type,
                    bytes,
                    status: Status::Ok,
                    disk: None,
                })
            }
            Err(Refused { request_type, bytes, status: told }) => {
                set_status(memory, status, told);
                Next::Complete(Completed { head, written: 1, request_type, bytes, status: told, disk: None })
            }
        })
    }

    #[inline]
    fn end(&mut self, memory: &GuestMemory, completion: Completion<Buffers>) -> Next {
        let Completion { token, result, buffers } = completion;
        let head = token.slot();
        let slot = self.pending.get_mut(usize::from(head)).and_then(Option::take);
        let Pending { status: byte, request_type, bytes } = slot.expect("a completion is of a request that is out");
        keep(&mut self.spare, buffers.into_parts().0);
        let (status, data) = match result {
            // A read is of less than 4 GiB, as its chain is.
            Ok(()) if request_type == RequestType::Read => (Status::Ok, bytes as u32),
            Ok(()) => (Status::Ok, 0),
            Err(_) => (Status::IoError, 0),
        };
        set_status(memory, byte, status);
        Next::Complete(Completed { head, written: data + 1, request_type, bytes, status, disk: None })
    }
}

#[inline]
fn set_status(memory: &GuestMemory, byte: IoVec, status: Status) {
    let told = match status {
        Status::Ok => VIRTIO_BLK_S_OK,
        Status::IoError => VIRTIO_BLK_S_IOERR,
        Status::Unsupported => VIRTIO_BLK_S_UNSUPP,
    };
    memory.scatter(&[byte], &[told as u8]);
}
