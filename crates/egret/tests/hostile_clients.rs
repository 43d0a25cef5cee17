//! Clients and guests that break the rules lose their session or their queue, and nobody else notices.
//!
//! Beside every attack another export's client writes and verifies without a pause, and after it the attacked export
//! serves a new client. Each attack is worth one line in the log.

mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::event::{EventfdFlags, eventfd};

use support::await_that;
use support::disk::Disk;
use support::guest::*;
use support::neighbour::Neighbour;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::wire::*;

const MIB: u64 = 1 << 20;

/// A daemon with an export to attack and one to leave alone.
struct Scene {
    neighbour: Neighbour,
    server: Server,
    victim: PathBuf,
    _scratch: Scratch,
}

impl Scene {
    fn open() -> Self {
        let scratch = Scratch::new();
        let image = scratch.image("victim", MIB);
        Self::open_with(scratch, |options| options.disk("d0", &image, "aio=io_uring,cache.direct=on"))
    }

    fn open_with(scratch: Scratch, victim_disk: impl FnOnce(Options) -> Options) -> Self {
        let (victim, neighbour) = (scratch.path("victim"), scratch.path("neighbour"));
        let options = victim_disk(Options::new().iothread("io0", ""))
            .disk("d1", &scratch.image("neighbour", MIB), "aio=io_uring,cache.direct=on")
            .export("e0", "d0", &victim, "writable=on,num-queues=2,iothread=io0")
            .export("e1", "d1", &neighbour, "writable=on,iothread=io0");
        let server = Server::start(&Program::under_test(), &options);
        Self { neighbour: Neighbour::start(&neighbour), server, victim, _scratch: scratch }
    }

    /// Attacks, and checks everything that must not have suffered.
    fn survives(&mut self, what: &str, attack: impl FnOnce(&Path, &Neighbour)) {
        attack(&self.victim, &self.neighbour);
        assert!(self.server.is_alive(), "the daemon outlives {what}");
        self.neighbour.await_progress();
        let mut next = Disk::connect(&self.victim).unwrap_or_else(|error| panic!("after {what}: {error}"));
        next.first().read(0, 4096).unwrap_or_else(|error| panic!("after {what}: {error}"));
        self.neighbour.await_progress();
        assert!(self.server.is_alive(), "the daemon outlives {what}");
    }

    /// [`survives`](Self::survives), with one line in the log.
    fn endures(&mut self, what: &str, attack: impl FnOnce(&Path, &Neighbour)) {
        let complaints = self.server.complaints().len();
        self.survives(what, attack);
        if Program::under_test().is_egret() {
            await_that("a line in the log", || self.server.complaints().len() > complaints);
            let said = self.server.complaints().split_off(complaints);
            assert_eq!(said.len(), 1, "{what} is worth one line: {said:?}");
        }
    }

    /// Lets a guest whose queue works break it, and waits until the daemon has noticed.
    fn endures_guest(&mut self, what: &str, attack: impl FnOnce(&mut Guest)) {
        self.endures(what, |socket, _| {
            let mut guest = Guest::boot(socket);
            guest.read_honestly();
            attack(&mut guest);
            if Program::under_test().is_egret() {
                guest.await_queue_error();
            }
        });
    }
}

#[test]
fn bytes_that_are_no_message_end_the_session() {
    let mut scene = Scene::open();
    let garbage = [0xA5; 64];
    let too_long = u32s(&[SET_OWNER, 1, u32::MAX]);
    let wrong_version = u32s(&[GET_FEATURES, 2, 0]);
    let unknown = u32s(&[4000, 1, 0]);
    for (what, bytes) in [
        ("garbage", &garbage[..]),
        ("a payload of 4 GiB", &too_long),
        ("another version", &wrong_version),
        ("an unknown request", &unknown),
    ] {
        scene.endures(what, |socket, _| {
            let mut wire = Wire::connect(socket);
            wire.send_bytes(bytes).expect("the socket takes it");
            wire.await_hangup();
        });
    }
}

#[test]
fn a_client_that_stops_in_the_middle_of_a_message_holds_up_nobody() {
    let mut scene = Scene::open();
    let header = u32s(&[SET_FEATURES, 1, 8]);
    let half_a_payload = [&header[..], &[0; 4]].concat();
    for (what, bytes) in [("half a header", &header[..6]), ("a bare header", &header), ("half", &half_a_payload)] {
        scene.endures(what, |socket, neighbour| {
            let mut wire = Wire::connect(socket);
            wire.send_bytes(bytes).expect("the socket takes it");
            neighbour.await_progress();
        });
    }
}

