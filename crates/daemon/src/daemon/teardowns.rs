//! Objects that are being torn down: each drains on a thread of its own, so that nobody else waits for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle, ThreadId};

use egret_confine::{Bounds, ThreadKind};
use egret_disk::Active;
use egret_event_loop::EventNotifier;
use egret_virtio::scsi::LunAddress;
use egret_vocabulary::schema::Export;

use super::Daemon;

/// Something that was torn down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TornDown {
    /// An export: its name, address, disks and threads are free.
    Export {
        /// Its name.
        id: String,
    },
    /// A logical unit: its disk is free, as its address has been before.
    Lun {
        /// Its export's name.
        export: String,
        /// Where it was.
        at: LunAddress,
        /// Its disk.
        node_name: String,
    },
}

/// A thread that is there to wait for something, which it is told afterwards: what is waited for may not be let go of where
/// there is no thread.
pub(super) struct Waiter {
    thread: JoinHandle<()>,
    call: Sender<Box<dyn FnOnce() + Send>>,
}

impl Waiter {
    /// One of this name.
    pub(super) fn new(name: &str) -> io::Result<Self> {
        let (call, take) = channel::<Box<dyn FnOnce() + Send>>();
        let bounds = Bounds::of_this_thread();
        let thread = move || {
            bounds.narrow(ThreadKind::Control);
            if let Ok(call) = take.recv() {
                call();
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(thread)?;
        Ok(Self { thread, call })
    }

    /// Has it wait, and end.
    pub(super) fn run(self, call: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
        let _ = self.call.send(Box::new(call));
        self.thread
    }
}

/// What is being torn down, and what has been.
pub(super) struct Teardowns {
    going: Vec<(TornDown, JoinHandle<()>)>,
    /// What is gone and was not yet taken.
    gone: Vec<TornDown>,
    sender: Sender<Ended>,
    receiver: Receiver<Ended>,
    bell: EventNotifier,
}

/// A thread that ends, and disks of what it has waited for that stay active.
type Ended = (ThreadId, Vec<Active>);

impl Teardowns {
    pub(super) fn new() -> io::Result<Self> {
        let (sender, receiver) = channel();
        Ok(Self { going: Vec::new(), gone: Vec::new(), sender, receiver, bell: EventNotifier::new()? })
    }

    /// Runs `leave` on a thread that is there for it; `what` has gone when it returns, but for disks that are to stay active.
    pub(super) fn add(&mut self, on: Waiter, what: TornDown, leave: impl FnOnce() -> Vec<Active> + Send + 'static) {
        let (sender, bell) = (self.sender.clone(), self.bell.clone());
        let thread = on.run(move || {
            let stay = leave();
            let _ = sender.send((thread::current().id(), stay));
            bell.set();
        });
        self.going.push((what, thread));
    }

    /// `what` has gone already.
    pub(super) fn add_gone(&mut self, what: TornDown) {
        self.gone.push(what);
    }

    /// The export that a disk was a logical unit of, if it is on its way out.
    pub(super) fn export_of(&self, node: &str) -> Option<&String> {
        self.going.iter().find_map(|(what, _)| match what {
            TornDown::Lun { export, node_name, .. } if node_name == node => Some(export),
            _ => None,
        })
    }

    pub(super) fn bell(&self) -> EventNotifier {
        self.bell.clone()
    }

    /// What is gone, and the disks of it that stay active.
    pub(super) fn take(&mut self) -> (Vec<TornDown>, Vec<Active>) {
        self.bell.clear();
        let mut stay = Vec::new();
        while let Ok((ended, stays)) = self.receiver.try_recv() {
            stay.extend(stays);
            // By its thread: a unit may have been added and taken away once more meanwhile.
            if let Some(at) = self.going.iter().position(|(_, thread)| thread.thread().id() == ended) {
                let (what, thread) = self.going.swap_remove(at);
                let _ = thread.join();
                self.gone.push(what);
            }
        }
        (std::mem::take(&mut self.gone), stay)
    }

    /// What is going, and the thread that waits for it, to be waited for by the caller from here on.
    pub(super) fn going(&mut self) -> Vec<(TornDown, JoinHandle<()>)> {
        std::mem::take(&mut self.going)
    }
}

impl Daemon {
    /// Readable when [`take_torn_down`](Self::take_torn_down) has news.
    pub fn teardowns_bell(&self) -> BorrowedFd<'_> {
        self.teardowns.bell.as_fd()
    }

    /// What was torn down since this was last called; names and disks are free from here on.
    pub fn take_torn_down(&mut self) -> Vec<TornDown> {
        let (gone, stay) = self.teardowns.take();
        self.unwritten.extend(stay.into_iter().map(|active| (active.disk().node_name().to_owned(), active)));
        self.leave_to_exports();
        if !gone.is_empty() {
            let went = |id: &str| gone.iter().any(|what| matches!(what, TornDown::Export { id: gone } if gone == id));
            let exports = self.config.exports.extract_if(.., |export| went(&export.id)).collect::<Vec<_>>();
            let of_exports = exports.iter().flat_map(Export::node_names).map(|(_, name)| name.to_owned());
            let of_units = gone.iter().filter_map(|what| match what {
                TornDown::Lun { node_name, .. } => Some(node_name.clone()),
                TornDown::Export { .. } => None,
            });
            self.reconcile_disks_or_log(&of_exports.chain(of_units).collect::<Vec<_>>());
        }
        gone
    }
}
