//! QEMU: its command line, and a virtual machine that has booted.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::agent::{Agent, AgentError};
use super::image::{Accel, Image};
use super::memory;
use crate::plan::{DeviceModel, Subject};
use crate::process::Process;
use crate::qmp::{PATIENCE, Qmp};
use crate::stack::options::{IDLE, IDLE_SIZE, IO_THREAD, blockdev, iothreads};
use crate::stack::{Context, Disk, Unable};

/// How long QEMU may take to open its sockets.
const TO_START: Duration = Duration::from_secs(30);
/// How long a guest may take to boot: one under emulation, on a machine with many other things to do, is slow.
const TO_BOOT: Duration = Duration::from_secs(600);
/// How long one takes on KVM, and more: it boots in a second or two.
const TO_TRY_KVM: Duration = Duration::from_secs(20);
/// The serial number of the disk of applications, by which the guest tells it from the others.
pub const APPLICATIONS: &str = "egret-apps";

/// What a virtual machine is made of.
pub struct Machine<'a> {
    /// Of a guest.
    pub subject: &'a Subject,
    /// What it boots.
    pub image: &'a Image,
    /// The length of its memory, in bytes.
    pub memory: u64,
    /// The disks under test.
    pub disks: Disks<'a>,
    /// The disk of applications, if it has one.
    pub applications: Option<&'a Path>,
}

/// Who serves the disks under test.
pub enum Disks<'a> {
    /// QEMU itself.
    Own {
        /// What they are.
        disks: &'a [Disk],
        /// How many there are beside them that nobody uses.
        idle: u16,
        /// Whether the guest may write.
        writable: bool,
    },
    /// Somebody at these sockets.
    VhostUser(&'a [PathBuf]),
}

