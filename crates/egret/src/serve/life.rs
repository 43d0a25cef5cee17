//! A daemon's life: from a checked configuration to the signal that ends it.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use egret_confine::{Bounds, ThreadKind};
use egret_daemon::metrics::Metrics;
use egret_daemon::process::{
    Inherited, Output, Patience, Pidfile, Places, Progress, Readiness, Sandbox, Side, Signal, Signals, abort_on_panic,
    background, give, notify_service_manager,
};
use egret_daemon::qmp::{Control, Woken};
use egret_daemon::watchdog::{OnStall, Watchdog};
use egret_daemon::{Credentials, Daemon};
use egret_loadgen::machine::allow_many_descriptors;
use egret_polling::trace::MAGIC;
use egret_vocabulary::Address;
use egret_vocabulary::Config;
use egret_vocabulary::chardev::Monitor;
use egret_vocabulary::schema::{AddFd, Addr, Descriptor, FdAddr};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::LevelFilter;

use super::summary::{CpuMeter, waits};

/// How often the summary comes.
const EVERY: Duration = Duration::from_secs(3);

/// How long whoever reads what is printed has to take what is to be known before disks are used.
const READER_PATIENCE: Duration = Duration::from_secs(1);

/// The newest waits that a recording keeps, of each I/O thread: some 7 MB.
const RECORDED_WAITS: usize = 1 << 17;

/// What concerns the process and not its disks.
pub struct Life {
    /// What to print once disks are served.
    pub announcement: Option<String>,
    /// Where it takes commands.
    pub monitors: Vec<Monitor>,
    /// Where it serves metrics, if it does.
    pub metrics: Option<Address>,
    /// Descriptors through which images are opened.
    pub add_fds: Vec<AddFd>,
    /// Where to write the process's number.
    pub pidfile: Option<PathBuf>,
    /// What the process is left with.
    pub sandbox: Sandbox,
    /// Whether to go into the background.
    pub daemonize: bool,
    /// How long an I/O thread may stand still; for ever, if there is no limit.
    pub watchdog: Option<Duration>,
    /// What is done about a stuck one.
    pub on_stall: OnStall,
    /// How long its end may take; as long as it takes, if there is no limit.
    pub shutdown_timeout: Option<Duration>,
    /// Whether to print how the I/O threads waited.
    pub stats: bool,
    /// Where to write how they waited, wait by wait.
    pub record_waits: Option<PathBuf>,
    /// Whether it prints anything at all.
    pub talks: bool,
}

/// Serves `config` until a signal ends it.
pub fn live(config: &Config, life: Life) -> Result<()> {
    abort_on_panic();
    // Clients' descriptors are many, and nothing here watches them by select(2), for which the soft limit is as low as it is.
    allow_many_descriptors();
    let inherited = Inherited::take_over(descriptors(config, &life))?.with_sets(life.add_fds.clone());
    if !life.daemonize {
        return serve(config, &life, inherited, None);
    }
    match background()? {
        Side::Launcher(daemon) => Ok(daemon.wait()?),
        Side::Daemon(readiness) => {
            let mut readiness = Some(readiness);
            let served = serve(config, &life, inherited, Some(&mut readiness));
            if let (Err(error), Some(readiness)) = (&served, readiness) {
                readiness.failed(&crate::in_one_line(error));
                // The launcher prints the error; here it would be a second line.
                egret_rbd::leave_at_once(1);
                std::process::exit(1);
            }
            served
        }
    }
}

/// The sockets to serve on, and the descriptors that were handed over.
fn descriptors<'a>(config: &'a Config, life: &'a Life) -> impl Iterator<Item = &'a Descriptor> {
    let exports = config.exports.iter().filter_map(|export| match export.addr()? {
        Addr::Fd(FdAddr { str: fd }) => Some(fd),
        Addr::Unix(_) => None,
    });
    let exports = exports.chain(life.add_fds.iter().map(|add| &add.fd));
    exports.chain(places(life).addresses.into_iter().filter_map(|address| match address {
        Address::Inherited { fd, .. } => Some(fd),
        Address::Unix { .. } | Address::Tcp { .. } => None,
    }))
}

