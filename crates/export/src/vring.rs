//! One vring: what its front-end has said of it, and the state that this puts it in.
//!
//! ```text
//!                SET_VRING_KICK             enabled, and its addresses are known
//!   Stopped ─────────────────────▶ Started ────────────────────────────────────▶ Running
//!      ▲                             │ ▲                                            │
//!      └────── GET_VRING_BASE ───────┘ └─── disabled, another kick, other memory ───┘
//! ```
//!
//! The states are those of vhost-user, "Ring states": a ring is started or stopped, and apart from that enabled or
//! disabled; it is processed while it is started and enabled. A ring that runs has a worker, which has its descriptors.

#![forbid(unsafe_code)]

use crate::peer_fd::PeerFd;
use crate::protocol::RingAt;
use crate::worker::{AtRest, VringFds};

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Stopped,
    Started,
    Running,
}

/// What there is to do for a vring, now that its front-end has changed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Start,
    Stop,
    Nothing,
}

/// A ring that runs was to be described anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Runs;

/// One vring of a session.
#[derive(Default)]
pub(crate) struct Vring {
    state: State,
    enabled: bool,
    size: u16,
    addresses: Option<RingAt>,
    /// By which address what is written to its used ring is logged, if it is to be.
    log: Option<u64>,
    /// Where it goes on, if it was told or has run.
    base: Option<u32>,
    /// The descriptors, unless it runs.
    fds: VringFds,
    /// It has run, and its base is where it stopped.
    has_run: bool,
    /// When it ran last, since it was started, it left requests to the record of what is in flight.
    has_left: bool,
}

impl Vring {
    pub(crate) fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// Whether it is started, and does not run.
    pub(crate) fn is_started(&self) -> bool {
        self.state == State::Started
    }

    /// Whether it runs, or does as soon as nothing is in the way.
    pub(crate) fn is_to_run(&self) -> bool {
        self.state != State::Stopped && self.enabled && self.addresses.is_some()
    }

