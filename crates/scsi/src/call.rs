//! What handlers of commands are called with, and return.

use crate::cdb::Cdb;
use crate::command::Command;
use crate::sense::Refusal;
use crate::step::{DataOut, Step, Task};

/// What a handler is called with.
pub(crate) struct Call<'a> {
    pub(crate) cdb: Cdb,
    pub(crate) command: &'a mut Command,
    pub(crate) task: &'a Task<'a>,
    pub(crate) data: &'a dyn DataOut,
}

/// What a handler returns: the next step, or why there is none.
pub(crate) type Answer = Result<Step, Refusal>;
