//! The write fence under the interleavings of those who change the medium and those who wait for them.
//!
//! In a model a thread is taken from the processor at most three times against its will (loom's preemption bound): most
//! faults of such a protocol need one or two.

#[path = "../src/write_fence.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod write_fence;

/// What `write_fence.rs` is made of here.
mod sync {
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    pub(crate) use super::atomics::{AtomicU32, AtomicUsize, Ordering};

    /// Two threads have one each.
    pub(crate) const LANES: usize = 2;
}

/// Atomics whose `SeqCst` is at least what the language means by it: loom takes it for `AcqRel`, but in fences. So an access
/// beside another that is weaker than it should be may go unnoticed.
mod atomics {
    pub(crate) use loom::sync::atomic::Ordering;
    use loom::sync::atomic::fence;

    macro_rules! atomic {
        ($name:ident, $of:ty) => {
            #[derive(Debug)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl Default for $name {
                fn default() -> Self {
                    Self::new(0)
                }
            }

            impl $name {
                pub(crate) fn new(value: $of) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $of {
                    between(order, || self.0.load(if order == Ordering::SeqCst { Ordering::Acquire } else { order }))
                }

                #[allow(dead_code, reason = "one of the two is never stored to")]
                pub(crate) fn store(&self, value: $of, order: Ordering) {
                    let weaker = if order == Ordering::SeqCst { Ordering::Release } else { order };
                    between(order, || self.0.store(value, weaker));
                }

                pub(crate) fn fetch_add(&self, value: $of, order: Ordering) -> $of {
                    between(order, || self.0.fetch_add(value, order))
                }

                pub(crate) fn fetch_sub(&self, value: $of, order: Ordering) -> $of {
                    between(order, || self.0.fetch_sub(value, order))
                }
            }
        };
    }

    atomic!(AtomicU32, u32);
    atomic!(AtomicUsize, usize);

    fn between<T>(order: Ordering, act: impl FnOnce() -> T) -> T {
        if order != Ordering::SeqCst {
            return act();
        }
        fence(Ordering::SeqCst);
        let result = act();
        fence(Ordering::SeqCst);
        result
    }
}

use std::ops::Range;
use std::sync::Arc;
use std::task::{Wake, Waker};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use write_fence::{Ticket, WriteFence};

const ALL: Range<u64> = 0..10;

/// A place where a command waits.
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn bell() -> (Arc<Bell>, Waker) {
    let bell = Arc::new(Bell(AtomicBool::new(false)));
    (Arc::clone(&bell), bell.into())
}

/// A fence, and a medium that loom watches: two accesses of which neither comes before the other end the model.
struct Medium {
    fence: WriteFence,
    blocks: UnsafeCell<u32>,
}

// SAFETY: loom's threads take turns, and loom watches who comes to the blocks.
unsafe impl Sync for Medium {}

impl Medium {
    /// A write, unless it is kept out.
    fn write(&self, lane: usize, waker: &Waker) -> bool {
        let Some(pass) = self.fence.enter(lane, &ALL, waker) else { return false };
        // SAFETY: this is what the model is about.
        self.blocks.with_mut(|blocks| unsafe { *blocks += 1 });
        self.fence.leave(pass);
        true
    }
}

fn model(act: impl Fn(Arc<Medium>) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || act(Arc::new(Medium { fence: WriteFence::default(), blocks: UnsafeCell::new(0) })));
}

/// Waits for those within, until they have left; `left` joins them.
fn drain(medium: &Medium, ticket: Ticket, left: impl FnOnce()) {
    let (rung, waker) = bell();
    if medium.fence.drained(ticket, &waker) {
        return left();
    }
    left();
    // Nobody else would wake it.
    assert!(rung.0.load(Ordering::SeqCst), "who waits for those within is woken when they have left");
    assert!(medium.fence.drained(ticket, &waker), "nobody is within any more");
}

