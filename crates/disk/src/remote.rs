//! Disks whose data is neither a file nor a device of this machine's: a crate on the floor above brings each kind, with a
//! protocol or a library of its own.

#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

use egret_event_loop::EventNotifier;

use crate::engine::Engine;
use crate::error::{EngineError, OpenCause};
use crate::geometry::{Blocks, Limits};
use crate::options::RemoteKind;
use crate::syncs::FlushError;

/// A disk of another crate's.
///
/// Any thread may call it, and may wait in it: no I/O thread does. What I/O threads use is its [engines](Self::engine), which
/// never wait.
pub trait Remote: Any + fmt::Debug + Send + Sync {
    /// Which driver it is.
    fn kind(&self) -> RemoteKind;

    /// What messages call it: the URI by which others would find it.
    fn name(&self) -> &str;

    /// Whether `other` was made with the same options, so that a disk that is to be as it is need not be opened anew.
    fn is_like(&self, _other: &dyn Any) -> bool {
        false
    }

    /// Opens it, and says what it is like. Called once, before anything but its kind and its name is asked for: to make one
    /// takes nothing.
    ///
    /// # Errors
    ///
    /// It cannot be reached, or is not what its options want.
    fn open(&self) -> Result<Shape, OpenCause>;

    /// An engine for an I/O thread, which runs this disk's jobs only. Called on that thread, which must not wait.
    ///
    /// The engine takes jobs of any length, of as many buffers as there are, at multiples of the logical block, and whatever the
    /// operation: a flush covers what any engine of this disk has completed before. Where it has lost its other side it keeps
    /// jobs or fails them, as the disk's options say. It is ended or dropped on its thread, without waiting for its other side.
    /// The buffers of a [`WriteZeroes`](crate::Op::WriteZeroes) mean nothing.
    ///
    /// # Errors
    ///
    /// No descriptors left, say.
    fn engine(&self) -> Result<Box<dyn Engine>, EngineError>;

    /// Asks for the size in bytes, which somebody may have changed.
    ///
    /// # Errors
    ///
    /// There is no answer; or [`ResourceBusy`](io::ErrorKind::ResourceBusy), where what was written is to be
    /// [flushed](Self::flush) before, because nothing could be afterwards.
    fn ask_size(&self) -> io::Result<u64>;

    /// Has a notifier set when somebody else has changed its size, where the driver is told of that: from here on, and at once
    /// if that may have happened before.
    fn watch(&self, _bell: &EventNotifier) {}

    /// The newest size that is known of it, if anything was heard since this was last asked; it may be what it was. Does not
    /// wait.
    fn take_new_size(&self) -> Option<u64> {
        None
    }

    /// Whether it can be [made longer](Self::resize); else its owner alone does that.
    fn can_resize(&self) -> bool {
        false
    }

    /// Makes it longer: so many bytes.
    ///
    /// # Errors
    ///
    /// It has more than that by now, what the other side says, or that this driver cannot.
    fn resize(&self, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Makes stable what was completed. One caller at a time does.
    ///
    /// # Errors
    ///
    /// What the other side says, and whether that is a loss. What is lost the next flush is not for.
    fn flush(&self) -> Result<(), FlushError>;

    /// Has nobody else write to it from here on, where the driver can see to that, and forgets what it knows of what is in
    /// it. Tries once.
    ///
    /// # Errors
    ///
    /// Somebody else does ([`OpenCause::RemoteLocked`]), or there is no answer.
    fn lock(&self) -> Result<(), OpenCause> {
        Ok(())
    }

    /// Takes back a [`lock`](Self::lock), if there was one.
    fn unlock(&self) {}

    /// Whether somebody else has taken the lock away: what fails has not been done, and nothing else will be, until the disk
    /// is opened anew.
    fn is_lost(&self) -> bool {
        false
    }
}

/// What a remote disk is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes.
    pub size: u64,
    /// Its block sizes.
    pub blocks: Blocks,
    /// What may be discarded and zeroed by one request.
    pub limits: Limits,
}

/// A handle of a [`Remote`]; equal are those that were made with the same options.
#[derive(Clone, Debug)]
pub struct RemoteDisk(Arc<dyn Remote>);

impl RemoteDisk {
    /// Of this disk.
    pub fn new(disk: impl Remote + 'static) -> Self {
        Self(Arc::new(disk))
    }
}

impl Deref for RemoteDisk {
    type Target = dyn Remote;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl RemoteDisk {
    /// Whether both are of one disk.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl PartialEq for RemoteDisk {
    fn eq(&self, other: &Self) -> bool {
        let theirs: &dyn Any = &*other.0;
        self.is(other) || self.0.is_like(theirs)
    }
}

impl Eq for RemoteDisk {}
