//! What opens, and what does not and why.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, OFlags, ftruncate, memfd_create};

use super::*;
use crate::{DetectZeroes, Discard, Locking};

/// Why it does not open.
fn refused(options: &Options) -> String {
    match Disk::open(options) {
        Ok(disk) => panic!("it opened: {disk:?}"),
        Err(e) => {
            let line = e.to_string();
            assert!(!line.contains('\n') && line.starts_with("blockdev 'disk0': "), "{line}");
            line
        }
    }
}

fn file(path: &Path) -> Options {
    Options::new("disk0", Driver::File { filename: path.to_owned() })
}

fn device(path: &Path) -> Options {
    Options::new("disk0", Driver::HostDevice { filename: path.to_owned() })
}

#[test]
fn an_image_is_described_as_it_is() {
    let image = Image::new(1 << 20);
    let disk = Disk::open(&image.options()).unwrap();
    assert_eq!((disk.size(), disk.logical_block_size()), (1 << 20, 512));
    assert!(disk.physical_block_size().is_power_of_two() && disk.physical_block_size() >= 512);
    assert_eq!((disk.alignment.memory, disk.offset_alignment()), (1, 1));
    assert!(!disk.read_only() && !disk.supports_discard() && disk.node_name() == "disk0");
    drop(disk);
    let disk = Disk::open(&Options { discard: Discard::Unmap, ..image.options() }).unwrap();
    assert!(disk.supports_discard() && disk.discard_granularity() == disk.physical_block_size());
    assert_eq!(
        (disk.max_discard_bytes(), disk.max_write_zeroes_bytes(), disk.optimal_io_size()),
        (1 << 30, 1 << 30, 0)
    );
}

#[test]
fn what_a_file_is_allocated_in_is_told_if_partitions_may_well_begin_at_multiples_of_it() {
    let Ok(huge) = memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) else {
        return egret_needs::this_test_lacks("files in huge pages");
    };
    ftruncate(&huge, 1 << 30).unwrap();
    let path = format!("/proc/self/fd/{}", huge.as_raw_fd());
    assert_eq!(Disk::open(&file(Path::new(&path))).unwrap().physical_block_size(), 512);
}

#[test]
fn zeroes_are_fast_as_long_as_the_kernel_may_have_a_way_to_ask_for_them_that_is_tried() {
    let image = Image::new(1 << 20);
    for (discard, unmap) in [(Discard::Ignore, true), (Discard::Unmap, false), (Discard::Unmap, true)] {
        for (punch_hole, zero_range) in [(true, true), (false, true), (true, false), (false, false)] {
            let disk = Disk::open(&Options { discard, ..image.options() }).unwrap();
            disk.able.punch_hole.store(punch_hole, Ordering::Relaxed);
            disk.able.zero_range.store(zero_range, Ordering::Relaxed);
            let punches = punch_hole && unmap && discard == Discard::Unmap;
            assert_eq!(disk.zeroes_fast(unmap), punches || zero_range, "{discard:?} {unmap} {punch_hole}");
        }
    }
    let null = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
    assert!(Disk::open(&Options::new("null", null)).unwrap().zeroes_fast(false));
}

#[test]
fn a_disk_runs_on_io_uring_if_it_was_asked_for_and_there_is_an_image() {
    let image = Image::new(1 << 20);
    for (name, options, _) in ways(&image.options()) {
        let disk = Disk::open(&options).unwrap();
        assert_eq!(disk.runs_on_io_uring(), options.aio == Aio::IoUring, "{name}");
    }
    let null = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
    let null = Disk::open(&Options { aio: Aio::IoUring, ..Options::new("null", null) }).unwrap();
    assert!(!null.runs_on_io_uring());
    // No engine gives it to the kernel, for which 0 and 1 are descriptors of somebody's.
    assert_eq!(null.fd(), -1);
}

#[test]
fn an_image_is_opened_past_the_page_cache_where_that_is_asked_for_and_only_there() {
    let image = Image::new(1 << 20);
    for read_only in [false, true] {
        for direct in [false, true] {
            let disk = Disk::open(&Options { direct, read_only, ..image.options() }).unwrap();
            let flags = rustix::fs::fcntl_getfl(disk.file().unwrap()).unwrap();
            assert_eq!(flags.contains(OFlags::DIRECT), direct, "read_only={read_only}");
            // A flag of the file would make each write wait.
            assert!(!flags.intersects(OFlags::DSYNC), "{flags:?}");
            // Where no write is of less than a block there is nothing to be kept apart.
            assert_eq!(disk.block_range_lock.is_some(), disk.offset_alignment() > 512);
        }
    }
}

