//! The vhost-user wire: messages in, replies out, every byte of them checked.
//!
//! Messages are those of QEMU's `docs/interop/vhost-user.rst`. A message is a header of three
//! 32-bit words (request, flags, size of the body), the body, and descriptors beside it. All integers are in the
//! host's byte order.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use egret_event_loop::{FromPeer, rights};
use egret_vring::vhost_user::{BACKEND_CONFIG_CHANGE, NO_FD, VRING_LOG, flag, request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::device_state::Direction;
use crate::peer_fd::PeerFd;
use crate::protocol_error::{MESSAGE_TIME, ProtocolError, invalid};
use crate::worker::Leave;

/// Memory regions that a client may have at a time, and the most descriptors that one message carries. The specification
/// draws a table of eight; Cloud Hypervisor has as many in one as there are.
pub(crate) const MAX_MEMORY_SLOTS: usize = 64;
/// The largest body of any message that we accept: configuration space with its header.
pub(crate) const MAX_BODY: usize = 4096;
const MAX_CONFIG: u32 = 256;

/// A piece of the peer's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionAt {
    pub guest_addr: u64,
    pub size: u64,
    pub user_addr: u64,
    pub offset: u64,
}

/// The vring addresses, in the peer's own address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingAt {
    pub desc: u64,
    pub used: u64,
    pub avail: u64,
}

/// A dirty log: where it is in its file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogAt {
    pub size: u64,
    pub offset: u64,
}

impl LogAt {
    /// As it lies in a message.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        [self.size, self.offset].map(u64::to_ne_bytes).concat()
    }
}

/// A record of what is in flight: where it is in its file, in bytes, and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InflightAt {
    pub size: u64,
    pub offset: u64,
    pub queues: u16,
    pub queue_size: u16,
}

impl InflightAt {
    /// As the specification has it, and as C's compilers pad it, which is what QEMU sends and insists on.
    const LENGTHS: [usize; 2] = [20, Self::LONG];
    pub(crate) const LONG: usize = 24;

    /// As it lies in a message of `len` bytes.
    pub(crate) fn to_bytes(self, len: usize) -> Vec<u8> {
        let Self { size, offset, queues, queue_size } = self;
        let longs = [size, offset, u64::from(queue_size) << 16 | u64::from(queues)];
        let mut bytes = longs.map(u64::to_ne_bytes).concat();
        bytes.truncate(len);
        bytes
    }

    fn parse(name: &str, body: &[u8]) -> Result<Self, ProtocolError> {
        if !Self::LENGTHS.contains(&body.len()) {
            return invalid(format!("{name} with a body of {} bytes instead of {}", body.len(), Self::LENGTHS[0]));
        }
        let [size, offset] = longs(body);
        let [numbers] = words(&body[16..]);
        Ok(Self { size, offset, queues: numbers as u16, queue_size: (numbers >> 16) as u16 })
    }
}

/// What the peer asks.
#[derive(Debug)]
pub(crate) enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    ResetDevice,
    SetMemTable(Vec<(RegionAt, PeerFd)>),
    SetVringNum(u32, u32),
    /// The queue, its addresses, and by which address its used ring is logged, if it is to be.
    SetVringAddr(u32, RingAt, Option<u64>),
    SetLogBase(LogAt, PeerFd),
    SetLogFd(PeerFd),
    SetVringBase(u32, u32),
    /// The queue, and whether it may leave requests to the record of what is in flight.
    GetVringBase(u32, Leave),
    SetVringKick(u32, Option<PeerFd>),
    SetVringCall(u32, Option<PeerFd>),
    SetVringErr(u32, Option<PeerFd>),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(u32, bool),
    SetBackendReqFd(PeerFd),
    GetConfig {
        offset: u32,
        size: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        bytes: Vec<u8>,
    },
    /// Only what it is for, and how long its answer is to be.
    GetInflight(InflightAt, usize),
    SetInflight(InflightAt, PeerFd),
    GetMaxMemSlots,
    AddMemReg(RegionAt, PeerFd),
    RemMemReg(RegionAt),
    /// Whichever descriptor came along, which is not used.
    SetDeviceState(Direction),
    CheckDeviceState,
}

