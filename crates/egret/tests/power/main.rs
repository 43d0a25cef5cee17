//! What was acknowledged as stable is on the disk when the power comes back.
//!
//! A client keeps account of what each sector may hold: what was acknowledged as stable, or anything that was written since.
//! The disk loses its power at a random request; whatever was not flushed to it survives or not, sector by sector, by
//! chance. The daemon is killed, as its host would be, and what the disk then holds is compared with the account.
//!
//! `EGRET_POWER_LOSSES` says how often for each combination; `make soak` asks for more.

#[path = "../support/mod.rs"]
mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use egret_faultdisk::{Effect, Fault, FaultDisk, Order, Survivors};
use egret_lab::disks::LoopDevice;

use support::attacker::{Ask, Attacker, DATA, Device, Variant};
use support::await_that;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};

const BLOCK: u64 = 4096;
const SECTOR: usize = 512;
/// Of a block.
const SECTORS: usize = BLOCK as usize / SECTOR;
/// Memory of a request: what COMPARE AND WRITE compares, and what it writes.
const SLOT: u64 = 2 * BLOCK;
const BLOCKS: usize = 64;
/// Requests at a time.
const BATCH: usize = 16;
/// Requests in which the power goes at the latest.
const SOON: u64 = 150;
/// A request of zeroes reads as this version.
const ZEROES: u64 = 0;

/// What the sectors of a block may hold.
#[derive(Clone, Debug)]
struct Account {
    /// What is stable: one version, or several where a loss of power has torn the block, or a discard has left a choice.
    stable: Vec<u64>,
    /// What was written since, in order; a discard leaves zeroes, or what there was.
    since: Vec<Change>,
    /// How many of those writes have ended well.
    acknowledged: usize,
    /// What each sector reads as now, where that is known.
    now: Option<Vec<u64>>,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Written(u64),
    Discarded,
}

impl Account {
    /// What was found on the disk, sector by sector.
    fn holds(found: Vec<u64>) -> Self {
        Self { stable: found.clone(), since: Vec::new(), acknowledged: 0, now: Some(found) }
    }

    /// So many writes since are stable.
    fn settle(&mut self, count: usize) {
        for change in self.since.drain(..count) {
            match change {
                Change::Written(version) => self.stable = vec![version],
                Change::Discarded => self.stable.push(ZEROES),
            }
        }
        self.acknowledged -= count;
    }

    /// All of it that was sent has ended well.
    fn acknowledge(&mut self) {
        self.acknowledged = self.since.len();
        self.now = match self.since.last() {
            Some(Change::Written(version)) => Some(vec![*version; SECTORS]),
            _ => None,
        };
    }

    fn may_be(&self, version: u64) -> bool {
        let leaves = |change: &Change| match change {
            Change::Written(written) => *written == version,
            Change::Discarded => version == ZEROES,
        };
        self.stable.contains(&version) || self.since.iter().any(leaves)
    }
}

/// One request of a batch.
#[derive(Clone, Copy)]
enum Sent {
    Change { block: usize, kind: Kind, is_stable: bool },
    Flush,
}

/// How a block is changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    /// With FUA.
    Stable,
    Zeroes,
    Discard,
    Same,
    CompareAndWrite,
}

/// A client that knows what the disk may hold.
struct Client {
    accounts: Vec<Account>,
    version: u64,
    random: u64,
    /// What was acknowledged as stable, and how.
    flushes: u64,
    stable_writes: u64,
    /// What else was acknowledged: discards, WRITE SAME and COMPARE AND WRITE.
    others: [u64; 3],
}

