//! The daemon's end: everything is told at once, each part ends on a thread of its own, and what does not is named.
//!
//! ```text
//! exports drain, side by side ──▶ a disk that none of them uses any more is made stable, and closed
//!                             │     └──▶ a session whose disks are stable is kept, if it is to be
//!                             ──▶ when all have drained, the I/O threads end
//! ```
//!
//! A disk that hangs holds up its own exports. It does not keep what was written to others from being made stable, nor,
//! where there is a limit, the process from ending.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use egret_disk::Active;
use egret_event_loop::EventNotifier;
use egret_export::QueueCounters;
use egret_vocabulary::schema;

use super::teardowns::Waiter;
use super::{Daemon, TornDown};
use crate::process::{Patience, keep_session};

/// What is to end.
#[derive(Clone, PartialEq, Eq)]
enum Part {
    Client(TornDown),
    Disk(String),
    IoThread(String),
}

/// What is ending, and what has.
struct Ending {
    /// What each export has disks of: asked for with each part that ends, of which there may be thousands.
    nodes: BTreeMap<String, Vec<String>>,
    going: Vec<Part>,
    sender: Sender<(Part, io::Result<Vec<Active>>)>,
    receiver: Receiver<(Part, io::Result<Vec<Active>>)>,
    /// What could not be written out, which nobody else is to have before that was tried once more.
    unwritten: Vec<Active>,
    /// Disks of which all that was written is on stable storage. To close them may take longer.
    stable: Arc<Mutex<BTreeSet<String>>>,
    /// Sessions that are kept when all of their disks are among those.
    leaving: Vec<(String, Vec<OwnedFd>)>,
    bell: EventNotifier,
    well: bool,
}

impl Ending {
    fn new(bell: EventNotifier, exports: &[schema::Export]) -> Self {
        let nodes_of = |export: &schema::Export| export.node_names().map(|(_, name)| name.to_owned()).collect();
        let nodes = exports.iter().map(|export| (export.id.clone(), nodes_of(export))).collect();
        let (sender, receiver) = channel();
        let (going, unwritten, stable, leaving) = Default::default();
        Self { nodes, going, sender, receiver, unwritten, stable, leaving, bell, well: true }
    }

    fn nodes_of(&self, export: &str) -> &[String] {
        self.nodes.get(export).map_or(&[], Vec::as_slice)
    }

    /// The disks that something which has not ended may still use.
    fn used(&self) -> BTreeSet<&str> {
        let of_part = |part| match part {
            &Part::Client(TornDown::Export { ref id }) => self.nodes_of(id),
            Part::Client(TornDown::Lun { node_name, .. }) => std::slice::from_ref(node_name),
            Part::Disk(_) | Part::IoThread(_) => &[],
        };
        self.going.iter().flat_map(of_part).map(String::as_str).collect()
    }

    /// `part` has ended when `end` returns, but for disks that are to stay active.
    fn begin(&mut self, part: Part, end: impl FnOnce() -> io::Result<Vec<Active>> + Send + 'static) {
        let (sender, bell, what) = (self.sender.clone(), self.bell.clone(), part.clone());
        match Waiter::new("egret-ending") {
            Ok(waiter) => {
                waiter.run(move || {
                    let _ = sender.send((what, end()));
                    bell.set();
                });
                self.going.push(part);
            }
            Err(e) => {
                // To drop it is to wait, and nobody limits how long that takes.
                std::mem::forget(end);
                self.fail(format_args!("there is no thread to end something on: {e}"));
            }
        }
    }

    /// Waits until something more may have ended; false when patience is over.
    fn wait(&mut self, patience: &Patience<'_>) -> bool {
        let Ok((part, ended)) = self.receiver.try_recv() else {
            let is_set = patience.wait(self.bell.as_fd());
            self.bell.clear();
            return is_set;
        };
        // One of them: a unit may have been added and taken away once more meanwhile.
        if let Some(at) = self.going.iter().position(|going| *going == part) {
            self.going.swap_remove(at);
        }
        match (part, ended) {
            (_, Ok(stay)) => self.unwritten.extend(stay),
            (Part::Disk(name), Err(e)) => self.fail(format_args!("blockdev '{name}': the last flush failed: {e}")),
            (_, Err(_)) => {}
        }
        true
    }

    fn fail(&mut self, line: impl Display) {
        tracing::error!("{line}");
        self.well = false;
    }

    fn has_clients(&self) -> bool {
        self.going.iter().any(|part| matches!(part, Part::Client(_)))
    }

    /// Has those sessions kept whose disks are stable: of what is lost a guest hears from this process alone.
    fn keep_sessions(&mut self, ended: &Receiver<(String, Vec<OwnedFd>)>) {
        self.leaving.extend(ended.try_iter());
        let stable = self.stable.lock().unwrap_or_else(PoisonError::into_inner);
        let is_stable =
            |(id, _): &mut (String, _)| self.nodes.get(id).into_iter().flatten().all(|name| stable.contains(name));
        for (id, session) in self.leaving.extract_if(.., is_stable) {
            if let Err(e) = keep_session(&session) {
                tracing::warn!("export '{id}': its client's session cannot be kept: {e}");
            }
            // As below.
            std::mem::forget(session);
        }
    }

