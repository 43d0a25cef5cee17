//! Machines that migrate with an image in a cluster: its exclusive lock goes along.

use std::sync::OnceLock;

use egret_needs::Ceph;
use serde_json::json;

use super::vm::{BLOCK, BLOCKS, Machine};
use super::{BLK, Image, Pair, moves};
use crate::support::await_that;
use crate::support::guest::Guest;
use crate::support::scratch::Scratch;

fn cluster() -> Option<&'static Ceph> {
    static CLUSTER: OnceLock<Option<Ceph>> = OnceLock::new();
    CLUSTER.get_or_init(Ceph::start).as_ref()
}

impl Pair {
    fn of_a_cluster(machine: Machine, image: &str, more: &str) -> Option<Self> {
        let ceph = cluster()?;
        ceph.run(&format!("rbd create {image} --size {}B", BLOCK * BLOCKS));
        let blockdev = format!("rbd,node-name=d0,pool=rbd,image={image},conf={}{more}", ceph.conf().display());
        Some(Self::with(machine, Scratch::new(), Image::Rbd(ceph, image.to_owned()), &blockdev))
    }

    /// The lines of what the cluster says of who has the image locked.
    fn lockers(&self) -> usize {
        let Image::Rbd(ceph, name) = &self.image else { unreachable!("it is in a cluster") };
        ceph.run(&format!("rbd lock ls {name}")).lines().filter(|line| line.starts_with("client.")).count()
    }
}

#[test]
fn machines_move_to_and_fro_with_an_image_in_a_cluster_and_no_request_notices() {
    let machines = [BLK, Machine { scsi: true, packed: true, queues: 3 }];
    // librbd may cache as well: what it has is in the image when the other begins, and is not believed when one comes back.
    for ((machine, name), more) in { machines.into_iter().zip(["blk", "scsi"]) }.zip(["", ",settings.rbd_cache=true"]) {
        let Some(mut pair) = Pair::of_a_cluster(machine, name, more) else { return };
        for round in 1..=moves(4) {
            let size = (BLOCKS + round) * BLOCK;
            pair.migrate(|pair| {
                pair.here().qmp.run("block_resize", json!({"node-name": "d0", "size": size}));
                pair.vm.load(20);
            });
            assert_eq!(pair.lockers(), 1);
            let node = pair.here().qmp.run("query-named-block-nodes", json!({}))[0].take();
            assert_eq!(node["image"]["virtual-size"], size);
        }
        pair.end();
    }
}

#[test]
fn whichever_daemon_is_killed_the_machine_arrives_and_the_dead_one_s_lock_is_broken() {
    let Some(mut pair) = Pair::of_a_cluster(BLK, "killed", "") else { return };
    (0..moves(1)).for_each(|_| pair.migrate_among_kills());
    // Nobody starts the one again that had the machine: the other has it without a move.
    pair.vm.load(40);
    pair.here().server = None;
    pair.at = 1 - pair.at;
    let socket = pair.here().socket.clone();
    pair.vm.reconnect(&socket);
    pair.vm.load(40);
    await_that("that to be logged", || {
        let said = pair.here().server.as_ref().expect("it runs").complaints().join("\n");
        said.contains("'rbd/killed': breaking the exclusive lock of 127.0.0.1:0/")
    });
    assert_eq!(pair.lockers(), 1);
    pair.hosts[1 - pair.at].restart();
    pair.end();
}

#[test]
fn an_image_in_a_cluster_is_that_daemon_s_whose_rings_run_or_that_was_told_to_have_it() {
    let Some(mut pair) = Pair::of_a_cluster(BLK, "one", "") else { return };
    let active = |active: bool| json!({"node-name": "d0", "active": active});
    pair.vm.load(40);
    let said = pair.hosts[1].qmp.fail("blockdev-set-active", active(true));
    assert!(said.contains("its exclusive lock is held by 127.0.0.1:0/"), "{said}");
    // One that comes too early waits, and is then refused with the reason.
    let there = pair.hosts[1].socket.clone();
    assert!(Guest::try_boot(&there).is_none());
    await_that("the reason to be logged", || {
        let said = pair.hosts[1].server.as_ref().expect("it runs").complaints().join("\n");
        said.contains("'rbd/one': its exclusive lock is held by 127.0.0.1:0/")
    });
    // Or is let in when the other has left.
    await_that("a guest to be let in that does not wait for too long", || {
        pair.vm.load(40);
        let is_let_in = std::thread::scope(|scope| {
            let early = scope.spawn(|| Guest::try_boot(&there).map(|mut early| early.read_honestly()).is_some());
            pair.vm.drain();
            // Its session looks every now and then; before that it has slept no more often than a guest has messages.
            let server = pair.hosts[1].server.as_ref().expect("it runs");
            let sleeps = || server.sleeps().into_iter().find(|(name, _)| name == "e0").map_or(0, |(_, count)| count);
            let before = sleeps();
            await_that("the other guest to wait", || sleeps() > before + 50 || early.is_finished());
            pair.vm.stop();
            early.join().expect("it reads")
        });
        if !is_let_in {
            pair.vm.go_on();
        }
        is_let_in
    });
    await_that("the guest to be gone", || !pair.hosts[1].is_active());
    // By hand, to and fro.
    for host in [0, 1, 0] {
        pair.hosts[host].qmp.run("blockdev-set-active", active(true));
        assert_eq!(([0, 1].map(|host| pair.hosts[host].is_active()), pair.lockers()), ([host == 0, host == 1], 1));
        pair.hosts[1 - host].qmp.fail("blockdev-set-active", active(true));
        pair.hosts[host].qmp.run("blockdev-set-active", active(false));
        assert_eq!(pair.lockers(), 0);
    }
}
