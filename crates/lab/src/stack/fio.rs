//! fio: a load's job file, and the parsing of its JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::Task;
use crate::plan::{Bytes, Load, LoadKeys, RateProcess, Seconds};
use crate::results::{Latency, Ledger, Measurement, Operations};

/// How long a job file may take: only its author knows how long it does.
const A_DAY: Duration = Duration::from_secs(86_400);

/// How long fio is at a load, at most, when it has started and before it reports.
pub fn length(load: &Load) -> Duration {
    if load.keys.jobfile.is_some() { A_DAY } else { load.span() }
}

/// The engine that is fio's counterpart of `--blockdev`'s `aio`.
pub fn engine(aio: Option<&str>) -> &'static str {
    match aio {
        Some("io_uring") => "io_uring",
        // Threads that do one request each.
        Some("threads") => "posixaio",
        _ => "libaio",
    }
}

/// What the sections of a load's job file say of their disks, which are paths.
pub fn sections(load: &Load, paths: &[&str]) -> Vec<String> {
    let names: Vec<String> = paths.iter().map(|path| escaped(path)).collect();
    let names = if load.keys.across_disks && !names.is_empty() { vec![names.join(":")] } else { names };
    names.iter().map(|name| format!("filename={name}")).collect()
}

/// How many jobs a load has, on all disks together.
fn jobs(load: &Load) -> u32 {
    u32::from(load.numjobs) * u32::from(load.groups())
}

/// The reads and writes that each job of an open loop is to make in a second: fio takes whole numbers.
fn rates(task: &Task<'_>) -> Option<[u64; 2]> {
    let each = task.rate_iops? / f64::from(jobs(task.load));
    let reads = match task.load.rw.ends_with("rw") {
        true => f64::from(task.load.rwmixread.min(100)) / 100.0,
        false => f64::from(u8::from(!task.load.writes())),
    };
    Some([reads, 1.0 - reads].map(|share| if share > 0.0 { (each * share).round().max(1.0) as u64 } else { 0 }))
}

/// The rate that the job file of an open loop asks for.
pub fn offered(task: &Task<'_>) -> Option<f64> {
    let each: u64 = rates(task)?.iter().sum();
    Some((each * u64::from(jobs(task.load))) as f64)
}

/// The job file for a task, with these sections.
pub fn job_file(task: &Task<'_>, sections: &[String], engine: &str) -> String {
    let load = task.load;
    // All keys by name, so that a new one is either passed on here or known to be none of fio's.
    let LoadKeys {
        norandommap,
        size,
        rate_process,
        ramp_time,
        runtime,
        processes,
        // What `load` has of them, and the task's rate.
        rw: _,
        bs: _,
        iodepth: _,
        numjobs: _,
        rwmixread: _,
        rate_iops: _,
        curve: _,
        // Sections are made of disks, and jobs have no queues of their own.
        across_disks: _,
        disks: _,
        idle_disks: _,
        queues: _,
        // The lab's own load's alone, as the plan's check says.
        verify: _,
        polling: _,
        name: _,
        subjects: _,
        jobfile: _,
        application: _,
    } = &load.keys;
    let milliseconds = |time: &Seconds| time.duration().as_millis();
    let mut text = String::from("[global]\n");
    let mut key = |name: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "{name}={value}");
    };
    key("ioengine", &engine);
    for always in ["direct", "group_reporting", "time_based", "lat_percentiles"] {
        key(always, &1);
    }
    if !*processes {
        key("thread", &1);
    }
    key("percentile_list", &"50:90:99:99.9");
    key("rw", &load.rw);
    key("bs", &load.bs.0);
    key("iodepth", &load.iodepth);
    key("numjobs", &load.numjobs);
    if load.rw.ends_with("rw") {
        key("rwmixread", &load.rwmixread);
        // Reads, writes, and both in one histogram.
        key("unified_rw_reporting", &"both");
    }
    if *norandommap {
        key("norandommap", &1);
    }
    if let Some(size) = size {
        key("size", &size.0);
    }
    if let Some([reads, writes]) = rates(task) {
        if load.rw.ends_with("rw") {
            // A single number would be the rate of reads and of writes each, and 0 of one of them no limit.
            key("rate_iops", &format_args!("{},{}", reads.max(1), writes.max(1)));
        } else {
            key("rate_iops", &(reads + writes));
        }
        key("rate_process", &if *rate_process == RateProcess::Poisson { "poisson" } else { "linear" });
    }
    key("randseed", &(task.seed >> 16));
    key("ramp_time", &format_args!("{}ms", milliseconds(ramp_time)));
    key("runtime", &format_args!("{}ms", milliseconds(runtime).max(1)));
    for (number, section) in sections.iter().enumerate() {
        let _ = writeln!(text, "[disk{number}]\n{section}");
    }
    text
}

