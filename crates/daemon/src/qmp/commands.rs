//! The commands that there are.

use super::command::Table;
use super::{block, descriptors, limits, live, luns, nbd, objects, own, stats};

/// Every command, in the order of the reference. A new one stands in the table of what it is about; a new table stands here.
pub static COMMANDS: Table = Table(&[
    own::COMMANDS,
    objects::COMMANDS,
    block::COMMANDS,
    nbd::COMMANDS,
    luns::COMMANDS,
    descriptors::COMMANDS,
    limits::COMMANDS,
    live::COMMANDS,
    stats::COMMANDS,
]);
