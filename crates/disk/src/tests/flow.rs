//! How requests go through the engines: batches, limits, attaching and detaching, announcements.

use std::os::fd::AsRawFd;
use std::sync::mpsc::TryRecvError;

use egret_event_loop::EventNotifier;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;
use crate::{Action, Failure, FailureLog};

fn null(latency: Nanos, read_zeroes: bool) -> Options {
    Options::new("null0", Driver::Null { size: 1 << 30, latency, read_zeroes })
}

#[test]
fn nothing_happens_before_a_batch_is_submitted() {
    everywhere(1 << 20, |rig| {
        let read = rig.push_read(0, Memory::new(4096, 0));
        assert_eq!(rig.engines.in_flight(), 1);
        assert!(!rig.engines.has_completions());
        assert_eq!(rig.engines.deadline(), None);
        assert_eq!(rig.finish(read).0, Ok(()));
        assert_eq!(rig.engines.in_flight(), 0);
        assert!(!rig.engines.has_completions());
        assert!(!rig.engines.takes_leave(), "its disk is there still");
    });
}

#[test]
fn engines_say_that_something_has_ended_until_it_is_reaped() {
    everywhere(1 << 20, |rig| {
        // Of two the page cache answers none.
        let reads = [0, 4096].map(|at| rig.push_read(at, Memory::new(4096, 0)));
        while rig.engines.in_flight() > 0 && !rig.engines.has_completions() {
            rig.turn();
        }
        assert!(rig.engines.has_completions() && !rig.engines.arm());
        for read in reads {
            assert_eq!(rig.finish(read).0, Ok(()));
        }
        assert!(!rig.engines.has_completions() && rig.engines.arm());
    });
}

#[test]
fn what_ends_is_announced_where_that_was_asked_for_and_not_taken_back() {
    everywhere(1 << 20, |rig| {
        // Linux AIO announces whatever ends, and the loop's own ring needs no descriptor.
        if rig.disk.options().aio == Aio::Native || rig.ring.is_some() {
            return;
        }
        for is_asked in [false, true] {
            assert!(rig.engines.arm());
            if !is_asked {
                rig.engines.suppress();
            }
            for at in [0, 4096] {
                rig.push_read(at, Memory::new(4096, 0));
            }
            rig.engines.submit(clock::now());
            while !rig.engines.has_completions() {
                std::thread::yield_now();
            }
            let patience = rustix::event::Timespec { tv_sec: if is_asked { 60 } else { 0 }, tv_nsec: 0 };
            let mut events = [epoll::Event { flags: epoll::EventFlags::IN, data: epoll::EventData::new_u64(0) }; 4];
            let told = epoll::wait(&rig.epoll, &mut events, Some(&patience)).unwrap();
            assert_eq!(told > 0, is_asked);
            rig.settle();
        }
    });
}

#[test]
fn a_batch_is_counted_once_by_its_size() {
    everywhere(1 << 20, |rig| {
        let begun = clock::now();
        for i in 0..9 {
            rig.push_read(i * 4096, Memory::new(4096, 0));
        }
        rig.settle();
        let stats = rig.engines.counters().read();
        let engine = stats.engines.iter().find(|stats| stats.requests > 0).unwrap();
        assert_eq!((engine.requests, engine.submissions, engine.batches[3]), (9, 1, 1));
        assert_eq!(engine.submitting > Nanos::ZERO, rig.ring.is_none());
        assert!(engine.longest_submission <= engine.submitting && engine.submitting <= clock::now() - begun);
    });
}

