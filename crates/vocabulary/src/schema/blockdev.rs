//! The `blockdev` object.

use egret_disk::{Aio, DebugEvent, DetectZeroes, Discard, IoType, Locking};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Problem;
use super::key::{Foreign, Harmless, Key, Shape, ValueType};
use super::nbd_client::{self, Nbd};
use super::object::{object, with_defaults};
use super::rbd::Rbd;
use super::words::{as_word, words};
use crate::{options, variants};

/// Longest `node-name`, in bytes: QEMU's.
pub(super) const LONGEST_NODE_NAME: usize = 31;

/// `PATH_MAX` less its terminator.
pub(super) const LONGEST_PATH: usize = 4095;
/// No file offset is larger.
const LARGEST_DISK: u64 = i64::MAX as u64;
/// The largest number of a set of descriptors: QEMU's.
pub const LARGEST_FD_SET: u64 = i64::MAX as u64;
/// What a filename begins with that names a set.
const FD_SET: &str = "/dev/fdset/";

options! {
    /// A disk, or a layer over one.
    ///
    /// Fields are as they were written: an inline child takes what it leaves unset from its parent, so what is in force
    /// is known only in place ([`Config::disk`](crate::Config::disk)).
    #[serde(remote = "Self")]
    pub struct Blockdev {
        /// Name of the disk.
        node_name: Option<String>, ValueType::Name(LONGEST_NODE_NAME), unset "needed, except inside another blockdev";
        /// What it is, and the keys that only such a one has.
        #[serde(flatten)]
        driver: Driver => &[];
        /// How the host's page cache is used.
        cache: Cache, ValueType::Object(&CACHE), unset "see its keys";
        /// Refuse writes.
        read_only: Option<bool>, ValueType::Flag, unset "off; inline: the parent's";
        /// Open the image for reading alone as long as no writable export uses it. With `off` it is opened for writing from
        /// the start, and locked for that while any export has it, unless `read-only` says otherwise: a disk that cannot be
        /// written to is refused, and one that is read can get an export that writes.
        auto_read_only: Option<bool>, ValueType::Flag, unset "on; inline: the parent's";
        /// Whether discards give storage back or are dropped.
        #[serde(with = "as_word::optional")]
        discard: Option<Discard>, ValueType::Word(words::<Discard>), unset "ignore; inline: unmap";
        /// Whether writes of zeroes become write-zeroes requests; `unmap` needs `discard=unmap`.
        #[serde(with = "as_word::optional")]
        detect_zeroes: Option<DetectZeroes>, ValueType::Word(words::<DetectZeroes>), unset "off";
    }
}

options! {
    /// How the host's page cache is used.
    #[derive(Copy, Default)]
    pub struct Cache {
        /// Bypass the host's page cache (`O_DIRECT`); `aio=native` needs it.
        direct: Option<bool>, ValueType::Flag, unset "off; inline: the parent's";
        /// Drop flushes: fast, and data is lost when the host goes down.
        no_flush: Option<bool>, ValueType::Flag, unset "off; inline: the parent's";
    }
}

variants! {
    /// What a blockdev is.
    pub enum Driver by "driver", "What the disk is." {
        /// A regular file.
        "file" => File(Image);
        /// A block device of the host.
        "host_device" => HostDevice(Image);
        /// A disk that keeps nothing; both of QEMU's spellings are the same here.
        "null-co" => NullCo(Null);
        /// As [`NullCo`](Self::NullCo).
        "null-aio" => NullAio(Null);
        /// A disk that an NBD server has.
        "nbd" => Nbd(Nbd);
        /// An image in a Ceph cluster.
        "rbd" => Rbd(Rbd);
        /// The raw format: the disk below, as it is.
        "raw" => Raw(Raw);
        /// The disk below, with the limits of a group.
        "throttle" => Throttle(Throttle);
        /// The disk below, with errors that are injected on purpose.
        "blkdebug" => Blkdebug(Blkdebug);
    }
    foreign FOREIGN_DRIVERS, because "Egret serves raw disks"
}

