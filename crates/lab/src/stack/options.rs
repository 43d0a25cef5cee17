//! A server's command line, from a subject's tables: the vocabulary that Egret and `qemu-storage-daemon` share.
//!
//! Every object is given as JSON, which both servers take and which keeps the types of the plan's values.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use egret_vocabulary::Config;
use egret_vocabulary::schema::{Blockdev, Export, IoThread, NbdEndpoint, NbdPlace, Object as _, ObjectError, Spelling};
use serde_json::{Value, json};

use super::{Context, Disk};
use crate::plan::{Backend, DeviceModel, DiskKind, Load, Plan, Server, Stack, Subject, nbd_place};

const OBJECT: &str = "--object";
const BLOCKDEV: &str = "--blockdev";
const EXPORT: &str = "--export";

/// What an I/O thread is called; its number follows.
pub(super) const IO_THREAD: &str = "io";
/// The size of an idle disk, which nobody reads.
pub(super) const IDLE_SIZE: u64 = 1 << 30;
/// The serial number of a guest's idle disk, by which the guest tells it from the others.
pub(super) const IDLE: &str = "egret-idle";
/// Keys of `--blockdev` that a null device has no use for.
const NOT_OF_NULL: [&str; 4] = ["aio", "aio-max-batch", "locking", "filename"];

/// The subject's daemon, or of a guest the one beside it: with the [`options`] that serve `disks`, and a monitor at
/// `socket("qmp")`.
pub(super) fn command(
    subject: &Subject,
    load: &Load,
    disks: &[Disk],
    context: &Context,
    socket: &dyn Fn(&str) -> PathBuf,
) -> Command {
    let mut command = match subject.stack {
        Stack::QemuStorageDaemon => Command::new("qemu-storage-daemon"),
        Stack::Egret | Stack::Guest | Stack::Host | Stack::VhostUserBlk | Stack::Ssh => {
            let mut egret = Command::new(&context.egret);
            egret.arg("serve");
            egret
        }
    };
    let chardev = format!("socket,id=qmp,path={},server=on,wait=off", socket("qmp").display());
    command.args(options(subject, load, disks, socket)).args(["--chardev", &chardev, "--monitor", "chardev=qmp"]);
    command
}

/// The options that serve `disks` for a load: busy disk N at `socket("busyN")`, idle ones at `socket("idleN")`.
fn options(subject: &Subject, load: &Load, disks: &[Disk], socket: &dyn Fn(&str) -> PathBuf) -> Vec<String> {
    let objects = objects(subject, load, disks, socket).into_iter();
    objects.flat_map(|(option, object)| [option.to_owned(), object.to_string()]).collect()
}

/// The objects that these options make, each with its option.
fn objects(
    subject: &Subject,
    load: &Load,
    disks: &[Disk],
    socket: &dyn Fn(&str) -> PathBuf,
) -> Vec<(&'static str, Value)> {
    let mut objects: Vec<_> = iothreads(subject).into_iter().map(|iothread| (OBJECT, iothread)).collect();
    let busy = disks.iter().enumerate().map(|(number, disk)| (format!("busy{number}"), disk.clone(), load.writes()));
    let idle = (0..load.idle_disks).map(|number| (format!("idle{number}"), Disk::Null(IDLE_SIZE), false));
    for (name, disk, writes) in busy.chain(idle) {
        objects.push((BLOCKDEV, blockdev(subject, &name, &disk, writes)));
        let mut export = export(subject, load, &name, &socket(&name), writes);
        if subject.stack == Stack::Guest && name.starts_with("idle") {
            export["serial"] = json!(IDLE);
        }
        objects.push((EXPORT, export));
    }
    objects
}

/// Subjects that name no engine and so have what servers take unasked, which nobody would choose to measure: a line for each.
pub fn unnamed_engines(plan: &Plan) -> impl Iterator<Item = String> {
    // What says where its disk is has said what else it is.
    let is_named = |subject: &Subject| ["aio", "driver", "file"].iter().any(|key| subject.blockdev.contains_key(*key));
    let has_one = |subject: &&Subject| match subject.stack {
        Stack::Egret | Stack::QemuStorageDaemon | Stack::Guest => {
            plan.disk.kind != DiskKind::Null && matches!(subject.backend, Backend::Local | Backend::Krbd(_))
        }
        Stack::Host | Stack::VhostUserBlk | Stack::Ssh => false,
    };
    let unnamed = plan.subjects.iter().filter(has_one).filter(move |subject| !is_named(subject));
    unnamed.map(|subject| format!("subject '{}' names no aio, and so has threads, as QEMU has it", subject.name))
}

