//! A storage daemon as a child process: egret, or a peer that takes the same options.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::fate::Fate;
use super::{await_some, await_that};

/// A daemon's program and the arguments that always come first.
#[derive(Clone, Debug, Default)]
pub struct Program {
    words: Vec<String>,
    ours: bool,
    fates: Vec<Fate>,
    variables: Vec<(&'static str, String)>,
    /// What it is started with as its third descriptor.
    given: Option<Arc<OwnedFd>>,
}

/// What says which egret is tested, if not the one of this build: the one that is released, for instance.
const OTHER: &str = "EGRET_TEST_BINARY";

/// The egret that is tested.
pub fn binary() -> String {
    std::env::var(OTHER).unwrap_or_else(|_| env!("CARGO_BIN_EXE_egret").to_owned())
}

/// Whether that is the one of this build.
pub fn is_of_this_build() -> bool {
    std::env::var_os(OTHER).is_none()
}

impl Program {
    /// The egret that is tested, which may open at run time what tests make.
    pub fn egret() -> Self {
        Self::egret_alone().with_words(["--sandbox-dir", env!("CARGO_TARGET_TMPDIR")])
    }

    /// The egret that is tested, which opens at run time what is beside its own images and sockets.
    pub fn egret_alone() -> Self {
        Self { words: vec![binary(), "serve".into()], ours: true, ..Self::default() }
    }

    /// The same, with system calls that do not do what they should.
    pub fn with(mut self, fate: Fate) -> Self {
        self.fates.push(fate);
        self
    }

    /// The same, with a variable in its environment.
    pub fn with_env(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// The same, with a socket of this name, as systemd hands it over.
    pub fn with_socket(self, name: &str, socket: OwnedFd) -> Self {
        let handed_over = self.after(["sh", "-c", HAND_OVER]).with_env("LISTEN_FDNAMES", name);
        Self { given: Some(Arc::new(socket)), ..handed_over }
    }

    /// The egret that is tested, whose files may not grow beyond a MiB or two, as the shell counts: it fails to write
    /// what is beyond.
    pub fn egret_with_small_files() -> Self {
        Self::egret_with_files_of(2048)
    }

    /// Likewise with files of so many blocks, of 512 bytes or of a KiB.
    pub fn egret_with_files_of(blocks: u32) -> Self {
        let limited = format!("ulimit -S -f {blocks}; exec \"$0\" \"$@\"");
        Self::egret().after(["sh", "-c", &limited])
    }

    /// The same, as the last words of another command.
    pub fn after<'a>(self, words: impl IntoIterator<Item = &'a str>) -> Self {
        let words = words.into_iter().map(Into::into).chain(self.words).collect();
        Self { words, ..self }
    }

    /// The same, with more options.
    pub fn with_words<'a>(mut self, words: impl IntoIterator<Item = &'a str>) -> Self {
        self.words.extend(words.into_iter().map(Into::into));
        self
    }

    /// A peer, as the words of its command.
    pub fn peer(command: &str) -> Self {
        Self { words: command.split_whitespace().map(Into::into).collect(), ..Self::default() }
    }

    /// What a test runs: egret, or the peer that `EGRET_TEST_SERVER` names.
    ///
    /// `EGRET_TEST_SERVER=qemu-storage-daemon cargo test -p egret` is how the tests were themselves tested.
    pub fn under_test() -> Self {
        std::env::var("EGRET_TEST_SERVER").map_or_else(|_| Self::egret(), |command| Self::peer(&command))
    }

    /// Whether this is egret, with its own options and its own words for errors.
    pub fn is_egret(&self) -> bool {
        self.ours
    }

    /// A command of this program, to which options are added.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        if let Some(socket) = &self.given {
            command.stdin(socket.try_clone().expect("a descriptor"));
        }
        self.fates.iter().for_each(|fate| fate.befall(&mut command));
        command
    }
}

/// Options in the vocabulary that egret and qemu-storage-daemon share.
#[derive(Clone, Debug, Default)]
pub struct Options {
    words: Vec<String>,
    sockets: Vec<PathBuf>,
}