#[test]
fn two_thousand_requests_pass_through_a_small_aio_context() {
    let image = Image::of(&pattern(1 << 20, 1));
    let options = Options { aio: Aio::Native, direct: true, ..image.options() };
    let engine_options = EngineOptions { aio_depth: 8, aio_max_batch: 5, ..EngineOptions::default() };
    let mut rig = Rig::with(&options, engine_options);
    let reads: Vec<u64> = (0..2000u64).map(|i| rig.push_read(i % 256 * 4096, Memory::new(4096, 0))).collect();
    rig.settle();
    let content = image.content();
    for (i, token) in reads.into_iter().enumerate() {
        let (result, memory) = rig.finish(token);
        assert_eq!(result, Ok(()));
        assert!(memory.unwrap().data() == &content[i % 256 * 4096..][..4096]);
    }
    let stats = &rig.engines.counters().read().engines;
    let native = stats.iter().find(|stats| stats.engine == "native").unwrap();
    assert_eq!(native.requests, 2000);
    assert!(native.submissions >= 400, "no batch is larger than was allowed: {native:?}");
    assert_eq!(native.batches[3..], [0; crate::BATCH_CLASSES - 3]);
}

#[test]
fn ten_thousand_requests_at_once_overflow_no_ring() {
    everywhere(1 << 20, |rig| {
        for i in 0..10_000u64 {
            rig.push_read(i % 256 * 4096, Memory::new(4096, 0));
        }
        rig.settle();
        assert_eq!(rig.done.len(), 10_000);
        assert!(rig.done.values().all(Result::is_ok));
    });
}

#[test]
fn one_worker_does_the_work_of_many() {
    let image = Image::new(1 << 20);
    let engine_options = EngineOptions { thread_pool_max: 1, ..EngineOptions::default() };
    let mut rig = Rig::with(&image.options(), engine_options);
    for i in 0..100 {
        rig.push_write(i * 4096, Memory::new(4096, 0));
    }
    rig.settle();
    assert!(rig.done.values().all(Result::is_ok));
}

#[test]
fn a_disk_that_is_detached_makes_room_for_another() {
    let images = [Image::of(&pattern(8192, 1)), Image::of(&pattern(8192, 2))];
    let ways = images.iter().map(|image| ways(&image.options()));
    let [first, second]: [Vec<_>; 2] = ways.collect::<Vec<_>>().try_into().unwrap();
    for ((name, first, shared), (_, second, _)) in first.into_iter().zip(second) {
        println!("{name}");
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&first, EngineOptions { ring, ..EngineOptions::default() });
        assert_eq!(rig.read(0, 8192), pattern(8192, 1));
        let slot = rig.slot;
        rig.engines.detach(slot);
        assert_eq!(Arc::strong_count(&rig.disk), 1, "nobody holds on to a disk that is detached");
        rig.disk = Arc::new(Disk::open(&second).unwrap());
        rig.slot = rig.engines.attach(&rig.disk).unwrap();
        assert_eq!(rig.slot, slot);
        assert_eq!(rig.read(0, 8192), pattern(8192, 2));
    }
}

#[test]
fn a_disk_that_is_detached_too_early_stays_until_its_last_request() {
    everywhere(1 << 20, |rig| {
        let read = rig.push_read(0, Memory::new(4096, 0));
        let slot = rig.slot;
        rig.engines.detach(slot);
        assert!(Arc::strong_count(&rig.disk) > 1);
        assert!(!rig.engines.takes_leave());
        assert_eq!(rig.finish(read).0, Ok(()));
        assert_eq!(Arc::strong_count(&rig.disk), 1);
        assert!(rig.engines.takes_leave(), "its engine may be one that the loop watches");
        assert!(!rig.engines.takes_leave());
    });
}

#[test]
fn who_waits_for_a_disk_to_be_let_go_of_is_told_when_its_last_request_has_ended() {
    everywhere(1 << 20, |rig| {
        let read = rig.push_read(0, Memory::new(4096, 0));
        let (held, is_held) = std::sync::mpsc::channel();
        rig.engines.detach_telling(rig.slot, held);
        assert_eq!(is_held.try_recv(), Err(TryRecvError::Empty));
        assert_eq!(rig.finish(read).0, Ok(()));
        assert_eq!(is_held.try_recv(), Err(TryRecvError::Disconnected));
    });
}

