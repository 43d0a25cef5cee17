//! Stacks: programs that serve a disk, or use one, and how each is started, loaded and stopped.
//!
//! ```text
//!   Subject, Load, Disk ── deploy() ──► Deployment ── measure(Task) ──► Measurement
//!                             │              └── dropped: its processes end
//!                             └──► Unable: Impossible here, or Failed
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`guest`] | a virtual machine with fio, rsync or a database inside |
//! | `host` | fio on the file or device itself |
//! | `served` | Egret, `qemu-storage-daemon`, or any command, under the lab's own load |
//! | `remote` | fio on a machine that is there already, over ssh |
//! | [`fio`] | fio's job files and its JSON, wherever it runs |
//! | `options` | a server's command line, and whether Egret would take it |
//! | `telemetry` | a server's own counters, over QMP |

pub mod fio;
pub mod guest;
mod host;
mod options;
mod remote;
mod served;
mod telemetry;

use std::fmt::Display;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egret_loadgen::load::Edge;
use egret_vocabulary::schema::NbdPlace;

use self::telemetry::Telemetry;
use crate::cpu_meter::{CpuMeter, processes_called};
use crate::disks::lacks;
use crate::machine::Placement;
use crate::plan::{Load, Plan, QEMU, Stack, Subject};
use crate::process::ProcessReaper;
use crate::results::{Measurement, Outcome};

pub use options::{SubjectError, check_options, unnamed_engines};
pub(crate) use remote::complaint as ssh_complaint;

/// What every stack is deployed with.
#[derive(Clone)]
pub struct Context {
    /// Starts processes so that they end with the lab.
    pub reaper: Arc<ProcessReaper>,
    /// A directory for sockets, private and with a short path.
    pub scratch: PathBuf,
    /// The processors of load and server.
    pub placement: Placement,
    /// This program, which serves disks as `egret serve`.
    pub egret: PathBuf,
    /// Whether the data on disks of other machines may be lost.
    pub destroy: bool,
}

/// One disk under test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// A file that the lab has made.
    File(PathBuf),
    /// A block device.
    Device(PathBuf),
    /// A server's own null device, of so many bytes.
    Null(u64),
    /// An export of an NBD server, and its process where that is the lab's own.
    Nbd(NbdPlace, Option<u32>),
    /// An image in a pool of the Ceph cluster that `CEPH_CONF` names.
    Rbd {
        /// The pool.
        pool: String,
        /// The image.
        image: String,
    },
    /// The same image, as the kernel's device.
    Krbd(PathBuf),
    /// A device on another host, or a file that fio makes there, of so many bytes.
    Remote(PathBuf, Option<u64>),
}

impl Disk {
    /// Where it is on this host, if it is.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) | Self::Device(path) | Self::Krbd(path) => Some(path),
            Self::Null(_) | Self::Nbd(..) | Self::Rbd { .. } | Self::Remote(..) => None,
        }
    }

    /// The processes on this host that serve it to whoever serves it here.
    fn backends(&self) -> Vec<u32> {
        match self {
            Self::Nbd(_, process) => process.iter().copied().collect(),
            Self::Rbd { .. } | Self::Krbd(_) => processes_called("ceph-osd"),
            Self::File(_) | Self::Device(_) | Self::Null(_) | Self::Remote(..) => Vec::new(),
        }
    }

    /// Whether its file system verifies checksums in the reader's buffer, as btrfs does: of two direct reads into the same
    /// buffer at least one would fail.
    fn checks_what_it_reads(&self) -> bool {
        const BTRFS: u64 = 0x9123_683e;
        self.path().and_then(|path| rustix::fs::statfs(path).ok()).is_some_and(|found| found.f_type as u64 == BTRFS)
    }
}

/// The processes on this host that serve some disks to whoever serves them here.
fn backends(disks: &[Disk]) -> Vec<u32> {
    let mut all: Vec<u32> = disks.iter().flat_map(Disk::backends).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// One measurement to make.
#[derive(Clone, Copy, Debug)]
pub struct Task<'a> {
    /// The load.
    pub load: &'a Load,
    /// An open loop at this rate, in requests per second of all jobs and disks together; a closed loop without it.
    pub rate_iops: Option<f64>,
    /// The same addresses for the same number.
    pub seed: u64,
    /// Where `perf` is told when to look, if it is to.
    pub control: Option<&'a File>,
    /// Whether it is looked how long I/O threads sleep in `io_submit`.
    pub io_submit: bool,
    /// Where raw output goes that should be kept, such as fio's: a path without its extension.
    pub raw: &'a Path,
}

impl Task<'_> {
    /// Has `perf` look from one edge of what is measured to the other.
    pub fn edge(&self, edge: Edge) {
        let said: &[u8] = match edge {
            Edge::Begin => b"enable\n",
            Edge::End => b"disable\n",
        };
        if let Some(mut to) = self.control {
            // A perf that has ended says so itself.
            let _ = to.write_all(said);
        }
    }
}

