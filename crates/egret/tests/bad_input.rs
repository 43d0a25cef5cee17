//! What `egret serve` says to a command line that it cannot carry out: one line that names the thing and the fix,
//! exit status 1, and nothing created.

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::disk::Disk;
use support::fate::Fate;
use support::scratch::Scratch;
use support::server::{Options, Program, Reaped, Server};
use support::{await_some, await_that};

const MIB: u64 = 1 << 20;

/// Runs the command until it ends by itself: its exit status and what it said.
fn run(mut command: Command) -> (Option<i32>, String) {
    let mut process = Reaped(command.spawn().expect("the daemon's program starts"));
    let status = await_some("a refusal; does it serve?", || process.0.try_wait().expect("our child"));
    let mut said = String::new();
    process.0.stderr.take().expect("stderr is piped").read_to_string(&mut said).expect("text");
    (status.code(), said)
}

/// Checks that the command refuses in one line that holds every one of `words`, and leaves `scratch` as it was.
fn refuses(scratch: &Scratch, command: Command, words: &[&str]) {
    let mut before = scratch.left_behind();
    let line = format!("{command:?}");
    let (status, said) = run(command);
    assert_eq!(status, Some(1), "{line} said {said:?}");
    assert_eq!(said.lines().count(), 1, "{line} said {said:?}");
    for word in words {
        assert!(said.contains(word), "{line} should have named {word:?} and said {said:?}");
    }
    let mut after = scratch.left_behind();
    before.sort();
    after.sort();
    assert_eq!(before, after, "{line} left something behind");
}

/// `egret serve` with these words, which have `$image` and `$socket` replaced, and a pidfile that must not appear.
fn serve(scratch: &Scratch, words: &str) -> Command {
    serve_with(&Program::egret(), scratch, words)
}

/// Likewise, of this program.
fn serve_with(program: &Program, scratch: &Scratch, words: &str) -> Command {
    let (image, socket) = (scratch.image_path("disk"), scratch.path("socket"));
    let words = words.replace("$image", image.to_str().expect("our own path"));
    let words = words.replace("$socket", socket.to_str().expect("our own path"));
    let mut command = program.command();
    command.args(words.split_whitespace()).arg("--pidfile").arg(scratch.path("pid"));
    command
}

#[test]
fn a_word_for_how_much_is_logged_is_one_of_four_and_an_empty_one_is_none() {
    for word in ["warning", "notice", "err", "4", "all", "warn,info"] {
        let scratch = scratch_with_an_image();
        let program = Program::egret().with_env("EGRET_LOG", word);
        let line = format!("EGRET_LOG must be error, warn, info or debug, got '{word}'");
        refuses(&scratch, serve_with(&program, &scratch, &format!("{DISK} {EXPORT}")), &[&line]);
    }
    let scratch = scratch_with_an_image();
    let program = Program::egret().with_env("EGRET_LOG", "").with(Fate::fails(libc::SYS_io_uring_setup, libc::EPERM));
    let options =
        Options::new().disk("d0", &scratch.image_path("disk"), "").export("e0", "d0", &scratch.path("e0"), "");
    let server = Server::start(&program, &options);
    await_that("the warning", || {
        server.complaints().iter().any(|line| line.contains("fd-monitor falls back to epoll"))
    });
}

#[test]
fn what_the_process_may_not_do_is_a_refusal_to_start_that_says_what_would_be_right() {
    for (call, errno, words, said) in [
        (libc::SYS_setgroups, libc::EPERM, "--user 54321 --group 54321", ["cannot become another user", "CAP_SETUID"]),
        (libc::SYS_setresuid, libc::EPERM, "--user 54321 --group 54321 --sandbox off", ["another user", "CAP_SETUID"]),
        (libc::SYS_io_setup, libc::ENOSYS, "", ["io_setup", "CONFIG_AIO"]),
        (libc::SYS_io_setup, libc::EAGAIN, "", ["no room for another AIO context", "aio-max-nr"]),
    ] {
        let scratch = scratch_with_an_image();
        let program = Program::egret_alone().with(Fate::fails(call, errno));
        refuses(&scratch, serve_with(&program, &scratch, &format!("{DISK} {EXPORT} {words}")), &said);
    }
}

