//! Commands that read, write or check the medium, and those that load and eject it.

use std::ops::Range;

use egret_disk::Op;

use crate::call::{Answer, Call};
use crate::cdb::Cdb;
use crate::command::Admission;
use crate::execute::is_fenced;
use crate::nexus::Nexus;
use crate::sense::{Code, Key, Refusal, Sense};
use crate::step::{DiskOp, Memory, Step, Task};
use crate::unit::LogicalUnit;
use crate::work::{Against, Verify, Work, is_zeroes};

/// FUA, in byte 1.
const FUA: u8 = 0x08;
/// UNMAP, in byte 1 of WRITE SAME.
const UNMAP: u8 = 0x08;
/// NDOB, in byte 1 of WRITE SAME (16): no data-out buffer.
const NO_DATA: u8 = 0x01;
/// The lengths of UNMAP's parameter list header and of one of its descriptors, in bytes (SBC-4).
const UNMAP_HEADER: usize = 8;
const UNMAP_DESCRIPTOR: usize = 16;

impl LogicalUnit {
    /// READ (6), (10), (12) and (16) (SBC-4).
    pub(crate) fn read(&self, call: Call<'_>) -> Answer {
        let Some(op) = self.read_op(&call.cdb, call.task)? else { return Ok(Step::good(0)) };
        if !is_of_medium(&call.cdb) || self.config.read_only || !self.told(&self.state()).write_cache {
            return Ok(self.start_one(call.command, call.task, op));
        }
        call.command.moved = op.len;
        call.command.work = Work::FlushThen(op);
        Ok(self.start(call.command, call.task.nexus, call.task.waker))
    }

    /// What a READ asks of the disk; `None` where that is nothing.
    #[inline(always)]
    pub(crate) fn read_op(&self, cdb: &Cdb, task: &Task<'_>) -> Result<Option<DiskOp>, Refusal> {
        let range = self.transfer(cdb)?;
        let len = range.end - range.start;
        if len > task.data_in {
            return Err(Refusal::Overrun(len));
        }
        Ok((len > 0).then_some(DiskOp { op: Op::Read, offset: range.start, len, memory: Memory::DataIn }))
    }

    /// WRITE (6), (10), (12) and (16) (SBC-4).
    pub(crate) fn write(&self, call: Call<'_>) -> Answer {
        let Some(op) = self.write_op(&call.cdb, call.task)? else { return Ok(Step::good(0)) };
        call.command.admission = Admission::Change(op.range(), call.task.lane);
        Ok(self.start_one(call.command, call.task, op))
    }

    /// What a WRITE asks of the disk; `None` where that is nothing.
    #[inline(always)]
    pub(crate) fn write_op(&self, cdb: &Cdb, task: &Task<'_>) -> Result<Option<DiskOp>, Refusal> {
        let range = self.transfer(cdb)?;
        // WRITE (6) has an address where the others have FUA.
        let fua = cdb.byte(0) != 0x0a && cdb.has(1, FUA) || !self.write_cache();
        self.data_out(task, &range, fua)
    }

    /// WRITE AND VERIFY (10), (12) and (16) (SBC-4).
    pub(crate) fn write_and_verify(&self, call: Call<'_>) -> Answer {
        let range = self.transfer(&call.cdb)?;
        let against = match byte_check(&call.cdb)? {
            Against::Block => return Err(Sense::cdb(1).bit(2).into()),
            against => against,
        };
        // It is the medium that is verified, so that is where the data has to be.
        let Some(write) = self.data_out(call.task, &range, true)? else { return Ok(Step::good(0)) };
        call.command.work = self.verify_work(&range, against, Some(write));
        call.command.moved = write.len;
        call.command.admission = Admission::Change(range, call.task.lane);
        Ok(self.start(call.command, call.task.nexus, call.task.waker))
    }

