//! fio on another machine, over ssh: a virtual machine that is there already, or a host.
//!
//! ```text
//!   lab ── ssh ──► sh: an agent ── sh ──► fio ──► its disk
//!    ├── of a libvirt domain on this host: the CPU time of its QEMU's threads, by what they are called
//!    └── of the Egret on this host that serves the disk: its CPU time and counters, by its monitor
//! ```
//!
//! Nothing is installed there, and nothing is left.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::guest::agent::{Agent, AgentError};
use super::guest::mark::Clock;
use super::guest::work::{self, Place, Work};
use super::telemetry::Telemetry;
use super::{Context, Deployment, Task, Unable, account, fio, quoted};
use crate::cpu_meter::{CpuMeter, Role};
use crate::plan::{Load, Subject};
use crate::process::{END_GROUPS, Process};
use crate::results::Measurement;

/// How long ssh may take to connect: what it is told, and after how long it is not waited for any more.
const CONNECT_TIMEOUT: &str = "ConnectTimeout=30";
const TO_CONNECT: Duration = Duration::from_secs(60);
/// How long looking at the disk may take.
const TO_LOOK: Duration = Duration::from_secs(30);
/// Where libvirt writes down which process a domain is.
const LIBVIRT: &str = "/run/libvirt/qemu";
/// What `scripts/guest-agent` does, in a folder of its own, until the connection ends; behind [`END_GROUPS`]. With the connection its
/// job ends: nobody sends anything while there is one, and so the end is all that can be read.
const AGENT: &str = r#"
exec 3>&1 1>&2 4<&0
folder=$(mktemp -d) && cd "$folder" || exit 1
trap 'cd /; rm -rf "$folder"' EXIT
trap : PIPE
echo "hello $(uname -r)" >&3
while read -r word number seconds bytes; do
  [ "$word" = job ] || break
  head -c "$bytes" >job
  JOB=$number setsid timeout "$seconds" sh ./job </dev/null >out 4<&- &
  job=$!
  { read -r word <&4 || { : >gone; end_groups "$job"; }; } &
  watch=$!
  wait "$job"
  status=$?
  # What timeout says of one that was late; busybox's is the job by then, and ended by SIGTERM.
  case $status in 124 | 143) end_groups "$job"; status=137 ;; esac
  # Not by SIGTERM: one that has just begun still has the trap of who began it, and would remove the folder.
  [ -e gone ] || kill -KILL "$watch"
  wait "$watch" 2>/dev/null
  echo "done $number $status $(($(wc -c <out)))" >&3
  cat out >&3
done
"#;

pub(super) struct Remote {
    /// Ends after what it carries does.
    ssh: Process,
    agent: Agent,
    disks: Vec<String>,
    writable: bool,
    destroy: bool,
    domain: Option<Domain>,
    monitor: Option<PathBuf>,
    broken: bool,
}

/// A libvirt domain on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Domain {
    pid: u32,
    is_emulated: bool,
}

impl Domain {
    /// The one of this name, by libvirt's `folder`.
    fn find(name: &str, folder: &Path) -> Result<Self, Unable> {
        let missing =
            |what: &str| Unable::Impossible(format!("domain '{name}' {what}: virsh list names those that run"));
        let pid = fs::read_to_string(folder.join(format!("{name}.pid"))).map_err(|_| missing("does not run here"))?;
        let pid: u32 = pid.trim().parse().map_err(|_| missing("has no process"))?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| missing("has ended"))?;
        Ok(Self { pid, is_emulated: is_emulated(&line) })
    }
}

/// Whether a QEMU of this command line has no KVM: by `-accel tcg`, or `-machine pc,accel=tcg` of a libvirt before 7.
fn is_emulated(line: &[u8]) -> bool {
    let words = || line.split(|byte| *byte == 0);
    let mut parts = words().flat_map(|word| word.split(|byte| *byte == b','));
    words().any(|word| word.starts_with(b"tcg")) || parts.any(|part| part.starts_with(b"accel=tcg"))
}

/// The Egret on this host that serves the disk.
struct Server {
    pid: u32,
    io_threads: BTreeSet<u32>,
    telemetry: Telemetry,
}

impl Server {
    /// The one that has this monitor.
    fn at(monitor: &Path) -> Result<Self, Unable> {
        let mut telemetry = Telemetry::connect(monitor).map_err(Unable::failed)?;
        let io_threads = telemetry.io_threads().unwrap_or_default();
        let pid = io_threads.first().and_then(|tid| {
            let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
            status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok())
        });
        let nobody =
            || Unable::failed(format!("{}: what answers there has no I/O threads on this host", monitor.display()));
        Ok(Self { pid: pid.ok_or_else(nobody)?, io_threads, telemetry })
    }
}

