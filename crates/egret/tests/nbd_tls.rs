//! NBD inside of TLS, both ways: others' servers and clients, who is refused, and what an outage costs.

mod support;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use egret_nbd::protocol::{Headers, answer, option};
use rustix::process::Signal;
use serde_json::json;

use support::await_that;
use support::certificates::{make, part};
use support::disk::Disk;
use support::nbd::{NbdServer, Reference, has_servers_or_skips, outages_cost_time_alone, use_it};
use support::nbd_client::{NbdClient, greet, haggle, send_option, string};
use support::port::Port;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const MIB: u64 = 1 << 20;

/// `--object`, for an end.
fn creds(id: &str, dir: &Path, more: &str) -> [String; 2] {
    ["--object".to_owned(), format!("tls-creds-x509,id={id},dir={}{more}", dir.display())]
}

/// A daemon whose disk of 32 MiB is exported inside of TLS.
struct Exporter {
    server: Server,
    nbd: PathBuf,
    image: PathBuf,
}

impl Exporter {
    fn new(scratch: &Scratch, dir: &Path, more: &str) -> Self {
        let (nbd, image) = (scratch.path("nbd"), scratch.image("disk", 32 * MIB));
        let options = Options::new()
            .words(creds("t", dir, &format!(",endpoint=server{more}")))
            .iothread("io0", "")
            .iothread("io1", "fd-monitor=epoll")
            .disk("d0", &image, "discard=unmap")
            .words(["--nbd-server".to_owned(), format!("addr.type=unix,addr.path={},tls-creds=t", nbd.display())])
            .words(["--export", "nbd,id=e0,node-name=d0,name=disk,writable=on,iothread.0=io0,iothread.1=io1"])
            .listening(&nbd);
        let server = Server::start(&Program::egret().with_env("EGRET_LOG", "info"), &options);
        Self { server, nbd, image }
    }

    /// For libnbd's tools.
    fn uri(&self, dir: &Path) -> String {
        format!("nbds+unix:///disk?socket={}&tls-certificates={}", self.nbd.display(), dir.display())
    }

    /// For QEMU's.
    fn image_opts(&self) -> String {
        let socket = self.nbd.display();
        format!("driver=nbd,server.type=unix,server.path={socket},export=disk,tls-creds=c,tls-hostname=localhost")
    }
}

/// Runs a program: whether it succeeds, and all that it printed. `None` if it is not here.
fn run(program: &str, arguments: &[&str]) -> Option<(bool, String)> {
    match Command::new(program).args(arguments).output() {
        Ok(output) => {
            let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            Some((output.status.success(), out + &err))
        }
        Err(_) => {
            egret_needs::this_test_lacks(program);
            None
        }
    }
}

/// [`run`], and it succeeds.
fn succeeds(program: &str, arguments: &[&str]) -> Option<String> {
    let (succeeded, said) = run(program, arguments)?;
    assert!(succeeded, "{program} {arguments:?}: {said}");
    Some(said)
}

