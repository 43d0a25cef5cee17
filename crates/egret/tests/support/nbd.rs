//! NBD servers that nobody here wrote: nbdkit, qemu-nbd and nbd-server, as child processes.

use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blkio::ReqFlags;
use rustix::process::{Pid, Signal, kill_process};

use super::disk::Disk;
use super::port::Port;
use super::server::{Reaped, Server, await_stopped};
use super::{Finished, await_that};

/// A running server; killed when dropped.
pub struct NbdServer {
    process: Reaped,
    words: Vec<String>,
    place: Place,
}

/// Where a server listens.
#[derive(Clone)]
enum Place {
    Unix(PathBuf),
    Tcp(String, u16),
}

impl Place {
    fn answers(&self) -> bool {
        match self {
            Self::Unix(path) => UnixStream::connect(path).is_ok(),
            Self::Tcp(host, port) => TcpStream::connect((host.as_str(), *port)).is_ok(),
        }
    }
}

impl NbdServer {
    /// nbdkit at a UNIX socket: filters, the plugin, and what they are told.
    pub fn nbdkit(socket: &Path, words: &[&str]) -> Self {
        let socket = socket.display().to_string();
        let first = ["nbdkit", "--foreground", "--exit-with-parent", "--unix", &socket];
        Self::start(first.into_iter().chain(words.iter().copied()), Place::Unix(socket.clone().into()))
    }

    /// nbdkit at a TCP port.
    pub fn nbdkit_tcp(host: &str, port: &Port, words: &[&str]) -> Self {
        let number = port.to_string();
        let first = ["nbdkit", "--foreground", "--exit-with-parent", "--ipaddr", host, "--port", &number];
        Self::start(first.into_iter().chain(words.iter().copied()), Place::Tcp(host.to_owned(), port.number()))
    }

    /// qemu-nbd over a raw image, for so many clients at a time.
    pub fn qemu(socket: &Path, image: &Path, clients: u32, words: &[&str]) -> Self {
        let [socket, image, clients] =
            [socket.display().to_string(), image.display().to_string(), format!("--shared={clients}")];
        let first = ["qemu-nbd", "--persistent", "--format=raw", "--discard=unmap", "--socket", &socket, &clients];
        let words = first.into_iter().chain(words.iter().copied()).chain([image.as_str()]);
        Self::start(words, Place::Unix(socket.clone().into()))
    }

    fn start<'a>(words: impl IntoIterator<Item = &'a str>, place: Place) -> Self {
        let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        let mut new = Self { process: spawn(&words), words, place };
        new.await_it();
        new
    }

    fn await_it(&mut self) {
        let (process, place) = (&mut self.process, &self.place);
        await_that(&format!("{} to listen", self.words[0]), || {
            assert!(process.0.try_wait().expect("our child").is_none(), "{:?} has ended", self.words);
            place.answers()
        });
    }

    /// As if its host were gone.
    pub fn kill(&mut self) {
        self.process.0.kill().expect("our child");
        self.process.0.wait().expect("our child");
        if let Place::Unix(path) = &self.place {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Starts it once more, as it was.
    pub fn start_again(&mut self) {
        self.process = spawn(&self.words);
        self.await_it();
    }

    /// Has it say nothing more, and keep its connections; or go on.
    pub fn hang(&self, hangs: bool) {
        let signal = if hangs { Signal::STOP } else { Signal::CONT };
        kill_process(Pid::from_child(&self.process.0), signal).expect("our child");
        if hangs {
            // A thread that still runs could answer once more.
            await_stopped(self.process.0.id());
        }
    }
}

/// nbd-server over an image, as the export "disk" at a TCP port. It goes to the background by itself.
pub struct Reference {
    pidfile: PathBuf,
}

impl Reference {
    /// Its files are in `folder`; `more` lines are about all of it.
    pub fn start(folder: &Path, port: &Port, image: &Path, more: &str) -> Self {
        let [pidfile, config] = ["nbd-server.pid", "nbd-server.conf"].map(|name| folder.join(name));
        let generic = format!("[generic]\nlistenaddr=127.0.0.1\nport={port}\nallowlist=true\n{more}");
        let disk = format!("[disk]\nexportname={}\nflush=true\nfua=true\ntrim=true\n", image.display());
        std::fs::write(&config, generic + &disk).expect("a file");
        let mut command = Command::new("nbd-server");
        let status = command.arg("-C").arg(&config).arg("-p").arg(&pidfile).status();
        assert!(status.expect("nbd-server; make deps installs it").success());
        let place = Place::Tcp("127.0.0.1".to_owned(), port.number());
        await_that("nbd-server to listen", || pidfile.exists() && place.answers());
        Self { pidfile }
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        let pid = std::fs::read_to_string(&self.pidfile).ok().and_then(|text| text.trim().parse().ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

fn spawn(words: &[String]) -> Reaped {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null());
    Reaped(command.spawn().unwrap_or_else(|e| panic!("{}: {e}; make deps installs it", words[0])))
}

const MIB: u64 = 1 << 20;

/// Every operation, verified.
pub fn use_it(disk: &mut Disk, block: u64) {
    for queue in &mut disk.queues {
        queue.write_pattern(0..4 * MIB, 1).unwrap();
        queue.verify_pattern(0..4 * MIB, 1).unwrap();
        queue.write_with(8 * MIB, &vec![7; block as usize], ReqFlags::FUA).unwrap();
        queue.flush().unwrap();
        queue.write_zeroes(MIB..MIB + 3 * block, ReqFlags::empty()).unwrap();
        queue.write_zeroes(2 * MIB..2 * MIB + block, ReqFlags::NO_UNMAP).unwrap();
        queue.discard(3 * MIB..3 * MIB + 64 * 1024).unwrap();
        assert!(queue.read(MIB, 3 * block as usize).unwrap().iter().all(|byte| *byte == 0));
        assert!(queue.read(2 * MIB, block as usize).unwrap().iter().all(|byte| *byte == 0));
        assert_eq!(queue.read(8 * MIB, block as usize).unwrap(), vec![7; block as usize]);
        queue.verify_pattern(0..MIB, 1).unwrap();
    }
}

/// Whether this machine has the servers.
pub fn has_servers_or_skips() -> bool {
    ["nbdkit", "qemu-nbd", "nbd-server"].into_iter().all(super::has_or_skips)
}

/// Has `again` end what `server` is connected to and start it again, three times, while `export` is written and verified: no
/// request fails, and `image` holds what was written last.
pub fn outages_cost_time_alone(server: &Server, export: &Path, image: &Path, mut again: impl FnMut()) {
    const EXTENT: Range<u64> = 0..8 << 20;
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut disk = Disk::connect(export).unwrap();
            while !stop.load(Ordering::Relaxed) {
                let round = rounds.fetch_add(1, Ordering::Relaxed) + 1;
                disk.first().write_pattern(EXTENT, round).unwrap();
                disk.first().flush().unwrap();
                disk.first().verify_pattern(EXTENT, round).unwrap();
            }
        });
        let finished = Finished(&stop);
        let connected = || server.log().iter().filter(|line| line.contains("connected to its server")).count();
        let begun = || rounds.load(Ordering::Relaxed);
        let mut round = 0;
        for _ in 0..3 {
            await_that("the load to go on", || {
                assert!(!load.is_finished());
                begun() > round
            });
            let before = connected();
            again();
            await_that("the daemon to be connected again", || {
                assert!(!load.is_finished());
                connected() > before
            });
            round = begun();
        }
        drop(finished);
        load.join().unwrap();
        Disk::open(image, false).unwrap().first().verify_pattern(EXTENT, begun()).unwrap();
    });
}
