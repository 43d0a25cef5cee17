//! Processes that do not outlive the lab, and directories and settings that it does not leave behind.
//!
//! Three things see to that, so that even `kill -9` of the lab leaves nothing:
//!
//! | what | when |
//! |---|---|
//! | [`Process`], [`Scratch`] and [`Setting`] end with their owners | the lab ends normally |
//! | the kernel ends a process whose parent dies (`PR_SET_PDEATHSIG`) | the lab is killed |
//! | a [`ProcessReaper`], a shell that waits on a pipe from the lab, ends process groups, removes directories and puts settings back | the same |
//!
//! All of them send SIGTERM first: fio's jobs, where they are processes, are in sessions of their own, and fio ends them. Only
//! what has not ended after five seconds is killed, with its children.
//!
//! After a reboot the next [`Scratch::new`] in the same directory finds left-over directories whose lock is free, and
//! removes them.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::cpu_meter::family_of;

/// How long a process may take to end before it is killed.
const GRACE: Duration = Duration::from_secs(5);
/// How long another process may keep the output streams of an ended one open.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How many of a process's last lines are kept.
const LINES: usize = 200;

/// Of shells: ends the process groups in a list, as [`ProcessReaper::stop`] does.
pub(crate) const END_GROUPS: &str = r#"
end_groups() {
    for group in $1; do
        kill -s TERM -- "-$group" && kill -s CONT -- "-$group"
    done
    patience=50
    for group in $1; do
        while kill -s 0 -- "-$group" && [ "$patience" -gt 0 ]; do
            sleep 0.1
            patience=$((patience - 1))
        done
        ! kill -s 0 -- "-$group" || kill -s KILL $(family_of "$group")
    done
} 2>/dev/null
# The processes of a group, and their children, which may have left it.
family_of() {
    family=' '
    for generation in 1 2; do
        for stat in /proc/[0-9]*/stat; do
            read -r line <"$stat" || continue
            # Behind the name: the state, the parent and the group.
            set -- "$1" ${line##*) }
            case "$4:$family" in "$1:"* | *" $3 "*) family="$family${line%% *} " ;; esac
        done
    done
    echo "$family"
} 2>/dev/null
"#;

/// The reaper's script, behind [`END_GROUPS`]. A line names a process group (`group 12`), one that has ended (`ended 12`), a setting that was
/// changed, with what it was (`setting FILE=VALUE`), one that is so again (`settled FILE=VALUE`), a directory, or a
/// command to run (`undo rbd rm x`), the last one first, again and again for as long as Ceph takes a dead client for alive;
/// end of file means that the lab has ended.
const REAPER: &str = r#"
trap '' INT TERM HUP
groups=' ' settings=' ' undo=
while IFS= read -r line; do
    case $line in
    "group "*) groups="$groups${line#group } " ;;
    "ended "*) one=${line#ended }; case $groups in *" $one "*) groups="${groups%% "$one" *} ${groups#* "$one" }" ;; esac ;;
    "setting "*) settings="$settings${line#setting } " ;;
    "settled "*) one=${line#settled }; case $settings in *" $one "*) settings="${settings%% "$one" *} ${settings#* "$one" }" ;; esac ;;
    "undo "*) undo="undo_one ${line#undo }
$undo" ;;
    "directory "*) set -- "$@" "${line#directory }" ;;
    esac
