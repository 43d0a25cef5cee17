//! Nothing is allocated for a request of an NBD client's: in a process of its own, whose allocator counts what the I/O thread
//! does.

#[path = "../../virtio/tests/counting/mod.rs"]
mod counting;
#[path = "../../egret/tests/support/nbd_client.rs"]
#[allow(dead_code, unreachable_pub, reason = "the daemon's tests use more of it")]
mod nbd_client;
mod peer;

use std::sync::Arc;
use std::time::Duration;

use counting::ALLOCATIONS_HERE;
use egret_disk::{Disk, Driver, Options};
use egret_event_loop::Nanos;
use egret_export::{Access, Export, NbdAddress, NbdOptions, NbdServer, NbdServerConfig};
use egret_nbd::protocol::{Headers, command, command_flag};
use nbd_client::NbdClient;
use peer::IoThread;

const PATIENCE: Duration = Duration::from_secs(60);

const DEPTH: usize = 16;
const REQUESTS: usize = 20_000;

#[test]
fn nothing_is_allocated_for_a_request() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let config = NbdServerConfig {
        address: NbdAddress::Unix(socket.clone(), Access::default()),
        max_connections: 0,
        handshake_max: PATIENCE,
        tls: None,
    };
    let server = NbdServer::start(config).unwrap();
    let io = IoThread::start();
    let driver = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
    let disk = Arc::new(Disk::open(&Options::new("d0", driver)).unwrap());
    let options =
        NbdOptions { name: "disk".into(), description: None, writable: true, writethrough: false, max_connections: 0 };
    let export = Export::start_nbd("e0".into(), options, &server, disk, std::slice::from_ref(&io.0)).unwrap();
    server.open();
    let counted = || io.0.call(|_| ALLOCATIONS_HERE.get()).unwrap();
    let data = [7; 4096];
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        let mut client = NbdClient::connect(&socket, "disk", headers);
        let extended = if headers == Headers::Extended { command_flag::PAYLOAD_LEN } else { 0 };
        let (mut asked, mut before) = (0, 0);
        for answered in 0..REQUESTS {
            while asked < REQUESTS && asked - answered < DEPTH {
                match asked % 4 {
                    0 => client.ask(0, command::READ, 4096, 4096, &[]),
                    1 => client.ask(command_flag::FUA | extended, command::WRITE, 4096, 4096, &data),
                    2 => client.ask(command_flag::FUA, command::TRIM, 8192, 4096, &[]),
                    _ => client.ask(0, command::FLUSH, 0, 0, &[]),
                };
                asked += 1;
            }
            client.hear().unwrap().1.unwrap();
            if answered == REQUESTS / 4 {
                before = counted();
            }
        }
        // More may be in flight now than ever before, and that takes memory once: a list longer, a buffer more.
        let made = counted() - before;
        assert!(before > 0 && made < 8 * DEPTH, "{headers:?}: {made} allocations");
    }
    drop(export);
    drop(server);
}
