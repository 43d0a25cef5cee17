//! Block sizes ("Size constraints").

use super::{DEFAULT_PAYLOAD, take_u32};

/// What a server wants of offsets and lengths, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Requests are multiples of it.
    pub minimum: u32,
    /// They had better be multiples of it.
    pub preferred: u32,
    /// No message carries more data.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// Of a server that says nothing: all of them take so much, and a client must not ask for less than a sector.
    fn default() -> Self {
        Self { minimum: 1, preferred: 4096, maximum: DEFAULT_PAYLOAD }
    }
}

/// Block sizes that no server may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "block sizes must be powers of two, the minimum up to 65536 and no more than the preferred one, that no more than the \
     maximum, got {} {} {}", .0.minimum, .0.preferred, .0.maximum
)]
pub struct BlockSizesError(BlockSizes);

impl BlockSizes {
    /// Reads them as they are sent.
    ///
    /// # Errors
    /// They are not as they must be. `None` if there are not three numbers.
    pub fn read(mut bytes: &[u8]) -> Option<Result<Self, BlockSizesError>> {
        let [minimum, preferred, maximum] =
            [take_u32(&mut bytes)?, take_u32(&mut bytes)?, take_u32(&mut bytes).filter(|_| bytes.is_empty())?];
        let read = Self { minimum, preferred, maximum };
        let is_sound = minimum.is_power_of_two()
            && minimum <= 1 << 16
            && preferred.is_power_of_two()
            && (minimum.max(512)..=maximum).contains(&preferred)
            && (maximum == u32::MAX || maximum.is_multiple_of(minimum));
        Some(if is_sound { Ok(read) } else { Err(BlockSizesError(read)) })
    }

    /// As they are sent.
    pub fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        for (place, number) in bytes.chunks_exact_mut(4).zip([self.minimum, self.preferred, self.maximum]) {
            place.copy_from_slice(&number.to_be_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sound_block_sizes_are_read_back_and_others_refused() {
        let of = |minimum, preferred, maximum| BlockSizes { minimum, preferred, maximum };
        for sound in [of(1, 512, 512), of(1, 4096, 1 << 25), of(65536, 65536, 65536), of(512, 4096, u32::MAX)] {
            assert_eq!(BlockSizes::read(&sound.to_bytes()), Some(Ok(sound)));
        }
        for wrong in [
            of(0, 4096, 1 << 25),
            of(3, 4096, 1 << 25),
            of(1 << 17, 1 << 17, 1 << 25),
            of(4096, 512, 1 << 25),
            of(1, 256, 1 << 25),
            of(1, 4096, 2048),
            of(512, 512, 1000),
        ] {
            assert_eq!(BlockSizes::read(&wrong.to_bytes()), Some(Err(BlockSizesError(wrong))));
        }
        assert_eq!(BlockSizes::read(&[0; 11]), None);
        assert_eq!(BlockSizes::read(&[0; 13]), None);
    }
}
