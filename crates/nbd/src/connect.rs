//! From an address to an export that takes requests, within a time, and until somebody does not want it any more.

#![forbid(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use egret_event_loop::{EventNotifier, rights};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};

use crate::channel::{Channel, ChannelError, Received};
use crate::handshake::{self, Export, HandshakeError};
use crate::protocol::{Headers, Reply, Request, chunk, command, errno};
use crate::target::{Address, Encryption, Target};

/// How long one attempt may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// After how long a peer is given up that does not acknowledge anything.
const SILENCE: Duration = Duration::from_secs(30);

/// A connection whose export takes requests.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) channel: Channel,
    pub(crate) export: Export,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody listens there, or the network does not lead there.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// Landlock does not let it.
    #[error(
        "the sandbox lets egret connect to those TCP ports that the configuration named when it started, not to {0}; use \
         server.type=unix, or start with --sandbox=off"
    )]
    Forbidden(u16),
    /// The name leads nowhere.
    #[error("cannot look up '{0}': {1}; give an address, for the sandbox does not let names be looked up")]
    LookUp(String, #[source] io::Error),
    /// What the server says.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// It is not to be spoken with.
    #[error("{0}")]
    Encrypt(#[source] ChannelError),
    /// Likewise.
    #[error("TLS was not begun: {0}")]
    ShakeHands(#[source] io::Error),
}

impl Connection {
    /// Connects and haggles, for [`PATIENCE`] at most; `stop` gives it up when it is set.
    pub(crate) fn make(target: &Target, stop: &EventNotifier) -> Result<Self, ConnectError> {
        let deadline = Instant::now() + PATIENCE;
        let socket = match &target.address {
            Address::Unix(path) => {
                let address = SocketAddrUnix::new(path).map_err(|e| ConnectError::Connect(e.into()))?;
                open(AddressFamily::UNIX, &address, deadline, stop).map_err(ConnectError::Connect)?
            }
            Address::Inet { host, port } => {
                let found = look_up(host, *port).map_err(|e| ConnectError::LookUp(host.clone(), e))?;
                open_one(&found, deadline, stop).map_err(|e| match e.kind() {
                    io::ErrorKind::PermissionDenied => ConnectError::Forbidden(*port),
                    _ => ConnectError::Connect(e),
                })?
            }
        };
        let mut channel = Channel::new(socket);
        let mut stream = Stream { channel: &mut channel, deadline, stop };
        let greeting = handshake::greet(&mut stream)?;
        if let Some(Encryption { credentials, name }) = &target.encryption {
            handshake::start_tls(&mut stream, greeting)?;
            let session = credentials.session(name.as_deref()).map_err(|e| ConnectError::Encrypt(e.into()))?;
            stream.channel.encrypt(session);
            stream.flush().map_err(ConnectError::ShakeHands)?;
        }
        let export = handshake::choose(&mut stream, greeting, &target.export)?;
        Ok(Self { channel, export })
    }

    /// Whether the other end still is there, as far as this one has heard.
    pub(crate) fn is_alive(&self) -> bool {
        let end = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut one = [PollFd::new(&self.channel, end)];
        matches!(poll(&mut one, Some(&Timespec::default())), Ok(0))
    }

    /// Has the server make stable what was written, and waits for what it says of that.
    pub(crate) fn flush(&mut self, deadline: Instant, stop: &EventNotifier) -> io::Result<Result<(), Errno>> {
        let mut stream = Stream { channel: &mut self.channel, deadline, stop };
        let headers = self.export.headers;
        let flush = Request { flags: 0, command: command::FLUSH, cookie: u64::MAX, offset: 0, length: 0 };
        let mut header = [0; 32];
        let len = flush.write(headers, &mut header);
        stream.write_all(&header[..len])?;
        stream.flush()?;
        // A reply without data, in whichever form: a simple one is the shortest.
        let mut bytes = [0; 32];
        let len = if headers == Headers::Extended { 32 } else { 16 };
        stream.read_exact(&mut bytes[..len])?;
        let broken = || io::Error::other("the server breaks the protocol");
        let reply = match Reply::read(headers, &bytes[..len]).map_err(io::Error::other)? {
            Some((reply, _)) => reply,
            None => {
                stream.read_exact(&mut bytes[16..20])?;
                Reply::read(headers, &bytes[..20]).map_err(io::Error::other)?.ok_or_else(broken)?.0
            }
        };
        match reply {
            Reply::Simple { error: 0, cookie: u64::MAX } => Ok(Ok(())),
            Reply::Chunk { flags: chunk::FLAG_DONE, kind: chunk::NONE, cookie: u64::MAX, length: 0, .. } => Ok(Ok(())),
            Reply::Simple { error, cookie: u64::MAX } => Ok(Err(errno(error))),
            Reply::Chunk { kind, cookie: u64::MAX, length: 6.., .. } if kind & chunk::IS_ERROR != 0 => {
                let mut error = [0; 4];
                stream.read_exact(&mut error)?;
                Ok(Err(errno(u32::from_be_bytes(error))))
            }
            _ => Err(broken()),
        }
    }

    /// Says goodbye, if that takes no time.
    pub(crate) fn close(mut self) {
        let goodbye = Request { flags: 0, command: command::DISCONNECT, cookie: 0, offset: 0, length: 0 };
        let mut header = [0; 32];
        let len = goodbye.write(self.export.headers, &mut header);
        let _ = self.channel.send(&[IoSlice::new(&header[..len])]);
        self.channel.say_goodbye();
    }
}

/// Where a name leads; an address leads to itself. No file is read for either, nor for `localhost`.
///
/// # Errors
/// The name leads nowhere, or nobody may be asked.
pub fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let known = match host {
        "localhost" => vec![IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)],
        _ => host.parse().ok().into_iter().collect(),
    };
    if !known.is_empty() {
        return Ok(known.into_iter().map(|address| SocketAddr::new(address, port)).collect());
    }
    Ok((host, port).to_socket_addrs()?.collect())
}

