//! What a logical unit is made of.

use thiserror::Error;

/// A world wide name (SPC-5, NAA designator format).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Naa {
    /// Eight bytes: NAA 2, 3 or 5, in the first four bits.
    Short(u64),
    /// Sixteen bytes: NAA 6.
    Long(u128),
}

impl Naa {
    /// A locally assigned name (NAA 3) that is always the same for the same text.
    ///
    /// Two texts may share a name, with the odds of 60 bits: who must be sure gives names.
    pub fn from_text(text: &str) -> Self {
        Self::Short(3 << 60 | name_of(text))
    }

    fn is_known(self) -> bool {
        match self {
            Self::Short(name) => matches!(name >> 60, 2 | 3 | 5),
            Self::Long(name) => name >> 124 == 6,
        }
    }
}

/// A number of 60 bits that is always the same for the same text.
pub(crate) fn name_of(text: &str) -> u64 {
    // FNV-1a, because it must never change: guests find their disks by it.
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    hash & !(0xf << 60)
}

/// What unmapping can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardConfig {
    /// The most that one operation asks for, in bytes.
    pub max_bytes: u64,
    /// What an operation should be a multiple of, in bytes.
    pub granularity_bytes: u64,
    /// Where the first such multiple begins, in bytes.
    pub alignment_bytes: u64,
    /// How many ranges one UNMAP may have; at least one.
    pub max_descriptors: u32,
    /// Whether blocks read as zeroes once they are unmapped.
    pub reads_zeroes: bool,
}

/// What a logical unit is made of: what is known of the disk, and how it presents itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunConfig {
    /// The disk's size, in bytes. What is less than a block at its end is not used.
    pub capacity_bytes: u64,
    /// The unit of addresses and lengths, in bytes.
    pub logical_block_bytes: u32,
    /// What writes should be multiples of, in bytes.
    pub physical_block_bytes: u32,
    /// Whether every write is refused.
    pub read_only: bool,
    /// Whether the medium can be ejected.
    pub removable: bool,
    /// Whether writes may stay in a cache until a flush, until the initiator says otherwise (WCE).
    pub write_cache: bool,
    /// Whether the disk has no seek time.
    pub solid_state: bool,
    /// What unmapping can do; `None` where there is no unmapping.
    pub discard: Option<DiscardConfig>,
    /// The most that one operation that writes zeroes asks for, in bytes.
    pub max_write_zeroes_bytes: u64,
    /// The most that one WRITE SAME may cover, in bytes.
    pub max_write_same_bytes: u64,
    /// The most that one command may move, in bytes; zero for any amount.
    pub max_transfer_bytes: u64,
    /// What a command moves best, in bytes; zero for not saying.
    pub optimal_transfer_bytes: u64,
    /// The most that COMPARE AND WRITE compares, in blocks; zero for not having the command.
    pub max_compare_and_write_blocks: u8,
    /// Who made it: at most 8 characters.
    pub vendor: String,
    /// What it is: at most 16 characters.
    pub product: String,
    /// Which edition: at most 4 characters.
    pub revision: String,
    /// The serial number: at most 252 characters, and the same for as long as the disk exists.
    pub serial: String,
    /// The world wide name; of the serial number where there is none.
    pub naa: Option<Naa>,
}

impl Default for LunConfig {
    /// A disk of no size and no name that can write and has nothing special.
    fn default() -> Self {
        Self {
            capacity_bytes: 0,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            read_only: false,
            removable: false,
            write_cache: true,
            solid_state: true,
            discard: None,
            max_write_zeroes_bytes: 1 << 30,
            max_write_same_bytes: 1 << 32,
            max_transfer_bytes: 0,
            optimal_transfer_bytes: 0,
            max_compare_and_write_blocks: 128,
            vendor: "EGRET".into(),
            product: "DISK".into(),
            revision: "1".into(),
            serial: String::new(),
            naa: None,
        }
    }
}

/// Why there can be no such logical unit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// Not a block size.
    #[error("{what} block size must be a power of two in 512..={max}, got {bytes}")]
    BlockSize {
        /// Which one.
        what: &'static str,
        /// The largest there may be, in bytes.
        max: u32,
        /// What was asked for, in bytes.
        bytes: u32,
    },
    /// The physical block is the smaller one.
    #[error("physical block size {physical} must be at least the logical block size {logical}")]
    PhysicalBelowLogical {
        /// In bytes.
        physical: u32,
        /// In bytes.
        logical: u32,
    },
    /// Not one block of it.
    #[error("capacity of {bytes} bytes is less than one block of {block}")]
    Empty {
        /// The capacity in bytes.
        bytes: u64,
        /// The block in bytes.
        block: u32,
    },
    /// Something that does not fit into its field, or is not text.
    #[error("{what} {text:?} must be at most {max} printable ASCII characters")]
    Text {
        /// What it is.
        what: &'static str,
        /// What was given.
        text: String,
        /// How many characters there may be.
        max: usize,
    },
    /// Two such units would be taken for the same one.
    #[error("a logical unit needs a serial number or a world wide name: initiators tell units apart by them")]
    Nameless,
    /// Not a world wide name.
    #[error("world wide name must begin with 2, 3 or 5 (8 bytes) or 6 (16 bytes), got {0:x?}")]
    Naa(Naa),
    /// An UNMAP that could not unmap anything.
    #[error("an UNMAP must have room for at least one range")]
    NoDescriptors,
    /// What was stored is no table of reservations.
    #[error("these are reservations that no unit can have")]
    Reservations,
    /// A limit that is less than a block.
    #[error("{what} of {bytes} bytes is less than one block of {block}")]
    Limit {
        /// Which one.
        what: &'static str,
        /// What was asked for.
        bytes: u64,
        /// The block in bytes.
        block: u32,
    },
}

