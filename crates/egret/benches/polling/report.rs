//! The table, the ladder, and every sample as JSON.
//!
//! A ratio is of two measurements of one repetition; shown are the median and the whole range.

use egret_lab::statistics::{median, spread};
use egret_loadgen::machine;
use serde_json::json;

use crate::cells::Cell;
use crate::deployment::{Contender, Outcome};
use crate::ladder::{Idle, Rung};

/// One measurement of one contender in one cell.
pub struct Measured {
    pub cell: Cell,
    pub contender: Contender,
    pub pair: usize,
    pub outcome: Outcome,
}

/// What one contender did in one cell.
pub fn of<'a>(measured: &'a [Measured], cell: &Cell, contender: &Contender) -> Vec<&'a Measured> {
    measured.iter().filter(|one| one.cell == *cell && one.contender == *contender).collect()
}

/// The ratios of `value` for one contender to that for another, each within one repetition.
pub fn ratios(
    measured: &[Measured],
    cell: &Cell,
    (one, other): (&Contender, &Contender),
    value: impl Fn(&Outcome) -> f64,
) -> Vec<f64> {
    let others = of(measured, cell, other);
    let ratio = |one: &&Measured| {
        let other = others.iter().find(|other| other.pair == one.pair)?;
        Some(value(&one.outcome) / value(&other.outcome))
    };
    of(measured, cell, one).iter().filter_map(ratio).collect()
}

/// The contender whose policy is `policy`, with whatever properties.
pub fn with_policy<'a>(contenders: &'a [Contender], policy: &str) -> Option<&'a Contender> {
    contenders.iter().find(|contender| contender.name.split(',').next() == Some(policy))
}

/// Prints a block of lines for each cell.
pub fn print(cells: &[Cell], contenders: &[Contender], measured: &[Measured]) {
    if measured.is_empty() {
        return;
    }
    println!();
    println!(
        "{:<34}{:<14}{:>9}{:>11}{:>11}{:>10}{:>7}{:>13}{:>13}{:>11}   {:<20}{:<20}{:<20}{:<20}",
        "4 KiB random reads",
        "policy",
        "IOPS",
        "p50 us",
        "p99 us",
        "CPU us/IO",
        "cores",
        "daemon us/IO",
        "kernel us/IO",
        "load us/IO",
        "IOPS / weighted",
        "CPU / weighted",
        "IOPS / busy",
        "CPU / busy"
    );
    for cell in cells {
        let mut name = cell.name();
        for contender in contenders {
            let mine = of(measured, cell, contender);
            if mine.is_empty() {
                continue;
            }
            let median_of = |value: fn(&Outcome) -> f64| median(mine.iter().map(|one| value(&one.outcome)).collect());
            let against = |policy: &str, value: fn(&Outcome) -> f64| {
                let other = with_policy(contenders, policy).filter(|other| *other != contender);
                other.map_or("-".into(), |other| spread(ratios(measured, cell, (contender, other), value)))
            };
            println!(
                "{:<34}{:<14}{:>9.0}{:>11.2}{:>11.2}{:>10.3}{:>7.2}{:>13.3}{:>13.3}{:>11.3}   {:<20}{:<20}{:<20}{:<20}{}",
                std::mem::take(&mut name),
                contender.name,
                median_of(|outcome| outcome.iops),
                median_of(|outcome| outcome.p50_us),
                median_of(|outcome| outcome.p99_us),
                median_of(|outcome| outcome.cpu_us),
                median_of(|outcome| outcome.cores),
                median_of(|outcome| outcome.daemon_cpu_us),
                median_of(|outcome| outcome.kernel_cpu_us),
                median_of(|outcome| outcome.load_cpu_us),
                against("weighted", |outcome| outcome.iops),
                against("weighted", |outcome| outcome.cpu_us),
                against("busy", |outcome| outcome.iops),
                against("busy", |outcome| outcome.cpu_us),
                if is_load_bound(&mine) { "load-bound" } else { "" },
            );
        }
    }
}

