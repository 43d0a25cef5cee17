//! Queues that ask for so much that an I/O thread, or its workers, would be busy with nothing else.
//!
//! How long the neighbour waits is for `make bench-neighbours` to say. Here the loop must come round while what was asked
//! for is being done, or the neighbour get on with its requests where that takes long on any machine.

use std::path::PathBuf;

use crate::scene::{GIB, MIB, Scene, Victim, variants};
use crate::support::attacker::{Ask, Attacker, DATA, SIZE, Variant};
use crate::support::await_that;

/// Buffers of one chain, as many as QEMU's: they are all the same memory.
const PIECES: usize = 1022;
/// As many reads of the neighbour's must end meanwhile, one after the other.
const MEANWHILE: u64 = 64;

/// Publishes the chains that `ask` makes, and waits for them; the neighbour must not have to. Its own thread may not have run
/// meanwhile, but not again and again.
fn leaves_room(scene: &Scene, what: &str, attacker: &mut Attacker, ask: impl Fn(&mut Attacker)) {
    await_that(&format!("the neighbour to do {MEANWHILE} reads beside {what}, {:?}", scene.variant), || {
        ask(attacker);
        let meanwhile = scene.neighbour.pages_during(|| {
            attacker.publish();
            attacker.await_all_or_end();
        });
        meanwhile >= MEANWHILE
    });
}

#[test]
fn a_thousand_chains_of_four_gigabytes_or_of_nothing_leave_room_for_the_neighbour() {
    for (variant, len) in variants().flat_map(|variant| [(variant, 4 * MIB as u32), (variant, 0)]) {
        let disk = Victim::Null(8 * GIB, "");
        let mut scene = Scene::open(variant, &disk);
        scene.survives("1024 chains of 1022 buffers", |scene| {
            let mut attacker = scene.attacker(4 * MIB);
            let buffers = vec![(DATA, len); PIECES];
            (0..SIZE).for_each(|_| attacker.ask(Ask::Read { at: 0 }, &buffers));
            // They are over in milliseconds, so what the neighbour does meanwhile depends on when it runs. But it is looked
            // at in each turn of the loop, and one such chain is enough for a turn.
            let before = scene.turns();
            attacker.publish();
            attacker.await_all_or_end();
            if let (Some(before), Some(after)) = (before, scene.turns()) {
                assert!(
                    after - before >= SIZE.into(),
                    "{variant:?}: {SIZE} chains of {len} in {} turns",
                    after - before
                );
            }
        });
        scene.close();
    }
}

#[test]
fn reads_that_the_kernel_copies_at_once_leave_room_for_the_neighbour() {
    for disk in ["aio=io_uring", "aio=threads"] {
        let mut scene = Scene::open(Variant::PLAIN, &Victim::Image(64 * MIB, disk));
        scene.survives("large reads of what is cached", |scene| {
            let mut attacker = scene.attacker(4 * MIB);
            let buffers = vec![(DATA, 4 * MIB as u32); 16];
            leaves_room(scene, disk, &mut attacker, |attacker| {
                (0..96).for_each(|_| attacker.ask(Ask::Read { at: 0 }, &buffers));
            });
        });
        scene.close();
    }
}

#[test]
fn large_writes_that_are_looked_at_for_zeroes_leave_room_for_the_neighbour() {
    for variant in variants().filter(|variant| !variant.packed) {
        let mut scene = Scene::open(variant, &Victim::Image(64 * MIB, "aio=io_uring,detect-zeroes=on"));
        scene.survives("large writes of zeroes", |scene| {
            let mut attacker = scene.attacker(4 * MIB);
            let buffers = vec![(DATA, 4 * MIB as u32); 16];
            leaves_room(scene, "zero detection", &mut attacker, |attacker| {
                (0..8).for_each(|_| attacker.ask(Ask::Write { at: 0 }, &buffers));
            });
        });
        scene.close();
    }
}

#[test]
fn zero_fills_on_one_disk_leave_workers_for_another() {
    // Zeroes have to be written where the file system has no better way: a tmpfs has none but holes.
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let image: PathBuf = folder.path().join("image");
    std::fs::File::create(&image).and_then(|file| file.set_len(64 * MIB)).expect("an image");
    for variant in variants().filter(|variant| !variant.packed) {
        let mut scene =
            Scene::open_beside(variant, &Victim::At(&image, "aio=threads"), "aio=threads,cache.direct=on", None);
        scene.survives("256 zero-fills", |scene| {
            let mut attacker = scene.attacker(MIB);
            leaves_room(scene, "256 zero-fills", &mut attacker, |attacker| {
                (0..256).for_each(|_| attacker.ask(Ask::WriteZeroes { at: 0, len: 32 * MIB }, &[]));
            });
        });
        scene.close();
    }
}
