//! Descriptors that a peer shares with the daemon, and may change at any time.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::scene::{DIRECT, MIB, Scene, Victim, variants};
use crate::support::attacker::{Ask, Attacker, DATA, Signals, Variant, make_block, stuff};
use crate::support::await_that;
use crate::support::guest::Share;
use crate::support::server::Program;

fn read(attacker: &mut Attacker) {
    attacker.ask(Ask::Read { at: 0 }, &[(DATA, 4096)]);
    attacker.publish();
}

#[test]
fn a_call_descriptor_that_blocks_when_it_is_written_to_stops_no_i_o_thread() {
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("a call descriptor that is full and blocks", |scene| {
            let mut attacker = scene.attacker(MIB);
            stuff(&attacker.signals.call);
            read(&mut attacker);
            attacker.await_all();
            scene.neighbour.await_progress();
        });
        scene.close();
    }
}

#[test]
fn an_error_descriptor_that_blocks_when_it_is_written_to_stops_no_i_o_thread() {
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("an error descriptor that is full and blocks", |scene| {
            let mut attacker = scene.attacker(MIB);
            stuff(&attacker.signals.error);
            attacker.chain_that_breaks();
            attacker.publish();
            scene.neighbour.await_progress();
        });
        scene.close();
    }
}

#[test]
fn a_kick_descriptor_that_blocks_or_never_ends_stops_no_i_o_thread() {
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("a kick descriptor that is full and blocks", |scene| {
        let mut attacker = scene.attacker(MIB);
        stuff(attacker.signals.kick.as_ref().expect("it has one"));
        let kick = attacker.signals.kick.take();
        read(&mut attacker);
        scene.neighbour.await_progress();
        drop(kick);
    });
    scene.close();
}

#[test]
fn a_call_descriptor_that_its_peer_makes_block_again_and_again_stops_no_i_o_thread() {
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("a call descriptor that is made to block all the time", |scene| {
            let mut attacker = scene.attacker(MIB);
            let call = attacker.signals.call.try_clone().expect("a descriptor");
            stuff(&call);
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                // Whoever makes it non-blocking before each write is too late sooner or later.
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        make_block(&call);
                    }
                });
                // A failure must end the thread too.
                let ends = || is_over.store(true, Ordering::Relaxed);
                let guard = Defer(ends);
                for _ in 0..300 {
                    read(&mut attacker);
                    attacker.await_all();
                }
                scene.neighbour.await_progress();
                drop(guard);
            });
        });
        scene.close();
    }
}

struct Defer<F: Fn()>(F);

impl<F: Fn()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[test]
fn the_daemon_ends_in_time_beside_a_client_whose_descriptors_all_block() {
    let scene = Scene::open(Variant::PLAIN, &DIRECT);
    let mut attacker = scene.attacker(MIB);
    stuff(&attacker.signals.call);
    stuff(&attacker.signals.error);
    read(&mut attacker);
    scene.neighbour.await_progress();
    attacker.chain_that_breaks();
    attacker.publish();
    scene.neighbour.await_progress();
    scene.close();
    drop(attacker);
}

#[test]
fn a_queue_without_a_kick_descriptor_is_served_and_its_i_o_thread_sleeps_all_the_same() {
    for variant in variants() {
        let mut scene = Scene::open(variant, &Victim::Image(MIB, "aio=io_uring"));
        scene.survives("a queue that nobody kicks", |scene| {
            let signals = Signals { kick: None, ..Signals::new() };
            let memory = vec![Share::new(DATA, MIB)];
            let mut attacker = Attacker::boot_with(&scene.victim, variant, memory, signals);
            attacker.read_honestly();
            scene.neighbour.await_progress();
            if !Program::under_test().is_egret() {
                return;
            }
            // Whoever spins for ever never goes to sleep by itself.
            scene.neighbour.rest();
            let sleeps = || {
                let threads = scene.server.sleeps();
                threads.iter().filter(|(name, _)| name == "io0").map(|(_, sleeps)| sleeps).sum::<u64>()
            };
            let before = sleeps();
            await_that("an idle I/O thread to sleep", || sleeps() >= before + 20);
            scene.neighbour.go_on();
            attacker.read_honestly();
        });
        scene.close();
    }
}
