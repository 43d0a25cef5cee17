//! Guest memory that is pinned for its disk: what is moved there is right whatever becomes of the memory, and no client
//! has the daemon pin for ever.

mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use support::await_that;
use support::disk::Disk;
use support::guest::*;
use support::http::sum;
use support::neighbour::Neighbour;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::wire::*;

const MIB: u64 = 1 << 20;
/// What the disk begins with.
const CONTENT: u8 = 0x5A;

/// A daemon whose exports pin memory, on one I/O thread: one for a test's guests, and one for a neighbour.
struct Scene {
    server: Server,
    socket: PathBuf,
    beside: PathBuf,
    metrics: PathBuf,
    _scratch: Scratch,
}

impl Scene {
    fn open(monitor: &str, more: &str) -> Self {
        let scratch = Scratch::new();
        let image = scratch.image_path("d0");
        std::fs::write(&image, vec![CONTENT; MIB as usize]).expect("an image");
        let [socket, beside, metrics] = ["e0", "e1", "metrics"].map(|name| scratch.path(name));
        let options = Options::new()
            .iothread("io0", &format!("fd-monitor={monitor}"))
            .disk("d0", &image, "aio=io_uring,cache.direct=on")
            .disk("d1", &scratch.image("d1", MIB), "aio=io_uring,cache.direct=on")
            .export("e0", "d0", &socket, &format!("writable=on,iothread=io0,pin-memory=on{more}"))
            .export("e1", "d1", &beside, "writable=on,iothread=io0,pin-memory=on")
            .metrics(&metrics);
        let server = Server::start(&Program::egret(), &options);
        Self { server, socket, beside, metrics, _scratch: scratch }
    }

    fn registered(&self) -> f64 {
        sum(&self.metrics, "egret_engine_registered_requests_total")
    }

    fn pinned(&self) -> f64 {
        sum(&self.metrics, "egret_engine_pinned_bytes")
    }

    /// Has a guest read until its reads go to memory that is pinned.
    fn await_registered(&self, guest: &mut Guest) {
        let before = self.registered();
        await_that("a read to pinned memory", || {
            guest.read_honestly();
            self.registered() > before
        });
    }
}

/// Makes all of a region be there, as a guest does that has used it.
fn fill(memory: &File) {
    memory.write_all_at(&[0; REGION as usize], 0).expect("our own memory");
}

fn first_byte(memory: &File) -> u8 {
    let mut byte = [0];
    memory.read_exact_at(&mut byte, BUFFER_AT - DATA).expect("our own memory");
    byte[0]
}

#[test]
fn what_is_read_goes_to_the_memory_that_there_is_and_not_to_what_there_was() {
    for monitor in ["io_uring", "epoll"] {
        let scene = Scene::open(monitor, "");
        let mut guest = Guest::boot(&scene.socket);
        let mut gone = Vec::new();
        for round in 0..8 {
            fill(&guest.data.file);
            scene.await_registered(&mut guest);
            assert_eq!(guest.data_byte(BUFFER_AT), CONTENT);
            // Others' memory takes its place, at the same address of the guest's, and likely of the daemon's.
            let message = guest.data.message();
            guest.wire.must(REM_MEM_REG, &message, &[]);
            let old = std::mem::replace(&mut guest.data, Share::new(DATA, REGION)).file;
            fill(&guest.data.file);
            guest.wire.must(ADD_MEM_REG, &message, &[guest.data.file.as_fd()]);
            old.write_all_at(&[1; 4096], BUFFER_AT - DATA).expect("our own memory");
            gone.push(old);
            guest.read_honestly();
            assert_eq!(guest.data_byte(BUFFER_AT), CONTENT, "round {round}");
        }
        assert!(gone.iter().all(|memory| first_byte(memory) == 1), "what was removed is left alone");
        drop(guest);
        await_that("all memory to be let go of", || scene.pinned() == 0.0);
        assert_eq!(scene.server.complaints(), Vec::<String>::new());
    }
}

