//! The logical units of a virtio-scsi export.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Problem;
use super::blockdev::LONGEST_NODE_NAME;
use super::key::{Key, Kind, Shape};

/// What single level LUN addressing reaches (SAM-5).
const LARGEST_LUN: u64 = 16383;
const LARGEST_TARGET: u64 = 255;
/// What a page of vital product data has room for.
const LONGEST_SERIAL: usize = 252;

/// A disk of a virtio-scsi device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Lun {
    /// Its number.
    pub lun: u16,
    /// The target that it belongs to.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub target: u8,
    /// The disk.
    pub node_name: String,
    /// What the guest reads as its serial number; the name of its disk if that is empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub serial: String,
    /// Its world wide name; zero for one that is made of the serial number.
    #[serde(default, skip_serializing_if = "is_nameless")]
    pub wwn: u64,
    /// Whether its medium can be ejected.
    #[serde(default)]
    pub removable: bool,
}

/// Where it is: its number and its target.
pub const ADDRESS: [Key; 2] = [
    Key::needed("lun", Kind::Number(0, LARGEST_LUN, ""), "Its number."),
    Key::optional("target", Kind::Number(0, LARGEST_TARGET, ""), &"0", "The target that it belongs to."),
];

/// What it is.
pub const PROPERTIES: [Key; 4] = [
    Key::needed("node-name", Kind::Name(LONGEST_NODE_NAME), "The blockdev behind it."),
    Key::optional(
        "serial",
        Kind::Text(0, LONGEST_SERIAL),
        &"its `node-name`",
        "What the guest reads as its serial number. Guests tell disks apart by it.",
    ),
    Key::optional(
        "wwn",
        Kind::Number(0, u64::MAX, ""),
        &"made of `serial`",
        "Its world wide name: a number of 64 bits that begins with 2, 3 or 5, such as 0x5000c50015ea71ac.",
    ),
    Key::optional("removable", Kind::Flag, &"off", "The guest can eject its medium."),
];

static KEYS: [Key; 6] = {
    let ([lun, target], [node, serial, wwn, removable]) = (ADDRESS, PROPERTIES);
    [lun, target, node, serial, wwn, removable]
};

pub(super) static SHAPE: Shape = Shape { keys: &KEYS, variants: None, foreign: &[] };

impl Lun {
    /// What the guest reads as its serial number.
    pub fn serial(&self) -> &str {
        if self.serial.is_empty() { &self.node_name } else { &self.serial }
    }
}

fn is_zero(target: &u8) -> bool {
    *target == 0
}

fn is_nameless(wwn: &u64) -> bool {
    *wwn == 0
}

/// That no two units are at one address or have one disk, and names are names.
pub(super) fn check(luns: &[Lun]) -> Result<(), Problem> {
    let (mut taken, mut disks) = (BTreeSet::new(), BTreeSet::new());
    for (at, lun) in luns.iter().enumerate() {
        if !taken.insert((lun.target, lun.lun)) {
            return Err(Problem::Together(format!("luns has two of target={},lun={}", lun.target, lun.lun)));
        }
        if !disks.insert(&lun.node_name) {
            return Err(Problem::Together(format!("luns has blockdev '{}' twice", lun.node_name)));
        }
        if lun.wwn != 0 && !matches!(lun.wwn >> 60, 2 | 3 | 5) {
            let (key, wwn) = (format!("luns.{at}.wwn"), format!("{:#x}", lun.wwn));
            return Err(Problem::must(key, "a number of 64 bits that begins with 2, 3 or 5", wwn));
        }
    }
    Ok(())
}
