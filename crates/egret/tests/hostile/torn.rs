//! Memory whose file is truncated after it was shared.

use crate::scene::{DIRECT, MIB, Scene, Victim, variants};
use crate::support::attacker::{Ask, Attacker, DATA, Device, SIZE, Variant};
use crate::support::guest::MEMORY_NAME;
use crate::support::server::Program;

const PAGE: u64 = 4096;
/// Chains, and pieces of each. Every second page of so many faults one by one would be more mappings than a process may
/// have (`vm.max_map_count`, 65530).
const CHAINS: u64 = 60;
const PIECES: u64 = 1000;
const LEN: u64 = 2 * PAGE * CHAINS * PIECES;

/// Chains of pieces of 512 bytes in every second page, none of them aligned, in memory that is gone when they are served.
fn tear(mut attacker: Attacker, ask: Ask) {
    for chain in 0..CHAINS {
        let pieces = (0..PIECES).map(|piece| (DATA + 2 * PAGE * (chain * PIECES + piece) + 1, 512));
        attacker.ask(ask, &pieces.collect::<Vec<_>>());
    }
    attacker.data[0].file.set_len(0).expect("our own memory");
    attacker.publish();
    attacker.await_all_or_end();
}

#[test]
fn memory_that_is_truncated_under_misaligned_reads_costs_its_owner_the_queue_and_the_process_no_maps() {
    for disk in ["aio=io_uring,cache.direct=on", "aio=native,cache.direct=on", "aio=threads,cache.direct=on"] {
        for variant in variants() {
            let mut scene = Scene::open(variant, &Victim::Image(MIB, disk));
            scene.survives(disk, |scene| tear(scene.attacker(LEN), Ask::Read { at: 0 }));
            scene.close();
            // The layouts matter to one engine as much as to another.
            if !disk.contains("io_uring") {
                break;
            }
        }
    }
}

#[test]
fn memory_that_is_truncated_under_writes_that_are_looked_at_for_zeroes_costs_its_owner_the_queue() {
    for variant in variants().filter(|variant| !variant.packed) {
        let disk = "aio=io_uring,cache.direct=on,detect-zeroes=on";
        let mut scene = Scene::open(variant, &Victim::Image(MIB, disk));
        scene.survives("writes from memory that is gone", |scene| tear(scene.attacker(LEN), Ask::Write { at: 0 }));
        scene.close();
    }
}

#[test]
fn memory_that_is_truncated_under_a_comparison_costs_its_owner_the_queue() {
    for variant in variants().filter(|variant| variant.device == Device::Scsi) {
        let mut scene = Scene::open(variant, &Victim::Image(MIB, "aio=threads"));
        let verify = Ask::Verify { at: 0, len: 512 * PIECES, against_data: true };
        scene.survives("VERIFY against memory that is gone", |scene| tear(scene.attacker(LEN), verify));
        scene.close();
    }
}

#[test]
fn headers_in_pages_that_are_gone_cost_their_owner_the_queue_and_have_nobody_replace_all_of_its_memory() {
    if !Program::under_test().is_egret() {
        return;
    }
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("headers in pages that are gone", |scene| {
            let mut attacker = scene.attacker(64 * MIB);
            let mapped = || scene.server.maps().iter().filter(|line| line.contains(MEMORY_NAME)).count();
            let before = mapped();
            let gone = 32 * MIB;
            attacker.data[0].file.set_len(gone).expect("our own memory");
            for page in 0..u64::from(SIZE) {
                attacker.chain(&[(DATA + gone + PAGE * page, 64, false), (DATA, 512, true)]);
            }
            attacker.publish();
            attacker.await_end();
            assert!(mapped() >= before, "what is left of it stays");
        });
        scene.close();
    }
}

#[test]
fn memory_that_is_truncated_and_grown_again_and_again_costs_nobody_else_anything() {
    let mut scene = Scene::open(Variant::PLAIN, &Victim::Image(MIB, "aio=threads,cache.direct=on"));
    scene.survives("memory that comes and goes", |scene| {
        for _ in 0..20 {
            let mut attacker = scene.attacker(MIB);
            for _ in 0..20 {
                (0..16).for_each(|_| attacker.ask(Ask::Read { at: 0 }, &[(DATA + 1, 4096), (DATA + MIB / 2, 4096)]));
                attacker.publish();
                let memory = &attacker.data[0].file;
                memory.set_len(0).and_then(|()| memory.set_len(MIB)).expect("our own memory");
                attacker.await_all_or_end();
                if attacker.is_over() {
                    break;
                }
            }
        }
    });
    scene.close();
}
