//! A virtual machine that uses the disk, with real fio inside, or an application.
//!
//! ```text
//!   lab ── QMP ───────────► QEMU ── KVM or TCG ──► guest: agent ── sh ──► fio, rsync, pgbench
//!    ├─── virtio-serial ────────────────────────────────►┘                       │
//!    └─── console: what its kernel says                      /dev/vda ◄──────────┘
//!                             QEMU's own virtio-blk or virtio-scsi, or ...
//!                             egret serve ◄── vhost-user
//! ```
//!
//! The lab sends scripts, which `work` and `applications` write, and gets back what they print. A guest is dear to
//! start: it stands by, stopped by QEMU, while others are measured.

pub(super) mod agent;
mod applications;
mod image;
pub(super) mod mark;
mod memory;
mod pinning;
mod qemu;
pub(super) mod work;

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};

use egret_loadgen::machine::on_cores;
use serde_json::json;

use self::agent::AgentError;
use self::image::{Accel, Image};
use self::mark::Clock;
use self::pinning::Pinning;
use self::qemu::{Disks, Machine, Qemu};
use self::work::{Place, Work};
use super::options::command;
use super::served::await_listeners;
use super::telemetry::Telemetry;
use super::{Context, Deployment, Disk, Task, Unable, account, fio};
use crate::cpu_meter::{CpuMeter, Role};
use crate::plan::{DeviceModel, Load, Server, Subject};
use crate::process::Process;
use crate::results::Measurement;

pub use pinning::shared_core;

/// Numbers of sockets, so that no two deployments share one.
static NUMBER: AtomicU64 = AtomicU64::new(0);

pub(super) struct Guest {
    /// Ends before what serves its disks does.
    qemu: Qemu,
    server: Option<Egret>,
    accel: Accel,
    subject: Subject,
    /// What it has, and so what it can take.
    memory: u64,
    disks: usize,
    idle: u16,
    writable: bool,
    applications: bool,
    /// The agent has failed: nobody knows what state the guest is in.
    broken: bool,
    /// The disks' paths in the guest.
    paths: Vec<String>,
}

/// The process that serves a guest's disks.
struct Egret {
    process: Process,
    telemetry: Telemetry,
}

/// What guests lack on this machine, and what would bring it.
pub(super) fn missing() -> Option<String> {
    match Image::find() {
        Err(Unable::Impossible(reason)) => Some(reason),
        _ => None,
    }
}

/// What guests are booted from, as far as it is there.
pub fn files() -> impl Iterator<Item = (&'static str, PathBuf)> {
    let image = Image::find().ok().into_iter();
    image.flat_map(|image| [("guest kernel", image.kernel()), ("guest initramfs", image.initramfs())])
}

/// Whether it is known that guests run under emulation here.
pub fn is_emulated() -> bool {
    Image::find().is_ok_and(|image| Accel::known(&image) == Some(Accel::Tcg))
}

/// Boots a guest.
pub(super) fn deploy(subject: &Subject, load: &Load, disks: &[Disk], context: &Context) -> Result<Guest, Unable> {
    if load.idle_disks > 0 && subject.device == DeviceModel::VirtioScsi {
        return Err(Unable::Impossible(
            "a guest's idle disks are virtio-blk: virtio-scsi tells nobody their serial".into(),
        ));
    }
    let image = Image::find()?;
    // Another guest may stand by with the same disk; only one at a time is under load.
    let mut subject = subject.clone();
    subject.blockdev.entry("locking".into()).or_insert_with(|| "off".into());
    let subject = &subject;
    let applications = load.keys.application.as_ref().map(|_| image.applications()).transpose()?;
    let (memory, writable) = (memory::needed(load), load.writes());
    let accel = Accel::known(&image).unwrap_or_else(|| {
        let found = if Qemu::runs_on_kvm(&image, subject, context) { Accel::Kvm } else { Accel::Tcg };
        found.remember(&image);
        found
    });
    let (server, sockets) = match subject.server {
        Server::Qemu => (None, Vec::new()),
        Server::Egret => {
            let (server, sockets) = serve(subject, load, disks, context)?;
            (Some(server), sockets)
        }
    };
    let disks_of = match subject.server {
        Server::Qemu => Disks::Own { disks, idle: load.idle_disks, writable },
        Server::Egret => Disks::VhostUser(&sockets),
    };
    let machine = Machine { subject, image: &image, memory, disks: disks_of, applications: applications.as_deref() };
    let qemu = Qemu::boot(&machine, accel, context)?;
    let mut guest = Guest {
        qemu,
        server,
        accel,
        subject: subject.clone(),
        memory,
        disks: disks.len(),
        idle: load.idle_disks,
        writable,
        applications: applications.is_some(),
        broken: false,
        paths: Vec::new(),
    };
    guest.place();
    let scheduler = subject.guests_scheduler();
    let script = work::find_disks(disks.len(), load.idle_disks, scheduler);
    let found = guest.qemu.agent.run(&script, work::PATIENCE, |_| {});
    let found = guest.check_answer(found)?;
    guest.paths = found.lines().map(|line| work::disk_with(scheduler, line)).collect::<Result<_, _>>()?;
    Ok(guest)
}

