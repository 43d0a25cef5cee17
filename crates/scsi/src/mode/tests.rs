use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use egret_disk::Op;

use super::*;
use crate::command::Command;
use crate::step::Task;
use crate::testing::{Rig, await_wake, cdb10, config, waker_of_this_thread};
use crate::{Done, LunConfig, Nexus};

const CACHING: [u8; 20] = [8, 18, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CONTROL: [u8; 12] = [10, 10, 0x20, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
const DESCRIPTOR: [u8; 8] = [0, 0, 4, 0, 0, 0, 2, 0];

const fn sense_6(flags: u8, page: u8, subpage: u8) -> [u8; 6] {
    [0x1a, flags, page, subpage, 255, 0]
}

const fn sense_10(flags: u8, page: u8) -> [u8; 10] {
    [0x5a, flags, page, 0, 0, 0, 0, 1, 0, 0]
}

/// A caching page with the write cache off.
fn write_through() -> [u8; 20] {
    let mut page = CACHING;
    page[2] = 0;
    page
}

/// MODE SELECT (6) of these parts.
fn select_6(rig: &mut Rig, parts: &[&[u8]]) -> crate::testing::Reply {
    let list = parts.concat();
    rig.run(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list, 0)
}

/// SPC-5, MODE SENSE (6) command; SBC-4, caching mode page.
#[test]
fn mode_sense_6_has_header_descriptor_and_pages() {
    let mut rig = Rig::new(config());
    let one = rig.run(&sense_6(0, 8, 0), &[], 255).good();
    assert_eq!(one, [&[31, 0, 0x10, 8], &DESCRIPTOR[..], &CACHING].concat());
    let none = rig.run(&sense_6(8, 10, 0), &[], 255).good();
    assert_eq!(none, [&[15, 0, 0x10, 0], &CONTROL[..]].concat());
    assert_eq!(rig.run(&[0x1a, 0, 8, 0, 4, 0], &[], 255).good(), [31, 0, 0x10, 8]);
}

/// SPC-5, MODE SENSE (10) command; SBC-4, long LBA mode parameter block descriptor.
#[test]
fn mode_sense_10_has_a_long_header_and_a_long_descriptor_if_asked() {
    let mut rig = Rig::new(config());
    let short = rig.run(&sense_10(0, 8), &[], 255).good();
    assert_eq!(short, [&[0, 34, 0, 0x10, 0, 0, 0, 8], &DESCRIPTOR[..], &CACHING].concat());
    let long = rig.run(&sense_10(0x10, 8), &[], 255).good();
    let descriptor = [0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    assert_eq!(long, [&[0, 42, 0, 0x10, 1, 0, 0, 16], &descriptor[..], &CACHING].concat());
    let none = rig.run(&sense_10(0x18, 8), &[], 255).good();
    assert_eq!(none[..8], [0, 26, 0, 0x10, 1, 0, 0, 0]);
}

/// SBC-4 and SPC-5, the mode pages' own clauses.
#[test]
fn every_page_is_as_long_as_its_clause_says_and_claims_nothing_that_is_not_so() {
    let mut rig = Rig::new(config());
    let mut power = vec![0x1a, 0x26];
    power.resize(39, 0);
    power.push(0x54);
    let mut extension = vec![0x4a, 1, 0, 0x1c];
    extension.resize(32, 0);
    let pages: [(u8, u8, &[u8]); 8] = [
        (0x01, 0, &[0x01, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (0x02, 0, &[0x02, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (0x07, 0, &[0x07, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (0x08, 0, &CACHING),
        (0x0a, 0, &CONTROL),
        (0x0a, 1, &extension),
        (0x1a, 0, &power),
        (0x1c, 0, &[0x1c, 0x0a, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ];
    for (code, subpage, page) in pages {
        assert_eq!(rig.run(&sense_6(8, code, subpage), &[], 255).good()[4..], *page, "{code:#x}, {subpage}");
    }
    let mut ask = |code, subpage| rig.run(&sense_6(8, code, subpage), &[], 255).good().split_off(4);
    let of = |wanted: &dyn Fn(u8, u8) -> bool| {
        let wanted = pages.iter().filter(|(code, subpage, _)| wanted(*code, *subpage));
        wanted.flat_map(|(.., page)| page.iter().copied()).collect::<Vec<_>>()
    };
    assert_eq!(ask(0x3f, 0), of(&|_, subpage| subpage == 0), "every page");
    assert_eq!(ask(0x3f, 0xff), of(&|_, _| true), "and every subpage");
    assert_eq!(ask(0x0a, 0xff), of(&|code, _| code == 0x0a), "every subpage of one page");
    assert_eq!(ask(0x08, 0xff), CACHING);
}

/// SPC-5, MODE SELECT (6) command: what MODE SENSE has returned may be given back.
#[test]
fn all_pages_as_they_are_can_be_selected_and_change_nothing() {
    let mut rig = Rig::new(config());
    let other = rig.other(2);
    let mut list = rig.run(&sense_6(8, 0x3f, 0xff), &[], 255).good();
    list[0] = 0;
    select_6(&mut rig, &[&list]).good();
    assert_eq!((other.take_attention(), rig.ops.len()), (None, 0));
    // Any bit but the two is fixed, wherever it is.
    for at in 4..list.len() {
        let mut changed = list.clone();
        changed[at] ^= 0x10;
        let reply = select_6(&mut rig, &[&changed]);
        assert_eq!(reply.status, crate::Status::CheckCondition, "{at}");
    }
}

/// SPC-5, control mode page; SBC-4, mode parameters overview.
#[test]
fn a_unit_that_is_write_protected_by_software_refuses_writes_says_so_and_is_not_after_a_reset() {
    let mut rig = Rig::new(config());
    let other = rig.other(2);
    let mut protect = CONTROL;
    protect[4] = 8;
    select_6(&mut rig, &[&[0; 4], &protect]).good();
    assert_eq!(rig.ops, [(Op::Flush, 0, 0)], "what was cached is written first");
    assert_eq!(other.take_attention().map(|s| s.code), Some(Code::MODE_CHANGED));
    let header = rig.run(&sense_6(8, 0x0a, 0), &[], 255).good();
    assert_eq!((header[2], header[8]), (0x90, 8));
    let protected = Sense::new(crate::Key::DataProtect, Code::WRITE_PROTECTED);
    for cdb in [cdb10(0x2a, 0, 0, 1), cdb10(0x2e, 0, 0, 1), cdb10(0x41, 0, 0, 1), cdb10(0x42, 0, 0, 0)] {
        assert_eq!(rig.run_as(&other, &cdb, &[0; 512], 0).sense(), protected);
    }
    rig.run(&cdb10(0x28, 0, 0, 1), &[], 512).good();
    select_6(&mut rig, &[&[0; 4], &CONTROL]).good();
    assert_eq!(rig.ops, []);
    rig.run(&cdb10(0x2a, 0, 0, 1), &[0; 512], 0).good();
    select_6(&mut rig, &[&[0; 4], &protect]).good();
    rig.unit.reset();
    rig.nexus.take_attention();
    rig.run(&cdb10(0x2a, 0, 0, 1), &[0; 512], 0).good();
}

/// SAM-5, power on; SBC-4, caching mode page.
#[test]
fn a_unit_that_is_powered_on_again_has_its_own_size_and_modes_and_keeps_persistent_reservations() {
    let mut rig = Rig::new(config());
    select_6(&mut rig, &[&[0; 4], &write_through()]).good();
    let register = [&[0; 8][..], &1_u64.to_be_bytes(), &[0; 8]].concat();
    rig.run(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &register, 0).good();
    rig.unit.reset();
    assert!(!rig.unit.write_cache(), "whoever turned it off may still be there");
    rig.unit.power_on(4096);
    assert_eq!((rig.unit.write_cache(), rig.unit.blocks()), (true, 8));
    while rig.nexus.take_attention().is_some() {}
    assert_eq!(rig.run(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255).good()[15], 1);
}

#[test]
fn a_unit_that_is_made_anew_knows_of_its_disk_what_is_new_and_has_the_reservations_that_there_were() {
    let mut rig = Rig::new(LunConfig { discard: None, ..config() });
    let register = [&[0; 8][..], &1_u64.to_be_bytes(), &[0; 8]].concat();
    rig.run(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &register, 0).good();
    assert!(rig.unit.anew(LunConfig { logical_block_bytes: 7, ..config() }).is_err());
    let anew = rig.unit.anew(LunConfig { capacity_bytes: 4096, ..config() }).unwrap();
    assert_eq!((anew.config().discard, anew.blocks()), (config().discard, 8));
    let mut rig = Rig::of(anew);
    while rig.nexus.take_attention().is_some() {}
    assert_eq!(rig.run(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255).good()[15], 1);
}

/// SPC-5, page control field.
#[test]
fn page_control_chooses_current_changeable_and_default_values_and_nothing_is_saved() {
    let mut rig = Rig::new(config());
    select_6(&mut rig, &[&[0; 4], &write_through()]).good();
    let mut ask = |page| rig.run(&sense_6(8, page, 0), &[], 255);
    assert_eq!(ask(0x08).good()[4..7], [8, 18, 0]);
    let mut changeable = [0; 20];
    changeable[..3].copy_from_slice(&[8, 18, 4]);
    assert_eq!(ask(0x48).good()[4..], changeable);
    assert_eq!(ask(0x4a).good()[4..], [10, 10, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    for page in [0x01, 0x02, 0x07, 0x1a, 0x1c] {
        assert!(ask(0x40 | page).good()[6..].iter().all(|byte| *byte == 0), "{page:#x}");
        assert_eq!(ask(page).good(), ask(0x80 | page).good(), "{page:#x}");
    }
    assert_eq!(ask(0x88).good()[4..7], [8, 18, 4]);
    assert_eq!(ask(0xc8).sense(), Sense::illegal(Code::SAVING));
}

/// SPC-5, MODE SENSE (6) command.
#[test]
fn a_page_or_subpage_that_is_not_there_is_an_invalid_field() {
    let mut rig = Rig::new(config());
    assert_eq!(rig.run(&sense_6(0, 0x10, 0), &[], 255).sense(), Sense::cdb(2).bit(5));
    assert_eq!(rig.run(&sense_6(0, 0x0a, 2), &[], 255).sense(), Sense::cdb(3));
    assert_eq!(rig.run(&sense_6(0, 0x08, 1), &[], 255).sense(), Sense::cdb(3));
    assert_eq!(rig.run(&sense_6(0, 0x3f, 1), &[], 255).sense(), Sense::cdb(3), "all pages, and some subpages");
}

/// SBC-4, mode parameters overview.
#[test]
fn write_protection_is_in_the_header() {
    let mut rig = Rig::new(LunConfig { read_only: true, ..config() });
    assert_eq!(rig.run(&sense_6(8, 8, 0), &[], 255).good()[2], 0x90);
}

/// SBC-4, caching mode page.
#[test]
fn turning_the_write_cache_off_flushes_it_and_makes_every_write_stable() {
    let mut rig = Rig::new(config());
    select_6(&mut rig, &[&[0; 4], &write_through()]).good();
    assert_eq!(rig.ops, [(Op::Flush, 0, 0)]);
    assert!(!rig.unit.write_cache());
    rig.run(&cdb10(0x2a, 0, 0, 1), &[1; 512], 0).good();
    assert_eq!(rig.ops[0].0, Op::Write { fua: true });
    select_6(&mut rig, &[&[0; 4], &CACHING]).good();
    assert_eq!(rig.ops, []);
    assert!(rig.unit.write_cache());
}

#[test]
fn the_write_cache_is_flushed_when_those_writes_have_ended_that_began_before_it_was_turned_off() {
    let rig = Rig::new(config());
    let begin = |command: &mut Command, cdb: &[u8], out: &[u8]| {
        let data_out = out.len() as u64;
        let task = Task { cdb, nexus: &rig.nexus, luns: &[], data_in: 0, data_out, lane: 1, waker: Waker::noop() };
        rig.unit.begin(command, &task, &out)
    };
    let is_flush = |step: Step| matches!(step, Step::Disk(DiskOp { op: Op::Flush, .. }));
    let (mut write, mut select) = (Command::new(), Command::new());
    let (data, list) = ([1; 512], [&[0; 4][..], &write_through()].concat());
    assert!(matches!(begin(&mut write, &cdb10(0x2a, 0, 0, 1), &data), Step::Disk(_)));
    assert_eq!(begin(&mut select, &[0x15, 0x10, 0, 0, list.len() as u8, 0], &list), Step::Wait);
    assert!(matches!(rig.unit.step(&mut write, Ok(()), &&data[..], &rig.nexus, Waker::noop()), Step::Done(_)));
    assert!(is_flush(rig.unit.retry(&mut select, &rig.nexus, Waker::noop())));
    rig.unit.abort(&mut select);
}

/// Turns the write cache off, or has all writes refused: the two that have to flush.
fn flushing_pages() -> [Vec<u8>; 2] {
    let mut protect = CONTROL;
    protect[4] = 8;
    [write_through().into(), protect.into()]
}

fn begin_select(rig: &Rig, command: &mut Command, nexus: &Nexus, page: &[u8]) -> Step {
    let list = [&[0; 4], page].concat();
    let (cdb, out, waker) = ([0x15, 0x10, 0, 0, list.len() as u8, 0], &list[..], Waker::noop());
    let task = Task { cdb: &cdb, nexus, luns: &[], data_in: 0, data_out: out.len() as u64, lane: 1, waker };
    rig.unit.begin(command, &task, &out)
}

/// SBC-4, caching mode page: whoever sees that the write cache is off flushes no more.
#[test]
fn a_mode_select_whose_flush_fails_or_is_aborted_has_told_nobody_that_the_cache_is_off_and_flushes_when_it_is_tried_again()
 {
    for page in flushing_pages() {
        for is_aborted in [false, true] {
            let mut rig = Rig::new(config());
            let other = rig.other(2);
            if is_aborted {
                let (mut command, nexus) = (Command::new(), rig.nexus.clone());
                assert!(matches!(begin_select(&rig, &mut command, &nexus, &page), Step::Disk(DiskOp::FLUSH)));
                rig.unit.abort(&mut command);
            } else {
                rig.fails = Some((0, rustix::io::Errno::IO));
                assert_eq!(select_6(&mut rig, &[&[0; 4], &page]).status, crate::Status::CheckCondition);
                rig.fails = None;
            }
            other.take_attention();
            assert_eq!(rig.run_as(&other, &sense_6(8, 8, 0), &[], 255).good()[6], 4, "its cache may have something");
            select_6(&mut rig, &[&[0; 4], &page]).good();
            assert_eq!(rig.ops, [(Op::Flush, 0, 0)], "aborted: {is_aborted}");
            other.take_attention();
            let caching = rig.run_as(&other, &sense_6(8, 8, 0), &[], 255).good();
            assert_eq!(caching[6], if page[0] == 8 { 0 } else { 4 });
        }
    }
}

#[test]
fn two_that_select_the_same_at_the_same_time_both_wait_until_it_is_flushed() {
    for page in flushing_pages() {
        let rig = Rig::new(config());
        let other = rig.other(2);
        let (mut first, mut second) = (Command::new(), Command::new());
        assert!(matches!(begin_select(&rig, &mut first, &rig.nexus, &page), Step::Disk(DiskOp::FLUSH)));
        other.take_attention();
        assert!(matches!(begin_select(&rig, &mut second, &other, &page), Step::Disk(DiskOp::FLUSH)));
        rig.unit.abort(&mut first);
        rig.unit.abort(&mut second);
    }
}

/// What is flushed before the cache is turned on says nothing of what comes into it then.
#[test]
fn a_flush_that_began_before_the_cache_was_on_again_does_not_have_it_told_off() {
    let mut rig = Rig::new(config());
    let other = rig.other(2);
    let (mut first, mut second) = (Command::new(), Command::new());
    assert!(matches!(begin_select(&rig, &mut first, &other, &write_through()), Step::Disk(DiskOp::FLUSH)));
    select_6(&mut rig, &[&[0; 4], &CACHING]).good();
    assert!(matches!(begin_select(&rig, &mut second, &rig.nexus, &write_through()), Step::Disk(DiskOp::FLUSH)));
    assert!(matches!(rig.unit.step(&mut first, Ok(()), &&[][..], &other, Waker::noop()), Step::Done(_)));
    rig.nexus.take_attention();
    assert_eq!(rig.run(&sense_6(8, 8, 0), &[], 255).good()[6], 4);
    assert!(matches!(rig.unit.step(&mut second, Ok(()), &&[][..], &rig.nexus, Waker::noop()), Step::Done(_)));
    assert_eq!(rig.run(&sense_6(8, 8, 0), &[], 255).good()[6], 0);
    while other.take_attention().is_some() {}
}

#[test]
fn what_one_turns_off_another_does_not_turn_on_again_who_changes_something_else() {
    const EACH: usize = 500;
    let rig = Rig::new(config());
    let select = |nexus: &Nexus, command: &mut Command, page: &[u8]| {
        let (waker, list) = (&waker_of_this_thread(), &[&[0; 4][..], page].concat()[..]);
        let cdb = [0x15, 0x10, 0, 0, list.len() as u8, 0];
        let task = Task { cdb: &cdb, nexus, luns: &[], data_in: 0, data_out: list.len() as u64, lane: 1, waker };
        let mut step = rig.unit.begin(command, &task, &list);
        loop {
            step = match step {
                Step::Disk(_) => rig.unit.step(command, Ok(()), &list, nexus, waker),
                Step::Wait => {
                    await_wake();
                    rig.unit.retry(command, nexus, waker)
                }
                // It is told of what the other has changed.
                Step::Done(Done { sense: Some(_), .. }) => rig.unit.begin(command, &task, &list),
                Step::Done(_) | Step::Overrun { .. } => break,
            }
        }
    };
    let mut protect = CONTROL;
    protect[4] = 0x08;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (other, mut command) = (rig.other(2), Command::new());
            while !is_over.load(Ordering::Relaxed) {
                select(&other, &mut command, &protect);
                select(&other, &mut command, &CONTROL);
            }
        });
        let mut turned_on = 0;
        for _ in 0..EACH {
            select(&rig.nexus, &mut Command::new(), &CACHING);
            select(&rig.nexus, &mut Command::new(), &write_through());
            turned_on += usize::from(rig.unit.write_cache());
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(turned_on, 0);
    });
}

/// SPC-5, MODE SELECT (6) command.
#[test]
fn other_nexuses_are_told_of_a_change_and_the_one_that_made_it_is_not() {
    let mut rig = Rig::new(config());
    let other = rig.other(2);
    select_6(&mut rig, &[&[0; 4], &CACHING]).good();
    assert_eq!(other.take_attention(), None, "nothing has changed");
    select_6(&mut rig, &[&[0; 4], &write_through()]).good();
    assert_eq!(other.take_attention().map(|s| s.code), Some(Code::MODE_CHANGED));
    assert_eq!(rig.nexus.take_attention(), None);
    select_6(&mut rig, &[&[0; 4], &write_through()]).good();
    assert_eq!(other.take_attention(), None, "it was off already");
}

/// Whose cache it is that may have something in it is not known of others.
#[test]
fn a_cache_that_one_goes_on_without_is_told_of_until_it_is_flushed_if_there_are_others_or_may_be_something_in_it() {
    for (is_shared, may_be_filled) in [(false, false), (true, false), (false, true)] {
        let mut rig = Rig::new(config());
        let _other = is_shared.then(|| rig.other(2));
        if may_be_filled {
            rig.unit.go_on_with_stable_writes();
        } else {
            rig.unit.go_on_without_cache(rig.nexus.id());
        }
        assert!(!rig.unit.write_cache());
        let is_told = is_shared || may_be_filled;
        assert_eq!(rig.unit.reports_write_cache(), is_told);
        assert_eq!(rig.run(&sense_6(8, 8, 0), &[], 255).good()[6], if is_told { 4 } else { 0 });
        select_6(&mut rig, &[&[0; 4], &write_through()]).good();
        assert_eq!(rig.run(&sense_6(8, 8, 0), &[], 255).good()[6], 0);
        assert!(!rig.unit.reports_write_cache());
    }
}

/// SPC-5, MODE SELECT (10) command.
#[test]
fn a_list_is_as_long_as_there_can_be_and_a_longer_one_is_refused_whatever_it_begins_with() {
    let mut rig = Rig::new(config());
    let mut list = rig.run(&[0x5a, 0x10, 0x3f, 0xff, 0, 0, 0, 1, 0, 0], &[], 256).good();
    list[..2].fill(0);
    assert_eq!(list.len(), LONGEST_LIST);
    rig.run(&cdb10(0x55, 0x10, 0, list.len() as u16), &list, 0).good();
    list.push(0);
    let wrong = Sense::illegal(Code::PARAMETER_LIST_LENGTH);
    assert_eq!(rig.run(&cdb10(0x55, 0x10, 0, list.len() as u16), &list, 0).sense(), wrong);
}

/// SPC-5, MODE SELECT (10) command.
#[test]
fn mode_select_10_takes_a_short_or_a_long_descriptor_that_says_what_is() {
    let mut rig = Rig::new(config());
    let mut select = |list: &[&[u8]]| {
        let list = list.concat();
        rig.run(&[0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0], &list, 0)
    };
    let long = [0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    select(&[&[0, 0, 0, 0, 0, 0, 0, 8], &DESCRIPTOR, &CACHING, &CONTROL]).good();
    select(&[&[0, 0, 0, 0, 1, 0, 0, 16], &long, &CACHING]).good();
    select(&[&[0, 0, 0, 0, 0, 0, 0, 8], &[0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]]).good();
    select(&[&[0, 0, 0, 0, 0, 0, 0, 8], &[0, 0, 0, 0, 0, 0, 2, 0]]).good();
    select(&[&[0; 8]]).good();
    let wrong = |at| Sense::list(at);
    assert_eq!(select(&[&[0, 0, 0, 0, 0, 0, 0, 8], &[0, 0, 4, 1, 0, 0, 2, 0]]).sense(), wrong(8));
    assert_eq!(select(&[&[0, 0, 0, 0, 0, 0, 0, 8], &[0, 0, 4, 0, 0, 0, 16, 0]]).sense(), wrong(13));
    assert_eq!(select(&[&[0, 0, 0, 0, 0, 0, 0, 16], &long]).sense(), wrong(6));
}

/// SPC-5, MODE SELECT (6) command: nothing is saved, and pages are the standard's.
#[test]
fn a_mode_select_with_sp_or_without_pf_is_an_invalid_field() {
    let mut rig = Rig::new(config());
    assert_eq!(rig.run(&[0x15, 0x11, 0, 0, 4, 0], &[0; 4], 0).sense(), Sense::cdb(1).bit(0));
    assert_eq!(rig.run(&[0x15, 0, 0, 0, 4, 0], &[0; 4], 0).sense(), Sense::cdb(1).bit(4));
    rig.run(&[0x15, 0x10, 0, 0, 0, 0], &[], 0).good();
    assert_eq!(rig.overrun(&[0x15, 0x10, 0, 0, 24, 0], &[0; 23], 0), 24);
}

/// SPC-5, mode parameters.
#[test]
fn a_list_that_is_wrong_anywhere_changes_nothing() {
    let mut rig = Rig::new(config());
    let mut fixed = CONTROL;
    fixed[2] = 0x04;
    let mut longer = CACHING;
    longer[1] = 10;
    for (list, sense) in [
        (&[&[0; 3][..]][..], Sense::illegal(Code::PARAMETER_LIST_LENGTH)),
        (&[&[0, 0, 0, 8], &[0; 7]], Sense::illegal(Code::PARAMETER_LIST_LENGTH)),
        (&[&[0; 4], &write_through()[..19]], Sense::illegal(Code::PARAMETER_LIST_LENGTH)),
        (&[&[0; 4], &write_through(), &[10]], Sense::illegal(Code::PARAMETER_LIST_LENGTH)),
        (&[&[0, 0, 0, 4], &[0; 4]], Sense::list(3)),
        (&[&[0; 4], &write_through(), &[0x10, 22]], Sense::list(24).bit(5)),
        // SPF.
        (&[&[0; 4], &write_through(), &[0x48, 18]], Sense::list(24).bit(5)),
        (&[&[0; 4], &write_through(), &fixed], Sense::list(26)),
        (&[&[0; 4], &longer], Sense::list(5)),
        (&[&[0; 4], &write_through(), &CACHING], Sense::list(24).bit(5)),
        // Subpages: one that is cut off, one that there is not, and one of another length.
        (&[&[0; 4], &write_through(), &[0x4a]], Sense::illegal(Code::PARAMETER_LIST_LENGTH)),
        (&[&[0; 4], &write_through(), &[0x4a, 1, 0]], Sense::illegal(Code::PARAMETER_LIST_LENGTH)),
        (&[&[0; 4], &write_through(), &[0x4a, 2, 0, 28]], Sense::list(25)),
        (&[&[0; 4], &write_through(), &[0x4a, 1, 1, 28]], Sense::list(26)),
    ] {
        assert_eq!(select_6(&mut rig, list).sense(), sense);
        assert!(rig.unit.write_cache());
    }
    // PS means nothing to MODE SELECT.
    let mut saveable = CACHING;
    saveable[0] |= 0x80;
    select_6(&mut rig, &[&[0; 4], &saveable]).good();
}
