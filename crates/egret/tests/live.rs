//! What carries requests changes under them: I/O threads, engines, policies, worker threads. Data is checked all along,
//! and every request that was made is counted once.

mod support;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use egret_loadgen::client::{Client, ClientOptions};
use egret_loadgen::load::{self, Job, Span, Spec, Waiting};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::{Value, json};
use support::disk::{self, BLOCK, Disk};
use support::guest::Guest;
use support::http::sum;
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};
use support::wire::{GET_VRING_BASE, u32s};
use support::{Finished, await_that};

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 4;
const THREADS: [&str; 3] = ["io0", "io1", "io2"];
/// How a disk can be opened, none like the one before.
const WAYS: [(&str, bool); 5] =
    [("io_uring", true), ("threads", true), ("native", true), ("io_uring", false), ("threads", false)];

/// A daemon whose I/O threads wait in three different ways, with a disk of 16 MiB that an export with four queues
/// writes to.
struct Deployment {
    qmp: Qmp,
    metrics: PathBuf,
    socket: PathBuf,
    image: PathBuf,
    server: Server,
    _scratch: Scratch,
}

impl Deployment {
    fn new() -> Self {
        Self::with("pin-memory=off")
    }

    fn with(more: &str) -> Self {
        let scratch = Scratch::new();
        let (image, socket, monitor) = (scratch.image("disk", 16 * MIB), scratch.path("socket"), scratch.path("qmp"));
        let metrics = scratch.path("metrics");
        let export = format!("writable=on,num-queues={QUEUES},iothread=io0,{more}");
        let options = Options::new()
            .iothread("io0", "fd-monitor=io_uring")
            .iothread("io1", "fd-monitor=epoll")
            .iothread("io2", "fd-monitor=ppoll")
            .disk("d0", &image, "aio=io_uring,cache.direct=on")
            .export("e0", "d0", &socket, &export)
            .monitor("m", &monitor)
            .metrics(&metrics);
        let server = Server::start(&Program::egret(), &options);
        Self { qmp: Qmp::connect(&monitor), metrics, socket, image, server, _scratch: scratch }
    }

    /// Runs `act` while a verifying load runs, until `act` is done; then reads everything back.
    fn under_load(mut self, waiting: Waiting, act: impl FnOnce(&mut Deployment)) -> Self {
        let rw = "randrw".parse().unwrap();
        let spec = Spec { rw, iodepth: 16, numjobs: QUEUES, verify: Some(11), waiting, ..Spec::default() };
        let (socket, done) = (self.socket.clone(), AtomicBool::new(false));
        let (begin, begun) = channel();
        std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                let mut jobs = jobs(&socket, &spec);
                let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(50) };
                let mut edge = move |_| {
                    let _ = begin.send(());
                };
                while !done.load(Ordering::Relaxed) {
                    load::run(&mut jobs, span, &mut edge).expect("no request fails, none comes back wrong");
                }
                jobs.iter_mut().map(|job| job.verify().expect("what was written is there")).sum::<u64>()
            });
            let finished = Finished(&done);
            begun.recv().expect("the load begins");
            act(&mut self);
            drop(finished);
            assert!(load.join().expect("the load is content") > 0);
        });
        assert_eq!(self.server.complaints(), Vec::<String>::new());
        self
    }

    fn export(&mut self) -> Value {
        self.qmp.run("query-block-exports", json!({}))[0].take()
    }

    fn reopen(&mut self, (aio, direct): (&str, bool), more: Value) -> Pause {
        let image = &self.image;
        let mut options = json!({"driver": "file", "node-name": "d0", "filename": image, "aio": aio,
                                 "cache": {"direct": direct}});
        options.as_object_mut().expect("an object").extend(more.as_object().cloned().expect("an object"));
        pause(&self.qmp.run("blockdev-reopen", json!({"options": [options]})))
    }

    fn move_queue(&mut self, queue: usize, to: &str) -> Pause {
        pause(&self.qmp.run("egret-move-queue", json!({"id": "e0", "queue": queue, "iothread": to})))
    }

    fn map(&mut self, how: Value) -> Pause {
        let mut arguments = json!({"id": "e0"});
        arguments.as_object_mut().expect("an object").extend(how.as_object().cloned().expect("an object"));
        pause(&self.qmp.run("egret-map-queues", arguments))
    }
}