/// What a thread of QEMU does, by its name; libvirt has QEMU name them.
fn role(name: &str) -> Role {
    match name {
        // The monitor's.
        "IO mon_iothread" => Role::Guest,
        _ if name.starts_with("IO ") => Role::IoThread,
        "worker" => Role::ServerOther,
        _ if name.starts_with("iou-wrk") => Role::ServerOther,
        _ => Role::Guest,
    }
}

/// Connects. The disk is only looked at.
pub(super) fn deploy(subject: &Subject, load: &Load, context: &Context) -> Result<Remote, Unable> {
    if load.idle_disks > 0 || load.keys.application.is_some() {
        return Err(Unable::Impossible("over ssh fio has no idle disks, and there is no application".into()));
    }
    let count = subject.disks().len();
    if usize::from(load.disks) > count {
        return Err(Unable::Impossible(format!("the load asks for {} disks, and the subject has {count}", load.disks)));
    }
    let domain = subject.domain.as_ref().map(|name| Domain::find(name, Path::new(LIBVIRT))).transpose()?;
    let host = subject.client.as_deref().and_then(|client| client.strip_prefix("ssh:")).unwrap_or_default();
    let disks = subject.disks().iter().map(|disk| disk.display().to_string()).collect();
    let (ours, theirs) = UnixStream::pair().map_err(Unable::failed)?;
    let mut command = Command::new("ssh");
    command.args(["-o", "BatchMode=yes", "-o", CONNECT_TIMEOUT, "--", host, &[END_GROUPS, AGENT].concat()]);
    command.stdout(Stdio::from(std::os::fd::OwnedFd::from(theirs.try_clone().map_err(Unable::failed)?)));
    let stdin = Stdio::from(std::os::fd::OwnedFd::from(theirs));
    let mut ssh = context.reaper.start_fed(command, stdin).map_err(Unable::failed)?;
    let greeted = Agent::greet(ours, TO_CONNECT);
    let agent = match greeted {
        Ok(agent) => agent,
        Err(error) => {
            // Its last words say why.
            ssh.wait(Duration::from_secs(1));
            let (_, log) = ssh.end();
            let said = log.iter().rev().map(|line| line.trim()).find(|line| !line.is_empty());
            return Err(Unable::Failed { reason: format!("ssh {host}: {}", said.unwrap_or(&error.to_string())), log });
        }
    };
    let (destroy, monitor) = (context.destroy, subject.monitor.clone());
    let mut remote = Remote { ssh, agent, disks, writable: false, destroy, domain, monitor, broken: false };
    (0..count).try_for_each(|disk| remote.look(disk, load.writes()))?;
    remote.writable = load.writes();
    Ok(remote)
}

impl Remote {
    /// Looks at a disk.
    fn look(&mut self, disk: usize, writes: bool) -> Result<(), Unable> {
        let script = probe(&self.disks[disk], writes, self.destroy);
        self.ssh.forget_log();
        let looked = self.agent.run(&script, TO_LOOK, |_| {});
        self.checked(looked).map(drop)
    }

    fn meter(&self, server: Option<&Server>) -> CpuMeter {
        let mut meter = CpuMeter::new();
        if let Some(domain) = self.domain {
            // Where it does not serve, its I/O threads have nothing to do.
            let serves = server.is_none();
            meter.follow(domain.pid, move |_, name| if serves { role(name) } else { Role::Guest });
        }
        if let Some(server) = server {
            meter.follow_server(server.pid, server.io_threads.clone());
        }
        meter
    }

    fn checked(&mut self, ran: Result<String, AgentError>) -> Result<String, Unable> {
        ran.map_err(|error| {
            self.broken |= !matches!(error, AgentError::Failed(_));
            let log = self.ssh.log();
            let reason = fio::complaint(&log).map_or(error.to_string(), |said| format!("{error}: {said}"));
            Unable::Failed { reason, log }
        })
    }
}

