//! Cores and clocks: where a load and its server run, what time they spend, and one line about the machine.

use std::fs;
use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

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

    /// A line that says which they are, or that there are none.
    pub fn describe(&self) -> String {
        match self.pair {
            Some((client, server)) => format!("cores: client on {client}, server on {server}"),
            None => "missing: a second core; client and server share one, unpinned".to_owned(),
        }
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

/// Processors that this process may use, in order.
pub fn allowed() -> impl Iterator<Item = usize> {
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
