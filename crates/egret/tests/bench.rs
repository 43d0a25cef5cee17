//! `egret bench`, as a process: real plans on real servers, interrupted and killed.

#[path = "bench/elsewhere.rs"]
mod elsewhere;
#[path = "bench/resumed.rs"]
mod resumed;
mod support;
#[path = "bench/verify.rs"]
mod verify;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use egret_lab::results::{Bottleneck, Cell, Measurement, Outcome, Run};
use egret_lab::runner;
use support::scratch::{Scratch, is_root_or_skips, write_script};
use support::server::Reaped;
use support::{PATIENCE, await_some, await_that, await_within, has_or_skips};

/// A lab's place: its plan, its results, and everything temporary of it.
struct Lab {
    scratch: Scratch,
    plan: PathBuf,
}

impl Lab {
    fn new(plan: &str) -> Self {
        let scratch = Scratch::new();
        let path = scratch.image_path("plan.toml");
        fs::write(&path, format!("name = 'test'\ntitle = 'A test'\n{plan}")).unwrap();
        fs::create_dir(scratch.path("tmp")).unwrap();
        Self { scratch, plan: path }
    }

    fn results(&self) -> PathBuf {
        self.scratch.image_path("results")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_egret"));
        command
            .arg("bench")
            .args(words)
            .env("TMPDIR", self.scratch.path("tmp"))
            .current_dir(self.plan.parent().unwrap());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// `egret bench PLAN --output RESULTS` and more.
    fn bench(&self, more: &[&str]) -> Command {
        let (plan, results) = (self.plan.display().to_string(), self.results().display().to_string());
        self.command(&[&[plan.as_str(), "--output", &results], more].concat())
    }

    fn run(&self) -> Run {
        runner::read(&self.results()).unwrap()
    }

    /// How many cells are kept so far: what the kernel says meanwhile is in the journal too, and is none.
    fn cells(&self) -> usize {
        runner::read(&self.results()).map_or(0, |run| run.cells.len())
    }

    /// Waits until there is nothing left of a lab that was killed: its reaper comes after it.
    fn await_nothing_left(&self) {
        let begins = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("egret-bench-");
        let entries = |place: &Path| fs::read_dir(place).into_iter().flatten().flatten();
        let places = [self.scratch.path("tmp"), self.results()];
        await_that("sockets and disks to vanish", || {
            places.iter().all(|place| !entries(place).any(|entry| begins(&entry)))
        });
        let mine = self.scratch.path("tmp").display().to_string();
        await_that("the servers to end", || !command_lines().iter().any(|line| line.contains(&mine)));
    }
}

/// The command lines of all processes.
fn command_lines() -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let line = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).ok();
    entries.filter_map(line).map(|line| String::from_utf8_lossy(&line).into_owned()).collect()
}

