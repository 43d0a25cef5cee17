//! Cores and clocks: what this machine has, and one line about it.

use std::fs;
use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

/// Year, month and day of a day counted from 1970-01-01: years begin in March, so that leap days end them.
pub fn civil(day: u64) -> (u64, u64, u64) {
    let day = day + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let month = if march < 10 { march + 3 } else { march - 9 };
    (era * 400 + year + u64::from(month <= 2), month, of_year - (153 * march + 2) / 5 + 1)
}

/// One core for the client and one for the server, where there are two.
#[derive(Clone, Copy, Debug)]
pub struct Cores {
    pair: Option<(usize, usize)>,
}

impl Cores {
    /// The first two cores that this process may use; none where there is only one.
    pub fn of_this_machine() -> Self {
        let mut cores = allowed();
        Self { pair: cores.next().zip(cores.next()) }
    }

    /// No core for anybody: client and server run where the scheduler puts them.
    pub const fn unpinned() -> Self {
        Self { pair: None }
    }

    /// The client's core and the server's.
    pub fn pair(&self) -> Option<(usize, usize)> {
        self.pair
    }

    /// Does `work` on the client's core.
    pub fn on_the_clients<T>(&self, work: impl FnOnce() -> T) -> T {
        on_cores(self.pair.map(|(client, _)| client).as_slice(), work)
    }

    /// Does `work`, such as starting a process, on the server's core.
    pub fn on_the_servers<T>(&self, work: impl FnOnce() -> T) -> T {
        on_cores(self.pair.map(|(_, server)| server).as_slice(), work)
    }
}

/// Who runs where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The load's cores, dealt out to its jobs; empty leaves them to the scheduler.
    pub load: Vec<usize>,
    /// The server's, or the virtual machine's; empty leaves it to the scheduler.
    pub server: Vec<usize>,
}

impl Placement {
    /// Deals `groups` of processors that share a core out: the load gets a core for each of its `jobs`, but at most half of
    /// all, and one processor of each; the server gets the rest. Where there is only one core they share it, unpinned
    /// unless it has several processors.
    pub fn of(groups: &[Vec<usize>], jobs: usize) -> Self {
        match groups {
            [] => Self::default(),
            [only] => match only.split_first() {
                Some((first, rest)) if !rest.is_empty() => Self { load: vec![*first], server: rest.to_vec() },
                _ => Self::default(),
            },
            groups => {
                let (load, server) = groups.split_at(jobs.clamp(1, groups.len() / 2));
                Self { load: load.iter().map(|group| group[0]).collect(), server: server.concat() }
            }
        }
    }

    /// Does `work`, such as starting a process, on the server's cores.
    pub fn on_the_servers<T>(&self, work: impl FnOnce() -> T) -> T {
        on_cores(&self.server, work)
    }

    /// Does `work` on the load's cores.
    pub fn on_the_loads<T>(&self, work: impl FnOnce() -> T) -> T {
        on_cores(&self.load, work)
    }
}

/// Processors that this process may use, in groups of those that share a core.
pub fn cores() -> Vec<Vec<usize>> {
    let usable: Vec<usize> = allowed().collect();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for cpu in &usable {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = fs::read_to_string(path).map(|list| parse_list(list.trim())).unwrap_or_default();
        match groups.iter_mut().find(|group| group.iter().any(|member| siblings.contains(member))) {
            Some(group) => group.push(*cpu),
            None => groups.push(vec![*cpu]),
        }
    }
    groups
}