options! {
    /// An image on the host.
    pub struct Image {
        /// Path of the file or device; or `/dev/fdset/N`: a descriptor of the set N, which `add-fd` or `--add-fd` handed
        /// over.
        filename: String, ValueType::Text(1, LONGEST_PATH);
        /// Engine that carries requests to the kernel.
        #[serde(with = "as_word")]
        aio: Aio, ValueType::Word(words::<Aio>), default Aio::Threads;
        /// Most requests of this disk handed to the kernel in one system call (`aio=native`); the smaller of this and the
        /// I/O thread's counts, and 0 does not.
        aio_max_batch: u64, ValueType::Number(0, LARGEST_DISK, "requests"), default 0;
        /// Lock the image against other processes, QEMU included; `auto` does where the file system can.
        #[serde(with = "as_word")]
        locking: Locking, ValueType::Word(words::<Locking>), default Locking::Auto;
        /// With `cache.direct=off` and an export with `allow-inactive=on`: drop what the page cache has of the image when
        /// the export's rings start, because another host may have written to it.
        drop_cache: bool, ValueType::Flag, default "on";
    }
}

options! {
    /// A disk that keeps nothing.
    pub struct Null {
        /// Size of the disk.
        size: u64, ValueType::Bytes(0, LARGEST_DISK), default "1G";
        /// How long each request takes.
        latency_ns: u64, ValueType::Number(0, LARGEST_DISK, "ns"), default 0;
        /// Fill what is read with zeroes; off leaves the guest's buffer as it was.
        read_zeroes: bool, ValueType::Flag, default "off";
    }
}

options! {
    /// The raw format over another disk.
    pub struct Raw {
        /// The disk below: a node-name, or a blockdev of its own (`file.driver=...,file.filename=...`).
        file: Child, ValueType::Child(LONGEST_NODE_NAME, || &SHAPE);
    }
}

options! {
    /// Limits that disks share, over another disk.
    pub struct Throttle {
        /// The `throttle-group` that limits it: all blockdevs of a group share its limits.
        throttle_group: String, ValueType::Name(usize::MAX);
        /// The disk below: a node-name, or a blockdev of its own (`file.driver=...,file.filename=...`).
        file: Child, ValueType::Child(LONGEST_NODE_NAME, || &SHAPE);
    }
}

options! {
    /// Errors that are injected on purpose, over another disk.
    pub struct Blkdebug {
        /// The disk below: a node-name, or a blockdev of its own (`image.driver=...,image.filename=...`).
        image: Child, ValueType::Child(LONGEST_NODE_NAME, || &SHAPE);
        /// Errors to inject (`inject-error.0.event=none,inject-error.0.iotype=write,inject-error.0.errno=28`).
        inject_error: Vec<InjectError>, ValueType::List(&INJECT_ERROR), unset "none";
        /// Changes of the state (`set-state.0.event=flush_to_disk,set-state.0.new_state=2`), which is 1 at first.
        set_state: Vec<SetState>, ValueType::List(&SET_STATE), unset "none";
    }
}

options! {
    /// An error to be injected.
    #[derive(Copy)]
    pub struct InjectError {
        /// What makes it active, from then on; `none` is so from the beginning.
        #[serde(with = "as_word")]
        event: DebugEvent, ValueType::Word(words::<DebugEvent>);
        /// The state in which the event does that; 0 is any.
        state: Option<u32>, ValueType::Number(0, u32::MAX as u64, ""), unset "any";
        /// Which requests it is for.
        #[serde(with = "as_word::optional")]
        iotype: Option<IoType>, ValueType::Word(words::<IoType>), unset "all";
        /// The error, by its number: 5 is EIO, and 28 ENOSPC.
        errno: u16, ValueType::Number(1, 4095, ""), default 5;
        /// The sector of 512 bytes that a request must touch.
        sector: Option<u64>, ValueType::Number(0, LARGEST_DISK / 512, ""), unset "any";
        /// Inject it once, and never again.
        once: bool, ValueType::Flag, default "off";
    }
}

/// A change of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetState {
    /// What brings it about.
    #[serde(with = "as_word")]
    pub event: DebugEvent,
    /// The state in which it does; 0 is any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<u32>,
    /// The state from then on.
    pub new_state: u32,
}

