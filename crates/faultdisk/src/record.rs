//! What a disk has run, and when.

use std::time::Instant;

use crate::faults::Asked;

/// A request that was run as it was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// What it was.
    pub asked: Asked,
    /// When it came: not before whoever asked for it did so.
    pub begun: Instant,
    /// When it was run: not after whoever asked for it was told. What begins later finds it done.
    pub ended: Instant,
}

/// What was run since somebody wanted to know.
#[derive(Debug, Default)]
pub struct Record(Option<Vec<Ran>>);

impl Record {
    /// Begins anew.
    pub fn begin(&mut self) {
        self.0 = Some(Vec::new());
    }

    /// A request is run now.
    pub fn note(&mut self, asked: Asked, begun: Instant) {
        if let Some(ran) = &mut self.0 {
            ran.push(Ran { asked, begun, ended: Instant::now() });
        }
    }

    /// In the order in which it was run.
    pub fn ran(&self) -> &[Ran] {
        self.0.as_deref().unwrap_or_default()
    }
}
