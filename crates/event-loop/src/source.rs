//! What a loop watches: the contract of a source, and what a source may do while it is dispatched.

use std::io;
use std::os::fd::RawFd;

use egret_polling::Nanos;

use crate::{Backend, ClockReads, EventLoop, Signals};

/// Names a source while it is attached to a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl SourceId {
    /// A small dense number, unique among the loop's sources of the moment; what [`Source::route`] returns.
    pub const fn index(self) -> u32 {
        self.index
    }
}

/// Something a loop watches and runs: in the daemon, a guest's queue.
///
/// The loop owns it by value from attach to detach and calls it on its own thread only. While a source is *active*
/// the loop asks [`poll`](Self::poll) every turn, and its events are *suppressed*; before the loop blocks it *arms*
/// the source, and from then on an event must show on [`descriptor`](Self::descriptor). Between a dispatch and the
/// end of the turn nothing is told to the outside: [`notify`](Self::notify) does that, once a turn.
///
/// None of the methods that run every turn may block, allocate, lock or log.
pub trait Source: Send + Sized + 'static {
    /// The engines that this kind of source pushes to.
    type Backend: Backend;

    /// The index of the source that a completion belongs to.
    fn route(completion: &<Self::Backend as Backend>::Completion) -> u32;

    /// The loop takes the source in, under this name.
    ///
    /// # Errors
    ///
    /// What the backend cannot do; the source is handed back unattached.
    fn attached(&mut self, id: SourceId, backend: &mut Self::Backend) -> io::Result<()>;

    /// The loop lets go of the source, which is drained.
    fn detached(&mut self, backend: &mut Self::Backend);

    /// Whether there is work: a few loads, no system call.
    fn poll(&mut self) -> bool;

    /// Whether [`poll`](Self::poll) sees all the work there is. Of the rest the monitor tells alone, and whatever it tells of such
    /// a source is an event to the policy, which otherwise would not learn of work that a dispatch finds, and does, at once.
    fn sees_all(&self) -> bool;

    /// Does the work there is. Also called when the source's descriptor or timer fired with no work behind it.
    fn dispatch(&mut self, backend: &mut Self::Backend, turn: &mut Turn);

    /// One of its requests has ended; `now` is the clock as read for this phase of the turn, or for it alone
    /// ([`ClockReads`]). Returns whether it is to be
    /// dispatched: there is more to push, or to try again.
    fn complete(&mut self, completion: <Self::Backend as Backend>::Completion, now: Nanos) -> bool;

    /// The end of a turn in which the source was dispatched or completed something: tell the outside, once. What is
    /// pushed to `signals` is signalled when all sources have been here.
    fn notify(&mut self, signals: &mut Signals);

    /// Events need not show on the descriptor until armed again.
    fn suppress(&mut self);

    /// From here on an event shows on the descriptor. False if work slipped in first.
    fn arm(&mut self) -> bool;

    /// Takes no more work in; what is in flight ends as usual, and nothing holds it back.
    fn stop(&mut self, backend: &mut Self::Backend);

    /// Takes work in again, after a [`stop`](Self::stop) with no detaching behind it.
    fn resume(&mut self, backend: &mut Self::Backend);

    /// Whether nothing of it is in flight.
    fn is_drained(&self) -> bool;

    /// What the monitor watches while the loop is blocked, edge by edge; the loop never reads from it. Fixed from
    /// attach to detach.
    fn descriptor(&self) -> Option<RawFd>;
}

/// Something to do on the loop's thread, with the loop at hand.
pub(crate) type Command<S> = Box<dyn FnOnce(&mut EventLoop<S>) + Send>;

/// What a source may use of its loop while it is dispatched.
pub struct Turn {
    pub(crate) now: Nanos,
    pub(crate) clock_reads: ClockReads,
    pub(crate) timer: Option<Nanos>,
}

impl Turn {
    /// The clock as read for this phase of the turn.
    pub const fn now(&self) -> Nanos {
        self.now
    }

    /// What its requests are to have for the time at which they begin: [`now`](Self::now), or readings of their own.
    pub const fn clock_reads(&self) -> ClockReads {
        self.clock_reads
    }

    /// Has the source dispatched again at `deadline`, which replaces one that was set before.
    pub const fn set_timer(&mut self, deadline: Nanos) {
        self.timer = Some(deadline);
    }
}
