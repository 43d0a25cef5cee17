//! A Linux guest that migrates from QEMU to QEMU, and from daemon to daemon.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

use crate::moves;
use crate::support::await_within;
use crate::support::qmp::Qmp;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Reaped, Server};
use crate::support::vm::{cache, can_boot_or_skips, scripts_folder};

/// What the script in the guest writes to, and more.
const DISK: u64 = 16 << 20;
/// How long the guest may say nothing: without hardware help, on a busy host.
const SILENCE: Duration = Duration::from_secs(240);

/// The engines, and the numbers of queues, of which each disk of a guest has another.
const ENGINES: [&str; 4] =
    ["aio=io_uring,cache.direct=on", "aio=native,cache.direct=on", "aio=threads,cache.direct=on", "aio=io_uring"];
const QUEUES: [usize; 4] = [2, 1, 8, 3];
/// The disks' names: what they are on, and how their rings are laid out.
const DISKS: [&str; 4] = ["blk-split", "blk-packed", "scsi-split", "scsi-packed"];

/// Which engine and number of queues each disk has: by how many places they are turned against the disks.
#[derive(Clone, Copy, Debug)]
struct Kind {
    engines: usize,
    queues: usize,
}

/// A daemon with four disks.
struct Host {
    server: Option<Server>,
    options: Options,
    attach: Vec<String>,
}

impl Host {
    fn start(scratch: &Scratch, name: &str, images: &[PathBuf; 4], kind: Kind) -> Self {
        let mut options = Options::new().iothread("io0", "fd-monitor=io_uring").iothread("io1", "fd-monitor=epoll");
        let mut attach = Vec::new();
        for (at, disk) in DISKS.into_iter().enumerate() {
            let (engine, queues) = (ENGINES[(at + kind.engines) % 4], QUEUES[(at + kind.queues) % 4]);
            let socket = scratch.path(&format!("{name}-{disk}"));
            let more = format!("writable=on,allow-inactive=on,num-queues={queues},iothread.0=io0,iothread.1=io1");
            options = options.disk(disk, &images[at], engine);
            let (device, word) = match disk.starts_with("scsi") {
                true => {
                    let unit = format!("luns.0.lun=0,luns.0.node-name={disk},luns.0.serial={disk}");
                    options = options.export_scsi(&format!("e{at}"), &socket, &format!("{more},{unit}"));
                    ("--scsi", "num_queues")
                }
                false => {
                    options = options.export(&format!("e{at}"), disk, &socket, &format!("{more},serial={disk}"));
                    ("--disk", "num-queues")
                }
            };
            let packed = if disk.ends_with("packed") { "on" } else { "off" };
            let socket = socket.to_str().expect("our own path").to_owned();
            // Of a property that is given twice QEMU takes the last.
            attach.extend(["--props".into(), format!("packed={packed},{word}={queues}"), device.into(), socket]);
        }
        Self { server: Some(Server::start(&Program::egret(), &options)), options, attach }
    }

    fn kill(&mut self) {
        // Dropping it is SIGKILL.
        self.server = None;
    }

    fn revive(&mut self) {
        self.server = Some(Server::start(&Program::egret(), &self.options));
    }

    fn restart(&mut self) {
        self.kill();
        self.revive();
    }
}

fn await_of_qemu<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    await_within(SILENCE, what, look)
}

/// A QEMU, with a guest or waiting for one.
struct Qemu {
    process: Reaped,
    qmp: Qmp,
    console: Receiver<String>,
    to_guest: ChildStdin,
}

