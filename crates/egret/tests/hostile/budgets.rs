//! Memory, records and descriptors without end.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::mpsc::channel;
use std::thread;

use crate::scene::{DIRECT, GIB, MIB, Scene, variants};
use crate::support::attacker::{Ask, DATA, Variant, new_eventfd};
use crate::support::guest::Share;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};
use crate::support::wire::*;
use crate::support::{await_that, neighbour::Neighbour};

const TIB: u64 = 1 << 40;

#[test]
fn sparse_memory_is_refused_before_the_daemon_s_address_space_is_full() {
    if !Program::under_test().is_egret() {
        return;
    }
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("memory that is as large as can be", |scene| {
            let resident = scene.server.resident();
            let mut attacker = scene.attacker(MIB);
            let mut total = MIB;
            for n in 1.. {
                let share = Share::new(DATA + n * TIB, TIB);
                if attacker.wire.refuses(ADD_MEM_REG, &share.message(), &[share.file.as_fd()]) {
                    break;
                }
                total += TIB;
                assert!(total <= 8 * TIB, "{total} bytes are more than any guest has");
            }
            scene.neighbour.await_progress();
            assert!(scene.server.resident() <= resident + 64 * MIB, "a map alone costs nothing");
        });
        scene.close();
    }
}

#[test]
fn what_an_export_may_map_is_an_option() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let options = Options::new().null("d0", "").export("e0", "d0", &socket, "memory-max=64M");
    let server = Server::start(&Program::egret(), &options);
    let offer = |len| {
        let share = Share::new(DATA, len);
        let mut wire = Wire::agree(&socket, F_VERSION_1);
        wire.refuses(ADD_MEM_REG, &share.message(), &[share.file.as_fd()])
    };
    assert!(!offer(64 * MIB), "as much as it may");
    assert!(offer(65 * MIB), "and no more");
    await_that("a line that names the option", || server.log().iter().any(|line| line.contains("memory-max")));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn many_exports_together_map_no_more_than_the_process_can() {
    if !Program::under_test().is_egret() {
        return;
    }
    const EXPORTS: usize = 40;
    let scratch = Scratch::new();
    let socket = |n: usize| scratch.path(&format!("s{n}"));
    let image = scratch.image("neighbour", crate::support::neighbour::EXTENT);
    let options = Options::new().iothread("io0", "").null("d0", "").disk("d1", &image, "");
    let options =
        (0..EXPORTS).fold(options, |options, n| options.export(&format!("e{n}"), "d0", &socket(n), "iothread=io0"));
    let options = options.export("n", "d1", &scratch.path("neighbour"), "writable=on,iothread=io0");
    let mut server = Server::start(&Program::egret(), &options);
    let neighbour = Neighbour::start(&scratch.path("neighbour"));
    let mut kept = Vec::new();
    let mut mapped = 0;
    for n in 0..EXPORTS {
        let mut wire = Wire::agree(&socket(n), F_VERSION_1);
        // As large as one export may have it.
        let share = Share::new(DATA, 4 * TIB - GIB);
        if wire.refuses(ADD_MEM_REG, &share.message(), &[share.file.as_fd()]) {
            break;
        }
        mapped += share.len;
        kept.push(wire);
    }
    assert!(mapped < 120 * TIB, "{mapped} bytes are all that an address space has");
    neighbour.await_progress();
    assert!(server.is_alive());
    drop((kept, neighbour));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn guest_memory_on_a_disk_is_refused() {
    if !Program::under_test().is_egret() {
        return;
    }
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("a file on a disk as memory", |scene| {
        let scratch = Scratch::new();
        let file = File::options().read(true).write(true).open(scratch.image("memory", MIB)).expect("our own file");
        let share = Share { file, guest: DATA, len: MIB };
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        assert!(wire.refuses(ADD_MEM_REG, &share.message(), &[share.file.as_fd()]), "one by one");
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        assert!(wire.refuses(SET_MEM_TABLE, &Share::table(&[&share]), &[share.file.as_fd()]), "all at once");
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        assert!(wire.refuses(SET_INFLIGHT_FD, &inflight(8192, 0, 1, 128), &[share.file.as_fd()]), "as a record");
    });
    scene.close();
}

#[test]
fn guest_memory_on_tmpfs_is_taken() {
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("a file in memory as memory", |scene| {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let path = folder.path().join("memory");
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path).expect("a file");
        file.set_len(MIB).expect("its length");
        let share = Share { file, guest: DATA, len: MIB };
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        wire.must(ADD_MEM_REG, &share.message(), &[share.file.as_fd()]);
    });
    scene.close();
}

#[test]
fn records_that_nobody_receives_are_few_and_cost_the_daemon_no_descriptors() {
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    let descriptors = scene.server.descriptors();
    scene.survives("records that nobody takes out of the socket", |scene| {
        // Each answer holds a descriptor in the socket for as long as nobody reads it.
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        let ask = |wire: &Wire| wire.send(GET_INFLIGHT_FD, &inflight(0, 0, 1, 128), &[]);
        let sent = (0..2000).take_while(|_| ask(&wire).is_ok()).count();
        scene.neighbour.await_progress();
        assert!(scene.server.descriptors() <= descriptors + 16, "answers are not the daemon's to keep");
        if Program::under_test().is_egret() {
            assert!(sent < 2000, "the session ends");
            let answered = wire.await_hangup() / (HEADER + 24);
            assert!(answered <= 64, "{answered} records are more than a client needs at a time");
        }
    });
    let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
    let (_, record) = wire.ask_inflight(1, 128).expect("an answer");
    assert!(record.is_some(), "somebody else has a record");
    drop((wire, record));
    scene.close();
}

