//! What there is here to choose from, and which engine suits an image best where nobody chose.

use std::path::Path;

pub use egret_disk::format::{is_place_of_devices, of as image_format};
use egret_event_loop::MonitorChoice;
use egret_event_loop::aio::Context;
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
    if engine(Aio::IoUring).is_ok() {
        Aio::IoUring
    } else if direct {
        Aio::Native
    } else {
        Aio::Threads
    }
}

/// Whether the kernel offers what an engine needs.
///
/// # Errors
/// What stands in the way.
pub fn engine(aio: Aio) -> Result<(), String> {
    match aio {
        Aio::IoUring => Ring::new().map(drop).map_err(|error| error.to_string()),
        Aio::Native => Context::new(1).map(drop).map_err(|error| error.to_string()),
        Aio::Threads => Ok(()),
    }
}

/// What io_uring lacks of what Egret has a use for, where there is one.
pub fn ring_lacks() -> Vec<&'static str> {
    Ring::new().map_or_else(|_| Vec::new(), |ring| ring.lacks())
}

/// The file descriptor monitor that `auto` comes to, and why it is none of those before it.
pub fn monitor() -> (MonitorChoice, Vec<String>) {
    let mut why = Vec::new();
    for &choice in &MonitorChoice::ALL[1..] {
        match choice.probe() {
            Ok(()) => return (choice, why),
            Err(error) => why.push(format!("no {choice}: {error}")),
        }
    }
    (MonitorChoice::Auto, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refuse::refuse;

    #[test]
    fn a_file_that_is_not_there_takes_no_direct_io() {
        assert!(!takes_direct_io(Path::new("/nonexistent/disk.img")));
    }

    #[test]
    fn linux_aio_is_chosen_for_direct_io_only() {
        assert_ne!(best_engine(false), Aio::Native);
        assert_ne!(best_engine(true), Aio::Threads);
    }

    #[test]
    fn where_there_is_no_io_uring_that_is_said_and_what_takes_its_place() {
        let refused = || {
            refuse(libc::SYS_io_uring_setup, libc::ENOSYS);
            let missing = "this kernel has no io_uring";
            assert_eq!(monitor(), (MonitorChoice::Epoll, vec![format!("no io_uring: {missing}")]));
            assert_eq!(engine(Aio::IoUring), Err(missing.to_owned()));
            assert_eq!((engine(Aio::Threads), ring_lacks()), (Ok(()), Vec::new()));
            assert_eq!((best_engine(true), best_engine(false)), (Aio::Native, Aio::Threads));
        };
        // The thread that tests run on may be another's next.
        std::thread::spawn(refused).join().unwrap();
    }
}
