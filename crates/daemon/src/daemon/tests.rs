use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use egret_disk::{Driver as DiskDriver, Limits, Locking, Options};
use egret_event_loop::ClockReads;
use egret_virtio::scsi::LunAddress;
use egret_vocabulary::keyval;
use egret_vocabulary::schema::{
    self, Addr, Blockdev, Device, Driver, Export, Image, IoThread, Lun, Object as _, ScsiDevice, Secret,
    Spelling::Typed, TlsCreds, UnixAddr,
};
use rustix::event::{PollFd, PollFlags};
use serde_json::json;

use super::*;
use crate::refuse::{refuse, refuse_threads};
use peer::{Peer, SET_VRING_ENABLE, Stuck, await_that, kick_ring, words};

#[path = "../../../export/tests/peer/mod.rs"]
mod peer;

pub(super) fn daemon() -> Daemon {
    Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap()
}

/// One with `d0`, whose image is in the directory.
fn with_image() -> (tempfile::TempDir, Daemon) {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon();
    daemon.add_blockdev(image(place.path(), "d0")).unwrap();
    (place, daemon)
}

pub(super) fn image(directory: &Path, name: &str) -> Blockdev {
    let path = directory.join(format!("{name}.img"));
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    Blockdev::new(name, Driver::File(Image::new(path.to_str().unwrap())))
}

pub(super) fn export(directory: &Path, id: &str, node: &str) -> Export {
    Export::new(id, node, Addr::Unix(UnixAddr { path: directory.join(id).to_str().unwrap().to_owned() }))
}

/// Whether somebody else could lock an image.
fn is_free(directory: &Path, name: &str) -> bool {
    let options = Options::new("other", DiskDriver::File { filename: directory.join(format!("{name}.img")) });
    Disk::open(&Options { locking: Locking::On, ..options }).is_ok()
}

/// What was on its way out, when so much of that has gone.
fn await_torn_down(daemon: &mut Daemon, many: usize) -> Vec<TornDown> {
    let mut gone = Vec::new();
    while gone.len() < many {
        rustix::event::poll(&mut [PollFd::from_borrowed_fd(daemon.teardowns_bell(), PollFlags::IN)], None).unwrap();
        gone.extend(daemon.take_torn_down());
    }
    gone
}

/// A client of the server over NBD, which is served.
fn nbd_client(directory: &Path) -> UnixStream {
    let mut client = UnixStream::connect(directory.join("nbd")).unwrap();
    // EXPORT_NAME, behind flags.
    client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x02d0").unwrap();
    client.read_exact(&mut [0; 28]).unwrap();
    // A flush: who is answered is there.
    client.write_all(&[&b"\x25\x60\x95\x13\0\0\0\x03"[..], &[0; 20]].concat()).unwrap();
    client.read_exact(&mut [0; 16]).unwrap();
    client
}

/// Has an NBD server at `nbd`, and `n0` of `d0` there.
fn serve_over_nbd(daemon: &mut Daemon, directory: &Path) {
    let addr = schema::NbdAddr::Unix(UnixAddr { path: directory.join("nbd").to_str().unwrap().to_owned() });
    let access = schema::Access::default();
    let server = schema::NbdServer { addr, access, max_connections: 0, tls_creds: None, handshake_max_seconds: 0 };
    daemon.start_nbd_server(server).unwrap();
    let nbd = schema::NbdDevice { node_name: "d0".to_owned(), name: None, description: None, max_connections: 0 };
    daemon.add_export(Export { device: Device::Nbd(nbd), ..export(directory, "n0", "d0") }).unwrap();
}

/// A SCSI device without units, whose guest may write.
fn scsi_export(directory: &Path, id: &str) -> Export {
    scsi_export_of(directory, id, Vec::new())
}

fn scsi_export_of(directory: &Path, id: &str, luns: Vec<Lun>) -> Export {
    let base = export(directory, id, "x");
    let vhost_user = base.vhost_user().unwrap().clone();
    Export { device: Device::VhostUserScsi(ScsiDevice { luns, vhost_user }), writable: true, ..base }
}

#[test]
fn a_unit_s_blocks_may_be_as_large_as_the_configuration_says_and_no_larger() {
    let (place, mut daemon) = with_image();
    let path = place.path().join("s0");
    let of_blocks = |bytes: u32| {
        let value = serde_json::json!({"type": "vhost-user-scsi", "id": "s0", "addr": {"type": "unix", "path": path},
            "logical-block-size": bytes, "luns": [{"lun": 0, "node-name": "d0"}]});
        Export::from_value(value, schema::Spelling::Typed).map_err(|e| e.to_string())
    };
    let largest = (9..32).map(|power| 1 << power).take_while(|bytes| of_blocks(*bytes).is_ok()).last().unwrap();
    daemon.add_export(of_blocks(largest).unwrap()).unwrap();
    daemon.remove_export("s0", Deletion::Safe).unwrap();
    daemon.take_torn_down();
    // What the device itself takes.
    let mut larger = of_blocks(largest).unwrap();
    if let Device::VhostUserScsi(ScsiDevice { vhost_user, .. }) = &mut larger.device {
        vhost_user.logical_block_size *= 2;
    }
    let refused = daemon.add_export(larger).unwrap_err().to_string();
    assert!(refused.contains("logical block size must be"), "{refused}");
}

const FIRST: LunAddress = LunAddress { target: 0, lun: 0 };

fn lun(lun: u16, node: &str) -> Lun {
    Lun {
        address: schema::LunAddress { lun, target: 0 },
        node_name: node.to_owned(),
        serial: String::new(),
        wwn: 0,
        removable: false,
        pr_file: String::new(),
    }
}

/// What the daemon would show of itself.
fn state(daemon: &Daemon) -> (Config, Vec<String>, Vec<String>, Vec<String>) {
    let names = |keys: &mut dyn Iterator<Item = &String>| keys.cloned().collect::<Vec<_>>();
    (
        daemon.config.clone(),
        names(&mut daemon.io_threads.keys()),
        names(&mut daemon.disks.keys()),
        names(&mut daemon.exports.keys()),
    )
}

/// What a daemon is asked, and what it says to that.
type Attempt<'a> = (Box<dyn Fn(&mut Daemon) -> Result<(), ChangeError> + 'a>, &'a str);

/// Asks all that; each is refused, and changes nothing.
fn refused(daemon: &mut Daemon, attempts: Vec<Attempt<'_>>) {
    let before = state(daemon);
    for (attempt, line) in attempts {
        let error = attempt(daemon).unwrap_err().to_string();
        assert!(error.starts_with(line), "{error}");
        assert_eq!(state(daemon), before, "{line}");
    }
}

