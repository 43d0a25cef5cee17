//! The command that limits disks, and how limits are shown.

use egret_disk::{LARGEST_LIMIT, Limits};
use egret_vocabulary::schema::{Key, Shape, ValueType, limits_by_name};
use serde_json::{Map, Value, json};

use super::QmpError;
use super::command::{Arguments, Command, Run, Takes, nothing, text};
use crate::daemon::View;

const RATE: ValueType = ValueType::Number(0, LARGEST_LIMIT, "");

const fn rate(name: &'static str, about: &'static str) -> Key {
    Key::needed(name, RATE, about)
}

const fn burst(name: &'static str, about: &'static str) -> Key {
    Key::optional(name, RATE, &"0", about)
}

const fn length(name: &'static str, about: &'static str) -> Key {
    Key::optional(name, RATE, &"1", about)
}

static LIMITS: Shape = Shape::of(&[
    Key::optional("device", ValueType::Text(0, usize::MAX), &"none", "Accepted as another spelling of `id`."),
    Key::optional("id", ValueType::Text(0, usize::MAX), &"none", "Name of the blockdev."),
    rate("bps", "Bytes a second of reads and writes together; 0 is no limit, as in all that follow."),
    rate("bps_rd", "Bytes a second of reads; not beside `bps`."),
    rate("bps_wr", "Bytes a second of writes; not beside `bps`."),
    rate("iops", "Requests a second of reads and writes together."),
    rate("iops_rd", "Reads a second; not beside `iops`."),
    rate("iops_wr", "Writes a second; not beside `iops`."),
    burst("bps_max", "As `bps`, in bursts; at least `bps`."),
    burst("bps_rd_max", "As `bps_rd`, in bursts."),
    burst("bps_wr_max", "As `bps_wr`, in bursts."),
    burst("iops_max", "As `iops`, in bursts."),
    burst("iops_rd_max", "As `iops_rd`, in bursts."),
    burst("iops_wr_max", "As `iops_wr`, in bursts."),
    length("bps_max_length", "Seconds that `bps_max` may last; so with those that follow."),
    length("bps_rd_max_length", "Of `bps_rd_max`."),
    length("bps_wr_max_length", "Of `bps_wr_max`."),
    length("iops_max_length", "Of `iops_max`."),
    length("iops_rd_max_length", "Of `iops_rd_max`."),
    length("iops_wr_max_length", "Of `iops_wr_max`."),
    burst("iops_size", "Bytes of a request that counts as one; a larger one counts as several. 0: each counts as one."),
    Key::optional("group", ValueType::Text(1, 255), &"the blockdev's name", "Group of disks that share the limits."),
]);

pub(super) static COMMANDS: &[Command] = &[Command {
    name: "block_set_io_throttle",
    takes: Takes::Keys(&LIMITS),
    returns: "{}",
    about: "Limit what guests do with a blockdev, together with the others of its group; all zero lifts its limits.",
    run: Run::Mutate(|context, arguments| {
        let name = match (text(&arguments, "device"), text(&arguments, "id")) {
            ("", name) | (name, "") if !name.is_empty() => name,
            _ => return Err(QmpError::generic("Need exactly one of 'device' and 'id'")),
        };
        if !context.daemon.config().node_names().contains(&name) {
            return Err(QmpError::no_device(name));
        }
        let limits = limits(&arguments);
        limits.check().map_err(|error| QmpError::generic(error.to_string()))?;
        let group = arguments.get("group").and_then(Value::as_str);
        context.daemon.set_limits(name, limits, group)?;
        Ok(nothing())
    }),
}];

fn limits(arguments: &Arguments) -> Limits {
    limits_by_name(["", "_rd", "_wr"], "_", |name| arguments.get(name)?.as_u64())
}

/// A blockdev's limits as `query-named-block-nodes` has them: bursts and the like only where there are some.
pub(super) fn shown(view: &View, node_name: &str) -> Map<String, Value> {
    let (group, limits) = view.limits(node_name).unzip();
    let limits = limits.unwrap_or_default();
    let mut shown = Map::new();
    for (unit, rates) in [("bps", limits.bytes), ("iops", limits.requests)] {
        for (part, limit) in [("", rates.total), ("_rd", rates.read), ("_wr", rates.write)] {
            shown.insert(format!("{unit}{part}"), limit.average.into());
            if limit.burst > 0 {
                shown.insert(format!("{unit}{part}_max"), limit.burst.into());
                shown.insert(format!("{unit}{part}_max_length"), limit.burst_seconds.into());
            }
        }
    }
    if limits.request_bytes > 0 {
        shown.insert("iops_size".to_owned(), limits.request_bytes.into());
    }
    shown.extend(group.map(|group| ("group".to_owned(), json!(group))));
    shown
}
