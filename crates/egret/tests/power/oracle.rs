//! What was said to be stable, against what the disk has done for it.
//!
//! A flush is answered when the disk has ended a flush that began after it was asked for: one that runs already need not be
//! about what has ended since. A write is stable when the disk has run it as a stable one, or a flush that began after it.
//!
//! All that counts is read off the disk's own [record](egret_faultdisk::FaultDisk::record), whichever engine has asked the
//! kernel for it and however that was done. A time of the record is never wrong in the daemon's disfavour: a request comes
//! to the disk after the client has asked, and is over before the client is told.

use std::ops::Range;
use std::time::Instant;

use egret_faultdisk::{IoType, Ran};

use crate::client::SECTOR;

/// Changes that have ended, and that no flush was about since: where they are, in bytes, and when they were asked for.
#[derive(Default)]
pub struct Oracle {
    open: Vec<(Range<u64>, Instant)>,
}

impl Oracle {
    /// A change has ended that a flush is to make stable.
    pub fn note(&mut self, bytes: Range<u64>, asked: Instant) {
        self.open.push((bytes, asked));
    }

    /// A flush has ended well: the disk has flushed meanwhile, and has what had ended before.
    pub fn flushed(&self, record: &[Ran], asked: Instant, told: Instant) {
        assert!(has_flushed(record, asked, told), "no flush of the disk began after one was asked for: {record:#?}");
        for (bytes, since) in &self.open {
            assert_stable(record, bytes, *since, told);
        }
    }

    /// Forgets what has ended: a flush was about it, or the power has gone.
    pub fn settle(&mut self) {
        self.open.clear();
    }
}

/// Asserts that the disk had made a change stable when the client was told so.
pub fn assert_stable(record: &[Ran], bytes: &Range<u64>, asked: Instant, told: Instant) {
    for sector in bytes.clone().step_by(SECTOR as usize) {
        let is_stable = record.iter().any(|ran| {
            let is_change = matches!(ran.asked.iotype, IoType::Write | IoType::Discard);
            let has_sector = ran.asked.at <= sector && sector + SECTOR <= ran.asked.at + ran.asked.len;
            let is_in_time = ran.begun >= asked && ran.ended <= told;
            let lasts = || ran.asked.is_stable || has_flushed(record, ran.ended, told);
            is_change && has_sector && is_in_time && lasts()
        });
        assert!(is_stable, "byte {sector} was not stable when that was said: {record:#?}");
    }
}

/// Whether the disk has run a flush that began after a time, and ended before another.
fn has_flushed(record: &[Ran], after: Instant, before: Instant) -> bool {
    record.iter().any(|ran| ran.asked.iotype == IoType::Flush && ran.begun >= after && ran.ended <= before)
}
