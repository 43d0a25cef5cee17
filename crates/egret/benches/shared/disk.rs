//! The disk under test, which the benchmarks share.
#![allow(dead_code, unreachable_pub, reason = "each benchmark uses its part of this")]

use std::io::{self, Write};
use std::path::Path;
use std::process::Stdio;

use egret_lab::disks::LoopDevice;

use crate::support::server::Program;

/// The disk's size in bytes: larger than most processors' caches.
const DISK: usize = 256 << 20;

/// The disk under test.
pub enum Disk {
    /// A block device whose bytes are in memory.
    Loop { device: LoopDevice, _backing: tempfile::NamedTempFile },
    /// The best there is without root.
    Plain(tempfile::NamedTempFile),
}

impl Disk {
    /// A loop device over shared memory.
    pub fn in_memory() -> io::Result<Self> {
        let backing = filled(Path::new("/dev/shm"))?;
        let device = LoopDevice::over(backing.path())?;
        println!("disk: {} over /dev/shm, direct I/O", device.path().display());
        Ok(Self::Loop { device, _backing: backing })
    }

    /// A loop device over shared memory, or else a plain file.
    pub fn for_this_machine() -> io::Result<Self> {
        match Self::in_memory() {
            Ok(disk) => Ok(disk),
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

/// The first line of a server's `--version`.
pub fn version_of(program: &Program) -> io::Result<String> {
    let output = program.command().arg("--version").stdout(Stdio::piped()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("it does not say its version").into())
}
