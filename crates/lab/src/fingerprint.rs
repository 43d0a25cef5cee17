//! The machine's fingerprint: the facts that figures depend on, and warnings about them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::machine::{self, Placement};
use crate::plan::{Backend, Load, Plan, Stack, Subject};
use crate::results::{BlockDevice, Component, Cpu, Host, Warning};
use crate::stack::{self, Disk, guest};

/// From this load average per processor on, others are at work.
const BUSY: f64 = 0.25;

fn read(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// This machine, for a plan whose load and servers run as `placement` says on `disks`. `egret` is this program.
pub fn take(plan: &Plan, placement: &Placement, disks: &[Disk], egret: &Path) -> Host {
    let mut host = machine(disks.first().and_then(Disk::path));
    host.components = components(plan, egret);
    host.warnings = warnings(&host, plan, placement);
    host
}

/// This machine, with the disk at a path, whatever is measured on it.
pub fn machine(disk: Option<&Path>) -> Host {
    let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| number_behind(&meminfo, name).unwrap_or(0) * 1024;
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut host = Host {
        name,
        cpu: cpu(&cpuinfo),
        memory: kib("MemTotal:"),
        huge_pages: number_behind(&meminfo, "HugePages_Free:").unwrap_or(0) * kib("Hugepagesize:"),
        kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default(),
        kernel_options: read("/proc/cmdline").unwrap_or_default(),
        boot_id: boot_id(),
        hypervisor: hypervisor(&cpuinfo),
        disk: disk.map(block_device),
        components: Vec::new(),
        settings: settings(disk),
        commands: Vec::new(),
        started: Vec::new(),
        load_average: load_average(),
        warnings: Vec::new(),
    };
    host.warnings = of_the_machine(&host);
    host
}

/// What the kernel calls the time since it was booted.
pub fn boot_id() -> Option<String> {
    read("/proc/sys/kernel/random/boot_id")
}

/// Settings that move figures and have no place of their own.
fn settings(disk: Option<&Path>) -> Vec<(String, String)> {
    const QUEUE: [&str; 8] = [
        "nr_requests",
        "rq_affinity",
        "nomerges",
        "io_poll",
        "wbt_lat_usec",
        "write_cache",
        "max_sectors_kb",
        "rotational",
    ];
    let turbo = read("/sys/devices/system/cpu/intel_pstate/no_turbo").map(|no| if no == "0" { "on" } else { "off" });
    let boost = || read("/sys/devices/system/cpu/cpufreq/boost").map(|on| if on == "1" { "on" } else { "off" });
    let mut all = vec![
        ("halt_poll_ns", read("/sys/module/kvm/parameters/halt_poll_ns")),
        (
            "transparent huge pages",
            read("/sys/kernel/mm/transparent_hugepage/enabled").map(|all| scheduler(&all).into()),
        ),
        ("turbo", turbo.or_else(boost).map(Into::into)),
        ("interrupts' default affinity", read("/proc/irq/default_smp_affinity")),
    ];
    if let Some(device) = disk.and_then(device_under) {
        all.extend(QUEUE.map(|name| (name, read(device.join("queue").join(name)))));
        all.push(("disk's interrupts", interrupts(&device, Path::new("/proc/irq"))));
    }
    all.into_iter().filter_map(|(name, is)| Some((name.to_owned(), is?))).collect()
}

/// Where a device's interrupts go, by the kernel's folder of all: `34: 0, 35: 1`; nothing of one that has none of its own.
fn interrupts(device: &Path, all: &Path) -> Option<String> {
    let place = fs::canonicalize(device.join("device")).ok()?;
    let folder = place.ancestors().map(|place| place.join("msi_irqs")).find(|folder| folder.is_dir())?;
    let entries = fs::read_dir(folder).ok()?.flatten();
    let mut numbers: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    let each = numbers.iter().filter_map(|number| {
        Some(format!("{number}: {}", read(all.join(format!("{number}/effective_affinity_list")))?))
    });
    Some(each.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
}

/// The load average of the last minute.
pub fn load_average() -> f64 {
    read("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// The number on the line that begins with `name`.
pub fn number_behind(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}

fn cpu(cpuinfo: &str) -> Cpu {
    const ROOT: &str = "/sys/devices/system/cpu";
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = machine::cores();
    let idle = [read(format!("{ROOT}/cpuidle/current_driver")), read(format!("{ROOT}/cpuidle/current_governor"))];
    let mut mitigations: Vec<(String, String)> = fs::read_dir(format!("{ROOT}/vulnerabilities"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, read(entry.path())?)))
        .collect();
    mitigations.sort();
    Cpu {
        model: model.map_or("unknown", |(_, model)| model).to_owned(),
        usable: {
            let mut usable = cores.concat();
            usable.sort_unstable();
            usable
        },
        online: machine::all_cores().concat().len(),
        nodes: read("/sys/devices/system/node/online").map_or(1, |list| machine::parse_list(&list).len()),
        governor: read(format!("{ROOT}/cpu0/cpufreq/scaling_governor")),
        idle: Some(idle.into_iter().flatten().collect::<Vec<_>>().join(", ")).filter(|idle| !idle.is_empty()),
        cores,
        mitigations,
    }
}

fn hypervisor(cpuinfo: &str) -> Option<String> {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"))?;
    if !flags.split(' ').any(|flag| flag == "hypervisor") {
        return None;
    }
    let vendor = read("/sys/class/dmi/id/sys_vendor").or_else(|| read("/sys/hypervisor/type"));
    Some(vendor.unwrap_or_else(|| "unknown".into()))
}

/// The block device at `path`, or under the file at `path`.
fn block_device(path: &Path) -> BlockDevice {
    let mut new = BlockDevice { path: path.display().to_string(), ..BlockDevice::default() };
    let Ok(metadata) = fs::metadata(path) else { return new };
    let is_file = metadata.is_file();
    let number = if is_file { metadata.dev() } else { metadata.rdev() };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    if is_file {
        new.file_system = read("/proc/self/mountinfo").and_then(|mounts| file_system(&mounts, major, minor));
    }
    let Some(device) = device_under(path) else { return new };
    new.device = device.file_name().map(|name| name.to_string_lossy().into_owned());
    new.model = read(device.join("device/model"));
    // In sectors, whatever the device's own are.
    new.size = read(device.join("size")).and_then(|sectors| Some(sectors.parse::<u64>().ok()? * 512));
    new.scheduler = read(device.join("queue/scheduler")).map(|all| scheduler(&all).to_owned());
    new
}

/// In `/sys`: the whole device at `path`, or under the file at `path`.
pub(crate) fn device_under(path: &Path) -> Option<PathBuf> {
    let metadata = fs::metadata(path).ok()?;
    let number = if metadata.is_file() { metadata.dev() } else { metadata.rdev() };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let mut device = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    if device.join("partition").exists() {
        device.pop();
    }
    Some(device)
}

/// `ext4` of a line `36 35 98:0 / /mnt rw - ext4 /dev/sda1 rw`.
fn file_system(mounts: &str, major: u32, minor: u32) -> Option<String> {
    let number = format!("{major}:{minor}");
    let mine = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number.as_str()))?;
    mine.split_once(" - ")?.1.split(' ').next().map(str::to_owned)
}

/// `none` of `[none] mq-deadline`.
pub(crate) fn scheduler(all: &str) -> &str {
    all.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or(all, |(chosen, _)| chosen)
}

fn components(plan: &Plan, egret: &Path) -> Vec<Component> {
    let mut programs = vec![("egret".to_owned(), egret.to_owned())];
    for program in plan.subjects.iter().flat_map(programs_of) {
        if !programs.contains(&program) {
            programs.push(program);
        }
    }
    programs.into_iter().filter_map(|(name, path)| component(&name, &path)).collect()
}

/// What a stack runs besides Egret, as far as it is there.
fn programs_of(subject: &Subject) -> Vec<(String, PathBuf)> {
    let named: &[&str] = match subject.stack {
        // Libvirt has one daemon for all, or one for each thing that it manages.
        Stack::Ssh if subject.domain.is_some() => &["virtqemud", "libvirtd"],
        // The programs of a subject's own command are unknown.
        Stack::Egret | Stack::VhostUserBlk | Stack::Ssh => &[],
        Stack::Host => &["fio"],
        Stack::QemuStorageDaemon => &["qemu-storage-daemon"],
        Stack::Guest => &["fio", &subject.qemu().to_string_lossy()],
    };
    let behind: &[&str] = match &subject.backend {
        Backend::Local | Backend::Server(_) => &[],
        Backend::Nbd | Backend::NbdUnix => &["nbdkit"],
        // The OSDs', where they are on this host.
        Backend::Rbd(_) | Backend::Krbd(_) => &["rbd", "ceph-osd"],
    };
    // Daemons are where the search path of others than root does not lead.
    let find = |name: &str| stack::find(name).or_else(|| stack::find(&format!("/usr/sbin/{name}")));
    let found = |name: &&str| Some(((*name).to_owned(), find(name)?));
    let mut all: Vec<_> = named.iter().chain(behind).filter_map(found).collect();
    if subject.stack == Stack::Guest {
        all.extend(guest::files().map(|(name, path)| (name.to_owned(), path)));
    }
    all
}

/// What a subject's process runs that is none of the programs that are `known`. A script is not what runs; nor is the
/// loader, where that is called by name. QEMU and Egret are asked for their versions; what others would do with the question nobody
/// knows.
pub fn started(subject: &str, pid: u32, known: &[Component]) -> Vec<Component> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let exe = PathBuf::from(format!("/proc/{pid}/exe"));
    // Another file may have its name by now: a newer version does not end what runs.
    let replaced = fs::read_link(&exe).ok().filter(|path| path.to_string_lossy().ends_with(GONE));
    let is_new = |path: &PathBuf| !known.iter().any(|one| Path::new(&one.path) == path);
    let component = |path: PathBuf| {
        let file = if replaced.as_ref() == Some(&path) { &exe } else { &path };
        let name = path.file_name()?.to_string_lossy();
        let name = name.trim_end_matches(GONE);
        let is_asked = name.starts_with("qemu-") || name == "egret";
        Some(Component {
            name: subject.to_owned(),
            path: path.display().to_string(),
            version: if is_asked { version(file) } else { String::new() },
            sha256: sha256(file)?,
        })
    };
    executables(&maps).into_iter().chain(replaced.clone()).filter(is_new).filter_map(component).collect()
}

