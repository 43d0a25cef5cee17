//! The reference line: fio on the file or device itself.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use egret_loadgen::load::Edge;
use egret_loadgen::machine::on_cores;

use super::{Context, Deployment, Disk, Task, Unable, backends, fio, no_scheduler};
use crate::cpu_meter::{CpuMeter, Role};
use crate::fingerprint::{self, device_under};
use crate::plan::{Load, Subject};
use crate::process::{Process, ProcessReaper, Setting};
use crate::results::Measurement;

/// How much longer than it should fio may take: to start, to write its report.
const PATIENCE: Duration = Duration::from_secs(120);
/// Of files that fio makes on another host: how many bytes of them it writes in a second, at least.
const SLOWEST: u64 = 16 << 20;
/// At first fio starts its threads and calibrates its clock; the ledger begins when that is over.
const SETTLING: Duration = Duration::from_millis(300);

pub(super) struct Host {
    disks: Vec<Disk>,
    engine: &'static str,
    /// The same where the subject says it: somebody's job file has fio's own otherwise.
    named_engine: Option<&'static str>,
    /// Where fio runs, if that is elsewhere.
    server: Option<String>,
    /// Of files that fio makes there: their size.
    size: Option<u64>,
    /// What serves the disks.
    backends: Vec<u32>,
    context: Context,
    /// Put back when it is over.
    _schedulers: Vec<Setting>,
}

/// Gives disks another I/O scheduler, until what is returned is dropped.
fn choose_scheduler(name: &str, disks: &[Disk], reaper: &Arc<ProcessReaper>) -> Result<Vec<Setting>, Unable> {
    let mut chosen: Vec<Setting> = Vec::new();
    for disk in disks {
        let disk = disk.path().ok_or_else(|| Unable::Impossible("a disk elsewhere has no scheduler here".into()))?;
        let impossible = |why: String| no_scheduler(name, disk.display(), why);
        let is_device = fs::metadata(disk).is_ok_and(|disk| disk.file_type().is_block_device());
        let device = device_under(disk).filter(|_| is_device);
        let file =
            device.ok_or_else(|| impossible("it is a file; its disk's is everybody's".into()))?.join("queue/scheduler");
        // Partitions of one disk have one.
        if chosen.iter().any(|setting| setting.file() == file) {
            continue;
        }
        let all = fs::read_to_string(&file).map_err(|error| impossible(error.to_string()))?;
        // The kernel loads the module of one that it knows.
        let setting = Setting::change(file, fingerprint::scheduler(&all), name, reaper);
        chosen.push(setting.map_err(|error| impossible(format!("{error}; it has {}", all.trim())))?);
    }
    Ok(chosen)
}

/// fio, on the load's cores: it is both the load and the path.
pub(super) fn deploy(subject: &Subject, load: &Load, disks: &[Disk], context: &Context) -> Result<Host, Unable> {
    if load.idle_disks > 0 {
        return Err(Unable::Impossible("idle disks are connections to a server, and there is none".into()));
    }
    let size = disks.first().and_then(|disk| if let Disk::Remote(_, size) = disk { *size } else { None });
    let aio = subject.blockdev.get("aio").and_then(|aio| aio.as_str());
    let engine = match disks.first() {
        Some(Disk::Nbd(..) | Disk::Rbd { .. }) if load.keys.jobfile.is_some() => {
            return Err(Unable::Impossible("a job file is run on a path, and a disk behind a server has none".into()));
        }
        Some(Disk::Null(_)) => {
            return Err(Unable::Impossible("a null disk is a server's own, and there is none".into()));
        }
        Some(Disk::Nbd(..)) => "nbd",
        Some(Disk::Rbd { .. }) => "rbd",
        _ => fio::engine(aio),
    };
    let server = subject.host.clone();
    let choose = |name: &String| choose_scheduler(name, disks, &context.reaper);
    let schedulers = subject.scheduler.as_ref().map(choose).transpose()?.unwrap_or_default();
    let backends = backends(disks);
    Ok(Host {
        disks: disks.to_vec(),
        engine,
        named_engine: aio.map(|_| engine),
        server,
        size,
        backends,
        context: context.clone(),
        _schedulers: schedulers,
    })
}

