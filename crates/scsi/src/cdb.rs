//! The commands there are: one table that CDBs are checked and dispatched by, and that REPORT SUPPORTED OPERATION CODES
//! shows.

use crate::sense::{Code, Sense};

/// Who handles a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    TestUnitReady,
    RequestSense,
    Inquiry,
    ModeSelect,
    ModeSense,
    StartStopUnit,
    SendDiagnostic,
    PreventAllow,
    ReadCapacity10,
    ReadCapacity16,
    Read,
    Write,
    WriteAndVerify,
    Verify,
    SynchronizeCache,
    WriteSame,
    Unmap,
    CompareAndWrite,
    LogSense,
    ReserveIn,
    ReserveOut,
    ReserveUnit,
    ReleaseUnit,
    ReportLuns,
    ReportOpcodes,
    ReportTaskManagement,
}

/// What a reservation of another nexus has against a command (SPC-5 and SPC-2, tables of commands allowed in the
/// presence of reservations; SBC-4, reservations).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing: it is allowed, or decides for itself.
    Free,
    /// It needs the unit and not the medium: RESERVE keeps it out, and persistent reservations have nothing against it.
    Unit,
    /// It reads the medium: an exclusive access reservation keeps it out.
    Read,
    /// It changes something, or is treated like that: every reservation keeps it out.
    Write,
    /// As `Write`, if the given bits of the given byte are not as given: only then does it take something away.
    Unless { byte: usize, mask: u8, is: u8 },
}

/// What the logical unit must have for a command to exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Discard,
    Removable,
    CompareAndWrite,
}

/// One command: an operation code, or one service action of it.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) code: u8,
    pub(crate) action: Option<u8>,
    pub(crate) run: Run,
    pub(crate) access: Access,
    pub(crate) needs: Needs,
    /// The bits of the CDB that are looked at; as long as the CDB is.
    pub(crate) usage: &'static [u8],
    /// The bits that must be zero, of the CDB as a big-endian number.
    reserved: u128,
    /// All of the CDB's bits, likewise.
    all: u128,
}

/// Vendor specific bits of the CONTROL byte. NACA, which this target does not do (SAM-5, CDB), is not among them.
const CONTROL: u8 = 0xc0;
/// Where SCSI-2 had the logical unit number, which some initiators still put there before they know better.
const OLD_LUN: u8 = 0xe0;

impl Spec {
    const fn new(code: u8, run: Run, access: Access, usage: &'static [u8]) -> Self {
        let all = !0 << (8 * (16 - usage.len()));
        let mut spec = Self { code, action: None, run, access, needs: Needs::Nothing, usage, reserved: all, all };
        let mut i = 0;
        while i < usage.len() {
            spec = spec.ignores(i, if i == 0 { 0xff } else { usage[i] });
            i += 1;
        }
        let spec = spec.ignores(usage.len() - 1, CONTROL);
        if usage.len() == 6 { spec.ignores(1, OLD_LUN) } else { spec }
    }

    /// Bits that may be set and mean nothing here: obsolete, or a hint that is not taken.
    const fn ignores(mut self, byte: usize, bits: u8) -> Self {
        self.reserved &= !((bits as u128) << (8 * (15 - byte)));
        self
    }

    const fn action(mut self, action: u8) -> Self {
        self.action = Some(action);
        self.ignores(1, ACTION)
    }

    const fn needs(mut self, needs: Needs) -> Self {
        self.needs = needs;
        self
    }
}

/// The SERVICE ACTION field, in byte 1.
pub(crate) const ACTION: u8 = 0x1f;

/// A CDB that has passed the checks of its table entry: long enough, and no reserved bit set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cdb {
    /// Its bytes as a big-endian number, zeroes after its end: it fits into registers.
    number: u128,
}