impl Qemu {
    fn start(scratch: &Scratch, name: &str, host: &Host, program: Option<&Path>, incoming: Option<&str>) -> Self {
        let (folder, monitor) = (scripts_folder(), scratch.path(&format!("{name}-monitor")));
        let mut command = Command::new(folder.join("run-guest"));
        command.args(&host.attach).arg("--qmp").arg(&monitor).args(["--timeout", "500", "--smp", "8"]);
        command.args(["--machine", "pc-q35-10.0"]);
        if let Some(program) = program {
            command.arg("--qemu").arg(program);
        }
        command.args(incoming.iter().flat_map(|uri| ["--incoming", uri]));
        let script = folder.join("guest-tests/migrate.sh");
        let spawned = command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child: Child = spawned.expect("a script of ours starts");
        let (said, console) = channel();
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).split(b'\n');
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = said.send(String::from_utf8_lossy(&line).into_owned());
            }
        });
        let to_guest = child.stdin.take().expect("a pipe");
        let mut process = Reaped(child);
        await_of_qemu("QEMU's monitor", || {
            let ended = process.0.try_wait().expect("our child");
            let said: Vec<String> = ended.iter().flat_map(|_| console.try_iter()).collect();
            assert!(ended.is_none(), "QEMU ended: {said:?}");
            monitor.exists().then_some(())
        });
        // It is there before it is listened on.
        std::os::unix::net::UnixStream::connect(&monitor)
            .map(drop)
            .or_else(|_| {
                await_of_qemu("QEMU to listen", || std::os::unix::net::UnixStream::connect(&monitor).ok().map(drop));
                Ok::<_, std::io::Error>(())
            })
            .expect("it listens");
        Self { process, qmp: Qmp::connect(&monitor).with_patience(SILENCE), console, to_guest }
    }

    fn tell_guest(&mut self, word: &str) {
        writeln!(self.to_guest, "{word}").expect("it reads");
    }

    /// What the guest says next that begins so, and the rest of it; `console` gets all that it says.
    fn await_line(&self, prefix: &str, console: &mut String) -> String {
        loop {
            let line = self.console.recv_timeout(SILENCE);
            let line = line.unwrap_or_else(|_| panic!("the guest did not say '{prefix}':\n{console}"));
            *console += &line;
            console.push('\n');
            let bad = ["EGRET-FAIL", "I/O error", "Kernel panic"].iter().any(|word| line.contains(word));
            assert!(!bad, "{console}");
            if let Some(rest) = line.trim_end().strip_prefix(prefix) {
                return rest.to_owned();
            }
        }
    }

    /// Waits until a migration has ended, one way or the other.
    fn migrated(&mut self) -> String {
        await_of_qemu("the migration to end", || {
            let status = self.qmp.run("query-migrate", json!({}))["status"].as_str().expect("a status").to_owned();
            ["completed", "failed", "cancelled"].contains(&status.as_str()).then_some(status)
        })
    }

    fn quit(mut self) {
        // It may be gone before it has answered.
        self.qmp.send(json!({"execute": "quit"}).to_string().as_bytes());
        let _ = self.process.0.wait();
    }

    /// Has the guest leave, and waits until it has.
    fn send_away(&mut self, uri: &str) {
        self.qmp.run("migrate", json!({"uri": uri}));
        assert_eq!(self.migrated(), "completed", "{}", self.qmp.run("query-migrate", json!({})));
    }

    /// Begins to have the guest leave, so slowly that memory is still being copied when this returns.
    fn begin_to_send_away(&mut self, uri: &str) {
        self.qmp.run("migrate-set-parameters", json!({"max-bandwidth": 1 << 20}));
        self.qmp.run("migrate", json!({"uri": uri}));
        await_of_qemu("memory to be copied", || {
            let status = self.qmp.run("query-migrate", json!({}));
            (status["status"] == "active" && status["ram"]["transferred"].as_u64()? > 1 << 20).then_some(())
        });
    }

    /// Has it leave as fast as it can from here on.
    fn hurry(&mut self) {
        self.qmp.run("migrate-set-parameters", json!({"max-bandwidth": 1 << 30}));
    }

    /// Waits until each of its disks has a daemon again.
    fn await_daemons(&mut self) {
        await_of_qemu("QEMU to connect again", || {
            let all = self.qmp.run("query-chardev", json!({}));
            let gone =
                |device: &Value| device["filename"].as_str().is_some_and(|name| name.starts_with("disconnected"));
            (!all.as_array()?.iter().any(gone)).then_some(())
        });
    }

    fn await_running(&mut self) {
        await_of_qemu("the guest to go on", || {
            let status: Value = self.qmp.run("query-status", json!({}));
            (status["status"] == "running").then_some(())
        });
    }
}

