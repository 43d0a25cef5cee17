//! virtio-scsi beside virtio-blk, and beside vhost-device-scsi where that is installed: the lab's load, which speaks
//! both, in turns.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use egret_lab::statistics::{median, spread};
use egret_loadgen::client::{Client, ClientOptions, Connection};
use egret_loadgen::load::{Edge, Job, LoadError, Span, Spec, Tally, Waiting};
use egret_loadgen::machine::{self, Cores};
use egret_loadgen::random::Shuffle;

use crate::arguments::CommonArguments;
use crate::cells::{SLICES, WARM_UP};
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};

/// The size of the file that all servers have, in bytes: so small that it stays in the page cache.
const FILE: u64 = 64 << 20;

/// The devices' disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Under {
    /// A disk that does nothing: the whole cost is the device's.
    Null,
    /// A file in the page cache, which every server can have.
    File,
}

/// vhost-device-scsi has no rings for more than 42 requests.
const CELLS: [(Under, u16); 4] = [(Under::Null, 1), (Under::Null, 64), (Under::File, 1), (Under::File, 32)];

const BLK: &str = "virtio-blk";
const SCSI: &str = "virtio-scsi";
/// As they come: their I/O thread spins before it sleeps.
const POLLING_BLK: &str = "virtio-blk, polling";
const POLLING_SCSI: &str = "virtio-scsi, polling";
const PEER: &str = "vhost-device-scsi";

/// Every device, and the virtio-blk that it is compared with.
const DEVICES: [(&str, Option<&str>); 5] =
    [(BLK, None), (SCSI, Some(BLK)), (POLLING_BLK, None), (POLLING_SCSI, Some(POLLING_BLK)), (PEER, None)];

fn name(under: Under, depth: u16) -> String {
    format!("devices, {} QD{depth}", if under == Under::Null { "null" } else { "file" })
}

/// A device with a client, and what was measured of it.
struct DeviceUnderLoad {
    name: String,
    server: Rc<Server>,
    job: Job,
    tally: Tally,
    cpu_ns: u64,
    /// How often the server has gone to sleep.
    sleeps: u64,
}

/// What one repetition has measured of one device.
struct Sample {
    cell: String,
    device: String,
    pair: usize,
    iops: f64,
    p50_us: f64,
    cpu_us: f64,
    /// For each request.
    sleeps: f64,
}

impl DeviceUnderLoad {
    fn new(name: &str, server: &Rc<Server>, disk: Connection, spec: &Spec) -> Result<Self, LoadError> {
        let mut jobs = spec.jobs(disk)?;
        let job = jobs.pop().expect("one job");
        let tally = job.tally();
        Ok(Self { name: name.to_owned(), server: Rc::clone(server), job, tally, cpu_ns: 0, sleeps: 0 })
    }

    fn take_turn(&mut self, span: Span) -> Result<(), LoadError> {
        let pid = self.server.pid();
        let (mut before, mut after) = ((0, 0), (0, 0));
        self.job.run(span, &mut self.tally, &mut |edge| {
            let sleeps = self.server.sleeps().into_iter().map(|(_, sleeps)| sleeps).sum();
            let now = (machine::cpu_time_ns(pid).unwrap_or_default(), sleeps);
            *if edge == Edge::Begin { &mut before } else { &mut after } = now;
        })?;
        self.cpu_ns += after.0 - before.0;
        self.sleeps += after.1.saturating_sub(before.1);
        Ok(())
    }
}

/// Measures and prints every cell that is asked for.
pub fn compare(common: &CommonArguments, peer: &str, length: Duration, cores: &Cores, shuffle: &mut Shuffle) {
    let cells: Vec<_> = CELLS.into_iter().filter(|(under, depth)| common.chooses(&name(*under, *depth))).collect();
    if cells.is_empty() {
        return;
    }
    let program = Program::peer(peer);
    // It has no word for its version.
    let is_there = program.command().arg("--help").output();
    if let Err(error) = &is_there {
        println!("missing: {peer} ({error}); give --scsi-peer $(scripts/install-vhost-device-scsi)");
    }
    let peer = is_there.is_ok().then_some(&program);
    let mut samples = Vec::new();
    for pair in 0..common.pairs() {
        for (under, depth) in shuffle.of(cells.clone()) {
            match measure(under, depth, peer, length, cores, shuffle) {
                Ok(devices) => samples.extend(devices.into_iter().map(|device| {
                    let requests = device.tally.requests().max(1) as f64;
                    Sample {
                        cell: name(under, depth),
                        pair,
                        iops: device.tally.iops(),
                        p50_us: device.tally.lat_us(0.5),
                        cpu_us: device.cpu_ns as f64 / 1e3 / requests,
                        sleeps: device.sleeps as f64 / requests,
                        device: device.name,
                    }
                })),
                Err(error) => println!("failed: {}: {error}", name(under, depth)),
            }
        }
    }
    print(&cells.iter().map(|(under, depth)| name(*under, *depth)).collect::<Vec<_>>(), &samples);
}