impl Cdb {
    /// Finds a command in the table.
    ///
    /// # Errors
    ///
    /// INVALID COMMAND OPERATION CODE where there is no such command, INVALID FIELD IN CDB for an unknown service
    /// action, a reserved bit that is set, or bytes that are missing.
    #[inline(always)]
    pub(crate) fn parse(cdb: &[u8]) -> Result<(Self, &'static Spec), Sense> {
        let &[code, ..] = cdb else { return Err(Sense::illegal(Code::OPERATION_CODE)) };
        let first = FIRST[usize::from(code)];
        if first == NONE {
            return Err(Sense::illegal(Code::OPERATION_CODE));
        }
        let mut spec = &TABLE[usize::from(first)];
        if spec.action.is_some() {
            let action = cdb.get(1).map(|byte| byte & ACTION);
            let found = TABLE[usize::from(first)..].iter().take_while(|s| s.code == code).find(|s| s.action == action);
            spec = found.ok_or(Sense::cdb(1).bit(4))?;
        }
        let len = spec.usage.len();
        // What is on the wire is often longer than the CDB: then all is copied at once, and the end made zero.
        let mut number = match cdb.first_chunk() {
            Some(bytes) => u128::from_be_bytes(*bytes),
            None if cdb.len() < len => return Err(Sense::cdb(cdb.len())),
            None => cdb.iter().fold(0, |n, byte| n << 8 | u128::from(*byte)) << (8 * (16 - cdb.len())),
        };
        number &= spec.all;
        let wrong = number & spec.reserved;
        if wrong != 0 {
            let zeroes = wrong.leading_zeros();
            return Err(Sense::cdb(zeroes as usize / 8).bit(7 - (zeroes % 8) as u8));
        }
        Ok((Self { number }, spec))
    }

    /// The byte at `at`.
    #[inline]
    pub(crate) fn byte(&self, at: usize) -> u8 {
        (self.number >> (8 * (15 - at))) as u8
    }

    /// The big-endian number at `at`.
    #[inline]
    pub(crate) fn u16(&self, at: usize) -> u16 {
        (self.number >> (8 * (14 - at))) as u16
    }

    /// The big-endian number at `at`.
    #[inline]
    pub(crate) fn u32(&self, at: usize) -> u32 {
        (self.number >> (8 * (12 - at))) as u32
    }

    /// The big-endian number at `at`.
    #[inline]
    fn u64(&self, at: usize) -> u64 {
        (self.number >> (8 * (8 - at))) as u64
    }

    /// Whether the bits in `mask` of byte `at` are set, any of them.
    #[inline]
    pub(crate) fn has(&self, at: usize, mask: u8) -> bool {
        self.byte(at) & mask != 0
    }

    /// What the first three bits of the operation code say of the layout (SPC-5, operation code).
    #[inline]
    fn group(&self) -> u8 {
        self.byte(0) >> 5
    }

    /// Whether it has six bytes.
    pub(crate) fn is_short(&self) -> bool {
        self.group() == 0
    }

    /// The logical block address, where the CDB's length has it.
    #[inline(always)]
    pub(crate) fn lba(&self) -> u64 {
        match self.group() {
            0 => u64::from(self.u32(0) & 0x1f_ffff),
            4 => self.u64(2),
            _ => u64::from(self.u32(2)),
        }
    }

    /// The transfer, verification or other length, likewise. Zero is 256 in a six-byte CDB (SBC-4, READ (6)).
    #[inline(always)]
    pub(crate) fn blocks(&self) -> u64 {
        match self.group() {
            0 if self.byte(4) == 0 => 256,
            0 => u64::from(self.byte(4)),
            4 => u64::from(self.u32(10)),
            5 => u64::from(self.u32(6)),
            _ => u64::from(self.u16(7)),
        }
    }

    /// Where the length is that [`blocks`](Self::blocks) returns, for a field pointer.
    pub(crate) fn blocks_at(&self) -> usize {
        match self.group() {
            0 => 4,
            4 => 10,
            5 => 6,
            _ => 7,
        }
    }

