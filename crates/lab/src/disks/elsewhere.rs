//! A plan's disks as subjects get at them that do not have them here: by an NBD server, or as images of a Ceph cluster.

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_vocabulary::schema::{NbdEndpoint, NbdPlace};

use crate::plan::{Backend, DiskKind, Load, Plan, Stack, Subject, nbd_place};
use crate::process::{Process, ProcessReaper, Scratch, short_directory};
use crate::stack::{Disk, find};

/// How long an NBD server may take to listen.
const PATIENCE: Duration = Duration::from_secs(10);
/// Ceph's commands wait for a cluster by default until it is there.
const WAITING: [&str; 4] = ["--client-mount-timeout", "10", "--rados-mon-op-timeout", "10"];

/// What was made, or why it was not; the servers and their sockets are gone when it is dropped, and images are removed when
/// the lab ends.
#[derive(Default)]
pub(super) struct Elsewhere {
    made: Vec<(Backend, Result<Vec<Disk>, String>)>,
    _servers: Vec<Process>,
    _places: Vec<Scratch>,
}

/// What a subject's disk needs that is not there, and what would bring it. Asks the cluster, if there is one.
pub fn lacks(subject: &Subject) -> Option<String> {
    let program = |name: &str| find(name).is_none().then(|| format!("{name} is not installed"));
    let driver = match &subject.backend {
        Backend::Local => return None,
        Backend::Nbd | Backend::NbdUnix => {
            if let Some(missing) = program("nbdkit") {
                return Some(format!("{missing}: it comes with the package nbdkit"));
            }
            "nbd"
        }
        Backend::Server(_) => "nbd",
        Backend::Rbd(pool) | Backend::Krbd(pool) => {
            if let Some(missing) = program("rbd") {
                return Some(format!("{missing}: it comes with the package ceph-common"));
            }
            if matches!(subject.backend, Backend::Krbd(_)) && !Path::new("/sys/bus/rbd").exists() {
                return Some("this kernel maps no images: modprobe rbd, where it has the module".into());
            }
            if let Err(why) = rbd(&["ls", pool]) {
                return Some(format!("no pool '{pool}' of a Ceph cluster ({why}): CEPH_CONF names its ceph.conf"));
            }
            if matches!(subject.backend, Backend::Rbd(_)) { "rbd" } else { return None }
        }
    };
    let said = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).stdin(Stdio::null()).output().ok()?;
        Some([output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat())
    };
    match subject.stack {
        Stack::Host => said("fio", &["--enghelp"])
            .filter(|engines| !engines.split_whitespace().any(|word| word == driver))
            .map(|_| format!("fio was built without its engine {driver}")),
        // Its drivers are modules, which are looked for when they are needed.
        Stack::QemuStorageDaemon if driver == "rbd" => {
            said("qemu-storage-daemon", &["--blockdev", "rbd,node-name=d,pool=-,image=-,conf=/nonexistent"])
                .filter(|text| text.contains("Unknown driver"))
                .map(|_| "qemu-storage-daemon has no driver rbd: it comes with the package qemu-block-extra".into())
        }
        _ => None,
    }
}

