//! What the figures add up to: `low-regret` against the goals that were set for it.

use egret_lab::statistics::{Agreement, agreement, median};

use crate::cells::{Cell, Demand, Placement, Under};
use crate::deployment::{Contender, Outcome};
use crate::report::{Measured, of, ratios, with_policy};
use egret_loadgen::load::Waiting;

/// A goal that every one of some cells is to reach.
struct Goal<'a> {
    /// In words.
    what: &'a str,
    /// What the ratio is of.
    value: fn(&Outcome) -> f64,
    /// Whether it is good enough.
    good: fn(f64) -> bool,
    /// Which cells count.
    counts: fn(&Cell) -> bool,
}

const IOPS: fn(&Outcome) -> f64 = |outcome| outcome.iops;
const CPU: fn(&Outcome) -> f64 = |outcome| outcome.cpu_us;

/// Prints one line for each goal, and the cells that miss it.
pub fn print(cells: &[Cell], contenders: &[Contender], measured: &[Measured]) {
    let Some(subject) = with_policy(contenders, "low-regret") else { return };
    if measured.is_empty() {
        return;
    }
    println!("\ngoals of {} (a cell counts as missed if its median does):", subject.name);
    if let Some(weighted) = with_policy(contenders, "weighted") {
        let pair = (subject, weighted);
        let goal =
            Goal { what: "IOPS at least 0.99 of weighted's", value: IOPS, good: |r| r >= 0.99, counts: |_| true };
        judge(&goal, pair, cells, measured);
        total("CPU per I/O at most 0.75 of weighted's over the matrix", pair, cells, measured, |_| true);
    }
    if let Some(busy) = with_policy(contenders, "busy") {
        let pair = (subject, busy);
        let apart = |cell: &Cell| cell.placement == Placement::Apart;
        let goal = Goal {
            what: "IOPS at least 0.95 of busy's where a core is free",
            value: IOPS,
            good: |r| r >= 0.95,
            counts: apart,
        };
        judge(&goal, pair, cells, measured);
        let light = |cell: &Cell| cell.is_light();
        let goal = Goal {
            what: "CPU per I/O at most 0.5 of busy's at light load",
            value: CPU,
            good: |r| r <= 0.5,
            counts: light,
        };
        judge(&goal, pair, cells, measured);
        let contended = |cell: &Cell| cell.placement == Placement::Contended && !cell.is_light();
        let goal = Goal {
            what: "more IOPS than busy where cores are contended",
            value: IOPS,
            good: |r| r > 1.0,
            counts: contended,
        };
        judge(&goal, pair, cells, measured);
        total("CPU per I/O against busy's over the matrix", pair, cells, measured, |_| true);
    }
    null_disk(cells, contenders, measured);
}

fn judge(goal: &Goal<'_>, pair: (&Contender, &Contender), cells: &[Cell], measured: &[Measured]) {
    let mut verdicts = [0; 3];
    let mut missed = Vec::new();
    for cell in cells.iter().filter(|cell| (goal.counts)(cell)) {
        let ratios = ratios(measured, cell, pair, goal.value);
        let Some(verdict) = agreement(&ratios, goal.good) else { continue };
        verdicts[match verdict {
            Agreement::Yes => 0,
            Agreement::No => 1,
            Agreement::CantTell => 2,
        }] += 1;
        let median = median(ratios);
        if !(goal.good)(median) {
            missed.push(format!("{} {median:.3}", cell.name()));
        }
    }
    let [yes, no, cant_tell] = verdicts;
    if yes + no + cant_tell > 0 {
        println!("- {}: yes {yes}, no {no}, can't tell {cant_tell}; {} missed", goal.what, missed.len());
        missed.iter().for_each(|cell| println!("    {cell}"));
    }
}

/// A geometric mean over the cells: each counts alike, however slow its disk.
fn total(what: &str, pair: (&Contender, &Contender), cells: &[Cell], measured: &[Measured], counts: fn(&Cell) -> bool) {
    let medians = cells.iter().filter(|cell| counts(cell)).map(|cell| ratios(measured, cell, pair, CPU));
    let logs: Vec<_> = medians.filter(|ratios| !ratios.is_empty()).map(|ratios| median(ratios).ln()).collect();
    if !logs.is_empty() {
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        println!("- {what}: {mean:.3} (geometric mean of {} cells)", logs.len());
    }
}

/// The null disk with a polling client on the next core: what the path costs at best.
fn null_disk(cells: &[Cell], contenders: &[Contender], measured: &[Measured]) {
    let is_null = |cell: &&Cell| {
        let Cell { under, waiting, disks, placement, .. } = cell;
        (*under, *waiting, *disks, *placement) == (Under::Null(0), Waiting::Polling, 1, Placement::Apart)
    };
    for cell in cells.iter().filter(is_null) {
        for contender in contenders {
            let mine = of(measured, cell, contender);
            if mine.is_empty() {
                continue;
            }
            let iops = median(mine.iter().map(|one| one.outcome.iops).collect());
            let name = &contender.name;
            match cell.demand {
                Demand::Depth(1) => {
                    println!("- null disk, a round trip under 700 ns: {:.0} ns with {name}", 1e9 / iops);
                }
                Demand::Depth(64) => {
                    let limit = mine.iter().find_map(|one| one.outcome.limit.as_deref());
                    let limit = limit.map_or(String::new(), |limit| format!("; the load was the limit: {limit}"));
                    println!("- null disk, above 5.0 M IOPS on one core: {:.2} M with {name}{limit}", iops / 1e6);
                }
                _ => {}
            }
        }
    }
}