    /// The allocation or parameter list length of MODE SENSE and MODE SELECT, of which both sizes exist.
    pub(crate) fn mode_length(&self) -> usize {
        if self.is_short() { usize::from(self.byte(4)) } else { usize::from(self.u16(7)) }
    }
}

/// No such operation code.
const NONE: u8 = 0xff;

/// Where an operation code begins in `TABLE`.
static FIRST: [u8; 256] = {
    let mut first = [NONE; 256];
    let mut i = TABLE.len();
    while i > 0 {
        i -= 1;
        first[TABLE[i].code as usize] = i as u8;
    }
    first
};

/// A hint about how the blocks belong together.
const GROUP_NUMBER: u8 = 0x3f;
/// Rebuild assist recovery control: there is nothing to recover with.
const RARC: u8 = 0x04;
/// Synchronise the non-volatile cache, obsolete since SBC-4.
const SYNC_NV: u8 = 0x04;

const LBA10: [u8; 10] = [0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0];
const LBA12: [u8; 12] = [0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0];
const LBA16: [u8; 16] = [0, 0, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0];

/// The usage of a command that has its address and length in the usual places, and `flags` in byte 1.
const fn usual<const N: usize>(layout: [u8; N], code: u8, flags: u8) -> [u8; N] {
    let mut usage = layout;
    usage[0] = code;
    usage[1] = flags;
    usage
}

/// An entry of the table for such a command.
macro_rules! usual {
    ($layout:ident, $code:literal, $flags:literal, $run:ident, $access:ident) => {
        Spec::new($code, Run::$run, Access::$access, &const { usual($layout, $code, $flags) })
            .ignores($layout.len() - if $layout.len() == 10 { 4 } else { 2 }, GROUP_NUMBER)
    };
}

const FREE: Access = Access::Free;
const UNIT: Access = Access::Unit;

