//! Task management, between the control queue and the request queues, which other threads may run.
//!
//! ```text
//!   control queue                       each request queue, on its own thread
//!   Function ──── Inbox, waker ───────▶ looks for its commands, marks those that are to end, and holds the function
//!                                       until they have left and the driver has been shown that they have
//!   response ◀─── EndedFunctions, waker ──────── lets go of it: the last one who does has ended it
//! ```
//!
//! Each thread looks at its own commands only, so there are no races, and nothing is polled. A function is complete when its
//! last reference is dropped. So none can be forgotten: a queue that stops, breaks or is dropped drops its references. A
//! command that no function is about pays for this with one load when it ends.
//!
//! A queue that stops may leave commands to the record of what is in flight, or in its ring. They have not ended, and whoever
//! serves the queue next does them: so a function that is to end one of them is not done either, and is left, too. So is one that
//! comes when the queue pops no more: nobody knows what is in the ring.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use super::LunAddress;

/// Why a command is aborted, as its response says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abort {
    /// By ABORT TASK, or with the task set of its logical unit.
    Task,
    /// By a reset of its logical unit or nexus.
    Reset,
}

/// The commands that a function applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum About {
    /// The commands of a logical unit with this identifier.
    Task(LunAddress, u64),
    /// All commands of a logical unit.
    Unit(LunAddress),
    /// All commands of a target's logical units.
    Target(u8),
}

impl About {
    /// Whether the command with that tag is one of them.
    pub(super) fn names(self, address: LunAddress, tag: u64) -> bool {
        match self {
            Self::Task(of, wanted) => of == address && wanted == tag,
            Self::Unit(of) => of == address,
            Self::Target(of) => of == address.target,
        }
    }
}

/// A task management function in progress. Each queue that has still to act on it holds a reference.
#[derive(Debug)]
pub(super) struct Function {
    /// The head of its chain on the control queue.
    head: u16,
    pub(super) about: About,
    /// Why its commands are to be aborted; `None` for a query.
    pub(super) ends: Option<Abort>,
    /// Whether any of its commands was in progress.
    found: AtomicBool,
    /// Whether any of them was left to the record, or may have been left in a ring.
    left: AtomicBool,
    ended: Arc<EndedFunctions>,
}

impl Function {
    pub(super) fn new(head: u16, about: About, ends: Option<Abort>, ended: &Arc<EndedFunctions>) -> Arc<Self> {
        let [found, left] = [false; 2].map(AtomicBool::new);
        Arc::new(Self { head, about, ends, found, left, ended: Arc::clone(ended) })
    }

    /// Notes that one of its commands is in progress.
    pub(super) fn find(&self) {
        // Relaxed is enough: `Arc` orders this store before the drop of the last reference, which reads it.
        self.found.store(true, Ordering::Relaxed);
    }

    /// Notes that one of its commands is left to the record, or may be left in a ring, and has not ended.
    pub(super) fn leave(&self) {
        // As above.
        self.left.store(true, Ordering::Relaxed);
    }
}

/// What a function came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It is done; none of its commands was in progress.
    FoundNothing,
    /// It is done; some were.
    Found,
    /// It is not: some of its commands were left to the record, or may have been left in a ring. Others may have ended.
    Left { found: bool },
}

impl Drop for Function {
    fn drop(&mut self) {
        let ending = match (*self.left.get_mut(), *self.found.get_mut()) {
            // Who asks for commands is answered, whatever else is left.
            (true, true) if self.ends.is_none() => Ending::Found,
            (true, found) => Ending::Left { found },
            (false, true) => Ending::Found,
            (false, false) => Ending::FoundNothing,
        };
        self.ended.add(self.head, ending);
    }
}

/// The functions of a control queue that no queue has any more: their heads, and what they came to.
#[derive(Debug)]
pub(super) struct EndedFunctions(Mutex<(Vec<(u16, Ending)>, Waker)>);

impl Default for EndedFunctions {
    fn default() -> Self {
        Self(Mutex::new((Vec::new(), Waker::noop().clone())))
    }
}

impl EndedFunctions {
    pub(super) fn set_waker(&self, waker: Waker) {
        lock(&self.0).1 = waker;
    }

    fn add(&self, head: u16, ending: Ending) {
        let mut this = lock(&self.0);
        this.0.push((head, ending));
        let waker = this.1.clone();
        drop(this);
        waker.wake();
    }

    pub(super) fn take(&self) -> Vec<(u16, Ending)> {
        mem::take(&mut lock(&self.0).0)
    }
}

/// The functions that a request queue is to act on. It takes them from when the queue first comes to a loop until it has left
/// the last: between two loops as well, where what they are about may be in the ring.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    letters: Mutex<Letters>,
    /// Whether the queue may have requests that wait for limits.
    holds: AtomicBool,
    /// Whether it is to look which of them hold up others.
    called: AtomicBool,
}

/// Those of a device's request queues. As a waker it calls the queues that may hold up others' commands.
#[derive(Debug)]
pub(super) struct Inboxes(Mutex<Vec<Arc<Inbox>>>);