/// How long a change had queues wait.
type Pause = Duration;

fn pause(answer: &Value) -> Pause {
    Duration::from_nanos(answer["pause-ns"].as_u64().expect("every change says how long it had queues wait"))
}

/// For people: the tests assert nothing about speed.
fn print_pauses(what: &str, mut pauses: Vec<Pause>) {
    pauses.sort_unstable();
    let at = |share: usize| pauses[(pauses.len() - 1) * share / 100];
    println!(
        "{what}: {} times, a pause of {:?} (median), {:?} (p90), {:?} (most)",
        pauses.len(),
        at(50),
        at(90),
        at(100)
    );
}

fn jobs(socket: &Path, spec: &Spec) -> Vec<Job> {
    spec.jobs(Client::connect(socket, ClientOptions::default()).unwrap().start(spec.shape()).unwrap()).unwrap()
}

#[test]
fn queues_move_between_io_threads_under_load() {
    for waiting in [Waiting::Blocking, Waiting::Polling] {
        let deployment = Deployment::new().under_load(waiting, |deployment| {
            let moves =
                (0..90).map(|round| deployment.move_queue(round % 4, THREADS[(round + round / 4) % 3])).collect();
            print_pauses("one queue moved", moves);
            let maps = (0..45).map(|round| match round % 3 {
                0 => deployment.map(json!({"iothread": THREADS})),
                1 => deployment.map(json!({"iothread": "io1"})),
                _ => deployment.map(json!({"iothread-vq-mapping": [
                    {"iothread": "io2", "vqs": [3, 0]}, {"iothread": "io0", "vqs": [1, 2]}]})),
            });
            print_pauses("all queues mapped", maps.collect());
            let mapping = json!([{"iothread": "io2", "vqs": [0, 3]}, {"iothread": "io0", "vqs": [1, 2]}]);
            assert_eq!(deployment.export()["iothread-vq-mapping"], mapping);
            // Who has no queue can go while the others work, and who has one cannot.
            deployment.qmp.run("object-del", json!({"id": "io1"}));
            let refused = deployment.qmp.fail("object-del", json!({"id": "io2"}));
            assert_eq!(refused, "object 'io2' is in use, can not be deleted");
        });
        drop(deployment);
    }
}