/// The results of a group of fio's jobs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Group {
    /// The name of the group's first job.
    pub name: String,
    /// fio's number of it. A group with another number ran before or after it: its first job has a `stonewall`.
    pub number: u64,
    /// How long it ran, in seconds.
    pub seconds: f64,
    /// Reads, if there were any.
    pub reads: Option<Operations>,
    /// Writes and trims, if there were any.
    pub writes: Option<Operations>,
    /// How long reads and writes took together, where fio was asked for that.
    pub mixed: Option<Latency>,
    /// CPU time of the jobs, in nanoseconds.
    pub cpu_ns: u64,
}

/// The groups in fio's output; lines beside the JSON are passed over. With `--status-interval` there is an object for each
/// interval, and one for the whole run at the end: the last whole one counts.
///
/// # Errors
/// It is no output of fio's, or a job in it has failed.
pub fn groups(output: &str) -> Result<Vec<Group>, String> {
    let begins = output.match_indices('{').map(|(at, _)| at).filter(|at| *at == 0 || output[..*at].ends_with('\n'));
    // Text after an object, such as a warning, is ignored.
    let object = |at: usize| serde_json::Deserializer::from_str(&output[at..]).into_iter::<Value>().next();
    let mut found = Err("it has no JSON".to_owned());
    for at in begins.collect::<Vec<_>>().into_iter().rev() {
        match object(at) {
            Some(Ok(value)) => {
                let is_run = ["jobs", "client_stats"].iter().any(|key| value[key].is_array());
                found = Ok(value);
                if is_run {
                    break;
                }
            }
            Some(Err(error)) => found = Err(format!("not JSON: {error}")),
            None => {}
        }
    }
    let value = found?;
    let bytes = unit_of_bytes(value["fio version"].as_str().unwrap_or_default());
    let clients = value["client_stats"].as_array().map(|all| all.iter().filter(|one| one["jobname"] != "All clients"));
    let jobs: Vec<&Value> = match clients {
        Some(clients) => clients.collect(),
        None => value["jobs"].as_array().ok_or("it has no 'jobs', which fio's JSON has")?.iter().collect(),
    };
    jobs.into_iter().map(|job| group(job, bytes)).collect()
}

/// What `io_bytes` counts: up to fio 2.20 it is KiB.
fn unit_of_bytes(version: &str) -> u64 {
    let mut numbers = version.trim_start_matches("fio-").split(['.', '-']).map_while(|number| number.parse().ok());
    let version: Option<(u32, u32)> = numbers.next().zip(numbers.next());
    if version.is_some_and(|version| version < (2, 21)) { 1024 } else { 1 }
}

fn group(job: &Value, bytes: u64) -> Result<Group, String> {
    let name = job["jobname"].as_str().unwrap_or("fio").to_owned();
    if let Some(error) = job["error"].as_i64().filter(|error| *error != 0) {
        let error = std::io::Error::from_raw_os_error(i32::try_from(error).unwrap_or(0));
        return Err(format!("job '{name}' failed: {error}"));
    }
    let runtime = |kind: &str| job[kind]["runtime"].as_f64().unwrap_or(0.0) / 1e3;
    let [reads, writes, trims, both] = ["read", "write", "trim", "mixed"].map(|kind| operations(&job[kind], bytes));
    // With `unified_rw_reporting=mixed` fio tells of nothing else.
    let alone = both.clone().filter(|_| [&reads, &writes, &trims].iter().all(|kind| kind.is_none()));
    let kinds = if alone.is_some() { &["mixed"][..] } else { &["read", "write", "trim"] };
    let seconds = kinds.iter().map(|kind| runtime(kind)).fold(0.0, f64::max);
    // Shares of the time that all jobs of the group ran, in percent.
    let cpu = |kind: &str| job[kind].as_f64().unwrap_or(0.0) / 100.0;
    let elapsed = job["job_runtime"].as_f64().unwrap_or(seconds * 1e3) / 1e3;
    Ok(Group {
        reads: reads.or(alone),
        writes: [writes, trims].into_iter().flatten().reduce(joined),
        mixed: both.map(|both| both.latency),
        seconds,
        cpu_ns: ((cpu("usr_cpu") + cpu("sys_cpu")) * elapsed * 1e9) as u64,
        number: job["groupid"].as_u64().unwrap_or(0),
        name,
    })
}

