//! The properties of an I/O thread that shape its polling.

use thiserror::Error;

use crate::{Nanos, PolicyKind};

/// An I/O thread's polling properties, as its owner wrote them.
///
/// 0 for `grow`, `shrink` or `weight` means the default, as in QEMU; that of `shrink` was to start over, up to 11.0. A change of any of them builds a new policy, so what the old
/// one had learned is gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// `poll-max-ns`: no window is longer (`busy` excepted); 0 means never spin. Unset, it is the policy's own.
    pub max: Option<Nanos>,
    /// `poll-grow`: what a window is multiplied by when it grows (2).
    pub grow: Option<u64>,
    /// `poll-shrink`: what a window is divided by when it shrinks (2; unset or 0, the two oldest policies start over).
    pub shrink: Option<u64>,
    /// `poll-weight`: a new interval counts `2^-weight` in the average (3).
    pub weight: Option<u32>,
    /// `poll-price`: nanoseconds of CPU that one nanosecond of latency is worth (1).
    pub price: Option<u32>,
}

impl Parameters {
    /// `poll-max-ns` where it is left unset, to QEMU's policies.
    pub const QEMU_MAX: Nanos = Nanos(32_768);
    /// The largest `poll-max-ns`, `poll-grow` and `poll-shrink`: QEMU holds them in an `int64_t`.
    pub const LARGEST: u64 = i64::MAX as u64;
    /// The largest `poll-weight`: a 64-bit number cannot be shifted further.
    pub const LARGEST_WEIGHT: u32 = 63;
    /// The largest `poll-price`: beyond it, `busy` is what is meant.
    pub const LARGEST_PRICE: u32 = 1_000;

    /// Whether every value is within its range, and belongs to a policy of kind `kind`.
    ///
    /// # Errors
    /// The first property that is not; the message is one line and begins with the property's name.
    pub fn validate(&self, kind: PolicyKind) -> Result<(), ParameterError> {
        self.validate_ranges()?;
        match self.set_properties().find(|&property| !kind.uses(property)) {
            Some(property) => Err(ParameterError::Meaningless { property, kind }),
            None => Ok(()),
        }
    }

    /// As [`validate`](Self::validate), but lets pass what the policy has no use for.
    ///
    /// For a configuration that names no policy and was written for another program.
    ///
    /// # Errors
    /// The first property that is out of its range.
    pub fn validate_ranges(&self) -> Result<(), ParameterError> {
        let check = |property, got: u64, largest| {
            if got > largest { Err(ParameterError::OutOfRange { property, largest, got }) } else { Ok(()) }
        };
        check(Property::Max, self.max.map_or(0, |max| max.0), Self::LARGEST)?;
        check(Property::Grow, self.grow.unwrap_or(0), Self::LARGEST)?;
        check(Property::Shrink, self.shrink.unwrap_or(0), Self::LARGEST)?;
        check(Property::Weight, self.weight.unwrap_or(0).into(), Self::LARGEST_WEIGHT.into())?;
        check(Property::Price, self.price.unwrap_or(0).into(), Self::LARGEST_PRICE.into())
    }

    /// The longest window that a policy of kind `kind` chooses: `poll-max-ns`, or its own bound where that is unset.
    pub fn max_for(&self, kind: PolicyKind) -> Nanos {
        self.max.unwrap_or(kind.own_max())
    }

    /// `poll-price`, or 1 where it is unset; here 0 means 0.
    pub fn price_or_default(&self) -> u32 {
        self.price.unwrap_or(1)
    }

    pub(crate) fn grow_or_default(&self) -> u64 {
        self.grow.filter(|&grow| grow != 0).unwrap_or(2)
    }

    pub(crate) fn shrink_or_default(&self) -> u64 {
        self.shrink.filter(|&shrink| shrink != 0).unwrap_or(2)
    }

    pub(crate) fn weight_or_default(&self) -> u32 {
        self.weight.filter(|&weight| weight != 0).unwrap_or(3)
    }

    fn set_properties(&self) -> impl Iterator<Item = Property> {
        [
            (Property::Grow, self.grow.is_some()),
            (Property::Shrink, self.shrink.is_some()),
            (Property::Weight, self.weight.is_some()),
            (Property::Price, self.price.is_some()),
        ]
        .into_iter()
        .filter_map(|(property, set)| set.then_some(property))
    }
}

/// A polling property of an I/O thread, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// `poll-max-ns`.
    Max,
    /// `poll-grow`.
    Grow,
    /// `poll-shrink`.
    Shrink,
    /// `poll-weight`.
    Weight,
    /// `poll-price`.
    Price,
}