#[test]
fn what_blocks_direct_io_wants_is_found_by_trying_where_nobody_says_it() {
    // A file in memory has no device below it that could be asked.
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return egret_needs::this_test_lacks("/dev/shm") };
    let image = Image::within(folder, &pattern(65536, 1));
    let options = Options { direct: true, ..image.options() };
    if let Err(e) = Disk::open(&options) {
        return egret_needs::this_test_lacks(format_args!("direct I/O of files in memory: {e}"));
    }
    let mut rig = Rig::new(&options);
    assert_eq!((rig.disk.alignment.memory, rig.disk.offset_alignment()), (512, 512));
    assert_eq!(rig.read(512, 4096), pattern(65536, 1)[512..][..4096]);
}

#[test]
fn an_image_that_is_handed_over_becomes_what_would_have_been_opened() {
    let image = Image::new(1 << 20);
    for direct in [false, true] {
        // Every write would go to its end.
        let handed = File::options().read(true).append(true).open(&image.path).unwrap();
        let options = Options { direct, ..image.options() };
        let opened = crate::Image::open(&options, Some(handed)).unwrap();
        let disk = Arc::new(Disk::of(&options, opened).unwrap());
        let flags = rustix::fs::fcntl_getfl(disk.file().unwrap()).unwrap();
        assert_eq!((flags.contains(OFlags::DIRECT), flags.contains(OFlags::APPEND)), (direct, false), "{flags:?}");
        let data = pattern(4096, u64::from(direct));
        let mut rig = Rig::over(disk, EngineOptions::default());
        assert_eq!(rig.write(8192, &data), Ok(()));
        let content = image.content();
        assert!(content.len() == 1 << 20 && content[8192..][..4096] == data);
    }
    let refused = |options: &Options, path: &Path| {
        crate::Image::open(options, Some(File::open(path).unwrap())).unwrap_err().to_string()
    };
    let folder = image.path.parent().unwrap();
    assert!(refused(&file(folder), folder).contains("is a directory"));
    assert!(refused(&device(&image.path), &image.path).contains("use driver=file"));
}

#[test]
fn an_image_that_is_handed_over_and_cannot_be_used_is_left_without_locks() {
    let image = Image::new(1 << 20);
    let [one, other] = [(); 2].map(|()| File::options().read(true).write(true).open(&image.path).unwrap());
    let options = Options { locking: Locking::On, ..file(&image.path) };
    // Whoever has handed it over has it still, and its locks with it.
    let handed = |file: &File| crate::Image::open(&options, Some(file.try_clone().unwrap())).unwrap();
    let disk = Disk::of(&options, handed(&one)).unwrap();
    for (size, line) in [(0, "is empty"), (1000, "not a multiple of its block size")] {
        other.set_len(size).unwrap();
        let refused = disk.reopen_as(&options, handed(&other)).unwrap_err().to_string();
        assert!(refused.contains(line), "{refused}");
    }
    drop(disk);
    let refused = Disk::of(&options, handed(&other)).unwrap_err().to_string();
    assert!(refused.contains("not a multiple of its block size"), "{refused}");
    other.set_len(1 << 20).unwrap();
    Disk::open(&options).unwrap();
}

#[test]
fn an_image_that_is_handed_over_is_not_one_whose_writes_are_all_to_be_stable_by_themselves() {
    use std::os::unix::fs::OpenOptionsExt;

    let image = Image::new(1 << 20);
    for (flags, direct) in [(libc::O_DSYNC, false), (libc::O_SYNC, false), (libc::O_DSYNC, true)] {
        let handed = File::options().read(true).write(true).custom_flags(flags).open(&image.path).unwrap();
        let options = Options { direct, ..image.options() };
        let refused = crate::Image::open(&options, Some(handed)).unwrap_err().to_string();
        assert!(refused.contains("open it without, and use writethrough=on"), "{refused}");
    }
}

