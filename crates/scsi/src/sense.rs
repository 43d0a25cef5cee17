//! How a command ends: its status, and the sense data that says why.

use rustix::io::Errno;

use egret_disk::Op;

/// A status code (SAM-5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// It was done.
    Good = 0x00,
    /// It was not; the sense data says why.
    CheckCondition = 0x02,
    /// Not now; the initiator tries again.
    Busy = 0x08,
    /// Another nexus has the unit reserved, or a reservation key was wrong.
    ReservationConflict = 0x18,
}

/// A sense key (SPC-5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Key {
    /// Nothing to report.
    NoSense = 0x0,
    /// The unit cannot be accessed as it is.
    NotReady = 0x2,
    /// The medium, or the file that is one, failed.
    MediumError = 0x3,
    /// The unit itself failed.
    HardwareError = 0x4,
    /// The initiator asked for what cannot be.
    IllegalRequest = 0x5,
    /// Something changed that the initiator must know before it goes on.
    UnitAttention = 0x6,
    /// Writing is not possible.
    DataProtect = 0x7,
    /// What was read is not what was given to compare it with.
    Miscompare = 0xe,
}

/// An additional sense code and its qualifier (SPC-5, annex on numeric codes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code(pub u8, pub u8);

impl Code {
    /// Nothing more to say.
    pub const NONE: Self = Self(0x00, 0x00);
    /// Write error.
    pub const WRITE_ERROR: Self = Self(0x0c, 0x00);
    /// Unrecovered read error.
    pub const READ_ERROR: Self = Self(0x11, 0x00);
    /// Parameter list length error.
    pub const PARAMETER_LIST_LENGTH: Self = Self(0x1a, 0x00);
    /// Miscompare during verify operation.
    pub const MISCOMPARE: Self = Self(0x1d, 0x00);
    /// Invalid command operation code.
    pub const OPERATION_CODE: Self = Self(0x20, 0x00);
    /// Logical block address out of range.
    pub const LBA_RANGE: Self = Self(0x21, 0x00);
    /// Invalid field in CDB.
    pub const FIELD_IN_CDB: Self = Self(0x24, 0x00);
    /// Logical unit not supported.
    pub const NO_SUCH_UNIT: Self = Self(0x25, 0x00);
    /// Invalid field in parameter list.
    pub const FIELD_IN_LIST: Self = Self(0x26, 0x00);
    /// Invalid release of persistent reservation.
    pub const INVALID_RELEASE: Self = Self(0x26, 0x04);
    /// Write protected.
    pub const WRITE_PROTECTED: Self = Self(0x27, 0x00);
    /// Space allocation failed write protect.
    pub const NO_SPACE: Self = Self(0x27, 0x07);
    /// Power on, reset, or bus device reset occurred.
    pub const POWER_ON: Self = Self(0x29, 0x00);
    /// Bus device reset function occurred.
    pub const UNIT_RESET: Self = Self(0x29, 0x03);
    /// I_T nexus loss occurred.
    pub const NEXUS_LOSS: Self = Self(0x29, 0x07);
    /// Mode parameters changed.
    pub const MODE_CHANGED: Self = Self(0x2a, 0x01);
    /// Reservations preempted.
    pub const RESERVATIONS_PREEMPTED: Self = Self(0x2a, 0x03);
    /// Reservations released.
    pub const RESERVATIONS_RELEASED: Self = Self(0x2a, 0x04);
    /// Registrations preempted.
    pub const REGISTRATIONS_PREEMPTED: Self = Self(0x2a, 0x05);
    /// Capacity data has changed.
    pub const CAPACITY_CHANGED: Self = Self(0x2a, 0x09);
    /// Commands cleared by another initiator.
    pub const COMMANDS_CLEARED: Self = Self(0x2f, 0x00);
    /// Saving parameters not supported.
    pub const SAVING: Self = Self(0x39, 0x00);
    /// Medium not present.
    pub const NO_MEDIUM: Self = Self(0x3a, 0x00);
    /// Reported LUNs data has changed.
    pub const LUNS_CHANGED: Self = Self(0x3f, 0x0e);
    /// Internal target failure.
    pub const TARGET_FAILURE: Self = Self(0x44, 0x00);
    /// Medium removal prevented.
    pub const REMOVAL_PREVENTED: Self = Self(0x53, 0x02);
}

/// Where the field is that was refused (SPC-5, field pointer sense key specific data).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// In the CDB; otherwise in the parameter list.
    pub in_cdb: bool,
    /// The field's first byte.
    pub byte: u16,
    /// Its most significant bit, where it is less than a byte.
    pub bit: Option<u8>,
}

/// Why a command ended with CHECK CONDITION.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// The kind of trouble.
    pub key: Key,
    /// Which trouble.
    pub code: Code,
    /// What the command's description puts into the INFORMATION field: a block address or an offset in bytes.
    pub information: Option<u64>,
    /// The field to blame.
    pub pointer: Option<Pointer>,
}

impl Sense {
    /// The length of fixed format sense data.
    pub const LEN: usize = 18;

    /// Nothing to report.
    pub const NOTHING: Self = Self::new(Key::NoSense, Code::NONE);

    /// With neither information nor pointer.
    pub const fn new(key: Key, code: Code) -> Self {
        Self { key, code, information: None, pointer: None }
    }

