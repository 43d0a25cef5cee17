//! What a disk holds, and which of it would survive a loss of power.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

/// What a disk writes at once or not at all.
pub const SECTOR: u64 = 512;

type Sector = [u8; SECTOR as usize];

/// A disk with a volatile write cache: writes are read back at once, and are stable after a flush.
#[derive(Debug)]
pub struct Store {
    /// What reads find.
    image: File,
    size: u64,
    /// Of each sector that was written since the last flush, what is stable there.
    unflushed: BTreeMap<u64, Box<Sector>>,
}

/// What survives a loss of power, of each sector that was not flushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Survivors {
    /// What was stable.
    #[default]
    None,
    /// What was written last.
    All,
    /// One or the other, by a coin that is tossed for each sector: so writes are torn, and reach the disk in any order.
    Random(u64),
}

impl Store {
    /// The disk that `image` is, with an empty cache.
    ///
    /// # Errors
    /// When its length cannot be read or is not a multiple of a sector.
    pub fn new(image: File) -> io::Result<Self> {
        let size = image.metadata()?.len();
        if size == 0 || !size.is_multiple_of(SECTOR) {
            let why =
                format!("a disk has whole sectors of {SECTOR} bytes, and at least one; the image has {size} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(Self { image, size, unflushed: BTreeMap::new() })
    }

    /// Its size in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Sectors whose last write a loss of power may take back.
    pub fn unflushed(&self) -> usize {
        self.unflushed.len()
    }

    /// What lies there, up to the disk's end.
    ///
    /// # Errors
    /// The image's.
    pub fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let len = self.size.saturating_sub(at).min(len as u64);
        let mut data = vec![0; len as usize];
        self.image.read_exact_at(&mut data, at)?;
        Ok(data)
    }

    /// Writes, into the cache alone unless the write is to be stable when it ends.
    ///
    /// # Errors
    /// Beyond the disk's end, and the image's.
    pub fn write(&mut self, at: u64, data: &[u8], is_stable: bool) -> io::Result<()> {
        let sectors = self.sectors(at, data.len() as u64)?;
        if !is_stable {
            self.remember(sectors.clone())?;
        }
        self.image.write_all_at(data, at)?;
        if is_stable {
            self.settle(sectors);
        }
        Ok(())
    }

    /// Fills with zeroes, in the cache.
    ///
    /// # Errors
    /// As of [`write`](Self::write).
    pub fn zero(&mut self, at: u64, len: u64) -> io::Result<()> {
        self.remember(self.sectors(at, len)?)?;
        let zeroes = [0; 1 << 16];
        let mut range = at..at + len;
        while !range.is_empty() {
            let part = (range.end - range.start).min(zeroes.len() as u64);
            self.image.write_all_at(&zeroes[..part as usize], range.start)?;
            range.start += part;
        }
        Ok(())
    }

    /// Makes stable what was written.
    pub fn flush(&mut self) {
        self.unflushed.clear();
    }

    /// Takes back what the loss of power does. What is there afterwards is stable.
    ///
    /// # Errors
    /// The image's.
    pub fn lose_power(&mut self, survivors: Survivors) -> io::Result<()> {
        let mut coin = match survivors {
            Survivors::Random(seed) => Some(Coin(seed)),
            Survivors::None | Survivors::All => None,
        };
        for (sector, stable) in std::mem::take(&mut self.unflushed) {
            let survives = coin.as_mut().map_or(survivors == Survivors::All, Coin::toss);
            if !survives {
                self.image.write_all_at(&*stable, sector * SECTOR)?;
            }
        }
        Ok(())
    }

    /// The sectors that are touched by a write there.
    fn sectors(&self, at: u64, len: u64) -> io::Result<Range<u64>> {
        let end = at.checked_add(len).filter(|end| *end <= self.size);
        let end = end.ok_or_else(|| io::Error::from(io::ErrorKind::StorageFull))?;
        Ok(at / SECTOR..end.div_ceil(SECTOR))
    }

    /// Keeps what is stable there, of sectors of which it is not kept already.
    fn remember(&mut self, sectors: Range<u64>) -> io::Result<()> {
        for sector in sectors {
            if let Entry::Vacant(vacant) = self.unflushed.entry(sector) {
                let mut stable = Box::new([0; SECTOR as usize]);
                self.image.read_exact_at(&mut *stable, sector * SECTOR)?;
                vacant.insert(stable);
            }
        }
        Ok(())
    }

    /// Forgets what was stable there, since what was written last is now.
    fn settle(&mut self, sectors: Range<u64>) {
        for sector in sectors {
            self.unflushed.remove(&sector);
        }
    }
}

/// A fair coin whose tosses a seed decides (splitmix64).
struct Coin(u64);

impl Coin {
    fn toss(&mut self) -> bool {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(sectors: u64) -> Store {
        let image = tempfile::tempfile().unwrap();
        image.set_len(sectors * SECTOR).unwrap();
        Store::new(image).unwrap()
    }

    fn sector(store: &Store, sector: u64) -> u8 {
        let data = store.read(sector * SECTOR, SECTOR as usize).unwrap();
        assert!(data.iter().all(|byte| *byte == data[0]), "a sector is never torn");
        data[0]
    }

    #[test]
    fn what_was_written_is_read_and_goes_with_the_power_unless_it_was_flushed() {
        let mut store = store(8);
        store.write(0, &[1; 1024], false).unwrap();
        store.flush();
        store.write(512, &[2; 1024], false).unwrap();
        store.zero(0, 512).unwrap();
        assert_eq!([0, 1, 2].map(|at| sector(&store, at)), [0, 2, 2]);
        assert_eq!(store.unflushed(), 3);
        store.lose_power(Survivors::None).unwrap();
        assert_eq!([0, 1, 2].map(|at| sector(&store, at)), [1, 1, 0]);
    }

    #[test]
    fn a_stable_write_survives_and_makes_nothing_else_survive() {
        let mut store = store(8);
        store.write(0, &[1; 2048], false).unwrap();
        store.write(512, &[2; 512], true).unwrap();
        store.lose_power(Survivors::None).unwrap();
        assert_eq!([0, 1, 2, 3].map(|at| sector(&store, at)), [0, 2, 0, 0]);
    }

    #[test]
    fn chance_keeps_some_sectors_and_a_seed_always_the_same() {
        let survivors = |survivors| {
            let mut store = store(64);
            store.write(0, &[1; 64 * 512], false).unwrap();
            store.lose_power(survivors).unwrap();
            (0..64).filter(|&at| sector(&store, at) == 1).collect::<Vec<_>>()
        };
        let some = survivors(Survivors::Random(7));
        assert!((10..54).contains(&some.len()), "{some:?}");
        assert_eq!(survivors(Survivors::Random(7)), some);
        assert_ne!(survivors(Survivors::Random(8)), some);
        assert_eq!(survivors(Survivors::All).len(), 64);
    }

    #[test]
    fn nothing_is_written_beyond_the_end() {
        let mut store = store(2);
        assert!(store.write(512, &[1; 1024], true).is_err());
        assert!(store.zero(u64::MAX, 512).is_err());
        assert_eq!(store.read(512, 1024).unwrap().len(), 512);
        assert!(Store::new(tempfile::tempfile().unwrap()).is_err(), "an empty image is no disk");
    }
}
