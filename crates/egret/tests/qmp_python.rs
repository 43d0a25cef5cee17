//! The monitor as seen by `qemu.qmp`, a client that nobody here wrote.

mod support;

use std::path::Path;
use std::process::Command;

use support::await_that;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A Python that has `qemu.qmp`; `None`, where this is no CI, if there can be none.
fn python(test: &str) -> Option<String> {
    let found = Command::new(format!("{ROOT}/scripts/install-qmp-client")).output().expect("our own script");
    if found.status.success() {
        return Some(String::from_utf8(found.stdout).expect("a path").trim().to_owned());
    }
    let why = String::from_utf8_lossy(&found.stderr).into_owned();
    assert!(std::env::var_os("CI").is_none(), "{why}");
    eprintln!("{test}: skipped: {why}");
    None
}

#[test]
fn qemus_own_client_drives_every_command() {
    let Some(python) = python("qemus_own_client_drives_every_command") else { return };
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let mut server = Server::start(&Program::egret(), &Options::new().monitor("m", &socket));
    let script = Path::new(ROOT).join("crates/egret/tests/qmp_client/drive.py");
    let driven =
        Command::new(python).arg(script).arg(&socket).arg(scratch.path("").as_os_str()).output().expect("it runs");
    let said = String::from_utf8_lossy(&driven.stderr);
    assert!(driven.status.success(), "{said}");
    await_that("the daemon to end", || !server.is_alive());
}
