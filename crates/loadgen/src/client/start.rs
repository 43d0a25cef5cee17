//! Sharing memory and setting the rings up.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{DriverConfig, PACKED_BASE};
use egret_vring::vhost_user::{protocol_feature, request};
use rustix::event::{EventfdFlags, eventfd};

use super::framing::{READ_CAPACITY, TEST_UNIT_READY};
use super::queue::{Layout, Queue, Signals};
use super::wire::{u32s, u64s};
use super::{Client, ClientError, EVENT_IDX, INDIRECT, Info, RING_PACKED};

/// The guest address at which the memory begins. It is not 0, so that a null address is never valid.
const MEMORY: u64 = 1 << 32;
/// The largest ring that is asked for: QEMU and SPDK allow no more.
const LARGEST_RING: u16 = 1024;
/// More unit attentions than a logical unit can have pending.
const MOST_NEWS: u32 = 16;
/// A request is a header, one buffer, and a status.
const PIECES: u16 = 3;

/// How many queues, and how large.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Queues.
    pub queues: u16,
    /// Requests that each can have in flight.
    pub depth: u16,
    /// The longest request, in bytes.
    pub bytes: u32,
    /// Buffers that each queue has for these requests: one each, or fewer that they share.
    pub buffers: u16,
}

impl Default for Shape {
    fn default() -> Self {
        Self { queues: 1, depth: 64, bytes: 4096, buffers: 64 }
    }
}

/// A disk whose queues are started.
pub struct Connection {
    /// What it says of itself.
    pub info: Info,
    /// Its queues.
    pub queues: Vec<Queue>,
}

impl Client {
    /// Shares memory, and starts queues of that shape.
    ///
    /// # Errors
    /// More queues than the disk has, deeper ones than a ring can be, or the server refuses.
    pub fn start(mut self, shape: Shape) -> Result<Connection, ClientError> {
        let too_many = |what, asked, most: u16| Err(ClientError::TooMany { what, asked, most: most.into() });
        if shape.queues == 0 || shape.queues > self.info.queues {
            return too_many("queues", shape.queues.into(), self.info.queues);
        }
        // A request in the ring's own table touches one cache line less than one in an indirect table.
        let direct = shape.depth.checked_mul(PIECES).filter(|&size| size <= LARGEST_RING);
        let (size, indirect) = match direct {
            Some(size) => (size, None),
            None if self.features & INDIRECT != 0 => (shape.depth, Some(PIECES)),
            None => return too_many("requests in flight", shape.depth.into(), LARGEST_RING / PIECES),
        };
        if size == 0 || size > LARGEST_RING {
            return too_many("requests in flight", shape.depth.into(), LARGEST_RING);
        }
        let packed = self.features & RING_PACKED != 0;
        let ring = DriverConfig {
            size: size.next_power_of_two().max(16),
            packed,
            event_idx: self.features & EVENT_IDX != 0,
            indirect,
            base: if packed { PACKED_BASE as u16 } else { 0 },
        };
        let layout = Layout::new(ring, self.framing, shape);
        let region = Region::anonymous(MEMORY, layout.bytes * u64::from(shape.queues))?;
        self.share(&region)?;
        let memory = Arc::new(GuestMemory::empty().with(region)?);

        let starts = (0..shape.queues).map(|index| {
            let at = MEMORY + layout.bytes * u64::from(index);
            let signals = Signals::new()?;
            self.start_queue(self.framing.first_queue() + index, ring, at, &signals)?;
            Ok((at, signals))
        });
        let started: Vec<_> = starts.collect::<Result<_, ClientError>>()?;
        // Without REPLY_ACK, the reply to any later request proves that all before it were handled.
        self.wire.ask(request::GET_FEATURES)?;
        let session = Arc::new(self.wire.into_stream());
        let queues = started.into_iter().map(|(at, signals)| {
            Queue::new(&memory, at, layout, signals, Arc::clone(&session)).map_err(ClientError::from)
        });
        Ok(Connection { info: self.info, queues: queues.collect::<Result<_, _>>()? })
    }

    fn share(&mut self, region: &Region) -> Result<(), ClientError> {
        let place = [region.guest_addr, region.size, region.user_addr, region.offset];
        let file = [region.file.as_fd()];
        if self.protocol & protocol_feature::CONFIGURE_MEM_SLOTS != 0 {
            self.wire.request(request::ADD_MEM_REG, &[u64s(&[0]), u64s(&place)].concat(), &file)
        } else {
            self.wire.request(request::SET_MEM_TABLE, &[u32s(&[1, 0]), u64s(&place)].concat(), &file)
        }
    }

    fn start_queue(&mut self, index: u16, ring: DriverConfig, at: u64, signals: &Signals) -> Result<(), ClientError> {
        let index32 = u32::from(index);
        let which = u64s(&[index.into()]);
        let queue = ring.queue(at);
        let addresses = [u32s(&[index32, 0]), u64s(&[queue.desc, queue.used, queue.avail, 0])].concat();
        self.wire.request(request::SET_VRING_NUM, &u32s(&[index32, ring.size.into()]), &[])?;
        self.wire.request(request::SET_VRING_BASE, &u32s(&[index32, queue.base]), &[])?;
        self.wire.request(request::SET_VRING_ADDR, &addresses, &[])?;
        let fds: [(_, BorrowedFd<'_>); 3] = [
            (request::SET_VRING_ERR, signals.err.as_fd()),
            (request::SET_VRING_CALL, signals.call.as_fd()),
            (request::SET_VRING_KICK, signals.kick.as_fd()),
        ];
        for (request, fd) in fds {
            self.wire.request(request, &which, &[fd])?;
        }
        self.wire.request(request::SET_VRING_ENABLE, &u32s(&[index32, 1]), &[])
    }
}

impl Connection {
    /// Clears the unit attentions that a new initiator gets, such as the power on's, and reads the capacity.
    pub(super) fn ask_what_it_is(&mut self, patience: Duration) -> Result<(), ClientError> {
        let queue = &mut self.queues[0];
        let mut last = 0;
        for _ in 0..MOST_NEWS {
            last = queue.command(&TEST_UNIT_READY, &mut [], patience)?.status;
            if last == 0 {
                break;
            }
        }
        let refused = |request, code: u8| Err(ClientError::Refused { request, code: code.into() });
        if last != 0 {
            return refused("TEST UNIT READY", last);
        }
        let mut capacity = [0; 32];
        let asked = queue.command(&READ_CAPACITY, &mut capacity, patience)?;
        if !asked.is_ok() {
            return refused("READ CAPACITY (16)", asked.status);
        }
        self.info = Info::of_scsi(&capacity, self.info.queues);
        self.queues.iter_mut().for_each(|queue| queue.set_block_size(self.info.block_size));
        Ok(())
    }
}

impl Signals {
    fn new() -> rustix::io::Result<Self> {
        let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self { kick: new()?, call: new()?, err: new()? })
    }
}
