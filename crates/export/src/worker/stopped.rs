//! A queue whose export is stopped for an error: what it keeps meanwhile, and how it goes on.
//!
//! ```text
//!   completion ─failed, to wait─▶ failed ─┐  resumed
//!   push ────────────────────────▶ new ───┴──────────▶ the engines, in this order
//! ```
//!
//! The requests stay in flight, in the ring and in its record. They are the queue's and no disk's, so that a queue may
//! move, or get another disk, and takes them along. A queue that is drained for good leaves them to the record, from
//! which they are taken in again; where there is no record they are tried once more, and their guest is told how they
//! ended.
//!
//! Nobody waits for what is kept: its model lets go of whatever others wait for, and takes it again, in its turn, before the
//! request goes on. So what goes on may be another request of the same command, or none.
//!
//! None of this runs while the export is not stopped and nothing fails.

use std::mem;
use std::sync::Arc;

use egret_disk::{Action, Completion, EngineSet, FailedRequest, Failure, Op, Request, RequestToken};
use egret_event_loop::{Nanos, Turn};
use egret_virtio::{DiskKey, Next};
use egret_vring::memory::Buffers;

use super::{Leave, Phase, QueueWorker};
use crate::errors::{Hold, IoStatus};

/// How often a queue tries whether there is space again.
const TRY_EVERY: Nanos = Nanos::from_millis(1000);

/// What a queue keeps while its export is stopped.
#[derive(Default)]
pub(super) struct Stopped {
    /// It keeps what comes. It may be so after the export was resumed, until the queue goes on; and before it knows that
    /// the export is stopped it is not.
    pub(super) is: bool,
    /// The queue is drained for good.
    pub(super) leaving: Option<Leave>,
    /// Requests that failed.
    failed: Vec<Kept>,
    /// There for as long as some of those are, or the one that is tried.
    hold: Option<Hold>,
    /// Requests that came meanwhile.
    new: Vec<Kept>,
    /// The request that is tried before the others.
    probe: Option<Probe>,
    /// When the next one is.
    pub(super) probe_at: Nanos,
}

/// A request that is tried: with its command if that begins again.
struct Probe {
    head: u16,
    /// What had failed.
    failed: Op,
    /// What is out.
    out: Op,
}

type Kept = (DiskKey, Request<Buffers>);

impl Stopped {
    /// By head, whether its request is kept.
    pub(super) fn kept_heads(&self, size: u16) -> Vec<bool> {
        let mut kept = vec![false; size.into()];
        for (_, request) in self.failed.iter().chain(&self.new) {
            kept[usize::from(request.token.slot())] = true;
        }
        kept
    }

    fn len(&self) -> usize {
        self.failed.len() + self.new.len()
    }

    /// Lets the export go on, as far as this queue is concerned, if it has nothing left of what failed.
    fn let_go_if_none_failed(&mut self) {
        if self.failed.is_empty() && self.probe.is_none() {
            self.hold = None;
        }
    }

    /// Whether a request is pushed though the queue keeps what comes.
    #[cold]
    pub(super) fn lets_pass(&mut self, request: &Request<Buffers>) -> bool {
        let is_it = |probe: &&mut Probe| probe.head == request.token.slot();
        self.probe.as_mut().filter(is_it).map(|probe| probe.out = request.op).is_some()
    }
}

impl QueueWorker {
    /// Keeps a request that was to be pushed.
    #[cold]
    pub(super) fn keep(&mut self, key: DiskKey, mut request: Request<Buffers>) {
        self.model.suspend(&mut request);
        self.stopped.new.push((key, request));
        self.count_kept();
    }