fn measure(
    under: Under,
    depth: u16,
    peer: Option<&Program>,
    length: Duration,
    cores: &Cores,
    shuffle: &mut Shuffle,
) -> Result<Vec<DeviceUnderLoad>, LoadError> {
    let scratch = Scratch::new();
    let image = scratch.image("disk", FILE);
    std::fs::write(&image, vec![0xA5; FILE as usize]).expect("room for a file");
    let theirs = scratch.path("theirs");
    let node = |options: Options, name: &str| match under {
        Under::Null => options.null(name, ""),
        Under::File => options.disk(name, &image, "read-only=on,aio=io_uring"),
    };
    let spec = Spec {
        iodepth: depth,
        waiting: Waiting::Polling,
        cpus_allowed: cores.pair().map(|(client, _)| client).into_iter().collect(),
        ..Spec::default()
    };
    let start =
        |program: &Program, options: &Options| Rc::new(cores.on_the_servers(|| Server::start(program, options)));
    let start_scsi = |path: &Path| Client::start_scsi(path, ClientOptions::default(), spec.shape());
    let mut devices = Vec::new();
    for (iothread, names) in [("poll-max-ns=0", [BLK, SCSI]), ("", [POLLING_BLK, POLLING_SCSI])] {
        let [blk, scsi] = names.map(|name| scratch.path(&name.replace(", ", "-")));
        let options = node(node(Options::new().iothread("io0", iothread), "b"), "s");
        let options = options.export("blk", "b", &blk, "iothread=io0").export_scsi(
            "scsi",
            &scsi,
            "iothread=io0,luns.0.lun=0,luns.0.node-name=s",
        );
        let server = start(&Program::egret(), &options);
        let disks = [Client::connect(&blk, ClientOptions::default())?.start(spec.shape())?, start_scsi(&scsi)?];
        for (name, disk) in names.into_iter().zip(disks) {
            devices.push(DeviceUnderLoad::new(name, &server, disk, &spec)?);
        }
    }
    if let (Some(peer), Under::File) = (peer, under) {
        let words = ["--socket-path".to_owned(), theirs.display().to_string(), image.display().to_string()];
        let server = start(peer, &Options::new().words(words).listening(&theirs));
        devices.push(DeviceUnderLoad::new(PEER, &server, start_scsi(&theirs)?, &spec)?);
    }
    for slice in 0..SLICES {
        devices = shuffle.of(devices);
        let ramp = if slice == 0 { WARM_UP } else { WARM_UP / 10 };
        for device in &mut devices {
            cores.on_the_clients(|| device.take_turn(Span { ramp, length: length / SLICES }))?;
        }
    }
    Ok(devices)
}

/// The table; a ratio is of two measurements of one repetition.
fn print(cells: &[String], samples: &[Sample]) {
    println!();
    let figures = ["IOPS", "p50 us", "CPU us/IO", "sleeps/IO"].map(|column| format!("{column:>11}")).concat();
    let ratios =
        ["IOPS / blk", "CPU / blk", "IOPS / peer", "CPU / peer"].map(|column| format!("{column:<20}")).concat();
    println!("{:<26}{:<24}{figures}   {ratios}", "4 KiB random reads", "device");
    for cell in cells {
        let mut title = cell.as_str();
        let of = |device: &str| {
            samples.iter().filter(move |one| one.cell == *cell && one.device == device).collect::<Vec<_>>()
        };
        for (device, blk) in DEVICES {
            let mine = of(device);
            if mine.is_empty() {
                continue;
            }
            let median_of = |value: fn(&Sample) -> f64| median(mine.iter().map(|one| value(one)).collect());
            let ratios = |base: Option<&str>, value: fn(&Sample) -> f64| {
                let bases = base.map(of).unwrap_or_default();
                let ratio = |one: &&Sample| {
                    let base = bases.iter().find(|base| base.pair == one.pair)?;
                    Some(value(one) / value(base))
                };
                spread(mine.iter().filter_map(ratio).collect())
            };
            let peer = blk.map(|_| PEER);
            println!(
                "{:<26}{device:<24}{:>11.0}{:>11.1}{:>11.3}{:>11.3}   {:<20}{:<20}{:<20}{:<20}",
                std::mem::take(&mut title),
                median_of(|one| one.iops),
                median_of(|one| one.p50_us),
                median_of(|one| one.cpu_us),
                median_of(|one| one.sleeps),
                ratios(blk, |one| one.iops),
                ratios(blk, |one| one.cpu_us),
                ratios(peer, |one| one.iops),
                ratios(peer, |one| one.cpu_us),
            );
        }
    }
}
