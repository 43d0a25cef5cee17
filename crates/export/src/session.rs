//! One client's session: the vhost-user conversation, and the queues that it starts and stops.
//!
//! A session runs on its export's own thread and talks to I/O threads through their mailboxes, so that a client that
//! dawdles, or a disk that takes its time to drain, holds up nobody else.

use std::mem;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use egret_disk::{LOCK_PATIENCE, LOOK_AGAIN};
use egret_virtio::{Device, DriverError, EVENT_IDX, RING_PACKED};
use egret_vring::memory::{DirtyLog, GuestMemory, Region};
use egret_vring::ring::{Inflight, InflightConfig, PACKED_BASE, QueueConfig, Record};
use egret_vring::vhost_user::{F_LOG_ALL, F_PROTOCOL_FEATURES, protocol_feature};
use rustix::fs::SealFlags;

use crate::budget::ClientBudget;
use crate::device_state::Transfer;
use crate::kept::{Kept, Said};
use crate::memory_file::memory_file;
use crate::peer_fd::PeerFd;
use crate::protocol::{Connection, InflightAt, MAX_MEMORY_SLOTS, Message, RegionAt, Request, RingAt};
use crate::protocol_error::{ProtocolError, invalid};
use crate::queues::Shared;
use crate::source::Worker;
use crate::vring::{Due, Runs, Vring};
use crate::worker::{Leave, QueueWorker, VringFds};

mod keeping;
mod migration;

use keeping::HandedOver;

const PROTOCOL_FEATURES: u64 = protocol_feature::MQ
    | protocol_feature::LOG_SHMFD
    | protocol_feature::REPLY_ACK
    | protocol_feature::BACKEND_REQ
    | protocol_feature::CONFIG
    | protocol_feature::INFLIGHT_SHMFD
    | protocol_feature::RESET_DEVICE
    | protocol_feature::CONFIGURE_MEM_SLOTS
    | protocol_feature::DEVICE_STATE
    | protocol_feature::GET_VRING_BASE_INFLIGHT
    | protocol_feature::GET_VRING_BASE_SKIP_DRAIN;

const INFLIGHT: u64 = protocol_feature::GET_VRING_BASE_INFLIGHT;
const SKIP_DRAIN: u64 = protocol_feature::GET_VRING_BASE_SKIP_DRAIN;

/// What this side of the socket has for features, beside the device.
const TRANSPORT_FEATURES: u64 = F_PROTOCOL_FEATURES | F_LOG_ALL;

/// Where the configuration space begins for old front-ends, from before the protocol dropped that offset.
const OLD_CONFIG_OFFSET: u32 = 0x100;

/// The largest ring: a client may choose one larger than the device was described for, as with qemu-storage-daemon.
const MAX_QUEUE_SIZE: u16 = 1024;

/// What it may have mapped at a time: these, a dirty log, and the one that takes its place.
pub const MAX_MAPPINGS: usize = MAX_MEMORY_SLOTS + 2;

/// How long a change of memory, or the end of a session, waits for memory to be unpinned, of which seconds are some hundred
/// GiB.
const UNPIN_PATIENCE: Duration = Duration::from_secs(10);

/// By which I/O threads give back what they had pinned: who has it pinned, or may yet have, has a sender.
struct Unpinned {
    to: Sender<Arc<GuestMemory>>,
    from: Receiver<Arc<GuestMemory>>,
}

impl Unpinned {
    fn new() -> Self {
        let (to, from) = channel();
        Self { to, from }
    }
}

/// The state of one conversation.
pub(crate) struct Session<'a> {
    shared: &'a Shared,
    device: &'a Arc<dyn Device>,
    connection: Connection<'a>,
    budget: &'a mut ClientBudget,
    memory: Arc<GuestMemory>,
    unpinned: Unpinned,
    vrings: Vec<Vring>,
    /// The client's record of what is in flight.
    inflight: Option<Inflight>,
    /// Where the client has what is written to its memory noted, while it has LOG_ALL, and what is signalled then.
    log: Option<Arc<DirtyLog>>,
    log_fd: Option<Arc<PeerFd>>,
    /// Rings are to run as soon as less is owed to the disks' limits.
    awaits_limits: bool,
    transfer: Transfer,
    /// For the next daemon, if somebody keeps sessions until then.
    handed_over: Option<HandedOver>,
    features: u64,
    protocol_features: u64,
}