/// Numbers as the kernel lists them: `0-3,8`.
pub fn parse_list(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

fn allowed() -> impl Iterator<Item = usize> {
    let allowed = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(move |core| allowed.is_set(*core))
}

/// Does `work` on some cores, with the thread back where it may be afterwards; anywhere if there are none.
///
/// Where this process may use none of them it stays where it is.
pub fn on_cores<T>(cores: &[usize], work: impl FnOnce() -> T) -> T {
    if cores.is_empty() {
        return work();
    }
    let before = sched_getaffinity(None);
    let mut only = CpuSet::new();
    cores.iter().for_each(|core| only.set(*core));
    let moved = sched_setaffinity(None, &only).is_ok();
    let done = work();
    if let (true, Ok(before)) = (moved, before) {
        // What was allowed before is allowed now.
        let _ = sched_setaffinity(None, &before);
    }
    done
}

/// User and system time of this thread, in nanoseconds.
pub fn thread_cpu_time_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// User and system time of every thread that process `pid` has or had, in nanoseconds.
///
/// # Errors
/// There is no such process.
#[allow(unsafe_code)]
pub fn cpu_time_ns(pid: u32) -> io::Result<u64> {
    let mut clock = 0;
    // SAFETY: it only writes `clock`.
    let error = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it only writes `time`.
    if unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Time that the threads of process `pid` that are called `name` have been on a core, in nanoseconds.
///
/// A thread that is running is counted up to its last scheduler tick, a few milliseconds back at worst.
///
/// # Errors
/// There is no such process or thread, or the kernel does not keep count (`CONFIG_SCHED_INFO`).
pub fn named_threads_cpu_time_ns(pid: u32, name: &str) -> io::Result<u64> {
    let mut total = None;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        // A thread may end between the listing and the look; one that did is not the one that is asked for.
        if fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
            let schedstat = fs::read_to_string(task.join("schedstat"))?;
            let ran = schedstat.split_ascii_whitespace().next().and_then(|ran| ran.parse::<u64>().ok());
            let ran = ran.ok_or_else(|| io::Error::other(format!("{}/schedstat: no time", task.display())))?;
            total = Some(total.unwrap_or(0) + ran);
        }
    }
    total.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("process {pid} has no thread '{name}'")))
}

/// Lets this process, and those that it starts, have as many descriptors as it may: a hundred connections take many.
pub fn allow_many_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // Best effort: who runs out of them says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// The machine in one line.
pub fn fingerprint() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let (kernel, load) = (read("/proc/sys/kernel/osrelease"), read("/proc/loadavg"));
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let load = load.split(' ').next().unwrap_or_default();
    format!("machine: {cores} x {}, Linux {}, load {load}", model.unwrap_or("unknown CPU"), kernel.trim())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn the_load_has_a_core_for_each_job_and_half_of_all_at_most() {
        let place = |groups: &[&[usize]], jobs| {
            let groups: Vec<Vec<usize>> = groups.iter().map(|group| group.to_vec()).collect();
            let Placement { load, server } = Placement::of(&groups, jobs);
            (load, server)
        };
        assert_eq!(place(&[&[0], &[1]], 4), (vec![0], vec![1]));
        assert_eq!(place(&[&[0, 4], &[1, 5], &[2, 6], &[3, 7]], 1), (vec![0], vec![1, 5, 2, 6, 3, 7]));
        assert_eq!(place(&[&[0, 4], &[1, 5], &[2, 6], &[3, 7]], 9), (vec![0, 1], vec![2, 6, 3, 7]));
        assert_eq!(place(&[&[0, 1]], 2), (vec![0], vec![1]));
        assert_eq!(place(&[&[0]], 1), (vec![], vec![]));
    }

    #[test]
    fn this_machines_processors_are_each_in_one_core() {
        let mut all = cores().concat();
        all.sort_unstable();
        assert_eq!(all, allowed().collect::<Vec<_>>());
    }

    #[test]
    fn the_time_of_a_thread_is_found_by_its_name_and_that_of_others_is_not_in_it() {
        static DONE: AtomicBool = AtomicBool::new(false);
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let burner = named("burner")
            .spawn(|| {
                while !DONE.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
            .unwrap();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let sleeper = named("sleeper").spawn(move || stopped.recv()).unwrap();
        let time_of = |name| named_threads_cpu_time_ns(std::process::id(), name);
        // A thread takes its name itself, when it comes to run.
        while time_of("burner").unwrap_or(0) < 20_000_000 || time_of("sleeper").is_err() {
            std::thread::yield_now();
        }
        assert!(time_of("sleeper").unwrap() < 20_000_000);
        assert_eq!(time_of("nobody").unwrap_err().kind(), io::ErrorKind::NotFound);
        DONE.store(true, Ordering::Relaxed);
        drop(stop);
        burner.join().unwrap();
        sleeper.join().unwrap().unwrap_err();
    }
}