#[test]
fn batches_are_as_small_as_they_were_last_asked_to_be() {
    let image = Image::new(1 << 20);
    let mut rig = Rig::new(&Options { aio: Aio::Native, direct: true, ..image.options() });
    for (most, submissions) in [(5, 2), (2, 5), (0, 1), (10, 1)] {
        rig.engines.set_aio_max_batch(most);
        let count =
            |rig: &Rig| rig.engines.counters().read().engines.iter().map(|stats| stats.submissions).sum::<u64>();
        let before = count(&rig);
        for at in 0..10 {
            rig.push_read(at * 4096, Memory::new(4096, 0));
        }
        rig.settle();
        assert_eq!(count(&rig) - before, submissions, "at most {most}");
    }
}

#[test]
fn disks_of_all_engines_share_a_thread() {
    let image = Image::of(&pattern(1 << 20, 4));
    let mut options = image.options();
    options.read_only = true;
    let ways = ways(&options);
    let mut rig = Rig::new(&ways[0].1);
    let mut slots = vec![rig.slot];
    let mut disks = Vec::new();
    for (_, options, _) in &ways[1..] {
        let disk = Arc::new(Disk::open(options).unwrap());
        slots.push(rig.engines.attach(&disk).unwrap());
        disks.push(disk);
    }
    let nothing = Arc::new(Disk::open(&null(Nanos::ZERO, true)).unwrap());
    let nothing = rig.engines.attach(&nothing).unwrap();
    rig.watch();
    let reads: Vec<u64> = (0..100u64)
        .map(|i| {
            rig.slot = slots[i as usize % slots.len()];
            rig.push_read(i * 4096, Memory::new(4096, 0))
        })
        .collect();
    rig.slot = nothing;
    let zeroes = rig.push_read(0, Memory::new(4096, 0));
    rig.settle();
    for (i, token) in reads.into_iter().enumerate() {
        let (result, memory) = rig.finish(token);
        assert!(result == Ok(()) && memory.unwrap().data() == &pattern(1 << 20, 4)[i * 4096..][..4096]);
    }
    assert_eq!(rig.finish(zeroes).1.unwrap().data(), [0; 4096]);
    assert_eq!(rig.engines.counters().read().engines.len(), 4);
}

#[test]
fn engines_that_go_away_wait_for_what_is_in_flight() {
    everywhere(1 << 20, |rig| {
        let disk = Arc::clone(&rig.disk);
        let ring = rig.ring.as_ref().map(|_| shared_ring());
        let mut going = Rig::over(disk, EngineOptions { ring, ..EngineOptions::default() });
        for i in 0..32 {
            going.push_write(i * 4096, Memory::new(4096, 0).filled(&pattern(4096, i)));
        }
        going.engines.submit(clock::now());
        // The engines are dropped before the memory.
        let Rig { engines, memory, .. } = going;
        drop(engines);
        drop(memory);
        assert_eq!(rig.read(4096, 4096), pattern(4096, 1));
        // Whoever waits for their writes does not wait for ever.
        assert_eq!(rig.write(512, &pattern(512, 77)), Ok(()));
    });
}

#[test]
fn a_null_disk_of_no_latency_completes_at_once() {
    let mut rig = Rig::new(&null(Nanos::ZERO, true));
    let read = rig.push_read(0, Memory::new(4096, 0));
    rig.push(Op::WriteZeroes { unmap: true, fua: false }, 4096, 4096, None);
    rig.push(Op::Flush, 0, 0, None);
    assert!(rig.engines.has_completions());
    assert!(!rig.engines.arm());
    assert_eq!(rig.finish(read).1.unwrap().data(), [0; 4096]);
}

#[test]
fn a_null_disk_fills_what_is_read_if_it_is_to_and_never_what_is_written() {
    for read_zeroes in [false, true] {
        for op in [Op::Read, Op::Write { fua: false }] {
            let mut rig = Rig::new(&null(Nanos::ZERO, read_zeroes));
            let token = rig.push(op, 0, 4096, Some(Memory::new(4096, 0).filled(&[7; 4096])));
            let (result, memory) = rig.finish(token);
            let expected = if read_zeroes && op == Op::Read { 0 } else { 7 };
            assert!(result == Ok(()) && memory.unwrap().data() == [expected; 4096], "{read_zeroes} {op:?}");
            // Workers are for long reads of zeroes.
            let engines = rig.engines.counters().read().engines.len();
            assert_eq!(engines, if read_zeroes { 2 } else { 1 });
        }
    }
}

