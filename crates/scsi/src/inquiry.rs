//! INQUIRY: who the unit is, and what it can do.

use crate::call::{Answer, Call};
use crate::command::Command;
use crate::config::{LunConfig, Naa};
use crate::sense::{Code, Refusal, Sense};
use crate::step::{Step, Task};
use crate::unit::LogicalUnit;

/// The vital product data pages there are (SPC-5, vital product data parameters).
const PAGES: [u8; 10] = [0x00, 0x80, 0x83, 0x85, 0x86, 0x87, 0x88, 0xb0, 0xb1, 0xb2];
/// Direct access block device, connected (SPC-5, standard INQUIRY data).
const DISK: u8 = 0x00;
/// The target could have a unit here and has none.
const NOT_THERE: u8 = 0x7f;
/// The standards that the unit claims (SPC-5, standard INQUIRY data): SAM-5, SPC-5, SBC-4, of no particular version.
const VERSIONS: [u16; 3] = [0x00a0, 0x05c0, 0x0600];
/// The length of standard INQUIRY data, in bytes.
const STANDARD: usize = 74;

impl LogicalUnit {
    /// INQUIRY (SPC-5).
    pub(crate) fn inquiry(&self, call: Call<'_>) -> Answer {
        let Call { cdb, command, task, .. } = call;
        let (vital, page) = (cdb.has(1, 1), cdb.byte(2));
        let data = &mut command.response;
        match (vital, page) {
            (false, 0) => standard(data, &self.config, DISK),
            (false, _) => return Err(Sense::cdb(2).into()),
            (true, 0x00) => data.extend(PAGES),
            (true, 0x80) => data.extend(self.config.serial.bytes()),
            (true, 0x83) => identify(data, &self.config, task.nexus.id().port),
            // SPC-5, management network addresses: there are none.
            (true, 0x85) => {}
            (true, 0x86) => extended(data),
            // SPC-5, mode page policy: every page and subpage is shared by all nexuses, and not with other units.
            (true, 0x87) => data.extend([0x3f, 0xff, 0, 0]),
            (true, 0x88) => ports(data, task.nexus.id().port),
            (true, 0xb0) => self.limits(data),
            // SBC-4, block device characteristics: the medium does not rotate, or nothing is said of it; FUA is not
            // ignored.
            (true, 0xb1) => {
                data.resize(0x3c, 0);
                data[1] = u8::from(self.config.solid_state);
                data[4] = 0x02;
            }
            (true, 0xb2) => self.provisioning(data),
            (true, _) => return Err(Sense::cdb(2).into()),
        }
        if vital {
            let [high, low] = (data.len() as u16).to_be_bytes();
            data.splice(..0, [DISK, page, high, low]);
        }
        command.respond(task, usize::from(cdb.u16(3)))
    }

    /// Block limits (SBC-4), all of it in blocks.
    fn limits(&self, data: &mut Vec<u8>) {
        let blocks = |bytes: u64| bytes / self.block();
        let short = |bytes: u64| blocks(bytes).min(u64::from(u32::MAX)) as u32;
        let config = &self.config;
        // Offsets are those of the page less its header.
        data.resize(0x3c, 0);
        let mut put = |at: usize, bytes: &[u8]| data[at - 4..][..bytes.len()].copy_from_slice(bytes);
        put(4, &[0x01, self.max_compare_and_write_blocks()]);
        let granularity = (config.physical_block_bytes / config.logical_block_bytes).min(u32::from(u16::MAX)) as u16;
        put(6, &granularity.to_be_bytes());
        put(8, &short(config.max_transfer_bytes).to_be_bytes());
        put(12, &short(config.optimal_transfer_bytes).to_be_bytes());
        if let Some(discard) = config.discard {
            put(20, &short(self.max_unmap_bytes()).to_be_bytes());
            put(24, &discard.max_descriptors.to_be_bytes());
            put(28, &short(discard.granularity_bytes).to_be_bytes());
            put(32, &(1 << 31 | short(discard.alignment_bytes)).to_be_bytes());
        }
        put(36, &blocks(config.max_write_same_bytes).to_be_bytes());
    }

    /// Logical block provisioning (SBC-4).
    fn provisioning(&self, data: &mut Vec<u8>) {
        // LBPU, LBPWS and LBPWS10, then LBPRZ; thin.
        let (flags, kind) = match self.config.discard {
            Some(discard) => (0xe0 | u8::from(discard.reads_zeroes) << 2, 2),
            None => (0, 0),
        };
        data.extend([0, flags, kind, 0]);
    }
}

