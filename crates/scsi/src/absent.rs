//! What an initiator is told that addresses a logical unit which is not there.

use crate::call::Call;
use crate::cdb::{Cdb, Run};
use crate::command::Command;
use crate::inquiry::of_nothing;
use crate::report::report_luns;
use crate::sense::{Code, Refusal, Sense};
use crate::step::{DataOut, Step, Task};

/// Answers a command for a logical unit number without a logical unit (SAM-5, incorrect logical unit numbers): the
/// task's nexus may be any. INQUIRY says that there is no device, REQUEST SENSE and REPORT LUNS are answered, anything
/// else is LOGICAL UNIT NOT SUPPORTED.
///
/// It never needs a disk, so the step is [`Step::Done`] or [`Step::Overrun`].
pub fn absent(command: &mut Command, task: &Task<'_>, data: &dyn DataOut) -> Step {
    command.recycle();
    command.touched = true;
    let unsupported = Sense::illegal(Code::NO_SUCH_UNIT);
    let answer = match Cdb::parse(task.cdb) {
        Ok((cdb, spec)) => match spec.run {
            Run::Inquiry => of_nothing(command, task, cdb.has(1, 1), usize::from(cdb.u16(3))),
            Run::ReportLuns => report_luns(Call { cdb, command, task, data }),
            Run::RequestSense => {
                command.response.extend(unsupported.to_bytes());
                command.respond(task, usize::from(cdb.byte(4)))
            }
            _ => Err(Refusal::Sense(unsupported)),
        },
        Err(_) => Err(Refusal::Sense(unsupported)),
    };
    answer.unwrap_or_else(Step::from)
}