#[test]
fn a_recording_that_could_not_be_written_at_the_end_is_refused_and_no_other_file_is_overwritten() {
    let scratch = scratch_with_an_image();
    let fifo = scratch.image_path("disk").with_extension("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for (words, said) in [
        ("--record-waits $socket/waits", ["--record-waits", "No such file or directory"]),
        ("--record-waits $image", ["--record-waits", "something other than recorded waits"]),
        ("--record-waits $image/waits", ["--record-waits", "Not a directory"]),
        ("--record-waits /", ["--record-waits", "'/' is no file"]),
        (&format!("--record-waits {}", fifo.display()), ["--record-waits", "is no file"]),
    ] {
        refuses(&scratch, serve(&scratch, &format!("{DISK} {EXPORT} {words}")), &said);
    }
    assert_eq!(fs::metadata(scratch.image_path("disk")).unwrap().len(), MIB);
}

#[test]
fn an_engine_that_the_kernel_refuses_is_a_refusal_to_start_whatever_the_export() {
    let exports = [
        EXPORT.to_owned(),
        "--export type=vhost-user-scsi,id=e0,addr.type=unix,addr.path=$socket,luns.0.node-name=d0,luns.0.lun=0"
            .to_owned(),
        "--nbd-server addr.type=unix,addr.path=$socket --export type=nbd,id=e0,node-name=d0".to_owned(),
    ];
    for export in exports {
        let scratch = scratch_with_an_image();
        let refused = Fate::fails(libc::SYS_io_uring_setup, libc::EPERM);
        let words = format!("--object iothread,id=io0,fd-monitor=epoll {DISK},aio=io_uring {export},iothread=io0");
        refuses(
            &scratch,
            serve_with(&Program::egret().with(refused), &scratch, &words),
            &["'e0'", "aio=io_uring", "refused"],
        );
    }
}

/// A place with a good image at `$image` and nothing at `$socket`.
fn scratch_with_an_image() -> Scratch {
    let scratch = Scratch::new();
    scratch.image("disk", MIB);
    scratch
}

const DISK: &str = "--blockdev driver=file,node-name=d0,filename=$image";
const EXPORT: &str = "--export type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path=$socket";