#[test]
fn data_is_what_was_written_inside_of_tls_over_each_server_that_there_is() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let Some(dir) = make(&scratch, "tls", &[]) else { return };
    let images = ["one", "two", "three"].map(|name| scratch.image(name, 16 * MIB));
    let [of_nbdkit, of_qemu] = ["nbdkit", "qemu"].map(|name| scratch.path(name));
    let (file, tls) = (format!("file={}", images[0].display()), format!("--tls-certificates={}", dir.display()));
    let _nbdkit = NbdServer::nbdkit(&of_nbdkit, &["--tls=require", "--tls-verify-peer", &tls, "file", &file]);
    let object = format!("tls-creds-x509,id=t,endpoint=server,verify-peer=on,dir={}", dir.display());
    let words = ["--export-name=disk", "--object", &object, "--tls-creds=t"];
    let _qemu = NbdServer::qemu(&of_qemu, &images[1], 4, &words);
    let port = Port::new();
    let of = |name: &str| dir.join(name).display().to_string();
    let files = [("cacertfile", "ca-cert.pem"), ("certfile", "server-cert.pem"), ("keyfile", "server-key.pem")];
    let files: String = files.iter().map(|(key, name)| format!("{key}={}\n", of(name))).collect();
    let _reference = Reference::start(&scratch.path(""), &port, &images[2], &format!("{files}force_tls=true\n"));
    for (round, monitor) in ["io_uring", "epoll", "ppoll"].into_iter().enumerate() {
        let exports = ["e0", "e1", "e2"].map(|name| scratch.path(name));
        let mut options = Options::new().iothread("io0", &format!("fd-monitor={monitor}")).words(creds("c", &dir, ""));
        for (at, place) in [
            format!("server.type=unix,server.path={},tls-hostname=localhost", of_nbdkit.display()),
            format!("filename=nbds+unix:///disk?socket={}", of_qemu.display()),
            format!("filename=nbds://127.0.0.1:{port}/disk"),
        ]
        .into_iter()
        .enumerate()
        {
            let blockdev = format!("nbd,node-name=d{at},discard=unmap,tls-creds=c,{place}");
            options = options.words(["--blockdev".to_owned(), blockdev]);
            options = options.export(&format!("e{at}"), &format!("d{at}"), &exports[at], "writable=on,iothread=io0");
        }
        let server = Server::start(&Program::egret(), &options);
        for export in &exports[..] {
            let mut disk = Disk::connect(export).unwrap();
            use_it(&mut disk, 512);
            disk.first().write_pattern(12 * MIB..16 * MIB, round as u64).unwrap();
        }
        assert_eq!(server.complaints(), [""; 0], "{monitor}");
        assert_eq!(server.terminate().code(), Some(0), "{monitor}");
    }
    for image in images {
        let mut disk = Disk::open(&image, false).unwrap();
        disk.first().verify_pattern(0..MIB, 1).unwrap();
        disk.first().verify_pattern(12 * MIB..16 * MIB, 2).unwrap();
    }
}

#[test]
fn others_clients_read_and_write_inside_of_tls_what_is_on_the_disk() {
    let scratch = Scratch::new();
    let Some(dir) = make(&scratch, "tls", &[]) else { return };
    let exporter = Exporter::new(&scratch, &dir, "");
    let (uri, image) = (exporter.uri(&dir), exporter.image.display().to_string());
    let source = scratch.image("source", 32 * MIB);
    Disk::open(&source, true).unwrap().first().write_pattern(MIB..9 * MIB, 4).unwrap();
    let source = source.display().to_string();
    let Some(_) = succeeds("nbdcopy", &["--connections=2", &source, &uri]) else { return };
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&image).unwrap());
    let copy = scratch.image_path("copy").display().to_string();
    succeeds("nbdcopy", &["--requests=64", &uri, &copy]);
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&copy).unwrap());
    let told = succeeds("nbdinfo", &[&uri]).unwrap();
    assert!(told.contains("with TLS") && told.contains("export-size: 33554432"), "{told}");
    let object = format!("tls-creds-x509,id=c,endpoint=client,dir={}", dir.display());
    let (opts, plain) = (exporter.image_opts(), format!("driver=raw,file.filename={source}"));
    succeeds("qemu-img", &["compare", "--object", &object, "--image-opts", &opts, &plain]);
    let commands =
        ["write -P 7 0 3M", "write -z 1M 1M", "discard 8M 8M", "flush", "read -P 7 2M 1M", "read -P 0 1M 1M"];
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let arguments: Vec<&str> =
        ["--object", &object, "--image-opts"].into_iter().chain(commands).chain([&*opts]).collect();
    let said = succeeds("qemu-io", &arguments).unwrap();
    assert!(!said.contains("failed"), "{said}");
    assert_eq!(std::fs::read(&image).unwrap()[..MIB as usize], vec![7; MIB as usize]);
    assert_eq!(exporter.server.complaints(), [""; 0]);
}

