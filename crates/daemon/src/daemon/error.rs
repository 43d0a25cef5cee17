//! Why an object could not be added, changed or removed.

use std::io;

use egret_export::ConfigError;
use egret_virtio::scsi::LunAddress;
use egret_vocabulary::schema::{Descriptor, ObjectError};

use super::FdSetError;
use super::calls::Unanswered;
use super::reservations::PrFileError;
use crate::process::InheritError;

/// Why a daemon could not be started, or an object could not be brought to life: one line that names the object.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] egret_disk::OpenError),
    /// A disk that is to be served is not open.
    #[error("blockdev '{0}' is not open")]
    NotOpen(String),
    /// A disk is not waited for.
    #[error("blockdev '{0}': {1}")]
    Unanswered(String, #[source] Unanswered),
    /// A disk is to be opened otherwise, and what was written to it would be lost by that.
    #[error(
        "blockdev '{0}' stays locked as it was open, for its last flush failed; give it back first (blockdev-set-active with \
         active=false), or close it (blockdev-del)"
    )]
    Unwritten(String),
    /// A disk cannot be opened through a set of descriptors.
    #[error("blockdev '{0}': {1}")]
    FdSet(String, #[source] FdSetError),
    /// A descriptor for a set is not there.
    #[error("--add-fd fd={0}: {1}")]
    AddFd(Descriptor, InheritError),
    /// An I/O thread cannot be started.
    #[error("iothread '{0}': {1}")]
    IoThread(String, String),
    /// An export's I/O threads cannot run what its disks are asked for.
    #[error("export '{0}': {1}")]
    Engine(String, String),
    /// An export's blocks do not fit the disk.
    #[error("export '{export}': logical-block-size={block} does not divide {disk}, which has {size} bytes")]
    OddSize {
        /// The export.
        export: String,
        /// Its logical block, in bytes.
        block: u32,
        /// The disk.
        disk: String,
        /// Its size in bytes.
        size: u64,
    },
    /// An export's blocks are less than the disk takes.
    #[error(
        "export '{export}': logical-block-size must be at least {least}, the smallest block of {disk}, got {block}"
    )]
    SmallBlocks {
        /// The export.
        export: String,
        /// Its logical block, in bytes.
        block: u32,
        /// The disk.
        disk: String,
        /// Its own, in bytes.
        least: u32,
    },
    /// An export that writes, of a disk that others read and that is open for reading.
    #[error(
        "export '{export}': blockdev '{node}' is open for reading, because export '{reader}' came first; \
         delete that one, make the export that writes before it, or give the blockdev auto-read-only=off"
    )]
    OpenForReading {
        /// The export that writes.
        export: String,
        /// The disk.
        node: String,
        /// An export that reads.
        reader: String,
    },
    /// An export's descriptor is not there.
    #[error("export '{0}': addr.str {1}: {2}")]
    Inherit(String, Descriptor, InheritError),
    /// There is no such user or group as may connect to an export.
    #[error("export '{0}': {1}")]
    Access(String, #[source] std::io::Error),
    /// One of an export's logical units cannot be made.
    #[error("export '{0}': {1}: {2}")]
    Unit(String, LunAddress, #[source] Box<UnitError>),
    /// A blockdev whose reservations are kept would be another unit for the guests of another export.
    #[error(
        "export '{0}': {1}: guests of another export see blockdev '{2}' otherwise, and reservations that are kept would \
         not hold for both; let writable, writethrough, logical-block-size, serial, wwn, removable and pr-file be the same"
    )]
    TwoUnits(String, LunAddress, String),
    /// Credentials cannot be had.
    #[error("tls-creds-x509 '{0}': {1}")]
    TlsCreds(String, #[source] egret_nbd::tls::CredentialsError),
    /// What is in files of an object is not waited for.
    #[error("{0} '{1}': {2}")]
    ObjectUnanswered(&'static str, String, #[source] Unanswered),
    /// There is no such user or group as may connect to the NBD server.
    #[error("NBD server: {0}")]
    NbdAccess(#[source] std::io::Error),
    /// Its port is none.
    #[error("NBD server: {0}")]
    NbdPort(String),
    /// It cannot be had.
    #[error(transparent)]
    NbdServer(#[from] egret_export::NbdServerError),
    /// An export over NBD, and no server.
    #[error("export '{0}': type=nbd needs the NBD server: give --nbd-server, or nbd-server-start before it")]
    NoNbdServer(String),
    /// An export cannot be made.
    #[error(transparent)]
    Export(#[from] egret_export::ExportError),
}

/// Why there is no such logical unit.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// What guests would see of it.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its reservations.
    #[error(transparent)]
    PrFile(#[from] PrFileError),
    /// Their file is not waited for.
    #[error("its pr-file: {0}")]
    Unanswered(#[from] Unanswered),
}

/// Why a running daemon's objects stay as they are; where QEMU has words for it, in QEMU's words.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// An object's name is taken.
    #[error("attempt to add duplicate property '{0}' to object (type 'container')")]
    DuplicateObject(String),
    /// There is no such object.
    #[error("object '{0}' not found")]
    NoObject(String),
    /// An export runs on it, somebody encrypts by it, or a blockdev names it.
    #[error("object '{0}' is in use, can not be deleted")]
    ObjectInUse(String),
    /// A throttle group has the name of one that a command has made.
    #[error("A group with this name already exists")]
    DuplicateThrottleGroup,
    /// A blockdev's name is taken.
    #[error("Duplicate nodes with node-name='{0}'")]
    DuplicateNode(String),
    /// A blockdev has no name.
    #[error("'node-name' must be specified for the root node")]
    NamelessNode,
    /// There is no such blockdev, to be removed.
    #[error("Failed to find node with node-name='{0}'")]
    NoNode(String),
    /// There is no such blockdev, to be used.
    #[error("Cannot find device='{0}' nor node-name='{1}'")]
    NoDevice(String, String),
    /// It is exported.
    #[error("Node {0} is in use")]
    NodeInUse(String),
    /// Another lies over it.
    #[error("Block device {0} is in use")]
    NodeBelow(String),
    /// It was made with the one that it is written in.
    #[error("Node {0} is not owned by the monitor")]
    NodeInside(String),
    /// An export's name is taken.
    #[error("Block export id '{0}' is already in use")]
    DuplicateExport(String),
    /// There is no such export.
    #[error("Export '{0}' is not found")]
    NoExport(String),
    /// An export ends, and there is no thread to wait for that.
    #[error(
        "export '{0}' takes no client any more, and no thread could be had to wait for the one that it has: {1}; delete it once more"
    )]
    ExportEnds(String, io::Error),
    /// A logical unit cannot be taken away, for there is no thread to wait for its requests.
    #[error(
        "export '{0}': no thread could be had to wait for the requests for {1}, which stays as it is: {2}; try again"
    )]
    LunStays(String, LunAddress, io::Error),
    /// An export has no logical units.
    #[error("export '{0}' has no logical units: it is not of type vhost-user-scsi")]
    NotScsi(String),
    /// An export has a logical unit there.
    #[error("export '{0}': {1} is in use")]
    LunInUse(String, LunAddress),
    /// An export has no logical unit there.
    #[error("export '{0}': there is nothing at {1}")]
    NoLun(String, LunAddress),
    /// The NBD server cannot be had as it was asked for.
    #[error("{0}")]
    NbdServer(egret_vocabulary::schema::Problem),
    /// NBD is served already.
    #[error("NBD server already running")]
    NbdServerRunning,
    /// NBD is not served.
    #[error("NBD server not running")]
    NoNbdServer,
    /// An export is not one over NBD.
    #[error("Export '{0}' is not an NBD export")]
    NotNbd(String),
    /// Another export over NBD has its name.
    #[error("NBD server already has export named '{0}'")]
    NbdName(String),
    /// A client uses it.
    #[error("export '{0}' still in use")]
    ExportInUse(String),
    /// It is on its way out already.
    #[error("Export '{0}' is already shutting down")]
    ExportLeaves(String),
    /// An export is to run on a thread that is not there.
    #[error("iothread \"{0}\" not found")]
    NoIoThread(String),
    /// A property that is fixed while its object lives.
    #[error("iothread '{0}': {1} cannot be changed while the thread runs; make another one")]
    Fixed(String, String),
    /// A descriptor that nobody handed over.
    #[error("export '{0}': addr.type 'fd' needs a socket that was handed over")]
    NoSocket(String),
    /// An export's queues are not to move.
    #[error("export '{0}': fixed-iothread=on keeps it on iothread '{1}'")]
    FixedExport(String, String),
    /// A node to be reopened has no name.
    #[error("node-name not specified")]
    NamelessReopening,
    /// A node would be another one.
    #[error("Cannot change the option '{0}': a node keeps its image; for another image add another blockdev")]
    FixedOption(&'static str),
    /// An export writes to it.
    #[error("Read-only block node '{0}' cannot support read-write users")]
    ReadOnlyInUse(String),
    /// An export that is on its way out uses it, or a unit of one.
    #[error(
        "export '{0}', or a unit that it had, is on its way out and still uses it; wait for BLOCK_EXPORT_DELETED, or \
         EGRET_LUN_DELETED"
    )]
    ShuttingDown(String),
    /// Limits on a blockdev that no requests reach by its own name.
    #[error("blockdev '{0}' lies below another: limit that one")]
    LimitBelow(String),
    /// Limits on a blockdev that has those of its configuration.
    #[error("blockdev '{0}' is limited by throttle-group '{1}' (driver=throttle): change the limits of that one")]
    Throttled(String, String),
    /// A disk cannot have that size.
    #[error("blockdev '{0}': {1}")]
    Resize(String, String),
    /// A disk cannot be had active, or inactive.
    #[error("blockdev '{0}': {1}")]
    SetActive(String, String),
    /// It does not fit the others.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// It cannot be had.
    #[error(transparent)]
    Start(#[from] StartError),
}
