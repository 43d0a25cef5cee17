//! The wake-up protocol under every interleaving of its two sides.

#[path = "../src/doorbell.rs"]
#[allow(dead_code, missing_docs)]
mod doorbell;

/// What `doorbell.rs` is made of here.
mod sync {
    pub use loom::sync::atomic::{AtomicBool, Ordering, fence};
}

use doorbell::Doorbell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};

#[test]
fn no_ring_is_lost_between_the_last_look_and_the_block() {
    loom::model(|| {
        let bell = Arc::new(Doorbell::default());
        let woken = Arc::new(AtomicBool::new(false));
        let ringer = {
            let (bell, woken) = (Arc::clone(&bell), Arc::clone(&woken));
            loom::thread::spawn(move || {
                if bell.ring() {
                    woken.store(true, Ordering::SeqCst);
                }
            })
        };
        let blocks = bell.arm();
        ringer.join().unwrap();
        // A loop that blocked before it saw the ringing has been woken.
        assert!(!blocks || woken.load(Ordering::SeqCst));
        bell.disarm();
        assert!(bell.rang());
        assert!(!bell.ring(), "a loop that is awake is not woken");
    });
}

#[test]
fn what_was_stored_before_the_ring_is_seen_after_the_answer() {
    loom::model(|| {
        let bell = Arc::new(Doorbell::default());
        let letter = Arc::new(AtomicU32::new(0));
        let ringer = {
            let (bell, letter) = (Arc::clone(&bell), Arc::clone(&letter));
            loom::thread::spawn(move || {
                letter.store(7, Ordering::Relaxed);
                bell.ring();
            })
        };
        if bell.answer() {
            assert_eq!(letter.load(Ordering::Relaxed), 7);
        }
        ringer.join().unwrap();
    });
}