/// How a guest gets from one place to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Live,
    /// After a migration that was cancelled.
    AtTheSecondAttempt,
    /// Saved to a file, and restored.
    ByFile,
    /// The daemon where it goes is killed before it comes, the one where it was when it has left, and the other when it is
    /// there.
    WithKills,
    /// The daemon where it is is killed while memory is copied.
    WithTheSourceKilled,
    /// The daemon where it goes is killed while memory is copied.
    WithTheDestinationKilled,
    /// The daemon where it goes is killed while memory is copied, and is only started again when the guest is there.
    WithTheDestinationGone,
}

const WAYS: [Way; 7] = [
    Way::Live,
    Way::AtTheSecondAttempt,
    Way::ByFile,
    Way::WithKills,
    Way::WithTheSourceKilled,
    Way::WithTheDestinationKilled,
    Way::WithTheDestinationGone,
];

#[test]
fn a_guest_migrates_to_and_fro_under_load_and_sees_nothing_of_it() {
    if !can_boot_or_skips() {
        return;
    }
    let kinds: Vec<_> = (0..16).map(|kind| Kind { engines: kind % 4, queues: kind / 4 }).collect();
    if std::env::var_os(crate::TIMES).is_none() {
        return to_and_fro([None, None], kinds[0]);
    }
    // Guests of every kind, two at a time.
    std::thread::scope(|scope| {
        for kinds in kinds.chunks(8) {
            scope.spawn(|| kinds.iter().for_each(|kind| to_and_fro([None, None], *kind)));
        }
    });
}

/// What is newest changes by the day, and so it is not for every run: `scripts/install-newer-qemu` has the test run.
#[test]
fn a_guest_migrates_to_a_newer_qemu_and_back() {
    let newer = cache().join("qemu-unstable/qemu");
    if !newer.exists() {
        let why = "skipped, because there is none: run scripts/install-newer-qemu";
        let _ = writeln!(std::io::stderr(), "a_guest_migrates_to_a_newer_qemu_and_back: {why}");
    } else if can_boot_or_skips() {
        to_and_fro([None, Some(&newer)], Kind { engines: 0, queues: 0 });
    }
}

