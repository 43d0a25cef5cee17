//! Programs that serve vhost-user-blk sockets, under the lab's own load.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use egret_loadgen::client::{Client, ClientError, ClientOptions, Connection, Shape};
use egret_loadgen::load::{self, Edge, Job, LoadError, Rate, Spec, Tally, Waiting};

use super::options::{command, queues};
use super::telemetry::Telemetry;
use super::{Context, Deployment, Disk, Task, Unable, backends, quoted};
use crate::cpu_meter::{CpuMeter, Role, threads_of};
use crate::plan::{DeviceModel, Load, LoadKeys, RateProcess, Stack, Subject};
use crate::process::Process;
use crate::results::{Bottleneck, Latency, Measurement, Operations};

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(30);
/// The most memory for all buffers of a load, in bytes; beyond it requests share buffers. It is several times the size of
/// most processors' caches, so that shared buffers are not cache-warm.
const MEMORY: u64 = 128 << 20;

/// Servers that listen, and connections to their idle disks.
pub(super) struct Served {
    device: DeviceModel,
    /// Closed before the servers end.
    _idle: Vec<Connection>,
    servers: Vec<Process>,
    /// What serves the disks to them.
    backends: Vec<u32>,
    sockets: Vec<PathBuf>,
    /// Of a server that can be asked.
    telemetry: Option<Telemetry>,
    iothreads: u32,
    /// Bytes that buffers may take on each disk before requests share them.
    memory: Option<u64>,
    context: Context,
}

pub(super) fn deploy(subject: &Subject, load: &Load, disks: &[Disk], context: &Context) -> Result<Served, Unable> {
    if (subject.stack, subject.device) == (Stack::QemuStorageDaemon, DeviceModel::VirtioScsi) {
        return Err(Unable::Impossible("qemu-storage-daemon has no vhost-user-scsi export".into()));
    }
    if load.keys.jobfile.is_some() || load.keys.application.is_some() {
        return Err(Unable::Impossible(
            "the lab's own load is neither fio nor an application; they take a guest".into(),
        ));
    }
    let socket = |name: &str| context.scratch.join(format!("{name}.sock"));
    let names = |kind: &'static str, count: usize| (0..count).map(move |number| format!("{kind}{number}"));
    let sockets: Vec<PathBuf> = names("busy", disks.len()).map(|name| socket(&name)).collect();
    let idle: Vec<PathBuf> = names("idle", load.idle_disks.into()).map(|name| socket(&name)).collect();

    let (commands, qmp) = match subject.stack {
        Stack::VhostUserBlk => (shell_commands(subject, disks, &sockets, load)?, None),
        Stack::Egret | Stack::QemuStorageDaemon | Stack::Host | Stack::Guest | Stack::Ssh => {
            (vec![command(subject, load, disks, context, &socket)], Some(socket("qmp")))
        }
    };
    let all: Vec<&PathBuf> = sockets.iter().chain(&idle).chain(&qmp).collect();
    for socket in &all {
        // A server that was killed has left it.
        let _ = fs::remove_file(socket);
    }
    let cores = if subject.cpus.is_empty() { &context.placement.server } else { &subject.cpus };
    let start = |mut command: Command| {
        command.stdout(Stdio::piped());
        egret_loadgen::machine::on_cores(cores, || context.reaper.start(command)).map_err(Unable::failed)
    };
    let mut servers = commands.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
    await_listeners(&mut servers, &all)?;
    let telemetry = qmp.map(|path| Telemetry::connect(&path)).transpose();
    let telemetry = telemetry.map_err(|error| failed(&format!("QMP: {error}"), &servers))?;
    let shape = Shape { queues: queues(load), depth: 1, ..Shape::default() };
    let connected: Result<_, ClientError> = idle.iter().map(|socket| connect(subject.device, socket, shape)).collect();
    let idle = connected.map_err(|error| failed(&error, &servers))?;
    Ok(Served {
        device: subject.device,
        _idle: idle,
        servers,
        backends: backends(disks),
        sockets,
        telemetry,
        iothreads: subject.iothreads,
        memory: (!disks.iter().any(Disk::checks_what_it_reads)).then_some(MEMORY / disks.len().max(1) as u64),
        context: context.clone(),
    })
}

