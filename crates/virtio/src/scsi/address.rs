//! How a driver names a logical unit (virtio 1.3, 5.6.6.1).

use std::fmt;

/// The LUNs that a target can have.
pub const MAX_LUN: u16 = 16383;

/// The well-known logical unit for REPORT LUNS.
const REPORT_LUNS: [u8; 8] = [0xc1, 0x01, 0, 0, 0, 0, 0, 0];

/// Which logical unit of which target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LunAddress {
    /// The target.
    pub target: u8,
    /// The logical unit's number, at most [`MAX_LUN`].
    pub lun: u16,
}

impl LunAddress {
    /// As events have it: 1, the target, and the number as REPORT LUNS has it. Linux takes those two bytes for the
    /// number of the unit that came or went, and knows units by what REPORT LUNS has told it.
    pub(super) fn to_bytes(self) -> [u8; 8] {
        let [high, low, ..] = self.number().to_be_bytes();
        [1, self.target, high, low, 0, 0, 0, 0]
    }

    /// As REPORT LUNS of its target has it (SAM-5): peripheral device addressing as far as that goes, which is what
    /// initiators expect to find, and flat space addressing beyond.
    pub(super) fn number(self) -> u64 {
        let method = if self.lun < 256 { 0 } else { 0x4000 };
        u64::from(self.lun | method) << 48
    }
}

impl fmt::Display for LunAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "target {}, lun {}", self.target, self.lun)
    }
}

/// What a driver addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Addressed {
    /// A logical unit, which may exist.
    Unit(LunAddress),
    /// The one that knows all the others.
    ReportLuns,
    /// Nothing that there could be.
    Nothing,
}

impl Addressed {
    #[inline]
    pub(super) fn parse(lun: [u8; 8]) -> Self {
        match lun {
            // Peripheral device addressing on bus 0, or flat space.
            [1, target, high @ (0 | 0x40..=0x7f), low, 0, 0, 0, 0] => {
                Self::Unit(LunAddress { target, lun: u16::from_be_bytes([high & 0x3f, low]) })
            }
            REPORT_LUNS => Self::ReportLuns,
            _ => Self::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_writing_a_lun_are_understood_and_nothing_else_is() {
        let unit = |target, lun| Addressed::Unit(LunAddress { target, lun });
        for (bytes, addressed) in [
            ([1, 0, 0x40, 0, 0, 0, 0, 0], unit(0, 0)),
            ([1, 0, 0, 7, 0, 0, 0, 0], unit(0, 7)),
            ([1, 255, 0x7f, 0xff, 0, 0, 0, 0], unit(255, MAX_LUN)),
            (REPORT_LUNS, Addressed::ReportLuns),
            ([0, 0, 0x40, 0, 0, 0, 0, 0], Addressed::Nothing),
            ([1, 0, 0x01, 0, 0, 0, 0, 0], Addressed::Nothing),
            ([1, 0, 0x80, 0, 0, 0, 0, 0], Addressed::Nothing),
            ([1, 0, 0x40, 0, 0, 0, 0, 1], Addressed::Nothing),
        ] {
            assert_eq!(Addressed::parse(bytes), addressed, "{bytes:x?}");
        }
    }

    #[test]
    fn an_address_survives_its_ways_of_being_written() {
        for lun in [0, 255, 256, MAX_LUN] {
            let address = LunAddress { target: 200, lun };
            assert_eq!(Addressed::parse(address.to_bytes()), Addressed::Unit(address));
            assert_eq!(address.to_bytes()[2..4], address.number().to_be_bytes()[..2], "as REPORT LUNS has it");
        }
        assert_eq!(LunAddress { target: 3, lun: 255 }.number(), 0x00ff << 48);
        assert_eq!(LunAddress { target: 3, lun: 256 }.number(), 0x4100 << 48);
    }
}
