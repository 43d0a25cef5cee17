//! A UNIX socket that listens: nobody connects before its permissions are right, nobody else's socket is removed for it
//! or by it, and whoever may connect by its permissions may still be of the wrong user.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egret_confine::{Use, refusal};
use egret_event_loop::{FromPeer, closer, rights};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};

use crate::peer_log::PeerLog;
use crate::sys::peer_uid;

/// The longest path of a UNIX socket, in bytes: `sun_path` less its terminating zero.
pub const MAX_SOCKET_PATH: usize = 107;

/// Clients that may wait to be let in.
const BACKLOG: i32 = 128;
/// How long another process is waited for that makes a socket in the same directory. One is made in no time; who holds
/// on to the directory's lock is none of ours.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long `accept` may sleep at most, see [`keep_from_blocking`].
const LONGEST_ACCEPT: Duration = Duration::from_millis(100);

/// Who may connect to a socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The permissions of the socket's file; to connect takes the right to write. `None`: what the umask leaves.
    pub mode: Option<u32>,
    /// The user that the file belongs to, if not this process's.
    pub user: Option<u32>,
    /// The group that the file belongs to, if not the one of every file made there.
    pub group: Option<u32>,
    /// The users of whom clients are let in; empty: all.
    pub uids: Vec<u32>,
}

/// Whether those who connect may send descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// They are to.
    Taken,
    /// Nobody has a use for any.
    Refused,
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path does not fit `sun_path`.
    #[error("its path is {0} bytes long; the system allows at most {MAX_SOCKET_PATH}")]
    TooLong(usize),
    /// Somebody answers on it.
    #[error("it is in use by a running server; stop that one or choose another path")]
    InUse,
    /// Something else is in the way.
    #[error("it exists and is not a socket; choose another path")]
    NotASocket,
    /// It cannot be given away.
    #[error("cannot give it to user {0}: {1}")]
    User(u32, #[source] io::Error),
    /// Likewise.
    #[error("cannot give it to group {0}: {1}; this process must be in that group")]
    Group(u32, #[source] io::Error),
    /// Outside of what the sandbox leaves.
    #[error("{0}")]
    Confined(String),
    /// What the system says.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl From<Errno> for BindError {
    fn from(e: Errno) -> Self {
        Self::System(e.into())
    }
}

/// A UNIX socket that listens.
#[derive(Debug)]
pub struct UnixSocket {
    /// Who waits to be let in may have sent something already, which is closed with it.
    socket: FromPeer,
    /// The file to remove at the end, if it was made here.
    made: Option<Made>,
    uids: Vec<u32>,
}

/// A socket's file: where it was made, and which it is.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    id: (u64, u64),
}

impl UnixSocket {
    /// Makes a socket at `path`, in the place of one on which nobody listens any more.
    ///
    /// # Errors
    /// Something else is there, or it cannot have the permissions that are asked for. Nothing is left behind.
    pub fn bind(path: &Path, access: &Access, rights: Rights) -> Result<Self, BindError> {
        let length = path.as_os_str().len();
        if length > MAX_SOCKET_PATH {
            return Err(BindError::TooLong(length));
        }
        let address = SocketAddrUnix::new(path)?;
        let socket = stream_socket()?;
        // Two that found the same dead socket would remove it both, and the slower one the other's new one with it.
        let _lock = lock_directory(path);
        match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_if_left_behind(path, &address)?;
                bind(&socket, &address)?;
            }
            Err(Errno::ACCESS) => {
                let confined = refusal(path, Use::Socket).map(BindError::Confined);
                return Err(confined.unwrap_or(Errno::ACCESS.into()));
            }
            bound => bound?,
        }
        let file = open_path(path)?;
        let made = Made { path: path.to_owned(), id: id(&file.metadata()?) };
        rights.apply(&socket);
        let new = Self { socket: socket.into(), made: Some(made), uids: access.uids.clone() };
        // Nobody can connect before it listens: whoever tries is refused (unix(7), ECONNREFUSED).
        give(&file, access)?;
        listen(&new.socket, BACKLOG)?;
        Ok(new)
    }

    /// Takes clients from a socket that somebody else made and listens on: who may connect by its permissions is that
    /// one's business, who is let in is said by `uids`.
    ///
    /// # Errors
    /// The system refuses.
    pub fn adopt(socket: OwnedFd, uids: Vec<u32>, rights: Rights) -> io::Result<Self> {
        keep_from_blocking(&socket)?;
        rights.apply(&socket);
        Ok(Self { socket: socket.into(), made: None, uids })
    }

    /// The next who has come and is let in, whose socket does not block; who is not is hung up on, and told to `log`. Does not
    /// wait for one, but a moment where many who were hung up on wait for that.
    ///
    /// # Errors
    /// There are no descriptors left, say.
    pub fn accept(&self, log: &PeerLog) -> io::Result<Option<FromPeer>> {
        closer::await_room();
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(client) => self.admit(client.into(), log),
            // It has left again, or another process that shares the socket was faster.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Lets a client in, or hangs up on it.
    pub(crate) fn admit(&self, client: FromPeer, log: &PeerLog) -> io::Result<Option<FromPeer>> {
        admit(client, &self.uids, log)
    }
}

