//! Applications in the guest, on an ext4 of their own: rsync of a tree of files, and PostgreSQL under pgbench.
//!
//! Every measurement makes the file system anew, and takes it off the disk when it is over: the next may be another
//! guest's. What is made ready before the first mark is not measured.

use std::time::Duration;

use super::mark::MARK;
use super::qemu::APPLICATIONS;
use crate::results::{Latency, Measurement, Operations};
use crate::stack::Task;

/// How long one may take beside the plan's times: a tree or a database is made first, maybe under emulation.
pub const LIMIT: Duration = Duration::from_secs(1200);
/// How much there is to copy, or in the database, if the plan does not say, in bytes.
const SIZE: u64 = 256 << 20;
/// Of 100 000 files, how many are 256 bytes long, how many twice that, and so on: sizes of a log-normal distribution whose
/// median is 2 kB, so that the mean is that of the published tree, 15 kB (46 GB in 3.1 million files).
const SIZES: [u64; 17] =
    [19_639, 10_933, 13_015, 13_756, 12_910, 10_757, 7958, 5227, 3049, 1579, 726, 296, 107, 35, 10, 3, 1];
/// Files in a directory.
const FILES: u64 = 250;
/// What one unit of pgbench's scale takes, in bytes, about.
const UNIT: u64 = 16 << 20;

