//! What is on its way out: each drains on a thread of its own, so that nobody else waits for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use egret_confine::{Bounds, ThreadKind};
use egret_event_loop::EventNotifier;
use egret_virtio::scsi::LunAddress;

use super::Daemon;

/// Something that has gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Departed {
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

/// What is going, and what has gone.
pub(super) struct Departures {
    going: Vec<(Departed, JoinHandle<()>)>,
    /// What is gone and not yet told of.
    gone: Vec<Departed>,
    tell: Sender<Departed>,
    told: Receiver<Departed>,
    bell: EventNotifier,
}

impl Departures {
    pub(super) fn new() -> io::Result<Self> {
        let (tell, told) = channel();
        Ok(Self { going: Vec::new(), gone: Vec::new(), tell, told, bell: EventNotifier::new()? })
    }

    /// `what` has gone when `leave` returns.
    pub(super) fn add(&mut self, what: Departed, leave: impl FnOnce() + Send + 'static) {
        let (tell, bell, name) = (self.tell.clone(), self.bell.clone(), what.clone());
        let bounds = Bounds::of_this_thread();
        let thread = move || {
            bounds.narrow(ThreadKind::Control);
            leave();
            let _ = tell.send(name);
            bell.set();
        };
        match std::thread::Builder::new().name("egret-departure".to_owned()).spawn(thread) {
            Ok(thread) => self.going.push((what, thread)),
            // What `leave` holds was dropped with it: an export has gone then, and nobody waits for a disk.
            Err(e) => {
                tracing::warn!("no thread to wait for the end of {what:?}: {e}");
                self.gone.push(what);
            }
        }
    }

    /// `what` has gone already.
    pub(super) fn add_gone(&mut self, what: Departed) {
        self.gone.push(what);
    }

    /// The export that a disk was a logical unit of, if it is on its way out.
    pub(super) fn export_of(&self, node: &str) -> Option<&String> {
        self.going.iter().find_map(|(what, _)| match what {
            Departed::Lun { export, node_name, .. } if node_name == node => Some(export),
            _ => None,
        })
    }

    pub(super) fn bell(&self) -> EventNotifier {
        self.bell.clone()
    }

    fn take(&mut self) -> Vec<Departed> {
        self.bell.clear();
        while let Ok(what) = self.told.try_recv() {
            if let Some(at) = self.going.iter().position(|(going, _)| *going == what) {
                let _ = self.going.swap_remove(at).1.join();
            }
            self.gone.push(what);
        }
        std::mem::take(&mut self.gone)
    }

    /// What is going, and the thread that waits for it, to be waited for by the caller from here on.
    pub(super) fn going(&mut self) -> Vec<(Departed, JoinHandle<()>)> {
        std::mem::take(&mut self.going)
    }
}

impl Daemon {
    /// Readable when [`departed`](Self::departed) has news.
    pub fn departures(&self) -> BorrowedFd<'_> {
        self.departures.bell.as_fd()
    }

    /// What has gone since this was last asked, and is free from here on.
    pub fn departed(&mut self) -> Vec<Departed> {
        let gone = self.departures.take();
        if !gone.is_empty() {
            let went = |id: &str| gone.iter().any(|what| matches!(what, Departed::Export { id: gone } if gone == id));
            self.config.exports.retain(|export| !went(&export.id));
            self.settle_disks_again();
        }
        gone
    }
}
