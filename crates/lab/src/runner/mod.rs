//! Runs a plan: every cell in its turn, each kept before the next begins.
//!
//! ```text
//!   Plan ── steps() ──► for each cell that is not kept yet:
//!                         deploy ── measure ──► Cell ──► cells.jsonl
//!                                    └── kernel log, perf
//!                       at the end, and when interrupted ──► result.json
//! ```
//!
//! A cell that failed is a result, and the run goes on. One that was interrupted is none: it is measured when the run is
//! resumed.

mod journal;
mod kernel_log;
mod marks;
mod order;
mod perf;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::cpu_meter::stolen_ns;
use crate::disks::{self, Disks};
use crate::fingerprint;
use crate::import::is_imported;
use crate::machine::{self, Placement};
use crate::plan::{Load, Plan};
use crate::process::{ProcessReaper, Scratch, short_directory};
use crate::results::{Cell, CellId, Component, FORMAT, Host, Incident, Measurement, Outcome, Run, Warning};
use crate::stack::{self, Context, Deployment, Task, Unable};
use crate::statistics::Looks;

use egret_loadgen::machine::allow_many_descriptors;
use egret_loadgen::random::mix;
pub use journal::{JOURNAL, Journal, RESULT, read};
pub use marks::{brief, drift, mark_device_bound, noise};
use order::is_host;
pub(crate) use order::subject_called;
pub use order::{AGAIN, Step, more_steps, steps};
pub use perf::CALL_GRAPH;

/// Where a run's directory has what its cells leave.
pub const RAW: &str = "raw";
/// A cell's time beside its load: starting, connecting, ending.
const OVERHEAD: Duration = Duration::from_millis(300);
/// From this share of all processors' time on, a hypervisor takes enough away to show.
const STOLEN: f64 = 0.01;

/// How an incident begins that says what is not as it was.
const RESUMED: &str = "resumed with other conditions than it began with";

/// Hears how a run goes.
pub trait Progress {
    /// A cell is about to be measured.
    fn measuring(&mut self, id: &CellId);

    /// A cell has ended: `done` of `total` have, and the rest will take about so long.
    fn ended(&mut self, cell: &Cell, done: usize, total: usize, left: Duration);

    /// Something else that one should know.
    fn says(&mut self, text: &str);
}

/// How a run came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every cell has ended.
    Finished,
    /// Some are left.
    Interrupted,
}

/// The options of a run beside its plan.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// By how much the plan was scaled.
    pub scale: f64,
    /// The seed of the cells' order.
    pub seed: u64,
    /// Only cells whose load or subject has this in its name.
    pub only: Option<String>,
    /// Of a new run: what its curves' points are shares of, by load, where that is not its own peak.
    pub peaks: BTreeMap<String, f64>,
    /// Where the run's directory is, or will be.
    pub directory: PathBuf,
    /// This program, which serves disks as `egret serve`.
    pub egret: PathBuf,
    /// Whether a device may be written to.
    pub write_device: bool,
    /// Of a new run: whether its device is written full before.
    pub precondition: bool,
    /// Of a new run: what the plan has and this machine lacks, in one line each.
    pub left_out: Vec<String>,
}

/// Checks before anything starts whether a plan can be run here.
///
/// # Errors
/// What it lacks, and what would bring it, in one line.
pub fn check(plan: &Plan, options: &RunOptions) -> Result<(), String> {
    for subject in plan.subjects.iter().filter(|subject| !subject.optional) {
        if let Some(missing) = stack::missing(subject).or_else(|| disks::lacks(subject)) {
            return Err(format!("subject '{}': {missing}", subject.name));
        }
    }
    // Of a run that is resumed it may be gone: each cell would fail, and a cell that has ended is never measured again.
    plan.loads.iter().try_for_each(Load::check_job_file)?;
    // Of one that was scaled a job file may want more than there is.
    plan.loads.iter().try_for_each(|load| plan.check_size(load))?;
    if !options.write_device {
        disks::check_writes_no_device(plan)?;
    }
    if options.precondition {
        disks::check_precondition(plan, options.write_device)?;
    }
    disks::check(plan, &options.directory)
}

/// How long a plan's cells take, one after the other, without those of job files: only their authors know that.
pub fn duration(plan: &Plan, steps: &[Step]) -> Duration {
    steps.iter().filter_map(|step| length(&plan.loads[step.load])).sum()
}

fn length(load: &Load) -> Option<Duration> {
    load.keys.jobfile.is_none().then(|| load.span() + OVERHEAD)
}

/// How long cells took, for what is left.
#[derive(Default)]
struct Pace {
    /// Of cells whose length is known before.
    spent: Duration,
    planned: Duration,
    /// Of job files: how long a cell took the last time, by the load's place in the plan.
    job_files: HashMap<usize, Duration>,
}

