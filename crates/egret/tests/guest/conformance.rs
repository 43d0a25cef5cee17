//! Suites of SCSI commands that others wrote, in a guest: sg3-utils' tools and libiscsi's `iscsi-test-cu`.

use crate::console::Guest;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};
use crate::support::vm::can_boot_or_skips;

const DISK: u64 = 64 << 20;
/// Tests that the suite has of disks, at least.
const WHOLE: usize = 215;

/// What does not pass of the suite: the disk or disks; a test, or all whose names begin so; what becomes of it; and why that
/// is right.
const OTHERWISE: &[(&[&str], &str, &str, &str)] = &[
    (ALL, "Inquiry.Standard", "failed", "it does not know SPC-5, which is newer than it"),
    (ALL, "Inquiry.BlockLimits", "failed", "likewise; and it has more than 512 MiB unmapped at once for a mistake"),
    (
        &["small"],
        "WriteSame10.InvalidDataOutSize",
        "failed",
        "virtio has an answer of its own for data that is too short",
    ),
    (&["small"], "WriteSame16.InvalidDataOutSize", "failed", "likewise"),
    (&["small"], "MultipathIO.Simple", "failed", "the other way is told that a mode page was changed on this one"),
    (&["large"], "PreventAllow.Eject", "failed", "it wants no medium to be loaded where none may be removed"),
    (ALL, "CompareAndWrite.InvalidDataOutSize", "skipped", ISCSI),
    (ALL, "ExtendedCopy.", "skipped", ABSENT),
    (ALL, "GetLBAStatus.", "skipped", ABSENT),
    (ALL, "Inquiry.AllocLength", "skipped", "it does not know SPC-5"),
    (&["large"], "NoMedia.NoMediaSBC", "skipped", "it goes through all commands, and some are absent"),
    (ALL, "OrWrite.", "skipped", ABSENT),
    (ALL, "Prefetch1", "skipped", ABSENT),
    (&["small"], "PreventAllow.", "skipped", "its medium cannot be removed"),
    (&["large"], "PreventAllow.", "skipped", ISCSI),
    (ALL, "ProutReserve.", "skipped", ISCSI),
    (ALL, "ProutPreempt.", "skipped", ISCSI),
    (ALL, "ReadDefectData1", "skipped", ABSENT),
    (ALL, "ReadOnly.ReadOnlySBC", "skipped", "it can be written"),
    (ALL, "ReceiveCopyResults.", "skipped", ABSENT),
    (ALL, "Reserve6.", "skipped", ISCSI),
    (ALL, "Sanitize.", "skipped", ABSENT),
    (&["small"], "StartStopUnit.Simple", "skipped", "its medium cannot be removed"),
    (ALL, "WriteAtomic16.", "skipped", ABSENT),
    (&["large"], "WriteSame10.UnmapUnaligned", "skipped", "its blocks are not parts of larger ones"),
    (&["large"], "WriteSame16.UnmapUnaligned", "skipped", "likewise"),
    (&["large"], "WriteSame10.InvalidDataOutSize", "skipped", "likewise"),
    (&["large"], "WriteSame16.InvalidDataOutSize", "skipped", "likewise"),
    (ALL, "WriteSame10.ZeroBlocks", "skipped", "it says so (WSNZ)"),
    (ALL, "WriteSame16.ZeroBlocks", "skipped", "it says so (WSNZ)"),
    (&["small"], "MultipathIO.Reset", "skipped", ISCSI),
    (&["small"], "MultipathIO.CompareAndWriteAsync", "skipped", ISCSI),
    (&["large"], "MultipathIO.", "skipped", "there is one way to it"),
];
const ALL: &[&str] = &["small", "large"];
const ISCSI: &str = "it needs iSCSI";
const ABSENT: &str = "a disk need not have the command, and this one has not";

#[test]
fn a_scsi_disk_does_what_others_suites_of_commands_expect_of_it() {
    if !can_boot_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let sockets = ["one", "two", "large"].map(|name| scratch.path(name));
    let unit =
        |node: &str| format!("num-queues=2,iothread=io0,luns.0.lun=0,luns.0.node-name={node},luns.0.serial={node}");
    let options = Options::new()
        .iothread("io0", "")
        .disk("small", &scratch.image("small", DISK), "aio=io_uring,cache.direct=on,discard=unmap")
        .disk("large", &scratch.image("large", DISK), "aio=threads,discard=unmap")
        .export_scsi("one", &sockets[0], &format!("writable=on,{}", unit("small")))
        .export_scsi("two", &sockets[1], &format!("writable=on,{}", unit("small")))
        .export_scsi(
            "large",
            &sockets[2],
            &format!("writable=on,logical-block-size=4096,{},luns.0.removable=on", unit("large")),
        );
    let server = Server::start(&Program::egret(), &options);
    let attach = sockets.each_ref().map(|socket| ["--scsi", socket.to_str().expect("our own path")]);
    let [one, two, large] = attach;
    let attach = [&one[..], &two, &["--props", "packed=on"], &large].concat();
    let guest = Guest::run(&attach, &["conformance.sh"]);
    let mut met = vec![false; OTHERWISE.len()];
    for disk in ["small", "large"] {
        let prefix = format!("{disk}: ");
        let outcomes = guest.console.lines().filter_map(|line| line.trim_end().strip_prefix(&prefix)?.split_once(' '));
        let (totals, outcomes): (Vec<_>, Vec<_>) = outcomes.partition(|(test, _)| *test == "TOTAL");
        let total = totals.first().and_then(|(_, total)| total.parse().ok());
        assert!(total >= Some(WHOLE), "{disk}: {total:?} tests\n{}", guest.console);
        assert_eq!(Some(outcomes.len()), total, "{disk}: each has passed or is listed\n{}", guest.console);
        for (test, outcome) in outcomes.into_iter().filter(|(_, outcome)| *outcome != "passed") {
            let expected = OTHERWISE
                .iter()
                .position(|&(disks, name, what, _)| disks.contains(&disk) && test.starts_with(name) && outcome == what);
            let at = expected.unwrap_or_else(|| panic!("{disk}: {test} {outcome}\n{}", guest.console));
            met[at] = true;
        }
    }
    let mut unmet = OTHERWISE.iter().zip(met).filter(|(_, met)| !met);
    assert!(unmet.next().is_none(), "passes by now: {:?}", unmet.collect::<Vec<_>>());
    let complaints = server.complaints();
    assert!(complaints.iter().all(|line| line.contains("its guests must know of each other")), "{complaints:?}");
    assert_eq!(server.terminate().code(), Some(0));
}
