//! Errors that are injected on purpose: QEMU's `blkdebug`, as far as a raw disk has it.
//!
//! A request first raises the events that stand for what QEMU does on its behalf; each rule of an event may change the
//! state, or make an error active. Then the first active error that means the request is what becomes of it. As in QEMU
//! (block/blkdebug.c) an event with errors of its own takes those of other events back, an error of the event
//! `none` is active from the beginning, and of several new states of one event the first counts. What QEMU does on behalf of
//! a request is what it does for the raw format over `blkdebug`: a flush with nothing to flush comes no further than to the
//! format, so that no error strikes it.

#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use crate::geometry::SECTOR;
use crate::options::{DebugEvent, IoType};
use crate::request::{Op, Request};

impl IoType {
    const fn of(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write { .. } => Self::Write,
            Op::Flush => Self::Flush,
            Op::Discard => Self::Discard,
            Op::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }

    const fn events(self) -> &'static [DebugEvent] {
        match self {
            Self::Read => &[DebugEvent::ReadAio],
            Self::Write => &[DebugEvent::WriteAio, DebugEvent::Pwritev],
            Self::WriteZeroes => &[DebugEvent::PwritevZero],
            Self::Discard => &[],
            Self::Flush => &[DebugEvent::FlushToOs, DebugEvent::FlushToDisk],
        }
    }
}

/// An error to be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectError {
    /// What makes it active.
    pub event: DebugEvent,
    /// The state in which it does; any, if it is not said.
    pub state: Option<u32>,
    /// Which requests it is for; all, if it is not said.
    pub iotype: Option<IoType>,
    /// The error.
    pub errno: Errno,
    /// The sector of 512 bytes that a request must touch, if it must.
    pub sector: Option<u64>,
    /// Whether it strikes once.
    pub once: bool,
}

/// A change of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetState {
    /// What brings it about.
    pub event: DebugEvent,
    /// The state in which it does; any, if it is not said.
    pub state: Option<u32>,
    /// The state from then on.
    pub new_state: u32,
}

/// What is to go wrong on a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DebugRules {
    /// Errors.
    pub inject_error: Vec<InjectError>,
    /// States.
    pub set_state: Vec<SetState>,
}

/// A disk's rules, and how far they have come.
#[derive(Debug)]
pub(crate) struct Blkdebug {
    rules: DebugRules,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    state: u32,
    /// The errors that are active, by their places in the rules.
    active: Vec<usize>,
    /// Those that have struck once, and are over.
    over: Vec<usize>,
    /// Something was changed since the last flush.
    is_dirty: bool,
}

impl Blkdebug {
    /// `None` if nothing is to go wrong.
    pub(crate) fn new(rules: &DebugRules) -> Option<Self> {
        if rules.inject_error.is_empty() {
            return None;
        }
        let new = Self {
            rules: rules.clone(),
            progress: Mutex::new(Progress { state: 1, active: Vec::new(), over: Vec::new(), is_dirty: false }),
        };
        new.raise(&mut new.progress(), DebugEvent::None);
        Some(new)
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn raise(&self, progress: &mut Progress, event: DebugEvent) {
        let state = progress.state;
        let is_now = |at: DebugEvent, of: Option<u32>| at == event && of.is_none_or(|of| of == state);
        let errors = self.rules.inject_error.iter().enumerate();
        let struck = errors.filter(|(at, rule)| is_now(rule.event, rule.state) && !progress.over.contains(at));
        let active: Vec<usize> = struck.map(|(at, _)| at).collect();
        if !active.is_empty() {
            progress.active = active;
        }
        if let Some(rule) = self.rules.set_state.iter().find(|rule| is_now(rule.event, rule.state)) {
            progress.state = rule.new_state;
        }
    }

    /// The error that a request is to end with, if it is to. A guest that runs into errors on purpose may wait for a lock.
    pub(crate) fn strike(&self, request: &Request) -> Option<Errno> {
        let iotype = IoType::of(request.op);
        let mut progress = self.progress();
        if iotype == IoType::Flush && !progress.is_dirty {
            self.raise(&mut progress, DebugEvent::FlushToOs);
            return None;
        }
        for event in iotype.events() {
            self.raise(&mut progress, *event);
        }
        progress.is_dirty |= !matches!(iotype, IoType::Read | IoType::Flush);
        let sector = u64::from(SECTOR);
        let touched = request.offset / sector..(request.offset + request.len).div_ceil(sector);
        let means = |at: &usize| {
            let rule = &self.rules.inject_error[*at];
            rule.iotype.is_none_or(|of| of == iotype) && rule.sector.is_none_or(|sector| touched.contains(&sector))
        };
        let Some(at) = progress.active.iter().copied().find(means) else {
            progress.is_dirty &= iotype != IoType::Flush;
            return None;
        };
        let rule = self.rules.inject_error[at];
        if rule.once {
            progress.active.retain(|other| *other != at);
            progress.over.push(at);
        }
        Some(rule.errno)
    }
}

#[cfg(test)]
mod tests {
    use egret_vring::memory::Lent;

