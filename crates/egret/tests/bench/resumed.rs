//! Runs that go on with another server than they began with.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use egret_lab::results::{Component, Incident};

use super::{Lab, await_some, started, succeeded};

/// A run that was killed, and goes on after `change` had its server's program: what the lab says of that, and what it says has
/// served the run, before and after.
fn resumed(change: impl FnOnce(&Path)) -> (Vec<String>, [Vec<Component>; 2]) {
    let place = tempfile::tempdir().unwrap();
    let server = place.path().join("server");
    fs::copy(env!("CARGO_BIN_EXE_egret"), &server).unwrap();
    let plan = format!(
        "repetitions = 5\n[disk]\ntype = 'file'\nsize = '16M'\n[[subject]]\nname = 'mine'\nstack = 'vhost-user-blk'\n\
         command = 'exec {} serve {{disk}} --socket {{socket}}'\n[[load]]\nramp_time = '20ms'\nruntime = '200ms'\n",
        server.display()
    );
    let lab = await_some("a kill to come before the end", || {
        let lab = Lab::new(&plan);
        let mut child = started(&lab);
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        lab.await_nothing_left();
        (lab.cells() < 10).then_some(lab)
    });
    let before = lab.run().host.started;
    assert!(before.len() == 1 && before[0].path == server.display().to_string(), "{before:?}");
    change(&server);
    let results = lab.results().display().to_string();
    succeeded(&lab.command(&["--resume", &results]).output().unwrap());
    let run = lab.run();
    assert!(run.ended.is_some());
    let said = run.incidents.into_iter().filter(|one| one.source == Incident::LAB).map(|one| one.text).collect();
    (said, [before, run.host.started])
}

#[test]
fn a_run_that_was_killed_and_goes_on_with_another_server_says_so() {
    let another = |server: &Path| {
        // What stands behind a program runs with it as well.
        fs::OpenOptions::new().append(true).open(server).unwrap().write_all(b"another").unwrap();
    };
    let (said, [before, after]) = resumed(another);
    assert_eq!(said, ["resumed with other conditions than it began with: the program of 'mine'"]);
    assert_eq!(before, after, "it is told of what the run began with");
}

#[test]
fn a_run_that_goes_on_with_the_same_server_says_nothing() {
    let (said, [before, after]) = resumed(|_| ());
    assert_eq!((said, before), (Vec::new(), after));
}