fn operations(of: &Value, unit: u64) -> Option<Operations> {
    let requests = of["total_ios"].as_u64().filter(|requests| *requests > 0)?;
    Some(Operations {
        requests,
        bytes: of["io_bytes"].as_u64().unwrap_or(0).saturating_mul(unit),
        latency: latency(of),
    })
}

/// Total latencies (`lat`) if fio was asked for their percentiles, or else completion latencies (`clat`).
fn latency(of: &Value) -> Latency {
    let whole = &of["lat_ns"];
    let from = if whole["percentile"].is_object() { whole } else { &of["clat_ns"] };
    let value = |value: &Value| value.as_f64().unwrap_or(0.0);
    let percentile = |of: &str| value(&from["percentile"][of]);
    Latency {
        mean: value(&from["mean"]),
        p50: percentile("50.000000"),
        p90: percentile("90.000000"),
        p99: percentile("99.000000"),
        p999: percentile("99.900000"),
        max: value(&from["max"]),
    }
}

/// All groups together, as one measurement without a ledger but for fio's own CPU time; nothing where none did anything.
/// Its time is that of all that ran one after the other.
pub fn measurement(groups: &[Group]) -> Option<Measurement> {
    let mut phases: BTreeMap<u64, f64> = BTreeMap::new();
    for Group { number, seconds, .. } in groups {
        let longest = phases.entry(*number).or_default();
        *longest = longest.max(*seconds);
    }
    let seconds = phases.into_values().sum();
    let cpu = Ledger { load: Some(groups.iter().map(|group| group.cpu_ns).sum()), ..Ledger::default() };
    let measurement = Measurement {
        seconds,
        reads: groups.iter().filter_map(|group| group.reads.clone()).reduce(joined),
        writes: groups.iter().filter_map(|group| group.writes.clone()).reduce(joined),
        latency: if let [only] = groups { only.mixed.clone() } else { None },
        cpu,
        ..Measurement::default()
    };
    (measurement.requests() > 0 && seconds > 0.0).then_some(measurement)
}

/// Quantiles of both do not follow from those of each, and are absent.
fn joined(one: Operations, other: Operations) -> Operations {
    let requests = one.requests + other.requests;
    let share = one.requests as f64 / requests.max(1) as f64;
    let mean = one.latency.mean * share + other.latency.mean * (1.0 - share);
    let latency = Latency { mean, max: one.latency.max.max(other.latency.max), ..Latency::default() };
    Operations { requests, bytes: one.bytes + other.bytes, latency }
}

/// Somebody's job file, on this disk, and by this engine where it names none.
pub fn with_target(job_file: &str, target: &str, engine: Option<&str>) -> String {
    let engine = engine.map_or(String::new(), |engine| format!("ioengine={engine}\n"));
    format!("[global]\nfilename={}\n{engine}\n{job_file}", escaped(target))
}

/// An engine that a job file names and that is another one than this.
pub fn other_engine<'a>(job_file: &'a str, engine: &str) -> Option<&'a str> {
    keys(job_file).filter(|(key, _)| *key == "ioengine").map(|(_, named)| named).find(|named| *named != engine)
}

/// A colon parts file names.
pub(crate) fn escaped(path: &str) -> String {
    path.replace(':', "\\:")
}