#[test]
fn what_cannot_be_added_or_removed_leaves_everything_as_it_was() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    daemon.add_io_thread(IoThread::new("io0")).unwrap();
    daemon.add_blockdev(image(at, "d0")).unwrap();
    let mut e0 = export(at, "e0", "d0");
    e0.iothread = vec!["io0".to_owned()];
    daemon.add_export(e0.clone()).unwrap();

    let missing = Blockdev::new("d1", Driver::File(Image::new("/nonexistent")));
    let elsewhere = Export { id: "e1".to_owned(), ..e0.clone() };
    let attempts: Vec<Attempt<'_>> = vec![
        (Box::new(|d| d.add_io_thread(IoThread::new("io0"))), "attempt to add duplicate property 'io0'"),
        (Box::new(|d| d.remove_io_thread("io0")), "object 'io0' is in use, can not be deleted"),
        (Box::new(|d| d.remove_io_thread("io1")), "object 'io1' not found"),
        (Box::new(|d| d.add_blockdev(image(at, "d0"))), "Duplicate nodes with node-name='d0'"),
        (Box::new(|d| d.add_blockdev(missing.clone())), "blockdev 'd1': '/nonexistent' does not exist"),
        (Box::new(|d| d.remove_blockdev("d0")), "Node d0 is in use"),
        (Box::new(|d| d.remove_blockdev("d9")), "Failed to find node with node-name='d9'"),
        (Box::new(|d| d.add_export(e0.clone())), "Block export id 'e0' is already in use"),
        (Box::new(|d| d.add_export(elsewhere.clone())), "export 'e1': addr.path"),
        (Box::new(|d| d.add_export(export(at, "e1", "d9"))), "Cannot find device='' nor node-name='d9'"),
        (
            Box::new(|d| d.add_export(Export { iothread: vec!["x".into()], ..export(at, "e1", "d0") })),
            "iothread \"x\" not found",
        ),
        (
            Box::new(|d| d.add_export(Export { writable: true, ..export(at, "e1", "d0") })),
            "export 'e1': blockdev 'd0' is open for reading, because export 'e0' came first",
        ),
        (Box::new(|d| d.remove_export("e9", Deletion::Hard)), "Export 'e9' is not found"),
    ];
    refused(&mut daemon, attempts);
}

#[test]
fn an_export_that_cannot_be_had_leaves_no_thread_that_was_started_for_it() {
    let (place, mut daemon) = with_image();
    let at = place.path();
    let nowhere = export(&at.join("nowhere"), "e0", "d0");
    let attempt = |line| -> Vec<Attempt<'_>> { vec![(Box::new(|d| d.add_export(nowhere.clone())), line)] };
    let line = "export 'e0': cannot listen";
    refused(&mut daemon, attempt(line));
    // One that was there stays.
    daemon.add_export(export(at, "e1", "d0")).unwrap();
    refused(&mut daemon, attempt(line));
    assert!(daemon.thread_id(DEFAULT_IOTHREAD).is_some());
}

#[test]
fn an_engine_that_cannot_be_had_is_no_export_s_and_no_disk_of_one_that_is_there() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let io_uring = |name: &str| {
        let blockdev = image(at, name);
        let Driver::File(image) = blockdev.driver else { unreachable!("it is one") };
        Blockdev { driver: Driver::File(Image { aio: schema::Aio::IoUring, ..image }), ..blockdev }
    };
    let attempts = || {
        // For this thread and those that it starts.
        refuse(libc::SYS_io_uring_setup, libc::EPERM);
        let mut daemon = daemon();
        daemon.add_blockdev(image(at, "d0")).unwrap();
        daemon.add_blockdev(io_uring("d1")).unwrap();
        daemon.add_export(export(at, "e0", "d0")).unwrap();
        daemon.add_export(scsi_export(at, "s0")).unwrap();
        let attempts: Vec<Attempt<'_>> = vec![
            (Box::new(|d| d.add_export(export(at, "e1", "d1"))), "export 'e1': aio=io_uring: io_uring is refused"),
            (
                Box::new(|d| d.add_export(scsi_export_of(at, "s1", vec![lun(0, "d1")]))),
                "export 's1': aio=io_uring: io_uring is refused",
            ),
            (Box::new(|d| d.add_lun("s0", lun(0, "d1"))), "export 's0': aio=io_uring: io_uring is refused"),
            (Box::new(|d| d.reopen(vec![io_uring("d0")]).map(drop)), "export 'e0': aio=io_uring: io_uring is refused"),
        ];
        refused(&mut daemon, attempts);
    };
    std::thread::scope(|scope| scope.spawn(attempts).join().unwrap());
}

fn secret(keys: serde_json::Value) -> Secret {
    Secret::from_value(keys, Typed).unwrap()
}

#[test]
fn a_secret_is_read_when_it_is_added_and_stays_as_long_as_a_blockdev_names_it() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("key");
    let mut daemon = daemon();
    let missing = format!("secret 's': '{}': No such file", file.display());
    let filed = || secret(json!({"id": "s", "file": file, "format": "base64"}));
    refused(&mut daemon, vec![(Box::new(|d| d.add_secret(filed())), &missing)]);
    std::fs::write(&file, "hidden").unwrap();
    refused(&mut daemon, vec![(Box::new(|d| d.add_secret(filed())), "secret 's': it is not base64: ")]);
    std::fs::write(&file, "d29y\nZHM=\n").unwrap();
    daemon.add_secret(filed()).unwrap();
    std::fs::remove_file(&file).unwrap();
    daemon.add_secret(secret(json!({"id": "t", "data": "other words"}))).unwrap();
    assert_eq!(
        daemon.config.secrets.iter().map(|s| s.bytes().unwrap()).collect::<Vec<_>>(),
        [b"words".to_vec(), b"other words".to_vec()]
    );
    for (key, unused) in [("key-secret=s", "t"), ("encrypt.format=luks2,encrypt.key-secret=t", "s")] {
        let disk =
            format!("raw,node-name=d0,file.driver=rbd,file.pool=p,file.image=i,file.{}", key.replace(',', ",file."));
        let (value, spelling) = keyval::read(&disk, "driver").unwrap();
        // As if its cluster were there.
        daemon.config.add_blockdev(Blockdev::from_value(value, spelling).unwrap()).unwrap();
        let used = if unused == "s" { "t" } else { "s" };
        let line = format!("object '{used}' is in use, can not be deleted");
        refused(&mut daemon, vec![(Box::new(|d| d.remove_secret(used)), &line)]);
        daemon.remove_secret(unused).unwrap();
        refused(&mut daemon, vec![(Box::new(|d| d.remove_secret(unused)), &format!("object '{unused}' not found"))]);
        daemon.add_secret(secret(json!({"id": unused, "data": "again"}))).unwrap();
        daemon.config.blockdevs.clear();
    }
}

