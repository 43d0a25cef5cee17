//! CPU time by who spends it, over the measured interval.
//!
//! A [`CpuMeter`] looks at both edges of the measured interval: at every thread of the processes that it follows, at every
//! kernel thread, and at `/proc/stat` for the host as a whole. All files are opened
//! beforehand, so that an edge costs one read per thread and disturbs little.
//!
//! A thread's total is exact to the nanosecond (`schedstat`). Its division into user and system time, and the host's busy
//! time and interrupts, are counted in ticks, mostly of 10 ms. An interrupt during a thread's run counts for both, unless
//! the kernel accounts for interrupts separately (`CONFIG_IRQ_TIME_ACCOUNTING`).
//!
//! A thread that ends takes its figures with it. Its time stays in its process's, which is counted in ticks: what that has
//! more than its threads is theirs that have ended. That of processes that ended is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Instant;

use egret_loadgen::load::Edge;

use crate::io_submit::Watch;
use crate::machine;
use crate::results::Ledger;

/// The part of the ledger that a thread's time belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// An I/O thread of the server.
    IoThread,
    /// Any other thread of the server: workers, main loop.
    ServerOther,
    /// A server's process whose threads cannot be told apart.
    Server,
    /// A virtual processor, or another thread of a virtual machine.
    Guest,
    /// What serves the disk to the server: an NBD server, or Ceph's OSDs.
    Backend,
    /// The load.
    Load,
    /// A thread of the kernel.
    Kernel,
}

/// CPU time spent, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Spent {
    total: u64,
    system: u64,
}

/// A thread's role by its ID and name.
type Judge = Box<dyn Fn(u32, &str) -> Role + Send>;

/// Whom the time of threads belongs to that have ended: they are mostly of a pool, and QEMU's are called so.
const ENDED: (u32, &str) = (0, "worker");

/// A process that is followed.
struct Process {
    pid: u32,
    role: Judge,
    stat: Option<File>,
    /// Its CPU time at both edges, in ticks, with that of threads that have ended.
    ticks: [u64; 2],
}

/// One thread, with its files open.
struct Thread {
    /// Whose it is; 0 for the kernel's.
    process: u32,
    role: Role,
    schedstat: Option<File>,
    stat: Option<File>,
    before: Spent,
    after: Spent,
}

/// Reads CPU times at both edges of an interval.
pub struct CpuMeter {
    processes: Vec<Process>,
    /// Those whose families are followed, by who was the first.
    families: Vec<(u32, Role)>,
    threads: BTreeMap<u32, Thread>,
    host: [Host; 2],
    edges: [Option<Instant>; 2],
    tick_ns: u64,
    /// Whether I/O threads are looked at from edge to edge.
    watches: bool,
    watch: Option<Watch>,
    in_io_submit: Option<f64>,
}

/// The host as a whole, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Host {
    busy: u64,
    interrupts: u64,
    stolen: u64,
}

/// From linux/sched.h.
const PF_KTHREAD: u64 = 0x0020_0000;

impl Default for CpuMeter {
    fn default() -> Self {
        Self::new()
    }
}

impl CpuMeter {
    /// Follows the kernel's threads and the host.
    pub fn new() -> Self {
        let mut meter = Self {
            processes: Vec::new(),
            families: Vec::new(),
            threads: BTreeMap::new(),
            host: Default::default(),
            edges: [None; 2],
            tick_ns: tick_ns(),
            watches: false,
            watch: None,
            in_io_submit: None,
        };
        meter.find_kernel_threads();
        meter
    }

    /// Adds a process; `role` classifies each of its threads by ID and name.
    pub fn follow(&mut self, pid: u32, role: impl Fn(u32, &str) -> Role + Send + 'static) {
        let stat = File::open(format!("/proc/{pid}/stat")).ok();
        self.processes.push(Process { pid, role: Box::new(role), stat, ticks: [0; 2] });
        self.find_threads();
    }