/// Connects to the first address that answers. None may use up the time of those that come after it.
fn open_one(found: &[SocketAddr], deadline: Instant, stop: &EventNotifier) -> io::Result<OwnedFd> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for (address, left) in found.iter().zip((1..=found.len() as u32).rev()) {
        let now = Instant::now();
        let share = deadline.saturating_duration_since(now) / left;
        match open_tcp(*address, now + share, stop) {
            Ok(socket) => return Ok(socket),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn open_tcp(address: SocketAddr, deadline: Instant, stop: &EventNotifier) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = open(family, &address, deadline, stop)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    // A server whose host is gone says nothing: what is sent is not acknowledged, and where nothing is sent it is asked.
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, SILENCE / 2)?;
    sockopt::set_tcp_keepintvl(&socket, SILENCE / 6)?;
    sockopt::set_tcp_keepcnt(&socket, 3)?;
    sockopt::set_tcp_user_timeout(&socket, SILENCE.as_millis() as u32)?;
    Ok(socket)
}

fn open(
    family: AddressFamily,
    address: &impl rustix::net::addr::SocketAddrArg,
    deadline: Instant,
    stop: &EventNotifier,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if family == AddressFamily::UNIX {
        rights::refuse(&socket);
    }
    if let Err(e) = connect(&socket, address) {
        if e != Errno::INPROGRESS {
            return Err(e.into());
        }
        wait(&socket, PollFlags::OUT, deadline, stop)?;
        // Asked again, it says what has come of it.
        connect(&socket, address)?;
    }
    Ok(socket)
}

/// Waits until a socket is ready.
fn wait(socket: impl AsFd, what: PollFlags, deadline: Instant, stop: &EventNotifier) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut both = [PollFd::new(&socket, what), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut both, Timespec::try_from(left).ok().as_ref()) {
            Ok(_) if !both[1].revents().is_empty() => return Err(Errno::CANCELED.into()),
            Ok(_) if !both[0].revents().is_empty() => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Waits for so long, or until `stop` is set; false if it is.
pub(crate) fn pause(length: Duration, stop: &EventNotifier) -> bool {
    let mut one = [PollFd::new(stop, PollFlags::IN)];
    matches!(retry_on_intr(|| poll(&mut one, Timespec::try_from(length).ok().as_ref())), Ok(0))
}

/// A connection that takes no longer than it may.
struct Stream<'a> {
    channel: &'a mut Channel,
    deadline: Instant,
    stop: &'a EventNotifier,
}

