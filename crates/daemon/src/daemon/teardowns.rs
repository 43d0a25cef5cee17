//! Objects that are being torn down: each drains on a thread of its own, so that nobody else waits for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use egret_confine::{Bounds, ThreadKind};
use egret_disk::Active;
use egret_event_loop::EventNotifier;
use egret_virtio::scsi::LunAddress;

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

/// What is being torn down, and what has been.
pub(super) struct Teardowns {
    going: Vec<(TornDown, JoinHandle<()>)>,
    /// What is gone and was not yet taken.
    gone: Vec<TornDown>,
    sender: Sender<(TornDown, Option<Active>)>,
    receiver: Receiver<(TornDown, Option<Active>)>,
    bell: EventNotifier,
}

impl Teardowns {
    pub(super) fn new() -> io::Result<Self> {
        let (sender, receiver) = channel();
        Ok(Self { going: Vec::new(), gone: Vec::new(), sender, receiver, bell: EventNotifier::new()? })
    }

    /// Runs `leave` on a thread of its own; `what` has gone when it returns, but for a disk that is to stay active.
    pub(super) fn add(&mut self, what: TornDown, leave: impl FnOnce() -> Option<Active> + Send + 'static) {
        let (sender, bell, name) = (self.sender.clone(), self.bell.clone(), what.clone());
        let bounds = Bounds::of_this_thread();
        let thread = move || {
            bounds.narrow(ThreadKind::Control);
            let stays = leave();
            let _ = sender.send((name, stays));
            bell.set();
        };
        match std::thread::Builder::new().name("egret-teardown".to_owned()).spawn(thread) {
            Ok(thread) => self.going.push((what, thread)),
            // What `leave` holds was dropped with it: an export has gone then, and nobody waits for a disk.
            Err(e) => {
                tracing::warn!("no thread to wait for the end of {what:?}: {e}");
                self.gone.push(what);
            }
        }
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
    fn take(&mut self) -> (Vec<TornDown>, Vec<Active>) {
        self.bell.clear();
        let mut stay = Vec::new();
        while let Ok((what, stays)) = self.receiver.try_recv() {
            stay.extend(stays);
            if let Some(at) = self.going.iter().position(|(going, _)| *going == what) {
                let _ = self.going.swap_remove(at).1.join();
            }
            self.gone.push(what);
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
            self.config.exports.retain(|export| !went(&export.id));
            self.reconcile_disks_or_log();
        }
        gone
    }
}
