//! What a service manager is told: systemd's `sd_notify`, which is a datagram to a socket that it names.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

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
pub fn tell_service_manager(progress: Progress) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET").filter(|place| !place.is_empty()) else { return };
    if let Err(e) = tell(&place, progress) {
        tracing::warn!("the service manager at '{}' cannot be told: {e}", place.display());
    }
}

fn tell(place: &OsStr, progress: Progress) -> io::Result<()> {
    let address = match place.as_bytes() {
        // An address without a file.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(place)?,
        _ => return Err(io::Error::other("it must be an absolute path, or begin with @")),
    };
    let text = match progress {
        // A daemon that went into the background is not the process that was started.
        Progress::Ready => format!("READY=1\nMAINPID={}\n", std::process::id()),
        Progress::Stopping => "STOPPING=1\n".to_owned(),
    };
    UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    }

    #[test]
    fn a_manager_is_told_at_a_path_and_at_an_address_without_a_file() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        tell(path.as_os_str(), Progress::Ready).unwrap();
        assert_eq!(heard(&socket), format!("READY=1\nMAINPID={}\n", std::process::id()));

        let name = format!("egret-test-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        tell(OsStr::new(&format!("@{name}")), Progress::Stopping).unwrap();
        assert_eq!(heard(&socket), "STOPPING=1\n");

        assert!(tell(OsStr::new("notify"), Progress::Ready).unwrap_err().to_string().contains("absolute path"));
        assert!(tell(place.path().join("nobody").as_os_str(), Progress::Ready).is_err());
    }
}
