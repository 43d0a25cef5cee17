//! QEMU's policies beside QEMU: the windows of its own I/O threads, as `scripts/record-qemu-waits` read them from 10.0 and 11.1.
#![allow(missing_docs)]

use std::fs::read_to_string;

use egret_polling::replay::windows;
use egret_polling::trace::Trace;
use egret_polling::{Nanos, Parameters, PolicyKind};

/// The recorded waits `name`, and QEMU's window before each.
fn recorded(name: &str) -> (Trace, Vec<Nanos>) {
    let read = |kind| read_to_string(format!("{}/tests/qemu/{name}.{kind}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (trace, windows) = (Trace::parse(read("waits").as_bytes()).unwrap(), read("windows"));
    (trace, windows.lines().map(|line| Nanos(line.parse().unwrap())).collect())
}

/// Replays `name`; the recording has to have `changes` of the window, or it says little.
fn replays_window_by_window(name: &str, kind: PolicyKind, parameters: &Parameters, changes: usize) {
    let (trace, theirs) = recorded(name);
    let ours = windows(&trace, kind, parameters).unwrap();
    assert_eq!(ours.len(), theirs.len());
    let differs = ours.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs);
    assert_eq!(differs.map(|wait| (wait, ours[wait], theirs[wait])), None, "{name}: the first window that differs");
    let changed = theirs.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changed >= changes, "{name}: {changed} changes");
}

/// As the I/O threads of the loads with eight requests in flight were told.
fn tuned(weight: Option<u32>) -> Parameters {
    Parameters { max: Some(Nanos(200_000)), grow: Some(3), shrink: Some(4), weight, price: None }
}

#[test]
fn per_source_window_has_the_windows_that_qemu_10_had() {
    replays_window_by_window("10.0-qd1", PolicyKind::PerSourceWindow, &Parameters::default(), 100);
    replays_window_by_window("10.0-qd8", PolicyKind::PerSourceWindow, &tuned(None), 100);
    replays_window_by_window("10.0-rate", PolicyKind::PerSourceWindow, &Parameters::default(), 30);
}

#[test]
fn weighted_has_the_windows_that_qemu_11_1_had() {
    replays_window_by_window("11.1-qd1", PolicyKind::Weighted, &Parameters::default(), 100);
    replays_window_by_window("11.1-qd8", PolicyKind::Weighted, &tuned(Some(2)), 100);
    replays_window_by_window("11.1-rate", PolicyKind::Weighted, &Parameters::default(), 100);
}
