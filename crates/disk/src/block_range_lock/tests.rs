//! Outside of what it tests, which `tests/block_range_lock.rs` has in a crate of its own.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::block_range_lock::*;

#[test]
fn many_share_a_range_and_none_while_it_is_locked_exclusively() {
    let lock = BlockRangeLock::default();
    assert!(lock.try_lock_shared(&(0..4096)));
    assert!(lock.try_lock_shared(&(512..1024)));
    lock.unlock_shared(&(0..4096));
    lock.unlock_shared(&(512..1024));
    lock.lock_exclusive(&(0..4096));
    assert!(!lock.try_lock_shared(&(0..512)));
    assert!(lock.try_lock_shared(&(STRIPE_BYTES..2 * STRIPE_BYTES)));
    lock.unlock_exclusive(&(0..4096));
    assert!(lock.try_lock_shared(&(0..512)));
}

#[test]
fn a_lock_that_was_refused_leaves_nothing_behind() {
    let lock = BlockRangeLock::default();
    lock.lock_exclusive(&(STRIPE_BYTES..STRIPE_BYTES + 512));
    assert!(!lock.try_lock_shared(&(0..3 * STRIPE_BYTES)));
    lock.unlock_exclusive(&(STRIPE_BYTES..STRIPE_BYTES + 512));
    assert!(lock.is_free());
}

#[test]
fn a_range_names_each_of_its_stripes_once_in_ascending_order() {
    for (range, expected) in [
        (0..1, vec![0]),
        (STRIPE_BYTES - 1..STRIPE_BYTES + 1, vec![0, 1]),
        (63 * STRIPE_BYTES..65 * STRIPE_BYTES, vec![0, 63]),
        (5..1000 * STRIPE_BYTES, (0..64).collect()),
    ] {
        assert_eq!(stripes(&range).collect::<Vec<_>>(), expected, "{range:?}");
    }
}

#[test]
fn an_exclusive_lock_keeps_all_other_threads_out() {
    let lock = BlockRangeLock::default();
    let inside = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for worker in 0..4u64 {
            let (lock, inside) = (&lock, &inside);
            scope.spawn(move || {
                for round in 0..500 {
                    let start = (round % 3) * STRIPE_BYTES;
                    let range = start..start + 2 * STRIPE_BYTES;
                    if (worker + round) % 2 == 0 {
                        lock.lock_exclusive(&(STRIPE_BYTES..3 * STRIPE_BYTES));
                        assert_eq!(inside.swap(1000, Ordering::Relaxed), 0);
                        inside.store(0, Ordering::Relaxed);
                        lock.unlock_exclusive(&(STRIPE_BYTES..3 * STRIPE_BYTES));
                    } else {
                        lock.lock_shared(&range);
                        assert!(inside.fetch_add(1, Ordering::Relaxed) < 1000);
                        inside.fetch_sub(1, Ordering::Relaxed);
                        lock.unlock_shared(&range);
                    }
                }
            });
        }
    });
}
