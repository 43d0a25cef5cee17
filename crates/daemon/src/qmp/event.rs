//! Events: what happens without having been asked for.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use egret_disk::{Action, Op};
use egret_export::is_nospace;
use egret_virtio::scsi::LunAddress;
use serde_json::{Value, json};

use crate::watchdog::Stall;
use crate::{BrokenQueue, DiskFailure, RequestTimeout};

/// Something that every monitor is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An export has gone: its name, its address and its disk are free.
    BlockExportDeleted {
        /// The export.
        id: String,
    },
    /// A request failed in a disk's engine.
    BlockIoError(DiskFailure),
    /// A guest has broken a queue.
    QueueBroken(BrokenQueue),
    /// Requests take longer than they should.
    RequestTimeout(RequestTimeout),
    /// A logical unit has gone: its disk is free.
    LunDeleted {
        /// Its export.
        id: String,
        /// Where it was.
        at: LunAddress,
        /// Its disk.
        node_name: String,
    },
    /// An I/O thread is stuck, or goes on.
    Stall(Stall),
    /// The daemon ends.
    Shutdown {
        /// `host-qmp-quit` or `host-signal`.
        reason: &'static str,
    },
}

/// Names of what is carried, and their types in introspection.
type Members = &'static [(&'static str, &'static str)];

/// What an event is called, what it carries, of which types that is, and what it means.
pub(super) const EVENTS: &[(&str, &str, Members, &str)] = &[
    (
        "BLOCK_EXPORT_DELETED",
        r#"{"id"}"#,
        &[("id", "str")],
        "An export has gone: its name, its address and its disk are free.",
    ),
    (
        "BLOCK_IO_ERROR",
        r#"{"device", "node-name", "qom-path": "", "operation": "read"|"write", "action": "report"|"ignore"|"stop", "nospace", "reason"}"#,
        &[
            ("device", "str"),
            ("node-name", "str"),
            ("qom-path", "str"),
            ("operation", "str"),
            ("action", "str"),
            ("nospace", "bool"),
            ("reason", "str"),
        ],
        "A disk could not do what a guest asked for. `action` is what `rerror` and `werror` have the export `device` do \
         about it; with `stop` it waits from here on, and that is told each time, but of one that stops again and \
         again once a second, after the eighth. Of others the first, and then the newest once a second. `write` is all \
         that does not read.",
    ),
    (
        "EGRET_IOTHREAD_RESUMED",
        r#"{"id", "thread-id", "phase", "seconds"}"#,
        &[("id", "str"), ("thread-id", "int"), ("phase", "str"), ("seconds", "number")],
        "An I/O thread that was stuck goes on. `phase` is where it was, and `seconds` how long at least.",
    ),
    (
        "EGRET_IOTHREAD_STALLED",
        r#"{"id", "thread-id", "phase": "wait"|"reap"|"dispatch"|"submit"|"notify", "seconds"}"#,
        &[("id", "str"), ("thread-id", "int"), ("phase", "str"), ("seconds", "number")],
        "An I/O thread has not got on for `seconds`, as long as `--watchdog` allows, and does not wait for events: nobody \
         is served by it. The log says where it is.",
    ),
    (
        "EGRET_LUN_DELETED",
        r#"{"id", "target", "lun", "node-name"}"#,
        &[("id", "str"), ("target", "int"), ("lun", "int"), ("node-name", "str")],
        "A logical unit has gone from the export `id`: its requests have ended and its disk is free.",
    ),
    (
        "EGRET_QUEUE_BROKEN",
        r#"{"id", "queue", "reason"}"#,
        &[("id", "str"), ("queue", "int"), ("reason", "str")],
        "The guest, or its front-end, has broken the rules of a queue of the export `id`: nothing on it is served until the \
         driver sets it up anew. Of each queue the first time is told, and then the newest once a second.",
    ),
    (
        "EGRET_REQUEST_TIMEOUT",
        r#"{"id", "requests", "seconds"}"#,
        &[("id", "str"), ("requests", "int"), ("seconds", "number")],
        "Requests of the export `id` have been in flight for longer than its `request-timeout`, the oldest for `seconds`. \
         They go on, and nothing more is told before all of them have ended.",
    ),
    (
        "SHUTDOWN",
        r#"{"guest": false, "reason"}"#,
        &[("guest", "bool"), ("reason", "str")],
        "The daemon ends, because of `quit` (`host-qmp-quit`) or a signal (`host-signal`).",
    ),
];

impl Event {
    /// As the protocol has it, with the time that it is now.
    pub fn to_json(&self) -> Value {
        let (name, data) = match self {
            Self::BlockExportDeleted { id } => ("BLOCK_EXPORT_DELETED", json!({ "id": id })),
            Self::BlockIoError(told @ DiskFailure { node_name, failure, .. }) => (
                "BLOCK_IO_ERROR",
                json!({
                    "device": &*failure.export,
                    "node-name": node_name,
                    "qom-path": "",
                    "operation": if failure.op == Op::Read { "read" } else { "write" },
                    "action": match failure.action {
                        Action::Report => "report",
                        Action::Ignore => "ignore",
                        Action::Stop => "stop",
                    },
                    "nospace": is_nospace(failure.errno),
                    "reason": reason(failure.errno) + told.consequence(),
                }),
            ),
            Self::LunDeleted { id, at, node_name } => {
                ("EGRET_LUN_DELETED", json!({ "id": id, "target": at.target, "lun": at.lun, "node-name": node_name }))
            }
            Self::QueueBroken(BrokenQueue { export, queue, reason }) => {
                ("EGRET_QUEUE_BROKEN", json!({ "id": export, "queue": queue, "reason": reason }))
            }
            Self::RequestTimeout(RequestTimeout { export, requests, oldest }) => {
                let seconds = Duration::from(*oldest).as_secs_f64();
                ("EGRET_REQUEST_TIMEOUT", json!({ "id": export, "requests": requests, "seconds": seconds }))
            }
            Self::Stall(Stall { id, thread_id, phase, stood, over }) => (
                if *over { "EGRET_IOTHREAD_RESUMED" } else { "EGRET_IOTHREAD_STALLED" },
                json!({ "id": id, "thread-id": thread_id, "phase": phase.word(), "seconds": stood.as_secs_f64() }),
            ),
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

/// What the system says, without its number.
fn reason(errno: rustix::io::Errno) -> String {
    let said = std::io::Error::from(errno).to_string();
    said.split(" (os error").next().unwrap_or(&said).to_owned()
}
