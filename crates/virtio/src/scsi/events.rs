//! Events of logical units (virtio 1.3, 5.6.6.3), and the queue that reports them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egret_scsi::Code;
use egret_vring::memory::GuestMemory;
use egret_vring::ring::Chain;
use virtio_bindings::bindings::virtio_scsi::{
    VIRTIO_SCSI_EVT_RESET_REMOVED, VIRTIO_SCSI_EVT_RESET_RESCAN, VIRTIO_SCSI_T_EVENTS_MISSED, VIRTIO_SCSI_T_NO_EVENT,
    VIRTIO_SCSI_T_PARAM_CHANGE, VIRTIO_SCSI_T_TRANSPORT_RESET,
};

use super::address::LunAddress;
use crate::model::{Completed, EventModel, Status};

/// The length of `struct virtio_scsi_event`.
pub(super) const EVENT: usize = 16;

/// How many events wait for the driver's buffers. Beyond that events are dropped, and reported as missed.
const PENDING: usize = 64;

/// Something that has happened to a logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) address: LunAddress,
    pub(super) what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Added,
    Removed,
    Resized,
}

impl Event {
    /// As the driver reads it; `None` if some were missed.
    fn to_bytes(event: Option<Self>) -> [u8; EVENT] {
        let (kind, reason) = match event.map(|event| event.what) {
            None => (VIRTIO_SCSI_T_NO_EVENT | VIRTIO_SCSI_T_EVENTS_MISSED, 0),
            Some(What::Added) => (VIRTIO_SCSI_T_TRANSPORT_RESET, VIRTIO_SCSI_EVT_RESET_RESCAN),
            Some(What::Removed) => (VIRTIO_SCSI_T_TRANSPORT_RESET, VIRTIO_SCSI_EVT_RESET_REMOVED),
            Some(What::Resized) => {
                let Code(code, qualifier) = Code::CAPACITY_CHANGED;
                (VIRTIO_SCSI_T_PARAM_CHANGE, u32::from(code) | u32::from(qualifier) << 8)
            }
        };
        let mut bytes = [0; EVENT];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..12].copy_from_slice(&event.map_or([0; 8], |event| event.address.to_bytes()));
        bytes[12..].copy_from_slice(&reason.to_le_bytes());
        bytes
    }
}

/// Events that are not reported yet.
#[derive(Debug, Default)]
pub(super) struct Events {
    pending: Mutex<Pending>,
    /// How many there are, to be read without the lock.
    count: AtomicU32,
}

#[derive(Debug, Default)]
struct Pending {
    events: VecDeque<Event>,
    missed: bool,
}

impl Events {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an event, unless the last one that is queued is the same.
    pub(super) fn raise(&self, event: Event) {
        let mut pending = self.pending();
        if pending.events.len() == PENDING {
            pending.missed = true;
        } else if pending.events.back() != Some(&event) {
            pending.events.push_back(event);
        }
        self.count(&pending);
    }

    /// Says that there were events, and not which.
    pub(super) fn miss(&self) {
        let mut pending = self.pending();
        pending.missed = true;
        self.count(&pending);
    }

    /// Forgets all.
    pub(super) fn clear(&self) {
        let mut pending = self.pending();
        *pending = Pending::default();
        self.count(&pending);
    }

    /// The next event, as the driver is to read it. That some were missed has a buffer of its own, behind those that were not:
    /// Windows' driver knows no event with that bit, and leaves out what it says besides (`vioscsi/vioscsi.c` of virtio-win).
    fn take(&self) -> [u8; EVENT] {
        let mut pending = self.pending();
        let event = pending.events.pop_front();
        if event.is_none() {
            pending.missed = false;
        }
        self.count(&pending);
        Event::to_bytes(event)
    }

    /// Drops an event because the driver's buffer was too small for it.
    fn lose(&self) {
        let mut pending = self.pending();
        pending.events.pop_front();
        pending.missed = true;
        self.count(&pending);
    }

    fn count(&self, pending: &Pending) {
        // To have missed some is one to report.
        let count = pending.events.len() + usize::from(pending.missed);
        self.count.store(count as u32, Ordering::Release);
    }

    /// How many events there are.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }
}

/// The event queue. The driver's buffers stay in the ring until there is an event: buffers that were popped and not used
/// would be lost when the queue stops.
pub(super) struct EventQueue(pub(super) Arc<super::Scsi>);

impl EventModel for EventQueue {
    fn has_event(&self) -> bool {
        self.0.events.len() > 0
    }

    fn begin(&mut self, memory: &GuestMemory, chain: &Chain) -> Completed {
        let events = &self.0.events;
        if (chain.writable_len() as usize) < EVENT {
            events.lose();
            return Completed::other(chain.head(), 0, Status::IoError);
        }
        let written = memory.scatter(chain.writable(), &events.take()) as u32;
        Completed::other(chain.head(), written, Status::Ok)
    }
}