done
end_groups "$groups"
for one in $settings; do echo "${one#*=}" >"${one%%=*}"; done
undo_one() {
    for try in 0 1 2 3 4 5 6 7 8 9; do
        timeout 30 "$@"
        # Done, or never there.
        case $? in 0 | 2) break ;; esac
        sleep 5
    done
}
eval "$undo"
[ $# -eq 0 ] || rm -rf -- "$@"
"#;

/// Starts processes, and sees to it that they end with the lab.
///
/// Processes end when the *thread* that started them does: start them from one that lives as long as they should.
pub struct ProcessReaper {
    lines: Mutex<Option<ChildStdin>>,
    shell: Child,
    running: Mutex<Vec<u32>>,
    stopped: AtomicBool,
}

impl ProcessReaper {
    /// Starts the reaper itself.
    ///
    /// # Errors
    /// There is no shell.
    pub fn new() -> io::Result<Arc<Self>> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &[END_GROUPS, REAPER].concat(), "egret-bench-reaper"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let mut shell = command.spawn()?;
        let lines = Mutex::new(shell.stdin.take());
        Ok(Arc::new(Self { lines, shell, running: Mutex::default(), stopped: AtomicBool::new(false) }))
    }

    fn send(&self, line: &str) {
        if let Some(lines) = &mut *held(&self.lines) {
            // Without the reaper the lab still cleans up itself when it ends normally.
            let _ = writeln!(lines, "{line}");
        }
    }

    /// Starts a process in a group of its own. What it says on its standard error is kept; its standard output, too,
    /// unless that goes somewhere else already.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(self: &Arc<Self>, command: Command) -> io::Result<Process> {
        self.start_fed(command, Stdio::null())
    }

    /// The same, with something to read.
    ///
    /// # Errors
    /// It cannot be started.
    #[allow(unsafe_code)]
    pub fn start_fed(self: &Arc<Self>, mut command: Command, stdin: Stdio) -> io::Result<Process> {
        self.go_on()?;
        command.stdin(stdin).stderr(Stdio::piped()).process_group(0);
        let lab = rustix::process::getpid();
        // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
                // It may have happened already.
                if rustix::process::getppid() == Some(lab) { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
            });
        }
        let mut child = command.spawn()?;
        self.send(&format!("group {}", child.id()));
        held(&self.running).push(child.id());
        let log = Arc::new(Mutex::new(Vec::new()));
        let streams: [Option<Box<dyn io::Read + Send>>; 2] = [
            child.stderr.take().map(|stream| Box::new(stream) as _),
            child.stdout.take().map(|stream| Box::new(stream) as _),
        ];
        let readers = streams.into_iter().flatten().map(|stream| keep_lines(stream, Arc::clone(&log))).collect();
        Ok(Process { child, reaper: Arc::clone(self), log, readers, ended: None })
    }

    /// Has a command run when the lab has ended, however it ends; its words have neither spaces nor anything that a shell
    /// would read.
    pub fn undo(&self, words: &[&str]) {
        self.send(&format!("undo {}", words.join(" ")));
    }

    /// Ends all that runs, and starts nothing more: for an interrupt, from any thread. It waits for that, so that a load
    /// whose server does not end is none that goes on.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        for pid in held(&self.running).iter() {
            signal_group(*pid, Signal::TERM);
            signal_group(*pid, Signal::CONT);
        }
        let begin = Instant::now();
        while !held(&self.running).is_empty() && begin.elapsed() < GRACE {
            std::thread::sleep(Duration::from_millis(2));
        }
        held(&self.running).iter().for_each(|pid| kill_family(*pid));
    }

    /// Whether [`stop`](Self::stop) was called.
    pub fn has_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// # Errors
    /// [`stop`](Self::stop) was called.
    pub fn go_on(&self) -> io::Result<()> {
        if self.has_stopped() { Err(io::Error::new(io::ErrorKind::Interrupted, "interrupted")) } else { Ok(()) }
    }

    fn forget(&self, pid: u32) {
        held(&self.running).retain(|running| *running != pid);
        self.send(&format!("ended {pid}"));
    }
}

impl Drop for ProcessReaper {
    fn drop(&mut self) {
        // End of file: it removes what is left, if anything, and ends.
        held(&self.lines).take();
        let _ = self.shell.wait();
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signal_group(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        // It may be gone.
        let _ = kill_process_group(pid, signal);
    }
}

/// Kills a process that does not end, and what it has started, which may have left its group.
fn kill_family(pid: u32) {
    for pid in family_of(pid).into_iter().filter_map(|pid| Pid::from_raw(pid as i32)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn keep_lines(stream: Box<dyn io::Read + Send>, log: Arc<Mutex<Vec<String>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        // Output that is no UTF-8 is read all the same: a closed pipe would kill the writer.
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            let mut log = held(&log);
            if log.len() == LINES {
                log.remove(0);
            }
            log.push(line);
        }
    })
}