/// A process for each disk, as the shell understands the subject's command.
fn shell_commands(subject: &Subject, disks: &[Disk], sockets: &[PathBuf], load: &Load) -> Result<Vec<Command>, Unable> {
    let text = subject.command.as_deref().unwrap_or_default();
    if load.idle_disks > 0 {
        return Err(Unable::Impossible(
            "a command serves one disk, and nobody knows how it would serve idle ones".into(),
        ));
    }
    let command = |(disk, socket): (&Disk, &PathBuf)| {
        let path = match disk.path() {
            Some(path) => path,
            None if text.contains("{disk}") => {
                return Err(Unable::Impossible("a null disk has no path, and the command asks for one".into()));
            }
            None => Path::new(""),
        };
        let text = text
            .replace("{socket}", &quoted(&socket.to_string_lossy()))
            .replace("{disk}", &quoted(&path.to_string_lossy()));
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &text]);
        Ok(command)
    };
    disks.iter().zip(sockets).map(command).collect()
}

fn connect(device: DeviceModel, socket: &Path, shape: Shape) -> Result<Connection, ClientError> {
    match device {
        DeviceModel::VirtioBlk => Client::connect(socket, ClientOptions::default())?.start(shape),
        DeviceModel::VirtioScsi => Client::start_scsi(socket, ClientOptions::default(), shape),
    }
}

fn failed(reason: &dyn std::fmt::Display, servers: &[Process]) -> Unable {
    Unable::Failed { reason: reason.to_string(), log: servers.iter().flat_map(Process::log).collect() }
}