fn measured(cell: &Cell) -> &Measurement {
    match &cell.outcome {
        Outcome::Measured(measurement) => measurement,
        other => panic!("{:?}: {other:?}", cell.id),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

/// The one line that says what is wrong, of a command that must fail.
fn complaint(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success(), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    said.trim().to_owned()
}

/// A subject for each way to a disk, under a load that reads and one that writes.
fn ways(ways: &[(&str, &str)]) -> String {
    let mut plan = "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n".to_owned();
    for (stack, backend) in ways {
        plan += &format!("[[subject]]\nname = '{stack} {backend}'\nstack = '{stack}'\nbackend = '{backend}'\n");
    }
    plan + "[[load]]\nrw = ['randread', 'randwrite']\niodepth = 4\nsize = '8M'\nramp_time = '50ms'\nruntime = '2s'\n"
}

/// All of a run's cells were measured, and who is behind the disk has spent time on each.
fn are_served_from_elsewhere(run: &Run, subjects: usize) {
    assert_eq!(run.cells.len(), 2 * subjects);
    for cell in &run.cells {
        let measured = measured(cell);
        // Who looks at fio when it has ended knows nothing of its backend.
        let is_unseen = cell.id.subject.starts_with("host ") && measured.cpu.backend.is_none();
        let has_spent = measured.cpu.backend.is_some_and(|spent| spent > 0);
        assert!(measured.requests() > 0 && (is_unseen || has_spent), "{measured:?}");
    }
}

#[test]
fn a_disk_behind_an_nbd_server_is_measured_and_the_servers_time_is_apart() {
    if !["nbdkit", "fio", "qemu-storage-daemon"].into_iter().all(has_or_skips) {
        return;
    }
    let all = [("egret", "nbd"), ("egret", "nbd+unix"), ("qemu-storage-daemon", "nbd+unix"), ("host", "nbd")];
    let lab = Lab::new(&ways(&all));
    succeeded(&lab.bench(&[]).output().unwrap());
    are_served_from_elsewhere(&lab.run(), all.len());
    lab.await_nothing_left();
}

#[test]
fn an_image_is_measured_and_is_gone_afterwards_even_if_the_lab_is_killed() {
    let Some(ceph) = egret_needs::Ceph::start() else { return };
    let all = [("egret", "rbd"), ("host", "rbd:rbd")];
    let lab = Lab::new(&ways(&all));
    succeeded(&lab.bench(&[]).env("CEPH_CONF", ceph.conf()).output().unwrap());
    are_served_from_elsewhere(&lab.run(), all.len());
    assert_eq!(ceph.run("rbd ls"), "");
    let (plan, results) = (lab.plan.display().to_string(), lab.scratch.path("killed").display().to_string());
    let mut killed = lab.command(&[&plan, "--output", &results]);
    let mut child = Reaped(killed.env("CEPH_CONF", ceph.conf()).spawn().unwrap());
    await_that("an image", || !ceph.run("rbd ls").is_empty());
    child.0.kill().unwrap();
    // For half a minute Ceph may take who had it open for alive.
    await_within(2 * PATIENCE, "the image to be removed", || ceph.run("rbd ls").is_empty().then_some(()));
}

#[test]
fn a_backend_that_is_not_there_is_said_before_anything_starts() {
    let lab = Lab::new(&ways(&[("egret", "nbd://127.0.0.1:1"), ("egret", "rbd")]).replace(", 'randwrite'", ""));
    let none = |mut command: Command| {
        command.env("CEPH_CONF", "/nonexistent").env("CEPH_ARGS", "--mon-host 127.0.0.1:1");
        command
    };
    let said = complaint(none(lab.bench(&[])));
    let expected = ["rbd is not installed", "no pool 'rbd' of a Ceph cluster"];
    assert!(expected.iter().any(|line| said.contains(line)), "{said}");
}

const NULL_DISK: &str = "repetitions = 1
[disk]
type = 'null'
size = '64M'
[[subject]]
name = 'off'
stack = 'egret'
iothread = { poll-policy = 'off' }
[[subject]]
name = 'two threads'
stack = 'egret'
iothreads = 2
[[subject]]
name = 'as it comes'
stack = 'egret'
[[load]]
rw = 'randrw'
iodepth = 4
numjobs = 2
disks = 2
idle_disks = 3
ramp_time = '20ms'
runtime = '1s'
[[load]]
curve = { from = 50, to = 50, points = 1 }
ramp_time = '20ms'
runtime = '1s'
";

#[test]
fn a_plan_is_measured_cell_by_cell() {
    let lab = Lab::new(NULL_DISK);
    succeeded(&lab.bench(&[]).output().unwrap());
    let run = lab.run();
    assert_eq!(run.cells.len(), 4 * 3);
    assert!(run.ended.is_some());
    // A container does not show them.
    let kernel_threads = std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n");
    for cell in &run.cells {
        let measurement = measured(cell);
        let cpu = &measurement.cpu;
        assert!(measurement.requests() > 0 && measurement.seconds > 0.09, "{cell:?}");
        assert!(cpu.load.is_some() && cpu.host_busy.is_some(), "{cell:?}");
        assert_eq!(cpu.kernel_threads.is_some(), kernel_threads, "{cell:?}");
        assert!(cpu.io_thread_work.is_some() && cpu.io_thread_system.is_some(), "{cell:?}");
        let polling = measurement.polling.as_ref().expect("the daemon tells");
        // One that always finds work does not wait.
        let has_windows = polling.mean_window_ns.is_some() && polling.windows_reset.is_some();
        assert_eq!(has_windows, polling.waits > 0, "{cell:?}");
        assert_eq!(measurement.writes.is_some(), cell.id.load.starts_with("randrw"), "{cell:?}");
        assert_eq!(measurement.offered_iops.is_some(), cell.id.point == 1, "{cell:?}");
        assert!(!matches!(measurement.limit, Some(Bottleneck::Device(_))), "{cell:?}");
    }
    lab.await_nothing_left();
}

#[test]
fn fio_on_the_host_is_the_reference_line() {
    if !has_or_skips("fio") {
        return;
    }
    let lab = Lab::new(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n\
         [[subject]]\nname = 'host'\nstack = 'host'\n\
         [[subject]]\nname = 'egret'\nstack = 'egret'\nblockdev = { aio = 'io_uring' }\n\
         [[load]]\nrw = ['randread', 'randwrite']\nramp_time = '50ms'\nruntime = '2s'\n\
         [[load]]\nname = 'mine'\njobfile = 'mine.fio'\n",
    );
    // Whose disk it is run on the plan says; who cannot run it says so.
    let job = "[mine]\nrw=randread\nioengine=psync\nthread\nio_size=64k\nsize=64k\nexec_prerun=true\n";
    fs::write(lab.plan.with_file_name("mine.fio"), job).unwrap();
    let here = || fs::read_dir(lab.plan.parent().unwrap()).unwrap().count();
    let before = here();
    succeeded(&lab.bench(&[]).output().unwrap());
    assert_eq!(here(), before + 1, "what fio leaves where it runs is not where the user stands, but for the results");
    let run = lab.run();
    assert_eq!(run.cells.len(), 6);
    assert_eq!(run.job_files.keys().collect::<Vec<_>>(), ["mine"]);
    let (mine, rest): (Vec<_>, Vec<_>) = run.cells.iter().partition(|cell| cell.id.load == "mine");
    for cell in mine {
        match cell.id.subject.as_str() {
            "host" => assert_eq!(measured(cell).requests(), 16, "{cell:?}"),
            _ => assert!(matches!(cell.outcome, Outcome::Impossible { .. }), "{cell:?}"),
        }
    }
    for cell in rest {
        let measurement = measured(cell);
        assert!(measurement.requests() > 0 && measurement.latency(|latency| latency.p99).unwrap() > 0.0, "{cell:?}");
        assert!(measurement.cpu.load.unwrap() > 0, "{cell:?}");
    }
    assert!(run.host.components.iter().any(|component| component.name == "fio"));
    let served = |(subject, line): &(String, String)| subject == "egret" && line.contains(" serve ");
    assert!(run.host.commands.iter().any(served), "{:?}", run.host.commands);
    lab.await_nothing_left();
}

#[test]
fn fio_runs_on_several_hosts() {
    if !has_or_skips("fio") {
        return;
    }
    let lab = Lab::new("");
    let (one, other) = (lab.scratch.path("one"), lab.scratch.path("other"));
    let servers = [&one, &other].map(|socket| {
        let mut fio = Command::new("fio");
        fio.arg(format!("--server=sock:{}", socket.display())).stdout(Stdio::null()).stderr(Stdio::null());
        Reaped(fio.spawn().unwrap())
    });
    await_that("fio to listen", || [&one, &other].iter().all(|socket| UnixStream::connect(socket).is_ok()));
    let place = lab.plan.parent().unwrap().display();
    let plan = format!(
        "name = 'hosts'\ntitle = 't'\nrepetitions = 1\nnoise-floor = false\nhosts = ['sock:{}', 'sock:{}']\n\
         [disk]\ntype = 'file'\npath = '{place}'\nsize = '16M'\n\
         [[subject]]\nname = 'libaio'\nstack = 'host'\n[[load]]\nramp_time = 0\nruntime = '2s'\n\
         [[load]]\njobfile = 'mine.fio'\n",
        one.display(),
        other.display()
    );
    fs::write(&lab.plan, plan).unwrap();
    fs::write(lab.plan.with_file_name("mine.fio"), "[mine]\nrw=randread\nthread\nio_size=1M\n").unwrap();
    succeeded(&lab.bench(&[]).output().unwrap());
    let left = fs::read_dir(lab.plan.parent().unwrap()).unwrap().flatten().map(|entry| entry.file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains("disk")).collect();
    assert!(left.is_empty(), "fio's own file is there: {left:?}");
    let run = lab.run();
    assert_eq!(run.cells.len(), 4);
    assert!(run.cells.iter().all(|cell| measured(cell).requests() > 0), "{run:?}");
    drop(servers);
    lab.await_nothing_left();
}

#[test]
fn fio_runs_over_ssh_on_a_disk_that_is_there() {
    if !has_or_skips("fio") {
        return;
    }
    let scratch = Scratch::new();
    let (image, programs) = (scratch.image("image", 16 << 20), scratch.path("bin"));
    fs::create_dir(&programs).unwrap();
    // Of ssh's words the last is what runs there, and the one before it says where.
    let ssh = "#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\n[ \"$1\" = me@there ] || { echo \"no route to $1\" >&2; exit 255; }\nexec sh -c \"$2\"\n";
    write_script(&programs.join("ssh"), ssh);
    let path = with_programs(&programs);
    let with = |client: &str, rw: &str, more: &str| {
        Lab::new(&format!(
            "repetitions = 2\nnoise-floor = false\nio-submit = true\n[disk]\ntype = 'null'\n\
             [[subject]]\nname = 's'\nstack = 'ssh'\nclient = 'ssh:{client}'\ndisk = '{}'\n{more}\
             [[load]]\nrw = '{rw}'\nramp_time = '100ms'\nruntime = '2s'\n",
            image.display()
        ))
    };
    let plan = |client: &str, rw: &str| with(client, rw, "");
    let lab = plan("me@there", "randread");
    succeeded(&lab.bench(&[]).env("PATH", &path).output().unwrap());
    let cells = lab.run().cells;
    assert!(cells.len() == 2 && cells.iter().all(|cell| measured(cell).requests() > 0), "{cells:?}");

    // Of an Egret on this host that serves it there is all that of one under the lab's own load is.
    let monitor = scratch.path("monitor");
    let mut egret = Command::new(env!("CARGO_BIN_EXE_egret"));
    egret.arg("serve").arg(scratch.image("served", 1 << 20)).arg("--socket").arg(scratch.path("served.sock"));
    let chardev = format!("socket,id=qmp,path={},server=on,wait=off", monitor.display());
    egret.args(["--chardev", &chardev, "--monitor", "chardev=qmp"]).stdout(Stdio::null()).stderr(Stdio::null());
    let egret = Reaped(egret.spawn().unwrap());
    await_that("egret to listen", || UnixStream::connect(&monitor).is_ok());
    let lab = with("me@there", "randread", &format!("monitor = '{}'\n", monitor.display()));
    succeeded(&lab.bench(&[]).env("PATH", &path).output().unwrap());
    let cells = lab.run().cells;
    let measurement = measured(&cells[0]);
    assert!(measurement.io_thread_cores.is_some() && measurement.polling.is_some(), "{measurement:?}");
    assert!(measurement.cpu.io_thread_work.is_some() && measurement.cpu.load.is_none(), "{measurement:?}");
    if rustix::process::geteuid().is_root() {
        assert!(measurement.in_io_submit.is_some(), "{measurement:?}");
    }
    let [(subject, line)] = lab.run().host.commands.try_into().unwrap();
    assert!(subject == "s" && line.contains(" serve ") && line.contains("served.sock"), "{line}");
    drop(egret);
    assert!(!lab.bench(&["--output", "again"]).env("PATH", &path).output().unwrap().status.success());

    // A clock that goes ten times as fast.
    let wrong = scratch.path("wrong");
    fs::create_dir(&wrong).unwrap();
    let cat = "#!/bin/sh\n[ \"$1\" = /proc/uptime ] || exec /bin/cat \"$@\"\n\
               read -r up rest </proc/uptime\necho \"$(awk \"BEGIN { print 10 * $up }\") $rest\"\n";
    write_script(&wrong.join("cat"), cat);
    let lab = plan("me@there", "randread");
    lab.bench(&[]).env("PATH", format!("{}:{path}", wrong.display())).output().unwrap();
    assert!(lab.run().cells[0].failure().unwrap().starts_with("the clock there is wrong: "), "{:?}", lab.run().cells);

    let lab = plan("me@there", "randwrite");
    assert!(complaint(lab.bench(&[])).contains("over ssh: --write-device lets it"));
    fs::write(&image, vec![1; 16 << 20]).unwrap();
    let output = lab.bench(&["--write-device"]).env("PATH", &path).output().unwrap();
    assert!(!output.status.success() && lab.run().cells[0].failure().unwrap().contains("is not empty there"));

    let lab = plan("nobody", "randread");
    assert!(!lab.bench(&[]).env("PATH", &path).output().unwrap().status.success());
    assert!(lab.run().cells[0].failure().unwrap().contains("ssh nobody: no route to nobody"));
}

#[test]
fn of_a_domain_the_fingerprint_has_the_version_of_libvirt() {
    let lab = Lab::new(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'null'\n[[subject]]\nname = 's'\nstack = 'ssh'\n\
         client = 'ssh:there'\ndisk = '/dev/vdb'\ndomain = 'egret-no-such-domain'\n[[load]]\nruntime = '100ms'\n",
    );
    let programs = lab.scratch.path("bin");
    fs::create_dir(&programs).unwrap();
    for program in ["ssh", "libvirtd"] {
        let says = format!("#!/bin/sh\necho '{program} (of a test) 9.0.0'\n");
        write_script(&programs.join(program), &says);
    }
    lab.bench(&[]).env("PATH", with_programs(&programs)).output().unwrap();
    let run = lab.run();
    assert!(matches!(run.cells[0].outcome, Outcome::Impossible { .. }), "it does not run: {:?}", run.cells);
    let libvirt = run.host.components.iter().find(|one| one.name == "libvirtd").expect("libvirt's daemon");
    assert_eq!((libvirt.version.as_str(), libvirt.sha256.len()), ("libvirtd (of a test) 9.0.0", 64));
}

#[test]
fn fio_over_ssh_ends_with_the_connection() {
    if !has_or_skips("fio") {
        return;
    }
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::KILL] {
        let scratch = Scratch::new();
        let (lab, mut bench) = over_ssh(&scratch.image("image", 16 << 20), "processes = true\nruntime = '10m'");
        let mut child = Reaped(bench.spawn().unwrap());
        let there = |name: &str| {
            let has_folder = |process: &PathBuf| {
                let folder = fs::read_link(process.join("cwd"));
                folder.is_ok_and(|folder| folder.starts_with(lab.scratch.path("tmp")))
            };
            let is_called =
                |process: &PathBuf| fs::read_to_string(process.join("comm")).is_ok_and(|is| is.contains(name));
            let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
            processes.filter(|process| has_folder(process) && is_called(process)).count()
        };
        await_that("fio and its job", || there("fio") >= 2);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child.0), signal).unwrap();
        child.0.wait().unwrap();
        await_that("all to end there", || there("") == 0);
        await_that("the folder there to vanish", || fs::read_dir(lab.scratch.path("tmp")).unwrap().next().is_none());
    }
}

