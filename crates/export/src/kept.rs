//! A client's session on its way from one daemon to the next, while somebody keeps it who keeps descriptors and nothing
//! beside them: a service manager (sd_notify(3), `FDSTORE=1`).
//!
//! The next daemon is told what the client has said, in the client's own words: messages of vhost-user, which every version
//! takes. They lie in a memfd. That one, the client's socket and the descriptors of the messages lie in sockets whose other
//! ends nobody has: as many as their messages take, for one has room for [`MOST_SENT`] descriptors. Who [takes](KeptSession::take)
//! a session leaves nothing there, so that a daemon that ends soon after it began does not have another begin where it did.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};

use egret_event_loop::FromPeer;
use egret_event_loop::rights::MOST_SENT;
use rustix::fs::SealFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use crate::memory_file::memory_file;
use crate::peer_fd::PeerFd;
use crate::protocol::MAX_BODY;

/// What the messages of the longest session take, with a state of a mebibyte.
const LONGEST: u64 = 4 << 20;
/// What a socket's message begins with. The last figure is that of the form.
const MAGIC: [u8; 8] = *b"egret-k1";
/// How a message begins: that, whose session it is, and which of how many.
const HEADER: usize = 24;
/// The longest name of an export that is looked for.
const LONGEST_NAME: usize = 1024;

/// A message of vhost-user that the client has sent, or might have.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) number: u32,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<PeerFd>,
}

/// A session that nobody serves.
#[derive(Debug)]
pub struct Kept {
    pub(crate) client: FromPeer,
    /// What the device was, beside what the client has said of it.
    pub(crate) state: Vec<u8>,
    pub(crate) said: Vec<Said>,
}

/// A session as it is kept.
#[derive(Debug)]
pub struct KeptSession {
    export: String,
    /// What lies in them is the client's.
    sockets: Vec<FromPeer>,
}

/// Which of a session's sockets this is.
struct Place {
    session: u64,
    at: u32,
    of: u32,
}

impl Kept {
    /// Puts a session of the export of this name into sockets. Those are all that is to be kept of it.
    ///
    /// # Errors
    /// The system's: it has no more descriptors, or the client's socket is itself in too many others.
    pub(crate) fn into_sockets(self, export: &str) -> io::Result<Vec<OwnedFd>> {
        static SESSIONS: AtomicU32 = AtomicU32::new(0);
        let words = words_of(&self.state, &self.said);
        let file = memory_file("egret-session", words.len() as u64, SealFlags::empty())?;
        let mut file = File::from(file);
        file.write_all(&words)?;
        let fds = [file.as_fd(), self.client.as_fd()].into_iter();
        let fds: Vec<_> = fds.chain(self.said.iter().flat_map(|said| &said.fds).map(PeerFd::as_fd)).collect();
        let session = u64::from(std::process::id()) << 32 | u64::from(SESSIONS.fetch_add(1, Ordering::Relaxed));
        let parts = fds.chunks(MOST_SENT);
        let of = parts.len() as u32;
        (0..).zip(parts).map(|(at, fds)| Place { session, at, of }.store(export, fds)).collect()
    }
}

impl KeptSession {
    /// The sessions that lie in these sockets. Others, and what is not all there, are let go.
    pub fn gather(sockets: impl IntoIterator<Item = OwnedFd>) -> Vec<Self> {
        let mut found: BTreeMap<(u64, String), Vec<(Place, FromPeer)>> = BTreeMap::new();
        for socket in sockets.into_iter().map(FromPeer::from) {
            if let Some((place, export)) = Place::of(&socket) {
                found.entry((place.session, export)).or_default().push((place, socket));
            }
        }
        let whole = found.into_iter().filter_map(|((_, export), mut parts)| {
            parts.sort_by_key(|(place, _)| place.at);
            let is_whole =
                parts.iter().zip(0..).all(|((place, _), at)| place.at == at && place.of as usize == parts.len());
            is_whole.then(|| Self { export, sockets: parts.into_iter().map(|(_, socket)| socket).collect() })
        });
        whole.collect()
    }

    /// Whose it is.
    pub fn export(&self) -> &str {
        &self.export
    }

