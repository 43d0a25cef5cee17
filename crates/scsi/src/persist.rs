//! PERSISTENT RESERVE IN and OUT, and RESERVE and RELEASE, which they have replaced.

use std::sync::Arc;
use std::task::Waker;

use crate::call::{Answer, Call};
use crate::command::{Admission, Hold};
use crate::kept::{Change, Outcome};
use crate::nexus::{Attention, NexusId};
use crate::reservations::{Effects, Refused, Reservations, Type};
use crate::sense::{Code, Key, Refusal, Sense};
use crate::step::Step;
use crate::unit::{LogicalUnit, State};

/// The length of PERSISTENT RESERVE OUT's basic parameter list, in bytes (SPC-5).
const LIST: usize = 24;
/// SPEC_I_PT, ALL_TG_PT and APTPL, in the list's byte 20: other initiators, other ports, and the next power on.
const SPEC_I_PT: u8 = 0x08;
const ALL_TG_PT: u8 = 0x04;
const APTPL: u8 = 0x01;

/// Service actions of PERSISTENT RESERVE OUT (SPC-5).
const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;

/// What a PERSISTENT RESERVE OUT asks for.
#[derive(Clone, Debug)]
pub(crate) struct ReserveOut {
    action: u8,
    /// `None` for one that there is not.
    kind: Option<Type>,
    /// Of one that registers: whether reservations are to outlast a loss of power.
    aptpl: Option<bool>,
    key: u64,
    new: u64,
}

impl ReserveOut {
    fn apply(&self, table: &mut Reservations, nexus: NexusId) -> Result<Effects, Refusal> {
        let Self { action, kind, aptpl, key, new } = *self;
        let was_registered = table.is_registered(nexus);
        let notices = match action {
            REGISTER => table.register(nexus, key, new),
            RESERVE => table.reserve(nexus, key, kind),
            RELEASE => table.release(nexus, key, kind),
            CLEAR => table.clear(nexus, key),
            PREEMPT | PREEMPT_AND_ABORT => table.preempt(nexus, key, new, kind),
            _ => Ok(table.register_anyway(nexus, new)),
        };
        let notices = notices.map_err(|refused| match refused {
            Refused::Conflict => Refusal::Conflict,
            Refused::NotThatOne => Sense::illegal(Code::INVALID_RELEASE).into(),
            Refused::ZeroKey => Sense::list(8).into(),
            Refused::NoSuchType => Sense::cdb(2).into(),
        })?;
        // Who was not registered and does not register has nothing happen (SPC-5, registering).
        if let Some(aptpl) = aptpl
            && (was_registered || table.is_registered(nexus))
        {
            table.aptpl = aptpl;
        }
        // Who is taken to be gone is not to keep the medium where it is (SBC-4, PREVENT ALLOW MEDIUM REMOVAL).
        let is_preempted = |attention: Attention| {
            matches!(attention, Attention::ReservationsPreempted | Attention::RegistrationsPreempted)
        };
        let preempted = notices.iter().filter(|(_, attention)| is_preempted(*attention)).map(|(nexus, _)| *nexus);
        let allow_removal = if matches!(action, CLEAR | PREEMPT_AND_ABORT) { preempted.collect() } else { Vec::new() };
        Ok(Effects { notices, allow_removal })
    }
}

impl LogicalUnit {
    /// PERSISTENT RESERVE IN (SPC-5).
    pub(crate) fn reserve_in(&self, call: Call<'_>) -> Answer {
        let Call { cdb, command, task, .. } = call;
        let data = &mut command.response;
        let state = self.state();
        if state.reservations.is_unit_reserved() {
            return Err(Refusal::Conflict);
        }
        match cdb.byte(1) & 0x1f {
            0 => read_keys(&state, data),
            1 => read_reservation(&state, data),
            2 => {
                // Length; RESERVE and RELEASE get along with it (CRH), and registering is through this port; whether it
                // can outlast a loss of power (PTPL_C), and does (PTPL_A); no say about which commands are allowed; every
                // type.
                let can_last = u8::from(state.keeping.keeper.is_some());
                data.extend([0, 8, 0x10 | can_last, 0x80 | can_last & u8::from(state.reservations.aptpl)]);
                data.extend(type_mask());
                data.extend([0, 0]);
            }
            _ => read_full_status(&state, data),
        }
        drop(state);
        command.respond(task, usize::from(cdb.u16(7)))
    }

