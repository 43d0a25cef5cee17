//! Disks of the user's, here and on a machine behind ssh.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

/// OpenSSH's server and client, between which nothing is but a pipe, with keys and settings of their own.
struct Ssh {
    scratch: Scratch,
}

impl Ssh {
    /// `None` where it is not installed, said under the test's name.
    fn new() -> Option<Self> {
        const SERVER: &str = "/usr/sbin/sshd";
        for program in [SERVER, "ssh", "ssh-keygen"] {
            if !has_or_skips(program) {
                return None;
            }
        }
        let scratch = Scratch::new();
        let path = |name: &str| scratch.path(name).display().to_string();
        let write = |name: &str, text: String| fs::write(scratch.path(name), text).unwrap();
        for key in ["host", "user"] {
            let mut keygen = Command::new("ssh-keygen");
            succeeded(&keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)]).output().unwrap());
        }
        write("known", format!("machine {}", fs::read_to_string(scratch.path("host.pub")).unwrap()));
        // Where it keeps its unprivileged part, as root, which nobody else may write to; its service makes it otherwise.
        let _ = fs::create_dir("/run/sshd");
        let _ = fs::set_permissions("/run/sshd", fs::Permissions::from_mode(0o755));
        write(
            "sshd",
            format!(
                "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n\
                 PermitRootLogin prohibit-password\nPidFile none\n",
                path("host"),
                path("user.pub")
            ),
        );
        succeeded(&Command::new(SERVER).args(["-t", "-f", &path("sshd")]).output().unwrap());
        write(
            "config",
            format!(
                "Host machine\nProxyCommand {SERVER} -i -f {}\nIdentityFile {}\nIdentitiesOnly yes\n\
                 UserKnownHostsFile {}\nStrictHostKeyChecking yes\n",
                path("sshd"),
                path("user"),
                path("known")
            ),
        );
        // ssh looks for its settings in the user's home, and this is not that.
        fs::create_dir(scratch.path("bin")).unwrap();
        let ssh = egret_lab::stack::find("ssh").unwrap();
        write_script(
            &scratch.path("bin/ssh"),
            &format!("#!/bin/sh\nexec {} -F {} \"$@\"\n", ssh.display(), path("config")),
        );
        Some(Self { scratch })
    }

    fn search_path(&self) -> String {
        with_programs(&self.scratch.path("bin"))
    }
}

#[test]
fn fio_runs_through_openssh_on_sixteen_disks_at_once() {
    if !has_or_skips("fio") {
        return;
    }
    let Some(ssh) = Ssh::new() else { return };
    let disks: Vec<_> = (0..16).map(|number| ssh.scratch.image(&format!("disk{number}"), 1 << 20)).collect();
    let named: Vec<String> = disks.iter().map(|disk| format!("'{}'", disk.display())).collect();
    let lab = Lab::new(&format!(
        "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'null'\n\
         [[subject]]\nname = 'there'\nstack = 'ssh'\nclient = 'ssh:machine'\ndisk = [{}]\n\
         [[load]]\ndisks = [1, 16]\nramp_time = '100ms'\nruntime = '2s'\n\
         [[load]]\nname = 'across'\nrw = 'randwrite'\ndisks = 16\nacross_disks = true\nramp_time = 0\nruntime = '2s'\n\
         [[load]]\nname = 'too many'\ndisks = 17\n",
        named.join(", ")
    ));
    // A disk is written to by chance. Of so many requests each has some; where this machine's disk is slow it takes more than one run.
    let cells = loop {
        succeeded(&lab.bench(&["--write-device"]).env("PATH", ssh.search_path()).output().unwrap());
        let cells = lab.run().cells;
        if cells.iter().any(|cell| cell.id.load == "across" && measured(cell).requests() > 500) {
            break cells;
        }
        fs::remove_dir_all(lab.results()).unwrap();
    };
    for cell in &cells {
        match &cell.outcome {
            Outcome::Impossible { reason } => {
                assert_eq!(reason, "the load asks for 17 disks, and the subject has 16");
                assert_eq!(cell.id.load, "too many");
            }
            _ => assert!(measured(cell).requests() > 0, "{cell:?}"),
        }
    }
    // Every disk was written to.
    for disk in disks {
        assert!(fs::read(disk).unwrap().iter().any(|byte| *byte != 0));
    }
}

