//! What lies in `contrib/` fits the daemon: the dashboard its metrics, the units its options and its manners.

mod support;

use std::collections::BTreeSet;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use support::disk::Disk;
use support::http::get;
use support::scratch::{Scratch, is_root_or_skips, write_script};
use support::server::{Options, Program, Reaped, Server, binary};
use support::survivor::{BLOCK, BLOCKS, Client};
use support::wire::GET_FEATURES;
use support::{PATIENCE, await_that, has_or_skips};

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

/// Each daemon may have an export `disk0` and an I/O thread `io0`.
#[test]
fn the_dashboard_tells_what_has_one_name_on_two_hosts_apart() {
    let dashboard = std::fs::read_to_string(format!("{CONTRIB}/grafana/egret.json")).unwrap();
    let parsed: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = parsed["panels"].as_array().unwrap().iter();
    let mut targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten().peekable();
    assert!(targets.peek().is_some());
    for target in targets {
        let [expr, legend] = ["expr", "legendFormat"].map(|key| target[key].as_str().unwrap());
        assert!(legend.starts_with("{{instance}} "), "{legend}");
        assert!(expr.split(" by (").skip(1).all(|labels| labels.starts_with("instance, ")), "{expr}");
    }
}

/// The units: the daemon of a host, and that of a tenant.
const UNITS: [&str; 4] = ["egret.service", "egret.socket", "egret@.service", "egret@.socket"];

/// The tenant of the tests.
const TENANT: &str = "blue";

/// A file of `contrib/systemd`.
fn unit(name: &str) -> String {
    std::fs::read_to_string(format!("{CONTRIB}/systemd/{name}")).unwrap()
}

/// What a unit says of `key`, in the tenant's instance of it.
fn said(unit: &str, key: &str) -> Vec<String> {
    let whole = unit.replace("\\\n", " ");
    let values = whole.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    values.map(|value| value.replace("%i", TENANT)).collect()
}

/// As [`said`], of what is said once.
fn said_once(unit: &str, key: &str) -> String {
    let [value] = said(unit, key).try_into().unwrap_or_else(|values| panic!("{key}: {values:?}"));
    value
}

#[test]
fn systemd_takes_the_units_as_they_are() {
    if !has_or_skips("systemd-analyze") {
        return;
    }
    let scratch = Scratch::new();
    // It looks whether the program is there.
    let installed = "/usr/bin/egret";
    for name in UNITS {
        let text = unit(name);
        assert!(name.ends_with("socket") || text.contains(installed));
        std::fs::write(scratch.path(name), text.replace(installed, env!("CARGO_BIN_EXE_egret"))).unwrap();
    }
    let paths = UNITS.map(|name| scratch.path(&name.replace('@', &format!("@{TENANT}"))));
    for (path, name) in paths.iter().zip(UNITS) {
        if name.contains('@') {
            std::fs::copy(scratch.path(name), path).unwrap();
        }
    }
    let said = Command::new("systemd-analyze").arg("verify").args(&paths).output().unwrap();
    let lines = String::from_utf8_lossy(&said.stderr).into_owned();
    // It speaks of this machine's other units, too.
    let ours: Vec<&str> = lines.lines().filter(|line| line.contains("egret")).collect();
    assert!(ours.is_empty(), "{ours:?}");
}

#[test]
fn each_service_asks_for_the_socket_that_its_unit_makes() {
    for (service, socket) in [(UNITS[0], UNITS[1]), (UNITS[2], UNITS[3])] {
        let (text, name) = (unit(service), said_once(&unit(socket), "FileDescriptorName"));
        assert_eq!(said_once(&text, "Requires"), socket.replace('@', &format!("@{TENANT}")));
        let chardev = format!("--chardev socket,id=qmp,fd={name},server=on,wait=off");
        assert!(said_once(&text, "ExecStart").contains(&chardev), "{text}");
    }
}

