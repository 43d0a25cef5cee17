//! What concerns the process and none of its objects.

use serde_json::{Value, json};

use super::key::{Shape, ValueType};
use super::object::{read_options, with_defaults};
use super::{Problem, Spelling};
use crate::options;

options! {
    struct Process {
        // Half of the addresses that a process has on x86-64.
        /// Guest memory that may be mapped at a time for the clients of all exports.
        memory_max: u64, ValueType::Bytes(1 << 20, 1 << 47), default "64T";
    }
}

/// The key, in a file; an option on the command line.
pub(crate) const MEMORY_MAX: &str = Process::KEYS[0].name;

static SHAPE: Shape = Shape::of(Process::KEYS);

/// Reads how much guest memory may be mapped for all exports together, in bytes.
///
/// # Errors
/// It is no such number.
pub fn memory_max(value: Value, spelling: Spelling) -> Result<u64, Problem> {
    read_options(json!({ MEMORY_MAX: value }), &SHAPE, spelling).map(|Process { memory_max }| memory_max)
}

/// The same where nobody says.
pub(crate) fn default_memory_max() -> u64 {
    let Process { memory_max } = with_defaults(json!({}), &SHAPE);
    memory_max
}