/// Makes a file system on the disk and mounts it where the applications see it; undone at the end, however that comes.
fn on_a_file_system(path: &str, script: &str) -> String {
    format!(
        r#"set -eu
{MARK}
for disk in /sys/block/vd*; do
  [ "$(cat "$disk/serial")" != {APPLICATIONS} ] || applications=/dev/${{disk##*/}}
done
mkdir -p /apps /dev/shm
if ! [ -e /apps/tmp ]; then
  mount -t ext4 -o ro,noload "$applications" /apps
  mount -t proc proc /apps/proc
  mount -t tmpfs -o mode=1777 tmpfs /apps/tmp
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  mount --rbind /dev /apps/dev
fi
in_apps() {{ chroot /apps "$@"; }}
postgres() {{ program=$1; shift; chroot --userspec=70:70 /apps "/postgresql/$program" "$@"; }}
mkfs.ext4 -q -F -E nodiscard {path} >&2
mount -t ext4 {path} /apps/mnt
stop() {{ true; }}
# What a database that was stopped has left behind takes a moment to end.
leave() {{
  for again in $(seq 100); do
    umount /apps/mnt 2>/dev/null && return
    sleep 0.1
  done
  umount /apps/mnt
}}
trap 'status=$?; stop; cd /; leave; exit $status' EXIT
{script}
"#
    )
}

/// The lengths of a tree's files, and how many of each there are: about `size` bytes together.
fn files(size: u64) -> Vec<(u64, u64)> {
    let lengths = SIZES.iter().enumerate().map(|(class, count)| (256 << class, *count));
    let (all, bytes) = lengths.clone().fold((0, 0), |(all, bytes), (len, count)| (all + count, bytes + len * count));
    // Rounding takes what comes up to here, so that rare lengths are there where there are files enough.
    let up_to = |count: u64| (u128::from(count) * u128::from(size) / u128::from(bytes)) as u64;
    let mut before = 0;
    let of = lengths.map(|(len, count)| {
        let place = up_to(before);
        before += count;
        (len, up_to(before) - place)
    });
    let mut files: Vec<_> = of.filter(|(_, count)| *count > 0).collect();
    if files.is_empty() {
        files.push((bytes / all, 1));
    }
    files
}

/// Copies a tree of files with rsync, on one file system, from a cold cache until all is on the disk.
pub fn rsync(task: &Task<'_>, path: &str) -> String {
    let files = files(task.load.keys.size.map_or(SIZE, |size| size.0));
    let all: u64 = files.iter().map(|(_, count)| count).sum();
    let directories = all.div_ceil(FILES);
    let each: Vec<String> = files.iter().map(|(len, count)| format!("{len}:{count}")).collect();
    let script = format!(
        r#"mkdir /apps/mnt/from
for directory in $(seq {directories}); do
  mkdir "/apps/mnt/from/$directory"
  # Every directory has its share of each length.
  for each in {each}; do
    len=${{each%:*}} count=${{each#*:}}
    count=$((count * directory / {directories} - count * (directory - 1) / {directories}))
    [ $count = 0 ] || head -c $((count * len)) /dev/urandom | split -a 4 -b $len - "/apps/mnt/from/$directory/file$len-"
  done
done
sync
echo 3 >/proc/sys/vm/drop_caches
mark begin
in_apps rsync -a /mnt/from/ /mnt/to/ >&2
sync
mark end
copied=$(find /apps/mnt/to -type f | wc -l)
[ "$copied" = {all} ] || {{ echo "rsync has copied $copied files of {all}" >&2; exit 1; }}
echo "files $copied"
"#,
        each = each.join(" "),
    );
    on_a_file_system(path, &script)
}

/// A database under `iodepth` clients, closed loop or at a rate; prints its rate and how long its transactions took.
pub fn pgbench(task: &Task<'_>, path: &str) -> String {
    let (load, keys) = (task.load, &task.load.keys);
    let scale = (keys.size.map_or(SIZE, |size| size.0) / UNIT).max(1);
    // The log of a busy database is larger than a small one, and the disk is as large as the plan says.
    let wal = (scale * (UNIT >> 20) / 2).max(64);
    let clients = load.iodepth;
    let threads = load.numjobs.min(clients);
    let ramp = keys.ramp_time.0.ceil() as u64;
    let seconds = keys.runtime.0.ceil().max(1.0) as u64;
    let rate = task.rate_iops.map_or(String::new(), |rate| format!("--rate={}", rate.max(0.1)));
    let run = format!("postgres pgbench -h /tmp -n -c {clients} -j {threads} --random-seed={}", task.seed >> 16);
    let script = format!(
        r#"mkdir /apps/mnt/data
chown 70:70 /apps/mnt/data
postgres initdb -D /mnt/data --no-locale -E UTF8 --no-sync >/tmp/initdb 2>&1 || {{ cat /tmp/initdb >&2; exit 1; }}
control() {{ postgres pg_ctl -D /mnt/data -s -w "$@"; }}
stop() {{ control -m immediate stop >/dev/null 2>&1 || true; }}
control -t 300 -l /tmp/postgres.log -o '-k /tmp -c listen_addresses= -c jit=off -c shared_buffers=64MB -c max_wal_size={wal}MB' start >&2 ||
  {{ cat /apps/tmp/postgres.log >&2; exit 1; }}
postgres pgbench -h /tmp -i -q -s {scale} postgres >/tmp/made 2>&1 || {{ cat /tmp/made >&2; exit 1; }}
postgres psql -h /tmp -q -c CHECKPOINT postgres >&2
[ {ramp} = 0 ] || {run} -T {ramp} {rate} postgres >/dev/null 2>&1
rm -f /apps/tmp/log*
mark begin
{run} -T {seconds} {rate} -l --log-prefix=/tmp/log postgres 2>&1
mark end
cat /apps/tmp/log* | awk '{{ print $3 }}' | sort -n | awk '
  {{ time[NR] = $1; sum += $1 }}
  function at(share) {{ rank = int(share * NR + 0.999999); return time[rank < 1 ? 1 : rank] }}
  END {{
    if (!NR) {{ print "pgbench finished no transaction in {seconds} s" >"/dev/stderr"; exit 1 }}
    print "latency_us", NR, sum / NR, at(0.5), at(0.9), at(0.99), at(0.999), time[NR]
  }}'
"#
    );
    on_a_file_system(path, &script)
}

/// What pgbench has printed, and the latencies of its log.
///
/// # Errors
/// It has printed something else.
pub fn transactions(output: &str, between: f64) -> Result<Measurement, String> {
    let rest = |prefix: &str| output.lines().find_map(|line| line.strip_prefix(prefix)).map(str::trim);
    let tps = rest("tps = ").and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok());
    let tps =
        tps.filter(|tps| tps.is_finite()).ok_or("pgbench in the guest did not say how many transactions it ran")?;
    let fields =
        rest("latency_us ").unwrap_or_default().split(' ').map(str::parse::<f64>).collect::<Result<Vec<_>, _>>();
    let Ok([requests, mean, p50, p90, p99, p999, max]) = fields.as_deref() else {
        return Err("pgbench in the guest did not say how long its transactions took".into());
    };
    let ns = |us: &f64| us * 1e3;
    let latency = Latency { mean: ns(mean), p50: ns(p50), p90: ns(p90), p99: ns(p99), p999: ns(p999), max: ns(max) };
    Ok(Measurement {
        // pgbench leaves out what it takes to connect.
        seconds: if tps > 0.0 { requests / tps } else { between },
        writes: Some(Operations { requests: *requests as u64, bytes: 0, latency }),
        transactions: Some(tps),
        ..Measurement::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
pgbench (15.20 (Debian 15.20-0+deb12u1))
transaction type: <builtin: TPC-B (sort of)>
number of transactions actually processed: 482
latency average = 4.153 ms
initial connection time = 5.320 ms
tps = 240.789 (without initial connection time)
latency_us 482 4153.2 3900 5100 9000 20000 31000
";

    #[test]
    fn a_tree_has_many_small_files_and_a_few_large_ones() {
        for size in [1 << 20, 512 << 20, 46_000_000_000] {
            let files = files(size);
            let (count, bytes) =
                files.iter().fold((0, 0), |(all, bytes), (len, count)| (all + count, bytes + len * count));
            assert!((0.7..1.3).contains(&(bytes as f64 / size as f64)), "{size}: {bytes}");
            let small: u64 = files.iter().filter(|(len, _)| *len <= 2048).map(|(_, count)| count).sum();
            assert!((0.5..0.65).contains(&(small as f64 / count as f64)), "half are below 2 kB: {files:?}");
        }
        // As was published: 3.1 million.
        let published: u64 = files(46_000_000_000).iter().map(|(_, count)| count).sum();
        assert!((3_000_000..3_100_000).contains(&published), "{published}");
        assert_eq!(files(46_000_000_000).last().map(|(len, _)| *len), Some(16 << 20));
        assert_eq!(files(1).len(), 1, "there is one file at least");
    }

    #[test]
    fn a_databases_transactions_are_its_requests() {
        let measurement = transactions(OUTPUT, 2.0).unwrap();
        assert_eq!(measurement.transactions, Some(240.789));
        let writes = measurement.writes.as_ref().unwrap();
        assert_eq!((writes.requests, writes.latency.p99, writes.latency.mean), (482, 9e6, 4_153_200.0));
        assert_eq!(measurement.latency(|latency| latency.max), Some(31e6));
    }

    #[test]
    fn what_is_missing_in_pgbenchs_words_is_said() {
        assert!(transactions("", 1.0).unwrap_err().contains("how many"));
        assert!(transactions("tps = nan\n", 1.0).unwrap_err().contains("how many"));
        let without_log = &OUTPUT[..OUTPUT.find("latency_us").unwrap()];
        assert!(transactions(without_log, 1.0).unwrap_err().contains("how long"));
        assert!(transactions(&format!("{without_log}latency_us 0 -nan\n"), 1.0).is_err());
    }
}