impl Deployment for Host {
    fn measure(&mut self, task: &Task<'_>) -> Result<Measurement, Unable> {
        let raw = std::path::absolute(task.raw).map_err(Unable::failed)?;
        let (job, output) = (raw.with_extension("fio"), raw.with_extension("json"));
        fs::write(&job, self.job(task)?).map_err(Unable::failed)?;
        let mut command = Command::new("fio");
        // There it leaves what it writes beside its output, such as how far it was with `verify`.
        command.current_dir(&self.context.scratch);
        if let Some(server) = &self.server {
            command.arg(format!("--client={server}"));
        }
        // In one word each: as a client fio takes an option's second word for a job of the server's.
        let mut option = OsString::from("--output=");
        option.push(&output);
        command.arg("--output-format=json").arg(option).arg(&job).stdout(Stdio::piped());
        let reaper = &self.context.reaper;
        let mut fio = on_cores(&self.context.placement.load, || reaper.start(command)).map_err(Unable::failed)?;
        let watched = if self.server.is_none() { watch(&mut fio, &self.backends, task) } else { None };
        let status = fio.wait(self.limit(task.load));
        let (_, log) = fio.end();
        let failed = |reason: String| Unable::Failed { reason, log: log.clone() };
        match status {
            None => return Err(failed("fio does not end".into())),
            Some(status) if !status.success() => {
                let said = fio::complaint(&log).map_or(status.to_string(), str::to_owned);
                return Err(failed(format!("fio: {said}")));
            }
            Some(_) => {}
        }
        let text = fs::read_to_string(&output).map_err(Unable::failed)?;
        let groups = fio::groups(&text).map_err(|error| failed(format!("fio: {error}")))?;
        let mut measurement = fio::measurement(&groups).ok_or_else(|| failed("fio did nothing".into()))?;
        measurement.offer(fio::offered(task));
        if let Some(meter) = watched {
            let own = measurement.cpu.load;
            measurement.cpu = meter.ledger().scaled(measurement.seconds / meter.seconds());
            // The threads of a fio that ended early took what they had spent with them; fio knows it.
            measurement.cpu.load = measurement.cpu.load.filter(|spent| *spent > 0).or(own);
        }
        Ok(measurement)
    }
}

impl Host {
    /// How long fio may take.
    fn limit(&self, load: &Load) -> Duration {
        let files = self.size.unwrap_or(0) * self.disks.len() as u64;
        PATIENCE + Duration::from_secs(files / SLOWEST) + fio::length(load)
    }

    fn job(&self, task: &Task<'_>) -> Result<String, Unable> {
        let path = |disk: &'_ Disk| match disk {
            Disk::Remote(path, _) => Some(path.clone()),
            here => here.path().map(Into::into),
        };
        let paths: Vec<PathBuf> = self.disks.iter().filter_map(path).collect();
        let targets: Vec<&str> = paths.iter().filter_map(|target| target.to_str()).collect();
        let own = self.size.map_or(String::new(), |size| format!("[global]\nsize={size}\nunlink=1\n"));
        match &task.load.keys.jobfile {
            None => {
                let mut sections = fio::sections(task.load, &targets);
                sections.extend(self.disks.iter().filter_map(|disk| match disk {
                    Disk::Nbd(place, _) => Some(format!("uri={place}")),
                    Disk::Rbd { pool, image } => Some(format!("clientname=admin\npool={pool}\nrbdname={image}")),
                    _ => None,
                }));
                Ok(own + &fio::job_file(task, &sections, self.engine))
            }
            Some(path) => {
                let text =
                    fs::read_to_string(path).map_err(|error| Unable::failed(format!("{}: {error}", path.display())))?;
                Ok(own + &fio::with_target(&text, targets.first().copied().unwrap_or_default(), self.named_engine))
            }
        }
    }
}

/// Looks at the host while fio measures; nothing if fio ended too soon.
///
/// fio does not report when it begins to measure. That is at least the ramp after its start, and lasts for the runtime. So
/// the interval from [`SETTLING`] after the ramp to just before the earliest possible end lies within it.
fn watch(fio: &mut Process, backends: &[u32], task: &Task<'_>) -> Option<CpuMeter> {
    let keys = &task.load.keys;
    if keys.jobfile.is_some() {
        return None;
    }
    let length = keys.runtime.duration();
    let settling = SETTLING.min(length / 4);
    if fio.wait(keys.ramp_time.duration() + settling).is_some() {
        return None;
    }
    let mut meter = CpuMeter::new();
    // Jobs may be processes.
    meter.follow_family(fio.pid(), Role::Load);
    backends.iter().for_each(|pid| meter.follow(*pid, |_, _| Role::Backend));
    task.edge(Edge::Begin);
    meter.edge(Edge::Begin);
    if fio.wait(length.saturating_sub(settling).mul_f64(0.98)).is_some() {
        return None;
    }
    meter.edge(Edge::End);
    task.edge(Edge::End);
    Some(meter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Placement;
    use crate::plan::expand;

    #[test]
    fn fio_may_take_its_ramp_its_runtime_and_the_time_that_files_take_which_it_makes_on_other_hosts() {
        let limit = |keys: &str, disks: &[Disk]| {
            let load = expand(&toml::from_str(keys).unwrap()).remove(0);
            let subject = toml::from_str("name = 's'\nstack = 'host'\nhost = 'there'").unwrap();
            let context = Context {
                reaper: ProcessReaper::new().unwrap(),
                scratch: PathBuf::new(),
                placement: Placement::default(),
                egret: PathBuf::new(),
                destroy: false,
            };
            deploy(&subject, &load, disks, &context).map_err(|_| "impossible").unwrap().limit(&load).as_secs()
        };
        let long = "ramp_time = '10m'\nruntime = '5m'";
        assert_eq!(limit(long, &[Disk::Remote("/dev/x".into(), None)]), 900 + 120);
        let file = Disk::Remote("/f".into(), Some(16 << 30));
        assert_eq!(limit(long, &[file.clone(), file]), 900 + 120 + 2048);
        assert_eq!(limit("jobfile = 'mine.fio'", &[]), 86_400 + 120);
    }
}
