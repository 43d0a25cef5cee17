//! The guest's memory: which of its addresses are whose, and where they are mapped here.
//!
//! A [`GuestMemory`] never changes. A change makes a new one (an *epoch*) that shares the mappings that stay, so a
//! worker may finish what is in flight on the old map while the new one already exists; a mapping goes away with the
//! last map that holds it.
//!
//! The peer can write to all of it at any time, and can truncate the file behind it. No reference to guest memory
//! ever exists; `fault` turns the SIGBUS of a truncated file into a flag. Which files may be memory, and how much of it
//! there may be, is for [`MemoryRules`] to say.

mod access;
mod budget;
mod fault;
mod iovec;
pub mod iovecs;
mod lent;
mod log;
mod mapping;
pub mod volatile;

use std::cmp::Reverse;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use thiserror::Error;

pub use budget::{MemoryBudget, MemoryLimits, OverBudget};
pub use iovec::IoVec;
pub(crate) use lent::Lender;
pub use lent::{Access, Buffers, Lent};
pub use log::{DirtyLog, LOG_PAGE};
use mapping::Mapping;

/// What may be guest memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryRules {
    /// Which files.
    pub files: MemoryFiles,
    /// How much of them; no limit if there is none.
    pub budget: Option<Arc<MemoryBudget>>,
    /// Whether disks may have the kernel pin it.
    pub pin: bool,
}

/// Which files may be guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryFiles {
    /// Those that live in this kernel's memory: memfds, and files on tmpfs and hugetlbfs. What else touches them cannot
    /// make an access wait.
    #[default]
    SharedMemory,
    /// All that can be mapped. An access waits for as long as whoever keeps the file likes: a FUSE or NFS server for ever.
    Any,
}

/// A stretch of guest memory, as a vhost-user front-end describes it.
#[derive(Debug)]
pub struct Region<F = File> {
    /// Where the guest sees it, in bytes.
    pub guest_addr: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Where the front-end has it mapped: ring addresses come in these terms.
    pub user_addr: u64,
    /// The memory itself. Dropped once it is mapped, or refused.
    pub file: F,
    /// Where in `file` the region begins, in bytes.
    pub offset: u64,
}

impl Region {
    /// `size` bytes of new memory at `guest_addr`, which is also where its front-end has it: for a driver that makes its
    /// own. The file can be cloned, and handed to a device, before the region is mapped.
    ///
    /// # Errors
    ///
    /// The system's refusal.
    pub fn anonymous(guest_addr: u64, size: u64) -> io::Result<Self> {
        let file = mapping::memfd()?;
        file.set_len(size)?;
        Ok(Self { guest_addr, size, user_addr: guest_addr, file, offset: 0 })
    }
}

impl<F> Region<F> {
    /// Looks for numbers that no region can have.
    fn check(&self) -> Result<(), MemoryError> {
        let Self { guest_addr, size, user_addr, offset, .. } = *self;
        if size == 0 {
            return Err(MemoryError::Empty { guest_addr });
        }
        let ends = [
            (guest_addr, u64::MAX, "guest addresses"),
            (user_addr, u64::MAX, "front-end addresses"),
            (offset, i64::MAX as u64, "file"),
        ];
        for (start, limit, space) in ends {
            if start.checked_add(size).is_none_or(|end| end > limit) {
                return Err(MemoryError::Overflow { guest_addr, size, space });
            }
        }
        Ok(())
    }
}