#[test]
fn orders_that_cannot_be_carried_out_are_refused() {
    let mut scene = Scene::open();
    let mut refused = |what: &str, request: u32, payload: &[u8], fds: usize| {
        scene.endures(what, |socket, _| {
            let mut wire = Wire::agree(socket, F_VERSION_1);
            let region = Share::new(DATA, REGION);
            wire.must(ADD_MEM_REG, &region.message(), &[region.file.as_fd()]);
            let other = Share::new(DATA, REGION);
            assert!(wire.refuses(request, payload, &vec![other.file.as_fd(); fds]), "{what} is refused");
        });
    };
    let region = |guest: u64, len: u64, user: u64, offset: u64| u64s(&[0, guest, len, user, offset]);
    refused("a region longer than its file", ADD_MEM_REG, &region(1 << 40, 2 * REGION, 1 << 40, 0), 1);
    refused("a region that begins behind its file", ADD_MEM_REG, &region(1 << 40, REGION, 1 << 40, 4096), 1);
    refused("an empty region", ADD_MEM_REG, &region(1 << 40, 0, 1 << 40, 0), 1);
    refused("a region over another", ADD_MEM_REG, &region(DATA + 4096, REGION, 1 << 40, 0), 1);
    refused("a region over the end of memory", ADD_MEM_REG, &region(u64::MAX - 4095, REGION, 1 << 40, 0), 1);
    refused("a region over the end of the client", ADD_MEM_REG, &region(1 << 40, REGION, u64::MAX - 4095, 0), 1);
    refused("a region whose offset overflows", ADD_MEM_REG, &region(1 << 40, REGION, 1 << 40, u64::MAX - 4095), 1);
    refused("a region without a file", ADD_MEM_REG, &region(1 << 40, REGION, 1 << 40, 0), 0);
    refused("the removal of no region", REM_MEM_REG, &region(1 << 40, REGION, 1 << 40, 0), 0);
    refused("a table of 1000 regions", SET_MEM_TABLE, &[u32s(&[1000, 0]), vec![0; 8 * 32]].concat(), 8);
    refused("a table shorter than it says", SET_MEM_TABLE, &[u32s(&[2, 0]), vec![0; 32]].concat(), 2);
    refused("a queue of no size", SET_VRING_NUM, &u32s(&[0, 0]), 0);
    refused("a queue of size 3", SET_VRING_NUM, &u32s(&[0, 3]), 0);
    refused("a queue of size 65536", SET_VRING_NUM, &u32s(&[0, 65536]), 0);
    refused("the size of queue 200", SET_VRING_NUM, &u32s(&[200, 16]), 0);
    refused("the start of queue 200", SET_VRING_ENABLE, &u32s(&[200, 1]), 0);
    refused("the kick of queue 200", SET_VRING_KICK, &u64s(&[200]), 1);
    refused("a kick without its descriptor", SET_VRING_KICK, &u64s(&[0]), 0);
    refused("a record for no queue", GET_INFLIGHT_FD, &inflight(0, 0, 0, 128), 0);
    refused("a record for too many queues", GET_INFLIGHT_FD, &inflight(0, 0, u16::MAX, 128), 0);
    refused("a record for queues too long", GET_INFLIGHT_FD, &inflight(0, 0, 1, u16::MAX), 0);
    refused("a record of no descriptors", SET_INFLIGHT_FD, &inflight(REGION, 0, 1, 0), 1);
    refused("a record of too many queues", SET_INFLIGHT_FD, &inflight(REGION, 0, 3, 128), 1);
    refused("a record shorter than its queues", SET_INFLIGHT_FD, &inflight(2048, 0, 1, 128), 1);
    refused("a record longer than its file", SET_INFLIGHT_FD, &inflight(4096, REGION - 2048, 1, 128), 1);
    refused("a record behind the end of all files", SET_INFLIGHT_FD, &inflight(4096, u64::MAX - 4095, 1, 128), 1);
    refused("a record at an odd offset", SET_INFLIGHT_FD, &inflight(4096, 4, 1, 128), 1);
    refused("a record without a file", SET_INFLIGHT_FD, &inflight(4096, 0, 1, 128), 0);
    refused("a record of half a message", SET_INFLIGHT_FD, &inflight(4096, 0, 1, 128)[..16], 1);
}

