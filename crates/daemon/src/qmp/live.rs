//! Commands that change what carries a guest's requests while it makes them.

use egret_export::Pause;
use egret_vocabulary::schema::{Blockdev, Export, Key, Kind, Object, Shape, Spelling, VQ_MAPPING};
use serde_json::{Value, json};

use super::QmpError;
use super::command::{Arguments, Command, Context, Run, Takes, keys, text};
use crate::daemon::{ChangeError, DEFAULT_IOTHREAD};

/// What each of them returns.
const RETURNS: &str = r#"{"pause-ns", "drain-ns"}"#;

static NODES: Shape = keys(&[Key::needed(
    "options",
    Kind::List(Blockdev::SHAPE),
    "Blockdevs as `blockdev-add` takes them: what one leaves unset goes back to its default.",
)]);
static QUEUE: Shape = keys(&[
    Key::needed("id", Kind::Text(0, usize::MAX), "Name of the export."),
    Key::needed("queue", Kind::Number(0, u16::MAX as u64, ""), "The request queue, counted from 0."),
    Key::needed("iothread", Kind::Text(0, usize::MAX), "The I/O thread that is to run it."),
]);
static MAPPING: Shape = keys(&[
    Key::needed("id", Kind::Text(0, usize::MAX), "Name of the export."),
    Key::optional("iothread", Kind::Names, &"by the mapping", "As the export's key of this name."),
    Key::optional(
        "iothread-vq-mapping",
        Kind::List(&VQ_MAPPING),
        &"by `iothread`",
        "As the export's key of this name.",
    ),
]);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "blockdev-reopen",
        takes: Takes::Keys(&NODES),
        returns: RETURNS,
        about: "Open nodes otherwise while they are used: `aio`, `cache`, `read-only`, `discard`, `detect-zeroes` and \
                `locking` can change, the image cannot. If one node cannot be had as asked, all stay as they are. \
                `pause-ns`, Egret's own, is the longest time that a queue was not served for that, \
                and `drain-ns` how long of it requests in flight took to end.",
        run: Run::Change(|context, arguments| {
            let blockdevs = arguments.get("options").and_then(Value::as_array).cloned().unwrap_or_default();
            let read = |blockdev| Blockdev::from_value(blockdev, Spelling::Typed);
            let blockdevs = blockdevs.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
            let pause = context.daemon.reopen(blockdevs)?;
            Ok(told(pause))
        }),
    },
    Command {
        name: "egret-move-queue",
        takes: Takes::Keys(&QUEUE),
        returns: RETURNS,
        about: "Have another I/O thread run one queue of an export: its client sees nothing of it. `pause-ns` is how \
                long nobody served it, `drain-ns` how long of that requests in flight took to end. The control and event queues of `vhost-user-scsi` are with request queue 0.",
        run: Run::Change(|context, arguments| {
            let queue = arguments.get("queue").and_then(Value::as_u64).and_then(|queue| u16::try_from(queue).ok());
            let export = find(context, &arguments)?;
            let mapping = export.mapping(DEFAULT_IOTHREAD);
            let moved = export.with_queue_on(queue.unwrap_or(u16::MAX), text(&arguments, "iothread"), mapping)?;
            place(context, moved)
        }),
    },
    Command {
        name: "egret-map-queues",
        takes: Takes::Keys(&MAPPING),
        returns: RETURNS,
        about: "Spread an export's queues over I/O threads, or gather them: `iothread`, or `iothread-vq-mapping` with \
                the rules that it has for exports. `pause-ns` is the longest time that nobody served one of them, `drain-ns` how \
                long of it requests in flight took to end.",
        run: Run::Change(|context, arguments| {
            let placed = find(context, &arguments)?.placed(&arguments)?;
            place(context, placed)
        }),
    },
];

fn find<'a>(context: &'a Context<'_>, arguments: &Arguments) -> Result<&'a Export, ChangeError> {
    let id = text(arguments, "id");
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
