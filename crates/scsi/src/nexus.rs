//! The relation between an initiator's port and ours, as one logical unit sees it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, Ordering};

use strum::VariantArray;

use crate::config::name_of;
use crate::sense::{Code, Key, Sense};

/// Names an I_T nexus. It stays the same when the initiator goes away and comes back, and so do its registration and
/// reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NexusId {
    /// The initiator's port; 60 bits of it are shown to others, as part of a name.
    pub initiator: u64,
    /// The target's port, from 1: its relative port identifier.
    pub port: u16,
}

impl NexusId {
    /// The nexus of an initiator that is called `name`, always the same for the same name, with the first port.
    pub fn of_initiator(name: &str) -> Self {
        Self { initiator: name_of(name), port: 1 }
    }

    /// How long a TransportID is, in bytes.
    pub(crate) const TRANSPORT_ID_LEN: usize = 24;

    /// The initiator's TransportID. virtio has no format of its own; this is that of SAS (SPC-5, TransportID for SAS),
    /// with a locally assigned name.
    pub(crate) fn transport_id(self) -> [u8; Self::TRANSPORT_ID_LEN] {
        let mut id = [0; Self::TRANSPORT_ID_LEN];
        id[0] = 0x06;
        id[4..12].copy_from_slice(&(3 << 60 | self.initiator & !(0xf << 60)).to_be_bytes());
        id
    }
}

/// A unit attention condition (SAM-5), most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
#[repr(u16)]
pub enum Attention {
    /// The unit was not there before.
    PowerOn = 1 << 0,
    /// The unit was reset.
    UnitReset = 1 << 1,
    /// The nexus was lost, and is there again.
    NexusLoss = 1 << 2,
    /// Another nexus ended the commands of this one.
    CommandsCleared = 1 << 3,
    /// The target has other logical units than before.
    LunsChanged = 1 << 4,
    /// The medium has another size than before.
    CapacityChanged = 1 << 5,
    /// Another nexus changed a mode page.
    ModeChanged = 1 << 6,
    /// Another nexus took the reservation and all registrations away.
    ReservationsPreempted = 1 << 7,
    /// Another nexus took this one's registration away.
    RegistrationsPreempted = 1 << 8,
    /// Another nexus gave up the reservation.
    ReservationsReleased = 1 << 9,
}

impl Attention {
    const ALL: [Self; Self::VARIANTS.len()] = *Self::VARIANTS.first_chunk().expect("all of them");

    /// The bits of all of them.
    pub(crate) const MASK: u16 = (1 << Self::ALL.len()) - 1;

    /// The bits of those that come of a unit's being made and attached.
    pub(crate) const OF_ARRIVAL: u16 = Self::PowerOn as u16 | Self::LunsChanged as u16 | Self::CapacityChanged as u16;

    fn code(self) -> Code {
        match self {
            Self::PowerOn => Code::POWER_ON,
            Self::UnitReset => Code::UNIT_RESET,
            Self::NexusLoss => Code::NEXUS_LOSS,
            Self::CommandsCleared => Code::COMMANDS_CLEARED,
            Self::LunsChanged => Code::LUNS_CHANGED,
            Self::CapacityChanged => Code::CAPACITY_CHANGED,
            Self::ModeChanged => Code::MODE_CHANGED,
            Self::ReservationsPreempted => Code::RESERVATIONS_PREEMPTED,
            Self::RegistrationsPreempted => Code::REGISTRATIONS_PREEMPTED,
            Self::ReservationsReleased => Code::RESERVATIONS_RELEASED,
        }
    }
}

/// What stands in the way of a command: usually nothing, and that is one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flags(u8);

impl Flags {
    /// A unit attention is pending.
    pub(crate) const ATTENTION: u8 = 1 << 0;
    /// A reservation keeps reads out.
    pub(crate) const NO_READ: u8 = 1 << 1;
    /// A reservation keeps writes out.
    pub(crate) const NO_WRITE: u8 = 1 << 2;
    /// The medium is ejected.
    pub(crate) const NOT_READY: u8 = 1 << 3;
    /// A RESERVE keeps out what persistent reservations let pass.
    pub(crate) const RESERVED: u8 = 1 << 4;

    pub(crate) fn is_clear(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn has(self, bits: u8) -> bool {
        self.0 & bits != 0
    }
}

/// One I_T nexus of one logical unit, made by [`LogicalUnit::attach`](crate::LogicalUnit::attach) and shared by all of
/// the queues that the nexus has.
#[derive(Debug)]
pub struct Nexus {
    pub(crate) id: NexusId,
    flags: AtomicU8,
    /// The unit attentions that have not been reported.
    pending: AtomicU16,
    /// How often another has taken its registration away.
    preempted: AtomicU32,
    /// Whether nobody uses it any more.
    gone: AtomicBool,
}

impl Nexus {
    pub(crate) fn new(id: NexusId) -> Self {
        Self {
            id,
            flags: AtomicU8::new(0),
            pending: AtomicU16::new(0),
            preempted: AtomicU32::new(0),
            gone: AtomicBool::new(false),
        }
    }

