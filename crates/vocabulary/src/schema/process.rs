//! What concerns the process and none of its objects.

use serde_json::{Map, Value};

use super::key::{Key, Kind, Shape};
use super::{Problem, Spelling, fit_arguments};

/// Guest memory mapped for all exports together, in bytes, unless somebody says otherwise: half of the addresses that a
/// process has on x86-64.
pub(crate) const DEFAULT_MEMORY_MAX: u64 = 64 << 40;

/// The key, in a file; an option on the command line.
pub(crate) const MEMORY_MAX: &str = "memory-max";

static SHAPE: Shape = Shape {
    keys: &[Key::optional(
        MEMORY_MAX,
        Kind::Bytes(1 << 20, 1 << 47),
        &"64T",
        "Guest memory that may be mapped at a time for the clients of all exports.",
    )],
    variants: None,
    foreign: &[],
};

/// Reads how much guest memory may be mapped for all exports together, in bytes.
///
/// # Errors
/// It is no such number.
pub fn memory_max(value: Value, spelling: Spelling) -> Result<u64, Problem> {
    let given = Map::from_iter([(MEMORY_MAX.to_owned(), value)]);
    let fitted = fit_arguments(given, &SHAPE, spelling)?;
    Ok(fitted[MEMORY_MAX].as_u64().unwrap_or(DEFAULT_MEMORY_MAX))
}