static INJECT_ERROR: Shape = Shape {
    keys: InjectError::KEYS,
    variants: None,
    foreign: &[Foreign {
        name: "immediately",
        harmless: Harmless::Off,
        because: "an injected error never comes within the submission",
    }],
};
static SET_STATE: Shape = Shape::of(SetState::KEYS);

impl SetState {
    /// Its keys. `options!` would spell the last with `-`, and QEMU does not.
    pub const KEYS: &'static [Key] = &[
        Key::needed("event", ValueType::Word(words::<DebugEvent>), "What brings it about."),
        Key::optional("state", Self::STATE, &"any", "The state in which it does; 0 is any."),
        Key::needed("new_state", Self::STATE, "The state from then on."),
    ];
    const STATE: ValueType = ValueType::Number(0, u32::MAX as u64, "");
}

impl Driver {
    /// The blockdev below, and the key that says which it is; `None` for a disk of its own.
    pub const fn child(&self) -> Option<(&'static str, &Child)> {
        match self {
            Self::Raw(Raw { file }) | Self::Throttle(Throttle { file, .. }) => Some(("file", file)),
            Self::Blkdebug(Blkdebug { image, .. }) => Some(("image", image)),
            Self::File(_) | Self::HostDevice(_) | Self::NullCo(_) | Self::NullAio(_) | Self::Nbd(_) | Self::Rbd(_) => {
                None
            }
        }
    }

    /// As [`child`](Self::child), to be changed.
    pub const fn child_mut(&mut self) -> Option<(&'static str, &mut Child)> {
        match self {
            Self::Raw(Raw { file }) | Self::Throttle(Throttle { file, .. }) => Some(("file", file)),
            Self::Blkdebug(Blkdebug { image, .. }) => Some(("image", image)),
            Self::File(_) | Self::HostDevice(_) | Self::NullCo(_) | Self::NullAio(_) | Self::Nbd(_) | Self::Rbd(_) => {
                None
            }
        }
    }
}

/// A disk below another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Child {
    /// A blockdev made elsewhere, by its node-name.
    Node(String),
    /// A blockdev of its own.
    Inline(Box<Blockdev>),
}

static SHAPE: Shape = Shape {
    keys: Blockdev::KEYS,
    variants: Some(Driver::VARIANTS),
    foreign: &[
        Foreign {
            name: "force-share",
            harmless: Harmless::Off,
            because: "it reads an image that another process writes; use locking=off if that is what you want",
        },
        Foreign {
            name: "active",
            harmless: Harmless::Any,
            because: "a blockdev is inactive until an export needs it, and with `allow-inactive` until its rings start",
        },
        Foreign {
            name: "x-check-cache-dropped",
            harmless: Harmless::Off,
            because: "nobody looks whether the page cache is empty",
        },
        Foreign {
            name: "pr-manager",
            harmless: Harmless::No,
            because: "persistent reservations are not passed on; a logical unit keeps its own, in its pr-file",
        },
        Foreign { name: "offset", harmless: Harmless::Zero, because: NO_PARTS },
        Foreign { name: "size", harmless: Harmless::No, because: NO_PARTS },
        nbd_client::BITMAP,
        Foreign { name: "config", harmless: Harmless::No, because: "rules of blkdebug are written in its own keys" },
        Foreign { name: "align", harmless: Harmless::Zero, because: NO_OTHER_LIMITS },
        Foreign { name: "max-transfer", harmless: Harmless::Zero, because: NO_OTHER_LIMITS },
        Foreign { name: "opt-write-zero", harmless: Harmless::Zero, because: NO_OTHER_LIMITS },
        Foreign { name: "max-write-zero", harmless: Harmless::Zero, because: NO_OTHER_LIMITS },
        Foreign { name: "opt-discard", harmless: Harmless::Zero, because: NO_OTHER_LIMITS },
        Foreign { name: "max-discard", harmless: Harmless::Zero, because: NO_OTHER_LIMITS },
        Foreign { name: "take-child-perms", harmless: Harmless::No, because: NO_PERMISSIONS },
        Foreign { name: "unshare-child-perms", harmless: Harmless::No, because: NO_PERMISSIONS },
    ],
};