#[test]
fn a_ring_that_does_not_lie_in_memory_is_not_started() {
    let mut scene = Scene::open();
    let mut refused = |what: &str, rings: u64| {
        scene.endures(what, |socket, _| {
            let mut wire = Wire::agree(socket, F_VERSION_1);
            let region = Share::new(DATA, REGION);
            wire.must(ADD_MEM_REG, &region.message(), &[region.file.as_fd()]);
            let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
            wire.must(SET_VRING_NUM, &u32s(&[0, SIZE.into()]), &[]);
            // At once, or when the ring would start.
            let is_refused = wire.refuses(SET_VRING_ADDR, &ring_addresses(rings), &[])
                || wire.refuses(SET_VRING_KICK, &u64s(&[0]), &[kick.as_fd()])
                || wire.refuses(SET_VRING_ENABLE, &u32s(&[0, 1]), &[]);
            assert!(is_refused, "{what} is refused");
        });
    };
    refused("a ring outside memory", 1 << 50);
    refused("a ring that leaves memory", DATA + USER + REGION - 4096);
    refused("a ring at an odd address", DATA + USER + 1);
}

#[test]
fn more_regions_than_slots_are_refused() {
    let mut scene = Scene::open();
    scene.endures("one region too many", |socket, _| {
        let mut wire = Wire::agree(socket, F_VERSION_1);
        let slots = wire.ask(GET_MAX_MEM_SLOTS, &[]).expect("the number of slots");
        let region = |n: u64| Share::new((n + 1) << 30, REGION);
        for n in 0..slots {
            let region = region(n);
            let added = wire.order(ADD_MEM_REG, &region.message(), &[region.file.as_fd()]);
            assert_eq!(added.expect("an answer"), 0, "there are {slots} slots, and this is number {n}");
        }
        let last = region(slots);
        assert!(wire.refuses(ADD_MEM_REG, &last.message(), &[last.file.as_fd()]));
    });
}

#[test]
fn descriptors_sent_for_nothing_are_closed() {
    let mut scene = Scene::open();
    scene.neighbour.await_progress();
    let before = scene.server.descriptors();
    scene.survives("60 descriptors with the wrong message", |socket, _| {
        let region = Share::new(DATA, REGION);
        let mut wire = Wire::connect(socket);
        wire.send(SET_OWNER, &[], &[region.file.as_fd(); 60]).expect("the socket takes it");
        // Whether this ends the session or is only overlooked is the daemon's choice.
        let _ = wire.ask(GET_FEATURES, &[]);
    });
    await_that("the descriptors to be closed", || scene.server.descriptors() <= before);
}

#[test]
fn a_chain_that_never_ends_breaks_the_queue_and_nothing_else() {
    let mut scene = Scene::open();
    scene.endures_guest("a chain that loops", |guest| {
        guest.describe_read(4096);
        guest.describe(1, BUFFER_AT, 512, NEXT | WRITE, 0);
        guest.offer(0);
    });
    scene.endures_guest("a descriptor that follows itself", |guest| {
        guest.describe(5, BUFFER_AT, 0, NEXT | WRITE, 5);
        guest.offer(5);
    });
    scene.endures_guest("an indirect table that loops", |guest| {
        let table = [descriptor(HEADER_AT, 16, NEXT, 1), descriptor(BUFFER_AT, 512, NEXT | WRITE, 0)].concat();
        guest.data.put(DATA + 0x4000, &table);
        guest.describe(0, DATA + 0x4000, 32, INDIRECT, 0);
        guest.offer(0);
    });
}

#[test]
fn a_chain_that_leads_nowhere_breaks_the_queue_and_nothing_else() {
    let mut scene = Scene::open();
    let mut with = |what: &str, (addr, len, flags, next): (u64, u32, u16, u16)| {
        scene.endures_guest(what, |guest| {
            guest.describe_read(4096);
            guest.describe(1, addr, len, flags, next);
            guest.offer(0);
        });
    };
    with("a buffer outside memory", (1 << 50, 4096, NEXT | WRITE, 2));
    with("a buffer that leaves memory", (DATA + REGION - 512, 4096, NEXT | WRITE, 2));
    with("a buffer over the end of all addresses", (u64::MAX - 511, 4096, NEXT | WRITE, 2));
    with("a buffer of 4 GiB", (BUFFER_AT, u32::MAX, NEXT | WRITE, 2));
    with("a next descriptor outside the table", (BUFFER_AT, 4096, NEXT | WRITE, SIZE));
}