    /// Looks at a request that has ended, which failed or did so while the queue is stopped. Returns its completion if it
    /// is one for the guest.
    #[cold]
    pub(super) fn judge(
        &mut self,
        mut completion: Completion<Buffers>,
        failed: Option<Box<FailedRequest>>,
        now: Nanos,
    ) -> Option<Completion<Buffers>> {
        let head = completion.token.slot();
        let probe = self.stopped.probe.take_if(|probe| probe.head == head);
        let failed = failed.and_then(|failed| Some((self.disks.key_of(failed.slot)?, failed)));
        let Some((key, failed)) = failed else {
            match probe {
                // It has done again what comes before what had failed. That may be stable now, and was not to be before.
                Some(probe) if mem::discriminant(&probe.out) != mem::discriminant(&probe.failed) => {
                    self.stopped.probe = Some(probe);
                }
                Some(_) => {
                    self.errors.find_space();
                    self.stopped.let_go_if_none_failed();
                }
                None => {}
            }
            return Some(completion);
        };
        let is_for_guest = self.gives_up() || self.model.is_aborted(head);
        // Whatever was asked for: to tell the guest would be to say that the disk is bad, and it is another's.
        let wanted = if self.is_lost(key) { Action::Stop } else { self.errors.policy.action(&failed) };
        let action = match wanted {
            Action::Stop if is_for_guest => Action::Report,
            // What a command was to look at is not there.
            Action::Ignore if failed.op == Op::Read && completion.buffers.is_own() => Action::Report,
            action => action,
        };
        let FailedRequest { op, offset, len, errno, .. } = *failed;
        if action == Action::Stop {
            if self.errors.stop(errno, &mut self.stopped.hold) {
                self.note(key, op, errno, action);
            }
            self.stopped.is = true;
            self.stopped.probe_at = now + TRY_EVERY;
            let Completion { token, buffers, .. } = completion;
            // What is tried before the others was the first of them, and stays it.
            let at = if probe.is_some() { 0 } else { self.stopped.failed.len() };
            let mut request = Request { op, offset, len, buffers, token };
            self.model.suspend(&mut request);
            self.stopped.failed.insert(at, (key, request));
            self.count_kept();
            return None;
        }
        self.note(key, op, errno, action);
        if action == Action::Ignore {
            completion.result = Ok(());
        }
        if probe.is_some() {
            self.stopped.let_go_if_none_failed();
        }
        Some(completion)
    }

    fn note(&self, DiskKey(key): DiskKey, op: Op, errno: rustix::io::Errno, action: Action) {
        if let Some(Some(disk)) = self.disks.all.get(key as usize) {
            let (export, has_lost_writes) = (Arc::clone(&self.errors.export), disk.has_lost_writes());
            disk.note_failure(Failure { export, op, errno, action, has_lost_writes });
        }
    }

    fn is_lost(&self, DiskKey(key): DiskKey) -> bool {
        matches!(self.disks.all.get(key as usize), Some(Some(disk)) if disk.is_lost())
    }

    /// Whether requests that fail are for the guest, whatever was asked for: nobody comes who could try them again. That
    /// is so without a record, and where what is written is logged: then the guest moves to a machine that is not
    /// given the record, unless it is said to be.
    pub(super) fn gives_up(&self) -> bool {
        let is_lost = |leave| match leave {
            Leave::Nothing => !self.queue.has_record() || self.queue.memory().log().is_some(),
            Leave::NotBegun => !self.queue.has_record(),
        };
        self.phase == Phase::Broken || self.stopped.leaving.is_some_and(is_lost)
    }

    /// Keeps what no engine has begun, and what is to come: all of it is left to the record.
    pub(super) fn withdraw(&mut self, engines: &mut EngineSet) {
        self.stopped.is = true;
        for key in (0..self.disks.slots.len() as u32).map(DiskKey) {
            let Some(slot) = self.disks.slot(key) else { continue };
            for Request { op, offset, len, buffers, token } in engines.withdraw(slot) {
                let buffers = self.queue.take_back(buffers);
                self.keep(key, Request { op, offset, len, buffers, token });
            }
        }
        for (key, request) in mem::take(&mut self.follow_ups) {
            self.keep(key, request);
        }
    }

    /// Finds out whether the export is stopped still. If so, the queue has itself woken when it goes on, and tries one
    /// request now and then if that may help; if not, all that was kept goes to the engines.
    #[cold]
    pub(super) fn attend_stop(&mut self, engines: &mut EngineSet, turn: &mut Turn) {
        let is_stopped = self.errors.is_stopped();
        self.stopped.is = !self.gives_up()
            && match self.phase {
                Phase::Running => is_stopped,
                // A queue that was found drained stays so until it is told to go on.
                Phase::Stopping | Phase::Broken => is_stopped || self.stopped.is,
            };
        if !self.stopped.is {
            return self.release(engines, turn.now());
        }
        self.end_kept(turn.now());
        // One that stops is dispatched when it is to go on, and is not to hear of an export that has been resumed, or never
        // was stopped: it would be woken at once, again and again, for as long as its disk hangs.
        if self.phase == Phase::Running
            && let Some(alarm) = &self.alarm
        {
            self.errors.wake_when_resumed(self.info.index, Arc::clone(alarm).into());
        }
        if self.phase == Phase::Running && self.errors.status() == IoStatus::NoSpace {
            self.probe(engines, turn);
        }
    }