/// Lets a client in that is of one of these users, or of any if there are none; another is hung up on, and told to `log`.
///
/// Its user is the one that it had when it connected (SO_PEERCRED), whatever it has become and whoever has the
/// connection now.
pub(crate) fn admit(client: FromPeer, uids: &[u32], log: &PeerLog) -> io::Result<Option<FromPeer>> {
    if uids.is_empty() {
        return Ok(Some(client));
    }
    let uid = peer_uid(&client)?;
    if uids.contains(&uid) {
        return Ok(Some(client));
    }
    log.warn(format_args!("a client of user {uid} is not let in: allow-uid does not name it"));
    Ok(None)
}

/// Has `accept` on a socket that others have too wait for nobody.
///
/// Whoever shares it may take a client that we were told of, and a blocking `accept` would wait for the next. The flag
/// that says not to block is shared, too: those who have the socket are trusted, but one may be a program that does not
/// expect the flag, and takes it back; then there is still an end to the sleep. Clients have no part in either: they
/// have sockets of their own.
///
/// # Errors
/// The system refuses.
pub fn keep_from_blocking(socket: impl AsFd) -> io::Result<()> {
    ioctl_fionbio(&socket, true)?;
    Ok(set_socket_timeout(&socket, Timeout::Recv, Some(LONGEST_ACCEPT))?)
}

impl Rights {
    fn apply(self, socket: impl AsFd) {
        match self {
            Self::Taken => {}
            Self::Refused => rights::refuse(socket),
        }
    }
}

impl AsFd for UnixSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for UnixSocket {
    /// Removes the file, if it is still the one that was made here. Another cannot have its number as long as the socket
    /// is there, which holds on to its file.
    fn drop(&mut self) {
        if let Some(Made { path, id: ours }) = &self.made
            && std::fs::symlink_metadata(path).is_ok_and(|there| id(&there) == *ours)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

fn id(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

/// The socket's file itself, whatever becomes of the path.
fn open_path(path: &Path) -> Result<File, BindError> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?);
    // Whoever may write in the directory may have put something there in between, which is not ours to give away.
    let found = file.metadata()?;
    let is_ours = found.file_type().is_socket() && found.uid() == rustix::process::geteuid().as_raw();
    if is_ours { Ok(file) } else { Err(BindError::NotASocket) }
}

fn give(file: &File, access: &Access) -> Result<(), BindError> {
    // Through /proc, because a descriptor without rights (O_PATH) has no fchmod, and chmod would follow a link.
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    if let Some(mode) = access.mode {
        std::fs::set_permissions(&itself, PermissionsExt::from_mode(mode))?;
    }
    if let Some(group) = access.group {
        std::os::unix::fs::chown(&itself, None, Some(group)).map_err(|e| BindError::Group(group, e))?;
    }
    if let Some(user) = access.user {
        std::os::unix::fs::chown(&itself, Some(user), None).map_err(|e| BindError::User(user, e))?;
    }
    Ok(())
}

/// Keeps other daemons from making sockets in the same directory meanwhile. It is a courtesy among ourselves: without
/// the right to read the directory, or where somebody holds on to it, things go on without.
fn lock_directory(path: &Path) -> Option<OwnedFd> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, rustix::fs::Mode::empty()).ok()?;
    let end = Instant::now() + PATIENCE;
    while flock(&directory, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(directory)
}