impl Pace {
    fn ended(&mut self, plan: &Plan, load: usize, took: Duration) {
        match length(&plan.loads[load]) {
            Some(planned) => (self.spent, self.planned) = (self.spent + took, self.planned + planned),
            None => drop(self.job_files.insert(load, took)),
        }
    }

    fn of(&self, plan: &Plan, left: &[Step]) -> Duration {
        let pace = if self.planned.is_zero() { 1.0 } else { self.spent.as_secs_f64() / self.planned.as_secs_f64() };
        let of_job_files: Duration = left.iter().filter_map(|step| self.job_files.get(&step.load)).sum();
        duration(plan, left).mul_f64(pace) + of_job_files
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A run in progress.
pub struct Runner {
    run: Run,
    steps: Vec<Step>,
    journal: Journal,
    context: Context,
    /// Those that are dear to start, by the subject's place in the plan. They end before their disks do.
    kept: HashMap<usize, Box<dyn Deployment>>,
    /// Subjects whose servers were looked at since it began, or was resumed, by their place in the plan.
    seen: HashSet<usize>,
    /// What is to be said of them beside the next cell.
    news: Vec<String>,
    disks: Disks,
    kernel: kernel_log::KernelLog,
    directory: PathBuf,
    _scratch: Scratch,
}

impl Runner {
    /// Makes the disks and the run's directory.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn begin(plan: Plan, options: &RunOptions, reaper: &Arc<ProcessReaper>) -> io::Result<Self> {
        let left_out = options.left_out.iter();
        let left_out = left_out.map(|text| Warning { about: Warning::LEFT_OUT.into(), text: text.clone() });
        let mut run = Run {
            format: FORMAT,
            job_files: fingerprint::job_files(&plan),
            plan,
            scale: options.scale,
            seed: options.seed,
            only: options.only.clone(),
            peaks: options.peaks.clone(),
            started: now(),
            ended: None,
            host: Host { warnings: left_out.collect(), ..Host::default() },
            cells: Vec::new(),
            incidents: Vec::new(),
        };
        // The journal comes first: it refuses a directory that holds another run, before disks are filled.
        let journal = Journal::create(&options.directory, &run)?;
        if options.precondition {
            disks::precondition(&run.plan, reaper)?;
            run.plan.disk.preconditioned = true;
        }
        let disks = Disks::make(&run.plan, &options.directory, reaper)?;
        let placement = placement(&run.plan);
        let host = fingerprint::take(&run.plan, &placement, &disks.disks, &options.egret);
        begin_on(&mut run, host, &disks);
        journal.result(&run)?;
        Self::new(run, journal, disks, placement, options, reaper)
    }

    /// Goes on with the run in the directory that the options name.
    ///
    /// # Errors
    /// There is none, or its disks cannot be made.
    pub fn resume(options: &RunOptions, reaper: &Arc<ProcessReaper>) -> io::Result<Self> {
        let (mut journal, mut run) = Journal::resume(&options.directory)?;
        if is_imported(&run) {
            let error = format!("{}: what fio measured elsewhere does not go on here", options.directory.display());
            return Err(io::Error::other(error));
        }
        check(&run.plan, options).map_err(io::Error::other)?;
        let disks = Disks::make(&run.plan, &options.directory, reaper)?;
        let placement = placement(&run.plan);
        let host = fingerprint::take(&run.plan, &placement, &disks.disks, &options.egret);
        if run.cells.is_empty() {
            // It may have been interrupted before anybody looked at the machine.
            begin_on(&mut run, host, &disks);
        } else {
            if let Some(text) = differs(&run, &host) {
                let incident = Incident { at: now(), cell: None, source: Incident::LAB.into(), text };
                journal.incident(&incident)?;
                run.incidents.push(incident);
            }
            disks.warnings.iter().for_each(|warning| warn(&mut run.host, warning.clone()));
        }
        journal.result(&run)?;
        Self::new(run, journal, disks, placement, options, reaper)
    }

    fn new(
        run: Run,
        journal: Journal,
        disks: Disks,
        placement: Placement,
        options: &RunOptions,
        reaper: &Arc<ProcessReaper>,
    ) -> io::Result<Self> {
        allow_many_descriptors();
        fs::create_dir_all(options.directory.join(RAW))?;
        let scratch = Scratch::new(&short_directory(), reaper)?;
        let steps = steps(&run.plan, run.seed, run.only.as_deref());
        let context = Context {
            reaper: Arc::clone(reaper),
            scratch: scratch.path().to_owned(),
            placement,
            egret: options.egret.clone(),
            destroy: run.plan.disk.destroy,
        };
        let kernel = kernel_log::KernelLog::open(kernel_log::KMSG);
        let (kept, directory) = (HashMap::new(), options.directory.clone());
        let (seen, news) = (HashSet::new(), Vec::new());
        Ok(Self { run, steps, journal, context, kept, seen, news, disks, kernel, directory, _scratch: scratch })
    }

    /// What there is so far.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// How many cells there are, those that have ended among them.
    pub fn total(&self) -> usize {
        self.steps.len()
    }

    /// Measures what is left. Call it from the thread that will still be there when it returns: servers end with it.
    ///
    /// # Errors
    /// What was found could not be kept.
    pub fn go(&mut self, progress: &mut dyn Progress) -> io::Result<Ending> {
        if let Some(text) = self.kernel.refusal() {
            self.warn(Warning::KERNEL_LOG, text);
        }
        let (begin, stolen) = (Instant::now(), stolen_ns());
        let mut pace = Pace::default();
        let looks = Looks::new(self.run.plan.repetitions, self.run.plan.most_repetitions());
        for look in looks.all() {
            self.measure_all(&mut pace, progress)?;
            // One that was stopped with nothing left of these steps may still owe more of them.
            if self.owes() {
                break;
            }
            mark_device_bound(&self.run.plan, &mut self.run.cells);
            let more = more_steps(&self.run, look.after);
            if more.is_empty() {
                break;
            }
            self.steps.extend(more);
        }
        self.kept.clear();
        self.finish(begin.elapsed(), stolen_ns().saturating_sub(stolen))
    }

    /// Whether any of the steps that are known is left.
    fn owes(&self) -> bool {
        self.run.cells.len() < self.steps.len()
    }

    /// Measures what is left of the steps that are known.
    fn measure_all(&mut self, pace: &mut Pace, progress: &mut dyn Progress) -> io::Result<()> {
        let finished: HashSet<CellId> = self.run.cells.iter().map(|cell| cell.id.clone()).collect();
        let left: Vec<Step> = self.steps.iter().filter(|step| !finished.contains(&step.id)).cloned().collect();
        let total = self.steps.len();
        for (number, step) in left.iter().enumerate() {
            if self.context.reaper.has_stopped() {
                break;
            }
            progress.measuring(&step.id);
            let (started, begin, known) = (now(), Instant::now(), self.run.host.commands.len());
            let outcome = self.measure(step).map_or_else(Outcome::from, Outcome::from);
            if self.context.reaper.has_stopped() {
                break;
            }
            // A lab that is killed does not come to write at its end what has served the cells that it keeps.
            if self.run.host.commands.len() > known {
                self.journal.result(&self.run)?;
            }
            let cell = Cell { id: step.id.clone(), started, outcome };
            self.journal.cell(&cell)?;
            self.note_incidents(&step.id, progress)?;
            pace.ended(&self.run.plan, step.load, begin.elapsed());
            let rest = pace.of(&self.run.plan, &left[number + 1..]);
            progress.ended(&cell, total - left.len() + number + 1, total, rest);
            self.run.cells.push(cell);
        }
        Ok(())
    }

    fn finish(&mut self, elapsed: Duration, stolen: u64) -> io::Result<Ending> {
        let interrupted = self.owes();
        let run = &mut self.run;
        run.ended = (!interrupted).then(now);
        mark_device_bound(&run.plan, &mut run.cells);
        let processors = run.host.cpu.processors();
        let mut warnings: Vec<Warning> = noise(&run.cells, processors).into_iter().collect();
        warnings.extend(drift(&run.plan, &run.cells));
        warnings.extend(brief(&run.plan, &run.cells));
        let share = stolen as f64 / elapsed.as_nanos().max(1) as f64 / processors.max(1) as f64;
        if share > STOLEN {
            let text = format!("a hypervisor took {:.1}% of the processors' time away", share * 100.0);
            warnings.push(Warning { about: "steal".into(), text });
        }
        warnings.into_iter().for_each(|warning| warn(&mut self.run.host, warning));
        self.journal.result(&self.run)?;
        Ok(if interrupted { Ending::Interrupted } else { Ending::Finished })
    }

    fn warn(&mut self, about: &str, text: String) {
        warn(&mut self.run.host, Warning { about: about.into(), text });
    }

    fn note_incidents(&mut self, id: &CellId, progress: &mut dyn Progress) -> io::Result<()> {
        let of_kernel = self.kernel.news().into_iter().map(|text| ("kernel", format!("the kernel: {text}"), text));
        let ours = self.news.drain(..).map(|text| (Incident::LAB, text.clone(), text));
        for (source, said, text) in of_kernel.chain(ours) {
            progress.says(&said);
            let incident = Incident { at: now(), cell: Some(id.clone()), source: source.into(), text };
            self.journal.incident(&incident)?;
            self.run.incidents.push(incident);
        }
        Ok(())
    }

    fn measure(&mut self, step: &Step) -> Result<Measurement, Unable> {
        let load = self.run.plan.loads[step.load].clone();
        let rate_iops = match step.share {
            Some(share) => Some(peak(&self.run, &load)? * share),
            None => load.keys.rate_iops.map(|each| each * f64::from(load.numjobs) * f64::from(load.groups())),
        };
        let mut deployment = self.deploy(step.subject, &load)?;
        if self.seen.insert(step.subject) {
            let name = self.run.plan.subjects[step.subject].name.clone();
            self.news.extend(look(&mut self.run.host, &name, &deployment.pids()));
        }
        deployment.resume();
        let raw = self.directory.join(RAW).join(raw_name(&step.id));
        // The same addresses for all of a pair.
        let seed = mix(self.run.seed ^ mix(u64::from(step.id.repetition)));
        // Nobody knows when a job file of somebody's own begins.
        let from_begin = load.keys.jobfile.is_some();
        let perf = self.run.plan.perf.then(|| perf::record(&self.context.reaper, from_begin, &raw));
        let control = perf.as_ref().and_then(|recording| Some(&recording.as_ref().ok()?.control));
        let io_submit = self.run.plan.io_submit;
        let measured = deployment.measure(&Task { load: &load, rate_iops, seed, control, io_submit, raw: &raw });
        // Where the lab's own loads stay is known before. A run that was interrupted ends, and its disks with it.
        let whole = if from_begin && !self.context.reaper.has_stopped() {
            // Who stands by has the file open that was there before.
            self.disks.restore(&self.run.plan.disk, || self.kept.clear()).map_err(Unable::failed)
        } else {
            Ok(())
        };
        let measured = measured.and_then(|measured| whole.map(|()| measured));
        let profile = perf.map(|recording| recording.and_then(perf::Recording::profile));
        let (samples, symbols) = profile.unwrap_or_else(|| Ok(Default::default())).unwrap_or_else(|text| {
            self.warn("perf", text);
            Default::default()
        });
        let has_io_threads = |measured: &Measurement| measured.io_thread_cores.is_some();
        if io_submit && measured.as_ref().is_ok_and(|one| has_io_threads(one) && one.in_io_submit.is_none()) {
            let text = "nobody may see what I/O threads sleep in: as root, or with kernel.yama.ptrace_scope=0, one may";
            self.warn("io-submit", text.into());
        }
        // One that failed is of no use any more.
        if measured.is_ok() && deployment.takes(&load) {
            deployment.pause();
            self.kept.insert(step.subject, deployment);
        }
        measured.map(|measurement| Measurement { samples, symbols, ..measurement })
    }

    fn deploy(&mut self, subject: usize, load: &Load) -> Result<Box<dyn Deployment>, Unable> {
        if let Some(deployment) = self.kept.remove(&subject)
            && deployment.takes(load)
        {
            return Ok(deployment);
        }
        let count = usize::from(load.disks);
        let subject = &self.run.plan.subjects[subject];
        let disks = self.disks.of(&subject.backend).map_err(Unable::failed)?;
        let disks = disks.get(..count).ok_or_else(|| {
            let count = disks.len();
            Unable::Impossible(format!("the load asks for {} disks, and the subject has {count}", load.disks))
        })?;
        stack::deploy(subject, load, disks, &self.context)
    }
}

/// What the curves of a run had their points at shares of, by load: for another run that is to be measured at the same rates.
///
/// # Errors
/// A curve, of which `loads` has the name, has no peak there.
pub fn peaks<'a>(of: &Run, loads: impl IntoIterator<Item = &'a str>) -> Result<BTreeMap<String, f64>, String> {
    let peak_of = |name: &str| {
        let load = of.plan.loads.named(name).filter(|load| load.keys.curve.is_some());
        let peak = load.and_then(|load| peak(of, load).ok());
        Ok((name.to_owned(), peak.ok_or_else(|| format!("it has measured no peak of '{name}'"))?))
    };
    loads.into_iter().map(peak_of).collect()
}