/// Runs `rbd`; what it says last, if it fails.
fn rbd(words: &[&str]) -> Result<String, String> {
    let output = Command::new("rbd").args(WAITING).args(words).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("rbd: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(text(&output.stderr).lines().next_back().unwrap_or("rbd failed").to_owned())
}

impl Elsewhere {
    /// Makes what a plan's subjects ask for of its `disks`.
    ///
    /// # Errors
    /// The lab is to end.
    pub(super) fn make(&mut self, plan: &Plan, disks: &[Disk], reaper: &Arc<ProcessReaper>) -> io::Result<()> {
        for backend in plan.subjects.iter().map(|subject| &subject.backend) {
            if *backend == Backend::Local || self.made.iter().any(|(made, _)| made == backend) {
                continue;
            }
            reaper.go_on()?;
            let made = match backend {
                Backend::Server(uri) => Ok(nbd_place(uri).map(|place| Disk::Nbd(place, None)).into_iter().collect()),
                _ => (0..).zip(disks).map(|(number, disk)| self.copy(backend, number, disk, reaper)).collect(),
            };
            self.made.push((backend.clone(), made));
        }
        Ok(())
    }

    /// The disks that are reached so, or why there are none.
    pub(super) fn of(&self, backend: &Backend) -> Result<&[Disk], &str> {
        let found = self.made.iter().find(|(made, _)| made == backend);
        found.map_or(Err("it was not made"), |(_, made)| made.as_deref().map_err(String::as_str))
    }

    fn copy(
        &mut self,
        backend: &Backend,
        number: usize,
        disk: &Disk,
        reaper: &Arc<ProcessReaper>,
    ) -> Result<Disk, String> {
        let path = disk.path().ok_or("a null disk has nothing that another server could have")?;
        match backend {
            Backend::Nbd | Backend::NbdUnix => self.serve(backend, path, reaper),
            Backend::Rbd(pool) | Backend::Krbd(pool) => {
                let image = format!("egret-bench-{}-{number}", std::process::id());
                let kernels = matches!(backend, Backend::Krbd(_));
                let name = format!("{pool}/{image}{}", if kernels { "-krbd" } else { "" });
                reaper.undo(&[&["rbd"], &WAITING[..], &["rm", "--no-progress", &name]].concat());
                rbd(&["import", "--no-progress", &path.to_string_lossy(), &name])?;
                if !kernels {
                    return Ok(Disk::Rbd { pool: pool.clone(), image });
                }
                let device = rbd(&["device", "map", &name])?;
                reaper.undo(&["rbd", "device", "unmap", &device]);
                Ok(Disk::Krbd(device.into()))
            }
            Backend::Local | Backend::Server(_) => Ok(disk.clone()),
        }
    }

    /// Starts nbdkit on a file or device.
    fn serve(&mut self, backend: &Backend, path: &Path, reaper: &Arc<ProcessReaper>) -> Result<Disk, String> {
        let text = |error: io::Error| format!("nbdkit: {error}");
        let mut command = Command::new("nbdkit");
        command.arg("--foreground");
        let server = if *backend == Backend::NbdUnix {
            let place = Scratch::new(&short_directory(), reaper).map_err(text)?;
            let socket = place.path().join("nbd.sock");
            self._places.push(place);
            command.arg("--unix").arg(&socket);
            NbdEndpoint::Unix(socket.display().to_string())
        } else {
            // One that is free now. Somebody else may take it before nbdkit does, who then says so.
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
            let port = port.map_err(text)?.port();
            command.args(["--ipaddr", "127.0.0.1", "--port", &port.to_string()]);
            NbdEndpoint::Inet("127.0.0.1".into(), port)
        };
        command.arg("file").arg(path).stdout(Stdio::null());
        let mut nbdkit = reaper.start(command).map_err(text)?;
        let begin = Instant::now();
        let listens = || match &server {
            NbdEndpoint::Unix(path) => UnixStream::connect(path).is_ok(),
            NbdEndpoint::Inet(host, port) => TcpStream::connect((host.as_str(), *port)).is_ok(),
        };
        while !listens() {
            if nbdkit.ended().is_some() || begin.elapsed() > PATIENCE {
                let (_, log) = nbdkit.end();
                return Err(format!("nbdkit: {}", log.last().map_or("it does not listen", String::as_str)));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let disk = Disk::Nbd(NbdPlace { server, export: String::new() }, Some(nbdkit.pid()));
        self._servers.push(nbdkit);
        Ok(disk)
    }
}

/// What does not go together in a plan.
///
/// # Errors
/// A line for a subject.
pub fn check_backend(plan: &Plan, subject: &Subject) -> Result<(), String> {
    let writes = |load: &Load| load.writes() && load.is_put_on(&subject.name);
    let why = match (&subject.backend, subject.stack, plan.disk.kind) {
        (Backend::Local, ..) => return Ok(()),
        (_, Stack::VhostUserBlk | Stack::Ssh, _) => "has a disk of its own, and no backend",
        (_, _, DiskKind::Null) => "a null disk has nothing that another server could have",
        _ if !plan.hosts.is_empty() => "on other hosts a disk has no backend",
        (Backend::Rbd(_) | Backend::Krbd(_), _, DiskKind::Device) => {
            "an image is a copy of the plan's disk, and a device is not copied: it needs a disk of type file or loop"
        }
        (Backend::Server(_), ..) if plan.loads.iter().any(writes) => {
            "the lab writes to no server that it has not started: put loads that write on other subjects"
        }
        _ => return check_disks(plan, subject),
    };
    Err(format!("subject '{}': {why}", subject.name))
}

/// That no load asks for more disks than are reached so, or for one job across several where it would be one for each.
fn check_disks(plan: &Plan, subject: &Subject) -> Result<(), String> {
    let is_one = matches!(subject.backend, Backend::Server(_));
    // The kernel's images are devices.
    let has_path = subject.stack != Stack::Host || matches!(subject.backend, Backend::Krbd(_));
    for load in plan.loads.iter().filter(|load| load.disks > 1 && load.is_put_on(&subject.name)) {
        let (name, disks) = (&load.name, load.disks);
        if is_one {
            return Err(format!(
                "subject '{}': the load '{name}' asks for {disks} disks, and the server has 1",
                subject.name
            ));
        }
        if load.keys.across_disks && !has_path {
            return Err(format!(
                "subject '{}': fio goes across files and devices, and '{name}' asks it to go across disks of an engine",
                subject.name
            ));
        }
    }
    Ok(())
}