impl Machine<'_> {
    /// QEMU's arguments, but for where its sockets are.
    fn arguments(&self, accel: Accel) -> Result<Vec<OsString>, Unable> {
        let mut words: Vec<OsString> = Vec::new();
        let mut add = |option: &str, value: String| words.extend([option.into(), value.into()]);
        // Threads with names are easier to read about in top.
        add("-name", "egret-lab,debug-threads=on".into());
        add("-machine", "q35,memory-backend=memory".into());
        // The BIOS boots the kernel that it is given, and has no memory for the rings of so many disks.
        add("-boot", "strict=on".into());
        let (accel, cpu, kernel) = match accel {
            Accel::Kvm => ("kvm", "host", ""),
            // Mitigations cost an emulated processor dear, and defend nothing. The kernel's check that its timer ticks
            // fails on a busy host; under KVM the kernel leaves it out by itself.
            Accel::Tcg => ("tcg,thread=multi", "max", " mitigations=off no_timer_check"),
        };
        add("-accel", accel.into());
        add("-cpu", cpu.into());
        add("-smp", self.subject.vcpus.to_string());
        add("-m", format!("{}M", self.memory >> 20));
        add("-object", memory::backend(self.memory, self.subject.pages)?);
        add("-append", format!("console=ttyS0 loglevel=4 panic=-1{kernel}"));
        for object in iothreads(self.subject) {
            add("-object", object.to_string());
        }
        if let Some(path) = self.applications {
            let file = json!({ "driver": "file", "node-name": "apps", "filename": path, "read-only": true });
            add("-blockdev", file.to_string());
            add("-device", json!({ "driver": "virtio-blk-pci", "drive": "apps", "serial": APPLICATIONS }).to_string());
        }
        match &self.disks {
            Disks::Own { disks, idle, writable } => {
                let busy = disks.iter().map(|disk| (disk.clone(), *writable));
                let idle = std::iter::repeat_n((Disk::Null(IDLE_SIZE), false), usize::from(*idle));
                let all = disks.len() + idle.len();
                for (number, (disk, writable)) in busy.chain(idle).enumerate() {
                    let name = format!("disk{number}");
                    let node = blockdev(self.subject, &name, &disk, writable);
                    add("-blockdev", node.to_string());
                    for mut device in self.own_devices(number, &name) {
                        if number >= disks.len() {
                            device["serial"] = json!(IDLE);
                        }
                        add("-device", placed(device, number, all)?.to_string());
                    }
                }
            }
            Disks::VhostUser(sockets) => {
                for (number, socket) in sockets.iter().enumerate() {
                    add("-chardev", format!("socket,id=disk{number},path={}", escaped(socket)));
                    add("-device", placed(self.vhost_user_device(number), number, sockets.len())?.to_string());
                }
            }
        }
        words.extend(["-kernel".into(), self.image.kernel().into(), "-initrd".into(), self.image.initramfs().into()]);
        Ok(words)
    }

    fn own_devices(&self, number: usize, node: &str) -> Vec<Value> {
        let vcpus = self.subject.vcpus;
        let (mut device, more) = match self.subject.device {
            DeviceModel::VirtioBlk => (json!({ "driver": "virtio-blk-pci", "drive": node, "num-queues": vcpus }), None),
            DeviceModel::VirtioScsi => (
                json!({ "driver": "virtio-scsi-pci", "id": format!("scsi{number}"), "num_queues": vcpus }),
                Some(json!({ "driver": "scsi-hd", "bus": format!("scsi{number}.0"), "drive": node })),
            ),
        };
        let thread = |number| json!({ "iothread": format!("{IO_THREAD}{number}") });
        match self.subject.iothreads {
            0 => {}
            1 => device["iothread"] = thread(0)["iothread"].take(),
            several => device["iothread-vq-mapping"] = (0..several).map(thread).collect(),
        }
        [Some(device), more].into_iter().flatten().collect()
    }

    fn vhost_user_device(&self, number: usize) -> Value {
        let (chardev, vcpus) = (format!("disk{number}"), self.subject.vcpus);
        match self.subject.device {
            DeviceModel::VirtioBlk => {
                json!({ "driver": "vhost-user-blk-pci", "chardev": chardev, "num-queues": vcpus })
            }
            DeviceModel::VirtioScsi => {
                json!({ "driver": "vhost-user-scsi-pci", "chardev": chardev, "num_queues": vcpus })
            }
        }
    }
}

/// A place for a device of so many: where there are more than QEMU has slots for, eight share one.
fn placed(mut device: Value, number: usize, all: usize) -> Result<Value, Unable> {
    /// The first slot that nobody else gets, and how many there are from there on.
    const SLOTS: [usize; 2] = [8, 23];
    if all <= 16 || device["driver"] == "scsi-hd" {
        return Ok(device);
    }
    if all > SLOTS[1] * 8 {
        return Err(Unable::Impossible(format!("a guest has room for {} disks, not {all}", SLOTS[1] * 8)));
    }
    device["addr"] = json!(format!("{:x}.{}", SLOTS[0] + number / 8, number % 8));
    device["multifunction"] = json!(true);
    Ok(device)
}

