//! In an open loop a stall is charged to every request that was due meanwhile.

mod support;

use std::time::{Duration, Instant};

use egret_loadgen::client::{Client, ClientOptions};
use egret_loadgen::load::{Edge, Job, Rate, RateProcess, Span, Spec, Waiting};
use support::{Device, Puppet, PuppetOptions, job};

const STALL: Duration = Duration::from_millis(100);

/// Loads a server that stalls once; how many requests took over a tenth of the stall or never even began, and how many
/// there were by that which were due.
fn slow_requests(waiting: Waiting, rate: Rate) -> (u64, f64) {
    let puppet = Puppet::with(PuppetOptions::default(), |mut device| {
        let mut stalled = false;
        let begin = Instant::now();
        while device.serve_one(0) {
            if !stalled && begin.elapsed() > STALL {
                stalled = true;
                std::thread::sleep(STALL);
            }
        }
    });
    let spec = Spec { iodepth: 2, waiting, rate_iops: Some(rate), ..Spec::default() };
    let mut job = job(&puppet, &spec);
    let mut tally = job.tally();
    job.run(Span { ramp: Duration::ZERO, length: 4 * STALL }, &mut tally, &mut |_| ()).unwrap();
    let slow = tally.lat.count_between(STALL.as_nanos() as u64 / 10, u64::MAX / 2);
    let unstarted = tally.open.as_ref().map_or(0, |open| open.unstarted);
    let due = rate.iops * tally.elapsed.as_secs_f64();
    (slow + unstarted, (tally.requests() + unstarted) as f64 / due)
}

#[test]
fn requests_that_were_due_in_a_stall_all_count_as_slow() {
    for process in [RateProcess::Fixed, RateProcess::Poisson] {
        for waiting in [Waiting::Polling, Waiting::Blocking] {
            let (slow, share) = slow_requests(waiting, Rate { iops: 2000.0, process });
            // 90 ms of the stall at two a millisecond are 180, give or take; a closed loop would see two.
            assert!(slow > 100, "{process:?}, {waiting:?}: {slow}");
            assert!((0.6..1.5).contains(&share), "{process:?}, {waiting:?}: {share} of what was due");
        }
    }
}

#[test]
fn what_was_due_on_a_disk_that_stalls_is_not_given_to_another() {
    for process in [RateProcess::Fixed, RateProcess::Poisson] {
        for waiting in [Waiting::Polling, Waiting::Blocking] {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let stalls = Puppet::with(PuppetOptions::default(), move |device| {
                let _ = ended.recv();
                device.serve();
            });
            let serves = Puppet::with(PuppetOptions::default(), Device::serve);
            let rate_iops = Some(Rate { iops: 4000.0, process });
            let spec = Spec { iodepth: 2, waiting, rate_iops, ..Spec::default() };
            let connect = |puppet: &Puppet| {
                let client = Client::connect(&puppet.socket, ClientOptions::default()).unwrap();
                let mut disk = client.start(spec.shape()).unwrap();
                (disk.info, disk.queues.remove(0))
            };
            let mut job = Job::new(&spec, 0, vec![connect(&stalls), connect(&serves)]).unwrap();
            let mut tally = job.tally();
            let span = Span { ramp: Duration::ZERO, length: STALL };
            let mut end = Some(end);
            job.run(span, &mut tally, &mut |edge| drop(end.take_if(|_| edge == Edge::End))).unwrap();
            // Half of what was due was due there, and two of those found room.
            let unstarted = tally.open.as_ref().unwrap().unstarted as f64;
            let due = 4000.0 * tally.elapsed.as_secs_f64();
            assert!(unstarted > 0.4 * due, "{process:?}, {waiting:?}: {unstarted} of {due} never began");
        }
    }
}

