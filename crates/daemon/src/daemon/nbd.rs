//! The server that has all exports over NBD.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use egret_export::{NbdAddress, NbdServer, NbdServerConfig};
use egret_nbd::tls::ServerCredentials;
use egret_vocabulary::schema::{self, Device, NbdAddr, UnixAddr};

use super::io_threads::iothreads_of;
use super::{ChangeError, Credentials, Daemon, Deletion, StartError};

/// Starts the server that an object describes.
pub(super) fn start(object: &schema::NbdServer, credentials: &Credentials) -> Result<NbdServer, StartError> {
    let schema::NbdServer { addr, access, max_connections, tls_creds, handshake_max_seconds } = object;
    let tls = tls_creds.as_ref().and_then(|id| credentials.server(id)).cloned();
    let address = match addr {
        NbdAddr::Unix(UnixAddr { path }) => {
            let access = crate::access::resolve(access).map_err(StartError::NbdAccess)?;
            NbdAddress::Unix(path.into(), access)
        }
        NbdAddr::Inet(inet) => {
            let port = inet.number().map_err(|problem| StartError::NbdPort(problem.to_string()))?;
            warn_of_reach(&inet.host, port, tls.as_ref());
            NbdAddress::Tcp(inet.host.clone(), port)
        }
    };
    let handshake_max = Duration::from_secs((*handshake_max_seconds).into());
    Ok(NbdServer::start(NbdServerConfig { address, max_connections: *max_connections, handshake_max, tls })?)
}

/// Says that other hosts may read what is exported, if they may.
fn warn_of_reach(host: &str, port: u16, tls: Option<&ServerCredentials>) {
    let what = match tls {
        Some(tls) if tls.verifies_peers() => return,
        Some(_) => "who they are is not asked (verify-peer=off)",
        None => "nothing is encrypted; nor is anybody asked who he is",
    };
    let mut addresses = egret_nbd::look_up(host, port).into_iter().flatten().map(|address| address.ip());
    if let Some(reached) = addresses.find(|ip: &IpAddr| !ip.is_loopback()) {
        tracing::warn!("NBD server: other hosts reach {reached}, and {what}");
    }
}

impl Daemon {
    /// Starts to serve NBD.
    ///
    /// # Errors
    /// It does already, or the address cannot be had.
    pub fn start_nbd_server(&mut self, object: schema::NbdServer) -> Result<(), ChangeError> {
        if self.nbd_server.is_some() {
            return Err(ChangeError::NbdServerRunning);
        }
        let known = self.config.check_tls_creds(object.tls_creds.as_deref(), schema::Endpoint::Server);
        known.map_err(ChangeError::NbdServer)?;
        let server = start(&object, &self.credentials)?;
        server.open();
        self.nbd_server = Some(server);
        self.config.nbd_server = Some(object);
        Ok(())
    }

    /// Ends that: exports over NBD go, whoever uses them, and their socket does.
    ///
    /// # Errors
    /// NBD is not served, or an I/O thread of one of its exports is stuck. Or an export cannot be
    /// [removed](Self::remove_export): then the server is there until it is ended once more.
    pub fn stop_nbd_server(&mut self) -> Result<(), ChangeError> {
        if self.nbd_server.is_none() {
            return Err(ChangeError::NoNbdServer);
        }
        let is_nbd = |export: &&schema::Export| matches!(export.device, Device::Nbd(_));
        let there = self.config.exports.iter().filter(|export| !self.is_shutting_down(&export.id));
        let there: Vec<_> = there.filter(is_nbd).collect();
        // Once for all of them: each that nobody uses would wait for its own.
        let idle = there.iter().copied().filter(|export| !self.exports[&export.id].is_in_use());
        self.await_answers(idle.flat_map(iothreads_of).collect::<BTreeSet<_>>())?;
        let ids: Vec<String> = there.iter().map(|export| export.id.clone()).collect();
        for id in ids {
            self.remove_export(&id, Deletion::Hard)?;
        }
        self.nbd_server = None;
        self.config.nbd_server = None;
        Ok(())
    }
}