impl Client {
    fn new(seed: u64) -> Self {
        let accounts = vec![Account::holds(vec![ZEROES; SECTORS]); BLOCKS];
        Self { accounts, version: ZEROES, random: seed, flushes: 0, stable_writes: 0, others: [0; 3] }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// How to change a block next: with COMPARE AND WRITE only where it is known what there is.
    fn kind(&mut self, block: usize, device: Device) -> Kind {
        let is_known = self.accounts[block].now.is_some();
        match (self.random(9), device) {
            (0, _) => Kind::Zeroes,
            (1, _) => Kind::Stable,
            (2, _) => Kind::Discard,
            (3, Device::Scsi) => Kind::Same,
            (4 | 5, Device::Scsi) if is_known => Kind::CompareAndWrite,
            _ => Kind::Write,
        }
    }

    /// Sends batches of writes, zeroes and flushes until the disk fails, or so many times.
    fn load(&mut self, attacker: &mut Attacker, device: Device, is_write_through: bool, batches: usize) {
        for _ in 0..batches {
            if !self.batch(attacker, device, is_write_through) {
                return;
            }
        }
    }

    /// Whether all went well.
    fn batch(&mut self, attacker: &mut Attacker, device: Device, is_write_through: bool) -> bool {
        let mut blocks: Vec<usize> = (0..BLOCKS).collect();
        // A flush of this batch is about what had ended before it was sent.
        let before: Vec<usize> = self.accounts.iter().map(|account| account.acknowledged).collect();
        let first = attacker.made();
        let mut batch = Vec::new();
        for slot in 0..BATCH as u64 {
            if self.random(5) == 0 {
                attacker.ask(Ask::Flush, &[]);
                batch.push(Sent::Flush);
                continue;
            }
            // No two requests of a batch are for one block: which of them comes last would be chance.
            let block = blocks.swap_remove(self.random(blocks.len() as u64) as usize);
            let (at, data) = (block as u64 * BLOCK, DATA + slot * SLOT);
            let kind = self.kind(block, device);
            self.version += 1;
            let change = match kind {
                Kind::Zeroes => Change::Written(ZEROES),
                Kind::Discard => Change::Discarded,
                _ => Change::Written(self.version),
            };
            let account = &mut self.accounts[block];
            account.since.push(change);
            let before = account.now.take();
            let new = contents(block, self.version);
            let memory = &attacker.data[0];
            match kind {
                Kind::Discard if device == Device::Scsi => memory.put(data, &unmap(at, attacker.block)),
                Kind::CompareAndWrite => {
                    let before = before.unwrap_or_default();
                    let before =
                        before.iter().flat_map(|version| contents(block, *version).split_off(BLOCK as usize - SECTOR));
                    memory.put(data, &before.chain(new).collect::<Vec<u8>>());
                }
                _ => memory.put(data, &new),
            }
            match kind {
                Kind::Zeroes => attacker.ask(Ask::WriteZeroes { at, len: BLOCK }, &[]),
                Kind::Discard if device == Device::Blk => attacker.ask(Ask::Discard { at, len: BLOCK }, &[]),
                Kind::Discard => attacker.ask(Ask::Unmap, &[(data, UNMAP as u32)]),
                Kind::Stable => attacker.ask(Ask::WriteStable { at }, &[(data, BLOCK as u32)]),
                Kind::Same => attacker.ask(Ask::WriteSame { at, len: BLOCK }, &[(data, attacker.block as u32)]),
                Kind::CompareAndWrite => attacker.ask(Ask::CompareAndWrite { at }, &[(data, SLOT as u32)]),
                Kind::Write => attacker.ask(Ask::Write { at }, &[(data, BLOCK as u32)]),
            }
            // What a discard leaves is nothing to rely on, and so it need not be stable.
            let is_stable =
                (is_write_through && kind != Kind::Discard) || (kind == Kind::Stable && device == Device::Scsi);
            batch.push(Sent::Change { block, kind, is_stable });
        }
        attacker.publish();
        attacker.await_all();
        let ended: Vec<(Sent, bool)> =
            (first..).zip(batch).map(|(at, sent)| (sent, attacker.status_of(at) == 0)).collect();
        if ended.iter().any(|(sent, is_well)| *is_well && matches!(sent, Sent::Flush)) {
            self.flushes += 1;
            self.accounts.iter_mut().zip(before).for_each(|(account, count)| account.settle(count));
        }
        for (sent, _) in ended.iter().filter(|(_, is_well)| *is_well) {
            let &Sent::Change { block, kind, is_stable } = sent else { continue };
            let account = &mut self.accounts[block];
            account.acknowledge();
            match kind {
                Kind::Discard => self.others[0] += 1,
                Kind::Same => self.others[1] += 1,
                Kind::CompareAndWrite => self.others[2] += 1,
                _ => {}
            }
            if is_stable {
                self.stable_writes += 1;
                account.settle(account.acknowledged);
            }
        }
        ended.iter().all(|(_, is_well)| *is_well)
    }

    /// Compares what is on the disk with the account, and goes on with what is there.
    fn verify(&mut self, disk: &Path) {
        let file = File::open(disk).expect("the disk");
        for (block, account) in self.accounts.iter_mut().enumerate() {
            let mut found = [0; BLOCK as usize];
            file.read_exact_at(&mut found, block as u64 * BLOCK).expect("it has power");
            let versions: Vec<u64> = found.chunks(SECTOR).map(|sector| version(block, sector)).collect();
            for (sector, version) in versions.iter().enumerate() {
                assert!(account.may_be(*version), "block {block}, sector {sector}: {version}, not {account:?}");
            }
            *account = Account::holds(versions);
        }
    }
}

/// A block of a version: each sector says which block and which version it is of.
fn contents(block: usize, version: u64) -> Vec<u8> {
    [block as u64, version].map(u64::to_le_bytes).concat().repeat(BLOCK as usize / 16)
}

/// The length of UNMAP's parameter list for one range (SBC-4, UNMAP parameter list).
const UNMAP: usize = 24;

/// That list, for a block.
fn unmap(at: u64, block: u64) -> Vec<u8> {
    let (first, count) = (at / block, (BLOCK / block) as u32);
    [&[0, 22, 0, 16, 0, 0, 0, 0], &first.to_be_bytes()[..], &count.to_be_bytes(), &[0; 4]].concat()
}

/// The version that a sector is of.
fn version(block: usize, sector: &[u8]) -> u64 {
    let words: Vec<u64> = sector.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
    assert!(words.chunks(2).all(|pair| pair == &words[..2]), "sectors are whole");
    assert!(words[0] == block as u64 || sector.iter().all(|byte| *byte == 0), "it is of this block");
    words[1]
}

#[derive(Clone, Copy)]
enum Backing {
    /// The disk's file itself.
    File,
    /// A loop device over it, with a page cache of its own.
    LoopDevice,
}

/// How the daemon ends when the power has gone, or is about to go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Killed,
    Asked,
}

