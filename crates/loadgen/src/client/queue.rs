//! One queue: requests in, completions out.
//!
//! A request lives in a *slot*: a frame and a buffer, at addresses that never change. The caller
//! chooses the slot, and may reuse it when the request has completed. If there are fewer buffers than slots, slots share
//! them, and the data of a read may be overwritten by another's.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_vring::memory::GuestMemory;
use egret_vring::ring::{Driver, DriverConfig, Piece, RingError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::framing::{Frame, Framing, LINE};
use super::{ClientError, Shape};

/// Buffers begin on pages, as a guest's do.
const PAGE: u64 = 4096;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads into the slot's buffer.
    Read,
    /// Writes the slot's buffer.
    Write,
    /// Flushes.
    Flush,
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Its slot.
    pub slot: u16,
    /// 0, or what went wrong: `VIRTIO_BLK_S_*`; or `VIRTIO_SCSI_S_*`, and the SCSI status where that is 0.
    pub status: u8,
}

impl Completed {
    /// Whether it succeeded.
    pub fn is_ok(self) -> bool {
        self.status == 0
    }
}

/// The eventfds by which both sides notify each other.
pub(super) struct Signals {
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    pub(super) err: OwnedFd,
}

/// Where a queue's parts are, from its beginning.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    ring: DriverConfig,
    framing: Framing,
    frames: u64,
    buffers: u64,
    /// From one buffer to the next.
    stride: u64,
    depth: u16,
    /// Slots that are so many apart have the same buffer.
    shared: u16,
    longest: u32,
    /// All of it.
    pub(super) bytes: u64,
}

impl Layout {
    pub(super) fn new(ring: DriverConfig, framing: Framing, shape: Shape) -> Self {
        let frames = ring.bytes().next_multiple_of(LINE);
        let buffers = (frames + framing.stride() * u64::from(shape.depth)).next_multiple_of(PAGE);
        let stride = u64::from(shape.bytes).next_multiple_of(PAGE);
        let shared = shape.buffers.clamp(1, shape.depth);
        let bytes = buffers + stride * u64::from(shared);
        Self { ring, framing, frames, buffers, stride, depth: shape.depth, shared, longest: shape.bytes, bytes }
    }
}

/// A running queue. Allocates nothing.
pub struct Queue {
    driver: Driver,
    memory: Arc<GuestMemory>,
    at: u64,
    layout: Layout,
    signals: Signals,
    session: Arc<UnixStream>,
    kicks: u64,
}

impl Queue {
    pub(super) fn new(
        memory: &Arc<GuestMemory>,
        at: u64,
        layout: Layout,
        signals: Signals,
        session: Arc<UnixStream>,
    ) -> Result<Self, RingError> {
        let driver = Driver::new(memory, at, layout.ring)?;
        Ok(Self { driver, memory: Arc::clone(memory), at, layout, signals, session, kicks: 0 })
    }

    /// Requests are of a logical unit with blocks of that many bytes.
    pub(super) fn set_block_size(&mut self, block: u32) {
        self.layout.framing = Framing::Scsi { block };
    }

    /// How many slots there are.
    pub fn depth(&self) -> u16 {
        self.layout.depth
    }

    /// The longest request, in bytes.
    pub fn longest(&self) -> u32 {
        self.layout.longest
    }

    /// How often the server was kicked.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    #[inline]
    fn frame(&self, slot: u16) -> u64 {
        self.at + self.layout.frames + self.layout.framing.stride() * u64::from(slot)
    }

    fn buffer(&self, slot: u16) -> u64 {
        self.at + self.layout.buffers + self.layout.stride * u64::from(slot % self.layout.shared)
    }

    /// Copies `bytes` to the beginning of a slot's buffer.
    ///
    /// # Panics
    /// When they are longer than it.
    pub fn fill(&self, slot: u16, bytes: &[u8]) {
        assert!(slot < self.layout.depth && bytes.len() <= self.layout.longest as usize, "more than a slot's buffer");
        self.memory.write(self.buffer(slot), bytes);
    }

    /// Copies the beginning of a slot's buffer to `bytes`.
    ///
    /// # Panics
    /// When they are longer than it.
    pub fn copy(&self, slot: u16, bytes: &mut [u8]) {
        assert!(slot < self.layout.depth && bytes.len() <= self.layout.longest as usize, "more than a slot's buffer");
        self.memory.read(self.buffer(slot), bytes);
    }

