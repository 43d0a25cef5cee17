//! Who runs a request, and as what: by what is asked, and by the disk's options.

use std::sync::atomic::Ordering;

use super::*;
use crate::blocking::{MAX_IOVECS, PART};
use crate::job::Job;
use crate::triage::{Verdict, triage};
use crate::{DetectZeroes, Discard};

const SIZE: u64 = 4 << 20;
const DONE: Verdict = Verdict::Answered(Ok(()));
const REFUSED: Verdict = Verdict::Answered(Err(Errno::INVAL));
const WRITE: Op = Op::Write { fua: false };
const STABLE: Op = Op::Write { fua: true };

/// A request for the disk: who runs it, as what, and whether the disk is synced afterwards.
fn asked(disk: &Disk, op: Op, offset: u64, mut memory: Memory) -> (Verdict, Op, bool) {
    let len = memory.len() as u64;
    let moves = matches!(op, Op::Read | Op::Write { .. });
    let buffers = if moves { memory.iovecs() } else { Lent::default() };
    let mut job = Job::new(0, Request { op, offset, len, buffers, token: RequestToken(0) });
    let verdict = triage(disk, &mut job);
    (verdict, job.request.op, job.sync_after)
}

/// Of so many bytes, none of them zero.
fn of(len: u64) -> Memory {
    Memory::new(len as usize, 0)
}

fn disk(adjust: impl Fn(&mut Options)) -> (Image, Disk) {
    let image = Image::new(SIZE);
    let mut options = image.options();
    adjust(&mut options);
    let disk = Disk::open(&options).unwrap();
    (image, disk)
}

#[test]
fn what_changes_nothing_is_answered() {
    let (_image, disk) = disk(|options| options.discard = Discard::Unmap);
    let zeroes = Op::WriteZeroes { unmap: false, fua: false };
    for op in [Op::Read, WRITE, STABLE, Op::Discard, zeroes] {
        assert_eq!(asked(&disk, op, 512, of(0)).0, DONE, "{op:?} of nothing");
    }
    assert_eq!(asked(&disk, Op::Flush, 0, of(0)), (Verdict::Worker, Op::Flush, false));
}

#[test]
fn what_is_no_range_of_sectors_of_the_disk_is_refused_and_so_is_a_change_where_nothing_may_change() {
    let (image, writable) = disk(|_| ());
    for (offset, len) in [(1, 512), (512, 511), (256, 256), (SIZE, 512), (SIZE - 512, 1024), (u64::MAX - 511, 512)] {
        assert_eq!(asked(&writable, Op::Read, offset, of(len)).0, REFUSED, "{offset}+{len}");
    }
    assert_eq!(asked(&writable, Op::Read, SIZE - 512, of(512)).0, Verdict::Engine);
    drop(writable);
    let read_only = Disk::open(&Options { read_only: true, ..image.options() }).unwrap();
    for op in [WRITE, STABLE, Op::Discard, Op::WriteZeroes { unmap: false, fua: false }] {
        assert_eq!(asked(&read_only, op, 0, of(512)).0, Verdict::Answered(Err(Errno::ROFS)), "{op:?}");
    }
    assert_eq!(asked(&read_only, Op::Read, 0, of(512)).0, Verdict::Engine);
    assert_eq!(asked(&read_only, Op::Flush, 0, of(0)).0, Verdict::Worker);
}

#[test]
fn an_engine_moves_what_is_short_and_of_few_pieces_and_a_worker_the_rest() {
    let (_image, disk) = disk(|_| ());
    for op in [Op::Read, WRITE] {
        for (memory, expected) in [
            (of(PART), Verdict::Engine),
            (of(PART + 512), Verdict::Worker),
            (Memory::pieces(&[512; MAX_IOVECS], 0), Verdict::Engine),
            (Memory::pieces(&[512; MAX_IOVECS + 1], 0), Verdict::Worker),
            (Memory::new(4096, 7), Verdict::Engine),
        ] {
            assert_eq!(asked(&disk, op, 0, memory).0, expected, "{op:?}");
        }
    }
}