    use super::*;
    use crate::request::RequestToken;

    const WRITE: Op = Op::Write { fua: false };
    const ERROR: InjectError =
        InjectError { event: DebugEvent::None, state: None, iotype: None, errno: Errno::IO, sector: None, once: false };

    /// The errors of requests for these sectors, one after the other.
    fn struck(inject_error: &[InjectError], set_state: &[SetState], asked: &[(Op, u64)]) -> Vec<Option<Errno>> {
        let rules = DebugRules { inject_error: inject_error.to_vec(), set_state: set_state.to_vec() };
        let blkdebug = Blkdebug::new(&rules).unwrap();
        let strike = |&(op, sector): &(Op, u64)| {
            let len = if op == Op::Flush { 0 } else { 1024 };
            let (buffers, token) = (Lent::default(), RequestToken(0));
            blkdebug.strike(&Request { op, offset: 512 * sector, len, buffers, token })
        };
        asked.iter().map(strike).collect()
    }

    #[test]
    fn an_error_strikes_the_requests_that_it_is_for() {
        const EIO: Option<Errno> = Some(Errno::IO);
        let asked =
            [(Op::Read, 0), (WRITE, 0), (WRITE, 6), (Op::Flush, 0), (Op::WriteZeroes { unmap: true, fua: false }, 7)];
        let cases = [
            (ERROR, [EIO; 5]),
            (InjectError { iotype: Some(IoType::Write), ..ERROR }, [None, EIO, EIO, None, None]),
            (InjectError { iotype: Some(IoType::Flush), ..ERROR }, [None, None, None, EIO, None]),
            (InjectError { sector: Some(7), ..ERROR }, [None, None, EIO, None, EIO]),
            // Between what they touch, and behind all of it.
            (InjectError { sector: Some(3), ..ERROR }, [None; 5]),
            (InjectError { sector: Some(9), ..ERROR }, [None; 5]),
            (InjectError { once: true, ..ERROR }, [EIO, None, None, None, None]),
            (InjectError { event: DebugEvent::WriteAio, ..ERROR }, [None, EIO, EIO, EIO, EIO]),
            (InjectError { event: DebugEvent::FlushToDisk, once: true, ..ERROR }, [None, None, None, EIO, None]),
            (InjectError { event: DebugEvent::PwritevZero, ..ERROR }, [None, None, None, None, EIO]),
            (InjectError { state: Some(2), ..ERROR }, [None; 5]),
            (
                InjectError { errno: Errno::NOSPC, event: DebugEvent::Pwritev, iotype: Some(IoType::Read), ..ERROR },
                [None; 5],
            ),
        ];
        for (error, expected) in cases {
            assert_eq!(struck(&[error], &[], &asked), expected, "{error:?}");
        }
    }