/// Why a memory map could not be changed.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// A region of no length.
    #[error("memory region at {guest_addr:#x} has no length")]
    Empty {
        /// The region's guest address.
        guest_addr: u64,
    },
    /// Its end is past the end of an address space or of any file.
    #[error("memory region at {guest_addr:#x} of {size:#x} bytes overflows its {space}")]
    Overflow {
        /// The region's guest address.
        guest_addr: u64,
        /// Its length in bytes.
        size: u64,
        /// What overflows.
        space: &'static str,
    },
    /// It covers guest addresses that another region has.
    #[error("memory region at {guest_addr:#x} of {size:#x} bytes overlaps the one at {other:#x}")]
    Overlap {
        /// The region's guest address.
        guest_addr: u64,
        /// Its length in bytes.
        size: u64,
        /// The guest address of the region it overlaps.
        other: u64,
    },
    /// The file ends before the region does.
    #[error("memory region at {guest_addr:#x} needs a file of {needed:#x} bytes, its file has {file:#x}")]
    ShortFile {
        /// The region's guest address.
        guest_addr: u64,
        /// Offset and size together, in bytes.
        needed: u64,
        /// The file's length in bytes.
        file: u64,
    },
    /// No such region to remove.
    #[error("no memory region at {guest_addr:#x} of {size:#x} bytes to remove")]
    Unknown {
        /// The guest address asked for.
        guest_addr: u64,
        /// The length asked for, in bytes.
        size: u64,
    },
    /// Not a file that may be memory.
    #[error(
        "memory region at {guest_addr:#x} is not shared memory: a memfd, or a file on tmpfs or hugetlbfs \
         (the export's memory-files=any takes other files, whose server or disk can then stop its I/O thread)"
    )]
    NotShared {
        /// The region's guest address.
        guest_addr: u64,
    },
    /// More than may be mapped.
    #[error("memory region at {guest_addr:#x}: {why}")]
    OverBudget {
        /// The region's guest address.
        guest_addr: u64,
        /// What there is too much of.
        why: OverBudget,
    },
    /// The process has as many regions mapped as it can watch.
    #[error("more than {limit} memory regions mapped in this process")]
    TooMany {
        /// How many can be watched.
        limit: usize,
    },
    /// The system refused.
    #[error("cannot {what} the memory region at {guest_addr:#x}: {source}")]
    System {
        /// What was refused.
        what: &'static str,
        /// The region's guest address.
        guest_addr: u64,
        /// Why.
        source: io::Error,
    },
}

/// Guest addresses `guest..guest + size`, and where they are mapped here.
#[derive(Clone, Copy)]
struct Span {
    guest: u64,
    size: u64,
    host: *mut u8,
}

impl Span {
    /// Has no address, not even for nothing.
    const NONE: Self = Self { guest: u64::MAX, size: 0, host: ptr::without_provenance_mut(usize::MAX) };

    /// The iovec of `len` bytes at `guest_addr`, if the span has all of it.
    #[inline]
    fn iovec(&self, guest_addr: u64, len: u64) -> Option<IoVec> {
        let offset = guest_addr.wrapping_sub(self.guest);
        if offset >= self.size || len > self.size - offset {
            return None;
        }
        // SAFETY: `offset + len <= size`, and the map that holds this span holds the mapping of `size` bytes at
        // `host`. Whoever keeps iovecs keeps the map: a queue until nothing of it is in flight.
        Some(unsafe { IoVec::new(self.host.add(offset as usize), len as usize) })
    }

    /// Whether it has the host addresses of `iovec`.
    #[inline]
    fn holds(&self, iovec: &IoVec) -> bool {
        let offset = (iovec.base() as u64).wrapping_sub(self.host as u64);
        offset < self.size && iovec.len() as u64 <= self.size - offset
    }
}

/// An immutable map of guest memory.
pub struct GuestMemory {
    /// The two largest spans, or empty ones in their place: nearly every buffer is in one of them, and two predictable
    /// comparisons are done before a search has begun.
    largest: [Span; 2],
    /// By guest address, no two overlapping; `mappings[i]` is what keeps `spans[i]` mapped.
    spans: Vec<Span>,
    mappings: Vec<Arc<Mapping>>,
    /// The same spans by host address.
    by_host: Vec<Span>,
    rules: MemoryRules,
    /// Where it is noted what was written.
    log: Option<Arc<DirtyLog>>,
    /// How many [truncations](fault::truncations) there had been when all of it was last found whole.
    whole_at: AtomicUsize,
}

