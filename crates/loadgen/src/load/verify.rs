//! Stamped blocks: each holds its own offset, seed and generation, and [`Ledger`] knows which was written last.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | a magic number |
//! | 8..16 | the block's offset on the disk |
//! | 16..24 | the seed |
//! | 24..32 | the generation: how often this block has been written |
//! | 32.. | what those three make, a word at a time |
//!
//! All are little-endian words. Lost, misplaced, torn and foreign blocks are told apart.

use thiserror::Error;

use crate::random::mix;

const MAGIC: u64 = 0x0074_6572_6765_e667;
const HEADER: usize = 32;

/// What a verified block begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Its offset on the disk, in bytes.
    pub offset: u64,
    /// Whose pattern it is.
    pub seed: u64,
    /// How often it has been written.
    pub generation: u32,
}

/// How a block differs from the one that was written there.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Mismatch {
    /// It was not written by a load that verifies.
    #[error("the block at {offset} is no stamped block")]
    Unstamped {
        /// Where it was read.
        offset: u64,
    },
    /// It belongs elsewhere.
    #[error("the block at {offset} belongs to {other}")]
    Misplaced {
        /// Where it was read.
        offset: u64,
        /// Where it was written.
        other: u64,
    },
    /// It has another seed.
    #[error("the block at {offset} was written with seed {other} instead of {seed}")]
    Foreign {
        /// Where it was read.
        offset: u64,
        /// What was expected.
        seed: u64,
        /// What was found.
        other: u64,
    },
    /// It is older than it should be, or newer.
    #[error("the block at {offset} is of generation {other} instead of {generation}")]
    Stale {
        /// Where it was read.
        offset: u64,
        /// What was expected.
        generation: u32,
        /// What was found.
        other: u64,
    },
    /// Its header is right and the rest is not.
    #[error("the block at {offset} is torn or damaged at byte {byte} of it")]
    Torn {
        /// Where it was read.
        offset: u64,
        /// The first word that differs begins there.
        byte: usize,
    },
}

impl Stamp {
    fn word(&self, index: usize) -> u64 {
        match index {
            0 => MAGIC,
            1 => self.offset,
            2 => self.seed,
            3 => self.generation.into(),
            _ => mix(self.seed ^ self.offset ^ u64::from(self.generation) << 40)
                .wrapping_add((index as u64).wrapping_mul(MAGIC)),
        }
    }

    /// Makes `block` the block of this stamp.
    pub fn fill(&self, block: &mut [u8]) {
        for (index, bytes) in block.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&self.word(index).to_le_bytes()[..bytes.len()]);
        }
    }

    /// Whether `block` is the block of this stamp; generation 0 stands for any.
    ///
    /// # Errors
    /// What it is instead.
    pub fn check(&self, block: &[u8]) -> Result<(), Mismatch> {
        let Self { offset, seed, generation } = *self;
        let word = |index: usize| {
            let bytes = block.get(index * 8..index * 8 + 8).unwrap_or(&[0; 8]);
            u64::from_le_bytes(std::array::from_fn(|byte| bytes[byte]))
        };
        if block.len() < HEADER || word(0) != MAGIC {
            return Err(Mismatch::Unstamped { offset });
        }
        if word(1) != offset {
            return Err(Mismatch::Misplaced { offset, other: word(1) });
        }
        if word(2) != seed {
            return Err(Mismatch::Foreign { offset, seed, other: word(2) });
        }
        let found = word(3);
        let Some(known) = u32::try_from(found).ok().filter(|&found| generation == 0 || found == generation) else {
            return Err(Mismatch::Stale { offset, generation, other: found });
        };
        let expected = Self { generation: known, ..*self };
        let wrong = block.chunks(8).enumerate().find(|(index, bytes)| {
            let word = expected.word(*index).to_le_bytes();
            word[..bytes.len()] != **bytes
        });
        wrong.map_or(Ok(()), |(index, _)| Err(Mismatch::Torn { offset, byte: index * 8 }))
    }
}

/// What a job has written, and which blocks it has requests on.
pub(super) struct Ledger {
    pub(super) seed: u64,
    /// By block.
    generations: Vec<u32>,
    busy: Vec<bool>,
}

impl Ledger {
    pub(super) fn new(seed: u64, blocks: u64) -> Self {
        Self { seed, generations: vec![0; blocks as usize], busy: vec![false; blocks as usize] }
    }

    /// Reserves a block for one request; false if there is one on it already.
    pub(super) fn reserve(&mut self, block: u64) -> bool {
        !std::mem::replace(&mut self.busy[block as usize], true)
    }

    pub(super) fn release(&mut self, block: u64) {
        self.busy[block as usize] = false;
    }

    /// How often a block has been written; 0 if never.
    pub(super) fn generation(&self, block: u64) -> u32 {
        self.generations[block as usize]
    }

    /// The generation that the next write of a block makes.
    pub(super) fn advance(&mut self, block: u64) -> u32 {
        let generation = &mut self.generations[block as usize];
        *generation = generation.wrapping_add(1).max(1);
        *generation
    }

    pub(super) fn blocks(&self) -> u64 {
        self.generations.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { offset: 8192, seed: 5, generation: 3 };

    fn block() -> Vec<u8> {
        let mut block = vec![0; 4096];
        STAMP.fill(&mut block);
        block
    }

    #[test]
    fn a_block_is_the_block_of_its_own_stamp_and_of_no_other() {
        assert_eq!(STAMP.check(&block()), Ok(()));
        assert_eq!(Stamp { generation: 0, ..STAMP }.check(&block()), Ok(()));
        let found = Stamp { offset: 0, ..STAMP }.check(&block());
        assert_eq!(found, Err(Mismatch::Misplaced { offset: 0, other: 8192 }));
        let found = Stamp { seed: 6, ..STAMP }.check(&block());
        assert_eq!(found, Err(Mismatch::Foreign { offset: 8192, seed: 6, other: 5 }));
        let found = Stamp { generation: 4, ..STAMP }.check(&block());
        assert_eq!(found, Err(Mismatch::Stale { offset: 8192, generation: 4, other: 3 }));
        assert_eq!(STAMP.check(&[0; 4096]), Err(Mismatch::Unstamped { offset: 8192 }));
    }

    #[test]
    fn a_single_wrong_byte_is_seen() {
        for byte in [32, 100, 4095] {
            let mut block = block();
            block[byte] ^= 1;
            assert_eq!(STAMP.check(&block), Err(Mismatch::Torn { offset: 8192, byte: byte / 8 * 8 }));
        }
    }

    #[test]
    fn a_block_has_one_request_on_it_at_a_time() {
        let mut ledger = Ledger::new(1, 4);
        assert!(ledger.reserve(2) && !ledger.reserve(2));
        ledger.release(2);
        assert!(ledger.reserve(2));
        assert_eq!((ledger.generation(2), ledger.advance(2), ledger.generation(2)), (0, 1, 1));
    }
}
