//! The monitor as seen by `qemu.qmp`, a client that nobody here wrote.

mod support;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;

use support::await_that;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A Python that has `qemu.qmp`; `None`, where this is no CI, if there can be none.
fn python() -> Option<String> {
    let found = Command::new(format!("{ROOT}/scripts/install-qmp-client")).output().expect("our own script");
    if found.status.success() {
        return Some(String::from_utf8(found.stdout).expect("a path").trim().to_owned());
    }
    egret_needs::this_test_lacks(format_args!("qemu.qmp: {}", String::from_utf8_lossy(&found.stderr)));
    None
}

/// A daemon that may open the images that are made beside its sockets.
fn in_place(scratch: &Scratch) -> Program {
    Program::egret().with_words(["--sandbox-dir", scratch.path("").to_str().unwrap()])
}

#[test]
fn qemus_own_client_drives_every_command() {
    let Some(python) = python() else { return };
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let mut server = Server::start(&in_place(&scratch), &Options::new().monitor("m", &socket));
    let script = Path::new(ROOT).join("crates/egret/tests/qmp_client/drive.py");
    let driven =
        Command::new(python).arg(script).arg(&socket).arg(scratch.path("").as_os_str()).output().expect("it runs");
    let said = String::from_utf8_lossy(&driven.stderr);
    assert!(driven.status.success(), "{said}");
    await_that("the daemon to end", || !server.is_alive());
}

/// Every command, as one types it into `qmp-shell`; `PLACE` is a directory.
const TYPED: &str = r#"
query-version
query-commands
query-qmp-schema
query-fdsets
object-add qom-type=iothread id=io0 poll-max-ns=10000
object-add qom-type=iothread id=io1
qom-list path=/objects
qom-set path=/objects/io0 property=poll-policy value=low-regret
qom-get path=/objects/io0 property=poll-policy
query-iothreads
blockdev-add driver=file node-name=d0 filename=PLACE/image cache={"direct":false}
block-export-add type=vhost-user-blk id=e0 node-name=d0 iothread=io0 writable=true addr={"type":"unix","path":"PLACE/e0"}
block-export-resume id=e0
blockdev-set-active node-name=d0 active=true
query-block-exports
blockdev-reopen options=[{"driver":"file","node-name":"d0","filename":"PLACE/image","discard":"unmap"}]
egret-move-queue id=e0 queue=0 iothread=io1
egret-map-queues id=e0 iothread=io0
block_set_io_throttle id=d0 bps=0 bps_rd=0 bps_wr=0 iops=100 iops_rd=0 iops_wr=0
nbd-server-start addr={"type":"unix","data":{"path":"PLACE/nbd"}}
nbd-server-add device=d0 name=n0
nbd-server-remove name=n0
nbd-server-stop
block_resize node-name=d0 size=2097152
query-named-block-nodes
query-blockstats
egret-query-stats export=e0
block-export-add type=vhost-user-scsi id=s0 iothread=io0 addr={"type":"unix","path":"PLACE/s0"}
egret-lun-add id=s0 lun=5 node-name=d0
egret-lun-del id=s0 lun=5
block-export-del id=s0
block-export-del id=e0
blockdev-del node-name=d0
object-del id=io0
quit
"#;

#[test]
fn every_command_can_be_typed_into_qmp_shell() {
    let Some(python) = python() else { return };
    let scratch = Scratch::new();
    std::fs::File::create(scratch.path("image")).unwrap().set_len(1 << 20).unwrap();
    let socket = scratch.path("qmp");
    let mut server = Server::start(&in_place(&scratch), &Options::new().monitor("m", &socket));
    let known = Qmp::connect(&socket).run("query-commands", json!({}));
    let names = known.as_array().unwrap().iter().map(|command| command["name"].as_str().unwrap());
    // The shell sends no descriptors.
    let not_typed = ["qmp_capabilities", "getfd", "closefd", "add-fd", "remove-fd"];
    let forgotten = names.filter(|name| !not_typed.contains(name) && !TYPED.contains(&format!("\n{name}")));
    assert_eq!(forgotten.collect::<Vec<_>>(), [""; 0]);
    let typed = TYPED.trim_start().replace("PLACE", scratch.path("").to_str().unwrap().trim_end_matches('/'));
    let mut shell = Command::new(Path::new(&python).with_file_name("qmp-shell"));
    // It keeps what was typed in a file there.
    shell.env("HOME", scratch.path(""));
    shell.arg(&socket).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut shell = shell.spawn().unwrap();
    shell.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    // When the daemon is gone it ends with an exception, whatever was typed.
    let answers = String::from_utf8(shell.wait_with_output().unwrap().stdout).unwrap();
    assert!(!answers.contains("\"error\""), "{answers}");
    assert_eq!(answers.matches("{\"return\":").count(), typed.lines().count(), "{answers}");
    await_that("the daemon to end", || !server.is_alive());
}
