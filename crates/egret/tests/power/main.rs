//! What was acknowledged as stable is on the disk when the power comes back.
//!
//! A [client] keeps account of what each sector may hold: what was acknowledged as stable, or anything that was written since.
//! The disk loses its power at a random request, or at a flush; whatever was not flushed to it survives or not, sector by
//! sector, by chance. The daemon is killed, as its host would be, and what the disk then holds is compared with the account.
//!
//! Until then nothing is left to chance: of all that is acknowledged as stable the [oracle] looks up what the disk has done
//! for it, and when.
//!
//! `EGRET_POWER_LOSSES` says how often for each combination; `make soak` asks for more.

mod client;
mod oracle;
#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::time::Instant;

use egret_faultdisk::{Effect, Fault, FaultDisk, IoType, Order, Survivors};
use egret_lab::disks::LoopDevice;

use client::{BATCH, BLOCK, BLOCKS, Client, SECTOR, SLOT, View};
use oracle::Oracle;
use support::attacker::{Ask, Attacker, DATA, Device, Variant};
use support::await_that;
use support::http::sum;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};

/// Requests in which the power goes at the latest.
const SOON: u64 = 150;
/// Flushes of the disk, likewise.
const FLUSHES: u64 = 13;

/// Who runs requests, and how.
#[derive(Clone, Copy)]
struct Engine {
    aio: &'static str,
    is_direct: bool,
    /// Whether guest memory is registered with the ring.
    pins: bool,
}

/// Linux AIO takes direct I/O alone, and only io_uring pins.
const ENGINES: [Engine; 6] = [
    Engine { aio: "threads", is_direct: true, pins: false },
    Engine { aio: "threads", is_direct: false, pins: false },
    Engine { aio: "native", is_direct: true, pins: false },
    Engine { aio: "io_uring", is_direct: true, pins: false },
    Engine { aio: "io_uring", is_direct: false, pins: false },
    Engine { aio: "io_uring", is_direct: true, pins: true },
];

impl Engine {
    /// The options of a disk.
    fn disk(self) -> String {
        let direct = if self.is_direct { "on" } else { "off" };
        format!("aio={},cache.direct={direct},discard=unmap", self.aio)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Backing {
    /// The disk's file itself.
    File,
    /// A loop device over it, with a page cache of its own.
    LoopDevice,
    /// The same with sectors of 4096 bytes, and a client that writes 512.
    LargeSectors,
}

impl Backing {
    /// The device, if it is one, and its path.
    fn over(self, disk: &FaultDisk) -> (Option<LoopDevice>, PathBuf) {
        let sectors = match self {
            Self::File => return (None, disk.path()),
            Self::LoopDevice => SECTOR,
            Self::LargeSectors => BLOCK,
        };
        let device = LoopDevice::with_sectors_of(sectors as u32, &disk.path()).expect("a loop device");
        let path = device.path().to_owned();
        (Some(device), path)
    }
}

/// How the daemon ends when the power has gone, or is about to go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Killed,
    Asked,
}

/// A loss of power, and what precedes it.
struct Round {
    number: u64,
    backing: Backing,
    end: End,
    engine: Engine,
    variant: Variant,
    is_write_through: bool,
}

fn losses() -> u64 {
    std::env::var("EGRET_POWER_LOSSES").map_or(2, |count| count.parse().expect("EGRET_POWER_LOSSES is a number"))
}

/// Loses power again and again, with every engine, cache mode and device over a disk of that kind.
fn lose_power(backing: Backing, end: End) {
    if !is_root_or_skips("for a disk that loses its power") {
        return;
    }
    let scratch = Scratch::new();
    let disk = scratch.fault_disk(BLOCKS as u64 * BLOCK);
    let (mut client, mut number) = (Client::new(1), 0);
    for engine in ENGINES {
        // Sectors that are too large matter to direct I/O alone.
        if backing == Backing::LargeSectors && !engine.is_direct {
            continue;
        }
        for is_write_through in [false, true] {
            for variant in Variant::ALL {
                for _ in 0..losses() {
                    number += 1;
                    let round = Round { number, backing, end, engine, variant, is_write_through };
                    round.run(&disk, &mut client, &scratch);
                }
            }
        }
    }
    assert!(client.flushes > 0 && client.stable_writes > 0, "something was promised");
    assert!(client.others.iter().all(|count| *count > 0), "of everything there was some: {:?}", client.others);
}

impl Round {
    /// The logical block, in turns, so that each combination has both.
    fn block(&self) -> u64 {
        if self.backing == Backing::LargeSectors || !self.number.is_multiple_of(2) { SECTOR } else { BLOCK }
    }

    /// When the power goes. Every other time it is at a flush, and each combination has both.
    fn fault(&self, client: &mut Client) -> Fault {
        let (iotype, after) = match self.number / 2 % 2 {
            0 => (None, client.random(SOON)),
            _ => (Some(IoType::Flush), self.number % FLUSHES),
        };
        Fault { iotype, sectors: None, after, times: Some(1), effect: Effect::PowerOff }
    }

