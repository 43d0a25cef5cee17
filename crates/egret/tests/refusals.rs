//! What `egret serve` refuses: one line on standard error, status 1, and nothing left behind.

use std::path::Path;
use std::process::{Command, Output};

fn egret(place: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_egret")).args(arguments).current_dir(place).output().unwrap()
}

#[test]
fn a_refusal_is_one_line_and_status_1_and_leaves_nothing_behind() {
    let export = "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=s";
    for (arguments, line) in [
        (&["serve"][..], "nothing to serve: name a disk (egret serve DISK), or give an --export or a --monitor"),
        (&["serve", "no.img"], "disk 'no.img': no such file; make an empty one with: truncate -s 10G 'no.img'"),
        (&["serve", "."], "disk '.' is a directory; name a raw image or a block device"),
        (
            &["serve", "--blokdev", "x"],
            "unexpected argument '--blokdev' found; a similar argument exists: '--blockdev'",
        ),
        (
            &["serve", "--monitor", "chardev=c"],
            "--monitor: there is no chardev 'c'; make one with: --chardev socket,id=c,path=PATH,server=on,wait=off",
        ),
        (
            &[
                "serve",
                "--pidfile",
                "p",
                "--daemonize",
                "--blockdev",
                "null-co,node-name=n",
                "--export",
                export,
                "--object",
                "iothread,id=io0,poll-weight=64",
            ],
            "iothread 'io0': poll-weight must be 0..=63, got 64",
        ),
        (
            &["serve", "--blockdev", "file,node-name=n,filename=x,aio=native", "--export", export],
            "blockdev 'n': aio=native needs cache.direct=on (or use aio=io_uring)",
        ),
    ] {
        let place = tempfile::tempdir().unwrap();
        let Output { status, stdout, stderr } = egret(place.path(), arguments);
        assert_eq!(String::from_utf8(stderr).unwrap(), format!("egret: {line}\n"));
        assert_eq!(status.code(), Some(1));
        assert_eq!(stdout, b"");
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_run_that_is_not_there_is_named() {
    let place = tempfile::tempdir().unwrap();
    let Output { stderr, .. } = egret(place.path(), &["compare", "a", "b"]);
    assert_eq!(String::from_utf8(stderr).unwrap(), "egret: a: No such file or directory (os error 2)\n");
}

#[test]
fn help_and_version_are_answers_and_no_refusals() {
    for arguments in [&["-h"][..], &["serve", "-h"], &["-V"], &["serve", "-V"], &["serve", "--object", "help"]] {
        let Output { status, stdout, stderr } = egret(Path::new("/"), arguments);
        assert_eq!((status.code(), stderr), (Some(0), Vec::new()));
        assert!(!stdout.is_empty(), "{arguments:?}");
    }
}
