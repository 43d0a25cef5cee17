//! Which requests fail, and how: what a disk is told.

use std::ops::RangeInclusive;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::store::SECTOR;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoType {
    /// It reads.
    Read,
    /// It writes.
    Write,
    /// It makes writes stable.
    Flush,
    /// It discards, or fills with zeroes.
    Discard,
}

/// Requests that go wrong, and how. Named as QEMU's `blkdebug` names what it injects, where that knows of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Fault {
    /// Which requests; all, if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iotype: Option<IoType>,
    /// The first and the last sector of 512 bytes; a request that touches one of them is meant. Flushes touch none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sectors: Option<[u64; 2]>,
    /// How many requests are spared before.
    #[serde(default)]
    pub after: u64,
    /// How many requests are meant then; all, if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// What becomes of them.
    pub effect: Effect,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// It does nothing, and ends with this error of errno(3), by its name.
    Errno(ErrnoName),
    /// It is run so many milliseconds later. Requests that come meanwhile overtake it.
    LateMs(u64),
    /// It is neither run nor answered before a `release`.
    Never,
    /// The power goes before it is run.
    PowerOff,
    /// A read or a write moves so many bytes of what it was asked for, and says so.
    Short(u32),
    /// A write moves so many bytes, and ends with EIO.
    Torn(u32),
    /// Requests wait until there are so many, or for 2 s: then the last is run first.
    Reordered(u32),
}

/// Errors that disks end requests with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ErrnoName {
    /// The disk failed.
    Eio,
    /// There is no room left, as a thin disk says.
    Enospc,
    /// The disk is gone.
    Enodev,
    /// It took too long.
    Etimedout,
    /// It cannot be done without waiting, as the kernel says of what is asynchronous.
    Eagain,
    /// It cannot be done so, as the kernel says of flags that it does not know.
    Eopnotsupp,
}

impl From<ErrnoName> for Errno {
    fn from(name: ErrnoName) -> Self {
        match name {
            ErrnoName::Eio => Self::IO,
            ErrnoName::Enospc => Self::NOSPC,
            ErrnoName::Enodev => Self::NODEV,
            ErrnoName::Etimedout => Self::TIMEDOUT,
            ErrnoName::Eagain => Self::AGAIN,
            ErrnoName::Eopnotsupp => Self::OPNOTSUPP,
        }
    }
}

/// What is asked of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// What it does.
    pub iotype: IoType,
    /// Where it begins, in bytes.
    pub at: u64,
    /// How long it is, in bytes; zero for flushes.
    pub len: u64,
    /// Whether it is a write that is stable when it ends.
    pub is_stable: bool,
}

impl Asked {
    fn sectors(&self) -> Option<RangeInclusive<u64>> {
        (self.len > 0).then(|| self.at / SECTOR..=(self.at + self.len - 1) / SECTOR)
    }
}

impl Fault {
    fn means(&self, asked: &Asked) -> bool {
        let is_there = self.sectors.is_none_or(|[first, last]| {
            asked.sectors().is_some_and(|sectors| *sectors.start() <= last && first <= *sectors.end())
        });
        self.iotype.is_none_or(|iotype| iotype == asked.iotype) && is_there
    }
}

/// The faults that are to happen, in the order that they were told.
#[derive(Debug, Default)]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// Adds one.
    pub fn add(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// What is left of them.
    pub fn list(&self) -> &[Fault] {
        &self.0
    }

    /// What becomes of a request, if it does not simply go well: the first fault that means it decides.
    pub fn strike(&mut self, asked: &Asked) -> Option<Effect> {
        let mut struck = None;
        for fault in self.0.iter_mut().filter(|fault| fault.means(asked)) {
            if fault.after > 0 {
                fault.after -= 1;
                continue;
            }
            fault.times = fault.times.map(|times| times.saturating_sub(1));
            struck = Some(fault.effect);
            break;
        }
        self.0.retain(|fault| fault.times != Some(0));
        struck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Asked = Asked { iotype: IoType::Read, at: 0, len: 4096, is_stable: false };
    const FLUSH: Asked = Asked { iotype: IoType::Flush, at: 0, len: 0, is_stable: false };

    fn fault(text: &str) -> Fault {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_fault_strikes_the_requests_that_it_means_as_often_as_it_says() {
        let mut faults = Faults::default();
        faults.add(fault(r#"{"iotype": "read", "after": 1, "times": 2, "effect": {"errno": "EIO"}}"#));
        let mut strike = |asked| faults.strike(asked).is_some();
        assert_eq!([&READ, &FLUSH, &READ, &READ, &READ].map(&mut strike), [false, false, true, true, false]);
        assert!(faults.list().is_empty(), "it is over");
    }

    #[test]
    fn sectors_are_those_that_a_request_touches() {
        let mut faults = Faults::default();
        faults.add(fault(r#"{"sectors": [7, 8], "effect": "never"}"#));
        let mut strike = |at, len| faults.strike(&Asked { at, len, ..READ }).is_some();
        assert!(strike(0, 4096) && strike(8 * 512, 512) && strike(0, 1 << 20));
        assert!(!strike(0, 3584) && !strike(9 * 512, 512));
        assert_eq!(faults.strike(&FLUSH), None);
    }

    #[test]
    fn the_first_fault_decides_and_what_makes_no_sense_is_refused() {
        let mut faults = Faults::default();
        faults.add(fault(r#"{"times": 1, "effect": {"late-ms": 5}}"#));
        faults.add(fault(r#"{"effect": {"torn": 512}}"#));
        assert_eq!(faults.strike(&FLUSH), Some(Effect::LateMs(5)));
        assert_eq!(faults.strike(&FLUSH), Some(Effect::Torn(512)));
        faults.clear();
        assert_eq!(faults.strike(&FLUSH), None);
        for text in [r#"{}"#, r#"{"effect": {"errno": "EWHAT"}}"#, r#"{"effect": "never", "sector": 1}"#] {
            assert!(serde_json::from_str::<Fault>(text).is_err(), "{text}");
        }
    }
}
