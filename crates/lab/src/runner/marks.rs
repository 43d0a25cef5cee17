//! Marks that take several cells: device-bound cells, and other work on the machine.

use std::collections::BTreeMap;

use super::order::{is_host, subject_called};
use crate::plan::{Load, Plan};
use crate::results::{Bottleneck, Cell, CellId, DISTURBS, Measurement, Outcome, Warning};
use crate::statistics::mean;

/// What is over sooner is not told exactly enough by milliseconds, in seconds.
const BRIEF: f64 = 0.05;

/// A subject whose throughput is this share of fio's on the host, or as little above it, is device-bound.
const DEVICE_BOUND: f64 = 0.97;
/// With fewer requests in flight the bottleneck is latency, and not the disk.
const SATURATING: u32 = 4;

fn throughput(measurement: &Measurement) -> f64 {
    measurement.bytes() as f64 / measurement.seconds.max(1e-9)
}

/// Marks the cells that are as fast as the host's own fio in the same repetition, where enough is in flight to saturate a
/// disk: their figures are the disk's. One that is faster than fio has shown that fio was not at the disk's limit, and then
/// nobody is: in this repetition, or in none, where most of the repetitions that have all subjects showed it, as later ones
/// lack those that are done with. Open loops are not marked, because their rate is given.
pub fn mark_device_bound(plan: &Plan, cells: &mut [Cell]) {
    let is_host = |name: &str| is_host(plan, name);
    let in_flight = |id: &CellId| plan.loads.named(&id.load).map_or(0, Load::in_flight);
    // What the disk itself reaches says nothing of one that is reached otherwise, or from another host.
    let way = |name: &str| subject_called(plan, name).map(|one| (&one.backend, &one.host, &one.client));
    // Of two that are marked none lost more than the threshold to the other.
    let bound = DEVICE_BOUND.max(1.0 - plan.threshold / 2.0);
    let mut rounds: BTreeMap<(String, u32), Vec<(CellId, f64)>> = BTreeMap::new();
    for cell in cells.iter().filter(|cell| cell.id.point == 0) {
        let reached = cell.measured().map(|measurement| (cell.id.clone(), throughput(measurement)));
        rounds.entry((cell.id.load.clone(), cell.id.repetition)).or_default().extend(reached);
    }
    let best = |one: &CellId, repetition: u32, of: &dyn Fn(&str) -> bool| {
        let round = rounds.get(&(one.load.clone(), repetition)).map_or(&[][..], Vec::as_slice);
        let same = |id: &CellId| way(&id.subject) == way(&one.subject);
        let reached = round.iter().filter(|(id, _)| same(id) && of(&id.subject)).map(|(_, reached)| *reached);
        reached.fold(0.0, f64::max)
    };
    // Whether fio was at the disk's limit, as far as a repetition shows it.
    let was_at_limit = |one: &CellId, repetition: u32| {
        let host = best(one, repetition, &is_host);
        (host > 0.0).then(|| best(one, repetition, &|_| true) <= host / bound)
    };
    let mostly_was = |one: &CellId| {
        let whole: Vec<bool> = (0..plan.repetitions).filter_map(|repetition| was_at_limit(one, repetition)).collect();
        2 * whole.iter().filter(|was| **was).count() >= whole.len()
    };
    for cell in cells.iter_mut().filter(|cell| cell.id.point == 0) {
        let host = best(&cell.id, cell.id.repetition, &is_host);
        if let Outcome::Measured(measurement) = &mut cell.outcome {
            // What was marked before the repetition was whole may be none.
            measurement.limit.take_if(|limit| matches!(limit, Bottleneck::Device(_)));
            let share = throughput(measurement) / host;
            let is_bound = share >= bound && was_at_limit(&cell.id, cell.id.repetition) == Some(true);
            let is_asked = !is_host(&cell.id.subject) && in_flight(&cell.id) >= SATURATING;
            let is_free = measurement.limit.is_none() && measurement.offered_iops.is_none();
            if is_bound && is_asked && is_free && mostly_was(&cell.id) {
                let text = format!("{:.0}% of what fio on the host gets from the disk", share * 100.0);
                measurement.limit = Some(Bottleneck::Device(text));
            }
        }
    }
}

