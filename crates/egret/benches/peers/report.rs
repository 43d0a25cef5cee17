//! Medians and ratios: the table, and every sample as JSON.

use egret_lab::statistics::{Agreement, agreement, median, spread};
use egret_loadgen::machine;
use serde_json::json;

use crate::cells::{Cell, Contender, Idle, Measured, Role};
use crate::load::Outcome;

/// Prints a block of lines for each cell, and then what they add up to.
///
/// Ratios are of two measurements of one repetition; shown are the median and the whole range.
pub fn print(cells: &[Cell], contenders: &[Contender], measured: &[Measured]) {
    println!();
    println!(
        "{:<26}{:<32}{:>9}{:>9}{:>9}{:>11}   {:<20}{:<20}",
        "4 KiB random reads", "server", "IOPS", "p50 us", "p99 us", "CPU us/IO", "IOPS / peer", "CPU / peer"
    );
    for cell in cells {
        let mut name = cell.name();
        for contender in contenders {
            let mine = of(measured, cell, contender.role);
            if mine.is_empty() {
                continue;
            }
            let median_of = |value: fn(&Outcome) -> f64| median(mine.iter().map(|one| value(&one.sample)).collect());
            println!(
                "{:<26}{:<32}{:>9.0}{:>9.1}{:>9.1}{:>11.2}   {:<20}{:<20}",
                std::mem::take(&mut name),
                contender.name,
                median_of(|sample| sample.iops),
                median_of(|sample| sample.p50_us),
                median_of(|sample| sample.p99_us),
                median_of(|sample| sample.cpu_us),
                spread(ratios(measured, cell, contender.role, |sample| sample.iops)),
                spread(ratios(measured, cell, contender.role, |sample| sample.cpu_us)),
            );
        }
    }
    if measured.iter().all(|one| one.contender.role != Role::Peer) {
        return;
    }
    println!();
    for contender in contenders.iter().filter(|contender| contender.role != Role::Peer) {
        let count = |ratio: fn(&Outcome) -> f64, good: fn(f64) -> bool| {
            let verdicts = cells.iter().map(|cell| agreement(&ratios(measured, cell, contender.role, ratio), good));
            let verdicts: Vec<_> = verdicts.flatten().collect();
            let of = |one: Agreement| verdicts.iter().filter(|verdict| **verdict == one).count();
            format!("yes {}, no {}, can't tell {}", of(Agreement::Yes), of(Agreement::No), of(Agreement::CantTell))
        };
        println!(
            "{}: at least the peer's IOPS: {}; at most its CPU per I/O: {} (of the cells beside a peer)",
            contender.name,
            count(|sample| sample.iops, |ratio| ratio >= 1.0),
            count(|sample| sample.cpu_us, |ratio| ratio <= 1.0),
        );
    }
}

/// What one kind of contender did in one cell.
fn of<'a>(measured: &'a [Measured], cell: &Cell, role: Role) -> Vec<&'a Measured> {
    measured.iter().filter(|one| one.cell == *cell && one.contender.role == role).collect()
}

/// The ratios of `value` for `role` to that for the peer, each within one repetition.
fn ratios(measured: &[Measured], cell: &Cell, role: Role, value: fn(&Outcome) -> f64) -> Vec<f64> {
    if role == Role::Peer {
        return Vec::new();
    }
    let peers = of(measured, cell, Role::Peer);
    let ratio = |one: &&Measured| {
        let peer = peers.iter().find(|peer| peer.pair == one.pair)?;
        Some(value(&one.sample) / value(&peer.sample))
    };
    of(measured, cell, role).iter().filter_map(ratio).collect()
}

/// Prints the cost of each idle server.
pub fn print_idle(idle: &[Idle]) {
    if idle.is_empty() {
        return;
    }
    println!();
    println!("{:<26}{:<32}{:>14}{:>16}", "idle, clients connected", "server", "wake-ups/s", "resident MiB");
    for one in idle {
        let exports = format!("{} export{}", one.exports, if one.exports == 1 { "" } else { "s" });
        let resident = one.resident as f64 / f64::from(1 << 20);
        println!("{exports:<26}{:<32}{:>14.1}{resident:>16.1}", one.contender, one.wakeups_per_second);
    }
}

/// Every sample.
pub fn json(measured: &[Measured], idle: &[Idle]) -> String {
    let measured = measured.iter().map(|one| {
        json!({
            "cell": one.cell.name(),
            "server": one.contender.name,
            "repetition": one.pair,
            "iops": one.sample.iops,
            "p50_us": one.sample.p50_us,
            "p99_us": one.sample.p99_us,
            "cpu_us_per_io": one.sample.cpu_us,
        })
    });
    let idle = idle.iter().map(|one| {
        json!({
            "server": one.contender,
            "exports": one.exports,
            "wakeups_per_second": one.wakeups_per_second,
            "resident_bytes": one.resident,
        })
    });
    let all = json!({
        "machine": machine::fingerprint(),
        "samples": measured.collect::<Vec<_>>(),
        "idle": idle.collect::<Vec<_>>(),
    });
    format!("{all:#}\n")
}
