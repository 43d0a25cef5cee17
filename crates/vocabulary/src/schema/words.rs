//! Words of the vocabulary: enums that are defined where they mean something, and spelled here as they spell themselves.

use std::fmt::Display;
use std::str::FromStr;

use egret_disk::{Aio, DebugEvent, DetectZeroes, Discard, IoType, Locking};
use egret_event_loop::MonitorChoice;
use egret_polling::PolicyKind;

/// A type whose values are words.
pub trait Word: Copy + FromStr<Err: Display> + 'static {
    /// Every value, in the order in which they are listed.
    const VALUES: &'static [Self];

    /// How this value is spelled.
    fn word(self) -> &'static str;
}

/// Every word for a value of `T`.
pub fn words<T: Word>() -> Vec<&'static str> {
    T::VALUES.iter().map(|value| value.word()).collect()
}

macro_rules! word {
    ($($type:ty),+) => {$(
        impl Word for $type {
            const VALUES: &'static [Self] = Self::ALL;

            fn word(self) -> &'static str {
                self.as_str()
            }
        }
    )+};
}

word!(PolicyKind, MonitorChoice, Aio, DetectZeroes, Discard, Locking, DebugEvent, IoType);

/// `#[serde(with = "as_word")]`: a value as its word.
pub(super) mod as_word {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Word;

    pub fn serialize<T: Word, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value.word())
    }

    pub fn deserialize<'de, T: Word, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }

    /// The same for a value that may be unset.
    pub mod optional {
        use serde::{Deserializer, Serialize, Serializer};

        use super::Word;

        pub fn serialize<T: Word, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
            value.map(Word::word).serialize(serializer)
        }

        pub fn deserialize<'de, T: Word, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
            super::deserialize(deserializer).map(Some)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads_back<T: Word + PartialEq + std::fmt::Debug>() {
        for value in T::VALUES {
            assert!(value.word().parse::<T>().is_ok_and(|read| read == *value), "{value:?}");
        }
    }

    #[test]
    fn every_word_reads_back_as_its_value() {
        reads_back::<PolicyKind>();
        reads_back::<MonitorChoice>();
        reads_back::<Aio>();
        reads_back::<DetectZeroes>();
        reads_back::<Discard>();
        reads_back::<Locking>();
        reads_back::<DebugEvent>();
        reads_back::<IoType>();
    }
}
