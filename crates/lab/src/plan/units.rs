//! Sizes and times as fio spells them.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{IntoDeserializer as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes: `4096`, `4k`, `1G`, by powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A length of time: `5`, `5s`, `500ms`, `2m`; seconds without a unit.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Seconds(pub f64);

impl Seconds {
    /// As the standard library has it.
    pub fn duration(self) -> Duration {
        Duration::from_secs_f64(self.0)
    }
}

/// The longest time, in seconds: 1000 hours.
const LONGEST: f64 = 3.6e6;
const SIZES: [(&str, u64); 5] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10), ("", 1)];
const TIMES: [(&str, f64); 6] = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("", 1.0)];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = &text[digits.len()..];
        let scale = SIZES.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, scale)| *scale);
        let bytes = digits.parse::<u64>().ok().zip(scale).and_then(|(count, scale)| count.checked_mul(scale));
        bytes.map(Self).ok_or_else(|| format!("a size such as 4096, 4k, 16M or 1G, not '{text}'"))
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = &text[digits.len()..];
        let scale = TIMES.iter().find(|(name, _)| *name == unit).map(|(_, scale)| *scale);
        let seconds = digits.parse::<f64>().ok().zip(scale).map(|(count, scale)| count * scale);
        let seconds = seconds.filter(|seconds| (0.0..=LONGEST).contains(seconds));
        seconds.map(Self).ok_or_else(|| format!("a time such as 5, 5s, 500ms or 2m, of at most 1000h, not '{text}'"))
    }
}

impl fmt::Display for Bytes {
    /// The shortest spelling without a fraction.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |scale: u64| self.0 >= scale && self.0.is_multiple_of(scale);
        let (unit, scale) = SIZES.into_iter().find(|(_, scale)| fits(*scale)).unwrap_or(("", 1));
        write!(f, "{}{unit}", self.0 / scale)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s", self.0)
    }
}

/// Both a number and a string are understood; what is written is a string.
macro_rules! by_its_spelling {
    ($type:ty, $number:ty) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #[derive(Deserialize)]
                #[serde(untagged, expecting = "a number, or a string of a number and a unit")]
                enum Spelling {
                    Number($number),
                    Text(String),
                }
                let text = match Spelling::deserialize(deserializer)? {
                    Spelling::Number(number) => number.to_string(),
                    Spelling::Text(text) => text,
                };
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

by_its_spelling!(Bytes, u64);
by_its_spelling!(Seconds, f64);

/// One value, or a list of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum OneOrMany<T> {
    /// One.
    One(T),
    /// A list.
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    /// All of them.
    pub fn all(&self) -> &[T] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

/// By hand, because what serde says of an untagged value that fits nowhere does not say what would.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Values(PhantomData))
    }
}

struct Values<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Values<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value, or a list of them")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut many = Vec::new();
        while let Some(one) = list.next_element()? {
            many.push(one);
        }
        if many.is_empty() {
            return Err(serde::de::Error::custom("a list of no values would be no load at all"));
        }
        Ok(OneOrMany::Many(many))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        T::deserialize(text.into_deserializer()).map(OneOrMany::One)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Self::Value, E> {
        T::deserialize(number.into_deserializer()).map(OneOrMany::One)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Self::Value, E> {
        T::deserialize(number.into_deserializer()).map(OneOrMany::One)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_as_fio_spells_them() {
        for (text, bytes) in [("4096", 4096), ("4k", 4096), ("4K", 4096), ("16M", 16 << 20), ("2G", 2 << 30), ("0", 0)]
        {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        assert_eq!([4096, 4097, 2 << 30, 0].map(|bytes| Bytes(bytes).to_string()), ["4k", "4097", "2G", "0"]);
        for text in ["", "k", "4kb", "-1", "99999999999T"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_seconds_unless_they_say_otherwise() {
        for (text, seconds) in [("5", 5.0), ("0.5s", 0.5), ("500ms", 0.5), ("2m", 120.0)] {
            assert_eq!(text.parse(), Ok(Seconds(seconds)), "{text}");
        }
        for text in ["", "-1", "5 s", "inf", "NaN", "1e300", "1001h"] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }
}
