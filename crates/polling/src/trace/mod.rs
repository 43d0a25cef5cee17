//! Recorded waits: what a loop writes down so that every policy can be tried on it later.
//!
//! | file | what it is |
//! |---|---|
//! | `record.rs` | one wait, as a loop notes it: fixed size, no allocation |
//! | `recorder.rs` | a bounded ring of the newest records |
//! | `text.rs` | the file format, written |
//! | `reader.rs` | the file format, read, with errors that name the line |

mod reader;
mod record;
mod recorder;
mod text;

pub use reader::TraceError;
pub use record::{Ready, Record};
pub use recorder::Recorder;
pub use text::MAGIC;

use crate::{BlockCost, Nanos};

/// The waits of one I/O thread in the order they happened, and what is known of where.
///
/// [`to_string`](ToString::to_string) writes the file format and [`parse`](Self::parse) reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The machine and the load, in one line of at most [`Trace::LONGEST_NOTE`] bytes.
    pub note: String,
    /// What blocking cost where the trace was taken; `latency` is what a blocked record's length has too much.
    pub block: BlockCost,
    /// Older waits that did not fit.
    pub lost: u64,
    /// At most [`Trace::MOST_WAITS`].
    pub waits: Vec<Record>,
}

impl Trace {
    /// The version of the file format that this library writes, and the only one it reads.
    pub const VERSION: u32 = 1;
    /// More waits than this are no trace: some 200 MB in memory.
    pub const MOST_WAITS: usize = 1 << 22;
    /// The longest note, in bytes.
    pub const LONGEST_NOTE: usize = 1_000;

    /// How long each wait would have been had the loop been awake when it ended.
    pub fn true_lengths(&self) -> impl Iterator<Item = Nanos> + '_ {
        self.waits.iter().map(|record| record.true_length(self.block.latency))
    }
}