#[test]
fn a_line_with_one_mistake_is_refused_with_its_name_and_the_fix() {
    let with_disk = |export: &str| format!("{DISK} --export {export}");
    let with_thread = |properties: &str| format!("{DISK} --object iothread,id=io0{properties} {EXPORT},iothread=io0");
    let with_blockdev = |properties: &str| format!("{DISK}{properties} {EXPORT}");
    let table: Vec<(String, &[&str])> = vec![
        // Names that nothing has, or two things have.
        (format!("{DISK} {EXPORT},iothread=io1"), &["io1", "e0"]),
        (format!("{DISK} {}", EXPORT.replace("=d0", "=d1")), &["d1", "e0"]),
        (format!("{DISK} {DISK} {EXPORT}"), &["d0"]),
        (format!("--object iothread,id=io0 --object iothread,id=io0 {DISK} {EXPORT}"), &["io0"]),
        (format!("{DISK} {EXPORT} {}", EXPORT.replace("$socket", "$socket2")), &["e0"]),
        (format!("{DISK} {EXPORT} {}", EXPORT.replace("id=e0", "id=e1")), &["$socket"]),
        (format!("{DISK} {EXPORT} --metrics unix:$socket"), &["metrics", "$socket is taken by export 'e0'"]),
        (
            format!("{DISK} {EXPORT} --chardev socket,id=c0,server=on,path=$socket --monitor c0"),
            &["chardev 'c0'", "$socket is taken by export 'e0'"],
        ),
        // Options and properties that nobody knows; the nearest one that somebody does.
        (format!("{DISK} {EXPORT} --exprot x"), &["--exprot", "--export"]),
        (with_thread(",poll-wieght=3"), &["poll-wieght", "poll-weight"]),
        (with_blockdev(",filenam=x"), &["filenam", "filename"]),
        (format!("{DISK} {EXPORT},num-queue=2"), &["num-queue", "num-queues"]),
        ("--object iothraed,id=io0".into(), &["iothraed", "iothread"]),
        ("--blockdev driver=fiel,node-name=d0,filename=$image".into(), &["fiel", "file"]),
        ("--blockdev driver=qcow2,node-name=d0,file=d1".into(), &["qcow2", "raw"]),
        (with_disk("type=fuse,id=e0,node-name=d0"), &["fuse", "vhost-user-blk"]),
        (with_disk("type=nbd,id=e0,node-name=d0"), &["e0", "--nbd-server"]),
        ("--monitor chardev=c0".into(), &["--monitor"]),
        ("--chardev socket,id=c0,server=on".into(), &["--chardev", "path"]),
        ("--chardev socket,id=c0,server=on,path=p,mode=rw".into(), &["mode", "octal", "rw"]),
        (
            "--chardev socket,id=c0,server=on,path=$image.s,group=no.such --monitor c0".into(),
            &["c0", "no group 'no.such'"],
        ),
        (
            "--chardev socket,id=c0,server=on,host=0.0.0.0,port=9 --monitor c0".into(),
            &["c0", "0.0.0.0", "force-remote=on"],
        ),
        // Values out of range or of the wrong kind.
        (with_thread(",poll-weight=64"), &["io0", "poll-weight", "64"]),
        (with_thread(",poll-max-ns=fast"), &["io0", "poll-max-ns", "fast"]),
        (with_thread(",fd-monitor=select"), &["fd-monitor", "select", "epoll"]),
        (with_thread(",poll-policy=bsuy"), &["poll-policy", "bsuy", "busy"]),
        (with_blockdev(",aio=io-uring"), &["aio", "io-uring", "io_uring"]),
        (with_blockdev(",cache.direct=maybe"), &["cache.direct", "maybe", "on"]),
        (format!("{DISK} {EXPORT},num-queues=0"), &["e0", "num-queues", "0"]),
        (format!("{DISK} {EXPORT},num-queues=100000"), &["e0", "num-queues", "100000"]),
        (format!("{DISK} {EXPORT},queue-size=2"), &["e0", "queue-size", "4"]),
        (format!("{DISK} {EXPORT},queue-size=100"), &["e0", "queue-size", "100"]),
        (format!("{DISK} {EXPORT},queue-size=2048"), &["e0", "queue-size", "2048", "1024"]),
        (format!("{DISK} {EXPORT},logical-block-size=1000"), &["e0", "logical-block-size", "1000"]),
        // What is missing.
        (String::new(), &["--export"]),
        (DISK.into(), &["--export"]),
        ("--blockdev driver=file,node-name=d0".into(), &["d0", "filename"]),
        ("--blockdev driver=file,filename=$image".into(), &["node-name"]),
        (with_disk("type=vhost-user-blk,id=e0,node-name=d0"), &["e0", "addr"]),
        // What contradicts itself.
        (with_blockdev(",aio=threads,aio-max-batch=4"), &["d0", "aio-max-batch", "native"]),
        (with_blockdev(",aio=native"), &["d0", "aio=native", "cache.direct=on"]),
        (format!("{DISK},read-only=on {EXPORT},writable=on"), &["e0", "d0", "read-only"]),
        ("--blockdev {\"driver\":\"file\"".into(), &["--blockdev"]),
    ];
    for (line, words) in &table {
        let scratch = scratch_with_an_image();
        let socket = scratch.path("socket");
        let words: Vec<String> =
            words.iter().map(|word| word.replace("$socket", socket.to_str().expect("our own path"))).collect();
        refuses(&scratch, serve(&scratch, line), &words.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

#[test]
fn a_path_that_cannot_be_an_image_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.image_path("disk");
    let path = image.to_str().expect("our own path");
    let line = format!("{DISK} {EXPORT}");
    refuses(&scratch, serve(&scratch, &line), &[path]);
    refuses(&scratch, serve(&scratch, "$image"), &[path]);

    fs::create_dir(&image).expect("our own directory");
    refuses(&scratch, serve(&scratch, &line), &[path, "directory"]);
    fs::remove_dir(&image).expect("our own directory");

    UnixListener::bind(&image).expect("our own socket");
    refuses(&scratch, serve(&scratch, &line), &[path]);
}

#[test]
fn an_image_that_is_no_whole_number_of_blocks_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 512 + 100);
    let path = image.to_str().expect("our own path");
    refuses(&scratch, serve(&scratch, &format!("{DISK} {EXPORT}")), &[path, "612", "512"]);

    File::options().write(true).open(&image).and_then(|file| file.set_len(4096 + 512)).expect("our own image");
    let line = format!("{DISK} {EXPORT},logical-block-size=4096");
    refuses(&scratch, serve(&scratch, &line), &[path, "4608", "4096"]);
}

