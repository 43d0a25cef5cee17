//! When a plan that may measure more repetitions looks at what it has, and what a look may spend.

/// Looks at most: more of them cost each too much.
const MOST: u32 = 3;

/// A look at what was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// After how many repetitions it comes.
    pub after: u32,
    /// Its share of the probability of an error.
    pub share: f64,
    /// Whether nothing is measured after it.
    pub is_last: bool,
}

impl Look {
    /// The look of who looks once, at all there is.
    pub const ONLY: Self = Self { after: u32::MAX, share: 1.0, is_last: true };
}

/// The repetitions after which verdicts are made, in order.
///
/// A look may find by chance what is not there, and so may the next. Each has a share of the probability of an error, in
/// proportion to the repetitions that are new at it (Lan and DeMets 1983, a spending function that is linear in
/// information), and the shares' sum is 1: whatever the looks have in common, all together err no more often than one would.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looks(Vec<u32>);

impl Looks {
    /// The first after `least` repetitions, the last after `most`.
    pub fn new(least: u32, most: u32) -> Self {
        let more = most.saturating_sub(least);
        let steps = (MOST - 1).min(more);
        Self((0..=steps).map(|step| least + (more * step).div_ceil(steps.max(1))).collect())
    }

    /// Each look.
    pub fn all(&self) -> impl Iterator<Item = Look> {
        let most = self.0.last().copied().unwrap_or(1).max(1);
        let before = std::iter::once(0).chain(self.0.iter().copied());
        self.0.iter().zip(before).map(move |(&after, before)| Look {
            after,
            share: f64::from(after - before) / f64::from(most),
            is_last: after == most,
        })
    }

    /// The look after so many repetitions, if there is another.
    pub fn after(&self, repetitions: u32) -> Option<u32> {
        self.0.iter().copied().find(|look| *look > repetitions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_spread_over_the_repetitions_and_spend_all_there_is_once() {
        for (least, most, looks) in [(5, 12, vec![5, 9, 12]), (5, 5, vec![5]), (5, 6, vec![5, 6]), (5, 1, vec![5])] {
            let all = Looks::new(least, most);
            assert_eq!(all.all().map(|look| look.after).collect::<Vec<_>>(), looks);
            let spent: f64 = all.all().map(|look| look.share).sum();
            assert!((spent - 1.0).abs() < 1e-12, "{spent}");
            assert_eq!(all.all().filter(|look| look.is_last).count(), 1);
            assert_eq!(all.after(looks[0]), looks.get(1).copied());
        }
    }
}
