//! In which order cells are measured.
//!
//! A round is one repetition of everything. Within it loads come in random order, and under each load the subjects do,
//! one right after the other: what disturbs the machine for longer than a cell disturbs all of a pair alike. The baseline
//! comes twice where the plan wants its noise floor. Of a curve the closed loop's peak comes first, of all subjects, and
//! then each point, again of all.
//!
//! The order follows from the run's seed, so that a run that is resumed goes on in the same one.

use std::collections::BTreeSet;
use std::ops::Range;

use egret_loadgen::random::{Shuffle, mix};

use crate::analysis::Analysis;
use crate::plan::{Load, Plan, Stack, Subject};
use crate::results::{CellId, Run};
use crate::statistics::{Looks, Verdict};

/// What the baseline's second measurement is called.
pub const AGAIN: &str = " (again)";

/// The subject that goes by a name; the baseline has a second one.
pub(crate) fn subject_called<'a>(plan: &'a Plan, name: &str) -> Option<&'a Subject> {
    plan.subject(name.strip_suffix(AGAIN).unwrap_or(name))
}

/// Whether that is fio on the host.
pub(super) fn is_host(plan: &Plan, name: &str) -> bool {
    subject_called(plan, name).is_some_and(|subject| subject.stack == Stack::Host)
}

/// A cell to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Which.
    pub id: CellId,
    /// The load's place in the plan.
    pub load: usize,
    /// The subject's place in the plan.
    pub subject: usize,
    /// Of a curve's point: the share of its peak.
    pub share: Option<f64>,
}

/// Every cell of a plan, in order; with `only`, those whose load or subject has it in its name. Repetitions beyond the
/// plan's least come later, where they decide.
pub fn steps(plan: &Plan, seed: u64, only: Option<&str>) -> Vec<Step> {
    rounds(plan, seed, only, 0..plan.repetitions)
}

/// What is measured once more after so many repetitions: up to the next look, the comparisons that it may decide, and the
/// host beside them. Nothing where none is left.
pub fn more_steps(run: &Run, after: u32) -> Vec<Step> {
    let plan = &run.plan;
    let Some(look) = Looks::new(plan.repetitions, plan.most_repetitions()).after(after) else { return Vec::new() };
    let seen =
        Run { cells: run.cells.iter().filter(|cell| cell.id.repetition < after).cloned().collect(), ..run.clone() };
    let mut wanted: BTreeSet<(String, String)> = BTreeSet::new();
    for judged in Analysis::new(&seen).judged {
        // Five times what is left: the estimate is rough, and one stall among five pairs makes much of it. With three times
        // three of forty losses of 5 % were given up at nine pairs, where measurements scattered by 2.3 %.
        let within = |more: usize| more <= 5 * (plan.most_repetitions() - after) as usize;
        if !matches!(judged.decision, Ok(Verdict::CantTell { more_pairs: Some(more) }) if within(more)) {
            continue;
        }
        let names = plan.subjects.iter().filter(|subject| subject.stack == Stack::Host).map(|host| host.name.clone());
        let again = format!("{}{AGAIN}", judged.baseline);
        for name in names.chain([judged.subject, judged.baseline, again]) {
            wanted.insert((judged.load.clone(), name));
        }
    }
    let mut steps = rounds(plan, run.seed, run.only.as_deref(), after..look);
    steps.retain(|step| wanted.contains(&(step.id.load.clone(), step.id.subject.clone())));
    steps
}

fn rounds(plan: &Plan, seed: u64, only: Option<&str>, repetitions: Range<u32>) -> Vec<Step> {
    let loads = &plan.loads;
    let mut steps = Vec::new();
    for repetition in repetitions {
        let mut shuffle = Shuffle::seeded(mix(seed ^ u64::from(repetition)));
        for load in shuffle.of((0..loads.len()).collect()) {
            for (point, share) in points(&loads[load]) {
                for (subject, name) in shuffle.of(contenders(plan, &loads[load])) {
                    let id = CellId { load: loads[load].name.clone(), subject: name, repetition, point };
                    steps.push(Step { id, load, subject, share });
                }
            }
        }
    }
    steps.retain(|step| only.is_none_or(|only| step.id.load.contains(only) || step.id.subject.contains(only)));
    steps
}

