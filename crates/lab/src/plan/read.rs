//! Plans from files, and those that are built in.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use egret_loadgen::load::Rw;
use egret_vocabulary::nearest::nearest;

use super::{Backend, Bytes, DeviceModel, DiskKind, Load, Pages, Plan, Seconds, Server, Stack, Subject};
use crate::analysis::chart::anchor;
use crate::disks;
use crate::stack::fio;

/// What is wrong with a plan: `FILE:LINE: what`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlanError(String);

/// More cells nobody waits for, and they are listed before the first is measured.
const MOST_CELLS: u64 = 1_000_000;
/// Of a job on a disk: more than any makes, and all that was due is looked at.
const MOST_IOPS: f64 = 1e7;
/// Of a peak.
const MOST_PERCENT: f64 = 1000.0;
const MOST_THREADS: u32 = 1024;

macro_rules! built_in {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("../../../../plans/", $name, ".toml")))),*]
    };
}

/// Plans that are always there, by name; the first is what is run when none is named.
pub const BUILT_IN: &[(&str, &str)] = built_in!(
    "quick",
    "modes",
    "curve",
    "guest",
    "iothreads",
    "virtio",
    "pages",
    "apps",
    "polling",
    "qemu",
    "plug",
    "scheduler",
    "devices",
    "remote"
);

