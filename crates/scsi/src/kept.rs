//! Persistent reservations that outlast the power: who stores them, and a change that waits until they are stored.
//!
//! A unit without a [`Keeper`] forgets its reservations with the power, and says so. With one, a change becomes a table of
//! its own, goes to the keeper, and takes effect when it is stored: what initiators are told has happened has outlasted the
//! power already. Changes are stored one at a time. Nexuses have their turns, and each one's changes are stored in the order
//! in which their commands came: who is to be fenced cannot keep that off by changes of its own, however many of them wait.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Waker;

use crate::command::Hold;
use crate::nexus::NexusId;
use crate::reservations::{Effects, Reservations};
use crate::unit::State;
use crate::write_fence;

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
    next: Option<(Reservations, Effects)>,
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
    /// The commands that wait for that: those of each nexus that has any, and the nexuses in the order of their turns. And a
    /// number for the next command.
    line: VecDeque<(NexusId, BTreeSet<u64>)>,
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

    /// Whether it is the turn of who holds this, a command of `nexus`, as always where nothing is stored; otherwise that holds
    /// a place from then on, and `waker` is woken when it is worth another try.
    pub(crate) fn has_turn(&mut self, hold: &mut Hold, nexus: NexusId, waker: &Waker) -> bool {
        if self.keeper.is_none() {
            return true;
        }
        let Hold::Turn(turn) = *hold else {
            *hold = Hold::Turn(self.line_up(nexus));
            return self.has_turn(hold, nexus, waker);
        };
        let has_turn = !self.busy && self.first() == Some(turn);
        if !has_turn {
            self.wait(waker);
        }
        has_turn
    }

    fn line_up(&mut self, nexus: NexusId) -> u64 {
        let turn = self.next;
        self.next += 1;
        match self.line.iter_mut().find(|(other, _)| *other == nexus) {
            Some((_, turns)) => _ = turns.insert(turn),
            None => self.line.push_back((nexus, BTreeSet::from([turn]))),
        }
        turn
    }

    fn first(&self) -> Option<u64> {
        self.line.front().and_then(|(_, turns)| turns.first().copied())
    }

    /// Gives a place up. Returns who is to be woken.
    pub(crate) fn leave(&mut self, turn: u64) -> Vec<Waker> {
        // Behind the first nobody has waited for it.
        if self.step_out(turn) { std::mem::take(&mut self.waiting) } else { Vec::new() }
    }

    /// Whoever has the turn has something stored.
    pub(crate) fn begin(&mut self, waker: &Waker) {
        if let Some(first) = self.first() {
            self.step_out(first);
        }
        self.busy = true;
        self.wait(waker);
    }

    /// Takes a command out of the line. Whether it was the first: then its nexus has had its turn, whatever came of it.
    fn step_out(&mut self, turn: u64) -> bool {
        let was_first = self.first() == Some(turn);
        for (_, turns) in &mut self.line {
            turns.remove(&turn);
        }
        if was_first {
            self.line.rotate_left(1);
        }
        self.line.retain(|(_, turns)| !turns.is_empty());
        was_first
    }

    pub(crate) fn wait(&mut self, waker: &Waker) {
        write_fence::wait(&mut self.waiting, waker);
    }
}

impl Change {
    pub(crate) fn new(state: Arc<Mutex<State>>, next: Reservations, effects: Effects, outcome: Outcome) -> Self {
        Self { state, next: Some((next, effects)), outcome }
    }

    /// It is on stable storage, and takes effect.
    pub fn is_stored(mut self) {
        self.end(true);
    }

    fn end(&mut self, stored: bool) {
        let Some((next, effects)) = self.next.take() else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if stored {
            state.reservations = next;
            state.take(effects);
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
