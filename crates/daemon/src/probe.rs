//! Which engine suits an image best, where nobody chose.

use std::path::Path;

use egret_event_loop::ring::Ring;
use egret_vocabulary::schema::Aio;
use rustix::fs::{Mode, OFlags};

/// Whether the file system behind `path` lets the page cache be bypassed.
///
/// False as well where `path` cannot be opened at all; whoever opens it next learns why.
pub fn takes_direct_io(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty()).is_ok()
}

/// The best engine that the kernel offers: io_uring, else Linux AIO where I/O is direct, else threads.
///
/// io_uring may be missing from the kernel, or switched off by a sysctl or a seccomp filter.
pub fn best_engine(direct: bool) -> Aio {
    if Ring::new().is_ok() {
        Aio::IoUring
    } else if direct {
        Aio::Native
    } else {
        Aio::Threads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_takes_no_direct_io() {
        assert!(!takes_direct_io(Path::new("/nonexistent/disk.img")));
    }

    #[test]
    fn linux_aio_is_chosen_for_direct_io_only() {
        assert_ne!(best_engine(false), Aio::Native);
        assert_ne!(best_engine(true), Aio::Threads);
    }
}
