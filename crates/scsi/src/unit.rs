//! A logical unit: what its nexuses share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use crate::config::{ConfigError, LunConfig};
use crate::kept::{Keeper, Keeping, Registered};
use crate::nexus::{Attention, Flags, Nexus, NexusId};
use crate::reservations::{Effects, Notices, Reservations};
use crate::write_fence::WriteFence;

/// A logical unit: a disk as SCSI has it.
///
/// Every queue of every nexus shares it. It does no I/O; see the [crate's documentation](crate) for what to do with it.
#[derive(Debug)]
pub struct LogicalUnit {
    pub(crate) config: LunConfig,
    /// How many logical blocks there are.
    blocks: AtomicU64,
    /// Whether writes may stay in a cache (WCE).
    write_cache: AtomicBool,
    /// Whether initiators are told so.
    reports_write_cache: AtomicBool,
    /// Whether an initiator has all writes refused (SWP).
    write_protect: AtomicBool,
    /// As `state`, shared with one that takes its place.
    pub(crate) fence: Arc<WriteFence>,
    /// Shared with a change of the reservations that is being stored.
    pub(crate) state: Arc<Mutex<State>>,
}

/// What changes, and rarely.
#[derive(Debug)]
pub(crate) struct State {
    nexuses: Vec<Arc<Nexus>>,
    pub(crate) reservations: Reservations,
    pub(crate) keeping: Keeping,
    /// Whether the medium cannot be used until it is loaded.
    pub(crate) ejected: bool,
    /// How often the write cache has been turned off, and after how many of these times it has been flushed.
    pub(crate) turned_off: u64,
    pub(crate) flushed: u64,
    /// Who prevents the medium's removal.
    pub(crate) preventing: Vec<NexusId>,
}

impl LogicalUnit {
    /// A unit that nobody has seen yet.
    ///
    /// # Errors
    ///
    /// What is wrong with `config`.
    pub fn new(config: LunConfig) -> Result<Self, ConfigError> {
        Self::with(config, Reservations::default(), None)
    }

    /// A unit whose persistent reservations outlast a loss of power: those that there are, and who stores what becomes of
    /// them.
    ///
    /// # Errors
    ///
    /// What is wrong with `config`, or that there cannot be such reservations.
    pub fn kept(config: LunConfig, registered: &Registered, keeper: Arc<dyn Keeper>) -> Result<Self, ConfigError> {
        let reservations = Reservations::restore(registered).ok_or(ConfigError::Reservations)?;
        Self::with(config, reservations, Some(keeper))
    }

