//! Commands that are cheap to give and dear to carry out.

use crate::scene::{KIB, MIB, Scene, Victim, variants};
use crate::support::attacker::{Ask, Device};

#[test]
fn a_thousand_verifications_at_a_time_take_little_memory() {
    for variant in variants().filter(|variant| variant.device == Device::Scsi) {
        for disk in ["aio=io_uring,cache.direct=on", "aio=threads"] {
            let mut scene = Scene::open(variant, &Victim::Image(MIB, disk));
            scene.survives("1024 of VERIFY", |scene| {
                let mut attacker = scene.attacker(MIB);
                scene.server.forget_peak();
                let before = scene.server.peak();
                let len = 256 * KIB;
                (0..1024).for_each(|_| attacker.ask(Ask::Verify { at: 0, len, against_data: false }, &[]));
                attacker.publish();
                attacker.await_all();
                assert_eq!(attacker.status(), 0, "it verifies");
                let peak = scene.server.peak();
                assert!(peak <= before + 64 * MIB, "{peak} bytes at most, and {before} before");
            });
            scene.close();
        }
    }
}
