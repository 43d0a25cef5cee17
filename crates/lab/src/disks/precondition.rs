//! A device that is written full before it is measured: flash that was not is faster than it will be.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::plan::{DiskKind, Plan};
use crate::process::ProcessReaper;
use crate::stack;

/// Large devices take hours.
const A_WEEK: Duration = Duration::from_secs(7 * 86_400);

/// Checks whether that can be done, and does nothing.
///
/// # Errors
/// What is in the way, in one line.
pub fn check(plan: &Plan, write_device: bool) -> Result<(), String> {
    let Some(path) = plan.disk.place().filter(|_| plan.disk.kind == DiskKind::Device && plan.hosts.is_empty()) else {
        return Err("--precondition is for a disk of type 'device': the lab's own files are full".into());
    };
    if !write_device {
        return Err(format!("--precondition writes all of {} twice or more: --write-device lets it", path.display()));
    }
    match stack::find("fio") {
        Some(_) => Ok(()),
        None => Err("--precondition needs fio, which is not installed: it comes with the package fio".into()),
    }
}

/// Writes all of the plan's devices twice from its begin to its end; and where loads write at random, once more in their
/// order and in pieces of their length.
///
/// # Errors
/// fio failed, or the lab was told to stop.
pub fn precondition(plan: &Plan, reaper: &Arc<ProcessReaper>) -> io::Result<()> {
    let random = plan.loads.iter().filter(|load| load.writes() && load.rw.starts_with("rand"));
    let bs = random.map(|load| load.bs.0).min();
    plan.disk.paths().iter().try_for_each(|path| {
        fio(path, &["--rw=write", "--bs=1M", "--iodepth=8", "--loops=2"], reaper)?;
        match bs {
            Some(bs) => fio(path, &["--rw=randwrite", &format!("--bs={bs}"), "--iodepth=32"], reaper),
            None => Ok(()),
        }
    })
}

fn fio(path: &Path, how: &[&str], reaper: &Arc<ProcessReaper>) -> io::Result<()> {
    let mut command = Command::new("fio");
    let target = stack::fio::escaped(&path.to_string_lossy());
    command.args(["--name=precondition", "--ioengine=libaio", "--direct=1", "--refill_buffers=1", "--randrepeat=0"]);
    command.args(["--thread", "--size=100%", "--minimal"]).arg(format!("--filename={target}")).args(how);
    command.stdout(Stdio::piped());
    let mut fio = reaper.start(command)?;
    match fio.wait(A_WEEK) {
        Some(status) if status.success() => Ok(()),
        _ => {
            reaper.go_on()?;
            Err(io::Error::other(format!(
                "{} could not be written full: {}",
                path.display(),
                fio.log().concat().trim()
            )))
        }
    }
}