#[test]
fn a_null_disk_completes_when_its_latency_is_over() {
    let mut rig = Rig::new(&null(Nanos(1000), false));
    let slow = Arc::new(Disk::open(&null(Nanos(5000), false)).unwrap());
    let slow = rig.engines.attach(&slow).unwrap();
    let fast = std::mem::replace(&mut rig.slot, slow);
    let late = rig.push_read(0, Memory::new(512, 0));
    rig.slot = fast;
    let early = rig.push_read(0, Memory::new(512, 0));
    assert!(rig.engines.descriptors().is_empty());
    rig.engines.submit(Nanos(100));
    assert_eq!(rig.engines.deadline(), Some(Nanos(1100)));
    assert!(rig.engines.arm());
    let mut done = Vec::new();
    rig.engines.reap(Nanos(1099), &mut |c| done.push(c.completion.token.0));
    assert!(done.is_empty());
    rig.engines.reap(Nanos(1100), &mut |c| done.push(c.completion.token.0));
    assert_eq!(done, [early]);
    assert_eq!(rig.engines.deadline(), Some(Nanos(5100)));
    rig.engines.reap(Nanos(9000), &mut |c| done.push(c.completion.token.0));
    assert_eq!(done, [early, late]);
    assert_eq!((rig.engines.deadline(), rig.engines.in_flight()), (None, 0));
}

#[test]
fn a_disk_notes_failures_in_the_first_log_that_it_was_given() {
    let bell = EventNotifier::new().unwrap();
    let logs = [(); 2].map(|()| Arc::new(FailureLog::new(&bell)));
    let disk = Disk::open(&null(Nanos::ZERO, false)).unwrap();
    let failure = Failure {
        export: "export0".into(),
        op: Op::Flush,
        errno: Errno::IO,
        action: Action::Report,
        has_lost_writes: false,
    };
    disk.note_failure(failure.clone());
    logs.iter().for_each(|log| disk.log_failures(Arc::clone(log)));
    disk.note_failure(failure.clone());
    assert_eq!(logs.map(|log| log.take()), [vec![failure], vec![]]);
}

#[test]
fn a_request_that_failed_comes_back_as_it_was_asked_for_and_one_that_makes_no_sense_does_not() {
    const MIB: u64 = 1 << 20;
    let file = memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, MIB).unwrap();
    fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    let filename = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    let options =
        Options { detect_zeroes: crate::DetectZeroes::On, ..Options::new("sealed", Driver::File { filename }) };
    for (aio, no_flush) in [Aio::Threads, Aio::IoUring].into_iter().flat_map(|aio| [(aio, false), (aio, true)]) {
        let mut rig = Rig::new(&Options { aio, no_flush, ..options.clone() });
        let zeroes = Op::WriteZeroes { unmap: false, fua: true };
        let asked = [(Op::Write { fua: true }, 7), (Op::Write { fua: true }, 0), (Op::Write { fua: false }, 7)];
        for (op, byte) in asked {
            let token = rig.push(op, 4096, 4096, Some(Memory::new(4096, 0).filled(&[byte; 4096])));
            assert_eq!(rig.finish(token).0, Err(Errno::PERM));
        }
        assert_eq!(rig.run(zeroes, 4096, 4096), Err(Errno::PERM));
        assert_eq!(rig.run(zeroes, 2 * MIB, 4096), Err(Errno::INVAL));
        let failed = rig.failed.iter().map(|failed| (failed.op, failed.offset, failed.len, failed.errno));
        let all = asked.map(|(op, _)| op).into_iter().chain([zeroes]);
        assert!(failed.eq(all.map(|op| (op, 4096, 4096, Errno::PERM))), "{aio} {no_flush}: {:?}", rig.failed);
    }
}