    /// Makes a request of `len` bytes at byte `offset` of the disk, which the server sees after
    /// [`publish`](Self::publish).
    ///
    /// # Panics
    /// When the slot is in use, or the request longer than its buffer.
    #[inline]
    pub fn submit(&mut self, slot: u16, op: Op, offset: u64, len: u32) {
        assert!(slot < self.layout.depth && len <= self.layout.longest, "a request longer than its slot");
        self.add(slot, op, len, &self.layout.framing.frame(op, offset, len));
    }

    #[inline]
    fn add(&mut self, slot: u16, op: Op, len: u32, frame: &Frame) {
        let (at, framing) = (self.frame(slot), self.layout.framing);
        self.memory.write(at, frame.bytes());
        let (header, answer) = (framing.header(at), framing.answer(at));
        let data = Piece { addr: self.buffer(slot), len };
        let token = u64::from(slot);
        let added = match op {
            Op::Read => self.driver.add(&[header], &framing.read(data, answer), token),
            Op::Write => self.driver.add(&[header, data], &[answer], token),
            Op::Flush => self.driver.add(&[header], &[answer], token),
        };
        added.expect("the ring has room for every slot");
    }

    /// Sends a SCSI command that reads at most `into.len()` bytes, in a free slot, and waits for it to complete.
    ///
    /// # Errors
    /// The server does not answer within `patience`, or not as it should.
    pub(super) fn command(
        &mut self,
        cdb: &[u8; 16],
        into: &mut [u8],
        patience: Duration,
    ) -> Result<Completed, ClientError> {
        let op = if into.is_empty() { Op::Flush } else { Op::Read };
        self.add(0, op, into.len() as u32, &Framing::command(cdb));
        self.publish()?;
        let deadline = Instant::now() + patience;
        loop {
            if let Some(completed) = self.reap()? {
                self.copy(0, into);
                return Ok(completed);
            }
            if self.arm() {
                let left = deadline.saturating_duration_since(Instant::now());
                let mut fds = [self.call(), self.session()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
                match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                    Ok(0) => return Err(ClientError::Silent("a SCSI command")),
                    Ok(_) if !fds[1].revents().is_empty() => return Err(ClientError::HungUp("a SCSI command")),
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
                let _ = rustix::io::read(&self.signals.call, &mut [0; 8]);
            }
        }
    }

    /// Makes the requests that were submitted since the last call available, and kicks the server if it asked for that.
    ///
    /// # Errors
    /// The system's refusal.
    #[inline]
    pub fn publish(&mut self) -> Result<(), ClientError> {
        if self.driver.publish() {
            self.kick()?;
        }
        Ok(())
    }

    fn kick(&mut self) -> Result<(), ClientError> {
        self.kicks += 1;
        match rustix::io::write(&self.signals.kick, &1u64.to_ne_bytes()) {
            // A full eventfd counter wakes its reader as well, so EAGAIN is no error.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Whether there is a completion: one load.
    #[inline]
    pub fn has_completed(&self) -> bool {
        self.driver.has_used()
    }

    /// The next completion, if there is one.
    ///
    /// # Errors
    /// The server used a chain that was not available to it.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<Completed>, ClientError> {
        let Some(used) = self.driver.reap()? else { return Ok(None) };
        let slot = used.token as u16;
        let framing = self.layout.framing;
        let (at, len) = framing.verdict(self.frame(slot));
        let mut verdict = [u8::MAX; 2];
        self.memory.read(at, &mut verdict[..len]);
        Ok(Some(Completed { slot, status: framing.status(verdict) }))
    }

    /// Enables notifications; false if there is a completion already.
    pub fn arm(&mut self) -> bool {
        self.driver.arm_calls()
    }

    /// Disables notifications, which is a hint only.
    pub fn suppress(&mut self) {
        self.driver.suppress_calls();
    }

    /// The call eventfd: readable when the server notifies. It is never read here; watch it edge-triggered, or read it.
    pub fn call(&self) -> BorrowedFd<'_> {
        self.signals.call.as_fd()
    }

    /// The error eventfd: readable when the server stops the queue.
    pub fn err(&self) -> BorrowedFd<'_> {
        self.signals.err.as_fd()
    }

    /// Becomes readable when the server hangs up.
    pub fn session(&self) -> BorrowedFd<'_> {
        self.session.as_fd()
    }
}
