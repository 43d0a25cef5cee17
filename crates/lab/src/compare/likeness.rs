//! Whether two runs may be compared at all.

use crate::plan::{Bytes, Load, Plan, Subject};
use crate::results::{Cell, Component, Host, Run};

/// Memory may differ by this share of the larger: kernels keep more or less of it for themselves.
const MEMORY: f64 = 0.1;

/// What two runs differ in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What it is.
    pub about: &'static str,
    /// There, of the first run.
    pub a: String,
    /// And of the second.
    pub b: String,
    /// What it means.
    pub role: Role,
}

/// What a difference means to a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It may be what is compared: two kernels, or two versions of a program. One of them is; both together leave open
    /// which of them made the difference.
    Compared,
    /// It changes no figure by itself, such as the host's name.
    Told,
    /// Figures cannot be compared across it.
    Unlike,
}

/// Everything that two runs differ in.
pub fn differences(a: &Run, b: &Run) -> Vec<Difference> {
    let mut found = Found::default();
    found.host(&a.host, &b.host);
    found.plan(a, b);
    found.0
}

/// Why they cannot be compared, in one line each; none if they can.
pub fn objections(differences: &[Difference]) -> Vec<String> {
    let unlike = differences.iter().filter(|difference| difference.role == Role::Unlike);
    let mut objections: Vec<_> =
        unlike.map(|Difference { about, a, b, .. }| format!("{about}: {a} against {b}")).collect();
    let compared: Vec<_> =
        differences.iter().filter(|difference| difference.role == Role::Compared).map(|d| d.about).collect();
    if compared.contains(&KERNEL) && compared.len() > 1 {
        objections.push(format!(
            "both the kernel and programs ({}) differ: either could be what made a difference",
            compared.iter().filter(|about| **about != KERNEL).copied().collect::<Vec<_>>().join(", ")
        ));
    }
    objections
}

const KERNEL: &str = "kernel";

/// The programs that do the serving; others, such as fio's version, are named by what they are.
fn program(name: &str) -> &'static str {
    match name {
        "egret" => "egret",
        "qemu-storage-daemon" => "qemu-storage-daemon",
        "fio" => "fio",
        name if name.contains("qemu-system") => "QEMU",
        _ => "another program",
    }
}

#[derive(Default)]
struct Found(Vec<Difference>);

impl Found {
    fn note(&mut self, about: &'static str, role: Role, a: impl ToString, b: impl ToString) {
        let (a, b) = (a.to_string(), b.to_string());
        if a != b {
            self.0.push(Difference { about, a, b, role });
        }
    }

    fn host(&mut self, a: &Host, b: &Host) {
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".into());
        self.note("host", Role::Told, &a.name, &b.name);
        self.note(KERNEL, Role::Compared, &a.kernel, &b.kernel);
        self.note("kernel options", Role::Unlike, options(&a.kernel_options), options(&b.kernel_options));
        self.note("CPU", Role::Unlike, &a.cpu.model, &b.cpu.model);
        self.note("usable CPUs", Role::Unlike, a.cpu.usable.len(), b.cpu.usable.len());
        self.note("cores", Role::Unlike, a.cpu.cores.len(), b.cpu.cores.len());
        self.note("NUMA nodes", Role::Unlike, a.cpu.nodes, b.cpu.nodes);
        self.note("frequency governor", Role::Unlike, or_none(&a.cpu.governor), or_none(&b.cpu.governor));
        self.note("idle driver", Role::Unlike, or_none(&a.cpu.idle), or_none(&b.cpu.idle));
        // Another kernel knows others, or words them otherwise, and they are then a part of what is compared.
        let role = if a.kernel == b.kernel { Role::Unlike } else { Role::Told };
        self.note("mitigations", role, mitigations(a), mitigations(b));
        // Runs of before they were looked at have none.
        if !a.settings.is_empty() && !b.settings.is_empty() {
            self.note("settings", role, settings(a, b), settings(b, a));
        }
        self.note("hypervisor", Role::Unlike, or_none(&a.hypervisor), or_none(&b.hypervisor));
        if a.memory.abs_diff(b.memory) as f64 > MEMORY * a.memory.max(b.memory) as f64 {
            self.note("memory", Role::Unlike, a.memory, b.memory);
        }
        self.disk(a, b);
        for theirs in &b.components {
            if let Some(ours) = a.components.iter().find(|ours| ours.name == theirs.name) {
                self.component(ours, theirs);
            }
        }
        for theirs in &b.started {
            let ours = |one: &&Component| (&one.name, &one.path) == (&theirs.name, &theirs.path);
            if let Some(ours) = a.started.iter().find(ours) {
                self.note("another program", Role::Compared, &ours.sha256, &theirs.sha256);
            }
        }
    }