#[test]
fn no_two_objects_have_one_name_whatever_they_are() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let creds = |id: &str| TlsCreds::from_value(json!({"id": id, "dir": at, "verify-peer": false}), Typed).unwrap();
    let mut daemon = daemon();
    daemon.add_secret(secret(json!({"id": "s", "data": ""}))).unwrap();
    daemon.add_io_thread(IoThread::new("i")).unwrap();
    daemon.add_tls_creds(creds("t")).unwrap();
    for id in ["s", "i", "t"] {
        let line = format!("attempt to add duplicate property '{id}'");
        let attempts: Vec<Attempt<'_>> = vec![
            (Box::new(|d| d.add_io_thread(IoThread::new(id))), &line),
            (Box::new(|d| d.add_tls_creds(creds(id))), &line),
            (Box::new(|d| d.add_secret(secret(json!({"id": id, "data": "x"})))), &line),
        ];
        refused(&mut daemon, attempts);
    }
    // Nor has the thread of exports that name none.
    daemon.add_tls_creds(creds(DEFAULT_IOTHREAD)).unwrap();
    daemon.add_blockdev(image(at, "d0")).unwrap();
    let attempt: Attempt<'_> = (Box::new(|d| d.add_export(export(at, "e0", "d0"))), "iothread 'io': exports that name");
    refused(&mut daemon, vec![attempt]);
}

#[test]
fn a_logical_unit_that_cannot_be_added_or_removed_leaves_everything_as_it_was() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    for name in ["d0", "d1", "d2", "d3"] {
        daemon.add_blockdev(image(at, name)).unwrap();
    }
    std::fs::File::create(at.join("odd.img")).unwrap().set_len(512 * 3).unwrap();
    let odd = Image::new(at.join("odd.img").to_str().unwrap());
    daemon.add_blockdev(Blockdev::new("odd", Driver::File(odd))).unwrap();
    daemon.add_export(export(at, "e0", "d0")).unwrap();
    let mut s0 = scsi_export(at, "s0");
    s0.vhost_user_mut().unwrap().logical_block_size = 4096;
    daemon.add_export(s0).unwrap();
    daemon.add_lun("s0", lun(1, "d1")).unwrap();
    daemon.add_export(export(at, "e2", "d2")).unwrap();

    let nameless = |wwn| Lun { wwn, ..lun(2, "d3") };
    let attempts: Vec<Attempt<'_>> = vec![
        (Box::new(|d| d.add_lun("s9", lun(2, "d3"))), "Export 's9' is not found"),
        (Box::new(|d| d.add_lun("e0", lun(2, "d3"))), "export 'e0' has no logical units"),
        (Box::new(|d| d.add_lun("s0", lun(1, "d3"))), "export 's0': target 0, lun 1 is in use"),
        (Box::new(|d| d.add_lun("s0", lun(2, "d9"))), "Cannot find device='' nor node-name='d9'"),
        (Box::new(|d| d.add_lun("s0", lun(2, "d1"))), "Node d1 is in use"),
        (
            Box::new(|d| d.add_lun("s0", lun(2, "d2"))),
            "export 's0': blockdev 'd2' is open for reading, because export 'e2' came first",
        ),
        (Box::new(|d| d.add_lun("s0", lun(2, "odd"))), "export 's0': logical-block-size=4096 does not divide"),
        (Box::new(|d| d.add_lun("s0", nameless(1))), "export 's0': luns.1.wwn must be"),
        (Box::new(|d| d.remove_lun("s9", FIRST)), "Export 's9' is not found"),
        (Box::new(|d| d.remove_lun("e0", FIRST)), "export 'e0' has no logical units"),
        (Box::new(|d| d.remove_lun("s0", FIRST)), "export 's0': there is nothing at target 0, lun 0"),
        (Box::new(|d| d.remove_blockdev("d1")), "Node d1 is in use"),
    ];
    refused(&mut daemon, attempts);
    assert!(!daemon.disk_state("d1").unwrap().read_only, "it is still written");
}

#[test]
fn a_logical_unit_that_goes_frees_its_disk_when_that_is_told() {
    let (place, mut daemon) = with_image();
    daemon.add_export(scsi_export(place.path(), "s0")).unwrap();
    let empty = state(&daemon);
    for _ in 0..3 {
        daemon.add_lun("s0", lun(0, "d0")).unwrap();
        assert!(!daemon.disk_state("d0").unwrap().read_only, "an export writes");
        daemon.remove_lun("s0", FIRST).unwrap();
        assert_eq!(daemon.remove_blockdev("d0").unwrap_err().to_string(), "Node d0 is in use");
        let gone = TornDown::Lun { export: "s0".into(), at: FIRST, node_name: "d0".into() };
        assert_eq!(await_torn_down(&mut daemon, 1), [gone]);
        assert!(daemon.disk_state("d0").unwrap().read_only, "nobody writes any more");
        assert_eq!(state(&daemon), empty);
    }
    daemon.remove_blockdev("d0").unwrap();
}

#[test]
fn a_blockdev_is_in_use_as_long_as_a_unit_that_was_taken_away_uses_what_is_written_inside_it() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon();
    let filename = match image(place.path(), "a").driver {
        Driver::File(image) => image.filename,
        _ => unreachable!("it is a file"),
    };
    let text = format!("raw,node-name=r,file.driver=file,file.node-name=f,file.filename={filename}");
    let (value, spelling) = keyval::read(&text, "driver").unwrap();
    daemon.add_blockdev(Blockdev::from_value(value, spelling).unwrap()).unwrap();
    daemon.add_export(scsi_export(place.path(), "s0")).unwrap();
    daemon.add_lun("s0", lun(0, "f")).unwrap();
    daemon.remove_lun("s0", FIRST).unwrap();
    assert_eq!(daemon.remove_blockdev("r").unwrap_err().to_string(), "Node f is in use");
    await_torn_down(&mut daemon, 1);
    daemon.remove_blockdev("r").unwrap();
    assert_eq!(daemon.disks_by_name().len(), 0);
}

#[test]
fn what_somebody_would_have_to_wait_for_is_not_removed_where_there_is_no_thread_for_that_and_is_when_there_is() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon();
    for name in ["d0", "d1"] {
        daemon.add_blockdev(image(place.path(), name)).unwrap();
    }
    daemon.add_export(export(place.path(), "e0", "d0")).unwrap();
    daemon.add_export(scsi_export(place.path(), "s0")).unwrap();
    daemon.add_lun("s0", lun(0, "d1")).unwrap();
    let mut client = UnixStream::connect(place.path().join("e0")).unwrap();
    // GET_FEATURES: who is answered is there.
    client.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    client.read_exact(&mut [0; 20]).unwrap();
    serve_over_nbd(&mut daemon, place.path());
    let nbd = nbd_client(place.path());
    let before = state(&daemon);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            refuse_threads();
            let error = daemon.remove_lun("s0", FIRST).unwrap_err().to_string();
            assert!(error.starts_with("export 's0': no thread could be had to wait"), "{error}");
            let error = daemon.remove_export("e0", Deletion::Hard).unwrap_err().to_string();
            assert!(error.starts_with("export 'e0' takes no client any more"), "{error}");
            let error = daemon.stop_nbd_server().unwrap_err().to_string();
            assert!(error.starts_with("export 'n0' takes no client any more"), "{error}");
            assert!(daemon.nbd_server.is_some(), "it is there, as the configuration says");
        });
    });
    assert_eq!(state(&daemon), before);
    daemon.remove_lun("s0", FIRST).unwrap();
    daemon.remove_export("e0", Deletion::Hard).unwrap();
    daemon.stop_nbd_server().unwrap();
    await_torn_down(&mut daemon, 3);
    for mut client in [client, nbd] {
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "it was hung up on");
    }
}

