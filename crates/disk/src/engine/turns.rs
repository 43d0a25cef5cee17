//! Whose turn it is, among disks that share what an engine has a limited number of: workers, or places in the kernel.
//!
//! - Each disk has a line of its own, however many slots stand for it, and the lines have their turns one after the
//!   other.
//! - Where there are several disks, one takes no more places than it leaves free. So one that came first, or that hangs,
//!   leaves half of them to the others, one that comes then half of those, and so on: as long as fewer disks than that
//!   keep all of theirs, the next one finds a place at once. A disk that is the only one leaves one place, if there are
//!   more than two: it may hang, and another come then. Of two that would be half of what it can do.
//! - Large jobs have a line beside the disk's other one, and where the I/O thread has several disks, here or with other
//!   engines, one place at a time: workers that copy without a pause would leave their I/O thread, and the other disks, a
//!   small part of its processor only.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use crate::disk::Disk;

/// As many places as there are.
const ALL: u32 = u32::MAX;
/// Places for large jobs of one disk.
const LARGE: u32 = 1;

/// See the module's description. It allocates nothing in the steady state.
pub(crate) struct Turns<T> {
    /// How many places there are.
    places: u32,
    /// Places that are taken.
    taken: u32,
    lines: Vec<Line<T>>,
    /// Lines in which something waits, in the order of their turns.
    order: VecDeque<usize>,
    /// How many disks there are.
    disks: u32,
    /// Whether the I/O thread has several, some of which may take no turns here.
    beside_others: bool,
    /// The number of the batch that places are taken for.
    batch: u64,
}

/// One disk's jobs.
struct Line<T> {
    waiting: VecDeque<T>,
    /// Places that it has taken.
    taken: u32,
    /// The disk's address, which identifies it as long as it is attached.
    disk: usize,
    /// How many places it may take where there are several disks.
    most: u32,
    /// How many slots stand for the disk; the line is free if none does.
    slots: u32,
    /// How many jobs of one batch it may take.
    batch_most: u32,
    /// The last batch that it took jobs of, where that is limited, and how many they were.
    batched: (u64, u32),
}

impl<T> Turns<T> {
    pub(crate) const fn new(places: u32) -> Self {
        Self { places, taken: 0, lines: Vec::new(), order: VecDeque::new(), disks: 0, beside_others: false, batch: 0 }
    }

    /// How many places there are from here on; those that are too many now are given back as ever.
    pub(crate) const fn set_places(&mut self, places: u32) {
        self.places = places;
    }

    /// Places that are taken.
    pub(crate) const fn taken(&self) -> u32 {
        self.taken
    }

    /// The line of a disk, for one more slot that stands for it.
    pub(crate) fn open(&mut self, disk: &Arc<Disk>) -> usize {
        self.open_for(disk, ALL)
    }

    /// Likewise the line of its large jobs.
    pub(crate) fn open_large(&mut self, disk: &Arc<Disk>) -> usize {
        self.open_for(disk, LARGE)
    }

    fn open_for(&mut self, disk: &Arc<Disk>, most: u32) -> usize {
        let disk = Arc::as_ptr(disk).addr();
        let known = self.lines.iter().position(|line| line.slots > 0 && (line.disk, line.most) == (disk, most));
        let at = known.unwrap_or_else(|| {
            self.disks += u32::from(most == ALL);
            let free = self.lines.iter().position(|line| line.slots == 0);
            free.unwrap_or_else(|| {
                self.lines.push(Line {
                    waiting: VecDeque::new(),
                    taken: 0,
                    disk,
                    most,
                    slots: 0,
                    batch_most: ALL,
                    batched: (0, 0),
                });
                self.lines.len() - 1
            })
        });
        let line = &mut self.lines[at];
        (line.disk, line.most, line.batch_most) = (disk, most, ALL);
        line.slots += 1;
        at
    }

    /// The most of a line that go into one batch from here on; 0 is no limit.
    pub(crate) fn limit_batches(&mut self, at: usize, most: u32) {
        self.lines[at].batch_most = if most == 0 { ALL } else { most };
    }

    /// Begins a batch, which what is taken from here on is in.
    pub(crate) const fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// Takes back an [`open`](Self::open); nothing of the slot's waits. The other disks may have more places then.
    pub(crate) fn close(&mut self, at: usize) {
        let line = &mut self.lines[at];
        line.slots -= 1;
        if line.slots == 0 {
            line.waiting = VecDeque::new();
            self.disks -= u32::from(line.most == ALL);
        }
    }

    /// Appends a job to its line.
    pub(crate) fn put(&mut self, at: usize, what: T) {
        let waiting = &mut self.lines[at].waiting;
        if waiting.is_empty() {
            self.order.push_back(at);
        }
        waiting.push_back(what);
    }

    /// Puts a job at the head of its line, before all others.
    pub(crate) fn put_first(&mut self, at: usize, what: T) {
        let waiting = &mut self.lines[at].waiting;
        if waiting.is_empty() {
            self.order.push_front(at);
        }
        waiting.push_front(what);
    }

    /// Takes a place for that whose turn it is, and says whose line it was in. `None` if nothing waits, or only of disks
    /// that have their share, of the places or of the batch.
    pub(crate) fn take(&mut self) -> Option<(usize, T)> {
        let turn = self.order.iter().position(|&at| self.room(at) > 0)?;
        let at = self.order.remove(turn)?;
        let line = &mut self.lines[at];
        let what = line.waiting.pop_front()?;
        line.taken += 1;
        self.taken += 1;
        if line.batch_most != ALL {
            line.batched = (self.batch, line.in_batch(self.batch) + 1);
        }
        if !line.waiting.is_empty() {
            self.order.push_back(at);
        }
        Some((at, what))
    }

    /// Gives a place back.
    pub(crate) fn leave(&mut self, at: usize) {
        self.lines[at].taken -= 1;
        self.taken -= 1;
    }

    /// Whether the I/O thread has several disks, those included that take no turns here.
    pub(crate) const fn set_beside_others(&mut self, several: bool) {
        self.beside_others = several;
    }

    /// What was last [set](Self::set_beside_others).
    pub(crate) const fn are_beside_others(&self) -> bool {
        self.beside_others
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// How many places could be taken now, but no more than `most`. To find that out takes no longer than there are
    /// places: a line that has its share has one.
    pub(crate) fn wanted(&self, most: u32) -> u32 {
        let mut wanted = 0;
        for &at in &self.order {
            if wanted >= most {
                break;
            }
            wanted += self.room(at).min(self.lines[at].waiting.len() as u32);
        }
        wanted.min(most)
    }

    /// Takes out all that waits.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.order.clear();
        self.lines.iter_mut().flat_map(|line| line.waiting.drain(..))
    }

    /// How many places a line could take now, if no other did.
    fn room(&self, at: usize) -> u32 {
        let free = self.places.saturating_sub(self.taken);
        let Line { taken, most, batch_most, .. } = self.lines[at];
        // Each that it takes is one more of its own and one less that is free.
        let kept_back = u32::from(self.places > 2);
        let share =
            if self.disks > 1 { free.saturating_sub(taken).div_ceil(2) } else { free.saturating_sub(kept_back) };
        let room = if self.beside_others { share.min(most.saturating_sub(taken)) } else { share };
        if batch_most == ALL { room } else { room.min(batch_most.saturating_sub(self.lines[at].in_batch(self.batch))) }
    }
}

impl<T> Line<T> {
    /// How many of this batch are its own.
    const fn in_batch(&self, batch: u64) -> u32 {
        if self.batched.0 == batch { self.batched.1 } else { 0 }
    }
}
