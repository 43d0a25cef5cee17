//! What a guest's migration asks of a session: the dirty log, and the device's state.
//!
//! A front-end turns logging on and off while the rings run, and may hand another log over at any time. Each queue changes
//! its log on its loop, and the front-end is answered when all have: from then on nobody writes to the old one.

use std::mem;
use std::os::fd::AsFd;
use std::sync::Arc;

use egret_vring::memory::DirtyLog;
use egret_vring::vhost_user::F_LOG_ALL;

use super::{Answered, Session};
use crate::device_state::{self, Direction, Transfer, TransferError};
use crate::peer_fd::PeerFd;
use crate::protocol::{LogAt, Message};
use crate::protocol_error::{ProtocolError, invalid};
use crate::vring::Vring;

impl Session<'_> {
    pub(super) fn set_log(&mut self, at: LogAt, fd: PeerFd) -> Result<(), ProtocolError> {
        match DirtyLog::map(&fd, at.offset, at.size, &self.shared.memory) {
            Ok(log) => self.log = Some(Arc::new(log)),
            Err(e) => return invalid(format!("dirty log: {e}")),
        }
        self.hand_over(|kept| kept.log = Some((at, fd)));
        self.update_logs()
    }

    /// Has all queues log where they are to. When this returns, none of them writes to another log any more.
    pub(super) fn update_logs(&mut self) -> Result<(), ProtocolError> {
        let log = self.log.clone().filter(|_| self.features & F_LOG_ALL != 0);
        if log.is_none() && self.memory.log().is_none() {
            return Ok(());
        }
        self.extend_memory(self.memory.logging(log))
    }

    /// By which address a queue's used ring is logged, if it is to be; and whether the log has room for that and for all of
    /// memory.
    pub(super) fn used_log(&self, index: usize) -> Result<Option<u64>, ProtocolError> {
        let Some(log) = self.memory.log() else { return Ok(None) };
        let vring = &self.vrings[index];
        let (end, memory_end) = (log.end(), self.memory.end());
        if memory_end > end {
            return invalid(format!("a dirty log of memory up to {end:#x}, where memory ends at {memory_end:#x}"));
        }
        let Some(used) = vring.log() else { return Ok(None) };
        let len = if self.is_packed() { 4 } else { 6 + 8 * u64::from(vring.size()) };
        match used.checked_add(len) {
            Some(used_end) if used_end <= end => Ok(Some(used)),
            _ => invalid(format!(
                "queue {index}: its used ring is logged at {used:#x}, and the dirty log ends at {end:#x}"
            )),
        }
    }

    /// What is signalled when the log has changed.
    pub(super) fn log_signal(&self) -> Option<Arc<PeerFd>> {
        self.log_fd.clone().filter(|_| self.memory.log().is_some())
    }

    /// Gives the client a channel for the device's state. Its own is not used: see [`device_state`].
    pub(super) fn transfer_state(
        &mut self,
        direction: Direction,
        message: &Message,
    ) -> Result<Answered, ProtocolError> {
        let channel = match direction {
            _ if self.vrings.iter().any(Vring::is_running) => Err(TransferError::Running),
            Direction::Save => device_state::save(&**self.device),
            Direction::Load => device_state::begin_to_load(),
        };
        let replied = match channel {
            Ok(channel) => {
                self.budget.records.send(self.connection.stream())?;
                let replied = self.connection.reply_with(message, &0u64.to_ne_bytes(), &[channel.as_fd()]);
                self.transfer = match direction {
                    Direction::Save => Transfer::Saved,
                    Direction::Load => Transfer::Loading(channel),
                };
                replied
            }
            Err(e) => {
                self.transfer = Transfer::None;
                self.shared.log().warn(format_args!("the device's state cannot be transferred: {e}"));
                self.connection.reply_u64(message, device_state::FAILED)
            }
        };
        replied.map(|()| Answered::Replied)
    }

    /// Whether the state that was transferred is good. One that was loaded is the device's then.
    pub(super) fn check_state(&mut self) -> bool {
        let checked = match mem::take(&mut self.transfer) {
            Transfer::None => Err(TransferError::NotAsked),
            Transfer::Saved => Ok(()),
            Transfer::Loading(_) if self.vrings.iter().any(Vring::is_running) => Err(TransferError::Running),
            Transfer::Loading(channel) => device_state::load(&**self.device, &channel),
        };
        if let Err(e) = &checked {
            self.shared.log().warn(format_args!("the device's state is not taken: {e}"));
        } else if let Some(inflight) = &self.inflight {
            self.device.note_choices(inflight);
        }
        checked.is_ok()
    }
}