#[test]
fn an_indirect_table_that_is_none_breaks_the_queue_and_nothing_else() {
    let mut scene = Scene::open();
    let mut with = |what: &str, addr: u64, len: u32, flags: u16| {
        scene.endures_guest(what, |guest| {
            guest.describe(0, addr, len, flags, 1);
            guest.offer(0);
        });
    };
    with("an indirect table outside memory", 1 << 50, 32, INDIRECT);
    with("an indirect table of no length", BUFFER_AT, 0, INDIRECT);
    with("an indirect table of a length and a half", BUFFER_AT, 24, INDIRECT);
    with("an indirect table of 4 GiB", BUFFER_AT, 0xFFFF_FFF0, INDIRECT);
    with("an indirect table with something behind it", BUFFER_AT, 32, INDIRECT | NEXT);
    scene.endures_guest("an indirect table within another", |guest| {
        guest.data.put(BUFFER_AT, &descriptor(BUFFER_AT, 16, INDIRECT, 0));
        guest.describe(0, BUFFER_AT, 16, INDIRECT, 0);
        guest.offer(0);
    });
}

#[test]
fn an_available_ring_that_lies_breaks_the_queue_and_nothing_else() {
    let mut scene = Scene::open();
    scene.endures_guest("a head outside the table", |guest| guest.offer(SIZE));
    scene.endures_guest("an index that runs ahead", |guest| guest.publish(guest.used() + SIZE + 1));
    scene.endures_guest("an index that runs back", |guest| guest.publish(guest.used().wrapping_sub(1)));
}

#[test]
fn a_request_without_room_for_its_answer_breaks_the_queue_and_nothing_else() {
    let mut scene = Scene::open();
    scene.endures_guest("a chain without a status byte", |guest| {
        guest.describe_read(4096);
        guest.describe(1, BUFFER_AT, 4096, 0, 0);
        guest.offer(0);
    });
    scene.endures_guest("a header that is too short", |guest| {
        guest.describe_read(4096);
        guest.describe(0, HEADER_AT, 8, NEXT, 2);
        guest.offer(0);
    });
}

#[test]
fn memory_truncated_under_the_daemon_costs_its_owner_the_queue_and_nobody_else_anything() {
    let mut scene = Scene::open();
    let mut truncated = |what: &str, attack: &dyn Fn(&mut Guest)| {
        scene.endures(what, |socket, _| {
            let mut guest = Guest::boot(socket);
            guest.read_honestly();
            guest.describe_read(4096);
            attack(&mut guest);
            // The next kick at the latest shows it.
            await_that("the queue or the session to end", || {
                guest.kick();
                guest.is_over()
            });
        });
    };
    truncated("rings that vanish", &|guest| {
        guest.rings.file.set_len(0).expect("our own memory");
        guest.kick();
    });
    truncated("headers that vanish", &|guest| {
        guest.data.file.set_len(0).expect("our own memory");
        guest.offer(0);
    });
    truncated("a used ring that vanishes", &|guest| {
        guest.rings.file.set_len(USED).expect("our own memory");
        guest.offer(0);
    });
}

#[test]
fn a_buffer_that_vanishes_costs_its_owner_a_request_or_the_queue() {
    // The page cache is copied from by the kernel, direct I/O pins pages: neither may kill.
    for disk in ["aio=threads", "aio=io_uring", "aio=threads,cache.direct=on", "aio=native,cache.direct=on"] {
        let scratch = Scratch::new();
        let image = scratch.image("victim", MIB);
        let mut scene = Scene::open_with(scratch, |options| options.disk("d0", &image, disk));
        scene.survives(disk, |socket, _| {
            let mut guest = Guest::boot(socket);
            guest.read_honestly();
            // Header and status byte stay, in the page before the buffer; the buffer's page goes.
            let status_at = BUFFER_AT - 1;
            guest.describe_read(4096);
            guest.data.put(status_at, &[0xFF]);
            guest.describe(2, status_at, 1, WRITE, 0);
            guest.data.file.set_len(BUFFER_AT - DATA).expect("our own memory");
            guest.offer(0);
            await_that("the request or the queue to fail", || guest.used() == 2 || guest.is_over());
            assert!(guest.is_over() || guest.data_byte(status_at) == 1, "{disk}: VIRTIO_BLK_S_IOERR");
        });
    }
}

#[test]
fn a_client_that_leaves_in_the_middle_of_its_requests_takes_nothing_with_it() {
    let mut scene = Scene::open_with(Scratch::new(), |options| options.null("d0", "latency-ns=100000000"));
    scene.survives("leaving with requests in flight", |socket, _| {
        let mut guest = Guest::boot(socket);
        for head in [0, 3, 6, 9] {
            guest.describe_read_at(head, 4096);
            guest.offer(head);
        }
        await_that("the daemon to take the requests up", || guest.is_taken_up());
    });
}

