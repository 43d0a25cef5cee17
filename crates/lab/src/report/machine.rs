//! The machine's fingerprint, in rows.

use time::OffsetDateTime;

use super::tables::Grid;
use crate::plan::Plan;
use crate::results::Run;

const GIB: f64 = (1_u64 << 30) as f64;

/// What the run was made on.
pub fn fingerprint(run: &Run) -> Grid {
    let mut grid = Grid::new(&["What", "Is"]);
    let host = &run.host;
    let mut row = |what: &str, is: String| {
        if !is.is_empty() {
            grid.push(vec![what.into(), is]);
        }
    };
    let shared = host.cpu.cores.iter().filter(|core| core.len() > 1).count();
    let smt = if shared > 0 { "with SMT" } else { "without SMT" };
    row("Processor", host.cpu.model.clone());
    let topology = format!(
        "{} usable on {} cores {smt}, NUMA nodes: {}",
        host.cpu.usable.len(),
        host.cpu.cores.len(),
        host.cpu.nodes
    );
    row("Processors", topology);
    row("Governor", host.cpu.governor.clone().unwrap_or_else(|| "none to be seen".into()));
    row("Idle driver", host.cpu.idle.clone().unwrap_or_else(|| "none to be seen".into()));
    row("Hypervisor", host.hypervisor.clone().unwrap_or_else(|| "none".into()));
    row(
        "Memory",
        format!("{:.1} GiB, free huge pages {:.1} GiB", host.memory as f64 / GIB, host.huge_pages as f64 / GIB),
    );
    row("Kernel", host.kernel.clone());
    row("Kernel's options", host.kernel_options.clone());
    if let Some(disk) = &host.disk {
        let parts = [
            Some(disk.path.clone()),
            disk.device.as_ref().map(|device| format!("on {device}")),
            disk.model.clone(),
            disk.file_system.as_ref().map(|system| format!("in {system}")),
            disk.scheduler.as_ref().map(|scheduler| format!("I/O scheduler {scheduler}")),
        ];
        row("Disk", parts.into_iter().flatten().collect::<Vec<_>>().join(", "));
    }
    row("Load average at the start", format!("{:.2}", host.load_average));
    for component in &host.components {
        let digest = component.sha256.get(..16).unwrap_or(&component.sha256);
        row(&component.name, format!("{}, {}, SHA-256 {digest}…", component.version, component.path));
    }
    for one in &host.started {
        let digest = one.sha256.get(..16).unwrap_or(&one.sha256);
        let version = Some(one.version.as_str()).filter(|version| !version.is_empty());
        let is = version.into_iter().chain([one.path.as_str()]).collect::<Vec<_>>().join(", ");
        row(&format!("Started for: {}", one.name), format!("{is}, SHA-256 {digest}…"));
    }
    for (name, is) in &host.settings {
        row(&format!("Setting: {name}"), is.clone());
    }
    for (subject, line) in &host.commands {
        row(&format!("Command line: {subject}"), line.clone());
    }
    for (name, state) in &host.cpu.mitigations {
        row(&format!("Mitigation: {name}"), state.clone());
    }
    grid
}

/// How often a plan measures each cell: `5`, or `5 to 12`.
pub fn repetitions(plan: &Plan) -> String {
    let (least, most) = (plan.repetitions, plan.most_repetitions());
    if most > least { format!("{least} to {most}") } else { least.to_string() }
}

/// What the run was, in one line.
pub fn line(run: &Run) -> String {
    let repetitions = repetitions(&run.plan);
    let scale =
        if (run.scale - 1.0).abs() > f64::EPSILON { format!(", scaled by {}", run.scale) } else { String::new() };
    let ended = if run.ended.is_some() { "" } else { "; not finished" };
    format!(
        "{} · {} · plan {}, {repetitions} repetitions{scale}, seed {} · {} cells{ended}",
        run.host.name,
        date(run.started),
        run.plan.name,
        run.seed,
        run.cells.len()
    )
}

/// `2026-11-21 04:36 UTC`; seconds that no calendar has are shown as they are.
pub fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    let Some(time) = time else { return format!("@{seconds}") };
    let (date, (hour, minute, _)) = (time.date(), time.to_hms());
    format!("{date} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_795_235_760), "2026-11-21 04:36 UTC");
        assert_eq!(date(u64::MAX), "@18446744073709551615");
    }
}
