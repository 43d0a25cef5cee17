//! Where inputs begin: the files of `corpus/TARGET`, and inputs without end that are made of them.

use std::fs;
use std::path::{Path, PathBuf};

/// The inputs that are kept for a target, by name.
///
/// # Panics
/// When they cannot be read.
pub fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(&path).expect("a file"))).collect()
}

/// Inputs without end, each made of bytes at random, of those before it and of the corpus; the same for the same seed.
pub fn mutants(corpus: Vec<Vec<u8>>, seed: u64) -> impl Iterator<Item = Vec<u8>> {
    let mut state = seed | 1;
    let mut random = move || {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let mut kept: Vec<Vec<u8>> = Vec::new();
    std::iter::repeat_with(move || {
        let from = if random() % 2 == 0 && !corpus.is_empty() { &corpus } else { &kept };
        let mut input = match from.len() as u64 {
            0 => Vec::new(),
            len => from[(random() % len) as usize].clone(),
        };
        for _ in 0..=random() % 8 {
            let at = (random() % (input.len() as u64 + 1)) as usize;
            match random() % 6 {
                0 => input.truncate(at),
                1 => {
                    input.splice(at..at, (0..random() % 64).map(|_| random() as u8).collect::<Vec<_>>()).for_each(drop)
                }
                2 => input.extend((0..random() % 64).map(|_| random() as u8)),
                3 if !corpus.is_empty() => {
                    // A part of another, in the place of a part of this one.
                    let other = &corpus[(random() % corpus.len() as u64) as usize];
                    let [from, to] = [(); 2].map(|()| (random() % (other.len() as u64 + 1)) as usize);
                    let end = (at + (random() % 32) as usize).min(input.len());
                    input.splice(at..end, other[from.min(to)..from.max(to)].iter().copied()).for_each(drop);
                }
                4 => {
                    let end = (at + (random() % 32) as usize).min(input.len());
                    input.drain(at..end).for_each(drop);
                }
                _ => input.get_mut(at).into_iter().for_each(|byte| *byte = random() as u8),
            }
        }
        input.truncate(4096);
        if kept.len() < 64 {
            kept.push(input.clone());
        } else {
            let at = (random() % 64) as usize;
            kept[at].clone_from(&input);
        }
        input
    })
}