    /// Takes it out: whoever has these sockets too finds nothing there any more.
    ///
    /// # Errors
    /// It is not what a daemon puts there, or somebody else has taken it.
    pub fn take(self) -> io::Result<Kept> {
        let mut fds = Vec::new();
        for socket in &self.sockets {
            fds.append(&mut receive(socket)?);
        }
        let mut fds = fds.into_iter();
        let (file, client) = fds.next().zip(fds.next()).ok_or_else(foreign)?;
        let file = File::from(file.into_fd());
        let mut words = vec![0; file.metadata()?.len().min(LONGEST) as usize];
        file.read_exact_at(&mut words, 0)?;
        let fds = fds.map(|fd| PeerFd::new(fd.into_fd()));
        let (state, said) = read_words(&words, fds).ok_or_else(foreign)?;
        Ok(Kept { client, state, said })
    }
}

impl Place {
    /// Has descriptors lie in a socket.
    fn store(&self, export: &str, fds: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
        let (kept, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let numbers = [self.at, self.of].map(u32::to_ne_bytes).concat();
        let header = [&MAGIC[..], &self.session.to_ne_bytes(), &numbers, export.as_bytes()].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SENT))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sendmsg(&other, &[IoSlice::new(&header)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(kept)
    }

    /// What lies in a socket, and whose it is. It stays there.
    fn of(socket: impl AsFd) -> Option<(Self, String)> {
        let mut bytes = [0; HEADER + LONGEST_NAME];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let len =
            recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut RecvAncillaryBuffer::default(), flags).ok()?.bytes;
        let (header, name) = bytes[..len].split_first_chunk::<HEADER>()?;
        let (magic, session) = (&header[..8], u64::from_ne_bytes(header[8..16].try_into().ok()?));
        let number = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| header[at + byte]));
        let name = String::from_utf8(name.to_vec()).ok()?;
        (magic == MAGIC).then_some((Self { session, at: number(16), of: number(20) }, name))
    }
}