/// Warns of other work on the machine while cells were measured.
pub fn noise(cells: &[Cell], processors: usize) -> Option<Warning> {
    let shares: Vec<f64> = cells.iter().filter_map(Cell::measured).filter_map(|one| one.others(processors)).collect();
    let disturbed = shares.iter().filter(|share| **share > DISTURBS).count();
    let most = shares.iter().copied().fold(0.0, f64::max);
    (disturbed > 0).then(|| Warning {
        about: "noisy-neighbour".into(),
        text: format!(
            "something else used more than {:.0}% of the machine in {disturbed} of {} cells, at most {:.0}%",
            DISTURBS * 100.0,
            shares.len(),
            most * 100.0
        ),
    })
}

/// Warns of cells of fio's that are over so soon that whole milliseconds, in which fio tells how long it took, are off by more than a
/// hundredth.
pub fn brief(plan: &Plan, cells: &[Cell]) -> Option<Warning> {
    let is_fios = |cell: &&Cell| subject_called(plan, &cell.id.subject).is_some_and(|subject| subject.stack.is_fios());
    let briefs = cells.iter().filter(is_fios).filter_map(|cell| Some((cell, cell.measured()?.seconds)));
    let briefs: Vec<(&Cell, f64)> = briefs.filter(|(_, seconds)| *seconds < BRIEF).collect();
    let (cell, seconds) = briefs.iter().min_by(|one, other| one.1.total_cmp(&other.1))?;
    let text = format!(
        "{} cells were over within {:.0} ms, such as '{}' under {} after {:.0} ms: fio tells whole milliseconds, and rates are off by as much",
        briefs.len(),
        BRIEF * 1e3,
        cell.id.subject,
        cell.id.load,
        seconds * 1e3
    );
    Some(Warning { about: "brief".into(), text })
}

/// Warns of a load that writes and under which all subjects together became slower, or faster, from repetition to
/// repetition: a disk that fills or wears in. Ratios of one repetition are hardly touched; figures are.
pub fn drift(plan: &Plan, cells: &[Cell]) -> Option<Warning> {
    let drifts = plan.loads.iter().filter(|load| load.writes()).filter_map(|load| {
        let mut rounds: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        for cell in cells.iter().filter(|cell| cell.id.load == load.name && cell.id.point == 0) {
            if let Some(reached) = cell.measured().map(throughput).filter(|reached| *reached > 0.0) {
                rounds.entry(cell.id.repetition).or_default().push(reached.ln());
            }
        }
        let points: Vec<(f64, f64)> =
            rounds.iter().filter_map(|(round, logs)| Some((f64::from(*round), mean(logs)?))).collect();
        let change = trend(&points)?;
        (change.abs() > plan.threshold).then(|| (load.name.clone(), change))
    });
    let (load, change) = drifts.max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))?;
    let percent = change.exp_m1() * 100.0;
    let text = format!(
        "under {load} all subjects together changed by {percent:+.0}% from the first repetition to the last: a disk that fills \
         or wears in is not the one that was measured at first"
    );
    Some(Warning { about: "drift".into(), text })
}

