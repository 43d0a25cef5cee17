//! The in-flight record of a packed ring.
//!
//! Used descriptors are written over those of chains in flight, so the record has copies: an entry for each descriptor,
//! linked to a list for each chain. All others are in a list of free ones.
//!
//! ```text
//!   pop      for each descriptor: its copy ──▶ num, last, counter ──▶ inflight = 1 ──▶ free_head ──▶ old_free_head
//!   publish  next of the last entry = free_head ──▶ free_head = the first ──▶ used_idx ──▶ the used descriptor's flags
//!            ──▶ inflight = 0 ──▶ old_free_head ──▶ old_used_idx                 for each chain
//! ```
//!
//! A device may be killed between any two of these stores. What the header has twice is what a step changes: up to a pop's
//! last store and a publication's flags the old values hold, and from there on the new ones. Whether the flags have been
//! written, the ring says. Each chain is a step, as with SPDK: in a batch of several, whose first flags are written last,
//! used descriptors behind the first would stay in the ring for the driver to find when the next device has come so far.
//!
//! An index and its wrap counter are stored at once: one without the other is a place of another lap.
//!
//! The lists are kept here as well as in the record, so that nothing in it has to be believed later.

use std::mem;
use std::sync::atomic::{Ordering, compiler_fence};

use super::super::packed::area::{Descriptor, OWNER, Position, Slots};
use super::{Field, Record, RecordError, crash};

/// How long `QueueRegionPacked` is up to its descriptors' states, and each of these.
pub(super) const STRIDE: u64 = 32;

const FREE_HEAD: Field<u16> = Field::at(12);
const OLD_FREE_HEAD: Field<u16> = Field::at(14);
/// `used_idx` and `old_used_idx`, `used_wrap_counter` and `old_used_wrap_counter`, and two bytes of padding.
const USED: Field<u64> = Field::at(16);

/// Of a state, here called an entry.
mod entry {
    use super::Field;

    pub(super) const NEXT: Field<u16> = Field::at(2);
    pub(super) const LAST: Field<u16> = Field::at(4);
    pub(super) const NUM: Field<u16> = Field::at(6);
    pub(super) const ID: Field<u16> = Field::at(16);
    pub(super) const FLAGS: Field<u16> = Field::at(18);
    pub(super) const LEN: Field<u32> = Field::at(20);
    pub(super) const ADDR: Field<u64> = Field::at(24);
}

/// The entries of a chain: the first and the last of its list, and how many.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::ring) struct Entries {
    pub(in crate::ring) head: u16,
    last: u16,
    pub(in crate::ring) num: u16,
}

/// A chain that has been used, and the flags that show it to the driver.
struct Shown {
    entries: Entries,
    flags: u16,
}

/// Keeps a queue's record.
pub(in crate::ring) struct Tracker {
    record: Record,
    /// The next counter.
    counter: u64,
    /// Where the next chain is shown to the driver.
    used: Position,
    /// The first free entry, if there is one.
    free: u16,
    /// For each entry the next of its list.
    next: Box<[u16]>,
    /// The entry of the last descriptor noted.
    noted: u16,
    /// For each buffer ID in flight, its chain's entries.
    chains: Box<[Entries]>,
    /// What has been used and not shown.
    batch: Vec<Shown>,
    /// What is popped before anything else: the chains that were in flight, the next one last.
    recovered: Vec<Entries>,
}

impl Tracker {
    /// Brings a record into agreement with its ring, on which it begins at `base` if it was never used.
    pub(in crate::ring) fn start(mut record: Record, ring: &Slots, base: Position) -> Result<Self, RecordError> {
        let size = ring.size();
        let has_been_used = record.take_in(true, size, |record| {
            (0..record.size).for_each(|at| record.set(record.state(at), entry::NEXT, at + 1));
            record.set(record.header(), FREE_HEAD, 0);
            record.set(record.header(), OLD_FREE_HEAD, 0);
            record.set(record.header(), USED, used_word(base, base));
        })?;
        let mut tracker = Self {
            counter: 0,
            used: base,
            free: 0,
            next: (0..record.size).map(|at| at + 1).collect(),
            noted: 0,
            chains: vec![Entries::default(); size.into()].into(),
            batch: Vec::with_capacity(size.into()),
            recovered: Vec::new(),
            record,
        };
        if has_been_used {
            tracker.reconcile(ring)?;
            tracker.read_lists(size)?;
        }
        Ok(tracker)
    }