// SAFETY: the pointers name mappings that `mappings` keeps for as long as the map lives, and every access through them
// is volatile or atomic and good from any thread.
unsafe impl Send for GuestMemory {}
// SAFETY: as above; the map itself never changes.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// A map with nothing in it, for any amount of shared memory.
    pub fn empty() -> Self {
        Self::under(MemoryRules::default())
    }

    /// A map with nothing in it, for what `rules` allow.
    pub fn under(rules: MemoryRules) -> Self {
        Self::of(Vec::new(), rules)
    }

    /// A map of `size` bytes at `guest_addr`, which is where its front-end has them, too: an allocation, which needs no
    /// system call, and which tools that run no system calls know all about.
    #[cfg(any(test, feature = "testing"))]
    pub fn allocated(guest_addr: u64, size: u64) -> Self {
        Self::of(vec![Arc::new(Mapping::allocated(guest_addr, size))], MemoryRules::default())
    }

    /// This map and `region`.
    ///
    /// # Errors
    ///
    /// A region that is empty, wraps round, overlaps another's guest addresses, or is longer than its file; one that is
    /// against the map's rules; or the system's refusal to map it. This map is as it was.
    pub fn with<F: AsFd>(&self, region: Region<F>) -> Result<Self, MemoryError> {
        let (guest_addr, size) = (region.guest_addr, region.size);
        region.check()?;
        let other =
            self.spans.iter().find(|span| guest_addr < span.guest + span.size && span.guest < guest_addr + size);
        if let Some(other) = other {
            return Err(MemoryError::Overlap { guest_addr, size, other: other.guest });
        }
        let mut mappings = self.mappings.clone();
        mappings.push(Arc::new(Mapping::new(region, &self.rules)?));
        Ok(self.remade(mappings))
    }

    /// This map without the region that was added with exactly these numbers.
    ///
    /// # Errors
    ///
    /// There is no such region.
    pub fn without(&self, guest_addr: u64, size: u64, user_addr: u64) -> Result<Self, MemoryError> {
        let same = |m: &Arc<Mapping>| m.guest_addr == guest_addr && m.size == size && m.user_addr == user_addr;
        let Some(gone) = self.mappings.iter().position(same) else {
            return Err(MemoryError::Unknown { guest_addr, size });
        };
        let mut mappings = self.mappings.clone();
        mappings.remove(gone);
        Ok(self.remade(mappings))
    }

    /// This map, and what is written through it from here on is in `log`.
    pub fn logging(&self, log: Option<Arc<DirtyLog>>) -> Self {
        Self { log, ..Self::of(self.mappings.clone(), self.rules.clone()) }
    }

    /// A map of these mappings, with this one's rules and log.
    fn remade(&self, mappings: Vec<Arc<Mapping>>) -> Self {
        Self { log: self.log.clone(), ..Self::of(mappings, self.rules.clone()) }
    }

    fn of(mut mappings: Vec<Arc<Mapping>>, rules: MemoryRules) -> Self {
        mappings.sort_by_key(|m| m.guest_addr);
        let spans: Vec<Span> =
            mappings.iter().map(|m| Span { guest: m.guest_addr, size: m.size, host: m.base() }).collect();
        let mut by_host = spans.clone();
        by_host.sort_by_key(|span| span.host);
        let mut largest = spans.clone();
        largest.sort_by_key(|span| Reverse(span.size));
        largest.resize(2, Span::NONE);
        let whole_at = AtomicUsize::new(0);
        Self { largest: [largest[0], largest[1]], spans, mappings, by_host, rules, log: None, whole_at }
    }

    /// The number of regions.
    pub fn regions(&self) -> usize {
        self.mappings.len()
    }

    /// Whether disks may have the kernel pin it.
    pub fn may_be_pinned(&self) -> bool {
        self.rules.pin
    }

    /// Where each region is mapped.
    pub fn mapped(&self) -> impl Iterator<Item = IoVec> {
        // SAFETY: the map that holds these spans holds their mappings; whoever moves data by the iovecs keeps the map.
        self.by_host.iter().map(|span| unsafe { IoVec::new(span.host, span.size as usize) })
    }

    /// The guest address of what the front-end has at `user_addr`.
    pub fn guest_address(&self, user_addr: u64) -> Option<u64> {
        self.mappings.iter().find_map(|m| {
            let offset = user_addr.checked_sub(m.user_addr).filter(|&offset| offset < m.size)?;
            Some(m.guest_addr + offset)
        })
    }

    /// The end of the last region.
    pub fn end(&self) -> u64 {
        self.spans.last().map_or(0, |span| span.guest + span.size)
    }

    /// Whether it is made of the same mappings, so that what one of them holds the other holds.
    pub fn has_the_regions_of(&self, other: &Self) -> bool {
        self.mappings.len() == other.mappings.len()
            && self.mappings.iter().zip(&other.mappings).all(|(one, other)| Arc::ptr_eq(one, other))
    }

    /// Whether what `other` holds this holds, too, in the same mappings, whatever else it has.
    pub fn includes(&self, other: &Self) -> bool {
        other.mappings.iter().all(|mapping| self.mappings.iter().any(|own| Arc::ptr_eq(own, mapping)))
    }

    /// Where it is noted what was written.
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref()
    }

    /// Whether the peer took memory away from under one of the regions, so that what is there now is not the guest's.
    ///
    /// Two loads and a comparison, for before each batch of accesses; the regions are looked at once for each time that
    /// a region of anybody was truncated.
    #[inline]
    pub fn is_truncated(&self) -> bool {
        let truncations = fault::truncations();
        self.whole_at.load(Ordering::Relaxed) != truncations && self.look_for_truncation(truncations)
    }

    #[cold]
    fn look_for_truncation(&self, truncations: usize) -> bool {
        // A region is marked before its truncation is counted.
        fence(Ordering::Acquire);
        let is_truncated =
            self.mappings.iter().any(|m| m.is_truncated()) || self.log.as_ref().is_some_and(|log| log.is_truncated());
        if !is_truncated {
            self.whole_at.store(truncations, Ordering::Relaxed);
        }
        is_truncated
    }

    fn span_at(&self, guest_addr: u64) -> Option<&Span> {
        let after = self.spans.partition_point(|span| span.guest <= guest_addr);
        self.spans.get(after.checked_sub(1)?)
    }

    /// `len` bytes at `guest_addr`, when they lie wholly inside one region.
    #[inline]
    pub(crate) fn slice(&self, guest_addr: u64, len: usize) -> Option<IoVec> {
        let len = len as u64;
        let [first, second] = &self.largest;
        let iovec = first.iovec(guest_addr, len).or_else(|| second.iovec(guest_addr, len));
        iovec.or_else(|| self.span_at(guest_addr)?.iovec(guest_addr, len))
    }

    /// Appends `len` bytes at `guest_addr` to `into`: one iovec, or one for each of the adjacent regions that they
    /// lie in. False, and `into` as it was, when some of them are in no region.
    #[inline]
    pub(crate) fn iovecs(&self, guest_addr: u64, len: usize, into: &mut Vec<IoVec>) -> bool {
        if let Some(iovec) = self.slice(guest_addr, len) {
            into.push(iovec);
            return true;
        }
        self.slices_across(guest_addr, len, into)
    }

    #[cold]
    fn slices_across(&self, mut guest_addr: u64, len: usize, into: &mut Vec<IoVec>) -> bool {
        let before = into.len();
        let mut left = len as u64;
        while left > 0 {
            let here = self.span_at(guest_addr).and_then(|span| {
                let room = span.size - (guest_addr - span.guest).min(span.size);
                span.iovec(guest_addr, left.min(room)).filter(|iovec| !iovec.is_empty())
            });
            let Some(iovec) = here else {
                into.truncate(before);
                return false;
            };
            into.push(iovec);
            guest_addr = guest_addr.wrapping_add(iovec.len() as u64);
            left -= iovec.len() as u64;
        }
        true
    }
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.mappings.iter()).finish()
    }
}

#[cfg(kani)]
mod proofs;
// Miri maps no files.
#[cfg(all(test, not(miri)))]
mod tests;