    fn with(
        config: LunConfig,
        reservations: Reservations,
        keeper: Option<Arc<dyn Keeper>>,
    ) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            blocks: AtomicU64::new(config.capacity_bytes / u64::from(config.logical_block_bytes)),
            write_cache: AtomicBool::new(config.write_cache),
            reports_write_cache: AtomicBool::new(config.write_cache),
            write_protect: AtomicBool::new(false),
            fence: Arc::default(),
            state: Arc::new(Mutex::new(State {
                nexuses: Vec::new(),
                reservations,
                keeping: Keeping::by(keeper),
                ejected: false,
                turned_off: 0,
                flushed: 0,
                preventing: Vec::new(),
            })),
            config,
        })
    }

    /// The same unit, of whose disk something else is known now, for when nobody has it: with other limits, and the same blocks.
    /// What initiators have left, reservations and commands under way among it, both have; and it is [powered
    /// on](Self::power_on).
    ///
    /// # Errors
    ///
    /// What is wrong with `config`.
    pub fn anew(&self, config: LunConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let new = Self {
            blocks: self.blocks().into(),
            write_cache: config.write_cache.into(),
            reports_write_cache: config.write_cache.into(),
            write_protect: false.into(),
            fence: Arc::clone(&self.fence),
            state: Arc::clone(&self.state),
            config,
        };
        new.power_on(new.config.capacity_bytes);
        Ok(new)
    }

    /// What it was made of. The capacity and the write cache may have changed since.
    pub fn config(&self) -> &LunConfig {
        &self.config
    }

    /// The nexus of that name, as it was left, or a new one, that will be told of the power on (SAM-5, unit attention
    /// conditions).
    pub fn attach(&self, id: NexusId) -> Arc<Nexus> {
        let mut state = self.state();
        if let Some(nexus) = state.nexuses.iter().find(|n| n.id == id) {
            nexus.set_gone(false);
            return nexus.clone();
        }
        let nexus = Arc::new(Nexus::new(id));
        nexus.attend(Attention::PowerOn);
        state.nexuses.push(nexus.clone());
        state.settle();
        nexus
    }

    /// Forgets a nexus that will not come back, but not before it has no key registered any more: a registration outlasts
    /// connections (SPC-5). Who still has it must not use it any more.
    pub fn detach(&self, id: NexusId) {
        let mut state = self.state();
        state.preventing.retain(|n| *n != id);
        state.reservations.lose(id);
        if let Some(nexus) = state.nexus(id) {
            nexus.set_gone(true);
        }
        state.forget();
        state.settle();
    }

    /// Has `waker` woken whenever a command begins to wait for others', on whatever nexus. It is for who may have operations that
    /// wait for long before a disk has them, as for its limits: some of these may be [what is waited for](Self::holds_up).
    pub fn add_holder(&self, waker: Waker) {
        self.fence.add_holder(waker);
    }

    /// Takes such a waker back, once.
    pub fn remove_holder(&self, waker: &Waker) {
        self.fence.remove_holder(waker);
    }

    /// LOGICAL UNIT RESET (SAM-5): everything is as after power on, except for persistent reservations and the write
    /// cache, and every nexus is told. Commands that are under way are the caller's, who aborts them first.
    ///
    /// The write cache stays as it is because an initiator that has turned it off no longer flushes, and may not look
    /// again whether it is still off.
    pub fn reset(&self) {
        let mut state = self.state();
        state.preventing.clear();
        state.reservations.reset();
        state.ejected = false;
        self.set_write_protect(false);
        state.settle();
        state.attend(Attention::UnitReset, None);
    }

    /// Nobody has had the unit for a while: everything is as when it was new, except for persistent reservations and for
    /// its size, which is `bytes` now.
    pub fn power_on(&self, bytes: u64) {
        self.reset();
        let mut state = self.state();
        state.flushed = state.turned_off;
        self.set_write_cache(&state, self.config.write_cache);
        drop(state);
        self.set_capacity(bytes);
    }

    /// I_T NEXUS RESET (SAM-5): what the nexus has reserved by RESERVE is free, what it prevents is allowed. The caller
    /// aborts its commands first.
    pub fn reset_nexus(&self, id: NexusId) {
        let mut state = self.state();
        state.preventing.retain(|n| *n != id);
        state.reservations.lose(id);
        state.settle();
        state.tell(vec![(id, Attention::NexusLoss)]);
    }

    /// The initiator was reset, or has gone. For a unit that no other nexus uses this is a [reset](Self::reset);
    /// otherwise others go on with the unit as it is, and only this nexus is [lost](Self::reset_nexus). Commands are the
    /// caller's, as there.
    pub fn reset_initiator(&self, id: NexusId) {
        let is_alone = self.state().is_alone(id);
        if is_alone { self.reset() } else { self.reset_nexus(id) }
    }

    /// Whether a key is registered, by whomever: whoever has one, and whoever has none any more, relies on it.
    pub fn is_registered(&self) -> bool {
        !self.state().reservations.registrations().is_empty()
    }

    /// Tells every nexus that something has changed, except for the one that has done it.
    pub fn attend(&self, attention: Attention, except: Option<NexusId>) {
        self.state().attend(attention, except);
    }

    /// Changes the size, in bytes, and tells every nexus if that makes a difference. Returns whether it does.
    pub fn set_capacity(&self, bytes: u64) -> bool {
        let blocks = bytes / self.block();
        let changed = self.blocks.swap(blocks, Ordering::SeqCst) != blocks;
        if changed {
            self.attend(Attention::CapacityChanged, None);
        }
        changed
    }

    /// How many logical blocks there are.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Whether writes may stay in a cache until a flush.
    #[inline]
    pub fn write_cache(&self) -> bool {
        // `SeqCst`, because who has entered the fence looks here afterwards: see `look_again`.
        self.write_cache.load(Ordering::SeqCst)
    }

    /// Whether initiators are told that there is a write cache, which they are as long as something may be in it.
    #[inline]
    pub fn reports_write_cache(&self) -> bool {
        self.reports_write_cache.load(Ordering::Relaxed)
    }

    pub(crate) fn set_write_cache(&self, state: &State, on: bool) {
        self.write_cache.store(on, Ordering::SeqCst);
        self.reports_write_cache.store(self.told(state).write_cache, Ordering::Relaxed);
    }

    /// As [`restore`](Self::restore) does where the cache was off and nothing else is known.
    pub fn go_on_without_cache(&self, id: NexusId) {
        self.turn_cache_off(&mut self.state(), id);
    }

    /// Goes on without a write cache, though there may be something in it: before anybody is told, somebody has to flush.
    pub fn go_on_with_stable_writes(&self) {
        let mut state = self.state();
        if self.write_cache() {
            state.turned_off += 1;
            self.set_write_cache(&state, false);
        }
    }

    /// Goes on without a write cache for a nexus that has been without one elsewhere, and so has nothing in it. Of others that
    /// is not known: before they are told somebody has to flush.
    pub(crate) fn turn_cache_off(&self, state: &mut State, id: NexusId) {
        if self.write_cache() {
            state.turned_off += 1;
            // Nor is it known of who has gone.
            if state.is_only(id) {
                state.flushed = state.turned_off;
            }
            self.set_write_cache(state, false);
        }
    }

    /// Whether all writes are refused because an initiator wants it so.
    #[inline]
    pub(crate) fn write_protect(&self) -> bool {
        // As for the write cache.
        self.write_protect.load(Ordering::SeqCst)
    }

    pub(crate) fn set_write_protect(&self, on: bool) {
        self.write_protect.store(on, Ordering::SeqCst);
    }

    /// Bytes of a logical block.
    #[inline]
    pub(crate) fn block(&self) -> u64 {
        u64::from(self.config.logical_block_bytes)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Works out what stands in every nexus's way: kept ready, because every command asks.
    pub(crate) fn settle(&mut self) {
        let not_ready = if self.ejected { Flags::NOT_READY } else { 0 };
        for nexus in &self.nexuses {
            let mask = Flags::NO_READ | Flags::NO_WRITE | Flags::RESERVED | Flags::NOT_READY;
            nexus.set_flags(mask, self.reservations.denied(nexus.id) | not_ready);
        }
    }

    pub(crate) fn set_ejected(&mut self, ejected: bool) {
        self.ejected = ejected;
        self.settle();
    }

    pub(crate) fn nexus(&self, id: NexusId) -> Option<&Nexus> {
        self.nexuses.iter().find(|nexus| nexus.id == id).map(|nexus| &**nexus)
    }

    /// Whether nobody else has the unit, nor has left anything registered.
    fn is_only(&self, id: NexusId) -> bool {
        self.nexuses.iter().all(|nexus| nexus.id == id)
    }

    /// Whether nobody else uses the unit: who has gone has nothing there but a registration.
    pub(crate) fn is_alone(&self, id: NexusId) -> bool {
        self.nexuses.iter().all(|nexus| nexus.id == id || nexus.is_gone())
    }

    pub(crate) fn attend(&self, attention: Attention, except: Option<NexusId>) {
        for nexus in self.nexuses.iter().filter(|n| Some(n.id) != except) {
            nexus.attend(attention);
        }
    }

    /// Has a change of the reservations take effect, which is in the table.
    pub(crate) fn take(&mut self, Effects { notices, allow_removal }: Effects) {
        self.preventing.retain(|nexus| !allow_removal.contains(nexus));
        self.settle();
        self.tell(notices);
    }

    /// Tells those whom a change of the reservations is about, and then forgets who has gone: commands of theirs may wait,
    /// and are fenced by it.
    pub(crate) fn tell(&mut self, notices: Notices) {
        for (id, attention) in notices {
            if let Some(nexus) = self.nexus(id) {
                nexus.attend(attention);
            }
        }
        self.forget();
    }

    fn forget(&mut self) {
        self.nexuses.retain(|nexus| !nexus.is_gone() || self.reservations.is_registered(nexus.id));
    }
}