impl Request {
    /// What it takes of what a client [may order](crate::budget::Pace): much where memory is mapped or made, and where every
    /// queue may be told.
    pub(crate) const fn cost(&self) -> u32 {
        match self {
            Self::SetMemTable(regions) => 16 + 2 * regions.len() as u32,
            Self::AddMemReg(..) | Self::RemMemReg(_) => 16,
            Self::GetInflight(..) | Self::SetInflight(..) | Self::SetDeviceState(..) | Self::CheckDeviceState => 16,
            Self::SetFeatures(_) | Self::SetLogBase(..) | Self::SetLogFd(_) => 16,
            _ => 1,
        }
    }
}

/// What the answer to a request needs to know of it.
#[derive(Debug)]
pub(crate) struct Message {
    number: u32,
    /// The peer wants to hear how it went.
    pub wants_ack: bool,
}

impl From<u32> for Message {
    /// Of a request by its number, nobody hears how it went.
    fn from(number: u32) -> Self {
        Self { number, wants_ack: false }
    }
}

/// One peer's socket, and the descriptor that tells when to stop listening to it.
pub(crate) struct Connection<'a> {
    stream: FromPeer,
    stop: BorrowedFd<'a>,
}

impl<'a> Connection<'a> {
    /// Reads from `stream` until `stop` is readable.
    pub(crate) const fn new(stream: FromPeer, stop: BorrowedFd<'a>) -> Self {
        Self { stream, stop }
    }

    /// The next message; `None` when the peer has left between two messages, or it is time to stop.
    pub(crate) fn receive(&self) -> Result<Option<(Request, Message)>, ProtocolError> {
        let mut fds = Vec::new();
        let mut header = [0; 12];
        let mut begun = None;
        match self.fill(&mut header, &mut fds, &mut begun)? {
            0 => return Ok(None),
            12 => {}
            _ => return Err(ProtocolError::HungUp),
        }
        let [number, flags, size] = words(&header);
        if flags & 3 != flag::VERSION || flags & flag::REPLY != 0 {
            return invalid(format!("a header with flags {flags:#x}; the version must be 1, and no reply was due"));
        }
        if size as usize > MAX_BODY {
            return invalid(format!("a message of {size} bytes; at most {MAX_BODY} were expected"));
        }
        let mut body = vec![0; size as usize];
        if self.fill(&mut body, &mut fds, &mut begun)? != body.len() {
            return Err(ProtocolError::HungUp);
        }
        let request = parse(number, &body, fds)?;
        Ok(Some((request, Message { number, wants_ack: flags & flag::NEED_REPLY != 0 })))
    }