impl Plan {
    /// A plan by the name of a built-in one, or by the path of a file.
    ///
    /// # Errors
    /// There is none, or it is wrong.
    pub fn named(name: &str) -> Result<Self, PlanError> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return Self::read(name, text, Path::new("."));
        }
        let path = Path::new(name);
        if !path.is_file() {
            let names = BUILT_IN.iter().map(|(name, _)| *name);
            let nearest = nearest(name, names.clone()).map_or(String::new(), |near| format!("did you mean '{near}'? "));
            let all = names.collect::<Vec<_>>().join(", ");
            return Err(PlanError(format!(
                "no plan '{name}': neither a file nor built in; {nearest}built in are {all}"
            )));
        }
        let text = std::fs::read_to_string(path).map_err(|error| PlanError(format!("{name}: {error}")))?;
        Self::read(name, &text, path.parent().unwrap_or(Path::new(".")))
    }

    /// Reads a plan's text, which errors call `name`. Relative paths of job files begin at `directory`.
    ///
    /// # Errors
    /// It is wrong, and where.
    pub fn read(name: &str, text: &str, directory: &Path) -> Result<Self, PlanError> {
        let mut plan: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start).min(text.len());
            let line = 1 + text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
            PlanError(format!("{name}:{line}: {}", explained(error.message())))
        })?;
        // By their whole paths, as runs are resumed elsewhere.
        let found = |path: &Path| {
            let path = directory.join(path);
            std::path::absolute(&path).unwrap_or(path)
        };
        plan.loads.change(|loads| {
            for keys in loads.iter_mut() {
                let Some(path) = &mut keys.jobfile else { continue };
                // A run is compared with others, whose job file was found elsewhere.
                let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
                keys.name = keys.name.take().or(name);
                *path = found(path);
            }
        });
        for qemu in plan.subjects.iter_mut().filter_map(|subject| subject.qemu.as_mut()) {
            // A word without a slash is a name.
            if qemu.components().count() > 1 {
                *qemu = found(qemu);
            }
        }
        plan.spread_over_hosts();
        plan.check().map_err(|what| PlanError(format!("{name}: {what}")))?;
        Ok(plan)
    }

    /// Puts every subject on each of the plan's hosts.
    fn spread_over_hosts(&mut self) {
        let Some(first) = self.hosts.first() else { return };
        let on = |name: &str, host: &str| format!("{name} @ {host}");
        self.baseline = self.baseline.as_ref().map(|baseline| on(baseline, first));
        let subjects = self.subjects.iter().flat_map(|subject| {
            self.hosts.iter().map(|host| Subject {
                name: on(&subject.name, host),
                host: Some(host.clone()),
                ..subject.clone()
            })
        });
        self.subjects = subjects.collect();
        let spread = |names: &mut Vec<String>| {
            *names = names.iter().flat_map(|name| self.hosts.iter().map(|host| on(name, host))).collect();
        };
        self.charts.iter_mut().for_each(|chart| spread(&mut chart.subjects));
        self.loads.change(|loads| loads.iter_mut().for_each(|keys| spread(&mut keys.subjects)));
    }

    fn check(&self) -> Result<(), String> {
        if self.repetitions == 0 || self.subjects.is_empty() || self.loads.is_empty() {
            return Err("a plan needs at least one repetition, one subject and one load".into());
        }
        if let Some(most) = self.most_repetitions.filter(|most| *most < self.repetitions) {
            return Err(format!("most-repetitions must be at least repetitions, {}, got {most}", self.repetitions));
        }
        if !(self.threshold > 0.0 && self.threshold < 1.0) {
            return Err(format!("threshold must be a share between 0 and 1, got {}", self.threshold));
        }
        let subjects = distinct("subject", self.subjects.iter().map(|subject| subject.name.as_str()))?;
        if let Some(baseline) = &self.baseline {
            known("baseline", baseline, &subjects)?;
        }
        self.subjects.iter().try_for_each(check_subject)?;
        self.subjects.iter().try_for_each(|subject| crate::disks::check_backend(self, subject))?;
        let names = distinct("load", self.loads.iter().map(|load| load.name.as_str()))?;
        self.loads.iter().try_for_each(check_load)?;
        for load in self.loads.iter() {
            let who = format!("load '{}'", load.name);
            load.keys.subjects.iter().try_for_each(|subject| known(&who, subject, &subjects))?;
            self.check_fios(load)?;
        }
        distinct("chart", self.charts.iter().map(|chart| chart.id.as_str()))?;
        for chart in &self.charts {
            let id = format!("chart '{}'", chart.id);
            chart.loads.iter().try_for_each(|load| known(&id, load, &names))?;
            chart.subjects.iter().try_for_each(|subject| known(&id, subject, &subjects))?;
            if chart.under.is_some() && !self.loads.iter().any(|load| chart.shows(load)) {
                return Err(format!("{id} shows no load: none asks for what stands in its 'under'"));
            }
        }
        if self.disk.kind == DiskKind::Device && self.disk.path.is_none() {
            return Err("a disk of type 'device' needs its path".into());
        }
        if self.disk.kind != DiskKind::Device && self.disk.paths().len() > 1 {
            return Err("only a disk of type 'device' has several paths: files are made in one directory".into());
        }
        let cells = self.loads.iter().map(|load| {
            let subjects = self.subjects.iter().filter(|one| load.is_put_on(&one.name)).count() as u64;
            (subjects + 1) * (1 + u64::from(load.points()))
        });
        let cells = cells.fold(0, u64::saturating_add).saturating_mul(self.most_repetitions().into());
        if cells > MOST_CELLS {
            return Err(format!(
                "repetitions, loads, subjects and points make {cells} cells, and at most {MOST_CELLS} are measured"
            ));
        }
        self.check_hosts()
    }

    /// That what fio alone can is asked of fio alone, and what it cannot of others too; and that no guest is asked for queues.
    fn check_fios(&self, load: &Load) -> Result<(), String> {
        let on = || self.subjects.iter().filter(|subject| load.is_put_on(&subject.name));
        let keys = [("queues", load.keys.queues.is_some()), ("polling", load.keys.polling)];
        if let Some((key, _)) = keys.iter().find(|(_, is_said)| *is_said && on().all(|one| one.stack.is_fios())) {
            return Err(format!("load '{}': {key} is of the lab's own load, and it is put on fio alone", load.name));
        }
        if let Some(guest) = on().find(|one| one.stack == Stack::Guest && load.keys.queues.is_some()) {
            let (load, guest) = (&load.name, &guest.name);
            return Err(format!(
                "load '{load}': queues has no effect on '{guest}': a guest's disks have one for each of vcpus"
            ));
        }
        if load.keys.verify {
            self.check_verifies(load)?;
        }
        self.check_engines(load)?;
        self.check_size(load)?;
        let key = match (load.keys.across_disks, load.keys.processes) {
            (true, _) => "across_disks",
            (false, true) => "processes",
            (false, false) => return Ok(()),
        };
        match on().find(|one| !one.stack.is_fios()) {
            None => Ok(()),
            Some(subject) => Err(format!(
                "load '{}': {key} is fio's, of the stacks host, guest and ssh, and it is put on '{}'",
                load.name, subject.name
            )),
        }
    }

    /// That a load, or its job file, uses no more of a disk that the lab makes than there is: fio makes a file longer.
    ///
    /// # Errors
    /// It does, in one line.
    pub fn check_size(&self, load: &Load) -> Result<(), String> {
        let disk = Bytes(disks::size(&self.disk));
        let is_on_it = |one: &Subject| one.stack != Stack::Ssh && !matches!(one.backend, Backend::Server(_));
        let is_made = self.disk.kind != DiskKind::Device
            && self.subjects.iter().any(|one| load.is_put_on(&one.name) && is_on_it(one));
        // Of a device, which a guest's disk is, fio takes what there is; a loop device may turn out to be a file. On other hosts
        // the file goes with the cell.
        let is_file = |one: &Subject| one.stack == Stack::Host && one.backend == Backend::Local;
        let is_outgrown =
            self.hosts.is_empty() && self.subjects.iter().any(|one| load.is_put_on(&one.name) && is_file(one));
        let path = load.keys.jobfile.as_ref().filter(|_| is_outgrown);
        let job_file = path.map(|path| std::fs::read_to_string(path).unwrap_or_default());
        let sizes = fio::sizes(job_file.as_deref().unwrap_or_default()).chain(load.keys.size);
        match sizes.max().filter(|size| is_made && *size > disk) {
            Some(size) => Err(format!("load '{}': size = {size}, and the plan's disk has {disk}", load.name)),
            None => Ok(()),
        }
    }

    /// That a job file leaves the engine to a subject that says which.
    fn check_engines(&self, load: &Load) -> Result<(), String> {
        let Some(path) = &load.keys.jobfile else { return Ok(()) };
        let text = std::fs::read_to_string(path).unwrap_or_default();
        for subject in self.subjects.iter().filter(|one| one.stack == Stack::Host && load.is_put_on(&one.name)) {
            let Some(aio) = subject.blockdev.get("aio").and_then(|aio| aio.as_str()) else { continue };
            if let Some(engine) = fio::other_engine(&text, fio::engine(Some(aio))) {
                return Err(format!(
                    "load '{}': aio = \"{aio}\" of '{}' has no effect: {} has ioengine={engine}; leave out one of them",
                    load.name,
                    subject.name,
                    path.display()
                ));
            }
        }
        Ok(())
    }

    /// That a load that verifies finds on its disks what it has written itself, or else a disk is wrong.
    fn check_verifies(&self, load: &Load) -> Result<(), String> {
        let complain = |what: &str| Err(format!("load '{}': {what}", load.name));
        if let Some(fio) = self.subjects.iter().find(|one| one.stack.is_fios() && load.is_put_on(&one.name)) {
            // fio reads back within the runtime, and counts that among the reads; and under norandommap it does not know which
            // of two writes was the last.
            return complain(&format!(
                "verify is of the lab's own load, and it is put on '{}': leave that out of its subjects, or have a job file verify",
                fio.name
            ));
        }
        if !load.writes() {
            return complain("verify checks what the load itself has written, and it only reads");
        }
        if self.disk.kind == DiskKind::Null {
            return complain("verify needs a disk that keeps what is written, and a null disk does not");
        }
        Ok(())
    }

    fn check_hosts(&self) -> Result<(), String> {
        if self.hosts.is_empty() {
            return match self.subjects.iter().find(|subject| subject.host.is_some()) {
                Some(subject) => Err(format!("subject '{}': its host comes from the plan's hosts", subject.name)),
                None => Ok(()),
            };
        }
        if let Some(other) = self.subjects.iter().find(|subject| subject.stack != Stack::Host) {
            return Err(format!("subject '{}': what runs on other hosts is fio, of the stack host", other.name));
        }
        match self.disk.kind {
            DiskKind::File | DiskKind::Device if self.disk.path.is_some() => Ok(()),
            _ => Err("on other hosts a disk is a device, or a file in a directory, and has a path there".into()),
        }
    }

    /// Shrinks, or stretches, sizes and times evenly.
    #[must_use]
    pub fn scaled(mut self, scale: f64) -> Self {
        let size = |bytes: Bytes, least: u64| Bytes((((bytes.0 as f64 * scale) as u64) >> 20 << 20).max(least));
        let time = |seconds: Seconds| Seconds(seconds.0 * scale);
        // The smallest database and its log need room.
        let has_application = self.loads.iter().any(|load| load.keys.application.is_some());
        let least = if has_application { 256 << 20 } else { 16 << 20 };
        if self.disk.kind != DiskKind::Device {
            // One that the plan does not name, too, or loads would outgrow it.
            self.disk.size = Some(size(self.disk.size.unwrap_or(Bytes(disks::SIZE)), least))
                .filter(|_| scale != 1.0)
                .or(self.disk.size);
        }
        self.loads.change(|loads| {
            for keys in loads.iter_mut().filter(|keys| keys.jobfile.is_none()) {
                let longest = keys.bs.all().iter().map(|bs| bs.0).max().unwrap_or(0);
                keys.size = keys.size.map(|bytes| size(bytes, (1 << 20).max(longest)));
                (keys.runtime, keys.ramp_time) = (time(keys.runtime), time(keys.ramp_time));
            }
        });
        self
    }

    /// With the times and the size of one of its profiles.
    ///
    /// # Errors
    /// It has none of this name.
    pub fn with_profile(mut self, name: &str) -> Result<Self, PlanError> {
        let Some(profile) = self.profiles.get(name).copied() else {
            let known = self.profiles.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let known = if known.is_empty() { "none".into() } else { known };
            return Err(PlanError(format!("{} has no profile '{name}': it has {known}", self.name)));
        };
        let is_device = self.disk.kind == DiskKind::Device;
        if !is_device {
            self.disk.size = profile.size.or(self.disk.size);
        }
        self.loads.change(|loads| {
            for keys in loads.iter_mut().filter(|keys| keys.jobfile.is_none()) {
                (keys.ramp_time, keys.runtime) = (profile.ramp_time, profile.runtime);
                // An application's is of its files.
                if is_device && keys.application.is_none() {
                    keys.size = profile.size.or(keys.size);
                }
            }
        });
        Ok(self)
    }

    /// Has a QEMU that subjects name be the one at `path`.
    ///
    /// # Errors
    /// No subject names it.
    pub fn place_qemu(&mut self, name: &str, path: &Path) -> Result<(), String> {
        let named = |subject: &&mut Subject| subject.stack == Stack::Guest && subject.qemu() == Path::new(name);
        let mut found = false;
        for subject in self.subjects.iter_mut().filter(named) {
            subject.qemu = Some(path.into());
            found = true;
        }
        if found { Ok(()) } else { Err(format!("no subject of {} has qemu = \"{name}\"", self.name)) }
    }

    /// With every subject set up as the baseline that it is compared with, by whatever name, so that nothing is there to be
    /// found. fio on the host stays what it is beside another baseline: it says how much the disk can do.
    #[must_use]
    pub fn all_alike(mut self) -> Self {
        let is_host = |name: &str| self.subject(name).is_some_and(|subject| subject.stack == Stack::Host);
        // Subjects that are compared with each other, if only by way of others, and the one that all of them become.
        let mut groups: Vec<(BTreeSet<&str>, &str)> = Vec::new();
        for load in self.loads.iter() {
            let mut model = self.baseline_under(load);
            let names = self.subjects.iter().map(|subject| subject.name.as_str());
            let mut names: BTreeSet<&str> =
                names.filter(|name| load.is_put_on(name) && (is_host(model) || !is_host(name))).collect();
            groups.retain(|(others, of_others)| {
                let apart = others.is_disjoint(&names);
                if !apart {
                    names.extend(others);
                    model = if model == self.baseline() { model } else { *of_others };
                }
                apart
            });
            groups.push((names, model));
        }
        let alike = self.subjects.iter().map(|subject| {
            let group = groups.iter().find(|(names, _)| names.contains(subject.name.as_str()));
            let model = group.and_then(|(_, model)| self.subject(model)).unwrap_or(subject).clone();
            Subject { name: subject.name.clone(), line: subject.line.clone(), at: subject.at, ..model }
        });
        self.subjects = alike.collect();
        self.title += " (every subject is set up as its baseline)";
        self
    }

    /// The plan without some subjects, and without what is of them alone.
    pub(crate) fn leave_out(&mut self, names: &[String]) {
        let stays = |name: &String| !names.contains(name);
        self.subjects.retain(|subject| stays(&subject.name));
        self.loads.change(|loads| {
            // A load that names no subject is put on all of them.
            loads.retain(|keys| keys.subjects.is_empty() || keys.subjects.iter().any(stays));
            loads.iter_mut().for_each(|keys| keys.subjects.retain(stays));
        });
        self.charts.retain(|chart| chart.subjects.is_empty() || chart.subjects.iter().any(stays));
        self.charts.iter_mut().for_each(|chart| chart.subjects.retain(stays));
    }

    /// How often a cell is measured at most.
    pub fn most_repetitions(&self) -> u32 {
        self.most_repetitions.unwrap_or(self.repetitions).max(self.repetitions)
    }

    /// The subject of this name.
    pub fn subject(&self, name: &str) -> Option<&Subject> {
        self.subjects.iter().find(|subject| subject.name == name)
    }

    /// The subject that the others are compared with.
    pub fn baseline(&self) -> &str {
        self.baseline.as_deref().or_else(|| self.subjects.first().map(|first| first.name.as_str())).unwrap_or_default()
    }

    /// The subject that the others are compared with under a load: the plan's, or the first that the load names.
    pub fn baseline_under<'a>(&'a self, load: &'a Load) -> &'a str {
        let first = load.keys.subjects.first().filter(|_| !load.is_put_on(self.baseline()));
        first.map_or(self.baseline(), String::as_str)
    }
}

