//! Notifications to a service manager: systemd's `sd_notify`, which is a datagram to a socket that it names.

use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr, sendto};

/// How far the daemon is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Every disk is served.
    Ready,
    /// It was told to end.
    Stopping,
}

/// Tells the service manager, if there is one that wants to know (`$NOTIFY_SOCKET`, as in sd_notify(3)). Served or not
/// does not depend on whether it could be told.
pub fn notify_service_manager(progress: Progress) {
    let Some(place) = place() else { return };
    log(&place, notify(&place, progress));
}

/// What sockets are called that hold a client's session, where a service manager keeps them (sd_notify(3), `FDNAME`).
pub(super) const KEPT: &str = "egret-session";

/// Whether the service manager keeps descriptors for the next process (`$FDSTORE`, as in systemd.exec(5): since 254 systemd says
/// so; for an older one a drop-in may).
pub(crate) fn keeps_sessions() -> bool {
    let most = std::env::var("FDSTORE").ok().and_then(|most| most.parse().ok());
    most.is_some_and(|most: u32| most > 0) && place().is_some()
}

/// Has the service manager keep a client's session.
///
/// # Errors
/// It cannot be told. If it has no room it says nothing, and the client is hung up on.
pub(crate) fn keep_session(sockets: &[OwnedFd]) -> io::Result<()> {
    let Some(place) = place() else { return Ok(()) };
    let fds: Vec<_> = sockets.iter().map(OwnedFd::as_fd).collect();
    // Nobody has their other ends, for which it would let go of them.
    let text = format!("FDSTORE=1\nFDNAME={KEPT}\nFDPOLL=0\n");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let parts = [io::IoSlice::new(text.as_bytes())];
    Ok(sendmsg_addr(UnixDatagram::unbound()?, &address(&place)?, &parts, &mut control, SendFlags::NOSIGNAL)
        .map(drop)?)
}

/// Has it let go of those that it has kept: they are empty.
pub(crate) fn forget_sessions() {
    let Some(place) = place() else { return };
    let text = format!("FDSTOREREMOVE=1\nFDNAME={KEPT}\n");
    log(&place, UnixDatagram::unbound().and_then(|socket| send(&socket, &place, &text)));
}

/// What tells the service manager that the daemon's I/O threads get on.
pub(crate) struct Heartbeat {
    /// How often it is to: twice in the time after which the manager would end the daemon.
    pub(crate) every: Duration,
    place: OsString,
    /// Made once: a daemon that has no descriptors left serves on, and is not to be ended for that.
    socket: UnixDatagram,
}

impl Heartbeat {
    /// As the service manager wants it, if it does (`$WATCHDOG_USEC`, as in sd_watchdog_enabled(3)).
    ///
    /// # Errors
    /// There is no descriptor to be had.
    pub(crate) fn asked_for() -> io::Result<Option<Self>> {
        let variable = |name| std::env::var(name).ok();
        let every = interval(variable("WATCHDOG_USEC").as_deref(), variable("WATCHDOG_PID").as_deref());
        every.zip(place()).map(|(every, place)| Self::new(every, place)).transpose()
    }

    pub(crate) fn new(every: Duration, place: OsString) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        // The watchdog waits for nobody: a manager that does not read has more of these than it can miss.
        socket.set_nonblocking(true)?;
        Ok(Self { every, place, socket })
    }

    pub(crate) fn beat(&self) {
        match send(&self.socket, &self.place, "WATCHDOG=1\n") {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            sent => log(&self.place, sent),
        }
    }
}

fn place() -> Option<OsString> {
    std::env::var_os("NOTIFY_SOCKET").filter(|place| !place.is_empty())
}

fn log(place: &OsStr, told: io::Result<()>) {
    if let Err(e) = told {
        tracing::warn!("the service manager at '{}' cannot be told: {e}", place.display());
    }
}

fn interval(micros: Option<&str>, pid: Option<&str>) -> Option<Duration> {
    let is_ours = pid.is_none_or(|pid| pid.parse() == Ok(std::process::id()));
    let micros: u64 = micros.filter(|_| is_ours)?.parse().ok().filter(|micros| *micros > 0)?;
    Some(Duration::from_micros(micros) / 2)
}

fn notify(place: &OsStr, progress: Progress) -> io::Result<()> {
    let text = match progress {
        // A daemon that went into the background is not the process that was started.
        Progress::Ready => format!("READY=1\nMAINPID={}\n", std::process::id()),
        Progress::Stopping => "STOPPING=1\n".to_owned(),
    };
    send(&UnixDatagram::unbound()?, place, &text)
}

fn send(socket: &UnixDatagram, place: &OsStr, text: &str) -> io::Result<()> {
    Ok(sendto(socket, text.as_bytes(), SendFlags::NOSIGNAL, &address(place)?).map(drop)?)
}

fn address(place: &OsStr) -> io::Result<SocketAddrUnix> {
    Ok(match place.as_bytes() {
        // An address without a file.
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        [b'/', ..] => SocketAddrUnix::new(place)?,
        _ => return Err(io::Error::other("it must be an absolute path, or begin with @")),
    })
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::SocketAddr;

    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    }

    #[test]
    fn a_manager_that_wants_to_hear_from_this_process_does_twice_in_the_time_that_it_gives() {
        let ours = std::process::id().to_string();
        for pid in [None, Some(ours.as_str())] {
            assert_eq!(interval(Some("3000000"), pid), Some(Duration::from_millis(1500)));
            assert_eq!(interval(None, pid), None);
            assert_eq!(interval(Some("0"), pid), None);
        }
        assert_eq!(interval(Some("3000000"), Some("1")), None, "another process is meant");
    }

    #[test]
    fn a_manager_is_notified_at_a_path_and_at_an_address_without_a_file() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        notify(path.as_os_str(), Progress::Ready).unwrap();
        assert_eq!(heard(&socket), format!("READY=1\nMAINPID={}\n", std::process::id()));

        let name = format!("egret-test-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        notify(OsStr::new(&format!("@{name}")), Progress::Stopping).unwrap();
        assert_eq!(heard(&socket), "STOPPING=1\n");

        // As many as it has room for, and then those are enough.
        let heartbeat = Heartbeat::new(Duration::ZERO, format!("@{name}").into()).unwrap();
        (0..1000).for_each(|_| heartbeat.beat());
        assert_eq!(heard(&socket), "WATCHDOG=1\n");

        assert!(notify(OsStr::new("notify"), Progress::Ready).unwrap_err().to_string().contains("absolute path"));
        assert!(notify(place.path().join("nobody").as_os_str(), Progress::Ready).is_err());
    }
}