    /// Reads until `buffer` is full; returns how much there was before the peer left or it was time to stop. `begun` is
    /// when the message's first bytes came.
    fn fill(
        &self,
        buffer: &mut [u8],
        fds: &mut Vec<PeerFd>,
        begun: &mut Option<Instant>,
    ) -> Result<usize, ProtocolError> {
        let mut have = 0;
        while have < buffer.len() {
            // For more than are taken: the kernel would close them here, which may take long.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(rights::MOST_SENT))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut buffer[have..])];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match recvmsg(&self.stream, &mut parts, &mut control, flags) {
                Ok(message) => {
                    for part in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(received) = part {
                            fds.extend(received.map(PeerFd::new));
                        }
                    }
                    if fds.len() > MAX_MEMORY_SLOTS {
                        return invalid(format!("{} descriptors; at most {MAX_MEMORY_SLOTS}", fds.len()));
                    }
                    if message.bytes == 0 {
                        break;
                    }
                    have += message.bytes;
                    begun.get_or_insert_with(Instant::now);
                }
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => break,
                Err(Errno::AGAIN) => {
                    let time = begun.map(|begun| MESSAGE_TIME.saturating_sub(begun.elapsed()));
                    match wait(self.stream.as_fd(), self.stop, time)? {
                        Waited::Readable => {}
                        Waited::Stop => break,
                        Waited::TimeOver => return Err(ProtocolError::Late),
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(have)
    }

    /// Lets so much time go by; false when it is time to stop.
    pub(crate) fn pause(&self, time: Duration) -> io::Result<bool> {
        pause(self.stop, time)
    }

    /// Waits for so long at most; false if nothing has come by then, and it is not time to stop.
    pub(crate) fn await_input(&self, time: Duration) -> io::Result<bool> {
        Ok(!matches!(wait(self.stream.as_fd(), self.stop, Some(time))?, Waited::TimeOver))
    }

    /// Whether the peer is gone, whatever it has said before.
    pub(crate) fn is_hung_up(&self) -> io::Result<bool> {
        Ok(poll(&mut [PollFd::new(&self.stream, PollFlags::RDHUP)], Some(&Timespec::default()))? > 0)
    }

    /// The peer's socket.
    pub(crate) const fn stream(&self) -> &FromPeer {
        &self.stream
    }

    /// Likewise, for good.
    pub(crate) fn into_stream(self) -> FromPeer {
        self.stream
    }

    /// Answers `to`.
    pub(crate) fn reply(&self, to: &Message, body: &[u8]) -> Result<(), ProtocolError> {
        self.reply_with(to, body, &[])
    }

    /// Answers `to`, with descriptors.
    pub(crate) fn reply_with(&self, to: &Message, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ProtocolError> {
        Ok(send_message(&self.stream, to.number, flag::VERSION | flag::REPLY, body, fds)?)
    }

    /// Answers `to` with a number, as most requests want it, and acknowledgements too.
    pub(crate) fn reply_u64(&self, to: &Message, value: u64) -> Result<(), ProtocolError> {
        self.reply(to, &value.to_ne_bytes())
    }
}

/// Tells the peer, on the channel it gave for that, that the configuration space changed.
pub(crate) fn send_config_change(channel: &PeerFd) -> io::Result<()> {
    send_message(channel, BACKEND_CONFIG_CHANGE, flag::VERSION, &[], &[])
}

fn send_message(stream: impl AsFd, number: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let header = [number, flags, body.len() as u32].map(u32::to_ne_bytes).concat();
    let bytes = [&header[..], body].concat();
    // A peer that lets its socket fill up has stopped listening: an answer is a few bytes, and one at a time.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, flags)?;
    if sent < bytes.len() { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) }
}

/// What a wait ended with.
enum Waited {
    Readable,
    Stop,
    TimeOver,
}

/// Waits for input; false when it is time to stop.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, stop: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(matches!(wait(fd, stop, None)?, Waited::Readable))
}

/// Lets so much time go by; false when it is time to stop.
pub(crate) fn pause(stop: BorrowedFd<'_>, time: Duration) -> io::Result<bool> {
    Ok(matches!(wait(stop, stop, Some(time))?, Waited::TimeOver))
}

fn wait(fd: BorrowedFd<'_>, stop: BorrowedFd<'_>, time: Option<Duration>) -> io::Result<Waited> {
    let end = time.map(|time| Instant::now() + time);
    let mut both = [PollFd::from_borrowed_fd(fd, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut both, left.as_ref()) {
            Ok(0) => return Ok(Waited::TimeOver),
            Ok(_) if both[1].revents().is_empty() => return Ok(Waited::Readable),
            Ok(_) => return Ok(Waited::Stop),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut each = bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes")));
    std::array::from_fn(|_| each.next().unwrap_or(0))
}

fn longs<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut each = bytes.chunks_exact(8).map(|long| u64::from_ne_bytes(long.try_into().expect("eight bytes")));
    std::array::from_fn(|_| each.next().unwrap_or(0))
}

fn region(bytes: &[u8]) -> RegionAt {
    let [guest_addr, size, user_addr, offset] = longs(bytes);
    RegionAt { guest_addr, size, user_addr, offset }
}

/// Makes a request of a message's parts. Descriptors that it has no use for are closed.
pub(crate) fn parse(number: u32, body: &[u8], mut fds: Vec<PeerFd>) -> Result<Request, ProtocolError> {
    use request::*;
    let name = name(number);
    let sized = |size: usize| match body.len() {
        len if len == size => Ok(()),
        len => invalid(format!("{name} with a body of {len} bytes instead of {size}")),
    };
    let long = || sized(8).map(|()| longs::<1>(body)[0]);
    let state = || sized(8).map(|()| words::<2>(body));
    let ring_fd = |fds: &mut Vec<PeerFd>| {
        let value = long()?;
        match (value & NO_FD == 0, fds.pop(), fds.is_empty()) {
            (true, Some(fd), true) => Ok((value as u32 & 0xff, Some(fd))),
            (false, None, _) => Ok((value as u32 & 0xff, None)),
            _ => invalid(format!("{name} with the wrong number of descriptors")),
        }
    };
    let fd = |fds: &mut Vec<PeerFd>| match fds.pop() {
        Some(fd) => Ok(fd),
        None => invalid(format!("{name} without a descriptor")),
    };
    let empty = |request| sized(0).map(|()| request);
    match number {
        GET_FEATURES => empty(Request::GetFeatures),
        SET_FEATURES => long().map(Request::SetFeatures),
        SET_OWNER => empty(Request::SetOwner),
        RESET_OWNER => empty(Request::ResetOwner),
        SET_MEM_TABLE => mem_table(body, fds).map(Request::SetMemTable),
        SET_VRING_NUM => state().map(|[index, num]| Request::SetVringNum(index, num)),
        SET_VRING_ADDR => sized(40).map(|()| {
            let [index, flags] = words(body);
            let [_, desc, used, avail, log] = longs(body);
            Request::SetVringAddr(index, RingAt { desc, used, avail }, (flags & VRING_LOG != 0).then_some(log))
        }),
        SET_LOG_BASE => {
            sized(16)?;
            let [size, offset] = longs(body);
            fd(&mut fds).map(|fd| Request::SetLogBase(LogAt { size, offset }, fd))
        }
        SET_LOG_FD => {
            sized(0)?;
            fd(&mut fds).map(Request::SetLogFd)
        }
        SET_VRING_BASE => state().map(|[index, base]| Request::SetVringBase(index, base)),
        GET_VRING_BASE => state().map(|[index, _]| Request::GetVringBase(index, Leave::Nothing)),
        GET_VRING_BASE_SKIP_DRAIN => state().map(|[index, _]| Request::GetVringBase(index, Leave::NotBegun)),
        SET_VRING_KICK => ring_fd(&mut fds).map(|(index, fd)| Request::SetVringKick(index, fd)),
        SET_VRING_CALL => ring_fd(&mut fds).map(|(index, fd)| Request::SetVringCall(index, fd)),
        SET_VRING_ERR => ring_fd(&mut fds).map(|(index, fd)| Request::SetVringErr(index, fd)),
        GET_PROTOCOL_FEATURES => empty(Request::GetProtocolFeatures),
        SET_PROTOCOL_FEATURES => long().map(Request::SetProtocolFeatures),
        GET_QUEUE_NUM => empty(Request::GetQueueNum),
        SET_VRING_ENABLE => match state()? {
            [index, on @ (0 | 1)] => Ok(Request::SetVringEnable(index, on == 1)),
            [_, other] => invalid(format!("{name} {other}; it must be 0 or 1")),
        },
        SET_BACKEND_REQ_FD => fd(&mut fds).map(Request::SetBackendReqFd),
        GET_CONFIG | SET_CONFIG => config(number, body),
        GET_INFLIGHT_FD => InflightAt::parse(name, body).map(|at| Request::GetInflight(at, body.len())),
        SET_INFLIGHT_FD => {
            let at = InflightAt::parse(name, body)?;
            fd(&mut fds).map(|fd| Request::SetInflight(at, fd))
        }
        RESET_DEVICE => empty(Request::ResetDevice),
        GET_MAX_MEM_SLOTS => empty(Request::GetMaxMemSlots),
        ADD_MEM_REG => {
            sized(40)?;
            fd(&mut fds).map(|fd| Request::AddMemReg(region(&body[8..]), fd))
        }
        // Front-ends may send a descriptor along, which means nothing.
        REM_MEM_REG => sized(40).map(|()| Request::RemMemReg(region(&body[8..]))),
        // The one phase that there is.
        SET_DEVICE_STATE_FD => match (state()?, fd(&mut fds)?) {
            ([0, 0], _) => Ok(Request::SetDeviceState(Direction::Save)),
            ([1, 0], _) => Ok(Request::SetDeviceState(Direction::Load)),
            ([direction, phase], _) => {
                invalid(format!("{name} of direction {direction} in phase {phase}; there are 0 and 1, in phase 0"))
            }
        },
        CHECK_DEVICE_STATE => empty(Request::CheckDeviceState),
        other => invalid(format!("request {other}, which was not negotiated")),
    }
}

fn mem_table(body: &[u8], fds: Vec<PeerFd>) -> Result<Vec<(RegionAt, PeerFd)>, ProtocolError> {
    let [count] = words(body);
    if count as usize > MAX_MEMORY_SLOTS {
        return invalid(format!("SET_MEM_TABLE with {count} regions; at most {MAX_MEMORY_SLOTS}"));
    }
    // A front-end may have more rows than regions, and send them all: Linux's virtio_uml always has two.
    if body.len() < 8 + 32 * count as usize || body.len() % 32 != 8 || fds.len() != count as usize {
        return invalid(format!("SET_MEM_TABLE of {count} regions in {} bytes, {} descriptors", body.len(), fds.len()));
    }
    Ok(body[8..].chunks_exact(32).map(region).zip(fds).collect())
}

fn config(number: u32, body: &[u8]) -> Result<Request, ProtocolError> {
    let [offset, size, flags] = words(body);
    if body.len() < 12 || body.len() - 12 != size as usize || size > MAX_CONFIG {
        return invalid(format!("configuration access of {size} bytes in a body of {}", body.len()));
    }
    Ok(match number {
        request::GET_CONFIG => Request::GetConfig { offset, size, flags },
        _ => Request::SetConfig { offset, bytes: body[12..].to_vec() },
    })
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn of_longs(longs: &[u64]) -> Vec<u8> {
        longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
    }

    /// With so many descriptors.
    fn parsed(number: u32, body: &[u8], fds: usize) -> Result<Request, ProtocolError> {
        let fd = || PeerFd::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        parse(number, body, std::iter::repeat_with(fd).take(fds).collect())
    }

    #[test]
    fn a_message_has_the_length_and_the_descriptors_that_its_request_takes_and_costs_what_that_is_worth() {
        use request::*;
        // Number, lengths of bodies, descriptors, cost.
        let requests: [(u32, &[usize], &[usize], u32); 28] = [
            (GET_FEATURES, &[0], &[0, 1, 2], 1),
            (SET_FEATURES, &[8], &[0, 1, 2], 16),
            (SET_OWNER, &[0], &[0, 1, 2], 1),
            (RESET_OWNER, &[0], &[0, 1, 2], 1),
            (SET_VRING_NUM, &[8], &[0, 1, 2], 1),
            (SET_VRING_ADDR, &[40], &[0, 1, 2], 1),
            (SET_LOG_BASE, &[16], &[1, 2], 16),
            (SET_LOG_FD, &[0], &[1, 2], 16),
            (SET_VRING_BASE, &[8], &[0, 1, 2], 1),
            (GET_VRING_BASE, &[8], &[0, 1, 2], 1),
            (GET_VRING_BASE_SKIP_DRAIN, &[8], &[0, 1, 2], 1),
            (SET_VRING_KICK, &[8], &[1], 1),
            (SET_VRING_CALL, &[8], &[1], 1),
            (SET_VRING_ERR, &[8], &[1], 1),
            (GET_PROTOCOL_FEATURES, &[0], &[0, 1, 2], 1),
            (SET_PROTOCOL_FEATURES, &[8], &[0, 1, 2], 1),
            (GET_QUEUE_NUM, &[0], &[0, 1, 2], 1),
            (SET_VRING_ENABLE, &[8], &[0, 1, 2], 1),
            (SET_BACKEND_REQ_FD, &[0, 4, 8, 12, 16, 20, 24, 40, 48], &[1, 2], 1),
            (GET_INFLIGHT_FD, &[20, 24], &[0, 1, 2], 16),
            (SET_INFLIGHT_FD, &[20, 24], &[1, 2], 16),
            (RESET_DEVICE, &[0], &[0, 1, 2], 1),
            (GET_MAX_MEM_SLOTS, &[0], &[0, 1, 2], 1),
            (ADD_MEM_REG, &[40], &[1, 2], 16),
            (REM_MEM_REG, &[40], &[0, 1, 2], 16),
            (SET_DEVICE_STATE_FD, &[8], &[1, 2], 16),
            (CHECK_DEVICE_STATE, &[0], &[0, 1, 2], 16),
            (999, &[], &[], 0),
        ];
        for (number, lengths, descriptors, cost) in requests {
            for len in [0, 4, 8, 12, 16, 20, 24, 40, 48] {
                for fds in 0..3 {
                    let what = format!("request {number} of {len} bytes with {fds} descriptors");
                    match parsed(number, &vec![0; len], fds) {
                        Ok(request) => {
                            assert!(lengths.contains(&len) && descriptors.contains(&fds), "{what}");
                            assert_eq!(request.cost(), cost, "{what}");
                        }
                        Err(e) => assert!(!lengths.contains(&len) || !descriptors.contains(&fds), "{what}: {e}"),
                    }
                }
            }
        }
        // Who says that there is no descriptor sends none.
        for number in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
            for (fds, is_right) in [(0, true), (1, false), (2, false)] {
                assert_eq!(parsed(number, &of_longs(&[NO_FD | 3]), fds).is_ok(), is_right, "{number} with {fds}");
            }
        }
        for (count, bytes, fds, is_right) in [
            (0, 8, 0, true),
            (1, 40, 1, true),
            (64, 2056, 64, true),
            (65, 2088, 65, false),
            (1, 72, 1, true),
            (1, 39, 1, false),
            (1, 71, 1, false),
            (1, 73, 1, false),
            (2, 40, 2, false),
            (1, 40, 0, false),
            (1, 40, 2, false),
        ] {
            let mut body = vec![0; bytes];
            body[0] = count;
            let request = parsed(SET_MEM_TABLE, &body, fds);
            assert_eq!(request.as_ref().is_ok(), is_right, "{count} regions in {bytes} bytes with {fds} descriptors");
            assert!(request.is_err() || request.unwrap().cost() == 16 + 2 * u32::from(count));
        }
        for (len, size, is_right) in [
            (11, 0, false),
            (12, 0, true),
            (12, 1, false),
            (13, 1, true),
            (13, 0, false),
            (268, 256, true),
            (269, 257, false),
        ] {
            let mut body = bytes(&[0, size, 0, 0]);
            body.resize(len, 0);
            for number in [GET_CONFIG, SET_CONFIG] {
                let request = parsed(number, &body, 0);
                assert_eq!(request.as_ref().is_ok(), is_right, "{number} of {size} bytes in {len}");
                assert!(request.is_err() || request.unwrap().cost() == 1);
            }
        }
    }

    #[test]
    fn who_leaves_between_two_messages_has_left_and_who_does_so_in_one_has_hung_up() {
        use std::io::Write;
        use std::os::unix::net::UnixStream;
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let message = bytes(&[request::SET_VRING_NUM, flag::VERSION, 8, 0, 16]);
        for said in [0, 1, 11, 12, 19, 20, 21] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(&message.repeat(2)[..said]).unwrap();
            drop(theirs);
            let connection = Connection::new(ours.into(), stop.as_fd());
            if said >= message.len() {
                assert!(matches!(connection.receive(), Ok(Some((Request::SetVringNum(0, 16), _)))), "{said}");
            }
            match connection.receive() {
                Ok(None) => assert_eq!(said % message.len(), 0),
                Err(ProtocolError::HungUp) => assert_ne!(said % message.len(), 0),
                other => panic!("{said}: {other:?}"),
            }
        }
    }