/// Whether in most repetitions the load, and not the server, was measured.
fn is_load_bound(measured: &[&Measured]) -> bool {
    2 * measured.iter().filter(|one| one.outcome.limit.is_some()).count() > measured.len()
}

/// Prints the busy disk's figures beside more and more idle ones.
pub fn print_ladder(rungs: &[Rung], idle: &[Idle]) {
    if rungs.is_empty() {
        return;
    }
    println!();
    println!(
        "{:<12}{:<14}{:>12}{:>10}{:>11}   {:<22}{:<22}",
        "monitor", "policy", "idle disks", "IOPS", "CPU us/IO", "IOPS / alone", "CPU per I/O / alone"
    );
    let mut seen: Vec<(&str, &str, usize)> = Vec::new();
    for Rung { monitor, policy, company, .. } in rungs {
        if !seen.contains(&(monitor, policy, *company)) {
            seen.push((monitor, policy, *company));
        }
    }
    seen.sort_unstable();
    for (monitor, policy, company) in seen {
        let on = |company: usize| {
            rungs.iter().filter(move |rung| rung.monitor == monitor && rung.policy == policy && rung.company == company)
        };
        let ratios = |value: fn(&Outcome) -> f64| {
            let ratio = |one: &Rung| {
                let alone = on(0).find(|alone| alone.repetition == one.repetition)?;
                Some(value(&one.outcome) / value(&alone.outcome))
            };
            spread(on(company).filter_map(ratio).collect())
        };
        let median_of = |value: fn(&Outcome) -> f64| median(on(company).map(|rung| value(&rung.outcome)).collect());
        println!(
            "{monitor:<12}{policy:<14}{company:>12}{:>10.0}{:>11.2}   {:<22}{:<22}",
            median_of(|outcome| outcome.iops),
            median_of(|outcome| outcome.cpu_us),
            ratios(|outcome| outcome.iops),
            ratios(|outcome| outcome.cpu_us),
        );
    }
    println!("goals beside 100: IOPS at least 0.98 of alone with io_uring, 0.9 with epoll; CPU per I/O at most 1.05");
    for Idle { monitor, policy, cores } in idle {
        println!("idle with 100 connected disks, {monitor}, {policy}: {:.3}% of a core", cores * 100.0);
    }
}

/// Every sample.
pub fn json(measured: &[Measured], rungs: &[Rung], idle: &[Idle]) -> String {
    let figures = |outcome: &Outcome| {
        json!({
            "iops": outcome.iops,
            "p50_us": outcome.p50_us,
            "p99_us": outcome.p99_us,
            "mean_us": outcome.mean_us,
            "cpu_us_per_io": outcome.cpu_us,
            "cores": outcome.cores,
            "daemon_cpu_us_per_io": outcome.daemon_cpu_us,
            "kernel_cpu_us_per_io": outcome.kernel_cpu_us,
            "load_cpu_us_per_io": outcome.load_cpu_us,
            "habits": outcome.habits,
            "load_bound": outcome.limit,
        })
    };
    let samples = measured.iter().map(|one| {
        json!({
            "cell": one.cell.name(),
            "policy": one.contender.name,
            "repetition": one.pair,
            "figures": figures(&one.outcome),
        })
    });
    let ladder = rungs.iter().map(|rung| {
        json!({
            "monitor": rung.monitor,
            "policy": rung.policy,
            "idle_disks": rung.company,
            "repetition": rung.repetition,
            "figures": figures(&rung.outcome),
        })
    });
    let idle = idle.iter().map(|one| json!({ "monitor": one.monitor, "policy": one.policy, "cores": one.cores }));
    let all = json!({
        "machine": machine::fingerprint(),
        "samples": samples.collect::<Vec<_>>(),
        "ladder": ladder.collect::<Vec<_>>(),
        "idle": idle.collect::<Vec<_>>(),
    });
    format!("{all:#}\n")
}