/// What lies in a socket is ours from here on.
fn receive(socket: &FromPeer) -> io::Result<Vec<FromPeer>> {
    let mut bytes = [0; HEADER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SENT))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    if got.bytes == 0 {
        return Err(io::Error::other("somebody else has taken it"));
    }
    let rights = control.drain().filter_map(|part| match part {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(rights.flatten().map(FromPeer::from).collect())
}

fn foreign() -> io::Error {
    io::Error::other("it is of another kind")
}

/// What is said, as it lies in the file: numbers of 32 bits, and bytes behind their number.
fn words_of(state: &[u8], said: &[Said]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let number = |bytes: &mut Vec<u8>, number: usize| bytes.extend((number as u32).to_ne_bytes());
    number(&mut bytes, state.len());
    bytes.extend(state);
    for Said { number: request, body, fds } in said {
        for each in [*request as usize, fds.len(), body.len()] {
            number(&mut bytes, each);
        }
        bytes.extend(body);
    }
    bytes
}

/// Likewise, back. `None` if it cannot be.
fn read_words(mut words: &[u8], mut fds: impl Iterator<Item = PeerFd>) -> Option<(Vec<u8>, Vec<Said>)> {
    let number = |words: &mut &[u8]| {
        let (first, rest) = words.split_first_chunk()?;
        *words = rest;
        Some(u32::from_ne_bytes(*first))
    };
    let bytes = |words: &mut &[u8]| {
        let len = number(words)? as usize;
        let (first, rest) = words.split_at_checked(len)?;
        *words = rest;
        Some(first.to_vec())
    };
    let state = bytes(&mut words)?;
    let mut said = Vec::new();
    while !words.is_empty() {
        let (request, count) = (number(&mut words)?, number(&mut words)? as usize);
        let body = bytes(&mut words).filter(|body| body.len() <= MAX_BODY)?;
        let fds: Vec<_> = fds.by_ref().take(count).collect();
        if fds.len() < count {
            return None;
        }
        said.push(Said { number: request, body, fds });
    }
    Some((state, said))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use egret_event_loop::closer;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;
    use crate::lingering::lingering;

    /// A session of an export, whose messages have so many descriptors each, and the client's end of it.
    fn kept(fds: &[usize]) -> (Kept, UnixStream) {
        let (client, theirs) = UnixStream::pair().unwrap();
        let fd = || PeerFd::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let said = (0..).zip(fds).map(|(number, count)| Said {
            number,
            body: vec![number as u8; number as usize],
            fds: std::iter::repeat_with(fd).take(*count).collect(),
        });
        (Kept { client: OwnedFd::from(client).into(), state: b"state".to_vec(), said: said.collect() }, theirs)
    }

    fn shape(said: &[Said]) -> Vec<(u32, usize, usize)> {
        said.iter().map(|said| (said.number, said.body.len(), said.fds.len())).collect()
    }

    #[test]
    fn who_lets_go_of_what_a_client_has_handed_over_does_not_wait_until_it_is_closed() {
        closer::begin().unwrap();
        let (mut theirs, mut sockets) = (Vec::new(), Vec::new());
        // One whose file says nothing, and one of which a part is missing.
        for (session, of) in [(1, 1), (2, 2)] {
            let (ours, other) = lingering();
            let [file, client] = [(); 2].map(|()| tempfile::tempfile().unwrap());
            let place = Place { session, at: 0, of };
            sockets.push(place.store("e0", &[file.as_fd(), client.as_fd(), ours.as_fd()]).unwrap());
            theirs.push(other);
        }
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let found = KeptSession::gather(sockets);
            let taken: Vec<_> = found.into_iter().map(|session| session.take().is_err()).collect();
            tell.send(taken).unwrap();
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(vec![true]));
    }

    #[test]
    fn sessions_are_kept_in_sockets_that_are_found_in_any_order_and_taken_once() {
        let counts = [vec![1, 0, 64], vec![], vec![64; 4]];
        let names = ["e0", "e1", "e2"];
        let (mut sockets, mut copies, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for (name, counts) in names.iter().zip(&counts) {
            let (kept, client) = kept(counts);
            sockets.extend(kept.into_sockets(name).unwrap());
            theirs.push(client);
        }
        assert_eq!(sockets.len(), 1 + 1 + 2);
        let sessions: HashSet<_> = sockets.iter().map(|socket| Place::of(socket).unwrap().0.session).collect();
        assert_eq!(sessions.len(), names.len(), "none is taken for another of this daemon's");
        assert!(sessions.iter().all(|session| session >> 32 == std::process::id().into()), "nor for another daemon's");
        copies.extend(sockets.iter().map(|socket| socket.try_clone().unwrap()));
        sockets.reverse();
        sockets.push(UnixStream::pair().unwrap().0.into());
        let found = KeptSession::gather(sockets);
        assert_eq!(found.iter().map(KeptSession::export).collect::<Vec<_>>(), names);
        for ((session, counts), mut theirs) in found.into_iter().zip(&counts).zip(theirs) {
            let taken = session.take().unwrap();
            assert_eq!(taken.state, b"state");
            let expected: Vec<_> = (0..).zip(counts).map(|(number, count)| (number, number as usize, *count)).collect();
            assert_eq!(shape(&taken.said), expected);
            for fd in taken.said.iter().flat_map(|said| &said.fds).map(PeerFd::as_fd).chain([taken.client.as_fd()]) {
                assert!(fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC));
            }
            rustix::io::write(&taken.client, b"x").unwrap();
            theirs.read_exact(&mut [0; 1]).unwrap();
        }
        assert!(KeptSession::gather(copies).is_empty(), "nobody finds them once more");
    }

    #[test]
    fn a_session_of_which_a_part_is_missing_is_none() {
        let (kept, mut theirs) = kept(&[64; 4]);
        let mut sockets = kept.into_sockets("e0").unwrap();
        sockets.remove(1);
        assert!(KeptSession::gather(sockets).is_empty());
        assert_eq!(theirs.read(&mut [0; 1]).unwrap(), 0, "the client is hung up on");
    }

    #[test]
    fn what_was_kept_by_somebody_else_is_not_taken_for_a_session() {
        let said = [Said { number: 1, body: vec![0; 8], fds: Vec::new() }];
        let words = words_of(b"s", &said);
        for len in 0..words.len() {
            let is_whole = read_words(&words[..len], std::iter::empty()).is_some();
            assert_eq!(is_whole, len == 5, "{len}");
        }
        assert!(read_words(&words, std::iter::empty()).is_some());
        let without =
            [Said { number: 1, body: Vec::new(), fds: vec![PeerFd::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap())] }];
        assert!(read_words(&words_of(&[], &without), std::iter::empty()).is_none(), "its descriptor is not there");
        let long = [Said { number: 1, body: vec![0; MAX_BODY + 1], fds: Vec::new() }];
        assert!(read_words(&words_of(&[], &long), std::iter::empty()).is_none());
    }
}
