//! `make demo`: a file is served, written, read back and measured, beside the same client on the file itself.
//!
//! It needs neither root nor QEMU: the client is libblkio, over vhost-user as a virtual machine would be, and with
//! io_uring on the file. The two take turns of half a second, so that what disturbs this machine disturbs both.

#[path = "../shared/load.rs"]
mod load;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use egret_loadgen::machine;
use load::{Load, Outcome, Tally};
use support::announced::Announced;
use support::disk::{BLOCK, DEPTH, Disk, pattern};
use support::scratch::Scratch;

/// The disk's size in bytes.
const DISK: u64 = 512 << 20;
/// What it is filled with.
const SEED: u64 = 0xE9;
/// How many turns each side gets at each depth, and how long one is.
const TURNS: usize = 6;
const TURN: Duration = Duration::from_millis(500);
/// The part of a turn that is not measured, at first.
const WARM_UP: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    match demonstrate() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

fn demonstrate() -> io::Result<()> {
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk.img", DISK), scratch.path("disk.sock"));
    println!("\n$ egret serve {} --socket {}", image.display(), socket.display());
    let daemon = Announced::start(&image, &socket);
    for line in daemon.text().lines() {
        println!("{}", format!("  {line}").trim_end());
    }

    let direct = is_open_for_direct_io(daemon.pid(), &image)?;
    let mut served = Disk::connect(&socket)?;
    let file = Disk::open(&image, direct);
    let on_host = File::open(&image)?;
    // All have it open; removed now, it does not stay behind after an interrupt.
    fs::remove_file(&image)?;

    println!("\n{}", machine::fingerprint());
    let how = if direct {
        "direct I/O: past the host's page cache"
    } else {
        "buffered: its file system has no direct I/O, so what is measured is the host's page cache"
    };
    println!("disk: a file of {} MiB, {how}", DISK >> 20);
    println!("client: libblkio, one queue\n");

    write_and_verify(&mut served)?;
    compare(&daemon, &mut served, file, direct)?;

    drop(served);
    let begin = Instant::now();
    let status = daemon.terminate();
    println!("\nended by SIGTERM after {} ms: {status}", begin.elapsed().as_millis());
    verify_on_host(on_host)?;
    println!("the file on the host holds what was written, byte for byte");
    match scratch.left_behind().as_slice() {
        [] if status.success() => Ok(()),
        left => Err(io::Error::other(format!("the daemon did not end well: {status}, and left {left:?} behind"))),
    }
}

/// Whether process `pid` has opened `image` with `O_DIRECT`: asked of the kernel and not of the daemon.
fn is_open_for_direct_io(pid: u32, image: &Path) -> io::Result<bool> {
    let image = image.canonicalize()?;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let fd = entry?;
        if fs::read_link(fd.path()).is_ok_and(|target| target == image) {
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", fd.file_name().display()))?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok()).unwrap_or_default();
            return Ok(flags & libc::O_DIRECT != 0);
        }
    }
    Err(io::Error::other("the daemon has not opened its disk"))
}

/// Fills the disk and reads it back through the daemon.
fn write_and_verify(disk: &mut Disk) -> io::Result<()> {
    let rate = |begin: Instant| DISK as f64 / 1e6 / begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    disk.first().write_pattern(0..DISK, SEED)?;
    disk.first().flush()?;
    println!("written and flushed, {} KiB a request, {DEPTH} in flight: {:>6.0} MB/s", BLOCK >> 10, rate(begin));
    let begin = Instant::now();
    disk.first().verify_pattern(0..DISK, SEED)?;
    println!("read back and compared, every byte right:         {:>6.0} MB/s", rate(begin));
    Ok(())
}

fn verify_on_host(mut file: File) -> io::Result<()> {
    let mut block = vec![0; 1 << 20];
    for at in (0..DISK).step_by(block.len()) {
        file.read_exact(&mut block)?;
        if block != pattern(SEED, at, block.len()) {
            return Err(io::Error::other(format!("the MiB at {at} of the file is not what was written")));
        }
    }
    Ok(())
}

/// Loads both in turns, and prints what came of it.
fn compare(daemon: &Announced, served: &mut Disk, file: io::Result<Disk>, direct: bool) -> io::Result<()> {
    let missing = |error: &io::Error| println!("missing: io_uring, for the client on the file itself ({error})");
    let mut file = file.inspect_err(missing).ok();
    println!("\n{:<44}{:>10}{:>10}{:>10}{:>20}", "4 KiB random reads", "IOPS", "p50 us", "p99 us", "server CPU us/IO");
    for depth in [1, 64] {
        let load = Load { depth, capacity: DISK, warm_up: WARM_UP, length: TURN };
        let (mut through_egret, mut by_itself) = (Tally::default(), Tally::default());
        for _ in 0..TURNS {
            let cpu_time = || machine::cpu_time_ns(daemon.pid()).expect("the daemon lives");
            load.run(served.first(), cpu_time, &mut through_egret)?;
            if let Some(file) = &mut file {
                load.run(file.first(), || 0, &mut by_itself)?;
            }
        }
        let egret = through_egret.outcome();
        print_row(depth, "through egret", &egret, &format!("{:.2}", egret.cpu_us));
        if file.is_some() {
            let file = by_itself.outcome();
            let name = if direct { "the file itself, io_uring, direct" } else { "the file itself, io_uring, buffered" };
            print_row(depth, name, &file, "-");
            let latency = egret.p50_us - file.p50_us;
            println!("{:<44}{:>10.2}{:>+10.1}", "       egret / file; difference", egret.iops / file.iops, latency);
        }
    }
    println!("The server's CPU time counts what it spins; with egret serve --poll-max-ns 0 it never does.");
    Ok(())
}

fn print_row(depth: usize, name: &str, outcome: &Outcome, cpu: &str) {
    let Outcome { iops, p50_us, p99_us, .. } = outcome;
    println!("{:<7}{name:<37}{iops:>10.0}{p50_us:>10.1}{p99_us:>10.1}{cpu:>20}", format!("QD{depth}"));
}
