//! What one thread counts and any thread may read.

use std::sync::atomic::{AtomicU64, Ordering};

use egret_polling::Nanos;

/// A number that one thread changes and any thread may read, at no cost to the one.
///
/// Changing it is a load and a store, as with a plain field, and not one locked operation: whoever owns what is counted
/// is the only one to change it, from one thread at a time, and hands that right on only together with what it owns. A
/// second writer would lose counts, and nothing else. Readers see each number whole, and several of them not of one
/// moment.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `more`; the owner's alone.
    #[inline]
    pub fn add(&self, more: u64) {
        self.set(self.get().wrapping_add(more));
    }

    /// Makes it `value`; the owner's alone.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Adds a time, in nanoseconds; the owner's alone.
    #[inline]
    pub fn add_time(&self, more: Nanos) {
        self.add(more.0);
    }

    /// Its value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Its value, as a time.
    #[inline]
    pub fn time(&self) -> Nanos {
        Nanos(self.get())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn times_add_up() {
        let counter = Counter::default();
        counter.add_time(Nanos(5));
        counter.add_time(Nanos(7));
        assert_eq!((counter.time(), counter.get()), (Nanos(12), 12));
        counter.set(3);
        assert_eq!(counter.time(), Nanos(3));
    }

    #[test]
    fn a_reader_sees_a_counter_only_grow_and_in_the_end_all_of_it() {
        let counter = Arc::new(Counter::default());
        let owner = {
            let counter = Arc::clone(&counter);
            std::thread::spawn(move || (0..100_000).for_each(|_| counter.add(3)))
        };
        let mut last = 0;
        while !owner.is_finished() {
            let now = counter.get();
            assert!(now >= last && now.is_multiple_of(3), "{last} {now}");
            last = now;
        }
        owner.join().unwrap();
        assert_eq!(counter.get(), 300_000);
    }
}
