//! What a group may do, and which limits make sense together.

/// The most that a limit may be, and that a burst may come to; large enough for any disk, and small enough for
/// arithmetic.
pub const LARGEST_LIMIT: u64 = 1_000_000_000_000_000;

/// The limits of a throttle group. Everything zero, which is the default, limits nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes a second.
    pub bytes: Rates,
    /// Requests a second.
    pub requests: Rates,
    /// Bytes that one request stands for: a larger one counts as so many as it has of these. Zero: each counts as one.
    pub request_bytes: u64,
}

/// Limits of one unit, by direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Of reads and writes together.
    pub total: Limit,
    /// Of reads.
    pub read: Limit,
    /// Of writes, zeroes and discards among them.
    pub write: Limit,
}

/// One limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Units a second in the long run; zero is no limit.
    pub average: u64,
    /// Units a second in a burst; zero leaves the average alone, whose tenth may come at once.
    pub burst: u64,
    /// Seconds that a burst may last at its rate.
    pub burst_seconds: u64,
}

impl Default for Limit {
    fn default() -> Self {
        Self { average: 0, burst: 0, burst_seconds: 1 }
    }
}

/// Why limits make no sense, in QEMU's words (`throttle_is_valid`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A total and its part.
    #[error("bps/iops/max total values and read/write values cannot be used at the same time")]
    TotalAndPart,
    /// The size of a request where requests are not limited.
    #[error("iops size requires an iops value to be set")]
    SizeWithoutRequests,
    /// More than [`LARGEST_LIMIT`].
    #[error("bps/iops/max values must be within [0, {LARGEST_LIMIT}]")]
    TooLarge,
    /// A burst of no length.
    #[error("the burst length cannot be 0")]
    NoBurstLength,
    /// A burst's length where there is no burst.
    #[error("burst length set without burst rate")]
    LengthWithoutBurst,
    /// A burst of more than [`LARGEST_LIMIT`] in all.
    #[error("burst length too high for this burst rate")]
    BurstTooLong,
    /// A burst over no average.
    #[error("bps_max/iops_max require corresponding bps/iops values")]
    BurstWithoutAverage,
    /// A burst that is slower than the average.
    #[error("bps_max/iops_max cannot be lower than bps/iops")]
    BurstBelowAverage,
}

impl Limits {
    /// Whether anything is limited.
    pub fn are_set(&self) -> bool {
        self.all().any(|limit| limit.average > 0)
    }

    /// Whether they make sense together.
    ///
    /// # Errors
    ///
    /// What is wrong; of several things the one that QEMU names.
    pub fn check(&self) -> Result<(), LimitsError> {
        let clashes = |rates: &Rates, of: fn(&Limit) -> u64| {
            of(&rates.total) > 0 && (of(&rates.read) > 0 || of(&rates.write) > 0)
        };
        let both = [&self.bytes, &self.requests];
        if both.iter().any(|rates| clashes(rates, |limit| limit.average) || clashes(rates, |limit| limit.burst)) {
            return Err(LimitsError::TotalAndPart);
        }
        if self.request_bytes > 0 && self.requests.all().iter().all(|limit| limit.average == 0) {
            return Err(LimitsError::SizeWithoutRequests);
        }
        self.all().try_for_each(Limit::check)
    }

    fn all(&self) -> impl Iterator<Item = &Limit> {
        self.bytes.all().into_iter().chain(self.requests.all())
    }
}

impl Rates {
    fn all(&self) -> [&Limit; 3] {
        [&self.total, &self.read, &self.write]
    }
}

impl Limit {
    fn check(&self) -> Result<(), LimitsError> {
        let &Self { average, burst, burst_seconds } = self;
        match () {
            () if average.max(burst) > LARGEST_LIMIT => Err(LimitsError::TooLarge),
            () if burst_seconds == 0 => Err(LimitsError::NoBurstLength),
            () if burst_seconds > 1 && burst == 0 => Err(LimitsError::LengthWithoutBurst),
            () if burst > 0 && burst_seconds > LARGEST_LIMIT / burst => Err(LimitsError::BurstTooLong),
            () if burst > 0 && average == 0 => Err(LimitsError::BurstWithoutAverage),
            () if burst > 0 && burst < average => Err(LimitsError::BurstBelowAverage),
            () => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limits with one of the six set to this.
    fn each(limit: Limit) -> Vec<Limits> {
        let places: [fn(&mut Limits) -> &mut Limit; 6] = [
            |limits| &mut limits.bytes.total,
            |limits| &mut limits.bytes.read,
            |limits| &mut limits.bytes.write,
            |limits| &mut limits.requests.total,
            |limits| &mut limits.requests.read,
            |limits| &mut limits.requests.write,
        ];
        let set = |place: fn(&mut Limits) -> &mut Limit| {
            let mut limits = Limits::default();
            *place(&mut limits) = limit;
            limits
        };
        places.map(set).into()
    }

    // As in QEMU's tests/unit/test-throttle.c.
    #[test]
    fn a_limit_makes_sense_or_is_refused_for_what_is_wrong_with_it() {
        const MAX: u64 = LARGEST_LIMIT;
        let refused = [
            ((MAX + 1, 0, 1), LimitsError::TooLarge),
            ((MAX, MAX + 1, 1), LimitsError::TooLarge),
            ((1, 1, 0), LimitsError::NoBurstLength),
            ((1, 0, 2), LimitsError::LengthWithoutBurst),
            ((1, 1, MAX + 1), LimitsError::BurstTooLong),
            ((1, 3, MAX / 2), LimitsError::BurstTooLong),
            ((1, MAX, 2), LimitsError::BurstTooLong),
            ((0, 100, 1), LimitsError::BurstWithoutAverage),
            ((100, 30, 1), LimitsError::BurstBelowAverage),
        ];
        let taken = [(0, 0, 1), (1, 0, 1), (MAX, 0, 1), (MAX, MAX, 1), (1, 1, MAX), (1, 2, MAX / 2), (100, 100, 1)];
        let outcomes = { refused }.into_iter().map(|(limit, error)| (limit, Err(error)));
        for ((average, burst, burst_seconds), outcome) in outcomes.chain(taken.map(|limit| (limit, Ok(())))) {
            for limits in each(Limit { average, burst, burst_seconds }) {
                assert_eq!(limits.check(), outcome, "{limits:?}");
                assert_eq!(limits.are_set(), average > 0);
            }
        }
    }

    #[test]
    fn a_total_and_its_parts_exclude_each_other_and_parts_go_together() {
        let one = Limit { average: 1, ..Limit::default() };
        let burst = Limit { burst: 1, ..one };
        for limit in [one, burst] {
            let none = Limit::default();
            for (total, read, write, makes_sense) in [
                (limit, limit, none, false),
                (limit, none, limit, false),
                (limit, limit, limit, false),
                (limit, none, none, true),
                (none, limit, limit, true),
            ] {
                let rates = Rates { total, read, write };
                let outcome = if makes_sense { Ok(()) } else { Err(LimitsError::TotalAndPart) };
                assert_eq!(Limits { bytes: rates, ..Limits::default() }.check(), outcome);
                assert_eq!(Limits { requests: rates, ..Limits::default() }.check(), outcome);
            }
        }
        let sized = Limits { request_bytes: 4096, ..Limits::default() };
        assert_eq!(sized.check(), Err(LimitsError::SizeWithoutRequests));
    }
}
