//! Reservations: who has registered, who has reserved, and what that keeps others from.
//!
//! There are two kinds, and one logical unit has either, never both: persistent reservations (SPC-5), and those that
//! RESERVE makes and RELEASE ends (SPC-2), which keep everything out and are gone after a reset.
//!
//! Nothing here knows a CDB. Every service action returns the unit attentions that it establishes.

use strum::VariantArray;

use crate::kept::Registered;
use crate::nexus::{Attention, Flags, NexusId};
use crate::state::{UnitState, UnitStateError};

/// What a reservation keeps others from (SPC-5, persistent reservations type).
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
#[repr(u8)]
pub(crate) enum Type {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrants = 5,
    ExclusiveAccessRegistrants = 6,
    WriteExclusiveAll = 7,
    ExclusiveAccessAll = 8,
}

impl Type {
    pub(crate) const ALL: [Self; Self::VARIANTS.len()] = *Self::VARIANTS.first_chunk().expect("all of them");

    pub(crate) fn of(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as u8 == code)
    }

    /// Whether every registrant holds it.
    fn is_for_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// Whether registrants have access that do not hold it.
    fn admits_registrants(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    fn keeps_reads_out(self) -> bool {
        matches!(self, Self::ExclusiveAccess | Self::ExclusiveAccessRegistrants | Self::ExclusiveAccessAll)
    }
}

/// A nexus that has registered a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) nexus: NexusId,
    pub(crate) key: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reservation {
    kind: Type,
    /// For the types that are for all registrants, whoever made it.
    holder: NexusId,
}

/// Why a service action is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// RESERVATION CONFLICT.
    Conflict,
    /// There is a reservation, but not the one to release.
    NotThatOne,
    /// No key to preempt.
    ZeroKey,
    /// Not a type that a reservation can have.
    NoSuchType,
}

/// Unit attentions, and for whom.
pub(crate) type Notices = Vec<(NexusId, Attention)>;

/// What a change does to nexuses, beside what stands in the table.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    pub(crate) notices: Notices,
    /// Those who prevent the medium's removal no more.
    pub(crate) allow_removal: Vec<NexusId>,
}

/// The registrations and reservations of one logical unit.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reservations {
    generation: u32,
    /// Whether persistent ones outlast a loss of power, where there is who stores them (APTPL).
    pub(crate) aptpl: bool,
    registrations: Vec<Registration>,
    held: Option<Reservation>,
    /// Who has reserved the unit by RESERVE; nobody is registered then.
    unit_holder: Option<NexusId>,
}

impl Reservations {
    /// What was stored; `None` if there cannot be such a table.
    pub(crate) fn restore(stored: &Registered) -> Option<Self> {
        let Registered { aptpl, registrations, reservation } = stored;
        let mut table = Self { aptpl: *aptpl, ..Self::default() };
        for &(nexus, key) in registrations {
            if key == 0 || table.is_registered(nexus) {
                return None;
            }
            table.registrations.push(Registration { nexus, key });
        }
        if let Some((kind, holder)) = *reservation {
            let kind = Type::of(kind)?;
            let is_held = if kind.is_for_all() { !registrations.is_empty() } else { table.is_registered(holder) };
            table.held = Some(Reservation { kind, holder }).filter(|_| is_held);
            table.held?;
        }
        Some(table)
    }

    /// What is to be stored of it: what RESERVE has reserved is not.
    pub(crate) fn stored(&self) -> Registered {
        Registered {
            aptpl: self.aptpl,
            registrations: self.registrations.iter().map(|r| (r.nexus, r.key)).collect(),
            reservation: self.held.map(|held| (held.kind as u8, held.holder)),
        }
    }