#[test]
fn where_there_is_no_direct_io_that_is_said_of_what_is_opened_and_of_what_is_handed_over() {
    let path = Path::new("/proc/self/status");
    let options = Options { direct: true, read_only: true, ..file(path) };
    let handed = crate::Image::open(&options, Some(File::open(path).unwrap())).unwrap_err().to_string();
    for line in [refused(&options), handed] {
        assert!(line.contains("does not support direct I/O"), "{line}");
    }
}

#[test]
fn there_is_no_direct_io_where_the_kernel_calls_it_invalid_and_what_fails_otherwise_fails_for_another_reason() {
    let image = Image::beside_the_build(&[0; 65536]);
    let unsupported = "does not support direct I/O";
    for (call, errno, direct, expected) in [
        (libc::SYS_openat, libc::EINVAL, true, unsupported),
        (libc::SYS_openat, libc::EINVAL, false, "cannot open"),
        (libc::SYS_pread64, libc::EINVAL, true, unsupported),
        // A first block that is bad.
        (libc::SYS_pread64, libc::EIO, true, ""),
    ] {
        let options = Options { direct, ..image.options() };
        // What is refused to a thread it never has again.
        let opened = std::thread::spawn(move || {
            crate::refuse::refuse(call, errno);
            Disk::open(&options).map(drop)
        });
        let said = opened.join().unwrap().err().map(|e| e.to_string()).unwrap_or_default();
        assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{call} {errno} {direct}: {said}");
    }
}

#[test]
fn a_size_that_changes_is_found_when_asked_for() {
    let image = Image::new(1 << 20);
    let mut rig = Rig::new(&image.options());
    File::options().write(true).open(&image.path).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(rig.disk.size(), 1 << 20);
    assert_eq!(rig.write(1 << 20, &[1; 512]), Err(Errno::INVAL));
    assert_eq!(rig.disk.refresh_size().unwrap(), 2 << 20);
    assert_eq!(rig.write(1 << 20, &[1; 512]), Ok(()));
}

#[test]
fn a_disk_grows_and_never_shrinks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let disk = Disk::open(&Options::new("disk", Driver::File { filename: path.clone() })).unwrap();
    assert_eq!(disk.grow(3 << 20).unwrap(), 3 << 20);
    assert_eq!(disk.grow(1 << 20).unwrap(), 3 << 20);
    assert_eq!(disk.size(), path.metadata().unwrap().len());
}

#[test]
fn what_is_no_image_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.img");
    assert!(refused(&file(&missing)).contains("missing.img' does not exist"));
    assert!(!missing.exists() && !Disk::open(&file(&missing)).unwrap_err().is_locked());
    assert!(refused(&device(&missing)).contains("does not exist"));
    assert!(refused(&file(dir.path())).contains("is a directory"));
    assert!(refused(&device(dir.path())).contains("is a directory"));
    for options in [file(Path::new("/dev/null")), device(Path::new("/dev/null"))] {
        assert!(refused(&options).contains("neither a regular file nor a block device"));
    }
    let image = Image::new(4096);
    assert!(refused(&device(&image.path)).contains("use driver=file"));
    assert!(refused(&file(&image.path.join("below"))).contains("cannot open"));
    if let Some(loop_device) = LoopDevice::new(1 << 20, 512) {
        assert!(std::fs::metadata(&loop_device.path).unwrap().file_type().is_block_device());
        assert!(refused(&file(&loop_device.path)).contains("use driver=host_device"));
    }
}

#[test]
fn a_size_that_is_no_number_of_blocks_is_refused() {
    let odd = Image::of(&[1; 1000]);
    assert!(refused(&odd.options()).contains("1000 bytes, not a multiple of its block size 512"));
    let empty = Image::new(0);
    assert!(refused(&empty.options()).contains("is empty"));
    let null = |size| Options::new("disk0", Driver::Null { size, latency: Nanos::ZERO, read_zeroes: false });
    assert!(refused(&null(1000)).contains("multiple of 512, got 1000"));
    assert!(refused(&null(0)).contains("got 0"));
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let image = Image::new(4096);
    let native = Options { aio: Aio::Native, ..image.options() };
    assert!(refused(&native).contains("aio=native needs cache.direct=on"));
    let detect = Options { detect_zeroes: DetectZeroes::Unmap, ..image.options() };
    assert!(refused(&detect).contains("detect-zeroes=unmap needs discard=unmap"));
}

