//! The disk as its users see it: a file, a loop device, a socket.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use egret_faultdisk::{Effect, ErrnoName, FaultDisk, IoType, Order, Ran, Survivors, serve};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::process::{Pid, Signal, kill_process};

const SIZE: u64 = 1 << 20;

/// A disk, the folder that it is in, and the file. `None`, where this is no CI, without root and FUSE.
fn mounted() -> Option<(Arc<FaultDisk>, File, tempfile::TempDir)> {
    let folder = tempfile::tempdir().unwrap();
    let image = tempfile::tempfile().unwrap();
    image.set_len(SIZE).unwrap();
    let disk = match FaultDisk::mount(image, folder.path()) {
        Ok(disk) => Arc::new(disk),
        Err(error) => {
            egret_needs::this_test_lacks(format_args!("root and FUSE: {error}"));
            return None;
        }
    };
    let file = File::options().read(true).write(true).open(disk.path()).unwrap();
    Some((disk, file, folder))
}

fn at(file: &File, offset: u64) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    byte[0]
}

#[test]
fn what_was_not_flushed_goes_with_the_power_whatever_made_the_rest_stable() {
    let Some((disk, file, _folder)) = mounted() else { return };
    file.write_all_at(&[1; 4096], 0).unwrap();
    file.sync_data().unwrap();
    // What is not flushed, and a write that is stable by itself.
    file.write_all_at(&[2; 4096], 4096).unwrap();
    let slices = [std::io::IoSlice::new(&[3; 4096])];
    rustix::io::pwritev2(file.as_fd(), &slices, 8192, ReadWriteFlags::DSYNC).unwrap();
    assert_eq!(disk.tell(Order::Status).unwrap().unflushed, 8);
    disk.tell(Order::PowerOff).unwrap();
    assert_eq!(file.write_all_at(&[9; 512], 0).unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert!(file.sync_data().is_err());
    disk.tell(Order::PowerOn(Survivors::None)).unwrap();
    assert_eq!([0, 4096, 8192].map(|offset| at(&file, offset)), [1, 0, 3]);
    let status = disk.tell(Order::Status).unwrap();
    assert_eq!((status.unflushed, status.writes, status.flushes), (0, 4, 2));
}

#[test]
fn requests_fail_as_they_are_told_to() {
    let Some((disk, file, _folder)) = mounted() else { return };
    disk.inject(IoType::Write, Some(1), Effect::Errno(ErrnoName::Enospc));
    assert_eq!(file.write_at(&[1; 4096], 0).unwrap_err().raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    assert_eq!(at(&file, 0), 0);
    disk.inject(IoType::Write, Some(1), Effect::Torn(512));
    assert_eq!(file.write_at(&[1; 4096], 0).unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert_eq!([0, 511, 512].map(|offset| at(&file, offset)), [1, 1, 0]);
    disk.inject(IoType::Write, Some(1), Effect::Short(1024));
    assert_eq!(file.write_at(&[2; 4096], 0).unwrap(), 1024);
    disk.inject(IoType::Flush, Some(1), Effect::Errno(ErrnoName::Eio));
    assert!(file.sync_data().is_err());
    assert_eq!(disk.tell(Order::Status).unwrap().unflushed, 2);
    disk.inject(IoType::Flush, Some(1), Effect::PowerOff);
    assert!(file.sync_data().is_err());
    let status = disk.tell(Order::PowerOn(Survivors::None)).unwrap();
    assert_eq!((status.is_on, status.struck, status.waiting), (true, 5, 0));
    assert_eq!(at(&file, 0), 0);
}

#[test]
fn what_is_run_is_recorded_with_what_it_was_and_when_and_what_fails_is_not() {
    let Some((disk, file, _folder)) = mounted() else { return };
    file.write_all_at(&[1; 512], 0).unwrap();
    assert!(disk.recorded().is_empty(), "nobody has asked for it");
    disk.record();
    disk.inject(IoType::Write, Some(1), Effect::Errno(ErrnoName::Eio));
    assert!(file.write_at(&[1; 512], 0).is_err());
    let before = Instant::now();
    file.write_all_at(&[1; 4096], 4096).unwrap();
    let between = Instant::now();
    let slices = [std::io::IoSlice::new(&[3; 512])];
    rustix::io::pwritev2(file.as_fd(), &slices, 512, ReadWriteFlags::DSYNC).unwrap();
    file.sync_data().unwrap();
    let after = Instant::now();
    let ran = disk.recorded();
    let what: Vec<_> =
        ran.iter().map(|Ran { asked, .. }| (asked.iotype, asked.at, asked.len, asked.is_stable)).collect();
    let expected = [(IoType::Write, 4096, 4096, false), (IoType::Write, 512, 512, true), (IoType::Flush, 0, 0, false)];
    assert_eq!(what, expected);
    let times = [before, ran[0].begun, ran[0].ended, between, ran[1].begun, ran[1].ended];
    assert!(times.is_sorted() && [ran[1].ended, ran[2].begun, ran[2].ended, after].is_sorted());
    disk.record();
    assert!(disk.recorded().is_empty(), "a new one");
}

#[test]
fn a_request_that_never_ends_is_run_when_it_is_released_and_fails_when_the_power_goes() {
    let Some((disk, file, _folder)) = mounted() else { return };
    for (order, is_written) in [(Order::Release, true), (Order::PowerOff, false)] {
        disk.inject(IoType::Write, Some(1), Effect::Never);
        let (sender, ended) = mpsc::channel();
        let writer = file.try_clone().unwrap();
        thread::spawn(move || sender.send(writer.write_at(&[5; 512], 0).is_ok()));
        while disk.tell(Order::Status).unwrap().waiting == 0 {
            thread::yield_now();
        }
        assert!(ended.try_recv().is_err(), "it does not end by itself");
        disk.tell(order).unwrap();
        assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(is_written));
    }
}

#[test]
fn late_requests_are_overtaken_and_none_lands_after_the_power_was_gone() {
    let Some((disk, file, _folder)) = mounted() else { return };
    disk.inject(IoType::Write, Some(1), Effect::LateMs(30_000));
    let writer = file.try_clone().unwrap();
    let late = thread::spawn(move || writer.write_at(&[7; 512], 0));
    while disk.tell(Order::Status).unwrap().waiting == 0 {
        thread::yield_now();
    }
    assert_eq!(at(&file, 0), 0, "others need not wait for it");
    disk.tell(Order::PowerOff).unwrap();
    disk.tell(Order::PowerOn(Survivors::All)).unwrap();
    assert!(late.join().unwrap().is_err());
    assert_eq!(at(&file, 0), 0);
    disk.inject(IoType::Write, Some(1), Effect::LateMs(1));
    file.write_all_at(&[8; 512], 0).unwrap();
    assert_eq!(at(&file, 0), 8);
}

#[test]
fn the_last_of_requests_that_are_reordered_is_run_first() {
    let Some((disk, file, _folder)) = mounted() else { return };
    disk.inject(IoType::Write, Some(2), Effect::Reordered(2));
    let write = |value: u8| {
        let (disk, writer) = (Arc::clone(&disk), file.try_clone().unwrap());
        let asked = disk.tell(Order::Status).unwrap().writes;
        let thread = thread::spawn(move || writer.write_at(&[value; 512], 0).unwrap());
        while disk.tell(Order::Status).unwrap().writes == asked {
            thread::yield_now();
        }
        thread
    };
    for thread in [write(1), write(2)] {
        assert_eq!(thread.join().unwrap(), 512);
    }
    assert_eq!(at(&file, 0), 1, "it is written last");
    assert_eq!(disk.tell(Order::Status).unwrap().struck, 2);
}

#[test]
fn orders_and_answers_are_lines_of_a_socket() {
    let Some((disk, file, folder)) = mounted() else { return };
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("control");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = Arc::clone(&disk);
    thread::spawn(move || serve(&server, &listener));
    let mut client = UnixStream::connect(&socket).unwrap();
    let mut answers = BufReader::new(client.try_clone().unwrap()).lines();
    let mut ask = |line: &str| {
        client.write_all(format!("{line}\n").as_bytes()).unwrap();
        answers.next().unwrap().unwrap()
    };
    let answer = ask(r#"{"inject": {"iotype": "read", "effect": {"errno": "EIO"}, "times": 1}}"#);
    assert!(
        answer.contains(r#""faults":[{"after":0,"effect":{"errno":"EIO"},"iotype":"read","times":1}]"#),
        "{answer}"
    );
    assert!(file.read_at(&mut [0; 512], 0).is_err());
    assert!(ask(r#""status""#).contains(r#""struck":1"#));
    assert!(ask(r#""power-off""#).contains(r#""is-on":false"#));
    assert!(ask(r#"{"power-on": {"random": 4}}"#).contains(r#""is-on":true"#));
    for (line, why) in [("", "no order: EOF"), (r#""explode""#, "unknown variant `explode`"), ("{", "no order: EOF")] {
        let answer = ask(line);
        assert!(answer.starts_with(r#"{"error":"#) && answer.contains(why), "{line}: {answer}");
    }
    drop(folder);
}

#[test]
fn the_program_says_where_the_disk_is_and_leaves_nothing_behind() {
    // For its word on what is missing.
    if mounted().is_none() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let [image, folder, control] = ["image", "folder", "control"].map(|name| place.path().join(name));
    File::create(&image).unwrap().set_len(SIZE).unwrap();
    std::fs::create_dir(&folder).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_egret-faultdisk"));
    command.arg(&folder).arg("--image").arg(&image).arg("--control").arg(&control).stdout(Stdio::piped());
    let mut program = command.spawn().unwrap();
    let said = BufReader::new(program.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    assert_eq!(Path::new(&said), folder.join("disk"));
    let file = File::options().read(true).write(true).open(&said).unwrap();
    file.write_all_at(&[6; 512], 0).unwrap();
    let mut client = UnixStream::connect(&control).unwrap();
    client.write_all(b"\"status\"\n").unwrap();
    assert!(BufReader::new(client).lines().next().unwrap().unwrap().contains(r#""writes":1"#));
    drop(file);
    kill_process(Pid::from_child(&program), Signal::TERM).unwrap();
    assert!(program.wait().unwrap().success());
    assert!(!control.exists() && !folder.join("disk").exists(), "socket and file system are gone");
    assert_eq!(at(&File::open(&image).unwrap(), 0), 6, "what was written is in the image");
}