#[test]
fn who_does_not_encrypt_is_told_that_he_must_and_nothing_else() {
    let scratch = Scratch::new();
    let Some(dir) = make(&scratch, "tls", &[]) else { return };
    let exporter = Exporter::new(&scratch, &dir, ",verify-peer=off");
    let socket = &exporter.nbd;
    let mut stream = greet(socket);
    let name = [&string("disk")[..], &[0, 0]].concat();
    let context = [&string("disk")[..], &[0; 4]].concat();
    for (option, data) in [
        (option::LIST, &[][..]),
        (option::STRUCTURED_REPLY, &[]),
        (option::EXTENDED_HEADERS, &[]),
        (option::INFO, &name),
        (option::GO, &name),
        (option::SET_META_CONTEXT, &context),
        (99, b"?"),
    ] {
        let answers = haggle(&mut stream, option, data);
        assert_eq!(answers.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [answer::TLS_REQUIRED], "{option}");
    }
    assert_eq!(haggle(&mut stream, option::STARTTLS, b"x")[0].0, answer::INVALID);
    // What is said between STARTTLS and TLS could be somebody else's.
    let starttls = [&b"IHAVEOPT"[..], &option::STARTTLS.to_be_bytes(), &[0; 4]].concat();
    let list = [&b"IHAVEOPT"[..], &option::LIST.to_be_bytes(), &[0; 4]].concat();
    let mut rest = Vec::new();
    stream.write_all(&[starttls, list.clone()].concat()).unwrap();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty(), "{rest:?}");
    // Nor is it taken later for what is said inside.
    let mut stream = greet(socket);
    assert_eq!(haggle(&mut stream, option::STARTTLS, &[])[0].0, answer::ACK);
    stream.write_all(&list).unwrap();
    let _ = stream.read_to_end(&mut rest);
    assert_eq!(rest[0], 21, "an alert, and no more: {rest:?}");
    let mut stream = greet(socket);
    send_option(&mut stream, option::EXPORT_NAME, b"disk").unwrap();
    rest.clear();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
    for why in [
        "it has sent something between STARTTLS and TLS",
        "a client is sent away: TLS: received corrupt message of type InvalidContentType",
        "it does not begin TLS, which tls-creds ask for",
    ] {
        await_that(why, || exporter.server.complaints().iter().any(|line| line.contains(why)));
    }
    let plain = format!("nbd+unix:///disk?socket={}", socket.display());
    let Some((succeeded, said)) = run("nbdinfo", &[&plain]) else { return };
    assert!(!succeeded && said.contains("TLS"), "{said}");
    // Encrypted, without a certificate of its own.
    let ca = part(&scratch, "ca", &dir, &["ca-cert.pem"]);
    assert_eq!(succeeds("nbdinfo", &["--size", &exporter.uri(&ca)]).unwrap().trim(), (32 * MIB).to_string());
}

#[test]
fn who_has_no_certificate_of_the_cas_is_not_let_in_and_costs_nobody_else() {
    let scratch = Scratch::new();
    let (Some(dir), Some(other)) = (make(&scratch, "tls", &[]), make(&scratch, "other", &[])) else { return };
    let exporter = Exporter::new(&scratch, &dir, "");
    let nobody = part(&scratch, "nobody", &dir, &["ca-cert.pem"]);
    let expired = make(&scratch, "expired", &["-1"]).unwrap();
    for (at, client) in [&nobody, &other, &expired].into_iter().enumerate() {
        let Some((succeeded, said)) = run("nbdinfo", &["--size", &exporter.uri(client)]) else { return };
        assert!(!succeeded, "{said}");
        await_that("the daemon to say why", || {
            exporter.server.complaints().iter().filter(|line| line.contains("a client is sent away: TLS: ")).count()
                > at
        });
        assert_eq!(succeeds("nbdinfo", &["--size", &exporter.uri(&dir)]).unwrap().trim(), (32 * MIB).to_string());
    }
    assert!(exporter.server.complaints()[0].ends_with("TLS: peer sent no certificates"));
}