/// Checks that no two names are equal, or so alike that one of them would have the other's files and links.
fn distinct<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<BTreeSet<&'a str>, String> {
    let mut all = BTreeMap::new();
    for name in names {
        match all.insert(anchor(what, name), name) {
            Some(other) if other == name => {
                return Err(format!("two {what}s are called '{name}'; give one of them another name"));
            }
            Some(other) => {
                return Err(format!(
                    "two {what}s are called '{other}' and '{name}', which have one name in files and links; give one of \
                     them another name"
                ));
            }
            None => {}
        }
    }
    Ok(all.into_values().collect())
}

fn known(who: &str, name: &str, names: &BTreeSet<&str>) -> Result<(), String> {
    if names.contains(name) {
        return Ok(());
    }
    let hint = nearest(name, names.iter().copied()).map_or(String::new(), |near| format!("; did you mean '{near}'?"));
    Err(format!("{who} names '{name}', which is not in the plan{hint}"))
}

fn check_subject(subject: &Subject) -> Result<(), String> {
    let complain = |what: &str| Err(format!("subject '{}': {what}", subject.name));
    if subject.iothreads > MOST_THREADS {
        return complain(&format!("iothreads must be at most {MOST_THREADS}, got {}", subject.iothreads));
    }
    match (subject.stack, &subject.command) {
        (Stack::VhostUserBlk, None) => complain("the stack vhost-user-blk needs a command, with {socket} in it"),
        (Stack::VhostUserBlk, Some(command)) if !command.contains("{socket}") => {
            complain("its command does not say {socket}, so nobody would know where it listens")
        }
        (Stack::VhostUserBlk, Some(_)) | (_, None) => Ok(()),
        (_, Some(_)) => complain("only the stack vhost-user-blk has a command"),
    }?;
    if subject.qemu.is_some() && subject.stack != Stack::Guest {
        return complain("only the stack guest has a qemu");
    }
    if let Some(scheduler) = &subject.scheduler {
        if !matches!(subject.stack, Stack::Host | Stack::Guest) {
            return complain("only the stacks host and guest have a scheduler");
        }
        // It stands in a script for a guest's shell.
        if scheduler.is_empty() || !scheduler.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        {
            return complain("a scheduler is a word, such as none or mq-deadline");
        }
    }
    if let Some(what) = has_no_effect(subject) {
        return complain(&what);
    }
    if subject.stack == Stack::Ssh {
        return crate::stack::ssh_complaint(subject).map_or(Ok(()), complain);
    }
    if subject.client.is_some() || subject.disk.is_some() || subject.domain.is_some() || subject.monitor.is_some() {
        return complain("only the stack ssh has a client, a disk, a domain and a monitor");
    }
    Ok(())
}

