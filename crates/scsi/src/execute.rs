//! A command's way through the logical unit.

use std::task::Waker;

use egret_disk::Op;
use rustix::io::Errno;

use crate::call::{Answer, Call};
use crate::cdb::{Access, Cdb, Needs, Run, Spec};
use crate::command::{Admission, Command, Hold};
use crate::medium::is_of_medium;
use crate::nexus::{Flags, Nexus};
use crate::report::{log_sense, report_luns, report_task_management, send_diagnostic};
use crate::sense::{Code, Key, Refusal, Sense, failure};
use crate::step::{DataOut, DiskOp, Memory, Step, Task, make_stable};
use crate::unit::LogicalUnit;
use crate::work::Work;

impl LogicalUnit {
    /// Begins a command: looks at the CDB, and at the parameter list where there is one, and says what to do.
    ///
    /// `command` is of no other task that is under way. When this returns [`Step::Disk`] or [`Step::Wait`] the command
    /// is under way, until a later step is [`Step::Done`] or it is [aborted](Self::abort).
    pub fn begin(&self, command: &mut Command, task: &Task<'_>, data: &dyn DataOut) -> Step {
        command.recycle();
        // Before the flags: who preempts sets those first and then counts, so that one of the two is seen here, or the
        // count is another when the command is let in.
        command.preempted = task.nexus.preempted();
        let parsed = self.find(task.cdb);
        let flags = task.nexus.flags();
        if !flags.is_clear()
            && let Err(refusal) = self.hinder(flags, parsed.as_ref().ok(), task.nexus)
        {
            return refusal.into();
        }
        match parsed {
            Ok((cdb, spec)) => self.run(spec.run, Call { cdb, command, task, data }).unwrap_or_else(Step::from),
            Err(sense) => sense.into(),
        }
    }

    /// As [`begin`](Self::begin), for a READ or WRITE that nothing stands in the way of: then the command is under way,
    /// with this operation and no other. `None`, and nothing has happened, for anything else: `begin` has the answer.
    ///
    /// Nearly all commands are such. Inlined, they go from the CDB to the operation in registers: a [`Step`] would have to
    /// go through memory, and be waited for.
    #[inline(always)]
    pub fn begin_transfer(&self, command: &mut Command, task: &Task<'_>) -> Option<DiskOp> {
        // In this order, as in `begin`.
        let preempted = task.nexus.preempted();
        if !task.nexus.flags().is_clear() {
            return None;
        }
        let (cdb, spec) = Cdb::parse(task.cdb).ok()?;
        let op = match spec.run {
            Run::Read => {
                if is_of_medium(&cdb) {
                    // It may be a flush as well.
                    return None;
                }
                let op = self.read_op(&cdb, task).ok()??;
                command.recycle();
                op
            }
            Run::Write => {
                let op = self.write_op(&cdb, task).ok()??;
                let pass = self.fence.enter(task.lane, &op.range(), task.waker)?;
                // As in `look_again`; here it begins anew.
                let is_stable = matches!(op.op, Op::Write { fua: true });
                let is_let_in = (is_stable || self.write_cache()) && !self.write_protect();
                if !is_let_in || is_fenced(task.nexus, preempted) {
                    self.fence.leave(pass);
                    return None;
                }
                command.recycle();
                command.preempted = preempted;
                command.hold = Hold::Pass(pass);
                op
            }
            _ => return None,
        };
        command.moved = op.len;
        command.out = Some(op.op);
        Some(op)
    }

    /// As [`step`](Self::step), for a [transfer](Command::is_transfer) whose operation has ended well. Returns how much
    /// has been moved, in bytes: all that it is about.
    ///
    /// # Panics
    ///
    /// When no operation of the command is out.
    #[inline(always)]
    pub fn end_transfer(&self, command: &mut Command) -> u64 {
        debug_assert!(command.is_transfer());
        command.out.take().expect("a command without an operation that is out");
        if let Hold::Pass(pass) = std::mem::take(&mut command.hold) {
            self.fence.leave(pass);
        }
        command.moved
    }

    /// Goes on after [`Step::Wait`], with the nexus of [`begin`](Self::begin) and a waker as there.
    ///
    /// # Panics
    ///
    /// When the command is not waiting.
    pub fn retry(&self, command: &mut Command, nexus: &Nexus, waker: &Waker) -> Step {
        assert!(command.is_waiting(), "a command that is not waiting cannot be tried again");
        self.start(command, nexus, waker)
    }

