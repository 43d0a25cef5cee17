//! What clients do that others' changes would have to wait for: a session that does not end.

use std::os::fd::AsFd;

use serde_json::json;

use crate::support::await_that;
use crate::support::guest::Guest;
use crate::support::qmp::Qmp;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};
use crate::support::wire::{GET_VRING_BASE, SET_MEM_TABLE, u32s};

/// Whether somebody may change something else.
pub fn await_change(qmp: &mut Qmp) {
    qmp.run("object-add", json!({"qom-type": "iothread", "id": "other"}));
    qmp.run("object-del", json!({"id": "other"}));
}

#[test]
fn a_queue_that_is_stopped_on_a_disk_that_hangs_is_in_use_and_holds_up_no_change_of_others() {
    for request in [GET_VRING_BASE, SET_MEM_TABLE] {
        let scratch = Scratch::new();
        let [monitor, socket] = ["qmp", "disk"].map(|name| scratch.path(name));
        let options = Options::new()
            .monitor("m", &monitor)
            .iothread("io0", "")
            .iothread("io1", "")
            .null("d0", "latency-ns=3600000000000")
            .export("e0", "d0", &socket, "writable=on,iothread=io0")
            .words(["--shutdown-timeout=0"]);
        let _server = Server::start(&Program::egret(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let mut guest = Guest::boot(&socket);
        guest.describe_read(4096);
        guest.offer(0);
        await_that("the daemon to take the read", || guest.is_taken_up());
        let sent = match request {
            GET_VRING_BASE => guest.wire.send(request, &u32s(&[0, 0]), &[]),
            _ => {
                let table = [u32s(&[1, 0]), guest.data.message()[8..].to_vec()].concat();
                guest.wire.send(request, &table, &[guest.data.file.as_fd()])
            }
        };
        sent.expect("the socket takes it");
        // Before the daemon looks at the message, and when it has: both ends of each are some turns of its threads apart.
        for _ in 0..20 {
            assert_eq!(qmp.fail("block-export-del", json!({"id": "e0"})), "export 'e0' still in use", "{request}");
            await_change(&mut qmp);
        }
        // A queue that stops need not move, and is on the thread that it was on.
        let moved = json!({"id": "e0", "iothread": "io1"});
        await_that("the queue to stop", || qmp.try_run("egret-map-queues", moved.clone()).is_ok());
        for id in ["io0", "io1"] {
            let refused = qmp.fail("object-del", json!({"id": id}));
            assert_eq!(refused, format!("object '{id}' is in use, can not be deleted"), "{request}");
        }
        qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
        await_change(&mut qmp);
        assert_eq!(qmp.run("query-block-exports", json!({}))[0]["shutting-down"], true, "{request}");
    }
}
