//! Disks of other machines: how their options say that they are reached.

use std::iter;
use std::time::Duration;

use egret_disk::Locking;
use egret_rbd::{ClusterOptions, ImageOptions, Luks, RbdOptions, Secret as Bytes};
use egret_vocabulary::schema::{Encrypt, EncryptionFormat, MonitorAddress, Rbd, Secret};

/// How the cluster of `rbd` is found, as far as that is for files to say.
pub(crate) fn cluster_of(object: &Rbd) -> ClusterOptions {
    rbd("", object, false, Locking::Off, &[]).cluster
}

/// How the image of `rbd` is opened, for the disk of this name.
///
/// It takes everything apart, so that an option that nobody reads does not compile.
pub(super) fn rbd(node_name: &str, rbd: &Rbd, read_only: bool, locking: Locking, secrets: &[Secret]) -> RbdOptions {
    let Rbd {
        pool,
        namespace,
        image,
        conf,
        snapshot,
        user,
        key_secret,
        auth_client_required,
        server,
        encrypt,
        locking: _,
        connect_timeout,
        images_per_cluster_handle,
        settings,
    } = rbd;
    // `Config` has seen to it that they are there, and that they can be read.
    let find = |name: &str| secrets.iter().find(|secret| secret.id == name);
    let key = key_secret.as_deref().and_then(find).and_then(|secret| secret.base64().ok());
    let passphrase = |name: &str| Bytes(find(name).and_then(|secret| secret.bytes().ok()).unwrap_or_default());
    let address = |MonitorAddress { host, port }: &MonitorAddress| match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    };
    // librbd's cache acknowledges writes, and is gone with this process, which the guest outlives: unlike QEMU's, which ends
    // with it. So it is for who asks for it by its name.
    let cache = ("rbd_cache".to_owned(), "false".to_owned());
    // What librbd encrypts it encrypts on a thread of its own, which no other disk waits for.
    let hands_over = encrypt.as_ref().map(|_| ("rbd_non_blocking_aio".to_owned(), "true".to_owned()));
    let settings = settings.iter().map(|(name, value)| (name.clone(), value.clone()));
    RbdOptions {
        node_name: node_name.to_owned(),
        cluster: ClusterOptions {
            conf: conf.clone(),
            user: user.clone(),
            key: key.map(|key| Bytes(key.into_bytes())),
            monitors: server.iter().map(address).collect(),
            auth: auth_client_required.iter().map(ToString::to_string).collect(),
            settings: iter::once(cache).chain(hands_over).chain(settings).collect(),
            connect_timeout: Duration::from_secs((*connect_timeout).into()),
            images: *images_per_cluster_handle,
        },
        image: ImageOptions {
            pool: pool.clone(),
            namespace: namespace.clone().unwrap_or_default(),
            image: image.clone(),
            snapshot: snapshot.clone(),
            read_only,
            encryption: encrypt.as_ref().map(|Encrypt { format, key_secret }| {
                let format = match format {
                    EncryptionFormat::Luks => Luks::One,
                    EncryptionFormat::Luks2 => Luks::Two,
                };
                (format, passphrase(key_secret))
            }),
        },
        locking,
    }
}
