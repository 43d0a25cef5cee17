//! `egret serve`: from options to a checked configuration, and on to the daemon.
//!
//! There are two ways in, and both end in the same [`Config`]: a [disk](one_disk) by its path, with everything else
//! chosen for it; or [objects] in `qemu-storage-daemon`'s words.

mod announce;
pub mod keys;
mod life;
mod objects;
pub mod one_disk;
mod summary;

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use egret_daemon::process::Sandbox;
use egret_daemon::watchdog::OnStall;
use egret_vocabulary::Address;
use egret_vocabulary::chardev::{self, Backend};
use egret_vocabulary::config::{Config, ConfigFile, effective};
use egret_vocabulary::metrics;
use egret_vocabulary::schema::{self, AddFd, Aio, MonitorChoice, PolicyKind, Spelling, words};

use announce::announcement;
use life::Life;

/// What says of objects what they are to be, and goes with nothing that adjusts those that [`one_disk`] makes. Each such option
/// names them, too: clap requires no disk where there may be none, and would take the option and do nothing about it.
const OBJECTS: [&str; 6] = ["blockdev", "object", "export", "config", "add_fd", "nbd_server"];

/// Serve disks until told to stop.
///
/// Either name one disk, or say everything in qemu-storage-daemon's own options: a line that works there for a raw disk
/// over vhost-user-blk works here unchanged.
#[derive(Args, Clone, Debug, Default)]
#[command(
    after_help = "egret-serve(1) and docs/options.md tell the keys of --object, --blockdev, --export and --nbd-server; so does each with 'help'."
)]
pub struct Serve {
    /// The disk to serve: a raw image, or a block device of the host
    #[arg(conflicts_with_all = OBJECTS)]
    pub disk: Option<PathBuf>,

    /// Where clients connect [default: the disk's name with .sock, in the current directory]
    #[arg(long, value_name = "PATH", requires = "disk", conflicts_with_all = OBJECTS)]
    pub socket: Option<String>,
    /// Refuse writes
    #[arg(long, requires = "disk", conflicts_with_all = OBJECTS)]
    pub read_only: bool,
    /// Engine that carries requests to the kernel [default: the best there is]
    #[arg(long, value_name = "ENGINE", requires = "disk", conflicts_with_all = OBJECTS, value_parser = PossibleValuesParser::new(words::<Aio>()))]
    pub aio: Option<String>,
    /// Go through the host's page cache even where it can be bypassed
    #[arg(long, requires = "disk", conflicts_with_all = OBJECTS)]
    pub buffered: bool,
    /// Request queues [default: 4, or one for each I/O thread]
    #[arg(long, value_name = "N", requires = "disk", conflicts_with_all = OBJECTS)]
    pub num_queues: Option<String>,
    /// I/O threads that the queues are spread over
    #[arg(long, value_name = "N", requires = "disk", conflicts_with_all = OBJECTS, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub iothreads: u16,
    /// When an I/O thread spins, and for how long [default: low-regret]
    #[arg(long, value_name = "POLICY", requires = "disk", conflicts_with_all = OBJECTS, value_parser = PossibleValuesParser::new(words::<PolicyKind>()))]
    pub poll_policy: Option<String>,
    /// No wait spins longer than this [default: the policy's own]
    #[arg(long, value_name = "NS", requires = "disk", conflicts_with_all = OBJECTS)]
    pub poll_max_ns: Option<String>,
    /// How an I/O thread waits for file descriptors [default: auto]
    #[arg(long, value_name = "MONITOR", requires = "disk", conflicts_with_all = OBJECTS, value_parser = PossibleValuesParser::new(words::<MonitorChoice>()))]
    pub fd_monitor: Option<String>,

    /// Make the objects that a file names, beside those that options do
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the configuration with every default filled in, as a file, and serve nothing
    #[arg(long)]
    pub print_config: bool,