    /// Ends or takes back what the last device was about to do.
    fn reconcile(&mut self, ring: &Slots) -> Result<(), RecordError> {
        let header = self.record.header();
        let (used, was_shown) = Self::place(&self.record, ring)?;
        self.used = used;
        if was_shown {
            self.free = self.record.get(header, FREE_HEAD);
            self.record.set(header, OLD_FREE_HEAD, self.free);
        } else {
            self.free = self.record.get(header, OLD_FREE_HEAD);
            self.record.set(header, FREE_HEAD, self.free);
        }
        self.record.set(header, USED, used_word(self.used, self.used));
        Ok(())
    }

    /// Where a record that was used has the next chain shown to the driver, and whether what the last device was about to show
    /// is.
    pub(in crate::ring) fn place(record: &Record, ring: &Slots) -> Result<(Position, bool), RecordError> {
        let [used, old] = places(record.get(record.header(), USED), ring.size())?;
        let was_shown = used != old && ring.flags(old.slot()) & OWNER != old.available();
        Ok((if was_shown { used } else { old }, was_shown))
    }

    /// Finds out what is free and what is in flight: each entry is one or the other.
    fn read_lists(&mut self, ring: u16) -> Result<(), RecordError> {
        let mut seen = vec![false; self.record.size.into()];
        let mut at = self.free;
        while at < self.record.size {
            self.record.set_in_flight(at, false);
            at = self.visit(at, &mut seen)?;
        }
        let mut descriptors = 0;
        for (counter, head) in self.record.in_flight() {
            let num = self.record.get(self.record.state(head), entry::NUM);
            let (mut last, mut at) = (head, head);
            for _ in 0..num {
                last = at;
                at = self.visit(at, &mut seen)?;
            }
            self.recovered.push(Entries { head, last, num });
            self.counter = counter.wrapping_add(1);
            descriptors += u32::from(num);
        }
        self.recovered.reverse();
        if descriptors > ring.into() {
            return Err(RecordError::TooMuch(ring));
        }
        // The entry of a chain without descriptors is among these as well.
        if seen.contains(&false) {
            return Err(RecordError::Lists(self.record.size));
        }
        Ok(())
    }

    /// Reads an entry's link, which must not have been read before; returns it.
    fn visit(&mut self, at: u16, seen: &mut [bool]) -> Result<u16, RecordError> {
        if seen.get_mut(usize::from(at)).is_none_or(|seen| mem::replace(seen, true)) {
            return Err(RecordError::Lists(self.record.size));
        }
        let next = self.record.get(self.record.state(at), entry::NEXT);
        self.next[usize::from(at)] = next;
        Ok(next)
    }

    /// Whether the peer took the record's memory away.
    #[inline]
    pub(in crate::ring) fn is_truncated(&self) -> bool {
        self.record.is_truncated()
    }

    /// Where the next chain is shown to the driver.
    pub(in crate::ring) fn used(&self) -> Position {
        self.used
    }

    /// What is to be popped instead of a chain from the ring.
    #[inline]
    pub(in crate::ring) fn recovered(&self) -> Option<Entries> {
        self.recovered.last().copied()
    }

    /// The copy of a descriptor, and the entry of the next of its chain.
    pub(in crate::ring) fn descriptor(&self, at: u16) -> (Descriptor, u16) {
        let (record, state) = (&self.record, self.record.state(at));
        let descriptor = Descriptor {
            addr: u64::from_le(record.get(state, entry::ADDR)),
            len: u32::from_le(record.get(state, entry::LEN)),
            id: u16::from_le(record.get(state, entry::ID)),
            flags: u16::from_le(record.get(state, entry::FLAGS)),
        };
        (descriptor, self.next[usize::from(at)])
    }