/// By how much a line through some points rises from the first to the last; nothing of fewer than five, or where they lie
/// less on it than chance allows in one case of a hundred (r² of 0.92 with three degrees of freedom).
fn trend(points: &[(f64, f64)]) -> Option<f64> {
    let [x, y]: [Vec<f64>; 2] = [points.iter().map(|one| one.0).collect(), points.iter().map(|one| one.1).collect()];
    let centre = [mean(&x)?, mean(&y)?];
    let product =
        |a: &[f64], b: &[f64], [at, bt]: [f64; 2]| -> f64 { a.iter().zip(b).map(|(a, b)| (a - at) * (b - bt)).sum() };
    let (xy, xx, yy) = (product(&x, &y, centre), product(&x, &x, [centre[0]; 2]), product(&y, &y, [centre[1]; 2]));
    let is_line = points.len() >= 5 && xy * xy > 0.92 * xx * yy;
    is_line.then(|| xy / xx * (x.last().unwrap_or(&0.0) - x.first().unwrap_or(&0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Ledger, Operations};

    fn cell(load: &str, subject: &str, bytes: u64) -> Cell {
        let reads = Some(Operations { requests: 10, bytes, ..Operations::default() });
        let cpu = Ledger { host_busy: Some(400_000_000), load: Some(200_000_000), ..Ledger::default() };
        let measurement = Measurement { seconds: 1.0, reads, cpu, ..Measurement::default() };
        let id = CellId { load: load.into(), subject: subject.into(), repetition: 0, point: 0 };
        Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measurement)) }
    }

    #[test]
    fn who_is_as_fast_as_the_disk_decides_nothing() {
        let plan = toml::from_str(
            "name = 'p'\ntitle = 't'\n[disk]\ntype = 'file'\n[[subject]]\nname = 'h'\nstack = 'host'\n[[subject]]\nname = 'e'\nstack = 'egret'\n[[load]]\niodepth = [1, 8]\n",
        )
        .unwrap();
        let (deep, single) = ("randread 4k QD8", "randread 4k QD1");
        let mut cells = [
            cell(deep, "h", 1000),
            cell(deep, "e", 980),
            cell(deep, "slow", 970),
            cell(single, "h", 100),
            cell(single, "e", 100),
        ];
        mark_device_bound(&plan, &mut cells);
        let limits: Vec<_> = cells.iter().map(|cell| cell.measured().unwrap().limit.is_some()).collect();
        assert_eq!(limits, [false, true, false, false, false]);
        assert_eq!(
            cells[1].measured().unwrap().limit,
            Some(Bottleneck::Device("98% of what fio on the host gets from the disk".into()))
        );
    }

    #[test]
    fn what_fio_gets_on_this_host_is_no_limit_of_who_is_loaded_from_another() {
        let plan = toml::from_str(
            "name = 'p'\ntitle = 't'\n[disk]\ntype = 'file'\n[[subject]]\nname = 'h'\nstack = 'host'\n[[subject]]\nname = 'e'\n\
             stack = 'ssh'\nclient = 'ssh:other'\n[[subject]]\nname = 'e2'\nstack = 'egret'\nhost = 'other'\n[[load]]\nname = 'l'\niodepth = 8\n",
        )
        .unwrap();
        let mut cells = [cell("l", "h", 1000), cell("l", "e", 980), cell("l", "e2", 980)];
        mark_device_bound(&plan, &mut cells);
        assert!(cells.iter().all(|cell| cell.measured().unwrap().limit.is_none()));
    }

    #[test]
    fn who_is_faster_than_fio_has_shown_that_fio_was_not_at_the_disks_limit() {
        let plan = |threshold: f64| {
            let subjects = ["a", "b"].map(|name| format!("[[subject]]\nname = '{name}'\nstack = 'egret'\n")).concat();
            let text = format!(
                "name = 'p'\ntitle = 't'\nthreshold = {threshold}\n[disk]\ntype = 'file'\n[[subject]]\nname = 'h'\n\
                 stack = 'host'\n{subjects}[[load]]\nname = 'l'\niodepth = 8\n"
            );
            toml::from_str::<Plan>(&text).unwrap()
        };
        let marked = |threshold: f64, a: u64, b: u64| {
            let mut cells = [cell("l", "h", 1000), cell("l", "a", a), cell("l", "b", b)];
            // As at an earlier look, when the other one was not there yet.
            mark_device_bound(&plan(threshold), &mut cells[..2]);
            mark_device_bound(&plan(threshold), &mut cells);
            [&cells[1], &cells[2]].map(|cell| cell.measured().unwrap().limit.is_some())
        };
        assert_eq!(marked(0.05, 980, 980), [true; 2]);
        assert_eq!(marked(0.05, 980, 1025), [true; 2]);
        assert_eq!(marked(0.05, 980, 1300), [false; 2], "the other one gets more from the disk");
        assert_eq!(marked(0.05, 1300, 1290), [false; 2]);
        // No pair that is excused may differ by more than the threshold.
        for (threshold, least, most) in [(0.05, 975, 1025), (0.02, 990, 1010), (0.5, 970, 1030)] {
            assert_eq!(marked(threshold, least, most), [true; 2], "{threshold}");
            assert!(least as f64 / most as f64 > 1.0 - threshold);
            assert_eq!(marked(threshold, least - 1, 1000), [false, true], "{threshold}");
            assert_eq!(marked(threshold, 1000, most + 1), [false; 2], "{threshold}");
        }
    }

    #[test]
    fn what_fio_was_not_at_in_the_first_repetitions_bounds_nobody_in_later_ones_without_who_was_faster() {
        let subjects = ["a", "u"].map(|name| format!("[[subject]]\nname = '{name}'\nstack = 'egret'\n")).concat();
        let plan: Plan = toml::from_str(&format!(
            "name = 'p'\ntitle = 't'\nrepetitions = 5\nmost-repetitions = 12\n[disk]\ntype = 'file'\n[[subject]]\nname = 'h'\n\
             stack = 'host'\n{subjects}[[load]]\nname = 'l'\niodepth = 8\n"
        ))
        .unwrap();
        let marked = |of_u: [u64; 5]| {
            let round = |repetition: u32| {
                let u = of_u.get(repetition as usize).map(|bytes| cell("l", "u", *bytes));
                let mut round: Vec<Cell> = [cell("l", "h", 1000), cell("l", "a", 985)].into_iter().chain(u).collect();
                round.iter_mut().for_each(|cell| cell.id.repetition = repetition);
                round
            };
            let mut cells: Vec<Cell> = (0..12).flat_map(round).collect();
            mark_device_bound(&plan, &mut cells);
            let of_a = cells.iter().filter(|cell| cell.id.subject == "a");
            of_a.filter(|cell| cell.measured().unwrap().limit.is_some()).count()
        };
        assert_eq!(marked([1300; 5]), 0, "it was done with after five");
        assert_eq!(marked([1300, 1300, 1300, 1000, 1000]), 0);
        assert_eq!(marked([1300, 1300, 1000, 1000, 1000]), 10, "a minority of repetitions shows nothing of the others");
    }

    #[test]
    fn fio_on_the_host_is_the_host_by_its_second_name_too() {
        let plan = toml::from_str(
            "name = 'p'\ntitle = 't'\n[disk]\ntype = 'file'\n[[subject]]\nname = 'h'\nstack = 'host'\n[[subject]]\nname = 'e'\nstack = 'egret'\n[[load]]\nname = 'l'\niodepth = 8\n",
        )
        .unwrap();
        let mut cells = [cell("l", "h", 1000), cell("l", "h (again)", 1050), cell("l", "e", 1040)];
        mark_device_bound(&plan, &mut cells);
        let limits = cells.each_ref().map(|cell| cell.measured().unwrap().limit.is_some());
        assert_eq!(limits, [false, false, true]);
    }

    #[test]
    fn work_that_nobody_answers_for_is_a_noisy_neighbours() {
        let warning = noise(&[cell("l", "s", 1)], 2).unwrap();
        assert_eq!(warning.text, "something else used more than 5% of the machine in 1 of 1 cells, at most 10%");
        assert_eq!(noise(&[cell("l", "s", 1)], 8), None);
    }

    #[test]
    fn a_disk_that_fills_is_warned_of_and_one_that_scatters_is_not() {
        let plan = |rw: &str| {
            let text = format!(
                "name = 'p'\ntitle = 't'\n[disk]\ntype = 'file'\n[[subject]]\nname = 'e'\nstack = 'egret'\n\
                 [[load]]\nname = 'l'\nrw = '{rw}'\n"
            );
            toml::from_str::<Plan>(&text).unwrap()
        };
        let cells = |rates: [u64; 5]| {
            let numbered = |(repetition, bytes): (u32, u64)| {
                let mut cell = cell("l", "e", bytes);
                cell.id.repetition = repetition;
                cell
            };
            (0..).zip(rates).map(numbered).collect::<Vec<_>>()
        };
        let filling = cells([1000, 950, 905, 850, 805]);
        let text = drift(&plan("randwrite"), &filling).unwrap().text;
        assert!(text.starts_with("under l all subjects together changed by -20% from"), "{text}");
        assert_eq!(drift(&plan("randread"), &filling), None);
        assert_eq!(drift(&plan("randwrite"), &cells([1000, 700, 1200, 800, 1400])), None);
        assert_eq!(drift(&plan("randwrite"), &cells([1000, 999, 998, 997, 996])), None);
    }
}