/// A subject whose processes run, and wait for a load.
pub trait Deployment {
    /// Whether it can take `load` as it runs. A deployment is kept for another load, or for the next round, only if it
    /// can: that is for stacks that take long to start. The others are deployed anew for every measurement, so that
    /// nothing is left over from the last one.
    fn takes(&self, _load: &Load) -> bool {
        false
    }

    /// The processes that serve, by number.
    fn pids(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Puts it under load, once, and returns when that is over.
    ///
    /// # Errors
    /// The server or the load failed, or gave no valid result.
    fn measure(&mut self, task: &Task<'_>) -> Result<Measurement, Unable>;

    /// Stops it while others are measured, so that it takes no CPU time.
    fn pause(&mut self) {}

    /// It will be measured next.
    fn resume(&mut self) {}
}

/// Starts a subject's processes for a load on `disks`, of which there are as many as the load asks for.
///
/// Call it from a thread that lives as long as the deployment: its processes end with that thread.
///
/// # Errors
/// It cannot be done here, or was tried and failed.
pub fn deploy(
    subject: &Subject,
    load: &Load,
    disks: &[Disk],
    context: &Context,
) -> Result<Box<dyn Deployment>, Unable> {
    if let Some(missing) = missing(subject) {
        return Err(Unable::Impossible(missing));
    }
    Ok(match subject.stack {
        Stack::Host => Box::new(host::deploy(subject, load, disks, context)?),
        Stack::Guest => Box::new(guest::deploy(subject, load, disks, context)?),
        Stack::Ssh => Box::new(remote::deploy(subject, load, context)?),
        Stack::Egret | Stack::QemuStorageDaemon | Stack::VhostUserBlk => {
            Box::new(served::deploy(subject, load, disks, context)?)
        }
    })
}

/// The program that a subject needs and this machine lacks, and the package that has it.
pub fn missing(subject: &Subject) -> Option<String> {
    let package = |name: &str, package: &str| match find(name) {
        Some(_) => None,
        None => Some(format!("{name} is not installed: it comes with the package {package}")),
    };
    match subject.stack {
        Stack::Host => package("fio", "fio"),
        Stack::Ssh => package("ssh", "openssh-client"),
        Stack::QemuStorageDaemon => package("qemu-storage-daemon", "qemu-utils (Debian, Ubuntu) or qemu-tools"),
        Stack::Guest => match subject.qemu.as_ref().map(|qemu| qemu.display().to_string()) {
            None => package(QEMU, "qemu-system-x86"),
            Some(named) if find(&named).is_some() => None,
            Some(path) if path.contains('/') => Some(format!("there is no QEMU {path}")),
            Some(name) => Some(format!("there is no QEMU '{name}': --qemu {name}=PATH says where it is")),
        }
        .or_else(guest::missing),
        Stack::Egret | Stack::VhostUserBlk => None,
    }
}

/// Takes out of a plan the optional subjects whose programs this machine lacks, but for the baseline; says of each what
/// would bring it, in one line.
pub fn leave_out(plan: &mut Plan) -> Vec<String> {
    let (mut left_out, mut names) = (Vec::new(), Vec::new());
    for subject in plan.subjects.iter().filter(|one| one.optional && one.name != plan.baseline()) {
        if let Some(why) = missing(subject).or_else(|| lacks(subject)) {
            left_out.push(format!("without the subject '{}': {why}", subject.name));
            names.push(subject.name.clone());
        }
    }
    plan.leave_out(&names);
    left_out
}

/// Where a program is, by the search path or by its own.
pub fn find(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|place| place.join(program)).find(|place| place.is_file())
}

/// Why there is no measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unable {
    /// This machine cannot do it; says what it lacks, and what would bring that.
    Impossible(String),
    /// It should have worked.
    Failed {
        /// Why not, in one line.
        reason: String,
        /// The last lines of the server's or the guest's output.
        log: Vec<String>,
    },
}

impl Unable {
    /// A failure without any output.
    pub fn failed(reason: impl ToString) -> Self {
        Self::Failed { reason: reason.to_string(), log: Vec::new() }
    }
}

/// Puts into a measurement what was spent where the load runs in a guest or on another host, but for `load`, which that has
/// told of itself.
fn account(measurement: &mut Measurement, meter: &CpuMeter, telemetry: Option<&Telemetry>, load: Option<u64>) {
    measurement.cpu = meter.ledger();
    if let Some(telemetry) = telemetry {
        telemetry.complete(measurement);
    }
    measurement.cpu = measurement.cpu.scaled(measurement.seconds / meter.seconds()).without(load);
    measurement.io_thread_cores = meter.cores();
    measurement.in_io_submit = meter.in_io_submit();
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A disk has no such I/O scheduler.
fn no_scheduler(name: &str, disk: impl Display, why: impl Display) -> Unable {
    Unable::Impossible(format!("no scheduler '{name}' for {disk}: {why}"))
}

impl From<Unable> for Outcome {
    fn from(unable: Unable) -> Self {
        match unable {
            Unable::Impossible(reason) => Self::Impossible { reason },
            Unable::Failed { reason, log } => Self::Failed { reason, log },
        }
    }
}