/// Requests per second that a curve's points are shares of: another run's, where that was asked for, or else the highest peak of the first repetition that has one, of
/// whoever got there, so that all subjects are measured at the same rates in all repetitions. The host's own is no goal.
fn peak(run: &Run, load: &Load) -> Result<f64, Unable> {
    if let Some(peak) = run.peaks.get(&load.name) {
        return Ok(*peak);
    }
    let is_host = |name: &str| is_host(&run.plan, name);
    let peaks = run.cells.iter().filter(|cell| cell.id.load == load.name && cell.id.point == 0);
    let peaks: Vec<(u32, f64)> = peaks
        .filter(|cell| !is_host(&cell.id.subject) || run.plan.subjects.iter().all(|one| is_host(&one.name)))
        .filter_map(|cell| Some((cell.id.repetition, cell.measured()?)))
        .map(|(repetition, peak)| (repetition, peak.requests() as f64 / peak.seconds.max(1e-9)))
        .collect();
    let first = peaks.iter().map(|(repetition, _)| *repetition).min();
    let of_first = peaks.iter().filter(|(repetition, _)| Some(*repetition) == first);
    let highest = of_first.map(|(_, peak)| *peak).fold(0.0, f64::max);
    if highest > 0.0 {
        Ok(highest)
    } else {
        Err(Unable::failed("no peak was measured, and its points are shares of that"))
    }
}