    /// Adds a process that serves, with these I/O threads.
    pub fn follow_server(&mut self, pid: u32, io_threads: BTreeSet<u32>) {
        self.follow(pid, move |tid, _| if io_threads.contains(&tid) { Role::IoThread } else { Role::ServerOther });
    }

    /// Adds a process with all that it starts: its process group, and whoever is a descendant of one in it.
    pub fn follow_family(&mut self, pid: u32, role: Role) {
        self.families.push((pid, role));
        self.find_threads();
    }

    /// Whether one of the processes has the socket of this number open, as far as this one may look.
    pub fn has_socket(&self, number: u64) -> bool {
        let socket = PathBuf::from(format!("socket:[{number}]"));
        let files = self.processes.iter().flat_map(|process| fs::read_dir(format!("/proc/{}/fd", process.pid)));
        files.flatten().flatten().any(|file| fs::read_link(file.path()).is_ok_and(|file| file == socket))
    }

    /// Has it watched, between the edges, how long I/O threads sleep in `io_submit`.
    pub fn watch_io_submit(&mut self) {
        self.watches = true;
    }

    /// The share of the time between the edges that they did; `None` where nobody looked, or may.
    pub fn in_io_submit(&self) -> Option<f64> {
        self.in_io_submit
    }

    fn io_threads(&self) -> impl Iterator<Item = u32> {
        self.threads.iter().filter(|(_, thread)| thread.role == Role::IoThread).map(|(tid, _)| *tid)
    }

    /// Physical cores that the I/O threads may run on, all together: two processors of one core are one, and no more of
    /// them are of use than there are threads. `None` without I/O threads.
    pub fn cores(&self) -> Option<u32> {
        let allowed = |tid: u32| {
            let status = fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            list.map(|list| machine::parse_list(list.trim())).unwrap_or_default()
        };
        cores_of(&machine::all_cores(), &self.io_threads().map(allowed).collect::<Vec<_>>())
    }

    /// Reads all counters. The first call begins the interval, the second ends it.
    pub fn edge(&mut self, edge: Edge) {
        match edge {
            Edge::Begin => {
                // What started under the load's ramp is not to count from its birth.
                self.find_kernel_threads();
                self.find_threads();
                self.host[0] = Host::now();
                self.edges[0] = Some(Instant::now());
                for thread in self.threads.values_mut() {
                    thread.before = thread.look(self.tick_ns).unwrap_or_default();
                    thread.after = thread.before;
                }
                // Processes are read last here and first at the end, so that they have nothing more than their threads do but that of
                // others.
                self.read_processes(0);
                self.watch = self.watches.then(|| Watch::begin(self.io_threads()));
            }
            Edge::End => {
                self.in_io_submit = self.watch.take().and_then(Watch::end);
                self.read_processes(1);
                for thread in self.threads.values_mut() {
                    thread.after = thread.look(self.tick_ns).unwrap_or(thread.before);
                }
                self.edges[1] = Some(Instant::now());
                self.host[1] = Host::now();
                // All of the time of those that started within the interval counts.
                self.find_kernel_threads();
                self.find_threads();
            }
        }
    }

    fn read_processes(&mut self, edge: usize) {
        for process in &mut self.processes {
            let ticks = process.stat.as_ref().and_then(reading).and_then(|text| ticks_of(&text));
            // Of a process that has ended nothing more is known.
            process.ticks[edge] = ticks.map_or(process.ticks[0], |(user, system)| user + system);
        }
    }

    fn find_kernel_threads(&mut self) {
        for pid in kernel_threads() {
            let open = || Thread::open(&format!("/proc/{pid}"), 0, Role::Kernel, self.tick_ns);
            self.threads.entry(pid).or_insert_with(open);
        }
    }

