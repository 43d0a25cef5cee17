//! Which policy, by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::VariantArray;
use thiserror::Error;

use crate::low_regret::LowRegret;
use crate::parameters::{ParameterError, Property};
use crate::policies::{Fixed, PerSourceWindow, SharedWindow, Weighted};
use crate::{Nanos, Parameters, Policy};

/// A value of `poll-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, VariantArray)]
#[serde(try_from = "String", into = "&'static str")]
pub enum PolicyKind {
    /// `off`: never spins.
    Off,
    /// `busy`: never blocks.
    Busy,
    /// `fixed`: spins for `poll-max-ns`, always.
    Fixed,
    /// `shared-window`: QEMU up to 9.2, one window per I/O thread.
    SharedWindow,
    /// `per-source-window`: QEMU 10.0 to 11.0, a window per source.
    PerSourceWindow,
    /// `weighted`: QEMU 11.1, a weighted interval per source and one window.
    Weighted,
    /// `low-regret`: learns the waits and prices spinning.
    LowRegret,
}

impl PolicyKind {
    /// Every policy, from the oldest idea to the newest.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// How it is spelled.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Busy => "busy",
            Self::Fixed => "fixed",
            Self::SharedWindow => "shared-window",
            Self::PerSourceWindow => "per-source-window",
            Self::Weighted => "weighted",
            Self::LowRegret => "low-regret",
        }
    }

    /// The properties that a policy of this kind heeds.
    const fn properties(self) -> &'static [Property] {
        match self {
            Self::Off | Self::Busy | Self::Fixed => &[Property::Max],
            Self::SharedWindow | Self::PerSourceWindow => &[Property::Max, Property::Grow, Property::Shrink],
            Self::Weighted => &[Property::Max, Property::Grow, Property::Shrink, Property::Weight],
            Self::LowRegret => &[Property::Max, Property::Price],
        }
    }

    /// Whether a window that shrinks is gone at once where `poll-shrink` is unset or 0, and not divided by a default.
    pub const fn starts_over(self) -> bool {
        match self {
            Self::SharedWindow | Self::PerSourceWindow => true,
            Self::Off | Self::Busy | Self::Fixed | Self::Weighted | Self::LowRegret => false,
        }
    }

    /// The longest window that a policy of this kind chooses where `poll-max-ns` is unset.
    pub const fn own_max(self) -> Nanos {
        match self {
            Self::Off => Nanos::ZERO,
            Self::Busy | Self::Fixed => Nanos::MAX,
            Self::SharedWindow | Self::PerSourceWindow | Self::Weighted => Parameters::QEMU_MAX,
            Self::LowRegret => LowRegret::LONGEST,
        }
    }

    /// Whether a policy of this kind heeds `property`.
    pub fn uses(self, property: Property) -> bool {
        self.properties().contains(&property)
    }
}

/// A policy of kind `kind` that has learned nothing yet.
///
/// A changed property means a new policy: learned state does not outlive the properties it was learned under. The
/// caller hands a new policy its block cost anew ([`Policy::set_block_cost`]). Properties that `kind` has no use for
/// are ignored here; [`Parameters::validate`] is the place to refuse them.
///
/// # Errors
/// A value out of its range.
pub fn build(kind: PolicyKind, parameters: &Parameters) -> Result<Box<dyn Policy>, ParameterError> {
    parameters.validate_ranges()?;
    Ok(match kind {
        PolicyKind::Off => Box::new(Fixed::new(Nanos::ZERO)),
        // A maximum of zero means "never spin" to every policy, to this one too.
        PolicyKind::Busy if parameters.max_for(kind) > Nanos::ZERO => Box::new(Fixed::new(Nanos::MAX)),
        PolicyKind::Busy | PolicyKind::Fixed => Box::new(Fixed::new(parameters.max_for(kind))),
        PolicyKind::SharedWindow => Box::new(SharedWindow::new(parameters)),
        PolicyKind::PerSourceWindow => Box::new(PerSourceWindow::new(parameters)),
        PolicyKind::Weighted => Box::new(Weighted::new(parameters)),
        PolicyKind::LowRegret => Box::new(LowRegret::new(parameters)),
    })
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl From<PolicyKind> for &'static str {
    fn from(kind: PolicyKind) -> Self {
        kind.as_str()
    }
}

