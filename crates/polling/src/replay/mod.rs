//! Recorded waits, once more, under every policy.
//!
//! A replay feeds the true lengths of a trace's waits to a policy and adds up what its windows would have cost. It runs
//! the policy's own code, and it cannot run the world: had the loop spun less, its waits would have come out otherwise
//! (blocking makes batches, spinning takes a core from whoever serves the disk). A replay ranks policies; only a live
//! run decides.
//!
//! | file | what it is |
//! |---|---|
//! | `simulate.rs` | one policy on one trace |
//! | `hindsight.rs` | what could not have been beaten: the offline optimum, and the best fixed window |
//! | `row.rs` | one line of the report |
//! | `front.rs` | CPU against latency, drawn |

mod front;
mod hindsight;
mod row;
mod simulate;

pub use front::front_svg;
pub use row::{Contender, Row, Windows};

use self::hindsight::Hindsight;
use crate::kind::build;
use crate::parameters::ParameterError;
use crate::trace::Trace;
use crate::{BlockCost, Nanos, Parameters, PolicyKind};

/// What a trace is replayed under.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// What blocking costs the replayed thread, and what its policy is told it costs; a recorded trace brings its own
    /// in [`Trace::block`].
    pub block: BlockCost,
    /// The policies' properties; `price` counts in every row's cost, whatever the policy heeds.
    pub parameters: Parameters,
}

impl Setting {
    /// K, by which this setting weighs a block against spinning.
    pub fn k(&self) -> Nanos {
        self.block.total(self.parameters.price_or_default())
    }
}

/// Replays `trace` under each of `policies`; the first two rows are the offline optimum and the best fixed window.
///
/// # Errors
/// A property out of its range.
pub fn replay(
    name: &str,
    trace: &Trace,
    setting: &Setting,
    policies: &[PolicyKind],
) -> Result<Vec<Row>, ParameterError> {
    let hindsight = Hindsight::of(trace);
    let offline_optimum = hindsight.offline_optimum(setting);
    let (best, best_tally) = hindsight.best_fixed(setting);
    let row = |contender, tally| Row::new(name, contender, setting, tally, &offline_optimum, &best_tally);

    let mut rows = vec![row(Contender::OfflineOptimum, offline_optimum), row(Contender::BestFixed(best), best_tally)];
    for &kind in policies {
        let mut policy = build(kind, &setting.parameters)?;
        policy.set_block_cost(setting.block);
        let max = setting.parameters.max_for(kind);
        let (mut sum, mut near_max, mut elapsed) = (0_u128, Nanos::ZERO, Nanos::ZERO);
        let tally = simulate::run(policy.as_mut(), trace, setting.block.latency, |window, length| {
            sum += u128::from(window.0);
            elapsed += length;
            near_max += if window.is_near(max) { length } else { Nanos::ZERO };
        });
        let windows = Windows {
            mean_ns: (sum / u128::from(tally.waits.max(1))) as u64,
            reset_rate: policy.resets() as f64 / tally.waits.max(1) as f64,
            near_max: near_max.0 as f64 / elapsed.0.max(1) as f64,
        };
        rows.push(Row { windows: Some(windows), ..row(Contender::Policy(kind), tally) });
    }
    Ok(rows)
}

/// The window that a policy of kind `kind` chooses before each wait of `trace`; those of no length have none.
///
/// # Errors
/// A property out of its range.
pub fn windows(trace: &Trace, kind: PolicyKind, parameters: &Parameters) -> Result<Vec<Nanos>, ParameterError> {
    let mut windows = Vec::with_capacity(trace.waits.len());
    let mut policy = build(kind, parameters)?;
    policy.set_block_cost(trace.block);
    simulate::run(policy.as_mut(), trace, trace.block.latency, |window, _length| windows.push(window));
    Ok(windows)
}