/// What was wrong, of the lines of a fio that failed: the first that says it, as those behind it are of what it gave up then.
pub fn complaint(log: &[String]) -> Option<&str> {
    let says_it =
        |line: &&String| (line.starts_with("fio:") && !line.ends_with(" dropped")) || line.starts_with("Bad option");
    let last = || log.iter().rev().find(|line| !line.trim().is_empty());
    log.iter().find(says_it).or_else(last).map(|line| line.trim().trim_start_matches("fio: "))
}

/// The keys of a job file and their values, as fio takes them, with blanks around the sign.
fn keys(job_file: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = job_file.lines().map(str::trim);
    lines.map(|line| line.split_once('=').map_or((line, ""), |(key, value)| (key.trim(), value.trim())))
}

/// Whether a job file may write: a job's `rw` or `readwrite` is not a read's.
pub fn may_write(job_file: &str) -> bool {
    keys(job_file).any(|(key, value)| matches!(key, "rw" | "readwrite") && !matches!(value, "read" | "randread"))
}

/// The key of a job file by which fio uses something else than the disk that it is run on: other files, which it adds to
/// that one or leaves behind, what an engine has on other machines, or what is said where nobody looks; or removes that disk.
pub fn goes_elsewhere(job_file: &str) -> Option<&str> {
    let goes_elsewhere = |key: &str, value: &str| match key {
        "filename" | "filename_format" | "directory" | "opendir" => true,
        "read_iolog" | "merge_blktrace_file" | "profile" => true,
        "unlink" | "unlink_each_loop" => value != "0",
        "ioengine" => matches!(value, "filedelete" | "dirdelete"),
        // Of engines: nbd, rbd and rados, net and rdma, http, nfs, glusterfs, libhdfs, dfs, libblkio, e4defrag, exec.
        "uri" | "pool" | "rbdname" | "hostname" | "http_host" | "nfs_url" | "volume" | "brick" | "namenode"
        | "cont" | "libblkio_path" | "donorname" | "program" => true,
        // `mmap:FILE`, which is removed at the end, too.
        "mem" | "iomem" => value.contains(':'),
        _ => key.starts_with("include") || (key.starts_with("write_") && key.ends_with("log")),
    };
    keys(job_file).find(|(key, value)| goes_elsewhere(key, value)).map(|(key, _)| key)
}

/// Whether a job file has fio give the disk, or the one that its file is on, another I/O scheduler: fio leaves it so, and cells of
/// other loads, and a user's machine, would have it from then on.
pub fn changes_the_scheduler(job_file: &str) -> bool {
    keys(job_file).any(|(key, _)| key == "ioscheduler")
}

/// How long files are to be by a job file, where that is a number: fio makes those that are shorter anew, with nothing in them.
pub fn sizes(job_file: &str) -> impl Iterator<Item = Bytes> {
    keys(job_file).filter(|(key, _)| matches!(*key, "size" | "filesize")).filter_map(|(_, size)| size.parse().ok())
}

