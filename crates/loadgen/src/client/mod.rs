//! A vhost-user-blk or vhost-user-scsi client: a virtual machine's part, without the virtual machine.
//!
//! ```text
//!   Client::connect ── features, configuration ──► Client ── start(Shape) ──► Connection { queues }
//! ```
//!
//! A [`Client`] has talked to its server and knows the disk; [`start`](Client::start) shares memory with it, sets the
//! rings up and gives the queues away, each of which another thread may use. The session lasts as long as any of its
//! queues.
//!
//! A server that does not answer, closes the connection, breaks the protocol or misuses the rings is an error within the
//! client's patience, and never makes it hang.

mod error;
mod framing;
mod info;
mod queue;
mod start;
mod wire;

use std::path::Path;
use std::time::Duration;

use egret_vring::vhost_user::{F_PROTOCOL_FEATURES, protocol_feature, request};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
};
use virtio_bindings::bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub use error::ClientError;
pub use info::Info;
pub use queue::{Completed, Op, Queue};
pub use start::{Connection, Shape};

use self::framing::Framing;
use self::info::SECTOR;
use self::wire::Wire;

const fn bit(feature: u32) -> u64 {
    1 << feature
}

const EVENT_IDX: u64 = bit(VIRTIO_RING_F_EVENT_IDX);
const RING_PACKED: u64 = bit(VIRTIO_F_RING_PACKED);
const INDIRECT: u64 = bit(VIRTIO_RING_F_INDIRECT_DESC);

/// What the client understands of any device.
const KNOWN: u64 = bit(VIRTIO_F_VERSION_1) | EVENT_IDX | RING_PACKED | INDIRECT;

/// What it understands of virtio-blk.
const KNOWN_BLK: u64 = bit(VIRTIO_BLK_F_SEG_MAX)
    | bit(VIRTIO_BLK_F_RO)
    | bit(VIRTIO_BLK_F_BLK_SIZE)
    | bit(VIRTIO_BLK_F_FLUSH)
    | bit(VIRTIO_BLK_F_TOPOLOGY)
    | bit(VIRTIO_BLK_F_CONFIG_WCE)
    | bit(VIRTIO_BLK_F_MQ);

/// How long a server may take to answer.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How a client connects.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// How long any answer may take.
    pub patience: Duration,
    /// Whether to take `VIRTIO_F_EVENT_IDX` where it is offered.
    pub event_idx: bool,
    /// Whether to take `VIRTIO_F_RING_PACKED` where it is offered.
    pub packed: bool,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self { patience: PATIENCE, event_idx: true, packed: false }
    }
}

/// A connection to a server whose queues are not started yet.
pub struct Client {
    wire: Wire,
    features: u64,
    protocol: u64,
    info: Info,
    framing: Framing,
}

impl Client {
    /// Connects, agrees on features and reads the disk's configuration.
    ///
    /// # Errors
    /// Nothing listens on the socket, or the server lacks a feature that this client needs.
    pub fn connect(path: &Path, options: ClientOptions) -> Result<Self, ClientError> {
        let mut new = Self::agree(path, options, KNOWN | KNOWN_BLK, Framing::Blk)?;
        if new.protocol & protocol_feature::CONFIG == 0 {
            return Err(ClientError::Lacks("VHOST_USER_PROTOCOL_F_CONFIG"));
        }
        let mut space = [0; Info::SPACE];
        new.wire.config(&mut space)?;
        new.info = Info::new(&space, new.features);
        new.limit_queues()?;
        Ok(new)
    }

    /// Connects to a vhost-user-scsi server and starts queues of that shape, for LUN 0 of target 0. The disk's
    /// properties can be read through a running queue only.
    ///
    /// # Errors
    /// As [`connect`](Self::connect) and [`start`](Self::start), or the unit does not answer.
    pub fn start_scsi(path: &Path, options: ClientOptions, shape: Shape) -> Result<Connection, ClientError> {
        let mut new = Self::agree(path, options, KNOWN, Framing::Scsi { block: SECTOR as u32 })?;
        new.info.queues = u16::MAX;
        new.limit_queues()?;
        let mut disk = new.start(shape)?;
        disk.ask_what_it_is(options.patience)?;
        Ok(disk)
    }

    fn agree(path: &Path, options: ClientOptions, known: u64, framing: Framing) -> Result<Self, ClientError> {
        let mut wire = Wire::connect(path, options.patience)?;
        wire.request(request::SET_OWNER, &[], &[])?;
        let offered = wire.ask(request::GET_FEATURES)?;
        for (feature, name) in
            [(bit(VIRTIO_F_VERSION_1), "VIRTIO_F_VERSION_1"), (F_PROTOCOL_FEATURES, "VHOST_USER_F_PROTOCOL_FEATURES")]
        {
            if offered & feature == 0 {
                return Err(ClientError::Lacks(name));
            }
        }
        let mut features = offered & known;
        if !options.event_idx {
            features &= !EVENT_IDX;
        }
        if !options.packed {
            features &= !RING_PACKED;
        }
        let protocol = wire.ask(request::GET_PROTOCOL_FEATURES)?
            & (protocol_feature::MQ
                | protocol_feature::REPLY_ACK
                | protocol_feature::CONFIG
                | protocol_feature::CONFIGURE_MEM_SLOTS);
        wire.request(request::SET_PROTOCOL_FEATURES, &wire::u64s(&[protocol]), &[])?;
        wire.acknowledged = protocol & protocol_feature::REPLY_ACK != 0;
        wire.request(request::SET_FEATURES, &wire::u64s(&[features | F_PROTOCOL_FEATURES]), &[])?;
        Ok(Self { wire, features, protocol, info: Info::UNKNOWN, framing })
    }

    /// As many queues as the server has.
    fn limit_queues(&mut self) -> Result<(), ClientError> {
        if self.protocol & protocol_feature::MQ != 0 {
            let most = u16::try_from(self.wire.ask(request::GET_QUEUE_NUM)?).unwrap_or(u16::MAX);
            self.info.queues = self.info.queues.min(most.saturating_sub(self.framing.first_queue()));
        }
        if self.info.queues == 0 { Err(ClientError::Lacks("a queue")) } else { Ok(()) }
    }

    /// The disk's properties.
    pub fn info(&self) -> &Info {
        &self.info
    }
}
