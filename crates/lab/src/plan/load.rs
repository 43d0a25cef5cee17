//! What subjects are put under: fio's words, with lists for a matrix.

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::units::{Bytes, OneOrMany, Seconds};

/// A load as a plan spells it. Keys with several values make a load for each combination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoadKeys {
    /// What the report calls it, where it is one; `randread 4k QD1` and the like without it.
    pub name: Option<String>,
    /// The subjects that it is put on, by name; all of them if there are none. Where the plan's baseline is not among
    /// them, the first is theirs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub subjects: Vec<String>,
    /// `read`, `write`, `rw`, `randread`, `randwrite` or `randrw`.
    pub rw: OneOrMany<String>,
    /// The length of a request.
    pub bs: OneOrMany<Bytes>,
    /// Requests in flight, for each job.
    pub iodepth: OneOrMany<u16>,
    /// Jobs, each with a queue and a core of its own as far as there are cores.
    pub numjobs: OneOrMany<u16>,
    /// The share of reads where there are both, in percent.
    pub rwmixread: OneOrMany<u8>,
    /// Disks that are connected and idle beside the one under load.
    pub idle_disks: OneOrMany<u16>,
    /// Disks under load at the same time.
    pub disks: OneOrMany<u16>,
    /// Whether each job goes over all the disks in turns, as fio's with several file names; without it each disk has jobs
    /// of its own. Only where fio makes the load.
    #[serde(skip_serializing_if = "no")]
    pub across_disks: bool,
    /// Whether fio's jobs are processes instead of threads.
    #[serde(skip_serializing_if = "no")]
    pub processes: bool,
    /// Queues of each disk; as many as there are jobs without it.
    pub queues: Option<u16>,
    /// An open loop at this rate, in requests per second for each job and disk. A closed loop without it.
    pub rate_iops: Option<f64>,
    /// How an open loop's requests are spaced.
    pub rate_process: RateProcess,
    /// Latency as load rises: the closed loop's peak first, then open loops at shares of it.
    pub curve: Option<Curve>,
    /// Whether random addresses may come twice before all came once.
    pub norandommap: bool,
    /// How much of the disk is used; all of it without this.
    pub size: Option<Bytes>,
    /// Whether what the load writes, where it is the lab's own, is checked when it is read, and all of it at the end.
    pub verify: bool,
    /// Whether the load, where it is the lab's own, waits by looking again and again instead of sleeping.
    pub polling: bool,
    /// What is not measured, at first.
    pub ramp_time: Seconds,
    /// What is.
    pub runtime: Seconds,
    /// fio's own job file, on the stacks that take fio. All keys above but `name` and `subjects` are then the job file's.
    pub jobfile: Option<PathBuf>,
    /// An application in a guest instead of fio, on a file system on the disk: `rsync` of small files of `size` together, or
    /// `pgbench` with `iodepth` clients in `numjobs` threads on a database of about `size`.
    pub application: Option<Application>,
}

/// The keys that pgbench reads.
const PGBENCHS: &[&str] =
    &["application", "size", "idle_disks", "iodepth", "numjobs", "rate_iops", "curve", "ramp_time", "runtime"];

/// What runs in a guest beside fio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Application {
    /// Copies a tree of small files.
    Rsync,
    /// PostgreSQL's own benchmark.
    Pgbench,
}

/// How an open loop's requests are spaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateProcess {
    /// As many independent users make them.
    #[default]
    Poisson,
    /// All gaps alike.
    Fixed,
}

/// Shares of a closed loop's peak at which latency is measured, in percent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// The first.
    pub from: f64,
    /// The last.
    pub to: f64,
    /// How many there are.
    pub points: u32,
}

