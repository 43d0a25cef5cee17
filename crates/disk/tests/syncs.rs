//! Syncs of the page cache, under the interleavings of those who ask for them.

#[path = "../src/syncs.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod syncs;

/// What `syncs.rs` is made of here.
mod sync {
    pub(crate) use loom::sync::Mutex;
    pub(crate) use loom::sync::atomic::{AtomicI32, AtomicU64, Ordering};
}

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::thread;
use rustix::io::Errno;
use syncs::{FlushError, Syncs};

/// What the kernel knows of an open file.
#[derive(Default)]
struct Kernel {
    syncs: Syncs,
    /// Writes that have completed, and those of them that are on the disk.
    written: AtomicU32,
    stable: AtomicU32,
    /// Pages were lost, and nobody was told yet.
    has_news: AtomicBool,
    calls: AtomicU32,
}

impl Kernel {
    /// Tells of what was lost once, and writes the rest.
    fn fdatasync(&self) -> Result<(), Errno> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let written = self.written.load(Ordering::SeqCst);
        if self.has_news.swap(false, Ordering::SeqCst) {
            return Err(Errno::IO);
        }
        self.stable.fetch_max(written, Ordering::SeqCst);
        Ok(())
    }

    fn flush(&self) -> Result<(), Errno> {
        self.syncs.run(|| self.fdatasync().map_err(|errno| FlushError { errno, is_loss: true }))
    }
}

/// Runs this on several threads at once, one of them this one.
fn at_once(threads: usize, kernel: &Arc<Kernel>, act: fn(&Kernel)) {
    let others: Vec<_> = (1..threads)
        .map(|_| {
            let kernel = Arc::clone(kernel);
            thread::spawn(move || act(&kernel))
        })
        .collect();
    act(kernel);
    others.into_iter().for_each(|other| other.join().expect("no panic"));
}

fn model(act: impl Fn(Arc<Kernel>) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || act(Arc::default()));
}

#[test]
fn of_flushes_at_once_none_succeeds_where_one_was_told_of_a_loss() {
    model(|kernel| {
        kernel.has_news.store(true, Ordering::SeqCst);
        at_once(3, &kernel, |kernel| assert_eq!(kernel.flush(), Err(Errno::IO)));
        assert_eq!(kernel.flush(), Err(Errno::IO), "nor any later");
        assert_eq!(kernel.calls.load(Ordering::SeqCst), 1, "and nobody is asked in vain");
        assert_eq!(kernel.syncs.lost(), Some(Errno::IO));
    });
}

#[test]
fn a_flush_that_succeeds_has_made_stable_what_was_written_before_it_was_asked_for() {
    model(|kernel| {
        at_once(3, &kernel, |kernel| {
            let own = kernel.written.fetch_add(1, Ordering::SeqCst) + 1;
            assert_eq!(kernel.flush(), Ok(()));
            assert!(kernel.stable.load(Ordering::SeqCst) >= own);
        });
        assert!(kernel.calls.load(Ordering::SeqCst) <= 3);
        assert_eq!(kernel.syncs.lost(), None);
    });
}

#[test]
fn one_sync_serves_all_who_have_waited_for_the_same_one_to_end() {
    let least = Arc::new(std::sync::atomic::AtomicU32::new(u32::MAX));
    let seen = Arc::clone(&least);
    model(move |kernel| {
        at_once(3, &kernel, |kernel| assert_eq!(kernel.flush(), Ok(())));
        seen.fetch_min(kernel.calls.load(Ordering::SeqCst), Ordering::Relaxed);
    });
    assert_eq!(least.load(Ordering::Relaxed), 1, "the fewest of all interleavings");
}

#[test]
fn a_sync_that_failed_and_lost_nothing_says_nothing_of_the_next() {
    model(|kernel| {
        assert_eq!(kernel.syncs.run(|| Err(FlushError::again(Errno::INTR))), Err(Errno::INTR));
        assert_eq!(kernel.flush(), Ok(()));
    });
}
