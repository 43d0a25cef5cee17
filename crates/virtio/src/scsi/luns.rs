//! The logical units of a device, and what one queue sees of them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64};

use egret_scsi::{LogicalUnit, Nexus};

use super::address::{Addressed, LunAddress};
use super::{CACHE_OFF, CACHE_ON, Scsi};
use crate::model::DiskKey;

/// A logical unit, and where it is.
#[derive(Debug)]
pub struct Lun {
    /// Where drivers find it.
    pub address: LunAddress,
    /// Which of the export's disks it has.
    pub disk: DiskKey,
    /// What it is. Other devices may have it, too.
    pub unit: Arc<LogicalUnit>,
    /// The driver, as it sees it.
    pub(super) nexus: Arc<Nexus>,
    /// How many blocks it had when its size was last reported to the driver.
    pub(super) blocks: AtomicU64,
    /// What the record has of its [cache](Self::cache), or 0 before it has any of it.
    pub(super) noted: AtomicU8,
}

impl Lun {
    /// What a record is to have of its write cache.
    #[inline]
    pub(super) fn cache(&self) -> u8 {
        let off = if self.unit.write_cache() { 0 } else { CACHE_OFF };
        off | if self.unit.reports_write_cache() { CACHE_ON } else { 0 }
    }
}

/// All logical units of a device at one moment. A change makes a new one.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// By address.
    luns: Vec<Arc<Lun>>,
    /// For REPORT LUNS, made once and not for each who asks: their numbers within their targets, and within the whole
    /// device, as a driver addresses them.
    numbers: Vec<u64>,
    addresses: Vec<u64>,
}

impl Table {
    fn of(mut luns: Vec<Arc<Lun>>) -> Self {
        luns.sort_by_key(|lun| lun.address);
        let numbers = luns.iter().map(|lun| lun.address.number()).collect();
        let addresses = luns.iter().map(|lun| u64::from_be_bytes(lun.address.to_bytes())).collect();
        Self { luns, numbers, addresses }
    }

    pub(super) fn all(&self) -> &[Arc<Lun>] {
        &self.luns
    }

    pub(super) fn find(&self, address: LunAddress) -> Option<&Arc<Lun>> {
        self.luns.binary_search_by_key(&address, |lun| lun.address).ok().map(|at| &self.luns[at])
    }

    pub(super) fn of_target(&self, target: u8) -> &[Arc<Lun>] {
        &self.luns[self.places(target)]
    }

    /// The units of a target, for REPORT LUNS.
    pub(super) fn numbers(&self, target: u8) -> &[u64] {
        &self.numbers[self.places(target)]
    }

    /// Those of the whole device.
    pub(super) fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    fn places(&self, target: u8) -> Range<usize> {
        let from = self.luns.partition_point(|lun| lun.address.target < target);
        let to = self.luns.partition_point(|lun| lun.address.target <= target);
        from..to
    }

    pub(super) fn with(&self, lun: Arc<Lun>) -> Self {
        Self::of(self.luns.iter().cloned().chain([lun]).collect())
    }

    pub(super) fn without(&self, address: LunAddress) -> Self {
        Self::of(self.luns.iter().filter(|lun| lun.address != address).cloned().collect())
    }
}

/// The logical units as one queue sees them: those that are there, and those that have gone while it still has commands
/// for them. Found without touching anything that another queue writes to.
pub(super) struct View {
    version: u64,
    table: Arc<Table>,
    seen: Vec<Option<Seen>>,
    /// Where in `seen` those are that are still there, by address.
    found: Vec<(LunAddress, usize)>,
    /// How a driver wrote the address of the last one that it asked for, and where that is: most commands are for the
    /// same.
    last: Option<([u8; 8], usize)>,
}

struct Seen {
    lun: Arc<Lun>,
    in_flight: u32,
    there: bool,
}

impl View {
    pub(super) fn new(scsi: &Scsi) -> Self {
        let mut view =
            Self { version: u64::MAX, table: Arc::default(), seen: Vec::new(), found: Vec::new(), last: None };
        view.refresh(scsi);
        view
    }

    /// Looks whether there are others now: one load if there are not.
    #[inline]
    pub(super) fn refresh(&mut self, scsi: &Scsi) {
        if !self.is_current(scsi) {
            self.renew(scsi);
        }
    }

    /// Whether there are no others than when it looked last.
    #[inline]
    pub(super) fn is_current(&self, scsi: &Scsi) -> bool {
        scsi.version() == self.version
    }

    #[cold]
    fn renew(&mut self, scsi: &Scsi) {
        (self.version, self.table) = scsi.snapshot();
        for place in &mut self.seen {
            let Some(seen) = place else { continue };
            seen.there = self.table.find(seen.lun.address).is_some_and(|lun| Arc::ptr_eq(lun, &seen.lun));
            if !seen.there && seen.in_flight == 0 {
                *place = None;
            }
        }
        let places = self.seen.iter().enumerate().filter_map(|(at, seen)| Some((at, seen.as_ref()?)));
        let there = places.filter(|(_, seen)| seen.there).map(|(at, seen)| (seen.lun.address, at));
        // There may be thousands, and this is in the middle of a turn: nothing is looked for in all of them.
        let known: BTreeMap<_, _> = there.collect();
        let mut vacant = 0;
        self.found.clear();
        for lun in self.table.all() {
            let at = known.get(&lun.address).copied().unwrap_or_else(|| {
                while matches!(self.seen.get(vacant), Some(Some(_))) {
                    vacant += 1;
                }
                if vacant == self.seen.len() {
                    self.seen.push(None);
                }
                self.seen[vacant] = Some(Seen { lun: Arc::clone(lun), in_flight: 0, there: true });
                vacant
            });
            self.found.push((lun.address, at));
        }
        self.last = None;
    }

    /// Where the unit is that a driver addresses so, if there is one.
    #[inline]
    pub(super) fn find(&mut self, lun: [u8; 8]) -> Option<usize> {
        match self.last {
            Some((last, at)) if last == lun => Some(at),
            _ => self.search(lun),
        }
    }

    fn search(&mut self, lun: [u8; 8]) -> Option<usize> {
        let Addressed::Unit(address) = Addressed::parse(lun) else { return None };
        let found = self.found.binary_search_by_key(&address, |(address, _)| *address).ok()?;
        let (_, at) = self.found[found];
        self.last = Some((lun, at));
        Some(at)
    }

    /// The unit that [`find`](Self::find) found there.
    #[inline]
    pub(super) fn lun(&self, at: usize) -> &Lun {
        &self.seen[at].as_ref().expect("a unit stays while there are commands for it").lun
    }

    /// All units that are there.
    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// A command for the unit has begun.
    #[inline(always)]
    pub(super) fn enter(&mut self, at: usize) {
        self.seen[at].as_mut().expect("a unit stays while there are commands for it").in_flight += 1;
    }

    /// It has ended.
    #[inline]
    pub(super) fn leave(&mut self, at: usize) {
        if let Some(seen) = &mut self.seen[at] {
            seen.in_flight -= 1;
            if seen.in_flight == 0 && !seen.there {
                self.seen[at] = None;
            }
        }
    }
}