#[test]
fn memory_removed_under_requests_in_flight_is_let_go_after_them() {
    let mut scene = Scene::open_with(Scratch::new(), |options| options.null("d0", "latency-ns=1000000000"));
    scene.survives("a removal", |socket, _| {
        let mut guest = Guest::boot(socket);
        guest.describe_read(4096);
        guest.offer(0);
        await_that("the daemon to take the request up", || guest.is_taken_up());
        let message = guest.data.message();
        guest.wire.must(REM_MEM_REG, &message, &[]);
        assert_eq!(guest.used(), 1, "an answered removal means that nothing uses the region");
    });
}

/// Adds a region of `memory` at guest address `at`; whether the daemon took it.
fn adds(wire: &mut Wire, memory: &File, at: u64, len: u64) -> bool {
    !wire.refuses(ADD_MEM_REG, &u64s(&[0, at, len, at + USER, 0]), &[memory.as_fd()])
}

/// Memory as long as a test likes, of which nothing is there.
fn sparse(len: u64) -> File {
    Share::new(0, len).file
}

#[test]
fn memory_without_end_costs_its_owner_the_session_and_nobody_else_anything() {
    if !Program::under_test().is_egret() {
        return;
    }
    const TIB: u64 = 1 << 40;
    let mut scene = Scene::open();
    for attempt in 1..=20 {
        scene.endures("memory without end", |socket, _| {
            let mut wire = Wire::agree(socket, F_VERSION_1);
            let memory = sparse(TIB);
            let taken = (0..).take_while(|n| adds(&mut wire, &memory, n * TIB, TIB)).count();
            assert_eq!(taken, 4, "the limit unless somebody says otherwise, for the client {attempt} too");
        });
    }
    let said = scene.server.complaints().pop().expect("a line");
    assert!(said.contains("memory-max") && said.contains("4T"), "{said}");
}

#[test]
fn memory_for_all_exports_has_an_end_too() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let sockets = [scratch.path("e0"), scratch.path("e1")];
    let options = Options::new().words(["--memory-max=1M"]).null("d0", "");
    let options = options.export("e0", "d0", &sockets[0], "").export("e1", "d0", &sockets[1], "memory-max=2M");
    let server = Server::start(&Program::under_test(), &options);
    let [mut first, mut second] = sockets.each_ref().map(|socket| Wire::agree(socket, F_VERSION_1));
    assert!(adds(&mut first, &sparse(MIB), 0, MIB));
    assert!(!adds(&mut second, &sparse(MIB), 0, MIB));
    await_that("a line that names the option", || server.complaints().iter().any(|line| line.contains("--memory-max")));
    drop(first);
    await_that("what the first one had to be free", || {
        adds(&mut Wire::agree(&sockets[1], F_VERSION_1), &sparse(MIB), 0, MIB)
    });
}

#[test]
fn a_guest_that_has_all_that_it_may_have_can_send_its_table_again() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let socket = scratch.path("e0");
    let options = Options::new().null("d0", "").export("e0", "d0", &socket, "memory-max=1M");
    let _server = Server::start(&Program::under_test(), &options);
    let mut wire = Wire::agree(&socket, F_VERSION_1);
    let memory = sparse(MIB);
    let table = [u32s(&[1, 0]), u64s(&[DATA, MIB, DATA + USER, 0])].concat();
    for _ in 0..3 {
        wire.must(SET_MEM_TABLE, &table, &[memory.as_fd()]);
    }
    assert!(!adds(&mut wire, &memory, 0, 4096), "and no more than that");
}

#[test]
fn guest_memory_is_a_file_on_a_disk_only_where_the_operator_says_so() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let sockets = [scratch.path("e0"), scratch.path("e1")];
    let options = Options::new().null("d0", "").export("e0", "d0", &sockets[0], "");
    let options = options.export("e1", "d0", &sockets[1], "memory-files=any");
    let server = Server::start(&Program::under_test(), &options);
    let path = scratch.image("memory", MIB);
    let on_disk = File::options().read(true).write(true).open(path).expect("our own file");
    assert!(!adds(&mut Wire::agree(&sockets[0], F_VERSION_1), &on_disk, 0, MIB));
    await_that("a line that names the option", || server.complaints().iter().any(|line| line.contains("memory-files")));
    assert!(adds(&mut Wire::agree(&sockets[1], F_VERSION_1), &on_disk, 0, MIB));
    // An in-flight record is never on a disk.
    let mut wire = Wire::agree(&sockets[1], F_VERSION_1);
    assert!(wire.refuses(SET_INFLIGHT_FD, &inflight(REGION, 0, 1, 128), &[on_disk.as_fd()]));
}
