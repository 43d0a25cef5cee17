//! Reads that the host's page cache answers, and that no engine sees.
//!
//! Such a read is a copy from memory to memory. An engine makes the same copy, but submitting and completing
//! it takes a system call, or waking a worker that wakes the loop. So one `preadv2` that does not wait is tried
//! in its stead, and what it finds is the guest's in the turn that asked for it.
//!
//! Only a read that is all that its I/O thread has in flight is tried. Of several an engine moves one while the others
//! wait for the storage, and workers move them side by side; here they would be moved one by one, and tried for nothing
//! where the storage has to be asked anyway.

use crate::blocking;
use crate::disk::Disk;
use crate::job::Job;
use crate::request::{Op, Request};

/// Bytes of the longest read that is tried: the other queues wait as long as the loop copies.
const LONGEST: u64 = 64 << 10;
/// The most reads that go by between two tries.
const LONGEST_PAUSE: u32 = 1024;

/// When reads of one attached disk are tried on the page cache: after each miss twice as many go by untried.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PageCacheProbe {
    /// Reads that go by before the next try.
    pause: u32,
    /// Reads that go by after the next miss.
    next: u32,
}

impl PageCacheProbe {
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

    /// Whether the page cache may be asked for it, should it stay alone.
    #[inline]
    pub(super) fn suits(job: &Job) -> bool {
        job.request.op == Op::Read && job.request.len <= LONGEST
    }

    /// Fills a read from the page cache; false if the engine has to, whatever the reason: should something be wrong, it
    /// will say so. Leaves none in the place of a probe that the file system cannot answer.
    pub(super) fn read(place: &mut Option<Self>, disk: &Disk, request: &Request) -> bool {
        let Some(probe) = place else { return false };
        if !probe.is_due() {
            return false;
        }
        let found = blocking::read_cached(disk, request.offset, &request.buffers);
        let hit = found == Ok(request.len);
        probe.learn(hit);
        if found.is_err_and(blocking::is_unsupported) {
            *place = None;
        }
        hit
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use egret_event_loop::{Backend, clock};

    use super::*;
    use crate::tests::Memory;
    use crate::{Driver, EngineOptions, EngineSet, Options, RequestToken};

    /// How many reads go by untried before the next one is tried.
    fn untried(probe: &mut PageCacheProbe) -> u32 {
        (0..).find(|_| probe.is_due()).unwrap()
    }

    #[test]
    fn the_more_often_a_try_was_in_vain_the_more_reads_go_by_before_the_next() {
        let mut probe = PageCacheProbe { pause: 0, next: 1 };
        let mut pauses = Vec::new();
        for _ in 0..13 {
            pauses.push(untried(&mut probe));
            probe.learn(false);
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]);
    }

    #[test]
    fn a_read_that_was_found_makes_up_for_all_that_were_not() {
        let mut probe = PageCacheProbe { pause: 0, next: 1 };
        for _ in 0..5 {
            untried(&mut probe);
            probe.learn(false);
        }
        assert_eq!(untried(&mut probe), 16);
        probe.learn(true);
        assert_eq!(untried(&mut probe), 0);
        probe.learn(false);
        assert_eq!(untried(&mut probe), 1);
    }

    #[test]
    fn a_file_system_that_cannot_read_without_waiting_is_asked_once() {
        let Ok(image) = tempfile::NamedTempFile::new_in(Path::new("/dev/shm")) else {
            egret_needs::this_test_lacks("/dev/shm");
            return;
        };
        image.as_file().set_len(8192).unwrap();
        let options = Options::new("disk0", Driver::File { filename: image.path().to_owned() });
        let disk = Arc::new(Disk::open(&options).unwrap());
        let mut memory = Memory::new(4096, 0);
        if blocking::read_cached(&disk, 0, &memory.iovecs()).is_ok() {
            return egret_needs::this_test_lacks("a file system in /dev/shm that cannot read without waiting");
        }
        let mut engines = EngineSet::new(EngineOptions::default());
        let slot = engines.attach(&disk).unwrap();
        assert_eq!(engines.slots[0].as_ref().unwrap().probe, Some(PageCacheProbe { pause: 0, next: 1 }));
        let request = Request { op: Op::Read, offset: 0, len: 4096, buffers: memory.iovecs(), token: RequestToken(0) };
        engines.push(slot, request);
        engines.submit(clock::now());
        assert_eq!(engines.slots[0].as_ref().unwrap().probe, None);
        assert_eq!((engines.in_flight(), engines.counters.cached.get()), (1, 0));
    }
}
