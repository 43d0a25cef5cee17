use super::*;
use crate::testing::{Rig, config};
use crate::{Attention, DiscardConfig, Key, Task};

const fn inquiry(vital: u8, page: u8, len: u8) -> [u8; 6] {
    [0x12, vital, page, 0, len, 0]
}

/// A vital product data page, less its header.
fn page(config: LunConfig, page: u8) -> Vec<u8> {
    let mut data = Rig::new(config).run(&inquiry(1, page, 255), &[], 255).good();
    assert_eq!(data[..2], [0, page]);
    assert_eq!(usize::from(u16::from_be_bytes([data[2], data[3]])), data.len() - 4);
    data.split_off(4)
}

/// SPC-5, standard INQUIRY data.
#[test]
fn standard_inquiry_data_says_what_the_unit_is_and_which_standards_it_claims() {
    let config = LunConfig { vendor: "ACME".into(), product: "Pond".into(), revision: "2.0".into(), ..config() };
    let data = Rig::new(config).run(&inquiry(0, 0, 255), &[], 255).good();
    assert_eq!(data[..8], [0, 0, 7, 0x12, data.len() as u8 - 5, 0, 0, 2]);
    assert_eq!(&data[8..36], b"ACME    Pond            2.0 ");
    assert_eq!(data[58..64], [0x00, 0xa0, 0x05, 0xc0, 0x06, 0x00]);
    assert_eq!(data.len(), 74);
}

/// SPC-5, standard INQUIRY data.
#[test]
fn a_removable_medium_is_said_to_be_one() {
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    assert_eq!(rig.run(&inquiry(0, 0, 36), &[], 36).good()[1], 0x80);
}

/// SPC-5, ALLOCATION LENGTH field.
#[test]
fn no_more_is_returned_than_is_allocated_and_that_is_no_error() {
    let mut rig = Rig::new(config());
    for len in [0, 5, 36, 74] {
        assert_eq!(rig.run(&inquiry(0, 0, len), &[], 255).good().len(), usize::from(len));
    }
    assert_eq!(rig.run(&inquiry(0, 0, 255), &[], 74).moved, 74);
    assert_eq!(rig.overrun(&inquiry(0, 0, 255), &[], 73), 74);
}

/// SPC-5, INQUIRY command.
#[test]
fn a_page_that_is_unknown_or_asked_for_without_evpd_is_an_invalid_field() {
    let mut rig = Rig::new(config());
    assert_eq!(rig.run(&inquiry(0, 0x80, 255), &[], 255).sense(), Sense::cdb(2));
    assert_eq!(rig.run(&inquiry(1, 0xb7, 255), &[], 255).sense(), Sense::cdb(2));
    // CMDDT, obsolete.
    assert_eq!(rig.run(&inquiry(2, 0, 255), &[], 255).sense(), Sense::cdb(1).bit(1));
}

/// SPC-5, supported VPD pages.
#[test]
fn every_page_in_the_list_of_pages_is_there() {
    let pages = page(config(), 0x00);
    assert_eq!(pages, [0x00, 0x80, 0x83, 0x85, 0x86, 0x87, 0x88, 0xb0, 0xb1, 0xb2]);
    for code in pages {
        assert_eq!(page(config(), code).is_empty(), code == 0x85, "{code:#x}");
    }
}

/// SPC-5, unit serial number VPD page.
#[test]
fn the_serial_number_is_returned_as_it_was_given() {
    assert_eq!(page(config(), 0x80), b"SN-1");
}

/// SPC-5, device identification VPD page.
#[test]
fn the_unit_is_identified_by_vendor_and_serial_number_and_by_its_world_wide_name() {
    let data = page(LunConfig { naa: Some(Naa::Short(0x5001_2345_6789_abcd)), ..config() }, 0x83);
    let (vendor, rest) = data.split_at(4 + 12);
    assert_eq!(vendor, [&[2, 1, 0, 12], &b"EGRET   SN-1"[..]].concat());
    let (naa, rest) = rest.split_at(12);
    assert_eq!(naa, [1, 3, 0, 8, 0x50, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd]);
    let (name, port) = rest.split_at(4 + 24);
    assert_eq!(name, [&[3, 8, 0, 24], &b"naa.500123456789ABCD\0\0\0\0"[..]].concat());
    assert_eq!(port, [1, 0x14, 0, 4, 0, 0, 0, 1], "relative target port identifier");

    let long = page(LunConfig { naa: Some(Naa::Long(6 << 124 | 1)), ..config() }, 0x83);
    assert_eq!(long[16..22], [1, 3, 0, 16, 0x60, 0]);
    let made_up = page(config(), 0x83);
    assert_eq!(made_up[20] >> 4, 3, "locally assigned");
    assert_eq!(page(config(), 0x83), made_up);
}

