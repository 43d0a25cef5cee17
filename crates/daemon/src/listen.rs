//! Sockets on which the daemon is told and asked things: where they are, and who may connect.
//!
//! A UNIX socket has its owner and mode before it listens, so nobody can connect earlier who could not later. A TCP
//! socket has neither, and whoever reaches it may do everything: it is on a loopback address unless that is forced.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use egret_event_loop::FromPeer;
use egret_export::{PeerLog, Rights, UnixSocket, keep_from_blocking};
use egret_vocabulary::Address;
use egret_vocabulary::schema::Access;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};

use crate::access;
use crate::process::Inherited;

/// A socket that listens.
#[derive(Debug)]
pub(crate) enum Socket {
    /// With what may be said about those who come.
    Unix(UnixSocket, PeerLog),
    Tcp(TcpListener),
}

impl Socket {
    /// Listens at `address`, which may be a socket of what is `inherited`; those who connect may send descriptors or not.
    ///
    /// # Errors
    /// Somebody else listens there, there is no such group, host or socket, or what the system says.
    pub(crate) fn open(address: &Address, inherited: &mut Inherited, rights: Rights) -> io::Result<Self> {
        match address {
            Address::Unix { path, access } => {
                let socket = UnixSocket::bind(path, &access::resolve(access)?, rights).map_err(io::Error::other)?;
                Ok(Self::Unix(socket, log_about(address)))
            }
            Address::Tcp { host, port, remote } => open_tcp(host, *port, *remote),
            Address::Inherited { fd, access, remote } => {
                let socket = inherited.take(fd).map_err(io::Error::other)?;
                adopt(socket, log_about(address), access, *remote, rights)
            }
        }
    }

    /// The next client, if there is one that is let in; reading and writing do not block.
    pub(crate) fn accept(&self) -> io::Result<Option<FromPeer>> {
        match self {
            Self::Unix(socket, log) => socket.accept(log),
            Self::Tcp(listener) => match listener.accept() {
                Ok((client, _)) => prepare(client).map(Some),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => Ok(None),
                Err(e) => Err(e),
            },
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket, _) => socket.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Its lines begin with where the socket is.
fn log_about(address: &Address) -> PeerLog {
    PeerLog::about(&format!("{address}: "))
}

fn open_tcp(host: &str, port: u16, remote: bool) -> io::Result<Socket> {
    let addresses = egret_nbd::look_up(host, port)?;
    addresses.iter().try_for_each(|address| check_reach(address, remote))?;
    let listener = TcpListener::bind(addresses.as_slice())?;
    listener.set_nonblocking(true)?;
    Ok(Socket::Tcp(listener))
}

/// That whoever connects at `address` is on this host, or may be elsewhere.
fn check_reach(address: &SocketAddr, remote: bool) -> io::Result<()> {
    if remote || address.ip().is_loopback() {
        return Ok(());
    }
    let why = format!("other hosts reach {}; use path, or host=localhost, or add force-remote=on", address.ip());
    Err(io::Error::other(why))
}

/// Listens on a socket that somebody else made.
fn adopt(socket: OwnedFd, log: PeerLog, access: &Access, remote: bool, rights: Rights) -> io::Result<Socket> {
    let listens = socket_acceptconn(&socket).map_err(|_| io::Error::other("it is not a socket"))?;
    if !listens {
        return Err(io::Error::other("it does not listen"));
    }
    match socket_domain(&socket)? {
        AddressFamily::UNIX => Ok(Socket::Unix(UnixSocket::adopt(socket, access::resolve(access)?.uids, rights)?, log)),
        AddressFamily::INET | AddressFamily::INET6 if access.allow_uid.is_empty() => {
            let listener = TcpListener::from(socket);
            check_reach(&listener.local_addr()?, remote)?;
            keep_from_blocking(&listener)?;
            Ok(Socket::Tcp(listener))
        }
        AddressFamily::INET | AddressFamily::INET6 => {
            Err(io::Error::other("it is no UNIX socket, and allow-uid is about those"))
        }
        _ => Err(io::Error::other("it is neither a UNIX socket nor one of TCP")),
    }
}

fn prepare(client: TcpStream) -> io::Result<FromPeer> {
    client.set_nonblocking(true)?;
    // An answer should not wait for the next; without that it is late, and right.
    let _ = client.set_nodelay(true);
    Ok(OwnedFd::from(client).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_stays_on_this_host_unless_it_is_forced_out() {
        let open = |host: &str, remote| {
            Socket::open(
                &Address::Tcp { host: host.to_owned(), port: 0, remote },
                &mut Inherited::default(),
                Rights::Taken,
            )
        };
        assert!(open("127.0.0.1", false).is_ok());
        assert!(open("0.0.0.0", true).is_ok());
        let refused = open("0.0.0.0", false).unwrap_err().to_string();
        assert_eq!(refused, "other hosts reach 0.0.0.0; use path, or host=localhost, or add force-remote=on");
    }
}
