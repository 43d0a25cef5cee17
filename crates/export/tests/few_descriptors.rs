//! What becomes of clients while their export's process has no descriptor left: in a process of its own.

mod peer;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use egret_disk::{Disk, Driver, Options};
use egret_event_loop::Nanos;
use egret_export::{Address, Export};
use peer::lines::{lines, record_lines};
use peer::{GET_QUEUE_NUM, IoThread, Peer, await_that, blk_config, export_config};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn who_comes_when_no_descriptor_is_left_is_let_in_when_there_is_one() {
    record_lines();
    let (io, scratch) = (IoThread::start(), tempfile::tempdir().unwrap());
    let path = scratch.path().join("socket");
    let null = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options::new("null", null)).unwrap());
    let config = export_config(Address::Path(path.clone()));
    let _export = Export::start(config, blk_config(disk.size(), 3), disk, vec![io.0.clone()]).unwrap();
    let usual = getrlimit(Resource::Nofile);
    // The next is the last, and the client's own.
    let next = File::open("/dev/null").unwrap();
    setrlimit(Resource::Nofile, Rlimit { current: Some(next.as_raw_fd() as u64 + 1), ..usual }).unwrap();
    drop(next);
    let mut peer = Peer(UnixStream::connect(&path).unwrap());
    await_that("the export to try in vain", || lines("export 'e0': cannot accept clients") > 0);
    setrlimit(Resource::Nofile, usual).unwrap();
    assert_eq!(peer.ask_u64(GET_QUEUE_NUM), 3);
}