/// A lab with a load on a disk over ssh, and what runs it, to which `ssh` connects this machine. What that runs is in a session of
/// its own, as sshd has it, and has nothing of the connection but its end.
fn over_ssh(disk: &Path, load: &str) -> (Lab, Command) {
    let lab = Lab::new(&format!(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'null'\n\
         [[subject]]\nname = 's'\nstack = 'ssh'\nclient = 'ssh:there'\ndisk = '{}'\n[[load]]\n{load}\n",
        disk.display()
    ));
    let programs = lab.scratch.path("bin");
    fs::create_dir(&programs).unwrap();
    let ssh = "#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\ncat | setsid sh -c \"$1\" | cat\n";
    write_script(&programs.join("ssh"), ssh);
    let mut bench = lab.bench(&[]);
    bench.env("PATH", with_programs(&programs));
    (lab, bench)
}

#[test]
fn a_load_that_only_reads_leaves_a_file_over_ssh_as_it_is_though_it_wants_more_of_it_than_there_is() {
    if !has_or_skips("fio") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("image", 4 << 20);
    let content = vec![7; 4 << 20];
    fs::write(&image, &content).unwrap();
    let load = "rw = 'randread'\nsize = '16M'\nruntime = '2s'\nramp_time = '0s'";
    let (_lab, mut bench) = over_ssh(&image, load);
    let ended = bench.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(said.contains("1 cells measured"), "{said}");
    assert_eq!(fs::read(&image).unwrap(), content);
}

