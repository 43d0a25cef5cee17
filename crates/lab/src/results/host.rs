//! The machine's fingerprint.

use serde::{Deserialize, Serialize};

/// What a run was made on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its processors.
    pub cpu: Cpu,
    /// Its memory, in bytes.
    pub memory: u64,
    /// Huge pages that are free, in bytes.
    pub huge_pages: u64,
    /// The kernel's release.
    pub kernel: String,
    /// The kernel's command line.
    pub kernel_options: String,
    /// What the kernel calls the time since it was booted.
    #[serde(default)]
    pub boot_id: Option<String>,
    /// `kvm`, `vmware`, ... where this is a virtual machine itself.
    pub hypervisor: Option<String>,
    /// The disk under test, as far as it is on one.
    pub disk: Option<BlockDevice>,
    /// The programs of the stacks.
    pub components: Vec<Component>,
    /// Other settings that move figures, by name: of KVM, memory, processors, interrupts and the disk's queue.
    #[serde(default)]
    pub settings: Vec<(String, String)>,
    /// By subject: the whole command lines of what served it.
    #[serde(default)]
    pub commands: Vec<(String, String)>,
    /// By subject: what served it and is none of the programs that the plan names, as where one is a script that starts
    /// another.
    #[serde(default)]
    pub started: Vec<Component>,
    /// The load average of the last minute when the run began.
    pub load_average: f64,
    /// What a reader should mind.
    pub warnings: Vec<Warning>,
}

/// Processors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// As the vendor calls it.
    pub model: String,
    /// Processors that this process may use.
    pub usable: Vec<usize>,
    /// How many processors there are, whoever may use them; 0 in runs of before that was looked at.
    #[serde(default)]
    pub online: usize,
    /// Processors that share a core, in groups; a group of one where there is no SMT.
    pub cores: Vec<Vec<usize>>,
    /// NUMA nodes.
    pub nodes: usize,
    /// The frequency governor, where there is one.
    pub governor: Option<String>,
    /// The idle driver and governor, where there are.
    pub idle: Option<String>,
    /// Mitigations in force, as `/sys/devices/system/cpu/vulnerabilities` has them.
    pub mitigations: Vec<(String, String)>,
}

impl Cpu {
    /// How many processors others may use, too: of which the host's busy time is.
    pub fn processors(&self) -> usize {
        if self.online > 0 { self.online } else { self.usable.len() }
    }
}

/// A block device, or the one that a file is on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockDevice {
    /// The path under test.
    pub path: String,
    /// The device's name in `/sys/block`.
    pub device: Option<String>,
    /// Its model.
    pub model: Option<String>,
    /// Its size, in bytes.
    #[serde(default)]
    pub size: Option<u64>,
    /// Its I/O scheduler.
    pub scheduler: Option<String>,
    /// The file system, of a file.
    pub file_system: Option<String>,
}

/// A program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Component {
    /// `egret`, `fio`, `qemu-storage-daemon`, ...
    pub name: String,
    /// Where it is.
    pub path: String,
    /// What it says of itself.
    pub version: String,
    /// Its SHA-256.
    pub sha256: String,
}

/// What a reader should mind about the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// A word for it: `smt-sibling`, `governor`, `scheduler`, `engine`, `noisy-neighbour`, ...
    pub about: String,
    /// In one line.
    pub text: String,
}

impl Warning {
    /// What it is about where the kernel's messages could not be read, so that nobody knows whether it complained.
    pub const KERNEL_LOG: &str = "kernel-log";

    /// What it is about where the plan has what this machine lacks.
    pub const LEFT_OUT: &str = "left-out";
}
