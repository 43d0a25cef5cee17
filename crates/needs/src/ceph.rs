//! A Ceph cluster of one's own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// A cluster in memory; taken down when it is dropped, or when the process has ended.
#[derive(Debug)]
pub struct Ceph {
    dir: PathBuf,
}

/// One of its daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The monitor.
    Mon,
    /// The OSD.
    Osd,
    /// A node, with its monitor and its OSD, of those that [`Ceph::start_nodes`] starts.
    Node(&'static str),
}

impl Ceph {
    /// The nodes that [`start_nodes`](Self::start_nodes) starts.
    pub const NODES: [Part; 3] = [Part::Node("a"), Part::Node("b"), Part::Node("c")];

    /// A new one of one monitor and one OSD, with an empty pool `rbd`; `None`, and a line that says so, where Ceph is not
    /// installed.
    ///
    /// # Panics
    /// It does not start; or `CI` is set, and Ceph is not installed.
    pub fn start() -> Option<Self> {
        Self::up(&[])
    }

    /// As [`start`](Self::start), of three nodes, each a monitor and an OSD, and with a replica on each.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_nodes() -> Option<Self> {
        Self::up(&["--nodes", "3"])
    }

    fn up(how: &[&str]) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let installed = ["ceph-mon", "ceph-osd", "ceph", "rbd"].map(|tool| Path::new("/usr/bin").join(tool).exists());
        if installed.contains(&false) {
            crate::this_test_lacks("Ceph: Debian's packages ceph-mon, ceph-osd and ceph-common");
            return None;
        }
        let name = format!("egret-ceph-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let new = Self { dir: Path::new("/dev/shm").join(name) };
        new.script("up", &[how, &[&std::process::id().to_string()]].concat());
        Some(new)
    }

    /// The file that a client needs.
    pub fn conf(&self) -> PathBuf {
        self.dir.join("ceph.conf")
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Kills a daemon, as a loss of power does.
    pub fn kill(&self, part: Part) {
        self.script("kill", &[part.word()]);
    }

    /// Starts a daemon that was killed; a node has joined the cluster again when this returns.
    pub fn revive(&self, part: Part) {
        self.script("start", &[part.word()]);
    }

    /// What one of Ceph's commands prints: `rbd create disk --size 1G`.
    ///
    /// # Panics
    /// It fails.
    pub fn run(&self, command: &str) -> String {
        let words: Vec<_> = command.split(' ').collect();
        String::from_utf8_lossy(&self.script("run", &words).stdout).into_owned()
    }

    fn script(&self, what: &str, arguments: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/ceph");
        let mut command = Command::new("timeout");
        command.args(["300"]).arg(script).arg(what).arg(&self.dir).args(arguments);
        let output = command.output().unwrap_or_else(|e| panic!("scripts/ceph: {e}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "scripts/ceph {what} {arguments:?}: {said}");
        output
    }
}

impl Part {
    const fn word(self) -> &'static str {
        match self {
            Self::Mon => "mon",
            Self::Osd => "osd",
            Self::Node(name) => name,
        }
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        self.script("down", &[]);
    }
}
