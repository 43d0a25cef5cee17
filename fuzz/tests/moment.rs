//! Each target for a moment: on the corpus, where what a fuzzer has found is kept by name, and then on inputs that are made
//! of it and always the same.

use std::panic::catch_unwind;

/// Runs a target on its corpus, and on the first `count` inputs that are made of it.
fn run(name: &str, target: fn(&[u8]), count: usize) {
    let corpus = egret_fuzz::corpus(name);
    for (path, input) in &corpus {
        assert!(catch_unwind(|| target(input)).is_ok(), "the input was {}", path.display());
    }
    let corpus = corpus.into_iter().map(|(_, input)| input).collect();
    for input in egret_fuzz::mutants(corpus, 1).take(count) {
        assert!(catch_unwind(|| target(&input)).is_ok(), "the input was {input:?}");
    }
}

#[test]
fn commands_at_a_logical_unit_all_end_within_disk_and_buffers() {
    run("scsi_commands", egret_fuzz::scsi_commands, 20_000);
}

#[test]
fn chains_at_a_virtio_scsi_device_are_all_used_once() {
    run("scsi_queues", egret_fuzz::scsi_queues, 5_000);
}

#[test]
fn a_ring_that_is_written_over_leads_nowhere_outside_the_guest_s_memory() {
    run("blk_ring", egret_fuzz::blk_ring, 10_000);
}

#[test]
fn a_ring_that_another_thread_writes_over_leads_nowhere_outside_the_guest_s_memory() {
    run("scribbled_rings", egret_fuzz::scribbled_rings, 1_500);
}

#[test]
fn memory_that_is_truncated_grown_and_replaced_kills_nobody() {
    run("torn_memory", egret_fuzz::torn_memory, 5_000);
}

#[test]
fn a_record_that_is_written_over_leads_nowhere_outside_the_guest_s_memory() {
    run("inflight_record", egret_fuzz::inflight_record, 10_000);
}

#[test]
fn a_client_of_an_nbd_server_is_answered_alike_however_its_bytes_arrive() {
    run("nbd_handshake", egret_fuzz::nbd_handshake, 10_000);
}

#[test]
fn replies_of_any_kind_end_each_request_once() {
    run("nbd_replies", egret_fuzz::nbd_replies, 3_000);
}

#[test]
fn a_session_of_any_messages_leaves_nothing_behind() {
    run("session", egret_fuzz::session, 1_000);
}

#[test]
fn bytes_at_a_monitor_are_answered_however_they_arrive() {
    run("qmp", egret_fuzz::qmp, 10_000);
}

#[test]
fn text_that_is_no_configuration_is_refused_with_its_line() {
    run("config_file", egret_fuzz::config_file, 5_000);
}