fn serve(
    config: &Config,
    life: &Life,
    mut inherited: Inherited,
    launcher: Option<&mut Option<Readiness>>,
) -> Result<()> {
    let level = log_level()?;
    // Before the first thread, which would be ended by a signal that it does not block.
    let signals = Signals::block().context("signals")?;
    let places = places(life);
    // What is read and looked up may be somewhere that does not answer, as what is opened below.
    let look_up = || -> Result<_> {
        let config = config.clone().with_secrets_read()?;
        life.record_waits.as_deref().map_or(Ok(()), may_record).context("--record-waits")?;
        let (credentials, confinement) = (Credentials::read(&config)?, life.sandbox.look_up(&config, &places)?);
        Ok((config, credentials, confinement))
    };
    let (config, credentials, confinement) = signals.end_during(look_up, || ()).context("signals")??;
    let config = &config;
    inherited = inherited.with_credentials(credentials);
    let pidfile = life.pidfile.as_deref().map(Pidfile::create).transpose()?;
    // A daemon that goes into the background lets go of its terminal.
    let output = if launcher.is_none() { Output::open() } else { Output::default() };
    let (identity, missing) = Sandbox::begin(confinement)?;
    let _log = log(level)?;
    if !missing.is_nothing() {
        tracing::warn!("sandbox: {missing}");
    }
    let start = || Daemon::start(config, &mut inherited);
    let mut daemon = signals.end_during(start, || pidfile.iter().for_each(Pidfile::remove)).context("signals")??;
    // Clients come from here on, and what they have asked for may not end. Whoever ends the daemon has a limit to that, though
    // it is for a mistake.
    let patience = || Patience::new(life.shutdown_timeout, &signals);
    let watched = watch(&mut daemon, life, &mut inherited);
    let (metrics, watchdog) = match watched {
        Ok(watched) => watched,
        Err(error) => {
            let _ = daemon.end(&patience());
            return Err(error);
        }
    };
    daemon.resume_sessions();
    let meter = CpuMeter::new(&daemon);
    let mut control = Control::new(daemon)?;
    control.announce_stalls_of(watchdog.stalls());
    let obey = || -> Result<Option<Signal>> {
        control.open(&life.monitors, &output, &mut inherited)?;
        identity.iter().try_for_each(|identity| give(identity, config, &places))?;
        for name in inherited.unused() {
            tracing::warn!("socket '{name}' was handed over, and nobody serves who connects to it");
        }
        drop(inherited);
        if let Some(announcement) = &life.announcement {
            // Nobody is obeyed yet, and so only signals would wait.
            let announced = output.write_all(announcement.as_bytes(), READER_PATIENCE, signals.as_fd());
            announced.unwrap_or_else(|error| tracing::warn!("cannot print all of how disks are attached: {error}"));
        }
        if let Some(readiness) = launcher.and_then(Option::take) {
            readiness.ready().context("cannot let go of the terminal")?;
        }
        // All that was named is open. From here on this thread obeys others.
        Bounds::of_this_thread().narrow(ThreadKind::Control);
        notify_service_manager(Progress::Ready);
        attend(&mut control, meter, &signals, life, &output)
    };
    let asked = match obey() {
        Ok(asked) => asked,
        Err(error) => {
            let patience = patience();
            let daemon = control.shut_down("host-error", &patience);
            let _ = daemon.is_some_and(|daemon| daemon.end(&patience));
            return Err(error);
        }
    };
    notify_service_manager(Progress::Stopping);
    let reason = if asked.is_some() { "host-signal" } else { "host-qmp-quit" };
    let ended = end(control, life, reason, &patience().of_end(asked), &output);
    drop((metrics, watchdog));
    drop(pidfile);
    ended
}

/// Has what there is to tell of the daemon told, written and looked after.
fn watch(daemon: &mut Daemon, life: &Life, inherited: &mut Inherited) -> Result<(Option<Metrics>, Watchdog)> {
    let registry = Arc::clone(daemon.registry());
    let metrics = life.metrics.as_ref().map(|place| Metrics::serve(Arc::clone(&registry), place, inherited));
    let metrics = metrics.transpose()?;
    let watchdog = Watchdog::start(registry, life.watchdog, life.on_stall).context("--watchdog")?;
    if life.record_waits.is_some() {
        daemon.record_waits(RECORDED_WAITS).context("--record-waits")?;
    }
    Ok((metrics, watchdog))
}

/// Prints something, as far as somebody takes it at once: a terminal that was closed or is held up, or a pipe that nobody
/// reads any more, is worth neither an end of the daemon nor a wait of the thread that signals and monitors wait for.
fn say(output: &Output, text: &str) {
    let mut rest = text.as_bytes();
    while let Ok(count @ 1..) = output.write(rest) {
        rest = &rest[count..];
    }
}

