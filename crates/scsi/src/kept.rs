//! Persistent reservations that outlast the power: who stores them, and a change that waits until they are stored.
//!
//! A unit without a [`Keeper`] forgets its reservations with the power, and says so. With one, a change becomes a table of
//! its own, goes to the keeper, and takes effect when it is stored: what initiators are told has happened has outlasted the
//! power already. Changes are stored one at a time, in the order in which their commands came: who is to be fenced cannot keep
//! that off by changes of its own.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Waker;

use crate::command::Hold;
use crate::nexus::NexusId;
use crate::reservations::{Notices, Reservations};
use crate::unit::State;

/// The persistent reservations of a unit, as they are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// Whether they are to outlast a loss of power, as the last who registered wanted it (APTPL).
    pub aptpl: bool,
    /// Who has registered, and which key.
    pub registrations: Vec<(NexusId, u64)>,
    /// The type of the reservation (SPC-5, persistent reservations type), and who has made it.
    pub reservation: Option<(u8, NexusId)>,
}

/// Stores the persistent reservations of one unit.
pub trait Keeper: Send + Sync + fmt::Debug {
    /// Begins to store a table in the place of the one before, and does not wait for that: any thread may be calling.
    /// [`Change::is_stored`] says from another thread when it is on stable storage. A unit asks for one table at a time.
    fn store(&self, table: Registered, change: Change);
}

/// A change of a unit's reservations that is being stored. Dropped, it has failed.
#[must_use = "initiators wait for it"]
pub struct Change {
    state: Arc<Mutex<State>>,
    /// What takes effect; `None` once it has.
    next: Option<(Reservations, Notices)>,
    outcome: Outcome,
}

/// Whether a change was stored, once that is known.
pub(crate) type Outcome = Arc<OnceLock<bool>>;

/// What the unit knows of its keeper.
#[derive(Debug, Default)]
pub(crate) struct Keeping {
    pub(crate) keeper: Option<Arc<dyn Keeper>>,
    /// Whether a change is being stored.
    pub(crate) busy: bool,
    /// The commands that wait for that, the oldest first, and a number for the next.
    line: VecDeque<u64>,
    next: u64,
    /// Of the queues in which they wait.
    waiting: Vec<Waker>,
}

impl Keeping {
    pub(crate) fn by(keeper: Option<Arc<dyn Keeper>>) -> Self {
        Self { keeper, ..Self::default() }
    }

    /// Whether nothing is being stored, and nobody waits to have something stored.
    pub(crate) fn is_idle(&self) -> bool {
        !self.busy && self.line.is_empty()
    }

    /// Whether it is the turn of who holds this, as always where nothing is stored; otherwise that holds a place from then on,
    /// and `waker` is woken when it is worth another try.
    pub(crate) fn has_turn(&mut self, hold: &mut Hold, waker: &Waker) -> bool {
        if self.keeper.is_none() {
            return true;
        }
        let Hold::Turn(turn) = *hold else {
            self.line.push_back(self.next);
            *hold = Hold::Turn(self.next);
            self.next += 1;
            return self.has_turn(hold, waker);
        };
        let has_turn = !self.busy && self.line.front() == Some(&turn);
        if !has_turn {
            self.wait(waker);
        }
        has_turn
    }

    /// Gives a place up. Returns who is to be woken.
    pub(crate) fn leave(&mut self, turn: u64) -> Vec<Waker> {
        self.line.retain(|other| *other != turn);
        std::mem::take(&mut self.waiting)
    }

    /// Whoever has the turn has something stored.
    pub(crate) fn begin(&mut self, waker: &Waker) {
        self.line.pop_front();
        self.busy = true;
        self.wait(waker);
    }

    pub(crate) fn wait(&mut self, waker: &Waker) {
        if !self.waiting.iter().any(|other| other.will_wake(waker)) {
            self.waiting.push(waker.clone());
        }
    }
}

impl Change {
    pub(crate) fn new(state: Arc<Mutex<State>>, next: Reservations, notices: Notices, outcome: Outcome) -> Self {
        Self { state, next: Some((next, notices)), outcome }
    }

    /// It is on stable storage, and takes effect.
    pub fn is_stored(mut self) {
        self.end(true);
    }

    fn end(&mut self, stored: bool) {
        let Some((next, notices)) = self.next.take() else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if stored {
            state.reservations = next;
            state.settle();
            state.tell(notices);
        }
        let _ = self.outcome.set(stored);
        state.keeping.busy = false;
        let waiting = std::mem::take(&mut state.keeping.waiting);
        // So that who is woken need not wait for the state.
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.end(false);
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Change").field("next", &self.next).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