    /// Finds threads, and processes of families, that are not known yet.
    fn find_threads(&mut self) {
        let known: BTreeSet<u32> = self.processes.iter().map(|process| process.pid).collect();
        for (first, role) in self.families.clone() {
            for pid in family_of(first).into_iter().filter(|pid| !known.contains(pid)) {
                let stat = File::open(format!("/proc/{pid}/stat")).ok();
                self.processes.push(Process { pid, role: Box::new(move |_, _| role), stat, ticks: [0; 2] });
            }
        }
        for Process { pid, role, .. } in &self.processes {
            for (tid, name) in threads_of(*pid) {
                let open = || Thread::open(&format!("/proc/{pid}/task/{tid}"), *pid, role(tid, &name), self.tick_ns);
                self.threads.entry(tid).or_insert_with(open);
            }
        }
    }

    /// The interval's length in seconds; 0 before it has ended.
    pub fn seconds(&self) -> f64 {
        match self.edges {
            [Some(begin), Some(end)] => end.duration_since(begin).as_secs_f64(),
            _ => 0.0,
        }
    }

    /// The CPU time between the edges, by role. Roles without a thread are absent.
    pub fn ledger(&self) -> Ledger {
        let mut sums: BTreeMap<Role, Spent> = BTreeMap::new();
        let known = self.threads.values().map(|thread| (thread.role, thread.spent()));
        let ended = self.processes.iter().filter_map(|process| {
            let spent = self.of_ended_threads(process)?;
            Some(((process.role)(ENDED.0, ENDED.1), spent))
        });
        for (role, spent) in known.chain(ended) {
            let sum = sums.entry(role).or_default();
            sum.total += spent.total;
            sum.system += spent.system;
        }
        let total = |role| sums.get(&role).map(|spent: &Spent| spent.total);
        let ticks = |of: fn(&Host) -> u64| of(&self.host[1]).saturating_sub(of(&self.host[0])) * self.tick_ns;
        let io = sums.get(&Role::IoThread);
        Ledger {
            io_thread_work: io.map(|spent| spent.total - spent.system),
            io_thread_spin_found: None,
            io_thread_spin_wasted: None,
            io_thread_system: io.map(|spent| spent.system),
            server_other: total(Role::ServerOther),
            server: total(Role::Server),
            guest: total(Role::Guest),
            backend: total(Role::Backend),
            kernel_threads: total(Role::Kernel),
            interrupts: Some(ticks(|host| host.interrupts)),
            stolen: Some(ticks(|host| host.stolen)),
            load: total(Role::Load),
            host_busy: Some(ticks(|host| host.busy)),
        }
    }

    /// What the threads of a process have spent that are gone; `None` where the counting in ticks may have made it up. User and
    /// system time are each cut down to a tick, at both edges, and so are those of each thread where the kernel counts it in
    /// ticks alone.
    fn of_ended_threads(&self, process: &Process) -> Option<Spent> {
        let threads = || self.threads.values().filter(|thread| thread.process == process.pid);
        let in_ticks = threads().filter(|thread| thread.schedstat.is_none()).count() as u64;
        let all = process.ticks[1].saturating_sub(process.ticks[0]) * self.tick_ns;
        let total = all.saturating_sub(threads().map(|thread| thread.spent().total).sum());
        (total >= 2 * (1 + in_ticks) * self.tick_ns).then_some(Spent { total, system: 0 })
    }
}

impl Thread {
    /// With its files open, and looked at for the first time.
    fn open(place: &str, process: u32, role: Role, tick_ns: u64) -> Self {
        let open = |name: &str| File::open(format!("{place}/{name}")).ok();
        // A kernel thread has no user time.
        let stat = if role == Role::Kernel { None } else { open("stat") };
        let schedstat = open("schedstat");
        let mut thread = Self { process, role, stat, schedstat, before: Spent::default(), after: Spent::default() };
        thread.after = thread.look(tick_ns).unwrap_or_default();
        thread
    }

    /// Its CPU time so far; `None` if it has ended.
    fn look(&self, tick_ns: u64) -> Option<Spent> {
        let run = self.schedstat.as_ref().and_then(reading).and_then(|text| text.split(' ').next()?.parse().ok());
        let ticks = self.stat.as_ref().and_then(reading).and_then(|text| ticks_of(&text));
        match (run, ticks) {
            (Some(total), Some((user, system))) => Some(divide(total, user, system)),
            (Some(total), None) if self.stat.is_none() => Some(Spent { total, system: total }),
            // Without CONFIG_SCHED_INFO there are ticks alone.
            (None, Some((user, system))) => Some(Spent { total: (user + system) * tick_ns, system: system * tick_ns }),
            _ => None,
        }
    }