    /// What a part has not done.
    fn unfinished(&self, part: &Part, in_flight: impl Fn(&str) -> u64, patience: &Patience<'_>) -> String {
        match part {
            Part::Client(TornDown::Export { id }) => {
                let disks = self.nodes_of(id).iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
                match in_flight(id) {
                    0 => format!("export '{id}': its client's session has not ended {patience}"),
                    1 => format!("export '{id}': a request has not ended {patience}; blockdev {disks}"),
                    count => format!("export '{id}': {count} requests have not ended {patience}; blockdev {disks}"),
                }
            }
            Part::Client(TornDown::Lun { export, at, node_name }) => {
                format!("export '{export}': requests for {at} have not ended {patience}; blockdev '{node_name}'")
            }
            Part::Disk(name) => format!(
                "blockdev '{name}': fdatasync has not ended {patience}; what was written may not be on stable storage"
            ),
            Part::IoThread(name) => format!("iothread '{name}': its thread has not ended {patience}"),
        }
    }
}

impl Daemon {
    /// Ends everything, within `patience`: exports drain and go, then threads; what was written is made stable. False if
    /// something has not ended, or not well: the log has a line for each, which names it and says why as far as that is
    /// known. It goes on in threads that nobody waits for any more, so that the process had better end.
    #[must_use]
    pub fn end(mut self, patience: &Patience<'_>) -> bool {
        self.wind_down(patience)
    }

    pub(super) fn wind_down(&mut self, patience: &Patience<'_>) -> bool {
        let mut ending = Ending::new(self.teardowns.bell(), &self.config.exports);
        self.registry.stop_exports();
        let counters = self.exports.iter().map(|(id, export)| (id.clone(), export.queues().to_vec()));
        let counters: Vec<(String, Vec<Arc<QueueCounters>>)> = counters.collect();
        self.units.clear();
        let (keep, kept) = channel();
        for (id, export) in std::mem::take(&mut self.exports) {
            let (of, keep) = (id.clone(), keep.clone());
            let end = move || {
                let (active, session) = export.end_and_keep();
                let _ = session.map(|session| keep.send((of, session)));
                Ok(active)
            };
            ending.begin(Part::Client(TornDown::Export { id }), end);
        }
        for (what, thread) in self.teardowns.going() {
            let end = move || {
                let _ = thread.join();
                Ok(Vec::new())
            };
            ending.begin(Part::Client(what), end);
        }
        ending.unwritten.extend(std::mem::take(&mut self.unwritten).into_values());
        loop {
            // Those of what was torn down before, which nobody takes any more.
            ending.unwritten.extend(self.teardowns.take().1);
            let used = ending.used();
            let free: Vec<_> = self.disks.keys().filter(|name| !used.contains(name.as_str())).cloned().collect();
            for name in free {
                if let Some(disk) = self.disks.remove(&name) {
                    let is_of = |active: &mut Active| Arc::ptr_eq(active.disk(), &disk);
                    let unwritten: Vec<_> = ending.unwritten.extract_if(.., is_of).collect();
                    let held = self.held.remove(&name);
                    let (of, stable, bell) = (name.clone(), Arc::clone(&ending.stable), ending.bell.clone());
                    // It is left to others and closed there, too, which may take as long.
                    let end = move || {
                        // Where flushes are ignored that is written out, too.
                        let flushed = if unwritten.is_empty() { disk.flush() } else { disk.write_out() };
                        if flushed.is_ok() {
                            stable.lock().unwrap_or_else(PoisonError::into_inner).insert(of);
                            bell.set();
                        }
                        drop((held, unwritten));
                        flushed.map(|()| Vec::new())
                    };
                    ending.begin(Part::Disk(name), end);
                }
            }
            if !ending.has_clients() {
                for (name, io_thread) in std::mem::take(&mut self.io_threads) {
                    let end = move || {
                        drop(io_thread);
                        Ok(Vec::new())
                    };
                    ending.begin(Part::IoThread(name), end);
                }
            }
            ending.keep_sessions(&kept);
            if ending.going.is_empty() || !ending.wait(patience) {
                break;
            }
        }
        ending.keep_sessions(&kept);
        for (id, _) in &ending.leaving {
            tracing::warn!("export '{id}': its client's session is not kept: not all that was written is stable");
        }
        // How long it takes to close what a client has handed over is for the client to say, unless the process ends.
        std::mem::forget((kept, std::mem::take(&mut ending.leaving)));
        // To drop them is to wait for them.
        std::mem::forget(std::mem::take(&mut self.io_threads));
        std::mem::forget(std::mem::take(&mut self.disks));
        std::mem::forget(std::mem::take(&mut ending.unwritten));
        let in_flight = |id: &str| {
            let queues = counters.iter().filter(|(export, _)| export == id).flat_map(|(_, queues)| queues);
            queues.map(|queue| queue.in_flight.get()).sum()
        };
        for part in std::mem::take(&mut ending.going) {
            ending.fail(ending.unfinished(&part, in_flight, patience));
        }
        ending.well
    }
}
