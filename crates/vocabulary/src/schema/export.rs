//! The `export` object.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use super::access::{self, Access};
use super::blockdev::LONGEST_NODE_NAME;
use super::descriptor::Descriptor;
use super::key::{Foreign, Harmless, Key, Kind, Shape, Variants};
use super::lun::{self, Lun};
use super::object::object;
use super::{Object, ObjectError, Problem, Spelling};

/// Longest path of a UNIX socket, in bytes: `sockaddr_un` holds 108 with the terminator.
pub const LONGEST_SOCKET_PATH: usize = 107;

/// A SET_VRING_KICK or _CALL message has eight bits for the queue's number (vhost-user protocol, "vring descriptor
/// index"), so no client can start a 257th queue.
const MOST_QUEUES: u64 = 256;
/// Likewise, with a control and an event queue beside them.
const MOST_SCSI_QUEUES: u16 = 254;
/// What a request needs beside data are two descriptors, and powers of two have none between that and this.
const SMALLEST_QUEUE: u64 = 4;
const LARGEST_QUEUE: u64 = 1024;
const LARGEST_BLOCK: u64 = 2 << 20;
/// `VIRTIO_BLK_ID_BYTES` (virtio 1.3, 5.2.6).
const LONGEST_SERIAL: usize = 20;

const DEFAULT_BLOCK: u32 = 512;
const DEFAULT_QUEUE_SIZE: u16 = 128;
/// No guest has as much.
const DEFAULT_MEMORY_MAX: u64 = 4 << 40;
/// What qemu-storage-daemon answers.
const DEFAULT_SERIAL: &str = "vhost_user_blk";

/// How disks are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExportType {
    /// One, as a virtio-blk device over vhost-user.
    VhostUserBlk,
    /// Any number, as a virtio-scsi device over vhost-user.
    VhostUserScsi,
}

/// Which files clients may hand over as guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryFiles {
    /// Memfds, and files on tmpfs and hugetlbfs.
    #[default]
    SharedMemory,
    /// All that can be mapped.
    Any,
}

/// What becomes of a queue that its client asks to be polled, by giving it no kick descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kickless {
    /// It is looked at once a millisecond at least.
    #[default]
    Timer,
    /// Its I/O thread does not sleep while it runs.
    Busy,
}

/// Disks offered to virtual machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self", rename_all = "kebab-case")]
pub struct Export {
    /// How it is offered.
    #[serde(rename = "type")]
    pub kind: ExportType,
    /// Its name.
    pub id: String,
    /// The disk; empty where there are `luns`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// The disks of a virtio-scsi device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub luns: Vec<Lun>,
    /// Where clients connect.
    pub addr: Addr,
    /// Who may connect there.
    #[serde(flatten)]
    pub access: Access,
    /// Whether clients may write.
    #[serde(default)]
    pub writable: bool,
    /// Whether every write is on stable storage before it completes.
    #[serde(default)]
    pub writethrough: bool,
    /// The smallest addressable unit, in bytes.
    #[serde(default = "default_block")]
    pub logical_block_size: u32,
    /// Request queues.
    #[serde(default = "default_num_queues")]
    pub num_queues: u16,
    /// The ring size that the device is described for.
    #[serde(default = "default_queue_size")]
    pub queue_size: u16,
    /// I/O threads that its queues are spread over; empty if the daemon chooses.
    #[serde(default, skip_serializing_if = "Vec::is_empty", serialize_with = "one_or_list")]
    pub iothread: Vec<String>,
    /// Which I/O thread has which queues; empty if `iothread` says it all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub iothread_vq_mapping: Vec<VqMapping>,
    /// Whether the disk may not be moved to another I/O thread.
    #[serde(default)]
    pub fixed_iothread: bool,
    /// What becomes of queues that their client asks to be polled.
    #[serde(default)]
    pub kickless_queues: Kickless,
    /// How much guest memory is mapped at a time, at most, in bytes.
    #[serde(default = "default_memory_max")]
    pub memory_max: u64,
    /// Which files may be guest memory.
    #[serde(default)]
    pub memory_files: MemoryFiles,
    /// What the guest reads as the disk's serial number, if it was said; `luns` have their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
}

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Addr {
    /// A UNIX socket, made by the daemon.
    Unix {
        /// Its path.
        path: String,
    },
    /// A listening UNIX socket that the daemon inherits.
    Fd {
        /// Its descriptor.
        #[serde(rename = "str")]
        fd: Descriptor,
    },
}

/// An I/O thread and its queues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VqMapping {
    /// The I/O thread.
    pub iothread: String,
    /// Its queues; empty if all are dealt out in turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vqs: Vec<u16>,
}

