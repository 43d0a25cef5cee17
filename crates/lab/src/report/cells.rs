//! `cells.csv`: a row for each cell that has ended, units in the header.

use std::io;

use crate::import::is_imported;
use crate::plan::{Load, Metric};
use crate::results::{Bottleneck, Operations, Outcome, Run};

/// Writes the table.
///
/// # Errors
///
/// What `to` says.
pub fn write(run: &Run, to: impl io::Write) -> io::Result<()> {
    let mut table = csv::Writer::from_writer(to);
    let cell = [
        "load",
        "subject",
        "repetition",
        "point",
        "started_unix_s",
        "seconds",
        "reads",
        "writes",
        "bytes",
        "offered_iops",
        "unstarted",
    ];
    let accounts = ["load_cpu_s", "host_busy_s", "stolen_s", "unaccounted_s", "limit", "functional_only"];
    // Columns that only a cell that was measured has anything in.
    let figures = cell.len() - IDENTITY + Metric::ALL.len() + accounts.len();
    let metrics = Metric::ALL.iter().map(|metric| metric.column());
    table.write_record(cell.into_iter().chain(metrics).chain(accounts).chain(ASKED).chain(OUTCOME))?;
    for cell in &run.cells {
        let identity = [
            cell.id.load.clone(),
            cell.id.subject.clone(),
            cell.id.repetition.to_string(),
            cell.id.point.to_string(),
            cell.started.to_string(),
        ];
        let asked = asked(run, &cell.id.load);
        let (outcome, reason) = match &cell.outcome {
            Outcome::Measured(_) => ("measured", ""),
            Outcome::Failed { reason, .. } => ("failed", reason.as_str()),
            Outcome::Impossible { reason } => ("impossible", reason.as_str()),
        };
        let outcome = [outcome, reason].map(str::to_owned);
        let Outcome::Measured(measured) = &cell.outcome else {
            let nothing = std::iter::repeat_n(String::new(), figures);
            table.write_record(identity.into_iter().chain(nothing).chain(asked).chain(outcome))?;
            continue;
        };
        let requests = |of: &Option<Operations>| of.as_ref().map(|of| of.requests.to_string());
        let seconds = |of: Option<u64>| of.map(|nanoseconds| format!("{:.6}", nanoseconds as f64 / 1e9));
        let mut fields = Vec::from(identity);
        fields.extend([
            measured.seconds.to_string(),
            requests(&measured.reads).unwrap_or_default(),
            requests(&measured.writes).unwrap_or_default(),
            measured.bytes().to_string(),
            measured.offered_iops.map(|rate| rate.to_string()).unwrap_or_default(),
            measured.offered_iops.map(|_| measured.unstarted.to_string()).unwrap_or_default(),
        ]);
        fields.extend(Metric::ALL.iter().map(|metric| {
            let value = metric.of(measured);
            value.map(|value| format!("{value:.6}")).unwrap_or_default()
        }));
        fields.extend(
            [measured.cpu.load, measured.cpu.host_busy, measured.cpu.stolen, measured.cpu.unaccounted()]
                .map(|of| seconds(of).unwrap_or_default()),
        );
        fields.push(match &measured.limit {
            Some(Bottleneck::Load(why)) => format!("load: {why}"),
            Some(Bottleneck::Device(why)) => format!("device: {why}"),
            None => String::new(),
        });
        fields.push(measured.functional_only.to_string());
        fields.extend(asked.into_iter().chain(outcome));
        table.write_record(fields)?;
    }
    table.flush()
}

/// How many of the columns say which cell it is.
const IDENTITY: usize = 5;
/// What became of the cell, and why.
const OUTCOME: [&str; 2] = ["outcome", "reason"];
/// What a load asks for, of which its name tells in words.
const ASKED: [&str; 7] = ["rw", "bs_bytes", "iodepth", "numjobs", "rwmixread", "disks", "idle_disks"];

/// Nothing of loads that a job file or an application decides, and of those that were imported.
fn asked(run: &Run, load: &str) -> [String; ASKED.len()] {
    let known = |load: &&Load| load.keys.jobfile.is_none() && load.keys.application.is_none() && !is_imported(run);
    let Some(load) = run.plan.loads.named(load).filter(known) else { return Default::default() };
    let counts = [load.iodepth, load.numjobs, load.rwmixread.into(), load.disks, load.idle_disks];
    let [iodepth, numjobs, rwmixread, disks, idle_disks] = counts.map(|count| count.to_string());
    [load.rw.clone(), load.bs.0.to_string(), iodepth, numjobs, rwmixread, disks, idle_disks]
}
