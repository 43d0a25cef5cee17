//! The logical units of a device, and what one queue sees of them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use egret_scsi::{LogicalUnit, Nexus};

use super::Scsi;
use super::address::LunAddress;
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
    /// How many blocks the driver has been told of.
    pub(super) blocks: AtomicU64,
}

/// All logical units of a device at one moment. A change makes a new one.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// By address.
    luns: Vec<Arc<Lun>>,
}

impl Table {
    pub(super) fn all(&self) -> &[Arc<Lun>] {
        &self.luns
    }

    pub(super) fn find(&self, address: LunAddress) -> Option<&Arc<Lun>> {
        self.luns.binary_search_by_key(&address, |lun| lun.address).ok().map(|at| &self.luns[at])
    }

    pub(super) fn of_target(&self, target: u8) -> &[Arc<Lun>] {
        let from = self.luns.partition_point(|lun| lun.address.target < target);
        let to = self.luns.partition_point(|lun| lun.address.target <= target);
        &self.luns[from..to]
    }

    pub(super) fn with(&self, lun: Arc<Lun>) -> Self {
        let mut luns = self.luns.clone();
        luns.push(lun);
        luns.sort_by_key(|lun| lun.address);
        Self { luns }
    }

    pub(super) fn without(&self, address: LunAddress) -> Self {
        Self { luns: self.luns.iter().filter(|lun| lun.address != address).cloned().collect() }
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
    /// The place in `found` of the last one: most commands are for the same.
    last: usize,
}

struct Seen {
    lun: Arc<Lun>,
    in_flight: u32,
    there: bool,
}

impl View {
    pub(super) fn new(scsi: &Scsi) -> Self {
        let mut view = Self { version: u64::MAX, table: Arc::default(), seen: Vec::new(), found: Vec::new(), last: 0 };
        view.refresh(scsi);
        view
    }

    /// Looks whether there are others now: one load if there are not.
    #[inline]
    pub(super) fn refresh(&mut self, scsi: &Scsi) {
        if scsi.version() != self.version {
            self.renew(scsi);
        }
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
        for lun in self.table.all() {
            if self.seen.iter().flatten().any(|seen| Arc::ptr_eq(&seen.lun, lun)) {
                continue;
            }
            let new = Some(Seen { lun: Arc::clone(lun), in_flight: 0, there: true });
            match self.seen.iter().position(Option::is_none) {
                Some(vacant) => self.seen[vacant] = new,
                None => self.seen.push(new),
            }
        }
        let there = self.seen.iter().enumerate().filter_map(|(at, seen)| Some((at, seen.as_ref()?)));
        self.found = there.filter(|(_, seen)| seen.there).map(|(at, seen)| (seen.lun.address, at)).collect();
        self.found.sort_unstable();
        self.last = 0;
    }

    /// Where the unit at `address` is.
    #[inline]
    pub(super) fn find(&mut self, address: LunAddress) -> Option<usize> {
        match self.found.get(self.last) {
            Some(&(last, at)) if last == address => return Some(at),
            _ => {}
        }
        self.last = self.found.binary_search_by_key(&address, |(address, _)| *address).ok()?;
        Some(self.found[self.last].1)
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
    #[inline]
    pub(super) fn enter(&mut self, at: usize) {
        if let Some(seen) = &mut self.seen[at] {
            seen.in_flight += 1;
        }
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