    /// Copies the descriptor that has `before` others before it in the chain that is being popped.
    ///
    /// There are as many entries as the ring has descriptors, or more: no more are taken than are free.
    #[inline]
    pub(in crate::ring) fn note(&mut self, before: u16, Descriptor { addr, len, id, flags }: Descriptor) {
        self.noted = if before == 0 { self.free } else { self.next[usize::from(self.noted)] };
        let state = self.record.state(self.noted);
        self.record.set(state, entry::ADDR, addr.to_le());
        self.record.set(state, entry::LEN, len.to_le());
        self.record.set(state, entry::FLAGS, flags.to_le());
        self.record.set(state, entry::ID, id.to_le());
    }

    /// The chain that was to be popped again has been, or the one whose `num` descriptors have been noted.
    #[inline]
    pub(in crate::ring) fn begin(&mut self, id: u16, num: u16) {
        self.chains[usize::from(id)] = match self.recovered.pop() {
            Some(entries) => entries,
            None => self.take_noted(num),
        };
    }

    #[inline]
    fn take_noted(&mut self, num: u16) -> Entries {
        let entries = Entries { head: self.free, last: self.noted, num };
        let head = self.record.state(entries.head);
        self.record.set(head, entry::NUM, num);
        self.record.set(head, entry::LAST, entries.last);
        self.record.set_counter(entries.head, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.record.set_in_flight(entries.head, true);
        self.free = self.next[usize::from(entries.last)];
        self.record.set(self.record.header(), FREE_HEAD, self.free);
        self.record.set(self.record.header(), OLD_FREE_HEAD, self.free);
        entries
    }

    /// A chain has been used, and will be shown to the driver with these flags.
    #[inline]
    pub(in crate::ring) fn add_used(&mut self, id: u16, flags: u16) {
        self.batch.push(Shown { entries: self.chains[usize::from(id)], flags });
    }

    /// Shows the driver what has been used.
    #[inline]
    pub(in crate::ring) fn publish(&mut self, ring: &Slots) {
        let mut batch = mem::take(&mut self.batch);
        batch.drain(..).for_each(|shown| self.show(shown, ring));
        self.batch = batch;
    }

    #[inline]
    fn show(&mut self, Shown { entries, flags }: Shown, ring: &Slots) {
        let Entries { head, last, num } = entries;
        let (record, old) = (&mut self.record, self.used);
        let header = record.header();
        record.set(record.state(last), entry::NEXT, self.free);
        self.next[usize::from(last)] = self.free;
        record.set(header, FREE_HEAD, head);
        self.free = head;
        self.used = old.advance(num, ring.size());
        record.set(header, USED, used_word(self.used, old));
        ring.set_flags(old.slot(), flags);
        crash::point();
        // What comes after must not be moved before: the flags are no volatile store.
        compiler_fence(Ordering::SeqCst);
        record.set_in_flight(head, false);
        record.set(header, OLD_FREE_HEAD, head);
        record.set(header, USED, used_word(self.used, self.used));
    }
}

/// What the header has as its used index, and as the old one.
fn used_word(used: Position, old: Position) -> u64 {
    let ([u0, u1], [o0, o1]) = (used.slot().to_ne_bytes(), old.slot().to_ne_bytes());
    u64::from_ne_bytes([u0, u1, o0, o1, used.wrap(), old.wrap(), 0, 0])
}

/// The used index that the header has, and the old one.
fn places(word: u64, ring: u16) -> Result<[Position; 2], RecordError> {
    let [u0, u1, o0, o1, used_wrap, old_wrap, ..] = word.to_ne_bytes();
    let place = |slot, wrap: u8| match Position::new(slot | u16::from(wrap != 0) << 15, ring) {
        Ok(place) if slot < ring => Ok(place),
        _ => Err(RecordError::NoSuchSlot { slot, ring }),
    };
    Ok([place(u16::from_ne_bytes([u0, u1]), used_wrap)?, place(u16::from_ne_bytes([o0, o1]), old_wrap)?])
}
