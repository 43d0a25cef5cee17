//! Dirty logs that are none, that go while they are written to, and that come without a pause; states of devices that are
//! none.

use std::fs::File;
use std::os::fd::AsFd;

use egret_vring::vhost_user::{F_LOG_ALL, VRING_LOG};

use crate::scene::{DIRECT, GIB, MIB, Scene, variants};
use crate::support::attacker::{Ask, DATA, Variant};
use crate::support::guest::Share;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};
use crate::support::wire::*;
use crate::support::{await_that, neighbour};

/// More than any address has that an attacker's memory is at.
const LOG: u64 = (DATA + GIB) / (8 * 4096);

/// A log, and the message that hands it over.
fn log(len: u64) -> (Share, Vec<u8>) {
    (Share::new(0, len), u64s(&[len, 0]))
}

#[test]
fn a_log_that_is_truncated_costs_its_owner_the_queue() {
    if !Program::under_test().is_egret() {
        return;
    }
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("a log that is gone", |scene| {
            let mut attacker = scene.attacker(MIB);
            let (log, message) = log(LOG);
            let features = attacker.features() | F_LOG_ALL;
            attacker.wire.must(SET_FEATURES, &u64s(&[features]), &[]);
            attacker.wire.order(SET_LOG_BASE, &message, &[log.file.as_fd()]).expect("an answer");
            let addresses = attacker.addresses(VRING_LOG);
            attacker.wire.must(SET_VRING_ADDR, &addresses, &[]);
            attacker.read_honestly();
            log.file.set_len(0).expect("our own memory");
            for _ in 0..16 {
                attacker.ask(Ask::Read { at: 0 }, &[(DATA + 1, 4096), (DATA + MIB / 2, 4096)]);
            }
            attacker.publish();
            attacker.await_all_or_end();
        });
        scene.close();
    }
}

#[test]
fn logs_without_end_cost_their_own_session() {
    if !Program::under_test().is_egret() {
        return;
    }
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("one log after the other, and all of them on and off", |scene| {
            let mut attacker = scene.attacker(MIB);
            let (features, addresses) = (attacker.features(), [attacker.addresses(VRING_LOG), attacker.addresses(0)]);
            for round in 0..300 {
                let (log, message) = log(LOG);
                attacker.ask(Ask::Read { at: 0 }, &[(DATA, 4096)]);
                attacker.publish();
                attacker.wire.order(SET_LOG_BASE, &message, &[log.file.as_fd()]).expect("an answer");
                let features = features | if round % 3 == 0 { 0 } else { F_LOG_ALL };
                attacker.wire.send(SET_FEATURES, &u64s(&[features]), &[]).expect("the socket takes it");
                attacker.wire.send(SET_VRING_ADDR, &addresses[round % 2], &[]).expect("the socket takes it");
            }
            attacker.await_all();
        });
        scene.close();
    }
}

#[test]
fn a_sparse_log_is_refused_before_the_daemon_s_address_space_is_full() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let options = Options::new().null("d0", "").export("e0", "d0", &socket, "memory-max=64M");
    let server = Server::start(&Program::egret(), &options);
    let offer = |len| {
        let (log, message) = log(len);
        let mut wire = Wire::agree(&socket, F_VERSION_1);
        // A refusal is the end of the session here.
        wire.order(SET_LOG_BASE, &message, &[log.file.as_fd()]).is_ok_and(|answer| answer == len)
    };
    assert!(offer(64 * MIB), "as much as it may map");
    assert!(!offer(65 * MIB), "and no more");
    await_that("a line that names the option", || server.log().iter().any(|line| line.contains("memory-max")));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_log_on_a_disk_is_refused() {
    if !Program::under_test().is_egret() {
        return;
    }
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("a file on a disk as a log", |scene| {
        let scratch = Scratch::new();
        let file = File::options().read(true).write(true).open(scratch.image("log", neighbour::EXTENT));
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        let message = u64s(&[MIB, 0]);
        assert!(wire.refuses(SET_LOG_BASE, &message, &[file.expect("our own file").as_fd()]));
    });
    scene.close();
}

#[test]
fn states_that_nobody_takes_away_and_states_of_garbage_cost_the_daemon_nothing() {
    if !Program::under_test().is_egret() {
        return;
    }
    for variant in variants().filter(|variant| !variant.packed) {
        let mut scene = Scene::open(variant, &DIRECT);
        let descriptors = scene.server.descriptors();
        scene.survives("states without end", |scene| {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            for direction in [0, 1] {
                let wire = Wire::agree(&scene.victim, F_VERSION_1);
                let ask = || wire.send(SET_DEVICE_STATE_FD, &u32s(&[direction, 0]), &[writer.as_fd()]);
                let _ = (0..2000).take_while(|_| ask().is_ok()).count();
                scene.neighbour.await_progress();
                assert!(scene.server.descriptors() <= descriptors + 16, "answers are not the daemon's to keep");
            }
            drop(reader);
            for _ in 0..50 {
                let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
                assert_eq!(wire.ask(CHECK_DEVICE_STATE, &[]).expect("an answer"), 1, "nobody has asked for one");
            }
        });
        scene.close();
    }
}
