//! The lab's client on a served disk, beside libblkio, which nobody here wrote: what one writes, the other reads.

mod support;

use std::time::Duration;

use egret_loadgen::client::{Client, ClientError, ClientOptions, Shape};
use egret_loadgen::load::{self, Job, LoadError, Mismatch, Rate, RateProcess, Span, Spec, SpecError, Stamp, Waiting};
use support::disk::{self, BLOCK, Disk};
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const MIB: u64 = 1 << 20;
const BS: u32 = 4096;

/// A disk of 4 MiB with four queues, served at a socket.
fn serve(scratch: &Scratch, export: &str) -> (Server, std::path::PathBuf) {
    let (image, socket) = (scratch.image("disk", 4 * MIB), scratch.path("socket"));
    let options = Options::new().disk("d0", &image, "cache.direct=on,aio=io_uring").iothread("io0", "").export(
        "e0",
        "d0",
        &socket,
        &format!("iothread=io0,num-queues=4{export}"),
    );
    (Server::start(&Program::under_test(), &options), socket)
}

fn writable(scratch: &Scratch) -> (Server, std::path::PathBuf) {
    serve(scratch, ",writable=on")
}

fn jobs(socket: &std::path::Path, options: ClientOptions, spec: &Spec) -> Vec<Job> {
    spec.jobs(Client::connect(socket, options).unwrap().start(spec.shape()).unwrap()).unwrap()
}

/// Short runs until at least `requests` have completed.
fn run(jobs: &mut [Job], requests: u64) {
    let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(20) };
    let mut done = 0;
    while done < requests {
        done += load::run(jobs, span, &mut |_| ()).unwrap().unwrap().requests();
    }
}

#[test]
fn the_client_sees_the_disk_as_libblkio_does() {
    let scratch = Scratch::new();
    let (_server, socket) = serve(&scratch, ",logical-block-size=4k,writable=on");
    let info = *Client::connect(&socket, ClientOptions::default()).unwrap().info();
    let theirs = Disk::connect(&socket).unwrap();
    assert_eq!(info.capacity, theirs.capacity().unwrap());
    assert_eq!(usize::from(info.queues), theirs.max_queues().unwrap());
    assert_eq!(info.block_size as usize, theirs.request_alignment().unwrap());
    assert!(info.flushes && !info.read_only);
}

#[test]
fn the_client_drives_virtio_scsi_and_finds_what_it_wrote() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk", 4 * MIB), scratch.path("socket"));
    let luns = "writable=on,logical-block-size=4k,num-queues=2,iothread=io0,luns.0.lun=0,luns.0.node-name=d0";
    let options = Options::new().disk("d0", &image, "aio=threads").iothread("io0", "");
    let _server = Server::start(&Program::under_test(), &options.export_scsi("e0", &socket, luns));
    let spec = Spec { iodepth: 16, numjobs: 2, verify: Some(9), rw: "randrw".parse().unwrap(), ..Spec::default() };
    let disk = Client::start_scsi(&socket, ClientOptions::default(), spec.shape()).unwrap();
    assert_eq!((disk.info.capacity, disk.info.block_size, disk.info.queues), (4 * MIB, 4096, 2));
    let mut jobs = spec.jobs(disk).unwrap();
    run(&mut jobs, 2000);
    assert!(jobs.iter_mut().map(|job| job.verify().unwrap()).sum::<u64>() > 0);
    drop(jobs);
    assert!(std::fs::read(&image).unwrap().iter().any(|&byte| byte != 0), "the image holds it");
}

#[test]
fn what_the_lab_writes_libblkio_reads() {
    let scratch = Scratch::new();
    let (_server, socket) = writable(&scratch);
    let spec = Spec { rw: "write".parse().unwrap(), iodepth: 16, verify: Some(7), ..Spec::default() };
    let mut jobs = jobs(&socket, ClientOptions::default(), &spec);
    run(&mut jobs, 4 * MIB / u64::from(BS));
    drop(jobs);
    let mut theirs = Disk::connect(&socket).unwrap();
    for at in (0..4 * MIB).step_by(BLOCK) {
        let bytes = theirs.first().read(at, BLOCK).unwrap();
        for (block, offset) in bytes.chunks(BS as usize).zip((at..).step_by(BS as usize)) {
            Stamp { offset, seed: 7, generation: 0 }.check(block).unwrap();
        }
    }
}

#[test]
fn what_libblkio_writes_the_lab_reads() {
    let scratch = Scratch::new();
    let (_server, socket) = writable(&scratch);
    let mut theirs = Disk::connect(&socket).unwrap();
    let mut block = vec![0; BLOCK];
    for at in (0..4 * MIB).step_by(BLOCK) {
        for (block, offset) in block.chunks_mut(BS as usize).zip((at..).step_by(BS as usize)) {
            Stamp { offset, seed: 8, generation: 1 }.fill(block);
        }
        theirs.first().write(at, &block).unwrap();
    }
    drop(theirs);
    let rw = "randread".parse().unwrap();
    let spec = Spec { rw, iodepth: 16, norandommap: false, verify: Some(8), ..Spec::default() };
    run(&mut jobs(&socket, ClientOptions::default(), &spec), 4 * MIB / u64::from(BS));

    // And a block that is not one of them does not pass for one.
    let mut theirs = Disk::connect(&socket).unwrap();
    theirs.first().write(8 * 4096, &disk::pattern(1, 0, 4096)).unwrap();
    drop(theirs);
    let spec = Spec { rw: "read".parse().unwrap(), verify: Some(8), ..Spec::default() };
    let span = Span { ramp: Duration::ZERO, length: Duration::from_secs(3600) };
    let error = load::run(&mut jobs(&socket, ClientOptions::default(), &spec), span, &mut |_| ()).unwrap_err();
    assert_eq!(error.to_string(), "the block at 32768 is no stamped block");
}