    fn spent(&self) -> Spent {
        let total = self.after.total.saturating_sub(self.before.total);
        let system = self.after.system.saturating_sub(self.before.system).min(total);
        Spent { total, system }
    }
}

/// How many of `groups` of processors that share a core threads use that may run on `allowed` ones each.
fn cores_of(groups: &[Vec<usize>], allowed: &[Vec<usize>]) -> Option<u32> {
    let may = |group: &&Vec<usize>| allowed.iter().flatten().any(|cpu| group.contains(cpu));
    let cores = groups.iter().filter(may).count().min(allowed.len());
    u32::try_from(cores).ok().filter(|cores| *cores > 0)
}

/// Divides an exact time in the proportion of its ticks.
fn divide(total: u64, user: u64, system: u64) -> Spent {
    let ticks = (user + system).max(1);
    Spent { total, system: (u128::from(total) * u128::from(system) / u128::from(ticks)) as u64 }
}

fn reading(file: &File) -> Option<String> {
    let mut buffer = [0; 1024];
    let len = file.read_at(&mut buffer, 0).ok().filter(|len| *len > 0)?;
    Some(String::from_utf8_lossy(&buffer[..len]).into_owned())
}

/// The fields of a `stat` file behind the name, which may itself have brackets and spaces; counted from the third.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ')
}

/// User and system time.
fn ticks_of(stat: &str) -> Option<(u64, u64)> {
    let mut fields = fields(stat).skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn is_kernel_thread(stat: &str) -> bool {
    let flags = fields(stat).nth(6).and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & PF_KTHREAD != 0)
}

fn numbers_in(directory: &str) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn kernel_threads() -> Vec<u32> {
    let stat = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/stat"));
    numbers_in("/proc").filter(|pid| stat(pid).is_ok_and(|stat| is_kernel_thread(&stat))).collect()
}

/// The processes that go by a name.
pub(crate) fn processes_called(name: &str) -> Vec<u32> {
    let is_it = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
    numbers_in("/proc").filter(is_it).collect()
}

/// The parent and the process group in a `stat` file.
fn relatives_of(stat: &str) -> Option<[u32; 2]> {
    let mut fields = fields(stat).skip(1).map(str::parse);
    Some([fields.next()?.ok()?, fields.next()?.ok()?])
}

/// A process, the others of its group, and their descendants, which may have left it.
pub(crate) fn family_of(first: u32) -> BTreeSet<u32> {
    let relatives = |pid: u32| Some((pid, relatives_of(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?));
    let all: Vec<_> = numbers_in("/proc").filter_map(relatives).collect();
    let mut family = BTreeSet::from([first]);
    loop {
        let is_new = |family: &BTreeSet<u32>, (pid, [parent, group]): (u32, [u32; 2])| {
            !family.contains(&pid) && (group == first || family.contains(&parent))
        };
        let new: Vec<u32> = all.iter().filter(|one| is_new(&family, **one)).map(|(pid, _)| *pid).collect();
        if new.is_empty() {
            return family;
        }
        family.extend(new);
    }
}

/// A process's threads, by number and name.
pub(crate) fn threads_of(pid: u32) -> Vec<(u32, String)> {
    let name =
        |tid: u32| Some((tid, fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).ok()?.trim().to_owned()));
    numbers_in(&format!("/proc/{pid}/task")).filter_map(name).collect()
}

/// Time that a hypervisor has taken from all processors, in nanoseconds.
pub(crate) fn stolen_ns() -> u64 {
    Host::now().stolen * tick_ns()
}

fn tick_ns() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)
}

impl Host {
    fn now() -> Self {
        fs::read_to_string("/proc/stat").map(|stat| Self::read(&stat)).unwrap_or_default()
    }