/// Whether there is fio and a disk, and where the load writes whether nobody uses it, for the shell there.
///
/// A disk has many names, and is mounted by any of them or as `/dev/root`: what is compared are the kernel's numbers, of the disk,
/// of its partitions, and of what it is a partition of.
fn probe(disk: &str, writes: bool, destroy: bool) -> String {
    format!(
        r#"
disk={disk}
fail() {{ echo "$1" >&2; exit 1; }}
in_use() {{ fail "$disk is in use there"; }}
number() {{ set -- $(stat -L -c '0x%t 0x%T' "$1"); echo "$(($1+0)):$(($2+0))"; }}
# A loop device is no holder.
sources() {{ cut -d ' ' -f 1 /proc/mounts /proc/swaps; cat /sys/block/loop*/loop/backing_file 2>/dev/null; }}
command -v fio >/dev/null || fail "fio is not installed there"
[ -b "$disk" ] || [ -f "$disk" ] || fail "$disk is no block device and no file there"
[ -r "$disk" ] || fail "no permission for $disk there"
[ {writes} = true ] || exit 0
[ -w "$disk" ] || fail "no permission to write to $disk there"
if [ -b "$disk" ]; then
  device=/sys/dev/block/$(number "$disk")
  [ -e "$device/dev" ] || fail "nobody can tell there who uses $disk: that takes stat and /sys"
  # What btrfs has mounted has a number of its own, and one of its devices a name.
  used=$(
    cut -d ' ' -f 3 /proc/self/mountinfo
    sources | sort -u | while read -r source; do [ ! -b "$source" ] || number "$source"; done
  )
  set -- "$device" "$device"/*/partition
  [ ! -e "$device/partition" ] || set -- "$@" "$device/.."
  for part do
    part=${{part%/partition}}
    [ -e "$part/dev" ] || continue
    name=$(basename "$(readlink -f "$part")")
    [ -z "$(ls "$part/holders" 2>/dev/null; ls -d /sys/fs/btrfs/*/devices/"$name" 2>/dev/null)" ] || in_use
    ! echo "$used" | grep -qxF "$(cat "$part/dev")" || in_use
  done
else
  sources | while read -r source; do [ ! "$source" -ef "$disk" ] || exit 1; done || in_use
fi
[ {destroy} = true ] || head -c 1048576 "$disk" | cmp -s -n 1048576 - /dev/zero || fail "$disk is not empty there, and the plan writes to it; say destroy = true if its data may be lost"
"#,
        disk = quoted(disk),
    )
}

impl Deployment for Remote {
    fn takes(&self, load: &Load) -> bool {
        !self.broken
            && usize::from(load.disks) <= self.disks.len()
            && load.idle_disks == 0
            && (self.writable || !load.writes())
    }

    fn pids(&self) -> Vec<u32> {
        let egret = self.monitor.as_deref().and_then(|monitor| Server::at(monitor).ok());
        self.domain.iter().map(|domain| domain.pid).chain(egret.map(|egret| egret.pid)).collect()
    }

    fn measure(&mut self, task: &Task<'_>) -> Result<Measurement, Unable> {
        let work = Work::of(task, &self.disks[..task.load.disks.into()], Place::OWN_FOLDER)?;
        let mut server = self.monitor.as_deref().map(Server::at).transpose()?;
        let mut meter = self.meter(server.as_ref());
        if task.io_submit {
            meter.watch_io_submit();
        }
        let mut clock = Clock::default();
        self.ssh.forget_log();
        let ran = self.agent.run(&work.script, work.limit, |mark| {
            if let Some(edge) = work::edge(mark) {
                task.edge(edge);
                meter.edge(edge);
                server.iter_mut().for_each(|server| server.telemetry.edge(edge));
            }
            clock.hear(mark);
        });
        let output = self.checked(ran)?;
        // The raw output is for debugging; failing to keep it does not fail the measurement.
        let _ = fs::write(task.raw.with_extension("json"), &output);
        let mut measurement = work.measurement(&output, meter.seconds()).map_err(Unable::failed)?;
        measurement.offer(fio::offered(task));
        measurement.functional_only = self.domain.is_some_and(|domain| domain.is_emulated);
        if !measurement.functional_only {
            clock.agrees().map_err(Unable::failed)?;
        }
        // Of another host nothing is known but what fio says of itself.
        if (self.domain.is_some() || server.is_some()) && meter.seconds() > 0.0 {
            let load = measurement.cpu.load.filter(|_| self.domain.is_some());
            account(&mut measurement, &meter, server.as_ref().map(|server| &server.telemetry), load);
        }
        Ok(measurement)
    }
}