    fn disk(&mut self, a: &Host, b: &Host) {
        let disk = |host: &Host| host.disk.clone().unwrap_or_default();
        let (a, b) = (disk(a), disk(b));
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".into());
        self.note("disk", Role::Unlike, or_none(a.model), or_none(b.model));
        // Of virtual disks all that tells two from each other. Runs of before it was looked at have none.
        if let (Some(a), Some(b)) = (a.size, b.size) {
            self.note("disk's size", Role::Unlike, Bytes(a), Bytes(b));
        }
        self.note("I/O scheduler", Role::Unlike, or_none(a.scheduler), or_none(b.scheduler));
        self.note("file system", Role::Unlike, or_none(a.file_system), or_none(b.file_system));
    }

    fn component(&mut self, a: &Component, b: &Component) {
        // fio measures; it is not what is measured.
        let role = if a.name == "fio" { Role::Unlike } else { Role::Compared };
        if a.version != b.version {
            self.note(program(&a.name), role, &a.version, &b.version);
        } else if a.sha256 != b.sha256 {
            self.note(program(&a.name), if role == Role::Unlike { Role::Told } else { role }, build(a), build(b));
        }
    }

    fn plan(&mut self, a: &Run, b: &Run) {
        self.note("plan", Role::Unlike, &a.plan.name, &b.plan.name);
        self.note("scale", Role::Unlike, a.scale, b.scale);
        self.note("disk under test", Role::Unlike, disk_of(&a.plan), disk_of(&b.plan));
        self.note("preconditioned", Role::Unlike, a.plan.disk.preconditioned, b.plan.disk.preconditioned);
        self.note("load-cpus", Role::Unlike, processors(&a.plan), processors(&b.plan));
        self.note("perf", Role::Unlike, perf(a), perf(b));
        self.note("io-submit", Role::Unlike, a.plan.io_submit, b.plan.io_submit);
        for load in a.plan.loads.iter() {
            if let Some(other) = b.plan.loads.named(&load.name) {
                self.note("load", Role::Unlike, like(load), like(other));
                if let (Some(ours), Some(theirs)) = (a.job_files.get(&load.name), b.job_files.get(&load.name)) {
                    self.note("job file", Role::Unlike, ours, theirs);
                }
            }
        }
        for subject in &a.plan.subjects {
            if let Some(other) = b.plan.subject(&subject.name) {
                // Where a QEMU is found is no matter; which it is may be what is compared.
                if subject.qemu() != other.qemu() {
                    self.note("QEMU", Role::Compared, qemu(a, subject), qemu(b, other));
                }
                let [subject, other] = [subject, other].map(|one| Subject { qemu: None, ..one.clone() });
                self.note("subject", Role::Unlike, format!("{subject:?}"), format!("{other:?}"));
            }
        }
    }
}

/// All that is said of a load, but where its job file is found; and whether its name, which is what it was found by, was in the
/// plan.
fn like(load: &Load) -> String {
    let mut load = load.clone();
    load.keys.name = None;
    load.keys.jobfile = load.keys.jobfile.and_then(|path| Some(path.file_name()?.into()));
    format!("{load:?}")
}

fn build(component: &Component) -> String {
    format!("{}, built as {}", component.version, component.sha256.get(..12).unwrap_or(&component.sha256))
}

/// A guest's QEMU: what it is, or else where.
fn qemu(run: &Run, subject: &Subject) -> String {
    let name = subject.qemu().display().to_string();
    let found = run.host.components.iter().find(|one| one.name == name);
    found.map_or(name, build)
}

fn disk_of(plan: &Plan) -> String {
    let size = plan.disk.size.map_or_else(|| "its own size".into(), |size| size.to_string());
    format!("{:?} of {size}", plan.disk.kind)
}

fn processors(plan: &Plan) -> String {
    if plan.load_cpus.is_empty() { "chosen".into() } else { format!("{:?}", plan.load_cpus) }
}

/// Whether `perf` was looking, which takes time from what it looks at. Where it is missing, or may not look, it did not.
fn perf(run: &Run) -> &'static str {
    let mut measured = run.cells.iter().filter_map(Cell::measured);
    let nothing_was_measured = measured.clone().next().is_none();
    match run.plan.perf {
        false => "off",
        true if nothing_was_measured || measured.any(|one| one.samples > 0 || !one.symbols.is_empty()) => "on",
        true => "on, and it saw nothing",
    }
}

/// The kernel's options without those that only say where it was found.
fn options(line: &str) -> String {
    let kept = line.split_whitespace().filter(|word| {
        !["BOOT_IMAGE=", "root=", "initrd=", "resume="].iter().any(|found_at| word.starts_with(found_at))
    });
    kept.collect::<Vec<_>>().join(" ")
}

/// One host's settings that are not the other's. Of interrupts no two boots are alike.
fn settings(of: &Host, other: &Host) -> String {
    let differs = |one: &&(String, String)| one.0 != "disk's interrupts" && !other.settings.contains(one);
    let each = of.settings.iter().filter(differs).map(|(name, is)| format!("{name} {is}"));
    each.collect::<Vec<_>>().join(", ")
}

fn mitigations(host: &Host) -> String {
    let each = host.cpu.mitigations.iter().map(|(against, state)| format!("{against}: {state}"));
    each.collect::<Vec<_>>().join("; ")
}
