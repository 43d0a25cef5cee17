//! Commands about disks and what is offered of them.

use egret_export::QueueStats;
use egret_virtio::RequestType;
use egret_vocabulary::disk::Bottom;
use egret_vocabulary::options;
use egret_vocabulary::schema::{Addr, Blockdev, Device, Export, FdAddr, Object, Shape, Spelling, ValueType};
use serde_json::{Value, json};

use super::command::{Command, Run, Takes, nothing, typed};
use super::{limits, luns};
use crate::daemon::{DEFAULT_IOTHREAD, Deletion, DiskState, View};

options! {
    struct Node {
        /// Name of the blockdev.
        node_name: String, ValueType::Text(0, usize::MAX);
    }
}

options! {
    struct Delete {
        /// Name of the export.
        id: String, ValueType::Text(0, usize::MAX);
        /// `safe` refuses while a client uses it, `hard` cuts the client off.
        mode: Deletion, ValueType::Word(Deletion::words), default Deletion::Safe;
    }
}

options! {
    struct Resume {
        /// Name of the export.
        id: String, ValueType::Text(0, usize::MAX);
    }
}

options! {
    struct SetActive {
        /// Name of the blockdev; all, if left out.
        node_name: Option<String>, ValueType::Text(0, usize::MAX), unset "none";
        /// Whether it is to be active.
        active: bool, ValueType::Flag;
    }
}

options! {
    struct Resize {
        /// Accepted as another spelling of `node-name`.
        device: Option<String>, ValueType::Text(0, usize::MAX), unset "none";
        /// Name of the blockdev.
        node_name: Option<String>, ValueType::Text(0, usize::MAX), unset "none";
        /// What it is to have; less than it has is refused.
        size: u64, ValueType::Bytes(0, i64::MAX as u64);
    }
}

options! {
    struct Statistics {
        /// One entry for each blockdev, not for each export.
        query_nodes: bool, ValueType::Flag, default "off";
    }
}

options! {
    struct Nodes {
        /// Accepted, and changes nothing: there are no backing files.
        flat: bool, ValueType::Flag, default "off";
    }
}

