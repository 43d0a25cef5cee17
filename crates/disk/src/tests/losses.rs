//! What the page cache has lost, and who has to be told before somebody who opens the disk once more lifts that.

use std::io;

use egret_faultdisk::{Effect, ErrnoName, IoType};

use super::*;
use crate::Locking;

/// A disk through the page cache.
struct Cached {
    faulty: FaultDisk,
    _folder: tempfile::TempDir,
}

impl Cached {
    fn new() -> Option<Self> {
        let (folder, faulty) = fault_disk(1 << 20)?;
        Some(Self { faulty, _folder: folder })
    }

    fn open(&self) -> Arc<Disk> {
        self.open_with(false)
    }

    fn open_with(&self, direct: bool) -> Arc<Disk> {
        let options = Options::new("disk0", Driver::File { filename: self.faulty.path() });
        Arc::new(Disk::open(&Options { direct, locking: Locking::Off, ..options }).unwrap())
    }

    /// Has what is written next be lost, as one flush tells.
    fn lose(&self) {
        self.faulty.inject(IoType::Flush, Some(1), Effect::Errno(ErrnoName::Eio));
    }
}

/// Opens a disk once more, as somebody who names it does.
fn reopened(old: &Arc<Disk>) -> Arc<Disk> {
    let new = Arc::new(old.reopen(old.options()).unwrap());
    new.follow(old);
    new
}

/// How a guest's flush ends.
fn flushed(disk: &Arc<Disk>) -> Result<(), Errno> {
    Rig::over(Arc::clone(disk), EngineOptions::default()).run(Op::Flush, 0, 0)
}

/// Those who have a disk made stable that no guest has asked for.
const UNASKED: [fn(&Disk) -> io::Result<()>; 2] = [Disk::write_out, Disk::flush];

#[test]
fn what_was_found_lost_when_no_guest_had_asked_is_lifted_by_who_opens_the_disk_after_a_flush_has_failed() {
    let Some(cached) = Cached::new() else { return };
    for ask in UNASKED {
        let disk = cached.open();
        cached.lose();
        ask(&disk).unwrap_err();
        let once = reopened(&reopened(&disk));
        assert!(ask(&once).is_err() && once.let_go_of_predecessor().is_err(), "these are no guests either");
        let twice = reopened(&once);
        assert_eq!([flushed(&twice), flushed(&twice)], [Err(Errno::IO); 2]);
        assert!(ask(&twice).is_err());
        assert_eq!(flushed(&reopened(&twice)), Ok(()));
    }
}

#[test]
fn what_a_disk_left_behind_and_lost_is_not_lifted_by_who_writes_out_the_one_after_it() {
    let Some(cached) = Cached::new() else { return };
    for ask in UNASKED {
        let disk = reopened(&cached.open());
        cached.lose();
        disk.let_go_of_predecessor().unwrap_err();
        ask(&disk).unwrap_err();
        let disk = reopened(&disk);
        assert_eq!(flushed(&disk), Err(Errno::IO));
        assert_eq!(flushed(&reopened(&disk)), Ok(()));
    }
}

#[test]
fn what_was_written_to_a_file_by_direct_io_may_be_lost_as_well() {
    let Some(cached) = Cached::new() else { return };
    let disk = cached.open_with(true);
    cached.lose();
    assert_eq!([flushed(&disk), flushed(&disk)], [Err(Errno::IO); 2]);
    let disk = reopened(&disk);
    assert_eq!(flushed(&disk), Ok(()));
    // Of what was written before a reopening the old file alone may be told.
    let disk = reopened(&disk);
    cached.lose();
    disk.let_go_of_predecessor().unwrap_err();
    assert_eq!([flushed(&disk), flushed(&disk)], [Err(Errno::IO); 2]);
}

#[test]
fn what_a_guest_was_told_of_is_lifted_whoever_has_asked_since() {
    let Some(cached) = Cached::new() else { return };
    for ask in UNASKED {
        let disk = cached.open();
        cached.lose();
        assert_eq!(flushed(&disk), Err(Errno::IO));
        ask(&disk).unwrap_err();
        assert_eq!(flushed(&reopened(&disk)), Ok(()));
    }
}
