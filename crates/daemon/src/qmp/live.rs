//! Commands that change what carries a guest's requests while it makes them.

use egret_export::Pause;
use egret_vocabulary::options;
use egret_vocabulary::schema::{Blockdev, Export, Object, Shape, Spelling, VQ_MAPPING, ValueType, VqMapping};
use serde_json::{Value, json};

use super::QmpError;
use super::command::{Command, Context, Run, Takes, typed};
use crate::daemon::{ChangeError, DEFAULT_IOTHREAD};

/// What each of them returns.
const RETURNS: &str = r#"{"pause-ns", "drain-ns"}"#;

options! {
    struct Reopen {
        /// Blockdevs as `blockdev-add` takes them: what one leaves unset goes back to its default.
        options: Vec<Value>, ValueType::List(Blockdev::SHAPE);
    }
}

options! {
    struct MoveQueue {
        /// Name of the export.
        id: String, ValueType::Text(0, usize::MAX);
        /// The request queue, counted from 0.
        queue: u16, ValueType::Number(0, u16::MAX as u64, "");
        /// The I/O thread that is to run it.
        iothread: String, ValueType::Text(0, usize::MAX);
    }
}

options! {
    struct MapQueues {
        /// Name of the export.
        id: String, ValueType::Text(0, usize::MAX);
        /// As the export's key of this name.
        iothread: Vec<String>, ValueType::Names, unset "by the mapping";
        /// As the export's key of this name.
        iothread_vq_mapping: Vec<VqMapping>, ValueType::List(&VQ_MAPPING), unset "by `iothread`";
    }
}

static REOPEN: Shape = Shape::of(Reopen::KEYS);
static MOVE_QUEUE: Shape = Shape::of(MoveQueue::KEYS);
static MAP_QUEUES: Shape = Shape::of(MapQueues::KEYS);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "blockdev-reopen",
        takes: Takes::Keys(&REOPEN),
        returns: RETURNS,
        about: "Open nodes otherwise while they are used: `aio`, `cache`, `read-only`, `discard`, `detect-zeroes` and \
                `locking` can change, the image cannot. If one node cannot be had as asked, all stay as they are. \
                What was written before is made stable then, for which the answer waits five seconds at most; no flush \
                succeeds before that is done. `pause-ns`, Egret's own, is the longest time that a queue was not served for that, \
                and `drain-ns` how long of it requests in flight took to end.",
        run: Run::Mutate(|context, arguments| {
            let Reopen { options } = typed(arguments)?;
            let read = |blockdev| Blockdev::from_value(blockdev, Spelling::Typed);
            let blockdevs = options.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
            let pause = context.daemon.reopen(blockdevs)?;
            Ok(told(pause))
        }),
    },
    Command {
        name: "egret-move-queue",
        takes: Takes::Keys(&MOVE_QUEUE),
        returns: RETURNS,
        about: "Have another I/O thread run one queue of an export: its client sees nothing of it. `pause-ns` is how \
                long nobody served it, `drain-ns` how long of that requests in flight took to end. The control and event queues of `vhost-user-scsi` are with request queue 0.",
        run: Run::Mutate(|context, arguments| {
            let MoveQueue { id, queue, iothread } = typed(arguments)?;
            let export = find(context, &id)?;
            let moved = export.with_queue_on(queue, &iothread, export.mapping(DEFAULT_IOTHREAD))?;
            place(context, moved)
        }),
    },
    Command {
        name: "egret-map-queues",
        takes: Takes::Keys(&MAP_QUEUES),
        returns: RETURNS,
        about: "Spread an export's queues over I/O threads, or gather them: `iothread`, or `iothread-vq-mapping` with \
                the rules that it has for exports. One of type nbd has as many I/O threads afterwards as before, and no \
                `iothread-vq-mapping`. `pause-ns` is the longest time that nobody served one of them, `drain-ns` how \
                long of it requests in flight took to end.",
        run: Run::Mutate(|context, arguments| {
            let MapQueues { id, iothread, iothread_vq_mapping } = typed(arguments)?;
            let placed = find(context, &id)?.placed(iothread, iothread_vq_mapping)?;
            place(context, placed)
        }),
    },
];

fn find<'a>(context: &'a Context<'_>, id: &str) -> Result<&'a Export, ChangeError> {
    let found = context.daemon.config().exports.iter().find(|export| export.id == id);
    found.ok_or_else(|| ChangeError::NoExport(id.to_owned()))
}

fn place(context: &mut Context<'_>, placed: Export) -> Result<Value, QmpError> {
    let pause = context.daemon.place_export(placed)?;
    Ok(told(pause))
}

fn told(pause: Pause) -> Value {
    json!({ "pause-ns": pause.whole.0, "drain-ns": pause.drain.0 })
}

#[cfg(test)]
mod tests;
