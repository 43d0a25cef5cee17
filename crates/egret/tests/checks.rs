//! Checks that are no tests, of `make` and of scripts, where their tool is missing; and what `make` is told.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A check's output where there is neither a Rust nor a way to one.
fn run(check: &[&str], without: &Path, ci: bool) -> Output {
    let mut command = match check[0] {
        "make" => Command::new("make"),
        script => Command::new(Path::new(ROOT).join(script)),
    };
    command.args(&check[1..]).current_dir(ROOT);
    command.env("PATH", format!("{}:/usr/bin:/bin", without.display())).env("EGRET_CACHE", without);
    // What this test's own cargo and make, and whoever runs it, have set.
    for variable in ["CARGO", "MAKEFLAGS", "MAKELEVEL", "CI"] {
        command.env_remove(variable);
    }
    if ci {
        command.env("CI", "true");
    }
    command.output().unwrap()
}

#[test]
fn a_check_whose_tool_cannot_be_had_says_so_and_fails_where_ci_is_set() {
    if Command::new("make").arg("--version").output().is_err() {
        return egret_needs::this_test_lacks("make");
    }
    let place = tempfile::tempdir().unwrap();
    for tool in ["cargo", "rustup"] {
        let path = place.path().join(tool);
        fs::write(&path, "#!/bin/sh\nexit 1\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }
    let checks: [&[&str]; 6] = [
        &["make", "miri"],
        &["make", "tsan"],
        &["make", "kani"],
        &["scripts/check-msrv"],
        &["scripts/check-dependencies"],
        &["scripts/mutants", "vring"],
    ];
    for check in checks {
        for ci in [false, true] {
            let output = run(check, place.path(), ci);
            let said = [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap()).concat();
            assert!(said.contains(" is missing"), "{check:?}: {said}");
            assert_eq!(output.status.success(), !ci, "{check:?}, CI {ci}: {said}");
        }
    }
}

#[test]
fn what_make_is_told_reaches_what_it_runs() {
    if Command::new("make").arg("--version").output().is_err() {
        return egret_needs::this_test_lacks("make");
    }
    let place = tempfile::tempdir().unwrap();
    for (target, told, reaches) in [
        ("soak-at-random", "SEED=7", " EGRET_SOAK_SEED=7 "),
        ("bench-polling", "BENCH=--policy busy\n        --policy off", " -- --policy busy --policy off\n"),
    ] {
        let said = run(&["make", "-n", target, told], place.path(), false).stdout;
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains(reaches), "{said}");
    }
}