/// SPC-5, device identification VPD page.
#[test]
fn the_longest_serial_number_fits_where_it_is_whole_and_is_cut_where_it_is_not() {
    let serial = "s".repeat(252);
    let mut rig = Rig::new(LunConfig { serial: serial.clone(), ..config() });
    let long = |page| [0x12, 1, page, 4, 0, 0];
    assert_eq!(&rig.run(&long(0x80), &[], 1024).good()[4..], serial.as_bytes());
    let data = rig.run(&long(0x83), &[], 1024).good();
    assert_eq!(data[7], 255);
    assert_eq!(data[4 + 4 + 255..][..4], [1, 3, 0, 8]);
}

/// SPC-5, management network addresses VPD page.
#[test]
fn there_is_no_network_address_to_manage_the_unit_at() {
    let mut rig = Rig::new(config());
    assert_eq!(rig.run(&inquiry(1, 0x85, 255), &[], 255).good(), [0, 0x85, 0, 0]);
    assert_eq!(rig.run(&inquiry(1, 0x85, 2), &[], 255).good(), [0, 0x85]);
}

/// SPC-5, extended INQUIRY data VPD page.
#[test]
fn extended_inquiry_data_claims_simple_tasks_a_volatile_cache_and_the_sense_data_there_is() {
    let data = page(config(), 0x86);
    let mut expected = [0; 0x3c];
    (expected[5 - 4], expected[6 - 4], expected[13 - 4]) = (1, 1, Sense::LEN as u8);
    assert_eq!(data, expected);
}

/// SPC-5, mode page policy VPD page.
#[test]
fn mode_pages_are_said_to_be_shared() {
    assert_eq!(page(config(), 0x87), [0x3f, 0xff, 0, 0]);
}