/// The disk of a subject, and its client, where they are what the stack needs.
pub(crate) fn complaint(subject: &Subject) -> Option<&'static str> {
    let client = subject.client.as_deref().map(|client| client.strip_prefix("ssh:").unwrap_or_default());
    if client.unwrap_or_default().is_empty() {
        return Some("the stack ssh needs a client, as \"ssh:HOST\" or \"ssh:USER@HOST\"");
    }
    let disks = subject.disks();
    let named = !disks.is_empty() && disks.iter().all(|path| *path != PathBuf::new());
    (!named).then_some("the stack ssh needs its disk, by the path that it has there")
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::process::ProcessReaper;

    #[test]
    fn a_domain_is_the_process_that_libvirt_wrote_down() {
        let folder = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        fs::write(folder.path().join("vm1.pid"), format!("{pid}\n")).unwrap();
        assert_eq!(Domain::find("vm1", folder.path()), Ok(Domain { pid, is_emulated: false }));
        let Err(Unable::Impossible(reason)) = Domain::find("vm2", folder.path()) else { panic!("it does not run") };
        assert_eq!(reason, "domain 'vm2' does not run here: virsh list names those that run");
    }

    #[test]
    fn what_serves_over_ssh_is_the_domains_qemu_where_there_is_one() {
        let connected = |domain: Option<Domain>| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(b"hello 6.1\n").unwrap();
            Remote {
                ssh: ProcessReaper::new().unwrap().start(Command::new("true")).unwrap(),
                agent: Agent::greet(ours, TO_CONNECT).unwrap(),
                disks: Vec::new(),
                writable: false,
                destroy: false,
                domain,
                monitor: None,
                broken: false,
            }
        };
        assert_eq!(connected(Some(Domain { pid: 7, is_emulated: false })).pids(), [7]);
        assert!(connected(None).pids().is_empty());
    }

    #[test]
    fn a_domain_without_kvm_is_known_whichever_libvirt_started_it() {
        for line in ["qemu\0-accel\0tcg,thread=multi\0", "qemu\0-machine\0pc-q35-4.2,accel=tcg,usb=off\0-m\0size=1"] {
            assert!(is_emulated(line.as_bytes()), "{line}");
        }
        for line in ["qemu\0-accel\0kvm\0-name\0guest=a tcg\0", "qemu\0-machine\0pc-q35-4.2,accel=kvm,usb=off\0"] {
            assert!(!is_emulated(line.as_bytes()), "{line}");
        }
    }

    #[test]
    fn threads_of_qemu_are_known_by_their_names() {
        let roles =
            ["IO iothread1", "worker", "iou-wrk-12", "CPU 0/KVM", "qemu-system-x86", "IO mon_iothread"].map(role);
        let guest = Role::Guest;
        assert_eq!(roles, [Role::IoThread, Role::ServerOther, Role::ServerOther, guest, guest, guest]);
    }

    /// The programs that a shell finds: those of this machine, or busybox's own alone; and an fio.
    fn programs(folder: &Path, busybox: bool) -> Option<String> {
        let (programs, path) = (folder.join("bin"), std::env::var("PATH").unwrap_or_default());
        fs::create_dir_all(&programs).unwrap();
        std::os::unix::fs::symlink("/bin/true", programs.join("fio")).unwrap();
        if !busybox {
            return Some(format!("{}:{path}", programs.display()));
        }
        let installed = Command::new("busybox").args(["--install", "-s"]).arg(&programs).status();
        installed.is_ok_and(|status| status.success()).then(|| programs.display().to_string())
    }

    #[test]
    fn a_disk_that_is_mounted_or_held_there_by_whatever_name_is_in_use_there() {
        use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

        let mut shells = vec![(vec!["sh"], false), (vec!["busybox", "sh"], true)];
        if crate::stack::find("dash").is_some() {
            shells.push((vec!["dash"], false));
        }
        for (shell, busybox) in shells {
            // A disk with a partition, another one, and one that the kernel does not tell of.
            let machine = || {
                let folder = tempfile::tempdir().unwrap();
                let at = |path: &str| folder.path().join(path);
                for place in [
                    "dev",
                    "proc/self",
                    "sys/dev/block",
                    "sys/devices/sd/queue",
                    "sys/devices/sd/sd1",
                    "sys/devices/other",
                ] {
                    fs::create_dir_all(at(place)).unwrap();
                }
                for (device, number) in [("sd", 0), ("sd/sd1", 1), ("other", 16)] {
                    let link = at(&format!("sys/dev/block/240:{number}"));
                    std::os::unix::fs::symlink(format!("../../devices/{device}"), link).unwrap();
                    fs::create_dir(at(&format!("sys/devices/{device}/holders"))).unwrap();
                    fs::write(at(&format!("sys/devices/{device}/dev")), format!("240:{number}\n")).unwrap();
                }
                fs::write(at("sys/devices/sd/sd1/partition"), "1\n").unwrap();
                for file in ["proc/self/mountinfo", "proc/mounts", "proc/swaps", "image"] {
                    fs::write(at(file), "").unwrap();
                }
                let nodes = [("sd", 0), ("sd1", 1), ("a-partition", 1), ("unknown", 99)];
                let made = nodes.map(|(name, minor)| {
                    let mode = Mode::RUSR | Mode::WUSR;
                    mknodat(CWD, at(&format!("dev/{name}")), FileType::BlockDevice, mode, makedev(240, minor))
                });
                std::os::unix::fs::symlink("sd", at("dev/by-id")).unwrap();
                made.iter().all(Result::is_ok).then_some(folder)
            };
            let said = |disk: &str, is_so: &[(&str, &str)]| {
                let folder = machine()?;
                let root = folder.path().display();
                for (file, text) in is_so {
                    let file = folder.path().join(file);
                    fs::create_dir_all(file.parent().unwrap()).unwrap();
                    fs::write(file, text.replace("$root", &root.to_string())).unwrap();
                }
                let disk = folder.path().join(disk).display().to_string();
                let script = probe(&disk, true, true);
                let script = ["/sys/", "/proc/"]
                    .iter()
                    .fold(script, |script, place| script.replace(place, &format!("{root}{place}")));
                let mut command = Command::new(shell[0]);
                command.args(&shell[1..]).args(["-c", &script]).env("PATH", programs(folder.path(), busybox)?);
                let ended = command.output().ok()?;
                let said =
                    String::from_utf8_lossy(&ended.stderr).lines().last().unwrap_or_default().replace(&disk, "it");
                assert_eq!(ended.status.success(), said.is_empty(), "{said}");
                Some(said)
            };
            if said("dev/sd", &[]).is_none() {
                egret_needs::this_test_lacks(format_args!("{}, and root for device nodes", shell[0]));
                continue;
            }
            let mounts = "proc/self/mountinfo";
            for (disk, is_so) in [
                ("dev/by-id", (mounts, "22 1 240:0 / /mnt rw - ext4 /dev/mapper/vg-data rw\n")),
                ("dev/sd", (mounts, "21 1 0:5 / /dev rw - devtmpfs x rw\n22 1 240:1 / / rw - ext4 /dev/root rw\n")),
                ("dev/sd1", (mounts, "22 1 240:0 / /mnt rw - iso9660 /dev/sd ro\n")),
                ("dev/sd", ("sys/devices/sd/holders/dm-0", "")),
                ("dev/sd", ("sys/devices/sd/sd1/holders/md0", "")),
                ("dev/sd1", ("sys/devices/sd/holders/dm-0", "")),
                ("dev/sd", ("proc/swaps", "Filename Type\n$root/dev/a-partition partition 1 0 -2\n")),
                ("dev/sd", ("proc/mounts", "proc /proc proc rw 0 0\n$root/dev/a-partition /data btrfs rw 0 0\n")),
                ("dev/sd", ("sys/fs/btrfs/uuid/devices/sd1", "")),
                ("dev/sd", ("sys/block/loop0/loop/backing_file", "$root/dev/a-partition\n")),
                ("dev/sd1", ("sys/block/loop0/loop/backing_file", "$root/dev/by-id\n")),
                ("image", ("proc/swaps", "Filename Type\n$root/image file 1 0 -2\n")),
                ("image", ("sys/block/loop0/loop/backing_file", "$root/image\n")),
            ] {
                assert_eq!(said(disk, &[is_so]).as_deref(), Some("it is in use there"), "{shell:?} {disk} {is_so:?}");
            }
            for (disk, is_so) in [
                ("dev/sd1", (mounts, "22 1 240:2 / /mnt rw - ext4 /dev/sd2 rw\n")),
                ("dev/sd", (mounts, "22 1 240:16 / / rw - ext4 /dev/root rw\n")),
                ("dev/sd", ("sys/devices/other/holders/md0", "")),
                ("dev/sd", ("sys/fs/btrfs/uuid/devices/other", "")),
                ("dev/sd", ("sys/block/loop0/loop/backing_file", "$root/dev/unknown\n")),
                ("dev/sd", ("sys/block/loop0/loop/backing_file", "$root/image\n")),
                ("image", ("proc/swaps", "Filename Type\n$root/dev/sd partition 1 0 -2\n")),
            ] {
                assert_eq!(said(disk, &[is_so]).as_deref(), Some(""), "{shell:?} {disk} {is_so:?}");
            }
            let unknown = said("dev/unknown", &[]);
            assert_eq!(unknown.as_deref(), Some("nobody can tell there who uses it: that takes stat and /sys"));
        }
    }

    #[test]
    fn a_shell_takes_a_path_for_what_it_is() {
        assert_eq!(quoted("/dev/it's $x"), r"'/dev/it'\''s $x'");
    }
}
