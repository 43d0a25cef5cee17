//! A guest as its console shows it.

use std::io::{BufRead as _, BufReader, Read as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use crate::support::server::Reaped;
use crate::support::vm::scripts_folder;

/// What a guest has printed on its console.
pub struct Guest {
    pub console: String,
}

impl Guest {
    /// Boots a guest whose disks `attach` names, and runs scripts of `scripts/guest-tests` in it.
    ///
    /// # Panics
    /// When a script fails, with the whole console.
    pub fn run(attach: &[&str], scripts: &[&str]) -> Self {
        Self::run_asking(attach, scripts, |asked| panic!("the guest asks for '{asked}'"))
    }

    /// As [`run`](Self::run); what a script asks of the host in a line `EGRET-ASKS WHAT`, `host` does.
    pub fn run_asking(attach: &[&str], scripts: &[&str], mut host: impl FnMut(&str)) -> Self {
        let watch = |line: &str| {
            line.strip_prefix("EGRET-ASKS ").into_iter().for_each(&mut host);
            ControlFlow::Continue(())
        };
        let (guest, ended) = Self::watch(attach, scripts, watch);
        let (status, complaints) = ended.expect("nobody has it end");
        assert!(status.success(), "the guest failed: {status}\n{}{complaints}", guest.console);
        guest
    }

    /// Boots a guest and shows `watch` each line that it says, until it has ended, or `watch` has its power cut. Returns how
    /// it has ended, and what was complained of.
    pub fn watch(
        attach: &[&str],
        scripts: &[&str],
        mut watch: impl FnMut(&str) -> ControlFlow<()>,
    ) -> (Self, Option<(ExitStatus, String)>) {
        let folder = scripts_folder();
        let machine = Command::new(folder.join("run-guest"))
            // Four of them run side by side, and each may be emulated.
            .args(["--timeout", "900"])
            .args(attach)
            .args(scripts.iter().map(|script| folder.join("guest-tests").join(script)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a script of ours starts");
        // QEMU dies with it.
        let mut machine = Reaped(machine);
        let mut complaints = machine.0.stderr.take().expect("a pipe");
        let complaints = std::thread::spawn(move || {
            let mut text = Vec::new();
            complaints.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned())
        });
        let mut console = String::new();
        for line in BufReader::new(machine.0.stdout.take().expect("a pipe")).split(b'\n') {
            let line = line.expect("the console can be read");
            let line = String::from_utf8_lossy(&line);
            console += &line;
            console.push('\n');
            if watch(line.trim_end()).is_break() {
                return (Self { console }, None);
            }
        }
        let status = machine.0.wait().expect("a child of ours");
        (Self { console }, Some((status, complaints.join().expect("it reads").expect("it can"))))
    }

    /// What the guest has said of `disk` in a line `DISK NAME VALUE`.
    pub fn fact(&self, disk: &str, name: &str) -> &str {
        self.last(&format!("{disk} {name} "))
    }

    /// Whether the driver of `device` and the daemon have agreed on a virtio feature.
    pub fn has_feature(&self, device: &str, feature: usize) -> bool {
        self.fact(device, "features").as_bytes()[feature] == b'1'
    }

    /// The hash of all of `disk`, as the guest has read it last.
    pub fn last_hash(&self, disk: &str) -> &str {
        self.last(&format!("EGRET-SHA256 {disk} "))
    }

    fn last(&self, prefix: &str) -> &str {
        let mut found = self.console.lines().filter_map(|line| line.strip_prefix(prefix));
        found.next_back().unwrap_or_else(|| panic!("the guest did not say '{prefix}':\n{}", self.console))
    }
}

/// The hash of a file, as a guest prints it of a disk.
pub fn hash(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().expect("coreutils");
    assert!(output.status.success(), "{output:?}");
    let line = String::from_utf8(output.stdout).expect("hexadecimal");
    // A backslash marks a file name with something odd in it.
    line.trim_start_matches('\\').split(' ').next().expect("a hash").to_owned()
}