/// Has a guest migrate between two daemons, and two QEMUs, each with another.
fn to_and_fro(programs: [Option<&Path>; 2], kind: Kind) {
    let scratch = Scratch::new();
    let images = DISKS.map(|name| scratch.image(name, DISK));
    let mut hosts = ["a", "b"].map(|name| Host::start(&scratch, name, &images, kind));
    let mut guest = Qemu::start(&scratch, "q0", &hosts[0], programs[0], None);
    let mut console = String::new();
    let count = moves(WAYS.len());
    for (round, way) in WAYS.into_iter().cycle().take(count).enumerate() {
        guest.await_line("EGRET-ASKS move", &mut console);
        let (from, to) = (round % 2, (round + 1) % 2);
        let name = format!("q{}", round + 1);
        let address = |kind: &str| format!("{kind}:{}", scratch.path(&format!("{name}-guest")).display());
        let wait_for_it =
            |name: &str, host: &Host, kind: &str| Qemu::start(&scratch, name, host, programs[to], Some(&address(kind)));
        if round == 1 && programs[from].is_some() {
            // Later QEMUs leave no requests behind that nobody has any more.
            let waits = wait_for_it(&format!("{name}-0"), &hosts[to], "unix");
            guest.begin_to_send_away(&address("unix"));
            hosts[from].kill();
            guest.hurry();
            assert_eq!(guest.migrated(), "failed");
            let why = guest.qmp.run("query-migrate", json!({}))["error-desc"].take();
            assert!(why.as_str().is_some_and(|why| why.starts_with("Failed to stop the VM")), "{why}");
            drop(waits);
            let _ = std::fs::remove_file(scratch.path(&format!("{name}-guest")));
            hosts[from].revive();
            guest.await_daemons();
            guest.tell_guest("stayed");
            guest.await_line("EGRET-ASKS move", &mut console);
        }
        let mut arrived = match way {
            Way::Live => {
                let arriving = wait_for_it(&name, &hosts[to], "unix");
                guest.send_away(&address("unix"));
                arriving
            }
            Way::AtTheSecondAttempt => {
                let gives_up = wait_for_it(&format!("{name}-0"), &hosts[to], "unix");
                guest.begin_to_send_away(&address("unix"));
                guest.qmp.run("migrate_cancel", json!({}));
                assert_eq!(guest.migrated(), "cancelled");
                drop(gives_up);
                guest.hurry();
                let _ = std::fs::remove_file(scratch.path(&format!("{name}-guest")));
                let arriving = wait_for_it(&name, &hosts[to], "unix");
                guest.send_away(&address("unix"));
                arriving
            }
            Way::ByFile => {
                guest.send_away(&address("file"));
                wait_for_it(&name, &hosts[to], "file")
            }
            Way::WithKills => {
                let arriving = wait_for_it(&name, &hosts[to], "unix");
                hosts[to].restart();
                guest.send_away(&address("unix"));
                hosts[from].restart();
                arriving
            }
            Way::WithTheSourceKilled | Way::WithTheDestinationKilled | Way::WithTheDestinationGone => {
                let mut arriving = wait_for_it(&name, &hosts[to], "unix");
                guest.begin_to_send_away(&address("unix"));
                match way {
                    Way::WithTheSourceKilled => {
                        hosts[from].restart();
                        guest.await_daemons();
                    }
                    Way::WithTheDestinationKilled => {
                        hosts[to].restart();
                        arriving.await_daemons();
                    }
                    _ => hosts[to].kill(),
                }
                guest.hurry();
                assert_eq!(guest.migrated(), "completed", "{way:?}: {}", guest.qmp.run("query-migrate", json!({})));
                if hosts[to].server.is_none() {
                    hosts[to].revive();
                }
                arriving
            }
        };
        arrived.await_running();
        if way == Way::WithKills {
            hosts[to].restart();
        }
        // Its last words may still be on their way.
        guest.quit();
        guest = arrived;
        guest.tell_guest(if round + 1 == count { "enough" } else { "moved" });
        console += &format!("[{way:?}: moved]\n");
        println!("{kind:?}: {} moves, the last one {way:?}", round + 1);
    }
    // The kernel finds the disks in any order.
    let mut hashes = DISKS.map(|_| guest.await_line("EGRET-SHA256 ", &mut console));
    hashes.sort();
    guest.await_line("EGRET-GUEST-EXIT: 0", &mut console);
    for (at, disk) in DISKS.into_iter().enumerate() {
        let queues = QUEUES[(at + kind.queues) % 4];
        assert!(console.contains(&format!("{disk} queues {queues}")), "{console}");
    }
    let _ = guest.process.0.wait();
    for host in hosts {
        let server = host.server.expect("it runs");
        // On a busy machine who leaves may take longer than who comes waits. QEMU connects again then.
        let complaints = server.complaints().into_iter().filter(|line| !line.contains("is locked: another process"));
        assert_eq!(complaints.collect::<Vec<_>>(), [""; 0]);
        assert_eq!(server.terminate().code(), Some(0));
    }
    let mut images = [0, 1, 2, 3].map(|at| format!("{} {}", DISKS[at], hash(&images[at])));
    images.sort();
    assert_eq!(hashes, images, "the guest and the host see the same bytes");
}

/// The hash of a file, as a guest prints it of a disk.
fn hash(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().expect("coreutils");
    String::from_utf8(output.stdout).expect("hexadecimal").split(' ').next().expect("a hash").to_owned()
}