/// A `poll-policy` that does not exist.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("poll-policy must be one of {known}; got '{0}'", known = known().join(", "))]
pub struct UnknownPolicy(String);

fn known() -> Vec<&'static str> {
    PolicyKind::ALL.iter().map(|kind| kind.as_str()).collect()
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.iter().copied().find(|kind| kind.as_str() == text);
        found.ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}

impl TryFrom<String> for PolicyKind {
    type Error = UnknownPolicy;

    fn try_from(text: String) -> Result<Self, UnknownPolicy> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_as_what_it_names() {
        for &kind in PolicyKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_names() {
        assert_eq!(
            "weigthed".parse::<PolicyKind>().unwrap_err().to_string(),
            "poll-policy must be one of off, busy, fixed, shared-window, per-source-window, weighted, low-regret; \
             got 'weigthed'"
        );
    }

    #[test]
    fn a_value_out_of_range_builds_nothing() {
        let parameters = Parameters { weight: Some(64), ..Parameters::default() };
        assert!(build(PolicyKind::Weighted, &parameters).is_err());
    }

    #[test]
    fn a_configuration_spells_a_policy_by_its_name() {
        let kind: PolicyKind = serde_json::from_str("\"per-source-window\"").unwrap();
        assert_eq!(kind, PolicyKind::PerSourceWindow);
        assert_eq!(serde_json::to_string(&kind).unwrap(), "\"per-source-window\"");
        let error = serde_json::from_str::<PolicyKind>("\"bussy\"").unwrap_err();
        assert!(error.to_string().contains("got 'bussy'"), "{error}");
    }

    #[test]
    fn each_policy_says_of_itself_what_the_loop_has_to_know() {
        /// Name, longest window, whether it starts over, weighs blocks, observes every turn; its window before it has seen any wait.
        type Told = (&'static str, u64, bool, bool, bool, u64);
        let told: [Told; 7] = [
            ("off", 0, false, false, false, 0),
            ("busy", u64::MAX, false, false, false, u64::MAX),
            ("fixed", u64::MAX, false, false, false, u64::MAX),
            ("shared-window", 32_768, true, false, true, 0),
            ("per-source-window", 32_768, true, false, true, 0),
            ("weighted", 32_768, false, false, true, 0),
            ("low-regret", (1 << 23) - 1, false, true, false, 0),
        ];
        for (&kind, expected) in PolicyKind::ALL.iter().zip(told) {
            let policy = build(kind, &Parameters::default()).unwrap();
            let told = (
                kind.as_str(),
                kind.own_max().0,
                kind.starts_over(),
                policy.weighs_block_cost(),
                policy.observes_every_turn(),
                policy.window_now().0,
            );
            assert_eq!(told, expected);
            assert_eq!((policy.resets(), policy.wants_cpu_time()), (0, false), "{kind}");
        }
        assert_eq!(format!("{:>5}", PolicyKind::Off), "  off");
    }

    #[test]
    fn busy_never_blocks_unless_the_maximum_forbids_to_spin_and_fixed_spins_for_the_maximum() {
        for (kind, max, window) in [
            (PolicyKind::Busy, 0, 0),
            (PolicyKind::Busy, 1, u64::MAX),
            (PolicyKind::Fixed, 0, 0),
            (PolicyKind::Fixed, 7, 7),
            (PolicyKind::Off, 7, 0),
        ] {
            let mut policy = build(kind, &Parameters { max: Some(Nanos(max)), ..Parameters::default() }).unwrap();
            assert_eq!((policy.window(&Default::default()), policy.window_now()), (Nanos(window), Nanos(window)));
        }
    }
}
