//! A client that keeps account of what each sector of its disk may hold.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use egret_faultdisk::FaultDisk;

use crate::oracle::{Oracle, assert_stable};
use crate::support::attacker::{Ask, Attacker, DATA, Device};

pub const BLOCK: u64 = 4096;
pub const SECTOR: u64 = 512;
/// Of a block.
const SECTORS: usize = (BLOCK / SECTOR) as usize;
pub const BLOCKS: usize = 64;
/// Memory of a request: what COMPARE AND WRITE compares, and what it writes, in one piece or in two.
pub const SLOT: u64 = 4 * BLOCK;
/// Where in it the second piece begins, which is not where the first ends.
const SECOND_PIECE: u64 = 2 * BLOCK + SECTOR;
/// Requests at a time.
pub const BATCH: usize = 16;
/// A request of zeroes reads as this version.
const ZEROES: u64 = 0;

/// What a sector may hold.
#[derive(Clone, Debug)]
struct Account {
    /// What is stable: one version, or several where a discard has left a choice.
    stable: Vec<u64>,
    /// What was written since, in order; a discard leaves zeroes, or what there was.
    since: Vec<Change>,
    /// How many of those writes have ended well.
    acknowledged: usize,
    /// What it reads as now, where that is known.
    now: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Written(u64),
    Discarded,
}