/// A subject whose options Egret does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("subject '{subject}': {why}")]
pub struct SubjectError {
    subject: String,
    why: Box<ObjectError>,
}

/// Holds Egret's own options in a plan against the vocabulary, before anything starts.
///
/// # Errors
/// The first subject with an object that Egret would not have.
pub fn check_options(plan: &Plan) -> Result<(), SubjectError> {
    let place = Path::new("/egret-bench");
    let disk = match plan.disk.kind {
        DiskKind::Null => Disk::Null(1 << 30),
        DiskKind::File => Disk::File(place.join("disk")),
        DiskKind::Loop | DiskKind::Device => Disk::Device(place.join("disk")),
    };
    let is_egrets = |subject: &&Subject| match subject.stack {
        Stack::Egret => true,
        Stack::Guest => subject.server == Server::Egret,
        Stack::Host | Stack::QemuStorageDaemon | Stack::VhostUserBlk | Stack::Ssh => false,
    };
    for subject in plan.subjects.iter().filter(is_egrets) {
        let nbd = |uri: &str| nbd_place(uri).map_or(disk.clone(), |place| Disk::Nbd(place, None));
        let disk = match &subject.backend {
            Backend::Local => disk.clone(),
            Backend::Nbd | Backend::NbdUnix => nbd("nbd://localhost"),
            Backend::Server(uri) => nbd(uri),
            Backend::Rbd(pool) => Disk::Rbd { pool: pool.clone(), image: "disk".into() },
            Backend::Krbd(_) => Disk::Krbd(place.join("disk")),
        };
        for load in plan.loads.iter().filter(|load| load.is_put_on(&subject.name)) {
            let disks = vec![disk.clone(); load.disks.into()];
            let objects = objects(subject, load, &disks, &|name| place.join(name));
            check(objects).map_err(|why| SubjectError { subject: subject.name.clone(), why: why.into() })?;
        }
    }
    Ok(())
}

fn check(objects: Vec<(&str, Value)>) -> Result<Config, ObjectError> {
    let (mut iothreads, mut blockdevs, mut exports) = (Vec::new(), Vec::new(), Vec::new());
    for (option, object) in objects {
        match option {
            OBJECT => iothreads.push(IoThread::from_user_object(object, Spelling::Typed)?),
            BLOCKDEV => blockdevs.push(Blockdev::from_value(object, Spelling::Typed)?),
            _ => exports.push(Export::from_value(object, Spelling::Typed)?),
        }
    }
    Config::new(iothreads, blockdevs, exports)
}

/// The subject's I/O threads.
pub(super) fn iothreads(subject: &Subject) -> Vec<Value> {
    let own = |number| json!({ "qom-type": "iothread", "id": format!("{IO_THREAD}{number}") });
    (0..subject.iothreads).map(|number| with(own(number), nested(&subject.iothread))).collect()
}

/// A disk, as `--blockdev` takes it.
pub(super) fn blockdev(subject: &Subject, name: &str, disk: &Disk, writes: bool) -> Value {
    let mut given = nested(&subject.blockdev);
    let own = match disk {
        Disk::File(path) => json!({ "driver": "file", "filename": path }),
        Disk::Device(path) | Disk::Krbd(path) => json!({ "driver": "host_device", "filename": path }),
        Disk::Nbd(NbdPlace { server, export }, _) => {
            let server = match server {
                NbdEndpoint::Unix(path) => json!({ "type": "unix", "path": path }),
                NbdEndpoint::Inet(host, port) => json!({ "type": "inet", "host": host, "port": port.to_string() }),
            };
            json!({ "driver": "nbd", "server": server, "export": export })
        }
        // Ceph's libraries find the cluster by themselves.
        Disk::Rbd { pool, image } => json!({ "driver": "rbd", "pool": pool, "image": image }),
        // The plan's check allows hosts with the stack `host` alone, so no server here gets such a disk.
        Disk::Remote(..) => Value::Null,
        Disk::Null(size) => {
            if let Some(given) = given.as_object_mut() {
                given.retain(|key, _| !NOT_OF_NULL.contains(&key.as_str()));
            }
            json!({ "driver": "null-co", "size": size })
        }
    };
    let all = json!({ "node-name": name, "read-only": !writes, "cache": { "direct": !matches!(disk, Disk::Null(_)) } });
    with(with(all, own), given)
}

