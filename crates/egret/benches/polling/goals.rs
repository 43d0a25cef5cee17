//! What the figures add up to: what a request costs with `low-regret`, against the best of the others in each cell.

use std::collections::{BTreeMap, BTreeSet};

use egret_lab::statistics::{median, spread};

use crate::cells::{Cell, Demand, Placement, Under};
use crate::deployment::{Contender, Outcome};
use crate::report::{Measured, of, ratios, with_policy};
use egret_loadgen::load::Waiting;

/// How much dearer than the best of the others a cell may be, and all of them on average.
const CELL: f64 = 1.05;
const MEAN: f64 = 1.00;

/// What `low-regret` minimises at a price of 1: CPU time, that of the kernel's threads too, since blocking moves work there, and
/// time. In an open loop that is the time a request takes, in a closed one the time until the next is answered.
fn cost(cell: &Cell, outcome: &Outcome) -> f64 {
    let time = if cell.is_light() { outcome.mean_us } else { 1e6 / outcome.iops };
    outcome.daemon_cpu_us + outcome.kernel_cpu_us + time
}

/// Prints a line for each cell, dearest first, how many of them are within the bounds, and what it comes to over each of the others.
pub fn print(cells: &[Cell], contenders: &[Contender], measured: &[Measured]) {
    let Some(subject) = with_policy(contenders, "low-regret") else { return };
    let mut rows: Vec<_> = cells.iter().filter_map(|cell| row(cell, subject, contenders, measured)).collect();
    if !rows.is_empty() {
        rows.sort_by(|one, other| other.over_best.total_cmp(&one.over_best));
        println!("\nCPU and time a request with {}, over the best of the others (us):", subject.name);
        rows.iter().for_each(|row| println!("  {}", row.text));
        let within = rows.iter().filter(|row| row.over_best <= CELL).count();
        println!("- at most {CELL}: {within} of {} cells", rows.len());
        let mean = geometric_mean(rows.iter().map(|row| row.over_best));
        println!("- geometric mean at most {MEAN}: {mean:.3}");
        for (at, other) in contenders.iter().filter(|&contender| contender != subject).enumerate() {
            let mean = geometric_mean(rows.iter().filter_map(|row| row.over_others[at]));
            println!("- geometric mean over {}: {mean:.3}", other.name);
        }
        let mut most = BTreeMap::new();
        for (habit, _) in rows.iter().filter_map(|row| row.habits.first()) {
            *most.entry(habit).or_insert(0) += 1;
        }
        most.iter()
            .for_each(|(habit, cells)| println!("- {cells} cells have the most of the time with the habit '{habit}'"));
    }
    null_disk(cells, contenders, measured);
}

fn geometric_mean(ratios: impl Iterator<Item = f64> + Clone) -> f64 {
    (ratios.clone().map(f64::ln).sum::<f64>() / ratios.count() as f64).exp()
}

/// One cell.
struct Row {
    /// The median, of the repetitions.
    over_best: f64,
    /// Likewise, of each of the others.
    over_others: Vec<Option<f64>>,
    /// The share of the time with each habit, on average, the largest first.
    habits: Vec<(String, f64)>,
    text: String,
}

fn row(cell: &Cell, subject: &Contender, contenders: &[Contender], measured: &[Measured]) -> Option<Row> {
    let mine = of(measured, cell, subject);
    let costs = |contender: &Contender, but: Option<usize>| -> Vec<f64> {
        let others = of(measured, cell, contender).into_iter().filter(|one| but != Some(one.pair));
        others.map(|one| cost(cell, &one.outcome)).collect()
    };
    // The best is found in the other repetitions, as by somebody who measured beforehand: among eight that are alike, the one
    // that had most luck in a repetition is none that anybody could have chosen.
    let best = |but| {
        let others = contenders.iter().filter(|&contender| contender != subject && !costs(contender, but).is_empty());
        others.min_by(|one, other| median(costs(one, but)).total_cmp(&median(costs(other, but))))
    };
    let ratio = |one: &&Measured| {
        let best = best((mine.len() > 1).then_some(one.pair))?;
        let other = of(measured, cell, best).into_iter().find(|other| other.pair == one.pair)?;
        Some(cost(cell, &one.outcome) / cost(cell, &other.outcome))
    };
    let over_best: Vec<f64> = mine.iter().filter_map(ratio).collect();
    let best = best(None)?;
    let mut text = format!(
        "{:<34}{:<20} {:>9.2} of {:>9.2} ({});",
        cell.name(),
        spread(over_best.clone()),
        median(costs(subject, None)),
        median(costs(best, None)),
        best.name
    );
    let mut over_others = Vec::new();
    for other in contenders.iter().filter(|&contender| contender != subject) {
        let pairs = ratios(measured, cell, (subject, other), |outcome| cost(cell, outcome));
        let over = (!pairs.is_empty()).then(|| median(pairs));
        text += &over.map_or(String::new(), |over| format!(" {over:.2} {}", other.name));
        over_others.push(over);
    }
    let share = |habit: &str| {
        let all = mine.iter().map(|one| one.outcome.habits.get(habit).copied().unwrap_or(0.0));
        (habit.to_owned(), all.sum::<f64>() / mine.len() as f64)
    };
    let names = mine.iter().flat_map(|one| one.outcome.habits.keys()).collect::<BTreeSet<_>>();
    let mut habits: Vec<_> = names.into_iter().map(|name| share(name)).collect();
    habits.sort_by(|one, other| other.1.total_cmp(&one.1));
    let shown = habits.iter().filter(|(_, share)| *share >= 0.02);
    text += ";";
    shown.for_each(|(habit, share)| text += &format!(" {:.0}% {habit}", 100.0 * share));
    (!over_best.is_empty()).then(|| Row { over_best: median(over_best), over_others, habits, text })
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