#[test]
fn a_disk_over_ssh_that_is_mounted_by_another_name_is_not_written_to() {
    if !is_root_or_skips("to mount a loop device") || !has_or_skips("fio") || !has_or_skips("mkfs.ext4") {
        return;
    }
    let scratch = Scratch::new();
    let device = egret_lab::disks::LoopDevice::over(&scratch.image("image", 16 << 20)).unwrap();
    let (root, at) = (scratch.path("root"), scratch.path("mnt"));
    std::os::unix::fs::symlink(device.path(), &root).unwrap();
    fs::create_dir(&at).unwrap();
    let done = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
    done(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(device.path()));
    let said = || {
        let (lab, mut bench) = over_ssh(device.path(), "rw = 'randwrite'\nruntime = '100ms'\nramp_time = '0s'");
        let ended = bench.arg("--write-device").output().unwrap();
        (lab.run().cells[0].failure().map(str::to_owned), ended)
    };
    done(Command::new("mount").args(["--no-canonicalize", "-t", "ext4"]).args([&root, &at]));
    let mounted = said();
    done(Command::new("umount").arg(&at));
    assert!(mounted.0.as_ref().is_some_and(|why| why.ends_with("is in use there")), "{mounted:?}");
    let free = said();
    assert!(free.0.as_ref().is_some_and(|why| why.contains("is not empty there, and")), "{free:?}");
}

#[test]
fn a_cell_over_ssh_failed_of_what_was_said_while_it_was_measured_and_not_before() {
    if !has_or_skips("fio") {
        return;
    }
    let scratch = Scratch::new();
    let load = "rw = 'randread'\nruntime = '2s'\nramp_time = '0s'";
    let (lab, mut bench) = over_ssh(&scratch.image("image", 16 << 20), load);
    let fio = "#!/bin/sh\nPATH=${PATH#*:}\n[ $# -gt 1 ] && ! mkdir \"$0-ran\" 2>/dev/null || { echo fio: a warning >&2; exec fio \"$@\"; }\n\
               echo fio: no more >&2\nexit 1\n";
    write_script(&lab.scratch.path("bin/fio"), fio);
    bench.args(["--repetitions", "2"]).output().unwrap();
    let cells = lab.run().cells;
    assert!(measured(&cells[0]).requests() > 0, "{cells:?}");
    assert!(cells[1].failure().unwrap().ends_with(": no more"), "{cells:?}");
}

/// The search path, with the programs in a folder before all others.
fn with_programs(folder: &Path) -> String {
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

/// A plan with profiles, and the path to a `perf` that does what a script says.
fn profiled(script: &str) -> (Lab, String) {
    let lab = Lab::new(
        "repetitions = 2\nnoise-floor = false\nperf = true\n[disk]\ntype = 'null'\nsize = '64M'\n\
         [[subject]]\nname = 'one'\nstack = 'egret'\n[[load]]\nramp_time = '20ms'\nruntime = '3s'\n",
    );
    let programs = lab.scratch.path("bin");
    fs::create_dir(&programs).unwrap();
    write_script(&programs.join("perf"), &format!("#!/bin/sh\n{script}"));
    (lab, with_programs(&programs))
}

#[test]
fn perf_looks_while_the_load_runs_and_the_page_has_what_it_saw() {
    // It writes down what it is told, and its call graph is that.
    let perf = "how=$1; what=\"$*\"
        while [ $# -gt 0 ]; do
            case $1 in --control=fifo:*) fifo=${1#--control=fifo:};; -o|-i) file=$2;; esac
            shift
        done
        case $how-$what in
        record-*' -a -g '*' -D -1 '*)
            trap 'dd if=$fifo of=$file bs=4096 count=1 iflag=nonblock 2>/dev/null; exit 0' TERM
            sleep 1000 & wait;;
        report-*sample,comm,sym*) printf '900 \\001 io0 \\001 [k] cpupri_set\\n100 \\001 x \\001 [.] a::b<c>\\n';;
        report-*) cat \"$file\";;
        esac";
    let (lab, path) = profiled(perf);
    succeeded(&lab.bench(&[]).env("PATH", &path).output().unwrap());
    let run = lab.run();
    for cell in &run.cells {
        let measured = measured(cell);
        assert_eq!((measured.samples, measured.symbols[0].name.as_str()), (1000, "cpupri_set"));
        let graph = lab.results().join("raw").join(format!("{}.callgraph", runner::raw_name(&cell.id)));
        assert_eq!(fs::read_to_string(graph).unwrap(), "enable\ndisable\n", "{:?}", cell.id);
    }
    let page = fs::read_to_string(lab.results().join("report.html")).unwrap();
    for said in
        [">cpupri_set</td>", ">io0</td>", ">90.00 % [", "href=\"raw/randread-4k-QD1--one--r1-p0.callgraph\">2</a>"]
    {
        assert!(page.contains(said), "the page has no {said}");
    }
    assert!(!page.contains("no profiles"));
}

#[test]
fn a_perf_that_may_not_look_is_said_on_the_page() {
    let (lab, path) = profiled("echo 'Error:' >&2; echo 'Access to performance monitoring is limited.' >&2; exit 1");
    succeeded(&lab.bench(&[]).env("PATH", &path).output().unwrap());
    let said = lab.run().host.warnings.into_iter().filter(|warning| warning.about == "perf").collect::<Vec<_>>();
    assert_eq!(said.len(), 1, "{said:?}");
    let page = fs::read_to_string(lab.results().join("report.html")).unwrap();
    for said in ["no profiles: Access to performance monitoring is limited. (as root, or", "There are no profiles:"] {
        assert!(page.contains(said), "the page does not say {said}");
    }
}

