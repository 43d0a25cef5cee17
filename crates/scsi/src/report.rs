//! Commands that report what the unit and its target are like.

use crate::call::{Answer, Call};
use crate::cdb::{ACTION, Spec, TABLE};
use crate::nexus::Attention;
use crate::sense::{Refusal, Sense};
use crate::step::Step;
use crate::unit::LogicalUnit;

/// Everything but well known logical units (SPC-5): there are none of those, or of any other special kind.
const SELECT_ALL: [u8; 2] = [0x00, 0x02];
/// Well known, administrative and subsidiary logical units.
const SELECT_NONE: [u8; 4] = [0x01, 0x10, 0x11, 0x12];

impl LogicalUnit {
    /// READ CAPACITY (10) (SBC-4).
    pub(crate) fn read_capacity_10(&self, call: Call<'_>) -> Answer {
        // All ones say that the long command is needed.
        let last = self.last_block().min(u64::from(u32::MAX)) as u32;
        call.command.response.extend(last.to_be_bytes());
        call.command.response.extend(self.config.logical_block_bytes.to_be_bytes());
        call.command.respond(call.task, 8)
    }

    /// READ CAPACITY (16) (SBC-4).
    pub(crate) fn read_capacity_16(&self, call: Call<'_>) -> Answer {
        let data = &mut call.command.response;
        data.extend(self.last_block().to_be_bytes());
        data.extend(self.config.logical_block_bytes.to_be_bytes());
        // No protection information; then how many logical blocks make a physical one, as a power of two.
        let exponent = (self.config.physical_block_bytes / self.config.logical_block_bytes).ilog2();
        data.extend([0, exponent.min(0xf) as u8]);
        // LBPME and LBPRZ; the first physical block begins with the first logical one.
        let provisioning = self.config.discard.map_or(0, |d| 0x80 | u8::from(d.reads_zeroes) << 6);
        data.extend([provisioning, 0]);
        data.resize(32, 0);
        call.command.respond(call.task, call.cdb.u32(10) as usize)
    }

    /// The last block's address. A medium that has lost all of its blocks cannot say so.
    fn last_block(&self) -> u64 {
        self.blocks().saturating_sub(1)
    }

    /// REPORT SUPPORTED OPERATION CODES (SPC-5).
    pub(crate) fn report_opcodes(&self, call: Call<'_>) -> Answer {
        const UNSUPPORTED: u8 = 1;
        const STANDARD: u8 = 3;
        let Call { cdb, command, task, .. } = call;
        let (timeouts, options) = (cdb.has(2, 0x80), cdb.byte(2) & 0x07);
        let (code, action) = (cdb.byte(3), cdb.u16(4));
        let data = &mut command.response;
        if options == 0 {
            data.extend([0; 4]);
            for spec in TABLE.iter().filter(|spec| self.has(spec.needs)) {
                let action = spec.action.unwrap_or(0);
                let flags = u8::from(spec.action.is_some()) | u8::from(timeouts) << 1;
                data.extend([spec.code, 0, 0, action, 0, flags, 0, spec.usage.len() as u8]);
                if timeouts {
                    data.extend(NO_TIMEOUTS);
                }
            }
            let len = (data.len() - 4) as u32;
            data[..4].copy_from_slice(&len.to_be_bytes());
            return command.respond(task, cdb.u32(6) as usize);
        }
        let has_actions = TABLE.iter().any(|s| s.code == code && s.action.is_some());
        let known = TABLE.iter().any(|s| s.code == code && self.has(s.needs));
        let with_action = match options {
            1 if has_actions => return Err(Sense::cdb(2).bit(2).into()),
            1 => false,
            2 if known && !has_actions => return Err(Sense::cdb(2).bit(2).into()),
            2 => true,
            // Either, whichever the operation code has; one without has only the action zero, so that another matches nothing.
            3 => has_actions || action != 0,
            _ => return Err(Sense::cdb(2).bit(2).into()),
        };
        let wanted = |s: &&Spec| s.code == code && (!with_action || s.action.map(u16::from) == Some(action));
        match TABLE.iter().find(wanted).filter(|s| self.has(s.needs)) {
            None => data.extend([0, UNSUPPORTED, 0, 0]),
            Some(spec) => {
                data.extend([0, u8::from(timeouts) << 7 | STANDARD, 0, spec.usage.len() as u8]);
                data.extend(spec.usage);
                if let Some(action) = spec.action {
                    data[5] = data[5] & !ACTION | action;
                }
                if timeouts {
                    data.extend(NO_TIMEOUTS);
                }
            }
        }
        command.respond(task, cdb.u32(6) as usize)
    }
}