#[test]
fn a_block_of_another_disk_is_no_block_of_ones_own() {
    let scratches = [Scratch::new(), Scratch::new()];
    let served = scratches.each_ref().map(writable);
    let job = |order: [usize; 2], rw: &str| {
        let (rw, size) = (rw.parse().unwrap(), Some(16 * u64::from(BS)));
        let spec = Spec { rw, size, iodepth: 8, verify: Some(7), ..Spec::default() };
        let connect = |disk: usize| Client::connect(&served[disk].1, ClientOptions::default()).unwrap();
        let disks = order.map(|disk| connect(disk).start(spec.shape()).unwrap());
        [Job::new(&spec, 0, disks.map(|mut disk| (disk.info, disk.queues.remove(0))).into()).unwrap()]
    };
    let is_whole = |scratch: &Scratch| {
        let image = std::fs::read(scratch.image_path("disk")).unwrap();
        image[..16 * BS as usize].chunks(BS as usize).all(|block| block[0] != 0)
    };
    let mut writer = job([0, 1], "write");
    while !scratches.iter().all(is_whole) {
        run(&mut writer, 1);
    }
    drop(writer);
    run(&mut job([0, 1], "read"), 100);
    let mut swapped = job([1, 0], "read");
    let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(20) };
    let error = loop {
        match load::run(&mut swapped, span, &mut |_| ()) {
            Ok(tally) => assert_eq!(tally.unwrap().requests(), 0, "another disk's blocks pass"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LoadError::Mismatch(Mismatch::Foreign { .. })), "{error}");
}

#[test]
fn jobs_on_four_queues_verify_each_other_in_every_manner() {
    let options = [(true, false), (false, false), (true, true)];
    for options in options.map(|(event_idx, packed)| ClientOptions { event_idx, packed, ..ClientOptions::default() }) {
        for waiting in [Waiting::Polling, Waiting::Blocking] {
            let scratch = Scratch::new();
            let (_server, socket) = writable(&scratch);
            let rw = "randrw".parse().unwrap();
            let spec = Spec { rw, bs: 8192, iodepth: 8, numjobs: 4, verify: Some(9), waiting, ..Spec::default() };
            let mut jobs = jobs(&socket, options, &spec);
            run(&mut jobs, 2000);
            let checked: u64 = jobs.iter_mut().map(|job| job.verify().unwrap()).sum();
            assert!(checked > 100, "{options:?}, {waiting:?}: {checked} blocks were written");
        }
    }
}

#[test]
fn deep_queues_go_through_indirect_tables() {
    let scratch = Scratch::new();
    let (_server, socket) = writable(&scratch);
    let rw = "randwrite".parse().unwrap();
    let spec = Spec { rw, bs: 512, iodepth: 700, verify: Some(10), ..Spec::default() };
    for packed in [false, true] {
        let mut jobs = jobs(&socket, ClientOptions { packed, ..ClientOptions::default() }, &spec);
        run(&mut jobs, 5000);
        assert!(jobs[0].verify().unwrap() > 700);
    }
}

#[test]
fn an_open_loop_keeps_its_rate() {
    let scratch = Scratch::new();
    let (_server, socket) = writable(&scratch);
    for process in [RateProcess::Fixed, RateProcess::Poisson] {
        let rate_iops = Some(Rate { iops: 500.0, process });
        let spec = Spec { iodepth: 64, rate_iops, waiting: Waiting::Blocking, ..Spec::default() };
        let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(400) };
        let tally = load::run(&mut jobs(&socket, ClientOptions::default(), &spec), span, &mut |_| ()).unwrap().unwrap();
        let unstarted = tally.open.as_ref().unwrap().unstarted;
        // However slow the machine is, what was due was either done or is said not to have begun.
        let (told, due) = (tally.requests() + unstarted, 500.0 * tally.elapsed.as_secs_f64());
        assert!((0.6..1.5).contains(&(told as f64 / due)), "{process:?}: {told} of {due}");
    }
}

#[test]
fn a_read_only_disk_is_read_and_not_written() {
    let scratch = Scratch::new();
    let (_server, socket) = serve(&scratch, "");
    let client = Client::connect(&socket, ClientOptions::default()).unwrap();
    assert!(client.info().read_only);
    let spec = Spec { rw: "write".parse().unwrap(), ..Spec::default() };
    let refused = spec.jobs(client.start(Shape::default()).unwrap()).err().unwrap();
    assert!(matches!(refused, LoadError::Spec(SpecError::ReadOnly)), "{refused}");
    run(&mut jobs(&socket, ClientOptions::default(), &Spec::default()), 100);
}

#[test]
fn a_server_killed_under_load_is_an_error_and_no_hang() {
    for waiting in [Waiting::Polling, Waiting::Blocking] {
        let scratch = Scratch::new();
        let (server, socket) = writable(&scratch);
        let spec = Spec { iodepth: 8, waiting, ..Spec::default() };
        let mut jobs = jobs(&socket, ClientOptions::default(), &spec);
        let span = Span { ramp: Duration::ZERO, length: Duration::from_secs(3600) };
        let mut server = Some(server);
        let mut kill = |_| drop(server.take());
        let error = load::run(&mut jobs, span, &mut kill).unwrap_err();
        assert!(matches!(error, LoadError::Client(ClientError::HungUp(_))), "{waiting:?}: {error}");
    }
}
