//! The `export` object.

use std::collections::BTreeSet;

use serde::{Serialize, Serializer};
use serde_json::json;

use super::access::Access;
use super::blockdev::LONGEST_NODE_NAME;
use super::descriptor::Descriptor;
use super::key::{Foreign, Harmless, Shape, ValueType};
use super::lun::{self, Lun, LunAddress};
use super::object::{object, with_defaults};
use super::{Object, ObjectError, Problem};
use crate::{choices, options, variants};

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
const SMALLEST_BLOCK: u64 = 512;
const LARGEST_BLOCK: u64 = 2 << 20;
/// `egret-scsi` has none that are larger.
const LARGEST_SCSI_BLOCK: u64 = 64 << 10;
/// A day.
const MOST_SECONDS: u64 = 86400;
/// `VIRTIO_BLK_ID_BYTES` (virtio 1.3, 5.2.6).
const LONGEST_SERIAL: usize = 20;

/// No string of NBD's is longer (doc/proto.md, "Conventions").
const LONGEST_NBD_STRING: usize = 4096;

/// What qemu-storage-daemon answers.
const DEFAULT_SERIAL: &str = "vhost_user_blk";

options! {
    /// Disks offered to virtual machines.
    #[serde(remote = "Self")]
    pub struct Export {
        /// How it is offered, and the keys that only such a one has.
        #[serde(flatten)]
        device: Device => &[];
        /// Name of the export.
        id: String, ValueType::Name(usize::MAX);
        /// Let clients write.
        writable: bool, ValueType::Flag, default "off";
        /// Complete a write only when it is on stable storage, and offer no volatile cache.
        writethrough: bool, ValueType::Flag, default "off";
        /// The I/O thread that runs the export, or a list (`iothread.0=a,iothread.1=b`) that its queues are dealt out to
        /// in turn.
        #[serde(serialize_with = "one_or_list")]
        iothread: Vec<String>, ValueType::Names, unset "the daemon chooses";
        /// Never move the disk to another I/O thread; not with several of them.
        fixed_iothread: bool, ValueType::Flag, default "off";
    }
}

options! {
    /// What exports over vhost-user have in common.
    pub struct VhostUser {
        /// Where clients connect.
        addr: Addr, ValueType::Object(&ADDR);
        /// Who may connect there.
        #[serde(flatten)]
        access: Access => Access::KEYS;
        /// Lock the image only while a client's rings run, not as long as the export is there: for a guest that migrates
        /// to another daemon with the same image. All exports of a blockdev have the same here.
        allow_inactive: bool, ValueType::Flag, default "off";
        /// Smallest unit that the guest addresses; of vhost-user-scsi 65536 at most. The disk's size must be a multiple of
        /// it.
        logical_block_size: u32, ValueType::PowerOfTwoBytes(SMALLEST_BLOCK, LARGEST_BLOCK), default SMALLEST_BLOCK;
        /// What is done when a read fails, as QEMU's drives have it: `report` tells the guest; `ignore` tells it that all
        /// went well; `stop` keeps the request, and every other of this export, until `block-export-resume`; `enospc` is
        /// `stop` if there is no space left, and otherwise `report`. Egret's own for exports.
        rerror: OnError, ValueType::Word(OnError::words), default OnError::Report;
        /// Likewise when a write, a flush, a discard or a write of zeroes fails.
        werror: OnError, ValueType::Word(OnError::words), default OnError::Report;
        /// How long a request may be in flight, in seconds, before the log and monitors are told (EGRET_REQUEST_TIMEOUT):
        /// once for as long as there are such requests. They go on. Egret's own.
        request_timeout: Option<u32>, ValueType::Number(1, MOST_SECONDS, "seconds"), unset "nobody is told";
        /// Request queues; of vhost-user-scsi 254 at most, beside which it has a control and an event queue.
        num_queues: u16, ValueType::Number(1, MOST_QUEUES, "queues"), default 1;
        /// The ring size that the disk is described for: requests of at most `queue-size` - 2 segments are offered, and by
        /// vhost-user-blk of at most 510, which is what Windows' driver has room for. A client may set up rings of any size
        /// up to 1024. Egret's own for this type.
        queue_size: u16, ValueType::PowerOfTwo(SMALLEST_QUEUE, LARGEST_QUEUE), default 128;
        /// Which I/O thread has which queues (`iothread-vq-mapping.0.iothread=a`), in the place of `iothread`: every
        /// thread once, and every queue once or no queue at all. Egret's own for exports.
        iothread_vq_mapping: Vec<VqMapping>, ValueType::List(&VQ_MAPPING), unset "by `iothread`";
        /// What is done with a queue that its client sets up without a kick descriptor, by which vhost-user asks for
        /// polling: `timer` looks at it once a millisecond at least, and more often while the I/O thread spins for its
        /// policy; `busy` lets the I/O thread never sleep, for clients that you trust with a core. Egret's own.
        kickless_queues: Kickless, ValueType::Word(Kickless::words), default Kickless::Timer;
        /// For user-mode Linux (virtio_uml): offer no packed rings, of which it does not say where they begin, and call the
        /// driver by a UNIX stream socket, which it has in the place of an eventfd. Not for clients that you do not trust: for
        /// how long a socket takes what is sent there its owner has more say. Egret's own.
        user_mode_linux: bool, ValueType::Flag, default "off";
        // No guest has as much as the default.
        /// Guest memory that may be mapped at a time. A client that hands over more loses its session; in no more than 64
        /// regions, whatever this says. Egret's own.
        memory_max: u64, ValueType::Bytes(1 << 20, 1 << 47), default "4T";
        /// Which files may be guest memory: `shared-memory` is memfds and files on tmpfs and hugetlbfs. With `any`,
        /// whoever serves the file (a disk, an NFS or FUSE server, the client itself) can stop the export's I/O thread
        /// for as long as it likes, and with it all exports there. Egret's own.
        memory_files: MemoryFiles, ValueType::Word(MemoryFiles::words), default MemoryFiles::SharedMemory;
        /// Have the kernel pin the guest memory that requests come to, so that each is the cheaper for it, with
        /// `aio=io_uring`: registered buffers. Not for a guest whose memory may be taken back while it runs, by a balloon,
        /// free page reporting or virtio-mem: its disk would read to, and write from, memory that it does not see any
        /// more. Pinned memory is not swapped out. Egret's own.
        pin_memory: bool, ValueType::Flag, default "off";
    }
}