#[test]
fn who_uses_disks_reaches_no_monitor_and_one_tenants_daemon_has_nothing_of_anothers() {
    let declared = unit("egret.sysusers");
    let declares = |kind: &str, name: &str| declared.lines().any(|line| line.starts_with(&format!("{kind} {name} ")));
    for (service, socket) in [(UNITS[0], UNITS[1]), (UNITS[2], UNITS[3])] {
        let (service, socket) = (unit(service), unit(socket));
        let disks = said_once(&service, "Group");
        let control = said_once(&socket, "SocketGroup");
        let others = said(&service, "SupplementaryGroups");
        assert!(disks != control && !others.iter().any(|groups| groups.split(' ').any(|group| group == control)));
        assert!(declares("g", &control) && said_once(&socket, "SocketMode") == "0660");
        // The daemon's runtime directory is the disks'; the monitor's socket is in none of those that the daemon has.
        let directory = format!("/run/{}/", said_once(&service, "RuntimeDirectory"));
        assert!(directory.ends_with("/disks/") && !said_once(&socket, "ListenStream").starts_with(&directory));
        assert_eq!(said_once(&service, "StateDirectoryMode"), "0700", "images are not the disks' group's");
    }
    assert!(declares("u", &said_once(&unit(UNITS[0]), "User")) && declares("g", &said_once(&unit(UNITS[0]), "Group")));
    // Nothing that one tenant's daemon has is another's.
    let tenant = unit(UNITS[2]);
    for key in ["User", "Group", "RuntimeDirectory", "StateDirectory"] {
        assert!(said_once(&tenant, key).starts_with("egret-blue"), "{key}");
    }
    assert!(said(&tenant, "SupplementaryGroups").is_empty() && said(&tenant, "DeviceAllow").is_empty());
}

#[test]
fn a_tenants_daemon_is_watched_and_confined_as_that_of_a_host_is() {
    let (host, tenant) = (unit(UNITS[0]), unit(UNITS[2]));
    let own = [
        "Description",
        "Requires",
        "ExecStart",
        "User",
        "Group",
        "SupplementaryGroups",
        "RuntimeDirectory",
        "StateDirectory",
        "DeviceAllow",
        "RestrictAddressFamilies",
        "IPAddressDeny",
        "IPAddressAllow",
        "Also",
    ];
    let keys = host.lines().filter_map(|line| Some(line.split_once('=')?.0));
    let shared: Vec<&str> =
        keys.filter(|key| key.bytes().all(|b| b.is_ascii_alphabetic()) && !own.contains(key)).collect();
    assert!(shared.contains(&"WatchdogSec") && shared.contains(&"CapabilityBoundingSet"), "{shared:?}");
    for key in shared {
        assert_eq!(said(&tenant, key), said(&host, key), "{key}");
    }
    assert_eq!(said_once(&tenant, "RestrictAddressFamilies"), "AF_UNIX");
    assert_eq!(said_once(&tenant, "PrivateNetwork"), "yes");
}

#[test]
fn sysusers_makes_the_users_and_groups_that_the_units_name() {
    if !has_or_skips("systemd-sysusers") {
        return;
    }
    let scratch = Scratch::new();
    let root = scratch.path("root");
    std::fs::create_dir_all(root.join("etc")).unwrap();
    let tenant = unit(UNITS[2]);
    // As the unit tells one to.
    let line = tenant.split('\'').find(|text| text.starts_with("u egret-NAME")).unwrap().replace("NAME", TENANT);
    std::fs::write(scratch.path("tenant"), line).unwrap();
    for config in [format!("{CONTRIB}/systemd/egret.sysusers"), scratch.path("tenant").display().to_string()] {
        let root = format!("--root={}", root.display());
        let done = Command::new("systemd-sysusers").args([&root, &config]).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }
    let has = |file: &str, name: &str| {
        let text = std::fs::read_to_string(root.join("etc").join(file)).unwrap();
        text.lines().any(|line| line.starts_with(&format!("{name}:")))
    };
    for (service, socket) in [(UNITS[0], UNITS[1]), (UNITS[2], UNITS[3])] {
        assert!(has("passwd", &said_once(&unit(service), "User")));
        assert!(has("group", &said_once(&unit(service), "Group")));
        assert!(has("group", &said_once(&unit(socket), "SocketGroup")));
    }
}

