//! `egret replay`: what it prints, and what it refuses in one line.

use std::path::Path;
use std::process::{Command, Output};

const TRACE: &str = "egret-waits 1\nnote two cores\nblock-cpu-ns 15000\nwakeup-latency-ns 28000\nlost 7\nwaits 2\n\
                     columns length-ns spun-ns how in-flight ended-by ready...\n10342 10342 s 1 c c1\n\
                     38120 4000 b 0 q q0 c1\n";

fn replay(place: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_egret")).arg("replay").args(arguments).current_dir(place).output().unwrap()
}

/// What it prints when all is well.
fn printed(place: &Path, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = replay(place, arguments);
    assert_eq!((status.code(), String::from_utf8(stderr).unwrap()), (Some(0), String::new()));
    String::from_utf8(stdout).unwrap()
}

fn place_with_a_trace() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("waits.txt"), TRACE).unwrap();
    place
}

#[test]
fn a_recorded_trace_becomes_a_table_with_a_line_for_each_policy() {
    let place = place_with_a_trace();
    let text = printed(place.path(), &["waits.txt"]);
    assert!(
        text.starts_with("waits.txt: 2 waits, K = 43.0 us at poll-price 1; 7 older ones were lost\ntwo cores\n"),
        "{text}"
    );
    for name in ["offline-optimum", "best-fixed (10.3 us)", "off", "busy", "weighted", "low-regret"] {
        assert_eq!(text.lines().filter(|line| line.starts_with(&format!("{name} "))).count(), 1, "{name} in {text}");
    }
    let off = text.lines().find(|line| line.starts_with("off ")).unwrap();
    let figures: Vec<_> = off.split_whitespace().collect();
    assert_eq!(figures[1..], ["4.203", "4.203", "0", "ns", "0", "ns", "2", "56.0", "us"]);
}

#[test]
fn every_generated_trace_replays_and_the_table_can_be_narrowed_to_some_policies() {
    let text = printed(Path::new("/"), &["builtin:all", "--policy", "weighted,low-regret"]);
    assert_eq!(text.matches("builtin:").count(), 8);
    assert_eq!(text.matches("\nlow-regret ").count(), 8);
    assert!(!text.contains("\nbusy "));
    let list = printed(Path::new("/"), &["--list"]);
    assert!(list.lines().count() == 8 && list.contains("builtin:heavy-tail    Pareto"), "{list}");
}

#[test]
fn the_price_and_the_cost_of_a_block_are_what_the_command_line_says() {
    let arguments = ["builtin:mixture", "--k", "5000", "--price", "2", "--poll-max-ns", "1000000", "--policy", "off"];
    let text = printed(Path::new("/"), &arguments);
    assert!(text.contains("K = 8.0 us at poll-price 2, poll-max-ns 1.0 ms"), "{text}");
}

#[test]
fn json_has_every_row_with_names_and_units() {
    let place = place_with_a_trace();
    let text = printed(place.path(), &["waits.txt", "builtin:tight", "--policy", "busy", "--json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let names: Vec<_> =
        rows.iter().map(|row| (row["trace"].as_str().unwrap(), row["contender"].as_str().unwrap())).collect();
    assert_eq!(names[..3], [("waits.txt", "offline-optimum"), ("waits.txt", "best-fixed"), ("waits.txt", "busy")]);
    assert_eq!((names.len(), names[5]), (6, ("builtin:tight", "busy")));
    assert_eq!(rows[2]["k_ns"], 43_000);
}

#[test]
fn a_picture_is_drawn_of_one_trace() {
    let place = place_with_a_trace();
    printed(place.path(), &["builtin:bursts", "--svg", "front.svg"]);
    let picture = std::fs::read_to_string(place.path().join("front.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("builtin:bursts"));
}

#[test]
fn what_cannot_be_replayed_is_refused_in_one_line() {
    let place = place_with_a_trace();
    let write = |name: &str, text: &str| std::fs::write(place.path().join(name), text).unwrap();
    write("short", TRACE.strip_suffix("38120 4000 b 0 q q0 c1\n").unwrap());
    write("new", &TRACE.replacen("waits 1", "waits 2", 1));
    write("picture", "GIF89a");
    write("damaged", &TRACE.replacen("10342 s", "x s", 1));
    for (arguments, line) in [
        (&["short"][..], "short: truncated: 2 waits promised, 1 found"),
        (&["new"], "new: a trace of version 2; this egret reads version 1"),
        (&["picture"], "picture: not a trace of waits: it must begin with 'egret-waits 1'"),
        (&["damaged"], "damaged: line 8: spun-ns must be a number, got 'x'"),
        (&["waits.txt", "absent"], "absent: No such file or directory (os error 2)"),
        (
            &["builtin:mixtrue"],
            "generated traces are lognormal, tight, exponential, mixture, alternating, bursts, phases, heavy-tail; \
             got 'mixtrue', did you mean 'mixture'?",
        ),
        (
            &["waits.txt", "--policy", "weigthed"],
            "invalid value 'weigthed' for '--policy <POLICY>': poll-policy must be one of off, busy, fixed, shared-window, \
             per-source-window, weighted, low-regret; got 'weigthed', did you mean 'weighted'?",
        ),
        (&["waits.txt", "--price", "1001"], "poll-price must be 0..=1000, got 1001"),
        (&["builtin:all", "--svg", "x"], "--svg draws one trace, and 8 were given"),
        (&["waits.txt", "--svg", "no/where.svg"], "no/where.svg: No such file or directory (os error 2)"),
        (&[], "the following required arguments were not provided: <FILE>..."),
    ] {
        let Output { status, stdout, stderr } = replay(place.path(), arguments);
        assert_eq!(String::from_utf8(stderr).unwrap(), format!("egret: {line}\n"));
        assert_eq!((status.code(), stdout), (Some(1), Vec::new()), "{line}");
    }
}