    /// The first line: user, nice, system, idle, iowait, irq, softirq, steal; a guest's time is in user already.
    fn read(stat: &str) -> Self {
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> = line.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
        let at = |index: usize| ticks.get(index).copied().unwrap_or(0);
        // What was stolen is time in which nobody here was busy.
        let (interrupts, stolen) = (at(5) + at(6), at(7));
        Self { busy: at(0) + at(1) + at(2) + interrupts, interrupts, stolen }
    }
}

#[cfg(test)]
mod tests {
    use egret_loadgen::machine::on_cores;

    use super::*;

    #[test]
    fn a_thread_whose_name_has_brackets_is_read_all_the_same() {
        let stat = "42 (a) b (c)) S 1 42 42 0 -1 2129984 1 2 3 4 150 50 0 0 20 0 1 0 7 0 0";
        assert_eq!(ticks_of(stat), Some((150, 50)));
        assert!(is_kernel_thread(stat));
        assert!(!is_kernel_thread(&stat.replace("2129984", "4194560")));
    }

    #[test]
    fn exact_time_is_divided_as_the_ticks_were() {
        assert_eq!(divide(1_000_003, 3, 1), Spent { total: 1_000_003, system: 250_000 });
        assert_eq!(divide(500, 0, 0), Spent { total: 500, system: 0 });
    }

    #[test]
    fn a_host_is_busy_with_all_but_idling_and_waiting_and_what_was_stolen() {
        let host = Host::read("cpu  100 10 50 1000 500 3 4 5 20 0\ncpu0 1 2 3 4\n");
        assert_eq!(host, Host { busy: 167, interrupts: 7, stolen: 5 });
    }

    #[test]
    fn time_is_booked_to_whom_the_thread_belongs() {
        let mut meter = CpuMeter::new();
        meter.threads.clear();
        let thread = |role, before, after| Thread { process: 0, role, schedstat: None, stat: None, before, after };
        let spent = |total, system| Spent { total, system };
        meter.threads.insert(1, thread(Role::IoThread, spent(100, 10), spent(400, 60)));
        meter.threads.insert(2, thread(Role::IoThread, spent(0, 0), spent(50, 50)));
        meter.threads.insert(3, thread(Role::ServerOther, spent(5, 0), spent(7, 1)));
        meter.threads.insert(4, thread(Role::ServerOther, spent(0, 0), spent(40, 40)));
        meter.tick_ns = 10;
        meter.host[1] = Host { busy: 100, interrupts: 2, stolen: 3 };
        let ledger = meter.ledger();
        assert_eq!((ledger.io_thread_work, ledger.io_thread_system), (Some(250), Some(100)));
        assert_eq!((ledger.server_other, ledger.interrupts, ledger.host_busy), (Some(42), Some(20), Some(1000)));
        assert_eq!((ledger.kernel_threads, ledger.guest, ledger.load), (None, None, None));
        assert_eq!((ledger.stolen, ledger.io_threads(), ledger.all_of_server()), (Some(30), Some(350), Some(392)));
        assert_eq!(ledger.unaccounted(), Some(1000 - 412));
    }

    #[test]
    fn what_a_process_has_more_than_its_threads_is_the_time_of_those_that_have_ended() {
        let of = |ticks: u64, in_ticks: bool| {
            let mut meter = CpuMeter::new();
            meter.threads.clear();
            meter.tick_ns = 10;
            let schedstat = || if in_ticks { None } else { File::open("/dev/null").ok() };
            let (role, before) = (Role::IoThread, Spent { total: 500, system: 0 });
            let after = Spent { total: 1500, system: 0 };
            meter.threads.insert(8, Thread { process: 7, role, schedstat: schedstat(), stat: None, before, after });
            let role = |tid: u32, name: &str| if (tid, name) == ENDED { Role::ServerOther } else { Role::IoThread };
            meter.processes.push(Process { pid: 7, role: Box::new(role), stat: None, ticks: [1000, 1000 + ticks] });
            let ledger = meter.ledger();
            assert_eq!(ledger.io_threads(), Some(1000));
            ledger.server_other
        };
        assert_eq!(of(130, false), Some(300));
        assert_eq!(of(102, false), Some(20));
        // Ticks that are cut off at both edges make up as much, of a thread that is counted in ticks, too.
        assert_eq!(of(101, false), None);
        assert_eq!((of(103, true), of(104, true)), (None, Some(40)));
        assert_eq!(of(90, false), None, "clocks differ");
    }