/// Of raw.
const NO_PARTS: &str = "a disk is a whole file or device";
/// Of blkdebug.
const NO_OTHER_LIMITS: &str = "what is in blkdebug has the limits that it has without";
/// Likewise.
const NO_PERMISSIONS: &str = "an image has locks, of exports that use it (locking), and no permissions of nodes";

static CACHE: Shape = Shape::of(Cache::KEYS);

/// QEMU's other drivers.
const FOREIGN_DRIVERS: &[&str] = &[
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "bochs",
    "cloop",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "ftp",
    "ftps",
    "gluster",
    "host_cdrom",
    "http",
    "https",
    "io_uring",
    "iscsi",
    "luks",
    "nfs",
    "nvme",
    "nvme-io_uring",
    "parallels",
    "preallocate",
    "qcow",
    "qcow2",
    "qed",
    "quorum",
    "replication",
    "snapshot-access",
    "ssh",
    "vdi",
    "vhdx",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
    "vmdk",
    "vpc",
    "vvfat",
];

/// The number of a set of descriptors.
pub type FdSetNumber = u64;

/// The set of descriptors that `filename` names, if it does: `/dev/fdset/N`.
pub fn fd_set_number(filename: &str) -> Option<FdSetNumber> {
    let digits = filename.strip_prefix(FD_SET)?;
    let number = digits.parse().ok().filter(|number| *number <= LARGEST_FD_SET)?;
    digits.bytes().all(|digit| digit.is_ascii_digit()).then_some(number)
}

impl Blockdev {
    /// The set of descriptors that its own image is opened through, if it is.
    pub fn fd_set(&self) -> Option<FdSetNumber> {
        match &self.driver {
            Driver::File(image) | Driver::HostDevice(image) => fd_set_number(&image.filename),
            _ => None,
        }
    }

    /// The name of the blockdev made elsewhere that this one lies over, or what is written inside it does.
    pub fn child_name(&self) -> Option<&str> {
        match self.driver.child()? {
            (_, Child::Node(name)) => Some(name),
            (_, Child::Inline(child)) => child.child_name(),
        }
    }
}

object!(Blockdev, "blockdev", "node-name", &SHAPE);

impl Blockdev {
    /// A blockdev with every key that its driver does not need left at its default.
    pub fn new(node_name: impl Into<String>, driver: Driver) -> Self {
        Self {
            node_name: Some(node_name.into()),
            driver,
            cache: Cache::default(),
            read_only: None,
            auto_read_only: None,
            discard: None,
            detect_zeroes: None,
        }
    }

    /// The blockdev below that is written inside this one.
    pub fn inline_child(&self) -> Option<&Self> {
        match self.driver.child()? {
            (_, Child::Inline(child)) => Some(child),
            (_, Child::Node(_)) => None,
        }
    }

    /// It, and all that is written inside it, from the top.
    pub fn layers(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |blockdev| blockdev.inline_child())
    }

    fn own_name(&self) -> &str {
        self.node_name.as_deref().unwrap_or_default()
    }

    fn check(&self) -> Result<(), Problem> {
        if let Driver::File(Image { filename, .. }) | Driver::HostDevice(Image { filename, .. }) = &self.driver
            && filename.starts_with(FD_SET)
            && fd_set_number(filename).is_none()
        {
            let allowed = format!("{FD_SET} with a number in 0..={LARGEST_FD_SET}");
            return Err(Problem::must("filename", allowed, format!("'{filename}'")));
        }
        if let Driver::Nbd(nbd) = &self.driver {
            nbd.place()?;
        }
        if let Driver::File(image) | Driver::HostDevice(image) = &self.driver
            && image.aio_max_batch > 0
            && image.aio != Aio::Native
        {
            let line = format!("aio-max-batch has no effect on aio={}; it belongs to native", image.aio);
            return Err(Problem::Together(line));
        }
        if let Driver::Rbd(rbd) = &self.driver {
            rbd.check()?;
        }
        // What its values must agree on depends on what it inherits: `Config` knows.
        Ok(())
    }
}

impl Image {
    /// The image at `filename`, with every other key at its default.
    pub fn new(filename: impl Into<String>) -> Self {
        with_defaults(json!({ "filename": filename.into() }), &Shape::of(Self::KEYS))
    }
}
