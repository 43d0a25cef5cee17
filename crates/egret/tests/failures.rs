//! Disks that fail, and who is told.

mod support;

use std::time::{Duration, Instant};

use serde_json::json;
use support::disk::Disk;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const MIB: u64 = 1 << 20;

#[test]
fn a_write_that_fails_is_told_to_monitors_once_a_second_and_to_the_guest_each_time() {
    for aio in ["threads", "io_uring"] {
        let scratch = Scratch::new();
        let (image, monitor, socket) = (scratch.image("disk", 16 * MIB), scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new().monitor("m", &monitor).disk("d0", &image, &format!("aio={aio}")).export(
            "e0",
            "d0",
            &socket,
            "writable=on",
        );
        let mut server = Server::start(&Program::egret_with_small_files(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let mut disk = Disk::connect(&socket).unwrap();
        disk.first().write(0, &[1; 4096]).unwrap();

        let begun = Instant::now();
        for _ in 0..50 {
            disk.first().write(8 * MIB, &[1; 4096]).unwrap_err();
        }
        let told = json!({
            "device": "e0", "node-name": "d0", "qom-path": "", "operation": "write", "action": "report",
            "nospace": false, "reason": "File too large",
        });
        assert_eq!(qmp.event("BLOCK_IO_ERROR"), told, "{aio}");
        // Of the other 49 the newest, when a second is over, and then no more.
        assert_eq!(qmp.event("BLOCK_IO_ERROR"), told, "{aio}");
        let taken = begun.elapsed();
        assert!(taken >= Duration::from_millis(900), "{aio}: {taken:?}");
        let stats = qmp.run("query-blockstats", json!({}));
        assert_eq!(stats[0]["stats"]["failed_wr_operations"], 50, "{aio}");

        // It goes on, and what can be done is done.
        disk.first().write(4096, &[2; 4096]).unwrap();
        assert!(disk.first().read(8 * MIB, 4096).unwrap().iter().all(|byte| *byte == 0));
        assert!(server.is_alive());
        let complaints = server.complaints();
        assert!((2..50).contains(&complaints.len()), "{complaints:?}");
        assert!(complaints[0].contains("blockdev 'd0': a write failed: File too large"), "{complaints:?}");
    }
}
