//! How a disk is opened: QEMU's `blockdev` vocabulary.

#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use egret_event_loop::Nanos;

use crate::blkdebug::DebugRules;
use crate::remote::RemoteDisk;

/// Everything [`Disk::open`](crate::Disk::open) needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// What messages call the disk.
    pub node_name: String,
    /// Where the data is.
    pub driver: Driver,
    /// Which engine runs the requests; the null driver has its own.
    pub aio: Aio,
    /// The most requests of this disk that `aio=native` gives to the kernel in one system call; 0 leaves it to the engine.
    pub aio_max_batch: u32,
    /// Go past the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// Ignore flushes: fast, and everything is lost when the host goes down.
    pub no_flush: bool,
    /// Refuse everything that changes the image.
    pub read_only: bool,
    /// What becomes of discards.
    pub discard: Discard,
    /// What becomes of written zeroes.
    pub detect_zeroes: DetectZeroes,
    /// Whether the image is locked against other processes.
    pub locking: Locking,
    /// Lock it only while somebody has it [active](crate::Disk::activate), not for as long as it is open.
    pub allow_inactive: bool,
    /// Whether the page cache drops what it has of the image when it becomes active.
    pub drop_cache: bool,
    /// Errors that are injected on purpose.
    pub blkdebug: DebugRules,
}

impl Options {
    /// The defaults of `qemu-storage-daemon`: `aio=threads`, cached, writable, `discard=ignore`, `locking=auto`.
    pub fn new(node_name: impl Into<String>, driver: Driver) -> Self {
        Self {
            node_name: node_name.into(),
            driver,
            aio: Aio::default(),
            aio_max_batch: 0,
            direct: false,
            no_flush: false,
            read_only: false,
            discard: Discard::default(),
            detect_zeroes: DetectZeroes::default(),
            locking: Locking::default(),
            allow_inactive: false,
            drop_cache: true,
            blkdebug: DebugRules::default(),
        }
    }
}

/// Where a disk's data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A regular file (`file`).
    File {
        /// Its path.
        filename: PathBuf,
    },
    /// A block device (`host_device`).
    HostDevice {
        /// Its path.
        filename: PathBuf,
    },
    /// Nowhere (`null-co`, `null-aio`): writes vanish, reads find what was in the buffer.
    Null {
        /// Bytes.
        size: u64,
        /// How long every request takes.
        latency: Nanos,
        /// Whether reads fill the buffer with zeroes.
        read_zeroes: bool,
    },
    /// Where another crate's driver has it.
    Remote(RemoteDisk),
}

/// An enumeration that is spelled in options: its names, both ways.
macro_rules! spelled {
    ($(#[$doc:meta])* $name:ident($what:literal) { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant),+ }

        impl $name {
            /// Every value, in the order in which help texts list them.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The word for it.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownValue;
            fn from_str(text: &str) -> Result<Self, UnknownValue> {
                Self::ALL.iter().copied().find(|value| value.as_str() == text).ok_or_else(|| UnknownValue {
                    what: $what,
                    given: text.to_owned(),
                    known: &[$($text),+],
                })
            }
        }
    };
}

spelled! {
    /// Which engine runs a disk's requests.
    Aio("aio") {
        /// Worker threads that block in `preadv` and `pwritev`.
        #[default]
        Threads = "threads",
        /// Linux AIO; needs direct I/O.
        Native = "native",
        /// io_uring.
        IoUring = "io_uring",
    }
}

spelled! {
    /// Which driver of another crate's has a disk.
    RemoteKind("driver") {
        /// Behind an NBD server.
        #[default]
        Nbd = "nbd",
        /// In a Ceph cluster.
        Rbd = "rbd",
    }
}

spelled! {
    /// What becomes of a discard.
    Discard("discard") {
        /// It succeeds and does nothing.
        #[default]
        Ignore = "ignore",
        /// The storage is given back.
        Unmap = "unmap",
    }
}

spelled! {
    /// What becomes of a write that holds nothing but zeroes.
    DetectZeroes("detect-zeroes") {
        /// It is written like any other.
        #[default]
        Off = "off",
        /// The range is zeroed without moving the data.
        On = "on",
        /// The range is zeroed and its storage given back.
        Unmap = "unmap",
    }
}

spelled! {
    /// Whether an image is locked against other processes, in the way that QEMU locks it.
    Locking("locking") {
        /// Where the system can.
        #[default]
        Auto = "auto",
        /// Or the disk does not open.
        On = "on",
        /// Never.
        Off = "off",
    }
}

spelled! {
    /// What [`blkdebug`](crate::DebugRules) is told of a request.
    DebugEvent("event") {
        /// Nothing: what is for it is active from the beginning.
        #[default]
        None = "none",
        /// A read begins.
        ReadAio = "read_aio",
        /// A write begins.
        WriteAio = "write_aio",
        /// Likewise, one layer above.
        Pwritev = "pwritev",
        /// A write of zeroes begins.
        PwritevZero = "pwritev_zero",
        /// A flush begins.
        FlushToOs = "flush_to_os",
        /// A flush reaches the disk.
        FlushToDisk = "flush_to_disk",
    }
}

spelled! {
    /// What a request does.
    IoType("iotype") {
        /// It reads.
        #[default]
        Read = "read",
        /// It writes.
        Write = "write",
        /// It writes zeroes.
        WriteZeroes = "write-zeroes",
        /// It discards.
        Discard = "discard",
        /// It flushes.
        Flush = "flush",
    }
}

/// A word that an option does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be one of {}, got '{given}'", .known.join(", "))]
pub struct UnknownValue {
    what: &'static str,
    given: String,
    known: &'static [&'static str],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_reads_back_as_it_is_spelled() {
        for &aio in Aio::ALL {
            assert_eq!(aio.to_string().parse(), Ok(aio));
        }
        assert_eq!("io_uring".parse(), Ok(Aio::IoUring));
        assert_eq!("unmap".parse(), Ok(Discard::Unmap));
    }

    #[test]
    fn an_unknown_value_is_told_the_known_ones() {
        let error = "uring".parse::<Aio>().unwrap_err();
        assert_eq!(error.to_string(), "aio must be one of threads, native, io_uring, got 'uring'");
    }
}