#[test]
fn a_stable_write_is_the_engine_s_where_the_kernel_can_do_it_and_is_like_another_where_flushes_are_ignored() {
    let (_image, mut flushed) = disk(|options| options.direct = true);
    flushed.become_a_device();
    let block = || of(flushed.offset_alignment().into());
    flushed.able.write_through.store(true, Ordering::Relaxed);
    assert_eq!(asked(&flushed, STABLE, 0, block()), (Verdict::Engine, STABLE, false));
    flushed.able.write_through.store(false, Ordering::Relaxed);
    assert_eq!(asked(&flushed, STABLE, 0, block()), (Verdict::Worker, STABLE, false));
    assert_eq!(asked(&flushed, WRITE, 0, block()), (Verdict::Engine, WRITE, false));
    let (_image, unflushed) = disk(|options| options.no_flush = true);
    unflushed.able.write_through.store(false, Ordering::Relaxed);
    assert_eq!(asked(&unflushed, STABLE, 0, of(512)), (Verdict::Engine, WRITE, false));
    assert_eq!(asked(&unflushed, Op::Flush, 0, of(0)).0, DONE);
}

#[test]
fn a_stable_write_that_may_go_to_the_page_cache_is_a_write_and_a_sync_which_alone_is_told_of_losses() {
    for (direct, is_device) in [(false, false), (false, true), (true, false)] {
        let (_image, mut cached) = disk(|options| options.direct = direct);
        if is_device {
            cached.become_a_device();
        }
        let block = || of(cached.offset_alignment().max(512).into());
        assert_eq!(asked(&cached, STABLE, 0, block()), (Verdict::Worker, WRITE, true), "{direct} {is_device}");
        assert_eq!(asked(&cached, WRITE, 0, block()), (Verdict::Engine, WRITE, false), "{direct} {is_device}");
    }
}

#[test]
fn zeroes_are_looked_for_in_writes_where_that_is_asked_for() {
    let zeroes = || Memory::new(4096, 0).filled(&[0; 4096]);
    let (_image, unlooked) = disk(|_| ());
    assert_eq!(asked(&unlooked, WRITE, 0, zeroes()), (Verdict::Engine, WRITE, false));
    for detect_zeroes in [DetectZeroes::On, DetectZeroes::Unmap] {
        let (_image, looked) = disk(|options| {
            options.detect_zeroes = detect_zeroes;
            options.discard = Discard::Unmap;
        });
        assert_eq!(asked(&looked, WRITE, 0, zeroes()), (Verdict::Worker, WRITE, false));
        assert_eq!(asked(&looked, STABLE, 0, zeroes()), (Verdict::Worker, WRITE, true), "synced by whoever writes it");
        assert_eq!(asked(&looked, WRITE, 0, of(4096)), (Verdict::Engine, WRITE, false));
    }
}

#[test]
fn discards_and_zeroes_are_for_workers_who_give_storage_back_where_that_is_asked_for_and_sync_what_is_to_be_stable() {
    let zeroes = |unmap, fua| Op::WriteZeroes { unmap, fua };
    for (discard, no_flush) in
        [(Discard::Ignore, false), (Discard::Ignore, true), (Discard::Unmap, false), (Discard::Unmap, true)]
    {
        let (_image, disk) = disk(|options| (options.discard, options.no_flush) = (discard, no_flush));
        let unmaps = discard == Discard::Unmap;
        let expected = if unmaps { Verdict::Worker } else { DONE };
        assert_eq!(asked(&disk, Op::Discard, 0, of(4096)).0, expected);
        for (unmap, fua) in [(false, false), (false, true), (true, false), (true, true)] {
            let expected = (Verdict::Worker, zeroes(unmap && unmaps, false), fua && !no_flush);
            assert_eq!(asked(&disk, zeroes(unmap, fua), 0, of(4096)), expected, "{discard:?} {no_flush}");
        }
    }
}

#[test]
fn a_null_disk_s_engine_runs_everything_but_long_reads_of_zeroes() {
    for read_zeroes in [false, true] {
        let driver = Driver::Null { size: SIZE, latency: Nanos::ZERO, read_zeroes };
        let null = Disk::open(&Options::new("null", driver)).unwrap();
        let long = if read_zeroes { Verdict::Worker } else { Verdict::Engine };
        for (op, len, expected) in [
            (Op::Read, PART, Verdict::Engine),
            (Op::Read, PART + 512, long),
            (WRITE, PART + 512, Verdict::Engine),
            (Op::Flush, 0, Verdict::Engine),
        ] {
            assert_eq!(asked(&null, op, 0, of(len)).0, expected, "{op:?} of {len}");
        }
    }
}
