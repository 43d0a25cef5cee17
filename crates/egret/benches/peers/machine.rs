//! Cores, clocks and the disk under test: what this machine has, and one line about each thing that it lacks.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::support::scratch::LoopDevice;
use crate::support::server::Program;

/// The disk's size in bytes: more than any cache of a CPU, less than anybody minds.
const DISK: usize = 256 << 20;

/// One core for the client and one for the server, where there are two.
pub struct Cores {
    pair: Option<(usize, usize)>,
}

impl Cores {
    /// The first two cores that this process may use.
    pub fn of_this_machine() -> Self {
        let allowed = sched_getaffinity(None).expect("our own thread");
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let pair = cores.next().zip(cores.next());
        match pair {
            Some((client, server)) => println!("cores: client on {client}, server on {server}"),
            None => println!("missing: a second core; client and server share one, unpinned"),
        }
        Self { pair }
    }

    /// Does `work` on the client's core.
    pub fn on_the_clients<T>(&self, work: impl FnOnce() -> T) -> T {
        self.on(self.pair.map(|(client, _)| client), work)
    }

    /// Does `work`, such as starting a process, on the server's core.
    pub fn on_the_servers<T>(&self, work: impl FnOnce() -> T) -> T {
        self.on(self.pair.map(|(_, server)| server), work)
    }

    fn on<T>(&self, core: Option<usize>, work: impl FnOnce() -> T) -> T {
        let before = sched_getaffinity(None).expect("our own thread");
        if let Some(core) = core {
            let mut only = CpuSet::new();
            only.set(core);
            sched_setaffinity(None, &only).expect("a core that we may use");
        }
        let done = work();
        sched_setaffinity(None, &before).expect("the cores that we had");
        done
    }
}

/// User and system time of every thread that process `pid` has or had, in nanoseconds.
pub fn cpu_time_ns(pid: u32) -> u64 {
    let mut clock = 0;
    // SAFETY: it only writes `clock`.
    let found = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) };
    assert_eq!(found, 0, "the server lives");
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it only writes `time`.
    let told = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(told, 0, "the server lives");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Lets this process have as many descriptors as it may: a hundred connections to each contender take many.
pub fn allow_many_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("our own soft limit");
}

/// The disk under test.
pub enum Disk {
    /// A block device whose bytes are in memory.
    Loop { device: LoopDevice, _backing: tempfile::NamedTempFile },
    /// The best there is without root.
    Plain(tempfile::NamedTempFile),
}

impl Disk {
    /// A loop device over shared memory, or else a plain file.
    pub fn for_this_machine() -> io::Result<Self> {
        let attached = filled(Path::new("/dev/shm")).and_then(|file| Ok((LoopDevice::over(file.path())?, file)));
        match attached {
            Ok((device, backing)) => {
                println!("disk: {} over /dev/shm, direct I/O", device.path().display());
                Ok(Self::Loop { device, _backing: backing })
            }
            Err(error) => {
                let directory = env!("CARGO_TARGET_TMPDIR");
                println!(
                    "missing: a loop device over /dev/shm, which needs root ({error}); a file in {directory} instead"
                );
                Ok(Self::Plain(filled(Path::new(directory))?))
            }
        }
    }

    /// Where a server finds it.
    pub fn path(&self) -> &Path {
        match self {
            Self::Loop { device, .. } => device.path(),
            Self::Plain(file) => file.path(),
        }
    }
}

/// A file without holes, which would be faster to read than data.
fn filled(directory: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix("egret-bench-").tempfile_in(directory)?;
    for _ in 0..DISK >> 20 {
        file.write_all(&[0xA5; 1 << 20])?;
    }
    file.as_file().sync_all()?;
    Ok(file)
}

/// The first line that a server says of itself.
pub fn version_of(program: &Program) -> io::Result<String> {
    let output = program.command().arg("--version").stdout(Stdio::piped()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("it does not say its version").into())
}

/// The machine in one line.
pub fn fingerprint() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let (kernel, load) = (read("/proc/sys/kernel/osrelease"), read("/proc/loadavg"));
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let load = load.split(' ').next().unwrap_or_default();
    format!("machine: {cores} x {}, Linux {}, load {load}", model.unwrap_or("unknown CPU"), kernel.trim())
}

/// Numbers without a pattern that a disk or a cache would notice.
pub struct Random(u64);

impl Random {
    /// The same numbers for the same `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// The next number: Marsaglia's xorshift64*.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }
}

/// Puts things in an order that differs from run to run.
pub struct Shuffle(Random);

impl Shuffle {
    /// From the nanoseconds that it is now.
    pub fn seeded_by_the_clock() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
        Self(Random::new(u64::from(now.subsec_nanos())))
    }

    /// The same things in another order.
    pub fn of<T>(&mut self, mut things: Vec<T>) -> Vec<T> {
        for last in (1..things.len()).rev() {
            things.swap(last, (self.0.next() % (last as u64 + 1)) as usize);
        }
        things
    }
}
