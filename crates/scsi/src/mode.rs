//! MODE SENSE and MODE SELECT.

mod pages;

use crate::call::{Answer, Call};
use crate::command::Admission;
use crate::execute::is_fenced;
use crate::nexus::{Attention, NexusId};
use crate::sense::{Code, Refusal, Sense};
use crate::step::{DiskOp, Step};
use crate::unit::{LogicalUnit, State};
use crate::work::Work;
pub(crate) use pages::Modes;
use pages::Page;

/// Bits of the device specific parameter (SBC-4, mode parameters overview): write protect; DPO and FUA are known.
const WRITE_PROTECT: u8 = 0x80;
const DPO_FUA: u8 = 0x10;
/// LLBAA of MODE SENSE (10), and LONGLBA of its header.
const LONG_REQUEST: u8 = 0x10;
const LONG_LBA: u8 = 0x01;
const NO_DESCRIPTORS: u8 = 0x08;
/// The longest parameter list that MODE SELECT takes, in bytes: all pages that there are, behind the longest header and
/// descriptor.
const LONGEST_LIST: usize = 180;

impl LogicalUnit {
    /// MODE SENSE (6) and (10) (SPC-5).
    pub(crate) fn mode_sense(&self, call: Call<'_>) -> Answer {
        let Call { cdb, command, task, .. } = call;
        let (control, code, subpage) = (cdb.byte(2) >> 6, cdb.byte(2) & 0x3f, cdb.byte(3));
        if control == 3 {
            return Err(Sense::illegal(Code::SAVING).into());
        }
        let asked = Page::asked(code, subpage)?;
        let short = call.cdb.is_short();
        let long_lba = !short && cdb.has(1, LONG_REQUEST);
        let descriptor = match (cdb.has(1, NO_DESCRIPTORS), long_lba) {
            (true, _) => Vec::new(),
            (false, false) => self.short_descriptor().to_vec(),
            (false, true) => self.long_descriptor().to_vec(),
        };
        let told = self.told(&self.state());
        let mut pages = Vec::new();
        for page in asked {
            pages.extend(match control {
                0 => page.bytes(told),
                1 => page.changeable(),
                _ => page.bytes(Modes { write_cache: self.config.write_cache, protect: false }),
            });
        }
        let device = DPO_FUA | if self.writable().is_err() { WRITE_PROTECT } else { 0 };
        let after = descriptor.len() + pages.len();
        let data = &mut command.response;
        if short {
            data.extend([(after + 3) as u8, 0, device, descriptor.len() as u8]);
        } else {
            data.extend(((after + 6) as u16).to_be_bytes());
            data.extend([0, device, if long_lba { LONG_LBA } else { 0 }, 0]);
            data.extend((descriptor.len() as u16).to_be_bytes());
        }
        data.extend(descriptor);
        data.extend(pages);
        command.respond(task, cdb.mode_length())
    }

