//! What a blockdev comes to when it is looked at from an export.
//!
//! Blockdevs may lie over one another (`raw` over `file`), and one written inside another takes what it leaves unset
//! from it. A [`Disk`] is the stack seen from its top: one image, and the settings that are in force. As in QEMU,
//!
//! - an inline child takes `cache.*`, `read-only` and `auto-read-only` from its parent, and its `discard` is `unmap`;
//!   a child that is named keeps its own;
//! - a discard gets through only if every layer lets it;
//! - a stack is read-only if any layer is.

use crate::schema::{
    Blkdebug, Blockdev, Cache, Child, DetectZeroes, Discard, Driver, Image, InjectError, Nbd, Null, Raw, Rbd, SetState,
    Throttle,
};

/// A disk, as an export opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk<'a> {
    /// What is at the bottom.
    pub bottom: Bottom<'a>,
    /// What the layers together come to.
    pub settings: Settings,
    /// The errors that its layers inject, and their states.
    pub errors: Vec<(&'a [InjectError], &'a [SetState])>,
    /// The throttle group that limits it: one at most, of a [`Config`](crate::Config).
    pub throttle_groups: Vec<&'a str>,
}

/// What is at the bottom of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottom<'a> {
    /// A regular file.
    File(&'a Image),
    /// A block device of the host.
    HostDevice(&'a Image),
    /// An image in a Ceph cluster.
    Rbd(&'a Rbd),
    /// Nothing.
    Null(&'a Null),
    /// An NBD server's export.
    Nbd(&'a Nbd),
}

/// The settings of one layer, or of a whole disk, with defaults filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether the host's page cache is bypassed.
    pub direct: bool,
    /// Whether flushes are dropped.
    pub no_flush: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether to open the image for reading alone as long as nobody writes.
    pub auto_read_only: bool,
    /// What becomes of discards.
    pub discard: Discard,
    /// What becomes of zeroes.
    pub detect_zeroes: DetectZeroes,
}

impl Settings {
    /// The settings of `blockdev` at the top of a stack, or of one that is named from above.
    pub(crate) fn top(blockdev: &Blockdev) -> Self {
        let own = Self {
            direct: false,
            no_flush: false,
            read_only: false,
            auto_read_only: true,
            discard: Discard::Ignore,
            detect_zeroes: DetectZeroes::Off,
        };
        own.overridden(blockdev)
    }

    /// The settings of `blockdev` inside this one.
    pub(crate) fn inline(self, blockdev: &Blockdev) -> Self {
        Self { discard: Discard::Unmap, detect_zeroes: DetectZeroes::Off, ..self }.overridden(blockdev)
    }

    /// What these settings come to over a layer below.
    fn over(self, below: Self) -> Self {
        Self {
            read_only: self.read_only || below.read_only,
            discard: if below.discard == Discard::Ignore { Discard::Ignore } else { self.discard },
            detect_zeroes: if self.detect_zeroes == DetectZeroes::Off {
                below.detect_zeroes
            } else {
                self.detect_zeroes
            },
            // How the image is opened its own layer says.
            direct: below.direct,
            no_flush: below.no_flush,
            auto_read_only: below.auto_read_only,
        }
    }

    /// It takes the object apart, so that a key that nobody reads does not compile.
    fn overridden(self, blockdev: &Blockdev) -> Self {
        let Blockdev { node_name: _, driver: _, cache, read_only, auto_read_only, discard, detect_zeroes } = blockdev;
        let Cache { direct, no_flush } = cache;
        Self {
            direct: direct.unwrap_or(self.direct),
            no_flush: no_flush.unwrap_or(self.no_flush),
            read_only: read_only.unwrap_or(self.read_only),
            auto_read_only: auto_read_only.unwrap_or(self.auto_read_only),
            discard: discard.unwrap_or(self.discard),
            detect_zeroes: detect_zeroes.unwrap_or(self.detect_zeroes),
        }
    }
}

impl<'a> Disk<'a> {
    /// Whether what is in its image may be in the host's page cache.
    pub(crate) fn is_cached(&self) -> bool {
        !self.settings.direct && !matches!(self.bottom, Bottom::Null(_) | Bottom::Nbd(_) | Bottom::Rbd(_))
    }

    /// Goes down from `blockdev` to the image; `find` knows blockdevs by their names.
    ///
    /// `None` if a name leads nowhere, or back to where it came from.
    pub(crate) fn resolve(
        blockdev: &'a Blockdev,
        find: impl Fn(&str) -> Option<(&'a Blockdev, Settings)>,
    ) -> Option<Self> {
        let (mut at, mut layer) = match blockdev.node_name.as_deref().and_then(&find) {
            Some(known) => known,
            None => (blockdev, Settings::top(blockdev)),
        };
        let mut settings = layer;
        let (mut named, mut errors, mut throttle_groups) = (Vec::new(), Vec::new(), Vec::new());
        let bottom = loop {
            let below = match &at.driver {
                Driver::File(image) => break Bottom::File(image),
                Driver::HostDevice(image) => break Bottom::HostDevice(image),
                Driver::Rbd(image) => break Bottom::Rbd(image),
                Driver::NullCo(null) | Driver::NullAio(null) => break Bottom::Null(null),
                Driver::Nbd(nbd) => break Bottom::Nbd(nbd),
                Driver::Raw(Raw { file: child }) => child,
                Driver::Throttle(Throttle { throttle_group, file }) => {
                    throttle_groups.push(throttle_group.as_str());
                    file
                }
                Driver::Blkdebug(Blkdebug { image, inject_error, set_state }) => {
                    errors.push((&inject_error[..], &set_state[..]));
                    image
                }
            };
            match below {
                Child::Inline(child) => (at, layer) = (child, layer.inline(child)),
                Child::Node(name) => {
                    if named.contains(&name) {
                        return None;
                    }
                    named.push(name);
                    (at, layer) = find(name)?;
                }
            }
            settings = settings.over(layer);
        };
        if let Bottom::Rbd(rbd) = bottom {
            settings.read_only |= rbd.snapshot.is_some();
        }
        Some(Self { bottom, settings, errors, throttle_groups })
    }
}
