//! A set of processors.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The processors that a thread may run on; never empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cpus(BTreeSet<u16>);

impl Cpus {
    /// The largest processor number: a fixed `cpu_set_t` holds 1024.
    pub const LARGEST: u16 = 1023;

    /// These processors; `None` if there are none, or one is above [`LARGEST`](Self::LARGEST).
    pub fn new(cpus: impl IntoIterator<Item = u16>) -> Option<Self> {
        let cpus: BTreeSet<u16> = cpus.into_iter().collect();
        let largest = *cpus.last()?;
        (largest <= Self::LARGEST).then_some(Self(cpus))
    }

    /// The processors, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().copied()
    }
}

/// Reads the kernel's list format: `0-3,8`.
impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| {
            let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
            digits.parse::<u16>().ok().filter(|number| is_number && *number <= Self::LARGEST)
        };
        let range = |range: &str| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(number(first)?..=number(last)?).filter(|range| !range.is_empty())
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        let cpus = ranges.and_then(|ranges| Self::new(ranges.into_iter().flatten()));
        cpus.ok_or_else(|| format!("'{text}' is not a list of processors such as 0-3,8"))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl TryFrom<String> for Cpus {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Cpus> for String {
    fn from(cpus: Cpus) -> Self {
        cpus.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_processors_reads_and_prints_as_the_kernel_does() {
        for (text, printed) in [("0", "0"), ("3,1,2", "1-3"), ("0-3,8", "0-3,8"), ("5,0-1,4", "0-1,4-5")] {
            assert_eq!(text.parse::<Cpus>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn what_names_no_processor_is_refused() {
        for text in ["", ",", "a", "3-1", "1-", "-1", "1024", "0-70000", "+1", "1 ,2"] {
            assert!(text.parse::<Cpus>().is_err(), "{text:?}");
        }
        assert_eq!(Cpus::new([]), None);
    }
}
