//! Marks that take several cells: device-bound cells, and other work on the machine.

use crate::plan::{Plan, Stack};
use crate::results::{Bottleneck, Cell, CellId, Measurement, Outcome, Warning};

/// A subject that reaches this share of fio's throughput on the host is device-bound.
const DEVICE_BOUND: f64 = 0.97;
/// With fewer requests in flight the bottleneck is latency, and not the disk.
const SATURATING: u32 = 4;
/// Other work disturbs if it takes this share of the machine.
const NOISE: f64 = 0.05;

fn measured(cell: &Cell) -> Option<&Measurement> {
    match &cell.outcome {
        Outcome::Measured(measurement) => Some(measurement),
        _ => None,
    }
}

fn throughput(measurement: &Measurement) -> f64 {
    measurement.bytes() as f64 / measurement.seconds.max(1e-9)
}

/// Marks the cells that are as fast as the host's own fio in the same repetition, where enough is in flight to saturate a
/// disk: their figures are the disk's. Open loops are not marked, because their rate is given.
pub fn mark_device_bound(plan: &Plan, cells: &mut [Cell]) {
    let is_host = |name: &str| plan.subjects.iter().any(|subject| subject.stack == Stack::Host && subject.name == name);
    let in_flight = |id: &CellId| {
        let load = plan.loads.named(&id.load);
        load.map_or(0, |load| u32::from(load.iodepth) * u32::from(load.numjobs) * u32::from(load.disks))
    };
    let hosts: Vec<(CellId, f64)> = cells
        .iter()
        .filter(|cell| is_host(&cell.id.subject))
        .filter_map(|cell| Some((cell.id.clone(), throughput(measured(cell)?))))
        .collect();
    for cell in cells {
        let same = |id: &CellId| id.load == cell.id.load && id.repetition == cell.id.repetition && cell.id.point == 0;
        let best = hosts.iter().filter(|(id, _)| same(id)).map(|(_, reached)| *reached).fold(0.0, f64::max);
        if best == 0.0 || is_host(&cell.id.subject) || in_flight(&cell.id) < SATURATING {
            continue;
        }
        if let Outcome::Measured(measurement) = &mut cell.outcome {
            let share = throughput(measurement) / best;
            if measurement.limit.is_none() && measurement.offered_iops.is_none() && share >= DEVICE_BOUND {
                let text = format!("{:.0}% of what fio on the host gets from the disk", share * 100.0);
                measurement.limit = Some(Bottleneck::Device(text));
            }
        }
    }
}

/// Warns of other work on the machine while cells were measured.
pub fn noise(cells: &[Cell], processors: usize) -> Option<Warning> {
    let shares = cells.iter().filter_map(measured).filter_map(|measurement| {
        let others = measurement.cpu.unaccounted()? as f64 / 1e9;
        Some((others / measurement.seconds.max(1e-9) / processors.max(1) as f64).min(1.0))
    });
    let shares: Vec<f64> = shares.collect();
    let disturbed = shares.iter().filter(|share| **share > NOISE).count();
    let most = shares.iter().copied().fold(0.0, f64::max);
    (disturbed > 0).then(|| Warning {
        about: "noisy-neighbour".into(),
        text: format!(
            "something else used more than {:.0}% of the machine in {disturbed} of {} cells, at most {:.0}%",
            NOISE * 100.0,
            shares.len(),
            most * 100.0
        ),
    })
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
            cell(deep, "slow", 900),
            cell(single, "h", 100),
            cell(single, "e", 100),
        ];
        mark_device_bound(&plan, &mut cells);
        let limits: Vec<_> = cells.iter().map(|cell| measured(cell).unwrap().limit.is_some()).collect();
        assert_eq!(limits, [false, true, false, false, false]);
        assert_eq!(
            measured(&cells[1]).unwrap().limit,
            Some(Bottleneck::Device("98% of what fio on the host gets from the disk".into()))
        );
    }

    #[test]
    fn work_that_nobody_answers_for_is_a_noisy_neighbours() {
        let warning = noise(&[cell("l", "s", 1)], 2).unwrap();
        assert_eq!(warning.text, "something else used more than 5% of the machine in 1 of 1 cells, at most 10%");
        assert_eq!(noise(&[cell("l", "s", 1)], 8), None);
    }
}