variants! {
    /// How disks are offered.
    pub enum Device by "type", "How the disk is offered." {
        /// One, as a virtio-blk device over vhost-user.
        "vhost-user-blk" => VhostUserBlk(BlkDevice);
        /// Any number, as a virtio-scsi device over vhost-user.
        "vhost-user-scsi" => VhostUserScsi(ScsiDevice);
        /// One, to the clients of the NBD server.
        "nbd" => Nbd(NbdDevice);
    }
    foreign &["fuse", "vduse-blk"], because "Egret exports vhost-user-blk, vhost-user-scsi and nbd"
}

options! {
    /// A virtio-blk device.
    pub struct BlkDevice {
        /// The blockdev to export.
        node_name: String, ValueType::Name(LONGEST_NODE_NAME);
        /// What the guest reads as the disk's serial number. Egret's own for this type.
        serial: Option<String>, ValueType::Text(0, LONGEST_SERIAL), unset DEFAULT_SERIAL;
        /// What it has in common with the other.
        #[serde(flatten)]
        vhost_user: VhostUser => VhostUser::KEYS;
    }
}

options! {
    /// A virtio-scsi device.
    pub struct ScsiDevice {
        /// The logical units that it begins with (`luns.0.lun=0,luns.0.node-name=d0`). This type is Egret's own.
        luns: Vec<Lun>, ValueType::List(&lun::SHAPE), unset "none";
        /// What it has in common with the other.
        #[serde(flatten)]
        vhost_user: VhostUser => VhostUser::KEYS;
    }
}

options! {
    /// A disk over NBD.
    pub struct NbdDevice {
        /// The blockdev to export.
        node_name: String, ValueType::Name(LONGEST_NODE_NAME);
        /// What clients call it.
        name: Option<String>, ValueType::Text(0, LONGEST_NBD_STRING), unset "`node-name`";
        /// What it is for, to people who ask.
        description: Option<String>, ValueType::Text(0, LONGEST_NBD_STRING), unset "none";
        /// Clients that it has at a time; 0 is any number, up to 255 on each of its I/O threads. Who chooses it then is refused, while those of other exports have
        /// the rest of the server's places.
        max_connections: u32, ValueType::Number(0, u32::MAX as u64, "clients"), default 0;
    }
}

choices! {
    /// What is done when a request fails: QEMU's `BlockdevOnError`, without `auto`, which leaves it to a blockdev.
    pub enum OnError {
        /// The guest is told.
        "report" => Report;
        /// The guest is told that it succeeded.
        "ignore" => Ignore;
        /// The export stops if there is no space left.
        "enospc" => Enospc;
        /// The export stops.
        "stop" => Stop;
    }
}

