//! TCP ports of this host's that are a test's own.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Result;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

/// A port on which nobody listens, and which nobody else gets until this is dropped, neither to listen on nor to connect
/// from: a socket has it that does not listen. So who connects is refused; but a server that was told of it listens there,
/// and may come and go, because it takes ports over that others have not given back yet (`SO_REUSEADDR`), as this one does.
pub struct Port {
    number: u16,
    _socket: OwnedFd,
}

impl Port {
    /// Of all addresses of this host.
    pub fn new() -> Self {
        // Without IPv6 there is the other alone.
        let kept = Self::keep(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| Self::keep(Ipv4Addr::UNSPECIFIED.into()));
        kept.expect("a port")
    }

    fn keep(any: std::net::IpAddr) -> Result<Self> {
        let family = if any.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        // No program that a test starts meanwhile is to have it.
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if any.is_ipv6() {
            sockopt::set_ipv6_v6only(&socket, false)?;
        }
        bind(&socket, &SocketAddr::new(any, 0))?;
        Ok(Self { number: SocketAddr::try_from(getsockname(&socket)?)?.port(), _socket: socket })
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}
