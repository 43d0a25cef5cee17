//! Queues that break, or are taken away, with requests in flight.

use std::time::Instant;

use serde_json::json;

use crate::scene::{DIRECT, MIB, Scene, Victim, variants};
use crate::support::attacker::{Ask, Attacker, DATA, Variant};
use crate::support::await_that;
use crate::support::qmp::Qmp;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};
use crate::support::wire::{GET_VRING_BASE, u32s};

/// Eight good reads and a chain that breaks the rules, in one kick.
fn break_with_reads_in_flight(attacker: &mut Attacker) {
    for slot in 0..8 {
        attacker.ask(Ask::Read { at: 0 }, &[(DATA + 4096 * slot, 4096)]);
    }
    attacker.chain_that_breaks();
    attacker.publish();
    attacker.await_end();
}

#[test]
fn a_queue_that_breaks_with_requests_in_flight_gives_its_guest_s_memory_back() {
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("50 queues that break with reads in flight", |scene| {
            for _ in 0..50 {
                break_with_reads_in_flight(&mut scene.attacker(MIB));
            }
        });
        scene.close();
    }
}

#[test]
fn a_queue_that_breaks_with_requests_in_flight_on_any_engine_gives_its_guest_s_memory_back() {
    for disk in ["aio=threads", "aio=native,cache.direct=on", "aio=io_uring"] {
        let mut scene = Scene::open(Variant::PLAIN, &Victim::Image(MIB, disk));
        scene.survives(disk, |scene| {
            for _ in 0..20 {
                break_with_reads_in_flight(&mut scene.attacker(MIB));
            }
        });
        scene.close();
    }
}

#[test]
fn a_queue_that_is_stopped_and_broken_by_turns_gives_its_guest_s_memory_back() {
    // A guest that resets its device has its front end ask where the queue stopped.
    for variant in variants() {
        let mut scene = Scene::open(variant, &Victim::Null(MIB, "latency-ns=20000000"));
        scene.survives("resets with requests in flight", |scene| {
            for is_broken in [true, false].repeat(5) {
                let mut attacker = scene.attacker(MIB);
                for slot in 0..8 {
                    attacker.ask(Ask::Read { at: 0 }, &[(DATA + 4096 * slot, 4096)]);
                }
                if is_broken {
                    attacker.chain_that_breaks();
                }
                attacker.publish();
                if is_broken {
                    attacker.await_end();
                }
                let which = attacker.which()[..4].to_vec();
                // An answer, or the end of the session: either way nothing of it runs any more.
                let _ = attacker.wire.ask(GET_VRING_BASE, &[which, u32s(&[0])].concat());
            }
        });
        scene.close();
    }
}

#[test]
fn monitors_are_told_of_a_queue_that_breaks_and_once_a_second_of_one_that_breaks_again_and_again() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let [socket, monitor] = ["victim", "qmp"].map(|name| scratch.path(name));
    let options = Options::new().null("d0", "").export("e0", "d0", &socket, "").monitor("m", &monitor);
    let server = Server::start(&Program::under_test(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let break_it = || {
        let mut attacker = Attacker::boot(&socket, Variant::PLAIN, MIB);
        attacker.chain_that_breaks();
        attacker.publish();
        attacker.await_end();
    };
    let begun = Instant::now();
    break_it();
    let told = qmp.event("EGRET_QUEUE_BROKEN");
    let reason = told["reason"].as_str().unwrap();
    assert_eq!(told, json!({"id": "e0", "queue": 0, "reason": reason}));
    let line = format!("export 'e0': queue 0: the guest broke the queue, which is stopped: {reason}");
    await_that("the log to say the same", || server.complaints().iter().any(|said| said.ends_with(&line)));
    (0..100).for_each(|_| break_it());
    assert_eq!(qmp.event("EGRET_QUEUE_BROKEN"), told);
    qmp.run("query-version", json!({}));
    let all = 2 + qmp.unheard("EGRET_QUEUE_BROKEN") as u64;
    assert!(all <= 1 + begun.elapsed().as_secs(), "{all} events");
    assert!(server.terminate().success());
}