#[test]
fn a_disk_behind_a_server_that_is_not_believed_is_not_opened_in_the_clear_either() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let (Some(dir), Some(other)) = (make(&scratch, "tls", &[]), make(&scratch, "other", &[])) else { return };
    let elsewhere = make(&scratch, "elsewhere", &["365", "elsewhere.example"]).unwrap();
    let expired = make(&scratch, "expired", &["-1"]).unwrap();
    let nobody = part(&scratch, "nobody", &dir, &["ca-cert.pem"]);
    let said = |socket: &Path, dir: &Path, more: &str| {
        let blockdev = format!("nbd,node-name=d0,server.type=unix,server.path={},tls-creds=c{more}", socket.display());
        let export =
            format!("type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={}", scratch.path("e").display());
        let mut command = Program::egret().command();
        let output =
            command.args(creds("c", dir, "")).args(["--blockdev", &blockdev, "--export", &export]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{blockdev}");
        let lines = String::from_utf8(output.stderr).unwrap();
        lines.lines().last().unwrap_or_default().to_owned()
    };
    let nbdkit = |name: &str, words: &[&str]| {
        let socket = scratch.path(name);
        let server = NbdServer::nbdkit(&socket, &[words, &["memory", "1M"]].concat());
        (socket, server)
    };
    let tls = |dir: &Path| format!("--tls-certificates={}", dir.display());
    let good = nbdkit("good", &["--tls=require", "--tls-verify-peer", &tls(&dir)]);
    let plain = nbdkit("plain", &["--tls=off"]);
    let old = nbdkit("old", &["--tls=require", &tls(&expired)]);
    let away = nbdkit("away", &["--tls=require", &tls(&elsewhere)]);
    for (socket, dir, more, why) in [
        (&good.0, &other, "", "TLS was not begun: TLS: invalid peer certificate: "),
        (&old.0, &expired, "", "TLS was not begun: TLS: invalid peer certificate: Expired"),
        (&away.0, &elsewhere, ",tls-hostname=localhost", "not valid for name"),
        (&plain.0, &dir, "", "the server has no TLS"),
        (&good.0, &nobody, "", "the server has ended the connection"),
    ] {
        let line = said(socket, dir, more);
        assert!(line.contains(why) && line.contains("blockdev 'd0'"), "{line}");
    }
    let missing = said(&good.0, &scratch.path("nowhere"), "");
    assert!(
        missing.contains("tls-creds-x509 'c': '") && missing.contains("/nowhere/ca-cert.pem': No such file"),
        "{missing}"
    );
    // Without credentials it says what it lacks.
    let export =
        format!("type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={}", scratch.path("e").display());
    let blockdev = format!("nbd,node-name=d0,server.type=unix,server.path={}", good.0.display());
    let output = Program::egret().command().args(["--blockdev", &blockdev, "--export", &export]).output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(line.contains("the server wants TLS") && line.contains("name credentials by tls-creds"), "{line}");
}

