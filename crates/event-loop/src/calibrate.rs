//! What it costs this thread to block and be woken: measured when it starts, corrected while it runs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use egret_polling::{BlockCost, Contention, Nanos};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, Pid, sched_getcpu, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use crate::clock;

/// How many wake-ups are measured, if they are quick.
const ROUNDS: usize = 200;
/// How many are measured even if they are slow.
const ENOUGH: usize = 64;
/// How many are measured however long that takes: of fewer, one that was kept from its core would be taken for typical.
const FEWEST: usize = 5;
/// Wake-ups at first that do not count: threads move, and processors notice that they are needed.
const SETTLING: usize = 16;
/// How long the measuring takes, if that is enough.
const BRIEFLY: Nanos = Nanos::from_millis(10);
/// How long it may take on a machine that is busy otherwise, if there are a few by then.
const AT_MOST: Nanos = Nanos::from_millis(50);

/// What a block was found to cost before there was anything to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calibration {
    /// All of it.
    pub cost: BlockCost,
    /// The part of `cost.cpu` that whoever wakes the thread pays; the loop can measure the rest as it goes.
    pub waking: Nanos,
}

/// Measures what it costs a thread like the calling one to sleep and be woken: two play ping-pong, each sleeping while the
/// other runs, for 10 ms, or up to 50 ms where the machine is busy, and five times at least.
///
/// The two are kept on different processors, where there are two: whoever wakes an I/O thread (a guest, a kernel thread)
/// is elsewhere, and to wake an idle processor costs several times what a switch on one's own does. All figures are
/// lower quartiles: other work on the machine makes some rounds dearer, sometimes most, and none cheaper.
///
/// # Errors
///
/// No thread or descriptor to be had.
pub fn calibrate() -> io::Result<Calibration> {
    let here = sched_getcpu();
    // Not on the calling thread, which could not be let go of again: who may run wherever the process may is told of the
    // processors of the moment, and who is bound to these keeps to them when the process gets others.
    let measure = move || {
        let mut only_here = CpuSet::new();
        only_here.set(here);
        // Refused where nothing of it is allowed, which leaves things as they are.
        let _ = sched_setaffinity(None, &only_here);
        play(here)
    };
    join(spawn(measure)?)
}

fn play(here: usize) -> io::Result<Calibration> {
    let ping = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let pong = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let sent = Arc::new(AtomicU64::new(0));
    let partner = {
        let (ping, pong, sent) = (Arc::clone(&ping), Arc::clone(&pong), Arc::clone(&sent));
        spawn(move || {
            // Refused on a machine with one processor.
            let _ = sched_setaffinity(None, &elsewhere(here));
            let mut cpu = Spent::new();
            // A count of two says goodbye.
            while receive(&ping)? == 1 {
                sent.store(clock::now().0, Ordering::Relaxed);
                rustix::io::write(&*pong, &1u64.to_ne_bytes())?;
                cpu.note();
            }
            Ok::<_, io::Error>(cpu.typical())
        })?
    };
    let start = clock::now();
    let (mut latencies, mut wakings, mut cpu) = (Vec::new(), Vec::new(), Spent::new());
    loop {
        let before = clock::now();
        if is_enough(latencies.len(), before - start) {
            break;
        }
        rustix::io::write(&*ping, &1u64.to_ne_bytes())?;
        wakings.push(clock::now() - before);
        receive(&pong)?;
        latencies.push(clock::now() - Nanos(sent.load(Ordering::Relaxed)));
        cpu.note();
    }
    rustix::io::write(&*ping, &2u64.to_ne_bytes())?;
    let theirs = join(partner)?;
    Ok(Calibration::of([cpu.typical(), theirs], typical(latencies), typical(wakings)))
}

fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    std::thread::Builder::new().name("calibrate".into()).stack_size(64 << 10).spawn(run)
}

fn join<T>(thread: JoinHandle<io::Result<T>>) -> io::Result<T> {
    thread.join().map_err(|_| io::Error::other("the calibrating thread panicked"))?
}

/// All processors but one.
fn elsewhere(here: usize) -> CpuSet {
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU).filter(|&cpu| cpu != here).for_each(|cpu| set.set(cpu));
    set
}

impl Calibration {
    /// Of what both sides of a round spent on it.
    fn of([mine, theirs]: [Nanos; 2], latency: Nanos, waking: Nanos) -> Self {
        // Each round is a sleep and a wake-up on either side.
        let cpu = Nanos((mine + theirs).0 / 2);
        Self { cost: BlockCost { cpu, latency }, waking: waking.min(cpu) }
    }
}