/// The placement that the plan asks for, or one that suits the machine.
fn placement(plan: &Plan) -> Placement {
    let jobs = plan.loads.iter().map(|load| load.numjobs).max().unwrap_or(1);
    let mut placement = Placement::of(&machine::cores(), jobs.into());
    if !plan.load_cpus.is_empty() {
        placement.load.clone_from(&plan.load_cpus);
        let rest = machine::cores().concat();
        placement.server = rest.into_iter().filter(|cpu| !plan.load_cpus.contains(cpu)).collect();
    }
    placement
}

/// A warning from before the run stays beside one from during it, unless they are equal.
fn warn(host: &mut Host, warning: Warning) {
    host.warnings.retain(|old| *old != warning);
    host.warnings.push(warning);
}

/// Has a run begin on this machine and these disks; what was left out of its plan stays so.
fn begin_on(run: &mut Run, host: Host, disks: &Disks) {
    let before = std::mem::replace(&mut run.host, host).warnings;
    let left_out = before.into_iter().filter(|warning| warning.about == Warning::LEFT_OUT);
    run.host.warnings.extend(disks.warnings.iter().cloned().chain(left_out));
}

/// How the machine differs from the one on which the run began.
fn differs(run: &Run, now: &Host) -> Option<String> {
    let before = &run.host;
    let hash = |host: &Host| host.components.iter().map(|one| one.sha256.clone()).collect::<Vec<_>>();
    // What has the same name after a reboot may be another disk, and the same one may have another name.
    let disk = |host: &Host| {
        let disk = host.disk.clone()?;
        Some((disk.model, disk.size, disk.scheduler, disk.file_system))
    };
    let what = [
        ("the kernel", before.kernel != now.kernel),
        ("the processors", before.cpu != now.cpu),
        ("the disk", disk(before) != disk(now)),
        ("the programs", hash(before) != hash(now)),
        ("the job files", run.job_files != fingerprint::job_files(&run.plan)),
    ];
    let changed: Vec<&str> = what.iter().filter(|(_, differs)| *differs).map(|(what, _)| *what).collect();
    (!changed.is_empty()).then(|| format!("{RESUMED}: {}", changed.join(", ")))
}

