//! The workers and their loop, under the interleavings of a batch that comes, of workers that start, wait, have waited long
//! enough and leave, and of the loop that sleeps.
//!
//! The pool is the real one, and so are the turns of its disks and the list of what is done. What a worker runs is a count
//! that loom watches: a job that two of them have at once ends the model. A job that is left behind, and a loop that nobody
//! wakes, are deadlocks, which loom finds by itself.

#[path = "../src/engine/threads/done.rs"]
#[allow(dead_code, unreachable_pub)]
mod done;
#[path = "../src/engine/turns.rs"]
#[allow(dead_code, unreachable_pub)]
mod turns;
#[path = "../src/engine/threads/workers.rs"]
#[allow(dead_code, unreachable_pub)]
mod workers;

use std::sync::Arc;
use std::time::Duration;

use done::{DoneList, JobPtr, Node};
use engine::WorkerLimits;
use rustix::io::Errno;
use workers::Workers;

/// What they are made of here.
mod sync {
    use std::os::fd::{AsRawFd, RawFd};
    use std::sync::{LockResult, PoisonError};
    use std::time::Duration;

    pub(crate) use loom::sync::atomic::{AtomicPtr, Ordering, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    /// One whose changes have an order. The language has one for them, but loom has none where nothing else tells it, and
    /// would show a flag that was cleared before it was set as clear.
    pub(crate) struct AtomicBool {
        flag: loom::sync::atomic::AtomicBool,
        order: Mutex<()>,
    }

    impl AtomicBool {
        pub(crate) fn new(value: bool) -> Self {
            Self { flag: loom::sync::atomic::AtomicBool::new(value), order: Mutex::new(()) }
        }

        pub(crate) fn load(&self, order: Ordering) -> bool {
            self.flag.load(order)
        }

        pub(crate) fn store(&self, value: bool, order: Ordering) {
            let _order = self.order.lock();
            self.flag.store(value, order);
        }

        pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
            let _order = self.order.lock();
            self.flag.swap(value, order)
        }
    }

    /// One whose waits are over for good when the model says so.
    pub(crate) struct Condvar {
        condvar: loom::sync::Condvar,
        time_is_up: AtomicBool,
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self { condvar: loom::sync::Condvar::new(), time_is_up: AtomicBool::new(false) }
        }

        /// Whoever waits has waited long enough; so has who is notified later, but has not looked by then.
        pub(crate) fn time_is_up(&self) {
            self.time_is_up.store(true, Ordering::SeqCst);
            self.condvar.notify_all();
        }

        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
            self.condvar.wait(guard)
        }

        pub(crate) fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _: Duration,
        ) -> LockResult<(MutexGuard<'a, T>, Waited)> {
            let guard = self.condvar.wait(guard).unwrap_or_else(PoisonError::into_inner);
            Ok((guard, Waited(self.time_is_up.load(Ordering::SeqCst))))
        }

        pub(crate) fn notify_one(&self) {
            self.condvar.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.condvar.notify_all();
        }
    }

    pub(crate) struct Waited(bool);

    impl Waited {
        pub(crate) fn timed_out(&self) -> bool {
            self.0
        }
    }

    /// An event that a loop sleeps on.
    pub(crate) struct EventNotifier(Mutex<bool>, loom::sync::Condvar);

    impl EventNotifier {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(false), loom::sync::Condvar::new())
        }

        pub(crate) fn set(&self) {
            *self.0.lock().expect("no panic") = true;
            self.1.notify_one();
        }

        /// Waits for the next edge.
        pub(crate) fn wait(&self) {
            let mut set = self.0.lock().expect("no panic");
            while !std::mem::take(&mut *set) {
                set = self.1.wait(set).expect("no panic");
            }
        }
    }

    impl AsRawFd for EventNotifier {
        fn as_raw_fd(&self) -> RawFd {
            unreachable!("the model has no descriptors")
        }
    }

    /// Threads, of which as many can be had as the model says.
    pub(crate) mod thread {
        use std::cell::Cell;
        use std::io;

        pub(crate) use loom::thread::yield_now;

        thread_local! {
            /// How many more can be started: loom's threads are all one thread's.
            pub(crate) static LEFT: Cell<u32> = const { Cell::new(0) };
        }

        pub(crate) struct Builder(loom::thread::Builder);

        impl Builder {
            pub(crate) fn new() -> Self {
                Self(loom::thread::Builder::new())
            }

            pub(crate) fn name(self, name: String) -> Self {
                Self(self.0.name(name))
            }

            pub(crate) fn spawn(self, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
                match LEFT.get() {
                    0 => Err(io::ErrorKind::WouldBlock.into()),
                    left => {
                        LEFT.set(left - 1);
                        self.0.spawn(run).map(drop)
                    }
                }
            }
        }
    }
}