impl Options {
    /// No options yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Words as they are.
    pub fn words<W: Into<String>>(mut self, words: impl IntoIterator<Item = W>) -> Self {
        self.words.extend(words.into_iter().map(Into::into));
        self
    }

    /// `--object iothread`; `more` is empty or further `key=value` pairs, as in every method here.
    pub fn iothread(self, id: &str, more: &str) -> Self {
        self.words(["--object".into(), joined(format!("iothread,id={id}"), more)])
    }

    /// `--blockdev` over a regular file or a block device.
    pub fn disk(self, node: &str, image: &Path, more: &str) -> Self {
        let block = fs::metadata(image).is_ok_and(|meta| meta.file_type().is_block_device());
        let driver = if block { "host_device" } else { "file" };
        let disk = format!("driver={driver},node-name={node},filename={}", image.display());
        self.words(["--blockdev".into(), joined(disk, more)])
    }

    /// `--blockdev` behind an NBD server at a UNIX socket.
    pub fn nbd(self, node: &str, server: &Path, more: &str) -> Self {
        let disk = format!("driver=nbd,node-name={node},server.type=unix,server.path={}", server.display());
        self.words(["--blockdev".into(), joined(disk, more)])
    }

    /// `--blockdev` without a disk behind it.
    pub fn null(self, node: &str, more: &str) -> Self {
        self.words(["--blockdev".into(), joined(format!("driver=null-co,node-name={node},size=1073741824"), more)])
    }

    /// `--export` as vhost-user-blk at `socket`.
    pub fn export(mut self, id: &str, node: &str, socket: &Path, more: &str) -> Self {
        self.sockets.push(socket.into());
        let path = socket.display();
        let export = format!("type=vhost-user-blk,id={id},node-name={node},addr.type=unix,addr.path={path}");
        self.words(["--export".into(), joined(export, more)])
    }

    /// `--export` as vhost-user-scsi at `socket`; `more` has its logical units.
    pub fn export_scsi(mut self, id: &str, socket: &Path, more: &str) -> Self {
        self.sockets.push(socket.into());
        let export = format!("type=vhost-user-scsi,id={id},addr.type=unix,addr.path={}", socket.display());
        self.words(["--export".into(), joined(export, more)])
    }

    /// A socket that the words name in another vocabulary.
    pub fn listening(mut self, socket: &Path) -> Self {
        self.sockets.push(socket.into());
        self
    }

    /// A QMP monitor at `socket`.
    pub fn monitor(mut self, id: &str, socket: &Path) -> Self {
        self.sockets.push(socket.into());
        let chardev = format!("socket,id={id},path={},server=on,wait=off", socket.display());
        self.words(["--chardev".into(), chardev, "--monitor".into(), format!("chardev={id}")])
    }

    /// Metrics at a UNIX socket.
    pub fn metrics(mut self, socket: &Path) -> Self {
        self.sockets.push(socket.into());
        self.words(["--metrics".into(), format!("unix:{}", socket.display())])
    }

    /// The words of the command line.
    pub fn as_words(&self) -> &[String] {
        &self.words
    }
}

fn joined(first: String, more: &str) -> String {
    if more.is_empty() { first } else { format!("{first},{more}") }
}

/// What is standard input becomes the third descriptor, as systemd hands it over: the shell's number is that of the program that
/// it becomes.
const HAND_OVER: &str = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" \"$@\"";

/// Egret, to be started with a socket of this name, as systemd hands it over.
pub fn activated(name: &str, socket: OwnedFd) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", HAND_OVER, &binary()]);
    command.env("LISTEN_FDNAMES", name).stdin(socket).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A process that does not outlive its test.
pub struct Reaped(pub Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        // One whose disk hangs ends when that does, and a test that failed is not to wait for it: the disk may be dropped next.
        if !std::thread::panicking() {
            let _ = self.0.wait();
        }
    }
}

const NOTIFY: &str = "NOTIFY_SOCKET";