    /// VERIFY (10), (12) and (16) (SBC-4).
    pub(crate) fn verify(&self, call: Call<'_>) -> Answer {
        let against = byte_check(&call.cdb)?;
        let range = self.transfer(&call.cdb)?;
        let needed = match against {
            _ if range.is_empty() => 0,
            Against::Nothing => 0,
            Against::Data => range.end - range.start,
            Against::Block => self.block(),
        };
        if needed > call.task.data_out {
            return Err(Refusal::Overrun(needed));
        }
        call.command.moved = needed;
        call.command.work = self.verify_work(&range, against, None);
        Ok(self.start(call.command, call.task.nexus, call.task.waker))
    }

    /// COMPARE AND WRITE (SBC-4).
    pub(crate) fn compare_and_write(&self, call: Call<'_>) -> Answer {
        let blocks = u64::from(call.cdb.byte(13));
        let range = self.range(call.cdb.lba(), blocks)?;
        self.writable()?;
        if blocks > u64::from(self.max_compare_and_write_blocks()) {
            return Err(Sense::cdb(13).into());
        }
        if blocks == 0 {
            return Ok(Step::good(0));
        }
        let (offset, len) = (range.start, range.end - range.start);
        if 2 * len > call.task.data_out {
            return Err(Refusal::Overrun(2 * len));
        }
        let op = Op::Write { fua: call.cdb.has(1, FUA) || !self.write_cache() };
        let write = DiskOp { op, offset, len, memory: Memory::DataOut(len) };
        call.command.work = Work::CompareAndWrite { offset, len, compared: 0, write, is_written: false };
        call.command.moved = 2 * len;
        call.command.admission = Admission::Alone(range);
        Ok(self.start(call.command, call.task.nexus, call.task.waker))
    }

    /// SYNCHRONIZE CACHE (10) and (16) (SBC-4): all of the cache, and never before it is done.
    pub(crate) fn synchronize_cache(&self, call: Call<'_>) -> Answer {
        self.range(call.cdb.lba(), call.cdb.blocks())?;
        Ok(self.start_one(call.command, call.task, DiskOp::FLUSH))
    }

    /// WRITE SAME (10) and (16) (SBC-4). Zeroes are written as such, whether or not the storage is to be
    /// given back: what is unmapped here reads as zeroes.
    pub(crate) fn write_same(&self, call: Call<'_>) -> Answer {
        let (cdb, command) = (&call.cdb, call.command);
        let blocks = cdb.blocks();
        let range = self.range(cdb.lba(), blocks)?;
        self.writable()?;
        // The block limits page says that there is no "as far as the medium goes" (WSNZ).
        if blocks == 0 || blocks > self.config.max_write_same_bytes / self.block() {
            return Err(Sense::cdb(cdb.blocks_at()).into());
        }
        let unmap = cdb.has(1, UNMAP);
        if unmap && self.config.discard.is_none() {
            return Err(Sense::cdb(1).bit(3).into());
        }
        let len = range.end - range.start;
        let mut zeroes = cdb.has(1, NO_DATA);
        if !zeroes {
            if self.block() > call.task.data_out {
                return Err(Refusal::Overrun(self.block()));
            }
            zeroes = is_zeroes(call.data, self.block());
            command.moved = self.block();
        }
        if zeroes {
            let limit = self.whole_blocks(self.config.max_write_zeroes_bytes);
            // Stable by itself and not by a flush behind it: what is done once more because it failed is then all of it.
            let fua = !self.write_cache();
            command.work = Work::Ranges { op: Op::WriteZeroes { unmap, fua }, limit };
            command.extents.push(range.clone());
        } else {
            let (block, fua) = (self.block(), !self.write_cache());
            command.work = Work::Fill { offset: range.start, left: len, block, fua };
        }
        command.admission = Admission::Change(range, call.task.lane);
        Ok(self.start(command, call.task.nexus, call.task.waker))
    }

