//! Commands about NBD: the server, and exports in the way in which there was nothing else once.

use egret_vocabulary::schema::{
    Export, FOREIGN_NBD_ADDR, Foreign, Harmless, InetAddr, NO_AUTHZ, NbdServer, Object, Shape, Spelling, UnixAddr,
    ValueType,
};
use egret_vocabulary::{options, variants};
use serde_json::{Value, json};

use super::QmpError;
use super::command::{Command, Run, Takes, nothing, typed};
use crate::daemon::{ChangeError, Deletion};

options! {
    struct Start {
        /// Where it listens.
        addr: NbdAddr, ValueType::Object(&ADDR);
        /// As the key of `--nbd-server`.
        max_connections: u32, ValueType::Number(0, u32::MAX as u64, ""), default 100;
        /// As the key of `--nbd-server`.
        tls_creds: Option<String>, ValueType::Name(usize::MAX), unset "no encryption";
        /// As the key of `--nbd-server`.
        handshake_max_seconds: u32, ValueType::Number(0, u32::MAX as u64, ""), default 10;
    }
}

variants! {
    enum NbdAddr by "type", "Kind of address." {
        "unix" => Unix(UnixData);
        "inet" => Inet(InetData);
    }
    foreign &["fd", "vsock"], because "Egret serves NBD on sockets that it makes itself, UNIX and TCP"
}

options! {
    struct UnixData {
        /// A UNIX socket.
        data: UnixAddr, ValueType::Object(&UNIX);
    }
}

options! {
    struct InetData {
        /// A TCP port.
        data: InetAddr, ValueType::Object(&INET);
    }
}

options! {
    struct Add {
        /// The blockdev to export.
        device: String, ValueType::Text(1, usize::MAX);
        /// Name of the export, and what clients call it.
        name: Option<String>, ValueType::Text(0, usize::MAX), unset "`device`";
        /// What it is for, to people who ask.
        description: Option<String>, ValueType::Text(0, usize::MAX), unset "none";
        /// Let clients write.
        writable: bool, ValueType::Flag, default "off";
    }
}

options! {
    struct Remove {
        /// Name of the export.
        name: String, ValueType::Text(0, usize::MAX);
        /// `safe` refuses while a client uses it, `hard` cuts clients off.
        mode: Deletion, ValueType::Word(Deletion::words), default Deletion::Safe;
    }
}

static UNIX: Shape = Shape { keys: UnixAddr::KEYS, variants: None, foreign: FOREIGN_NBD_ADDR };
static INET: Shape = Shape { keys: InetAddr::KEYS, variants: None, foreign: FOREIGN_NBD_ADDR };
static ADDR: Shape = Shape { keys: &[], variants: Some(NbdAddr::VARIANTS), foreign: &[] };
static START: Shape = Shape {
    keys: Start::KEYS,
    variants: None,
    foreign: &[Foreign { name: "tls-authz", harmless: Harmless::No, because: NO_AUTHZ }],
};
static ADD: Shape = Shape {
    keys: Add::KEYS,
    variants: None,
    foreign: &[Foreign { name: "bitmap", harmless: Harmless::No, because: "there are no dirty bitmaps" }],
};
static REMOVE: Shape = Shape::of(Remove::KEYS);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "nbd-server-start",
        takes: Takes::Keys(&START),
        returns: "{}",
        about: "Serve NBD, for exports of type nbd: it listens when this returns. In the sandbox that is on a UNIX socket: a TCP port is \
                the one that `--nbd-server` names.",
        run: Run::Mutate(|context, arguments| {
            let Start { addr, max_connections, tls_creds, handshake_max_seconds } = typed(arguments)?;
            let addr = match addr {
                NbdAddr::Unix(UnixData { data }) => json!({ "type": "unix", "path": data.path }),
                NbdAddr::Inet(InetData { data }) => json!({ "type": "inet", "host": data.host, "port": data.port }),
            };
            let mut server = json!({
                "addr": addr, "max-connections": max_connections, "handshake-max-seconds": handshake_max_seconds,
            });
            if let Some(tls_creds) = tls_creds {
                server["tls-creds"] = tls_creds.into();
            }
            context.daemon.start_nbd_server(NbdServer::from_value(server, Spelling::Typed)?)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "nbd-server-stop",
        takes: Takes::NOTHING,
        returns: "{}",
        about: "End that, and every export of type nbd, whoever uses it. In the sandbox a TCP port cannot be had again. \
                BLOCK_EXPORT_DELETED says of each when it is gone.",
        run: Run::Mutate(|context, _| {
            context.daemon.stop_nbd_server()?;
            Ok(nothing())
        }),
    },
    Command {
        name: "nbd-server-add",
        takes: Takes::Keys(&ADD),
        returns: "{}",
        about: "Export a disk over NBD: `block-export-add` with `type` nbd, and `id` and `name` the same. As in QEMU, a disk \
                that is read-only is exported so whatever `writable` says.",
        run: Run::Mutate(|context, arguments| {
            let Add { device, name, description, writable } = typed(arguments)?;
            let disk = context.daemon.config().disk(&device);
            let writable = writable && disk.is_none_or(|disk| !disk.settings.read_only);
            let name = name.unwrap_or_else(|| device.clone());
            let mut export = json!({
                "type": "nbd", "id": name, "name": name, "node-name": device, "writable": writable,
            });
            if let Some(description) = description {
                export["description"] = description.into();
            }
            context.daemon.add_export(Export::from_value(export, Spelling::Typed)?)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "nbd-server-remove",
        takes: Takes::Keys(&REMOVE),
        returns: "{}",
        about: "Take an export of type nbd back, as `block-export-del` does.",
        run: Run::Mutate(|context, arguments| {
            let Remove { name, mode } = typed(arguments)?;
            remove(context.daemon, &name, mode)
        }),
    },
];

fn remove(daemon: &mut crate::daemon::Daemon, name: &str, how: Deletion) -> Result<Value, QmpError> {
    let found = daemon.config().exports.iter().find(|export| export.id == name);
    if found.is_some_and(|export| export.vhost_user().is_some()) {
        return Err(ChangeError::NotNbd(name.to_owned()).into());
    }
    daemon.remove_export(name, how)?;
    Ok(nothing())
}