mod engine {
    pub(crate) use crate::turns;

    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(crate) struct WorkerLimits {
        pub(crate) min: u32,
        pub(crate) max: u32,
        pub(crate) idle: std::time::Duration,
    }
}

mod disk {
    pub(crate) struct Disk;
}

mod job {
    use loom::cell::UnsafeCell;

    /// So many parts, of which so many were run.
    pub(crate) struct Job {
        pub(crate) parts: u64,
        pub(crate) ran: UnsafeCell<u64>,
    }
}

mod blocking {
    use std::task::Poll;

    use rustix::io::Errno;

    use crate::disk::Disk;
    use crate::job::Job;

    pub(crate) const PART: u64 = 2;
    pub(crate) const SHARED_PART: u64 = 1;

    #[derive(Default)]
    pub(crate) struct Scratch(());

    /// Runs a part, which is 2 long, or 1 where disks share the workers.
    pub(crate) fn run(_: &Disk, job: &mut Job, done: &mut u64, part: u64, _: &mut Scratch) -> Poll<Result<(), Errno>> {
        // SAFETY: this is what the model is about.
        job.ran.with_mut(|ran| unsafe { *ran += part });
        *done += part;
        if *done < job.parts { Poll::Pending } else { Poll::Ready(Ok(())) }
    }
}

/// A loop with its workers and its disks.
struct Pool {
    workers: Arc<Workers>,
    disks: Vec<(Arc<disk::Disk>, usize)>,
    /// Jobs that it waits for.
    in_flight: usize,
    /// What came of the others.
    results: Vec<Result<(), Errno>>,
}

impl Pool {
    /// At most `max` workers for so many disks; of all that are started `threads` can be had.
    fn new(min: u32, max: u32, disks: usize, threads: u32) -> Self {
        sync::thread::LEFT.set(threads);
        let limits = WorkerLimits { min, max, idle: Duration::ZERO };
        let workers = Arc::new(Workers::new(limits, DoneList::new(sync::EventNotifier::new())));
        workers.lock().jobs.set_beside_others(disks > 1);
        let open = |_| {
            let disk = Arc::new(disk::Disk);
            let line = workers.lock().jobs.open(&disk);
            (disk, line)
        };
        let disks = (0..disks).map(open).collect();
        Self { workers, disks, in_flight: 0, results: Vec::new() }
    }

    /// Submits a job of so many parts for each of these disks.
    fn submit(&mut self, jobs: &[(usize, u64)]) {
        let mut queue = self.workers.lock();
        for &(disk, parts) in jobs {
            let (disk, line) = &self.disks[disk];
            let job = Box::new(job::Job { parts, ran: loom::cell::UnsafeCell::new(0) });
            queue.jobs.put(*line, JobPtr::new(Box::new(Node::new(job, Arc::as_ptr(disk)))));
        }
        self.workers.call(queue);
        self.in_flight += jobs.len();
    }

    /// Takes what is back. Each was run once and in full, or not at all.
    fn take(&mut self) {
        let Self { workers, in_flight, results, .. } = self;
        workers.done.take(|node| {
            let job = node.job.unwrap();
            // SAFETY: this is what the model is about.
            let ran = job.ran.with(|ran| unsafe { *ran });
            assert_eq!((ran, node.done), if node.result.is_ok() { (job.parts, job.parts) } else { (0, 0) });
            *in_flight -= 1;
            results.push(node.result);
        });
    }

    /// Sleeps as a loop does until all is back.
    fn await_all(&mut self) {
        while self.in_flight > 0 {
            if self.workers.done.arm() {
                self.workers.done.event.wait();
            }
            self.workers.done.disarm();
            self.take();
        }
    }

    /// Ends the workers, with what they were given. Returns what came of all jobs.
    fn end(mut self) -> Vec<Result<(), Errno>> {
        self.workers.end();
        let queue = self.workers.lock();
        assert_eq!((queue.workers, queue.jobs.taken()), (0, 0));
        drop(queue);
        self.take();
        assert_eq!(self.in_flight, 0, "what was given to the workers is done when they have left");
        self.results
    }
}

fn model(preemptions: usize, act: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(act);
}

#[test]
fn each_job_comes_back_once_and_the_loop_is_woken_for_it() {
    model(2, || {
        let mut pool = Pool::new(0, 2, 1, 2);
        pool.submit(&[(0, 2), (0, 2)]);
        pool.await_all();
        pool.submit(&[(0, 2)]);
        pool.await_all();
        assert_eq!(pool.end(), [Ok(()); 3]);
    });
}

#[test]
fn a_worker_that_waits_is_woken_each_time() {
    model(3, || {
        let mut pool = Pool::new(0, 1, 1, 1);
        for _ in 0..3 {
            pool.submit(&[(0, 2)]);
            pool.await_all();
        }
        assert_eq!(pool.end(), [Ok(()); 3]);
    });
}