/// SPC-5, SCSI ports VPD page.
#[test]
fn the_port_that_is_asked_is_in_the_list_of_ports() {
    assert_eq!(page(config(), 0x88), [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
}

/// SBC-4, block limits VPD page.
#[test]
fn block_limits_are_the_disk_s_own_in_blocks() {
    let config = LunConfig {
        max_transfer_bytes: 8 << 20,
        optimal_transfer_bytes: 1 << 20,
        discard: Some(DiscardConfig {
            max_bytes: 64 << 10,
            granularity_bytes: 8192,
            alignment_bytes: 4096,
            max_descriptors: 4,
            reads_zeroes: false,
        }),
        ..config()
    };
    let data = page(config, 0xb0);
    assert_eq!(data.len(), 0x3c);
    let number = |at: usize| u32::from_be_bytes(data[at - 4..at].try_into().unwrap());
    assert_eq!(data[..2], [1, 128], "WSNZ, maximum compare and write length");
    assert_eq!(data[2..4], [0, 8], "optimal transfer length granularity");
    assert_eq!(number(8), 16384, "maximum transfer length");
    assert_eq!(number(12), 2048, "optimal transfer length");
    assert_eq!(number(16), 0, "maximum prefetch length");
    assert_eq!(number(20), 512, "maximum unmap LBA count");
    assert_eq!(number(24), 4, "maximum unmap block descriptor count");
    assert_eq!(number(28), 16, "optimal unmap granularity");
    assert_eq!(number(32), 1 << 31 | 8, "unmap granularity alignment");
    assert_eq!((number(36), number(40)), (0, 1024), "maximum write same length");
    assert_eq!(data[40 - 4 + 4..], [0; 20]);
}

/// SBC-4, block limits VPD page.
#[test]
fn limits_that_do_not_fit_are_the_most_that_does() {
    let all = u64::MAX;
    let discard = DiscardConfig {
        max_bytes: all,
        granularity_bytes: 512,
        alignment_bytes: 0,
        max_descriptors: 256,
        reads_zeroes: true,
    };
    let data = page(LunConfig { max_transfer_bytes: all, discard: Some(discard), ..config() }, 0xb0);
    assert_eq!(data[4..8], [0xff; 4]);
    assert_eq!(data[16..20], [0xff; 4]);
}

/// SBC-4, block limits VPD page.
#[test]
fn without_discard_there_are_no_unmap_limits() {
    let data = page(LunConfig { discard: None, ..config() }, 0xb0);
    assert_eq!(data[16..32], [0; 16]);
}

/// SBC-4, block device characteristics VPD page.
#[test]
fn a_disk_without_seek_time_says_so() {
    assert_eq!(page(config(), 0xb1)[..2], [0, 1]);
    let data = page(LunConfig { solid_state: false, ..config() }, 0xb1);
    assert_eq!((data[..2].to_vec(), data.len()), (vec![0, 0], 0x3c));
}

/// SBC-4, logical block provisioning VPD page.
#[test]
fn provisioning_says_how_blocks_are_unmapped_and_what_they_read_as() {
    assert_eq!(page(config(), 0xb2), [0, 0xe0, 2, 0]);
    assert_eq!(page(LunConfig { discard: None, ..config() }, 0xb2), [0, 0, 0, 0]);
    let zeroes = config().discard.map(|discard| DiscardConfig { reads_zeroes: true, ..discard });
    assert_eq!(page(LunConfig { discard: zeroes, ..config() }, 0xb2), [0, 0xe4, 2, 0]);
}

/// SPC-5, REQUEST SENSE command.
#[test]
fn request_sense_reports_a_unit_attention_once_and_then_nothing() {
    let mut rig = Rig::new(config());
    rig.unit.attend(Attention::CapacityChanged, None);
    let request = [3, 0, 0, 0, 252, 0];
    let attention = Sense::new(Key::UnitAttention, Code::CAPACITY_CHANGED);
    assert_eq!(rig.run(&request, &[], 252).good(), attention.to_bytes());
    assert_eq!(rig.run(&request, &[], 252).good(), Sense::NOTHING.to_bytes());
    // Descriptor format, which is not there.
    assert_eq!(rig.run(&[3, 1, 0, 0, 252, 0], &[], 252).sense(), Sense::cdb(1).bit(0));
}

/// SPC-5, REQUEST SENSE command.
#[test]
fn a_request_sense_of_any_allocation_length_takes_a_unit_attention() {
    let mut rig = Rig::new(config());
    for len in [0, 4, 252] {
        rig.unit.attend(Attention::ModeChanged, None);
        rig.run(&[3, 0, 0, 0, len, 0], &[], 252).good();
        rig.run(&[0; 6], &[], 0).good();
    }
}

/// SAM-5, unit attention conditions.
#[test]
fn a_request_sense_without_room_for_its_answer_leaves_a_unit_attention_to_be_told() {
    let mut rig = Rig::new(config());
    rig.unit.attend(Attention::CapacityChanged, None);
    assert_eq!(rig.overrun(&[3, 0, 0, 0, 252, 0], &[], 10), Sense::LEN as u64);
    assert_eq!(rig.overrun(&[3, 0, 0, 0, 12, 0], &[], 10), 12);
    assert_eq!(rig.run(&[0; 6], &[], 0).sense().code, Code::CAPACITY_CHANGED);
}

/// SAM-5, incorrect logical unit numbers.
#[test]
fn where_there_is_no_unit_inquiry_request_sense_and_report_luns_are_answered_and_nothing_else() {
    let rig = Rig::new(config());
    let luns = [0, 1 << 48];
    let ask = |cdb: &[u8]| {
        let waker = std::task::Waker::noop();
        let task = Task { cdb, nexus: &rig.nexus, luns: &luns, data_in: 255, data_out: 0, lane: 0, waker };
        let mut command = Command::new();
        let Step::Done(done) = crate::absent(&mut command, &task, &&[][..]) else { panic!("it is not done") };
        assert_eq!(done.moved, command.data_in().len() as u64);
        (done.sense, command.data_in().to_vec())
    };
    let unsupported = Sense::illegal(Code::NO_SUCH_UNIT);
    let (sense, data) = ask(&inquiry(0, 0, 36));
    assert_eq!((sense, data[0], data.len()), (None, 0x7f, 36));
    assert_eq!(ask(&[3, 0, 0, 0, 18, 0]), (None, unsupported.to_bytes().to_vec()));
    let (sense, data) = ask(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0]);
    assert_eq!((sense, data.len()), (None, 24));
    for cdb in [&[0; 6][..], &inquiry(1, 0, 36), &[0xff], &[], &[0x28, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
        assert_eq!(ask(cdb), (Some(unsupported), vec![]), "{cdb:02x?}");
    }
}
