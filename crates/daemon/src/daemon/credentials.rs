//! Credentials for TLS, as their files had them when they were read.

use std::collections::BTreeMap;
use std::path::Path;

use egret_nbd::tls::{ClientCredentials, ServerCredentials};
use egret_vocabulary::Config;
use egret_vocabulary::schema::{Blockdev, Driver, Endpoint, Object as _, TlsCreds};

use super::{ChangeError, Daemon, StartError};

/// By the names of their objects.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    clients: BTreeMap<String, ClientCredentials>,
    servers: BTreeMap<String, ServerCredentials>,
}

impl Credentials {
    /// Reads what the objects of a configuration name.
    ///
    /// # Errors
    /// A file is not there, or does not hold what it should.
    pub fn read(config: &Config) -> Result<Self, StartError> {
        let mut new = Self::default();
        config.tls_creds.iter().try_for_each(|object| new.add(object))?;
        Ok(new)
    }

    fn add(&mut self, object: &TlsCreds) -> Result<(), StartError> {
        let TlsCreds { id, dir, endpoint, verify_peer } = object;
        let (dir, explain) = (Path::new(dir), |e| StartError::TlsCreds(id.clone(), e));
        match endpoint {
            Endpoint::Client => {
                let read = ClientCredentials::read(dir, *verify_peer).map_err(explain)?;
                self.clients.insert(id.clone(), read);
            }
            Endpoint::Server => {
                let read = ServerCredentials::read(dir, *verify_peer).map_err(explain)?;
                self.servers.insert(id.clone(), read);
            }
        }
        Ok(())
    }

    /// Those of this name, for who connects.
    pub(super) fn client(&self, id: &str) -> Option<&ClientCredentials> {
        self.clients.get(id)
    }

    /// Those of this name, for who is connected to.
    pub(super) fn server(&self, id: &str) -> Option<&ServerCredentials> {
        self.servers.get(id)
    }
}

impl Daemon {
    /// Adds credentials, whose files are read.
    ///
    /// # Errors
    /// Their name is taken, or a file does not hold what it should, or does not answer.
    pub fn add_tls_creds(&mut self, object: TlsCreds) -> Result<(), ChangeError> {
        if self.config.has_object(&object.id) {
            return Err(ChangeError::DuplicateObject(object.id));
        }
        let of = object.clone();
        let read = self.calls.run_on(Some(Path::new(&object.dir)), "credentials could not be read", move || {
            let mut new = Credentials::default();
            new.add(&of).map(|()| new)
        });
        let Credentials { clients, servers } =
            read.map_err(|why| StartError::ObjectUnanswered(TlsCreds::NOUN, object.id.clone(), why))??;
        self.credentials.clients.extend(clients);
        self.credentials.servers.extend(servers);
        self.config.tls_creds.push(object);
        Ok(())
    }

    /// Forgets credentials.
    ///
    /// # Errors
    /// There are none of this name, or a disk or the NBD server names them.
    pub fn remove_tls_creds(&mut self, id: &str) -> Result<(), ChangeError> {
        if !self.config.tls_creds.iter().any(|creds| creds.id == id) {
            return Err(ChangeError::NoObject(id.to_owned()));
        }
        let names =
            |blockdev: &Blockdev| matches!(&blockdev.driver, Driver::Nbd(nbd) if nbd.tls_creds.as_deref() == Some(id));
        let server = self.config.nbd_server.as_ref().and_then(|server| server.tls_creds.as_deref());
        if server == Some(id) || self.config.layers().any(names) {
            return Err(ChangeError::ObjectInUse(id.to_owned()));
        }
        self.config.tls_creds.retain(|creds| creds.id != id);
        self.credentials.clients.remove(id);
        self.credentials.servers.remove(id);
        Ok(())
    }
}