#[test]
fn a_policy_spins_or_sleeps_as_its_name_says_from_the_start_and_when_it_is_set() {
    for first in ["busy", "off"] {
        let scratch = Scratch::new();
        let (socket, monitor) = (scratch.path("socket"), scratch.path("qmp"));
        let options = Options::new()
            .null("d0", "")
            .iothread("io0", &format!("poll-policy={first}"))
            .export("e0", "d0", &socket, "iothread=io0")
            .monitor("m", &monitor);
        let server = Server::start(&Program::egret(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let client = disk::Client { read_only: true, ..disk::Client::default() };
        let mut disk = Disk::connect_as(&socket, client).expect("a connection");
        let policies = if first == "busy" { ["busy", "off", "busy"] } else { ["off", "busy", "off"] };
        for (index, policy) in policies.into_iter().enumerate() {
            // The first is what the daemon was started with.
            if index > 0 {
                qmp.run("qom-set", json!({"path": "/objects/io0", "property": "poll-policy", "value": policy}));
            }
            // The thread may have gone to sleep under the policy before.
            disk.first().read(0, 4096).expect("a read");
            let mut look = || qmp.run("egret-query-stats", json!({}))["iothreads"][0].take();
            let before = look();
            let since = |now: &Value, what: &str| {
                now[what].as_u64().expect("a count") - before[what].as_u64().expect("a count")
            };
            let spun = |now: &Value| since(now, "spin-found-ns") + since(now, "spin-wasted-ns");
            // A loop that always finds the next request at once neither spins nor sleeps.
            await_that("the loop to wait often", || {
                disk.first().read(0, 4096).expect("a read");
                let now = look();
                if policy == "busy" { spun(&now) > 1_000_000 } else { since(&now, "blocks") > 20 }
            });
            let now = look();
            let refuted = if policy == "busy" { since(&now, "blocks") } else { spun(&now) };
            assert_eq!(refuted, 0, "{policy}, after {first}: spun {} ns, slept {}", spun(&now), since(&now, "blocks"));
            // So it says itself. The kernel knows as well.
            let sleeps = || server.sleeps().iter().find(|(name, _)| name == "io0").expect("the thread").1;
            let slept = sleeps();
            if policy == "busy" {
                let ran = server.cpu_time("io0");
                await_that("the thread to spin", || server.cpu_time("io0") > ran + Duration::from_millis(50));
                assert_eq!(sleeps(), slept, "{policy}, after {first}");
            } else {
                for requests in 1..=20 {
                    disk.first().read(0, 4096).expect("a read");
                    await_that("the thread to sleep after each request", || sleeps() >= slept + requests);
                }
            }
        }
    }
}

#[test]
fn a_disk_changes_its_engine_and_cache_mode_under_load() {
    for waiting in [Waiting::Blocking, Waiting::Polling] {
        let deployment = Deployment::new().under_load(waiting, |deployment| {
            deployment.map(json!({"iothread": THREADS}));
            let mut pauses = Vec::new();
            for round in 0..60 {
                let more = match round % 4 {
                    0 => json!({}),
                    1 => json!({"discard": "unmap", "detect-zeroes": "unmap"}),
                    2 => json!({"detect-zeroes": "on", "locking": "off"}),
                    _ => json!({"discard": "unmap", "locking": "on"}),
                };
                pauses.push(deployment.reopen(WAYS[round % WAYS.len()], more));
            }
            print_pauses("disk reopened", pauses);
            let refused = deployment.qmp.fail(
                "blockdev-reopen",
                json!({"options": [{"driver": "file", "node-name": "d0",
                "filename": &deployment.image, "read-only": true}]}),
            );
            assert_eq!(refused, "Read-only block node 'd0' cannot support read-write users");
        });
        drop(deployment);
    }
}

/// Writes the disk and reads it back with libblkio, each queue its share, until `done`; how many requests that made.
fn write_and_verify(socket: &Path, done: &AtomicBool) -> u64 {
    let client = disk::Client { queues: QUEUES.into(), ..disk::Client::default() };
    let mut disk = Disk::connect_as(socket, client).expect("a connection");
    let share = 16 * MIB / u64::from(QUEUES);
    let write = |(index, queue): (usize, &mut disk::DiskQueue)| {
        let range = index as u64 * share..(index as u64 + 1) * share;
        let mut rounds = 0;
        while rounds == 0 || !done.load(Ordering::Relaxed) {
            queue.write_pattern(range.clone(), rounds).expect("no write fails");
            queue.verify_pattern(range.clone(), rounds).expect("no read fails");
            rounds += 1;
        }
        rounds * 2 * share / BLOCK as u64
    };
    std::thread::scope(|scope| {
        let write = &write;
        let queues: Vec<_> =
            disk.queues.iter_mut().enumerate().map(|queue| scope.spawn(move || write(queue))).collect();
        queues.into_iter().map(|queue| queue.join().expect("a queue that was served")).sum()
    })
}

#[test]
fn queues_with_pinned_memory_move_and_get_other_disks_under_load() {
    let mut deployment = Deployment::with("pin-memory=on");
    let (socket, metrics, done) = (deployment.socket.clone(), deployment.metrics.clone(), AtomicBool::new(false));
    let registered = || sum(&metrics, "egret_engine_registered_requests_total");
    std::thread::scope(|scope| {
        let load = scope.spawn(|| write_and_verify(&socket, &done));
        let finished = Finished(&done);
        for round in 0..24_usize {
            let before = registered();
            await_that("requests through pinned memory", || registered() > before);
            match round % 3 {
                0 => drop(deployment.move_queue(round % 4, THREADS[(round + round / 4) % 3])),
                1 => drop(deployment.reopen(("io_uring", round % 2 == 0), json!({}))),
                _ => {
                    // Without, for a moment.
                    deployment.reopen(("threads", false), json!({}));
                    deployment.reopen(("io_uring", true), json!({}));
                }
            }
        }
        drop(finished);
        assert!(load.join().expect("the load is content") > 0);
    });
    await_that("all memory to be let go of", || sum(&metrics, "egret_engine_pinned_bytes") == 0.0);
    assert_eq!(deployment.server.complaints(), Vec::<String>::new());
}

#[test]
fn everything_changes_at_once_and_every_request_is_served_once() {
    let mut deployment = Deployment::new();
    let (socket, done) = (deployment.socket.clone(), AtomicBool::new(false));
    let made: u64 = std::thread::scope(|scope| {
        let load = scope.spawn(|| write_and_verify(&socket, &done));
        let finished = Finished(&done);
        for round in 0..60_usize {
            deployment.move_queue(round % 4, THREADS[round % 3]);
            deployment.reopen(WAYS[round % WAYS.len()], json!({}));
            let set = |qmp: &mut Qmp, property: &str, value: Value| {
                qmp.run("qom-set", json!({"path": THREADS[round % 3], "property": property, "value": value}));
            };
            let policy = ["off", "busy", "shared-window", "per-source-window", "weighted", "low-regret"][round % 6];
            set(&mut deployment.qmp, "poll-policy", json!(policy));
            set(&mut deployment.qmp, "poll-max-ns", json!(round * 1000));
            set(&mut deployment.qmp, "thread-pool-min", json!(round % 2));
            set(&mut deployment.qmp, "thread-pool-max", json!([1, 64, 3, 16][round % 4]));
            set(&mut deployment.qmp, "aio-max-batch", json!([0, 1, 5][round % 3]));
            set(&mut deployment.qmp, "poll-idle-ms", json!(round + 1));
            deployment.map(json!({"iothread": [THREADS[round % 3], THREADS[(round + 1) % 3]]}));
        }
        drop(finished);
        load.join().expect("no request failed, and all data was right")
    });
    // The client has left, and what its queues counted comes together when they have stopped.
    let mut counts = || {
        let stats = deployment.qmp.run("query-blockstats", json!({}))[0]["stats"].take();
        let count = |kind: &str| ["rd", "wr"].map(|op| stats[kind.replace("OP", op)].as_u64().expect("a count"));
        (count("OP_operations").iter().sum::<u64>(), count("failed_OP_operations"))
    };
    support::await_that("all that was made to be counted", || counts().0 >= made);
    assert_eq!(counts(), (made, [0, 0]));
    assert_eq!(deployment.server.complaints(), Vec::<String>::new());
}

#[test]
fn a_client_that_comes_after_a_move_is_served_where_the_queues_are_then() {
    let mut deployment = Deployment::new();
    for round in 0..12 {
        let mut disk = Disk::connect(&deployment.socket).expect("a connection");
        disk.first().write_pattern(0..MIB, round).unwrap();
        deployment.move_queue(0, THREADS[round as usize % 3]);
        if round % 2 == 0 {
            deployment.map(json!({"iothread": THREADS[round as usize % 3]}));
        }
        // Gone right after the move, or in use once more before.
        if round % 3 == 0 {
            disk.first().verify_pattern(0..MIB, round).unwrap();
        }
        let before = deployment.export();
        drop(disk);
        let mut disk = Disk::connect(&deployment.socket).expect("a connection");
        disk.first().verify_pattern(0..MIB, round).unwrap();
        assert_eq!(deployment.export(), before, "the next client changes nothing about it");
    }
}

#[test]
fn a_queue_that_has_just_moved_stops_where_it_stands() {
    let mut deployment = Deployment::new();
    for round in 0..12_u32 {
        let mut guest = Guest::boot(&deployment.socket);
        for served in 0..=round {
            guest.read_honestly();
            deployment.move_queue(0, THREADS[(round + served) as usize % 3]);
        }
        let [queue, base] = [0, round + 1];
        let state = guest.wire.ask(GET_VRING_BASE, &u32s(&[queue, 0])).expect("its state");
        assert_eq!(state, u64::from(base) << 32, "all that was made available was taken once");
    }
}

#[test]
fn worker_threads_are_as_many_as_they_may_be_now() {
    let mut deployment = Deployment::new();
    deployment.reopen(("threads", true), json!({}));
    let mut set = |property: &str, value: u32| {
        deployment.qmp.run("qom-set", json!({"path": "/objects/io0", "property": property, "value": value}));
    };
    set("thread-pool-max", 2);
    let workers = |server: &Server| server.sleeps().iter().filter(|(name, _)| name == "disk-worker").count();
    let deployment = deployment.under_load(Waiting::Blocking, |deployment| {
        support::await_that("both workers", || workers(&deployment.server) == 2);
        deployment.qmp.run("qom-set", json!({"path": "io0", "property": "thread-pool-max", "value": 12}));
        support::await_that("more workers", || workers(&deployment.server) > 2);
        deployment.qmp.run("qom-set", json!({"path": "io0", "property": "thread-pool-max", "value": 1}));
        support::await_that("the others to leave", || workers(&deployment.server) == 1);
    });
    let shown = deployment.image.metadata().map(|image| image.len()).expect("the image");
    assert_eq!(shown, 16 * MIB);
}

/// Processors for those who are put there.
struct Cpuset(PathBuf);

impl Cpuset {
    /// With one processor, if there are any here.
    fn of(cpu: usize) -> Option<Self> {
        let name = format!("egret-test-{}", std::process::id());
        // Of the first cgroups and of the second.
        ["/sys/fs/cgroup/cpuset", "/sys/fs/cgroup"].into_iter().find_map(|root| {
            let (root, place) = (Path::new(root), Path::new(root).join(&name));
            write(&root.join("cgroup.subtree_control"), "+cpuset");
            fs::create_dir(&place).ok()?;
            let new = Self(place);
            write(&new.0.join("cpuset.mems"), &fs::read_to_string(root.join("cpuset.mems")).unwrap_or_default());
            new.give(&cpu.to_string()).then_some(new)
        })
    }

    fn give(&self, cpus: &str) -> bool {
        write(&self.0.join("cpuset.cpus"), cpus)
    }
}

/// Writes to a file of the kernel's, if it has it.
fn write(file: &Path, text: &str) -> bool {
    fs::File::options().write(true).open(file).and_then(|mut file| file.write_all(text.as_bytes())).is_ok()
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_daemon_that_is_given_more_processors_runs_on_them_with_every_thread() {
    let allowed = sched_getaffinity(None).unwrap();
    let cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(2).collect();
    let &[first, second] = &cpus[..] else { return egret_needs::this_test_lacks("two processors") };
    if !is_root_or_skips("for a cpuset") {
        return;
    }
    let Some(cpuset) = Cpuset::of(first) else { return egret_needs::this_test_lacks("cpusets") };
    let scratch = Scratch::new();
    let options = Options::new()
        .iothread("io0", "")
        .iothread("io1", "poll-policy=off")
        .disk("d0", &scratch.image("disk", MIB), "aio=threads")
        .export("e0", "d0", &scratch.path("e0"), "writable=on,iothread=io0")
        .monitor("m", &scratch.path("qmp"));
    let enter = format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", cpuset.0.display());
    let server = Server::start(&Program::egret().after(["sh", "-c", &enter]), &options);
    let mut qmp = Qmp::connect(&scratch.path("qmp"));
    let mut set = |property: &str, value: Value| {
        qmp.run("qom-set", json!({"path": "io1", "property": property, "value": value}));
    };
    set("cpu-affinity", json!(first.to_string()));
    set("cpu-affinity", Value::Null);
    // Which finds out what blocking costs.
    set("poll-policy", json!("low-regret"));
    // By a worker.
    Disk::connect(&scratch.path("e0")).unwrap().first().write(0, &[1; 4096]).unwrap();

    let runs_on = || -> Vec<String> {
        let lists = server.each_thread("status").into_iter().map(|status| {
            let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
            format!("{} on {}", line("Name:"), line("Cpus_allowed_list:"))
        });
        lists.collect()
    };
    let all_on = |cpus: &str| runs_on().iter().all(|line| line.ends_with(&format!(" on {cpus}")));
    assert!(all_on(&first.to_string()), "{:?}", runs_on());
    assert!(cpuset.give(&format!("{first},{second}")));
    let both = format!("{first}{}{second}", if second == first + 1 { '-' } else { ',' });
    assert!(all_on(&both), "{:?}", runs_on());
}
