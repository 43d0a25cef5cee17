//! What the agent is given to do: scripts for the guest's shell, and what to make of what they print.

use std::fs;
use std::time::Duration;

use egret_loadgen::load::Edge;

use super::applications;
use super::mark::{CLOCK, MARK};
use super::qemu::APPLICATIONS;
use crate::fingerprint;
use crate::plan::Application;
use crate::results::Measurement;
use crate::stack::options::IDLE;
use crate::stack::{Task, Unable, fio, no_scheduler};

/// How much longer than it should fio may take: to start, and to write its report, under emulation.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Ends the job file in a script.
const END: &str = "EGRET-END-OF-JOB-FILE";

/// Where scripts run.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    folder: &'static str,
    shell: &'static str,
}

impl Place {
    /// In the guests that the lab boots.
    pub const OF_GUESTS: Self = Self { folder: "/tmp", shell: "dash" };
    /// In the folder that the agent has made.
    pub const OWN_FOLDER: Self = Self { folder: ".", shell: "sh" };
}

/// A script, how long it may take, and how to read what it prints.
#[derive(Debug)]
pub struct Work {
    /// For the guest's shell.
    pub script: String,
    /// After that it has failed.
    pub limit: Duration,
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Fio,
    Rsync,
    Pgbench,
}

/// The edge of what is measured that a mark tells of, if it does.
pub fn edge(mark: &str) -> Option<Edge> {
    match mark.split(' ').next() {
        Some("begin") => Some(Edge::Begin),
        Some("end") => Some(Edge::End),
        _ => None,
    }
}

/// Finds so many disks under test, beside the idle ones, gives them an I/O scheduler, and prints each disk's path with the
/// schedulers that it has, as [`disk_with`] reads them.
pub fn find_disks(count: usize, idle: u16, scheduler: &str) -> String {
    format!(
        r#"
set -eu
look() {{
  for disk in /sys/block/vd* /sys/block/sd*; do
    [ -b "/dev/${{disk##*/}}" ] || continue
    case "$(cat "$disk/serial" 2>/dev/null)" in
      {APPLICATIONS}) continue ;;
      {IDLE}) echo "$disk" >>/tmp/idle && continue ;;
    esac
    echo "/dev/${{disk##*/}}"
  done
}}
for attempt in $(seq 300); do # a SCSI disk may take its time
  : >/tmp/idle
  look >/tmp/disks
  [ "$(wc -l </tmp/disks)" -lt {count} ] || [ "$(wc -l </tmp/idle)" -lt {idle} ] || break
  sleep 0.1
done
[ "$(wc -l </tmp/disks)" = {count} ] || {{ echo "the guest should have {count} disks and has $(cat /tmp/disks)" >&2; exit 1; }}
[ "$(wc -l </tmp/idle)" = {idle} ] || {{ echo "the guest should have {idle} idle disks and has $(wc -l </tmp/idle)" >&2; exit 1; }}
for module in /modules/{scheduler}.ko /modules/{scheduler}-iosched.ko; do
  [ ! -f "$module" ] || insmod "$module"
done
while read -r disk; do
  queue=/sys/block/${{disk##*/}}/queue/scheduler
  # One that the kernel lacks is refused, and what is in force then tells of it.
  echo {scheduler} >"$queue" 2>/dev/null || :
  echo "$disk $(cat "$queue")"
done </tmp/disks
"#
    )
}

/// A disk's path, from a line that says which schedulers it has and which of them is in force.
///
/// # Errors
/// Another is in force than the one that was wanted.
pub fn disk_with(scheduler: &str, line: &str) -> Result<String, Unable> {
    let (path, all) = line.split_once(' ').unwrap_or((line, ""));
    match fingerprint::scheduler(all) == scheduler {
        true => Ok(path.to_owned()),
        false => {
            Err(no_scheduler(scheduler, format_args!("the guest's {path}"), format_args!("it has {}", all.trim())))
        }
    }
}

