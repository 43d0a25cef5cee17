//! A vhost-user-blk client: a virtual machine's part, without the virtual machine.
//!
//! ```text
//!   Client::connect ── features, configuration ──► Client ── start(Shape) ──► Disk { queues }
//! ```
//!
//! A [`Client`] has talked to its server and knows the disk; [`start`](Client::start) shares memory with it, sets the
//! rings up and gives the queues away, each of which another thread may use. The session lasts as long as any of its
//! queues.
//!
//! A server that does not answer, hangs up, talks nonsense or uses the rings wrongly is an error within the client's
//! patience, never a hang.

mod error;
mod info;
mod queue;
mod start;
mod wire;

use std::path::Path;
use std::time::Duration;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

pub use error::ClientError;
pub use info::Info;
pub use queue::{Completed, Op, Queue};
pub use start::{Disk, Shape};

use self::wire::Wire;

const fn bit(feature: u32) -> u64 {
    1 << feature
}

const EVENT_IDX: u64 = bit(VIRTIO_RING_F_EVENT_IDX);
const INDIRECT: u64 = bit(VIRTIO_RING_F_INDIRECT_DESC);

/// What the client understands.
const KNOWN: u64 = bit(VIRTIO_F_VERSION_1)
    | EVENT_IDX
    | INDIRECT
    | bit(VIRTIO_BLK_F_SEG_MAX)
    | bit(VIRTIO_BLK_F_RO)
    | bit(VIRTIO_BLK_F_BLK_SIZE)
    | bit(VIRTIO_BLK_F_FLUSH)
    | bit(VIRTIO_BLK_F_TOPOLOGY)
    | bit(VIRTIO_BLK_F_CONFIG_WCE)
    | bit(VIRTIO_BLK_F_MQ);

/// How long a server may take to answer.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How to connect.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// How long any answer may take.
    pub patience: Duration,
    /// Whether to take `VIRTIO_F_EVENT_IDX` where it is offered.
    pub event_idx: bool,
}

impl Default for Manner {
    fn default() -> Self {
        Self { patience: PATIENCE, event_idx: true }
    }
}

/// A connection to a vhost-user-blk server whose queues are not started yet.
pub struct Client {
    wire: Wire,
    features: u64,
    protocol: u64,
    info: Info,
}

impl Client {
    /// Connects, agrees on features and reads the disk's configuration.
    ///
    /// # Errors
    /// Nobody listens, or who listens does not speak vhost-user-blk as this client needs it.
    pub fn connect(path: &Path, manner: Manner) -> Result<Self, ClientError> {
        let mut wire = Wire::connect(path, manner.patience)?;
        wire.tell(wire::SET_OWNER, &[], &[])?;
        let offered = wire.ask(wire::GET_FEATURES)?;
        for (feature, name) in [
            (bit(VIRTIO_F_VERSION_1), "VIRTIO_F_VERSION_1"),
            (wire::F_PROTOCOL_FEATURES, "VHOST_USER_F_PROTOCOL_FEATURES"),
        ] {
            if offered & feature == 0 {
                return Err(ClientError::Lacks(name));
            }
        }
        let mut features = offered & KNOWN;
        if !manner.event_idx {
            features &= !EVENT_IDX;
        }
        let protocol = wire.ask(wire::GET_PROTOCOL_FEATURES)?
            & (wire::P_MQ | wire::P_REPLY_ACK | wire::P_CONFIG | wire::P_MEM_SLOTS);
        if protocol & wire::P_CONFIG == 0 {
            return Err(ClientError::Lacks("VHOST_USER_PROTOCOL_F_CONFIG"));
        }
        wire.tell(wire::SET_PROTOCOL_FEATURES, &wire::u64s(&[protocol]), &[])?;
        wire.acknowledged = protocol & wire::P_REPLY_ACK != 0;
        wire.tell(wire::SET_FEATURES, &wire::u64s(&[features | wire::F_PROTOCOL_FEATURES]), &[])?;
        let mut space = [0; Info::SPACE];
        wire.config(&mut space)?;
        let mut info = Info::new(&space, features);
        if protocol & wire::P_MQ != 0 {
            let most = wire.ask(wire::GET_QUEUE_NUM)?;
            info.queues = info.queues.min(u16::try_from(most).unwrap_or(u16::MAX));
        }
        if info.queues == 0 {
            return Err(ClientError::Lacks("a queue"));
        }
        Ok(Self { wire, features, protocol, info })
    }

    /// What the disk says of itself.
    pub fn info(&self) -> &Info {
        &self.info
    }
}
