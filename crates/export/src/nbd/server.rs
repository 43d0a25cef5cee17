//! The server: a socket, the clients that have not chosen an export yet, and the names of exports.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use egret_confine::{Bounds, ThreadKind};
use egret_event_loop::{EventNotifier, FromPeer};
use egret_nbd::tls::ServerCredentials;
use egret_nbd::{Channel, ChannelError, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay};
use rustix::net::{SocketFlags, accept_with};

use super::client::{NewClient, describe};
use super::export::Offer;
use super::handshake::{Chosen, Ended, Fed, Handshake, Offers};
use crate::peer_log::PeerLog;
use crate::queues::lock;
use crate::socket::{Access, BindError, Rights, UnixSocket};

/// Clients that are in their handshakes at a time, beside those that have chosen: who says nothing takes no place of theirs.
const MOST_GUESTS: usize = 64;
/// How long a client has its handshake for itself. After that the one that has been in it longest makes room when there are
/// so many and somebody waits.
const UNDISTURBED: Duration = Duration::from_millis(250);
/// How long nobody is let in after the system could not.
const REST: Duration = Duration::from_secs(1);
/// What is read of a handshake at a time, and so the most that a client has sent beyond it.
const INPUT: usize = 4096;

/// Where clients connect.
#[derive(Clone, Debug)]
pub enum NbdAddress {
    /// A UNIX socket that is made at this path and removed again, and who may connect.
    Unix(PathBuf, Access),
    /// A TCP port of this host.
    Tcp(String, u16),
}