#[test]
fn an_image_without_permission_is_refused() {
    let scratch = scratch_with_an_image();
    let image = scratch.image_path("disk");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o000)).expect("our own image");
    let mut command = serve(&scratch, &format!("{DISK} {EXPORT}"));
    if rustix::process::geteuid().is_root() {
        // Root is refused only without the capabilities that make it root.
        let mut bounded = Command::new("setpriv");
        bounded.args(["--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]);
        bounded.arg(command.get_program()).args(command.get_args());
        bounded.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command = bounded;
    }
    refuses(&scratch, command, &[image.to_str().expect("our own path"), "ermission"]);
}

/// Serves the image at `$image` from another process.
fn elsewhere(scratch: &Scratch, socket: &Path) -> Server {
    let image = scratch.image_path("disk");
    let options = Options::new().disk("d0", &image, "").export("e0", "d0", socket, "writable=on");
    Server::start(&Program::under_test(), &options)
}

#[test]
fn an_image_that_another_process_writes_is_refused() {
    let scratch = scratch_with_an_image();
    let _other = elsewhere(&scratch, &scratch.path("other"));
    let image = scratch.image_path("disk");
    let words = [image.to_str().expect("our own path"), "lock"];
    refuses(&scratch, serve(&scratch, &format!("{DISK} {EXPORT},writable=on")), &words);
}

#[test]
fn an_image_is_shared_with_another_process_where_locking_is_off() {
    let scratch = scratch_with_an_image();
    let _other = elsewhere(&scratch, &scratch.path("other"));
    let socket = scratch.path("socket");
    let options = Options::new().disk("d0", &scratch.image_path("disk"), "locking=off");
    let options = options.export("e0", "d0", &socket, "writable=on");
    let _server = Server::start(&Program::under_test(), &options);
}

#[test]
fn a_socket_that_a_live_server_listens_on_is_refused() {
    let scratch = scratch_with_an_image();
    let socket = scratch.path("socket");
    let _other = elsewhere(&scratch, &socket);
    let path = socket.to_str().expect("our own path");
    let line = format!("--blockdev driver=null-co,node-name=d0,size=1048576 {EXPORT}");
    refuses(&scratch, serve(&scratch, &line), &[path, "in use"]);
    Disk::connect(&socket).expect("the live server goes on");
}

#[test]
fn a_socket_that_a_dead_server_left_is_replaced() {
    let scratch = scratch_with_an_image();
    let socket = scratch.path("socket");
    drop(UnixListener::bind(&socket).expect("our own socket"));
    let _server = elsewhere(&scratch, &socket);
    Disk::connect(&socket).expect("the new server");
}

#[test]
fn a_file_that_is_no_socket_is_not_replaced() {
    let scratch = scratch_with_an_image();
    let socket = scratch.path("socket");
    fs::write(&socket, "precious").expect("our own file");
    let path = socket.to_str().expect("our own path");
    refuses(&scratch, serve(&scratch, &format!("{DISK} {EXPORT}")), &[path, "socket"]);
    assert_eq!(fs::read_to_string(&socket).expect("our own file"), "precious");
}

#[test]
fn a_socket_whose_path_is_too_long_or_leads_nowhere_is_refused() {
    let scratch = scratch_with_an_image();
    let long: PathBuf = scratch.path(&"s".repeat(108));
    let long = long.to_str().expect("our own path");
    refuses(&scratch, serve(&scratch, &format!("{DISK} {}", EXPORT.replace("$socket", long))), &[long, "107"]);

    let nowhere: PathBuf = scratch.path("nowhere/socket");
    let nowhere = nowhere.to_str().expect("our own path");
    let line = format!("{DISK} {}", EXPORT.replace("$socket", nowhere));
    refuses(&scratch, serve(&scratch, &line), &[nowhere]);
}

#[test]
fn a_mistake_in_the_last_export_takes_the_others_back() {
    let scratch = scratch_with_an_image();
    let second = "--export type=vhost-user-blk,id=e1,node-name=d1,addr.type=unix,addr.path=$socket2";
    refuses(&scratch, serve(&scratch, &format!("{DISK} {EXPORT} {second}")), &["d1", "e1"]);
}
