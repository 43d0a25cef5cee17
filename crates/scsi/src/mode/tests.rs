use egret_disk::Op;

use super::*;
use crate::LunConfig;
use crate::testing::{Rig, cdb10, config};

const CACHING: [u8; 20] = [8, 18, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CONTROL: [u8; 12] = [10, 10, 0, 0x10, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
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
    for subpage in [0, 0xff] {
        let all = rig.run(&sense_6(8, 0x3f, subpage), &[], 255).good();
        assert_eq!(all, [&[35, 0, 0x10, 0], &CACHING[..], &CONTROL].concat());
    }
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
    assert_eq!(ask(0x4a).good()[4..], [10, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(ask(0x88).good()[4..7], [8, 18, 4]);
    assert_eq!(ask(0xc8).sense(), Sense::illegal(Code::SAVING));
}

/// SPC-5, MODE SENSE (6) command.
#[test]
fn a_page_or_subpage_that_is_not_there_is_an_invalid_field() {
    let mut rig = Rig::new(config());
    assert_eq!(rig.run(&sense_6(0, 0x1c, 0), &[], 255).sense(), Sense::cdb(2).bit(5));
    assert_eq!(rig.run(&sense_6(0, 0x0a, 1), &[], 255).sense(), Sense::cdb(3));
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
        (&[&[0; 4], &write_through(), &[0x1c, 10]], Sense::list(24).bit(5)),
        // SPF.
        (&[&[0; 4], &write_through(), &[0x48, 18]], Sense::list(24).bit(5)),
        (&[&[0; 4], &write_through(), &fixed], Sense::list(26)),
        (&[&[0; 4], &longer], Sense::list(5)),
    ] {
        assert_eq!(select_6(&mut rig, list).sense(), sense);
        assert!(rig.unit.write_cache());
    }
    // PS means nothing to MODE SELECT.
    let mut saveable = CACHING;
    saveable[0] |= 0x80;
    select_6(&mut rig, &[&[0; 4], &saveable]).good();
}
