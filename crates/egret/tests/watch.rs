//! What a daemon tells of itself while it runs: metrics as Prometheus scrapes them, and `egret top`.

mod support;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::Value;

use support::disk::Disk;
use support::http::{get, get_tcp, say};
use support::port::Port;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Reaped, Server, binary};
use support::{Finished, await_some, await_that};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const MIB: u64 = 1 << 20;

/// A disk of 4 MiB on a thread, with metrics at `metrics`.
fn daemon(scratch: &Scratch) -> Server {
    let options = Options::new()
        .iothread("io0", "")
        .disk("d0", &scratch.image("disk", 4 * MIB), "")
        .export("e0", "d0", &scratch.path("disk"), "writable=on,iothread=io0")
        .metrics(&scratch.path("metrics"));
    Server::start(&Program::egret(), &options)
}

fn scrape(socket: &Path) -> String {
    let (status, page) = get(socket, "/metrics").unwrap();
    assert_eq!(status, "HTTP/1.1 200 OK");
    page
}

/// The samples of a page: each series, as it is written, and its value.
fn samples(page: &str) -> BTreeMap<&str, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            (series, value.parse().expect("a number"))
        })
        .collect()
}

/// A program of Debian's package `prometheus`: installed, or in the cache that `scripts/install-test-deps` fills; `None`,
/// where this is no CI, if there is none.
fn prometheus(program: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("EGRET_CACHE").map_or_else(|| Path::new(ROOT).join(".cache"), PathBuf::from);
    let cached = cache.join("prometheus/usr/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).chain([cached]).map(|dir| dir.join(program)).find(|path| path.exists());
    if found.is_none() {
        egret_needs::this_test_lacks(format_args!("{program}: run scripts/install-test-deps"));
    }
    found
}

#[test]
fn a_scrape_tells_what_clients_did_and_goes_on_counting_when_they_leave() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let (socket, metrics) = (scratch.path("disk"), scratch.path("metrics"));
    let before = scrape(&metrics);
    assert_eq!(samples(&before)[r#"egret_export_requests_total{export="e0",queue="0",operation="write"}"#], 0.0);
    for round in 1..=2 {
        let mut disk = Disk::connect(&socket).unwrap();
        disk.first().write_pattern(0..4 * MIB, round).unwrap();
        drop(disk);
        let page = scrape(&metrics);
        let samples = samples(&page);
        let bytes = (4 * MIB * round) as f64;
        assert_eq!(samples[r#"egret_export_bytes_total{export="e0",queue="0",operation="write"}"#], bytes);
        let writes = samples[r#"egret_export_requests_total{export="e0",queue="0",operation="write"}"#];
        let timed = samples[r#"egret_export_request_duration_seconds_count{export="e0",operation="write"}"#];
        let all = r#"egret_export_request_duration_seconds_bucket{export="e0",operation="write",le="+Inf"}"#;
        assert!(writes > 0.0 && timed == writes && samples[all] == writes);
        assert_eq!(samples[r#"egret_export_errors_total{export="e0",queue="0",operation="write"}"#], 0.0);
        assert!(samples[r#"egret_engine_requests_total{iothread="io0",engine="threads"}"#] > 0.0);
        assert!(samples[r#"egret_iothread_cpu_seconds_total{iothread="io0"}"#] > 0.0);
        assert!(samples[r#"egret_iothread_waits_total{iothread="io0"}"#] > 0.0);
    }
    assert!(server.terminate().success());
    assert!(!metrics.exists(), "its socket is gone with it");
}

#[test]
fn promtool_has_nothing_to_say_against_a_scrape() {
    let Some(promtool) = prometheus("promtool") else { return };
    let scratch = Scratch::new();
    let _server = daemon(&scratch);
    let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
    disk.first().write_pattern(0..4 * MIB, 1).unwrap();
    let page = scrape(&scratch.path("metrics"));
    let mut check = Command::new(promtool);
    check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut check = check.spawn().unwrap();
    check.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let said = check.wait_with_output().unwrap();
    let said =
        (said.status.success(), String::from_utf8(said.stderr).unwrap(), String::from_utf8(said.stdout).unwrap());
    assert_eq!(said, (true, String::new(), String::new()), "{page}");
}

#[test]
fn a_real_prometheus_scrapes_it() {
    let Some(program) = prometheus("prometheus") else { return };
    let scratch = Scratch::new();
    let [ours, theirs] = [Port::new(), Port::new()];
    let options = Options::new()
        .null("d0", "")
        .export("e0", "d0", &scratch.path("disk"), "num-queues=2")
        .words(["--metrics".to_owned(), format!("127.0.0.1:{ours}")]);
    let _server = Server::start(&Program::egret(), &options);
    let config = scratch.path("prometheus.yml");
    let job = format!(
        "scrape_configs:\n- job_name: egret\n  scrape_interval: 1s\n  static_configs: [{{targets: ['127.0.0.1:{ours}']}}]\n"
    );
    std::fs::write(&config, job).unwrap();
    let mut prometheus = Command::new(program);
    prometheus
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", scratch.path("tsdb").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{theirs}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let _prometheus = Reaped(prometheus.spawn().unwrap());
    let question = "/api/v1/query?query=count(egret_export_requests_total%7Bexport=%22e0%22%7D)";
    let answer = await_some("Prometheus to have scraped", || {
        let (_, body) = get_tcp(theirs.number(), question).ok()?;
        let answer: Value = serde_json::from_str(&body).ok()?;
        answer["data"]["result"][0]["value"][1].as_str().map(str::to_owned)
    });
    assert_eq!(answer, "12", "two queues of six operations");

    // It understands whatever the dashboard asks for.
    let dashboard = std::fs::read_to_string(Path::new(ROOT).join("contrib/grafana/egret.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut asked = 0;
    for target in panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten() {
        let question = target["expr"].as_str().unwrap();
        let filled = question.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$export", ".*");
        let (status, body) = get_tcp(theirs.number(), &format!("/api/v1/query?query={}", escaped(&filled))).unwrap();
        assert!(status.contains(" 200 ") && body.contains("\"success\""), "{question}: {body}");
        asked += 1;
    }
    assert!(asked > 20, "{asked}");
}

/// As a part of a URL.
fn escaped(text: &str) -> String {
    text.bytes()
        .map(|byte| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[test]
fn a_hundred_exports_of_eight_queues_fit_on_a_page() {
    let scratch = Scratch::new();
    let mut options = Options::new().iothread("io0", "").null("d0", "").metrics(&scratch.path("metrics"));
    for export in 0..100 {
        let id = format!("e{export}");
        let socket = scratch.path(&id);
        options = options.export(&id, "d0", &socket, "num-queues=8,iothread=io0");
    }
    let _server = Server::start(&Program::egret(), &options);
    let begin = Instant::now();
    let page = scrape(&scratch.path("metrics"));
    println!("{} bytes in {:?}", page.len(), begin.elapsed());
    let samples = samples(&page);
    let of = |name: &str| samples.keys().filter(|series| series.starts_with(name)).count();
    assert_eq!((of("egret_export_requests_total{"), of("egret_export_in_flight{")), (100 * 8 * 6, 100 * 8));
    assert!(page.len() < 4 << 20, "{}", page.len());
}

#[test]
fn a_file_that_can_be_read_but_once_has_its_metrics_too() {
    let scratch = Scratch::new();
    let (metrics, file) = (scratch.path("metrics"), scratch.path("egret.toml"));
    let (socket, path) = (scratch.path("e0"), metrics.display());
    let text = format!(
        "[[blockdev]]\nnode-name = 'n'\ndriver = 'null-co'\n[[export]]\nid = 'e'\nnode-name = 'n'\n\
         type = 'vhost-user-blk'\naddr = {{ type = 'unix', path = '{}' }}\n[metrics]\npath = '{path}'\n",
        socket.display()
    );
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let writer = std::thread::spawn({
        let (file, text) = (file.clone(), text.clone());
        move || std::fs::write(file, text).unwrap()
    });
    let options = Options::new().words(["--config".into(), file.display().to_string()]);
    let server = Server::start(&Program::egret_alone(), &options.listening(&socket).listening(&metrics));
    scrape(&metrics);
    writer.join().unwrap();
    assert!(server.terminate().success());

    let mut command = Program::egret_alone().command();
    let mut daemon = Reaped(command.args(["--config", "/dev/stdin"]).stdin(Stdio::piped()).spawn().unwrap());
    daemon.0.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    await_that("the daemon to serve metrics", || get(&metrics, "/metrics").is_ok());
}

#[test]
fn top_prints_what_happens_as_plain_text_where_it_is_asked_to() {
    let scratch = Scratch::new();
    let qmp = scratch.path("qmp");
    let options = Options::new()
        .iothread("io0", "poll-policy=low-regret")
        .disk("d0", &scratch.image("disk", 4 * MIB), "")
        .export("e0", "d0", &scratch.path("disk"), "writable=on,iothread=io0,num-queues=3")
        .monitor("m", &qmp);
    let _server = Server::start(&Program::egret(), &options);
    let done = AtomicBool::new(false);
    let text = std::thread::scope(|scope| {
        let _finished = Finished(&done);
        scope.spawn(|| {
            let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
            while !done.load(Ordering::Relaxed) {
                disk.first().write_pattern(0..4 * MIB, 1).unwrap();
            }
        });
        await_some("top to see the load", || {
            let text = egret(&["top", "--once", "--interval", "0.1", qmp.to_str().unwrap()]);
            let busy = text.lines().find(|line| line.starts_with("e0 "))?.split_whitespace().nth(6)? != "-";
            busy.then_some(text)
        })
    });
    let words = |begin: &str| -> Vec<&str> {
        text.lines().find(|line| line.starts_with(begin)).unwrap_or_default().split_whitespace().collect()
    };
    assert_eq!(words("io0 ")[..2], ["io0", "low-regret"], "{text}");
    assert_eq!(words("e0 ")[..3], ["e0", "3", "io0"], "{text}");
    let said = Command::new(binary()).arg("top").arg(&qmp).output().unwrap();
    let complaint = "egret: top draws on a terminal, and its output is none; --once prints plain text\n";
    assert_eq!((said.status.code(), String::from_utf8_lossy(&said.stderr).as_ref()), (Some(1), complaint));
    assert!(words("e0 ")[3..].iter().all(|word| word.parse::<f64>().is_ok()), "{text}");
}

#[test]
fn each_queue_is_told_of_with_the_thread_that_runs_it() {
    let scratch = Scratch::new();
    let qmp = scratch.path("qmp");
    let options = Options::new()
        .iothread("io0", "")
        .iothread("io1", "")
        .null("d0", "")
        .export("blk", "d0", &scratch.path("blk"), "num-queues=3,iothread.0=io0,iothread.1=io1")
        .export_scsi(
            "scsi",
            &scratch.path("scsi"),
            "luns.0.lun=0,luns.0.node-name=d0,num-queues=2,iothread.0=io0,iothread.1=io1",
        )
        .monitor("m", &qmp);
    let _server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&qmp);
    for (id, threads) in [("blk", &["io0", "io1", "io0"][..]), ("scsi", &["io0", "io0", "io0", "io1"])] {
        let answer = qmp.run("egret-query-stats", serde_json::json!({ "export": id }));
        let queues = answer["exports"][0]["queues"].as_array().unwrap();
        let found: Vec<&str> = queues.iter().map(|queue| queue["iothread"].as_str().unwrap()).collect();
        assert_eq!(found, threads, "{id}: a virtio-scsi device's control and event queue come first");
    }
}

#[test]
fn shells_are_told_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = egret(&["completions", shell]);
        for command in ["serve", "replay", "config", "ctl", "top", "completions", "fd-monitor"] {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
    // A shell that is here reads its own.
    if Command::new("bash").arg("-c").arg("true").status().is_ok() {
        let script = egret(&["completions", "bash"]);
        let program =
            format!("{script}\nCOMP_WORDS=(egret s); COMP_CWORD=1; _egret egret s egret; echo \"${{COMPREPLY[*]}}\"");
        let said = Command::new("bash").arg("-c").arg(program).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "serve", "{said:?}");
    }
}

/// What the command prints.
fn egret(words: &[&str]) -> String {
    let said = Command::new(binary()).args(words).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    String::from_utf8(said.stdout).unwrap()
}

#[test]
fn hostile_clients_of_the_metrics_get_their_answer_or_none_and_others_theirs() {
    let scratch = Scratch::new();
    let mut server = daemon(&scratch);
    let metrics = scratch.path("metrics");
    let connect = || UnixStream::connect(&metrics).unwrap();
    // Who says nothing, and who says half of something, keep their places and hold nobody up.
    let _silent: Vec<UnixStream> = (0..4)
        .map(|half| {
            let mut stream = connect();
            stream.write_all(&b"GET /metrics HTTP/1.1\r\nHost: x"[..half * 8]).unwrap();
            stream
        })
        .collect();
    for (request, status) in [
        (&b"GET /other HTTP/1.1\r\n\r\n"[..], "HTTP/1.1 404 "),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", "HTTP/1.1 405 "),
        (b"\x16\x03\x01\x02\x00 \xff\xfe\r\n\r\n", "HTTP/1.1 400 "),
    ] {
        let answer = say(connect(), request).unwrap();
        assert!(answer.starts_with(status), "{answer}");
    }
    // A head without end: the answer may be lost, where there is more on its way than is read, and it is the last.
    let mut endless = connect();
    while endless.write_all(&[b'x'; 4096]).is_ok() {}
    let mut answer = Vec::new();
    let _ = endless.read_to_end(&mut answer);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431 "));
    // Who asks and leaves.
    for _ in 0..20 {
        connect().write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    }
    assert!(scrape(&metrics).contains("egret_build_info"));
    let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
    disk.first().write_pattern(0..4 * MIB, 1).unwrap();
    assert!(server.is_alive());
    assert_eq!(server.complaints(), Vec::<String>::new());
}

#[test]
fn clients_of_the_metrics_that_dawdle_hold_up_nobody_however_many_they_are() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let metrics = scratch.path("metrics");
    // If each had its ten seconds, the scrape would wait for minutes.
    let mut silent = Vec::new();
    for _ in 0..100 {
        let mut stream = UnixStream::connect(&metrics).unwrap();
        // None of it is a whole request.
        stream.write_all(&b"GET /metrics HTTP/1.1\r\n"[..silent.len() % 24]).unwrap();
        silent.push(stream);
    }
    assert!(scrape(&metrics).contains("egret_build_info"));
    await_that("those that made room to be closed", || server.descriptors() < 60);
    drop(silent);
    assert_eq!(server.complaints(), Vec::<String>::new());
}

#[test]
fn metrics_that_cannot_be_served_are_refused_in_one_line() {
    let scratch = Scratch::new();
    let taken = scratch.path("file");
    std::fs::write(&taken, "mine").unwrap();
    for (place, line) in [
        (format!("unix:{}", taken.display()), "it exists and is not a socket; choose another path"),
        ("0.0.0.0:1".to_owned(), "metrics: cannot listen on host '0.0.0.0', port 1: other hosts reach 0.0.0.0"),
        ("unix:/m,mod=1".to_owned(), "unknown key 'mod'; did you mean 'mode'?"),
    ] {
        let options = Options::new().null("d0", "").export("e0", "d0", &scratch.path("disk"), "");
        let mut command = Program::egret().command();
        let said = command.args(options.as_words()).args(["--metrics", &place]).output().unwrap();
        let said = (said.status.success(), String::from_utf8(said.stderr).unwrap());
        assert!(!said.0 && said.1.matches(line).count() == 1 && said.1.lines().count() == 1, "{said:?}");
    }
    assert_eq!(std::fs::read(&taken).unwrap(), b"mine");
    await_that("nothing to be left behind", || scratch.left_behind() == ["file"]);
}