/// Whether so many rounds, which took so long, will do.
fn is_enough(rounds: usize, took: Nanos) -> bool {
    rounds >= ROUNDS || rounds >= FEWEST && took >= if rounds < ENOUGH { AT_MOST } else { BRIEFLY }
}

/// What a thread spent in each round.
struct Spent {
    at: Nanos,
    rounds: Vec<Nanos>,
}

impl Spent {
    fn new() -> Self {
        Self { at: thread_cpu(), rounds: Vec::with_capacity(ROUNDS) }
    }

    fn note(&mut self) {
        let now = thread_cpu();
        self.rounds.push(now - self.at);
        self.at = now;
    }

    fn typical(self) -> Nanos {
        typical(self.rounds)
    }
}

/// The lower quartile of what came after the first few, or of all where there are hardly more than those.
fn typical(mut rounds: Vec<Nanos>) -> Nanos {
    let settled = if rounds.len() > 2 * SETTLING { &mut rounds[SETTLING..] } else { &mut rounds[..] };
    settled.sort_unstable();
    settled.get(settled.len() / 4).copied().unwrap_or_default()
}

fn receive(fd: &impl std::os::fd::AsFd) -> io::Result<u64> {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count)?;
    Ok(u64::from_ne_bytes(count))
}

/// CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Nanos {
    clock::nanos(clock_gettime(ClockId::ThreadCPUTime))
}

/// What the kernel keeps about a thread and its core, read now and then. Where it keeps none (`schedstat` is there with
/// CONFIG_SCHEDSTATS or CONFIG_TASK_DELAY_ACCT), none is known of.
pub(crate) struct Strain {
    schedstat: Option<File>,
    status: Option<File>,
    last: Contention,
}

impl Strain {
    /// Opens the records of a thread of this process.
    pub(crate) fn of(thread: Pid) -> io::Result<Self> {
        Self::at(Path::new(&format!("/proc/self/task/{}", thread.as_raw_nonzero())))
    }

    /// Opens those in a directory.
    fn at(task: &Path) -> io::Result<Self> {
        let (schedstat, status) = (open_if_there(&task.join("schedstat"))?, open_if_there(&task.join("status"))?);
        let mut new = Self { schedstat, status, last: Contention::default() };
        new.last = new.read()?;
        Ok(new)
    }

    /// What happened since the last time this was asked.
    pub(crate) fn since_last(&mut self) -> io::Result<Contention> {
        let now = self.read()?;
        Ok(between(std::mem::replace(&mut self.last, now), now))
    }

    fn read(&self) -> io::Result<Contention> {
        let mut buffer = [0; 4096];
        let text = read_at_start(self.schedstat.as_ref(), &mut buffer)?;
        let mut numbers = text.split_ascii_whitespace().filter_map(|word| word.parse().ok());
        let (ran, delayed) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let text = read_at_start(self.status.as_ref(), &mut buffer)?;
        let preempted = text.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
        let preempted = preempted.and_then(|count| count.trim().parse().ok()).unwrap_or(0);
        Ok(Contention { ran: Nanos(ran), delayed: Nanos(delayed), preempted })
    }
}

fn between(before: Contention, now: Contention) -> Contention {
    Contention {
        ran: now.ran - before.ran,
        delayed: now.delayed - before.delayed,
        preempted: now.preempted.saturating_sub(before.preempted),
    }
}