    #[test]
    fn a_thread_that_has_ended_counts_and_so_does_a_child_of_a_child() {
        let mut meter = CpuMeter::new();
        meter.follow(std::process::id(), |_, _| Role::Load);
        let mut shell = std::process::Command::new("/bin/sh");
        // It spends when it is told to, says so, and is there until its input ends.
        shell.args(["-c", "sh -c 'read x; i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; echo; read x'; true"]);
        shell.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut shell = std::os::unix::process::CommandExt::process_group(&mut shell, 0).spawn().unwrap();
        meter.follow_family(shell.id(), Role::Server);
        meter.edge(Edge::Begin);
        std::io::Write::write_all(shell.stdin.as_mut().unwrap(), b"\n").unwrap();
        let spend = || while egret_loadgen::machine::thread_cpu_time_ns() < 100_000_000 {};
        std::thread::spawn(spend).join().unwrap();
        let said = std::io::Read::read(shell.stdout.as_mut().unwrap(), &mut [0]);
        assert_eq!(said.unwrap(), 1);
        meter.edge(Edge::End);
        drop(shell.stdin.take());
        shell.wait().unwrap();
        // But for the ticks that are cut off.
        assert!(meter.ledger().load.unwrap() >= 80_000_000, "{:?}", meter.ledger());
        assert!(meter.ledger().server.unwrap() > 1_000_000, "{:?}", meter.ledger());
    }

    #[test]
    fn io_threads_have_cores_where_the_lab_may_not_run() {
        let (tell, told) = std::sync::mpsc::channel();
        let (goes, until) = std::sync::mpsc::channel::<()>();
        let all = machine::cores();
        let server = std::thread::spawn(move || {
            on_cores(&all[all.len() - 1], || {
                tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
                // Until the other end is gone.
                until.recv().unwrap_err();
            });
        });
        let io_thread = told.recv().unwrap();
        let mut meter = CpuMeter::new();
        meter.follow(std::process::id(), move |tid, _| if tid == io_thread { Role::IoThread } else { Role::Load });
        let cores = on_cores(&machine::cores()[0], || meter.cores());
        drop(goes);
        server.join().unwrap();
        assert_eq!(cores, Some(1));
    }

    #[test]
    fn two_processors_of_one_core_are_one() {
        let groups = [vec![0, 2], vec![1, 3]];
        let cores =
            |allowed: &[&[usize]]| cores_of(&groups, &allowed.iter().map(|cpus| cpus.to_vec()).collect::<Vec<_>>());
        assert_eq!(cores(&[&[0], &[2]]), Some(1));
        assert_eq!(cores(&[&[0], &[3]]), Some(2));
        assert_eq!(cores(&[&[0, 1, 2, 3]]), Some(1), "one thread has one core at a time");
        assert_eq!(cores(&[&[1, 3], &[1, 3], &[1, 3]]), Some(1));
        assert_eq!(cores(&[]), None);
    }

    #[test]
    fn a_meter_sees_what_this_very_process_spends() {
        let mut meter = CpuMeter::new();
        meter.follow(std::process::id(), |_, _| Role::Load);
        meter.edge(Edge::Begin);
        let begin = egret_loadgen::machine::thread_cpu_time_ns();
        while egret_loadgen::machine::thread_cpu_time_ns() - begin < 20_000_000 {}
        meter.edge(Edge::End);
        assert!(meter.ledger().load.unwrap() > 0);
        assert!(meter.seconds() > 0.0);
    }
}