/// What a subject says that its stack has no use for: who wrote it believes that it was measured.
fn has_no_effect(subject: &Subject) -> Option<String> {
    use Stack::{Egret, Guest, Host, QemuStorageDaemon, VhostUserBlk};
    let serves = [Egret, QemuStorageDaemon, Guest].as_slice();
    let guest = [Guest].as_slice();
    let is_qemus = subject.stack == Guest && subject.server == Server::Qemu;
    let keys: [(&str, bool, &[Stack]); 9] = [
        ("iothreads", subject.iothreads != 1, serves),
        ("iothread", !subject.iothread.is_empty(), serves),
        ("blockdev", !subject.blockdev.is_empty(), &[Host, Egret, QemuStorageDaemon, Guest]),
        ("export", !subject.export.is_empty(), if is_qemus { &[] } else { serves }),
        ("device", subject.device != DeviceModel::default(), &[Egret, QemuStorageDaemon, VhostUserBlk, Guest]),
        ("cpus", !subject.cpus.is_empty(), &[Egret, QemuStorageDaemon, VhostUserBlk, Guest]),
        ("server", subject.server != Server::default(), guest),
        ("pages", subject.pages != Pages::default(), guest),
        ("vcpus", subject.vcpus != 2, guest),
    ];
    if let Some((key, ..)) = keys.iter().find(|(_, is_said, read)| *is_said && !read.contains(&subject.stack)) {
        let stack = serde_json::to_value(subject.stack).unwrap_or_default();
        let server = if is_qemus { " whose server is QEMU" } else { "" };
        return Some(format!("{key} has no effect on the stack {}{server}", stack.as_str().unwrap_or_default()));
    }
    if subject.stack == Host && subject.blockdev.keys().any(|key| key != "aio") {
        return Some("of blockdev the stack host reads aio alone".into());
    }
    let is_egrets = subject.stack == Egret || (subject.stack == Guest && subject.server == Server::Egret);
    if subject.iothreads == 0 && is_egrets {
        // Such a subject would be one with an I/O thread by another name.
        return Some(
            "Egret has no main loop that serves: an export without an I/O thread runs on one of its own".into(),
        );
    }
    (subject.iothreads == 0 && !subject.iothread.is_empty())
        .then(|| "iothread has no effect on a server that has none: iothreads = 0".into())
}

fn check_load(load: &Load) -> Result<(), String> {
    let complain = |what: String| Err(format!("load '{}': {what}", load.name));
    if let Some((key, beside)) = load.has_no_effect() {
        return complain(format!("{key} has no effect beside {beside}"));
    }
    if load.keys.jobfile.is_some() {
        return load.check_job_file();
    }
    if let Err(error) = load.rw.parse::<Rw>() {
        return complain(error.to_string());
    }
    let counts = [("bs", load.bs.0), ("iodepth", load.iodepth.into()), ("numjobs", load.numjobs.into())];
    for (key, count) in counts.into_iter().chain([("disks", load.disks.into())]) {
        if count == 0 {
            return complain(format!("{key} must be at least 1"));
        }
    }
    if load.rwmixread > 100 {
        return complain(format!("rwmixread must be 0..=100, got {}", load.rwmixread));
    }
    if load.keys.rate_iops.is_some_and(|rate| !(rate > 0.0 && rate <= MOST_IOPS)) {
        return complain(format!("rate_iops must be above 0, and at most {MOST_IOPS}"));
    }
    if load.keys.runtime.0 <= 0.0 {
        return complain("runtime must be above 0".into());
    }
    match load.keys.curve {
        Some(curve)
            if !(curve.from > 0.0 && curve.from <= curve.to && curve.to <= MOST_PERCENT && curve.points > 0) =>
        {
            complain(format!(
                "a curve goes from a share above 0 to one that is not below it and at most {MOST_PERCENT} %, in at least one point"
            ))
        }
        Some(_) if load.keys.rate_iops.is_some() => {
            complain("a curve finds its rates by itself: leave rate_iops out".into())
        }
        _ => Ok(()),
    }
}

