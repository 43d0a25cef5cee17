//! A session that goes on in the next daemon: what that one is told of it, and how it goes on from there.

use std::mem;
use std::sync::Arc;

use egret_virtio::Origin;
use egret_vring::vhost_user::{NO_FD, VRING_LOG, request};

use super::Session;
use crate::kept::Said;
use crate::peer_fd::PeerFd;
use crate::protocol::{InflightAt, LogAt, RegionAt, Request, RingAt, parse};
use crate::protocol_error::ProtocolError;
use crate::vring::Vring;

/// What the client has handed over, as it came: the next daemon cannot use what it was made into here.
#[derive(Default)]
pub(super) struct HandedOver {
    pub(super) regions: Vec<(RegionAt, PeerFd)>,
    pub(super) inflight: Option<(InflightAt, PeerFd)>,
    pub(super) log: Option<(LogAt, PeerFd)>,
}

impl Session<'_> {
    /// Notes what the client has handed over, if the next daemon is to have it.
    pub(super) fn hand_over(&mut self, note: impl FnOnce(&mut HandedOver)) {
        self.handed_over.as_mut().map(note);
    }

    /// Whether another daemon can go on with it. Functions whose commands nobody would do any more are answered when their queue
    /// stops, and one that goes on would do these.
    pub(super) fn may_go_on(&self) -> bool {
        let gives_up = self.inflight.is_none() || self.memory.log().is_some();
        // It would go on from a place that is not its own.
        let is_lost = |index: usize| {
            let config = self.queue_config(index).ok().flatten();
            self.vrings[index].is_started() && config.is_some_and(|config| self.has_lost_its_place(index, &config))
        };
        !self.shared.forgets_session()
            && (self.device.diskless_queues() == 0 || !gives_up)
            && !(0..self.vrings.len()).any(is_lost)
    }

    /// What the client would have to say for another session to be as this one is. Its queues are at rest, and this is the end
    /// of it. `None` if what was handed over is not there any more.
    pub(super) fn retell(&mut self) -> Option<Vec<Said>> {
        let HandedOver { regions, inflight, log } = self.handed_over.take()?;
        let mut said = vec![longs(request::SET_PROTOCOL_FEATURES, &[self.protocol_features])];
        // Of a client that has not come so far the device has not heard.
        if self.features != 0 {
            said.push(longs(request::SET_FEATURES, &[self.features]));
        }
        said.extend(self.shared.take_channel().map(|fd| longs(request::SET_BACKEND_REQ_FD, &[]).with(fd)));
        for (RegionAt { guest_addr, size, user_addr, offset }, fd) in regions {
            said.push(longs(request::ADD_MEM_REG, &[0, guest_addr, size, user_addr, offset]).with(fd));
        }
        said.extend(log.map(|(at, fd)| Said::new(request::SET_LOG_BASE, at.to_bytes()).with(fd)));
        let inflight = inflight.filter(|_| self.inflight.is_some());
        said.extend(
            inflight.map(|(at, fd)| Said::new(request::SET_INFLIGHT_FD, at.to_bytes(InflightAt::LONG)).with(fd)),
        );
        let mut kicks = Vec::new();
        let is_packed = self.is_packed();
        for (index, vring) in (0..).zip(&mut self.vrings) {
            kicks.extend(retell_ring(index, vring, is_packed, &mut said));
        }
        // No queue has it any more.
        let log_fd = self.log_fd.take().and_then(Arc::into_inner);
        said.extend(log_fd.map(|fd| longs(request::SET_LOG_FD, &[]).with(fd)));
        said.append(&mut kicks);
        Some(said)
    }

    /// Goes on where another session has stopped, of which this was [said](Self::retell), and whose device was in such a state;
    /// false if its client has left.
    pub(super) fn go_on(&mut self, said: Vec<Said>, state: &[u8]) -> Result<bool, ProtocolError> {
        let is_kick = |said: &Said| said.number == request::SET_VRING_KICK;
        let (kicks, said): (Vec<_>, Vec<_>) = said.into_iter().partition(is_kick);
        said.into_iter().try_for_each(|said| self.obey(said))?;
        // As when the client comes back to another daemon: the guest hears of a power on.
        if let Err(e) = self.device.load(state, Origin::Here) {
            self.shared.log().warn(format_args!("the device's state is not taken: {e}"));
        }
        // What lies in the rings of one that died is not done any more: since then somebody else may have had the disk.
        if self.connection.is_hung_up()? {
            return Ok(false);
        }
        // Those without disks come last: functions must find the commands that lie in the other rings.
        kicks.into_iter().rev().try_for_each(|said| {
            let index = said.body.first_chunk().map_or(0, |index| u64::from_ne_bytes(*index));
            self.vring(index as u32 & 0xff)?.has_stopped();
            self.obey(said)
        })?;
        Ok(true)
    }

    /// Does what the client asked for, and has had its answer to.
    fn obey(&mut self, Said { number, body, fds }: Said) -> Result<(), ProtocolError> {
        match parse(number, &body, fds)? {
            Request::SetLogBase(at, fd) => self.set_log(at, fd),
            told => self.answer(told, &number.into()).map(drop),
        }
    }
}

/// What there is to say of a ring at rest; returned is what starts it.
fn retell_ring(index: u32, vring: &mut Vring, is_packed: bool, said: &mut Vec<Said>) -> Option<Said> {
    // What is left of a ring of the other layout would be refused, and who starts the ring says it anew.
    if vring.size() > 0 && (is_packed || vring.size().is_power_of_two()) {
        said.push(words(request::SET_VRING_NUM, &[index, vring.size().into()]));
    }
    if let Some(RingAt { desc, used, avail }) = vring.addresses() {
        let (flags, log) = vring.log().map_or((0, 0), |log| (VRING_LOG, log));
        let mut body = words(request::SET_VRING_ADDR, &[index, flags]);
        body.body.extend(longs(0, &[desc, used, avail, log]).body);
        said.push(body);
    }
    if let Some(base) = vring.base().filter(|base| is_packed || *base <= u32::from(u16::MAX)) {
        said.push(words(request::SET_VRING_BASE, &[index, base]));
    }
    said.push(words(request::SET_VRING_ENABLE, &[index, vring.is_enabled().into()]));
    let is_started = vring.is_started();
    let (kick, call, err) = mem::take(vring.fds()?).into_parts();
    let signal = |number, fd: Option<PeerFd>| match fd {
        Some(fd) => longs(number, &[index.into()]).with(fd),
        None => longs(number, &[u64::from(index) | NO_FD]),
    };
    said.extend(call.map(|fd| signal(request::SET_VRING_CALL, Some(fd))));
    said.extend(err.map(|fd| signal(request::SET_VRING_ERR, Some(fd))));
    is_started.then(|| signal(request::SET_VRING_KICK, kick))
}

impl Said {
    fn new(number: u32, body: Vec<u8>) -> Self {
        Self { number, body, fds: Vec::new() }
    }

    fn with(mut self, fd: PeerFd) -> Self {
        self.fds.push(fd);
        self
    }
}

fn longs(number: u32, longs: &[u64]) -> Said {
    Said::new(number, longs.iter().flat_map(|long| long.to_ne_bytes()).collect())
}

fn words(number: u32, words: &[u32]) -> Said {
    Said::new(number, words.iter().flat_map(|word| word.to_ne_bytes()).collect())
}