    /// Make a disk: [driver=]file|host_device|null-co|null-aio|nbd|rbd|raw|throttle|blkdebug,node-name=...[,KEY=VALUE...]
    #[arg(long, help_heading = "qemu-storage-daemon's options")]
    pub blockdev: Vec<String>,
    /// Make an I/O thread, or what disks and servers name: iothread|secret|throttle-group|tls-creds-x509,id=...[,KEY=VALUE...]
    #[arg(long, help_heading = "qemu-storage-daemon's options")]
    pub object: Vec<String>,
    /// Offer a disk: [type=]vhost-user-blk|vhost-user-scsi|nbd,id=...[,KEY=VALUE...]; of vhost-user-blk
    /// node-name=...,addr.type=unix,addr.path=... too
    #[arg(long, help_heading = "qemu-storage-daemon's options")]
    pub export: Vec<String>,
    /// Make a place for a monitor: socket,id=...,path=...,server=on,wait=off, or stdio,id=...
    #[arg(long, help_heading = "qemu-storage-daemon's options")]
    pub chardev: Vec<String>,
    /// Put a descriptor that it is started with into a set, for filename=/dev/fdset/M: fd=N|NAME,set=M[,opaque=TEXT]
    #[arg(long, value_name = "fd=N,set=M")]
    pub add_fd: Vec<String>,
    /// Take QMP commands: [chardev=]ID|stdio[,pretty=on]
    #[arg(long, help_heading = "qemu-storage-daemon's options")]
    pub monitor: Vec<String>,
    /// Serve metrics for Prometheus: unix:PATH, HOST:PORT on loopback, or fd:NAME; more keys may follow: ,mode=0660
    #[arg(long, value_name = "PLACE")]
    pub metrics: Option<String>,
    /// Serve NBD, for exports of type nbd: addr.type=unix,addr.path=... or addr.type=inet,addr.host=...,addr.port=...[,KEY=VALUE...]
    #[arg(long, help_heading = "qemu-storage-daemon's options")]
    pub nbd_server: Option<String>,

    /// Write the process's number to a file, and hold the file as long as it lives
    #[arg(long, value_name = "PATH")]
    pub pidfile: Option<PathBuf>,
    /// Map no more guest memory than this at a time, for all exports together [default: 64T]
    #[arg(long, value_name = "SIZE")]
    pub memory_max: Option<String>,
    /// Leave the daemon only the files, sockets and system calls that it needs
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = PossibleValuesParser::new(["on", "off"]))]
    pub sandbox: String,
    /// A directory in which images may be opened and sockets be made that a monitor names later; may be repeated
    #[arg(long, value_name = "DIR")]
    pub sandbox_dir: Vec<PathBuf>,
    /// Go on as this user, by name or number, when all is open
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// Go on in this group [default: the user's]
    #[arg(long, value_name = "GROUP", requires = "user")]
    pub group: Option<String>,
    /// Go into the background once disks are served
    #[arg(long)]
    pub daemonize: bool,
    /// Seconds that an I/O thread may make no progress before that is reported; 0 is for ever
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=86400))]
    pub watchdog: u32,
    /// What is done about an I/O thread that makes no progress for longer, beside reporting it
    #[arg(long, value_name = "WHAT", default_value = "report", value_parser = ["report", "abort"])]
    pub on_stall: String,
    /// Seconds that requests in flight have to end and disks to be made stable, once it is told to end; 0 is as long as it
    /// takes
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=86400))]
    pub shutdown_timeout: u32,
    /// Print also, every few seconds and at the end, how each I/O thread waited
    #[arg(long)]
    pub stats: bool,
    /// Write how each I/O thread waited, its newest waits, to a file at the end: for `egret replay`
    #[arg(long, value_name = "FILE")]
    pub record_waits: Option<PathBuf>,
    /// Accepted for qemu-storage-daemon's sake, and ignored
    #[arg(short = 'T', long, value_name = "OPTIONS")]
    pub trace: Vec<String>,
}