/// A load's subjects by place and name, the baseline twice.
fn contenders(plan: &Plan, load: &Load) -> Vec<(usize, String)> {
    let mut all: Vec<_> = plan.subjects.iter().map(|subject| subject.name.clone()).enumerate().collect();
    all.retain(|(_, name)| load.is_put_on(name));
    let baseline = all.iter().find(|(_, name)| plan.noise_floor && name == plan.baseline_under(load));
    let again = baseline.map(|(place, name)| (*place, format!("{name}{AGAIN}")));
    all.extend(again);
    all
}

fn points(load: &Load) -> Vec<(u32, Option<f64>)> {
    let mut points = vec![(0, None)];
    if let Some(curve) = load.keys.curve {
        let step = if curve.points > 1 { (curve.to - curve.from) / f64::from(curve.points - 1) } else { 0.0 };
        points.extend((0..curve.points).map(|point| (point + 1, Some((curve.from + step * f64::from(point)) / 100.0))));
    }
    points
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn plan(more: &str) -> Plan {
        let subjects: String =
            ["a", "b", "c"].map(|name| format!("[[subject]]\nname = '{name}'\nstack = 'egret'\n")).concat();
        let text = format!(
            "name = 'p'\ntitle = 't'\nbaseline = 'b'\nrepetitions = 4\n[disk]\ntype = 'null'\n{subjects}[[load]]\niodepth = [1, 2, 3]\n{more}"
        );
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn every_cell_comes_once_and_the_baseline_twice_a_round() {
        let steps = steps(&plan(""), 7, None);
        let ids: BTreeSet<&CellId> = steps.iter().map(|step| &step.id).collect();
        assert_eq!((steps.len(), ids.len()), (4 * 3 * 4, 4 * 3 * 4));
        assert!(ids.iter().any(|id| id.subject == "b (again)"));
    }

    #[test]
    fn subjects_of_a_pair_are_neighbours_and_their_order_is_random() {
        let steps = steps(&plan(""), 7, None);
        let mut orders = BTreeSet::new();
        for pair in steps.chunks(4) {
            assert!(
                pair.iter().all(|step| step.id.load == pair[0].id.load && step.id.repetition == pair[0].id.repetition)
            );
            orders.insert(pair.iter().map(|step| step.id.subject.clone()).collect::<Vec<_>>());
        }
        assert!(orders.len() > 4, "{orders:?}");
        let loads: BTreeSet<Vec<usize>> =
            steps.chunks(12).map(|round| round.iter().map(|step| step.load).collect()).collect();
        assert!(loads.len() > 1);
    }

    #[test]
    fn the_same_seed_gives_the_same_order_and_another_one_another() {
        let plan = plan("");
        assert_eq!(steps(&plan, 7, None), steps(&plan, 7, None));
        assert_ne!(steps(&plan, 7, None), steps(&plan, 8, None));
    }

    #[test]
    fn of_a_curve_the_peaks_come_first() {
        let plan = plan("curve = { from = 10, to = 90, points = 3 }");
        let all = steps(&plan, 7, Some("QD2"));
        assert_eq!(all.len(), 4 * 4 * 4);
        let shares: Vec<_> = all.iter().step_by(4).take(4).map(|step| step.share).collect();
        assert_eq!(shares, [None, Some(0.1), Some(0.5), Some(0.9)]);
        assert_eq!(
            all.iter().take(16).map(|step| step.id.point).collect::<Vec<_>>(),
            [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
        );
    }

    #[test]
    fn a_load_with_subjects_of_its_own_has_a_baseline_among_them() {
        let names = |subjects: &str| {
            let all = steps(&plan(&format!("subjects = {subjects}")), 7, Some("QD1"));
            all.into_iter().map(|step| step.id.subject).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
        };
        assert_eq!(names("['c', 'a']"), ["a", "c", "c (again)"]);
        assert_eq!(names("['c', 'b']"), ["b", "b (again)", "c"]);
    }

    #[test]
    fn some_can_be_chosen_by_name() {
        let all = steps(&plan(""), 7, Some("QD3"));
        assert_eq!(all.len(), 4 * 4);
        assert!(steps(&plan(""), 7, Some("nobody")).is_empty());
    }
}