#[test]
fn an_export_that_is_on_its_way_out_is_removed_once() {
    let (place, mut daemon) = with_image();
    serve_over_nbd(&mut daemon, place.path());
    for how in [Deletion::Safe, Deletion::Hard] {
        let removed = daemon.remove_export("n0", how).map_err(|e| e.to_string());
        match how {
            Deletion::Safe => removed.unwrap(),
            Deletion::Hard => assert_eq!(removed.unwrap_err(), "Export 'n0' is already shutting down"),
        }
    }
    daemon.stop_nbd_server().unwrap();
    daemon.take_torn_down();
    assert_eq!(daemon.remove_export("n0", Deletion::Hard).unwrap_err().to_string(), "Export 'n0' is not found");
}

#[test]
fn exports_of_one_blockdev_have_one_logical_unit_if_guests_see_the_same_of_it() {
    let (place, mut daemon) = with_image();
    let at = place.path();
    let scsi = |id: &str, serial: &str| scsi_export_of(at, id, vec![Lun { serial: serial.to_owned(), ..lun(0, "d0") }]);
    let unit = |daemon: &Daemon, id: &str| Arc::clone(&daemon.exports[id].lun(FIRST).unwrap().unit);
    for (id, serial) in [("s0", ""), ("s1", "d0"), ("s2", "another")] {
        daemon.add_export(scsi(id, serial)).unwrap();
    }
    assert!(Arc::ptr_eq(&unit(&daemon, "s0"), &unit(&daemon, "s1")), "the blockdev's name is the serial number");
    assert!(!Arc::ptr_eq(&unit(&daemon, "s0"), &unit(&daemon, "s2")));

    // It stays for as long as the blockdev does, and with it what was registered.
    let before = Arc::downgrade(&unit(&daemon, "s0"));
    for id in ["s0", "s1"] {
        daemon.remove_export(id, Deletion::Safe).unwrap();
    }
    daemon.take_torn_down();
    daemon.resize("d0", 2 << 20).unwrap();
    daemon.add_export(scsi("s0", "")).unwrap();
    assert!(Arc::ptr_eq(&unit(&daemon, "s0"), &before.upgrade().unwrap()));
    assert_eq!(unit(&daemon, "s0").blocks(), (2 << 20) / 512);
    for id in ["s0", "s2"] {
        daemon.remove_export(id, Deletion::Safe).unwrap();
    }
    daemon.take_torn_down();
    daemon.remove_blockdev("d0").unwrap();
    assert!(before.upgrade().is_none());
}

/// Has a guest of the export register a key.
fn register(daemon: &Daemon, export: &str) {
    use egret_scsi::{Command, Status, Step, Task};
    let unit = Arc::clone(&daemon.exports[export].lun(FIRST).unwrap().unit);
    let nexus = unit.attach(egret_scsi::NexusId { initiator: 1, port: 1 });
    let list = [&[0; 15][..], &[7], &[0; 8]].concat();
    let cdb = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
    let waker = std::task::Waker::noop();
    let task = Task { cdb: &cdb, nexus: &nexus, luns: &[0], data_in: 0, data_out: 24, lane: 0, waker };
    let mut command = Command::new();
    // The power on is told first.
    let ended = [(); 2].map(|()| unit.begin(&mut command, &task, &&list[..]));
    assert!(matches!(ended[1], Step::Done(done) if done.status == Status::Good), "{ended:?}");
    unit.detach(nexus.id());
}

#[test]
fn what_guests_have_registered_outlasts_exports_of_the_blockdev_that_show_it_otherwise() {
    let (place, mut daemon) = with_image();
    let at = place.path();
    let pr_file = at.join("pr").to_str().unwrap().to_owned();
    let scsi = |serial: &str, pr_file: &str| {
        let unit = Lun { serial: serial.to_owned(), pr_file: pr_file.to_owned(), ..lun(0, "d0") };
        scsi_export_of(at, "s0", vec![unit])
    };
    let comes_and_goes = |daemon: &mut Daemon, export: Export, registers: bool| {
        daemon.add_export(export).unwrap();
        if registers {
            register(daemon, "s0");
        }
        let unit = Arc::downgrade(&daemon.exports["s0"].lun(FIRST).unwrap().unit);
        daemon.remove_export("s0", Deletion::Safe).unwrap();
        daemon.take_torn_down();
        unit
    };
    let registered = comes_and_goes(&mut daemon, scsi("", ""), true);
    let otherwise = comes_and_goes(&mut daemon, scsi("otherwise", ""), false);
    assert!(comes_and_goes(&mut daemon, scsi("", ""), false).ptr_eq(&registered));
    assert!(otherwise.upgrade().is_none(), "nobody has registered there");
    // From here on they are to be in a file, and it is that which counts.
    comes_and_goes(&mut daemon, scsi("", &pr_file), false);
    assert!(registered.upgrade().is_none());
}

#[test]
fn a_unit_that_comes_back_has_what_its_disk_can_do_by_then_and_what_was_left_there() {
    let (place, mut daemon) = with_image();
    let at = place.path();
    daemon.add_export(scsi_export(at, "s0")).unwrap();
    let unit = |daemon: &Daemon| Arc::clone(&daemon.exports["s0"].lun(FIRST).unwrap().unit);
    let mut readers = Vec::new();
    for discard in [schema::Discard::Ignore, schema::Discard::Unmap, schema::Discard::Ignore] {
        daemon.reopen(vec![Blockdev { discard: Some(discard), ..image(at, "d0") }]).unwrap();
        daemon.add_lun("s0", lun(0, "d0")).unwrap();
        let unmaps = discard == schema::Discard::Unmap && daemon.disks["d0"].supports_discard();
        assert_eq!(unit(&daemon).config().discard.is_some(), unmaps);
        assert_eq!(unit(&daemon).blocks(), (1 << 20) / 512);
        if readers.is_empty() {
            register(&daemon, "s0");
        }
        daemon.add_export(scsi_export_of(at, "s1", vec![lun(0, "d0")])).unwrap();
        assert!(Arc::ptr_eq(&unit(&daemon), &daemon.exports["s1"].lun(FIRST).unwrap().unit), "both have it");
        readers.push(Arc::downgrade(&unit(&daemon)));
        daemon.remove_export("s1", Deletion::Safe).unwrap();
        daemon.remove_lun("s0", FIRST).unwrap();
        await_torn_down(&mut daemon, 1);
    }
    assert_eq!(readers.iter().filter(|unit| unit.upgrade().is_some()).count(), 1, "the last is kept");
}