/// What serde says, in one line and with the nearest key where one is unknown.
fn explained(message: &str) -> String {
    let line = message.lines().collect::<Vec<_>>().join(", ");
    let Some(rest) = line.strip_prefix("unknown field `").or_else(|| line.strip_prefix("unknown variant `")) else {
        return line;
    };
    let what = if line.starts_with("unknown field") { "key" } else { "word" };
    let mut quoted = rest.split('`');
    let unknown = quoted.next().unwrap_or_default();
    let names: Vec<&str> = quoted.skip(1).step_by(2).collect();
    match nearest(unknown, names.iter().copied()) {
        Some(near) => format!("unknown {what} '{unknown}'; did you mean '{near}'?"),
        None => format!("unknown {what} '{unknown}'; known are {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::CellId;

    const PLAN: &str = "name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n[[subject]]\nname = 's'\nstack = 'egret'\n[[load]]\nbs = '4k'\n";

    fn complaint(text: &str) -> String {
        Plan::read("x.toml", text, Path::new("/nowhere")).unwrap_err().to_string()
    }

    #[test]
    fn every_built_in_plan_is_in_order() {
        for (name, text) in BUILT_IN {
            let plan = Plan::read(name, text, Path::new(".")).unwrap();
            assert_eq!(plan.name, *name);
            assert!(!plan.title.is_empty() && !plan.about.is_empty(), "{name}");
        }
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_the_nearest_one() {
        assert_eq!(
            complaint(&format!("{PLAN}iodpeth = 4\n")),
            "x.toml:10: unknown key 'iodpeth'; did you mean 'iodepth'?"
        );
        assert_eq!(
            complaint(&PLAN.replace("'egret'", "'egert'")),
            "x.toml:7: unknown word 'egert'; did you mean 'egret'?"
        );
        assert!(complaint("name = 3").starts_with("x.toml:1: "));
    }

    #[test]
    fn a_value_that_cannot_be_says_what_could() {
        assert_eq!(
            complaint(&PLAN.replace("'4k'", "['4k', '4kb']")),
            "x.toml:9: a size such as 4096, 4k, 16M or 1G, not '4kb'"
        );
        assert_eq!(
            complaint(&PLAN.replace("'4k'", "'4kb'")),
            "x.toml:9: a size such as 4096, 4k, 16M or 1G, not '4kb'"
        );
    }

    #[test]
    fn what_does_not_fit_together_is_said() {
        let load = |more: &str| complaint(&format!("{PLAN}{more}\n"));
        assert!(load("rw = 'trim'").contains("rw must be read, write"));
        assert_eq!(
            load("iodepth = [1, 1]"),
            "x.toml: two loads are called 'randread 4k QD1'; give one of them another name"
        );
        for (text, said) in [
            ("runtime = 1e300", "x.toml:10: a time such as 5, 5s, 500ms or 2m, of at most 1000h, not '1"),
            ("rate_iops = 1e300", "rate_iops must be above 0, and at most 10000000"),
            ("curve = { from = 1, to = 1e300, points = 2 }", "at most 1000 %, in at least one point"),
            ("curve = { from = 1, to = 99, points = 4000000000 }", "make 40000000010 cells, and at most 1000000 are"),
        ] {
            let error = load(text);
            assert!(error.contains(said) && error.lines().count() == 1, "{error}");
        }
        let many = complaint(&PLAN.replace("title", "repetitions = 4000000000\ntitle"));
        assert!(many.ends_with("make 8000000000 cells, and at most 1000000 are measured"), "{many}");
        let many = complaint(&PLAN.replace("'egret'", "'egret'\niothreads = 4000000000"));
        assert!(many.ends_with("iothreads must be at most 1024, got 4000000000"), "{many}");
        assert_eq!(load("runtime = 0"), "x.toml: load 'randread 4k QD1': runtime must be above 0");
        assert_eq!(
            complaint(&PLAN.replace("title", "baseline = 'S'\ntitle")),
            "x.toml: baseline names 'S', which is not in the plan"
        );
        assert!(
            load("[[chart]]\nid = '2a'\ntitle = 't'\nmetric = 'iops'\nloads = ['randread 4k QD2']")
                .ends_with("did you mean 'randread 4k QD1'?")
        );
        assert_eq!(
            load("[[chart]]\nid = '2a'\ntitle = 't'\nmetric = 'iops'\nunder = { iodepth = 2 }"),
            "x.toml: chart '2a' shows no load: none asks for what stands in its 'under'"
        );
        assert!(
            load("[[chart]]\nid = '2a'\ntitle = 't'\nmetric = 'iops'\nunder = { iodpeth = 2 }")
                .ends_with("unknown key 'iodpeth'; did you mean 'iodepth'?")
        );
        assert_eq!(
            load("processes = true"),
            "x.toml: load 'randread 4k QD1 processes': processes is fio's, of the stacks host, guest and ssh, and it is put on 's'"
        );
        assert_eq!(
            complaint(&PLAN.replace("'egret'", "'egret'\nqemu = 'after'")),
            "x.toml: subject 's': only the stack guest has a qemu"
        );
        let keys = |stack: &str, more: &str| {
            let text = PLAN.replace("'egret'", &format!("'{stack}'\n{more}"));
            Plan::read("x", &text, Path::new(".")).err().map_or(String::new(), |error| error.to_string())
        };
        let ssh = "client = 'ssh:h'\ndisk = '/dev/vdb'\n";
        for (stack, key, value) in [
            ("host", "iothreads", "2"),
            ("host", "iothread", "{ poll-max-ns = 0 }"),
            ("host", "export", "{ queue-size = 64 }"),
            ("host", "cpus", "[0]"),
            ("host", "device", "'virtio-scsi'"),
            ("host", "vcpus", "4"),
            ("egret", "server", "'egret'"),
            ("egret", "pages", "'huge'"),
            ("qemu-storage-daemon", "vcpus", "1"),
            ("vhost-user-blk", "blockdev", "{ aio = 'native' }"),
            ("vhost-user-blk", "iothreads", "2"),
            ("ssh", "blockdev", "{ aio = 'io_uring' }"),
            ("ssh", "iothread", "{ poll-max-ns = 0 }"),
            ("ssh", "iothreads", "2"),
            ("ssh", "cpus", "[0]"),
            ("guest", "export", "{ queue-size = 64 }"),
        ] {
            let more = match stack {
                "ssh" => ssh,
                "vhost-user-blk" => "command = '{socket}'\n",
                _ => "",
            };
            let server = if stack == "guest" { " whose server is QEMU" } else { "" };
            let error = format!("x: subject 's': {key} has no effect on the stack {stack}{server}");
            assert_eq!(keys(stack, &format!("{more}{key} = {value}")), error);
            assert_eq!(keys(stack, more), "");
        }
        assert_eq!(keys("guest", "server = 'egret'\nexport = { queue-size = 64 }"), "");
        assert!(keys("host", "blockdev = { aio = 'native', 'cache.direct' = true }").ends_with("reads aio alone"));
        assert!(
            keys("guest", "monitor = '/m'")
                .ends_with("only the stack ssh has a client, a disk, a domain and a monitor")
        );
        let without = "iothreads = 0\niothread = { poll-max-ns = 0 }";
        assert!(keys("qemu-storage-daemon", without).ends_with("has none: iothreads = 0"));
        for (stack, key, what) in [
            ("guest", "queues = 4", "queues is of the lab's own load, and it is put on fio alone"),
            ("host", "polling = true", "polling is of the lab's own load, and it is put on fio alone"),
        ] {
            let error = complaint(&format!("{}{key}\n", PLAN.replace("egret", stack)));
            assert!(error.ends_with(what), "{error}");
        }
        let beside = "egret'\n[[subject]]\nname = 'g'\nstack = 'guest";
        let error = complaint(&format!("{}queues = 4\n", PLAN.replace("egret", beside)));
        assert!(error.ends_with("queues has no effect on 'g': a guest's disks have one for each of vcpus"), "{error}");
        for (rw, stack, disk, what) in [
            (
                "randwrite",
                "host",
                "file",
                "of the lab's own load, and it is put on 's': leave that out of its subjects, or",
            ),
            ("randread", "egret", "file", "verify checks what the load itself has written, and it only reads"),
            ("randwrite", "egret", "null", "verify needs a disk that keeps what is written, and a null disk does not"),
        ] {
            let text = PLAN.replace("egret", stack).replace("null", disk);
            let error = complaint(&format!("{text}rw = ['{rw}', 'randrw']\nverify = true\n"));
            assert!(error.contains(&format!("load '{rw} 4k QD1': verify ")) && error.contains(what), "{error}");
            let text = PLAN.replace("null", "file");
            assert!(Plan::read("x", &format!("{text}rw = 'randrw'\nverify = true"), Path::new(".")).is_ok());
        }
        let at = |backend: &str, disk: &str, more: &str| {
            let subject = format!("'egret'\nbackend = '{backend}'");
            complaint(&format!("{}{more}", PLAN.replace("'egret'", &subject).replace("'null'", disk)))
        };
        for wrong in ["ceph", "nbd:x", "nbd+unix:///x", "rbd:", "rbd:a b", "local:x"] {
            assert!(at(wrong, "'file'", "").contains("backend must be local, nbd, nbd+unix, the URI of"), "{wrong}");
        }
        assert!(
            at("nbd", "'null'", "").ends_with("subject 's': a null disk has nothing that another server could have")
        );
        assert!(at("rbd", "'device'\npath = '/dev/x'", "").contains("a device is not copied"));
        assert!(
            at("nbd://h", "'file'", "rw = 'write'\n").contains("the lab writes to no server that it has not started")
        );
        let ssh = |more: &str| complaint(&PLAN.replace("'egret'", &format!("'ssh'\n{more}")));
        assert!(ssh("disk = '/dev/vdb'").contains("the stack ssh needs a client, as \"ssh:HOST\""));
        assert!(ssh("client = 'vm1'\ndisk = '/dev/vdb'").contains("the stack ssh needs a client, as \"ssh:HOST\""));
        assert!(ssh("client = 'ssh:vm1'").contains("the stack ssh needs its disk"));
        assert!(load("subjects = ['z']").ends_with("load 'randread 4k QD1' names 'z', which is not in the plan"));
        assert!(complaint(&PLAN.replace("'egret'", "'vhost-user-blk'")).contains("needs a command"));
        assert!(load("application = 'rsnyc'").ends_with("unknown word 'rsnyc'; did you mean 'rsync'?"));
        assert!(load("jobfile = 'x.fio'").ends_with("there is no job file /nowhere/x.fio"));
        let folder = tempfile::tempdir().unwrap();
        let text = format!("{}jobfile = 'x.fio'\n", PLAN.replace("egret", "host").replace("null", "file"));
        let read = |job: &str| {
            std::fs::write(folder.path().join("x.fio"), job).unwrap();
            Plan::read("x", &text, folder.path()).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(read("[a]\n[b]\nstonewall\n"), Ok(()));
        let error = read("[a]\n[b]\nwait_for=a\n").unwrap_err();
        assert!(error.contains("x.fio has wait_for, and fio does not say"), "{error}");
        let error = read("[a]\nioscheduler = none\n").unwrap_err();
        assert!(
            error.ends_with(
                "x.fio has ioscheduler, which fio does not undo: leave it out; on the stacks host and guest a subject's scheduler says it"
            ),
            "{error}"
        );
        let error = read("[global]\nsize=1G\n[a]\n").unwrap_err();
        assert_eq!(error, "x: load 'x.fio': size = 1G, and the plan's disk has 256M");
        assert_eq!(read("[global]\nsize=256M\n[a]\nfilesize=1G-2G\n"), Ok(()));
        std::fs::write(folder.path().join("x.fio"), "[global]\nsize=1G\n[a]\n").unwrap();
        for (what, instead, is_wrong) in [
            ("'file'", "'loop'", true),
            ("[[load]]", "[[subject]]\nname = 'g'\nstack = 'guest'\n[[load]]", true),
            ("[[load]]", "[[subject]]\nname = 'g'\nstack = 'guest'\n[[load]]\nsubjects = ['g']", false),
            ("'host'", "'guest'", false),
            ("'host'", "'host'\nbackend = 'krbd'", false),
            ("[disk]", "hosts = ['h']\n[disk]\npath = '/srv'", false),
        ] {
            let read = Plan::read("x", &text.replace(what, instead), folder.path());
            assert_eq!(read.is_err(), is_wrong, "{instead}: {:?}", read.err());
        }
        let error = read("[a]\nfilename=/dev/sda\n").unwrap_err();
        assert!(error.contains("x.fio has filename, by which fio uses something else than the disk"), "{error}");
        std::fs::write(folder.path().join("x.fio"), "[a]\nioengine=psync\n").unwrap();
        let read = |text: &str| Plan::read("x", text, folder.path()).map(drop).map_err(|error| error.to_string());
        for (key, value) in [("iodepth", "32"), ("disks", "3"), ("runtime", "'9s'"), ("application", "'rsync'")] {
            let error = read(&format!("{text}{key} = {value}\n")).unwrap_err();
            assert!(
                error.ends_with(&format!("{key} has no effect beside a jobfile, which says all but name and subjects")),
                "{error}"
            );
        }
        for (application, key, is_said) in [
            ("rsync", "iodepth", true),
            ("rsync", "runtime", true),
            ("rsync", "size", false),
            ("rsync", "idle_disks", false),
            ("pgbench", "disks", true),
            ("pgbench", "bs", true),
            ("pgbench", "iodepth", false),
            ("pgbench", "rate_iops", false),
        ] {
            let plan = PLAN.replace("'egret'", "'guest'").replace("'null'", "'file'").replace("bs = '4k'\n", "");
            let said = read(&format!("{plan}application = '{application}'\n{key} = 8192\n"));
            let expected = format!(
                "x: load '{}': {key} has no effect beside {application}",
                if application == "rsync" { "rsync" } else { "pgbench 1 clients" }
            );
            assert_eq!(said, if is_said { Err(expected) } else { Ok(()) }, "{application} {key}");
        }
        for (what, is_wrong) in [
            ("iodepth = 0", "iodepth must be at least 1"),
            ("runtime = 0", "runtime must be above 0"),
            ("rate_iops = -5", "rate_iops must be above 0, and at most 10000000"),
            ("curve = { from = -5, to = 9, points = 1 }", "a curve goes from a share above 0"),
        ] {
            let error = load(&format!("application = 'pgbench'\n{what}"));
            assert!(error.contains(is_wrong), "{error}");
        }
        let error = read(&text.replace("'host'", "'host'\nblockdev.aio = 'native'")).unwrap_err();
        assert!(
            error.contains("aio = \"native\" of 's' has no effect: ") && error.contains("has ioengine=psync"),
            "{error}"
        );
        std::fs::write(folder.path().join("x.fio"), "[a]\nioengine=libaio\n").unwrap();
        assert_eq!(read(&text.replace("'host'", "'host'\nblockdev.aio = 'native'")), Ok(()));
        assert!(Plan::named("quik").unwrap_err().to_string().contains("did you mean 'quick'?"));
    }

    #[test]
    fn names_that_would_have_each_others_files_and_links_are_refused_and_others_are_in_any_script() {
        let read = |one: &str, other: &str| {
            let text = PLAN.replace("'s'", &format!("'{one}'"));
            let text = format!("{text}[[subject]]\nname = '{other}'\nstack = 'egret'\n");
            Plan::read("x.toml", &text, Path::new(".")).map_err(|error| error.to_string())
        };
        for (one, other) in [("C", "c"), ("a+b", "a-b"), ("a b", "a_b")] {
            let said = format!("two subjects are called '{one}' and '{other}', which have one name in files and links");
            assert!(read(one, other).unwrap_err().contains(&said));
        }
        for (one, other) in [("старый", "новыйй"), ("旧的", "新的"), ("é", "e")] {
            let plan = read(one, other).unwrap();
            let files = plan.subjects.iter().map(|subject| {
                let id = CellId { load: "l".into(), subject: subject.name.clone(), repetition: 0, point: 0 };
                crate::runner::raw_name(&id)
            });
            assert_eq!(files.collect::<BTreeSet<_>>().len(), 2, "{one} {other}");
        }
        let charts =
            "[[chart]]\nid = '1A'\ntitle = 't'\nmetric = 'iops'\n[[chart]]\nid = '1a'\ntitle = 't'\nmetric = 'iops'\n";
        assert!(complaint(&format!("{PLAN}{charts}")).contains("two charts are called '1A' and '1a', which have"));
    }

    #[test]
    fn a_job_file_has_its_whole_path_and_its_own_name_wherever_its_plan_is() {
        let place = tempfile::tempdir().unwrap();
        let read = |directory: &Path, load: &str| {
            let text = PLAN.replace("'egret'", "'host'").replace("'null'", "'file'") + load;
            Plan::read("x.toml", &text, directory)
        };
        for (directory, file) in [("one", "mine.fio"), ("other", "../other/mine.fio")] {
            let directory = place.path().join(directory);
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join("mine.fio"), "[mine]\nrw=read\n").unwrap();
            let plan = read(&directory, &format!("[[load]]\njobfile = '{file}'\n")).unwrap();
            assert_eq!(plan.loads[1].name, "mine.fio");
            let named = read(&directory, &format!("[[load]]\nname = 'n'\njobfile = '{file}'\n")).unwrap();
            assert_eq!(named.loads[1].name, "n");
        }
        let two = "[[load]]\njobfile = 'one/mine.fio'\n[[load]]\njobfile = 'other/mine.fio'\n";
        let error = read(place.path(), two).unwrap_err().to_string();
        assert!(error.ends_with("two loads are called 'mine.fio'; give one of them another name"), "{error}");

        // Plans are of the directory that the lab is called in, or below it.
        let text = PLAN.replace("'egret'", "'guest'\nqemu = './build/qemu'");
        let plan = Plan::read("x", &text, Path::new("")).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(plan.subjects[0].qemu(), here.join("build/qemu"));
        let error = read(Path::new("plans"), "[[load]]\njobfile = 'no.fio'\n").unwrap_err().to_string();
        assert!(error.ends_with(&format!("there is no job file {}", here.join("plans/no.fio").display())), "{error}");
    }

    #[test]
    fn egret_is_measured_in_no_main_loop_because_it_has_none_that_serves() {
        let read = |subject: &str| {
            let text = PLAN.replace("stack = 'egret'", &format!("stack = {subject}\niothreads = 0"));
            Plan::read("x.toml", &text, Path::new("."))
        };
        for egrets in ["'egret'", "'guest'\nserver = 'egret'"] {
            let error = read(egrets).unwrap_err().to_string();
            assert!(error.contains("subject 's': Egret has no main loop that serves"), "{error}");
        }
        assert!(["'guest'", "'qemu-storage-daemon'"].iter().all(|qemus| read(qemus).is_ok()));
    }

    #[test]
    fn no_load_asks_for_more_disks_than_there_are_behind_a_servers_uri_or_goes_across_what_has_no_path() {
        let read = |stack: &str, backend: &str, load: &str| {
            let text =
                PLAN.replace("'egret'", &format!("'{stack}'\nbackend = '{backend}'")).replace("'null'", "'file'");
            Plan::read("x.toml", &format!("{text}{load}\n"), Path::new("."))
        };
        let error = read("egret", "nbd://h", "disks = [1, 2]").unwrap_err().to_string();
        assert!(
            error.ends_with("the load 'randread 4k QD1 2 disks' asks for 2 disks, and the server has 1"),
            "{error}"
        );
        assert!(read("egret", "nbd://h", "disks = 1").is_ok() && read("egret", "nbd", "disks = 2").is_ok());
        for backend in ["nbd", "nbd+unix", "rbd"] {
            let error = read("host", backend, "disks = 4\nacross_disks = true").unwrap_err().to_string();
            assert!(error.contains("subject 's': fio goes across files and devices, and"), "{error}");
            assert!(read("host", backend, "disks = 4").is_ok());
        }
        assert!(read("host", "krbd", "disks = 4\nacross_disks = true").is_ok());
    }

    #[test]
    fn no_load_uses_more_of_a_disk_than_the_lab_makes() {
        let read = |stack: &str, disk: &str, size: &str| {
            let text = PLAN.replace("'egret'", stack).replace("'null'", disk);
            Plan::read("x", &format!("{text}size = '{size}'\n"), Path::new(".")).map(drop)
        };
        for disk in ["'file'\nsize = '16M'", "'loop'\nsize = '16M'", "'null'\nsize = '16M'"] {
            let error = read("'egret'", disk, "64M").unwrap_err().to_string();
            assert_eq!(error, "x: load 'randread 4k QD1': size = 64M, and the plan's disk has 16M");
            assert_eq!(read("'egret'", disk, "16M"), Ok(()));
        }
        assert!(read("'egret'", "'file'", "257M").is_err() && read("'egret'", "'file'", "256M").is_ok());
        // Of what is there already nobody knows it before.
        assert_eq!(read("'egret'", "'device'\npath = '/dev/x'", "1T"), Ok(()));
        assert_eq!(read("'ssh'\nclient = 'ssh:h'\ndisk = '/dev/x'", "'null'", "1T"), Ok(()));
        assert_eq!(read("'egret'\nbackend = 'nbd://h'", "'file'", "1T"), Ok(()));
    }

    #[test]
    fn hosts_have_every_subject_each() {
        let plan = PLAN.replace("title", "hosts = ['a', 'b,8765']\nbaseline = 's'\ntitle").replace("'egret'", "'host'");
        let remote = plan.replace("'null'", "'file'\npath = '/var/tmp'");
        let plan_read = Plan::read("p", &remote, Path::new(".")).unwrap();
        let names: Vec<_> = plan_read.subjects.iter().map(|subject| subject.name.as_str()).collect();
        assert_eq!((names.as_slice(), plan_read.baseline()), (["s @ a", "s @ b,8765"].as_slice(), "s @ a"));
        assert!(complaint(&plan).ends_with("and has a path there"));
        assert!(complaint(&remote.replace("'host'", "'egret'")).contains("what runs on other hosts is fio"));
    }

    #[test]
    fn a_profile_has_times_for_all_loads_and_there_is_no_other() {
        // Those who published said two lengths.
        for (name, profile, runtime, size) in [
            ("polling", "published", 150.0, 2),
            ("polling", "published-4m", 240.0, 2),
            ("qemu", "published", 150.0, 2),
            ("qemu", "published-4m", 240.0, 2),
            ("plug", "published", 600.0, 80),
            ("scheduler", "published", 600.0, 80),
        ] {
            let plan = Plan::named(name).unwrap().with_profile(profile).unwrap();
            assert!(plan.loads.iter().all(|load| load.keys.runtime == Seconds(runtime)), "{name} {profile}");
            assert_eq!(plan.disk.size, Some(Bytes(size << 30)), "{name} {profile}");
        }
        let error = Plan::named("quick").unwrap().with_profile("published").unwrap_err();
        assert_eq!(error.to_string(), "quick has no profile 'published': it has none");
    }

    #[test]
    fn a_profiles_size_is_that_of_the_disks_that_the_lab_makes_and_of_a_device_what_is_used() {
        let with = |disk: &str, profile: &str| {
            let loads = "[[load]]\nsize = '1M'\n[[load]]\njobfile = 'x.fio'\n";
            let text = format!(
                "name = 'p'\ntitle = 't'\n[disk]\n{disk}\n[[subject]]\nname = 's'\nstack = 'host'\n{loads}\
                 [profile.long]\nramp_time = 1\nruntime = 9\n{profile}\n"
            );
            let plan = toml::from_str::<Plan>(&text).unwrap().with_profile("long").unwrap();
            (plan.disk.size, plan.loads.iter().map(|load| load.keys.size).collect::<Vec<_>>())
        };
        let [small, large, used] = [16 << 20, 2 << 30, 1 << 20].map(|bytes| Some(Bytes(bytes)));
        assert_eq!(with("type = 'file'\nsize = '16M'", "size = '2G'"), (large, vec![used, None]));
        assert_eq!(with("type = 'file'\nsize = '16M'", ""), (small, vec![used, None]));
        let device = "type = 'device'\npath = '/dev/x'";
        assert_eq!(with(device, "size = '2G'"), (None, vec![large, None]));
        assert_eq!(with(device, ""), (None, vec![used, None]));
    }

    #[test]
    fn a_qemu_is_where_it_is_said_to_be_and_one_that_nobody_names_is_a_mistake() {
        let mut plan = Plan::named("qemu").unwrap();
        plan.place_qemu("after", Path::new("/new/qemu")).unwrap();
        let after = plan.subjects.iter().filter(|one| one.qemu() == Path::new("/new/qemu"));
        assert!(after.clone().count() == 4 && after.clone().all(|one| one.name.starts_with("after")));
        let error = plan.place_qemu("aftre", Path::new("/new/qemu")).unwrap_err();
        assert_eq!(error, "no subject of qemu has qemu = \"aftre\"");
    }

    #[test]
    fn a_plan_beside_itself_has_its_cells_and_subjects_that_are_alike() {
        for (name, _) in BUILT_IN {
            let plan = Plan::named(name).unwrap();
            let alike = plan.clone().all_alike();
            assert_eq!((&alike.loads, alike.baseline()), (&plan.loads, plan.baseline()), "{name}");
            let of = |name: &str| alike.subjects.iter().find(|subject| subject.name == name).unwrap();
            for load in alike.loads.iter() {
                let baseline = of(alike.baseline_under(load));
                for subject in alike.subjects.iter().filter(|subject| load.is_put_on(&subject.name)) {
                    let before = plan.subjects.iter().find(|one| one.name == subject.name).unwrap();
                    assert_eq!((&subject.line, subject.at), (&before.line, before.at));
                    let (name, line, at) = (baseline.name.clone(), baseline.line.clone(), baseline.at);
                    let is_baseline = Subject { name, line, at, ..subject.clone() } == *baseline;
                    let stays = subject.stack == Stack::Host && baseline.stack != Stack::Host && subject == before;
                    assert!(is_baseline || stays, "{}: '{}' under '{}'", plan.name, subject.name, load.name);
                }
            }
        }
        // Loads that share a subject, whose baselines are each other's subjects.
        let of = |name: &str, iothreads: u32| {
            format!("[[subject]]\nname = '{name}'\nstack = 'egret'\niothreads = {iothreads}\n")
        };
        let subjects = [of("a", 1), of("b", 2), of("c", 3), of("d", 4)].concat();
        let loads = "[[load]]\nsubjects = ['b', 'c']\n[[load]]\nbs = '8k'\nsubjects = ['d', 'b']\n[[load]]\nrw = 'read'\nsubjects = ['c', 'd']\n";
        let text = format!("name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n{subjects}{loads}");
        let alike = Plan::read("p", &text, Path::new(".")).unwrap().all_alike();
        assert_eq!(alike.subjects.iter().map(|one| one.iothreads).collect::<Vec<_>>(), [1, 2, 2, 2]);
    }

    #[test]
    fn a_plan_shrinks_evenly() {
        let plan = Plan::read("p", &PLAN.replace("'null'", "'file'\nsize = '1G'"), Path::new(".")).unwrap().scaled(0.5);
        assert_eq!(plan.disk.size, Some(Bytes(512 << 20)));
        let unnamed = |scale| Plan::read("p", PLAN, Path::new(".")).unwrap().scaled(scale).disk.size;
        assert_eq!((unnamed(1.0), unnamed(2.0)), (None, Some(Bytes(512 << 20))));
        let apps = Plan::named("apps").unwrap().scaled(0.001);
        assert_eq!(apps.disk.size, Some(Bytes(256 << 20)));
        assert_eq!((plan.loads[0].keys.runtime, plan.loads[0].keys.ramp_time), (Seconds(2.5), Seconds(0.5)));
    }
}