    /// Whether its front-end has enabled it.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn addresses(&self) -> Option<RingAt> {
        self.addresses
    }

    pub(crate) fn base(&self) -> Option<u32> {
        self.base
    }

    pub(crate) fn has_run(&self) -> bool {
        self.has_run
    }

    /// Whether it has run since SET_VRING_KICK, and left requests to the record of what is in flight when it stopped. QEMU
    /// disables a ring before it asks for the base.
    pub(crate) fn has_left(&self) -> bool {
        self.has_left
    }

    /// The descriptors; `None` while it runs, when its worker has them.
    pub(crate) fn fds(&mut self) -> Option<&mut VringFds> {
        (!self.is_running()).then_some(&mut self.fds)
    }

    /// SET_VRING_NUM.
    pub(crate) fn set_size(&mut self, size: u16) -> Result<(), Runs> {
        self.at_rest()?.size = size;
        Ok(())
    }

    /// SET_VRING_ADDR. Of a running ring, whose addresses cannot change, it says whether the ring is to be logged.
    pub(crate) fn set_addresses(&mut self, addresses: RingAt, log: Option<u64>) -> Result<(), Runs> {
        if self.addresses != Some(addresses) {
            self.at_rest()?.addresses = Some(addresses);
        }
        self.log = log;
        Ok(())
    }

    pub(crate) fn log(&self) -> Option<u64> {
        self.log
    }

    /// SET_VRING_BASE.
    pub(crate) fn set_base(&mut self, base: u32) -> Result<(), Runs> {
        self.at_rest()?.base = Some(base);
        Ok(())
    }

    /// SET_VRING_KICK, of a ring that does not run: any kick descriptor starts it, and so does the message that it has none.
    pub(crate) fn start(&mut self, kick: Option<PeerFd>) -> Result<(), Runs> {
        let this = self.at_rest()?;
        this.fds.kick = kick;
        this.state = State::Started;
        Ok(())
    }

    /// GET_VRING_BASE, of a ring that does not run: its kick and call descriptors are forgotten, and what else was said of it is
    /// not. The error descriptor is among that: QEMU hands it over when it connects, and not when the ring starts again.
    pub(crate) fn stop(&mut self) -> Result<(), Runs> {
        let this = self.at_rest()?;
        this.fds = this.fds.take_err();
        this.state = State::Stopped;
        this.has_left = false;
        Ok(())
    }

    /// RESET_DEVICE, of a ring that does not run: nothing is known of it any more but its error descriptor, as when it is
    /// [stopped](Self::stop).
    pub(crate) fn reset(&mut self) {
        *self = Self { fds: self.fds.take_err(), ..Self::default() };
    }

    /// SET_VRING_ENABLE.
    pub(crate) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// Whether it is to begin or to stop to run.
    pub(crate) fn due(&self) -> Due {
        match (self.state, self.enabled && self.addresses.is_some()) {
            (State::Started, true) => Due::Start,
            (State::Running, false) => Due::Stop,
            _ => Due::Nothing,
        }
    }

    /// It runs from here on, by a worker that gets its descriptors.
    pub(crate) fn run(&mut self) -> VringFds {
        self.state = State::Running;
        std::mem::take(&mut self.fds)
    }

    /// Its worker is told to stop; false if it has none. It is started still, and may run again.
    pub(crate) fn pause(&mut self) -> bool {
        let runs = self.is_running();
        if runs {
            self.state = State::Started;
        }
        runs
    }

    /// It has run in another daemon, and stopped where it was said to begin, if it was said where it is.
    pub(crate) fn has_stopped(&mut self) {
        self.has_run = self.base.is_some() && self.addresses.is_some();
    }

    /// Its worker has stopped.
    pub(crate) fn come_to_rest(&mut self, AtRest { base, fds, has_left }: AtRest) {
        self.base = Some(base);
        self.fds = fds;
        self.has_run = true;
        self.has_left = has_left;
    }

    /// For what may not change while it runs.
    fn at_rest(&mut self) -> Result<&mut Self, Runs> {
        if self.is_running() { Err(Runs) } else { Ok(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESSES: RingAt = RingAt { desc: 0x1000, used: 0x2000, avail: 0x3000 };

    /// One that a front-end has said everything of, in the order that QEMU has.
    fn described() -> Vring {
        let mut vring = Vring::default();
        vring.set_size(8).unwrap();
        vring.set_base(0).unwrap();
        vring.set_addresses(ADDRESSES, None).unwrap();
        vring.start(None).unwrap();
        vring.set_enabled(true);
        vring
    }

    fn running() -> Vring {
        let mut vring = described();
        vring.run();
        vring
    }

    fn at_rest() -> AtRest {
        AtRest { base: 7, fds: VringFds::default(), has_left: false }
    }

    #[test]
    fn a_vring_runs_when_it_is_started_enabled_and_has_its_addresses_in_whichever_order() {
        let steps: [fn(&mut Vring); 3] = [
            |vring| vring.start(None).unwrap(),
            |vring| vring.set_enabled(true),
            |vring| vring.set_addresses(ADDRESSES, None).unwrap(),
        ];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut vring = Vring::default();
            for (done, step) in order.into_iter().enumerate() {
                assert_eq!(vring.due(), Due::Nothing, "{done} of {order:?}");
                steps[step](&mut vring);
            }
            assert_eq!(vring.due(), Due::Start, "{order:?}");
        }
        assert_eq!(running().due(), Due::Nothing);
    }

    #[test]
    fn a_vring_that_is_disabled_stops_to_run_and_goes_on_where_it_was() {
        let mut vring = running();
        vring.set_enabled(false);
        assert_eq!(vring.due(), Due::Stop);
        assert!(vring.pause() && !vring.pause() && !vring.is_to_run());
        vring.come_to_rest(at_rest());
        assert_eq!((vring.due(), vring.base(), vring.has_run()), (Due::Nothing, Some(7), true));
        vring.set_enabled(true);
        assert_eq!(vring.due(), Due::Start);
    }

    #[test]
    fn a_vring_that_was_stopped_waits_for_a_kick_descriptor_and_knows_what_it_was_told_before() {
        let mut vring = running();
        vring.pause();
        assert!(vring.is_to_run(), "until it is stopped, by GET_VRING_BASE");
        vring.come_to_rest(at_rest());
        vring.stop().unwrap();
        assert_eq!((vring.due(), vring.is_to_run()), (Due::Nothing, false));
        assert_eq!((vring.size(), vring.addresses(), vring.base()), (8, Some(ADDRESSES), Some(7)));
        vring.start(None).unwrap();
        assert_eq!(vring.due(), Due::Start);
    }

    #[test]
    fn a_vring_has_left_requests_until_it_is_stopped_or_has_run_again_and_left_none() {
        let mut vring = described();
        for has_left in [true, false, true] {
            vring.run();
            vring.pause();
            vring.come_to_rest(AtRest { has_left, ..at_rest() });
            assert_eq!(vring.has_left(), has_left);
        }
        vring.stop().unwrap();
        vring.start(None).unwrap();
        assert!(!vring.has_left() && vring.has_run());
    }

    #[test]
    fn a_vring_of_another_daemon_has_run_if_it_was_said_where_it_is_and_where_it_begins() {
        for (has_base, has_addresses) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut vring = Vring::default();
            if has_base {
                vring.set_base(0).unwrap();
            }
            if has_addresses {
                vring.set_addresses(ADDRESSES, None).unwrap();
            }
            vring.has_stopped();
            assert_eq!(vring.has_run(), has_base && has_addresses);
        }
    }

    #[test]
    fn a_vring_that_runs_cannot_be_described_anew_but_be_told_whether_it_is_logged() {
        let mut vring = running();
        assert_eq!((vring.set_size(16), vring.set_base(1)), (Err(Runs), Err(Runs)));
        assert_eq!((vring.start(None), vring.stop()), (Err(Runs), Err(Runs)));
        assert_eq!(vring.set_addresses(ADDRESSES, Some(0x2000)), Ok(()));
        assert_eq!(vring.set_addresses(RingAt { desc: 0x8000, ..ADDRESSES }, None), Err(Runs));
        assert_eq!((vring.size(), vring.base(), vring.addresses()), (8, Some(0), Some(ADDRESSES)));
        assert_eq!(vring.log(), Some(0x2000));
        assert!(vring.fds().is_none(), "its worker has them");
        vring.pause();
        assert!(vring.fds().is_some());
    }
}