#[test]
fn any_command_that_serves_a_socket_can_be_measured() {
    let egret = env!("CARGO_BIN_EXE_egret");
    let lab = Lab::new(&format!(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n\
         [[subject]]\nname = 'mine'\nstack = 'vhost-user-blk'\n\
         command = 'true && {egret} serve {{disk}} --socket {{socket}}; true'\n\
         [[subject]]\nname = 'broken'\nstack = 'vhost-user-blk'\ncommand = 'echo no such luck for {{socket}} >&2; exit 3'\n\
         [[load]]\nramp_time = '20ms'\nruntime = '100ms'\n",
    ));
    // What failed is said, and ends the command with 1 however well the rest went.
    let output = lab.bench(&[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("1 cells measured, 1 failed"), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(said.contains("broken, repetition 1: failed: ") && said.contains("no such luck"), "{said}");
    assert_eq!(said.lines().count(), 1, "elsewhere than on a terminal nothing is said of what went well: {said}");
    for cell in lab.run().cells {
        match &cell.outcome {
            // The shell spends nothing, and the daemon is its child.
            Outcome::Measured(measurement) => assert!(measurement.cpu.server > Some(0), "{cell:?}"),
            Outcome::Failed { reason, .. } => assert!(reason.contains("no such luck"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    // The daemon was a grandchild, which the shell did not wait for.
    lab.await_nothing_left();
}

#[test]
fn nobody_is_told_what_a_server_spends_that_is_none_of_the_commands_processes() {
    let egret = env!("CARGO_BIN_EXE_egret");
    // It has left the command's processes, and ends when the last of these does.
    let away = "tail -f /dev/null | setsid -f sh -c \"SERVE & read x; kill \\$!\"";
    let away = away.replace("SERVE", &format!("{egret} serve {{disk}} --socket {{socket}}"));
    let lab = Lab::new(&format!(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n\
         [[subject]]\nname = 'away'\nstack = 'vhost-user-blk'\ncommand = '{away}'\n\
         [[load]]\nramp_time = '20ms'\nruntime = '100ms'\n",
    ));
    succeeded(&lab.bench(&[]).output().unwrap());
    let run = lab.run();
    let cpu = &measured(&run.cells[0]).cpu;
    assert!(cpu.serving().is_none() && cpu.load > Some(0), "{cpu:?}");
    lab.await_nothing_left();
}

#[test]
fn a_plan_of_which_nothing_can_be_measured_here_ends_with_1() {
    let lab = Lab::new(
        "noise-floor = false\n[disk]\ntype = 'null'\n[[subject]]\nname = 's'\nstack = 'vhost-user-blk'\ncommand = 'serve {disk} {socket}'\n[[load]]\n",
    );
    let output = lab.bench(&["--repetitions", "1"]).output().unwrap();
    let said = text(&output.stdout);
    assert!(said.contains("0 cells measured, 1 impossible here"), "{said}{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(1));
}

/// Cells that take long enough to be interrupted.
fn slow(disk: &str) -> Lab {
    Lab::new(&format!(
        "repetitions = 5\n[disk]\ntype = '{disk}'\nsize = '16M'\n[[subject]]\nname = 's'\nstack = 'egret'\n\
         [[load]]\nramp_time = '20ms'\nruntime = '200ms'\n",
    ))
}

/// Starts a run and waits until some cells are kept and another is being measured.
fn started(lab: &Lab) -> Reaped {
    let child = Reaped(lab.bench(&[]).spawn().unwrap());
    await_that("two cells", || lab.cells() >= 2);
    child
}

fn resumed(lab: &Lab, kept: &[Cell]) {
    let results = lab.results().display().to_string();
    succeeded(&lab.command(&["--resume", &results]).output().unwrap());
    let run = lab.run();
    assert_eq!(run.cells[..kept.len()], *kept);
    let ids: BTreeSet<_> = run.cells.iter().map(|cell| cell.id.clone()).collect();
    assert_eq!((run.cells.len(), ids.len()), (10, 10));
    assert!(run.ended.is_some());
    lab.await_nothing_left();
}

#[test]
fn a_lab_that_is_killed_leaves_nothing_behind_and_loses_no_cell() {
    let kinds =
        if is_root_or_skips("for a loop device") { ["null", "file", "loop"].as_slice() } else { &["null", "file"] };
    for disk in kinds {
        let lab = slow(disk);
        let mut child = started(&lab);
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        lab.await_nothing_left();
        let name = format!("egret-bench-{}-", child.0.id());
        await_that("files in memory to vanish", || {
            !fs::read_dir("/dev/shm")
                .unwrap()
                .flatten()
                .any(|entry| entry.file_name().to_string_lossy().starts_with(&name))
        });
        await_that("loop devices to detach", || {
            let devices = fs::read_dir("/sys/block").unwrap().flatten();
            let backing = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("loop/backing_file")).ok();
            !devices.filter_map(backing).any(|file| file.contains(&name))
        });
        let kept = lab.run().cells;
        assert!(kept.len() >= 2);
        resumed(&lab, &kept);
    }
}

#[test]
fn fios_jobs_end_with_the_lab_also_those_that_are_processes_and_those_of_a_fio_that_hangs() {
    // What hears nothing, with a job in a session of its own. It says more than a pipe holds, so that the lab listens to it, and has
    // said that it runs to whoever ends it then, before it is seen.
    let hangs = "#!/bin/sh\n[ $# -gt 1 ] || exec echo fio-3.33\ntrap '' TERM\nexec >/dev/null\nhead -c 100000 /dev/zero >&2\nsetsid tail -f \"$3\" &\nexec tail -f \"$3\"\n";
    for script in [None, Some(hangs)] {
        if script.is_none() && !has_or_skips("fio") {
            continue;
        }
        for signal in [rustix::process::Signal::INT, rustix::process::Signal::KILL] {
            let lab = Lab::new(
                "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n\
                 [[subject]]\nname = 'host'\nstack = 'host'\n[[load]]\nprocesses = true\nruntime = '10m'\n",
            );
            let programs = lab.scratch.path("bin");
            fs::create_dir(&programs).unwrap();
            if let Some(script) = script {
                write_script(&programs.join("fio"), script);
            }
            let path = with_programs(&programs);
            let mut child = Reaped(lab.bench(&[]).env("PATH", path).spawn().unwrap());
            let mine = lab.results().join("raw").display().to_string();
            let fios = || command_lines().iter().filter(|line| line.contains(&mine)).count();
            await_that("fio and its job", || fios() >= 2);
            rustix::process::kill_process(rustix::process::Pid::from_child(&child.0), signal).unwrap();
            child.0.wait().unwrap();
            await_that("fio and its job to end", || fios() == 0);
            lab.await_nothing_left();
        }
    }
}

#[test]
fn an_interrupt_keeps_what_is_finished_and_says_how_to_go_on() {
    let (lab, said) = await_some("an interrupt to come before the end", || {
        let lab = slow("null");
        let mut child = started(&lab);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child.0), rustix::process::Signal::INT)
            .unwrap();
        let status = child.0.wait().unwrap();
        let mut said = String::new();
        std::io::Read::read_to_string(&mut child.0.stderr.take().unwrap(), &mut said).unwrap();
        (!status.success()).then_some((lab, said))
    });
    assert!(said.contains("interrupted; to go on: egret bench --resume "), "{said}");
    lab.await_nothing_left();
    let run = lab.run();
    assert!(run.cells.len() >= 2 && run.ended.is_none());
    assert!(run.cells.iter().all(|cell| measured(cell).seconds > 0.19), "each was measured to its end");
    resumed(&lab, &run.cells);
}

#[test]
fn an_interrupt_of_the_second_of_several_plans_says_how_to_go_on_with_that() {
    let said = await_some("an interrupt to come before the end", || {
        let lab = slow("null");
        let first = lab.plan.with_file_name("first.toml");
        let load = "ramp_time = '10ms'\nruntime = '50ms'";
        let plan = fs::read_to_string(&lab.plan).unwrap().replace("ramp_time = '20ms'\nruntime = '200ms'", load);
        fs::write(&first, plan.replace("'test'", "'first'")).unwrap();
        let mut child = Reaped(lab.command(&["first.toml", "plan.toml", "--repetitions", "5"]).spawn().unwrap());
        let has_begun = || {
            let runs = fs::read_dir(lab.scratch.image_path("egret-bench")).into_iter().flatten().flatten();
            let second = runs.map(|run| run.path()).find(|run| run.to_string_lossy().contains("/test-"));
            second.is_some_and(|run| runner::read(&run).is_ok_and(|run| !run.cells.is_empty()))
        };
        await_that("a cell of the second plan", has_begun);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child.0), rustix::process::Signal::INT)
            .unwrap();
        let status = child.0.wait().unwrap();
        let mut said = String::new();
        std::io::Read::read_to_string(&mut child.0.stderr.take().unwrap(), &mut said).unwrap();
        (!status.success()).then_some((status.code(), said))
    });
    assert!(said.1.contains("interrupted; to go on: egret bench --resume egret-bench/test-"), "{said:?}");
    assert_eq!(said.0, Some(1));
}

#[test]
fn the_same_command_goes_on_with_a_run_and_a_finished_one_stays_as_it_is() {
    let lab = slow("null");
    succeeded(&lab.bench(&[]).output().unwrap());
    let before = lab.run();
    succeeded(&lab.bench(&[]).output().unwrap());
    assert_eq!(lab.run().cells, before.cells);
    let error = complaint(lab.bench(&["--repetitions", "4"]));
    assert!(error.contains("holds a run of something else"), "{error}");
}

#[test]
fn what_is_wrong_is_said_in_one_line_before_anything_starts() {
    let with = |plan: &str, more: &[&str]| {
        let lab = Lab::new(plan);
        let error = complaint(lab.bench(more));
        assert!(!lab.results().exists(), "{error}");
        error
    };
    let error = with(&NULL_DISK.replace("iodepth", "iodpeth"), &[]);
    assert!(error.ends_with("plan.toml:20: unknown key 'iodpeth'; did you mean 'iodepth'?"), "{error}");
    let error = with(&NULL_DISK.replace("poll-policy", "poll-polciy"), &[]);
    assert!(error.contains("subject 'off'") && error.contains("poll-policy"), "{error}");
    let error = with(&NULL_DISK.replace("'null'\nsize = '64M'", "'file'\nsize = '4096T'"), &[]);
    assert!(error.contains("too little space in "), "{error}");
    assert!(with(NULL_DISK, &["--only", "nobody"]).contains("no load and no subject has 'nobody'"));
    assert!(with(NULL_DISK, &["--scale", "0"]).contains("--scale must be above 0"));
    let device = NULL_DISK.replace("type = 'null'\nsize = '64M'", "type = 'device'\npath = '/dev/null'");
    assert!(with(&device, &[]).ends_with("the plan writes to /dev/null: --write-device lets it"));
    let error = with(&device, &["--write-device"]);
    assert!(error.contains("/dev/null is no block device"), "{error}");
    // A job file's own file or device would be written to, and none of the plan's checks look at it.
    let lab =
        Lab::new("[disk]\ntype = 'file'\n[[subject]]\nname = 'h'\nstack = 'host'\n[[load]]\njobfile = 'mine.fio'\n");
    let victim = lab.scratch.image("victim", 1 << 20);
    let job = format!("[global]\nfilename={}\n[mine]\nrw=write\nsize=64k\n", victim.display());
    fs::write(lab.plan.with_file_name("mine.fio"), job).unwrap();
    for more in [&["--dry-run"][..], &[]] {
        let error = complaint(lab.bench(more));
        assert!(error.contains("mine.fio has filename, by which fio uses something else"), "{error}");
    }
    assert!(fs::read(&victim).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn a_stack_that_is_not_installed_names_its_package() {
    let plan = "[disk]\ntype = 'null'\n[[subject]]\nname = 'q'\nstack = 'qemu-storage-daemon'\n[[load]]\nruntime = '50ms'\nramp_time = 0\n";
    let lab = Lab::new(plan);
    let mut command = lab.bench(&[]);
    command.env("PATH", lab.scratch.path("tmp"));
    let error = complaint(command);
    assert!(error.contains("qemu-storage-daemon is not installed: it comes with the package qemu-utils"), "{error}");

    // One that a plan can do without is left out, and the result says how to get it.
    let optional = plan
        .replace("stack =", "optional = true\nstack =")
        .replace("[[load]]", "[[subject]]\nname = 'e'\nstack = 'egret'\n[[load]]");
    let lab = Lab::new(&format!("baseline = 'e'\n{optional}"));
    let mut command = lab.bench(&["--repetitions", "1"]);
    succeeded(&command.env("PATH", lab.scratch.path("tmp")).output().unwrap());
    let run = lab.run();
    assert!(run.cells.iter().all(|cell| cell.id.subject != "q"), "{run:?}");
    let said = |text: &str| text.contains("without the subject 'q': qemu-storage-daemon is not installed");
    assert!(run.host.warnings.iter().any(|warning| said(&warning.text)), "{:?}", run.host.warnings);
    // The same command finds the same run again.
    let mut command = lab.bench(&["--repetitions", "1"]);
    succeeded(&command.env("PATH", lab.scratch.path("tmp")).output().unwrap());
}

#[test]
fn a_verdict_is_printed_written_for_a_ci_and_ends_the_command_where_it_is_asked_for() {
    let egret = env!("CARGO_BIN_EXE_egret");
    let subject = |name: &str, command: &str| {
        format!("[[subject]]\nname = '{name}'\nstack = 'vhost-user-blk'\ncommand = '{command}'\n")
    };
    let serves = format!("{egret} serve {{disk}} --socket {{socket}}");
    let plan = |other: &str| {
        let subjects = subject("good", &serves) + &subject("other", other);
        format!(
            "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n{subjects}\
             [[load]]\nramp_time = '20ms'\nruntime = '100ms'\n"
        )
    };
    for (other, code, line) in [
        (serves.as_str(), 2, "can't tell: of 2 comparisons 0 passed, 0 failed, 2 can't be told\n"),
        (
            "exit 3 # {socket}",
            1,
            "fail: of 1 comparisons 0 passed, 1 failed, 0 can't be told; 1 more decide nothing; of 2 cells 1 failed\n",
        ),
    ] {
        let lab = Lab::new(&plan(other));
        let file = lab.scratch.image_path("junit.xml");
        let output = lab.bench(&["--check", "--junit", &file.display().to_string()]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stdout));
        assert!(text(&output.stdout).ends_with(line), "{}", text(&output.stdout));
        let xml = fs::read_to_string(file).unwrap();
        assert_eq!(xml.contains(r#"errors="1""#), code == 1, "{xml}");
    }
}

#[test]
fn a_disk_is_measured_beside_999_idle_ones() {
    let lab = Lab::new(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'null'\nsize = '16M'\n\
         [[subject]]\nname = 's'\nstack = 'egret'\niothread = { fd-monitor = 'io_uring', poll-policy = 'off' }\n\
         [[load]]\nidle_disks = [0, 999]\nramp_time = '20ms'\nruntime = '2s'\n\
         [[chart]]\nid = 'd'\ntitle = 'Disks'\nform = 'ladder'\nmetric = 'iops'\nacross = 'disks'\n",
    );
    succeeded(&lab.bench(&[]).output().unwrap());
    let cells = lab.run().cells;
    assert!(cells.len() == 2 && cells.iter().all(|cell| measured(cell).requests() > 0), "{cells:?}");
    let report = fs::read_to_string(lab.results().join("report.md")).unwrap();
    for line in ["| randread 4k QD1 | s | 1 |", "| randread 4k QD1 999 idle disks | s | 1\u{202f}000 |"] {
        assert!(report.contains(line), "{report}");
    }
    lab.await_nothing_left();
}

#[test]
fn a_plan_measures_more_where_that_may_decide() {
    // One repetition decides nothing, and so it looks again after the second.
    let lab = Lab::new(
        "repetitions = 1\nmost-repetitions = 3\n[disk]\ntype = 'null'\nsize = '16M'\n\
         [[subject]]\nname = 'a'\nstack = 'egret'\n[[subject]]\nname = 'b'\nstack = 'egret'\n\
         [[load]]\nramp_time = '10ms'\nruntime = '30ms'\n",
    );
    succeeded(&lab.bench(&[]).output().unwrap());
    let run = lab.run();
    let ids: BTreeSet<_> = run.cells.iter().map(|cell| cell.id.clone()).collect();
    assert_eq!(ids.len(), run.cells.len());
    assert!(run.ended.is_some() && [6, 9].contains(&ids.len()), "{ids:?}");
    succeeded(&lab.bench(&[]).output().unwrap());
    assert_eq!(lab.run().cells, run.cells, "a finished run stays as it is");
}

#[test]
fn a_result_of_a_newer_lab_is_refused() {
    let lab = Lab::new(NULL_DISK);
    fs::create_dir(lab.results()).unwrap();
    fs::write(lab.results().join(runner::RESULT), r#"{"format": 99}"#).unwrap();
    let error = complaint(lab.bench(&[]));
    assert!(error.ends_with("a newer egret wrote it (format 99); this one reads up to 2"), "{error}");
}

#[test]
fn a_device_that_is_in_use_or_not_empty_is_not_written_to() {
    if !is_root_or_skips("for a loop device") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("image", 16 << 20);
    fs::write(&image, vec![0; 16 << 20]).unwrap();
    let device = egret_lab::disks::LoopDevice::over(&image).unwrap();
    let path = device.path().display();
    let plan = |more: &str| {
        format!(
            "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'device'\npath = '{path}'\n{more}\n\
             [[subject]]\nname = 's'\nstack = 'egret'\n[[load]]\nrw = 'randwrite'\nramp_time = 0\nruntime = '50ms'\n"
        )
    };
    // What was empty is not any more, and then the plan has to say that it may be destroyed.
    let lab = Lab::new(&plan(""));
    assert!(complaint(lab.bench(&[])).ends_with(&format!("the plan writes to {path}: --write-device lets it")));
    let write = ["--write-device"];
    succeeded(&lab.bench(&write).output().unwrap());
    let warnings = lab.run().host.warnings;
    assert!(warnings.iter().any(|warning| warning.about == "not-preconditioned"), "{warnings:?}");
    fs::File::options().write(true).open(device.path()).unwrap().write_all(&[1; 4096]).unwrap();
    let lab = Lab::new(&plan(""));
    assert!(complaint(lab.bench(&write)).contains("is not empty, and the plan writes to it; say destroy = true"));
    let lab = Lab::new(&plan("destroy = true\npreconditioned = true"));
    succeeded(&lab.bench(&write).output().unwrap());
    assert!(!lab.run().host.warnings.iter().any(|warning| warning.about == "not-preconditioned"));

    // Somebody holds it as a file system does.
    let flags = rustix::fs::OFlags::EXCL.bits() as i32;
    let mut options = fs::File::options();
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags);
    let _held = options.read(true).write(true).open(device.path()).unwrap();
    let lab = Lab::new(&plan("destroy = true"));
    assert!(complaint(lab.bench(&write)).contains("is in use"));
}

#[test]
fn a_device_is_written_full_where_that_is_asked_for_and_one_that_looks_empty_is_warned_of() {
    if !is_root_or_skips("for a loop device") || !has_or_skips("fio") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("image", 16 << 20);
    fs::write(&image, vec![0; 16 << 20]).unwrap();
    let device = egret_lab::disks::LoopDevice::over(&image).unwrap();
    let plan = format!(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'device'\npath = '{}'\n\
         [[subject]]\nname = 's'\nstack = 'egret'\n[[load]]\nrw = 'randread'\nramp_time = 0\nruntime = '50ms'\n",
        device.path().display()
    );
    let is_warned_of = |lab: &Lab| lab.run().host.warnings.iter().any(|one| one.about == "not-preconditioned");
    let lab = Lab::new(&plan);
    succeeded(&lab.bench(&[]).output().unwrap());
    assert!(is_warned_of(&lab), "it looks empty");

    let lab = Lab::new(&plan);
    assert!(complaint(lab.bench(&["--precondition"])).contains("--precondition writes all of"));
    let asked = ["--precondition", "--write-device"];
    succeeded(&lab.bench(&asked).output().unwrap());
    assert!(!is_warned_of(&lab) && lab.run().plan.disk.preconditioned);
    let written = fs::read(&image).unwrap();
    assert!(written.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
    // Going on with a run that is finished writes nothing.
    succeeded(&lab.bench(&asked).output().unwrap());
    assert_eq!(fs::read(&image).unwrap(), written);
    let lab = Lab::new("[disk]\ntype = 'null'\n[[subject]]\nname = 's'\nstack = 'egret'\n[[load]]\n");
    assert!(complaint(lab.bench(&asked)).contains("--precondition is for a disk of type 'device'"));
}

#[test]
fn what_fio_measured_elsewhere_is_brought_in() {
    let lab = Lab::new("");
    let output = r#"{ "jobs": [ { "jobname": "a", "error": 0, "job_runtime": 1000, "usr_cpu": 1, "sys_cpu": 1,
        "read": { "io_bytes": 4096, "runtime": 1000, "total_ios": 1, "clat_ns": { "mean": 7.0, "max": 9 } },
        "write": { "total_ios": 0 } } ] }"#;
    let file = lab.scratch.image_path("six.json");
    fs::write(&file, output).unwrap();
    let (results, file) = (lab.results().display().to_string(), file.display().to_string());
    succeeded(&lab.command(&["--output", &results, "--import", &file, &format!("seven={file}")]).output().unwrap());
    let run = lab.run();
    let subjects: Vec<_> = run.cells.iter().map(|cell| cell.id.subject.as_str()).collect();
    assert_eq!(subjects, ["six", "seven"]);
    assert_eq!(measured(&run.cells[0]).latency(|latency| latency.mean), Some(7.0));
    let error = complaint(lab.command(&["--resume", &results]));
    assert!(error.ends_with("results: what fio measured elsewhere does not go on here"), "{error}");
}

#[test]
fn runs_are_compared_in_groups_and_drawn_over_time() {
    let lab = slow("null");
    succeeded(&lab.bench(&["--repetitions", "1"]).output().unwrap());
    let results = lab.results().display().to_string();
    let egret = |words: &[&str]| {
        let mut egret = Command::new(env!("CARGO_BIN_EXE_egret"));
        egret.args(words).current_dir(lab.plan.parent().unwrap()).output().unwrap()
    };
    // A run beside itself has nothing that one repetition could tell, and twice the same run is not two.
    let one = egret(&["compare", &results, &results]);
    assert_eq!(one.status.code(), Some(2), "{}", text(&one.stderr));
    assert!(text(&one.stdout).contains("one run each: "), "{}", text(&one.stdout));
    let several = egret(&["compare", &results, &results, "--", &results, &results]);
    assert_eq!(several.status.code(), Some(3));
    assert!(text(&several.stderr).contains("one of the runs is given twice"), "{}", text(&several.stderr));
    assert!(!text(&several.stdout).contains("one run each: "), "{}", text(&several.stdout));
    assert!(text(&several.stdout).contains("the first runs are all of one boot: "), "{}", text(&several.stdout));
    let three = egret(&["compare", &results, &results, &results]);
    assert_eq!(three.status.code(), Some(3));
    assert!(text(&three.stderr).contains("two runs are compared, A and B, or several as A1 A2 A3 -- B1 B2 B3; got 3"));
    succeeded(&egret(&["report", &results]));
    let page = egret(&["report", "--output", "over-time.html", &results, &results]);
    assert_eq!(text(&page.stdout), "over-time.html\n");
    assert!(fs::read_to_string(lab.scratch.image_path("over-time.html")).unwrap().contains("<svg "));
    let page = egret(&["report", "--output", "first-night.html", &results]);
    assert_eq!(text(&page.stdout), "first-night.html\n");
    assert!(fs::read_to_string(lab.scratch.image_path("first-night.html")).unwrap().contains("over time"));
}

#[test]
fn a_second_run_is_measured_at_the_first_ones_rates_where_that_is_asked_for() {
    let plan =
        "noise-floor = false\nrepetitions = 1\n[disk]\ntype = 'null'\n[[subject]]\nname = 'one'\nstack = 'egret'\n";
    let load = "[[load]]\ncurve = { from = 50, to = 50, points = 1 }\nramp_time = '20ms'\nruntime = '100ms'\n";
    let lab = Lab::new(&format!("{plan}{load}"));
    let offered = |run: &Run| run.cells.iter().filter_map(|cell| measured(cell).offered_iops).collect::<Vec<_>>();
    succeeded(&lab.bench(&[]).output().unwrap());
    let first = lab.run();
    let before = lab.results().display().to_string();
    let place = lab.scratch.image_path("after");
    let (plan, after) = (lab.plan.display().to_string(), place.display().to_string());
    let at_its_rates = [&plan, "--output", &after, "--rates-of", &before];
    succeeded(&lab.command(&at_its_rates).output().unwrap());
    let second = runner::read(&place).unwrap();
    assert_eq!((offered(&second), second.peaks.len()), (offered(&first), 1));
    assert_ne!(first.cells[0], second.cells[0], "its own peak is another");
    // It goes on as it was begun.
    let seeds = [second.seed, second.seed + 1].map(|seed| format!("--seed={seed}"));
    let [its_seed, another] = seeds.each_ref().map(|seed| [&at_its_rates[..], &[seed.as_str()]].concat());
    succeeded(&lab.command(&at_its_rates).output().unwrap());
    succeeded(&lab.command(&its_seed).output().unwrap());
    let complains = |words: &[&str]| complaint(lab.command(words));
    for said in [complains(&at_its_rates[..3]), complains(&another)] {
        assert!(said.ends_with("holds a run of something else; --resume continues it as it was"), "{said}");
    }

    let new = lab.scratch.image_path("new").display().to_string();
    let said = complains(&[&plan, "--output", &new, "--rates-of", "nowhere"]);
    assert!(said.contains("nowhere/result.json: "), "{said}");
    fs::write(&lab.plan, fs::read_to_string(&lab.plan).unwrap().replace("curve", "iodepth = 4\ncurve")).unwrap();
    let said = complains(&[&plan, "--output", &new, "--rates-of", &before]);
    assert!(said.ends_with("results: it has measured no peak of 'randread 4k QD4 curve'"), "{said}");
    let said = complains(&["scheduler", "--output", &new, "--rates-of", &before]);
    assert!(said.ends_with("--rates-of is for curves, and scheduler has none"), "{said}");
}

#[test]
fn a_profile_is_taken_by_its_name() {
    let lab = Lab::new(&format!("{NULL_DISK}[profile.long]\nramp_time = '1m'\nruntime = '9m'\n"));
    let said = text(&lab.bench(&["--dry-run", "--profile", "long"]).output().unwrap().stdout);
    assert!(said.ends_with("test: 12 cells in 1 repetitions, about 121 min\n"), "{said}");
    assert!(complaint(lab.bench(&["--profile", "lnog"])).ends_with("test has no profile 'lnog': it has long"));
}

#[test]
fn a_profile_whose_disks_find_no_room_is_measured_on_the_plans_own_and_the_report_says_so() {
    let lab = Lab::new(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'file'\nsize = '16M'\n[[subject]]\nname = 's'\nstack = 'egret'\n\
         [[load]]\n[profile.long]\nramp_time = 0\nruntime = '100ms'\nsize = '4096T'\n",
    );
    let said = |output: Output| {
        succeeded(&output);
        text(&output.stdout)
    };
    let line = "disks of 16M and not of the profile's 4096T: too little space in ";
    let dry = said(lab.bench(&["--dry-run", "--profile", "long"]).output().unwrap());
    assert_eq!(dry.matches(line).count(), 1, "{dry}");
    said(lab.bench(&["--profile", "long"]).output().unwrap());
    let warnings: Vec<String> = lab.run().host.warnings.into_iter().map(|warning| warning.text).collect();
    assert_eq!(warnings.iter().filter(|text| text.starts_with(line)).count(), 1, "{warnings:?}");
    assert!(!said(lab.bench(&["--dry-run"]).output().unwrap()).contains("profile"));
}

#[test]
fn a_dry_run_names_the_cells_and_touches_nothing() {
    let lab = Lab::new(NULL_DISK);
    let output = lab.bench(&["--dry-run"]).output().unwrap();
    succeeded(&output);
    let said = text(&output.stdout);
    assert!(said.contains("two threads") && said.contains(", 50% of the highest peak"), "{said}");
    assert!(said.ends_with("test: 12 cells in 1 repetitions, about 15 s\n"), "{said}");
    assert!(!said.contains("warning: "), "a null disk has no engine: {said}");
    assert!(!lab.results().exists());
    let lab = Lab::new(&NULL_DISK.replacen("'null'", "'file'", 1));
    let said = text(&lab.bench(&["--dry-run"]).output().unwrap().stdout);
    assert!(said.contains("\nwarning: subject 'two threads' names no aio, and so has threads"), "{said}");
    for words in [&["--resume", "x", "--dry-run"][..], &["--resume", "x", "--seed=1"], &["--import", "x", "--dry-run"]]
    {
        let error = complaint(lab.command(words));
        let other = words[2].split('=').next().unwrap();
        assert!(error.contains(other) && error.contains("cannot be used with"), "{error}");
    }
}