fn losses() -> u64 {
    std::env::var("EGRET_POWER_LOSSES").map_or(2, |count| count.parse().expect("EGRET_POWER_LOSSES is a number"))
}

/// Loses power again and again, with every engine, cache mode and device over a disk of that kind.
fn lose_power(test: &str, backing: Backing, end: End) {
    if !is_root_or_skips(test, "for a disk that loses its power") {
        return;
    }
    let scratch = Scratch::new();
    let disk = scratch.fault_disk(BLOCKS as u64 * BLOCK);
    let (mut client, mut round) = (Client::new(1), 0);
    for aio in ["threads", "native", "io_uring"] {
        for direct in ["on", "off"] {
            // Linux AIO takes direct I/O alone.
            if (aio, direct) == ("native", "off") {
                continue;
            }
            for writethrough in ["off", "on"] {
                for variant in Variant::ALL {
                    for _ in 0..losses() {
                        round += 1;
                        // In turns, so that each combination has both.
                        let block = if round % 2 == 0 { BLOCK } else { SECTOR as u64 };
                        let options = format!("aio={aio},cache.direct={direct},discard=unmap");
                        let export = format!("writable=on,writethrough={writethrough},logical-block-size={block}");
                        let socket = scratch.path(&format!("e{round}"));
                        run(&disk, backing, end, &mut client, variant, &options, &export, block, &socket);
                    }
                }
            }
        }
    }
    assert!(client.flushes > 0 && client.stable_writes > 0, "something was promised");
    assert!(client.others.iter().all(|count| *count > 0), "of everything there was some: {:?}", client.others);
}

