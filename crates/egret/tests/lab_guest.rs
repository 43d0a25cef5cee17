//! The lab's guests: real fio and real applications in a Linux guest, on QEMU's disks and on Egret's.
//!
//! Most machines that run tests have no KVM for an ordinary guest, so nothing here looks at how fast anything was.
//! `docs/testing.md` tells what these tests need; without it they skip themselves and say so.

mod support;

use std::path::Path;
use std::process::Command;

use egret_lab::machine::Placement;
use egret_lab::plan::{Load, LoadKeys, Subject, expand};
use egret_lab::process::{self, ProcessReaper};
use egret_lab::results::Measurement;
use egret_lab::stack::{Context, Deployment, Disk, Task, Unable, deploy};
use support::scratch::{Scratch, is_root, write_script};
use support::vm::{cache, can_boot_or_skips, scripts_folder};

/// The size of a disk, in bytes.
const DISK: u64 = 192 << 20;

#[test]
fn fio_in_a_guest_measures_virtio_blk_of_qemus_own() {
    if !can_boot_or_skips() {
        return;
    }
    let lab = Lab::new();
    // More than there are slots for, so that they share some.
    let mut deployment = lab.deploy("blockdev = { aio = 'native' }", &beside(100));
    fio_measures(&lab, deployment.as_mut(), 100);
    a_panic_is_seen(&lab, deployment.as_mut());
}

#[test]
fn fio_in_a_guest_measures_virtio_scsi_of_qemus_own_on_two_io_threads() {
    if !can_boot_or_skips() {
        return;
    }
    let lab = Lab::new();
    let mut deployment = lab.deploy("device = 'virtio-scsi'\niothreads = 2\nblockdev = { aio = 'io_uring' }", FIO);
    fio_measures(&lab, deployment.as_mut(), 0);
}

#[test]
fn fio_in_a_guest_measures_virtio_blk_served_by_egret() {
    if !can_boot_or_skips() {
        return;
    }
    let lab = Lab::new();
    let mut deployment = lab.deploy("server = 'egret'\nblockdev = { aio = 'io_uring' }", &beside(100));
    let cores = fio_measures(&lab, deployment.as_mut(), 100);
    assert_eq!(cores, Some(1), "of Egret's I/O thread, and none of QEMU's");
}

#[test]
fn fio_in_a_guest_measures_virtio_scsi_served_by_egret() {
    if !can_boot_or_skips() {
        return;
    }
    let lab = Lab::new();
    let mut deployment = lab.deploy("server = 'egret'\ndevice = 'virtio-scsi'\nblockdev = { aio = 'native' }", FIO);
    fio_measures(&lab, deployment.as_mut(), 0);
}

#[test]
fn a_guest_has_the_scheduler_that_its_subject_asks_for_or_the_cell_says_what_it_has() {
    if !can_boot_or_skips() {
        return;
    }
    let lab = Lab::new();
    let mut deployment = lab.deploy("scheduler = 'mq-deadline'", FIO);
    // By the guest itself, and while it is under load.
    let path = lab.scratch.image_path("look.fio");
    let look = |scheduler: &str| {
        let looks = format!("dash -c \"grep -qF [{scheduler}] /sys/block/vda/queue/scheduler\"");
        let job = format!("[job]\nrw=read\nsize=1M\nexec_prerun={looks}\n");
        std::fs::write(&path, job).expect("our own directory");
        load(&format!("jobfile = '{}'", path.display()))
    };
    assert!(lab.measured(deployment.as_mut(), &look("mq-deadline")).requests() > 0);
    let other = lab.measure(deployment.as_mut(), &look("none"));
    assert!(matches!(other, Err(Unable::Failed { .. })), "it looks where it should: {other:?}");
    drop(deployment);
    let Err(unable) = lab.try_deploy("scheduler = 'none-such'", FIO) else { panic!("no kernel has it") };
    let Unable::Impossible(reason) = unable else { panic!("{unable:?}") };
    assert!(reason.contains("no scheduler 'none-such' for the guest's /dev/vda: it has [none]"), "{reason}");
}