    fn run(&self, disk: &FaultDisk, client: &mut Client, scratch: &Scratch) {
        let (device, path) = self.backing.over(disk);
        let (server, mut attacker) = self.start(&path, scratch);
        let view = View { device: self.variant.device, is_write_through: self.is_write_through };
        disk.record();
        match self.end {
            End::Killed => {
                disk.tell(Order::Inject(self.fault(client))).expect("it listens");
                client.load(&mut attacker, disk, view, usize::MAX);
                assert!(!disk.tell(Order::Status).expect("it listens").is_on, "nothing fails but for want of power");
                server.send(rustix::process::Signal::KILL);
                let mut server = server;
                server.await_end();
            }
            End::Asked => {
                assert!(client.load(&mut attacker, disk, view, 3), "nothing fails");
                drop(attacker);
                assert!(server.terminate().success());
                // A daemon that ends well leaves nothing that is not stable.
                client.settle();
                disk.tell(Order::PowerOff).expect("it listens");
            }
        }
        detach(device, path);
        let seed = client.random(u64::MAX);
        disk.tell(Order::PowerOn(Survivors::Random(seed))).expect("an image");
        disk.tell(Order::Clear).expect("it listens");
        client.verify(&disk.path());
    }

    /// Starts a daemon over what is at `path`, and a client of it.
    fn start(&self, path: &Path, scratch: &Scratch) -> (Server, Attacker) {
        let [socket, metrics] = ["e", "m"].map(|name| scratch.path(&format!("{name}{}", self.number)));
        let on = |is_on| if is_on { "on" } else { "off" };
        let block = self.block();
        let export = format!(
            "writable=on,writethrough={},logical-block-size={block},pin-memory={},iothread=io0",
            on(self.is_write_through),
            on(self.engine.pins)
        );
        let options = Options::new().disk("d0", path, &self.engine.disk()).iothread("io0", "").metrics(&metrics);
        let options = match self.variant.device {
            Device::Blk => options.export("e0", "d0", &socket, &export),
            Device::Scsi => {
                let luns = "luns.0.lun=0,luns.0.node-name=d0";
                options.export_scsi("e0", &socket, &format!("{export},{luns}"))
            }
        };
        let server = Server::start(&Program::egret(), &options);
        let mut attacker = Attacker::boot_flushing(&socket, self.variant, BATCH as u64 * SLOT);
        attacker.block = block;
        attacker.read_honestly();
        if self.engine.pins {
            // Only what is there is pinned.
            attacker.data[0].put(DATA, &[0; BATCH * SLOT as usize]);
            await_that("memory to be pinned", || {
                attacker.ask(Ask::Read { at: 0 }, &[(DATA, BLOCK as u32)]);
                attacker.publish();
                attacker.await_all();
                sum(&metrics, "egret_engine_registered_requests_total") > 0.0
            });
        }
        (server, attacker)
    }
}

/// Waits until nothing that a loop device had cached can reach the disk any more.
fn detach(device: Option<LoopDevice>, path: PathBuf) {
    let Some(device) = device else { return };
    let name = path.file_name().expect("a device").to_owned();
    let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
    let file = || std::fs::read_to_string(&backing).ok();
    let ours = file();
    assert!(ours.is_some(), "it has a file");
    drop(device);
    // Another test may have taken it since, over another file.
    await_that("the loop device to be free", || file() != ours);
}

#[test]
fn what_was_acknowledged_as_stable_survives_the_loss_of_power_of_a_file() {
    lose_power(Backing::File, End::Killed);
}

#[test]
fn what_was_acknowledged_as_stable_survives_the_loss_of_power_of_a_block_device() {
    lose_power(Backing::LoopDevice, End::Killed);
}

#[test]
fn what_was_acknowledged_as_stable_survives_where_sectors_are_larger_than_what_is_written() {
    lose_power(Backing::LargeSectors, End::Killed);
}

#[test]
fn all_that_was_written_is_stable_when_the_daemon_has_ended() {
    lose_power(Backing::LoopDevice, End::Asked);
}

#[test]
fn a_flush_that_is_asked_for_while_another_runs_is_answered_by_one_that_began_later() {
    if !is_root_or_skips("for a disk that takes its time") {
        return;
    }
    let scratch = Scratch::new();
    let disk = scratch.fault_disk(BLOCKS as u64 * BLOCK);
    let backings = [Backing::File, Backing::LoopDevice];
    for (number, (backing, engine)) in (1..).zip(backings.into_iter().flat_map(|of| ENGINES.map(|engine| (of, engine))))
    {
        let round =
            Round { number, backing, end: End::Asked, engine, variant: Variant::PLAIN, is_write_through: false };
        let (device, path) = backing.over(&disk);
        let (server, mut attacker) = round.start(&path, &scratch);
        disk.record();
        disk.inject(IoType::Flush, Some(1), Effect::Never);
        let first = attacker.made();
        attacker.ask(Ask::Flush, &[]);
        attacker.publish();
        await_that("the disk to have the first", || disk.tell(Order::Status).expect("it listens").waiting == 1);

        let asked = Instant::now();
        attacker.ask(Ask::Flush, &[]);
        // It is refused at once, and shows that the daemon has seen what was asked for before.
        attacker.ask(Ask::Read { at: BLOCKS as u64 * BLOCK }, &[(DATA, attacker.block as u32)]);
        attacker.publish();
        await_that("the daemon to have both", || attacker.has_status(first + 2));
        assert!(!attacker.has_status(first), "the first runs");
        disk.tell(Order::Release).expect("it listens");
        let told = attacker.await_each(first + 1)[0];
        assert_eq!([0, 1].map(|of| attacker.status_of(first + of)), [0; 2], "both end well");
        Oracle::default().flushed(&disk.recorded(), asked, told);
        assert!(server.terminate().success());
        detach(device, path);
    }
}
