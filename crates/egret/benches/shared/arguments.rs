//! Arguments that benchmarks share which compare servers in turns.

use std::path::PathBuf;
use std::time::Duration;

/// How much is measured, of what, and where the samples go.
#[derive(Debug, clap::Args)]
pub struct CommonArguments {
    /// Fewer and shorter measurements
    #[arg(long)]
    pub quick: bool,
    /// Repeat everything so often [default: 5]
    #[arg(long)]
    pairs: Option<usize>,
    /// Load each server in each cell for so long, in turns
    #[arg(long)]
    seconds: Option<f64>,
    /// Measure only cells whose name has all these words, such as "io_uring QD1"
    #[arg(long, value_name = "WORDS")]
    pub only: Option<String>,
    /// Write every sample to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// What cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

impl CommonArguments {
    pub fn pairs(&self) -> usize {
        self.pairs.unwrap_or(if self.quick { 2 } else { 5 }).max(1)
    }

    /// How long each server is loaded in a cell, with defaults in seconds for a normal and for a quick run.
    pub fn length(&self, usual: f64, quick: f64) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { quick } else { usual }))
    }

    /// Whether a cell of this name is asked for.
    pub fn chooses(&self, name: &str) -> bool {
        let has = |word| name.split([' ', ',']).any(|part| part == word);
        self.only.as_ref().is_none_or(|only| only.split_whitespace().all(has))
    }
}