choices! {
    /// What becomes of a queue that its client asks to be polled, by giving it no kick descriptor.
    pub enum Kickless {
        /// It is looked at once a millisecond at least.
        "timer" => Timer;
        /// Its I/O thread does not sleep while it runs.
        "busy" => Busy;
    }
}

choices! {
    /// Which files clients may hand over as guest memory.
    pub enum MemoryFiles {
        /// Memfds, and files on tmpfs and hugetlbfs.
        "shared-memory" => SharedMemory;
        /// All that can be mapped.
        "any" => Any;
    }
}

variants! {
    /// Where clients connect.
    pub enum Addr by "type", "Kind of address." {
        /// A UNIX socket, made by the daemon.
        "unix" => Unix(UnixAddr);
        /// A listening UNIX socket that the daemon inherits.
        "fd" => Fd(FdAddr);
    }
    foreign &["inet", "vsock"],
    because "vhost-user hands over file descriptors, which only UNIX sockets carry"
}

options! {
    /// A UNIX socket, made by the daemon.
    pub struct UnixAddr {
        /// Path of the UNIX socket to make.
        path: String, ValueType::Text(1, LONGEST_SOCKET_PATH);
    }
}

options! {
    /// A listening UNIX socket that the daemon inherits.
    pub struct FdAddr {
        /// A listening UNIX socket that the daemon is started with; with `block-export-add`, the name that `getfd` gave
        /// it.
        str: Descriptor, ValueType::Descriptor;
    }
}

options! {
    /// An I/O thread and its queues.
    pub struct VqMapping {
        /// The I/O thread.
        iothread: String, ValueType::Name(usize::MAX);
        /// Its queues, counted from 0.
        vqs: Vec<u16>, ValueType::Numbers(0, MOST_QUEUES - 1), unset "dealt out in turn";
    }
}

static SHAPE: Shape = Shape { keys: Export::KEYS, variants: Some(Device::VARIANTS), foreign: FOREIGN };

/// QEMU's keys of exports over NBD.
const FOREIGN: &[Foreign] = &[
    Foreign { name: "bitmap", harmless: Harmless::No, because: "there are no dirty bitmaps" },
    Foreign { name: "bitmaps", harmless: Harmless::No, because: "there are no dirty bitmaps" },
    Foreign {
        name: "allocation-depth",
        harmless: Harmless::Any,
        because: "a client that asks for it over NBD is told: it is 1 everywhere",
    },
    Foreign {
        name: "allow-inactive",
        harmless: Harmless::Off,
        because: "an image is locked for as long as an export of it over NBD is there",
    },
];

static ADDR: Shape = Shape {
    keys: &[],
    variants: Some(Addr::VARIANTS),
    foreign: &[
        Foreign { name: "abstract", harmless: Harmless::Off, because: "clients find a socket by its path" },
        Foreign { name: "tight", harmless: Harmless::Any, because: "it concerns abstract addresses" },
    ],
};

/// The keys of an I/O thread and its queues.
pub static VQ_MAPPING: Shape = Shape::of(VqMapping::KEYS);

object!(Export, "export", "id", &SHAPE);

impl BlkDevice {
    /// What the guest reads as the disk's serial number.
    pub fn serial(&self) -> &str {
        self.serial.as_deref().unwrap_or(DEFAULT_SERIAL)
    }
}

impl NbdDevice {
    /// What clients call it.
    pub fn name(&self) -> &str {
        self.name.as_ref().unwrap_or(&self.node_name)
    }
}

impl ScsiDevice {
    fn check_luns(&self) -> Result<(), Problem> {
        let Self { luns, vhost_user } = self;
        if vhost_user.num_queues > MOST_SCSI_QUEUES {
            return Err(Problem::must("num-queues", format!("1..={MOST_SCSI_QUEUES}"), vhost_user.num_queues));
        }
        if u64::from(vhost_user.logical_block_size) > LARGEST_SCSI_BLOCK {
            let allowed = ValueType::PowerOfTwoBytes(SMALLEST_BLOCK, LARGEST_SCSI_BLOCK).to_string();
            return Err(Problem::must("logical-block-size", allowed, vhost_user.logical_block_size));
        }
        if vhost_user.allow_inactive && luns.iter().any(|lun| !lun.pr_file.is_empty()) {
            let line = "pr-file does not go with allow-inactive=on: reservations do not move to another daemon";
            return Err(Problem::Together(line.to_owned()));
        }
        lun::check(luns)
    }
}

