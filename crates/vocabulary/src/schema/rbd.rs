//! Images in a Ceph cluster: the keys of `driver=rbd`.

use std::collections::BTreeMap;

use egret_disk::Locking;

use super::Problem;
use super::blockdev::LONGEST_PATH;
use super::key::{Foreign, Harmless, Shape, ValueType};
use super::words::{as_word, words};
use crate::{choices, options};

/// The longest name of a pool, an image, a user that is passed on; Ceph has limits of its own below that.
const LONGEST: usize = 255;

options! {
    /// An image in a Ceph cluster.
    pub struct Rbd {
        /// Pool that the image is in.
        pool: String, ValueType::Text(1, LONGEST);
        /// Namespace of the pool.
        namespace: Option<String>, ValueType::Text(0, LONGEST), unset "none";
        /// Name of the image.
        image: String, ValueType::Text(1, LONGEST);
        /// Path of the cluster's configuration.
        conf: Option<String>, ValueType::Text(1, LONGEST_PATH), unset "where Ceph looks for it";
        /// Snapshot of the image; it is read, and never written.
        snapshot: Option<String>, ValueType::Text(1, LONGEST), unset "none";
        /// Ceph's user, without `client.`.
        user: Option<String>, ValueType::Text(1, LONGEST), unset "admin";
        /// Secret that holds the user's key.
        key_secret: Option<String>, ValueType::Name(usize::MAX), unset "the configuration's keyring";
        /// How the cluster may be asked who it is (`auth-client-required.0=cephx`).
        auth_client_required: Vec<AuthMode>, ValueType::Words(AuthMode::words), unset "the configuration's";
        /// Monitors of the cluster (`server.0.host=10.0.0.1,server.0.port=3300`).
        server: Vec<MonitorAddress>, ValueType::List(&SERVER), unset "the configuration's";
        /// How the image is encrypted, for librbd to decrypt it.
        encrypt: Option<Encrypt>, ValueType::Object(&ENCRYPT), unset "not at all";
        /// Lock the image against other writers; `auto` does where it has the feature exclusive-lock. Egret's own.
        #[serde(with = "as_word")]
        locking: Locking, ValueType::Word(words::<Locking>), default Locking::Auto;
        /// How long the cluster may take to answer, where something waits for it: the start, a monitor's command, the end.
        /// Requests of guests wait for as long as it takes. Egret's own.
        connect_timeout: u32, ValueType::Number(1, 86_400, "s"), default 30;
        /// Most images that share one connection to the cluster. Egret's own.
        images_per_cluster_handle: u32, ValueType::Number(1, 65_536, "images"), default 4;
        /// Settings of Ceph's over those of its configuration (`settings.rados_osd_op_timeout=60`). Egret's own.
        settings: BTreeMap<String, String>, ValueType::Settings, unset "the configuration's";
    }
}

options! {
    /// Where a monitor of a cluster is.
    pub struct MonitorAddress {
        /// (rbd) Host of a monitor of the cluster: its address, or its name without a sandbox.
        host: String, ValueType::Text(1, LONGEST);
        /// (rbd) Port of the monitor; text, as in QEMU.
        port: String, ValueType::Text(1, 5);
    }
}

options! {
    /// How an image is encrypted.
    pub struct Encrypt {
        /// (rbd) Format that the image has been given by `rbd encryption format`, for librbd to decrypt it.
        format: EncryptionFormat, ValueType::Word(EncryptionFormat::words);
        /// (rbd) Secret that holds the passphrase.
        key_secret: String, ValueType::Name(usize::MAX);
    }
}

choices! {
    /// How a cluster may be asked who it is.
    pub enum AuthMode {
        /// By a key.
        "cephx" => Cephx;
        /// Not at all.
        "none" => None;
    }
}

choices! {
    /// A format of encryption.
    pub enum EncryptionFormat {
        /// LUKS.
        "luks" => Luks;
        /// LUKS2.
        "luks2" => Luks2;
    }
}

static SERVER: Shape = Shape::of(MonitorAddress::KEYS);
static ENCRYPT: Shape = Shape {
    keys: Encrypt::KEYS,
    variants: None,
    foreign: &[Foreign {
        name: "parent",
        harmless: Harmless::No,
        because: "an image has one format and one passphrase",
    }],
};

impl Rbd {
    /// The secrets that it names, and the keys that name them.
    pub fn secrets(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let key = self.key_secret.as_deref().map(|name| ("key-secret", name));
        let passphrase = self.encrypt.as_ref().map(|encrypt| ("encrypt.key-secret", encrypt.key_secret.as_str()));
        key.into_iter().chain(passphrase)
    }

    /// As the `rbd` command names it.
    pub fn spec(&self) -> String {
        let Self { pool, image, .. } = self;
        let namespace = self.namespace.as_deref().filter(|name| !name.is_empty());
        let namespace = namespace.map(|name| format!("{name}/")).unwrap_or_default();
        let snapshot = self.snapshot.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
        format!("{pool}/{namespace}{image}{snapshot}")
    }

    pub(super) fn check(&self) -> Result<(), Problem> {
        for (at, server) in self.server.iter().enumerate() {
            if !server.port.parse::<u16>().is_ok_and(|port| port > 0) {
                return Err(Problem::must(
                    format!("server.{at}.port"),
                    "a port (1..=65535)",
                    format!("'{}'", server.port),
                ));
            }
        }
        Ok(())
    }
}
