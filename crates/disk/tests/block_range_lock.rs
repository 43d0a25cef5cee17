//! The lock that keeps sub-block writes and whole-block writes apart, under the interleavings of those who take it.
//!
//! A lost wake-up is a deadlock, which loom finds by itself; so are two that wait for each other.

#[path = "../src/block_range_lock.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod block_range_lock;

/// What `block_range_lock.rs` is made of here.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
    pub(crate) use loom::sync::{Condvar, Mutex};
}

use std::ops::Range;
use std::sync::Arc;

use block_range_lock::{BlockRangeLock, STRIPE_BYTES};
use loom::cell::UnsafeCell;
use loom::thread;

/// A lock, and a block that loom watches: a write beside any other access ends the model.
#[derive(Default)]
struct Block {
    lock: BlockRangeLock,
    bytes: UnsafeCell<u32>,
}

// SAFETY: loom's threads take turns, and loom watches who comes to the bytes.
unsafe impl Sync for Block {}

/// A sub-block write: the block is read, changed and written back.
fn change(block: &Block, range: &Range<u64>) {
    block.lock.lock_exclusive(range);
    // SAFETY: this is what the model is about.
    block.bytes.with_mut(|bytes| unsafe { *bytes += 1 });
    block.lock.unlock_exclusive(range);
}

/// What shares the block with its like, and with no sub-block write.
fn share(block: &Block) {
    // SAFETY: this is what the model is about.
    block.bytes.with(|bytes| unsafe { std::hint::black_box(*bytes) });
}

fn model(act: impl Fn(Arc<Block>) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || act(Arc::default()));
}

/// Runs each of these on a thread, the last on this one.
fn beside(block: &Arc<Block>, other: fn(&Block), own: fn(&Block)) {
    let theirs = Arc::clone(block);
    let other = thread::spawn(move || other(&theirs));
    own(block);
    other.join().expect("no panic");
}

const ONE: Range<u64> = 0..512;
const TWO: Range<u64> = 0..STRIPE_BYTES + 512;

#[test]
fn two_sub_block_writes_come_one_after_the_other() {
    model(|block| beside(&block, |block| change(block, &ONE), |block| change(block, &TWO)));
}

#[test]
fn a_whole_block_write_that_may_wait_is_never_beside_a_sub_block_write() {
    fn whole(block: &Block) {
        block.lock.lock_shared(&TWO);
        share(block);
        block.lock.unlock_shared(&TWO);
    }
    model(|block| beside(&block, whole, |block| change(block, &TWO)));
}

#[test]
fn a_whole_block_write_that_may_not_wait_gets_in_alone_or_not_at_all() {
    fn whole(block: &Block) {
        if block.lock.try_lock_shared(&TWO) {
            share(block);
            block.lock.unlock_shared(&TWO);
        }
    }
    model(|block| beside(&block, whole, |block| change(block, &(STRIPE_BYTES..STRIPE_BYTES + 512))));
}
