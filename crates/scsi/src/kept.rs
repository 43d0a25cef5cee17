//! Persistent reservations that outlast the power: who stores them, and a change that waits until they are stored.
//!
//! A unit without a [`Keeper`] forgets its reservations with the power, and says so. With one, a change becomes a table of
//! its own, goes to the keeper, and takes effect when it is stored: what initiators are told has happened has outlasted the
//! power already. Changes are stored one at a time, and a command whose turn has not come waits.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Waker;

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
    /// Of the queues in which commands wait for that.
    waiting: Vec<Waker>,
}

impl Keeping {
    pub(crate) fn by(keeper: Option<Arc<dyn Keeper>>) -> Self {
        Self { keeper, ..Self::default() }
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