#[test]
fn several_devices_are_loaded_at_once_and_have_the_scheduler_that_a_subject_asks_for_meanwhile() {
    if !is_root_or_skips("for loop devices") || !has_or_skips("fio") {
        return;
    }
    let scratch = Scratch::new();
    let devices: Vec<_> = (0..3)
        .map(|number| egret_lab::disks::LoopDevice::over(&scratch.image(&format!("image{number}"), 2 << 20)).unwrap())
        .collect();
    let paths: Vec<String> = devices.iter().map(|device| device.path().display().to_string()).collect();
    let scheduler = |path: &str| format!("/sys/block/{}/queue/scheduler", path.trim_start_matches("/dev/"));
    let (before, seen) = (fs::read_to_string(scheduler(&paths[0])).unwrap(), scratch.path("seen"));
    let plan = |paths: &[&String], more: &str| {
        format!(
            "repetitions = 1\nnoise-floor = false\n[disk]\ntype = 'device'\npath = {paths:?}\n\
             [[subject]]\nname = 'as it is'\nstack = 'host'\n\
             [[subject]]\nname = 'other'\nstack = 'host'\nscheduler = 'mq-deadline'\n\
             [[subject]]\nname = 'none such'\nstack = 'host'\nscheduler = 'none-such'\n{more}"
        )
    };
    let load = "[[load]]\ndisks = 3\nrw = 'randwrite'\nramp_time = 0\nruntime = '2s'\n\
                [[load]]\nname = 'mine'\njobfile = 'mine.fio'\n";
    let lab = Lab::new(&plan(&paths.iter().collect::<Vec<_>>(), load));
    let job = format!(
        "[mine]\nrw=read\nthread\nsize=64k\nexec_prerun=sh -c \"cat {} >>{}\"\n",
        scheduler(&paths[0]),
        seen.display()
    );
    fs::write(lab.plan.with_file_name("mine.fio"), job).unwrap();
    succeeded(&lab.bench(&["--write-device"]).output().unwrap());
    for cell in &lab.run().cells {
        match &cell.outcome {
            Outcome::Impossible { reason } => {
                assert!(reason.contains("no scheduler 'none-such' for") && reason.contains("it has"), "{reason}");
                assert_eq!(cell.id.subject, "none such");
            }
            _ => assert!(measured(cell).requests() > 0, "{cell:?}"),
        }
    }
    assert!(fs::read_to_string(&seen).unwrap().contains("[mq-deadline]"));
    assert_eq!(fs::read_to_string(scheduler(&paths[0])).unwrap(), before, "it has its own again");
    for path in &paths {
        assert!(fs::read(path).unwrap().iter().any(|byte| *byte != 0), "{path} was written to");
    }

    let few = Lab::new(&plan(&[&paths[0], &paths[1]], "[[load]]\ndisks = 3\n"));
    assert!(complaint(few.bench(&[])).contains("the plan loads 3 disks at once, and there are 2: /dev/loop"));
    let twice = Lab::new(&plan(&[&paths[0], &paths[0]], "[[load]]\n"));
    assert!(complaint(twice.bench(&[])).contains("is a disk already: several disks are several devices"));
    let files =
        Lab::new("[disk]\ntype = 'file'\npath = ['a', 'b']\n[[subject]]\nname = 's'\nstack = 'egret'\n[[load]]\n");
    assert!(complaint(files.bench(&[])).contains("only a disk of type 'device' has several paths"));
}

#[test]
fn a_disk_has_its_own_scheduler_again_even_if_the_lab_is_killed() {
    if !is_root_or_skips("for a loop device") || !has_or_skips("fio") {
        return;
    }
    let scratch = Scratch::new();
    let device = egret_lab::disks::LoopDevice::over(&scratch.image("image", 2 << 20)).unwrap();
    let path = device.path().display().to_string();
    let file = format!("/sys/block/{}/queue/scheduler", &path["/dev/".len()..]);
    let scheduler = || fs::read_to_string(&file).unwrap();
    // One that was detached keeps what it had.
    fs::write(&file, "none").unwrap();
    let before = scheduler();
    let lab = Lab::new(&format!(
        "[disk]\ntype = 'device'\npath = '{path}'\n[[subject]]\nname = 's'\nstack = 'host'\nscheduler = 'mq-deadline'\n\
         [[load]]\nruntime = '1h'\n"
    ));
    let mut child = Reaped(lab.bench(&[]).spawn().unwrap());
    await_that("another scheduler", || scheduler().contains("[mq-deadline]"));
    child.0.kill().unwrap();
    await_that("its own scheduler", || scheduler() == before);
    lab.await_nothing_left();
}
