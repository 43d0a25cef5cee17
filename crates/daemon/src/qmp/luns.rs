//! Commands about logical units; QEMU has none of its own for them.

use egret_virtio::scsi::LunAddress;
use egret_vocabulary::schema::lun::{ADDRESS, PROPERTIES};
use egret_vocabulary::schema::{Key, Kind, Lun, Shape};
use serde_json::{Value, json};

use super::QmpError;
use super::command::{Arguments, Command, Run, Takes, keys, nothing, text};

const ID: Key = Key::needed("id", Kind::Text(0, usize::MAX), "Name of the export.");

static ADDED: [Key; 7] = {
    let ([lun, target], [node, serial, wwn, removable]) = (ADDRESS, PROPERTIES);
    [ID, lun, target, node, serial, wwn, removable]
};
static REMOVED: [Key; 3] = {
    let [lun, target] = ADDRESS;
    [ID, lun, target]
};
static LUN: Shape = keys(&ADDED);
static PLACE: Shape = keys(&REMOVED);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "egret-lun-add",
        takes: Takes::Keys(&LUN),
        returns: "{}",
        about: "Add a logical unit to an export of type vhost-user-scsi, and tell its guest.",
        run: Run::Change(|context, mut arguments| {
            let id = arguments.remove("id").unwrap_or_default();
            let lun: Lun = serde_json::from_value(arguments.into()).map_err(|e| QmpError::generic(e.to_string()))?;
            context.daemon.add_lun(id.as_str().unwrap_or_default(), lun)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "egret-lun-del",
        takes: Takes::Keys(&PLACE),
        returns: "{}",
        about: "Take a logical unit away, whether or not its guest still uses it, and tell the guest. EGRET_LUN_DELETED \
                says when its requests in flight have ended and its disk is free.",
        run: Run::Change(|context, arguments| {
            context.daemon.remove_lun(text(&arguments, "id"), address(&arguments))?;
            Ok(nothing())
        }),
    },
];

/// An address that its shape has checked.
fn address(arguments: &Arguments) -> LunAddress {
    let number = |key: &str| arguments.get(key).and_then(Value::as_u64).unwrap_or_default();
    LunAddress { target: number("target") as u8, lun: number("lun") as u16 }
}

/// A logical unit as queries have it.
pub(super) fn shown(lun: &Lun) -> Value {
    json!({ "target": lun.target, "lun": lun.lun, "node-name": lun.node_name, "serial": lun.serial() })
}
