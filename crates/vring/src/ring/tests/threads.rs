//! Both halves in threads of their own, each asleep whenever it may be.

use std::thread;
use std::time::{Duration, Instant};

use crate::memory::GuestMemory;
use crate::ring::{Chain, Driver, DriverConfig, Queue};
use crate::testing::{DATA, Guest, piece};

/// Far longer than any scheduler keeps a thread waiting: past it, the wake-up is lost.
const LOST: Duration = Duration::from_secs(20);
const CHAINS: u64 = if cfg!(miri) { 200 } else { 30_000 };

/// Sleeps until woken. A wake-up before is not forgotten, as it is not by an eventfd.
fn sleep() {
    let began = Instant::now();
    thread::park_timeout(LOST);
    assert!(began.elapsed() < LOST, "a wake-up was lost");
}

/// Echoes until told to stop by a chain of two bytes.
fn device(mut queue: Queue, driver: thread::Thread) {
    let mut chain = Chain::new();
    loop {
        queue.suppress_kicks();
        let mut stop = false;
        while queue.pop(&mut chain).unwrap() {
            stop |= chain.readable()[0].len() == 2;
            queue.add_used(chain.head(), 0);
        }
        if queue.publish_used() {
            driver.unpark();
        }
        if stop {
            return;
        }
        if queue.arm_kicks() {
            sleep();
        }
    }
}

fn guest(mut driver: Driver, device: &thread::Thread) {
    let (mut added, mut reaped) = (0, 0);
    while reaped < CHAINS {
        driver.suppress_calls();
        // Now one chain, now a few.
        for _ in 0..1 + added % 3 {
            if added < CHAINS {
                let len = if added + 1 == CHAINS { 2 } else { 1 };
                added += u64::from(driver.add(&[piece(DATA, len)], &[], added).is_ok());
            }
        }
        if driver.publish() {
            device.unpark();
        }
        while let Some(used) = driver.reap().unwrap() {
            assert_eq!(used.token, reaped, "used in order");
            reaped += 1;
        }
        if reaped < added && driver.arm_calls() {
            sleep();
        }
    }
}

#[test]
fn no_wake_up_is_lost_between_two_threads() {
    for (event_idx, packed) in [(false, false), (false, true), (true, false), (true, true)] {
        let base = if packed { 0x8000 } else { 65000 };
        let Guest { driver, queue, memory: _memory } =
            Guest::new(DriverConfig { size: 8, packed, event_idx, indirect: None, base });
        thread::scope(|scope| {
            let here = thread::current();
            let device = scope.spawn(move || device(queue, here));
            guest(driver, device.thread());
            device.join().unwrap();
        });
    }
}

#[test]
fn what_crosses_threads_may() {
    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    is_send::<Queue>();
    is_send::<Driver>();
    is_send::<Chain>();
    is_shared::<GuestMemory>();
}