#[test]
fn an_image_is_not_said_to_be_inactive_before_what_was_deleted_has_let_go_of_it() {
    let (place, mut daemon) = with_image();
    let at = place.path();
    let lets_go = |mut export: Export| {
        export.vhost_user_mut().unwrap().allow_inactive = true;
        export
    };
    let inactive = |daemon: &mut Daemon| daemon.set_active(Some("d0"), false).map_err(|e| e.to_string());
    let leaves = |id: &str| {
        format!(
            "export '{id}', or a unit that it had, is on its way out and still uses it; wait for BLOCK_EXPORT_DELETED, or EGRET_LUN_DELETED"
        )
    };
    daemon.add_export(lets_go(scsi_export_of(at, "s0", vec![lun(0, "d0")]))).unwrap();
    daemon.set_active(Some("d0"), true).unwrap();
    daemon.remove_lun("s0", FIRST).unwrap();
    assert_eq!(inactive(&mut daemon), Err(leaves("s0")));
    await_torn_down(&mut daemon, 1);
    daemon.add_export(lets_go(export(at, "e0", "d0"))).unwrap();
    daemon.set_active(Some("d0"), true).unwrap();
    daemon.remove_export("e0", Deletion::Hard).unwrap();
    assert_eq!(inactive(&mut daemon), Err(leaves("e0")));
    assert!(daemon.disk_state("d0").unwrap().active);
    daemon.take_torn_down();
    inactive(&mut daemon).unwrap();
}

#[test]
fn each_of_two_units_that_leave_one_address_is_waited_for_at_the_end() {
    let signals = crate::process::Signals::block().unwrap();
    let mut daemon = daemon();
    let (_never, held) = std::sync::mpsc::channel::<()>();
    let mut leaves = |leave: Box<dyn FnOnce() + Send>| {
        let what = TornDown::Lun { export: "s0".into(), at: FIRST, node_name: "d0".into() };
        daemon.teardowns.add(teardowns::Waiter::new("leaves").unwrap(), what, move || {
            leave();
            Vec::new()
        });
    };
    leaves(Box::new(|| ()));
    leaves(Box::new(move || held.recv().unwrap_or_default()));
    assert!(!daemon.end(&Patience::new(Some(std::time::Duration::from_secs(1)), &signals)));
}

#[test]
fn a_unit_that_comes_to_no_export_makes_none_forget_its_reservations_and_keeps_no_file() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    for name in ["d0", "d1"] {
        daemon.add_blockdev(image(at, name)).unwrap();
    }
    let unit = |serial: &str, pr_file: &str, node: &str| Lun {
        serial: serial.to_owned(),
        pr_file: pr_file.to_owned(),
        ..lun(0, node)
    };
    daemon.add_export(scsi_export_of(at, "s0", vec![unit("", "", "d0")])).unwrap();
    let first = Arc::clone(&daemon.exports["s0"].lun(FIRST).unwrap().unit);
    daemon.remove_export("s0", Deletion::Safe).unwrap();
    daemon.take_torn_down();

    let pr_file = at.join("pr").to_str().unwrap().to_owned();
    for wanted in [unit("otherwise", "", "d0"), unit("", &pr_file, "d0")] {
        let nowhere = scsi_export_of(&at.join("nowhere"), "s0", vec![wanted]);
        let error = daemon.add_export(nowhere).unwrap_err().to_string();
        assert!(error.starts_with("export 's0': cannot listen"), "{error}");
    }
    daemon.add_export(scsi_export_of(at, "s1", vec![unit("", "", "d0")])).unwrap();
    assert!(Arc::ptr_eq(&daemon.exports["s1"].lun(FIRST).unwrap().unit, &first));
    // The same unit by its name, for the file is of that.
    daemon.add_export(scsi_export_of(at, "s0", vec![unit("d0", &pr_file, "d1")])).unwrap();
}

#[test]
fn objects_go_in_the_order_of_their_uses_and_leave_nothing() {
    let (place, mut daemon) = with_image();
    let writer = Export { writable: true, ..export(place.path(), "e0", "d0") };
    daemon.add_export(writer).unwrap();
    assert!(!daemon.disk_state("d0").unwrap().read_only, "an export writes");
    daemon.remove_export("e0", Deletion::Safe).unwrap();
    assert_eq!(daemon.take_torn_down(), [TornDown::Export { id: "e0".into() }], "it had no client to wait for");
    assert!(daemon.disk_state("d0").unwrap().read_only, "nobody writes any more");
    daemon.remove_blockdev("d0").unwrap();
    daemon.remove_io_thread(DEFAULT_IOTHREAD).unwrap();
    assert_eq!(state(&daemon), (Config::empty(), vec![], vec![], vec![]));
    assert!(!place.path().join("e0").exists());
}

#[test]
fn a_blockdev_is_in_use_and_shown_however_many_layers_are_written_between_it_and_what_lies_over_it() {
    let blockdev = |text: &str| {
        let (value, spelling) = keyval::read(text, "driver").unwrap();
        Blockdev::from_value(value, spelling).unwrap()
    };
    for mid in ["driver=raw,file.node-name=mid,file.file", "driver=blkdebug,file.node-name=mid,file.image"] {
        let place = tempfile::tempdir().unwrap();
        let at = place.path();
        let mut daemon = daemon();
        daemon.add_blockdev(image(at, "bottom")).unwrap();
        daemon.add_blockdev(blockdev(&format!("raw,node-name=top,file.{mid}=bottom"))).unwrap();
        let inside = "driver=raw,file.node-name=in,file.file.driver=null-co,file.file.node-name=innermost";
        daemon.add_blockdev(blockdev(&format!("raw,node-name=out,file.{inside}"))).unwrap();
        daemon.add_blockdev(blockdev("raw,node-name=other,file=innermost")).unwrap();
        for node in ["bottom", "top", "mid", "out", "in", "innermost", "other"] {
            assert!(daemon.disk_state(node).is_some(), "{node}");
        }
        daemon.add_export(export(at, "e0", "top")).unwrap();
        let missing = blockdev("raw,node-name=d9,file.driver=raw,file.file=x");
        let limits = Limits::default();
        let attempts: Vec<Attempt<'_>> = vec![
            (Box::new(|d| d.add_blockdev(missing.clone())), "Cannot find device='x' nor node-name='x'"),
            (Box::new(|d| d.remove_blockdev("bottom")), "Block device bottom is in use"),
            (Box::new(|d| d.remove_blockdev("out")), "Block device innermost is in use"),
            (Box::new(|d| d.resize("bottom", 2 << 20).map(drop)), "Block device bottom is in use"),
            (Box::new(|d| d.set_limits("bottom", limits, None)), "blockdev 'bottom' lies below another"),
        ];
        refused(&mut daemon, attempts);
        daemon.add_export(export(at, "e1", "mid")).unwrap();
        daemon.remove_export("e0", Deletion::Safe).unwrap();
        daemon.remove_export("e1", Deletion::Safe).unwrap();
        daemon.take_torn_down();
        for node in ["top", "bottom", "other", "out"] {
            daemon.remove_blockdev(node).unwrap();
        }
    }
}