#[test]
fn a_client_that_replaces_its_memory_without_end_delays_others_a_little_and_leaves_nothing_pinned() {
    let scene = Scene::open("io_uring", "");
    let neighbour = Neighbour::start(&scene.beside);
    for _ in 0..3 {
        let mut guest = Guest::boot(&scene.socket);
        fill(&guest.data.file);
        scene.await_registered(&mut guest);
        // Large, and all of it there; and sparse, and larger than any guest's.
        let large = Share::new(1 << 40, 64 * MIB);
        large.file.write_all_at(&vec![0; 64 << 20], 0).expect("our own memory");
        let sparse = Share::new(2 << 40, 1 << 40);
        for region in [&large, &sparse] {
            for round in 0..8 {
                let message = region.message();
                guest.wire.must(ADD_MEM_REG, &message, &[region.file.as_fd()]);
                // To each part of it, of which none was read to before.
                let mut read_to_each_part = || {
                    for part in 0..4 {
                        guest.describe_read(4096);
                        guest.describe(1, region.guest + part * (16 * MIB), 4096, NEXT | WRITE, 2);
                        let before = guest.used();
                        guest.offer(0);
                        await_that("a read", || guest.used() == before.wrapping_add(1));
                        assert_eq!(guest.data_byte(STATUS_AT), 0, "the read succeeds");
                    }
                };
                read_to_each_part();
                if round == 0 && region.len == 64 * MIB {
                    await_that("some of it to be pinned", || {
                        read_to_each_part();
                        scene.pinned() >= (32 * MIB) as f64
                    });
                }
                guest.wire.must(REM_MEM_REG, &message, &[]);
            }
        }
        neighbour.await_progress();
    }
    drop(neighbour);
    await_that("all memory to be let go of", || scene.pinned() == 0.0);
    assert_eq!(scene.server.complaints(), Vec::<String>::new());
}

#[test]
fn memory_that_cannot_be_pinned_costs_a_client_a_line_in_the_log_and_nothing_else() {
    let scene = Scene::open("io_uring", ",memory-files=any");
    let mut guest = Guest::boot(&scene.socket);
    // A file on a disk, whose pages are to be written out some day.
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let memory = tempfile::tempfile_in(place).expect("a file");
    memory.set_len(REGION).expect("its length");
    fill(&memory);
    let message = guest.data.message();
    guest.wire.must(REM_MEM_REG, &message, &[]);
    guest.data.file = memory;
    guest.wire.must(ADD_MEM_REG, &message, &[guest.data.file.as_fd()]);
    let told = || scene.server.complaints().iter().filter(|line| line.contains("cannot be pinned")).count();
    await_that("a line in the log", || {
        guest.read_honestly();
        told() > 0
    });
    for _ in 0..100 {
        guest.read_honestly();
    }
    assert_eq!(guest.data_byte(BUFFER_AT), CONTENT);
    assert_eq!(told(), 1, "{:?}", scene.server.complaints());
    // Another client's memory is as good as any.
    let mut disk = Disk::connect(&scene.beside).expect("a connection");
    await_that("another's memory", || {
        disk.first().write_pattern(0..MIB, 1).expect("a write");
        disk.first().verify_pattern(0..MIB, 1).expect("a read");
        scene.pinned() > 0.0
    });
}

#[test]
fn an_export_whose_disk_has_another_engine_says_that_pinning_has_no_effect() {
    let scratch = Scratch::new();
    let image = scratch.image("d0", MIB);
    let options =
        Options::new().disk("d0", &image, "aio=threads").export("e0", "d0", &scratch.path("e0"), "pin-memory=on");
    let server = Server::start(&Program::egret(), &options);
    await_that("a warning", || !server.complaints().is_empty());
    let said = server.complaints();
    let line = "export 'e0': pin-memory has no effect on requests to blockdev 'd0'; it belongs to aio=io_uring";
    assert!(said.len() == 1 && said[0].contains(line), "{said:?}");
}

#[test]
fn a_ring_that_stops_and_starts_again_and_again_leaves_no_maps_of_its_memory_behind() {
    let scene = Scene::open("io_uring", "");
    let mut guest = Guest::boot(&scene.socket);
    // The more of them, the larger is a map.
    let regions: Vec<Share> = (0..24).map(|n| Share::new((1 + n) << 40, REGION)).collect();
    for region in &regions {
        guest.wire.must(ADD_MEM_REG, &region.message(), &[region.file.as_fd()]);
    }
    let mut go_round = |rounds| {
        for _ in 0..rounds {
            for enabled in [0, 1] {
                guest.wire.must(SET_VRING_ENABLE, &u32s(&[0, enabled]), &[]);
            }
            // By then the engine has let go of the map before.
            guest.read_honestly();
        }
        scene.server.resident_without_files()
    };
    let before = go_round(300);
    let grown = go_round(2000).saturating_sub(before);
    assert!(grown < MIB, "{grown} bytes more");
}