/// INQUIRY of a logical unit that is not there (SPC-5, peripheral qualifier).
pub(crate) fn of_nothing(command: &mut Command, task: &Task<'_>, vital: bool, allocated: usize) -> Answer {
    if vital {
        return Err(Refusal::Sense(Sense::illegal(Code::NO_SUCH_UNIT)));
    }
    standard(&mut command.response, &LunConfig::default(), NOT_THERE);
    command.respond(task, allocated)
}

/// Standard INQUIRY data (SPC-5).
fn standard(data: &mut Vec<u8>, config: &LunConfig, device: u8) {
    // SPC-5; response data format 2 and HISUP, since LUNs are hierarchical; CMDQUE.
    data.extend([device, u8::from(config.removable) << 7, 0x07, 0x12, (STANDARD - 5) as u8, 0, 0, 0x02]);
    for (text, len) in [(&config.vendor, 8), (&config.product, 16), (&config.revision, 4)] {
        data.extend(padded(text, len));
    }
    data.resize(58, 0);
    data.extend(VERSIONS.into_iter().flat_map(u16::to_be_bytes));
    data.resize(STANDARD, 0);
}

/// Extended INQUIRY data (SPC-5), less its header.
fn extended(data: &mut Vec<u8>) {
    data.resize(0x3c, 0);
    // SIMPSUP: whatever its attribute, every task is a simple one. V_SUP: the cache is volatile.
    (data[1], data[2]) = (0x01, 0x01);
    // The longest sense data.
    data[9] = Sense::LEN as u8;
}

/// SCSI ports (SPC-5): the one that is asked, of which nothing is known but its number.
fn ports(data: &mut Vec<u8>, port: u16) {
    let [high, low] = port.to_be_bytes();
    data.extend([0, 0, high, low, 0, 0, 0, 0, 0, 0, 0, 0]);
}

/// Device identification (SPC-5): a name by vendor, the world wide name in binary and as text; and the port that is
/// asked.
fn identify(data: &mut Vec<u8>, config: &LunConfig, port: u16) {
    /// ASSOCIATION, with the kind: a designator of the port and not of the unit.
    const OF_PORT: u8 = 0x10;
    const ASCII: u8 = 2;
    const BINARY: u8 = 1;
    const UTF8: u8 = 3;
    let mut designator = |set: u8, kind: u8, name: &[u8]| {
        data.extend([set, kind, 0, name.len() as u8]);
        data.extend(name);
    };
    let mut by_vendor: Vec<u8> = padded(&config.vendor, 8).collect();
    // The length is one byte.
    by_vendor.extend(config.serial.bytes().take(0xff - 8));
    designator(ASCII, 1, &by_vendor);
    let text = match config.naa.unwrap_or_else(|| Naa::from_text(&config.serial)) {
        Naa::Short(name) => {
            designator(BINARY, 3, &name.to_be_bytes());
            format!("naa.{name:016X}")
        }
        Naa::Long(name) => {
            designator(BINARY, 3, &name.to_be_bytes());
            format!("naa.{name:032X}")
        }
    };
    // SCSI name strings end with a null and are padded to a multiple of four (SPC-5, SCSI name string designator
    // format).
    let mut text = text.into_bytes();
    text.resize((text.len() / 4 + 1) * 4, 0);
    designator(UTF8, 8, &text);
    let [high, low] = port.to_be_bytes();
    designator(BINARY, OF_PORT | 4, &[0, 0, high, low]);
}

/// As many characters as the field has, blanks at the end (SPC-5, ASCII data field requirements).
fn padded(text: &str, len: usize) -> impl Iterator<Item = u8> {
    text.bytes().chain(std::iter::repeat(b' ')).take(len)
}

impl LogicalUnit {
    /// REQUEST SENSE (SPC-5): a unit attention that is pending, or why the medium is not ready, or nothing. What is pending
    /// is taken by any allocation length, also by one that leaves no room for it: initiators clear it that way.
    pub(crate) fn request_sense(&self, call: Call<'_>) -> Result<Step, Refusal> {
        let allocated = usize::from(call.cdb.byte(4));
        let needed = allocated.min(Sense::LEN) as u64;
        if needed > call.task.data_in {
            // Before what is pending is taken, which nobody would be told.
            return Err(Refusal::Overrun(needed));
        }
        let attention = {
            let _state = self.state();
            call.task.nexus.take_attention()
        };
        let sense = attention.or_else(|| self.not_ready()).unwrap_or(Sense::NOTHING);
        call.command.response.extend(sense.to_bytes());
        call.command.respond(call.task, allocated)
    }
}

#[cfg(test)]
mod tests;