static SHAPE: Shape = Shape {
    keys: &[
        Key::needed("id", Kind::Name(usize::MAX), "Name of the export."),
        Key::needed("addr", Kind::Object(&ADDR), "Where clients connect."),
        access::mode(&"as the umask leaves"),
        access::USER,
        access::GROUP,
        access::ALLOW_UID,
        Key::optional("writable", Kind::Flag, &"off", "Let clients write."),
        Key::optional(
            "writethrough",
            Kind::Flag,
            &"off",
            "Complete a write only when it is on stable storage, and offer no volatile cache.",
        ),
        Key::optional(
            "logical-block-size",
            Kind::PowerOfTwoBytes(DEFAULT_BLOCK as u64, LARGEST_BLOCK),
            &"512",
            "Smallest unit that the guest addresses. The disk's size must be a multiple of it.",
        ),
        Key::optional("num-queues", Kind::Number(1, MOST_QUEUES, "queues"), &"1", "Request queues."),
        Key::optional(
            "queue-size",
            Kind::PowerOfTwo(SMALLEST_QUEUE, LARGEST_QUEUE),
            &"128",
            "The ring size that the disk is described for: requests of at most `queue-size` - 2 segments are offered. A \
             client may set up rings of any size up to 1024. Egret's own for this type.",
        ),
        Key::optional(
            "iothread",
            Kind::Names,
            &"the daemon chooses",
            "The I/O thread that runs the export, or a list (`iothread.0=a,iothread.1=b`) that its queues are dealt \
             out to in turn.",
        ),
        Key::optional(
            "iothread-vq-mapping",
            Kind::List(&VQ_MAPPING),
            &"by `iothread`",
            "Which I/O thread has which queues (`iothread-vq-mapping.0.iothread=a`): every thread once, and every \
             queue once or no queue at all. Egret's own for exports.",
        ),
        Key::optional(
            "fixed-iothread",
            Kind::Flag,
            &"off",
            "Never move the disk to another I/O thread; not with several of them.",
        ),
        Key::optional(
            "kickless-queues",
            Kind::Word(|| vec!["timer", "busy"]),
            &"timer",
            "What is done with a queue that its client sets up without a kick descriptor, by which vhost-user asks for \
             polling: `timer` looks at it once a millisecond at least, and more often while the I/O thread spins for its \
             policy; `busy` lets the I/O thread never sleep, for clients that you trust with a core. Egret's own.",
        ),
        Key::optional(
            "memory-max",
            Kind::Bytes(1 << 20, 1 << 47),
            &"4T",
            "Guest memory that may be mapped at a time. A client that hands over more loses its session; in no more than \
             64 regions, whatever this says. Egret's own.",
        ),
        Key::optional(
            "memory-files",
            Kind::Word(|| vec!["shared-memory", "any"]),
            &"shared-memory",
            "Which files may be guest memory: `shared-memory` is memfds and files on tmpfs and hugetlbfs. With `any`, \
             whoever serves the file (a disk, an NFS or FUSE server, the client itself) can stop the export's I/O \
             thread for as long as it likes, and with it all exports there. Egret's own.",
        ),
    ],
    variants: Some(Variants {
        tag: "type",
        about: "How the disk is offered.",
        of: &[
            (
                "vhost-user-blk",
                &[
                    Key::needed("node-name", Kind::Name(LONGEST_NODE_NAME), "The blockdev to export."),
                    Key::optional(
                        "serial",
                        Kind::Text(0, LONGEST_SERIAL),
                        &DEFAULT_SERIAL,
                        "What the guest reads as the disk's serial number. Egret's own for this type.",
                    ),
                ],
            ),
            (
                "vhost-user-scsi",
                &[Key::optional(
                    "luns",
                    Kind::List(&super::lun::SHAPE),
                    &"none",
                    "The logical units that it begins with (`luns.0.lun=0,luns.0.node-name=d0`). This type is Egret's \
                     own.",
                )],
            ),
        ],
        foreign: &["nbd", "fuse", "vduse-blk"],
        because: "Egret exports vhost-user-blk and vhost-user-scsi",
    }),
    foreign: &[Foreign {
        name: "allow-inactive",
        harmless: Harmless::Off,
        because: "there is no migration of disks between daemons",
    }],
};

static ADDR: Shape = Shape {
    keys: &[],
    variants: Some(Variants {
        tag: "type",
        about: "Kind of address.",
        of: &[
            ("unix", &[Key::needed("path", Kind::Text(1, LONGEST_SOCKET_PATH), "Path of the UNIX socket to make.")]),
            (
                "fd",
                &[Key::needed(
                    "str",
                    Kind::Descriptor,
                    "A listening UNIX socket that the daemon is started with; with `block-export-add`, the name that `getfd` gave it.",
                )],
            ),
        ],
        foreign: &["inet", "vsock"],
        because: "vhost-user hands over file descriptors, which only UNIX sockets carry",
    }),
    foreign: &[
        Foreign { name: "abstract", harmless: Harmless::Off, because: "clients find a socket by its path" },
        Foreign { name: "tight", harmless: Harmless::Any, because: "it concerns abstract addresses" },
    ],
};