/// Every command, service actions of one operation code next to each other.
pub(crate) static TABLE: [Spec; 51] = [
    Spec::new(0x00, Run::TestUnitReady, UNIT, &[0x00, 0, 0, 0, 0, 0]),
    Spec::new(0x03, Run::RequestSense, FREE, &[0x03, 0, 0, 0, 0xff, 0]),
    Spec::new(0x08, Run::Read, Access::Read, &[0x08, 0x1f, 0xff, 0xff, 0xff, 0]),
    Spec::new(0x0a, Run::Write, Access::Write, &[0x0a, 0x1f, 0xff, 0xff, 0xff, 0]),
    Spec::new(0x12, Run::Inquiry, FREE, &[0x12, 0x01, 0xff, 0xff, 0xff, 0]),
    Spec::new(0x15, Run::ModeSelect, Access::Write, &[0x15, 0x11, 0, 0, 0xff, 0]),
    // Third parties and extents are obsolete; what identifies a reservation of an extent means nothing without one.
    Spec::new(0x16, Run::ReserveUnit, UNIT, &[0x16, 0, 0, 0, 0, 0]).ignores(2, 0xff),
    Spec::new(0x17, Run::ReleaseUnit, FREE, &[0x17, 0, 0, 0, 0, 0]).ignores(2, 0xff),
    Spec::new(0x1a, Run::ModeSense, Access::Write, &[0x1a, 0x08, 0xff, 0xff, 0xff, 0]),
    // Starting is allowed; stopping, ejecting and power conditions are not (SBC-4, reservations).
    Spec::new(0x1b, Run::StartStopUnit, Access::Unless { byte: 4, mask: 0xf1, is: 0x01 }, &[0x1b, 0x01, 0, 0, 0xf7, 0]),
    // Whether the test may take the unit or the device off line does not matter.
    Spec::new(0x1d, Run::SendDiagnostic, Access::Write, &[0x1d, 0xf4, 0, 0, 0, 0]).ignores(1, 0x03),
    // Allowing removal is allowed; preventing it is not (SPC-5).
    Spec::new(0x1e, Run::PreventAllow, Access::Unless { byte: 4, mask: 0x03, is: 0 }, &[0x1e, 0, 0, 0, 0x03, 0])
        .needs(Needs::Removable),
    Spec::new(0x25, Run::ReadCapacity10, FREE, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        .ignores(2, 0xff)
        .ignores(3, 0xff)
        .ignores(4, 0xff)
        .ignores(5, 0xff)
        .ignores(8, 0x01),
    usual!(LBA10, 0x28, 0x18, Read, Read).ignores(1, RARC),
    usual!(LBA10, 0x2a, 0x18, Write, Write),
    usual!(LBA10, 0x2e, 0x16, WriteAndVerify, Write),
    usual!(LBA10, 0x2f, 0x16, Verify, Read),
    usual!(LBA10, 0x35, 0x02, SynchronizeCache, Write).ignores(1, SYNC_NV),
    usual!(LBA10, 0x41, 0x08, WriteSame, Write),
    Spec::new(0x42, Run::Unmap, Access::Write, &[0x42, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0])
        .ignores(6, GROUP_NUMBER)
        .needs(Needs::Discard),
    Spec::new(0x4d, Run::LogSense, FREE, &[0x4d, 0x02, 0xff, 0xff, 0, 0xff, 0xff, 0xff, 0xff, 0]),
    Spec::new(0x55, Run::ModeSelect, Access::Write, &[0x55, 0x11, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    Spec::new(0x56, Run::ReserveUnit, UNIT, &[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0]).ignores(2, 0xff),
    Spec::new(0x57, Run::ReleaseUnit, FREE, &[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0]).ignores(2, 0xff),
    Spec::new(0x5a, Run::ModeSense, Access::Write, &[0x5a, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0]),
    reserve_in(0),
    reserve_in(1),
    reserve_in(2),
    reserve_in(3),
    reserve_out(0),
    reserve_out(1),
    reserve_out(2),
    reserve_out(3),
    reserve_out(4),
    reserve_out(5),
    reserve_out(6),
    usual!(LBA16, 0x88, 0x18, Read, Read).ignores(1, RARC),
    Spec::new(
        0x89,
        Run::CompareAndWrite,
        Access::Write,
        &[0x89, 0x18, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0xff, 0, 0],
    )
    .ignores(14, GROUP_NUMBER)
    .needs(Needs::CompareAndWrite),
    usual!(LBA16, 0x8a, 0x18, Write, Write),
    usual!(LBA16, 0x8e, 0x16, WriteAndVerify, Write),
    usual!(LBA16, 0x8f, 0x16, Verify, Read),
    usual!(LBA16, 0x91, 0x02, SynchronizeCache, Write).ignores(1, SYNC_NV),
    usual!(LBA16, 0x93, 0x09, WriteSame, Write),
    Spec::new(0x9e, Run::ReadCapacity16, FREE, &[0x9e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .action(0x10)
        .ignores(2, 0xff)
        .ignores(3, 0xff)
        .ignores(4, 0xff)
        .ignores(5, 0xff)
        .ignores(6, 0xff)
        .ignores(7, 0xff)
        .ignores(8, 0xff)
        .ignores(9, 0xff)
        .ignores(14, 0x01),
    Spec::new(0xa0, Run::ReportLuns, FREE, &[0xa0, 0, 0xff, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0]).ignores(1, OLD_LUN),
    Spec::new(0xa3, Run::ReportOpcodes, FREE, &[0xa3, 0, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .action(0x0c),
    Spec::new(0xa3, Run::ReportTaskManagement, FREE, &[0xa3, 0, 0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0])
        .action(0x0d),
    usual!(LBA12, 0xa8, 0x18, Read, Read).ignores(1, RARC),
    usual!(LBA12, 0xaa, 0x18, Write, Write),
    usual!(LBA12, 0xae, 0x16, WriteAndVerify, Write),
    usual!(LBA12, 0xaf, 0x16, Verify, Read),
];

const fn reserve_in(action: u8) -> Spec {
    Spec::new(0x5e, Run::ReserveIn, UNIT, &[0x5e, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0]).action(action)
}

const fn reserve_out(action: u8) -> Spec {
    Spec::new(0x5f, Run::ReserveOut, UNIT, &[0x5f, 0, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0]).action(action)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_so_that_service_actions_are_neighbours() {
        assert!(TABLE.windows(2).all(|w| (w[0].code, w[0].action) < (w[1].code, w[1].action)));
        assert!(TABLE.iter().all(|s| s.usage[0] == s.code && s.usage.len() <= 16));
    }

    /// SPC-5, operation code.
    #[test]
    fn a_cdb_s_length_is_what_its_group_says() {
        for spec in &TABLE {
            let len = [6, 10, 10, 0, 16, 12][usize::from(spec.code >> 5)];
            assert_eq!(spec.usage.len(), len, "{:#x}", spec.code);
        }
    }

    #[test]
    fn fields_are_where_each_length_has_them() {
        let read = |cdb: &[u8]| Cdb::parse(cdb).map(|(c, _)| (c.lba(), c.blocks())).unwrap();
        assert_eq!(read(&[8, 0x1f, 2, 3, 0, 0]), (0x1f_0203, 256));
        assert_eq!(read(&[0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0]), (0x0102_0304, 0x0506));
        assert_eq!(read(&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]), (0x0102_0304, 0x0506_0708));
        let long = [0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0];
        assert_eq!(read(&long), (0x0102_0304_0506_0708, 0x090a_0b0c));
    }

    #[test]
    fn every_reserved_bit_of_every_command_is_refused_and_pointed_at() {
        for spec in &TABLE {
            for bit in 0..8 * spec.usage.len() as u32 {
                let (byte, mask) = (bit as usize / 8, 0x80u8 >> (bit % 8));
                let reserved = spec.reserved & (1 << (127 - bit)) != 0;
                if byte == 0 || spec.action.is_some() && byte == 1 && ACTION & mask != 0 {
                    continue;
                }
                let mut cdb = vec![0; spec.usage.len()];
                (cdb[0], cdb[1]) = (spec.code, spec.action.unwrap_or(0));
                cdb[byte] |= mask;
                let expected = reserved.then(|| Sense::cdb(byte).bit(7 - (bit % 8) as u8));
                assert_eq!(Cdb::parse(&cdb).err(), expected, "{cdb:02x?}");
            }
        }
    }

    #[test]
    fn naca_is_refused_because_the_target_says_that_it_has_no_normaca() {
        assert_eq!(Cdb::parse(&[0, 0, 0, 0, 0, 0x04]).err(), Some(Sense::cdb(5).bit(2)));
    }

    #[test]
    fn a_cdb_that_is_short_is_refused_at_the_byte_that_is_missing() {
        for spec in &TABLE {
            let mut cdb = vec![0; spec.usage.len()];
            (cdb[0], cdb[1]) = (spec.code, spec.action.unwrap_or(0));
            assert!(Cdb::parse(&cdb).is_ok());
            cdb.pop();
            assert_eq!(Cdb::parse(&cdb).err(), Some(Sense::cdb(cdb.len())));
        }
        assert_eq!(Cdb::parse(&[]).err(), Some(Sense::illegal(Code::OPERATION_CODE)));
    }

    /// SPC-5, command descriptor block.
    #[test]
    fn what_is_not_in_the_table_is_an_invalid_operation_code_or_service_action() {
        for code in 0..=0xff {
            let known = TABLE.iter().any(|s| s.code == code);
            let found = Cdb::parse(&[code, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            let invalid = found.err() == Some(Sense::illegal(Code::OPERATION_CODE));
            assert_eq!(invalid, !known, "{code:#x}");
        }
        let mut unknown = [0; 16];
        (unknown[0], unknown[1]) = (0x9e, 0x1f);
        assert_eq!(Cdb::parse(&unknown).err(), Some(Sense::cdb(1).bit(4)));
    }
}
