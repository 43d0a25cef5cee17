//! Commands about logical units; QEMU has none of its own for them.

use egret_virtio::scsi;
use egret_vocabulary::options;
use egret_vocabulary::schema::{Lun, LunAddress, Shape, ValueType};
use serde_json::{Value, json};

use super::command::{Command, Run, Takes, nothing, typed};

options! {
    struct Add {
        /// Name of the export.
        id: String, ValueType::Text(0, usize::MAX);
        /// The logical unit.
        #[serde(flatten)]
        lun: Lun => Lun::KEYS;
    }
}

options! {
    struct Delete {
        /// Name of the export.
        id: String, ValueType::Text(0, usize::MAX);
        /// Where the logical unit is.
        #[serde(flatten)]
        address: LunAddress => LunAddress::KEYS;
    }
}

static ADD: Shape = Shape::of(Add::KEYS);
static DELETE: Shape = Shape::of(Delete::KEYS);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "egret-lun-add",
        takes: Takes::Keys(&ADD),
        returns: "{}",
        about: "Add a logical unit to an export of type vhost-user-scsi, and tell its guest.",
        run: Run::Mutate(|context, arguments| {
            let Add { id, lun } = typed(arguments)?;
            context.daemon.add_lun(&id, lun)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "egret-lun-del",
        takes: Takes::Keys(&DELETE),
        returns: "{}",
        about: "Take a logical unit away, whether or not its guest still uses it, and tell the guest. EGRET_LUN_DELETED \
                says when its requests in flight have ended and its disk is free.",
        run: Run::Mutate(|context, arguments| {
            let Delete { id, address: LunAddress { lun, target } } = typed(arguments)?;
            context.daemon.remove_lun(&id, scsi::LunAddress { target, lun })?;
            Ok(nothing())
        }),
    },
];

/// A logical unit as queries have it.
pub(super) fn shown(lun: &Lun) -> Value {
    let LunAddress { lun: number, target } = lun.address;
    json!({ "target": target, "lun": number, "node-name": lun.node_name, "serial": lun.serial() })
}