/// Egret, with as many queues for each disk as the guest has processors.
fn serve(subject: &Subject, load: &Load, disks: &[Disk], context: &Context) -> Result<(Egret, Vec<PathBuf>), Unable> {
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let socket = |name: &str| context.scratch.join(format!("guest{number}-{name}.sock"));
    let mut load = load.clone();
    load.keys.queues = Some(u16::try_from(subject.vcpus).unwrap_or(u16::MAX));
    let mut command = command(subject, &load, disks, context, &socket);
    command.stdout(Stdio::piped());
    let qmp = socket("qmp");
    let busy = (0..disks.len()).map(|number| socket(&format!("busy{number}")));
    let sockets: Vec<PathBuf> =
        busy.chain((0..load.idle_disks).map(|number| socket(&format!("idle{number}")))).collect();
    let all: Vec<&PathBuf> = sockets.iter().chain([&qmp]).collect();
    let cpus = Pinning::of(subject).iothreads;
    let mut process = on_cores(&cpus, || context.reaper.start(command)).map_err(Unable::failed)?;
    await_listeners(std::slice::from_mut(&mut process), &all)?;
    let telemetry = Telemetry::connect(&qmp).map_err(Unable::failed)?;
    Ok((Egret { process, telemetry }, sockets))
}

impl Deployment for Guest {
    fn pids(&self) -> Vec<u32> {
        self.server.iter().map(|server| server.process.pid()).chain([self.qemu.pid()]).collect()
    }

    fn takes(&self, load: &Load) -> bool {
        !self.broken
            && self.memory >= memory::needed(load)
            && self.disks == usize::from(load.disks)
            && (self.writable || !load.writes())
            && (self.applications || load.keys.application.is_none())
            && self.idle == load.idle_disks
            && memory::may_be_held(self.memory, self.subject.pages)
    }

    fn measure(&mut self, task: &Task<'_>) -> Result<Measurement, Unable> {
        let work = Work::of(task, &self.paths, Place::OF_GUESTS)?;
        let mut meter = self.meter();
        if task.io_submit {
            meter.watch_io_submit();
        }
        let mut facts = format!("kernel {}\nqemu {}\n", self.qemu.agent.kernel, self.qemu.monitor.version);
        let mut clock = Clock::default();
        let Self { qemu, server, .. } = self;
        let ran = qemu.agent.run(&work.script, work.limit, |mark| {
            if let Some(edge) = work::edge(mark) {
                task.edge(edge);
                meter.edge(edge);
                server.iter_mut().for_each(|server| server.telemetry.edge(edge));
            }
            clock.hear(mark);
            facts += &format!("{mark}\n");
        });
        let output = self.check_answer(ran)?;
        // The raw output is for debugging; failing to keep it does not fail the measurement.
        let _ = fs::write(task.raw.with_extension("json"), &output);
        let _ = fs::write(task.raw.with_extension("guest"), &facts);

        let mut measurement = work.measurement(&output, meter.seconds()).map_err(|reason| self.failed(reason))?;
        if self.accel == Accel::Kvm {
            clock.agrees().map_err(|reason| self.failed(reason))?;
        }
        measurement.offer(if task.load.keys.application.is_some() { task.rate_iops } else { fio::offered(task) });
        measurement.functional_only = self.accel == Accel::Tcg;
        if meter.seconds() > 0.0 {
            let load = measurement.cpu.load;
            account(&mut measurement, &meter, self.server.as_ref().map(|server| &server.telemetry), load);
        }
        Ok(measurement)
    }

    fn pause(&mut self) {
        self.broken |= self.qemu.monitor.run("stop", json!({})).is_err();
    }

    fn resume(&mut self) {
        self.broken |= self.qemu.monitor.run("cont", json!({})).is_err();
    }
}

impl Guest {
    /// Pins threads, where there are processors for them.
    fn place(&self) {
        Pinning::of(&self.subject).apply(&self.qemu.threads);
    }

    /// The agent's answer, unless it or the guest's kernel reports an error.
    fn check_answer(&mut self, ran: Result<String, AgentError>) -> Result<String, Unable> {
        if let Some(line) = qemu::complaint(&self.qemu.log()).filter(|_| ran.is_ok()) {
            let reason = format!("the guest's kernel has complained: {line}");
            self.broken = true;
            return Err(self.failed(reason));
        }
        ran.map_err(|error| {
            self.broken |= !matches!(error, AgentError::Failed(_));
            self.failure(&error)
        })
    }

    fn failed(&self, reason: String) -> Unable {
        Unable::Failed { reason, log: self.qemu.log() }
    }

    /// A server that has crashed takes the guest's disk with it, and knows more than the guest.
    fn failure(&mut self, error: &AgentError) -> Unable {
        match self.server.as_mut().and_then(|server| Some((server.process.ended()?, server.process.log()))) {
            Some((status, log)) => {
                Unable::Failed { reason: format!("egret ended with {status} under load: {error}"), log }
            }
            None => self.qemu.failure(error),
        }
    }

    fn meter(&mut self) -> CpuMeter {
        let mut meter = CpuMeter::new();
        let (threads, pid) = (self.qemu.threads.clone(), self.qemu.pid());
        let (serves, iothreads) = (self.server.is_none(), self.subject.iothreads);
        meter.follow(pid, move |tid, name| match name {
            // Where it does not serve, its I/O threads have nothing to do.
            _ if serves && (threads.iothreads.contains(&tid) || (iothreads == 0 && tid == pid)) => Role::IoThread,
            // Of QEMU's pool, where it is QEMU that serves.
            _ if serves && (name == "worker" || name.starts_with("iou-wrk")) => Role::ServerOther,
            _ => Role::Guest,
        });
        if let Some(server) = &mut self.server {
            let io_threads = server.telemetry.io_threads().unwrap_or_default();
            meter.follow_server(server.process.pid(), io_threads);
        }
        meter
    }
}