#[test]
fn a_device_that_may_not_be_written_opens_for_reading_only() {
    let Some(device) = LoopDevice::with(1 << 20, 512, &["--read-only"]) else { return };
    assert!(refused(&device.options()).contains("is read-only; use read-only=on"));
    assert!(Disk::open(&Options { read_only: true, ..device.options() }).is_ok());
}

#[test]
fn one_writer_excludes_all_others_and_readers_share() {
    let image = Image::new(4096);
    let (writer, reader) = (image.options(), Options { read_only: true, ..image.options() });
    let disk = Disk::open(&writer).unwrap();
    assert!(refused(&writer).contains("holds its write lock"));
    assert!(refused(&reader).contains("holds its write lock"));
    assert!(Disk::open(&Options { locking: Locking::Off, ..writer.clone() }).is_ok());
    drop(disk);
    let first = Disk::open(&reader).unwrap();
    let second = Disk::open(&Options { locking: Locking::On, ..reader.clone() }).unwrap();
    let line = refused(&writer);
    assert!(line.contains("is locked") && line.contains("read-only=on"), "{line}");
    drop((first, second));
    assert!(Disk::open(&writer).is_ok());
}

#[test]
fn a_disk_is_reopened_otherwise_without_a_moment_in_which_others_get_in() {
    let image = Image::new(1 << 20);
    let (writer, reader) = (image.options(), Options { read_only: true, ..image.options() });
    let mut disk = Disk::open(&writer).unwrap();
    for options in [&reader, &writer, &Options { no_flush: true, ..writer.clone() }] {
        let new = disk.reopen(options).unwrap();
        assert!(refused(&writer).contains("is locked"), "while both are open");
        assert_eq!(new.options(), options);
        drop(disk);
        assert!(refused(&writer).contains("is locked"), "and when the first is closed");
        disk = new;
    }
    // One that is given up leaves the locks as they were.
    let reading = disk.reopen(&reader).unwrap();
    drop(disk);
    drop(reading.reopen(&writer).unwrap());
    let beside = Disk::open(&reader).unwrap();
    let line = reading.reopen(&writer).unwrap_err().to_string();
    assert!(line.contains("is locked") && line.contains("write lock"), "{line}");
    drop(beside);
    drop(Disk::open(&reader).expect("what was shown for a writer is taken back"));
    let unlocked = reading.reopen(&Options { locking: Locking::Off, ..writer.clone() }).unwrap();
    drop(reading);
    let relocked = unlocked.reopen(&writer).unwrap();
    drop(unlocked);
    assert!(refused(&reader).contains("is locked"));
    drop(relocked);
    assert!(Disk::open(&writer).is_ok());
}

#[test]
fn a_disk_whose_place_another_has_may_leave_its_locks_before_it_is_closed() {
    let image = Image::new(4096);
    let disk = Disk::open(&image.options()).unwrap();
    assert!(refused(&image.options()).contains("is locked"));
    disk.leave_locks();
    drop(Disk::open(&image.options()).unwrap());
}

#[test]
fn a_disk_owes_for_the_one_before_what_no_flush_of_its_own_makes_stable_and_nothing_else() {
    let image = Image::new(1 << 20);
    let plain = Options { locking: Locking::Off, ..image.options() };
    let direct = Options { direct: true, ..plain.clone() };
    let unflushed = Options { no_flush: true, ..plain.clone() };
    let [reader, direct_reader] = [&plain, &direct].map(|options| Options { read_only: true, ..options.clone() });
    let null = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
    let null = Options::new("null", null);
    for (old, new, owes, of_devices) in [
        (&plain, &plain, true, true),
        (&plain, &direct, true, true),
        (&unflushed, &plain, true, true),
        // Direct I/O of a file may have left something in the page cache, too.
        (&direct, &plain, true, false),
        (&direct, &unflushed, true, true),
        (&direct, &reader, true, true),
        (&reader, &plain, false, false),
        (&direct_reader, &unflushed, false, false),
        (&null, &unflushed, false, false),
    ] {
        let [old, new] = [old, new].map(|options| Arc::new(Disk::open(options).unwrap()));
        new.follow(&old);
        assert_eq!(new.is_owed(), owes, "{:?} after {:?}", new.options(), old.options());
        if old.file().is_some() {
            let devices = [&old, &new].map(|disk| {
                let mut device = Disk::open(disk.options()).unwrap();
                device.become_a_device();
                Arc::new(device)
            });
            devices[1].follow(&devices[0]);
            assert_eq!(devices[1].is_owed(), of_devices, "{:?} after {:?}", new.options(), old.options());
        }
        new.flush().unwrap();
        assert!(!new.is_owed());
    }
}

