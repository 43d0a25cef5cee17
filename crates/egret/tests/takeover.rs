//! A daemon that is killed under load, and the next one, which goes on where it was.
//!
//! The client keeps its memory, its ring and the record of what is in flight, as a virtual machine monitor does that
//! connects again.

mod support;

use std::os::unix::fs::FileExt;
use std::path::Path;

use support::await_that;
use support::fate::Fate;
use support::guest::Guest;
use support::keeper::Keeper;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::survivor::{BLOCK, BLOCKS, Client, DEPTH, SIZE, content};
use support::wire::*;

/// Nothing is in flight, and the last daemon has ended.
fn assert_holds_what_was_written(image: &Path, client: &Client, case: &str) {
    let packed = client.driver.queue().packed;
    let holds = std::fs::read(image).expect("our own image");
    for (block, bytes) in holds.chunks(BLOCK).enumerate() {
        assert!(bytes == content(block, client.versions[block]), "{case}, {packed}: block {block} is as written");
    }
}

#[test]
fn a_daemon_killed_under_load_is_taken_over_by_the_next_and_no_request_notices() {
    let disks = ["aio=io_uring,cache.direct=on", "aio=native,cache.direct=on", "aio=threads"];
    for (disk, packed) in disks.into_iter().flat_map(|disk| [(disk, false), (disk, true)]) {
        let scratch = Scratch::new();
        let (image, socket) = (scratch.image("disk", (BLOCK * BLOCKS) as u64), scratch.path("socket"));
        let options = Options::new().iothread("io0", "").disk("d0", &image, disk).export(
            "e0",
            "d0",
            &socket,
            "writable=on,iothread=io0",
        );
        let mut client = Client::new(packed);
        for _ in 0..6 {
            let server = Server::start(&Program::egret(), &options);
            client.connect(&socket);
            client.load(300);
            assert_eq!(server.complaints(), Vec::<String>::new());
            // Dropping it is SIGKILL.
            drop(server);
        }
        client.finish(&options, &socket);
        assert_holds_what_was_written(&image, &client, disk);
    }
}

#[test]
fn a_record_that_was_asked_for_with_fewer_descriptors_than_the_ring_has_loses_no_request() {
    for packed in [false, true] {
        let scratch = Scratch::new();
        let socket = scratch.path("socket");
        let image = scratch.image("disk", (BLOCK * BLOCKS) as u64);
        let options = Options::new().iothread("io0", "").disk("d0", &image, "").export(
            "e0",
            "d0",
            &socket,
            "writable=on,iothread=io0",
        );
        // As QEMU 10.0.13, of which the ring is longer than its `queue-size`.
        let mut client = Client::new(packed);
        client.asks_for = SIZE / 8;
        for _ in 0..3 {
            let server = Server::start(&Program::egret(), &options);
            client.connect(&socket);
            client.load(300);
            assert_eq!(server.complaints(), Vec::<String>::new());
            drop(server);
        }
        client.finish(&options, &socket);
        assert_holds_what_was_written(&image, &client, "a short record");
    }
}

#[test]
fn a_client_goes_on_with_each_daemon_that_a_service_manager_starts_and_need_not_connect_again() {
    for packed in [false, true] {
        let scratch = Scratch::new();
        let keeper = Keeper::new(&scratch);
        let (image, socket) = (scratch.image("disk", (BLOCK * BLOCKS) as u64), scratch.path("socket"));
        let options = |image: &Path| {
            let disk = Options::new().iothread("io0", "").disk("d0", image, "");
            disk.export("e0", "d0", &socket, "writable=on,iothread=io0")
        };
        let mut client = Client::new(packed);
        let mut server = Server::start(&keeper.program(), &options(&image));
        keeper.hears("READY=1");
        client.connect(&socket);
        for _ in 0..3 {
            client.load(300);
            assert_eq!(server.terminate().code(), Some(0));
            let next = keeper.successor();
            // One that cannot serve leaves it where it is.
            let missing = options(&scratch.path("missing"));
            assert!(!next.command().args(missing.as_words()).output().unwrap().status.success());
            server = Server::start(&next, &options(&image));
            keeper.hears("FDSTOREREMOVE=1\nFDNAME=egret-session\n");
            client.load(300);
            assert_eq!(server.complaints(), Vec::<String>::new());
        }
        client.drain();
        client.wire = None;
        assert_eq!(server.terminate().code(), Some(0));
        assert_holds_what_was_written(&image, &client, "kept");
        keeper.hears("STOPPING=1");
        // Where nothing is kept a client is hung up on.
        let server = Server::start(&keeper.program().with_env("FDSTORE", "0"), &options(&image));
        keeper.hears("READY=1");
        client.connect(&socket);
        assert_eq!(server.terminate().code(), Some(0));
        assert!(client.wire.as_mut().unwrap().ask(GET_FEATURES, &[]).is_err());
    }
}