static NODE: Shape = Shape::of(Node::KEYS);
static DELETE: Shape = Shape::of(Delete::KEYS);
static RESUME: Shape = Shape::of(Resume::KEYS);
static SET_ACTIVE: Shape = Shape::of(SetActive::KEYS);
static RESIZE: Shape = Shape::of(Resize::KEYS);
static STATISTICS: Shape = Shape::of(Statistics::KEYS);
static NODES: Shape = Shape::of(Nodes::KEYS);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "blockdev-add",
        takes: Takes::BLOCKDEV,
        returns: "{}",
        about: "Add a disk, or a layer over one, and open its image.",
        run: Run::Mutate(|context, arguments| {
            context.daemon.add_blockdev(Blockdev::from_value(arguments.into(), Spelling::Typed)?)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "blockdev-del",
        takes: Takes::Keys(&NODE),
        returns: "{}",
        about: "Remove a blockdev that nothing uses, and close its image.",
        run: Run::Mutate(|context, arguments| {
            let Node { node_name } = typed(arguments)?;
            context.daemon.remove_blockdev(&node_name)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "blockdev-set-active",
        takes: Takes::Keys(&SET_ACTIVE),
        returns: "{}",
        about: "With `allow-inactive=on`: have an image locked before rings of its exports run, or no longer. One whose \
                rings run cannot be inactive, nor one that is used yet by an export, or a unit, that was deleted.",
        run: Run::Mutate(|context, arguments| {
            let SetActive { node_name, active } = typed(arguments)?;
            context.daemon.set_active(node_name.as_deref(), active)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "query-named-block-nodes",
        takes: Takes::Keys(&NODES),
        returns: r#"[{"node-name", "drv", "ro", "file", "image": {"virtual-size", ...}, "cache", "bps", ...}]"#,
        about: "Every blockdev: what it is, its size, its limits and its settings in force. One whose image could not be \
                opened when what lay over it was removed, say, is not `active` and has a size of 0, until it is exported or \
                reopened.",
        run: Run::Query(|view, _| {
            Ok(view.config().node_names().into_iter().filter_map(|name| node(view, name)).collect())
        }),
    },
    Command {
        name: "query-blockstats",
        takes: Takes::Keys(&STATISTICS),
        returns: r#"[{"device", "node-name", "stats": {"rd_bytes", "rd_operations", ...}}]"#,
        about: "What the exports there are have counted, by export (`device`), or with `query-nodes` by blockdev. Writes of \
                zeroes count as writes, and so do WRITE AND VERIFY and COMPARE AND WRITE, with what they write alone. The \
                blockdev of a logical unit has what was asked of that unit, but for notifications and latencies, which its \
                export has alone. Members of QEMU's that nothing is counted for are 0: all times, which `x-egret` has, \
                merged and invalid requests, zone appends, and the highest offset.",
        run: Run::Query(|view, arguments| {
            let Statistics { query_nodes } = typed(arguments)?;
            Ok(statistics(view, query_nodes))
        }),
    },
    Command {
        name: "block_resize",
        takes: Takes::Keys(&RESIZE),
        returns: r#"{}, or {"untold": [export, ...]}"#,
        about: "Make an image longer, or look again how long a device is, and tell the clients of its exports; \
                `untold` names exports whose client does not listen for that. A null disk keeps its size. An image grows \
                while an export writes, or with `auto-read-only=off`.",
        run: Run::Mutate(|context, arguments| {
            let Resize { device, node_name, size } = typed(arguments)?;
            let mut names = node_name.into_iter().chain(device);
            let untold = context.daemon.resize(&names.find(|name| !name.is_empty()).unwrap_or_default(), size)?;
            Ok(if untold.is_empty() { nothing() } else { json!({ "untold": untold }) })
        }),
    },
    Command {
        name: "block-export-add",
        takes: Takes::EXPORT,
        returns: "{}",
        about: "Offer a disk; it listens when this returns.",
        run: Run::Mutate(|context, arguments| {
            let export = Export::from_value(arguments.into(), Spelling::Typed)?;
            let Some(Addr::Fd(FdAddr { str: fd })) = export.addr().cloned() else {
                context.daemon.add_export(export)?;
                return Ok(nothing());
            };
            let socket = context.descriptors.named(&fd)?;
            context.daemon.add_export_on(export, Some(socket))?;
            context.descriptors.forget(&fd);
            Ok(nothing())
        }),
    },
    Command {
        name: "block-export-del",
        takes: Takes::Keys(&DELETE),
        returns: "{}",
        about: "Take an offer back. BLOCK_EXPORT_DELETED says when it is gone and its name and disk are free.",
        run: Run::Mutate(|context, arguments| {
            let Delete { id, mode } = typed(arguments)?;
            context.daemon.remove_export(&id, mode)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "block-export-resume",
        takes: Takes::Keys(&RESUME),
        returns: "{}",
        about: "Have an export go on that is stopped because a request failed (`rerror`, `werror`): what waits is tried \
                again, in its order, and may stop it again. Does nothing to an export that is not stopped.",
        run: Run::Query(|view, arguments| {
            let Resume { id } = typed(arguments)?;
            view.resume_export(&id)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "query-block-exports",
        takes: Takes::NOTHING,
        returns: r#"[{"id", "type", "node-name", "shutting-down", "io-status", "iothread-vq-mapping": [{"iothread", "vqs"}], "luns": [{"target", "lun", "node-name", "serial"}]}]"#,
        about: "Every export, those on their way out too, and which I/O thread runs which of its queues. One of type \
                vhost-user-scsi has `luns`, and an empty `node-name`. `io-status` is `ok`; or it is stopped because a \
                request failed: `nospace` if there is no space left, which it looks for once a second, and `failed` \
                otherwise.",
        run: Run::Query(|view, _| Ok(exports(view))),
    },
];

fn exports(view: &View) -> Value {
    let show = |export: &Export| {
        let mut shown = json!({
            "id": export.id,
            "type": export.device.word(),
            "node-name": node_of(export),
            "shutting-down": view.is_shutting_down(&export.id),
            "io-status": view.io_status(&export.id).name(),
            "iothread-vq-mapping": export.mapping(DEFAULT_IOTHREAD),
        });
        if let Device::VhostUserScsi(device) = &export.device {
            shown["luns"] = device.luns.iter().map(luns::shown).collect();
        }
        shown
    };
    view.config().exports.iter().map(show).collect()
}

/// The one disk of an export; empty where there are logical units.
fn node_of(export: &Export) -> &str {
    match &export.device {
        Device::VhostUserBlk(device) => &device.node_name,
        Device::Nbd(device) => &device.node_name,
        Device::VhostUserScsi(_) => "",
    }
}

fn node(view: &View, name: &str) -> Option<Value> {
    let config = view.config();
    let (disk, state) = (config.disk(name)?, view.disk_state(name).unwrap_or(DiskState::CLOSED));
    let file = match disk.bottom {
        Bottom::File(image) | Bottom::HostDevice(image) => image.filename.clone(),
        Bottom::Rbd(image) => format!("rbd:{}", image.spec()),
        Bottom::Null(_) => "null-co://".to_owned(),
        Bottom::Nbd(nbd) => nbd.uri(),
    };
    let driver = config.layers().find(|blockdev| blockdev.name() == name)?.driver.word();
    let mut shown = json!({
        "node-name": name,
        "drv": driver,
        "file": file,
        "ro": state.read_only,
        "active": state.active,
        "encrypted": false,
        "backing_file_depth": 0,
        "detect_zeroes": disk.settings.detect_zeroes.as_str(),
        "cache": { "direct": disk.settings.direct, "no-flush": disk.settings.no_flush, "writeback": true },
        "write_threshold": 0,
        "image": { "filename": file, "format": driver, "virtual-size": state.size, "dirty-flag": false },
    });
    shown.as_object_mut()?.extend(limits::shown(view, name));
    Some(shown)
}

fn statistics(view: &View, by_node: bool) -> Value {
    let config = view.config();
    if !by_node {
        let of = |export: &Export| view.export_stats(&export.id).unwrap_or_default();
        let show =
            |export: &Export| json!({ "device": export.id, "node-name": node_of(export), "stats": shown(&of(export)) });
        return config.exports.iter().map(show).collect();
    }
    let show = |name: &str| json!({ "node-name": name, "stats": shown(&view.node_stats(name)) });
    config.node_names().into_iter().map(show).collect()
}

/// Counters under QEMU's names, and how long requests took. What is counted nowhere is there as well, as nothing: who reads this
/// by QEMU's schema finds every member that is not optional.
fn shown(stats: &QueueStats) -> Value {
    let [read, mut write, zeroes, flush, discard] =
        [RequestType::Read, RequestType::Write, RequestType::WriteZeroes, RequestType::Flush, RequestType::Discard]
            .map(|op| stats.op(op));
    // To QEMU's devices they are writes.
    write.add(&zeroes);
    let latency = stats.latency().map(|latency| {
        let at = |quantile| latency.quantile(quantile).0;
        json!({ "p50-ns": at(0.5), "p99-ns": at(0.99), "p999-ns": at(0.999), "max-ns": latency.longest().0 })
    });
    let mut shown = json!({
        "rd_bytes": read.bytes, "rd_operations": read.succeeded(), "failed_rd_operations": read.errors,
        "wr_bytes": write.bytes, "wr_operations": write.succeeded(), "failed_wr_operations": write.errors,
        "flush_operations": flush.succeeded(), "failed_flush_operations": flush.errors,
        "unmap_bytes": discard.bytes, "unmap_operations": discard.succeeded(), "failed_unmap_operations": discard.errors,
        "wr_highest_offset": 0, "account_invalid": false, "account_failed": false, "timed_stats": [],
        "zone_append_bytes": 0, "zone_append_operations": 0, "failed_zone_append_operations": 0,
        "x-egret": { "notifications": stats.calls, "broken-queues": stats.broken, "latency": latency },
    });
    for op in ["rd", "wr", "zone_append", "flush", "unmap"] {
        shown[format!("{op}_total_time_ns")] = 0.into();
        shown[format!("invalid_{op}_operations")] = 0.into();
        if op != "flush" {
            shown[format!("{op}_merged")] = 0.into();
        }
    }
    shown
}
