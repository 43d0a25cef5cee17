//! The device as its session sees it.

use super::*;

#[test]
fn a_device_has_two_queues_that_need_no_disk_before_those_that_carry_commands() {
    let scsi = Scsi::new(ScsiConfig { num_queues: 5, queue_size: 64 }, "guest").unwrap();
    assert_eq!((scsi.num_queues(), scsi.diskless_queues()), (7, 2));
    let mut models = [0, 1, 2, 6].map(|index| Arc::clone(&scsi).model(index, 64));
    assert!(matches!(models, [Model::Control(_), Model::Event(_), Model::Request(_), Model::Request(_)]));
    for model in &mut models {
        model.let_go();
        assert_eq!((model.waiting(), model.is_aborted(0)), (0, false));
    }
}

#[test]
fn version_1_indirect_event_idx_packed_hotplug_and_change_are_offered() {
    let scsi = device();
    assert_eq!(scsi.features(), 1 << 32 | 1 << 28 | 1 << 29 | 1 << 34 | 1 << 1 | 1 << 2);
}

#[test]
fn the_configuration_space_says_how_many_queues_there_are_and_how_long_requests_may_be() {
    let mut space = [0; 40];
    Scsi::new(ScsiConfig { num_queues: 5, queue_size: 64 }, "guest").unwrap().read_config(0, &mut space);
    let words: Vec<_> = space.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let [seg_max, cmd_per_lun, event] = [62, 64, 16];
    assert_eq!(words, [5, seg_max, 0xffff, cmd_per_lun, event, 96, 32, 0xff_0000, 16383, 0]);
}

#[test]
fn a_configuration_that_cannot_be_is_refused() {
    let made = |num_queues, queue_size| Scsi::new(ScsiConfig { num_queues, queue_size }, "guest").map(drop);
    for num_queues in [0, 255] {
        assert_eq!(made(num_queues, 64), Err(ScsiError::Queues(num_queues)));
    }
    for queue_size in [0, 2, 100, 48] {
        assert_eq!(made(1, queue_size), Err(ScsiError::QueueSize(queue_size)));
    }
    for (num_queues, queue_size) in [(1, 4), (254, 1 << 15)] {
        assert_eq!(made(num_queues, queue_size), Ok(()));
    }
}