    #[test]
    fn states_say_which_errors_an_event_makes_active_and_those_take_back_what_others_did() {
        let read = |state, errno| InjectError { event: DebugEvent::ReadAio, state: Some(state), errno, ..ERROR };
        let set = |state, new_state| SetState { event: DebugEvent::FlushToOs, state: Some(state), new_state };
        let asked =
            [(WRITE, 0), (Op::Read, 0), (WRITE, 0), (Op::Flush, 0), (Op::Read, 0), (Op::Flush, 0), (Op::Read, 0)];
        let always = InjectError { iotype: Some(IoType::Write), ..ERROR };
        assert_eq!(
            struck(
                &[always, InjectError { iotype: Some(IoType::Read), ..read(2, Errno::NOSPC) }],
                &[set(1, 2), set(2, 3)],
                &asked
            ),
            [Some(Errno::IO), None, Some(Errno::IO), None, Some(Errno::NOSPC), None, Some(Errno::NOSPC)]
        );
    }

    #[test]
    fn of_the_new_states_of_one_event_the_first_counts() {
        let set = |new_state| SetState { event: DebugEvent::WriteAio, state: None, new_state };
        let read = |state, errno| InjectError { event: DebugEvent::ReadAio, state: Some(state), errno, ..ERROR };
        let errors = [read(2, Errno::NOSPC), read(3, Errno::IO)];
        assert_eq!(struck(&errors, &[set(2), set(3)], &[(WRITE, 0), (Op::Read, 0)]), [None, Some(Errno::NOSPC)]);
    }

    #[test]
    fn a_write_raises_first_that_of_the_format_and_then_that_of_blkdebug_itself() {
        let of = |event, state, errno| InjectError { event, state, errno, ..ERROR };
        let (format, itself) = (DebugEvent::WriteAio, DebugEvent::Pwritev);
        let errors = [of(format, None, Errno::IO), of(itself, None, Errno::NOSPC)];
        assert_eq!(struck(&errors, &[], &[(WRITE, 0)]), [Some(Errno::NOSPC)]);
        let set = [SetState { event: format, state: None, new_state: 2 }];
        assert_eq!(struck(&[of(itself, Some(2), Errno::IO)], &set, &[(WRITE, 0)]), [Some(Errno::IO)]);
    }

    #[test]
    fn a_flush_with_nothing_to_flush_is_struck_by_nothing_and_raises_only_what_comes_before() {
        const EIO: Option<Errno> = Some(Errno::IO);
        let set = [SetState { event: DebugEvent::FlushToOs, state: None, new_state: 2 }];
        let of = |event| InjectError { event, ..ERROR };
        let flushed = InjectError { iotype: Some(IoType::Flush), ..ERROR };
        for change in [WRITE, Op::Discard, Op::WriteZeroes { unmap: false, fua: false }] {
            let asked = [(Op::Flush, 0), (Op::Read, 0), (change, 0), (Op::Flush, 0), (Op::Flush, 0), (Op::Read, 0)];
            // One that fails has flushed nothing.
            assert_eq!(struck(&[flushed], &[], &asked), [None, None, None, EIO, EIO, None]);
            let once = InjectError { once: true, ..flushed };
            assert_eq!(struck(&[once], &[], &[&asked[2..5], &asked[..2]].concat()), [None, EIO, None, None, None]);
            let read = InjectError { iotype: Some(IoType::Read), ..of(DebugEvent::FlushToDisk) };
            assert_eq!(struck(&[read], &[], &asked), [None, None, None, None, None, EIO]);
            let read = InjectError { state: Some(2), ..of(DebugEvent::ReadAio) };
            assert_eq!(struck(&[read], &set, &asked[..2]), [None, EIO]);
            // One that has succeeded leaves nothing to the next.
            let later = InjectError { iotype: Some(IoType::Flush), ..of(DebugEvent::ReadAio) };
            let asked = [(change, 0), (Op::Flush, 0), (Op::Read, 0), (Op::Flush, 0)];
            assert_eq!(struck(&[later], &[], &asked), [None; 4]);
        }
    }
}