#[test]
fn a_server_inside_of_tls_that_is_killed_under_load_costs_time_and_nothing_else() {
    let scratch = Scratch::new();
    let Some(dir) = make(&scratch, "tls", &[]) else { return };
    let (image, export, port) = (scratch.image("image", 16 * MIB), scratch.path("e0"), Port::new());
    // The server is ours, too.
    let serving = Options::new()
        .words(creds("t", &dir, ",endpoint=server"))
        .disk("d0", &image, "")
        .words(["--nbd-server".to_owned(), format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port},tls-creds=t")])
        .words(["--export", "nbd,id=e0,node-name=d0,name=disk,writable=on"]);
    let mut nbd = Server::start(&Program::egret(), &serving);
    let options = Options::new()
        .iothread("io0", "")
        .iothread("io1", "fd-monitor=epoll")
        .words(creds("c", &dir, ""))
        .words([
            "--blockdev".to_owned(),
            format!(
                "nbd,node-name=d0,tls-creds=c,reconnect-delay=60,open-timeout=30,filename=nbds://localhost:{port}/disk"
            ),
        ])
        .export("e0", "d0", &export, "writable=on,num-queues=2,iothread.0=io0,iothread.1=io1");
    let server = Server::start(&Program::egret().with_env("EGRET_LOG", "info"), &options);
    outages_cost_time_alone(&server, &export, &image, || {
        nbd.send(Signal::KILL);
        nbd.await_end();
        nbd = Server::start(&Program::egret(), &serving);
    });
    assert_eq!(server.terminate().code(), Some(0));
    // The daemon may have ended while one of its connections was still being made.
    let is_cut_off = |line: &str| {
        ["the connection was cut off inside of TLS", "Connection reset by peer"].iter().any(|end| line.contains(end))
    };
    let complaints = nbd.complaints().into_iter().filter(|line| !is_cut_off(line));
    assert_eq!(complaints.collect::<Vec<_>>(), [""; 0]);
    assert_eq!(nbd.terminate().code(), Some(0));
}

#[test]
fn monitors_add_credentials_use_them_and_forget_them() {
    let scratch = Scratch::new();
    let Some(dir) = make(&scratch, "tls", &[]) else { return };
    let [monitor, nbd] = ["qmp", "nbd"].map(|name| scratch.path(name));
    let options = Options::new().disk("d0", &scratch.image("d0", MIB), "").monitor("m", &monitor);
    let program = Program::egret().with_words(["--sandbox-dir", scratch.path("").to_str().unwrap()]);
    let server = Server::start(&program, &options);
    let mut qmp = Qmp::connect(&monitor);
    let start = json!({"addr": {"type": "unix", "data": {"path": nbd}}, "tls-creds": "t"});
    let add =
        |id: &str, endpoint: &str| json!({"qom-type": "tls-creds-x509", "id": id, "dir": dir, "endpoint": endpoint});
    assert!(qmp.fail("nbd-server-start", start.clone()).contains("there is no tls-creds-x509 't'"));
    let nowhere =
        json!({"qom-type": "tls-creds-x509", "id": "t", "dir": scratch.path("nowhere"), "endpoint": "server"});
    assert!(qmp.fail("object-add", nowhere).contains("/nowhere/ca-cert.pem'"));
    qmp.run("object-add", add("t", "server"));
    assert!(qmp.fail("object-add", add("t", "client")).contains("duplicate"));
    qmp.run("object-add", add("c", "client"));
    let wrong = json!({"addr": {"type": "unix", "data": {"path": nbd}}, "tls-creds": "c"});
    assert_eq!(
        qmp.fail("nbd-server-start", wrong),
        "tls-creds: 'c' has endpoint=client, and endpoint=server is needed"
    );
    qmp.run("nbd-server-start", start);
    qmp.run(
        "block-export-add",
        json!({"type": "nbd", "id": "e0", "node-name": "d0", "name": "disk", "writable": true}),
    );
    // A disk of its own, behind itself.
    let server_at = json!({"type": "unix", "path": nbd});
    let disk = json!({"driver": "nbd", "node-name": "d1", "server": server_at, "export": "disk", "tls-creds": "c"});
    qmp.run("blockdev-add", disk);
    for id in ["t", "c"] {
        assert_eq!(qmp.fail("object-del", json!({"id": id})), format!("object '{id}' is in use, can not be deleted"));
    }
    qmp.run("blockdev-del", json!({"node-name": "d1"}));
    qmp.run("nbd-server-stop", json!({}));
    // Its name is another's to have only then.
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    for id in ["t", "c"] {
        qmp.run("object-del", json!({"id": id}));
        assert_eq!(qmp.fail("object-del", json!({"id": id})), format!("object '{id}' not found"));
    }
    // Without them nothing is encrypted, and a client need not.
    qmp.run("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": nbd}}}));
    qmp.run("block-export-add", json!({"type": "nbd", "id": "e1", "node-name": "d0", "name": "disk"}));
    assert_eq!(NbdClient::connect(&nbd, "disk", Headers::Simple).read(0, 512), [0; 512]);
    drop(qmp);
    assert_eq!(server.complaints(), [""; 0]);
    assert!(server.terminate().success());
}

#[test]
fn what_was_written_inside_of_tls_is_made_stable_though_its_server_was_killed_and_is_there_again() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let Some(dir) = make(&scratch, "tls", &[]) else { return };
    let (export, port) = (scratch.path("e0"), Port::new());
    let tls = format!("--tls-certificates={}", dir.display());
    let mut nbd = NbdServer::nbdkit_tcp("127.0.0.1", &port, &["--tls=require", &tls, "memory", "16M"]);
    let options = Options::new()
        .words(creds("c", &dir, ""))
        .words(["--blockdev".to_owned(), format!("nbd,node-name=d0,tls-creds=c,filename=nbds://localhost:{port}")])
        .export("e0", "d0", &export, "writable=on");
    let server = Server::start(&Program::egret().with_env("EGRET_LOG", "info"), &options);
    let mut disk = Disk::connect(&export).unwrap();
    disk.first().write(0, &[1; 4096]).unwrap();
    drop(disk);
    await_that("the client to have left", || server.log().iter().any(|line| line.contains("the client left")));
    // Over TCP a request is sent all the same, and what comes back is the end.
    nbd.kill();
    nbd.start_again();
    assert_eq!(server.terminate().code(), Some(0));
}