#[test]
fn an_image_grows_to_whole_blocks_and_never_shrinks() {
    let (place, mut daemon) = with_image();
    daemon.add_export(Export { writable: true, ..export(place.path(), "e0", "d0") }).unwrap();
    daemon.resize("d0", 2 << 20).unwrap();
    assert_eq!(daemon.disk_state("d0").unwrap().size, 2 << 20);
    for (size, line) in [(1 << 20, "shrinking would lose data"), ((2 << 20) + 1, "must be a multiple of 512")] {
        assert!(daemon.resize("d0", size).unwrap_err().to_string().contains(line));
        assert_eq!(daemon.disk_state("d0").unwrap().size, 2 << 20);
    }
}

#[test]
fn an_image_that_nobody_exports_is_made_longer_if_nobody_else_has_it_locked() {
    for was_exported in [false, true] {
        let place = tempfile::tempdir().unwrap();
        let at = place.path();
        let mut daemon = daemon();
        let blockdev = Blockdev { auto_read_only: Some(false), ..image(at, "d0") };
        daemon.add_blockdev(blockdev).unwrap();
        let file = at.join("d0.img");
        if was_exported {
            daemon.add_export(Export { writable: true, ..export(at, "e0", "d0") }).unwrap();
            // It could not be opened without locks, and so it is open as it was, and has left them.
            std::fs::rename(&file, at.join("away")).unwrap();
            daemon.remove_export("e0", Deletion::Safe).unwrap();
            daemon.take_torn_down();
            std::fs::rename(at.join("away"), &file).unwrap();
            assert_ne!(daemon.disks["d0"].options().locking, Locking::Off);
        }
        let options = Options::new("other", DiskDriver::File { filename: file });
        let elsewhere = || Disk::open(&Options { locking: Locking::On, ..options.clone() }).unwrap();
        let other = elsewhere();
        let refused = daemon.resize("d0", 2 << 20).unwrap_err().to_string();
        assert!(refused.contains("is locked"), "{refused}");
        drop(other);
        daemon.resize("d0", 2 << 20).unwrap();
        assert_eq!(elsewhere().size(), 2 << 20);
    }
}

#[test]
fn waits_are_recorded_of_threads_that_come_while_they_are_too() {
    let mut daemon = daemon();
    daemon.add_io_thread(IoThread::new("io0")).unwrap();
    assert!(daemon.take_recordings("").is_empty());
    daemon.record_waits(64).unwrap();
    daemon.add_io_thread(IoThread::new("io1")).unwrap();
    assert_eq!(daemon.take_recordings("").into_keys().collect::<Vec<_>>(), ["io0", "io1"]);
}

#[test]
fn a_thread_changes_its_policy_while_it_runs_and_keeps_what_is_fixed() {
    let mut daemon = daemon();
    daemon.add_io_thread(IoThread::new("io0")).unwrap();
    let busy = IoThread { poll_policy: Some(schema::PolicyKind::Busy), poll_idle_ms: 5, ..IoThread::new("io0") };
    daemon.change_io_thread(busy.clone()).unwrap();
    assert_eq!(daemon.config().iothreads[0], busy);
    let monitor = IoThread { fd_monitor: schema::MonitorChoice::Epoll, ..busy.clone() };
    let error = daemon.change_io_thread(monitor).unwrap_err().to_string();
    assert!(error.starts_with("iothread 'io0': fd-monitor cannot be changed"), "{error}");
    assert_eq!(daemon.config().iothreads, [busy]);
    assert!(daemon.thread_id("io0").is_some());
}

#[test]
fn what_is_about_a_thread_that_is_stuck_fails_and_changes_nothing() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    for name in ["io0", "io1", "io2"] {
        daemon.add_io_thread(IoThread::new(name)).unwrap();
    }
    for name in ["d0", "d2", "d3"] {
        daemon.add_blockdev(image(at, name)).unwrap();
    }
    let on = |id: &str, thread: &str| Export { iothread: vec![thread.to_owned()], ..export(at, id, "d0") };
    daemon.add_export(on("e0", "io1")).unwrap();
    for used in [export(at, "e2", "d2"), scsi_export(at, "s0")] {
        daemon.add_export(Export { iothread: vec!["io2".to_owned()], ..used }).unwrap();
    }
    let otherwise = Blockdev { detect_zeroes: Some(schema::DetectZeroes::On), ..image(at, "d2") };
    let stuck = ["io0", "io2"].map(|name| Stuck::begin(daemon.io_threads[name].handle()));
    let (line, used) = ("iothread 'io0': it is stuck", "iothread 'io2': it is stuck");
    let attempts: Vec<Attempt<'_>> = vec![
        (Box::new(|d| d.change_io_thread(IoThread { poll_max_ns: Some(0), ..IoThread::new("io0") })), line),
        (Box::new(|d| d.remove_io_thread("io0")), line),
        (Box::new(|d| d.add_export(on("e1", "io0"))), line),
        (Box::new(|d| d.place_export(on("e0", "io0")).map(drop)), line),
        (Box::new(|d| d.add_lun("s0", lun(0, "d3"))), used),
        (Box::new(|d| d.reopen(vec![otherwise.clone()]).map(drop)), used),
    ];
    refused(&mut daemon, attempts);
    daemon.add_export(on("e1", "io1")).unwrap();
    drop(stuck);
    daemon.place_export(on("e0", "io0")).unwrap();
}

#[test]
fn clients_that_start_queues_on_a_thread_that_is_stuck_hold_up_no_change() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    daemon.add_io_thread(IoThread::new("io0")).unwrap();
    for name in ["d0", "d1"] {
        daemon.add_blockdev(image(at, name)).unwrap();
    }
    let mut blk = export(at, "e0", "d0");
    blk.vhost_user_mut().unwrap().allow_inactive = true;
    for export in [blk, scsi_export_of(at, "s0", vec![lun(0, "d1")])] {
        daemon.add_export(Export { iothread: vec!["io0".to_owned()], ..export }).unwrap();
    }
    let stuck = Stuck::begin(daemon.io_threads["io0"].handle());
    let _clients = [("e0", 0), ("s0", 2)].map(|(id, queue)| {
        let mut peer = Peer(UnixStream::connect(at.join(id)).unwrap());
        peer.agree();
        let ring = kick_ring(&mut peer, queue);
        peer.say(SET_VRING_ENABLE, 0, &words(&[queue, 1]), &[]);
        (peer, ring)
    });
    await_that("their queues to be starting", || daemon.exports.values().all(egret_export::Export::is_in_use));
    let attempts: Vec<Attempt<'_>> = vec![
        (Box::new(|d| d.remove_export("e0", Deletion::Safe)), "export 'e0' still in use"),
        (Box::new(|d| d.set_active(Some("d0"), false)), "blockdev 'd0': rings of export 'e0' run"),
        (Box::new(|d| d.remove_lun("s0", FIRST)), "export 's0': a queue has not started in 5 s"),
    ];
    refused(&mut daemon, attempts);
    assert_eq!(daemon.resize("d1", 2 << 20).unwrap(), [""; 0]);
    for id in ["e0", "s0"] {
        daemon.remove_export(id, Deletion::Hard).unwrap();
        assert!(daemon.is_shutting_down(id));
    }
    assert_eq!(daemon.take_torn_down(), []);
    assert!(stuck.is(), "somebody has waited for it");
    drop(stuck);
    await_torn_down(&mut daemon, 2);
}