impl Export {
    /// An export over vhost-user-blk with every key that is not needed left at its default.
    pub fn new(id: impl Into<String>, node_name: impl Into<String>, addr: Addr) -> Self {
        let needed = json!({ "id": id.into(), "type": "vhost-user-blk", "node-name": node_name.into(), "addr": addr });
        with_defaults(needed, &SHAPE)
    }

    /// What it has if it is one over vhost-user.
    pub const fn vhost_user(&self) -> Option<&VhostUser> {
        match &self.device {
            Device::VhostUserBlk(BlkDevice { vhost_user, .. })
            | Device::VhostUserScsi(ScsiDevice { vhost_user, .. }) => Some(vhost_user),
            Device::Nbd(_) => None,
        }
    }

    /// Likewise, to be changed; whoever does sees to it that it fits together.
    pub const fn vhost_user_mut(&mut self) -> Option<&mut VhostUser> {
        match &mut self.device {
            Device::VhostUserBlk(BlkDevice { vhost_user, .. })
            | Device::VhostUserScsi(ScsiDevice { vhost_user, .. }) => Some(vhost_user),
            Device::Nbd(_) => None,
        }
    }

    /// Where its own clients connect; `None` if they are those of the NBD server.
    pub fn addr(&self) -> Option<&Addr> {
        self.vhost_user().map(|vhost_user| &vhost_user.addr)
    }

    /// Whether its disks are locked only while a client uses them.
    pub fn allow_inactive(&self) -> bool {
        self.vhost_user().is_some_and(|vhost_user| vhost_user.allow_inactive)
    }

    /// The smallest unit that its clients address, in bytes.
    pub fn logical_block_size(&self) -> u32 {
        self.vhost_user().map_or(SMALLEST_BLOCK as u32, |vhost_user| vhost_user.logical_block_size)
    }

    /// Its queues for requests; of one over NBD, the I/O threads that its clients are dealt out to.
    pub fn num_queues(&self) -> u16 {
        self.vhost_user().map_or(self.iothread.len().max(1) as u16, |vhost_user| vhost_user.num_queues)
    }

    fn vq_mapping(&self) -> &[VqMapping] {
        self.vhost_user().map_or(&[], |vhost_user| &vhost_user.iothread_vq_mapping)
    }

    /// The logical units of a virtio-scsi device.
    pub fn luns(&self) -> &[Lun] {
        match &self.device {
            Device::VhostUserBlk(_) | Device::Nbd(_) => &[],
            Device::VhostUserScsi(device) => &device.luns,
        }
    }

    /// The disks that it names, each with the key that names it.
    pub fn node_names(&self) -> impl Iterator<Item = (String, &str)> {
        let one = match &self.device {
            Device::VhostUserBlk(BlkDevice { node_name, .. }) | Device::Nbd(NbdDevice { node_name, .. }) => {
                Some(("node-name".to_owned(), node_name.as_str()))
            }
            Device::VhostUserScsi(_) => None,
        };
        let many = self.luns().iter().enumerate();
        one.into_iter().chain(many.map(|(at, lun)| (format!("luns.{at}.node-name"), lun.node_name.as_str())))
    }

    /// Whether it offers the disk of this name.
    pub fn has_node(&self, name: &str) -> bool {
        self.node_names().any(|(_, node)| node == name)
    }

    /// The same without one logical unit, and that one if it had it.
    pub fn without_lun(&self, address: LunAddress) -> (Self, Option<Lun>) {
        let mut without = self.clone();
        let lun = match &mut without.device {
            Device::VhostUserBlk(_) | Device::Nbd(_) => None,
            Device::VhostUserScsi(ScsiDevice { luns, .. }) => {
                luns.iter().position(|lun| lun.address == address).map(|at| luns.remove(at))
            }
        };
        (without, lun)
    }

    /// The same with another logical unit.
    ///
    /// # Errors
    /// It does not fit the others.
    pub fn with_lun(&self, lun: Lun) -> Result<Self, ObjectError> {
        let mut with = self.clone();
        if let Device::VhostUserScsi(device) = &mut with.device {
            device.luns.push(lun);
        }
        with.check().map(|()| with).map_err(|problem| self.error(problem))
    }

