//! Loads the disk at a vhost-user-blk socket, or LUN 0 at a vhost-user-scsi socket, in fio's words.
//!
//! ```text
//! cargo run --release -p egret-loadgen --example load -- disk.sock rw=randread bs=4096 iodepth=64 runtime=5 polling
//! cargo run --release -p egret-loadgen --example load -- disk.sock rw=randrw verify=1 rate_iops=5000 poisson cpu=0 pid=1234
//! ```

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use egret_loadgen::client::{Client, ClientOptions};
use egret_loadgen::load::{self, Edge, Rate, RateProcess, Spec, Waiting};
use egret_loadgen::machine;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let (socket, words) = words.split_first().ok_or("usage: load SOCKET [KEY=VALUE...] [polling|blocking] [scsi]")?;
    let mut spec = Spec { waiting: Waiting::Blocking, ..Spec::default() };
    let mut server = None;
    let mut scsi = false;
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let rate = || spec.rate_iops.unwrap_or(Rate { iops: 1000.0, process: RateProcess::Fixed });
        match key {
            "rw" => spec.rw = value.parse()?,
            "bs" => spec.bs = value.parse()?,
            "iodepth" => spec.iodepth = value.parse()?,
            "numjobs" => spec.numjobs = value.parse()?,
            "rwmixread" => spec.rwmixread = value.parse()?,
            "rate_iops" => spec.rate_iops = Some(Rate { iops: value.parse()?, ..rate() }),
            "poisson" => spec.rate_iops = Some(Rate { process: RateProcess::Poisson, ..rate() }),
            "randommap" => spec.norandommap = false,
            "verify" => spec.verify = Some(value.parse()?),
            "offset" => spec.offset = value.parse()?,
            "size" => spec.size = Some(value.parse()?),
            "ramp_time" => spec.ramp_time = Duration::from_secs_f64(value.parse()?),
            "runtime" => spec.runtime = Duration::from_secs_f64(value.parse()?),
            "cpu" => spec.cpus_allowed.push(value.parse()?),
            "scsi" => scsi = true,
            "polling" => spec.waiting = Waiting::Polling,
            "blocking" => spec.waiting = Waiting::Blocking,
            "pid" => server = Some(value.parse()?),
            _ => return Err(format!("unknown word '{word}'").into()),
        }
    }
    let (socket, options) = (Path::new(socket), ClientOptions::default());
    let disk = if scsi {
        Client::start_scsi(socket, options, spec.shape())?
    } else {
        Client::connect(socket, options)?.start(spec.shape())?
    };
    println!("{:?}", disk.info);
    let mut jobs = spec.jobs(disk)?;
    let mut cpu = [0, 0];
    let mut look = |edge| {
        cpu[usize::from(edge == Edge::End)] = server.map_or(0, |pid| machine::cpu_time_ns(pid).unwrap_or_default());
    };
    let Some(tally) = load::run(&mut jobs, spec.span(), &mut look)? else { return Ok(()) };
    println!(
        "{:.0} IOPS, {:.1} MB/s; lat p50 {:.2} us, p99 {:.2} us, p99.9 {:.2} us; CPU per I/O: load {:.3} us, server {:.3} us; \
         {} sleeps, {} kicks, {:.2} a turn, never waiting {:.2}",
        tally.iops(),
        tally.bytes as f64 / tally.elapsed.as_secs_f64() / 1e6,
        tally.lat_us(0.5),
        tally.lat_us(0.99),
        tally.lat_us(0.999),
        tally.cpu_us(),
        (cpu[1] - cpu[0]) as f64 / 1e3 / tally.requests() as f64,
        tally.sleeps,
        tally.kicks,
        tally.requests() as f64 / tally.turns as f64,
        tally.never_waiting(),
    );
    if let Some(open) = &tally.open {
        let us = |quantile| open.slat.value_at_quantile(quantile) as f64 / 1e3;
        println!("slat p50 {:.2} us, p99 {:.2} us; {} never begun", us(0.5), us(0.99), open.unstarted);
    }
    if let Some(limit) = tally.limit() {
        println!("the load itself was the limit: {limit}");
    }
    if spec.verify.is_some() {
        let checked: u64 = jobs.iter_mut().map(load::Job::verify).sum::<Result<_, _>>()?;
        println!("{checked} blocks read back as they were written");
    }
    Ok(())
}