fn export(subject: &Subject, load: &Load, name: &str, socket: &Path, writes: bool) -> Value {
    let own = json!({
        "id": format!("export-{name}"),
        "addr": { "type": "unix", "path": socket },
        "writable": writes,
        "num-queues": queues(load),
    });
    let kind = match subject.device {
        DeviceModel::VirtioBlk => json!({ "type": "vhost-user-blk", "node-name": name }),
        DeviceModel::VirtioScsi => {
            json!({ "type": "vhost-user-scsi", "luns": [{ "lun": 0, "node-name": name }] })
        }
    };
    let mut own = with(with(own, kind), nested(&subject.export));
    let threads: Vec<String> = (0..subject.iothreads).map(|number| format!("{IO_THREAD}{number}")).collect();
    match threads.as_slice() {
        [] => {}
        [only] => own["iothread"] = json!(only),
        // A server that has one I/O thread per export refuses a list with an error.
        several => own["iothread"] = json!(several),
    }
    own
}

/// Queues of each disk: one for each job, or more.
pub(super) fn queues(load: &Load) -> u16 {
    load.keys.queues.unwrap_or(1).max(load.numjobs)
}

/// An object with what another says besides, or instead.
fn with(mut object: Value, more: Value) -> Value {
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        for (key, value) in more {
            match object.get_mut(&key) {
                Some(there) if there.is_object() && value.is_object() => *there = with(there.take(), value),
                _ => {
                    object.insert(key, value);
                }
            }
        }
    }
    object
}