    /// An ILLEGAL REQUEST.
    pub const fn illegal(code: Code) -> Self {
        Self::new(Key::IllegalRequest, code)
    }

    /// The field of the CDB that begins in `byte` has a value that it must not have.
    pub const fn cdb(byte: usize) -> Self {
        let pointer = Some(Pointer { in_cdb: true, byte: byte as u16, bit: None });
        Self { pointer, ..Self::illegal(Code::FIELD_IN_CDB) }
    }

    /// Likewise of the parameter list.
    pub const fn list(byte: usize) -> Self {
        let pointer = Some(Pointer { in_cdb: false, byte: byte as u16, bit: None });
        Self { pointer, ..Self::illegal(Code::FIELD_IN_LIST) }
    }

    /// The same, of the field whose most significant bit is `bit`.
    pub const fn bit(mut self, bit: u8) -> Self {
        if let Some(pointer) = &mut self.pointer {
            pointer.bit = Some(bit);
        }
        self
    }

    /// The same, with something in the INFORMATION field.
    pub const fn with(self, information: u64) -> Self {
        Self { information: Some(information), ..self }
    }

    /// Fixed format sense data for a current error (SPC-5). Information that does not fit into four bytes is left
    /// out, as there is to be.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = 0x70;
        bytes[2] = self.key as u8;
        bytes[7] = (Self::LEN - 8) as u8;
        (bytes[12], bytes[13]) = (self.code.0, self.code.1);
        if let Some(information) = self.information.and_then(|i| u32::try_from(i).ok()) {
            bytes[0] |= 0x80;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        if let Some(Pointer { in_cdb, byte, bit }) = self.pointer {
            bytes[15] = 0x80 | u8::from(in_cdb) << 6 | bit.map_or(0, |bit| 0x08 | bit);
            bytes[16..].copy_from_slice(&byte.to_be_bytes());
        }
        bytes
    }
}

/// Why a command is not done, when that is known before the disk is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Sense(Sense),
    Conflict,
    /// The buffers are shorter than what the command moves, in bytes.
    Overrun(u64),
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Self {
        Self::Sense(sense)
    }
}

/// What the initiator is told of a disk's failure.
///
/// Where on the disk it was is not known, only where the operation began, so there is no INFORMATION: an initiator that
/// is told an address takes what precedes it as good.
pub(crate) fn failure(op: Op, errno: Errno) -> (Status, Option<Sense>) {
    let check = |key, code| (Status::CheckCondition, Some(Sense::new(key, code)));
    match errno {
        Errno::AGAIN | Errno::BUSY | Errno::NOMEM | Errno::INTR | Errno::CANCELED => (Status::Busy, None),
        Errno::BADE => (Status::ReservationConflict, None),
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => check(Key::DataProtect, Code::NO_SPACE),
        Errno::ROFS | Errno::PERM | Errno::ACCESS => check(Key::DataProtect, Code::WRITE_PROTECTED),
        Errno::IO | Errno::NODATA | Errno::ILSEQ if op == Op::Read => check(Key::MediumError, Code::READ_ERROR),
        Errno::IO | Errno::NODATA | Errno::ILSEQ => check(Key::MediumError, Code::WRITE_ERROR),
        _ => check(Key::HardwareError, Code::TARGET_FAILURE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SPC-5, fixed format sense data.
    #[test]
    fn fixed_format_has_every_field_where_the_standard_puts_it() {
        let sense = Sense::new(Key::Miscompare, Code::MISCOMPARE).with(0x0102_0304).to_bytes();
        assert_eq!(sense, [0xf0, 0, 0x0e, 1, 2, 3, 4, 10, 0, 0, 0, 0, 0x1d, 0, 0, 0, 0, 0]);
    }

    /// SPC-5, fixed format sense data.
    #[test]
    fn information_that_does_not_fit_is_not_valid() {
        let sense = Sense::illegal(Code::LBA_RANGE).with(1 << 32).to_bytes();
        assert_eq!(sense[..7], [0x70, 0, 5, 0, 0, 0, 0]);
    }

    /// SPC-5, field pointer sense key specific data.
    #[test]
    fn the_field_pointer_names_byte_and_bit() {
        assert_eq!(Sense::cdb(1).bit(3).to_bytes()[15..], [0xcb, 0, 1]);
        assert_eq!(Sense::list(0x102).to_bytes()[15..], [0x80, 1, 2]);
    }

    #[test]
    fn a_disk_s_failure_becomes_the_sense_key_of_its_kind() {
        let key = |op, errno| failure(op, errno).1.map(|s| s.key);
        let write = Op::Write { fua: false };
        assert_eq!(key(Op::Read, Errno::IO), Some(Key::MediumError));
        assert_eq!(failure(write, Errno::IO).1.unwrap().code, Code::WRITE_ERROR);
        assert_eq!(failure(write, Errno::NOSPC).1.unwrap().code, Code::NO_SPACE);
        assert_eq!(key(write, Errno::ROFS), Some(Key::DataProtect));
        assert_eq!(key(Op::Flush, Errno::INVAL), Some(Key::HardwareError));
        assert_eq!(failure(Op::Read, Errno::AGAIN), (Status::Busy, None));
        assert_eq!(failure(write, Errno::BADE), (Status::ReservationConflict, None));
    }
}