/// A process; ended and reaped when dropped, with all that it started.
pub struct Process {
    child: Child,
    reaper: Arc<ProcessReaper>,
    log: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The last lines of its output.
    pub fn log(&self) -> Vec<String> {
        held(&self.log).clone()
    }

    /// Begins them anew: what it has said so far is of something else.
    pub fn forget_log(&self) {
        held(&self.log).clear();
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// Waits until it ends, at most so long.
    pub fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            if begin.elapsed() >= patience {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends SIGTERM, SIGKILL after a grace period, and returns the status and the last lines of output.
    pub fn end(mut self) -> (Option<ExitStatus>, Vec<String>) {
        self.finish();
        (self.ended, self.log())
    }

    fn finish(&mut self) {
        if self.ended().is_none() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            // A stopped process handles SIGTERM only when it continues.
            let _ = kill_process(Pid::from_child(&self.child), Signal::CONT);
            if self.wait(GRACE).is_none() {
                kill_family(self.pid());
            }
        }
        // Its children in the same group end with it.
        signal_group(self.pid(), Signal::KILL);
        if self.ended.is_none() {
            self.ended = self.child.wait().ok();
        }
        self.reaper.forget(self.pid());
        self.hear_out();
        self.readers.clear();
    }

    /// Waits for the last output of one that has ended.
    pub fn hear_out(&self) {
        let begin = Instant::now();
        // A reader ends when the last writer closes the stream, which may be a process that left the group.
        while !self.readers.iter().all(JoinHandle::is_finished) && begin.elapsed() < LAST_WORDS {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.readers.is_empty() {
            self.finish();
        }
    }
}

/// A directory of the lab's own, gone with its owner.
pub struct Scratch {
    path: PathBuf,
    /// Locked as long as its owner lives.
    _lock: File,
}

/// How the names of all of them begin.
const PREFIX: &str = "egret-bench-";
const LOCK: &str = ".lock";

impl Scratch {
    /// Makes one in `parent`, and removes what labs that are dead have left there.
    ///
    /// # Errors
    /// It cannot be made there.
    pub fn new(parent: &Path, reaper: &ProcessReaper) -> io::Result<Self> {
        remove_abandoned(parent);
        let mut number = 0;
        let path = loop {
            let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => break path.canonicalize()?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        };
        let lock = File::create(path.join(LOCK))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        if let Some(name) = path.to_str().filter(|name| !name.contains('\n')) {
            reaper.send(&format!("directory {name}"));
        }
        Ok(Self { path, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn remove_abandoned(parent: &Path) {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX)) {
        // One without a lock file is being created, or is not the lab's.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A setting of the kernel's, a file in sysfs, which has its value back when its owner or the lab ends.
pub struct Setting {
    file: PathBuf,
    before: String,
    reaper: Arc<ProcessReaper>,
}

impl Setting {
    /// Gives it another value than the one that it has `before`.
    ///
    /// # Errors
    /// The kernel takes no such value.
    pub fn change(file: PathBuf, before: &str, value: &str, reaper: &Arc<ProcessReaper>) -> io::Result<Self> {
        let new = Self { file, before: before.to_owned(), reaper: Arc::clone(reaper) };
        new.reaper.send(&format!("setting {}", new.line()));
        fs::write(&new.file, value)?;
        Ok(new)
    }

    /// Which file it is.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// As the reaper knows it.
    fn line(&self) -> String {
        format!("{}={}", self.file.display(), self.before)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // Where that fails there is nothing any more that it would be a setting of.
        let _ = fs::write(&self.file, &self.before);
        self.reaper.send(&format!("settled {}", self.line()));
    }
}

/// Where sockets go: their paths have room for 107 bytes.
pub fn short_directory() -> PathBuf {
    let temporary = std::env::temp_dir();
    if temporary.as_os_str().len() > 50 { "/tmp".into() } else { temporary }
}