impl Inboxes {
    /// Of so many queues, none of which runs.
    pub(super) fn new(queues: u16) -> Arc<Self> {
        Arc::new(Self(Mutex::new((0..queues).map(|_| Arc::default()).collect())))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Arc<Inbox>>> {
        lock(&self.0)
    }
}

impl Wake for Inboxes {
    fn wake(self: Arc<Self>) {
        self.lock().iter().for_each(|inbox| inbox.call());
    }
}

#[derive(Debug, Default)]
struct Letters {
    /// In the order in which they came.
    functions: Vec<Arc<Function>>,
    /// The queue's, while it takes any.
    waker: Option<Waker>,
}

impl Inbox {
    /// Takes functions from here on, and has the queue woken by `waker`: also for those that there are already.
    pub(super) fn open(&self, waker: Waker) {
        let mut letters = lock(&self.letters);
        letters.waker = Some(waker.clone());
        let are_there = !letters.functions.is_empty();
        drop(letters);
        if are_there {
            waker.wake();
        }
    }

    /// Takes no more functions; those that it has.
    pub(super) fn close(&self) -> Vec<Arc<Function>> {
        mem::take(&mut *lock(&self.letters)).functions
    }

    pub(super) fn post(&self, function: &Arc<Function>) {
        let mut letters = lock(&self.letters);
        let Some(waker) = letters.waker.clone() else { return };
        letters.functions.push(Arc::clone(function));
        drop(letters);
        waker.wake();
    }

    /// The oldest functions, at most `most`; and whether there are more.
    pub(super) fn take(&self, most: usize) -> (Vec<Arc<Function>>, bool) {
        let functions = &mut lock(&self.letters).functions;
        let taken = functions.drain(..most.min(functions.len())).collect();
        (taken, !functions.is_empty())
    }

    /// The queue has a request that may wait for limits. Whoever waits for its command says so before it calls: if that call
    /// does not find what is said here, who looks after this finds that somebody waits.
    pub(super) fn hold(&self) {
        self.holds.store(true, Ordering::SeqCst);
    }

    /// Whether the queue has said so, and was not called since.
    pub(super) fn holds(&self) -> bool {
        self.holds.load(Ordering::Relaxed)
    }

    fn call(&self) {
        if self.holds.load(Ordering::SeqCst) && self.holds.swap(false, Ordering::SeqCst) {
            self.called.store(true, Ordering::Release);
            let waker = lock(&self.letters).waker.clone();
            waker.into_iter().for_each(Waker::wake);
        }
    }

    /// Whether the queue has been called since the last time.
    pub(super) fn is_called(&self) -> bool {
        self.called.load(Ordering::Relaxed) && self.called.swap(false, Ordering::Acquire)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: LunAddress = LunAddress { target: 1, lun: 2 };
    const ALL: About = About::Unit(UNIT);

    #[test]
    fn a_function_is_about_the_commands_that_it_names() {
        let beside = LunAddress { lun: 3, ..UNIT };
        let elsewhere = LunAddress { target: 2, ..UNIT };
        for (about, named) in [
            (About::Task(UNIT, 7), [true, false, false, false]),
            (About::Unit(UNIT), [true, true, false, false]),
            (About::Target(1), [true, true, true, false]),
        ] {
            let names = [(UNIT, 7), (UNIT, 8), (beside, 7), (elsewhere, 7)].map(|(at, tag)| about.names(at, tag));
            assert_eq!(names, named, "{about:?}");
        }
    }

    #[test]
    fn a_function_ends_when_the_last_queue_has_let_go_of_it_and_one_that_does_not_run_is_not_asked() {
        let (ended, inboxes) = (Arc::<EndedFunctions>::default(), [(); 3].map(|()| Inbox::default()));
        inboxes[0].open(Waker::noop().clone());
        inboxes[2].open(Waker::noop().clone());
        let function = Function::new(5, ALL, None, &ended);
        inboxes.iter().for_each(|inbox| inbox.post(&function));
        drop(function);
        let (taken, more) = inboxes[0].take(4);
        assert_eq!((taken.len(), more, inboxes[1].take(4).0.len()), (1, false, 0));
        taken[0].find();
        drop(taken);
        assert_eq!(ended.take(), []);
        drop(inboxes[2].close());
        assert_eq!(ended.take(), [(5, Ending::Found)]);
        drop(Function::new(6, ALL, None, &ended));
        assert_eq!(ended.take(), [(6, Ending::FoundNothing)]);
        let function = Function::new(7, ALL, Some(Abort::Task), &ended);
        function.find();
        function.leave();
        drop(function);
        assert_eq!(ended.take(), [(7, Ending::Left { found: true })]);
        for (finds, ending) in [(false, Ending::Left { found: false }), (true, Ending::Found)] {
            let query = Function::new(8, ALL, None, &ended);
            if finds {
                query.find();
            }
            query.leave();
            drop(query);
            assert_eq!(ended.take(), [(8, ending)]);
        }
    }

    #[test]
    fn what_is_not_taken_stays_in_its_order() {
        let (ended, inbox) = (Arc::<EndedFunctions>::default(), Inbox::default());
        inbox.open(Waker::noop().clone());
        (0..5).for_each(|head| inbox.post(&Function::new(head, ALL, None, &ended)));
        assert!(inbox.take(2).1);
        assert_eq!(ended.take(), [0, 1].map(|head| (head, Ending::FoundNothing)));
        assert!(!inbox.take(3).1);
        assert_eq!(ended.take(), [2, 3, 4].map(|head| (head, Ending::FoundNothing)));
    }
}