#[test]
fn an_export_over_nbd_on_a_thread_that_is_stuck_goes_when_that_goes_on_and_holds_up_no_change() {
    let (place, mut daemon) = with_image();
    serve_over_nbd(&mut daemon, place.path());
    let stuck = Stuck::begin(daemon.io_threads[DEFAULT_IOTHREAD].handle());
    let attempt: Attempt<'_> = (Box::new(Daemon::stop_nbd_server), "iothread 'io': it is stuck");
    refused(&mut daemon, vec![attempt]);
    daemon.remove_export("n0", Deletion::Safe).unwrap();
    assert!(daemon.is_shutting_down("n0") && stuck.is(), "somebody has waited for it");
    drop(stuck);
    assert_eq!(await_torn_down(&mut daemon, 1), [TornDown::Export { id: "n0".into() }]);
    daemon.stop_nbd_server().unwrap();
}

#[test]
fn the_server_over_nbd_ends_while_a_thread_is_stuck_with_what_clients_use() {
    let (place, mut daemon) = with_image();
    serve_over_nbd(&mut daemon, place.path());
    let _client = nbd_client(place.path());
    let stuck = Stuck::begin(daemon.io_threads[DEFAULT_IOTHREAD].handle());
    daemon.stop_nbd_server().unwrap();
    assert!(daemon.is_shutting_down("n0") && stuck.is(), "somebody has waited for it");
}

#[test]
fn reservations_credentials_and_secrets_in_files_that_do_not_answer_are_not_waited_for() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    let (value, spelling) = keyval::read("null-co,node-name=d0,size=1M", "driver").unwrap();
    daemon.add_blockdev(Blockdev::from_value(value, spelling).unwrap()).unwrap();
    daemon.add_export(scsi_export(at, "s0")).unwrap();
    // Another unit's, so that it is waited for, and what waits for somebody who writes.
    let (kept, pipe) = (at.join("pr"), at.join("ca-cert.pem"));
    let taken = std::fs::File::create(&kept).unwrap();
    rustix::fs::flock(&taken, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    daemon.calls.limit(Duration::from_millis(1));
    let unit = Lun { pr_file: kept.to_str().unwrap().to_owned(), ..lun(0, "d0") };
    let creds = TlsCreds::from_value(json!({"id": "t", "dir": at}), Typed).unwrap();
    let key = secret(json!({"id": "k", "file": pipe}));
    let lines = [
        format!("export 's0': target 0, lun 0: its pr-file: '{}' does not answer", kept.display()),
        format!("tls-creds-x509 't': '{}' does not answer: credentials could not be read", at.display()),
        format!("secret 'k': '{}' does not answer: it could not be read in 0 s", pipe.display()),
    ];
    let attempts: Vec<Attempt<'_>> = vec![
        (Box::new(|d| d.add_lun("s0", unit.clone())), &lines[0]),
        (Box::new(|d| d.add_tls_creds(creds.clone())), &lines[1]),
        (Box::new(|d| d.add_secret(key.clone())), &lines[2]),
    ];
    refused(&mut daemon, attempts);
    // Those who read it come to an end.
    drop(std::fs::File::options().write(true).open(&pipe).unwrap());
}

#[test]
fn a_thread_reads_the_clock_for_each_request_as_long_as_it_is_told_to() {
    let mut daemon = daemon();
    let mut thread = IoThread { x_clock_per_request: true, ..IoThread::new("io0") };
    daemon.add_io_thread(thread.clone()).unwrap();
    for reads in [ClockReads::ByRequest, ClockReads::ByPhase, ClockReads::ByRequest] {
        thread.x_clock_per_request = reads == ClockReads::ByRequest;
        daemon.change_io_thread(thread.clone()).unwrap();
        assert_eq!(daemon.io_threads["io0"].handle().call(|target| target.clock_reads()).unwrap(), reads);
    }
}

#[test]
fn a_thread_is_bound_to_processors_and_let_go_of_again() {
    let mut daemon = daemon();
    let thread = IoThread::new("io0");
    daemon.add_io_thread(thread.clone()).unwrap();
    let number = rustix::process::Pid::from_raw(daemon.thread_id("io0").unwrap());
    let runs_on = || rustix::thread::sched_getaffinity(number).unwrap();
    let anywhere = runs_on();
    let first = (0..=1023).find(|&cpu| anywhere.is_set(cpu)).unwrap();
    let bound = thread.with("cpu-affinity", serde_json::json!([first])).unwrap();
    daemon.change_io_thread(bound.clone()).unwrap();
    assert_eq!(runs_on().count(), 1);
    daemon.change_io_thread(bound.with("cpu-affinity", serde_json::Value::Null).unwrap()).unwrap();
    assert_eq!(runs_on(), anywhere);
    assert_eq!(daemon.config().iothreads, [thread]);
}

#[test]
fn a_thread_that_cannot_be_bound_to_its_processors_is_not_there() {
    let mut daemon = daemon();
    let nowhere = rustix::thread::CpuSet::MAX_CPU - 1;
    let thread = IoThread::new("io0").with("cpu-affinity", serde_json::json!([nowhere])).unwrap();
    let attempt: Vec<Attempt<'_>> = vec![(
        Box::new(|d| d.add_io_thread(thread.clone())),
        "iothread 'io0': cpu-affinity names no processor that is there",
    )];
    refused(&mut daemon, attempt);
    assert_eq!(daemon.thread_id("io0"), None);
}

#[test]
fn two_blockdevs_of_one_image_are_in_each_others_way_only_while_both_are_exported() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    let (first, mut second) = (image(at, "d0"), image(at, "d1"));
    second.driver.clone_from(&first.driver);
    daemon.add_blockdev(first).unwrap();
    daemon.add_blockdev(second).unwrap();
    daemon.add_export(Export { writable: true, ..export(at, "e1", "d1") }).unwrap();
    let error = daemon.add_export(export(at, "e0", "d0")).unwrap_err().to_string();
    assert!(error.starts_with("blockdev 'd0': ") && error.contains("is locked"), "{error}");
    daemon.remove_export("e1", Deletion::Safe).unwrap();
    assert_eq!(daemon.take_torn_down(), [TornDown::Export { id: "e1".into() }]);
    daemon.add_export(export(at, "e0", "d0")).unwrap();
    daemon.add_export(export(at, "e1", "d1")).unwrap();
}

