//! The wake-up handshake, in every interleaving that the memory model allows.
//!
//! What is modelled is the protocol and not the code, which works on raw memory: each side stores (its index, or its
//! wish), fences, and loads what the other stores. The fences are those of `arm_kicks` and `publish`. Kicks and
//! notifications are the same handshake with the sides exchanged.
//!
//! In a process of its own: loom's generators install a SIGBUS handler over the one that guest memory needs.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU16, Ordering, fence};
use loom::thread;

use egret_vring::ring::need_event;

/// One chain made available while the device goes to sleep. Whether it always wakes: because it saw the chain itself,
/// or because the driver kicked.
fn always_wakes(fences: bool) -> bool {
    let both_wait = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let verdict = std::sync::Arc::clone(&both_wait);
    loom::model(move || {
        let index = Arc::new(AtomicU16::new(0));
        // Where it was armed long ago: a kick for this was sent already.
        let event = Arc::new(AtomicU16::new(u16::MAX));
        let kicked = Arc::new(AtomicBool::new(false));

        let driver = {
            let (index, event, kicked) = (Arc::clone(&index), Arc::clone(&event), Arc::clone(&kicked));
            thread::spawn(move || {
                index.store(1, Ordering::Release);
                if fences {
                    fence(Ordering::SeqCst);
                }
                if need_event(event.load(Ordering::Relaxed), 1, 0) {
                    kicked.store(true, Ordering::Relaxed);
                }
            })
        };
        event.store(0, Ordering::Relaxed);
        if fences {
            fence(Ordering::SeqCst);
        }
        let seen = index.load(Ordering::Acquire) != 0;
        driver.join().unwrap();
        if !seen && !kicked.load(Ordering::Relaxed) {
            both_wait.store(true, Ordering::Relaxed);
        }
    });
    !verdict.load(Ordering::Relaxed)
}

#[test]
fn a_chain_is_seen_or_kicked_for() {
    assert!(always_wakes(true));
}

#[test]
fn without_the_fences_both_sides_may_wait() {
    assert!(!always_wakes(false));
}
