//! Events: what happens without having been asked for.

use std::time::{SystemTime, UNIX_EPOCH};

use egret_virtio::scsi::LunAddress;
use serde_json::{Value, json};

/// Something that every monitor is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An export has gone: its name, its address and its disk are free.
    BlockExportDeleted {
        /// The export.
        id: String,
    },
    /// A logical unit has gone: its disk is free.
    LunDeleted {
        /// Its export.
        id: String,
        /// Where it was.
        at: LunAddress,
        /// Its disk.
        node_name: String,
    },
    /// The daemon ends.
    Shutdown {
        /// `host-qmp-quit` or `host-signal`.
        reason: &'static str,
    },
}

/// What an event is called, what it carries, and what it means.
pub(super) const EVENTS: &[(&str, &str, &str)] = &[
    ("BLOCK_EXPORT_DELETED", r#"{"id"}"#, "An export has gone: its name, its address and its disk are free."),
    (
        "EGRET_LUN_DELETED",
        r#"{"id", "target", "lun", "node-name"}"#,
        "A logical unit has gone from the export `id`: its requests have ended and its disk is free.",
    ),
    (
        "SHUTDOWN",
        r#"{"guest": false, "reason"}"#,
        "The daemon ends, because of `quit` (`host-qmp-quit`) or a signal (`host-signal`).",
    ),
];

impl Event {
    /// As the protocol has it, with the time that it is now.
    pub fn to_json(&self) -> Value {
        let (name, data) = match self {
            Self::BlockExportDeleted { id } => ("BLOCK_EXPORT_DELETED", json!({ "id": id })),
            Self::LunDeleted { id, at, node_name } => {
                ("EGRET_LUN_DELETED", json!({ "id": id, "target": at.target, "lun": at.lun, "node-name": node_name }))
            }
            Self::Shutdown { reason } => ("SHUTDOWN", json!({ "guest": false, "reason": reason })),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        json!({
            "event": name,
            "data": data,
            "timestamp": { "seconds": now.as_secs(), "microseconds": now.subsec_micros() },
        })
    }
}