    /// MODE SELECT (6) and (10) (SPC-5). Nothing is changed before all of the list is known to be good.
    pub(crate) fn mode_select(&self, call: Call<'_>) -> Answer {
        let Call { cdb, command, task, data } = call;
        if cdb.has(1, 0x01) {
            // SP: nothing can be saved.
            return Err(Sense::cdb(1).bit(0).into());
        }
        if !cdb.has(1, 0x10) {
            // PF: the pages are the standard's.
            return Err(Sense::cdb(1).bit(4).into());
        }
        let len = cdb.mode_length();
        if len == 0 {
            return Ok(Step::good(0));
        }
        if len > LONGEST_LIST {
            return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH).into());
        }
        let list = command.take_list(task, data, len, LONGEST_LIST)?;
        // Held from the look to the change: what another turns off meanwhile is not turned on again.
        let mut state = self.state();
        // As for what another turns off: who preempts is before this or behind it.
        if is_fenced(task.nexus, command.preempted) {
            return Err(Refusal::Conflict);
        }
        let before = self.told(&state);
        let after = self.selected(&list, cdb.is_short())?;
        if self.write_cache() && !after.write_cache {
            state.turned_off += 1;
        }
        self.set_write_cache(&state, after.write_cache);
        self.set_write_protect(after.protect);
        if self.told(&state) != before {
            state.attend(Attention::ModeChanged, Some(task.nexus.id()));
        }
        if !after.write_cache || after.protect {
            // What the cache has got belongs on the medium from now on, and so does what it is about to get: of a write that
            // began before nobody has said that it is to be there when it ends. Even if it was off before: whoever turned it
            // off may not have flushed yet, or has failed to.
            command.work = Work::Once(Some(DiskOp::FLUSH));
            command.admission = Admission::Quiet;
            command.flushes = Some((state.turned_off, task.nexus.id()));
        }
        drop(state);
        Ok(self.start(command, task.nexus, task.waker))
    }

    /// What was in the cache when it had been turned off so often is on the medium: now others may be told.
    pub(crate) fn is_flushed(&self, turned_off: u64, by: NexusId) {
        let mut state = self.state();
        let before = self.told(&state);
        state.flushed = state.flushed.max(turned_off);
        self.set_write_cache(&state, self.write_cache());
        if self.told(&state) != before {
            state.attend(Attention::ModeChanged, Some(by));
        }
    }

    /// The modes as initiators are told of them. Who sees that there is no write cache flushes no more: so it is told of as
    /// long as something may be in it.
    pub(crate) fn told(&self, state: &State) -> Modes {
        Modes { write_cache: self.write_cache() || state.flushed < state.turned_off, protect: self.write_protect() }
    }

    /// The modes as a parameter list wants them.
    fn selected(&self, list: &[u8], short: bool) -> Result<Modes, Sense> {
        let too_short = Sense::illegal(Code::PARAMETER_LIST_LENGTH);
        let (header, at) = if short { (4, 3) } else { (8, 6) };
        if list.len() < header {
            return Err(too_short);
        }
        let (descriptor, long_lba) = if short {
            (usize::from(list[3]), false)
        } else {
            (usize::from(u16::from_be_bytes([list[6], list[7]])), list[4] & LONG_LBA != 0)
        };
        let mut rest = header + descriptor;
        if list.len() < rest {
            return Err(too_short);
        }
        match (descriptor, long_lba) {
            (0, _) => {}
            (8, false) => Self::check_descriptor(&list[header..rest], header, &self.short_descriptor(), 4, 5)?,
            (16, true) => Self::check_descriptor(&list[header..rest], header, &self.long_descriptor(), 8, 12)?,
            _ => return Err(Sense::list(at)),
        }
        let mut modes = Modes { write_cache: self.write_cache(), protect: self.write_protect() };
        let mut taken = Default::default();
        while rest < list.len() {
            rest = Page::take(list, rest, &mut modes, &mut taken)?;
        }
        Ok(modes)
    }

    /// A block descriptor may say what is, or say nothing about the number of blocks: all zeroes or all ones (SBC-4,
    /// 6.5.2). Number and length are before `number` and from `length` on; `at` is where it is in the list.
    fn check_descriptor(given: &[u8], at: usize, is: &[u8], number: usize, length: usize) -> Result<(), Sense> {
        let blocks = &given[..number];
        let silent = blocks.iter().all(|b| *b == 0) || blocks.iter().all(|b| *b == 0xff);
        if !silent && *blocks != is[..number] {
            return Err(Sense::list(at));
        }
        if given[length..] != is[length..] { Err(Sense::list(at + length)) } else { Ok(()) }
    }

    /// SBC-4, short LBA mode parameter block descriptor.
    fn short_descriptor(&self) -> [u8; 8] {
        let blocks = self.blocks().min(u64::from(u32::MAX)) as u32;
        let mut descriptor = [0; 8];
        descriptor[..4].copy_from_slice(&blocks.to_be_bytes());
        // Three bytes for the block's length; the fourth, reserved, is zero in every length there is.
        descriptor[4..].copy_from_slice(&self.config.logical_block_bytes.to_be_bytes());
        descriptor
    }

    /// SBC-4, long LBA mode parameter block descriptor.
    fn long_descriptor(&self) -> [u8; 16] {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&self.blocks().to_be_bytes());
        descriptor[12..].copy_from_slice(&self.config.logical_block_bytes.to_be_bytes());
        descriptor
    }
}

#[cfg(test)]
mod tests;
