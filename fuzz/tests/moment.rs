//! Each target for a moment, with inputs that are always the same; what a fuzzer has found is kept here by name.

use std::panic::catch_unwind;

/// Runs a target on the first `count` inputs of a seed.
fn run(target: fn(&[u8]), count: usize) {
    for input in egret_fuzz::mutants(1).take(count) {
        if catch_unwind(|| target(&input)).is_err() {
            panic!("the input was {input:?}");
        }
    }
}

#[test]
fn commands_at_a_logical_unit_all_end_within_disk_and_buffers() {
    run(egret_fuzz::scsi_commands, 20_000);
}

#[test]
fn chains_at_a_virtio_scsi_device_are_all_used_once() {
    run(egret_fuzz::scsi_queues, 5_000);
}

#[test]
fn a_ring_that_is_written_over_leads_nowhere_outside_the_guest_s_memory() {
    run(egret_fuzz::blk_ring, 10_000);
}