/// Plays the service manager that started the daemon.
struct Manager {
    socket: UnixDatagram,
    place: tempfile::TempDir,
}

impl Manager {
    /// Of a program that tells nobody else, and can tell.
    fn of(program: &Program) -> Option<Self> {
        if !program.ours || program.variables.iter().any(|(name, _)| *name == NOTIFY) {
            return None;
        }
        let place = tempfile::tempdir().expect("a directory for a socket");
        let path = place.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("our own directory");
        socket.set_nonblocking(true).expect("a socket");
        // Whoever the daemon runs as.
        for (path, mode) in [(place.path(), 0o755), (&path, 0o777)] {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("our own");
        }
        Some(Self { socket, place })
    }

    fn hears_that_it_serves(&self) -> bool {
        let mut text = [0; 64];
        self.socket.recv(&mut text).is_ok() && text.starts_with(b"READY=1")
    }
}

/// A running daemon; killed and reaped when dropped.
pub struct Server {
    process: Reaped,
    /// There for as long as the daemon may have something to tell.
    manager: Option<Manager>,
    reader: Option<JoinHandle<()>>,
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Starts `program` and waits until every export of `options` listens.
    ///
    /// # Panics
    /// When the daemon exits instead, with what it said.
    pub fn start(program: &Program, options: &Options) -> Self {
        let (manager, mut child) = Self::spawn(program, options, Stdio::piped());
        let stderr = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&log);
        let reader = std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                lines.lock().expect("no reader panics").push(line);
            }
        });
        let mut server = Self { process: Reaped(child), manager, reader: Some(reader), log };
        if !server.listens(options) {
            server.await_end();
            panic!("the daemon ended and said {:?}", server.log());
        }
        server
    }

    /// [`start`](Self::start), with standard error going to `stderr`, so that there is no log to look at here.
    ///
    /// # Panics
    /// When the daemon exits instead.
    pub fn start_logging_to(stderr: impl Into<Stdio>, program: &Program, options: &Options) -> Self {
        let (manager, child) = Self::spawn(program, options, stderr.into());
        let mut server = Self { process: Reaped(child), manager, reader: None, log: Arc::default() };
        assert!(server.listens(options), "the daemon listens");
        server
    }

    fn spawn(program: &Program, options: &Options, stderr: Stdio) -> (Option<Manager>, Child) {
        let manager = Manager::of(program);
        let mut command = program.command();
        command.envs(manager.iter().map(|manager| (NOTIFY, manager.place.path().join("notify"))));
        let child = command.args(&options.words).stderr(stderr).spawn();
        (manager, child.expect("the daemon's program starts"))
    }

    /// Waits until every export listens, and egret has opened all that it opens by itself; false if the process ends instead.
    fn listens(&mut self, options: &Options) -> bool {
        await_that("the daemon to listen or to end", || are_listening(&options.sockets) || !self.is_alive());
        await_that("the daemon to serve or to end", || {
            self.manager.as_ref().is_none_or(Manager::hears_that_it_serves) || !self.is_alive()
        });
        self.is_alive()
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// The lines logged so far.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("no writer panics").clone()
    }

    /// The warnings and errors logged so far.
    pub fn complaints(&self) -> Vec<String> {
        self.log().into_iter().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect()
    }

    /// Whether the process is still there.
    pub fn is_alive(&mut self) -> bool {
        self.process.0.try_wait().expect("our child").is_none()
    }

    /// Asks the daemon to end, and waits for it.
    pub fn terminate(mut self) -> ExitStatus {
        self.end()
    }

    /// As [`terminate`](Self::terminate), and what it has said is left.
    pub fn end(&mut self) -> ExitStatus {
        self.ask_to_end();
        self.await_end()
    }

    /// Asks the daemon to end.
    pub fn ask_to_end(&self) {
        self.send(rustix::process::Signal::TERM);
    }

    /// Sends the daemon a signal.
    pub fn send(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process.0);
        rustix::process::kill_process(pid, signal).expect("our child");
    }

    /// Waits until the daemon has ended, and all that it said is in the log.
    pub fn await_end(&mut self) -> ExitStatus {
        let status = await_some("the daemon to end", || self.process.0.try_wait().expect("our child"));
        if let Some(reader) = self.reader.take() {
            reader.join().expect("it only reads");
        }
        status
    }

    /// Has every thread stop in what it does, does something meanwhile, and has them go on.
    pub fn while_stopped<T>(&self, act: impl FnOnce() -> T) -> T {
        self.send(rustix::process::Signal::STOP);
        await_stopped(self.pid());
        let done = act();
        self.send(rustix::process::Signal::CONT);
        done
    }

    /// How many threads the process has.
    pub fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.pid())).expect("the daemon lives").count()
    }

    /// How many descriptors the process has open.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the daemon lives").count()
    }

    /// The lines of `/proc/PID/maps`.
    pub fn maps(&self) -> Vec<String> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid())).expect("the daemon lives");
        maps.lines().map(str::to_owned).collect()
    }

    /// Resident memory in bytes.
    pub fn resident(&self) -> u64 {
        self.status("VmRSS:") * 1024
    }

    /// Resident memory that no file backs, in bytes: how much of a program's own file is resident the kernel decides.
    pub fn resident_without_files(&self) -> u64 {
        (self.status("RssAnon:") + self.status("RssShmem:")) * 1024
    }

    /// The most memory that was ever resident, or was since [`forget_peak`](Self::forget_peak), in bytes.
    pub fn peak(&self) -> u64 {
        self.status("VmHWM:") * 1024
    }

    /// Begins [`peak`](Self::peak) anew.
    pub fn forget_peak(&self) {
        fs::write(format!("/proc/{}/clear_refs", self.pid()), "5").expect("our child");
    }

    fn status(&self, name: &str) -> u64 {
        field(&fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("the daemon lives"), name)
    }

    /// What /proc says about each thread.
    pub fn each_thread(&self, what: &str) -> Vec<String> {
        each_thread(self.pid(), what)
    }

    /// Each thread's name and how often it has gone to sleep by itself, so far.
    pub fn sleeps(&self) -> Vec<(String, u64)> {
        let sleeps = |status: &String| {
            let name = status.lines().next()?.trim_start_matches("Name:").trim().to_owned();
            Some((name, field(status, "voluntary_ctxt_switches:")))
        };
        self.each_thread("status").iter().filter_map(sleeps).collect()
    }

    /// For how long the thread of this name has had a processor so far.
    pub fn cpu_time(&self, thread: &str) -> Duration {
        let time = egret_loadgen::machine::named_threads_cpu_time_ns(self.pid(), thread);
        Duration::from_nanos(time.expect("a thread of this name"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon's log: {:#?}", self.log());
        }
    }
}