impl<'a> Session<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        device: &'a Arc<dyn Device>,
        connection: Connection<'a>,
        budget: &'a mut ClientBudget,
        may_be_kept: bool,
    ) -> Self {
        let vrings = (0..device.num_queues()).map(|_| Vring::default()).collect();
        let memory = Arc::new(GuestMemory::under(shared.memory.clone()));
        // A front-end that connects again, to another daemon perhaps, has read it then, and need not do so now.
        shared.set_news(device.tells_size());
        Self {
            shared,
            device,
            connection,
            budget,
            memory,
            unpinned: Unpinned::new(),
            vrings,
            inflight: None,
            log: None,
            log_fd: None,
            awaits_limits: false,
            transfer: Transfer::None,
            handed_over: may_be_kept.then(HandedOver::default),
            features: 0,
            protocol_features: 0,
        }
    }

    /// Serves the client until it leaves, breaks the protocol, or it is time to stop; then drains its queues. It goes on from
    /// what another daemon has kept, if it has. Returned is what is to be kept for the next.
    pub(crate) fn run(mut self, from: Option<(Vec<Said>, Vec<u8>)>) -> Result<Option<Kept>, ProtocolError> {
        let is_here = from.map_or(Ok(true), |(said, state)| self.go_on(said, &state));
        let ended = is_here.and_then(|is_here| if is_here { self.converse() } else { Ok(End::Left) });
        self.shared.set_draining(true);
        self.stop_all();
        let is_kept = matches!(ended, Ok(End::ToldTo)) && self.may_go_on();
        let told = if is_kept { self.retell().zip(Some(self.device.save())) } else { None };
        self.reset();
        self.device.forget_choices();
        self.await_unpinned();
        self.shared.set_draining(false);
        self.shared.set_channel(None);
        let client = self.connection.into_stream();
        if let Some((said, state)) = told {
            return Ok(Some(Kept { client, said, state }));
        }
        // What was sent and not received is closed with it.
        self.budget.records.leave(PeerFd::new(client.into_fd()));
        ended.map(|_| None)
    }

    fn converse(&mut self) -> Result<End, ProtocolError> {
        loop {
            self.await_limits()?;
            let Some((request, message)) = self.connection.receive()? else {
                return Ok(if self.connection.pause(Duration::ZERO)? { End::Left } else { End::ToldTo });
            };
            let pause = self.budget.pace.take(request.cost(), Instant::now());
            // Without a pause, too: a client that has always sent the next message is not waited for anywhere else. This one is
            // answered: who goes on with the session does not have it any more.
            let is_last = !self.connection.pause(pause)?;
            let answer = self.answer(request, &message);
            // The message that agrees on acknowledgements may ask for one: Linux's virtio_uml waits for it.
            let acknowledges = message.wants_ack && self.protocol_features & protocol_feature::REPLY_ACK != 0;
            match answer {
                Ok(Answered::Replied) => {}
                Ok(Answered::Done) if acknowledges => self.connection.reply_u64(&message, 0)?,
                Ok(Answered::Done) => {}
                Err(e) => {
                    if acknowledges {
                        let _ = self.connection.reply_u64(&message, 1);
                    }
                    return Err(e);
                }
            }
            if is_last {
                return Ok(End::ToldTo);
            }
        }
    }

    /// Starts the rings that are to run as soon as they need not wait for limits any more; whoever sends a message meanwhile
    /// does not wait for that.
    fn await_limits(&mut self) -> Result<(), ProtocolError> {
        while mem::take(&mut self.awaits_limits) {
            // Unless they have been stopped meanwhile.
            self.update_vrings()?;
            self.shared.set_draining(self.awaits_limits);
            if self.awaits_limits && self.connection.await_input(LOOK_AGAIN)? {
                break;
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: Request, message: &Message) -> Result<Answered, ProtocolError> {
        let reply = |bytes: &[u8]| self.connection.reply(message, bytes).map(|()| Answered::Replied);
        let reply_u64 = |value: u64| reply(&value.to_ne_bytes());
        match request {
            Request::GetFeatures => return reply_u64(self.device.features() & !self.withheld() | TRANSPORT_FEATURES),
            Request::GetProtocolFeatures => return reply_u64(PROTOCOL_FEATURES),
            Request::GetQueueNum => return reply_u64(self.vrings.len() as u64),
            Request::GetMaxMemSlots => return reply_u64(MAX_MEMORY_SLOTS as u64),
            Request::GetConfig { offset, size, flags } => return reply(&self.read_config(offset, size, flags)),
            Request::GetVringBase(index, leave) => {
                let base = self.get_base(index, leave)?;
                let state = [index.to_ne_bytes(), base.to_ne_bytes()].concat();
                return self.connection.reply(message, &state).map(|()| Answered::Replied);
            }
            Request::GetInflight(of, len) => {
                let (at, file) = self.make_inflight(of)?;
                self.budget.records.send(self.connection.stream())?;
                let replied = self.connection.reply_with(message, &at.to_bytes(len), &[file.as_fd()]);
                return replied.map(|()| Answered::Replied);
            }
            Request::SetLogBase(at, fd) => {
                self.set_log(at, fd)?;
                // libvhost-user replies with a number, rust-vmm's front-ends want this, and QEMU's takes either.
                return self.connection.reply(message, &at.to_bytes()).map(|()| Answered::Replied);
            }
            Request::SetDeviceState(direction) => return self.transfer_state(direction, message),
            Request::CheckDeviceState => {
                let is_good = self.check_state();
                return self.connection.reply_u64(message, u64::from(!is_good)).map(|()| Answered::Replied);
            }
            Request::SetOwner => {}
            Request::ResetOwner | Request::ResetDevice => self.reset(),
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::SetProtocolFeatures(features) => self.set_protocol_features(features)?,
            Request::SetInflight(at, fd) => self.set_inflight(at, fd)?,
            Request::SetMemTable(regions) => self.set_memory(regions)?,
            Request::AddMemReg(at, fd) => self.add_memory(at, fd)?,
            Request::RemMemReg(at) => self.remove_memory(at)?,
            Request::SetVringNum(index, size) => self.set_size(index, size)?,
            Request::SetVringAddr(index, at, log) => self.set_addresses(index, at, log)?,
            Request::SetLogFd(fd) => {
                // Kept until no queue has it any more, so that no I/O thread is the last to have it.
                let before = self.log_fd.replace(Arc::new(fd.into_eventfd()?));
                self.update_logs()?;
                drop(before);
            }
            Request::SetVringBase(index, base) => self.set_base(index, base)?,
            Request::SetVringKick(index, fd) => self.set_kick(index, fd)?,
            Request::SetVringCall(index, fd) => {
                let may_be_socket = self.shared.rings.user_mode_linux;
                self.set_fd(index, fd.map(|fd| fd.into_call(may_be_socket)).transpose()?, VringFds::set_call)?;
            }
            Request::SetVringErr(index, fd) => {
                self.set_fd(index, fd.map(PeerFd::into_eventfd).transpose()?, VringFds::set_err)?;
            }
            Request::SetVringEnable(index, enabled) => {
                self.vring(index)?.set_enabled(enabled);
                self.update_vring(index as usize)?;
                // One that was to run and did not has nothing to stop.
                self.settle();
            }
            Request::SetBackendReqFd(fd) => {
                self.shared.set_channel(Some(fd.into_channel()?));
                // Cloud Hypervisor sends it last, and did not have what there was to tell when its rings started.
                if self.vrings.iter().any(Vring::is_running) {
                    self.shared.tell_news();
                }
            }
            Request::SetConfig { offset, bytes } => self.write_config(offset, &bytes)?,
        }
        Ok(Answered::Done)
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, ProtocolError> {
        let count = self.vrings.len();
        match self.vrings.get_mut(index as usize) {
            Some(vring) => Ok(vring),
            None => invalid(format!("queue {index}; the export has {count}, from 0")),
        }
    }

    /// Changes what is known of a vring, as long as it does not run.
    fn describe(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Vring) -> Result<(), Runs>,
    ) -> Result<(), ProtocolError> {
        let changed = change(self.vring(index)?);
        changed.or_else(|Runs| invalid(format!("queue {index} was to be changed while it runs")))
    }

    /// Features of the device that are not offered.
    fn withheld(&self) -> u64 {
        // It lets its driver have a packed ring, and says of one that is new that it has run.
        if self.shared.rings.user_mode_linux { RING_PACKED } else { 0 }
    }

    fn set_features(&mut self, features: u64) -> Result<(), ProtocolError> {
        let taken = match features & self.withheld() {
            0 => self.device.set_features(features & !TRANSPORT_FEATURES),
            withheld => Err(DriverError::NotOffered(withheld)),
        };
        if let Err(e) = taken {
            return invalid(e.to_string());
        }
        self.features = features;
        // A record is for rings of one layout: a client that changes the layout has to hand over another record.
        self.inflight.take_if(|inflight| inflight.is_packed() != (features & RING_PACKED != 0));
        // Without protocol features there is no SET_VRING_ENABLE, and every ring is enabled.
        if features & F_PROTOCOL_FEATURES == 0 {
            self.vrings.iter_mut().for_each(|vring| vring.set_enabled(true));
        }
        self.update_logs()
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<(), ProtocolError> {
        let unknown = features & !PROTOCOL_FEATURES;
        if unknown != 0 {
            return invalid(format!("protocol features {unknown:#x}, which were not offered"));
        }
        self.protocol_features = features;
        Ok(())
    }

    fn set_size(&mut self, index: u32, size: u32) -> Result<(), ProtocolError> {
        match u16::try_from(size) {
            Ok(size) if (size.is_power_of_two() || self.is_packed() && size > 0) && size <= MAX_QUEUE_SIZE => {
                self.describe(index, |vring| vring.set_size(size))
            }
            _ => {
                let most = MAX_QUEUE_SIZE;
                invalid(format!("queue {index} of size {size}; it must be a power of two, at most {most}"))
            }
        }
    }

    fn set_addresses(&mut self, index: u32, at: RingAt, log: Option<u64>) -> Result<(), ProtocolError> {
        let before = self.vring(index)?.log();
        self.describe(index, |vring| vring.set_addresses(at, log))?;
        if before != log {
            self.update_memory(index as usize)?;
        }
        self.update_vring(index as usize)
    }

    fn set_base(&mut self, index: u32, base: u32) -> Result<(), ProtocolError> {
        if base > u32::from(u16::MAX) && !self.is_packed() {
            return invalid(format!("queue {index} to begin at {base}; an index has 16 bits"));
        }
        self.describe(index, |vring| vring.set_base(base))
    }

    fn is_packed(&self) -> bool {
        self.features & RING_PACKED != 0
    }

    /// The base to start a queue with: where it stopped, what the client has set, or the beginning.
    fn base(&self, vring: &Vring) -> u32 {
        vring.base().unwrap_or(if self.is_packed() { PACKED_BASE } else { 0 })
    }

    fn get_base(&mut self, index: u32, leave: Leave) -> Result<u32, ProtocolError> {
        self.vring(index)?;
        // A front-end that knows of no other way means this one.
        let leave = match self.protocol_features & (INFLIGHT | SKIP_DRAIN) {
            INFLIGHT => Leave::NotBegun,
            _ => leave,
        };
        self.stop_queues(index as usize..index as usize + 1, leave);
        // Whether the guest is paused, reset, saved or moved is not told; a front-end that asked for more knows of the record.
        // What a queue without disks has left are functions, which wait for other queues.
        let is_diskless = index < self.device.diskless_queues().into();
        if leave == Leave::Nothing && !is_diskless && self.vrings[index as usize].has_left() {
            self.shared.log().warn(format_args!(
                "queue {index} stops with requests that wait because a disk failed, and only its in-flight record has \
                 them: a guest that is saved or moved now would wait for them for ever"
            ));
        }
        self.describe(index, |vring| vring.stop())?;
        self.settle();
        // Nobody waits any more for what lies in its ring.
        self.update_diskless()?;
        Ok(self.base(&self.vrings[index as usize]))
    }

    fn set_kick(&mut self, index: u32, fd: Option<PeerFd>) -> Result<(), ProtocolError> {
        self.vring(index)?;
        let fd = fd.map(PeerFd::into_eventfd).transpose()?;
        // A running ring gets a new descriptor: it stops and starts again. No kick is lost, because the loop polls a queue
        // that is new to it before it waits.
        self.stop_queue(index as usize);
        self.describe(index, |vring| vring.start(fd))?;
        self.update_vring(index as usize)
    }

    fn set_fd<T: Send + 'static>(
        &mut self,
        index: u32,
        fd: Option<T>,
        set: impl FnOnce(&mut VringFds, Option<T>) -> Option<T> + Send + 'static,
    ) -> Result<(), ProtocolError> {
        let before = match self.vring(index)?.fds() {
            Some(fds) => set(fds, fd),
            None => self.shared.change(index as usize, move |worker| set(worker.fds(), fd)).flatten(),
        };
        // Here, and not on the I/O thread: what else it serves would wait for the peer.
        drop(before);
        Ok(())
    }

    /// Makes an in-flight record for a client that has none.
    fn make_inflight(&self, of: InflightAt) -> Result<(InflightAt, OwnedFd), ProtocolError> {
        // Before the client has chosen a layout the record is made as long as for packed rings, which is enough for both.
        let packed = self.is_packed() || self.features == 0;
        // It is for the longest rings, whatever was asked: QEMU 10.0.13 asks for `queue-size` descriptors, and has rings of
        // 1024 whatever that is.
        let config = InflightConfig { packed, queue_size: MAX_QUEUE_SIZE, ..self.inflight_config(of)? };
        let size = config.bytes();
        let file = memory_file("egret-inflight", size, SealFlags::SEAL)?;
        Ok((InflightAt { size, offset: 0, ..of }, file))
    }

    fn set_inflight(&mut self, at: InflightAt, fd: PeerFd) -> Result<(), ProtocolError> {
        let said = self.inflight_config(at)?;
        // The client says of ours what it has asked for. Another's, which is as long as was asked, is what it is said to be.
        let ours = InflightConfig { queue_size: MAX_QUEUE_SIZE, ..said };
        let config = if at.size >= ours.bytes() { ours } else { said };
        if self.vrings.iter().any(Vring::is_running) {
            return invalid("an in-flight record for queues that run");
        }
        match Inflight::map(&fd, at.offset, at.size, config) {
            Ok(inflight) => {
                // QEMU hands its record over at every start.
                if let Some(choices) = inflight.choices().filter(|_| !self.device.has_noted(&inflight)) {
                    self.device.choose(choices);
                }
                self.device.note_choices(&inflight);
                self.inflight = Some(inflight);
                self.hand_over(|kept| kept.inflight = Some((at, fd)));
                Ok(())
            }
            Err(e) => invalid(format!("in-flight record: {e}")),
        }
    }

    /// Checks what a record is asked for, or handed over, for.
    fn inflight_config(&self, of: InflightAt) -> Result<InflightConfig, ProtocolError> {
        let InflightAt { queues, queue_size, .. } = of;
        let most = self.vrings.len();
        if queues == 0 || usize::from(queues) > most {
            return invalid(format!("in-flight record of {queues} queues; it must be 1..={most}"));
        }
        if queue_size == 0 || queue_size > MAX_QUEUE_SIZE {
            return invalid(format!("in-flight record of {queue_size} descriptors; it must be 1..={MAX_QUEUE_SIZE}"));
        }
        Ok(InflightConfig { queues, queue_size, packed: self.is_packed() })
    }

    /// Starts or stops a queue if that is due now, and with a request queue the others that waited for it.
    fn update_vring(&mut self, index: usize) -> Result<(), ProtocolError> {
        match self.vrings[index].due() {
            Due::Start if self.owes_limits(index) => {
                self.awaits_limits = true;
                self.shared.set_draining(true);
                return Ok(());
            }
            Due::Start if !self.must_wait(index) => self.start(index)?,
            Due::Stop => self.stop_queue(index),
            Due::Start | Due::Nothing => return Ok(()),
        }
        if index < self.device.diskless_queues().into() { Ok(()) } else { self.update_diskless() }
    }

    /// Has queues start that waited for request queues.
    fn update_diskless(&mut self) -> Result<(), ProtocolError> {
        (0..self.device.diskless_queues().into()).try_for_each(|waiting| self.update_vring(waiting))
    }

    /// Whether a queue has to wait for limits. A client may stop and start its rings as often as it likes, and each drain lets
    /// everything go that waits for them. Functions wait for all queues of commands: they would not find those that are in no
    /// ring that runs.
    fn owes_limits(&self, index: usize) -> bool {
        let diskless = usize::from(self.device.diskless_queues());
        let queues = if index < diskless { diskless..self.vrings.len() } else { index..index + 1 };
        { queues }.any(|queue| !self.vrings[queue].is_running() && self.shared.owes_limits(queue))
    }

    /// Whether a queue without disks has to wait for request queues. It may have functions that abort commands, in the record or
    /// in its ring, or gets one before they run. These must find the commands: what the record has in flight must be so again, and
    /// what lies in a ring that was started be in one that runs. QEMU starts all rings, and enables them then.
    fn must_wait(&self, index: usize) -> bool {
        let diskless = usize::from(self.device.diskless_queues());
        let is_behind = |other: usize| !self.vrings[other].is_running() && self.has_work(other);
        index < diskless && (diskless..self.vrings.len()).any(is_behind)
    }

    /// Whether a queue that does not run has something in flight in its record, or available if it is started.
    fn has_work(&self, index: usize) -> bool {
        let record = self.record(index);
        let is_available = |config: QueueConfig| config.is_available(&self.memory, record.as_ref()).unwrap_or(false);
        record.as_ref().is_some_and(Record::is_busy)
            || self.vrings[index].is_started() && self.queue_config(index).ok().flatten().is_some_and(is_available)
    }

    fn record(&self, index: usize) -> Option<Record> {
        self.inflight.as_ref()?.queue(index as u16)
    }

    fn update_vrings(&mut self) -> Result<(), ProtocolError> {
        (0..self.vrings.len()).try_for_each(|index| self.update_vring(index))
    }

    /// Where a queue begins, if it has been said where it is.
    fn queue_config(&self, index: usize) -> Result<Option<QueueConfig>, ProtocolError> {
        let vring = &self.vrings[index];
        let Some(at) = vring.addresses() else { return Ok(None) };
        let guest = |what, address| match self.memory.guest_address(address) {
            Some(found) => Ok(found),
            None => invalid(format!("queue {index}: {what} at {address:#x}, which is outside its memory")),
        };
        Ok(Some(QueueConfig {
            size: vring.size(),
            desc: guest("descriptors", at.desc)?,
            avail: guest("available ring", at.avail)?,
            used: guest("used ring", at.used)?,
            base: self.base(vring),
            packed: self.is_packed(),
            event_idx: self.features & EVENT_IDX != 0,
            log: self.used_log(index)?,
        }))
    }

    /// Whether a ring is to begin where nobody knows that it is.
    fn has_lost_its_place(&self, index: usize, config: &QueueConfig) -> bool {
        // A record that nobody has used comes from a front-end that begins, or whose guest has just arrived and is where the
        // base says.
        let is_known = self.vrings[index].has_run() || self.record(index).is_some();
        !is_known && config.has_lost_its_place(&self.memory).unwrap_or(false)
    }

    fn start(&mut self, index: usize) -> Result<(), ProtocolError> {
        // Before anything is read of rings and record that it begins with: nobody writes to them any more who has the disks.
        if !self.activate()? {
            // It is time to stop, and whoever goes on with the session starts it; or there is nobody any more.
            return Ok(());
        }
        let Some(config) = self.queue_config(index)? else { return Ok(()) };
        if index < self.device.diskless_queues().into() && self.has_work(index) {
            self.shared.await_turns();
        }
        if self.has_lost_its_place(index, &config) {
            return invalid(format!(
                "queue {index} is packed, and no in-flight record says where a dead daemon was in it; reset the guest"
            ));
        }
        let queue = match config.start_recorded(&self.memory, self.record(index)) {
            Ok(queue) => queue,
            Err(e) => return invalid(format!("queue {index}: {e}")),
        };
        let mut fds = self.vrings[index].run();
        fds.log = self.log_signal();
        // What was unpinned since is unmapped, or a ring that starts again and again would leave it all to the end.
        self.unpinned.from.try_iter().for_each(drop);
        let unpinned = self.unpinned.to.clone();
        self.shared
            .run(self.device, index, queue, fds, unpinned)
            .or_else(|e| invalid(format!("queue {index}: {e}")))?;
        self.shared.tell_news();
        Ok(())
    }

    /// Has the disks active, if they are not. Whoever has them locked may be about to stop, or dead, with requests that have
    /// not ended yet. False if it is time to stop, or the client has left.
    fn activate(&self) -> Result<bool, ProtocolError> {
        let patience_ends = Instant::now() + LOCK_PATIENCE;
        loop {
            match self.shared.activate(&**self.device) {
                Err(e) if e.is_locked() && Instant::now() < patience_ends => {
                    if !self.connection.pause(LOOK_AGAIN)? || self.connection.is_hung_up()? {
                        return Ok(false);
                    }
                }
                activated => {
                    activated?;
                    // Whoever left meanwhile has nothing more done: somebody else may have had them since.
                    return Ok(!self.connection.is_hung_up()?);
                }
            }
        }
    }

    fn stop_queue(&mut self, index: usize) {
        self.stop_queues(index..index + 1, Leave::Nothing);
    }

    /// Stops some queues: all drain side by side.
    fn stop_queues(&mut self, which: Range<usize>, leave: Leave) {
        let drained: Vec<usize> = which.filter(|&index| self.vrings[index].pause()).collect();
        if !drained.is_empty() {
            let let_go = self.shared.let_go();
            let draining: Vec<_> = drained.iter().map(|&index| (index, self.shared.stop(index, leave))).collect();
            // Those with functions come last: functions wait for the other queues, where a move that failed has left some whose
            // workers have to be dropped first.
            for (index, leaving) in draining.into_iter().rev() {
                let at_rest = leaving.wait().and_then(Worker::into_queue).map(QueueWorker::into_rest);
                self.shared.has_stopped();
                at_rest.into_iter().for_each(|at_rest| self.vrings[index].come_to_rest(at_rest));
            }
            self.shared.note_drain(&drained, &let_go);
        }
        self.settle();
    }

    /// Gives the disks up when no ring is to run any more.
    fn settle(&self) {
        if !self.vrings.iter().any(Vring::is_to_run) {
            self.shared.deactivate();
        }
    }

    fn stop_all(&mut self) {
        self.stop_queues(0..self.vrings.len(), Leave::Nothing);
    }

    fn reset(&mut self) {
        self.stop_all();
        self.device.reset();
        self.inflight = None;
        self.vrings.iter_mut().for_each(Vring::reset);
        self.settle();
    }

    /// Replaces all of memory.
    ///
    /// The old map is released before the new one is made, so that a client with all the memory that its budget allows can
    /// send its table again. If the new map fails, the session ends, and the old one is not needed.
    fn set_memory(&mut self, regions: Vec<(RegionAt, PeerFd)>) -> Result<(), ProtocolError> {
        self.stop_all();
        let mut memory = GuestMemory::under(self.shared.memory.clone()).logging(self.memory.log().cloned());
        self.memory = Arc::new(GuestMemory::empty());
        self.await_unpinned();
        for (at, fd) in &regions {
            memory = with(&memory, *at, fd)?;
        }
        self.hand_over(|kept| kept.regions = regions);
        self.change_memory(memory)
    }

    /// Nobody waits for what is in flight: what that points into stays where it is.
    fn add_memory(&mut self, at: RegionAt, fd: PeerFd) -> Result<(), ProtocolError> {
        let more = with(&self.memory, at, &fd)?;
        self.hand_over(|kept| kept.regions.push((at, fd)));
        // A map that is pinned is so until its queues stop.
        if more.may_be_pinned() { self.change_memory(more) } else { self.extend_memory(more) }
    }

    /// Has all queues go on in a map that has what there is and more, with their chains in flight.
    fn extend_memory(&mut self, memory: GuestMemory) -> Result<(), ProtocolError> {
        // Kept until the queues have let go of it, so that none of them is the last to do so.
        let _before = mem::replace(&mut self.memory, Arc::new(memory));
        (0..self.vrings.len()).try_for_each(|index| self.update_memory(index))
    }

    /// Has a queue go on in the memory that there is, and log what is to be logged of it.
    fn update_memory(&mut self, index: usize) -> Result<(), ProtocolError> {
        if self.vrings[index].is_running() {
            let (memory, used, signal) = (Arc::clone(&self.memory), self.used_log(index)?, self.log_signal());
            drop(self.shared.change(index, move |worker| worker.extend_memory(&memory, used, signal)));
        }
        Ok(())
    }

    fn remove_memory(&mut self, at: RegionAt) -> Result<(), ProtocolError> {
        match self.memory.without(at.guest_addr, at.size, at.user_addr) {
            Ok(less) => {
                let is_it = |of: &RegionAt| (of.guest_addr, of.size) == (at.guest_addr, at.size);
                self.hand_over(|kept| kept.regions.retain(|(of, _)| !is_it(of)));
                self.change_memory(less)
            }
            Err(e) => invalid(e.to_string()),
        }
    }

    /// Waits until no I/O thread has any of the client's memory pinned; its queues are stopped. Until then what is removed
    /// from memory stays mapped.
    fn await_unpinned(&mut self) {
        let Unpinned { to, from } = mem::replace(&mut self.unpinned, Unpinned::new());
        drop(to);
        let patience_ends = Instant::now() + UNPIN_PATIENCE;
        // It is over when every sender has been dropped, and what comes is unmapped here.
        while from.recv_timeout(patience_ends.saturating_duration_since(Instant::now())).is_ok() {}
    }

    /// Changes to another map. Chains in flight point into the old one, so the queues are drained, and started again where
    /// they were.
    fn change_memory(&mut self, memory: GuestMemory) -> Result<(), ProtocolError> {
        self.stop_all();
        self.await_unpinned();
        self.memory = Arc::new(memory);
        self.update_vrings()
    }

    /// The reply to GET_CONFIG: its header again, and the bytes.
    fn read_config(&self, offset: u32, size: u32, flags: u32) -> Vec<u8> {
        let mut bytes = vec![0; size as usize];
        self.shared.set_news(false);
        self.device.read_config(config_offset(offset), &mut bytes);
        let header = [offset, size, flags].map(u32::to_ne_bytes).concat();
        [header, bytes].concat()
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), ProtocolError> {
        if let Err(e) = self.device.write_config(config_offset(offset), bytes) {
            return invalid(e.to_string());
        }
        if let Some(inflight) = &self.inflight {
            self.device.note_choices(inflight);
        }
        Ok(())
    }
}

/// Why a conversation is over.
enum End {
    /// It was time to stop, and the client waits for no answer.
    ToldTo,
    /// Any other reason.
    Left,
}

/// Whether a request has had its reply, or is only to be acknowledged.
enum Answered {
    Replied,
    Done,
}

fn config_offset(offset: u32) -> u64 {
    offset.checked_sub(OLD_CONFIG_OFFSET).unwrap_or(offset).into()
}

fn with(memory: &GuestMemory, at: RegionAt, fd: &PeerFd) -> Result<GuestMemory, ProtocolError> {
    if memory.regions() == MAX_MEMORY_SLOTS {
        return invalid(format!("more than {MAX_MEMORY_SLOTS} memory regions"));
    }
    let RegionAt { guest_addr, size, user_addr, offset } = at;
    let region = Region { guest_addr, size, user_addr, file: fd, offset };
    memory.with(region).map_err(|e| ProtocolError::Invalid(e.to_string()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use egret_event_loop::EventNotifier;
    use egret_virtio::blk::{Blk, BlkConfig};

    use super::*;
    use crate::queues::QueueCounts;

    #[test]
    fn who_changes_memory_waits_until_nobody_has_it_pinned_and_unmaps_it() {
        let (rules, kickless, errors) = Default::default();
        let counts = QueueCounts { all: 0, diskless: 0 };
        let shared = Shared::new("e", counts, rules, kickless, errors, Vec::new(), &[]);
        let device: Arc<dyn Device> = Blk::new(BlkConfig { capacity_bytes: 512, ..BlkConfig::default() }).unwrap();
        let ((ours, _theirs), stop) = (UnixStream::pair().unwrap(), EventNotifier::new().unwrap());
        let (connection, mut budget) = (Connection::new(ours.into(), stop.as_fd()), ClientBudget::new());
        let mut session = Session::new(&shared, &device, connection, &mut budget, false);
        let memory = Arc::new(GuestMemory::empty());
        let (to, pinned) = (session.unpinned.to.clone(), Arc::clone(&memory));
        let unpins = thread::spawn(move || {
            // Who does not wait for that is early, and found out.
            thread::sleep(Duration::from_millis(300));
            to.send(pinned).unwrap();
        });
        session.await_unpinned();
        assert_eq!(Arc::strong_count(&memory), 1);
        unpins.join().unwrap();
    }
}