/// The keys of an I/O thread and its queues.
pub static VQ_MAPPING: Shape = Shape {
    keys: &[
        Key::needed("iothread", Kind::Name(usize::MAX), "The I/O thread."),
        Key::optional("vqs", Kind::Numbers(0, MOST_QUEUES - 1), &"dealt out in turn", "Its queues, counted from 0."),
    ],
    variants: None,
    foreign: &[],
};

object!(Export, "export", "id", &SHAPE);

impl Export {
    /// An export over vhost-user-blk with every key that is not needed left at its default.
    pub fn new(id: impl Into<String>, node_name: impl Into<String>, addr: Addr) -> Self {
        Self {
            kind: ExportType::VhostUserBlk,
            id: id.into(),
            node_name: node_name.into(),
            luns: Vec::new(),
            addr,
            access: Access::default(),
            writable: false,
            writethrough: false,
            logical_block_size: DEFAULT_BLOCK,
            num_queues: 1,
            queue_size: DEFAULT_QUEUE_SIZE,
            iothread: Vec::new(),
            iothread_vq_mapping: Vec::new(),
            fixed_iothread: false,
            kickless_queues: Kickless::default(),
            memory_max: DEFAULT_MEMORY_MAX,
            memory_files: MemoryFiles::default(),
            serial: None,
        }
    }

    /// What the guest reads as the serial number of its one disk.
    pub fn serial(&self) -> &str {
        self.serial.as_deref().unwrap_or(DEFAULT_SERIAL)
    }

    /// The disks that it names, each with the key that names it.
    pub fn node_names(&self) -> impl Iterator<Item = (String, &str)> {
        let one = (self.kind == ExportType::VhostUserBlk).then_some(self.node_name.as_str());
        let one = one.map(|name| ("node-name".to_owned(), name));
        let many =
            self.luns.iter().enumerate().map(|(at, lun)| (format!("luns.{at}.node-name"), lun.node_name.as_str()));
        one.into_iter().chain(many)
    }

    /// Whether it offers the disk of this name.
    pub fn has_node(&self, name: &str) -> bool {
        self.node_names().any(|(_, node)| node == name)
    }

    /// The same with another logical unit.
    ///
    /// # Errors
    /// It does not fit the others.
    pub fn with_lun(&self, lun: Lun) -> Result<Self, ObjectError> {
        let mut with = self.clone();
        with.luns.push(lun);
        with.check().map(|()| with).map_err(|problem| self.error(problem))
    }

    /// The I/O threads that it names, each with the key that names it.
    pub fn iothreads(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let mapped = self.iothread_vq_mapping.iter().map(|of| ("iothread-vq-mapping", of.iothread.as_str()));
        self.iothread.iter().map(|name| ("iothread", name.as_str())).chain(mapped)
    }

    /// The I/O thread of queue `queue`; `None` if the daemon chooses.
    ///
    /// Queues without an owner of their own are dealt out in turn, in the order in which the threads are named.
    pub fn iothread_of(&self, queue: u16) -> Option<&str> {
        if let Some(owner) = self.iothread_vq_mapping.iter().find(|of| of.vqs.contains(&queue)) {
            return Some(&owner.iothread);
        }
        self.iothreads().map(|(_, name)| name).nth(usize::from(queue) % self.iothreads().count().max(1))
    }

    /// Which I/O thread has which queues, every queue named; `default` has those for which the daemon chooses.
    pub fn mapping(&self, default: &str) -> Vec<VqMapping> {
        let mut mapping: Vec<VqMapping> = Vec::new();
        for queue in 0..self.num_queues {
            let iothread = self.iothread_of(queue).unwrap_or(default);
            match mapping.iter_mut().find(|of| of.iothread == iothread) {
                Some(of) => of.vqs.push(queue),
                None => mapping.push(VqMapping { iothread: iothread.to_owned(), vqs: vec![queue] }),
            }
        }
        mapping
    }

    /// The same on other I/O threads: those that `keys` names under `iothread` or `iothread-vq-mapping`.
    ///
    /// # Errors
    /// It names none, or breaks the rules that these keys have.
    pub fn placed(&self, keys: &Map<String, Value>) -> Result<Self, ObjectError> {
        let mut object = serde_json::to_value(self).map_err(|e| self.error(Problem::Together(e.to_string())))?;
        if let Some(object) = object.as_object_mut() {
            for key in ["iothread", "iothread-vq-mapping"] {
                object.remove(key);
                object.extend(keys.get(key).map(|value| (key.to_owned(), value.clone())));
            }
        }
        let placed = Self::from_value(object, Spelling::Typed)?;
        let names_one = placed.iothreads().next().is_some();
        let missing = || self.error(Problem::Missing { key: "iothread-vq-mapping".to_owned() });
        names_one.then_some(placed).ok_or_else(missing)
    }