#[test]
fn a_tenants_daemon_serves_what_its_file_says_and_is_told_more_on_its_own_socket() {
    let scratch = Scratch::new();
    let (disks, config) = (scratch.path("disks"), scratch.path("blue.toml"));
    std::fs::create_dir(&disks).unwrap();
    // The file is that of the documentation, in this test's places.
    let docs = std::fs::read_to_string(format!("{CONTRIB}/../docs/watching.md")).unwrap();
    let (_, rest) = docs.split_once("```toml\n# /etc/egret/blue.toml\n").unwrap();
    let (file, _) = rest.split_once("```").unwrap();
    let image = scratch.image("disk0.img", 1 << 20);
    let file = file.replace("/run/egret-blue/disks", disks.to_str().unwrap());
    let file = file.replace("/var/lib/egret-blue/disk0.img", image.to_str().unwrap());
    std::fs::write(&config, file).unwrap();
    let command = said_once(&unit(UNITS[2]), "ExecStart");
    let command = command.replace("/etc/egret/blue.toml", config.to_str().unwrap());
    let command = command.replace("/run/egret-blue/disks", disks.to_str().unwrap());
    let command = command.replace("/var/lib/egret-blue", image.parent().unwrap().to_str().unwrap());
    let arguments: Vec<&str> = command.split_whitespace().skip(1).collect();
    let socket = std::os::unix::net::UnixListener::bind(scratch.path("qmp")).unwrap();
    let mut daemon = support::server::activated("qmp", socket.into());
    let mut child = support::server::Reaped(daemon.args(arguments).spawn().unwrap());
    let mut qmp = support::qmp::Qmp::connect(&scratch.path("qmp"));
    assert_eq!(qmp.run("query-block-exports", serde_json::json!({}))[0]["id"], "disk0");
    let mut disk = Disk::connect(&disks.join("disk0.sock")).unwrap();
    disk.first().write_pattern(0..1 << 20, 1).unwrap();
    drop(disk);
    qmp.run("quit", serde_json::json!({}));
    assert!(child.0.wait().unwrap().success());
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

/// A systemd of the test's own, as the manager of a user, where nobody else's services are.
struct Systemd {
    home: PathBuf,
    process: Reaped,
}

impl Systemd {
    /// One that has this service, which is `egret`.
    fn start(home: PathBuf, service: &str) -> Self {
        let units = home.join(".config/systemd/user");
        std::fs::create_dir_all(&units).unwrap();
        std::fs::write(units.join("egret.service"), service).unwrap();
        // It looks whether it was booted with, and whoever is killed takes its services along.
        const BOOT: &str =
            "mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && /lib/systemd/systemd --user; :";
        let mut command = Command::new("unshare");
        command.args(["-m", "-p", "--fork", "--kill-child", "--mount-proc", "sh", "-c", BOOT]);
        command.env("HOME", &home).env("XDG_RUNTIME_DIR", &home).stdout(Stdio::null()).stderr(Stdio::null());
        let new = Self { process: Reaped(command.spawn().unwrap()), home };
        await_that("systemd to answer", || new.does(&["list-units"]));
        new
    }

    fn does(&self, words: &[&str]) -> bool {
        let unshare = self.process.0.id();
        let inside = std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).unwrap();
        // Whoever asks from elsewhere is nobody whom it knows.
        let mut command = Command::new("nsenter");
        command
            .args(["-m", "-p", "-t", inside.trim(), "systemctl", "--user"])
            .args(words)
            .env("XDG_RUNTIME_DIR", &self.home)
            .env_remove("DBUS_SESSION_BUS_ADDRESS");
        command.output().unwrap().status.success()
    }
}

/// Which of its versions is here.
fn systemd_version() -> u32 {
    let said = Command::new("systemctl").arg("--version").output().unwrap().stdout;
    let said = String::from_utf8(said).unwrap();
    said.split_whitespace().nth(1).and_then(|version| version.parse().ok()).unwrap_or_else(|| panic!("{said}"))
}