#[test]
fn a_client_may_ask_for_a_record_as_often_as_a_monitor_does() {
    // QEMU asks once for each start of the device.
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("a few records", |scene| {
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        for _ in 0..8 {
            assert!(wire.ask_inflight(1, 128).expect("an answer").1.is_some());
        }
    });
    scene.close();
}

#[test]
fn floods_of_messages_cost_their_own_session_and_no_descriptors() {
    for variant in variants().filter(|variant| !variant.packed) {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("floods of SET_VRING_CALL and SET_MEM_TABLE", |scene| {
            let before = scene.server.descriptors();
            let mut most = 0;
            let attacker = scene.attacker(MIB);
            let which = attacker.which();
            for n in 0..3000 {
                let call = new_eventfd();
                if attacker.wire.send(SET_VRING_CALL, &which, &[call.as_fd()]).is_err() {
                    break;
                }
                if n % 100 == 0 {
                    most = most.max(scene.server.descriptors());
                }
            }
            scene.neighbour.await_progress();
            drop(attacker);
            assert!(most <= before + 256, "{most} descriptors at a time, and {before} before");

            let share = Share::new(DATA, MIB);
            let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
            for _ in 0..200 {
                if wire.order(SET_MEM_TABLE, &Share::table(&[&share]), &[share.file.as_fd()]).is_err() {
                    break;
                }
            }
            scene.neighbour.await_progress();
        });
        scene.close();
    }
}

#[test]
fn a_client_that_never_reads_its_answers_holds_up_nobody_and_not_the_end() {
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    let deaf = |scene: &Scene| {
        let wire = Wire::agree(&scene.victim, F_VERSION_1);
        let socket = wire.as_fd();
        let flags = rustix::fs::fcntl_getfl(socket).expect("our own socket");
        rustix::fs::fcntl_setfl(socket, flags | rustix::fs::OFlags::NONBLOCK).expect("our own socket");
        let ask = u32s(&[GET_FEATURES, 1, 0]);
        // Until neither the questions nor the answers have any more room.
        let mut in_vain = 0;
        while in_vain < 3 {
            match rustix::io::write(socket, &ask) {
                Ok(_) => in_vain = 0,
                Err(_) => {
                    in_vain += 1;
                    scene.neighbour.await_progress();
                }
            }
        }
        wire
    };
    scene.survives("a client that does not listen", |scene| drop(deaf(scene)));
    let kept = deaf(&scene);
    scene.close();
    drop(kept);
}

#[test]
fn sessions_that_peers_keep_for_ever_do_not_hold_up_the_end() {
    for half in [&[][..], &[0; 6], &u32s(&[SET_FEATURES, 1, 8])] {
        let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
        let mut kept = Wire::connect(&scene.victim);
        kept.send_bytes(half).expect("the socket takes it");
        scene.neighbour.await_progress();
        assert!(scene.server.is_alive());
        scene.close();
        drop(kept);
    }
}

#[test]
fn a_session_whose_peer_has_always_sent_another_order_does_not_hold_up_the_end_either() {
    let scene = Scene::open(Variant::PLAIN, &DIRECT);
    let mut kept = Wire::connect(&scene.victim);
    let (tell, told) = channel();
    let sender = thread::spawn(move || {
        let orders = u32s(&[SET_OWNER, 1, 0]).repeat(5000);
        while kept.send_bytes(&orders).is_ok() {
            let _ = tell.send(());
        }
    });
    // More than it may order at once: the rest is in the socket, and is taken out at a pace.
    (0..2).for_each(|_| told.recv().expect("the socket takes them"));
    scene.close();
    sender.join().expect("it only writes");
}

#[test]
fn descriptors_with_half_a_message_are_closed() {
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    scene.survives("descriptors with half a message", |scene| {
        let share = Share::new(DATA, MIB);
        for _ in 0..50 {
            let wire = Wire::connect(&scene.victim);
            // The length says that more comes.
            let message = [&share.message()[..16], &[0; 0]].concat();
            wire.send(ADD_MEM_REG, &message, &[share.file.as_fd(); 32]).expect("the socket takes it");
        }
    });
    scene.close();
}

#[test]
fn a_chain_over_more_regions_than_pieces_are_allowed_breaks_the_queue() {
    const REGIONS: u64 = 60;
    const LEN: u64 = 4096;
    if !Program::under_test().is_egret() {
        return;
    }
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("a chain of pieces of pieces", |scene| {
            let mut attacker = scene.attacker(MIB);
            // One behind the other, so that a buffer goes through all of them.
            let first = DATA + GIB;
            for n in 0..REGIONS {
                let share = Share::new(first + n * LEN, LEN);
                attacker.wire.must(ADD_MEM_REG, &share.message(), &[share.file.as_fd()]);
                attacker.data.push(share);
            }
            let through_all = (first, (REGIONS * LEN) as u32);
            attacker.ask(Ask::Read { at: 0 }, &[through_all; 4]);
            attacker.publish();
            attacker.await_all();
            attacker.ask(Ask::Read { at: 0 }, &[through_all; 20]);
            attacker.publish();
            attacker.await_end();
        });
        scene.close();
    }
}