/// Makes room where a server that was killed left its socket.
fn remove_if_left_behind(path: &Path, address: &SocketAddrUnix) -> Result<(), BindError> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(BindError::NotASocket);
    }
    // Without blocking: a server that hangs has clients waiting, and is there all the same.
    match connect(&stream_socket()?, address) {
        Err(Errno::CONNREFUSED) => Ok(std::fs::remove_file(path)?),
        _ => Err(BindError::InUse),
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        (dir, path)
    }

    fn any() -> Access {
        Access::default()
    }

    #[test]
    fn a_socket_has_its_mode_and_group_and_leaves_nothing_behind() {
        let (_dir, path) = place();
        let group = rustix::process::getgid().as_raw();
        let access = Access { mode: Some(0o666), group: Some(group), ..any() };
        let socket = UnixSocket::bind(&path, &access, Rights::Refused).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.mode() & 0o7777, found.gid()), (0o666, group));
        assert!(matches!(UnixSocket::bind(&path, &any(), Rights::Refused), Err(BindError::InUse)));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_may_be_as_long_as_the_system_has_room_for_it() {
        let (dir, _) = place();
        let room = MAX_SOCKET_PATH - dir.path().as_os_str().len() - 1;
        for (len, fits) in [(room, true), (room + 1, false)] {
            let bound = UnixSocket::bind(&dir.path().join("s".repeat(len)), &any(), Rights::Refused);
            assert_eq!(bound.is_ok(), fits);
            assert!(fits || matches!(bound, Err(BindError::TooLong(108))));
        }
    }

    #[test]
    fn a_socket_that_cannot_be_given_away_is_not_left_behind() {
        let (_dir, path) = place();
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            let access = Access { user: Some(0), ..any() };
            assert!(matches!(UnixSocket::bind(&path, &access, Rights::Refused), Err(BindError::User(0, _))));
            assert!(!path.exists());
        }
        let access = Access { user: Some(12_345), group: Some(54_321), mode: Some(0o600), ..any() };
        match UnixSocket::bind(&path, &access, Rights::Refused) {
            Ok(_socket) => {
                let found = std::fs::metadata(&path).unwrap();
                assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (12_345, 54_321, 0o600));
            }
            Err(e) => assert!(!is_root && matches!(e, BindError::Group(54_321, _)), "{e}"),
        }
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_that_took_its_place_is_left_alone() {
        let (_dir, path) = place();
        let first = UnixSocket::bind(&path, &any(), Rights::Refused).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = UnixSocket::bind(&path, &any(), Rights::Refused).unwrap();
        drop(first);
        assert!(UnixStream::connect(&path).is_ok(), "the second was there before the first had gone");
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_server_that_lets_nobody_in_is_found_to_be_there_without_waiting_for_it() {
        let (_dir, path) = place();
        let _busy = UnixSocket::bind(&path, &any(), Rights::Refused).unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        let mut waiting = Vec::new();
        while let Ok(()) = {
            waiting.push(stream_socket().unwrap());
            connect(waiting.last().unwrap(), &address)
        } {}
        assert!(matches!(UnixSocket::bind(&path, &any(), Rights::Refused), Err(BindError::InUse)));
    }

    #[test]
    fn whoever_finds_a_dead_socket_first_has_it_and_the_others_find_it_in_use() {
        for _ in 0..20 {
            let (_dir, path) = place();
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let sockets: Vec<_> = std::thread::scope(|scope| {
                let tries: Vec<_> =
                    (0..4).map(|_| scope.spawn(|| UnixSocket::bind(&path, &any(), Rights::Refused))).collect();
                tries.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let (won, lost): (Vec<_>, Vec<_>) = sockets.into_iter().partition(Result::is_ok);
            assert_eq!(won.len(), 1);
            assert!(lost.iter().all(|one| matches!(one, Err(BindError::InUse))), "{lost:?}");
            assert!(UnixStream::connect(&path).is_ok());
        }
    }

    #[test]
    fn a_link_is_not_followed() {
        let (dir, path) = place();
        let precious = dir.path().join("precious");
        std::fs::write(&precious, "precious").unwrap();
        symlink(&precious, &path).unwrap();
        assert!(matches!(UnixSocket::bind(&path, &any(), Rights::Refused), Err(BindError::NotASocket)));
        assert!(matches!(open_path(&path), Err(BindError::NotASocket)), "it may have come after the bind");
        assert!(std::fs::symlink_metadata(&path).unwrap().is_symlink() && precious.exists());
    }

    #[test]
    fn nobody_is_let_in_but_of_the_users_that_are_named() {
        let (_dir, path) = place();
        let log = PeerLog::about("");
        let ours = rustix::process::geteuid().as_raw();
        for (uids, is_let_in) in [(vec![], true), (vec![ours + 1, ours], true), (vec![ours + 1], false)] {
            let socket = UnixSocket::bind(&path, &Access { uids, ..any() }, Rights::Refused).unwrap();
            let mut client = UnixStream::connect(&path).unwrap();
            match (socket.accept(&log).unwrap(), is_let_in) {
                (Some(client), true) => {
                    let flags = rustix::fs::fcntl_getfl(&client).unwrap();
                    assert!(flags.contains(OFlags::NONBLOCK), "nobody waits for it");
                    let flags = rustix::io::fcntl_getfd(&client).unwrap();
                    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "no program has it that is started");
                }
                (None, false) => {
                    assert_eq!(io::Read::read(&mut client, &mut [0]).unwrap(), 0, "it was hung up on");
                }
                (arrival, _) => panic!("{arrival:?}"),
            }
            assert!(socket.accept(&log).unwrap().is_none());
        }
    }

    /// Sends a byte, and a descriptor beside it.
    fn send_fd(socket: &UnixStream) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [socket.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::empty())
    }

    #[test]
    fn who_is_to_send_no_descriptors_cannot_where_the_kernel_can_refuse_them() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert_eq!(send_fd(&theirs), Ok(1));
        rights::refuse(&ours);
        let refused = send_fd(&theirs);
        let (_dir, path) = place();
        for (rights, expected) in [(Rights::Taken, Ok(1)), (Rights::Refused, refused)] {
            let _socket = UnixSocket::bind(&path, &any(), rights).unwrap();
            let client = UnixStream::connect(&path).unwrap();
            assert_eq!(send_fd(&client), expected, "{rights:?}");
        }
    }

    #[test]
    fn a_client_that_another_process_took_is_not_waited_for() {
        let (_dir, path) = place();
        let shared = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let socket = UnixSocket::adopt(shared.try_clone().unwrap().into(), Vec::new(), Rights::Taken).unwrap();
        let log = PeerLog::about("");
        let _client = UnixStream::connect(&path).unwrap();
        shared.accept().unwrap();
        assert!(socket.accept(&log).unwrap().is_none());
        // Nor where that process takes the flag back.
        shared.set_nonblocking(false).unwrap();
        assert!(socket.accept(&log).unwrap().is_none());
    }

    #[test]
    fn one_daemon_at_a_time_makes_a_socket_in_a_directory_and_waits_for_others_but_not_for_ever() {
        use rustix::io::{FdFlags, fcntl_getfd};
        let (dir, path) = place();
        let held = lock_directory(&path).unwrap();
        assert!(fcntl_getfd(&held).unwrap().contains(FdFlags::CLOEXEC));
        let other = File::open(dir.path()).unwrap();
        assert!(flock(&other, FlockOperation::NonBlockingLockExclusive).is_err());
        let begun = Instant::now();
        assert!(lock_directory(&path).is_none());
        assert!(begun.elapsed() >= PATIENCE);
        drop(held);
        // A program that another test starts at the moment has it, too, until it runs.
        flock(&other, FlockOperation::LockExclusive).unwrap();
        // In one's own directory it needs no other name.
        assert!(lock_directory(Path::new("s")).is_some());
    }
}
