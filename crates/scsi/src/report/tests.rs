use super::*;
use crate::nexus::Flags;
use crate::sense::{Code, Key};
use crate::testing::{LUNS, Rig, config};
use crate::{DiscardConfig, LunConfig};

const READ_CAPACITY_10: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn read_capacity_16(len: u8) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[13]) = (0x9e, 0x10, len);
    cdb
}

fn opcodes(options: u8, code: u8, action: u8) -> [u8; 12] {
    [0xa3, 0x0c, options, code, 0, action, 0, 0, 0x10, 0, 0, 0]
}

/// SBC-4, READ CAPACITY (10) command.
#[test]
fn read_capacity_10_returns_the_last_address_or_all_ones_if_it_does_not_fit() {
    let mut rig = Rig::new(config());
    assert_eq!(rig.run(&READ_CAPACITY_10, &[], 8).good(), [0, 0, 3, 0xff, 0, 0, 2, 0]);
    rig.unit.set_capacity(u64::MAX);
    rig.nexus.take_attention();
    assert_eq!(rig.run(&READ_CAPACITY_10, &[], 8).good(), [0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]);
}

/// SBC-4, READ CAPACITY (16) command.
#[test]
fn read_capacity_16_adds_provisioning_and_the_physical_block() {
    let mut rig = Rig::new(config());
    let data = rig.run(&read_capacity_16(32), &[], 32).good();
    assert_eq!(data[..16], [0, 0, 0, 0, 0, 0, 3, 0xff, 0, 0, 2, 0, 0, 3, 0x80, 0]);
    assert_eq!(data[16..], [0; 16]);
    assert_eq!(rig.run(&read_capacity_16(12), &[], 12).good(), data[..12]);
    let zeroes = config().discard.map(|discard| DiscardConfig { reads_zeroes: true, ..discard });
    let data = Rig::new(LunConfig { discard: zeroes, ..config() }).run(&read_capacity_16(32), &[], 32).good();
    assert_eq!(data[14], 0xc0);
    let config = LunConfig { discard: None, logical_block_bytes: 4096, capacity_bytes: 1 << 33, ..config() };
    let data = Rig::new(config).run(&read_capacity_16(32), &[], 32).good();
    assert_eq!(data[..16], [0, 0, 0, 0, 0, 0x1f, 0xff, 0xff, 0, 0, 0x10, 0, 0, 0, 0, 0]);
}

/// SBC-4, capacity data has changed.
#[test]
fn a_new_size_is_told_once_and_used_at_once() {
    let mut rig = Rig::new(config());
    assert!(!rig.unit.set_capacity(1024 * 512 + 511));
    assert!(rig.unit.set_capacity(512));
    let changed = Sense::new(Key::UnitAttention, Code::CAPACITY_CHANGED);
    assert_eq!(rig.run(&READ_CAPACITY_10, &[], 8).sense(), changed);
    assert_eq!(rig.run(&READ_CAPACITY_10, &[], 8).good()[..4], [0, 0, 0, 0]);
    assert_eq!(rig.unit.config().capacity_bytes, config().capacity_bytes, "what it was made of stays");
    rig.unit.set_capacity(0);
    rig.nexus.take_attention();
    assert_eq!(rig.run(&[0x08, 0, 0, 0, 1, 0], &[], 512).sense().code, Code::LBA_RANGE);
}

/// SPC-5, REPORT SUPPORTED OPERATION CODES command.
#[test]
fn every_command_in_the_list_of_commands_is_reported_alone_too_and_works() {
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    let list = rig.run(&opcodes(0, 0, 0), &[], 4096).good();
    assert_eq!(u32::from_be_bytes(list[..4].try_into().unwrap()) as usize, list.len() - 4);
    let descriptors: Vec<_> = list[4..].chunks(8).collect();
    assert_eq!(descriptors.len(), TABLE.len());
    for descriptor in descriptors {
        let (code, action, has_action) = (descriptor[0], descriptor[3], descriptor[5] & 1);
        let one = rig.run(&opcodes(1 + has_action, code, action), &[], 64).good();
        assert_eq!(one[..4], [0, 3, 0, descriptor[7]]);
        assert_eq!(one.len(), 4 + usize::from(descriptor[7]));
        assert_eq!(one[4], code);
        assert_eq!(
            has_action == 1,
            one[5] & ACTION == action && TABLE.iter().any(|s| s.code == code && s.action == Some(action))
        );
        assert_eq!(rig.run(&opcodes(3, code, action), &[], 64).good(), one);
        // All of the bits that it says it uses may be set without there being a reserved one.
        let mut cdb = one[4..].to_vec();
        cdb[1] = cdb[1] & !ACTION | one[5] & ACTION;
        assert!(crate::cdb::Cdb::parse(&cdb).is_ok(), "{code:#x}");
    }
}

/// SPC-5, one_command parameter data format.
#[test]
fn a_cdb_s_usage_has_the_operation_code_the_service_action_and_ones_for_what_is_looked_at() {
    let mut rig = Rig::new(config());
    let own = rig.run(&opcodes(2, 0xa3, 0x0c), &[], 64).good();
    assert_eq!(own, [0, 3, 0, 12, 0xa3, 0x0c, 0x87, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]);
    let read = rig.run(&opcodes(1, 0x28, 0), &[], 64).good();
    assert_eq!(read, [0, 3, 0, 10, 0x28, 0x18, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0]);
}