#[test]
fn systemd_keeps_a_client_s_session_over_restarts_and_until_a_daemon_can_start() {
    if !has_or_skips("systemd-analyze") || !is_root_or_skips("to start a systemd") {
        return;
    }
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk", (BLOCK * BLOCKS) as u64), scratch.path("socket"));
    let options = Options::new().disk("d0", &image, "").export("e0", "d0", &socket, "writable=on");
    // As the unit here has it.
    let ours = unit("egret.service");
    let keys = ["Type=", "NotifyAccess=", "Restart", "StartLimit", "FileDescriptorStore", "Environment="];
    let [before, after] = ours.split_once("[Service]").map(Into::into).unwrap();
    let lines = |text: &str| {
        let ours = text.lines().filter(|line| keys.iter().any(|key| line.starts_with(key)));
        ours.collect::<Vec<_>>().join("\n")
    };
    let start = format!(
        "ExecStart={} serve --sandbox-dir {} {}",
        binary(),
        env!("CARGO_TARGET_TMPDIR"),
        options.as_words().join(" ")
    );
    let service = format!("[Unit]\n{}\n[Service]\n{}\n{start}\n", lines(before), lines(after));
    assert!(!service.contains("FDSTORE="), "before systemd 254 it is for the host's owner to trust clients");
    let home = scratch.path("home");
    let systemd = Systemd::start(home.clone(), &service);
    assert!(systemd.does(&["start", "egret"]));
    let mut client = Client::new(false);
    client.connect(&socket);
    // An older one keeps nothing, unless it is told to.
    if systemd_version() < 254 {
        assert!(systemd.does(&["restart", "egret"]));
        assert!(client.wire.as_mut().unwrap().ask(GET_FEATURES, &[]).is_err());
        let drop_ins = home.join(".config/systemd/user/egret.service.d");
        std::fs::create_dir(&drop_ins).unwrap();
        std::fs::write(drop_ins.join("trust.conf"), "[Service]\nEnvironment=FDSTORE=4096\n").unwrap();
        assert!(systemd.does(&["daemon-reload"]) && systemd.does(&["restart", "egret"]));
        client.connect(&socket);
    }
    for _ in 0..2 {
        client.load(300);
        assert!(systemd.does(&["restart", "egret"]));
    }
    client.load(300);
    // An update that cannot serve, and is put right.
    let away = image.with_extension("away");
    std::fs::rename(&image, &away).unwrap();
    assert!(!systemd.does(&["restart", "egret"]));
    std::fs::rename(&away, &image).unwrap();
    client.load(300);
    client.drain();
    assert!(systemd.does(&["stop", "egret"]));
    assert!(client.wire.as_mut().unwrap().ask(GET_FEATURES, &[]).is_err(), "who is stopped for good keeps nobody");
}

#[test]
fn the_plans_beside_spdk_are_plans_and_their_script_asks_spdk_for_the_disk() {
    for (plan, subjects) in [("disk", 4), ("null", 5)] {
        let run = Command::new(binary()).args(["bench", &format!("{CONTRIB}/spdk/{plan}.toml"), "--dry-run"]).output();
        let run = run.unwrap();
        assert!(run.status.success(), "{plan}: {}", String::from_utf8_lossy(&run.stderr));
        let out = String::from_utf8_lossy(&run.stdout);
        let first = out.lines().filter(|line| line.starts_with("randread 4k QD1 ")).count();
        assert_eq!(first, subjects, "{out}");
    }

    // In SPDK's place is what shows what it was asked for.
    let scratch = Scratch::new();
    let vhost = scratch.path("build/bin/vhost");
    std::fs::create_dir_all(vhost.parent().unwrap()).unwrap();
    write_script(&vhost, "#!/bin/sh\necho \"$@\" >&2\ncat \"$2\"\n");
    let script = |arguments: &[&str], bdev: &str| {
        let mut command = Command::new(format!("{CONTRIB}/../scripts/spdk-vhost"));
        let spdk = scratch.path("");
        command
            .args(arguments)
            .env("SPDK", spdk)
            .env("SPDK_BDEV", bdev)
            .env("TMPDIR", scratch.path(""))
            .output()
            .unwrap()
    };
    for (disk, bdev, method) in [(Some("/dev/disk"), "uring", "bdev_uring_create"), (None, "aio", "bdev_null_create")] {
        let ran = script(&[&["/run/e0/disk.sock"][..], disk.as_slice()].concat(), bdev);
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{said}");
        assert!(said.contains("-S /run/e0 -r /run/e0/disk.sock.rpc -m ["), "{said}");
        let config: Value = serde_json::from_slice(&ran.stdout).unwrap();
        let of = |at: usize| &config["subsystems"][at]["config"][0];
        assert_eq!((&of(0)["method"], of(0)["params"]["filename"].as_str()), (&method.into(), disk));
        assert_eq!(of(1)["params"]["ctrlr"], "disk.sock");
    }
    let ran = script(&["/run/e0/disk.sock", "/dev/disk"], "malloc");
    assert!(!ran.status.success());
    assert_eq!(String::from_utf8_lossy(&ran.stderr), "spdk-vhost: SPDK_BDEV is aio or uring, not malloc\n");
}