#[test]
fn what_is_in_flight_at_the_end_does_not_take_as_long_as_the_callback() {
    let (go, going) = std::sync::mpsc::channel::<()>();
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let puppet = Puppet::with(PuppetOptions::default(), move |mut device| {
        let _ = going.recv();
        (0..4).for_each(|_| assert!(device.serve_one(0)));
        drop(done);
        device.serve();
    });
    let rate_iops = Some(Rate { iops: 1000.0, process: RateProcess::Fixed });
    let spec = Spec { iodepth: 4, waiting: Waiting::Blocking, rate_iops, ..Spec::default() };
    let mut job = job(&puppet, &spec);
    let mut tally = job.tally();
    let (begin, mut go, mut until_end) = (Instant::now(), Some(go), Duration::MAX);
    let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(20) };
    job.run(span, &mut tally, &mut |edge| {
        if edge == Edge::End {
            until_end = begin.elapsed();
            drop(go.take());
            let _ = wait.recv();
            // Longer than all that has been measured, so that it shows.
            while begin.elapsed() < 3 * until_end {
                std::thread::sleep(span.length);
            }
        }
    })
    .unwrap();
    let longest = Duration::from_nanos(tally.lat.max());
    assert_eq!(tally.lat.len(), 4);
    // A histogram is right to a thousandth.
    assert!(longest > Duration::ZERO && longest < until_end.mul_f64(1.01), "{longest:?} of {until_end:?}");
}

#[test]
fn a_server_that_is_too_slow_for_a_rate_is_late_and_not_the_load() {
    let puppet = Puppet::with(PuppetOptions::default(), |mut device| {
        while device.serve_one(0) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let rate_iops = Some(Rate { iops: 5000.0, process: RateProcess::Fixed });
    let spec = Spec { iodepth: 1, waiting: Waiting::Blocking, rate_iops, ..Spec::default() };
    let mut job = job(&puppet, &spec);
    // Where the server's thread did not run meanwhile nothing is shown.
    let mut ran = (0..30).map(|_| {
        let mut tally = job.tally();
        job.run(Span { ramp: STALL, length: STALL }, &mut tally, &mut |_| ()).unwrap();
        tally
    });
    let tally = ran.find(|tally| tally.requests() > 0).expect("not all that was done was due in the warm-up");
    let open = tally.open.as_ref().unwrap();
    assert!(open.unstarted > tally.requests(), "{} of {}", tally.requests(), open.unstarted);
    assert_eq!((open.unstarted, tally.limit()), (open.unstarted_lat.len(), None));
    assert_eq!(tally.all_lat().len(), tally.requests() + open.unstarted);
}

#[test]
fn a_closed_loop_makes_as_many_requests_as_it_has_room_for() {
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let puppet = Puppet::with(PuppetOptions::default(), move |mut device| {
        let _ = wait.recv();
        assert_eq!(device.queue.next_available(), 0);
        let mut taken = 0;
        while device.serve_one(0) {
            taken += 1;
        }
        assert!(taken >= 16, "{taken}");
    });
    let spec = Spec { iodepth: 16, ..Spec::default() };
    let mut job = job(&puppet, &spec);
    drop(done);
    let mut tally = job.tally();
    let mut edges = Vec::new();
    let span = Span { ramp: Duration::from_millis(1), length: Duration::from_millis(5) };
    job.run(span, &mut tally, &mut |edge| edges.push(edge)).unwrap();
    assert_eq!(edges, [Edge::Begin, Edge::End]);
    assert!(tally.elapsed >= Duration::from_millis(5) && tally.cpu_ns > 0);
}

#[test]
fn what_was_in_flight_when_measuring_began_counts_and_has_no_latency() {
    let puppet = Puppet::with(PuppetOptions::default(), Device::serve);
    let spec = Spec { iodepth: 4, waiting: Waiting::Blocking, ..Spec::default() };
    let mut job = job(&puppet, &spec);
    let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(5) };
    loop {
        let mut tally = job.tally();
        job.run(span, &mut tally, &mut |_| ()).unwrap();
        // As long as the callback takes at the edge nobody looks, and the first four may have been done since then.
        assert_eq!(tally.lat.len(), tally.requests().saturating_sub(4));
        if tally.requests() > 4 {
            break;
        }
    }
}