    #[test]
    fn what_a_message_says_is_what_is_asked_for() {
        use request::*;
        let said = |number, body: &[u8], fds| parsed(number, body, fds).unwrap();
        let two = &bytes(&[5, 7])[..];
        assert!(
            matches!(said(SET_FEATURES, &of_longs(&[1 << 40]), 0), Request::SetFeatures(features) if features == 1 << 40)
        );
        assert!(matches!(said(SET_VRING_NUM, two, 0), Request::SetVringNum(5, 7)));
        assert!(matches!(said(SET_VRING_BASE, two, 0), Request::SetVringBase(5, 7)));
        assert!(matches!(said(GET_VRING_BASE, two, 0), Request::GetVringBase(5, Leave::Nothing)));
        assert!(matches!(said(GET_VRING_BASE_SKIP_DRAIN, two, 0), Request::GetVringBase(5, Leave::NotBegun)));
        assert!(matches!(said(SET_VRING_ENABLE, &bytes(&[5, 0]), 0), Request::SetVringEnable(5, false)));
        assert!(matches!(said(SET_VRING_ENABLE, &bytes(&[5, 1]), 0), Request::SetVringEnable(5, true)));
        assert!(parsed(SET_VRING_ENABLE, &bytes(&[5, 2]), 0).is_err());
        // A queue's number has eight bits.
        for (number, fd) in [(0x0205, true), (0x0205 | NO_FD, false)] {
            let (name, fds) = (of_longs(&[number]), usize::from(fd));
            assert!(
                matches!(said(SET_VRING_KICK, &name, fds), Request::SetVringKick(5, found) if found.is_some() == fd)
            );
            assert!(
                matches!(said(SET_VRING_CALL, &name, fds), Request::SetVringCall(5, found) if found.is_some() == fd)
            );
            assert!(matches!(said(SET_VRING_ERR, &name, fds), Request::SetVringErr(5, found) if found.is_some() == fd));
        }
        for (flags, logged) in [(0, None), (VRING_LOG, Some(0x4000)), (!VRING_LOG, None)] {
            let body = [bytes(&[5, flags]), of_longs(&[0x1000, 0x2000, 0x3000, 0x4000])].concat();
            let at = RingAt { desc: 0x1000, used: 0x2000, avail: 0x3000 };
            let Request::SetVringAddr(5, found, log) = said(SET_VRING_ADDR, &body, 0) else { panic!("{flags}") };
            assert_eq!((found, log), (at, logged));
        }
        let log = LogAt { size: 0x1000, offset: 0x2000 };
        assert!(matches!(said(SET_LOG_BASE, &log.to_bytes(), 1), Request::SetLogBase(found, _) if found == log));
        let at = InflightAt { size: 1 << 33, offset: 2, queues: 0x1234, queue_size: 0x5678 };
        for len in [20, 24] {
            let body = at.to_bytes(len);
            assert_eq!(body.len(), len);
            assert!(
                matches!(said(GET_INFLIGHT_FD, &body, 0), Request::GetInflight(found, asked) if (found, asked) == (at, len))
            );
            assert!(matches!(said(SET_INFLIGHT_FD, &body, 1), Request::SetInflight(found, _) if found == at));
        }
        let row = |first: u64| of_longs(&[first, first + 1, first + 2, first + 3]);
        let is_row = |found: RegionAt, first| {
            [found.guest_addr, found.size, found.user_addr, found.offset] == [first, first + 1, first + 2, first + 3]
        };
        let one = [of_longs(&[0]), row(10)].concat();
        assert!(matches!(said(ADD_MEM_REG, &one, 1), Request::AddMemReg(found, _) if is_row(found, 10)));
        assert!(matches!(said(REM_MEM_REG, &one, 0), Request::RemMemReg(found) if is_row(found, 10)));
        let Request::SetMemTable(table) = said(SET_MEM_TABLE, &[of_longs(&[2]), row(10), row(20)].concat(), 2) else {
            panic!("no table")
        };
        assert!(table.iter().zip([10, 20]).all(|((found, _), first)| is_row(*found, first)) && table.len() == 2);
        let config = [&bytes(&[32, 2, 1])[..], &[8, 9]].concat();
        assert!(matches!(said(GET_CONFIG, &config, 0), Request::GetConfig { offset: 32, size: 2, flags: 1 }));
        assert!(matches!(said(SET_CONFIG, &config, 0), Request::SetConfig { offset: 32, bytes } if bytes == [8, 9]));
        for (said, expected) in [
            ([0, 0], Some(Direction::Save)),
            ([1, 0], Some(Direction::Load)),
            ([0, 1], None),
            ([1, 1], None),
            ([2, 0], None),
        ] {
            match parsed(SET_DEVICE_STATE_FD, &bytes(&said), 1) {
                Ok(Request::SetDeviceState(direction)) => assert_eq!(Some(direction), expected),
                other => assert!(other.is_err() && expected.is_none(), "{said:?}"),
            }
        }
    }
}