/// What /proc says about each thread of a process.
fn each_thread(pid: u32, what: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives");
    // A thread may end between the listing and the look.
    tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join(what)).ok()).collect()
}

/// Waits until each thread of a process has stopped that was sent SIGSTOP: until then they run, and may do something.
pub fn await_stopped(pid: u32) {
    // Stopped, or stopped for its tracer.
    let is_stopped = |status: &String| ["State:\tT", "State:\tt"].iter().any(|state| status.contains(state));
    await_that("a process to stop", || each_thread(pid, "status").iter().all(is_stopped));
}

/// Whether every one of `sockets` is listened on.
///
/// Looked up in the kernel's table, because a connection would count as a client.
fn are_listening(sockets: &[PathBuf]) -> bool {
    const ACCEPTS: &str = "00010000";
    let table = fs::read_to_string("/proc/net/unix").expect("procfs");
    let listening: Vec<&str> = table.lines().filter(|line| line.split_whitespace().nth(3) == Some(ACCEPTS)).collect();
    sockets.iter().all(|socket| {
        let path = socket.to_str().expect("our own path");
        listening.iter().any(|line| line.ends_with(path))
    })
}

fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find(|line| line.starts_with(name)).expect("a field that Linux always shows");
    line.split_whitespace().nth(1).and_then(|value| value.parse().ok()).expect("a number")
}
