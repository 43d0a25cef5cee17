//! The logical units of a virtio-scsi export.

use std::collections::BTreeSet;

use super::Problem;
use super::blockdev::{LONGEST_NODE_NAME, LONGEST_PATH};
use super::key::{Shape, ValueType};
use crate::options;

/// What single level LUN addressing reaches (SAM-5).
const LARGEST_LUN: u64 = 16383;
const LARGEST_TARGET: u64 = 255;
/// What a page of vital product data has room for.
const LONGEST_SERIAL: usize = 252;

options! {
    /// Where a logical unit is in a virtio-scsi device.
    #[derive(Copy)]
    pub struct LunAddress {
        /// Its number.
        lun: u16, ValueType::Number(0, LARGEST_LUN, "");
        /// The target that it belongs to.
        target: u8, ValueType::Number(0, LARGEST_TARGET, ""), unset 0;
    }
}

options! {
    /// A disk of a virtio-scsi device.
    pub struct Lun {
        /// Where it is.
        #[serde(flatten)]
        address: LunAddress => LunAddress::KEYS;
        /// The blockdev behind it.
        node_name: String, ValueType::Name(LONGEST_NODE_NAME);
        /// What the guest reads as its serial number. Guests tell disks apart by it.
        serial: String, ValueType::Text(0, LONGEST_SERIAL), unset "its `node-name`";
        /// Its world wide name: a number of 64 bits that begins with 2, 3 or 5, such as 0x5000c50015ea71ac.
        wwn: u64, ValueType::Number(0, u64::MAX, ""), unset "made of `serial`";
        /// The guest can eject its medium.
        removable: bool, ValueType::Flag, default "off";
        /// File that its persistent reservations are kept in, so that they outlast the daemon. It is made if it is not
        /// there, with another beside it whenever they change. Exports of one blockdev need the same.
        pr_file: String, ValueType::Text(0, LONGEST_PATH), unset "they end with the daemon";
    }
}

pub(super) static SHAPE: Shape = Shape::of(Lun::KEYS);

impl Lun {
    /// What the guest reads as its serial number.
    pub fn serial(&self) -> &str {
        if self.serial.is_empty() { &self.node_name } else { &self.serial }
    }
}

/// That no two units are at one address or have one disk, and names are names.
pub(super) fn check(luns: &[Lun]) -> Result<(), Problem> {
    let (mut taken, mut disks) = (BTreeSet::new(), BTreeSet::new());
    for (at, lun) in luns.iter().enumerate() {
        let LunAddress { lun: number, target } = lun.address;
        if !taken.insert((target, number)) {
            return Err(Problem::Together(format!("luns has two of target={target},lun={number}")));
        }
        if !disks.insert(&lun.node_name) {
            return Err(Problem::Together(format!("luns has blockdev '{}' twice", lun.node_name)));
        }
        if !lun.pr_file.is_empty() && luns[..at].iter().any(|other| other.pr_file == lun.pr_file) {
            return Err(Problem::Together(format!(
                "luns has pr-file '{}' twice: each unit needs its own",
                lun.pr_file
            )));
        }
        if lun.wwn != 0 && !matches!(lun.wwn >> 60, 2 | 3 | 5) {
            let (key, wwn) = (format!("luns.{at}.wwn"), format!("{:#x}", lun.wwn));
            return Err(Problem::must(key, "a number of 64 bits that begins with 2, 3 or 5", wwn));
        }
    }
    Ok(())
}
