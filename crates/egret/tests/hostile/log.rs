//! What peers can do to the log.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Stdio;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::scene::{DIRECT, MIB, Scene};
use crate::support::attacker::Variant;
use crate::support::await_that;
use crate::support::scratch::Scratch;
use crate::support::server::Program;
use crate::support::wire::{F_VERSION_1, SET_VRING_KICK, Wire, u64s};

#[test]
fn five_hundred_short_sessions_of_garbage_are_worth_little_log() {
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("500 sessions of garbage", |scene| {
        for _ in 0..500 {
            let mut wire = Wire::connect(&scene.victim);
            wire.send_bytes(&[0xA5; 64]).expect("the socket takes it");
            wire.await_hangup();
        }
    });
    scene.close();
}

#[test]
fn what_is_not_logged_is_counted() {
    if !Program::under_test().is_egret() {
        return;
    }
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("100 queues that break", |scene| {
        for _ in 0..100 {
            let mut attacker = scene.attacker(MIB);
            attacker.chain_that_breaks();
            attacker.publish();
            attacker.await_end();
        }
    });
    let (status, log) = scene.end();
    assert_eq!(status.code(), Some(0));
    let told = log.iter().filter(|line| line.contains("the guest broke the queue")).count();
    assert!(told < 100, "{told} lines");
    let counted = log.iter().filter_map(|line| line.split_once("and ")?.1.split_once(" more")?.0.parse::<usize>().ok());
    assert!(told + counted.sum::<usize>() >= 100, "{log:#?}");
}

#[test]
fn a_log_that_nobody_reads_stops_no_i_o_thread() {
    let (unread, stderr) = rustix::pipe::pipe().expect("a pipe");
    // A description of its own, or the daemon's end would not block either.
    let ours = format!("/proc/self/fd/{}", stderr.as_raw_fd());
    let filler = OpenOptions::new().write(true).open(ours).expect("our own pipe");
    let stderr = Some(Stdio::from(File::from(stderr)));
    let mut scene = Scene::open_beside(Variant::PLAIN, &DIRECT, "aio=io_uring,cache.direct=on", stderr);
    let flags = fcntl_getfl(&filler).expect("our own pipe");
    fcntl_setfl(&filler, flags | OFlags::NONBLOCK).expect("our own pipe");
    // Whole pages first, and then whatever still fits.
    for len in [4096, 1] {
        while rustix::io::write(filler.as_fd(), &[b'.'; 4096][..len]).is_ok() {}
    }
    scene.survives("200 queues that break while the log stands still", |scene| {
        for _ in 0..200 {
            let mut attacker = scene.attacker(MIB);
            attacker.chain_that_breaks();
            attacker.publish();
            attacker.await_end();
        }
    });
    scene.close();
    drop(unread);
}

#[test]
fn a_name_that_a_peer_chose_forges_no_line() {
    if !Program::under_test().is_egret() {
        return;
    }
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("a descriptor with a name of two lines", |scene| {
        let scratch = Scratch::new();
        let name = scratch.image("x\nforged: the disk is gone\n\x1b[2J", 0);
        let file = File::open(name).expect("our own file");
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        assert!(wire.refuses(SET_VRING_KICK, &u64s(&[0]), &[file.as_fd()]));
        await_that("a line about it", || scene.server.log().iter().any(|line| line.contains("must be an eventfd")));
    });
    let log = scene.server.log();
    assert!(!log.iter().any(|line| line.starts_with("forged") || line.contains("\x1b[2J")), "{log:#?}");
    scene.close();
}