    /// Goes on after [`Step::Disk`], whose operation has ended as `result` says. `data` and the nexus are those of
    /// [`begin`](Self::begin), the waker as there.
    ///
    /// # Panics
    ///
    /// When no operation of the command is out.
    pub fn step(
        &self,
        command: &mut Command,
        result: Result<(), Errno>,
        data: &dyn DataOut,
        nexus: &Nexus,
        waker: &Waker,
    ) -> Step {
        let op = command.out.take().expect("a command without an operation that is out");
        if let Err(errno) = result {
            self.release(command);
            let (status, sense) = failure(op, errno);
            return Step::refused(status, sense);
        }
        if let Err(sense) = command.absorb(data) {
            self.release(command);
            return sense.into();
        }
        if let Hold::Pass(_) = command.hold
            && command.work.goes_on(&command.extents)
        {
            // However many operations it has, who waits for it waits for one of them, and may have fenced it.
            self.let_go(command);
            return self.start(command, nexus, waker);
        }
        self.advance(command, nexus)
    }

    /// Whether somebody waits for the command, on whatever nexus: for its operation that is out, which no disk has yet. Then
    /// it is to be [suspended](Self::suspend), and readmitted at once. To be asked when a waker says so that is a
    /// [holder's](Self::add_holder), and of every operation that is about to wait for a disk: one of the two finds it.
    #[cold]
    pub fn holds_up(&self, command: &Command) -> bool {
        match &command.hold {
            Hold::Pass(pass) => self.fence.holds_up(pass),
            Hold::Ticket { ticket, .. } => self.fence.is_outlived(*ticket),
            Hold::Nothing | Hold::Place(_) | Hold::Turn(_) | Hold::Change(_) => false,
        }
    }

    /// Puts a command off whose operation `out` is not to run for a while, and does not run now: until it is
    /// [readmitted](Self::readmit) nobody waits for it. Says whether it begins again then, as COMPARE AND WRITE does:
    /// others may change what it has compared.
    ///
    /// # Panics
    ///
    /// When no operation of the command is out.
    #[cold]
    pub fn suspend(&self, command: &mut Command, lane: usize, out: &DiskOp) -> bool {
        assert!(command.out.is_some(), "a command without an operation that is out");
        if command.is_transfer() && out.op != Op::Read {
            command.touched = true;
            command.admission = Admission::Change(out.range(), lane);
        }
        self.let_go(command);
        let begins_again = matches!(command.admission, Admission::Alone(_));
        if begins_again {
            command.work.begin_again();
        }
        begins_again
    }

    /// Goes on with a command that was [suspended](Self::suspend), with the nexus of [`begin`](Self::begin) and a waker
    /// as there. `None`: the operation that is `out` may run, which is stable now if the write cache was turned off
    /// meanwhile. Otherwise that is not to run, and this is what comes of the command; but on [`Step::Wait`] it is to be
    /// readmitted again when the waker has been woken.
    ///
    /// # Panics
    ///
    /// When no operation of the command is out.
    #[cold]
    pub fn readmit(&self, command: &mut Command, nexus: &Nexus, out: &mut DiskOp, waker: &Waker) -> Option<Step> {
        assert!(command.out.is_some(), "a command without an operation that is out");
        if !self.admit(command, waker) {
            return Some(Step::Wait);
        }
        // What ejects the medium needs no admission, and conflicts like what changes it.
        let changes = command.ejects.is_some() || !matches!(command.admission, Admission::None);
        let looked = match changes {
            true => self.look_again(command, nexus),
            false if nexus.flags().has(Flags::NO_READ) => Err(Refusal::Conflict),
            false => Ok(()),
        };
        if let Err(refusal) = looked {
            self.release(command);
            command.out = None;
            return Some(refusal.into());
        }
        if command.admission.changes_medium() && !self.write_cache() {
            make_stable(&mut out.op);
            command.out = Some(out.op);
        }
        if let Admission::Alone(_) = command.admission {
            command.out = None;
            return Some(self.advance(command, nexus));
        }
        (command.piece > 0).then_some(Step::Disk(DiskOp { memory: Memory::Scratch, ..*out }))
    }

    /// Ends a command early. None of its operations may be out any more: what is out ends first. Does nothing to one
    /// that is not under way.
    pub fn abort(&self, command: &mut Command) {
        self.release(command);
        command.reset();
    }

    /// Lets the command in where it needs that, and begins its work.
    pub(crate) fn start(&self, command: &mut Command, nexus: &Nexus, waker: &Waker) -> Step {
        self.keep_out(command, nexus, waker).unwrap_or_else(|| self.advance(command, nexus))
    }

    /// Likewise for a command that is one operation and nothing else.
    pub(crate) fn start_one(&self, command: &mut Command, task: &Task<'_>, op: DiskOp) -> Step {
        command.moved = op.len;
        command.work = Work::Once(Some(op));
        self.start(command, task.nexus, task.waker)
    }