fn open_if_there(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

fn read_at_start<'a>(file: Option<&File>, buffer: &'a mut [u8]) -> io::Result<&'a str> {
    let len = file.map_or(Ok(0), |file| file.read_at(buffer, 0))?;
    std::str::from_utf8(&buffer[..len]).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use rustix::thread::sched_getaffinity;

    use super::*;

    #[test]
    fn a_file_that_is_not_there_is_none_and_one_that_cannot_be_opened_is_an_error() {
        assert!(open_if_there(Path::new("/proc/self/there is none")).unwrap().is_none());
        assert!(open_if_there(Path::new("/proc/self/stat/it is no folder")).is_err());
        assert!(open_if_there(Path::new("/proc/self/stat")).unwrap().is_some());
    }

    #[test]
    fn blocking_costs_something_on_every_machine_and_less_than_to_find_that_out() {
        let before = clock::now();
        let Calibration { cost, waking } = calibrate().unwrap();
        let took = clock::now() - before;
        assert!(cost.cpu > Nanos::ZERO && cost.latency > Nanos::ZERO, "{cost:?}");
        assert!(waking > Nanos::ZERO && waking <= cost.cpu, "{waking:?} of {cost:?}");
        assert!(cost.cpu < took && cost.latency < took, "{cost:?} in {took:?}");
    }

    #[test]
    fn who_calibrates_may_run_all_the_while_where_it_might_before() {
        let allowed = sched_getaffinity(None).unwrap();
        if allowed.count() < 2 {
            return egret_needs::this_test_lacks("two processors");
        }
        let thread = rustix::thread::gettid();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    if sched_getaffinity(Some(thread)).unwrap() != allowed {
                        return false;
                    }
                }
                sched_getaffinity(Some(thread)).unwrap() == allowed
            });
            let calibrated = calibrate();
            done.store(true, Ordering::Relaxed);
            assert!(looks.join().unwrap() && calibrated.is_ok());
        });
    }

    #[test]
    fn both_sides_of_a_round_block_once_and_waking_is_part_of_it() {
        let us = Nanos::from_micros;
        let found = |waking| Calibration { cost: BlockCost { cpu: us(7), latency: us(30) }, waking };
        assert_eq!(Calibration::of([us(10), us(4)], us(30), us(5)), found(us(5)));
        assert_eq!(Calibration::of([us(4), us(10)], us(30), us(8)), found(us(7)));
    }

    #[test]
    fn elsewhere_is_every_processor_but_one() {
        let set = elsewhere(3);
        assert!((0..CpuSet::MAX_CPU).all(|cpu| set.is_set(cpu) == (cpu != 3)));
    }

    #[test]
    fn quick_wake_ups_are_measured_briefly_and_slow_ones_until_there_are_enough_and_a_few_always() {
        let ms = Nanos::from_millis;
        for (rounds, took, expected) in [
            (4, ms(60_000), false),
            (5, ms(50), true),
            (63, ms(49), false),
            (63, ms(50), true),
            (64, ms(9), false),
            (64, ms(10), true),
            (199, ms(9), false),
            (200, ms(0), true),
        ] {
            assert_eq!(is_enough(rounds, took), expected, "{rounds} in {took:?}");
        }
    }

    #[test]
    fn what_is_typical_is_the_lower_quartile_once_things_have_settled() {
        let rounds = |numbers: &mut dyn Iterator<Item = u64>| numbers.map(Nanos).collect::<Vec<_>>();
        assert_eq!(typical(Vec::new()), Nanos::ZERO);
        assert_eq!(typical(rounds(&mut (0..20).rev())), Nanos(5), "hardly any: of all");
        assert_eq!(typical(rounds(&mut (0..32).rev())), Nanos(8));
        // Sixteen that do not count, and seventeen that do.
        let unsettled = std::iter::repeat_n(1, 16);
        assert_eq!(typical(rounds(&mut unsettled.chain((100..117).rev()))), Nanos(104));
    }

    #[test]
    fn rounds_take_all_the_time_that_a_thread_spends_each_its_own() {
        let mut spent = Spent::new();
        let first = spent.at;
        for round in 1..=3u64 {
            let before = spent.at;
            while thread_cpu() == before {}
            spent.note();
            assert_eq!(spent.rounds.len() as u64, round);
        }
        assert!(spent.rounds.iter().all(|round| *round > Nanos::ZERO));
        assert_eq!(spent.rounds.iter().map(|round| round.0).sum::<u64>(), spent.at.0 - first.0);
    }

    #[test]
    fn strain_is_what_the_kernel_has_counted_from_one_reading_to_the_next() {
        let begin = thread_cpu();
        let mut strain = Strain::of(rustix::thread::gettid()).unwrap();
        let opened = thread_cpu();
        if std::fs::read_to_string("/proc/thread-self/schedstat").unwrap().starts_with("0 ") {
            return egret_needs::this_test_lacks("a kernel that counts how long threads run: CONFIG_SCHEDSTATS");
        }
        while thread_cpu() < opened + Nanos::from_millis(5) {}
        let looked = thread_cpu();
        let first = strain.since_last().unwrap();
        let after = thread_cpu();
        assert!(first.ran >= looked - opened && first.ran <= after - begin, "{first:?}");
        let second = strain.since_last().unwrap();
        assert!(second.ran <= thread_cpu() - looked, "{second:?}");
    }

    #[test]
    fn of_what_the_kernel_does_not_keep_nothing_is_known() {
        let mut strain = Strain::at(Path::new("/nowhere")).unwrap();
        assert_eq!(strain.since_last().unwrap(), Contention::default());
    }

    #[test]
    fn contention_is_what_has_been_added() {
        let counted = |ran, delayed, preempted| Contention { ran: Nanos(ran), delayed: Nanos(delayed), preempted };
        assert_eq!(between(counted(100, 20, 3), counted(107, 25, 4)), counted(7, 5, 1));
    }
}