#[allow(clippy::too_many_arguments, reason = "each is one thing that differs between two losses")]
fn run(
    disk: &FaultDisk,
    backing: Backing,
    end: End,
    client: &mut Client,
    variant: Variant,
    options: &str,
    export: &str,
    block: u64,
    socket: &Path,
) {
    let (device, path) = match backing {
        Backing::File => (None, disk.path()),
        Backing::LoopDevice => {
            let device = LoopDevice::over(&disk.path()).expect("a loop device");
            let path = device.path().to_owned();
            (Some(device), path)
        }
    };
    let options = Options::new().disk("d0", &path, options).iothread("io0", "");
    let options = match variant.device {
        Device::Blk => options.export("e0", "d0", socket, &format!("{export},iothread=io0")),
        Device::Scsi => {
            let luns = "luns.0.lun=0,luns.0.node-name=d0";
            options.export_scsi("e0", socket, &format!("{export},iothread=io0,{luns}"))
        }
    };
    let server = Server::start(&Program::egret(), &options);
    let mut attacker = Attacker::boot(socket, variant, BATCH as u64 * SLOT);
    attacker.block = block;
    attacker.read_honestly();
    let is_write_through = export.contains("writethrough=on");
    match end {
        End::Killed => {
            let after = client.random(SOON);
            let fault = Fault { iotype: None, sectors: None, after, times: Some(1), effect: Effect::PowerOff };
            disk.tell(Order::Inject(fault)).expect("it listens");
            client.load(&mut attacker, variant.device, is_write_through, usize::MAX);
            server.send(rustix::process::Signal::KILL);
            let mut server = server;
            server.await_end();
        }
        End::Asked => {
            client.load(&mut attacker, variant.device, is_write_through, 3);
            drop(attacker);
            assert!(server.terminate().success());
            // A daemon that ends well leaves nothing that is not stable.
            client.accounts.iter_mut().for_each(|account| account.settle(account.acknowledged));
            disk.tell(Order::PowerOff).expect("it listens");
        }
    }
    detach(device, path);
    let seed = client.random(u64::MAX);
    disk.tell(Order::PowerOn(Survivors::Random(seed))).expect("an image");
    disk.tell(Order::Clear).expect("it listens");
    client.verify(&disk.path());
}

/// Waits until nothing that a loop device had cached can reach the disk any more.
fn detach(device: Option<LoopDevice>, path: PathBuf) {
    let Some(device) = device else { return };
    drop(device);
    let name = path.file_name().expect("a device").to_owned();
    let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
    await_that("the loop device to be free", || {
        // Another test may have taken it since, over another file.
        !std::fs::read_to_string(&backing).is_ok_and(|file| file.trim().ends_with("/disk"))
    });
}

#[test]
fn what_was_acknowledged_as_stable_survives_the_loss_of_power_of_a_file() {
    lose_power("what_was_acknowledged_as_stable_survives_the_loss_of_power_of_a_file", Backing::File, End::Killed);
}

#[test]
fn what_was_acknowledged_as_stable_survives_the_loss_of_power_of_a_block_device() {
    let test = "what_was_acknowledged_as_stable_survives_the_loss_of_power_of_a_block_device";
    lose_power(test, Backing::LoopDevice, End::Killed);
}

#[test]
fn all_that_was_written_is_stable_when_the_daemon_has_ended() {
    lose_power("all_that_was_written_is_stable_when_the_daemon_has_ended", Backing::LoopDevice, End::Asked);
}