    /// UNMAP (SBC-4). Nothing is unmapped before all of the list is known to be good.
    pub(crate) fn unmap(&self, call: Call<'_>) -> Answer {
        let Some(discard) = self.config.discard else { return Err(Sense::illegal(Code::OPERATION_CODE).into()) };
        let command = call.command;
        self.writable()?;
        let len = usize::from(call.cdb.u16(7));
        if len == 0 {
            return Ok(Step::good(0));
        }
        let most = UNMAP_HEADER + UNMAP_DESCRIPTOR * discard.max_descriptors as usize;
        let given = command.take_list(call.task, call.data, len, most)?;
        let too_short = Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH).into());
        let Some((header, list)) = given.split_at_checked(UNMAP_HEADER) else { return too_short };
        // A descriptor that is not all there does not count.
        let described = usize::from(u16::from_be_bytes([header[2], header[3]])) / UNMAP_DESCRIPTOR * UNMAP_DESCRIPTOR;
        if described > len - UNMAP_HEADER {
            return too_short;
        }
        let Some(list) = list.get(..described) else { return Err(Sense::list(2).into()) };
        let mut total = 0;
        for (i, descriptor) in list.chunks_exact(UNMAP_DESCRIPTOR).enumerate() {
            let (lba, rest) = descriptor.split_first_chunk().unwrap_or((&[0; 8], &[]));
            let (blocks, _) = rest.split_first_chunk().unwrap_or((&[0; 4], &[]));
            let range = self.range(u64::from_be_bytes(*lba), u64::from(u32::from_be_bytes(*blocks)))?;
            total += range.end - range.start;
            if total > self.max_unmap_bytes() {
                return Err(Sense::list(UNMAP_HEADER + i * UNMAP_DESCRIPTOR + 8).into());
            }
            if !range.is_empty() {
                command.extents.push(range);
            }
        }
        command.extents.reverse();
        let start = command.extents.iter().map(|e| e.start).min();
        let end = command.extents.iter().map(|e| e.end).max();
        let (Some(start), Some(end)) = (start, end) else { return Ok(Step::good(len as u64)) };
        command.work = Work::Ranges { op: Op::Discard, limit: self.whole_blocks(discard.max_bytes) };
        command.admission = Admission::Change(start..end, call.task.lane);
        Ok(self.start(command, call.task.nexus, call.task.waker))
    }

    /// START STOP UNIT (SBC-4). A unit stays ready until its medium is ejected, as QEMU's and SCST's do: others may have it, and
    /// guests stop their disks when they shut down. To stop, or to change the power condition, writes the cache.
    pub(crate) fn start_stop_unit(&self, call: Call<'_>) -> Answer {
        let (cdb, command) = (&call.cdb, call.command);
        // With a power condition the two that follow mean nothing.
        let (by_condition, no_flush) = (cdb.byte(4) >> 4 != 0, cdb.has(4, 4));
        let (load, start) = (cdb.has(4, 2) && !by_condition, cdb.has(4, 1) && !by_condition);
        if load && !self.config.removable {
            return Err(Sense::cdb(4).bit(1).into());
        }
        if load && !start && !self.state().preventing.is_empty() {
            return Err(Sense::illegal(Code::REMOVAL_PREVENTED).into());
        }
        if start
            && !load
            && let Some(sense) = self.not_ready()
        {
            return Err(sense.into());
        }
        command.ejects = load.then_some(!start);
        if !start && !no_flush && !self.config.read_only {
            command.work = Work::Once(Some(DiskOp::FLUSH));
        }
        Ok(self.start(command, call.task.nexus, call.task.waker))
    }

    /// Loads or ejects the medium for a command of a nexus that had been `preempted` so often when it began. It may have
    /// written the cache since, for long: so this looks again at what was looked at then. Who preempts or prevents does that
    /// under the same lock, and sees nothing change that is not allowed when it is answered.
    pub(crate) fn set_ejected(&self, ejected: bool, nexus: &Nexus, preempted: u32) -> Result<(), Refusal> {
        let mut state = self.state();
        // To load it is allowed to all.
        if ejected && is_fenced(nexus, preempted) {
            return Err(Refusal::Conflict);
        }
        if ejected && !state.ejected && !state.preventing.is_empty() {
            return Err(Sense::illegal(Code::REMOVAL_PREVENTED).into());
        }
        state.set_ejected(ejected);
        Ok(())
    }

    /// PREVENT ALLOW MEDIUM REMOVAL (SBC-4).
    pub(crate) fn prevent_allow(&self, call: Call<'_>) -> Answer {
        let prevents = match call.cdb.byte(4) {
            0 => false,
            1 => true,
            _ => return Err(Sense::cdb(4).bit(1).into()),
        };
        let nexus = call.task.nexus.id();
        let mut state = self.state();
        // Under the lock, where who preempts is before this or behind it.
        if prevents && is_fenced(call.task.nexus, call.command.preempted) {
            return Err(Refusal::Conflict);
        }
        state.preventing.retain(|n| *n != nexus);
        if prevents {
            state.preventing.push(nexus);
        }
        Ok(Step::good(0))
    }

    /// The range of a command that moves it, in bytes.
    #[inline(always)]
    fn transfer(&self, cdb: &Cdb) -> Result<Range<u64>, Refusal> {
        let range = self.range(cdb.lba(), cdb.blocks())?;
        let max = self.config.max_transfer_bytes;
        if max != 0 && range.end - range.start > max {
            return Err(Sense::cdb(cdb.blocks_at()).into());
        }
        Ok(range)
    }

    /// The range in bytes, which is within the medium.
    #[inline(always)]
    fn range(&self, lba: u64, blocks: u64) -> Result<Range<u64>, Refusal> {
        let capacity = self.blocks();
        match lba.checked_add(blocks) {
            Some(end) if end <= capacity => Ok(lba * self.block()..end * self.block()),
            _ => Err(Sense::illegal(Code::LBA_RANGE).with(lba.max(capacity)).into()),
        }
    }

    /// The write of what the initiator gives; `None` where that is nothing.
    #[inline(always)]
    fn data_out(&self, task: &Task<'_>, range: &Range<u64>, fua: bool) -> Result<Option<DiskOp>, Refusal> {
        self.writable()?;
        let (offset, len) = (range.start, range.end - range.start);
        if len > task.data_out {
            return Err(Refusal::Overrun(len));
        }
        Ok((len > 0).then_some(DiskOp { op: Op::Write { fua }, offset, len, memory: Memory::DataOut(0) }))
    }

    #[inline]
    pub(crate) fn writable(&self) -> Result<(), Refusal> {
        let protected = Sense::new(Key::DataProtect, Code::WRITE_PROTECTED);
        if self.config.read_only || self.write_protect() { Err(protected.into()) } else { Ok(()) }
    }

    fn verify_work(&self, range: &Range<u64>, against: Against, write: Option<DiskOp>) -> Work {
        let (offset, left) = (range.start, range.end - range.start);
        Work::Verify(Verify { write, offset, left, done: 0, against, block: self.block() })
    }

    /// As much of `bytes` as is whole blocks; the configuration has at least one.
    fn whole_blocks(&self, bytes: u64) -> u64 {
        bytes - bytes % self.block()
    }

    /// The most that COMPARE AND WRITE compares: no more than a command may move.
    pub(crate) fn max_compare_and_write_blocks(&self) -> u8 {
        let most = self.config.max_compare_and_write_blocks;
        match self.config.max_transfer_bytes / self.block() {
            0 => most,
            transfer => most.min(transfer.min(0xff) as u8),
        }
    }

    /// The most that one UNMAP may have, in bytes: as many ranges as there may be, each as long as the disk takes at
    /// once.
    pub(crate) fn max_unmap_bytes(&self) -> u64 {
        let most =
            |d: crate::DiscardConfig| self.whole_blocks(d.max_bytes).saturating_mul(u64::from(d.max_descriptors));
        // The block limits page has 32 bits for this, in blocks.
        self.config.discard.map_or(0, most).min(u64::from(u32::MAX) * self.block())
    }
}

/// Whether a READ is of what the medium has (FUA): what a cache has that is newer is written there first. READ (6) has an
/// address where the others have that.
#[inline]
pub(crate) fn is_of_medium(cdb: &Cdb) -> bool {
    cdb.has(1, FUA) && cdb.byte(0) != 0x08
}

/// BYTCHK, in byte 1.
fn byte_check(cdb: &Cdb) -> Result<Against, Sense> {
    match cdb.byte(1) >> 1 & 3 {
        0 => Ok(Against::Nothing),
        1 => Ok(Against::Data),
        3 => Ok(Against::Block),
        _ => Err(Sense::cdb(1).bit(2)),
    }
}

#[cfg(test)]
mod tests;