#[test]
fn rsync_and_a_database_run_in_one_guest_one_after_the_other() {
    if !can_boot_or_skips() {
        return;
    }
    run("make-apps");
    let lab = Lab::new();
    let rsync = load("application = 'rsync'\nsize = '2M'");
    let mut deployment = lab.deploy("blockdev = { aio = 'threads' }", "application = 'rsync'\nsize = '2M'");
    let copied = lab.measured(deployment.as_mut(), &rsync);
    assert!(copied.seconds > 0.0);
    assert_eq!((copied.requests(), copied.transactions), (0, None));

    let pgbench = load("application = 'pgbench'\nsize = '16M'\niodepth = 2\nruntime = '1s'\nramp_time = 0");
    assert!(deployment.takes(&pgbench));
    let database = lab.measured(deployment.as_mut(), &pgbench);
    assert!(database.transactions.is_some_and(|tps| tps > 0.0));
    assert!(database.requests() > 0);
    assert!(database.latency(|latency| latency.p99).unwrap() >= database.latency(|latency| latency.p50).unwrap());
}

#[test]
fn two_qemus_are_compared_in_guests_and_a_mail_tells_of_it() {
    if !can_boot_or_skips() {
        return;
    }
    run("make-guest");
    let scratch = Scratch::new();
    // Another program by its path, and the same one by what it does.
    let (after, plan, results) = (scratch.path("after"), scratch.path("two.toml"), scratch.path("results"));
    write_script(&after, "#!/bin/sh\nexec qemu-system-x86_64 \"$@\"\n");
    std::fs::write(&plan, TWO_QEMUS).expect("our own directory");
    let egret = |words: &[&std::ffi::OsStr]| {
        let output = Command::new(env!("CARGO_BIN_EXE_egret")).args(words).output().expect("egret starts");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let named = format!("after={}", after.display());
    egret(&["bench".as_ref(), plan.as_ref(), "--qemu".as_ref(), named.as_ref(), "--output".as_ref(), results.as_ref()]);
    let mail = egret(&["report".as_ref(), "--mail".as_ref(), results.as_ref()]);
    let row = mail.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = row.clone().find(|row| row.starts_with(&["randread", "8k", "2", "2", "2"])).expect(&mail);
    let [iops, busy] = [row[5], row[row.len() - 3]].map(|word| word.parse::<f64>().expect(&mail));
    assert!(iops > 0.0 && busy > 0.0, "{mail}");
    for qemu in ["qemu-system-x86_64: QEMU emulator", &format!("{0}: QEMU emulator", after.display())] {
        assert!(mail.contains(qemu), "{mail}");
    }
}

/// Jobs that go across two disks, each with a queue for either of two I/O threads that spin.
const TWO_QEMUS: &str = r#"
name = "two"
title = "Two QEMUs"
repetitions = 1
noise-floor = false

[disk]
type = "file"
size = "16M"

[[subject]]
name = "before"
line = "before"
at = 2
stack = "guest"
iothreads = 2
iothread = { poll-max-ns = 32768, poll-grow = 2, poll-shrink = 2 }

[[subject]]
name = "after"
line = "after"
at = 2
stack = "guest"
qemu = "after"
iothreads = 2
iothread = { poll-max-ns = 0 }

[[load]]
bs = "8k"
numjobs = 2
disks = 2
across_disks = true
processes = true
ramp_time = "100ms"
runtime = "2s"
"#;

const FIO: &str = "rw = 'randrw'\nbs = '8k'\niodepth = 4\nruntime = '1s'\nramp_time = '100ms'";

/// [`FIO`] on one disk beside so many idle ones.
fn beside(idle: u16) -> String {
    format!("{FIO}\nidle_disks = {idle}")
}

/// Loads a guest twice, with a pause between, then asks for what fio cannot do, and checks what comes of it. Returns how many
/// cores its I/O threads have.
fn fio_measures(lab: &Lab, deployment: &mut dyn Deployment, idle: u16) -> Option<u32> {
    let randrw = load(&beside(idle));
    let first = lab.measured(deployment, &randrw);
    for operations in [&first.reads, &first.writes] {
        let operations = operations.as_ref().expect("half of the requests are of either kind");
        assert!(operations.requests > 0 && operations.latency.mean > 0.0);
        // fio forgets what it counted in the ramp, and what is in flight then is half forgotten.
        assert!(operations.bytes.abs_diff(operations.requests * 8192) <= 4 * 8192, "{operations:?}");
    }
    assert!(first.cpu.guest.is_some(), "what is not fio's: {:?}", first.cpu);
    assert!(first.cpu.io_thread_work.is_some() && first.cpu.io_thread_system.is_some());
    assert!(first.cpu.load.is_some_and(|ns| ns > 0), "its processors have worked, for fio: {:?}", first.cpu);
    assert!(first.in_io_submit.is_some() || !is_root(), "root may look at what I/O threads sleep in");

    deployment.pause();
    deployment.resume();
    let read = load(&format!("rw = 'read'\nbs = '64k'\nruntime = '1s'\nramp_time = 0\nidle_disks = {idle}"));
    assert!(deployment.takes(&read));
    let second = lab.measured(deployment, &read);
    assert!(second.reads.is_some() && second.writes.is_none());

    let wrong = load("rw = 'sideways'\nruntime = '1s'\nramp_time = 0");
    let Err(Unable::Failed { reason, log }) = lab.measure(deployment, &wrong) else {
        panic!("fio knows no such thing")
    };
    assert!(reason.contains("ended with status 1"), "{reason}");
    assert!(log.iter().any(|line| line.contains("sideways")), "{log:#?}");
    assert!(deployment.takes(&read), "the guest is as it was");
    first.io_thread_cores
}

/// Has fio bring the guest's kernel down.
fn a_panic_is_seen(lab: &Lab, deployment: &mut dyn Deployment) {
    let path = lab.scratch.image_path("panic.fio");
    let job = "[job]\nrw=read\nsize=1M\nexec_prerun=dash -c \"echo c >/proc/sysrq-trigger\"\n";
    std::fs::write(&path, job).expect("our own directory");
    let panic = load(&format!("jobfile = '{}'", path.display()));
    let Err(Unable::Failed { reason, log }) = lab.measure(deployment, &panic) else { panic!("the guest is down") };
    assert!(reason.contains("the guest is gone") && reason.contains("Kernel panic"), "{reason}: {log:#?}");
    assert!(!deployment.takes(&load(&beside(17))), "it is of no use any more");
}

/// A disk in a file, and what guests are started with.
struct Lab {
    scratch: Scratch,
    disk: Disk,
    context: Context,
    _sockets: process::Scratch,
}

impl Lab {
    fn new() -> Self {
        run("make-guest");
        let scratch = Scratch::new();
        let disk = Disk::File(scratch.image("disk", DISK));
        let reaper = ProcessReaper::new().expect("a shell");
        let sockets = process::Scratch::new(&std::env::temp_dir(), &reaper).expect("a directory");
        let context = Context {
            reaper,
            scratch: sockets.path().into(),
            placement: Placement::default(),
            egret: env!("CARGO_BIN_EXE_egret").into(),
            destroy: false,
        };
        Self { scratch, disk, context, _sockets: sockets }
    }

    /// A guest with the keys of a subject, for a load.
    fn deploy(&self, subject: &str, keys: &str) -> Box<dyn Deployment> {
        self.try_deploy(subject, keys).unwrap_or_else(|unable| panic!("{unable:#?}"))
    }

    fn try_deploy(&self, subject: &str, keys: &str) -> Result<Box<dyn Deployment>, Unable> {
        let subject: Subject =
            toml::from_str(&format!("name = 'guest'\nstack = 'guest'\n{subject}")).expect("a subject");
        deploy(&subject, &load(keys), std::slice::from_ref(&self.disk), &self.context)
    }

    fn measured(&self, deployment: &mut dyn Deployment, load: &Load) -> Measurement {
        self.measure(deployment, load).unwrap_or_else(|unable| panic!("{unable:#?}"))
    }

    fn measure(&self, deployment: &mut dyn Deployment, load: &Load) -> Result<Measurement, Unable> {
        let raw = self.scratch.image_path("raw");
        deployment.measure(&Task { load, rate_iops: None, seed: 1, control: None, io_submit: true, raw: &raw })
    }
}

fn load(keys: &str) -> Load {
    expand(&toml::from_str::<LoadKeys>(keys).expect("a load")).remove(0)
}

/// Runs one of the scripts that make what guests need; they do nothing when it is there.
fn run(script: &str) {
    let status = Command::new(scripts_folder().join(script)).status().expect("a script of ours starts");
    assert!(status.success(), "{script}: {status}");
    assert!(Path::new(&cache()).is_dir());
}