/// The key of a job file after which fio's output does not tell which jobs ran side by side and which in turn.
pub fn hides_its_order(job_file: &str) -> Option<&str> {
    keys(job_file).map(|(key, _)| key).find(|key| matches!(*key, "new_group" | "wait_for"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{LoadKeys, expand};

    fn load(keys: &str) -> crate::plan::Load {
        expand(&toml::from_str::<LoadKeys>(keys).unwrap()).remove(0)
    }

    #[test]
    fn a_load_is_written_as_fios_job_file() {
        let load =
            load("rw = 'randrw'\nrwmixread = 70\nbs = '8k'\niodepth = 4\nnumjobs = 2\ndisks = 2\nruntime = '500ms'");
        let raw = std::path::Path::new("raw");
        let task = Task { load: &load, rate_iops: Some(1000.0), seed: 7 << 16, control: None, io_submit: false, raw };
        let text = job_file(&task, &sections(&load, &["/dev/a", "/tmp/b:c"]), engine(Some("io_uring")));
        for line in [
            "ioengine=io_uring",
            "rw=randrw",
            "rwmixread=70",
            "unified_rw_reporting=both",
            "bs=8192",
            "iodepth=4",
            "numjobs=2",
            "runtime=500ms",
            "ramp_time=1000ms",
            "rate_iops=175,75",
            "rate_process=poisson",
            "randseed=7",
            "norandommap=1",
            "[disk1]",
            "filename=/tmp/b\\:c",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} in {text}");
        }
    }

    #[test]
    fn a_job_that_goes_across_all_disks_names_them_all_and_has_its_share_of_the_rate() {
        let load = load("disks = 2\nnumjobs = 4\nacross_disks = true\nprocesses = true");
        let task = Task {
            load: &load,
            rate_iops: Some(1000.0),
            seed: 0,
            control: None,
            io_submit: false,
            raw: std::path::Path::new("raw"),
        };
        let text = job_file(&task, &sections(&load, &["/dev/vda", "/dev/vdb"]), "libaio");
        assert!(text.ends_with("[disk0]\nfilename=/dev/vda:/dev/vdb\n"), "{text}");
        assert!(text.contains("\nrate_iops=250\n") && !text.contains("thread"), "{text}");
        assert_eq!(load.name, "randread 4k QD1 4 jobs 2 disks across processes");
    }

    #[test]
    fn the_rate_that_is_recorded_is_the_one_that_fio_is_asked_for() {
        let asked = |keys: &str, total: f64| {
            let (load, raw) = (load(keys), std::path::Path::new("raw"));
            let task = Task { load: &load, rate_iops: Some(total), seed: 0, control: None, io_submit: false, raw };
            let text = job_file(&task, &sections(&load, &["/dev/vda"]), "libaio");
            let rate = text.lines().find_map(|line| line.strip_prefix("rate_iops=")).unwrap().to_owned();
            (rate, offered(&task).unwrap())
        };
        assert_eq!(asked("numjobs = 16", 22.4), ("1".into(), 16.0));
        assert_eq!(asked("numjobs = 16\nrw = 'write'", 16.0 * 2.5), ("3".into(), 48.0));
        assert_eq!(asked("numjobs = 2\nrw = 'randrw'", 5.0), ("1,1".into(), 4.0));
        // Of what the load does not make there is none, whatever its rate.
        assert_eq!(asked("rw = 'rw'\nrwmixread = 100", 10.0), ("10,1".into(), 10.0));
        assert_eq!(asked("rw = 'rw'\nrwmixread = 0", 10.0), ("1,10".into(), 10.0));

        let reads = Some(Operations { requests: 160, ..Operations::default() });
        let mut reached = Measurement { seconds: 10.0, reads, ..Measurement::default() };
        reached.offer(Some(asked("numjobs = 16", 22.4).1));
        assert_eq!((crate::results::shortfall([&reached]), reached.unstarted), (None, 0));
    }

    const OUTPUT: &str = r#"fio: a warning
{ "fio version": "fio-3.33", "jobs": [ { "jobname": "disk0", "error": 0, "job_runtime": 2000,
  "usr_cpu": 10.0, "sys_cpu": 15.0,
  "read": { "io_bytes": 8192, "runtime": 1000, "total_ios": 2,
    "clat_ns": { "mean": 1.0, "max": 2 },
    "lat_ns": { "mean": 1500.5, "max": 2000, "percentile": { "50.000000": 1000, "90.000000": 1900,
      "99.000000": 1990, "99.900000": 1999 } } },
  "write": { "io_bytes": 0, "runtime": 0, "total_ios": 0 } } ] }"#;

    #[test]
    fn what_fio_says_is_understood() {
        let groups = groups(OUTPUT).unwrap();
        let latency = Latency { mean: 1500.5, p50: 1000.0, p90: 1900.0, p99: 1990.0, p999: 1999.0, max: 2000.0 };
        let reads = Some(Operations { requests: 2, bytes: 8192, latency });
        let group = Group {
            name: "disk0".into(),
            number: 0,
            seconds: 1.0,
            reads,
            writes: None,
            mixed: None,
            cpu_ns: 500_000_000,
        };
        assert_eq!(groups, [group]);
    }

    #[test]
    fn of_several_intervals_the_last_whole_one_is_the_run() {
        let first = OUTPUT.replace("\"total_ios\": 2", "\"total_ios\": 1");
        let requests = |text: &str| measurement(&groups(text).unwrap()).unwrap().requests();
        assert_eq!(requests(&format!("{first}\nfio: a warning\n{OUTPUT}\nand more")), 2);
        assert_eq!(requests(&format!("{OUTPUT}\n{}", &first[..first.len() / 2])), 2);
    }

    #[test]
    fn fio_up_to_2_20_counts_kib() {
        let bytes =
            |version: &str| measurement(&groups(&OUTPUT.replace("fio-3.33", version)).unwrap()).unwrap().bytes();
        for version in ["fio-2.2.10", "fio-2.20", "fio-2.20-14-g1a2b", "fio-1.99.12"] {
            assert_eq!(bytes(version), 8192 << 10, "{version}");
        }
        for version in ["fio-2.21", "fio-2.99", "fio-3.1", "fio-3.36-dirty", "mine"] {
            assert_eq!(bytes(version), 8192, "{version}");
        }
    }

    #[test]
    fn quantiles_of_reads_and_writes_are_those_of_both_or_absent() {
        let mixed = OUTPUT.replace(
            r#""write": { "io_bytes": 0, "runtime": 0, "total_ios": 0 }"#,
            r#""write": { "io_bytes": 4096, "runtime": 1000, "total_ios": 1, "lat_ns": { "mean": 3000.0, "max": 3000,
               "percentile": { "99.000000": 3000 } } },
               "mixed": { "io_bytes": 12288, "runtime": 1000, "total_ios": 3, "lat_ns": { "mean": 2000.0, "max": 3000,
               "percentile": { "99.000000": 2990 } } }"#,
        );
        let of = |text: &str| measurement(&groups(text).unwrap()).unwrap();
        assert_eq!(of(&mixed).latency(|latency| latency.p99), Some(2990.0));
        let apart = of(&mixed.replace("mixed", "other"));
        assert_eq!(apart.latency(|latency| latency.p99), None);
        assert!((apart.mean_latency().unwrap() - 2000.333).abs() < 0.01, "{:?}", apart.mean_latency());
    }

    #[test]
    fn requests_that_fio_tells_of_as_mixed_alone_or_as_trims_are_requests() {
        let of = |text: &str| measurement(&groups(text).unwrap()).unwrap();
        let mixed = of(&OUTPUT.replace("\"read\":", "\"mixed\":").replace("\"write\":", "\"other\":"));
        assert_eq!((mixed.requests(), mixed.bytes(), mixed.seconds), (2, 8192, 1.0));
        assert_eq!(mixed.latency(|latency| latency.p99), Some(1990.0));
        let trims = OUTPUT.replace("\"read\":", "\"trim\":");
        let (alone, beside) = (of(&trims), of(&trims.replace("\"total_ios\": 0", "\"total_ios\": 2")));
        assert_eq!(
            [alone, beside].map(|one| (one.requests(), one.reads, one.seconds)),
            [(2, None, 1.0), (4, None, 1.0)]
        );
    }

    #[test]
    fn jobs_that_wait_for_each_other_have_the_time_of_all_and_those_side_by_side_of_the_longest() {
        let job = |group: u32, seconds: f64| {
            serde_json::json!({
                "jobname": "job", "groupid": group, "error": 0, "job_runtime": seconds * 1e3,
                "read": { "io_bytes": 4_096_000.0 * seconds, "runtime": seconds * 1e3, "total_ios": (1000.0 * seconds) as u64 },
            })
        };
        let of = |jobs: &[(u32, f64)]| {
            let jobs: Vec<_> = jobs.iter().map(|(group, seconds)| job(*group, *seconds)).collect();
            let one = measurement(&groups(&serde_json::json!({ "jobs": jobs }).to_string()).unwrap()).unwrap();
            (one.requests(), one.seconds)
        };
        assert_eq!(of(&[(0, 1.0), (0, 2.0)]), (3000, 2.0));
        assert_eq!(of(&[(0, 1.0), (1, 1.0)]), (2000, 2.0));
        assert_eq!(of(&[(0, 1.0), (0, 2.0), (1, 4.0), (2, 3.0), (2, 3.0)]), (13_000, 9.0));
        for (text, key) in [("[a]\nrw=read\nstonewall\n#new_group", None), ("[a]\n new_group =1", Some("new_group"))] {
            assert_eq!(hides_its_order(text), key);
        }
        assert_eq!(hides_its_order("[a]\n[b]\nwait_for=a"), Some("wait_for"));
    }

    #[test]
    fn what_was_wrong_is_fios_first_line_that_says_it() {
        let of = |lines: &[&str]| {
            complaint(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>()).map(str::to_owned)
        };
        let dropped = "fio: job a dropped";
        for line in ["failed parsing rw=reed", "engine none not loadable"] {
            let said = of(&["note: both iodepth", &format!("fio: {line}"), "fio: failed to load engine", dropped]);
            assert_eq!(said.as_deref(), Some(line));
        }
        assert_eq!(of(&["Bad option <nosuch=1>", dropped]).as_deref(), Some("Bad option <nosuch=1>"));
        assert_eq!(of(&["x is not empty there", " "]).as_deref(), Some("x is not empty there"));
        assert_eq!((of(&[dropped]).as_deref(), of(&[])), (Some("job a dropped"), None));
    }

    #[test]
    fn a_job_that_failed_is_no_result() {
        let error = groups(&OUTPUT.replace("\"error\": 0", "\"error\": 28")).unwrap_err();
        assert_eq!(error, "job 'disk0' failed: No space left on device (os error 28)");
        assert!(groups("fio: nothing worked").is_err());
    }

    #[test]
    fn a_job_file_writes_if_one_of_its_jobs_does() {
        assert!(!may_write(
            "[global]\nrw=randread\n[a]\n readwrite = read\n# rw=write\nwrite_hint=none\nrw\t=\trandread"
        ));
        for line in ["rw=randrw", "rw =write", "\treadwrite\t=\ttrim", " readwrite = x", "rw=${HOW}", "rw"] {
            assert!(may_write(&format!("[a]\nrw=randread\n[b]\n{line}\n")), "{line}");
        }
    }

    #[test]
    fn a_job_file_is_run_by_the_engine_that_it_names_and_else_by_the_subjects() {
        let text = with_target("[global]\nrw=read\n[a]\n", "/d", Some("io_uring"));
        assert!(text.starts_with("[global]\nfilename=/d\nioengine=io_uring\n\n[global]"), "{text}");
        let named = "[global]\nioengine = libaio\n[a]\n";
        assert_eq!((other_engine("[a]\n", "libaio"), other_engine(named, "libaio")), (None, None));
        assert_eq!(other_engine(named, "io_uring"), Some("libaio"));
    }

    #[test]
    fn a_job_file_stays_on_the_disk_that_it_is_run_on() {
        let on_it = "[global]\nioengine=libaio\n# filename=/dev/sda\n[filename]\nrw=write\nmem=mmaphuge\nwrite_barrier=8\nnrfiles=1\nunlink=0\n";
        assert_eq!(goes_elsewhere(on_it), None);
        for (line, key) in [
            (" filename = /dev/sda", "filename"),
            ("filename_format=$jobname", "filename_format"),
            ("directory=/srv", "directory"),
            ("opendir=/srv", "opendir"),
            ("include more.fio", "include more.fio"),
            ("read_iolog=log", "read_iolog"),
            ("write_iolog=/dev/sda", "write_iolog"),
            ("write_bw_log", "write_bw_log"),
            ("iomem=mmap:/srv/file", "iomem"),
            ("rbdname=root", "rbdname"),
            ("uri=nbd://h/x", "uri"),
            ("unlink=1", "unlink"),
            ("unlink_each_loop", "unlink_each_loop"),
            ("ioengine=filedelete", "ioengine"),
        ] {
            assert_eq!(goes_elsewhere(&format!("{on_it}{line}\n")), Some(key), "{line}");
        }
    }

    #[test]
    fn how_long_a_job_file_wants_its_files_is_known_where_it_is_a_number() {
        let text = "[global]\nsize = 1G\n# size=2G\n[a]\nfilesize=16m\nsize=50%\nfilesize=1k-4k\nio_size=8G\n";
        assert_eq!(sizes(text).collect::<Vec<_>>(), [Bytes(1 << 30), Bytes(16 << 20)]);
    }
}