    /// Its name.
    pub fn id(&self) -> NexusId {
        self.id
    }

    /// Both under the unit's lock.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    pub(crate) fn set_gone(&self, gone: bool) {
        self.gone.store(gone, Ordering::Relaxed);
    }

    /// `SeqCst`, because who has entered the fence looks here afterwards: see `WriteFence`.
    #[inline]
    pub(crate) fn flags(&self) -> Flags {
        Flags(self.flags.load(Ordering::SeqCst))
    }

    /// Sets the flags in `mask` as they are in `flags`.
    pub(crate) fn set_flags(&self, mask: u8, flags: u8) {
        self.flags.fetch_or(mask & flags, Ordering::SeqCst);
        self.flags.fetch_and(!mask | flags, Ordering::SeqCst);
    }

    /// How often another has taken its registration away.
    pub(crate) fn preempted(&self) -> u32 {
        self.preempted.load(Ordering::SeqCst)
    }

    /// Establishes a unit attention, for this nexus alone.
    pub fn attend(&self, attention: Attention) {
        if attention == Attention::RegistrationsPreempted {
            self.preempted.fetch_add(1, Ordering::SeqCst);
        }
        self.pending.fetch_or(attention as u16, Ordering::SeqCst);
        self.flags.fetch_or(Flags::ATTENTION, Ordering::SeqCst);
    }

    /// Takes the most urgent of the unit attentions, to report it.
    pub(crate) fn take_attention(&self) -> Option<Sense> {
        // Down before the look at what is pending: what comes after that raises it again.
        self.flags.fetch_and(!Flags::ATTENTION, Ordering::SeqCst);
        let pending = self.pending.load(Ordering::SeqCst);
        let first = Attention::ALL.into_iter().find(|a| pending & *a as u16 != 0)?;
        self.forget(first);
        Some(Sense::new(Key::UnitAttention, first.code()))
    }

    /// All unit attentions that have not been reported, as bits.
    pub(crate) fn attentions(&self) -> u16 {
        self.pending.load(Ordering::SeqCst)
    }

    /// Has these be the unit attentions to report, and no others.
    pub(crate) fn set_attentions(&self, attentions: u16) {
        self.pending.store(attentions, Ordering::SeqCst);
        self.set_flags(Flags::ATTENTION, if attentions == 0 { 0 } else { Flags::ATTENTION });
    }

    /// Clears one unit attention.
    pub(crate) fn forget(&self, attention: Attention) {
        self.flags.fetch_and(!Flags::ATTENTION, Ordering::SeqCst);
        let left = self.pending.fetch_and(!(attention as u16), Ordering::SeqCst) & !(attention as u16);
        if left != 0 {
            self.flags.fetch_or(Flags::ATTENTION, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SAM-5, unit attention conditions.
    #[test]
    fn unit_attentions_are_reported_one_by_one_and_once() {
        let nexus = Nexus::new(NexusId { initiator: 1, port: 1 });
        nexus.attend(Attention::CapacityChanged);
        nexus.attend(Attention::PowerOn);
        nexus.attend(Attention::CapacityChanged);
        assert!(nexus.flags().has(Flags::ATTENTION));
        assert_eq!(nexus.take_attention().unwrap().code, Code::POWER_ON);
        assert_eq!(nexus.take_attention().unwrap().code, Code::CAPACITY_CHANGED);
        assert!(nexus.flags().is_clear());
        assert_eq!(nexus.take_attention(), None);
        Attention::ALL.into_iter().rev().for_each(|attention| nexus.attend(attention));
        let told: Vec<_> = std::iter::from_fn(|| nexus.take_attention()).map(|sense| sense.code).collect();
        assert_eq!(told, Attention::ALL.map(Attention::code), "whichever came first");
    }

    #[test]
    fn flags_are_set_without_touching_others() {
        let nexus = Nexus::new(NexusId { initiator: 1, port: 1 });
        nexus.attend(Attention::PowerOn);
        nexus.set_flags(Flags::NO_READ | Flags::NO_WRITE, Flags::NO_WRITE);
        assert!(nexus.flags().has(Flags::NO_WRITE) && nexus.flags().has(Flags::ATTENTION));
        nexus.set_flags(Flags::NO_READ | Flags::NO_WRITE, 0);
        assert!(!nexus.flags().has(Flags::NO_WRITE | Flags::NO_READ) && nexus.flags().has(Flags::ATTENTION));
    }

    /// SPC-5, TransportID for initiator ports using SCSI over SAS.
    #[test]
    fn a_transport_id_names_the_initiator() {
        let id = NexusId { initiator: 0xf123, port: 2 }.transport_id();
        assert_eq!(id[..12], [6, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0xf1, 0x23]);
        assert_eq!(id[12..], [0; 12]);
        let most = NexusId { initiator: u64::MAX, port: 2 }.transport_id();
        assert_eq!(most[4..12], [0x3f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "NAA 3 whatever its name");
    }
}