/// A table as JSON; a key with dots leads into objects.
fn nested(table: &BTreeMap<String, toml::Value>) -> Value {
    table.iter().fold(json!({}), |object, (key, value)| {
        let value = serde_json::to_value(value).unwrap_or_default();
        with(object, key.rsplit('.').fold(value, |value, part| json!({ part: value })))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{BUILT_IN, LoadKeys, expand};

    fn words(subject: &str, load: &str, disks: &[Disk]) -> Vec<Value> {
        let subject = toml::from_str(subject).unwrap();
        let load = expand(&toml::from_str::<LoadKeys>(load).unwrap()).remove(0);
        let words = options(&subject, &load, disks, &|name| PathBuf::from(format!("/run/{name}")));
        words.into_iter().skip(1).step_by(2).map(|word| serde_json::from_str(&word).unwrap()).collect()
    }

    #[test]
    fn tables_become_objects_and_dots_lead_into_them() {
        let subject = "name = 'n'\nstack = 'egret'\niothreads = 2\niothread = { poll-policy = 'off' }\n\
                       blockdev = { aio = 'native', 'cache.no-flush' = true }";
        let words = words(subject, "rw = 'write'\nnumjobs = 4", &[Disk::File("/d".into())]);
        assert_eq!(words[1], json!({ "qom-type": "iothread", "id": "io1", "poll-policy": "off" }));
        assert_eq!(
            words[2],
            json!({ "driver": "file", "filename": "/d", "node-name": "busy0", "read-only": false, "aio": "native",
                    "cache": { "direct": true, "no-flush": true } })
        );
        let addr = json!({ "type": "unix", "path": "/run/busy0" });
        assert_eq!(
            words[3],
            json!({ "type": "vhost-user-blk", "id": "export-busy0", "node-name": "busy0", "addr": addr,
                    "writable": true, "num-queues": 4, "iothread": ["io0", "io1"] })
        );
    }

    #[test]
    fn who_names_no_engine_is_told_that_it_is_threads() {
        let plan = |disk: &str| -> Plan {
            let subjects = [
                ("egret", ""),
                ("egret", "blockdev = { 'cache.direct' = false }"),
                ("qemu-storage-daemon", "blockdev = {}"),
                ("guest", "server = 'egret'"),
                ("guest", "backend = 'krbd'"),
                ("egret", "blockdev = { aio = 'threads' }"),
                ("guest", "blockdev = { aio = 'native' }"),
                ("egret", "blockdev = { driver = 'null-co' }"),
                ("egret", "backend = 'nbd'"),
                ("host", ""),
                ("vhost-user-blk", "command = '{socket}'"),
            ];
            let subjects = subjects
                .iter()
                .enumerate()
                .map(|(number, (stack, keys))| format!("[[subject]]\nname = '{number}'\nstack = '{stack}'\n{keys}\n"));
            let subjects: String = subjects.collect();
            toml::from_str(&format!("name = 'p'\ntitle = 't'\nload = []\n[disk]\ntype = '{disk}'\n{subjects}")).unwrap()
        };
        let expected =
            (0..5).map(|number| format!("subject '{number}' names no aio, and so has threads, as QEMU has it"));
        assert_eq!(unnamed_engines(&plan("file")).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        assert_eq!(unnamed_engines(&plan("null")).count(), 0, "servers have null disks of their own");
        for (name, _) in BUILT_IN {
            assert_eq!(unnamed_engines(&Plan::named(name).unwrap()).next(), None, "{name}");
        }
    }

    #[test]
    fn a_disk_that_is_elsewhere_is_named_as_both_servers_name_it() {
        let of = |disk: Disk| words("name = 'n'\nstack = 'egret'", "", &[disk]).remove(1);
        let common = |mut node: Value| {
            node["node-name"] = json!("busy0");
            node["read-only"] = json!(true);
            node["cache"] = json!({ "direct": true });
            node
        };
        for (uri, server) in [
            ("nbd://[::1]:99/a", json!({ "type": "inet", "host": "::1", "port": "99" })),
            ("nbd+unix:///a?socket=/s", json!({ "type": "unix", "path": "/s" })),
        ] {
            let node = of(Disk::Nbd(nbd_place(uri).unwrap(), None));
            assert_eq!(node, common(json!({ "driver": "nbd", "server": server, "export": "a" })));
        }
        let node = of(Disk::Rbd { pool: "p".into(), image: "i".into() });
        assert_eq!(node, common(json!({ "driver": "rbd", "pool": "p", "image": "i" })));
    }

    #[test]
    fn a_null_disk_has_no_engine_and_idle_ones_have_as_many_queues() {
        let subject = "name = 'n'\nstack = 'qemu-storage-daemon'\nblockdev = { aio = 'native', latency-ns = 5 }";
        let words = words(subject, "idle_disks = 1\nqueues = 32", &[Disk::Null(4096)]);
        assert_eq!(words[1]["latency-ns"], 5);
        assert_eq!(words[1].get("aio"), None);
        assert_eq!((&words[4]["id"], &words[4]["num-queues"]), (&json!("export-idle0"), &json!(32)));
        assert_eq!(words[4]["iothread"], "io0");
    }

    #[test]
    fn egrets_options_in_every_built_in_plan_are_egrets() {
        for (name, _) in BUILT_IN {
            check_options(&Plan::named(name).unwrap()).unwrap();
        }
    }

    #[test]
    fn what_egret_would_refuse_is_said_of_its_subject_before_anything_starts() {
        let plan = |subject: &str, load: &str| {
            let head = "name = 'p'\ntitle = 't'\n[disk]\ntype = 'file'\nsize = '1M'\n";
            let text = format!("{head}[[subject]]\nname = 's'\n{subject}\n[[load]]\n{load}\n");
            check_options(&Plan::read("p", &text, Path::new(".")).unwrap()).map_err(|error| error.to_string())
        };
        let egret = |more: &str| plan(&format!("stack = 'egret'\n{more}"), "");
        for (more, line) in [
            (
                "iothread = { poll-wieght = 3 }",
                "iothread 'io0': unknown key 'poll-wieght'; did you mean 'poll-weight'?",
            ),
            ("blockdev = { aio = 'uring' }", "blockdev 'busy0': aio must be threads, native or io_uring, got 'uring'"),
            ("blockdev = { aio-max-batch = 1 }", "blockdev 'busy0': aio-max-batch has no effect on aio=threads; it"),
            (
                "blockdev = { aio = 'native', 'cache.direct' = false }",
                "blockdev 'busy0': aio=native needs cache.direct=on",
            ),
            (
                "export = { queue-size = 2 }",
                "export 'export-busy0': queue-size must be a power of two in 4..=1024, got 2",
            ),
        ] {
            let error = egret(more).unwrap_err();
            assert!(error.starts_with(&format!("subject 's': {line}")), "{error}");
        }
        let last = plan("stack = 'egret'", "[[load]]\nname = 'second'\nqueues = 300").unwrap_err();
        assert!(last.ends_with("num-queues must be 1..=256, got 300"), "{last}");
        let wrong = "export = { queue-size = 2 }";
        assert!(plan(&format!("stack = 'guest'\nserver = 'egret'\n{wrong}"), "").is_err());
        // Another server, and other versions of it, have keys of their own.
        plan(&format!("stack = 'qemu-storage-daemon'\n{wrong}"), "").unwrap();
    }
}
