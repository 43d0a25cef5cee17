//! The thread that changes the daemon: one change at a time, from its first to its last step.
//!
//! A change may take as long as a disk does that it opens, closes or drains. The daemon goes to this thread with it and
//! comes back when it is done, so that nobody can look at something half changed; what monitors ask meanwhile is
//! answered from the [`View`] of how it was before.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use egret_confine::{Bounds, ThreadKind};
use egret_event_loop::EventNotifier;
use serde_json::Value;

use super::Descriptors;
use super::session::Order;
use crate::daemon::{Daemon, TornDown, View};
use crate::process::Patience;

/// A daemon that comes back.
pub(super) struct Done {
    pub(super) daemon: Daemon,
    /// How it is now.
    pub(super) view: View,
    /// What to answer to whoever gave the order, if somebody did, and what is left of the descriptors that it sent.
    pub(super) answer: Option<(Value, Descriptors)>,
    /// What has gone.
    pub(super) torn_down: Vec<TornDown>,
}

/// What is to be done.
pub(super) enum Change {
    /// What a client asks for.
    Order(Order),
    /// To close what exports leave behind that have gone.
    Teardowns,
    /// To close what clients leave behind, who have all gone.
    Desertion,
}

/// The thread, as others see it.
pub(super) struct Changes {
    orders: Option<Sender<(Daemon, Change)>>,
    done: Receiver<Done>,
    bell: EventNotifier,
    thread: Option<JoinHandle<()>>,
}

/// Is set at the thread's end too, for a thread that has panicked is waited for in vain.
struct SetAtTheEnd(EventNotifier);

impl Drop for SetAtTheEnd {
    fn drop(&mut self) {
        self.0.set();
    }
}

impl Changes {
    pub(super) fn start() -> io::Result<Self> {
        let bell = EventNotifier::new()?;
        let (orders, their_orders) = channel();
        let (their_done, done) = channel();
        let their_bell = SetAtTheEnd(bell.clone());
        let bounds = Bounds::of_this_thread();
        let work = move || {
            bounds.narrow(ThreadKind::Control);
            for (daemon, what) in their_orders {
                if their_done.send(change(daemon, what)).is_err() {
                    return;
                }
                their_bell.0.set();
            }
        };
        let thread = std::thread::Builder::new().name("egret-changes".to_owned()).spawn(work)?;
        Ok(Self { orders: Some(orders), done, bell, thread: Some(thread) })
    }

    /// Begins a change.
    ///
    /// # Panics
    /// When a change before has panicked.
    pub(super) fn begin(&self, daemon: Daemon, what: Change) {
        let orders = self.orders.as_ref().expect("it takes orders until it is dropped");
        assert!(orders.send((daemon, what)).is_ok(), "a change has panicked, and the daemon is gone with it");
    }

    /// What was begun, if it is done.
    ///
    /// # Panics
    /// When it has panicked.
    pub(super) fn take(&self) -> Option<Done> {
        self.bell.clear();
        match self.done.try_recv() {
            Ok(done) => Some(done),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => panic!("a change has panicked, and the daemon is gone with it"),
        }
    }

    /// Waits for what was begun; `None` if it takes longer.
    pub(super) fn wait(&self, at_most: Duration) -> Option<Done> {
        self.done.recv_timeout(at_most).ok()
    }

    /// Likewise, within `patience`.
    pub(super) fn wait_within(&self, patience: &Patience<'_>) -> Option<Done> {
        while patience.wait(self.as_fd()) {
            if let Some(done) = self.take() {
                return Some(done);
            }
        }
        None
    }
}

/// Readable when something is done.
impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn change(mut daemon: Daemon, what: Change) -> Done {
    let answer = match what {
        Change::Order(order) => Some(order.run(&mut daemon)),
        Change::Teardowns => None,
        Change::Desertion => {
            daemon.remove_forsaken_fd_sets();
            None
        }
    };
    let torn_down = daemon.take_torn_down();
    Done { view: daemon.view(), daemon, answer, torn_down }
}
