//! The list of engines: [`Aio`] names those of images, and drivers with an engine of their own stand beside it.
//!
//! Whatever has to know each engine matches on [`EngineKind`] without a default, so that the compiler asks of a new one
//! how it is made and what it does with what it cannot run.

#![forbid(unsafe_code)]

use crate::disk::{Backing, Disk};
use crate::options::{Aio, RemoteKind};

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineKind {
    /// The null driver's.
    Null,
    /// An image's, by the word of its option.
    Aio(Aio),
    /// Another crate's, for disks of this kind.
    Remote(RemoteKind),
}

impl EngineKind {
    /// Worker threads, which every other engine may need beside it.
    pub(crate) const THREADS: Self = Self::Aio(Aio::Threads);

    /// How many engines there may be on one I/O thread.
    pub(crate) const COUNT: usize = 1 + Aio::ALL.len() + RemoteKind::ALL.len();

    /// Each of them, at its [index](Self::index).
    pub(crate) const ALL: [Self; Self::COUNT] = {
        let mut all = [Self::Null; Self::COUNT];
        let mut at = 1;
        while at < Self::COUNT {
            let rest = at - 1;
            all[at] = match rest < Aio::ALL.len() {
                true => Self::Aio(Aio::ALL[rest]),
                false => Self::Remote(RemoteKind::ALL[rest - Aio::ALL.len()]),
            };
            at += 1;
        }
        all
    };

    /// The engine that runs what a disk is asked for.
    pub(crate) fn of(disk: &Disk) -> Self {
        match &disk.backing {
            Backing::Null { .. } => Self::Null,
            Backing::File(_) | Backing::Device(_) => Self::Aio(disk.options.aio),
            Backing::Remote(remote) => Self::Remote(remote.kind()),
        }
    }

    /// Where it stands in lists with an entry for each engine.
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Null => 0,
            Self::Aio(aio) => 1 + aio as usize,
            Self::Remote(kind) => 1 + Aio::ALL.len() + kind as usize,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Aio(aio) => aio.as_str(),
            Self::Remote(kind) => kind.as_str(),
        }
    }

    /// Whether the kernel runs its jobs while the loop goes on. Then the loop holds the disk's block range lock for each
    /// write, and the kernel may refuse a job, which worker threads run then.
    pub(crate) const fn runs_in_kernel(self) -> bool {
        match self {
            Self::Null | Self::Aio(Aio::Threads) | Self::Remote(_) => false,
            Self::Aio(Aio::Native | Aio::IoUring) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_stands_at_its_index_with_a_name_of_its_own() {
        for (at, kind) in EngineKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), at);
            assert_eq!(EngineKind::ALL.iter().filter(|other| other.name() == kind.name()).count(), 1);
        }
    }
}