#[test]
fn compare_and_write_is_alone_with_its_blocks_and_who_is_kept_out_is_woken() {
    model(|medium| {
        let (rung, waker) = bell();
        let writer = {
            let medium = Arc::clone(&medium);
            thread::spawn(move || medium.write(0, &waker))
        };
        let ticket = medium.fence.lock(ALL, Waker::noop()).expect("nobody else locks");
        let (_, own) = bell();
        if medium.fence.drained(ticket, &own) {
            // SAFETY: this is what the model is about.
            medium.blocks.with_mut(|blocks| unsafe { *blocks += 1 });
        }
        medium.fence.release(ticket);
        let got_in = writer.join().expect("no panic");
        assert!(got_in || rung.0.load(Ordering::SeqCst), "a write that was kept out is woken");
    });
}

#[test]
fn who_waits_for_those_within_is_woken_by_the_last_of_them() {
    model(|medium| {
        let writers: Vec<_> = (0..2)
            .map(|lane| {
                let medium = Arc::clone(&medium);
                // They are within together, which is fine: each has blocks of its own, and the model has none.
                thread::spawn(move || {
                    let pass = medium.fence.enter(lane, &(20..30), Waker::noop()).expect("nothing is locked there");
                    medium.fence.leave(pass);
                })
            })
            .collect();
        let ticket = medium.fence.queue();
        drain(&medium, ticket, || writers.into_iter().for_each(|writer| writer.join().expect("no panic")));
        medium.fence.release(ticket);
    });
}

#[test]
fn two_who_wait_are_woken_whichever_of_them_sees_that_those_within_have_left() {
    model(|medium| {
        let within = medium.fence.enter(0, &(20..30), Waker::noop()).expect("nothing is locked");
        let first = medium.fence.queue();
        let (first_rung, first_waker) = bell();
        assert!(!medium.fence.drained(first, &first_waker), "somebody is within");
        let leaver = {
            let medium = Arc::clone(&medium);
            thread::spawn(move || medium.fence.leave(within))
        };
        let second = medium.fence.queue();
        drain(&medium, second, || leaver.join().expect("no panic"));
        assert!(first_rung.0.load(Ordering::SeqCst) && medium.fence.drained(first, &first_waker));
        medium.fence.release(first);
        medium.fence.release(second);
    });
}

#[test]
fn who_is_left_of_two_who_wait_is_woken_when_those_within_have_left() {
    model(|medium| {
        let within = medium.fence.enter(0, &(20..30), Waker::noop()).expect("nothing is locked");
        let first = medium.fence.queue();
        assert!(!medium.fence.drained(first, Waker::noop()), "somebody is within");
        let threads = [
            {
                let medium = Arc::clone(&medium);
                thread::spawn(move || medium.fence.leave(within))
            },
            {
                let medium = Arc::clone(&medium);
                thread::spawn(move || medium.fence.release(first))
            },
        ];
        let second = medium.fence.queue();
        drain(&medium, second, || threads.into_iter().for_each(|thread| thread.join().expect("no panic")));
        medium.fence.release(second);
    });
}

/// One whose operation is a long way from its disk.
#[derive(Default)]
struct Holder {
    holds: atomics::AtomicU32,
    called: atomics::AtomicU32,
}

impl Wake for Holder {
    fn wake(self: Arc<Self>) {
        self.called.store(self.holds.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

#[test]
fn who_holds_up_others_finds_that_they_wait_or_is_called() {
    model(|medium| {
        let holder = Arc::<Holder>::default();
        medium.fence.add_holder(Arc::clone(&holder).into());
        let within = {
            let (medium, holder) = (Arc::clone(&medium), Arc::clone(&holder));
            thread::spawn(move || {
                let pass = medium.fence.enter(0, &(20..30), Waker::noop()).expect("nothing is locked");
                holder.holds.store(1, Ordering::SeqCst);
                let finds = medium.fence.holds_up(&pass);
                (pass, finds)
            })
        };
        let ticket = medium.fence.queue();
        let waits = !medium.fence.drained(ticket, Waker::noop());
        let (pass, finds) = within.join().expect("no panic");
        assert!(
            !waits || finds || holder.called.load(Ordering::SeqCst) == 1,
            "it would wait for as long as that takes"
        );
        medium.fence.leave(pass);
        medium.fence.release(ticket);
    });
}
