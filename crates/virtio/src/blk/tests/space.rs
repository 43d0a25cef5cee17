//! The configuration space, and the configurations that there can be.

use super::*;

fn space(blk: &Blk) -> [u8; 96] {
    let mut space = [0xff; 96];
    blk.read_config(0, &mut space);
    space
}

fn le32(space: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(space[offset..offset + 4].try_into().unwrap())
}

#[test]
fn says_what_the_disk_is() {
    let blk = Blk::new(config()).unwrap();
    let space = space(&blk);
    assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), SECTORS);
    assert_eq!(le32(&space, 8), 0, "size_max");
    assert_eq!(le32(&space, 12), 126, "seg_max");
    assert_eq!(le32(&space, 16), 0, "geometry");
    assert_eq!(le32(&space, 20), 512, "blk_size");
    assert_eq!(space[24..28], [3, 0, 8, 0], "topology: eight logical blocks in a physical one");
    assert_eq!(le32(&space, 28), 128, "opt_io_size: in logical blocks");
    assert_eq!(space[32..36], [1, 0, 4, 0], "writeback, num_queues");
    assert_eq!((le32(&space, 36), le32(&space, 40), le32(&space, 44)), (256, 1, 8), "discard");
    assert_eq!((le32(&space, 48), le32(&space, 52)), (512, 1), "write zeroes");
    assert_eq!(space[56..60], [1, 0, 0, 0], "may unmap");
    assert_eq!(space[60..], [0; 36], "nothing behind");
}

#[test]
fn no_more_segments_are_offered_than_a_request_of_windows_driver_has_room_for() {
    for (queue_size, seg_max) in [(4, 2), (256, 254), (512, 510), (1024, 510), (1 << 15, 510)] {
        let blk = Blk::new(BlkConfig { queue_size, ..config() }).unwrap();
        assert_eq!(le32(&space(&blk), 12), seg_max, "of a queue of {queue_size}");
    }
}

#[test]
fn reads_at_any_offset_and_as_zeroes_past_its_end() {
    let blk = Blk::new(config()).unwrap();
    let all = space(&blk);
    for offset in 0..=96 {
        for len in 0..=(96 - offset) {
            let mut some = vec![0xff; len];
            blk.read_config(offset as u64, &mut some);
            assert_eq!(some, all[offset..offset + len]);
        }
    }
    let mut some = [0xff; 8];
    blk.read_config(u64::MAX, &mut some);
    assert_eq!(some, [0; 8]);
}

#[test]
fn takes_writeback_and_nothing_else() {
    let blk = Blk::new(config()).unwrap();
    blk.write_config(32, &[0]).unwrap();
    assert_eq!(space(&blk)[32], 0);
    blk.write_config(32, &[7]).unwrap();
    assert_eq!(space(&blk)[32], 1);
    blk.write_config(32, &[0, 0, 4, 0]).unwrap();
    assert_eq!(space(&blk)[32..36], [0, 0, 4, 0]);
    blk.write_config(32, &[1, 0, 0xff, 0xff]).unwrap();
    assert_eq!(space(&blk)[32..36], [1, 0, 4, 0], "the number of queues is not for it to say");
    for (offset, bytes) in [(0, &[1; 8][..]), (31, &[1]), (33, &[1]), (32, &[1, 0]), (32, &[]), (u64::MAX, &[1])] {
        let refused = DriverError::ReadOnly { offset, len: bytes.len() };
        assert_eq!(blk.write_config(offset, bytes), Err(refused));
    }
}

#[test]
fn says_nothing_of_discard_on_a_read_only_disk() {
    let blk = Blk::new(BlkConfig { read_only: true, ..config() }).unwrap();
    assert_eq!(space(&blk)[36..60], [0; 24]);
}

#[test]
fn a_configuration_that_cannot_be_is_refused() {
    let refused = |change: &dyn Fn(&mut BlkConfig)| {
        let mut config = config();
        change(&mut config);
        Blk::new(config).unwrap_err().to_string()
    };
    assert!(refused(&|c| c.logical_block_size = 256).contains("at least 512, got 256"));
    assert!(refused(&|c| c.logical_block_size = 0).contains("got 0"));
    assert!(refused(&|c| c.physical_block_size = 0).contains("got 0"));
    assert!(refused(&|c| c.physical_block_size = 3000).contains("got 3000"));
    assert!(refused(&|c| c.logical_block_size = 8192).contains("8192, got 4096"));
    assert!(refused(&|c| c.num_queues = 0).contains("at least 1"));
    assert!(refused(&|c| c.queue_size = 2).contains("got 2"));
    assert!(refused(&|c| c.queue_size = 100).contains("got 100"));
    assert!(refused(&|c| c.serial = "0123456789012345678901".into()).contains("at most 20"));
    assert!(refused(&|c| c.serial = "röhre".into()).contains("ASCII"));
}