impl Account {
    /// What was found on the disk.
    fn holds(found: u64) -> Self {
        Self { stable: vec![found], since: Vec::new(), acknowledged: 0, now: Some(found) }
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
            Some(Change::Written(version)) => Some(*version),
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
#[derive(Clone)]
enum Sent {
    Change { sectors: Range<usize>, kind: Kind, is_stable: bool },
    Flush,
}

/// How sectors are changed.
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

/// The disk as the client sees it.
#[derive(Clone, Copy)]
pub struct View {
    pub device: Device,
    pub is_write_through: bool,
}

/// See the module's description.
pub struct Client {
    /// By sector.
    accounts: Vec<Account>,
    oracle: Oracle,
    version: u64,
    random: u64,
    /// What was acknowledged as stable, and how.
    pub flushes: u64,
    pub stable_writes: u64,
    /// What else was acknowledged: discards, WRITE SAME and COMPARE AND WRITE.
    pub others: [u64; 3],
}

impl Client {
    pub fn new(seed: u64) -> Self {
        let accounts = vec![Account::holds(ZEROES); BLOCKS * SECTORS];
        let oracle = Oracle::default();
        Self { accounts, oracle, version: ZEROES, random: seed, flushes: 0, stable_writes: 0, others: [0; 3] }
    }

    pub fn random(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// How to change sectors next: with COMPARE AND WRITE only where it is known what there is.
    fn kind(&mut self, sectors: &Range<usize>, device: Device) -> Kind {
        let is_known = self.accounts[sectors.clone()].iter().all(|account| account.now.is_some());
        match (self.random(9), device) {
            (0, _) => Kind::Zeroes,
            (1, _) => Kind::Stable,
            (2, _) => Kind::Discard,
            (3, Device::Scsi) => Kind::Same,
            (4 | 5, Device::Scsi) if is_known => Kind::CompareAndWrite,
            _ => Kind::Write,
        }
    }

    /// What to change next: a block, or where those are as small one of its odd sectors. Nothing that another request of
    /// the batch is for: which of them comes last would be chance.
    fn sectors(&mut self, block: u64, taken: &mut BTreeSet<usize>) -> Range<usize> {
        loop {
            let first = self.random(BLOCKS as u64) as usize * SECTORS;
            let sectors = if block == SECTOR && self.random(2) == 0 {
                let odd = first + 1 + 2 * self.random(SECTORS as u64 / 2) as usize;
                odd..odd + 1
            } else {
                first..first + SECTORS
            };
            if sectors.clone().all(|sector| !taken.contains(&sector)) {
                taken.extend(sectors.clone());
                return sectors;
            }
        }
    }

    /// Sends batches of writes, zeroes and flushes until a request fails, or so many times, and says whether all went well.
    /// The disk records what it runs.
    pub fn load(&mut self, attacker: &mut Attacker, disk: &FaultDisk, view: View, batches: usize) -> bool {
        (0..batches).all(|_| self.batch(attacker, disk, view))
    }

    /// Whether all went well.
    fn batch(&mut self, attacker: &mut Attacker, disk: &FaultDisk, view: View) -> bool {
        // A flush of this batch is about what had ended before it was sent.
        let before: Vec<usize> = self.accounts.iter().map(|account| account.acknowledged).collect();
        let (first, mut taken) = (attacker.made(), BTreeSet::new());
        let slots = (0..BATCH as u64).map(|slot| DATA + slot * SLOT);
        let batch: Vec<Sent> = slots.map(|data| self.ask(attacker, data, view, &mut taken)).collect();
        let asked = Instant::now();
        attacker.publish();
        let told = attacker.await_each(first);
        let statuses: Vec<bool> = (first..attacker.made()).map(|number| attacker.status_of(number) == 0).collect();
        let well = || batch.iter().zip(&told).zip(&statuses).filter(|(_, is_well)| **is_well).map(|(sent, _)| sent);
        let record = disk.recorded();
        for (_, told) in well().filter(|(sent, _)| matches!(sent, Sent::Flush)) {
            self.oracle.flushed(&record, asked, *told);
        }
        if well().any(|(sent, _)| matches!(sent, Sent::Flush)) {
            self.flushes += 1;
            self.oracle.settle();
            self.accounts.iter_mut().zip(before).for_each(|(account, count)| account.settle(count));
        }
        for (sent, told) in well() {
            let Sent::Change { sectors, kind, is_stable } = sent else { continue };
            match kind {
                Kind::Discard => self.others[0] += 1,
                Kind::Same => self.others[1] += 1,
                Kind::CompareAndWrite => self.others[2] += 1,
                _ => {}
            }
            let bytes = bytes_of(sectors);
            if *is_stable {
                self.stable_writes += 1;
                assert_stable(&record, &bytes, asked, *told);
            } else if *kind != Kind::Discard {
                self.oracle.note(bytes, asked);
            }
            for account in &mut self.accounts[sectors.clone()] {
                account.acknowledge();
                if *is_stable {
                    account.settle(account.acknowledged);
                }
            }
        }
        statuses.iter().all(|is_well| *is_well)
    }

    /// Makes a request whose memory begins at `data`.
    fn ask(&mut self, attacker: &mut Attacker, data: u64, view: View, taken: &mut BTreeSet<usize>) -> Sent {
        if self.random(5) == 0 {
            attacker.ask(Ask::Flush, &[]);
            return Sent::Flush;
        }
        let (device, unit) = (view.device, attacker.block);
        let sectors = self.sectors(unit, taken);
        let (at, len) = (bytes_of(&sectors).start, (sectors.len() as u64) * SECTOR);
        let kind = self.kind(&sectors, device);
        self.version += 1;
        let change = match kind {
            Kind::Zeroes => Change::Written(ZEROES),
            Kind::Discard => Change::Discarded,
            _ => Change::Written(self.version),
        };
        let new: Vec<u8> = sectors.clone().flat_map(|sector| contents(sector, self.version)).collect();
        let mut old = Vec::new();
        for sector in sectors.clone() {
            let account = &mut self.accounts[sector];
            account.since.push(change);
            old.extend(contents(sector, account.now.take().unwrap_or_default()));
        }
        let put = |bytes: &[u8]| pieces(self.version, attacker, data, bytes);
        let (ask, buffers) = match kind {
            Kind::Zeroes => (Ask::WriteZeroes { at, len }, Vec::new()),
            Kind::Discard if device == Device::Blk => (Ask::Discard { at, len }, Vec::new()),
            Kind::Discard => (Ask::Unmap, put(&unmap(at / unit, len / unit))),
            Kind::Write => (Ask::Write { at }, put(&new)),
            Kind::Stable => (Ask::WriteStable { at }, put(&new)),
            Kind::Same => (Ask::WriteSame { at, len }, put(&new[..unit as usize])),
            Kind::CompareAndWrite => (Ask::CompareAndWrite { at }, put(&[old, new].concat())),
        };
        attacker.ask(ask, &buffers);
        // What a discard leaves is nothing to rely on, and so it need not be stable.
        let is_stable =
            (view.is_write_through && kind != Kind::Discard) || (kind == Kind::Stable && device == Device::Scsi);
        Sent::Change { sectors, kind, is_stable }
    }

    /// All that has ended is stable.
    pub fn settle(&mut self) {
        self.accounts.iter_mut().for_each(|account| account.settle(account.acknowledged));
    }

    /// Compares what is on the disk with the account, and goes on with what is there.
    pub fn verify(&mut self, disk: &Path) {
        self.oracle.settle();
        let file = File::open(disk).expect("the disk");
        for (sector, account) in self.accounts.iter_mut().enumerate() {
            let mut found = [0; SECTOR as usize];
            file.read_exact_at(&mut found, sector as u64 * SECTOR).expect("it has power");
            let found = version(sector, &found);
            assert!(account.may_be(found), "sector {sector}: {found}, not {account:?}");
            *account = Account::holds(found);
        }
    }
}

fn bytes_of(sectors: &Range<usize>) -> Range<u64> {
    sectors.start as u64 * SECTOR..sectors.end as u64 * SECTOR
}

/// Puts a request's data into its memory: of every other version in two pieces, of these with the cut now between sectors
/// and now within one, which direct I/O does not take.
fn pieces(version: u64, attacker: &Attacker, data: u64, bytes: &[u8]) -> Vec<(u64, u32)> {
    let half = bytes.len() / 2;
    let cut = match version % 4 {
        1 => half - half % SECTOR as usize,
        3 => half + 12,
        _ => 0,
    };
    let (one, two) = if cut > 0 { bytes.split_at(cut) } else { (bytes, &[][..]) };
    let pieces = [(data, one), (data + SECOND_PIECE, two)].into_iter().filter(|(_, piece)| !piece.is_empty());
    pieces
        .map(|(at, piece)| {
            attacker.data[0].put(at, piece);
            (at, piece.len() as u32)
        })
        .collect()
}

/// A sector of a version: it says which block and which version it is of, but where it is zeroes. Those of a block are
/// alike, for WRITE SAME.
fn contents(sector: usize, version: u64) -> Vec<u8> {
    if version == ZEROES {
        return vec![0; SECTOR as usize];
    }
    [(sector / SECTORS) as u64, version].map(u64::to_le_bytes).concat().repeat(SECTOR as usize / 16)
}

/// UNMAP's parameter list for one range (SBC-4, UNMAP parameter list), in logical blocks.
fn unmap(first: u64, count: u64) -> Vec<u8> {
    [&[0, 22, 0, 16, 0, 0, 0, 0], &first.to_be_bytes()[..], &(count as u32).to_be_bytes(), &[0; 4]].concat()
}

/// The version that a sector is of.
fn version(sector: usize, bytes: &[u8]) -> u64 {
    let words: Vec<u64> = bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
    assert!(words.chunks(2).all(|pair| pair == &words[..2]), "sectors are whole");
    let block = (sector / SECTORS) as u64;
    assert!(words[0] == block || bytes.iter().all(|byte| *byte == 0), "it is of this block");
    words[1]
}