/// Sends the marks of a load of fio's. Each of its jobs runs this when it starts, and the first one counts: fio itself may
/// take long to start.
const MARKS: &str = "mkdir begun 2>/dev/null || exit 0
(sleep $RAMP; mark begin; sleep $RUNTIME; mark end; mkdir ended) &";

impl Work {
    /// For a load on the disks at `paths`.
    ///
    /// # Errors
    /// The plan's job file cannot be read.
    pub fn of(task: &Task<'_>, paths: &[String], place: Place) -> Result<Self, Unable> {
        let Some(application) = task.load.keys.application else { return Self::fio(task, paths, place) };
        let path = paths.first().map_or("", String::as_str);
        let (script, output) = match application {
            Application::Rsync => (applications::rsync(task, path), Output::Rsync),
            Application::Pgbench => (applications::pgbench(task, path), Output::Pgbench),
        };
        Ok(Self { script, limit: applications::LIMIT + task.load.span(), output })
    }

    fn fio(task: &Task<'_>, paths: &[String], Place { folder, shell }: Place) -> Result<Self, Unable> {
        let targets: Vec<&str> = paths.iter().map(String::as_str).collect();
        let keys = &task.load.keys;
        let (job, marks) = match &keys.jobfile {
            None => {
                let job = fio::job_file(task, &fio::sections(task.load, &targets), "libaio");
                let started = format!("[global]\nexec_prerun={shell} {folder}/started\n");
                (job.replacen("[global]\n", &started, 1), MARKS)
            }
            Some(path) => {
                let text = fs::read_to_string(path).map_err(|e| Unable::failed(format!("{}: {e}", path.display())))?;
                (fio::with_target(&text, targets.first().copied().unwrap_or_default(), None), "")
            }
        };
        let (ramp, runtime) = (keys.ramp_time.0, keys.runtime.0);
        // A file that is shorter than what is to be read fio would write anew, and over ssh it may be the user's.
        let readonly = if task.load.writes() { "" } else { " --readonly" };
        let script = format!(
            r#"cd {folder}
cat >load.fio <<'{END}'
{job}
{END}
rm -rf begun ended
cat >started <<'{END}'
{MARK}
{marks}
{END}
{MARK}
{CLOCK}
tell_clock before
RAMP={ramp} RUNTIME={runtime} fio{readonly} --output-format=json --output=fio.json load.fio >&2
status=$?
while [ -d begun ] && ! [ -d ended ]; do sleep 0.1; done
tell_clock after
cat fio.json
exit $status
"#
        );
        Ok(Self { script, limit: PATIENCE + fio::length(task.load), output: Output::Fio })
    }

    /// What it has printed, as a measurement without a ledger; `between` marks so many seconds have passed.
    ///
    /// # Errors
    /// It has printed something else.
    pub fn measurement(&self, output: &str, between: f64) -> Result<Measurement, String> {
        match self.output {
            Output::Fio => {
                let groups = fio::groups(output).map_err(|error| format!("fio in the guest: {error}"))?;
                fio::measurement(&groups).ok_or_else(|| "fio in the guest did nothing".into())
            }
            Output::Rsync => Ok(Measurement { seconds: between, ..Measurement::default() }),
            Output::Pgbench => applications::transactions(output, between),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_of_a_guest_has_the_scheduler_that_was_wanted_or_the_cell_says_which_it_has() {
        let vda = Ok("/dev/vda".to_owned());
        assert_eq!(disk_with("none", "/dev/vda [none] mq-deadline "), vda);
        assert_eq!(disk_with("none", "/dev/vda none"), vda);
        assert_eq!(disk_with("mq-deadline", "/dev/vda none [mq-deadline]"), vda);
        for line in ["/dev/vda [none] mq-deadline", "/dev/vda [none]", "/dev/vda none", "/dev/vda ", "/dev/vda"] {
            let Err(Unable::Impossible(reason)) = disk_with("mq-deadline", line) else { panic!("{line}") };
            assert!(reason.starts_with("no scheduler 'mq-deadline' for the guest's /dev/vda: it has"), "{reason}");
        }
    }
}