/// What the kernel says behind the name of a file that is not there any more.
const GONE: &str = " (deleted)";

/// The files of a process's memory that are run, and are no libraries.
fn executables(maps: &str) -> BTreeSet<PathBuf> {
    let file = |line: &str| {
        if line.ends_with(GONE) {
            return None;
        }
        let mut fields = line.split_ascii_whitespace();
        let is_run = fields.nth(1)?.contains('x');
        let path = PathBuf::from(fields.nth(3)?);
        let is_library = path.file_name()?.to_string_lossy().contains(".so");
        (is_run && path.is_absolute() && !is_library).then_some(path)
    };
    maps.lines().filter_map(file).collect()
}

fn component(name: &str, path: &Path) -> Option<Component> {
    let path = path.canonicalize().ok()?;
    Some(Component {
        name: name.to_owned(),
        version: version(&path),
        sha256: sha256(&path)?,
        path: path.display().to_string(),
    })
}

/// The first line of what a program says of itself.
fn version(path: &Path) -> String {
    let output = Command::new(path).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
}

/// What each load's job file is, by the load's name.
pub fn job_files(plan: &Plan) -> BTreeMap<String, String> {
    let digest = |load: &Load| Some((load.name.clone(), sha256(load.keys.jobfile.as_deref()?)?));
    plan.loads.iter().filter_map(digest).collect()
}

