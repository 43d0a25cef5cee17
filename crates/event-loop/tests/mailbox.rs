//! The mailbox of a loop, under the interleavings of those who send and of the loop that sleeps.

#[path = "../src/doorbell.rs"]
#[allow(dead_code, missing_docs)]
mod doorbell;
#[path = "../src/mailbox.rs"]
mod mailbox;

/// What they are made of here.
mod sync {
    pub use loom::sync::atomic::{Ordering, fence};
    pub use loom::sync::{Condvar, Mutex};

    /// One whose changes have an order, in which a swap follows what it read. That is how the language has it; loom would
    /// show a flag that was cleared before it was set as clear.
    #[derive(Debug)]
    pub struct AtomicBool {
        flag: loom::sync::atomic::AtomicBool,
        order: Mutex<()>,
    }

    impl AtomicBool {
        pub fn new(value: bool) -> Self {
            Self { flag: loom::sync::atomic::AtomicBool::new(value), order: Mutex::new(()) }
        }

        pub fn load(&self, order: Ordering) -> bool {
            self.flag.load(order)
        }

        pub fn store(&self, value: bool, order: Ordering) {
            let _order = self.order.lock();
            self.flag.store(value, order);
        }

        pub fn swap(&self, value: bool, order: Ordering) -> bool {
            let _order = self.order.lock();
            self.flag.swap(value, order)
        }
    }
}

use loom::sync::Arc;
use mailbox::Mailbox;
use sync::{Condvar, Mutex};

/// An event that a loop sleeps on.
struct EventNotifier(Mutex<bool>, Condvar);

impl EventNotifier {
    fn new() -> std::io::Result<Self> {
        Ok(Self(Mutex::new(false), Condvar::new()))
    }

    fn set(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }

    /// Waits for the next edge.
    fn wait(&self) {
        let mut set = self.0.lock().unwrap();
        while !std::mem::take(&mut *set) {
            set = self.1.wait(set).unwrap();
        }
    }
}

#[test]
fn each_letter_is_taken_once_and_in_order_and_a_loop_that_sleeps_is_woken_for_it() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let senders = [[10, 11].as_slice(), &[20]].map(|letters| {
            let mailbox = Arc::clone(&mailbox);
            loom::thread::spawn(move || letters.iter().for_each(|&letter| mailbox.send(letter)))
        });
        let mut taken: Vec<u32> = Vec::new();
        // A letter that is left behind, and a loop that nobody wakes, are deadlocks, which loom finds by itself.
        while taken.len() < 3 {
            if mailbox.bell.arm() {
                mailbox.wake.wait();
            }
            mailbox.bell.disarm();
            taken.append(&mut mailbox.take());
        }
        let _: [(); 2] = senders.map(|sender| sender.join().unwrap());
        assert!(mailbox.take().is_empty());
        let first: Vec<_> = taken.iter().copied().filter(|letter| *letter < 20).collect();
        assert_eq!((first, taken.contains(&20)), (vec![10, 11], true));
    });
}

#[test]
fn a_letter_to_a_loop_that_ends_is_taken_or_dropped_whether_it_comes_before_the_end_or_after() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let letter = std::sync::Arc::new(());
        let sender = {
            let (mailbox, letter) = (Arc::clone(&mailbox), std::sync::Arc::clone(&letter));
            loom::thread::spawn(move || mailbox.send(letter))
        };
        drop(mailbox.take());
        mailbox.close();
        sender.join().unwrap();
        assert_eq!(std::sync::Arc::strong_count(&letter), 1);
    });
}