/// The largest logical block, in bytes.
const MAX_BLOCK: u32 = 1 << 16;

impl LunConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let block = self.logical_block_bytes;
        for (what, bytes, max) in [("logical", block, MAX_BLOCK), ("physical", self.physical_block_bytes, 1 << 30)] {
            if !bytes.is_power_of_two() || !(512..=max).contains(&bytes) {
                return Err(ConfigError::BlockSize { what, max, bytes });
            }
        }
        if self.physical_block_bytes < block {
            return Err(ConfigError::PhysicalBelowLogical { physical: self.physical_block_bytes, logical: block });
        }
        if self.capacity_bytes < u64::from(block) {
            return Err(ConfigError::Empty { bytes: self.capacity_bytes, block });
        }
        for (what, text, max) in [
            ("vendor", &self.vendor, 8),
            ("product", &self.product, 16),
            ("revision", &self.revision, 4),
            ("serial", &self.serial, 252),
        ] {
            if text.len() > max || !text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
                return Err(ConfigError::Text { what, text: text.clone(), max });
            }
        }
        if self.discard.is_some_and(|d| d.max_descriptors == 0) {
            return Err(ConfigError::NoDescriptors);
        }
        let discard = self.discard.map_or(u64::MAX, |d| d.max_bytes);
        let transfer = if self.max_transfer_bytes == 0 { u64::MAX } else { self.max_transfer_bytes };
        for (what, bytes) in [
            ("largest discard", discard),
            ("largest write of zeroes", self.max_write_zeroes_bytes),
            ("largest WRITE SAME", self.max_write_same_bytes),
            ("largest transfer", transfer),
        ] {
            if bytes < u64::from(block) {
                return Err(ConfigError::Limit { what, bytes, block });
            }
        }
        match self.naa {
            Some(naa) if !naa.is_known() => Err(ConfigError::Naa(naa)),
            None if self.serial.is_empty() => Err(ConfigError::Nameless),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> LunConfig {
        LunConfig { capacity_bytes: 1 << 20, serial: "1".into(), ..LunConfig::default() }
    }

    #[test]
    fn a_configuration_that_cannot_be_says_what_would_be_right() {
        let says = |config: LunConfig| config.check().unwrap_err().to_string();
        assert_eq!(good().check(), Ok(()));
        for bytes in [500, 600, 256, 1 << 17] {
            assert_eq!(
                says(LunConfig { logical_block_bytes: bytes, ..good() }),
                format!("logical block size must be a power of two in 512..=65536, got {bytes}")
            );
        }
        assert_eq!(
            says(LunConfig { logical_block_bytes: 4096, ..good() }),
            "physical block size 512 must be at least the logical block size 4096"
        );
        assert_eq!(
            says(LunConfig { capacity_bytes: 511, ..good() }),
            "capacity of 511 bytes is less than one block of 512"
        );
        assert_eq!(
            says(LunConfig { vendor: "too long a vendor".into(), ..good() }),
            "vendor \"too long a vendor\" must be at most 8 printable ASCII characters"
        );
        assert_eq!(
            says(LunConfig { naa: Some(Naa::Short(1)), ..good() }),
            "world wide name must begin with 2, 3 or 5 (8 bytes) or 6 (16 bytes), got Short(1)"
        );
        assert_eq!(
            says(LunConfig { serial: String::new(), ..good() }),
            "a logical unit needs a serial number or a world wide name: initiators tell units apart by them"
        );
        assert_eq!(
            says(LunConfig { max_write_zeroes_bytes: 0, ..good() }),
            "largest write of zeroes of 0 bytes is less than one block of 512"
        );
    }

    #[test]
    fn one_block_is_enough_for_a_capacity_and_for_every_limit() {
        let one = DiscardConfig {
            max_bytes: 512,
            granularity_bytes: 512,
            alignment_bytes: 0,
            max_descriptors: 1,
            reads_zeroes: false,
        };
        let least = LunConfig {
            capacity_bytes: 512,
            discard: Some(one),
            max_write_zeroes_bytes: 512,
            max_write_same_bytes: 512,
            max_transfer_bytes: 512,
            ..good()
        };
        assert_eq!(least.check(), Ok(()));
    }

    #[test]
    fn a_name_made_of_text_is_locally_assigned_and_never_changes() {
        assert_eq!(Naa::from_text("disk0"), Naa::from_text("disk0"));
        assert!(Naa::from_text("").is_known());
        assert_ne!(Naa::from_text("disk0"), Naa::from_text("disk1"));
    }
}