    /// PRGENERATION: how often the registrations have changed.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn registrations(&self) -> &[Registration] {
        &self.registrations
    }

    /// Type and key of the reservation; the key is zero where every registrant holds it.
    pub(crate) fn reservation(&self) -> Option<(Type, u64)> {
        let held = self.held?;
        let key = if held.kind.is_for_all() { None } else { self.key_of(held.holder) };
        Some((held.kind, key.unwrap_or(0)))
    }

    pub(crate) fn is_registered(&self, nexus: NexusId) -> bool {
        self.key_of(nexus).is_some()
    }

    /// Whether it is a holder of the reservation.
    pub(crate) fn holds(&self, nexus: NexusId) -> bool {
        self.held.is_some_and(
            |held| {
                if held.kind.is_for_all() { self.is_registered(nexus) } else { held.holder == nexus }
            },
        )
    }

    /// What the reservation keeps this nexus from, as `Flags`.
    pub(crate) fn denied(&self, nexus: NexusId) -> u8 {
        if self.unit_holder.is_some_and(|holder| holder != nexus) {
            return Flags::NO_READ | Flags::NO_WRITE | Flags::RESERVED;
        }
        let Some(held) = self.held else { return 0 };
        if self.admits(nexus, held) {
            return 0;
        }
        if held.kind.keeps_reads_out() { Flags::NO_READ | Flags::NO_WRITE } else { Flags::NO_WRITE }
    }

    /// REGISTER (SPC-5, registering): `key` is the one that it has now, zero for none, and `new` the one to have, zero
    /// to unregister.
    pub(crate) fn register(&mut self, nexus: NexusId, key: u64, new: u64) -> Result<Notices, Refused> {
        if self.key_of(nexus).unwrap_or(0) != key {
            return Err(Refused::Conflict);
        }
        Ok(self.register_anyway(nexus, new))
    }

    /// REGISTER AND IGNORE EXISTING KEY (SPC-5, registering).
    pub(crate) fn register_anyway(&mut self, nexus: NexusId, new: u64) -> Notices {
        match self.registrations.iter_mut().find(|r| r.nexus == nexus) {
            None if new == 0 => return Vec::new(),
            None => self.registrations.push(Registration { nexus, key: new }),
            Some(registration) if new != 0 => registration.key = new,
            Some(_) => {
                self.generation = self.generation.wrapping_add(1);
                return self.unregister(nexus);
            }
        }
        self.generation = self.generation.wrapping_add(1);
        Vec::new()
    }

    /// RESERVE (SPC-5, reserving).
    pub(crate) fn reserve(&mut self, nexus: NexusId, key: u64, kind: Option<Type>) -> Result<Notices, Refused> {
        self.check(nexus, key)?;
        let kind = kind.ok_or(Refused::NoSuchType)?;
        match self.held {
            None => self.held = Some(Reservation { kind, holder: nexus }),
            Some(held) if held.kind == kind && self.holds(nexus) => {}
            Some(_) => return Err(Refused::Conflict),
        }
        Ok(Vec::new())
    }

    /// RELEASE (SPC-5, releasing a persistent reservation).
    pub(crate) fn release(&mut self, nexus: NexusId, key: u64, kind: Option<Type>) -> Result<Notices, Refused> {
        self.check(nexus, key)?;
        match self.held {
            Some(held) if self.holds(nexus) => {
                if kind != Some(held.kind) {
                    return Err(Refused::NotThatOne);
                }
                self.held = None;
                Ok(self.released(held.kind, nexus))
            }
            _ => Ok(Vec::new()),
        }
    }

    /// CLEAR (SPC-5, clearing).
    pub(crate) fn clear(&mut self, nexus: NexusId, key: u64) -> Result<Notices, Refused> {
        self.check(nexus, key)?;
        self.generation = self.generation.wrapping_add(1);
        self.held = None;
        let others = self.registrations.drain(..).filter(|r| r.nexus != nexus);
        Ok(others.map(|r| (r.nexus, Attention::ReservationsPreempted)).collect())
    }

    /// PREEMPT, and of PREEMPT AND ABORT what is not aborting (SPC-5, preempting persistent reservations and removing
    /// registrations): removes the registrations with `victim`'s key, and takes the reservation over if it is theirs.
    pub(crate) fn preempt(
        &mut self,
        nexus: NexusId,
        key: u64,
        victim: u64,
        kind: Option<Type>,
    ) -> Result<Notices, Refused> {
        self.check(nexus, key)?;
        let takes_over = match self.held {
            Some(held) if held.kind.is_for_all() => victim == 0,
            Some(held) => self.key_of(held.holder) == Some(victim),
            None => false,
        };
        if let (true, Some(before)) = (takes_over, self.held) {
            let kind = kind.ok_or(Refused::NoSuchType)?;
            let everybody = before.kind.is_for_all();
            let mut notices = self.remove(nexus, |r| r.nexus != nexus && (everybody || r.key == victim));
            self.held = Some(Reservation { kind, holder: nexus });
            if kind != before.kind {
                // Whatever type the old one was: others may do more now, or less.
                notices.extend(self.released_for_others(nexus));
            }
            self.generation = self.generation.wrapping_add(1);
            return Ok(notices);
        }
        if victim == 0 {
            return Err(Refused::ZeroKey);
        }
        if !self.registrations.iter().any(|r| r.key == victim) {
            return Err(Refused::Conflict);
        }
        let mut notices = self.remove(nexus, |r| r.key == victim);
        self.generation = self.generation.wrapping_add(1);
        if self.registrations.is_empty() {
            // Only a reservation for all registrants can have lost its last holder here.
            if let Some(held) = self.held.take() {
                notices.extend(self.released(held.kind, nexus));
            }
        }
        Ok(notices)
    }

    /// RESERVE (SPC-2, RESERVE(10) command).
    pub(crate) fn reserve_unit(&mut self, nexus: NexusId) -> Result<(), Refused> {
        if self.is_managed_for(nexus)? {
            return Ok(());
        }
        if self.unit_holder.is_some_and(|holder| holder != nexus) {
            return Err(Refused::Conflict);
        }
        self.unit_holder = Some(nexus);
        Ok(())
    }

    /// RELEASE (SPC-2, RELEASE(10) command): good, too, where there is nothing to release or it is another's.
    pub(crate) fn release_unit(&mut self, nexus: NexusId) -> Result<(), Refused> {
        if !self.is_managed_for(nexus)? {
            self.lose(nexus);
        }
        Ok(())
    }

    /// Whether RESERVE has reserved the unit: there are no persistent reservations then, not even to be looked at, and
    /// not even for who has reserved it (SPC-2, reservations overview).
    pub(crate) fn is_unit_reserved(&self) -> bool {
        self.unit_holder.is_some()
    }

    /// A nexus is lost or was reset. What it has registered stays.
    pub(crate) fn lose(&mut self, nexus: NexusId) {
        self.unit_holder.take_if(|holder| *holder == nexus);
    }

    /// The unit was reset. What was registered stays.
    pub(crate) fn reset(&mut self) {
        self.unit_holder = None;
    }

    /// Whether a persistent reservation gives the nexus already what RESERVE would, and RELEASE would not take away
    /// (SPC-4, exceptions to SPC-2 RESERVE and RELEASE behavior). Where it does not and anybody is registered, there is
    /// no RESERVE and no RELEASE (SPC-2, reservations overview).
    fn is_managed_for(&self, nexus: NexusId) -> Result<bool, Refused> {
        match self.held {
            Some(held) if self.admits(nexus, held) => Ok(true),
            _ if self.registrations.is_empty() => Ok(false),
            _ => Err(Refused::Conflict),
        }
    }

    /// Whether the nexus may do what it likes in spite of a reservation.
    fn admits(&self, nexus: NexusId, held: Reservation) -> bool {
        self.holds(nexus) || held.kind.admits_registrants() && self.is_registered(nexus)
    }

    /// Whether RESERVE has reserved the unit for this nexus.
    pub(crate) fn has_reserved_unit(&self, nexus: NexusId) -> bool {
        self.unit_holder == Some(nexus)
    }

    /// A nexus goes on with what this table, which was kept, has of it, and with what no table keeps.
    pub(crate) fn go_on(&mut self, nexus: NexusId, saved: &UnitState) -> Result<(), UnitStateError> {
        self.lose(nexus);
        if saved.reserved {
            self.reserve_unit(nexus).map_err(|_| UnitStateError::Reserved)?;
        }
        // Who has seen a generation takes the same one for the same registrations.
        self.generation = self.generation.max(saved.generation);
        Ok(())
    }

    /// Puts what a nexus had elsewhere in the place of what it has.
    pub(crate) fn take_over(&mut self, nexus: NexusId, saved: &UnitState) -> Result<(), UnitStateError> {
        let mut new = self.clone();
        new.registrations.retain(|r| r.nexus != nexus);
        // One that is for all registrants stays while there are others, whoever made it; and goes with the last of them.
        let is_alone = new.registrations.is_empty();
        new.held.take_if(|held| if held.kind.is_for_all() { is_alone } else { held.holder == nexus });
        new.unit_holder.take_if(|holder| *holder == nexus);
        if saved.key != 0 {
            if new.registrations.is_empty() {
                new.aptpl = saved.aptpl;
            }
            new.generation =
                if new.registrations.is_empty() { saved.generation } else { new.generation.wrapping_add(1) };
            // Where it was: a table that says the same need not be stored anew.
            let before = self.registrations.iter().position(|r| r.nexus == nexus);
            let at = before.unwrap_or(new.registrations.len());
            new.registrations.insert(at, Registration { nexus, key: saved.key });
        }
        let is_theirs = match saved.held {
            Some(kind) if new.held.is_none_or(|held| held.kind == kind && kind.is_for_all()) => {
                new.held.get_or_insert(Reservation { kind, holder: nexus });
                false
            }
            Some(_) => true,
            None => false,
        };
        if saved.reserved && new.unit_holder.is_none() {
            new.unit_holder = Some(nexus);
        } else if saved.reserved {
            return Err(UnitStateError::Reserved);
        }
        // A unit has either kind of reservations.
        if is_theirs || new.unit_holder.is_some() && !new.registrations.is_empty() {
            return Err(UnitStateError::Reserved);
        }
        *self = new;
        Ok(())
    }

    pub(crate) fn key_of(&self, nexus: NexusId) -> Option<u64> {
        self.registrations.iter().find(|r| r.nexus == nexus).map(|r| r.key)
    }

    /// Whether the nexus is registered with that key (SPC-5, basic PERSISTENT RESERVE OUT parameter list).
    fn check(&self, nexus: NexusId, key: u64) -> Result<(), Refused> {
        if self.key_of(nexus) == Some(key) { Ok(()) } else { Err(Refused::Conflict) }
    }

    /// Removes one's own registration, and the reservation if there is no holder any more (SPC-5, unregistering).
    fn unregister(&mut self, nexus: NexusId) -> Notices {
        let held = self.held.filter(|_| self.holds(nexus));
        self.registrations.retain(|r| r.nexus != nexus);
        match held {
            Some(held) if !held.kind.is_for_all() || self.registrations.is_empty() => {
                self.held = None;
                self.released(held.kind, nexus)
            }
            _ => Vec::new(),
        }
    }

    /// Removes registrations; those of others are told.
    fn remove(&mut self, nexus: NexusId, doomed: impl Fn(&Registration) -> bool) -> Notices {
        let mut notices = Vec::new();
        self.registrations.retain(|r| {
            let goes = doomed(r);
            if goes && r.nexus != nexus {
                notices.push((r.nexus, Attention::RegistrationsPreempted));
            }
            !goes
        });
        notices
    }

    /// Whom the end of a reservation of that type concerns: the other registrants, if it was one they had part in.
    fn released(&self, kind: Type, nexus: NexusId) -> Notices {
        if kind.admits_registrants() { self.released_for_others(nexus) } else { Vec::new() }
    }

    fn released_for_others(&self, nexus: NexusId) -> Notices {
        let others = self.registrations.iter().filter(|r| r.nexus != nexus);
        others.map(|r| (r.nexus, Attention::ReservationsReleased)).collect()
    }
}

#[cfg(test)]
mod tests;