/// Waits until every socket has a listener, or a server has ended.
pub(super) fn await_listeners(servers: &mut [Process], sockets: &[&PathBuf]) -> Result<(), Unable> {
    let begin = Instant::now();
    while !are_listening(sockets) {
        let ended = |server: &mut Process| server.ended().inspect(|_| server.hear_out());
        if let Some(status) = servers.iter_mut().find_map(ended) {
            let said = servers.iter().flat_map(Process::log).next_back();
            return Err(failed(&format!("the server ended with {status}: {}", said.unwrap_or_default()), servers));
        }
        if begin.elapsed() > PATIENCE {
            return Err(failed(&format!("the server does not listen after {} s", PATIENCE.as_secs()), servers));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn are_listening(sockets: &[&PathBuf]) -> bool {
    let table = table();
    sockets.iter().all(|socket| listener(&table, socket).is_some())
}

/// The kernel's table of sockets: they are looked up there, because a connection would count as a client.
fn table() -> String {
    fs::read_to_string("/proc/net/unix").unwrap_or_default()
}

/// The number of the socket that listens at a path.
fn listener(table: &str, path: &Path) -> Option<u64> {
    const ACCEPTS: &str = "00010000";
    let at_it = table.lines().filter(|line| line.ends_with(&*path.to_string_lossy()));
    let mut fields = at_it.map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.find(|fields| fields.get(3) == Some(&ACCEPTS))?.get(6)?.parse().ok()
}

impl Deployment for Served {
    fn pids(&self) -> Vec<u32> {
        self.servers.iter().map(Process::pid).collect()
    }

    fn measure(&mut self, task: &Task<'_>) -> Result<Measurement, Unable> {
        let mut meter = self.meter();
        if task.io_submit {
            meter.watch_io_submit();
        }
        // What a shell starts may leave it. Before any connection: some close what they listen on when they have one.
        let table = table();
        let is_seen = self.telemetry.is_some()
            || self.sockets.iter().all(|path| listener(&table, path).is_some_and(|one| meter.has_socket(one)));
        let spec = self.spec(task).map_err(|error| failed(&error, &self.servers))?;
        let jobs = self.jobs(&spec);
        let telemetry = &mut self.telemetry;
        let ran = jobs.and_then(|mut jobs| {
            let tally = load::run(&mut jobs, spec.span(), &mut |edge| {
                task.edge(edge);
                // CPU times are read last at the beginning and first at the end, so that queries to the server do not count.
                if edge == Edge::End {
                    meter.edge(edge);
                }
                if let Some(telemetry) = telemetry {
                    telemetry.edge(edge);
                }
                if edge == Edge::Begin {
                    meter.edge(edge);
                }
            })?;
            // What was written and not read since. It is over for the meter, so that this costs nobody anything.
            jobs.iter_mut().try_for_each(|job| job.verify().map(drop))?;
            Ok(tally)
        });
        let tally = match ran {
            Ok(Some(tally)) => tally,
            Ok(None) => return Err(Unable::failed("no job ran")),
            Err(error) => return Err(self.failure(&error)),
        };
        let mut measurement = measurement(&tally, &spec);
        measurement.offered_iops = task.rate_iops;
        if is_seen {
            measurement.cpu = meter.ledger();
        }
        measurement.cpu.load = Some(tally.cpu_ns);
        measurement.io_thread_cores = meter.cores();
        measurement.in_io_submit = meter.in_io_submit();
        if let Some(telemetry) = &self.telemetry {
            telemetry.complete(&mut measurement);
        }
        Ok(measurement)
    }
}

impl Served {
    fn meter(&mut self) -> CpuMeter {
        let mut meter = CpuMeter::new();
        self.backends.iter().for_each(|pid| meter.follow(*pid, |_, _| Role::Backend));
        for server in &self.servers {
            let pid = server.pid();
            let Some(telemetry) = &mut self.telemetry else {
                // The shell's, which starts the server as a process of its own.
                meter.follow_family(pid, Role::Server);
                continue;
            };
            let io_threads = telemetry.io_threads().unwrap_or_else(|| by_order(pid, self.iothreads));
            meter.follow_server(pid, io_threads);
        }
        meter
    }

    fn spec(&self, task: &Task<'_>) -> Result<Spec, LoadError> {
        let load = task.load;
        // All keys by name, so that a new one is either passed on here or known to be none of the load's.
        let LoadKeys {
            norandommap,
            size,
            verify,
            polling,
            rate_process,
            ramp_time,
            runtime,
            // What `load` has of them, and the task's rate.
            rw: _,
            bs: _,
            iodepth: _,
            numjobs: _,
            rwmixread: _,
            rate_iops: _,
            curve: _,
            // fio's alone, as the plan's check says.
            across_disks: _,
            processes: _,
            // What the server was started with.
            disks: _,
            idle_disks: _,
            queues: _,
            name: _,
            subjects: _,
            jobfile: _,
            application: _,
        } = &load.keys;
        let process = match rate_process {
            RateProcess::Poisson => load::RateProcess::Poisson,
            RateProcess::Fixed => load::RateProcess::Fixed,
        };
        let rate = |total: f64| Rate { iops: total / f64::from(load.numjobs.max(1)), process };
        Ok(Spec {
            rw: load.rw.parse()?,
            bs: u32::try_from(load.bs.0).unwrap_or(u32::MAX),
            iodepth: load.iodepth,
            numjobs: load.numjobs,
            rwmixread: load.rwmixread,
            rate_iops: task.rate_iops.map(rate),
            norandommap: *norandommap,
            offset: 0,
            size: size.map(|size| size.0),
            verify: verify.then_some(task.seed),
            ramp_time: ramp_time.duration(),
            runtime: runtime.duration(),
            randseed: task.seed,
            waiting: if *polling { Waiting::Polling } else { Waiting::Blocking },
            memory: self.memory,
            cpus_allowed: self.context.placement.load.clone(),
        })
    }

    /// Job N has queue N of every disk.
    fn jobs(&self, spec: &Spec) -> Result<Vec<Job>, LoadError> {
        let mut queues: Vec<Vec<_>> = (0..spec.numjobs).map(|_| Vec::new()).collect();
        for socket in &self.sockets {
            let disk = connect(self.device, socket, spec.shape())?;
            for (mine, queue) in queues.iter_mut().zip(disk.queues) {
                mine.push((disk.info, queue));
            }
        }
        (0..).zip(queues).map(|(number, disks)| Job::new(spec, number, disks)).collect()
    }

    fn failure(&mut self, error: &LoadError) -> Unable {
        // A server that crashes hangs up first.
        let crashed = self.servers.iter_mut().find_map(|server| server.wait(Duration::from_millis(200)));
        match crashed {
            Some(status) => failed(&format!("the server ended with {status} under load"), &self.servers),
            None => failed(error, &self.servers),
        }
    }
}

/// The I/O threads of a `qemu-storage-daemon`, which has neither names nor a question for them: after its main thread and
/// RCU's it starts those that its command line asks for, in that order. Without any, the main loop has their part.
fn by_order(pid: u32, iothreads: u32) -> BTreeSet<u32> {
    if iothreads == 0 {
        return BTreeSet::from([pid]);
    }
    let mut threads: Vec<u32> = threads_of(pid).into_iter().map(|(tid, _)| tid).collect();
    threads.sort_unstable();
    threads.into_iter().skip(2).take(iothreads as usize).collect()
}

/// Of each kind that the load makes there is a number, be it none: who was asked and completed nothing is stuck.
fn measurement(tally: &Tally, spec: &Spec) -> Measurement {
    let latency = |of: &hdrhistogram::Histogram<u64>| {
        let at = |quantile| of.value_at_quantile(quantile) as f64;
        Latency { mean: of.mean(), p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: of.max() as f64 }
    };
    let operations = |requests: u64, of: &hdrhistogram::Histogram<u64>| Operations {
        requests,
        bytes: requests * u64::from(spec.bs),
        latency: latency(of),
    };
    let mut reads = tally.lat.clone();
    if tally.writes > 0 {
        // Every write is recorded in both histograms, so this cannot fail.
        let _ = reads.subtract(&tally.write_lat);
    }
    Measurement {
        seconds: tally.elapsed.as_secs_f64(),
        reads: spec.rw.reads.then(|| operations(tally.reads, &reads)),
        writes: spec.rw.writes.then(|| operations(tally.writes, &tally.write_lat)),
        latency: Some(latency(&tally.all_lat())),
        unstarted: tally.open.as_ref().map_or(0, |open| open.unstarted),
        limit: tally.limit().map(Bottleneck::Load),
        ..Measurement::default()
    }
}

#[cfg(test)]
mod tests {
    use egret_loadgen::load::Rw;

    use super::*;
    use crate::results::Outcome;

    #[test]
    fn a_server_that_completes_nothing_in_all_of_the_interval_has_failed() {
        let mut tally = Tally::new(Waiting::Blocking, false);
        tally.elapsed = Duration::from_secs(2);
        for (reads, writes) in [(true, false), (false, true), (true, true)] {
            let spec = Spec { rw: Rw { reads, writes, random: true }, ..Spec::default() };
            let outcome = Outcome::from(measurement(&tally, &spec));
            assert!(
                matches!(&outcome, Outcome::Failed { reason, .. } if reason == "no request was completed"),
                "{outcome:?}"
            );
        }
    }

    #[test]
    fn a_mixed_loads_quantiles_are_of_all_its_requests() {
        let mut tally = Tally::new(Waiting::Blocking, false);
        (tally.reads, tally.writes, tally.elapsed) = (98, 2, Duration::from_secs(1));
        (0..98).for_each(|_| tally.lat.record(10_000).unwrap());
        for _ in 0..2 {
            tally.lat.record(1_000_000).unwrap();
            tally.write_lat.record(1_000_000).unwrap();
        }
        let rw = Rw { reads: true, writes: true, random: true };
        let measurement = measurement(&tally, &Spec { rw, ..Spec::default() });
        let p99 = measurement.latency(|latency| latency.p99).unwrap();
        // A mean of both p99, by how many there were, would be 30 us.
        assert!((990_000.0..1_010_000.0).contains(&p99), "{p99}");
    }
}