    fn probe(&mut self, engines: &mut EngineSet, turn: &mut Turn) {
        if self.stopped.probe.is_some() || self.stopped.failed.is_empty() {
            return;
        }
        if turn.now() >= self.stopped.probe_at {
            let (key, request) = self.stopped.failed.remove(0);
            self.stopped.probe = Some(Probe { head: request.token.slot(), failed: request.op, out: request.op });
            self.stopped.probe_at = turn.now() + TRY_EVERY;
            self.is_taken_up(request.token.slot(), turn.now());
            self.take_up(engines, key, request, turn.now());
            self.end_kept(turn.now());
        }
        if self.stopped.probe.is_none() && !self.stopped.failed.is_empty() {
            self.wake_at(turn, self.stopped.probe_at);
        }
    }

    /// Has everything that was kept run: what failed, and then what came later.
    fn release(&mut self, engines: &mut EngineSet, now: Nanos) {
        // One that is tried is among those that had failed, and how it ends shows nothing any more.
        self.stopped.probe = None;
        let failed = mem::take(&mut self.stopped.failed);
        // Where it gives up, and no other queue has what failed, the others must not wait for what these would have shown.
        self.stopped.hold = None;
        let new = mem::take(&mut self.stopped.new);
        for (key, request) in failed.into_iter().chain(new) {
            self.is_taken_up(request.token.slot(), now);
            self.take_up(engines, key, request, now);
        }
        self.count_kept();
    }

    /// Goes on with a request that was put off: now, or when those have ended that came in between.
    pub(super) fn take_up(&mut self, engines: &mut EngineSet, key: DiskKey, request: Request<Buffers>, now: Nanos) {
        // As for completions.
        self.check_truncation();
        match self.model.readmit(self.queue.memory(), key, request) {
            Next::Submit(key, request) => self.push_again(engines, key, request, now),
            next => self.go_on(next, now),
        }
    }

    /// Pushes what comes from before: from another loop, perhaps.
    pub(super) fn push_again(
        &mut self,
        engines: &mut EngineSet,
        key: DiskKey,
        mut request: Request<Buffers>,
        now: Nanos,
    ) {
        request.token = RequestToken::new(self.source, request.token.slot());
        self.push(engines, key, request, now);
    }

    /// Ends requests that were kept and that nothing is to become of: their driver has aborted them, or their disk is gone.
    /// If none is left then of those that had failed, in no queue, the export goes on.
    fn end_kept(&mut self, now: Nanos) {
        let queue = &self.queue;
        self.stopped.probe.take_if(|probe| !queue.is_in_flight(probe.head));
        let (model, disks) = (&self.model, &self.disks);
        let ends = |(key, request): &mut Kept| model.is_aborted(request.token.slot()) || disks.slot(*key).is_none();
        let mut ended: Vec<Kept> = self.stopped.failed.extract_if(.., ends).collect();
        ended.extend(self.stopped.new.extract_if(.., ends));
        for (_, Request { token, buffers, .. }) in ended {
            self.refuse(token, buffers, rustix::io::Errno::NODEV, now);
        }
        self.stopped.let_go_if_none_failed();
        self.count_kept();
    }

    /// Whether all that is in flight is kept, or waits for what is: no disk has any of it.
    pub(super) fn keeps_all(&self) -> bool {
        let kept = self.stopped.len() + self.model.waiting();
        self.stopped.is && !self.gives_up() && usize::from(self.queue.in_flight()) == kept
    }

    /// Whether all that is in flight are functions whose commands other queues have left to the record: those are left with
    /// them.
    pub(super) fn leaves_all(&self) -> bool {
        self.stopped.leaving.is_some() && usize::from(self.queue.in_flight()) == self.model.left()
    }

    /// Leaves what is kept to the record of what is in flight, and lets go of functions: nobody looks at them here any more.
    pub(crate) fn let_go(&mut self) {
        self.model.let_go();
        if self.queue.in_flight() == 0 {
            return;
        }
        self.stopped = Stopped::default();
        self.count_kept();
        self.counters.in_flight.set(0);
    }

    fn count_kept(&self) {
        self.counters.waiting.set(self.stopped.len() as u64);
    }
}
