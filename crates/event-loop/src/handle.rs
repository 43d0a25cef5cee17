//! A loop on a thread of its own, as other threads see it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use egret_confine::{Bounds, ThreadKind};
use egret_polling::{BlockCost, Nanos, Policy};
use rustix::thread::gettid;

use crate::calibrate::{Strain, calibrate};
use crate::mailbox::Mailbox;
use crate::ring::SharedRing;
use crate::source::Command;
use crate::{EventLoop, LoopCounters, LoopOptions, Source, SourceId};

/// The loop's thread has ended.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the I/O thread has ended")]
pub struct LoopGone;

/// Speaks to a loop from any thread, through its mailbox.
pub struct LoopHandle<S: Source> {
    mailbox: Arc<Mailbox<Command<S>>>,
    counters: Arc<LoopCounters>,
}

/// Two handles are equal when they speak to the same loop.
impl<S: Source> PartialEq for LoopHandle<S> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mailbox, &other.mailbox)
    }
}

impl<S: Source> Clone for LoopHandle<S> {
    fn clone(&self) -> Self {
        Self { mailbox: Arc::clone(&self.mailbox), counters: Arc::clone(&self.counters) }
    }
}

/// A source on its way out of a loop.
pub struct Leaving<S>(mpsc::Receiver<S>);

impl<S> Leaving<S> {
    /// One that has left already.
    pub fn left(source: S) -> Self {
        let (to, from) = mpsc::channel();
        let _ = to.send(source);
        Self(from)
    }

    /// None at all.
    pub fn none() -> Self {
        Self(mpsc::channel().1)
    }

    /// Waits until the source is drained and returns it; `None` if there was no such source.
    pub fn wait(self) -> Option<S> {
        self.0.recv().ok()
    }
}

impl<S: Source> LoopHandle<S> {
    /// A handle for `target`.
    pub fn new(target: &EventLoop<S>) -> Self {
        Self { mailbox: Arc::clone(&target.mailbox), counters: Arc::clone(target.counters()) }
    }

    /// What the loop counts; to read it is not to ask the loop.
    pub fn counters(&self) -> &Arc<LoopCounters> {
        &self.counters
    }

    /// Runs `command` on the loop, between two dispatches, without waiting for it.
    pub fn send(&self, command: impl FnOnce(&mut EventLoop<S>) + Send + 'static) {
        self.mailbox.send(Box::new(command));
    }

    /// Runs `command` on the loop and returns what it returns.
    ///
    /// # Errors
    ///
    /// [`LoopGone`].
    pub fn call<R: Send + 'static>(
        &self,
        command: impl FnOnce(&mut EventLoop<S>) -> R + Send + 'static,
    ) -> Result<R, LoopGone> {
        let (answer, answered) = mpsc::channel();
        self.send(move |target| {
            let _ = answer.send(command(target));
        });
        answered.recv().map_err(|_| LoopGone)
    }

    /// Whether the loop comes to run commands within `patience`: one that is stuck does not, and who [calls](Self::call) it
    /// waits for as long as that lasts.
    pub fn answers_within(&self, patience: Duration) -> bool {
        let (answer, answered) = mpsc::channel();
        self.send(move |_| {
            let _ = answer.send(());
        });
        answered.recv_timeout(patience).is_ok()
    }

    /// Makes sure that the loop's policies are told what blocking costs. A loop that does not know yet learns what it
    /// costs the calling thread, so that no I/O waits for the measuring.
    ///
    /// # Errors
    ///
    /// No thread or descriptor to measure with, or [`LoopGone`].
    pub fn calibrate(&self) -> io::Result<BlockCost> {
        if let Some(cost) = self.call(|target| target.block_cost()).map_err(io::Error::other)? {
            return Ok(cost);
        }
        let calibration = calibrate()?;
        // The loop's thread opens no files.
        let strain = Strain::of(self.call(|_| gettid()).map_err(io::Error::other)?)?;
        self.call(move |target| target.set_calibration(calibration, strain)).map_err(io::Error::other)?;
        Ok(calibration.cost)
    }

    /// Has `policy` decide about waits from here on, once it knows what blocking costs, should it weigh that.
    ///
    /// # Errors
    ///
    /// As [`calibrate`](Self::calibrate).
    pub fn set_policy(&self, policy: Box<dyn Policy>, window_max: Nanos) -> io::Result<()> {
        if policy.weighs_block_cost() {
            self.calibrate()?;
        }
        self.send(move |target| target.set_policy(policy, window_max));
        Ok(())
    }

    /// Gives a source to the loop.
    ///
    /// # Errors
    ///
    /// As [`EventLoop::attach`], the source with it, or [`LoopGone`] as an I/O error. So no loop drops a source, which may
    /// have what takes long to close.
    pub fn attach(&self, source: S) -> Result<SourceId, (Option<Box<S>>, io::Error)> {
        // By pointer: a command is moved from frame to frame, and threads that attach are many, with a stack each.
        let source = Box::new(source);
        let attached = self.call(|target| target.attach(*source).map_err(|(source, e)| (Some(Box::new(source)), e)));
        attached.unwrap_or_else(|e| Err((None, io::Error::other(e))))
    }

    /// Takes a source back, as soon as it is drained.
    pub fn detach(&self, id: SourceId) -> Leaving<S> {
        let (to, source) = mpsc::channel();
        self.send(move |target| {
            target.detach(id, move |source| {
                let _ = to.send(source);
            });
        });
        Leaving(source)
    }
}

/// Starts a thread that makes a loop, and runs it until it is stopped. A loop that ends otherwise serves nobody any more,
/// and nobody waits for it: `on_failure` is told why, on its thread.
///
/// # Errors
///
/// No thread, or as [`EventLoop::new`].
pub fn spawn<S: Source>(
    options: LoopOptions,
    backend: impl FnOnce(Option<SharedRing>) -> S::Backend + Send + 'static,
    on_failure: impl FnOnce(io::Error) + Send + 'static,
) -> io::Result<(LoopHandle<S>, JoinHandle<()>)> {
    let (started, start) = mpsc::channel();
    let bounds = Bounds::of_this_thread();
    let thread = std::thread::Builder::new().name(options.name.clone()).spawn(move || {
        // A deadline means that moment, not one up to 50 us later.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let wants_calibration = options.policy.weighs_block_cost();
        let made = EventLoop::new(options, backend).and_then(|mut new| {
            if wants_calibration {
                new.set_calibration(calibrate()?, Strain::of(gettid())?);
            }
            Ok(new)
        });
        let mut new = match made {
            Ok(new) => new,
            Err(e) => {
                let _ = started.send(Err(e));
                return;
            }
        };
        // Making a loop takes system calls that running it does not: the thread gives them up here.
        bounds.narrow(ThreadKind::Io);
        let _ = started.send(Ok(LoopHandle::new(&new)));
        if let Err(e) = new.run() {
            on_failure(e);
        }
    })?;
    let handle = start.recv().unwrap_or_else(|_| Err(io::Error::other("the I/O thread ended at its start")))?;
    Ok((handle, thread))
}
