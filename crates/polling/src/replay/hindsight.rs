//! What could not have been beaten, known only afterwards.

use super::Setting;
use super::simulate::Tally;
use crate::Nanos;
use crate::trace::Trace;

/// The waits in order of length, with their sums.
pub(super) struct Hindsight {
    sorted: Vec<u64>,
    /// `sums[i]`: the `i` shortest waits together.
    sums: Vec<u64>,
}

impl Hindsight {
    pub(super) fn of(trace: &Trace) -> Self {
        let turns = trace.waits.iter().zip(trace.true_lengths());
        let waits = turns.filter(|(record, _)| record.length > Nanos::ZERO);
        let mut lengths: Vec<_> = waits.map(|(_, length)| length.0).collect();
        lengths.sort_unstable();
        let mut sums = Vec::with_capacity(lengths.len() + 1);
        sums.push(0_u64);
        for &length in &lengths {
            sums.push(sums[sums.len() - 1].saturating_add(length));
        }
        Self { sorted: lengths, sums }
    }

    /// Spins for every wait up to K and blocks at once for the others: no policy costs less.
    pub(super) fn offline_optimum(&self, setting: &Setting) -> Tally {
        Tally { spin_wasted: Nanos::ZERO, ..self.fixed(setting.k()) }
    }

    /// What a window of `window` before every wait comes to.
    pub(super) fn fixed(&self, window: Nanos) -> Tally {
        self.with_found(self.sorted.partition_point(|&length| length <= window.0), window)
    }

    /// The window up to the maximum that costs least, the shortest of those, and what it comes to.
    pub(super) fn best_fixed(&self, setting: &Setting) -> (Nanos, Tally) {
        let cost = |tally: &Tally| tally.cost(setting.k());
        let mut best = (Nanos::ZERO, self.fixed(Nanos::ZERO));
        for (index, &length) in self.sorted.iter().enumerate() {
            // A window between two waits costs more than the shorter of them and finds no more.
            if setting.parameters.max.is_some_and(|max| length > max.0) {
                break;
            }
            if self.sorted.get(index + 1) == Some(&length) {
                continue;
            }
            let tally = self.with_found(index + 1, Nanos(length));
            if cost(&tally) < cost(&best.1) {
                best = (Nanos(length), tally);
            }
        }
        best
    }

    fn with_found(&self, found: usize, window: Nanos) -> Tally {
        let blocks = (self.sorted.len() - found) as u64;
        Tally {
            waits: self.sorted.len() as u64,
            spin_found: Nanos(self.sums[found]),
            spin_wasted: Nanos(blocks.saturating_mul(window.0)),
            blocks,
        }
    }
}

/// Windows worth drawing: none, then eight an octave from 250 ns to `max` or 10 ms.
pub(super) fn ladder(max: Option<Nanos>) -> impl Iterator<Item = Nanos> {
    let last = max.unwrap_or(Nanos::MAX).0.min(10_000_000);
    let steps = (0..).map(|step| (250.0 * (f64::from(step) / 8.0).exp2()) as u64);
    let between = steps.take_while(move |&window| window < last).map(Nanos);
    std::iter::once(Nanos::ZERO).chain(between).chain((last > 0).then_some(Nanos(last)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Record;
    use crate::{BlockCost, Parameters};

    #[test]
    fn of_windows_that_cost_the_same_the_shortest_is_the_best() {
        let best = |lengths: &[u64], max: u64| {
            let record = |&length| Record { length: Nanos(length), ..Record::default() };
            let waits = lengths.iter().map(record).collect();
            let trace = Trace { note: String::new(), block: BlockCost::default(), lost: 0, waits };
            let parameters = Parameters { max: Some(Nanos(max)), ..Parameters::default() };
            let setting = Setting { block: BlockCost { cpu: Nanos(4), latency: Nanos(6) }, parameters };
            let (window, tally) = Hindsight::of(&trace).best_fixed(&setting);
            (window.0, tally.cost(setting.k()))
        };
        assert_eq!(best(&[10], 100), (0, 10));
        assert_eq!(best(&[9], 100), (9, 9));
        assert_eq!(best(&[9], 9), (9, 9));
        assert_eq!(best(&[9], 8), (0, 10));
        assert_eq!(best(&[3, 3, 3, 40], 100), (3, 9 + 13));
    }

    #[test]
    fn the_ladder_has_eight_steps_an_octave_from_none_to_the_maximum() {
        let steps = |max: Option<u64>| ladder(max.map(Nanos)).map(|window| window.0).collect::<Vec<_>>();
        assert_eq!(steps(Some(600)), [0, 250, 272, 297, 324, 353, 385, 420, 458, 500, 545, 594, 600]);
        assert_eq!(steps(Some(500)), [0, 250, 272, 297, 324, 353, 385, 420, 458, 500]);
        assert_eq!(steps(Some(1)), [0, 1]);
        assert_eq!(steps(Some(0)), [0]);
        assert_eq!(steps(None).last(), Some(&10_000_000));
        assert_eq!(steps(None), steps(Some(u64::MAX)));
    }
}