/// SPC-5, REPORTING OPTIONS field.
#[test]
fn reporting_options_that_do_not_fit_the_command_are_an_invalid_field() {
    let mut rig = Rig::new(config());
    for (options, code) in [(1, 0x5e), (1, 0xa3), (2, 0x28), (4, 0x28), (7, 0)] {
        assert_eq!(rig.run(&opcodes(options, code, 0), &[], 64).sense(), Sense::cdb(2).bit(2), "{options} {code:#x}");
    }
}

/// SPC-5, SUPPORT field.
#[test]
fn a_command_that_is_not_there_is_reported_as_not_supported() {
    let mut rig = Rig::new(LunConfig { discard: None, max_compare_and_write_blocks: 0, ..config() });
    for (options, code, action) in [
        (1, 0x42, 0),
        (3, 0x42, 0),
        (1, 0x89, 0),
        (1, 0x1e, 0),
        (1, 0xff, 0),
        (2, 0xff, 1),
        (2, 0x9e, 0x12),
        (3, 0x28, 1),
    ] {
        assert_eq!(rig.run(&opcodes(options, code, action), &[], 64).good(), [0, 1, 0, 0], "{code:#x}");
    }
    let list = rig.run(&opcodes(0, 0, 0), &[], 4096).good();
    assert!(list[4..].chunks(8).all(|d| ![0x42, 0x89, 0x1e].contains(&d[0])));
}

/// SPC-5, command timeouts descriptor.
#[test]
fn timeouts_are_there_if_asked_for_and_say_nothing() {
    let mut rig = Rig::new(config());
    let timeouts = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let one = rig.run(&opcodes(0x81, 0x28, 0), &[], 64).good();
    assert_eq!((one[1], &one[14..]), (0x83, &timeouts[..]));
    let list = rig.run(&opcodes(0x80, 0, 0), &[], 4096).good();
    assert!(list[4..].chunks(20).all(|d| d[5] & 2 != 0 && d[8..] == timeouts));
}

/// SPC-5, REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS command.
#[test]
fn task_management_functions_are_those_of_the_transport() {
    let mut rig = Rig::new(config());
    assert_eq!(rig.run(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16).good(), [0xdc, 3, 0, 0]);
    let long = rig.run(&[0xa3, 0x0d, 0x80, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16).good();
    assert_eq!((&long[..4], long.len()), (&[0xdc, 3, 0, 12][..], 16));
    assert_eq!(rig.run(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0], &[], 16).good(), [0xdc, 3, 0, 0]);
    assert_eq!(rig.run(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0], &[], 16).sense(), Sense::cdb(6));
}

/// SPC-5, REPORT LUNS command.
#[test]
fn report_luns_returns_the_caller_s_list_for_the_kinds_that_there_are() {
    let mut rig = Rig::new(config());
    let mut ask = |select, len| rig.run(&[0xa0, 0, select, 0, 0, 0, 0, 0, 0, len, 0, 0], &[], 255);
    let all = [&[0, 0, 0, 16, 0, 0, 0, 0][..], &LUNS[0].to_be_bytes(), &LUNS[1].to_be_bytes()].concat();
    assert_eq!(ask(0, 255).good(), all);
    assert_eq!(ask(2, 255).good(), all);
    assert_eq!(ask(2, 16).good(), all[..16]);
    assert_eq!(ask(1, 255).good(), [0; 8]);
    assert_eq!(ask(3, 255).sense(), Sense::cdb(2));
    assert_eq!(ask(0, 15).sense(), Sense::cdb(6));
}

/// SAM-5, unit attention conditions.
#[test]
fn whoever_asks_for_the_list_of_luns_is_not_told_that_it_has_changed() {
    let mut rig = Rig::new(config());
    rig.unit.attend(Attention::LunsChanged, None);
    let ask = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0];
    assert_eq!(rig.overrun(&ask, &[], 20), 24);
    assert!(rig.nexus.flags().has(Flags::ATTENTION), "an overrun has told nothing");
    rig.unit.attend(Attention::ModeChanged, None);
    rig.run(&ask, &[], 255).good();
    assert_eq!(rig.nexus.take_attention().map(|s| s.code), Some(Code::MODE_CHANGED));
    assert!(rig.nexus.flags().is_clear());
}

/// SPC-5, LOG SENSE command.
#[test]
fn log_sense_has_the_list_of_pages_and_no_other() {
    let mut rig = Rig::new(config());
    let mut ask =
        |flags, page, subpage, pointer| rig.run(&[0x4d, flags, page, subpage, 0, 0, pointer, 0, 255, 0], &[], 255);
    assert_eq!(ask(0, 0, 0, 0).good(), [0, 0, 0, 1, 0]);
    assert_eq!(ask(0, 0x40, 0xff, 0).good(), [0x40, 0xff, 0, 4, 0, 0, 0, 0xff]);
    assert_eq!(ask(0, 0x2f, 0, 0).sense(), Sense::cdb(2).bit(5));
    assert_eq!(ask(0, 0, 1, 0).sense(), Sense::cdb(3));
    assert_eq!(ask(0, 0, 0, 1).sense(), Sense::cdb(5));
    assert_eq!(ask(2, 0, 0, 0).sense(), Sense::cdb(1).bit(1));
}
