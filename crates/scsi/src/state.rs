//! What one nexus has of a logical unit, for another process to go on with: a guest that is migrated takes it along.
//!
//! | bytes | hold, little-endian |
//! |---|---|
//! | 0..8 | how many blocks there are |
//! | 8..16 | the key that the nexus has registered; 0 if none |
//! | 16..20 | PRGENERATION |
//! | 20..22 | its unit attentions: bits, as of [`Attention`] |
//! | 22 | bits: write cache, write protection, prevents removal, RESERVE, holds the persistent reservation, APTPL, ejected |
//! | 23 | that reservation's type |
//! | 24..32 | zeroes |

use std::sync::Arc;

use thiserror::Error;

use crate::kept::{Change, Outcome};
use crate::nexus::{Attention, NexusId};
use crate::reservations::{Effects, Reservations, Type};
use crate::unit::{LogicalUnit, State};

const WRITE_CACHE: u8 = 1 << 0;
const WRITE_PROTECT: u8 = 1 << 1;
const PREVENTS: u8 = 1 << 2;
const RESERVED: u8 = 1 << 3;
const HOLDS: u8 = 1 << 4;
const APTPL: u8 = 1 << 5;
const EJECTED: u8 = 1 << 6;
const BITS: u8 = (1 << 7) - 1;

/// What a nexus has of a unit. What others have of it is theirs, and stays where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitState {
    pub(crate) blocks: u64,
    pub(crate) key: u64,
    pub(crate) generation: u32,
    pub(crate) attentions: u16,
    pub(crate) write_cache: bool,
    pub(crate) write_protect: bool,
    pub(crate) prevents: bool,
    /// By RESERVE.
    pub(crate) reserved: bool,
    /// The persistent reservation, if the nexus holds it.
    pub(crate) held: Option<Type>,
    /// Whether what is registered is to outlast a loss of power.
    pub(crate) aptpl: bool,
    pub(crate) ejected: bool,
}

/// Where a nexus was that goes on with what it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Here, with a daemon that has ended since: what is stored of reservations is stored for both, and is newer.
    Here,
    /// With another target, from which it takes along what it had.
    Elsewhere,
}

/// Why a state is none, or cannot be gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnitStateError {
    /// A field that no unit writes so.
    #[error("a {0} that there is not")]
    Field(&'static str),
    /// Another nexus has reserved the unit here.
    #[error("another initiator has reserved the unit here")]
    Reserved,
    /// A change of the unit's reservations is being stored.
    #[error("another initiator's change of the unit's reservations is being stored here")]
    Busy,
}

impl UnitState {
    /// How long it is.
    pub const BYTES: usize = 32;

    /// As it is handed over.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let bits = [
            (WRITE_CACHE, self.write_cache),
            (WRITE_PROTECT, self.write_protect),
            (PREVENTS, self.prevents),
            (RESERVED, self.reserved),
            (HOLDS, self.held.is_some()),
            (APTPL, self.aptpl),
            (EJECTED, self.ejected),
        ];
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.key.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.generation.to_le_bytes());
        bytes[20..22].copy_from_slice(&self.attentions.to_le_bytes());
        bytes[22] = bits.into_iter().filter(|(_, is_set)| *is_set).map(|(bit, _)| bit).sum();
        bytes[23] = self.held.map_or(0, |kind| kind as u8);
        bytes
    }

    /// Reads one that was handed over.
    ///
    /// # Errors
    ///
    /// [`UnitStateError::Field`].
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self, UnitStateError> {
        let number = |at: usize, len: usize| {
            bytes[at..at + len].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let (key, attentions, bits) = (number(8, 8), number(20, 2) as u16, bytes[22]);
        let has = |bit| bits & bit != 0;
        if bits & !BITS != 0 {
            return Err(UnitStateError::Field("flag"));
        }
        if attentions & !Attention::MASK != 0 {
            return Err(UnitStateError::Field("unit attention"));
        }
        if number(24, 8) != 0 {
            return Err(UnitStateError::Field("field"));
        }
        let held = match (has(HOLDS), Type::of(bytes[23])) {
            (false, None) if bytes[23] == 0 => None,
            // A reservation is a registrant's, and RESERVE makes none beside registrations.
            (true, Some(kind)) if key != 0 => Some(kind),
            _ => return Err(UnitStateError::Field("reservation")),
        };
        if has(RESERVED) && key != 0 {
            return Err(UnitStateError::Field("reservation"));
        }
        Ok(Self {
            blocks: number(0, 8),
            key,
            generation: number(16, 4) as u32,
            attentions,
            write_cache: has(WRITE_CACHE),
            write_protect: has(WRITE_PROTECT),
            prevents: has(PREVENTS),
            reserved: has(RESERVED),
            held,
            aptpl: has(APTPL),
            ejected: has(EJECTED),
        })
    }
}

