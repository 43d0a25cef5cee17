//! A well-behaved client beside attacks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;

use super::await_that;
use super::disk::{Disk, pattern};

/// How much it writes and reads, over and over, in bytes.
pub const EXTENT: u64 = 1 << 20;
/// The length of a page, in bytes.
const PAGE: usize = 4096;

/// A client that writes and verifies, over and over.
pub struct Neighbour {
    counts: Arc<Counts>,
    mode: Arc<AtomicU8>,
    thread: Option<JoinHandle<()>>,
}

/// What has ended.
#[derive(Default)]
struct Counts {
    rounds: AtomicU64,
    reads: AtomicU64,
}

/// Everything is written and verified, with many requests in flight.
const ROUNDS: u8 = 0;
/// Pages are read and verified one after the other.
const PAGES: u8 = 1;
const RESTS: u8 = 2;
const STOPS: u8 = 3;

impl Neighbour {
    /// Connects, and begins.
    pub fn start(socket: &Path) -> Self {
        let mut disk = Disk::connect(socket).expect("a connection");
        let (counts, mode) = (Arc::new(Counts::default()), Arc::new(AtomicU8::new(ROUNDS)));
        let (count, wanted) = (Arc::clone(&counts), Arc::clone(&mode));
        let thread = std::thread::spawn(move || {
            let mut page = vec![0; PAGE];
            loop {
                match wanted.load(Ordering::Relaxed) {
                    ROUNDS => {
                        let seed = count.rounds.load(Ordering::Relaxed);
                        disk.first().write_pattern(0..EXTENT, seed).expect("the neighbour writes");
                        disk.first().verify_pattern(0..EXTENT, seed).expect("the neighbour reads");
                        page = pattern(seed, 0, PAGE);
                        count.rounds.fetch_add(1, Ordering::Relaxed);
                    }
                    PAGES => {
                        let read = disk.first().read(0, PAGE).expect("the neighbour reads");
                        assert!(read == page, "what the neighbour reads is what it wrote");
                        count.reads.fetch_add(1, Ordering::Relaxed);
                    }
                    RESTS => std::thread::park(),
                    _ => return,
                }
            }
        });
        Self { counts, mode, thread: Some(thread) }
    }

    /// Waits until two more rounds are over, the second of which began after this call.
    pub fn await_progress(&self) {
        let rounds = || self.counts.rounds.load(Ordering::Relaxed);
        let before = rounds();
        await_that("the neighbour to go on", || rounds() >= before + 2);
    }

    /// Reads page after page while `act` runs, one at a time, and no rounds; returns how many.
    pub fn pages_during(&self, act: impl FnOnce()) -> u64 {
        let reads = || self.counts.reads.load(Ordering::Relaxed);
        let begun = reads();
        self.set(PAGES);
        await_that("the neighbour to read", || reads() > begun);
        let before = reads();
        act();
        let pages = reads() - before;
        self.set(ROUNDS);
        pages
    }

    /// Asks for nothing more after the round that is under way, until [`go_on`](Self::go_on).
    pub fn rest(&self) {
        self.set(RESTS);
    }

    /// The end of a [`rest`](Self::rest).
    pub fn go_on(&self) {
        self.set(ROUNDS);
    }

    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::Relaxed);
        self.thread.as_ref().expect("it runs").thread().unpark();
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.set(STOPS);
        let ended = self.thread.take().expect("dropped once").join();
        assert!(ended.is_ok() || std::thread::panicking(), "the neighbour saw a failure");
    }
}
