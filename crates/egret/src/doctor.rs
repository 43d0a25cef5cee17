//! `egret doctor`: what this host offers, and what Egret makes of it.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;
use egret_daemon::process::{Inherited, Places, Sandbox};
use egret_daemon::{Daemon, probe};
use egret_lab::fingerprint;
use egret_lab::results::Host;
use egret_loadgen::machine::allow_many_descriptors;
use egret_vocabulary::config::ConfigFile;
use egret_vocabulary::schema::Aio;
use rustix::process::{Resource, getrlimit};

use crate::serve::{self, Serve};

/// What `egret doctor` is asked.
#[derive(Args, Debug)]
#[command(after_help = "The status is 1 where a daemon could not serve. docs/install.md tells what the lines mean.")]
pub struct Doctor {
    /// A disk that is to be served, to be looked at as well
    disk: Option<PathBuf>,
}

/// What is looked at, and what there is to say of it.
type Line = (&'static str, String);

/// Runs `egret doctor`.
pub fn run(asked: &Doctor) -> Result<()> {
    // As a daemon does.
    allow_many_descriptors();
    let host = fingerprint::machine(asked.disk.as_deref());
    let mut lines = vec![("kernel", kernel(&host)), ("fd-monitor", monitor()), ("aio", engines())];
    if let Some(disk) = &asked.disk {
        serve::one_disk::driver(disk)?;
        let direct = probe::takes_direct_io(disk);
        let how = if direct { "past" } else { "through" };
        let aio = probe::best_engine(direct);
        lines.push(("disk", format!("{}: aio={aio}, {how} the host's page cache", disk.display())));
        lines.extend(serve::one_disk::warning(disk).map(|warning| ("mind", warning)));
    }
    lines.extend(limits());
    lines.push(("huge pages", huge_pages(&host)));
    lines.push(("driver=rbd", egret_rbd::load().map_or_else(|error| error.to_string(), |()| "librbd is there".into())));
    lines.push(("TLS", "by rustls, which is built in".into()));
    lines.extend(host.warnings.iter().map(|warning| ("mind", warning.text.clone())));
    // This confines the process, so it is the last that is done.
    let served = serve_one(asked.disk.as_deref());
    match &served {
        Ok(sandbox) => lines.extend([("sandbox", sandbox.clone()), ("a daemon", "serves here".into())]),
        Err(_) => lines.push(("a daemon", "cannot serve here".into())),
    }
    crate::print(&page(&lines))?;
    served.map(drop).context("a daemon cannot serve here")
}

fn page(lines: &[Line]) -> String {
    let width = lines.iter().map(|(what, _)| what.len()).max().unwrap_or_default();
    lines.iter().map(|(what, text)| format!("{what:width$}  {text}\n")).collect()
}

fn kernel(Host { kernel, hypervisor, .. }: &Host) -> String {
    let inside = hypervisor.as_ref().map(|vendor| format!(", in a virtual machine ({vendor})")).unwrap_or_default();
    format!("Linux {kernel} on {}{inside}", std::env::consts::ARCH)
}

/// What `fd-monitor=auto` comes to.
fn monitor() -> String {
    let (monitor, why) = probe::monitor();
    std::iter::once(monitor.to_string()).chain(why).collect::<Vec<_>>().join("; ")
}

/// What is chosen for a disk by its path, and what else there is.
fn engines() -> String {
    let [direct, buffered] = [true, false].map(probe::best_engine);
    let chosen = if direct == buffered {
        direct.to_string()
    } else {
        format!("{direct} past the page cache, {buffered} through it")
    };
    let missing = [Aio::IoUring, Aio::Native].into_iter().filter_map(|aio| Some((aio, probe::engine(aio).err()?)));
    let missing = missing.map(|(aio, why)| format!("no {aio}: {why}"));
    let lacks = probe::ring_lacks().into_iter().map(|what| format!("io_uring lacks {what}"));
    std::iter::once(chosen).chain(missing).chain(lacks).collect::<Vec<_>>().join("; ")
}

fn limits() -> [Line; 2] {
    let locked = getrlimit(Resource::Memlock).current.map_or("no limit".into(), |bytes| format!("{} MiB", bytes >> 20));
    let open = getrlimit(Resource::Nofile).current.map_or("no limit".into(), |files| files.to_string());
    [
        ("locked memory", format!("{locked} (ulimit -l): what pin-memory pins at most without CAP_IPC_LOCK")),
        ("open files", format!("{open} (ulimit -Hn): each queue of a guest takes three")),
    ]
}

fn huge_pages(Host { huge_pages, settings, .. }: &Host) -> String {
    let transparent = settings.iter().find(|(name, _)| name == "transparent huge pages");
    let transparent = transparent.map_or("not known", |(_, is)| is);
    format!("{} MiB free, for guests with hugetlb=on; transparent ones: {transparent}", huge_pages >> 20)
}

/// Serves a disk, confined as any daemon is; returns how that is. One that is named is read alone, and not locked: who has
/// it in use is not disturbed.
fn serve_one(disk: Option<&Path>) -> Result<String> {
    let socket = std::env::temp_dir().join(format!("egret-doctor-{}.sock", std::process::id()));
    let escaped = |path: &Path| path.to_string_lossy().replace(',', ",,");
    let path = escaped(&socket);
    let of_disk = |disk: &Path| -> Result<String> {
        let (driver, filename) = (serve::one_disk::driver(disk)?, escaped(disk));
        let direct = if probe::takes_direct_io(disk) { "on" } else { "off" };
        Ok(format!("{driver},node-name=disk,read-only=on,locking=off,cache.direct={direct},filename={filename}"))
    };
    let arguments = Serve {
        blockdev: vec![disk.map_or_else(|| Ok("null-co,node-name=disk".to_owned()), of_disk)?],
        export: vec![format!("vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={path}")],
        ..Serve::default()
    };
    let config = serve::config(&arguments, ConfigFile::default())?;
    let sandbox = Sandbox { on: true, directories: Vec::new(), user: None, group: None };
    let (_, missing) = Sandbox::begin(sandbox.look_up(&config, &Places::default())?)?;
    let daemon = Daemon::start(&config, &mut Inherited::default())?;
    UnixStream::connect(&socket).with_context(|| format!("socket '{}'", socket.display()))?;
    drop(daemon);
    Ok(if missing.is_nothing() { "system calls, files and ports".into() } else { missing.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_would_not_be_served_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let refused = |disk: &Path| format!("{:#}", run(&Doctor { disk: Some(disk.to_owned()) }).unwrap_err());
        assert!(refused(place.path()).contains("is a directory"));
        assert!(refused(Path::new("/dev/null")).contains("neither a file nor a block device"));
    }

    #[test]
    fn what_is_looked_at_stands_in_one_column_and_what_is_found_in_another() {
        assert_eq!(page(&[("a", "one".into()), ("a daemon", "two".into())]), "a         one\na daemon  two\n");
    }
}
