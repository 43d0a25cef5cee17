//! `egret ctl`: a daemon's commands from a shell.

mod support;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use support::await_that;
use support::scratch::Scratch;
use support::server::{Options, Program, Server, binary};

fn ctl(socket: &Path, words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(binary());
    let Output { status, stdout, stderr } = command.arg("ctl").arg(socket).args(words).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn a_shell_makes_a_disk_looks_at_it_and_ends_the_daemon() {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let mut server = Server::start(&Program::egret(), &Options::new().monitor("m", &socket));
    let good = |words: &[&str]| {
        let (status, said, complaint) = ctl(&socket, words);
        assert_eq!((status, complaint), (Some(0), String::new()), "{words:?}");
        said
    };
    assert_eq!(good(&["object-add", "qom-type=iothread", "id=io0"]), "");
    assert_eq!(good(&["blockdev-add", "driver=null-co", "node-name=n0", "size=1048576"]), "");
    let path = format!("addr.path={}", scratch.path("e0").display());
    good(&[
        "block-export-add",
        "type=vhost-user-blk",
        "id=e0",
        "node-name=n0",
        "iothread=io0",
        "addr.type=unix",
        &path,
    ]);
    let table = good(&["query-block-exports"]);
    assert!(table.starts_with("id  node-name") && table.contains("e0  n0"), "{table}");
    assert!(good(&["--json", "query-block-exports"]).starts_with(r#"[{"id":"e0""#));

    let (status, said, complaint) = ctl(&socket, &["blockdev-del", "node-name=n0"]);
    assert_eq!((status, said.as_str()), (Some(1), ""));
    assert_eq!(complaint, "egret: blockdev-del: Node n0 is in use\n");
    let (status, _, complaint) = ctl(&scratch.path("nobody"), &["quit"]);
    assert!(status == Some(1) && complaint.starts_with("egret: cannot connect to '"), "{complaint}");
    good(&["quit"]);
    await_that("the daemon to end", || !server.is_alive());
}

#[test]
fn what_cannot_be_printed_is_an_error_and_what_nobody_reads_any_more_is_none() {
    let scratch = Scratch::new();
    let (socket, file) = (scratch.path("qmp"), scratch.path("egret.toml"));
    let (socket_text, file_text) = (socket.to_str().unwrap(), file.to_str().unwrap());
    std::fs::write(&file, "[[blockdev]]\nnode-name = 'n'\ndriver = 'null-co'\n").unwrap();
    let _server = Server::start(&Program::egret(), &Options::new().monitor("m", &socket));
    for words in [
        &["ctl", socket_text, "query-version"][..],
        &["ctl", "--json", socket_text, "query-version"],
        &["top", "--once", "--interval=0.1", socket_text],
        &["config", "check", file_text],
        &["serve", "--config", file_text, "--monitor=stdio", "--print-config"],
        &["serve", "--object", "help"],
        &["replay", "--list"],
        &["replay", "builtin:tight"],
        &["replay", "--json", "builtin:tight"],
        &["bench", "--list"],
        &["bench", "quick", "--dry-run"],
    ] {
        let run = |stdout: Stdio| {
            let Output { status, stderr, .. } = Command::new(binary()).args(words).stdout(stdout).output().unwrap();
            (status.code(), String::from_utf8(stderr).unwrap())
        };
        let full = File::options().write(true).open("/dev/full").unwrap();
        let complaint = "egret: standard output: No space left on device (os error 28)\n";
        assert_eq!(run(full.into()), (Some(1), complaint.to_owned()), "{words:?}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(run(writer.into()), (Some(0), String::new()), "{words:?}");
    }
}