    /// Why the command does not get in, if it does not.
    fn keep_out(&self, command: &mut Command, nexus: &Nexus, waker: &Waker) -> Option<Step> {
        match command.admission {
            Admission::None => return None,
            Admission::Reserve(ref asked) => {
                match self.change_reservations(asked, &mut command.hold, nexus.id(), waker) {
                    None => return Some(Step::Wait),
                    Some(Err(refusal)) => {
                        self.release(command);
                        return Some(refusal.into());
                    }
                    Some(Ok(then)) => {
                        self.let_go(command);
                        command.admission = then;
                        return self.keep_out(command, nexus, waker);
                    }
                }
            }
            _ => {}
        }
        if !self.admit(command, waker) {
            return Some(Step::Wait);
        }
        if !matches!(command.admission, Admission::Quiet)
            && let Err(refusal) = self.look_again(command, nexus)
        {
            self.release(command);
            return Some(refusal.into());
        }
        None
    }

    /// Looks again at what was looked at when the command began, now that it is let in. Who preempts and aborts first keeps
    /// the nexus out and then waits for those within; who turns the write cache off or has all writes refused does that
    /// first, and then waits and flushes: so whoever gets in unseen sees it here.
    fn look_again(&self, command: &mut Command, nexus: &Nexus) -> Result<(), Refusal> {
        if is_fenced(nexus, command.preempted) {
            return Err(Refusal::Conflict);
        }
        if command.admission.changes_medium() {
            self.writable()?;
            if !self.write_cache() {
                command.work.make_stable();
            }
        }
        Ok(())
    }

    /// Asks the fence; false to wait until the waker has been woken.
    fn admit(&self, command: &mut Command, waker: &Waker) -> bool {
        if let Hold::Nothing | Hold::Place(_) = command.hold {
            let ticket = match &command.admission {
                Admission::None | Admission::Reserve(_) => return true,
                Admission::Change(range, lane) => {
                    let Some(pass) = self.fence.enter(*lane, range, waker) else {
                        if let Hold::Nothing = command.hold {
                            command.hold = Hold::Place(self.fence.line_up(range.clone()));
                        }
                        return false;
                    };
                    if let Hold::Place(place) = std::mem::replace(&mut command.hold, Hold::Pass(pass)) {
                        self.fence.release(place);
                    }
                    return true;
                }
                Admission::Alone(range) => {
                    let locked = match command.hold {
                        Hold::Place(place) => self.fence.lock_in_turn(place, waker).ok_or(place),
                        _ => self.fence.lock(range.clone(), waker),
                    };
                    match locked {
                        Ok(ticket) => ticket,
                        Err(place) => {
                            command.hold = Hold::Place(place);
                            return false;
                        }
                    }
                }
                Admission::Quiet => self.fence.queue(),
            };
            command.hold = Hold::Ticket { ticket, drained: false };
        }
        let Hold::Ticket { ticket, drained } = &mut command.hold else { return true };
        *drained = *drained || self.fence.drained(*ticket, waker);
        *drained && (!matches!(command.admission, Admission::Quiet) || self.fence.outlived(*ticket, waker))
    }

    fn advance(&self, command: &mut Command, nexus: &Nexus) -> Step {
        if let Some(op) = command.issue() {
            return Step::Disk(op);
        }
        self.release(command);
        if let Some(ejects) = command.ejects.take()
            && let Err(refusal) = self.set_ejected(ejects, nexus, command.preempted)
        {
            return refusal.into();
        }
        if let Some((turned_off, by)) = command.flushes.take() {
            self.is_flushed(turned_off, by);
        }
        Step::good(command.moved)
    }

    fn release(&self, command: &mut Command) {
        command.admission = Admission::None;
        self.let_go(command);
    }

    /// Lets go of the fence, of a turn, and of memory.
    fn let_go(&self, command: &mut Command) {
        command.scratch = Vec::new();
        match std::mem::take(&mut command.hold) {
            // What is being stored takes effect, whether or not anybody waits for it.
            Hold::Nothing | Hold::Change(_) => {}
            Hold::Turn(turn) => {
                let waiting = self.state().keeping.leave(turn);
                waiting.into_iter().for_each(Waker::wake);
            }
            Hold::Pass(pass) => self.fence.leave(pass),
            Hold::Place(ticket) | Hold::Ticket { ticket, .. } => self.fence.release(ticket),
        }
    }

    fn find(&self, cdb: &[u8]) -> Result<(Cdb, &'static Spec), Sense> {
        let (cdb, spec) = Cdb::parse(cdb)?;
        if !self.has(spec.needs) {
            return Err(Sense::illegal(Code::OPERATION_CODE));
        }
        Ok((cdb, spec))
    }

