//! A test program's tests, one in a process.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::rewrite::Id;

pub(crate) struct Test {
    program: PathBuf,
    /// Its package's.
    folder: PathBuf,
    pub(crate) name: String,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    TookTooLong,
}

/// Where tests run, one at a time.
pub(crate) struct Place {
    /// Where they put their files.
    scratch: PathBuf,
}

/// # Errors
/// Where it cannot be asked.
pub(crate) fn list(program: &Path, folder: &Path) -> anyhow::Result<Vec<Test>> {
    let output = Command::new(program).args(["--list", "--format=terse"]).current_dir(folder).output()?;
    ensure!(output.status.success(), "{} lists no tests", program.display());
    let lines = String::from_utf8(output.stdout)?;
    let names = lines.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names
        .map(|name| Test { program: program.to_owned(), folder: folder.to_owned(), name: name.to_owned() })
        .collect())
}

impl Place {
    pub(crate) fn new(number: u64) -> Self {
        Self { scratch: std::env::temp_dir().join(format!("egret-mutate-{}-{number}", std::process::id())) }
    }

    /// Runs a test as it is, and looks which changes it reaches.
    ///
    /// # Errors
    /// Where it cannot be run.
    pub(crate) fn reach(&self, test: &Test, limit: Duration) -> anyhow::Result<(Outcome, Vec<Id>)> {
        let path = self.scratch.with_extension("reached");
        let file = File::options().append(true).create(true).open(&path)?;
        let outcome = self.start(test, Some(("EGRET_REACHED_TO_STDIN", "1")), file.into(), limit)?;
        let bytes = fs::read(&path)?;
        fs::remove_file(&path)?;
        Ok((outcome, bytes.as_chunks().0.iter().map(|id| Id::from_le_bytes(*id)).collect()))
    }

    /// Runs a test with a change.
    ///
    /// # Errors
    /// Where it cannot be run.
    pub(crate) fn change(&self, test: &Test, change: Id, limit: Duration) -> anyhow::Result<Outcome> {
        self.start(test, Some(("EGRET_CHANGE", &change.to_string())), Stdio::null(), limit)
    }

    /// Runs a test as it was built.
    ///
    /// # Errors
    /// Where it cannot be run.
    pub(crate) fn run(&self, test: &Test, limit: Duration) -> anyhow::Result<Outcome> {
        self.start(test, None, Stdio::null(), limit)
    }

    fn start(&self, test: &Test, told: Option<(&str, &str)>, stdin: Stdio, limit: Duration) -> anyhow::Result<Outcome> {
        fs::create_dir_all(&self.scratch)?;
        // Many of them never end by themselves, and are not to outlive whoever limits them.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(&test.program);
        command.args(["--exact", &test.name]).current_dir(&test.folder).process_group(0);
        command.envs(told).env("TMPDIR", &self.scratch).env("RUST_BACKTRACE", "0");
        let mut child = command.stdin(stdin).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let begun = Instant::now();
        let outcome = loop {
            if let Some(status) = child.try_wait()? {
                break if status.success() { Outcome::Passed } else { Outcome::Failed };
            }
            if begun.elapsed() > limit {
                break Outcome::TookTooLong;
            }
            thread::sleep(Duration::from_millis(2));
        };
        // Of one that has ended another may have the number.
        let held = if outcome == Outcome::TookTooLong { held(child.id()) } else { Vec::new() };
        self.end(&mut child, held)?;
        Ok(outcome)
    }

    /// Ends what is left of a test, and puts away what it has left behind.
    fn end(&self, child: &mut Child, held: Vec<PathBuf>) -> anyhow::Result<()> {
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
        loop {
            // Who waits for a file system of its own cannot even be killed until that is gone.
            for mount in fs::read_to_string("/proc/self/mounts")?.lines().filter_map(|line| line.split(' ').nth(1)) {
                if Path::new(mount).starts_with(&self.scratch) {
                    let _ = unmount(mount, UnmountFlags::FORCE | UnmountFlags::DETACH);
                }
            }
            if child.try_wait()?.is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(2));
        }
        for file in held {
            for device in fs::read_dir("/sys/block")?.filter_map(Result::ok) {
                let backing = fs::read_to_string(device.path().join("loop/backing_file"));
                if backing.is_ok_and(|backing| Path::new(backing.trim_end()) == file) {
                    Command::new("losetup").arg("-d").arg(Path::new("/dev").join(device.file_name())).status()?;
                }
            }
            let _ = fs::remove_file(file);
        }
        let _ = fs::remove_dir_all(&self.scratch);
        Ok(())
    }
}

/// Files in memory that a process has open: disks of loop devices, mostly, which stay when it is killed.
fn held(process: u32) -> Vec<PathBuf> {
    let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
    let files = open.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    files.filter(|file| file.starts_with("/dev/shm")).collect()
}