    /// PERSISTENT RESERVE OUT (SPC-5).
    pub(crate) fn reserve_out(&self, call: Call<'_>) -> Answer {
        let Call { cdb, command, task, data } = call;
        if self.state().reservations.is_unit_reserved() {
            return Err(Refusal::Conflict);
        }
        let (action, scope, kind) = (cdb.byte(1) & 0x1f, cdb.byte(2) >> 4, cdb.byte(2) & 0xf);
        let len = cdb.u32(5) as usize;
        if len != LIST {
            return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH).into());
        }
        let list = command.take_list(task, data, LIST, LIST)?;
        let (keys, flags) = (&list, list[20]);
        let number = |at: usize| keys[at..at + 8].iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
        let (key, new) = (number(0), number(8));
        let aptpl = if matches!(action, RESERVE..=PREEMPT_AND_ABORT) {
            None
        } else {
            let knows = if self.state().keeping.keeper.is_some() { APTPL } else { 0 };
            let wrong = [(SPEC_I_PT, 3), (ALL_TG_PT, 2), (APTPL, 0)].into_iter();
            if let Some((_, bit)) = wrong.filter(|(mask, _)| mask & knows == 0).find(|(mask, _)| flags & mask != 0) {
                return Err(Sense::list(20).bit(bit).into());
            }
            Some(flags & APTPL != 0)
        };
        // Only whole logical units can be reserved. As with types, who reserves nothing may say what it likes.
        let kind = Type::of(kind).filter(|_| scope == 0);
        command.admission = Admission::Reserve(ReserveOut { action, kind, aptpl, key, new });
        Ok(self.start(command, task.nexus, task.waker))
    }

    /// Does what a PERSISTENT RESERVE OUT asks for, at once or, where the reservations are kept, when they are stored.
    /// Returns what is left to be waited for; `None`: it is not done yet, and `waker` is woken when it is worth another
    /// try.
    pub(crate) fn change_reservations(
        &self,
        asked: &ReserveOut,
        hold: &mut Hold,
        nexus: NexusId,
        waker: &Waker,
    ) -> Option<Result<Admission, Refusal>> {
        let then = if asked.action == PREEMPT_AND_ABORT { Admission::Quiet } else { Admission::None };
        let mut state = self.state();
        if let Hold::Change(outcome) = hold {
            match outcome.get() {
                Some(true) => return Some(Ok(then)),
                Some(false) => return Some(Err(Sense::new(Key::HardwareError, Code::TARGET_FAILURE).into())),
                None => {
                    state.keeping.wait(waker);
                    return None;
                }
            }
        }
        if !state.keeping.has_turn(hold, nexus, waker) {
            return None;
        }
        if state.reservations.is_unit_reserved() {
            return Some(Err(Refusal::Conflict));
        }
        let mut next = state.reservations.clone();
        let effects = match asked.apply(&mut next, nexus) {
            Ok(effects) => effects,
            Err(refusal) => return Some(Err(refusal)),
        };
        let Some(keeper) = state.keeping.keeper.clone() else {
            state.reservations = next;
            // First what keeps others out, then the wait for those who are within: see `WriteFence`.
            state.take(effects);
            return Some(Ok(then));
        };
        state.keeping.begin(waker);
        drop(state);
        let outcome = Outcome::default();
        *hold = Hold::Change(Arc::clone(&outcome));
        keeper.store(next.stored(), Change::new(Arc::clone(&self.state), next, effects, outcome));
        None
    }

    /// RESERVE (6) and (10) (SPC-2): the whole unit, for the nexus that asks.
    pub(crate) fn reserve_unit(&self, call: Call<'_>) -> Answer {
        self.change_holder(|table| table.reserve_unit(call.task.nexus.id()))
    }

    /// RELEASE (6) and (10) (SPC-2).
    pub(crate) fn release_unit(&self, call: Call<'_>) -> Answer {
        self.change_holder(|table| table.release_unit(call.task.nexus.id()))
    }

    fn change_holder(&self, change: impl FnOnce(&mut Reservations) -> Result<(), Refused>) -> Answer {
        let mut state = self.state();
        if !state.keeping.is_idle() {
            // Whoever registers is first, and keeps RESERVE and RELEASE out.
            return Err(Refusal::Conflict);
        }
        change(&mut state.reservations).map_err(|_| Refusal::Conflict)?;
        state.settle();
        Ok(Step::good(0))
    }
}

fn type_mask() -> [u8; 2] {
    // The bit of type n is bit n of the first byte, except that the last one is bit 0 of the second (SPC-5, REPORT
    // CAPABILITIES).
    let mask = Type::ALL.iter().fold(0_u16, |mask, kind| mask | 1 << *kind as u16);
    mask.to_le_bytes()
}

/// PRGENERATION, and the length of what follows it.
fn header(state: &State, data: &mut Vec<u8>, len: usize) {
    data.extend(state.reservations.generation().to_be_bytes());
    data.extend((len as u32).to_be_bytes());
}

/// READ KEYS (SPC-5).
fn read_keys(state: &State, data: &mut Vec<u8>) {
    let registrations = state.reservations.registrations();
    header(state, data, 8 * registrations.len());
    data.extend(registrations.iter().flat_map(|r| r.key.to_be_bytes()));
}

/// READ RESERVATION (SPC-5).
fn read_reservation(state: &State, data: &mut Vec<u8>) {
    let Some((kind, key)) = state.reservations.reservation() else { return header(state, data, 0) };
    header(state, data, 16);
    data.extend(key.to_be_bytes());
    data.extend([0, 0, 0, 0, 0, kind as u8, 0, 0]);
}

/// READ FULL STATUS (SPC-5).
fn read_full_status(state: &State, data: &mut Vec<u8>) {
    let table = &state.reservations;
    header(state, data, (24 + NexusId::TRANSPORT_ID_LEN) * table.registrations().len());
    for registration in table.registrations() {
        let nexus = registration.nexus;
        let held = table.reservation().filter(|_| table.holds(nexus));
        data.extend(registration.key.to_be_bytes());
        data.extend([0, 0, 0, 0, u8::from(held.is_some()), held.map_or(0, |(kind, _)| kind as u8), 0, 0, 0, 0]);
        data.extend(nexus.port.to_be_bytes());
        data.extend((NexusId::TRANSPORT_ID_LEN as u32).to_be_bytes());
        data.extend(nexus.transport_id());
    }
}

#[cfg(test)]
mod tests;
