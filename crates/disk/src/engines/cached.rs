//! Reads that the host's page cache answers, and that no engine sees.
//!
//! Such a read is a copy from memory to memory. An engine makes the same copy, but it has to be told to, and to be heard
//! of again: by a system call, or by waking a worker that wakes the loop. So one `preadv2` that does not wait is tried
//! in its stead, and what it finds is the guest's in the turn that asked for it.
//!
//! Only a read that is all that its I/O thread has in flight is tried. Of several an engine moves one while the others
//! wait for the storage, and workers move them side by side; here they would be moved one by one, and tried for nothing
//! where the storage has to be asked anyway.

use super::{Attached, Engines, completion};
use crate::blocking;
use crate::disk::Disk;
use crate::job::Job;
use crate::request::{Op, Request};

/// Bytes of the longest read that is tried: the other queues wait as long as the loop copies.
const LONGEST: u64 = 64 << 10;
/// The most reads that go by between two tries.
const LONGEST_PAUSE: u32 = 1024;

/// When the page cache is tried for one attached disk: the more seldom, the more often it was in vain.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Trial {
    /// Reads that go by before the next try.
    pause: u32,
    /// Reads that go by after the next miss.
    next: u32,
}

impl Trial {
    /// `None` where no read comes out of the page cache.
    pub(super) fn of(disk: &Disk) -> Option<Self> {
        (disk.file().is_some() && !disk.options.direct).then_some(Self { pause: 0, next: 1 })
    }

    /// Whether this read is tried.
    const fn is_due(&mut self) -> bool {
        let due = self.pause == 0;
        self.pause = self.pause.saturating_sub(1);
        due
    }

    fn learn(&mut self, hit: bool) {
        if hit {
            self.next = 1;
        } else {
            self.pause = self.next;
            self.next = (self.next * 2).min(LONGEST_PAUSE);
        }
    }
}

/// Whether the page cache may be asked for it, should it stay alone.
#[inline]
pub(super) fn suits(attached: &Attached, job: &Job) -> bool {
    attached.cache.is_some() && job.request.op == Op::Read && job.request.len <= LONGEST
}

impl Attached {
    /// Fills a read from the page cache; false if the engine has to, whatever the reason: should something be wrong, it
    /// will say so.
    fn read_cached(&mut self, request: &Request) -> bool {
        let Some(trial) = &mut self.cache else { return false };
        if !trial.is_due() {
            return false;
        }
        let found = blocking::read_cached(&self.disk, request.offset, &request.buffers);
        let hit = found == Ok(request.len);
        trial.learn(hit);
        if found.is_err_and(blocking::is_unsupported) {
            self.cache = None;
        }
        hit
    }
}

impl Engines {
    /// Runs a read that has stayed alone until its batch was complete.
    #[inline]
    pub(super) fn run_alone(&mut self, job: Job) {
        let Some(attached) = &mut self.slots[job.slot as usize] else { return };
        let kind = attached.kind;
        if attached.read_cached(&job.request) {
            self.counters.cached.add(1);
            self.answers.push_back((job.slot, completion(job, Ok(()))));
        } else {
            self.give(kind, job);
        }
    }

    /// There is another one: a read that was alone goes with it.
    #[inline]
    pub(super) fn end_alone(&mut self) {
        if let Some(job) = self.alone.take()
            && let Some(attached) = &self.slots[job.slot as usize]
        {
            self.give(attached.kind, job);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use egret_event_loop::{Backend, clock};

    use super::*;
    use crate::tests::Memory;
    use crate::{Driver, EngineOptions, Options, RequestToken};

    /// How many reads go by untried before the next one is tried.
    fn untried(trial: &mut Trial) -> u32 {
        (0..).find(|_| trial.is_due()).unwrap()
    }

    #[test]
    fn the_more_often_a_try_was_in_vain_the_more_reads_go_by_before_the_next() {
        let mut trial = Trial { pause: 0, next: 1 };
        let mut pauses = Vec::new();
        for _ in 0..13 {
            pauses.push(untried(&mut trial));
            trial.learn(false);
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]);
    }

    #[test]
    fn a_read_that_was_found_makes_up_for_all_that_were_not() {
        let mut trial = Trial { pause: 0, next: 1 };
        for _ in 0..5 {
            untried(&mut trial);
            trial.learn(false);
        }
        assert_eq!(untried(&mut trial), 16);
        trial.learn(true);
        assert_eq!(untried(&mut trial), 0);
        trial.learn(false);
        assert_eq!(untried(&mut trial), 1);
    }

    #[test]
    fn a_file_system_that_cannot_read_without_waiting_is_asked_once() {
        let Ok(image) = tempfile::NamedTempFile::new_in(Path::new("/dev/shm")) else {
            println!("skipped: /dev/shm is missing");
            return;
        };
        image.as_file().set_len(8192).unwrap();
        let options = Options::new("disk0", Driver::File { filename: image.path().to_owned() });
        let disk = Arc::new(Disk::open(&options).unwrap());
        let mut memory = Memory::new(4096, 0);
        if blocking::read_cached(&disk, 0, &memory.iovecs()).is_ok() {
            println!("skipped: /dev/shm reads without waiting");
            return;
        }
        let mut engines = Engines::new(EngineOptions::default());
        let slot = engines.attach(&disk).unwrap();
        assert_eq!(engines.slots[0].as_ref().unwrap().cache, Some(Trial { pause: 0, next: 1 }));
        let request = Request { op: Op::Read, offset: 0, len: 4096, buffers: memory.iovecs(), token: RequestToken(0) };
        engines.push(slot, request);
        engines.submit(clock::now());
        assert_eq!(engines.slots[0].as_ref().unwrap().cache, None);
        assert_eq!((engines.in_flight(), engines.counters.cached.get()), (1, 0));
    }
}