/// What each fixed window up to `poll-max-ns` would have cost: the front that a policy without foresight is on.
///
/// One row per window, shortest first, a handful an octave.
pub fn fixed_windows(name: &str, trace: &Trace, setting: &Setting) -> Vec<Row> {
    let hindsight = Hindsight::of(trace);
    let offline_optimum = hindsight.offline_optimum(setting);
    let (_, best) = hindsight.best_fixed(setting);
    hindsight::ladder(setting.parameters.max)
        .map(|window| {
            let tally = hindsight.fixed(window);
            Row::new(name, Contender::Fixed(window), setting, tally, &offline_optimum, &best)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Record;
    use crate::{EventKind, Slot};

    fn trace(lengths: &[u64]) -> Trace {
        let record = |&length| Record { length: Nanos(length), spun: Nanos(length), ..Record::default() };
        Trace { note: String::new(), block: BlockCost::default(), lost: 0, waits: lengths.iter().map(record).collect() }
    }

    /// A queue, in slot 0, ended each of the waits.
    fn trace_of_one_queue(lengths: &[u64]) -> Trace {
        let mut trace = trace(lengths);
        trace.block = BlockCost { cpu: Nanos::ZERO, latency: Nanos::ZERO };
        trace.waits.iter_mut().for_each(|record| record.ready.push(Slot(0), EventKind::Queue));
        trace
    }

    fn setting(max: u64) -> Setting {
        let block = BlockCost { cpu: Nanos(4), latency: Nanos(3) };
        Setting { block, parameters: Parameters { max: Some(Nanos(max)), price: Some(2), ..Parameters::default() } }
    }

    /// Waits of 2, 3 and 20 with K = 4 + 2 x 3 = 10: done by hand below.
    fn rows() -> Vec<Row> {
        replay("hand", &trace(&[2, 3, 20]), &setting(100), &[PolicyKind::Off, PolicyKind::Busy]).unwrap()
    }

    #[test]
    fn the_offline_optimum_spins_for_the_short_waits_and_blocks_at_once_for_the_long() {
        let row = &rows()[0];
        assert_eq!(row.contender, Contender::OfflineOptimum);
        assert_eq!((row.k_ns, row.cost_ns), (10, 2 + 3 + 10));
        assert_eq!((row.spin_found_ns, row.spin_wasted_ns, row.blocks, row.added_latency_ns), (5, 0, 1, 3));
    }

    #[test]
    fn the_best_fixed_window_is_the_one_that_costs_least_over_all_waits() {
        let row = &rows()[1];
        assert_eq!(row.contender, Contender::BestFixed(Nanos(3)));
        assert_eq!((row.cost_ns, row.spin_found_ns, row.spin_wasted_ns, row.blocks), (2 + 3 + 13, 5, 3, 1));
    }

    #[test]
    fn off_blocks_always_and_busy_never() {
        let [_, _, off, busy] = &rows()[..] else { panic!("four rows") };
        assert_eq!((off.cost_ns, off.cpu_ns, off.blocks, off.added_latency_ns), (30, 12, 3, 9));
        assert_eq!((off.spin_found_ns, off.spin_wasted_ns), (0, 0));
        assert_eq!((busy.cost_ns, busy.cpu_ns, busy.blocks, busy.spin_found_ns), (25, 25, 0, 25));
        assert_eq!(busy.competitive_ratio, 25.0 / 15.0);
        assert_eq!(busy.against_best_fixed, 25.0 / 18.0);
        assert_eq!((off.cpu_us_per_wait(), off.latency_us_per_wait()), (0.004, 0.003));
    }

    #[test]
    fn the_best_fixed_window_heeds_the_same_maximum() {
        let rows = replay("hand", &trace(&[2, 3, 20]), &setting(2), &[]).unwrap();
        assert_eq!(rows[1].contender, Contender::BestFixed(Nanos(2)));
        assert_eq!(rows[1].cost_ns, 2 + 12 + 12);
    }

    #[test]
    fn no_fixed_window_beats_the_best() {
        let trace = trace(&[700, 2_000, 9_000, 9_500, 40_000, 900_000]);
        let setting = Setting { block: BlockCost::default(), parameters: Parameters::default() };
        let best = replay("t", &trace, &setting, &[]).unwrap()[1].cost_ns;
        let fixed = fixed_windows("t", &trace, &setting);
        assert!(fixed.len() > 20 && fixed.iter().all(|row| row.cost_ns >= best));
    }

    #[test]
    fn an_empty_trace_costs_nothing_and_compares_as_equal() {
        let rows = replay("empty", &trace(&[]), &setting(100), PolicyKind::ALL).unwrap();
        assert!(rows.iter().all(|row| row.cost_ns == 0 && row.competitive_ratio == 1.0));
    }

    #[test]
    fn a_rows_windows_are_counted_as_qemus_are_published() {
        // per-source-window starts over from 0 after a wait beyond the maximum of 8000 ns; by hand: windows of 0, 4000, 8000, 8000
        // and 0 ns, of which the two of 8000 are near the maximum, and the wait of 9000 resets.
        let trace = trace_of_one_queue(&[5_000, 6_000, 7_000, 9_000, 1_000]);
        let parameters = Parameters { max: Some(Nanos(8_000)), ..Parameters::default() };
        let setting = Setting { block: trace.block, parameters };
        let rows = replay("windows", &trace, &setting, &[PolicyKind::PerSourceWindow]).unwrap();
        let expected = [0, 4_000, 8_000, 8_000, 0].map(Nanos);
        assert_eq!(windows(&trace, PolicyKind::PerSourceWindow, &parameters).unwrap(), expected);
        let near_max = (7_000.0 + 9_000.0) / 28_000.0;
        assert_eq!(rows[2].windows, Some(Windows { mean_ns: 4_000, reset_rate: 1.0 / 5.0, near_max }));
        assert_eq!(rows[1].windows, None);
    }

    #[test]
    fn a_row_becomes_json_with_names_and_units() {
        let json = serde_json::to_value(&rows()[1]).unwrap();
        assert_eq!(json["contender"], "best-fixed");
        assert_eq!(json["window_ns"], 3);
        assert_eq!(json["cost_ns"], 18);
        let json = serde_json::to_value(&rows()[3]).unwrap();
        assert_eq!(json["contender"], "busy");
        assert_eq!(json["window_ns"], serde_json::Value::Null);
    }

    #[test]
    fn a_wait_of_no_length_is_none() {
        let trace = trace(&[0, 5, 0]);
        assert_eq!(windows(&trace, PolicyKind::Busy, &Parameters::default()).unwrap(), [Nanos::MAX]);
        let rows = replay("none", &trace, &setting(100), &[PolicyKind::Busy, PolicyKind::Off]).unwrap();
        assert_eq!((rows[2].waits, rows[2].window_ns, rows[1].window_ns), (1, None, Some(5)));
        assert!(rows[2].cpu_us_per_wait() == 0.005 && rows[2].latency_us_per_wait() == 0.0);
        let fixed = fixed_windows("none", &trace, &setting(100));
        assert!(rows.iter().chain(&fixed).all(|row| row.waits == 1), "{rows:?} {fixed:?}");
        let of = |row: &Row| (row.cpu_us_per_wait(), row.latency_us_per_wait(), row.blocks);
        assert_eq!(of(&fixed[0]), of(&rows[3]), "a window of 0 is none");
    }
}