/// How a server is to be.
#[derive(Clone, Debug)]
pub struct NbdServerConfig {
    /// Where it listens.
    pub address: NbdAddress,
    /// Clients of its exports that it has at a time; 0: any number. Who comes then waits to be let in.
    pub max_connections: u32,
    /// How long a client may take to choose an export; zero: as long as it likes, while nobody needs its room.
    pub handshake_max: Duration,
    /// What all clients encrypt by, if any do.
    pub tls: Option<ServerCredentials>,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum NbdServerError {
    /// There is no socket at the path.
    #[error("NBD server: cannot listen on socket '{0}': {1}")]
    Bind(PathBuf, #[source] BindError),
    /// The port is taken, or there is no such host.
    #[error("NBD server: cannot listen on host '{0}', port {1}: {2}")]
    Tcp(String, u16, #[source] io::Error),
    /// It may not.
    #[error(
        "NBD server: cannot listen on host '{0}', port {1}: {2}; the sandbox leaves the port that --nbd-server names, and \
         that as long as it is listened on; use addr.type=unix, or start with --sandbox=off"
    )]
    Port(String, u16, #[source] io::Error),
    /// The system ran out of something.
    #[error("NBD server: {0}")]
    System(#[from] io::Error),
}

impl NbdServerError {
    fn of_port(host: &str, port: u16, e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::PermissionDenied => Self::Port(host.to_owned(), port, e),
            _ => Self::Tcp(host.to_owned(), port, e),
        }
    }
}

/// A server, which listens as long as it is there. Its exports are gone before it is.
pub struct NbdServer {
    registry: Arc<Registry>,
    stop: EventNotifier,
    thread: Option<JoinHandle<()>>,
}

/// What the server's thread shares with others.
struct Registry {
    offers: Mutex<Offers>,
    clients: AtomicUsize,
    /// Clients are let in.
    is_open: AtomicBool,
    /// Clients are, or one has left.
    left: EventNotifier,
}

#[cfg(test)]
impl Registry {
    /// One that lets clients in.
    fn open() -> Arc<Self> {
        Arc::new(Self {
            offers: Mutex::default(),
            clients: AtomicUsize::new(0),
            is_open: AtomicBool::new(true),
            left: EventNotifier::new().unwrap(),
        })
    }
}

/// An export's name, while it is in a server's list.
pub(super) struct Listed {
    registry: Arc<Registry>,
    name: String,
}

impl Drop for Listed {
    fn drop(&mut self) {
        lock(&self.registry.offers).remove(&self.name);
    }
}

/// A client's place among those of its server and of its export, from when it has chosen one.
pub(super) struct Place {
    registry: Arc<Registry>,
    of_export: Arc<AtomicUsize>,
}

impl Place {
    fn new(registry: &Arc<Registry>, of_export: &Arc<AtomicUsize>) -> Self {
        registry.clients.fetch_add(1, Ordering::AcqRel);
        of_export.fetch_add(1, Ordering::AcqRel);
        Self { registry: Arc::clone(registry), of_export: Arc::clone(of_export) }
    }

    /// One of a server that there is not.
    #[cfg(test)]
    pub(super) fn nowhere() -> Self {
        Self::new(&Registry::open(), &Arc::default())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of_export.fetch_sub(1, Ordering::AcqRel);
        self.registry.clients.fetch_sub(1, Ordering::AcqRel);
        self.registry.left.set();
    }
}

impl NbdServer {
    /// Begins to listen. Clients are let in from when it is [opened](Self::open).
    ///
    /// # Errors
    ///
    /// The address is taken or unusable; nothing is left behind.
    pub fn start(config: NbdServerConfig) -> Result<Self, NbdServerError> {
        let listener = Listener::open(&config.address)?;
        let (stop, left) = (EventNotifier::new()?, EventNotifier::new()?);
        let (offers, clients, is_open) = (Mutex::default(), AtomicUsize::new(0), AtomicBool::new(false));
        let registry = Arc::new(Registry { offers, clients, is_open, left });
        let most = if config.max_connections == 0 { usize::MAX } else { config.max_connections as usize };
        let hall = Hall {
            listener,
            registry: Arc::clone(&registry),
            log: PeerLog::about("NBD server: "),
            most,
            patience: config.handshake_max,
            tls: config.tls,
            rests_until: None,
            guests: Vec::new(),
        };
        let (theirs, bounds) = (stop.clone(), Bounds::of_this_thread());
        let thread =
            std::thread::Builder::new().name("nbd-server".to_owned()).stack_size(256 << 10).spawn(move || {
                bounds.narrow(ThreadKind::Session);
                hall.serve(&theirs);
            })?;
        Ok(Self { registry, stop, thread: Some(thread) })
    }

    /// Lets clients in: who comes before its exports are there would be told that they are not.
    pub fn open(&self) {
        self.registry.is_open.store(true, Ordering::Release);
        self.registry.left.set();
    }

    /// Whether an export of this name is in its list.
    pub fn has_export(&self, name: &str) -> bool {
        lock(&self.registry.offers).contains_key(name)
    }

    /// Puts an export into its list; `None` if its name is there.
    pub(super) fn list(&self, offer: &Arc<Offer>) -> Option<Listed> {
        let name = offer.options.name.clone();
        let mut offers = lock(&self.registry.offers);
        if offers.contains_key(&name) {
            return None;
        }
        offers.insert(name.clone(), Arc::clone(offer));
        Some(Listed { registry: Arc::clone(&self.registry), name })
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

enum Listener {
    Unix(UnixSocket),
    Tcp(TcpListener),
}

impl Listener {
    fn open(address: &NbdAddress) -> Result<Self, NbdServerError> {
        match address {
            NbdAddress::Unix(path, access) => UnixSocket::bind(path, access, Rights::Refused)
                .map(Self::Unix)
                .map_err(|e| NbdServerError::Bind(path.clone(), e)),
            NbdAddress::Tcp(host, port) => {
                let listen = || {
                    let addresses = egret_nbd::look_up(host, *port)?;
                    let listener = TcpListener::bind(addresses.as_slice())?;
                    listener.set_nonblocking(true)?;
                    Ok(Self::Tcp(listener))
                };
                listen().map_err(|e| NbdServerError::of_port(host, *port, e))
            }
        }
    }

    /// The next client, if there is one that is let in.
    fn accept(&self, log: &PeerLog) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::Unix(socket) => Ok(socket.accept(log)?.map(FromPeer::into_fd)),
            Self::Tcp(listener) => match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(client) => {
                    // Replies should not wait for others, and who is gone without a word should be found out. Without
                    // either it is slower, and right.
                    let _ = set_tcp_nodelay(&client, true);
                    let _ = set_socket_keepalive(&client, true);
                    Ok(Some(client))
                }
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
                Err(e) => Err(e.into()),
            },
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Where clients are until they have chosen.
struct Hall {
    listener: Listener,
    registry: Arc<Registry>,
    log: PeerLog,
    most: usize,
    patience: Duration,
    tls: Option<ServerCredentials>,
    /// Nobody is let in before this, because the system could not.
    rests_until: Option<Instant>,
    /// In the order in which they came.
    guests: Vec<Guest>,
}

/// A client that has not chosen an export yet.
struct Guest {
    channel: Channel,
    handshake: Handshake,
    /// It is encrypted by this when it has heard that it may.
    begins_tls: bool,
    /// It may have said more, of which no event will tell.
    has_input: bool,
    since: Instant,
    deadline: Option<Instant>,
}

/// What became of a guest.
enum Fate {
    Stays(Guest),
    Chose(Channel, Chosen),
    Left(Option<String>),
}

impl Hall {
    fn serve(mut self, stop: &EventNotifier) {
        loop {
            let now = Instant::now();
            let (lets_in, wakes_at) = self.look_ahead(now);
            let timeout = wakes_at.and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
            let mut fds = vec![
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(&self.registry.left, PollFlags::IN),
                PollFd::new(&self.listener, if lets_in { PollFlags::IN } else { PollFlags::empty() }),
            ];
            fds.extend(self.guests.iter_mut().map(|guest| {
                let wants = if guest.has_output() { PollFlags::OUT } else { PollFlags::IN };
                PollFd::from_borrowed_fd(guest.channel.as_fd(), wants)
            }));
            if poll(&mut fds, timeout.as_ref()).is_err() {
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return;
            }
            self.registry.left.clear();
            self.serve_guests(&ready[3..]);
            if lets_in && ready[2] {
                self.let_in();
            }
        }
    }

    /// Whether somebody is let in now, and when there is something to do though nobody says anything.
    fn look_ahead(&mut self, now: Instant) -> (bool, Option<Instant>) {
        self.rests_until = self.rests_until.filter(|until| *until > now);
        let room_at = self.guests.first().filter(|_| self.guests.len() >= MOST_GUESTS);
        let room_at = room_at.map(|first| first.since + UNDISTURBED).filter(|at| *at > now);
        let is_open = self.registry.is_open.load(Ordering::Acquire);
        let lets_in = is_open && !self.is_full() && room_at.is_none() && self.rests_until.is_none();
        let deadlines = self.guests.iter().filter_map(|guest| guest.deadline).chain(self.rests_until).chain(room_at);
        let is_behind = self.guests.iter().any(Guest::is_behind).then_some(now);
        (lets_in, deadlines.chain(is_behind).min())
    }

    /// Whether all places are taken.
    fn is_full(&self) -> bool {
        self.registry.clients.load(Ordering::Acquire) >= self.most
    }

    fn let_in(&mut self) {
        match self.listener.accept(&self.log) {
            Ok(Some(socket)) => {
                if self.guests.len() >= MOST_GUESTS {
                    self.guests.remove(0);
                    self.log.warn(format_args!(
                        "a client is sent away: others wait, and it has chosen no export in {UNDISTURBED:?}"
                    ));
                }
                let since = Instant::now();
                self.guests.push(Guest {
                    channel: Channel::new(socket),
                    handshake: Handshake::new(self.tls.is_some()),
                    begins_tls: false,
                    has_input: false,
                    since,
                    deadline: (!self.patience.is_zero()).then(|| since + self.patience),
                });
            }
            Ok(None) => {}
            Err(e) => {
                self.log.warn(format_args!("cannot accept clients: {e}"));
                // Out of descriptors, say: others may give some back.
                self.rests_until = Some(Instant::now() + REST);
            }
        }
    }

    fn serve_guests(&mut self, ready: &[bool]) {
        let now = Instant::now();
        for (guest, is_ready) in std::mem::take(&mut self.guests).into_iter().zip(ready) {
            let is_late = guest.deadline.is_some_and(|deadline| deadline <= now);
            let fate = match *is_ready || guest.is_behind() {
                // However much it says.
                _ if is_late => Fate::Left(Some(format!("it has chosen no export in {:?}", self.patience))),
                true => guest.go_on(self.tls.as_ref(), &self.registry.offers),
                false => Fate::Stays(guest),
            };
            match fate {
                Fate::Stays(guest) => self.guests.push(guest),
                Fate::Chose(channel, chosen) => self.place(channel, chosen),
                Fate::Left(Some(why)) => self.log.warn(format_args!("a client is sent away: {why}")),
                Fate::Left(None) => {}
            }
        }
    }

    /// Gives a client to the export that it has chosen, unless others were faster.
    fn place(&self, channel: Channel, Chosen { offer, headers, contexts, input, output }: Chosen) {
        if self.is_full() {
            return self.log.warn(format_args!("a client is sent away: there are {} with an export", self.most));
        }
        let place = Place::new(&self.registry, &offer.clients);
        offer.take(NewClient { channel, headers, contexts, input, output, place });
    }
}

impl Guest {
    fn has_output(&self) -> bool {
        self.handshake.has_output() || !self.channel.is_flushed()
    }

    /// Whether something that it has said waits to be heard.
    fn is_behind(&self) -> bool {
        self.has_input && !self.has_output()
    }

    fn go_on(mut self, tls: Option<&ServerCredentials>, offers: &Mutex<Offers>) -> Fate {
        match self.step(tls, offers) {
            Ok(Fed::Chose(chosen)) => Fate::Chose(self.channel, chosen),
            Ok(Fed::Waits | Fed::StartsTls) => Fate::Stays(self),
            Err(why) => {
                // What it is told last, if that takes no time.
                let _ = self.channel.send(&[IoSlice::new(self.handshake.output())]);
                Fate::Left(why)
            }
        }
    }

    /// Sends what there is to send, or reads what the client says.
    fn step(&mut self, tls: Option<&ServerCredentials>, offers: &Mutex<Offers>) -> Result<Fed, Ended> {
        let unless_later = |e: ChannelError| match e {
            ChannelError::System(Errno::AGAIN | Errno::INTR) => Ok(Fed::Waits),
            ChannelError::System(Errno::CONNRESET | Errno::PIPE) => Err(None),
            e => Err(Some(describe(e))),
        };
        if self.has_output() {
            let output = self.handshake.output();
            let sent = if output.is_empty() { Ok(0) } else { self.channel.send(&[IoSlice::new(output)]) };
            match sent {
                Ok(sent) => drop(output.drain(..sent)),
                Err(e) => return unless_later(e),
            }
            if let Err(e) = self.channel.flush() {
                return unless_later(e);
            }
            return match tls.filter(|_| self.begins_tls) {
                // What it has sent meanwhile may have waited for this.
                None => self.feed(&[], offers),
                Some(_) if self.has_output() => Ok(Fed::Waits),
                Some(tls) => {
                    self.begins_tls = false;
                    self.channel.encrypt(tls.session().map_err(|e| Some(e.to_string()))?);
                    Ok(Fed::Waits)
                }
            };
        }
        let mut input = [0; INPUT];
        match self.channel.receive(&mut [IoSliceMut::new(&mut input)]) {
            Ok(Received { bytes: 0, more: false }) => Err(None),
            Ok(Received { bytes, more }) => {
                self.has_input = more;
                self.feed(&input[..bytes], offers)
            }
            Err(e) => {
                self.has_input = false;
                unless_later(e)
            }
        }
    }

    fn feed(&mut self, input: &[u8], offers: &Mutex<Offers>) -> Result<Fed, Ended> {
        let fed = self.handshake.feed(input, offers)?;
        self.begins_tls |= matches!(fed, Fed::StartsTls);
        Ok(fed)
    }
}

#[cfg(test)]
mod tests;
