//! Images: how the one at the bottom of a stack of blockdevs is opened.

use egret_disk::{Disk, Driver, Options};
use egret_event_loop::Nanos;

use crate::disk::{self, Bottom};

/// How the image at the bottom of `disk` is opened. It is opened for writing only if an export writes.
pub(super) fn options(name: &str, disk: &disk::Disk<'_>, written: bool) -> Options {
    let mut options = Options::new(
        name,
        match disk.bottom {
            Bottom::File(image) => Driver::File { filename: image.filename.clone().into() },
            Bottom::HostDevice(image) => Driver::HostDevice { filename: image.filename.clone().into() },
            Bottom::Null(null) => {
                Driver::Null { size: null.size, latency: Nanos(null.latency_ns), read_zeroes: null.read_zeroes }
            }
        },
    );
    if let Bottom::File(image) | Bottom::HostDevice(image) = disk.bottom {
        options.aio = image.aio;
        options.locking = image.locking;
    }
    options.direct = disk.direct;
    options.no_flush = disk.no_flush;
    options.read_only = disk.read_only || !written;
    options.discard = disk.discard;
    options.detect_zeroes = disk.detect_zeroes;
    options
}

/// What messages call a disk: its node, and its file if it has one.
pub(super) fn described(disk: &Disk) -> String {
    let node = disk.node_name();
    match &disk.options().driver {
        Driver::File { filename } | Driver::HostDevice { filename } => {
            format!("blockdev '{node}' ('{}')", filename.display())
        }
        Driver::Null { .. } => format!("blockdev '{node}'"),
    }
}