/// Ends the daemon's objects within `patience`, and reports those that have not ended.
fn end(control: Control, life: &Life, reason: &'static str, patience: &Patience<'_>, output: &Output) -> Result<()> {
    let mut written = Ok(());
    let ended = control.shut_down(reason, patience).is_some_and(|daemon| {
        if life.talks && life.stats {
            say(output, &waits(&daemon));
        }
        if let Some(path) = &life.record_waits {
            written = write_recordings(&daemon, path);
        }
        daemon.end(patience)
    });
    if !ended {
        bail!("not everything has ended as it should, as the log says");
    }
    written
}

/// How much is logged, as `EGRET_LOG` says: a word that nobody knows would silence what goes wrong.
fn log_level() -> Result<LevelFilter> {
    let said = std::env::var_os("EGRET_LOG").unwrap_or_default();
    let said = said.to_string_lossy();
    Ok(match &*said.to_ascii_lowercase() {
        "error" => LevelFilter::ERROR,
        "" | "warn" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        _ => bail!("EGRET_LOG must be error, warn, info or debug, got '{said}'"),
    })
}

/// Lines of the log that wait to be written.
const LOG_LINES: usize = 1024;

/// Starts logging. A thread of its own writes the log, so that no other thread waits for a stalled reader of stderr; lines
/// beyond its queue are dropped. Dropping what is returned writes what waits,
/// and gives up after a second.
fn log(level: LevelFilter) -> Result<WorkerGuard> {
    let writer = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(LOG_LINES).thread_name("log");
    // The library's writer thread cannot declare its kind itself. It inherits the kind of the thread that starts it.
    let starter = std::thread::Builder::new().name("log".to_owned()).spawn(|| {
        Bounds::default().narrow(ThreadKind::Log);
        writer.finish(std::io::stderr())
    });
    let joined = starter.context("the log's thread")?.join();
    let (writer, guard) = joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let log = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_writer(writer);
    log.with_ansi(std::io::stderr().is_terminal()).compact().init();
    Ok(guard)
}

/// Options beside the configuration's objects.
fn places(life: &Life) -> Places<'_> {
    let monitors = life.monitors.iter().filter_map(|monitor| monitor.chardev.address());
    Places {
        addresses: monitors.chain(&life.metrics).collect(),
        pidfile: life.pidfile.as_deref(),
        written: life.record_waits.as_deref(),
    }
}

/// Whether a recording may be written to `path` at the end, as far as can be told: there is a directory for it, and no other
/// file that would be lost.
fn may_record(path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => {
            let mut begin = String::new();
            let read = File::open(path)?.take(MAGIC.len() as u64).read_to_string(&mut begin);
            if read.is_err() || !begin.is_empty() && begin != MAGIC {
                bail!("'{}' holds something other than recorded waits; use another name", path.display());
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            std::fs::read_dir(directory).with_context(|| directory.display().to_string())?;
        }
        // Whoever opens a FIFO waits for somebody who reads, and nobody is to be waited for at the end.
        Ok(found) if found.is_dir() || found.file_type().is_fifo() => {
            bail!("'{}' is no file; name one", path.display());
        }
        Ok(_) => {}
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    }
    Ok(())
}

/// A trace of each I/O thread: at `path`, with the thread's name behind it where there are several.
fn write_recordings(daemon: &Daemon, path: &Path) -> Result<()> {
    let machine = rustix::system::uname();
    let note = format!("{} {}", machine.sysname().to_string_lossy(), machine.release().to_string_lossy());
    let traces = daemon.take_recordings(&note);
    let alone = traces.len() == 1;
    for (name, trace) in traces {
        let mut path = path.as_os_str().to_owned();
        if !alone {
            path.push(format!(".{name}"));
        }
        std::fs::write(&path, trace.to_string()).with_context(|| format!("--record-waits {}", path.display()))?;
    }
    Ok(())
}

/// Takes commands until the end, and returns the signal that asked for it, if it was not a monitor; on a terminal with a line
/// now and then, elsewhere without ever waking up for nothing.
fn attend(
    control: &mut Control,
    mut meter: CpuMeter,
    signals: &Signals,
    life: &Life,
    output: &Output,
) -> Result<Option<Signal>> {
    let every = (life.talks && stdout().is_terminal()).then_some(EVERY);
    loop {
        match control.attend(signals.as_fd(), every).context("monitors")? {
            Woken::Quit => return Ok(None),
            Woken::Descriptor => return signals.wait().map(Some).context("signals"),
            Woken::Timeout => {
                // No line is printed while a change is in progress.
                let Some(daemon) = control.daemon() else { continue };
                if let Some(line) = meter.line(daemon) {
                    say(output, &format!("{line}\n"));
                }
                if life.stats {
                    say(output, &waits(daemon));
                }
            }
        }
    }
}