#[test]
fn batches_that_come_before_a_worker_has_looked_leave_none_asleep_afterwards() {
    model(1, || {
        let mut pool = Pool::new(0, 2, 1, 2);
        for batches in [1, 2, 1] {
            (0..batches).for_each(|_| pool.submit(&[(0, 2)]));
            pool.await_all();
        }
        assert_eq!(pool.end(), [Ok(()); 4]);
    });
}

#[test]
fn a_worker_that_is_on_its_way_is_not_called_for_once_more() {
    model(3, || {
        let mut pool = Pool::new(0, 2, 1, 2);
        pool.submit(&[(0, 2)]);
        pool.workers.call(pool.workers.lock());
        pool.await_all();
        assert_eq!(sync::thread::LEFT.get(), 1, "one of the two is still to be had");
        assert_eq!(pool.end(), [Ok(())]);
    });
}

#[test]
fn a_worker_that_has_waited_long_enough_stays_for_a_job_that_has_come_by_then() {
    model(3, || {
        // No other can be started.
        let mut pool = Pool::new(0, 1, 1, 1);
        pool.submit(&[(0, 2)]);
        pool.await_all();
        pool.submit(&[(0, 2)]);
        pool.workers.work.time_is_up();
        pool.await_all();
        assert_eq!(pool.end(), [Ok(()); 2]);
    });
}

/// One job and then another, while a worker that waits may find that it has waited long enough.
fn two_jobs_while_time_runs_out(bound: usize, make: fn() -> Pool) {
    model(bound, move || {
        let mut pool = make();
        pool.submit(&[(0, 2)]);
        let workers = Arc::clone(&pool.workers);
        let clock = loom::thread::spawn(move || workers.work.time_is_up());
        pool.await_all();
        pool.submit(&[(0, 2)]);
        pool.await_all();
        clock.join().expect("no panic");
        assert_eq!(pool.end(), [Ok(()); 2]);
    });
}

#[test]
fn a_worker_that_has_waited_long_enough_takes_no_job_along() {
    two_jobs_while_time_runs_out(3, || Pool::new(0, 1, 1, 2));
}

#[test]
fn as_many_workers_as_there_are_to_be_stay_however_long_they_have_waited() {
    // No other can be started.
    two_jobs_while_time_runs_out(2, || Pool::new(1, 1, 1, 1));
}

#[test]
fn beside_a_worker_that_stays_others_come_and_go() {
    two_jobs_while_time_runs_out(2, || Pool::new(1, 2, 1, 2));
}

#[test]
fn of_workers_that_have_waited_long_enough_together_as_many_stay_as_are_to() {
    model(2, || {
        // No third can be started.
        let mut pool = Pool::new(1, 2, 1, 2);
        pool.submit(&[(0, 2), (0, 2)]);
        pool.await_all();
        pool.workers.work.time_is_up();
        pool.submit(&[(0, 2)]);
        pool.await_all();
        assert_eq!(pool.end(), [Ok(()); 3]);
    });
}

#[test]
fn what_is_left_of_a_job_is_for_any_worker_and_another_disk_is_first() {
    model(2, || {
        let mut pool = Pool::new(0, 2, 2, 2);
        pool.submit(&[(0, 2), (1, 1)]);
        pool.await_all();
        assert_eq!(pool.end(), [Ok(()); 2]);
    });
}

#[test]
fn workers_that_are_too_many_leave_and_no_job_with_them() {
    model(2, || {
        let mut pool = Pool::new(0, 2, 1, 3);
        pool.submit(&[(0, 2), (0, 2)]);
        pool.workers.set_limits(WorkerLimits { min: 0, max: 1, idle: Duration::ZERO });
        pool.submit(&[(0, 2)]);
        pool.await_all();
        assert_eq!(pool.end(), [Ok(()); 3]);
    });
}

#[test]
fn workers_that_are_ended_do_what_they_were_given_first() {
    model(3, || {
        let mut pool = Pool::new(0, 2, 1, 2);
        pool.submit(&[(0, 2), (0, 4)]);
        assert_eq!(pool.end(), [Ok(()); 2]);
    });
}

#[test]
fn a_worker_that_cannot_be_started_costs_nothing_where_there_is_another_and_jobs_fail_where_there_is_none() {
    for (threads, result) in [(1, Ok(())), (0, Err(Errno::AGAIN))] {
        model(2, move || {
            let mut pool = Pool::new(0, 2, 1, threads);
            pool.submit(&[(0, 2), (0, 2)]);
            pool.await_all();
            pool.submit(&[(0, 2)]);
            pool.await_all();
            assert_eq!(pool.end(), [result; 3]);
        });
    }
}