    /// Whether the unit has what a command needs to exist.
    #[inline]
    pub(crate) fn has(&self, needs: Needs) -> bool {
        match needs {
            Needs::Nothing => true,
            Needs::Discard => self.config.discard.is_some(),
            Needs::Removable => self.config.removable,
            Needs::CompareAndWrite => self.config.max_compare_and_write_blocks > 0,
        }
    }

    /// Whether something stands in the command's way: a reservation before a unit attention (SAM-5, status precedence),
    /// that before what is wrong with the command (SAM-5, unit attention conditions), and only then a medium that is
    /// not ready.
    #[cold]
    fn hinder(&self, flags: Flags, found: Option<&(Cdb, &Spec)>, nexus: &Nexus) -> Result<(), Refusal> {
        let keeps_out = |(cdb, spec): &(Cdb, &Spec)| match spec.access {
            Access::Free => false,
            Access::Unit => flags.has(Flags::RESERVED),
            Access::Read => flags.has(Flags::NO_READ),
            Access::Write => flags.has(Flags::NO_WRITE),
            Access::Unless { byte, mask, is } => flags.has(Flags::NO_WRITE) && cdb.byte(byte) & mask != is,
        };
        if found.is_some_and(keeps_out) {
            return Err(Refusal::Conflict);
        }
        let run = found.map(|(_, spec)| spec.run);
        let exempt = matches!(run, Some(Run::Inquiry | Run::ReportLuns | Run::RequestSense));
        if flags.has(Flags::ATTENTION) && !exempt {
            let state = self.state();
            let attention = nexus.take_attention();
            drop(state);
            if let Some(sense) = attention {
                return Err(sense.into());
            }
        }
        match run {
            Some(run) if flags.has(Flags::NOT_READY) && needs_medium(run) => {
                self.not_ready().map_or(Ok(()), |sense| Err(sense.into()))
            }
            _ => Ok(()),
        }
    }

    /// Why the medium cannot be used, if it cannot.
    pub(crate) fn not_ready(&self) -> Option<Sense> {
        self.state().ejected.then(|| Sense::new(Key::NotReady, Code::NO_MEDIUM))
    }

    fn run(&self, run: Run, call: Call<'_>) -> Answer {
        call.command.touched = true;
        match run {
            Run::Read => self.read(call),
            Run::Write => self.write(call),
            Run::TestUnitReady => Ok(Step::good(0)),
            Run::SendDiagnostic => send_diagnostic(call),
            Run::RequestSense => self.request_sense(call),
            Run::Inquiry => self.inquiry(call),
            Run::ModeSelect => self.mode_select(call),
            Run::ModeSense => self.mode_sense(call),
            Run::StartStopUnit => self.start_stop_unit(call),
            Run::PreventAllow => self.prevent_allow(call),
            Run::ReadCapacity10 => self.read_capacity_10(call),
            Run::ReadCapacity16 => self.read_capacity_16(call),
            Run::WriteAndVerify => self.write_and_verify(call),
            Run::Verify => self.verify(call),
            Run::SynchronizeCache => self.synchronize_cache(call),
            Run::WriteSame => self.write_same(call),
            Run::Unmap => self.unmap(call),
            Run::CompareAndWrite => self.compare_and_write(call),
            Run::LogSense => log_sense(call),
            Run::ReserveIn => self.reserve_in(call),
            Run::ReserveOut => self.reserve_out(call),
            Run::ReserveUnit => self.reserve_unit(call),
            Run::ReleaseUnit => self.release_unit(call),
            Run::ReportLuns => report_luns(call),
            Run::ReportOpcodes => self.report_opcodes(call),
            Run::ReportTaskManagement => report_task_management(call),
        }
    }
}

impl Command {
    /// Whether it is under way, and no operation of it is out.
    fn is_waiting(&self) -> bool {
        self.out.is_none() && !matches!(self.admission, Admission::None)
    }
}

/// Whether a command is kept out whose nexus had been `preempted` so often when it began: by a reservation that there is,
/// or since another has preempted the nexus, which may have registered again.
#[inline]
pub(crate) fn is_fenced(nexus: &Nexus, preempted: u32) -> bool {
    nexus.flags().has(Flags::NO_WRITE) || nexus.preempted() != preempted
}

fn needs_medium(run: Run) -> bool {
    use Run::*;
    matches!(
        run,
        TestUnitReady
            | ReadCapacity10
            | ReadCapacity16
            | Read
            | Write
            | WriteAndVerify
            | Verify
            | SynchronizeCache
            | WriteSame
            | Unmap
            | CompareAndWrite
    )
}

#[cfg(test)]
mod tests;