    /// The I/O threads that it names, each with the key that names it.
    pub fn iothreads(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let mapped = self.vq_mapping().iter().map(|of| ("iothread-vq-mapping", of.iothread.as_str()));
        self.iothread.iter().map(|name| ("iothread", name.as_str())).chain(mapped)
    }

    /// The I/O thread of queue `queue`; `None` if the daemon chooses.
    ///
    /// Queues without an owner of their own are dealt out in turn, in the order in which the threads are named.
    pub fn iothread_of(&self, queue: u16) -> Option<&str> {
        if let Some(owner) = self.vq_mapping().iter().find(|of| of.vqs.contains(&queue)) {
            return Some(&owner.iothread);
        }
        self.iothreads().map(|(_, name)| name).nth(usize::from(queue) % self.iothreads().count().max(1))
    }

    /// Which I/O thread has which queues, every queue named; `default` has those for which the daemon chooses.
    pub fn mapping(&self, default: &str) -> Vec<VqMapping> {
        let mut mapping: Vec<VqMapping> = Vec::new();
        for queue in 0..self.num_queues() {
            let iothread = self.iothread_of(queue).unwrap_or(default);
            match mapping.iter_mut().find(|of| of.iothread == iothread) {
                Some(of) => of.vqs.push(queue),
                None => mapping.push(VqMapping { iothread: iothread.to_owned(), vqs: vec![queue] }),
            }
        }
        mapping
    }

    /// The same on other I/O threads.
    ///
    /// # Errors
    /// They are none, or break the rules that these keys have.
    pub fn placed(&self, iothread: Vec<String>, iothread_vq_mapping: Vec<VqMapping>) -> Result<Self, ObjectError> {
        let mut placed = Self { iothread, ..self.clone() };
        let count = placed.num_queues();
        match placed.vhost_user_mut() {
            Some(vhost_user) => vhost_user.iothread_vq_mapping = iothread_vq_mapping,
            None if count != self.num_queues() || !iothread_vq_mapping.is_empty() => {
                return Err(self.error(Problem::must("iothread", "as many names as it has had so far", "others")));
            }
            None => {}
        }
        placed.check().map_err(|problem| self.error(problem))?;
        let names_one = placed.iothreads().next().is_some();
        let missing = || self.error(Problem::Missing { key: "iothread-vq-mapping".to_owned() });
        names_one.then_some(placed).ok_or_else(missing)
    }

    /// The same with one queue on another I/O thread than `mapping`, the one in force, has it on.
    ///
    /// # Errors
    /// It has no such queue.
    pub fn with_queue_on(&self, queue: u16, iothread: &str, mapping: Vec<VqMapping>) -> Result<Self, ObjectError> {
        let count = self.num_queues();
        if queue >= count {
            let allowed = format!("0..={} (num-queues={count})", count - 1);
            return Err(self.error(Problem::must("queue", allowed, queue)));
        }
        let mut moved = Self { iothread: Vec::new(), ..self.clone() };
        let Some(vhost_user) = moved.vhost_user_mut() else {
            let of = |lane: u16| mapping.iter().find(|of| of.vqs.contains(&lane)).map(|of| of.iothread.clone());
            moved.iothread = (0..count).filter_map(of).collect();
            moved.iothread[usize::from(queue)] = iothread.to_owned();
            return Ok(moved);
        };
        vhost_user.iothread_vq_mapping = mapping;
        let mapping = &mut vhost_user.iothread_vq_mapping;
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
        if let Some(VhostUser { addr: Addr::Fd(_), access, .. }) = self.vhost_user()
            && let Some(key) = access.about_its_file().next()
        {
            return together(format!(
                "{key} does not go with addr.type=fd: whoever made that socket has said it; allow-uid does go with it"
            ));
        }
        if !self.iothread.is_empty() && !self.vq_mapping().is_empty() {
            return together("iothread and iothread-vq-mapping say the same thing twice: use one of them".to_owned());
        }
        if self.fixed_iothread && self.iothreads().count() > 1 {
            return together("fixed-iothread=on needs a single iothread, got several".to_owned());
        }
        let mut named = BTreeSet::new();
        if let Some((key, name)) = self.iothreads().find(|(_, name)| !named.insert(*name)) {
            return together(format!("{key} names iothread '{name}' twice"));
        }
        self.vhost_user().map_or(Ok(()), VhostUser::check_mapping)?;
        match &self.device {
            Device::VhostUserBlk(_) | Device::Nbd(_) => Ok(()),
            Device::VhostUserScsi(device) => device.check_luns(),
        }
    }
}

impl VhostUser {
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
