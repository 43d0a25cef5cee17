//! How much memory peers may have mapped here.
//!
//! A region costs the peer that hands it over nothing, and a sparse file is as long as it likes. Without a limit one peer
//! takes all addresses of the process, or all mappings that it may have, and the next allocation of anybody ends it. So
//! each mapping is charged, before it is made and until it is gone, to its export and to the process.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

/// What may be mapped at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Address space, in bytes: a region is mapped in whole pages.
    pub bytes: u64,
    /// Regions.
    pub regions: usize,
}

/// Limits for somebody, and what there is left of them.
#[derive(Debug)]
pub struct MemoryBudget {
    limits: MemoryLimits,
    /// Whose it is, and the option that sets how many bytes there are: for errors.
    owner: &'static str,
    option: &'static str,
    within: Option<Arc<Self>>,
    used: Mutex<MemoryLimits>,
}

/// Why something cannot be charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OverBudget {
    /// It is too long.
    #[error("{} more where {} of {} are mapped for the {owner}; {option} sets the limit", Size(*asked), Size(*used), Size(*limit))]
    Bytes {
        /// What it takes.
        asked: u64,
        /// What was mapped.
        used: u64,
        /// What may be.
        limit: u64,
        /// Whose budget it is.
        owner: &'static str,
        /// The option that sets the limit.
        option: &'static str,
    },
    /// It is one too many.
    #[error("the {owner} has {limit} regions mapped, and may have no more")]
    Regions {
        /// How many there are and may be.
        limit: usize,
        /// Whose budget it is.
        owner: &'static str,
    },
}

/// Bytes as options spell them: of the largest unit of which they are a multiple.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
        match units.into_iter().find(|(shift, _)| self.0 > 0 && self.0.trailing_zeros() >= *shift) {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

impl MemoryBudget {
    /// A budget of its own. Errors say that it is the `owner`'s, and that `option` sets how many bytes it has.
    pub fn new(limits: MemoryLimits, owner: &'static str, option: &'static str) -> Arc<Self> {
        Arc::new(Self { limits, owner, option, within: None, used: Mutex::new(MemoryLimits { bytes: 0, regions: 0 }) })
    }

    /// A part of this budget, with limits of its own: what is charged to it is charged to both.
    pub fn part(self: &Arc<Self>, limits: MemoryLimits, owner: &'static str, option: &'static str) -> Arc<Self> {
        let used = Mutex::new(MemoryLimits { bytes: 0, regions: 0 });
        Arc::new(Self { limits, owner, option, within: Some(Arc::clone(self)), used })
    }

    /// What is charged now.
    #[cfg(test)]
    pub(super) fn used(&self) -> MemoryLimits {
        *self.lock()
    }

    /// Takes `bytes` for one region.
    ///
    /// # Errors
    ///
    /// They are not left, here or in what this is a part of; nothing is taken.
    pub(super) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, OverBudget> {
        let (limits, owner, option) = (self.limits, self.owner, self.option);
        let mut used = self.lock();
        if used.regions >= limits.regions {
            return Err(OverBudget::Regions { limit: limits.regions, owner });
        }
        if bytes > limits.bytes.saturating_sub(used.bytes) {
            return Err(OverBudget::Bytes { asked: bytes, used: used.bytes, limit: limits.bytes, owner, option });
        }
        let rest = self.within.as_ref().map(|whole| whole.charge(bytes)).transpose()?;
        *used = MemoryLimits { bytes: used.bytes + bytes, regions: used.regions + 1 };
        Ok(Charge { budget: Arc::clone(self), bytes, _rest: rest.map(Box::new) })
    }

    fn lock(&self) -> MutexGuard<'_, MemoryLimits> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a mapping has taken of a budget; given back when dropped.
pub(super) struct Charge {
    budget: Arc<MemoryBudget>,
    bytes: u64,
    /// What was taken of that which the budget is a part of.
    _rest: Option<Box<Charge>>,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut used = self.budget.lock();
        *used = MemoryLimits { bytes: used.bytes - self.bytes, regions: used.regions - 1 };
    }
}