fn sha256(path: &Path) -> Option<String> {
    let mut file = fs::File::open(path).ok()?;
    let mut hash = Sha256::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        match file.read(&mut piece).ok()? {
            0 => break,
            len => hash.update(&piece[..len]),
        }
    }
    Some(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What a reader should mind of any figure from this machine.
fn of_the_machine(host: &Host) -> Vec<Warning> {
    let mut all = Vec::new();
    let mut warn = |about: &str, text: String| all.push(Warning { about: about.to_owned(), text });
    if let Some(governor) = host.cpu.governor.as_ref().filter(|governor| *governor != "performance") {
        warn("governor", format!("the frequency governor is '{governor}': 'performance' keeps the clock still"));
    }
    let scheduler = host.disk.as_ref().and_then(|disk| disk.scheduler.as_ref());
    if let Some(scheduler) = scheduler.filter(|scheduler| *scheduler != "none") {
        warn("scheduler", format!("the disk's I/O scheduler is '{scheduler}': 'none' leaves requests as they are"));
    }
    let processors = host.cpu.processors().max(1) as f64;
    if host.load_average / processors > BUSY {
        let text = format!("the load average was {:.2} to begin with: others are at work", host.load_average);
        warn("noisy-neighbour", text);
    }
    if let Some(hypervisor) = &host.hypervisor {
        warn(
            "virtual",
            format!(
                "this is a virtual machine (hypervisor: {hypervisor}): its neighbours and its host show in every figure"
            ),
        );
    }
    all
}

fn warnings(host: &Host, plan: &Plan, placement: &Placement) -> Vec<Warning> {
    let mut all = of_the_machine(host);
    let mut warn = |about: &str, text: String| all.push(Warning { about: about.to_owned(), text });
    stack::unnamed_engines(plan).for_each(|text| warn("engine", text));
    if placement.load.is_empty() {
        warn("one-core", "there is but one processor: the load and the server share it".into());
    }
    let (guests, others): (Vec<_>, Vec<_>) = plan.subjects.iter().partition(|subject| subject.stack == Stack::Guest);
    let servers = others.iter().map(|subject| {
        let cpus = if subject.cpus.is_empty() { &placement.server } else { &subject.cpus };
        (subject.name.as_str(), cpus.as_slice())
    });
    for (name, cpus) in servers {
        if let Some((mine, theirs)) = shared_core(&host.cpu.cores, &placement.load, cpus) {
            let text = format!("'{name}' may run on processor {theirs}, which shares a core with the load's {mine}");
            warn("smt-sibling", text);
            break;
        }
    }
    if let Some((name, shared)) =
        guests.iter().find_map(|subject| Some((&subject.name, guest::shared_core(&host.cpu.cores, subject)?)))
    {
        warn("smt-sibling", format!("'{name}': {shared} share a core, so that each slows the other down"));
    }
    if !guests.is_empty() && guest::is_emulated() {
        warn(
            "emulation",
            "there is no KVM for guests here: cells marked “functional only” show that things work, and not how fast"
                .into(),
        );
    }
    let known = |cpu: &&usize| !host.cpu.usable.contains(cpu);
    if let Some(cpu) = plan.load_cpus.iter().chain(plan.subjects.iter().flat_map(|subject| &subject.cpus)).find(known) {
        warn(
            "pinning",
            format!("the plan pins to processor {cpu}, which this process may not use: nothing is pinned there"),
        );
    }
    all
}

/// A processor of the load and one of the server that are the same core, if there are.
fn shared_core(cores: &[Vec<usize>], load: &[usize], server: &[usize]) -> Option<(usize, usize)> {
    cores.iter().find_map(|core| {
        let mine = core.iter().find(|cpu| load.contains(cpu))?;
        let theirs = core.iter().find(|cpu| server.contains(cpu))?;
        Some((*mine, *theirs))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn what_runs_is_no_script_no_loader_and_no_library() {
        let maps = "\
55d0-55d1 r--p 00000000 fe:00 1 /opt/qemu/bin/qemu\n55d1-55d2 r-xp 00001000 fe:00 1 /opt/qemu/bin/qemu\n\
7f00-7f01 r-xp 00000000 fe:00 2 /opt/qemu/lib/libc.so.6\n7f02-7f03 r-xp 00000000 fe:00 3 /opt/qemu/lib/ld-linux-x86-64.so.2\n\
7f04-7f05 r--p 00000000 fe:00 4 /etc/fonts\n7ffe-7fff r-xp 00000000 00:00 0 [vdso]\n";
        assert_eq!(executables(maps), BTreeSet::from(["/opt/qemu/bin/qemu".into()]));
        // This test is of this process's program, and nobody named it.
        let [mine] = started("s", std::process::id(), &[]).try_into().unwrap();
        assert_eq!(mine.path, std::env::current_exe().unwrap().display().to_string());
        assert!(started("s", std::process::id(), &[mine]).is_empty());
    }

    #[test]
    fn of_what_serves_qemu_and_egret_are_asked_for_their_versions_and_nothing_else_is() {
        let place = tempfile::tempdir().unwrap();
        for (name, is_asked) in [("qemu-system-x86_64", true), ("egret", true), ("server", false)] {
            let path = place.path().join(name);
            // Who forks here meanwhile would have it open for writing.
            assert!(Command::new("cp").arg("/bin/cat").arg(&path).status().unwrap().success());
            let mut command = Command::new(&path);
            let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            process.stdin.as_mut().unwrap().write_all(b"!").unwrap();
            process.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let [serves] = started("vm", process.id(), &[]).try_into().unwrap();
            // A newer version comes while it runs.
            fs::remove_file(&path).unwrap();
            assert!(Command::new("cp").arg("/bin/ls").arg(&path).status().unwrap().success());
            let [replaced] = started("vm", process.id(), &[]).try_into().unwrap();
            assert_eq!(replaced.path, format!("{} (deleted)", path.display()));
            assert_eq!((&replaced.version, &replaced.sha256), (&serves.version, &serves.sha256));
            drop(process.stdin.take());
            process.wait().unwrap();
            assert_eq!(serves.path, path.display().to_string());
            assert_eq!(serves.version.is_empty(), !is_asked, "{serves:?}");
            assert!(!is_asked || serves.version == version(Path::new("/bin/cat")), "{serves:?}");
        }
    }

    #[test]
    fn the_kernels_words_are_understood() {
        assert_eq!(scheduler("none [mq-deadline] kyber"), "mq-deadline");
        assert_eq!(scheduler("none"), "none");
        assert_eq!(number_behind("MemTotal:  24 kB\nHugePages_Free:   3\n", "HugePages_Free:"), Some(3));
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n23 22 0:24 / /dev/shm rw - tmpfs tmpfs rw";
        assert_eq!(file_system(mounts, 254, 0), Some("ext4".into()));
        assert_eq!(file_system(mounts, 1, 1), None);
        assert_eq!(machine::parse_list("0-2,8"), [0, 1, 2, 8]);
        assert_eq!(hypervisor("flags\t\t: fpu vme"), None);
    }

    #[test]
    fn a_pinned_sibling_is_found() {
        let cores = [vec![0, 4], vec![1, 5], vec![2, 6]];
        assert_eq!(shared_core(&cores, &[0], &[1, 5]), None);
        assert_eq!(shared_core(&cores, &[0], &[4]), Some((0, 4)));
    }

    #[test]
    fn what_should_make_one_doubt_is_said() {
        let plan: Plan = toml::from_str("name = 'p'\ntitle = 't'\nload-cpus = [9]\nload = []\n[disk]\ntype = 'file'\n[[subject]]\nname = 's'\nstack = 'egret'\n").unwrap();
        let cpu =
            Cpu { usable: vec![0, 1], cores: vec![vec![0, 1]], governor: Some("powersave".into()), ..Cpu::default() };
        let disk = Some(BlockDevice { scheduler: Some("mq-deadline".into()), ..BlockDevice::default() });
        let host = Host { cpu, disk, load_average: 3.0, ..Host::default() };
        let placement = Placement { load: vec![0], server: vec![1] };
        let abouts: Vec<String> = warnings(&host, &plan, &placement).into_iter().map(|warning| warning.about).collect();
        assert_eq!(abouts, ["governor", "scheduler", "noisy-neighbour", "engine", "smt-sibling", "pinning"]);
    }

    #[test]
    fn a_disks_interrupts_are_its_controllers() {
        let root = tempfile::tempdir().unwrap();
        let (controller, irq) = (root.path().join("controller"), root.path().join("irq"));
        let disk = controller.join("virtio1/block/vda");
        for (number, cpu) in [(35, "1"), (34, "0,2"), (7, "3")] {
            fs::create_dir_all(irq.join(format!("{number}"))).unwrap();
            fs::write(irq.join(format!("{number}/effective_affinity_list")), format!("{cpu}\n")).unwrap();
        }
        fs::create_dir_all(&disk).unwrap();
        std::os::unix::fs::symlink("../..", disk.join("device")).unwrap();
        assert_eq!(interrupts(&disk, &irq), None, "it has none of its own");
        fs::create_dir_all(controller.join("msi_irqs")).unwrap();
        [34, 35, 99]
            .iter()
            .for_each(|number| fs::write(controller.join(format!("msi_irqs/{number}")), "msi\n").unwrap());
        assert_eq!(interrupts(&disk, &irq).as_deref(), Some("34: 0,2, 35: 1"));
    }

    #[test]
    fn a_boot_has_a_name() {
        assert_eq!((boot_id().unwrap().len(), boot_id().unwrap().lines().count()), (36, 1));
    }

    #[test]
    fn this_machine_has_a_fingerprint() {
        let plan: Plan =
            toml::from_str("name = 'p'\ntitle = 't'\nload = []\nsubject = []\n[disk]\ntype = 'null'\n").unwrap();
        let program = std::env::current_exe().unwrap();
        let host = take(&plan, &Placement::default(), &[Disk::File(program.clone())], &program);
        assert!(!host.kernel.is_empty() && host.memory > 0 && !host.cpu.usable.is_empty());
        assert_eq!(host.cpu.processors(), std::fs::read_to_string("/proc/stat").unwrap().matches("\ncpu").count());
        assert_eq!(host.components[0].sha256.len(), 64);
        assert_eq!(host.disk.unwrap().path, program.display().to_string());
        let settings: Vec<&str> = host.settings.iter().map(|(name, _)| name.as_str()).collect();
        assert!(settings.contains(&"interrupts' default affinity"), "{settings:?}");
        let queue = device_under(&program).is_some_and(|device| device.join("queue").is_dir());
        assert_eq!(settings.contains(&"max_sectors_kb"), queue, "{settings:?}");
    }
}