/// A command timeouts descriptor (SPC-5) that says nothing.
const NO_TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-5): what virtio-scsi can ask for.
pub(crate) fn report_task_management(call: Call<'_>) -> Answer {
    let allocated = call.cdb.u32(6) as usize;
    if allocated < 4 {
        return Err(Sense::cdb(6).into());
    }
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET and QUERY TASK; then QUERY TASK SET and I_T NEXUS
    // RESET.
    let (first, second) = (0x80 | 0x40 | 0x10 | 0x08 | 0x04, 0x02 | 0x01);
    call.command.response.extend([first, second, 0, 0]);
    if call.cdb.has(2, 0x80) {
        // REPD: the same with timeouts, of which there are none.
        call.command.response[3] = 12;
        call.command.response.resize(16, 0);
    }
    call.command.respond(call.task, allocated)
}

/// REPORT LUNS (SPC-5).
pub(crate) fn report_luns(call: Call<'_>) -> Answer {
    let (select, allocated) = (call.cdb.byte(2), call.cdb.u32(6) as usize);
    let luns = match select {
        _ if SELECT_ALL.contains(&select) => call.task.luns,
        _ if SELECT_NONE.contains(&select) => &[],
        _ => return Err(Sense::cdb(2).into()),
    };
    if allocated < 16 {
        return Err(Sense::cdb(6).into());
    }
    // Only as many are listed as there is room for: that costs what the initiator gives.
    let needed = (8 + 8 * luns.len()).min(allocated);
    if needed as u64 > call.task.data_in {
        return Err(Refusal::Overrun(needed as u64));
    }
    // Whoever asks need not be told (SAM-5, unit attention conditions).
    call.task.nexus.forget(Attention::LunsChanged);
    let data = &mut call.command.response;
    data.extend((8 * luns.len() as u32).to_be_bytes());
    data.extend([0; 4]);
    data.extend(luns.iter().take(needed.div_ceil(8) - 1).flat_map(|lun| lun.to_be_bytes()));
    call.command.respond(call.task, allocated)
}

/// SEND DIAGNOSTIC (SPC-5): the default self-test, which passes: a disk that does not work says so when it is used.
pub(crate) fn send_diagnostic(call: Call<'_>) -> Answer {
    // SELF-TEST CODE: those in the background and the others.
    if call.cdb.byte(1) & 0xe0 == 0 { Ok(Step::good(0)) } else { Err(Sense::cdb(1).bit(7).into()) }
}

/// LOG SENSE (SPC-5): the supported log pages, which is all there is.
pub(crate) fn log_sense(call: Call<'_>) -> Answer {
    let (cdb, page) = (call.cdb, call.cdb.byte(2) & 0x3f);
    if cdb.has(1, 0x02) {
        // PPC: there are no parameters to have changed.
        return Err(Sense::cdb(1).bit(1).into());
    }
    if page != 0 {
        return Err(Sense::cdb(2).bit(5).into());
    }
    if cdb.u16(5) != 0 {
        return Err(Sense::cdb(5).into());
    }
    let list: &[u8] = match cdb.byte(3) {
        0x00 => &[0x00, 0, 0, 1, 0x00],
        // With subpages.
        0xff => &[0x40, 0xff, 0, 4, 0x00, 0x00, 0x00, 0xff],
        _ => return Err(Sense::cdb(3).into()),
    };
    call.command.response.extend(list);
    call.command.respond(call.task, usize::from(cdb.u16(7)))
}

#[cfg(test)]
mod tests;