    /// The same with one queue on another I/O thread than `mapping`, the one in force, has it on.
    ///
    /// # Errors
    /// It has no such queue.
    pub fn with_queue_on(&self, queue: u16, iothread: &str, mapping: Vec<VqMapping>) -> Result<Self, ObjectError> {
        if queue >= self.num_queues {
            let allowed = format!("0..={} (num-queues={})", self.num_queues - 1, self.num_queues);
            return Err(self.error(Problem::must("queue", allowed, queue)));
        }
        let mut moved = Self { iothread: Vec::new(), iothread_vq_mapping: mapping, ..self.clone() };
        let mapping = &mut moved.iothread_vq_mapping;
        mapping.iter_mut().for_each(|of| of.vqs.retain(|&other| other != queue));
        match mapping.iter_mut().find(|of| of.iothread == iothread) {
            Some(of) => {
                of.vqs.push(queue);
                of.vqs.sort_unstable();
            }
            None => mapping.push(VqMapping { iothread: iothread.to_owned(), vqs: vec![queue] }),
        }
        // A thread that has no queue left is free to go.
        mapping.retain(|of| !of.vqs.is_empty());
        Ok(moved)
    }

    fn own_name(&self) -> &str {
        &self.id
    }

    fn check(&self) -> Result<(), Problem> {
        let together = |problem: String| Err(Problem::Together(problem));
        if let (Addr::Fd { .. }, Some(key)) = (&self.addr, self.access.about_its_file().next()) {
            return together(format!(
                "{key} does not go with addr.type=fd: whoever made that socket has said it; allow-uid does go with it"
            ));
        }
        if !self.iothread.is_empty() && !self.iothread_vq_mapping.is_empty() {
            return together("iothread and iothread-vq-mapping say the same thing twice: use one of them".to_owned());
        }
        if self.fixed_iothread && self.iothreads().count() > 1 {
            return together("fixed-iothread=on needs a single iothread, got several".to_owned());
        }
        let mut named = BTreeSet::new();
        if let Some((key, name)) = self.iothreads().find(|(_, name)| !named.insert(*name)) {
            return together(format!("{key} names iothread '{name}' twice"));
        }
        self.check_mapping()?;
        match self.kind {
            ExportType::VhostUserBlk => Ok(()),
            ExportType::VhostUserScsi => self.check_luns(),
        }
    }

    fn check_luns(&self) -> Result<(), Problem> {
        if self.num_queues > MOST_SCSI_QUEUES {
            return Err(Problem::must("num-queues", format!("1..={MOST_SCSI_QUEUES}"), self.num_queues));
        }
        lun::check(&self.luns)
    }

    /// QEMU's rules: all entries say their queues or none does, and every queue has one owner.
    fn check_mapping(&self) -> Result<(), Problem> {
        let together = |problem: String| Err(Problem::Together(problem));
        let mapping = &self.iothread_vq_mapping;
        if mapping.iter().all(|of| of.vqs.is_empty()) {
            return Ok(());
        }
        if let Some(of) = mapping.iter().find(|of| of.vqs.is_empty()) {
            let name = &of.iothread;
            return together(format!("iothread-vq-mapping: iothread '{name}' has no vqs, and others have"));
        }
        let mut owned = BTreeSet::new();
        for &queue in mapping.iter().flat_map(|of| &of.vqs) {
            if queue >= self.num_queues {
                let allowed = format!("0..={} (num-queues={})", self.num_queues - 1, self.num_queues);
                return Err(Problem::must("iothread-vq-mapping: vqs", allowed, queue));
            }
            if !owned.insert(queue) {
                return together(format!("iothread-vq-mapping gives queue {queue} to two iothreads"));
            }
        }
        match (0..self.num_queues).find(|queue| !owned.contains(queue)) {
            Some(queue) => together(format!("iothread-vq-mapping gives queue {queue} to no iothread")),
            None => Ok(()),
        }
    }
}

fn one_or_list<S: Serializer>(names: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    match names {
        [name] => serializer.serialize_str(name),
        names => names.serialize(serializer),
    }
}

fn default_block() -> u32 {
    DEFAULT_BLOCK
}

fn default_num_queues() -> u16 {
    1
}

fn default_queue_size() -> u16 {
    DEFAULT_QUEUE_SIZE
}

fn default_memory_max() -> u64 {
    DEFAULT_MEMORY_MAX
}