#[test]
fn an_image_is_open_for_writing_from_the_start_where_auto_read_only_is_off() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    for (node, read_only, auto_read_only, open_for_reading) in [
        ("d0", None, None, true),
        ("d1", None, Some(true), true),
        ("d2", None, Some(false), false),
        ("d3", Some(true), Some(false), true),
    ] {
        daemon.add_blockdev(Blockdev { read_only, auto_read_only, ..image(at, node) }).unwrap();
        assert_eq!(daemon.disk_state(node).unwrap().read_only, open_for_reading, "{node}");
    }
    daemon.add_export(export(at, "reads", "d2")).unwrap();
    daemon.add_export(Export { writable: true, ..export(at, "writes", "d2") }).unwrap();
}

#[test]
fn a_set_of_descriptors_to_read_from_is_none_for_a_disk_that_is_opened_for_writing() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon();
    let file = tempfile::NamedTempFile::new_in(place.path()).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    daemon.add_fd(Some(0), std::fs::File::open(file.path()).unwrap().into(), None).unwrap();
    let disk = Blockdev::new("d0", Driver::File(Image::new("/dev/fdset/0")));
    let for_writing = Blockdev { auto_read_only: Some(false), ..disk.clone() };
    let error = daemon.add_blockdev(for_writing).unwrap_err().to_string();
    assert!(error.contains("no descriptor that is open for reading and writing"), "{error}");
    daemon.add_blockdev(disk).unwrap();
}

#[test]
fn a_blockdev_that_cannot_be_opened_otherwise_stays_open_without_locks_and_is_in_no_other_ones_way() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    let is_free = |name: &str| is_free(at, name);
    image(at, "d0");
    let open = || std::fs::File::options().read(true).write(true).open(at.join("d0.img")).unwrap();
    daemon.add_fd(Some(0), open().into(), None).unwrap();
    daemon.add_blockdev(Blockdev::new("d0", Driver::File(Image::new("/dev/fdset/0")))).unwrap();
    daemon.add_blockdev(image(at, "d1")).unwrap();
    let writer = |id: &str, node: &str| Export { writable: true, ..export(at, id, node) };
    daemon.add_export(writer("e0", "d0")).unwrap();
    daemon.add_export(writer("e1", "d1")).unwrap();
    assert!(!is_free("d0") && !is_free("d1"));
    daemon.remove_fd(0, None).unwrap();
    daemon.remove_export("e0", Deletion::Safe).unwrap();
    daemon.take_torn_down();
    assert!(is_free("d0"), "nobody uses it");
    assert!(!daemon.disk_state("d0").unwrap().read_only, "as it was opened");
    // What is about others goes on.
    daemon.add_blockdev(image(at, "d2")).unwrap();
    daemon.remove_export("e1", Deletion::Safe).unwrap();
    daemon.take_torn_down();
    assert!(is_free("d1"));
    assert!(daemon.disk_state("d1").unwrap().read_only);
    let otherwise = Blockdev { detect_zeroes: Some(schema::DetectZeroes::On), ..image(at, "d2") };
    daemon.reopen(vec![otherwise]).unwrap();
    // And what is about this one changes nothing, until it can be had.
    let as_it_is = || Blockdev::new("d0", Driver::File(Image::new("/dev/fdset/0")));
    let attempts: Vec<Attempt<'_>> = vec![
        (Box::new(|d| d.add_export(writer("e0", "d0"))), "blockdev 'd0': there is no fdset 0"),
        (Box::new(|d| d.reopen(vec![as_it_is()]).map(drop)), "blockdev 'd0': there is no fdset 0"),
    ];
    refused(&mut daemon, attempts);
    daemon.add_fd(Some(0), open().into(), None).unwrap();
    daemon.add_export(writer("e0", "d0")).unwrap();
    assert!(!is_free("d0"));
}

#[test]
fn an_image_that_nobody_could_make_stable_for_want_of_a_thread_stays_open_and_locked_until_there_is_one() {
    let (place, mut daemon) = with_image();
    let at = place.path();
    let (value, spelling) = keyval::read("raw,node-name=r,file=d0", "driver").unwrap();
    daemon.add_blockdev(Blockdev::from_value(value, spelling).unwrap()).unwrap();
    daemon.add_export(Export { writable: true, ..export(at, "e0", "d0") }).unwrap();
    daemon.calls.limit(Duration::MAX);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            refuse_threads();
            daemon.remove_export("e0", Deletion::Safe).unwrap();
            daemon.take_torn_down();
        });
    });
    assert!(daemon.disks.contains_key("d0") && !is_free(at, "d0"));
    daemon.add_blockdev(image(at, "d1")).unwrap();
    assert!(!daemon.disks.contains_key("d0") && is_free(at, "d0"));
}

#[test]
fn a_blockdev_that_is_not_open_is_said_to_be_that_and_opened_when_a_change_is_about_it() {
    let (place, mut daemon) = with_image();
    let at = place.path();
    let (value, spelling) = keyval::read("raw,node-name=r,file=d0", "driver").unwrap();
    daemon.add_blockdev(Blockdev::from_value(value, spelling).unwrap()).unwrap();
    std::fs::rename(at.join("d0.img"), at.join("away")).unwrap();
    daemon.remove_blockdev("r").unwrap();
    let limits = Limits::default();
    let attempts: Vec<Attempt<'_>> = vec![
        (Box::new(|d| d.resize("d0", 2 << 20).map(drop)), "blockdev 'd0' is not open"),
        (Box::new(|d| d.set_limits("d0", limits, None)), "blockdev 'd0' is not open"),
        (Box::new(|d| d.set_active(Some("d0"), true)), "blockdev 'd0' is not open"),
        (Box::new(|d| d.reopen(vec![d.config.blockdevs[0].clone()]).map(drop)), "blockdev 'd0': '"),
    ];
    refused(&mut daemon, attempts);
    std::fs::rename(at.join("away"), at.join("d0.img")).unwrap();
    daemon.add_blockdev(image(at, "d1")).unwrap();
    assert_eq!(daemon.disk_state("d0"), None, "that was about another");
    daemon.add_export(export(at, "e0", "d0")).unwrap();
    assert_eq!(daemon.disk_state("d0").unwrap().size, 1 << 20);
}

#[test]
fn a_blockdev_that_is_not_open_is_opened_when_it_is_reopened() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let mut daemon = daemon();
    for name in ["d0", "d1"] {
        daemon.add_blockdev(image(at, name)).unwrap();
    }
    let (value, spelling) = keyval::read("raw,node-name=r,file=d0", "driver").unwrap();
    daemon.add_blockdev(Blockdev::from_value(value, spelling).unwrap()).unwrap();
    let file = at.join("d0.img");
    std::fs::rename(&file, at.join("away")).unwrap();
    daemon.remove_blockdev("r").unwrap();
    std::fs::rename(at.join("away"), &file).unwrap();
    let as_it_is = |daemon: &Daemon, at: usize| daemon.config.blockdevs[at].clone();
    daemon.reopen(vec![as_it_is(&daemon, 1)]).unwrap();
    assert_eq!(daemon.disk_state("d0"), None, "that was about another");
    daemon.reopen(vec![as_it_is(&daemon, 0)]).unwrap();
    assert_eq!(daemon.disk_state("d0").unwrap().size, 1 << 20);
}