#[test]
fn a_client_whose_export_is_not_there_any_more_or_whom_nobody_keeps_any_more_is_hung_up_on() {
    for (id, keeps) in [("e1", "16"), ("e0", "0")] {
        let scratch = Scratch::new();
        let keeper = Keeper::new(&scratch);
        let options =
            |id: &str| Options::new().null("d0", "read-zeroes=on").export(id, "d0", &scratch.path("socket"), "");
        let server = Server::start(&keeper.program(), &options("e0"));
        keeper.hears("READY=1");
        let mut guest = Guest::boot(&scratch.path("socket"));
        guest.read_honestly();
        assert_eq!(server.terminate().code(), Some(0));
        let next = Server::start(&keeper.successor().with_env("FDSTORE", keeps), &options(id));
        keeper.hears("FDSTOREREMOVE=1");
        await_that("the client to be hung up on", || guest.is_over());
        let said = "export 'e0' is not for the client whose session was kept";
        await_that("a line in the log", || next.complaints().iter().any(|line| line.contains(said)));
        // And the next client is let in.
        Guest::boot(&scratch.path("socket")).read_honestly();
    }
}

#[test]
fn a_client_whose_disk_cannot_be_flushed_is_not_kept_for_a_daemon_that_would_not_know() {
    let scratch = Scratch::new();
    let keeper = Keeper::new(&scratch);
    let socket = scratch.path("socket");
    let disk = Options::new().disk("d0", &scratch.image("disk", 1 << 20), "aio=threads");
    let options = disk.export("e0", "d0", &socket, "writable=on");
    let program = keeper.program().with(Fate::fails(libc::SYS_fdatasync, libc::EIO));
    let mut server = Server::start(&program, &options);
    keeper.hears("READY=1");
    let mut guest = Guest::boot(&socket);
    guest.read_honestly();
    assert_eq!(server.end().code(), Some(1));
    let said = server.complaints().join("\n");
    assert!(said.contains("blockdev 'd0': the last flush failed"), "{said}");
    assert!(said.contains("export 'e0': its client's session is not kept"), "{said}");
    assert!(guest.is_over());
}

#[test]
fn a_flush_that_hangs_as_sessions_are_kept_is_named_and_keeps_neither_other_disks_nor_other_clients() {
    for limit in [0, 10] {
        let scratch = Scratch::new();
        let keeper = Keeper::new(&scratch);
        let (hung, well) = (scratch.path("hung"), scratch.path("well"));
        let options = Options::new()
            .disk("d0", &scratch.image("d0", 1 << 20), "aio=threads")
            .null("d1", "read-zeroes=on")
            .export("e0", "d0", &hung, "writable=on")
            .export("e1", "d1", &well, "writable=on")
            .words([format!("--shutdown-timeout={limit}")]);
        let program = keeper.program().with(Fate::never(libc::SYS_fdatasync));
        let mut server = Server::start(&program, &options);
        keeper.hears("READY=1");
        let mut guests = [&hung, &well].map(|socket| Guest::boot(socket));
        guests.iter_mut().for_each(Guest::read_honestly);
        server.ask_to_end();
        let _kept = keeper.hears("FDSTORE=1");
        if limit == 0 {
            // Nobody has waited for the other's disk.
            continue;
        }
        assert_eq!(server.await_end().code(), Some(1));
        // The lines are that the disk hangs, and that its client's session is not kept.
        let said = server.complaints().join("\n");
        assert!(said.contains("blockdev 'd0': fdatasync has not ended in 10 s"), "{said}");
        assert!(said.contains("export 'e0': its client's session is not kept"), "{said}");
        assert_eq!(said.lines().count(), 2, "{said}");
        let [hung, well] = guests.each_mut().map(|guest| guest.is_over());
        assert!(hung && !well);
    }
}

/// Waits until the daemon has taken up all that is in flight: it asks, before it sleeps, to be kicked for the next.
fn await_taken_up(client: &Client) {
    await_that("the daemon to take all of it up", || {
        let mut event = [0; 2];
        let queue = client.driver.queue();
        // In a packed ring it asks by descriptor, in a split one by chain.
        let (at, taken) = match queue.packed {
            true => (queue.used, SIZE - client.driver.free() as u16),
            false => (queue.used + 4 + 8 * u64::from(SIZE), DEPTH as u16),
        };
        assert!(client.memory.read(at, &mut event));
        u16::from_le_bytes(event) == (queue.base as u16).wrapping_add(taken)
    });
}