impl Stream<'_> {
    /// Whether there is time, and somebody wants it: what comes without end may never have to be waited for.
    fn check(&self) -> io::Result<()> {
        if !pause(Duration::ZERO, self.stop) {
            return Err(Errno::CANCELED.into());
        }
        if self.deadline <= Instant::now() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    /// Does something until it does not have to be waited for.
    fn persist<T>(
        &mut self,
        what: PollFlags,
        mut act: impl FnMut(&mut Channel) -> Result<T, ChannelError>,
    ) -> io::Result<T> {
        loop {
            self.check()?;
            match act(self.channel) {
                Err(ChannelError::System(Errno::AGAIN)) => {
                    // What TLS wants to say first is what keeps it.
                    let what = if self.channel.is_flushed() { what } else { PollFlags::OUT };
                    wait(&*self.channel, what, self.deadline, self.stop)?;
                }
                Err(ChannelError::System(Errno::INTR)) => {}
                Err(ChannelError::System(e)) => return Err(e.into()),
                Err(e @ ChannelError::Tls(_)) => return Err(io::Error::other(e)),
                Err(e @ ChannelError::Truncated) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, e)),
                Ok(done) => return Ok(done),
            }
        }
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let received = self.persist(PollFlags::IN, |channel| channel.receive(&mut [IoSliceMut::new(into)]))?;
            if !matches!(received, Received { bytes: 0, more: true }) {
                return Ok(received.bytes);
            }
        }
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.persist(PollFlags::OUT, |channel| channel.send(&[IoSlice::new(bytes)]))
    }

    /// All that was written is the system's; and keys are agreed on, where it is encrypted.
    fn flush(&mut self) -> io::Result<()> {
        while self.channel.is_shaking_hands() {
            self.persist(PollFlags::IN, Channel::shake_hands)?;
        }
        self.persist(PollFlags::OUT, Channel::flush)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn nothing_is_read_that_comes_too_late_or_for_nobody_though_it_is_there() {
        let (mut peer, socket) = UnixStream::pair().unwrap();
        let (mut channel, stop) = (Channel::new(socket.into()), EventNotifier::new().unwrap());
        let now = Instant::now();
        let mut read = |deadline| Stream { channel: &mut channel, deadline, stop: &stop }.read_exact(&mut [0]);
        peer.write_all(b"x").unwrap();
        assert_eq!(read(now).unwrap_err().kind(), io::ErrorKind::TimedOut);
        stop.set();
        let refused = |e: io::Error| assert_eq!(Errno::from_io_error(&e), Some(Errno::CANCELED), "{e}");
        refused(read(now + PATIENCE).unwrap_err());
        stop.clear();
        read(now + PATIENCE).unwrap();
        // Nor is it waited for.
        stop.set();
        refused(read(now + PATIENCE).unwrap_err());
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let [silent, answers] = [bind(), bind()];
        let addresses = [&silent, &answers].map(|listener| listener.local_addr().unwrap());
        // Who listens and accepts nobody takes as many as this, and says nothing to the next.
        rustix::net::listen(&silent, 0).unwrap();
        let _taken = TcpStream::connect(addresses[0]).unwrap();
        wait(&silent, PollFlags::IN, Instant::now() + PATIENCE, &EventNotifier::new().unwrap()).unwrap();
        let stop = EventNotifier::new().unwrap();
        let opened = open_one(&addresses, Instant::now() + PATIENCE / 5, &stop);
        drop((opened.unwrap(), answers.accept().unwrap()));
        let alone = open_one(&addresses[..1], Instant::now() + PATIENCE / 50, &stop);
        assert_eq!(alone.unwrap_err().kind(), io::ErrorKind::TimedOut, "nobody answers there");
    }
}