impl Default for LoadKeys {
    fn default() -> Self {
        Self {
            name: None,
            subjects: Vec::new(),
            rw: OneOrMany::One("randread".into()),
            bs: OneOrMany::One(Bytes(4096)),
            iodepth: OneOrMany::One(1),
            numjobs: OneOrMany::One(1),
            rwmixread: OneOrMany::One(50),
            idle_disks: OneOrMany::One(0),
            disks: OneOrMany::One(1),
            across_disks: false,
            processes: false,
            queues: None,
            rate_iops: None,
            rate_process: RateProcess::default(),
            curve: None,
            norandommap: true,
            size: None,
            verify: false,
            polling: false,
            ramp_time: Seconds(1.0),
            runtime: Seconds(5.0),
            jobfile: None,
            application: None,
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn no(said: &bool) -> bool {
    !*said
}

/// One load: no lists left.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// What the report calls it.
    pub name: String,
    /// As fio spells it.
    pub rw: String,
    /// The length of a request.
    pub bs: Bytes,
    /// Requests in flight, for each job.
    pub iodepth: u16,
    /// Jobs.
    pub numjobs: u16,
    /// The share of reads where there are both, in percent.
    pub rwmixread: u8,
    /// Disks that are connected and idle.
    pub idle_disks: u16,
    /// Disks under load.
    pub disks: u16,
    /// All the rest, as the plan has it.
    pub keys: LoadKeys,
}

/// The loads that `keys` stand for, the first key's values outermost.
pub fn expand(keys: &LoadKeys) -> Vec<Load> {
    let mut loads = Vec::new();
    for rw in keys.rw.all() {
        for bs in keys.bs.all() {
            for iodepth in keys.iodepth.all() {
                for numjobs in keys.numjobs.all() {
                    for rwmixread in keys.rwmixread.all() {
                        for idle_disks in keys.idle_disks.all() {
                            for disks in keys.disks.all() {
                                let mut load = Load {
                                    name: String::new(),
                                    rw: rw.clone(),
                                    bs: *bs,
                                    iodepth: *iodepth,
                                    numjobs: *numjobs,
                                    rwmixread: *rwmixread,
                                    idle_disks: *idle_disks,
                                    disks: *disks,
                                    keys: keys.clone(),
                                };
                                load.name = keys.name.clone().unwrap_or_else(|| load.described());
                                loads.push(load);
                            }
                        }
                    }
                }
            }
        }
    }
    loads
}

/// A plan's loads: one by one, as everybody but the plan's text wants them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<LoadKeys>", into = "Vec<LoadKeys>")]
pub struct Loads {
    keys: Vec<LoadKeys>,
    /// What the keys stand for, expanded when they were read or changed.
    all: Vec<Load>,
}

impl Loads {
    /// Changes them as the plan spells them.
    pub fn change(&mut self, change: impl FnOnce(&mut Vec<LoadKeys>)) {
        change(&mut self.keys);
        self.all = self.keys.iter().flat_map(expand).collect();
    }

    /// The one of this name.
    pub fn named(&self, name: &str) -> Option<&Load> {
        self.all.iter().find(|load| load.name == name)
    }
}

impl From<Vec<LoadKeys>> for Loads {
    fn from(keys: Vec<LoadKeys>) -> Self {
        Self { all: keys.iter().flat_map(expand).collect(), keys }
    }
}

impl From<Loads> for Vec<LoadKeys> {
    fn from(loads: Loads) -> Self {
        loads.keys
    }
}

impl Deref for Loads {
    type Target = [Load];

    fn deref(&self) -> &[Load] {
        &self.all
    }
}

impl Load {
    /// `randrw70 4k QD8 x16`: what is as usual goes without saying.
    fn described(&self) -> String {
        let curve = if self.keys.curve.is_some() { " curve" } else { "" };
        match self.keys.application {
            Some(Application::Pgbench) => return format!("pgbench {} clients{curve}", self.iodepth),
            Some(Application::Rsync) => return "rsync".into(),
            None => {}
        }
        // Of results whose plan was read before a file's own name was put in the load's place.
        if let Some(path) = &self.keys.jobfile {
            return path.display().to_string();
        }
        let mix = if self.rw.ends_with("rw") { self.rwmixread.to_string() } else { String::new() };
        let mut name = format!("{}{mix} {} QD{}", self.rw, self.bs, self.iodepth);
        let more = [(self.numjobs, 1, "jobs"), (self.disks, 1, "disks"), (self.idle_disks, 0, "idle disks")];
        for (count, usual, of) in more {
            if count != usual {
                name += &format!(" {count} {of}");
            }
        }
        let across = if self.keys.across_disks { " across" } else { "" };
        let processes = if self.keys.processes { " processes" } else { "" };
        name + across + processes + curve
    }

    /// The points of its curve, if it has one.
    pub fn points(&self) -> u32 {
        self.keys.curve.map_or(0, |curve| curve.points)
    }

    /// How many groups of `numjobs` jobs it has: one for each disk, or one that goes across all of them.
    pub fn groups(&self) -> u16 {
        if self.keys.across_disks { 1 } else { self.disks }
    }

    /// How many requests it has in flight, as its keys say: a job file may say otherwise.
    pub fn in_flight(&self) -> u32 {
        u32::from(self.iodepth) * u32::from(self.numjobs) * u32::from(self.groups())
    }

    /// How long it takes by its keys, ramp and all: how long a job file takes only its author knows.
    pub fn span(&self) -> Duration {
        self.keys.ramp_time.duration() + self.keys.runtime.duration()
    }

    /// Whether it is put on that subject.
    pub fn is_put_on(&self, subject: &str) -> bool {
        self.keys.subjects.is_empty() || self.keys.subjects.iter().any(|name| name == subject)
    }

    /// That its job file is there, if it has one, uses no other disk than it is run on, leaves that its I/O scheduler, and says
    /// which of its jobs run side by side.
    ///
    /// # Errors
    /// It is not there, or is not so, in one line.
    pub fn check_job_file(&self) -> Result<(), String> {
        let Some(path) = &self.keys.jobfile else { return Ok(()) };
        let complain = |what: String| Err(format!("load '{}': {what}", self.name));
        if !path.is_file() {
            return complain(format!("there is no job file {}", path.display()));
        }
        // Whoever runs it says what else is wrong with it.
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let path = path.display();
        if let Some(key) = crate::stack::fio::goes_elsewhere(&text) {
            return complain(format!(
                "{path} has {key}, by which fio uses something else than the disk that it is run on, the plan's, or removes it: leave it out"
            ));
        }
        if crate::stack::fio::changes_the_scheduler(&text) {
            return complain(format!(
                "{path} has ioscheduler, which fio does not undo: leave it out; on the stacks host and guest a subject's scheduler says it"
            ));
        }
        crate::stack::fio::hides_its_order(&text).map_or(Ok(()), |key| {
            complain(format!(
                "{path} has {key}, and fio does not say which of its jobs ran side by side: jobs that take turns have stonewall"
            ))
        })
    }

    /// A key that has no effect, and what it stands beside: a job file says all but the name and the subjects, and an application
    /// reads few others.
    pub fn has_no_effect(&self) -> Option<(String, &'static str)> {
        let (beside, has_effect): (_, &[&str]) = match (&self.keys.jobfile, self.keys.application) {
            (Some(_), _) => ("a jobfile, which says all but name and subjects", &["jobfile"]),
            (None, Some(Application::Rsync)) => ("rsync", &["application", "size", "idle_disks"]),
            (None, Some(Application::Pgbench)) => ("pgbench", PGBENCHS),
            (None, None) => return None,
        };
        let table = |keys: &LoadKeys| toml::Table::try_from(keys).unwrap_or_default();
        let usual = table(&LoadKeys::default());
        let is_said = |key: &str, value: &toml::Value| usual.get(key) != Some(value);
        let mut keys = table(&self.keys).into_iter();
        let has_none = |key: &str| !["name", "subjects"].contains(&key) && !has_effect.contains(&key);
        keys.find(|(key, value)| has_none(key) && is_said(key, value)).map(|(key, _)| (key, beside))
    }

    /// Whether it writes, or may.
    pub fn writes(&self) -> bool {
        if let Some(path) = &self.keys.jobfile {
            return std::fs::read_to_string(path).map_or(true, |text| crate::stack::fio::may_write(&text));
        }
        self.keys.application.is_some() || !matches!(self.rw.as_str(), "read" | "randread")
    }
}