/// Runs `egret serve`.
pub fn run(arguments: Serve) -> Result<()> {
    if let Some(help) = keys::help(&arguments) {
        return crate::print(&help);
    }
    let monitors = chardev::monitors(&arguments.chardev, &arguments.monitor)?;
    let add_fds = arguments.add_fd.iter().map(|text| AddFd::read(text)).collect::<Result<_, _>>()?;
    let file = arguments.config.as_deref().map(ConfigFile::open).transpose()?.unwrap_or_default();
    let metrics = metrics_place(&arguments, &file)?;
    let config = config(&arguments, file)?;
    let chardevs = monitors.iter().map(|monitor| &monitor.chardev);
    let chardevs = chardevs.filter_map(|chardev| Some((format!("chardev '{}'", chardev.id), chardev.address()?)));
    config.check_sockets(chardevs.chain(metrics.iter().map(|address| ("metrics".to_owned(), address))))?;
    let of_disk = arguments.disk.as_deref().and_then(one_disk::warning);
    for warning in config.warnings().into_iter().chain(of_disk) {
        // A daemon serves though nobody can be told.
        let _ = writeln!(std::io::stderr(), "egret: warning: {warning}");
    }
    if arguments.print_config {
        let metrics = metrics.as_ref().map(metrics::table).unwrap_or_default();
        return crate::print(&format!("{}{metrics}", effective(&config)));
    }
    let has_stdio = monitors.iter().any(|monitor| monitor.chardev.backend == Backend::Stdio);
    if has_stdio && arguments.daemonize {
        bail!("--daemonize gives the terminal up, and a monitor on stdio needs it: put the monitor on a socket");
    }
    // With a monitor on stdio, printed lines would mix with its answers.
    let talks = !has_stdio;
    let announcement = (talks && arguments.disk.is_some()).then(|| announcement(&config)).transpose()?;
    let Serve { pidfile, daemonize, stats, record_waits, user, group, .. } = arguments;
    let (watchdog, shutdown_timeout) = (seconds(arguments.watchdog), seconds(arguments.shutdown_timeout));
    let on_stall = if arguments.on_stall == "abort" { OnStall::Abort } else { OnStall::Report };
    let sandbox = Sandbox { on: arguments.sandbox == "on", directories: arguments.sandbox_dir, user, group };
    if !sandbox.on && !sandbox.directories.is_empty() {
        bail!("--sandbox-dir says what --sandbox=on leaves, and --sandbox=off leaves everything");
    }
    let life = Life {
        announcement,
        monitors,
        metrics,
        add_fds,
        pidfile,
        sandbox,
        daemonize,
        watchdog,
        on_stall,
        shutdown_timeout,
        stats,
        record_waits,
        talks,
    };
    life::live(&config, life)
}

/// A limit in seconds, where none is written 0.
fn seconds(limit: u32) -> Option<Duration> {
    (limit > 0).then(|| Duration::from_secs(limit.into()))
}

/// Where to serve metrics: the option's address, or else the file's.
fn metrics_place(arguments: &Serve, file: &ConfigFile) -> Result<Option<Address>> {
    if let Some(place) = &arguments.metrics {
        return Ok(Some(metrics::address(place)?));
    }
    Ok(file.metrics.clone())
}

/// The configuration that the arguments and their file ask for, which is read once: it may be a pipe.
pub fn config(arguments: &Serve, file: ConfigFile) -> Result<Config> {
    let mut config = match &arguments.disk {
        Some(disk) => one_disk::config(disk, arguments)?,
        None => objects::config(arguments, file)?,
    };
    if let Some(text) = &arguments.memory_max {
        let bytes = schema::memory_max(text.as_str().into(), Spelling::Text);
        config.memory_max = bytes.map_err(|problem| anyhow!("--{problem}"))?;
    }
    config.check_nbd_server()?;
    if config.exports.is_empty() && arguments.monitor.is_empty() {
        bail!("nothing to serve: name a disk (egret serve DISK), or give an --export or a --monitor");
    }
    Ok(config)
}