#[test]
fn a_record_that_somebody_has_written_to_costs_its_session_and_no_more() {
    // The features, the version, the length, and the used index, which may not be where the ring has none.
    for (packed, fields) in [(false, [0, 8, 10, 14]), (true, [0, 8, 10, 16])] {
        spoil_a_record(packed, fields);
    }
}

fn spoil_a_record(packed: bool, fields: [u64; 4]) {
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let disk = |latency: &str| Options::new().iothread("io0", "").null("d0", latency);
    let serve =
        |disk: Options| Server::start(&Program::egret(), &disk.export("e0", "d0", &socket, "writable=on,iothread=io0"));
    let mut client = Client::new(packed);
    let slow = serve(disk("latency-ns=3600000000000,read-zeroes=on"));
    client.connect(&socket);
    client.load(0);
    await_taken_up(&client);
    drop(slow);
    client.forget_what_was_written();

    let fast = serve(disk("read-zeroes=on"));
    let record = client.record_file();
    assert!(record.set_len(0).is_err(), "what the daemon makes cannot be taken from under it");
    for (complaints, at) in (1..).zip(fields) {
        let mut was = [0; 2];
        record.read_exact_at(&mut was, at).expect("our own memory");
        record.write_all_at(&0x7777u16.to_ne_bytes(), at).expect("our own memory");
        assert!(!client.is_let_in(&socket), "a record with something else at {at}");
        support::await_that("a line in the log", || fast.complaints().len() >= complaints);
        let said = fast.complaints();
        assert!(said.len() == complaints && said[complaints - 1].contains("in-flight record of "), "{said:?}");
        record.write_all_at(&was, at).expect("our own memory");
    }
    client.connect(&socket);
    client.drain();
}

#[test]
fn what_a_daemon_had_no_time_for_is_done_by_the_next() {
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let serve = |latency: &str| {
        let disk = Options::new().iothread("io0", "").null("d0", &format!("read-zeroes=on,latency-ns={latency}"));
        Server::start(&Program::egret(), &disk.export("e0", "d0", &socket, "writable=on,iothread=io0"))
    };
    for packed in [false, true] {
        let mut client = Client::new(packed);
        let slow = serve("3600000000000");
        client.connect(&socket);
        client.load(0);
        await_taken_up(&client);
        drop(slow);
        client.forget_what_was_written();
        let fast = serve("0");
        client.connect(&socket);
        client.drain();
        assert_eq!(fast.complaints(), Vec::<String>::new());
    }
}

#[test]
fn requests_that_waited_because_others_had_failed_are_done_by_the_next_daemon_however_the_first_ended() {
    type End = fn(Server, &mut Client, &Path);
    let ends: [(&str, End); 4] = [
        // Dropping it is SIGKILL.
        ("killed", |server, _, _| drop(server)),
        ("asked to end", |server, _, _| assert_eq!(server.terminate().code(), Some(0))),
        ("left by its client, who comes back", |server, client, socket| {
            client.wire = None;
            client.connect(socket);
            await_taken_up(client);
            drop(server);
        }),
        ("asked where the queue stands", |server, client, _| {
            let wire = client.wire.as_mut().expect("it is connected");
            wire.ask(GET_VRING_BASE, &u32s(&[0, 0])).expect("the queue stops");
            drop(server);
        }),
    ];
    for ((how, end), packed) in ends.into_iter().flat_map(|end| [(end, false), (end, true)]) {
        let scratch = Scratch::new();
        let (image, socket) = (scratch.image("disk", (BLOCK * BLOCKS) as u64), scratch.path("socket"));
        let options = Options::new().iothread("io0", "").disk("d0", &image, "").export(
            "e0",
            "d0",
            &socket,
            "writable=on,iothread=io0,werror=stop",
        );
        let mut client = Client::new(packed);
        // Half of the disk, or a quarter.
        let server = Server::start(&Program::egret_with_files_of(1024), &options);
        client.connect(&socket);
        client.load(0);
        support::await_that("a write that fails", || !server.complaints().is_empty());
        await_taken_up(&client);
        end(server, &mut client, &socket);

        let server = Server::start(&Program::egret(), &options);
        client.connect(&socket);
        client.load(300);
        client.drain();
        client.wire = None;
        assert_eq!((server.terminate().code(), how), (Some(0), how));
        assert_holds_what_was_written(&image, &client, how);
    }
}