/// A comma ends a value, and two are one.
fn escaped(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Threads of QEMU that have a part, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Threads {
    /// The guest's processors, in order.
    pub vcpus: Vec<u32>,
    /// I/O threads, in the order in which they were made.
    pub iothreads: Vec<u32>,
}

impl Threads {
    fn of(monitor: &mut Qmp) -> io::Result<Self> {
        Ok(Self { vcpus: monitor.threads("query-cpus-fast")?, iothreads: monitor.threads("query-iothreads")? })
    }
}

/// Whether a guest did not boot because an emulated processor waited for a timer that never fired, as one seldom does,
/// and as the kernel then says on the console.
fn lost_its_timer(unable: &Unable) -> bool {
    matches!(unable, Unable::Failed { log, .. } if log.iter().any(|line| line.contains("Possible timer handling issue")))
}

/// A virtual machine whose guest has booted; ends when dropped.
pub struct Qemu {
    process: Process,
    /// QEMU's monitor.
    pub monitor: Qmp,
    /// The agent in the guest.
    pub agent: Agent,
    /// Who QEMU's threads are.
    pub threads: Threads,
}

impl Qemu {
    /// Boots a guest. `Err` has the last lines of its console, and of QEMU.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not boot.
    pub fn boot(machine: &Machine<'_>, accel: Accel, context: &Context) -> Result<Self, Unable> {
        let boot = || Self::boot_within(machine, accel, context, TO_BOOT);
        boot().or_else(|unable| if accel == Accel::Tcg && lost_its_timer(&unable) { boot() } else { Err(unable) })
    }

    /// Whether KVM runs guests: that it is there proves little on a machine that is itself virtual.
    pub fn runs_on_kvm(image: &Image, subject: &Subject, context: &Context) -> bool {
        let machine =
            Machine { subject, image, memory: memory::LEAST, disks: Disks::VhostUser(&[]), applications: None };
        Self::boot_within(&machine, Accel::Kvm, context, TO_TRY_KVM).is_ok()
    }

    fn boot_within(machine: &Machine<'_>, accel: Accel, context: &Context, patience: Duration) -> Result<Self, Unable> {
        let (agent, monitor) = (Door::new(&context.scratch, "agent")?, Door::new(&context.scratch, "monitor")?);
        let mut command = Command::new(machine.subject.qemu());
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.args(machine.arguments(accel)?);
        // The console goes where QEMU's own words go.
        command.args(["-chardev", "file,id=console,path=/dev/stderr", "-serial", "chardev:console"]);
        command.args(["-chardev", &format!("socket,id=monitor,path={}", escaped(&monitor.path))]);
        command.args(["-mon", "chardev=monitor,mode=control"]);
        command.args(["-chardev", &format!("socket,id=agent,path={}", escaped(&agent.path))]);
        command.args(["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=egret.agent"]);
        command.stdout(Stdio::piped());
        let mut process = context.reaper.start(command).map_err(Unable::failed)?;

        let started = (|| {
            let monitor = Qmp::greet(monitor.enter(&mut process)?, Some(PATIENCE))?;
            Ok::<_, io::Error>((monitor, agent.enter(&mut process)?))
        })();
        let booted = match started {
            Ok((mut monitor, stream)) => Agent::greet(stream, patience)
                .map_err(|error| Trouble::of(&error))
                .and_then(|agent| Ok((Threads::of(&mut monitor).map_err(|error| Trouble::of(&error))?, agent)))
                .map(|(threads, agent)| (monitor, agent, threads)),
            Err(error) => Err(Trouble::of(&error)),
        };
        match booted {
            Ok((monitor, agent, threads)) => Ok(Self { process, monitor, agent, threads }),
            Err(trouble) => {
                let (_, log) = process.end();
                match lacks(machine.subject, &log) {
                    Some(reason) => Err(Unable::Impossible(reason)),
                    None => Err(trouble.with(log)),
                }
            }
        }
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The last lines of the guest's console and of QEMU.
    pub fn log(&self) -> Vec<String> {
        self.process.log().iter().map(|line| line.trim_end().to_owned()).collect()
    }

    /// Why the agent has given no result, with what the console says of it.
    pub fn failure(&mut self, error: &AgentError) -> Unable {
        if matches!(error, AgentError::Gone) {
            // Its last words arrive after it has ended.
            self.process.wait(Duration::from_secs(1));
        }
        let log = self.log();
        let last = log.iter().rev().find(|line| !line.is_empty()).cloned();
        let trouble = match (error, last) {
            // The script has said why.
            (AgentError::Failed(_), Some(last)) => Trouble(format!("{error}: {last}")),
            _ => Trouble::of(error),
        };
        trouble.with(log)
    }
}

/// Properties of an I/O thread that not every QEMU has.
const OF_NEWER_ONES: [&str; 4] = ["poll-weight", "aio-max-batch", "thread-pool-min", "thread-pool-max"];

/// The property that this QEMU is too old for, if that is what it has said. What no QEMU knows is a mistake, and no word
/// of this.
fn lacks(subject: &Subject, log: &[String]) -> Option<String> {
    let mut named = OF_NEWER_ONES.iter().filter(|name| subject.iothread.contains_key(**name));
    let said = |name: &&&str| log.iter().any(|line| line.contains(&format!("Parameter '{name}' is unexpected")));
    let name = named.find(said)?;
    Some(format!("{} has no {name}: it is older than that", subject.qemu().display()))
}

/// A failure, of which the console may know more.
struct Trouble(String);

impl Trouble {
    fn of(error: &dyn std::fmt::Display) -> Self {
        Self(error.to_string())
    }

    fn with(self, log: Vec<String>) -> Unable {
        let said = complaint(&log).or_else(|| log.iter().rev().find(|line| line.starts_with("qemu")));
        let reason = said.map_or_else(|| self.0.clone(), |said| format!("{}: {said}", self.0));
        Unable::Failed { reason, log }
    }
}

/// Beginnings of the kernel's messages about fatal errors.
const COMPLAINTS: [&str; 7] =
    ["Kernel panic", "BUG:", "Oops", "I/O error", "EXT4-fs error", "blocked for more than", "Out of memory"];

/// The first line in which the guest's kernel says that something is wrong.
pub fn complaint(log: &[String]) -> Option<&String> {
    log.iter().find(|line| COMPLAINTS.iter().any(|complaint| line.contains(complaint)))
}

/// A socket that QEMU comes to.
struct Door {
    listener: UnixListener,
    path: PathBuf,
}

impl Door {
    fn new(folder: &Path, name: &str) -> Result<Self, Unable> {
        let path = folder.join(format!("guest-{name}.sock"));
        // A lab that was killed may have left it.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(Unable::failed)?;
        listener.set_nonblocking(true).map_err(Unable::failed)?;
        Ok(Self { listener, path })
    }

    /// Waits for QEMU.
    fn enter(&self, process: &mut Process) -> io::Result<UnixStream> {
        let begin = Instant::now();
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if process.ended().is_some() => return Err(io::Error::other("QEMU has not started")),
                Err(_) if begin.elapsed() > TO_START => return Err(io::Error::other("QEMU does not start")),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_qemu_that_is_too_old_for_a_property_cannot_run_and_a_property_of_nobody_is_a_mistake() {
        let said = |name: &str| {
            let keys = format!("name = 's'\nstack = 'guest'\nqemu = '/old/qemu'\niothread = {{ {name} = 3 }}");
            let line = format!("qemu: -object {{\"id\":\"io0\"}}: Parameter '{name}' is unexpected");
            lacks(&toml::from_str(&keys).unwrap(), &[line])
        };
        assert_eq!(said("poll-weight").unwrap(), "/old/qemu has no poll-weight: it is older than that");
        assert_eq!(said("poll-wieght"), None);
    }

    #[test]
    fn a_guest_has_room_for_eight_times_as_many_disks_as_slots_and_says_so_of_more() {
        let device = |number, all| {
            placed(json!({ "driver": "virtio-blk-pci" }), number, all).map(|device| device["addr"].clone())
        };
        assert_eq!(device(15, 16), Ok(Value::Null), "where there are few QEMU finds a slot for each");
        let places: BTreeSet<String> = (0..184).map(|number| device(number, 184).unwrap().to_string()).collect();
        assert!(places.len() == 184 && places.contains("\"8.0\"") && places.contains("\"1e.7\""), "{places:?}");
        let refused = Unable::Impossible("a guest has room for 184 disks, not 185".into());
        assert_eq!(device(0, 185), Err(refused));
    }
}
