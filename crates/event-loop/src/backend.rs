//! What the sources of one loop share: the engines that take their requests and give back completions.

use std::os::fd::RawFd;

use egret_polling::Nanos;

/// The part of a loop that work is pushed into and completions come out of.
///
/// Sources push to it while they are dispatched and nothing happens; when every ready source has been dispatched the
/// loop calls [`submit`](Self::submit) once, because only the loop knows that the batch is complete, and once more where
/// that has ended some of it. All of it runs on the loop's thread. Apart from [`descriptors`](Self::descriptors) every method is called once a turn or more, so
/// none may allocate, lock, log, or make a system call beyond what its line says.
pub trait Backend {
    /// What comes out.
    type Completion;

    /// Whether [`reap`](Self::reap) may find something: a few loads, no system call.
    fn has_completions(&mut self) -> bool;

    /// Gives every finished request to `done`; what is not finished may be for the next [`submit`](Self::submit), which
    /// always follows. `now` is the clock as read for this phase of the turn.
    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(Self::Completion));

    /// Hands everything pushed since the last call to the kernel: one system call per engine that has work, or none
    /// where the loop's own wait does it (an engine on the loop's ring).
    fn submit(&mut self, now: Nanos);

    /// Requests pushed and not yet reaped.
    fn in_flight(&self) -> u32;

    /// When the next completion appears by itself, with no descriptor to announce it, or there is more to
    /// [`submit`](Self::submit) without a push; `None` if neither will be.
    fn deadline(&self) -> Option<Nanos>;

    /// Called before the loop blocks: from here on completions are announced on [`descriptors`](Self::descriptors).
    /// False if there are completions already, and the loop must not block.
    fn arm(&mut self) -> bool;

    /// Called when the loop is awake again: completions need not be announced.
    fn suppress(&mut self);

    /// The descriptors that announce completions. The loop watches them edge by edge and never reads from them; it
    /// asks again after every mailbox command, since a command may attach a disk and bring in an engine, and where
    /// [`takes_leave`](Self::takes_leave) says so.
    fn descriptors(&self) -> Vec<RawFd>;

    /// Whether an engine has left since the last call, asked after each [`reap`](Self::reap): its descriptor stays open until
    /// the next [`submit`](Self::submit), so that the loop watches none that another may have by then.
    fn takes_leave(&mut self) -> bool;

    /// One of the [`descriptors`](Self::descriptors) has announced something.
    fn announced(&mut self, _fd: RawFd) {}
}