impl std::fmt::Display for Property {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Max => "poll-max-ns",
            Self::Grow => "poll-grow",
            Self::Shrink => "poll-shrink",
            Self::Weight => "poll-weight",
            Self::Price => "poll-price",
        })
    }
}

/// What is wrong with a set of [`Parameters`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ParameterError {
    /// A value beyond what its property can hold.
    #[error("{property} must be 0..={largest}, got {got}")]
    OutOfRange {
        /// Which property.
        property: Property,
        /// Its largest value.
        largest: u64,
        /// What was asked for.
        got: u64,
    },
    /// A property the policy would ignore.
    #[error("{property} has no effect on poll-policy={kind}; it belongs to {}", owners(*property))]
    Meaningless {
        /// Which property.
        property: Property,
        /// The policy that ignores it.
        kind: PolicyKind,
    },
}

/// The policies that use `property`, for a reader: `a, b and c`.
fn owners(property: Property) -> String {
    let names: Vec<_> = PolicyKind::ALL.iter().filter(|kind| kind.uses(property)).map(|kind| kind.as_str()).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(parameters: Parameters, kind: PolicyKind) -> String {
        parameters.validate(kind).unwrap_err().to_string()
    }

    #[test]
    fn what_is_out_of_range_is_said_in_one_line() {
        let parameters = Parameters { weight: Some(64), ..Parameters::default() };
        assert_eq!(message(parameters, PolicyKind::Weighted), "poll-weight must be 0..=63, got 64");
        let parameters = Parameters { max: Some(Nanos::MAX), ..Parameters::default() };
        assert_eq!(
            message(parameters, PolicyKind::Off),
            "poll-max-ns must be 0..=9223372036854775807, got 18446744073709551615"
        );
        let parameters = Parameters { price: Some(1_001), ..Parameters::default() };
        assert_eq!(message(parameters, PolicyKind::LowRegret), "poll-price must be 0..=1000, got 1001");
    }

    #[test]
    fn a_property_the_policy_does_not_have_is_an_error_that_names_who_has_it() {
        let parameters = Parameters { weight: Some(3), ..Parameters::default() };
        assert_eq!(
            message(parameters, PolicyKind::LowRegret),
            "poll-weight has no effect on poll-policy=low-regret; it belongs to weighted"
        );
        let parameters = Parameters { grow: Some(0), ..Parameters::default() };
        assert_eq!(
            message(parameters, PolicyKind::Busy),
            "poll-grow has no effect on poll-policy=busy; it belongs to shared-window, per-source-window and weighted"
        );
        assert_eq!(parameters.validate_ranges(), Ok(()));
    }

    #[test]
    fn zero_means_the_default_except_for_the_price() {
        let zero =
            Parameters { grow: Some(0), shrink: Some(0), weight: Some(0), price: Some(0), ..Parameters::default() };
        assert_eq!((zero.grow_or_default(), zero.shrink_or_default(), zero.weight_or_default()), (2, 2, 3));
        assert_eq!(zero.price_or_default(), 0);
        assert_eq!(Parameters::default().price_or_default(), 1);
    }

    #[test]
    fn every_property_has_a_largest_value_and_its_policies() {
        let with = |property, value: u64| {
            let mut parameters = Parameters::default();
            match property {
                Property::Max => parameters.max = Some(Nanos(value)),
                Property::Grow => parameters.grow = Some(value),
                Property::Shrink => parameters.shrink = Some(value),
                Property::Weight => parameters.weight = Some(value as u32),
                Property::Price => parameters.price = Some(value as u32),
            }
            parameters
        };
        let windows: &[_] = &[PolicyKind::SharedWindow, PolicyKind::PerSourceWindow, PolicyKind::Weighted];
        for (property, name, largest, kinds) in [
            (Property::Max, "poll-max-ns", i64::MAX as u64, PolicyKind::ALL),
            (Property::Grow, "poll-grow", i64::MAX as u64, windows),
            (Property::Shrink, "poll-shrink", i64::MAX as u64, windows),
            (Property::Weight, "poll-weight", 63, &[PolicyKind::Weighted]),
            (Property::Price, "poll-price", 1_000, &[PolicyKind::LowRegret]),
        ] {
            assert_eq!(property.to_string(), name);
            assert_eq!(with(property, largest).validate_ranges(), Ok(()), "{name}");
            let got = largest + 1;
            assert_eq!(
                with(property, got).validate_ranges(),
                Err(ParameterError::OutOfRange { property, largest, got })
            );
            for &kind in PolicyKind::ALL {
                let meaningless = Err(ParameterError::Meaningless { property, kind });
                let expected = if kinds.contains(&kind) { Ok(()) } else { meaningless };
                assert_eq!(with(property, largest).validate(kind), expected, "{name} of {kind}");
            }
        }
    }
}