impl LogicalUnit {
    /// What a nexus has of the unit, which is to be attached. No command of its is in progress.
    pub fn save(&self, id: NexusId) -> UnitState {
        let state = self.state();
        let attentions = state.nexus(id).map_or(0, |nexus| nexus.attentions());
        let reservations = &state.reservations;
        UnitState {
            blocks: self.blocks(),
            key: reservations.key_of(id).unwrap_or(0),
            generation: reservations.generation(),
            attentions,
            write_cache: self.told(&state).write_cache,
            write_protect: self.write_protect(),
            prevents: state.preventing.contains(&id),
            reserved: reservations.has_reserved_unit(id),
            held: reservations.reservation().filter(|_| reservations.holds(id)).map(|(kind, _)| kind),
            aptpl: reservations.aptpl,
            ejected: state.ejected,
        }
    }

    /// Whether [`restore`](Self::restore) would work.
    ///
    /// # Errors
    ///
    /// [`UnitStateError::Reserved`], [`UnitStateError::Busy`].
    pub fn check(&self, id: NexusId, saved: &UnitState, origin: Origin) -> Result<(), UnitStateError> {
        self.state().taken_over(id, saved, origin).map(drop)
    }

    /// Goes on with what a nexus had of the same unit, instead of what it has now. If the unit has another size now, the nexus
    /// is told.
    ///
    /// What all nexuses share stays as it is here while there are others, but for what would take away what this one relies
    /// on: writes that are not cached, or are refused. Who was [here](Origin::Here) before, where reservations are kept, has of
    /// them what is kept, which others may have changed since; and is told what others do to it before it goes on.
    ///
    /// # Errors
    ///
    /// [`UnitStateError::Reserved`], [`UnitStateError::Busy`]. Nothing has changed.
    pub fn restore(&self, id: NexusId, saved: &UnitState, origin: Origin) -> Result<(), UnitStateError> {
        let mut state = self.state();
        let reservations = state.taken_over(id, saved, origin)?;
        let table = Some(reservations.stored()).filter(|table| *table != state.reservations.stored());
        state.reservations = reservations.clone();
        let is_preempted = saved.key != 0 && !state.reservations.is_registered(id);
        state.preventing.retain(|other| *other != id);
        // Who was preempted is not to keep the medium where it is, either.
        if saved.prevents && !is_preempted {
            state.preventing.push(id);
        }
        if !saved.write_cache {
            self.turn_cache_off(&mut state, id);
        }
        self.set_write_protect(saved.write_protect || self.write_protect());
        if state.is_alone(id) {
            state.ejected = saved.ejected && self.config.removable;
        }
        state.settle();
        if let Some(nexus) = state.nexus(id) {
            let since = match origin {
                Origin::Here => nexus.attentions() & !Attention::OF_ARRIVAL,
                Origin::Elsewhere => 0,
            };
            nexus.set_attentions(saved.attentions | since);
            if is_preempted {
                nexus.attend(Attention::RegistrationsPreempted);
            }
            if saved.blocks != self.blocks() {
                nexus.attend(Attention::CapacityChanged);
            }
        }
        // It holds from here on: nobody waits for it to be stored, and changes that follow do.
        if let (Some(keeper), Some(table)) = (state.keeping.keeper.clone(), table) {
            state.keeping.busy = true;
            drop(state);
            let change = Change::new(Arc::clone(&self.state), reservations, Effects::default(), Outcome::default());
            keeper.store(table, change);
        }
        Ok(())
    }
}

impl State {
    /// The reservations, with what a nexus had in the place of what it has.
    fn taken_over(&self, id: NexusId, saved: &UnitState, origin: Origin) -> Result<Reservations, UnitStateError> {
        let is_known = origin == Origin::Here && self.keeping.keeper.is_some();
        // What is being stored takes the place of these.
        if self.keeping.busy && (saved.reserved || !is_known) {
            return Err(UnitStateError::Busy);
        }
        let mut reservations = self.reservations.clone();
        if is_known {
            reservations.go_on(id, saved)?
        } else {
            reservations.take_over(id, saved)?
        }
        Ok(reservations)
    }
}

#[cfg(test)]
mod tests;
