//! What lies in `contrib/` fits the daemon: the dashboard its metrics, the units its options and its manners.

mod support;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::net::UnixDatagram;
use std::process::Command;

use serde_json::Value;

use support::PATIENCE;
use support::disk::Disk;
use support::http::get;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const CONTRIB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib");

/// Every word of `text` that is a metric's name.
fn metrics(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("egret_")).map(str::to_owned).collect()
}

#[test]
fn the_dashboard_shows_what_a_scrape_has_and_all_of_it() {
    let dashboard = std::fs::read_to_string(format!("{CONTRIB}/grafana/egret.json")).unwrap();
    let parsed: Value = serde_json::from_str(&dashboard).unwrap();
    let shown = metrics(&dashboard);
    let scratch = Scratch::new();
    let options = Options::new()
        .disk("d0", &scratch.image("disk", 1 << 20), "")
        .export("e0", "d0", &scratch.path("disk"), "writable=on")
        .metrics(&scratch.path("metrics"));
    let _server = Server::start(&Program::egret(), &options);
    let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
    disk.first().write_pattern(0..1 << 20, 1).unwrap();
    let (_, page) = get(&scratch.path("metrics"), "/metrics").unwrap();
    let samples: String = page.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    let scraped = metrics(&samples);
    let unknown: Vec<_> = shown.difference(&scraped).collect();
    assert!(unknown.is_empty(), "the dashboard asks for what is not there: {unknown:?}");
    // Of a histogram, one of its three series is enough.
    let base = |name: &str| {
        let parts = ["_bucket", "_sum", "_count"];
        parts.iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name).to_owned()
    };
    let forgotten: Vec<_> = scraped.iter().filter(|name| !shown.iter().any(|of| base(of) == base(name))).collect();
    assert!(forgotten.is_empty(), "the dashboard does not show {forgotten:?}");
    let ids: BTreeSet<u64> = parsed["panels"].as_array().unwrap().iter().filter_map(|p| p["id"].as_u64()).collect();
    assert_eq!(ids.len(), parsed["panels"].as_array().unwrap().len(), "each panel has an id of its own");
}

#[test]
fn systemd_takes_the_units_as_they_are() {
    let test = "systemd_takes_the_units_as_they_are";
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "there is no systemd-analyze");
        let _ = writeln!(std::io::stderr(), "{test}: skipped: there is no systemd-analyze");
        return;
    }
    let scratch = Scratch::new();
    let unit = std::fs::read_to_string(format!("{CONTRIB}/systemd/egret.service")).unwrap();
    // It looks whether the program is there.
    let installed = "/usr/bin/egret";
    assert!(unit.contains(installed));
    let paths = ["egret.service", "egret.socket"].map(|name| scratch.path(name));
    std::fs::write(&paths[0], unit.replace(installed, env!("CARGO_BIN_EXE_egret"))).unwrap();
    std::fs::copy(format!("{CONTRIB}/systemd/egret.socket"), &paths[1]).unwrap();
    let said = Command::new("systemd-analyze").arg("verify").args(&paths).output().unwrap();
    let lines = String::from_utf8_lossy(&said.stderr).into_owned();
    // It speaks of this machine's other units, too.
    let ours: Vec<&str> = lines.lines().filter(|line| line.contains("egret")).collect();
    assert!(ours.is_empty(), "{ours:?}");
}

#[test]
fn the_service_asks_for_the_socket_that_its_unit_makes() {
    let read = |name: &str| std::fs::read_to_string(format!("{CONTRIB}/systemd/{name}")).unwrap();
    let (service, socket) = (read("egret.service"), read("egret.socket"));
    let name = socket.lines().find_map(|line| line.strip_prefix("FileDescriptorName=")).unwrap();
    assert!(service.contains(&format!("--chardev socket,id=qmp,fd={name},server=on,wait=off")), "{service}");
}

#[test]
fn the_service_is_given_more_time_to_stop_than_it_takes_and_is_started_again_when_it_is_not_well() {
    let service = std::fs::read_to_string(format!("{CONTRIB}/systemd/egret.service")).unwrap();
    let value = |key: &str| service.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("{key}"));
    let said = Command::new(env!("CARGO_BIN_EXE_egret")).args(["serve", "--help"]).output().unwrap();
    let help = String::from_utf8(said.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, timeout) = help.split_once("--shutdown-timeout").unwrap();
    let (_, default) = timeout.split_once("[default: ").unwrap();
    let default: u64 = default.split_once(']').unwrap().0.parse().unwrap();
    // Its clients, its monitors and its disks, and a little for the rest.
    assert!(value("TimeoutStopSec=").parse::<u64>().unwrap() >= default + 5);
    assert_eq!(value("Restart="), "on-failure");
    assert!(value("WatchdogSec=").parse::<u64>().unwrap() > 0);
}

#[test]
fn a_service_manager_hears_when_disks_are_served_and_when_they_are_not_any_more() {
    let scratch = Scratch::new();
    let socket = UnixDatagram::bind(scratch.path("notify")).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let heard = || {
        let mut buffer = [0; 256];
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    };
    let options = Options::new().null("d0", "").export("e0", "d0", &scratch.path("disk"), "");
    let mut command = Program::egret().command();
    let child = command.args(options.as_words()).env("NOTIFY_SOCKET", scratch.path("notify")).spawn().unwrap();
    let mut child = support::server::Reaped(child);
    assert_eq!(heard(), format!("READY=1\nMAINPID={}\n", child.0.id()));
    assert!(scratch.path("disk").exists(), "it says so when disks are served, and not before");
    let pid = rustix::process::Pid::from_child(&child.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(heard(), "STOPPING=1\n");
    assert!(child.0.wait().unwrap().success());
}