#[test]
fn what_a_disk_still_owes_the_one_after_it_owes_too_whatever_the_one_between_leaves_behind_by_itself() {
    let image = Image::new(1 << 20);
    let cached = Options { locking: Locking::Off, ..image.options() };
    let direct = Options { direct: true, ..cached.clone() };
    let follow = |old: &Arc<Disk>| {
        let mut new = Disk::open(&direct).unwrap();
        // Of which nothing is in the page cache.
        new.become_a_device();
        let new = Arc::new(new);
        new.follow(old);
        new
    };
    let first = Arc::new(Disk::open(&cached).unwrap());
    let second = follow(&first);
    let third = follow(&second);
    assert_eq!([&second, &third].map(|disk| disk.is_owed()), [true; 2]);
    third.flush().unwrap();
    assert_eq!([&second, &third].map(|disk| disk.is_owed()), [false; 2], "it went as far as to the first");
    assert!(!follow(&third).is_owed());
}

#[test]
fn a_disk_that_is_reopened_is_the_same_image_of_the_same_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    let create = |len| File::create(&path).unwrap().set_len(len).unwrap();
    create(1 << 20);
    let disk = Disk::open(&file(&path)).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(disk.reopen(&file(&path)).unwrap().size(), 1 << 20, "until somebody asks");
    std::fs::remove_file(&path).unwrap();
    assert!(disk.reopen(&file(&path)).unwrap_err().to_string().contains("does not exist"));
    create(1 << 20);
    assert!(disk.reopen(&file(&path)).unwrap_err().to_string().contains("another has taken its place"));
}

#[test]
fn an_image_opens_again_as_soon_as_it_is_closed() {
    let image = Image::new(1 << 20);
    for _ in 0..10 {
        for (_, options, shared) in ways(&image.options()) {
            let ring = shared.then(shared_ring);
            let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
            rig.push_write(0, Memory::new(65536, 0));
            rig.push(Op::Flush, 0, 0, None);
            rig.settle();
        }
    }
}

/// Runs a line of `qemu-io` on an image; `None`, and a line that says so, where there is none.
fn qemu_io(path: &Path, extra: &[&str], line: &str) -> Option<(bool, String)> {
    let run = Command::new("qemu-io").args(["-f", "raw"]).args(extra).args(["-c", line]).arg(path).output();
    match run {
        Ok(run) => Some((run.status.success(), String::from_utf8_lossy(&run.stderr).into_owned())),
        Err(e) => {
            egret_needs::this_test_lacks(format_args!("qemu-io: {e}"));
            None
        }
    }
}

#[test]
fn qemu_is_kept_out_of_an_image_in_use() {
    let image = Image::new(65536);
    let disk = Disk::open(&image.options()).unwrap();
    let Some((ok, said)) = qemu_io(&image.path, &[], "write 0 512") else { return };
    assert!(!ok && said.contains("lock"), "{said}");
    drop(disk);
    let (ok, said) = qemu_io(&image.path, &[], "write 0 512").unwrap();
    assert!(ok, "{said}");
    let _reader = Disk::open(&Options { read_only: true, ..image.options() }).unwrap();
    let (ok, said) = qemu_io(&image.path, &[], "write 0 512").unwrap();
    assert!(!ok && said.contains("lock"), "{said}");
    let (ok, said) = qemu_io(&image.path, &["-r"], "read 0 512").unwrap();
    assert!(ok, "{said}");
}

#[test]
fn an_image_that_qemu_uses_is_refused() {
    let image = Image::new(65536);
    let spawned = Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(&image.path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn();
    let Ok(mut qemu) = spawned else {
        egret_needs::this_test_lacks("qemu-io");
        return;
    };
    // It answers when it has opened the image.
    let mut stdin = qemu.stdin.take().unwrap();
    writeln!(stdin, "length").unwrap();
    let mut answer = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(qemu.stdout.take().unwrap()), &mut answer).unwrap();
    assert!(refused(&image.options()).contains("holds its write lock"));
    drop(stdin);
    qemu.wait().unwrap();
    assert!(Disk::open(&image.options()).is_ok());
}