/// Keeps what serves a subject. Of a run that goes on that is kept already: says if it is another program now.
fn look(host: &mut Host, name: &str, pids: &[u32]) -> Option<String> {
    let started = pids.iter().flat_map(|pid| fingerprint::started(name, *pid, &host.components)).collect::<Vec<_>>();
    if !host.commands.iter().any(|(subject, _)| subject == name) {
        host.commands.extend(pids.iter().map(|pid| (name.to_owned(), command_line(*pid))));
        host.started.extend(started);
        return None;
    }
    let hashes = |all: &[Component]| -> BTreeSet<String> {
        all.iter().filter(|one| one.name == name).map(|one| one.sha256.clone()).collect()
    };
    let (before, now) = (hashes(&host.started), hashes(&started));
    // What another user's process runs not everybody may see.
    let is_another = before != now && !before.is_empty() && !now.is_empty();
    is_another.then(|| format!("{RESUMED}: the program of '{name}'"))
}

/// A process's command line, in words.
fn command_line(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    words.join(" ").trim().to_owned()
}

/// A cell's name as one of its files in [`RAW`], without what kind of file it is. Names whose anchors are distinct have
/// distinct files.
pub fn raw_name(id: &CellId) -> String {
    let plain = |text: &str| -> String {
        text.chars().map(|c| if c.is_alphanumeric() || c == '_' { c } else { '-' }).collect()
    };
    format!("{}--{}--r{}-p{}", plain(&id.load), plain(&id.subject), id.repetition, id.point)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::results::{BlockDevice, Operations};

    struct Silence;
    impl Progress for Silence {
        fn measuring(&mut self, _: &CellId) {}
        fn ended(&mut self, _: &Cell, _: usize, _: usize, _: Duration) {}
        fn says(&mut self, _: &str) {}
    }

    fn options(directory: &Path) -> RunOptions {
        RunOptions {
            scale: 1.0,
            seed: 1,
            only: None,
            peaks: BTreeMap::new(),
            directory: directory.to_owned(),
            egret: "/bin/true".into(),
            write_device: true,
            precondition: false,
            left_out: Vec::new(),
        }
    }

    /// A cell in which so many requests were completed in a second.
    fn cell(id: CellId, requests: u64) -> Cell {
        let reads = Some(Operations { requests, bytes: 4096 * requests, ..Operations::default() });
        let measurement = Measurement { seconds: 1.0, reads, ..Measurement::default() };
        Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measurement)) }
    }

    /// A plan whose disk warns.
    const OVER_SSH: &str = "name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n[[subject]]\nname = 's'\nstack = 'ssh'\noptional = true\n\
                            client = 'ssh:h'\ndisk = '/dev/x'\n[[load]]\nname = 'l'\nrw = 'write'\n";

    /// A run that goes on, with the subjects of its warnings.
    fn resumed(run: &Run) -> (Run, Vec<String>) {
        let place = tempfile::tempdir().unwrap();
        drop(Journal::create(place.path(), run).unwrap());
        let runner = Runner::resume(&options(place.path()), &ProcessReaper::new().unwrap()).unwrap();
        let kept = read(place.path()).unwrap();
        assert_eq!((&kept.host, &kept.incidents), (&runner.run().host, &runner.run().incidents));
        let abouts = kept.host.warnings.iter().map(|warning| warning.about.clone()).collect();
        (kept, abouts)
    }

    #[test]
    fn a_run_that_was_interrupted_before_its_first_cell_begins_where_it_is_resumed() {
        let mut begun = Run::of(OVER_SSH);
        let left_out = Warning { about: "left-out".into(), text: "fio is not installed".into() };
        begun.host.warnings.push(left_out);
        let (run, abouts) = resumed(&begun);
        assert!(!run.host.kernel.is_empty() && !run.host.cpu.usable.is_empty());
        assert!(run.incidents.is_empty(), "{:?}", run.incidents);
        for about in ["not-preconditioned", "left-out"] {
            assert_eq!(abouts.iter().filter(|one| *one == about).count(), 1, "{about}: {abouts:?}");
        }
        assert_eq!(resumed(&run).1, abouts);
    }

    #[test]
    fn a_run_that_goes_on_is_warned_of_the_disks_that_it_goes_on_with() {
        let mut begun = Run::of(OVER_SSH);
        let id = CellId { load: "l".into(), subject: "s".into(), repetition: 0, point: 0 };
        begun.cells.push(cell(id, 100));
        begun.host.kernel = "another".into();
        let (run, abouts) = resumed(&begun);
        assert_eq!((run.host.kernel.as_str(), run.incidents.len()), ("another", 1));
        assert_eq!(abouts, ["not-preconditioned"]);
        assert_eq!(resumed(&run).1, abouts);
    }

    #[test]
    fn a_run_that_goes_on_with_another_disk_says_so() {
        let mut run = Run::of("name = 'p'\ntitle = 't'\nsubject = []\nload = []\n[disk]\ntype = 'loop'\n");
        let one = BlockDevice {
            path: "/dev/loop1".into(),
            device: Some("loop1".into()),
            model: Some("a".into()),
            scheduler: Some("none".into()),
            ..BlockDevice::default()
        };
        run.host.disk = Some(one.clone());
        let says = |disk: Option<BlockDevice>| differs(&run, &Host { disk, ..run.host.clone() });
        let moved = BlockDevice { path: "/dev/loop7".into(), device: Some("loop7".into()), ..one.clone() };
        assert_eq!(says(Some(moved)), None, "its number is the kernel's to choose");
        let of = |change: fn(&mut BlockDevice)| {
            let mut other = one.clone();
            change(&mut other);
            Some(other)
        };
        for other in [
            None,
            of(|disk| disk.model = Some("b".into())),
            of(|disk| disk.size = Some(1 << 30)),
            of(|disk| disk.scheduler = Some("mq-deadline".into())),
            of(|disk| disk.file_system = Some("ext4".into())),
        ] {
            let said = says(other).expect("another disk");
            assert_eq!(said, "resumed with other conditions than it began with: the disk");
        }
    }

    #[test]
    fn a_run_that_is_stopped_before_it_knows_what_is_left_has_not_finished() {
        let place = tempfile::tempdir().unwrap();
        let subjects = ["a", "b"].map(|name| format!("[[subject]]\nname = '{name}'\nstack = 'egret'\n")).concat();
        let mut run = Run::of(&format!(
            "name = 'p'\ntitle = 't'\nrepetitions = 5\nmost-repetitions = 12\n[disk]\ntype = 'null'\n{subjects}[[load]]\nname = 'l'\n"
        ));
        let scattered = |id: CellId| {
            let requests =
                if id.subject == "b" { [930, 1000, 950, 1010, 940][id.repetition as usize % 5] } else { 1000 };
            cell(id, requests)
        };
        run.cells.extend(steps(&run.plan, run.seed, None).into_iter().map(|step| scattered(step.id)));
        let more = more_steps(&run, 5);
        run.cells.extend(more[1..].iter().map(|step| scattered(step.id.clone())));
        drop(Journal::create(place.path(), &run).unwrap());
        let reaper = ProcessReaper::new().unwrap();
        let mut runner = Runner::resume(&options(place.path()), &reaper).unwrap();
        reaper.stop();
        assert_eq!(runner.go(&mut Silence).unwrap(), Ending::Interrupted);
        assert_eq!((runner.run().ended, read(place.path()).unwrap().ended), (None, None));
        assert_eq!(runner.total(), runner.run().cells.len() + 1);
    }

    #[test]
    fn a_run_that_may_not_read_the_kernels_messages_says_so_once() {
        let place = tempfile::tempdir().unwrap();
        let options = RunOptions { only: Some("nothing is called so".into()), ..options(place.path()) };
        let plan =
            "name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n[[subject]]\nname = 'a'\nstack = 'egret'\n[[load]]\n";
        let reaper = ProcessReaper::new().unwrap();
        let mut runner = Runner::begin(toml::from_str(plan).unwrap(), &options, &reaper).unwrap();
        let said = || {
            let warnings = read(place.path()).unwrap().host.warnings.into_iter();
            warnings
                .filter(|warning| warning.about == Warning::KERNEL_LOG)
                .map(|warning| warning.text)
                .collect::<Vec<_>>()
        };
        for (log, expected) in [("/dev/zero", 0), ("/proc/no such log", 1), ("/proc/no such log", 1)] {
            runner.kernel = kernel_log::KernelLog::open(log);
            assert_eq!(runner.go(&mut Silence).unwrap(), Ending::Finished);
            assert_eq!(said().len(), expected, "{log}: {:?}", said());
        }
        assert!(said()[0].contains("cannot be read (No such file or directory"), "{:?}", said());
    }

    #[test]
    fn a_run_that_goes_on_with_another_job_file_says_so() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("mine.fio");
        fs::write(&path, "[mine]\n").unwrap();
        let plan = "name = 'p'\ntitle = 't'\nsubject = []\n[disk]\ntype = 'null'\n";
        let mut run = Run::of(&format!("{plan}[[load]]\nname = 'mine'\njobfile = '{}'\n", path.display()));
        run.job_files = fingerprint::job_files(&run.plan);
        assert_eq!(differs(&run, &run.host), None);
        fs::write(&path, "[mine]\nbs=8k\n").unwrap();
        let said = differs(&run, &run.host).unwrap();
        assert_eq!(said, "resumed with other conditions than it began with: the job files");
    }

    #[test]
    fn a_run_whose_job_file_is_gone_does_not_go_on() {
        let place = tempfile::tempdir().unwrap();
        let plan = "name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n[[subject]]\nname = 's'\nstack = 'ssh'\noptional = true\n\
                    client = 'ssh:h'\ndisk = '/dev/x'\n[[load]]\nname = 'mine'\njobfile = 'mine.fio'\n";
        drop(Journal::create(place.path(), &Run::of(plan)).unwrap());
        let files = || {
            let names = fs::read_dir(place.path()).unwrap().flatten().map(|entry| entry.path());
            names.map(|path| (fs::read(&path).unwrap(), path)).collect::<Vec<_>>()
        };
        let before = files();
        let resumed = Runner::resume(&options(place.path()), &ProcessReaper::new().unwrap());
        let said = resumed.err().unwrap().to_string();
        assert_eq!(said, "load 'mine': there is no job file mine.fio");
        assert_eq!(files(), before);
    }

    #[test]
    fn a_job_file_that_wants_more_than_a_disk_has_that_was_scaled_is_refused() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("mine.fio"), "[mine]\nsize=32M\n").unwrap();
        let plan = "name = 'p'\ntitle = 't'\n[disk]\ntype = 'file'\nsize = '64M'\n[[subject]]\nname = 's'\nstack = 'host'\n\
                    optional = true\n[[load]]\njobfile = 'mine.fio'\n";
        let plan = Plan::read("p", plan, place.path()).unwrap();
        let check = |scale| check(&plan.clone().scaled(scale), &options(place.path()));
        assert_eq!(check(0.5), Ok(()));
        assert_eq!(check(0.25).unwrap_err(), "load 'mine.fio': size = 32M, and the plan's disk has 16M");
    }

    /// Stands by, and does what a job file may; and who interrupts the lab then.
    struct Longer(PathBuf, Arc<AtomicUsize>, Option<Arc<ProcessReaper>>);
    impl Deployment for Longer {
        fn takes(&self, _: &Load) -> bool {
            true
        }
        fn measure(&mut self, _: &Task<'_>) -> Result<Measurement, Unable> {
            self.1.fetch_add(1, Ordering::Relaxed);
            fs::File::options().write(true).open(&self.0).unwrap().set_len(2 << 20).unwrap();
            self.2.iter().for_each(|reaper| reaper.stop());
            Ok(Measurement::default())
        }
    }

    /// A run of one cell for each of two subjects that stand by, how many of them were measured, and how long the disk is that
    /// they had then.
    fn run_that_outgrows_its_disk(is_interrupted: bool) -> (Run, usize, u64) {
        let place = tempfile::tempdir().unwrap();
        let subjects = ["a", "b"].map(|name| format!("[[subject]]\nname = '{name}'\nstack = 'egret'\n")).concat();
        let plan = format!(
            "name = 'p'\ntitle = 't'\nrepetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '1M'\n{subjects}\
             [[load]]\nname = 'mine'\njobfile = 'mine.fio'\n"
        );
        let reaper = ProcessReaper::new().unwrap();
        let mut runner = Runner::begin(toml::from_str(&plan).unwrap(), &options(place.path()), &reaper).unwrap();
        let (disk, measured) = (runner.disks.disks[0].path().unwrap().to_owned(), Arc::default());
        for subject in [0, 1] {
            let interrupts = is_interrupted.then(|| Arc::clone(&reaper));
            runner.kept.insert(subject, Box::new(Longer(disk.clone(), Arc::clone(&measured), interrupts)));
        }
        runner.go(&mut Silence).unwrap();
        (runner.run().clone(), measured.load(Ordering::Relaxed), fs::metadata(disk).unwrap().len())
    }

    #[test]
    fn who_stands_by_with_a_disk_that_had_to_be_filled_anew_is_not_measured_on_the_one_before() {
        let (run, measured, length) = run_that_outgrows_its_disk(false);
        assert_eq!((measured, length), (1, 1 << 20));
        let failed = |cell: &&Cell| cell.failure() == Some("the disk had 1048576 bytes before, and 2097152 afterwards");
        assert_eq!(run.cells.iter().filter(failed).count(), 1, "{:?}", run.cells);
    }

    #[test]
    fn a_run_that_is_interrupted_fills_no_disk_anew() {
        let (run, measured, length) = run_that_outgrows_its_disk(true);
        assert_eq!((run.cells.len(), measured, length), (0, 1, 2 << 20));
    }

    #[test]
    fn what_is_left_is_told_by_what_cells_took_and_a_job_files_by_what_it_took_before() {
        let plan = Run::of(
            "name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n[[subject]]\nname = 's'\nstack = 'host'\n\
             [[load]]\nname = 'own'\nramp_time = 0\nruntime = '700ms'\n[[load]]\nname = 'mine'\njobfile = 'mine.fio'\n",
        )
        .plan;
        let steps = steps(&plan, 0, None);
        let (second, mut pace) = (Duration::from_secs(1), Pace::default());
        assert_eq!((duration(&plan, &steps), pace.of(&plan, &steps)), (second * 10, second * 10));
        pace.ended(&plan, 1, second * 60);
        assert_eq!(pace.of(&plan, &steps), second * (10 + 10 * 60));
        pace.ended(&plan, 0, second * 2);
        assert_eq!(pace.of(&plan, &steps), second * (20 + 10 * 60));
    }

    #[test]
    fn all_subjects_are_measured_at_shares_of_one_peak() {
        let plan = "name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n[[subject]]\nname = 'h'\nstack = 'host'\n\
                    [[subject]]\nname = 'a'\nstack = 'egret'\n[[subject]]\nname = 'b'\nstack = 'egret'\n\
                    [[load]]\ncurve = { from = 10, to = 90, points = 3 }\n";
        let cell = |subject: &str, repetition, requests| {
            let id = CellId { load: "randread 4k QD1 curve".into(), subject: subject.into(), repetition, point: 0 };
            cell(id, requests)
        };
        let mut run = Run::of(plan);
        // The host is the baseline, and has a second name.
        run.cells =
            vec![cell("h", 0, 900), cell("h (again)", 0, 950), cell("a", 0, 100), cell("b", 0, 300), cell("b", 1, 400)];
        let load = run.plan.loads[0].clone();
        assert_eq!(peak(&run, &load), Ok(300.0));
        let first = run.clone();
        run.cells.clear();
        assert!(peak(&run, &load).is_err());
        let name = load.name.as_str();
        assert_eq!(peaks(&run, [name]), Err("it has measured no peak of 'randread 4k QD1 curve'".into()));
        assert_eq!(peaks(&first, ["another"]), Err("it has measured no peak of 'another'".into()));
        // A second run, whose own peak is another one, and a third after it are measured at the first one's rates.
        run.peaks = peaks(&first, [name]).unwrap();
        run.cells = vec![cell("a", 0, 500)];
        assert_eq!(peak(&run, &load), Ok(300.0));
        assert_eq!(peaks(&run, [name]), Ok(run.peaks.clone()));
    }
}
