//! The system calls that each kind of thread of a daemon makes, as `strace` reports them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use egret_confine::ThreadKind;
use egret_confine::rules::{RULES, Rule};

use super::server::Program;

impl Program {
    /// The same, with every system call written to `record`.
    pub fn recorded(self, record: &Path) -> Self {
        let record = record.to_str().expect("our own path");
        // Numbers as they are, but for the names of files. The daemon stays our child.
        let strace = "strace -D -f -Y -X raw -e raw=!openat -e signal=none -s 200 -o";
        self.after(strace.split(' ').chain([record]))
    }
}

/// What threads did once they were confined.
#[derive(Default)]
pub struct Calls {
    /// Rules that a call needed, by their place in the table, and the kinds that made it.
    used: Vec<(usize, ThreadKind)>,
    /// Calls that no rule allows, and the kinds of threads that made them.
    pub refused: BTreeSet<String>,
}

impl Calls {
    /// Adds what was [recorded](Program::recorded) of a daemon that has ended. Its I/O threads are called `io...`, its
    /// exports `e...`.
    pub fn add(&mut self, record: &Path) {
        let text = std::fs::read_to_string(record).expect("a record");
        let process = text.split_once('<').and_then(|(process, _)| process.parse().ok()).expect("its first line");
        let births = births(&text);
        let mut kinds: BTreeMap<u32, ThreadKind> = BTreeMap::new();
        for (at, line) in text.lines().enumerate() {
            // A thread inherits what its starter is when it starts it, and says what it is itself by its filter. Numbers may
            // come again.
            if let Some(born) = births.get(&at) {
                let inherited = line.split_once('<').and_then(|(parent, _)| kinds.get(&parent.parse().ok()?).copied());
                kinds.remove(born);
                kinds.extend(inherited.map(|kind| (*born, kind)));
            }
            // Of a line that was interrupted by another thread's the beginning tells everything.
            let Some(Line { thread, name, call, arguments }) = Line::parse(line) else { continue };
            if let Some(kind) = kinds.get(&thread) {
                self.note(*kind, call, arguments, process, name);
            }
            if call == "seccomp" {
                kinds.insert(thread, kind_of(name));
            }
        }
    }

    fn note(&mut self, kind: ThreadKind, call: &str, arguments: &str, process: u32, name: &str) {
        let numbers: Vec<u64> = arguments.split(", ").map(number).collect();
        let mut allowed = false;
        for (place, rule) in RULES.iter().enumerate().filter(|(_, rule)| rule.call == call && rule.is_for(kind)) {
            if rule.admits(&numbers, process) {
                allowed = true;
                if !self.used.contains(&(place, kind)) {
                    self.used.push((place, kind));
                }
            }
        }
        // The C library asks how many processors there are when there is a ninth thread, and goes by another way.
        let is_harmless = call == "clone3"
            || ["/sys/devices/system/cpu/online", "/proc/stat"].iter().any(|path| arguments.contains(path));
        if !allowed && !is_harmless {
            self.refused.insert(format!("{kind}, as {name}: {call}({arguments})"));
        }
    }

    /// Rules that no call needed, and the kinds of threads they are for.
    pub fn unused(&self) -> Vec<String> {
        let by = |place: usize, kind: ThreadKind| self.used.contains(&(place, kind));
        let unused = |(place, rule): (usize, &'static Rule)| {
            // What every thread may do it is enough for one to have done.
            let any = rule.who.len() == ThreadKind::ALL.len() && rule.who.iter().any(|kind| by(place, *kind));
            rule.who
                .iter()
                .filter(move |kind| !any && !by(place, **kind))
                .map(move |kind| format!("{kind}: {} {}", rule.call, rule.shown))
        };
        // The program may be of another build than this test, and what is installed here older than what makes the call.
        let is_made = |rule: &Rule| {
            !rule.why.contains("newer")
                && (super::server::is_of_this_build() || !rule.why.ends_with("in a debug build"))
        };
        RULES.iter().enumerate().filter(|(_, rule)| is_made(rule)).flat_map(unused).collect()
    }
}

/// A thread's kind, by its name when it is confined.
fn kind_of(name: &str) -> ThreadKind {
    match name {
        "egret" | "egret-changes" | "egret-call" | "egret-teardown" | "egret-reopened" | "egret-ending" => {
            ThreadKind::Control
        }
        "egret-metrics" => ThreadKind::Metrics,
        "egret-watchdog" => ThreadKind::Watchdog,
        "disk-worker" => ThreadKind::Worker,
        "log" => ThreadKind::Log,
        "egret-nbd" | "nbd" => ThreadKind::Connector,
        "egret-reserved" => ThreadKind::Reservations,
        "nbd-server" => ThreadKind::Session,
        "rbd" => ThreadKind::Rbd,
        "egret-closer" => ThreadKind::Closer,
        name if name.starts_with("io") => ThreadKind::Io,
        name if name.starts_with('e') => ThreadKind::Session,
        other => panic!("a thread called {other} is confined"),
    }
}

/// One system call, from its beginning.
struct Line<'a> {
    thread: u32,
    name: &'a str,
    call: &'a str,
    arguments: &'a str,
}

impl<'a> Line<'a> {
    /// `1234<name> call(1, 0x2) = 3`, or without its end.
    fn parse(line: &'a str) -> Option<Self> {
        let (thread, rest) = line.split_once('<')?;
        let (name, rest) = rest.split_once("> ")?;
        let (call, rest) = rest.trim_start().split_once('(')?;
        let is_word = |word: &str| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let end = rest.rfind(") ").unwrap_or(rest.find(" <unfinished").unwrap_or(rest.len()));
        is_word(call).then_some(Self { thread: thread.parse().ok()?, name, call, arguments: &rest[..end] })
    }
}

/// The threads that are started, by the lines in which that begins.
fn births(text: &str) -> BTreeMap<usize, u32> {
    let mut begun: BTreeMap<&str, usize> = BTreeMap::new();
    let mut births = BTreeMap::new();
    for (at, line) in text.lines().enumerate() {
        let Some((parent, rest)) = line.split_once('<') else { continue };
        if rest.contains("> clone") {
            begun.insert(parent, at);
        } else if !rest.contains("> <... clone") {
            continue;
        }
        // It may tell of it only after others have had their say, the new one too.
        if let Some((_, child)) = rest.rsplit_once(" = 0x")
            && let (Some(begun), Ok(child)) = (begun.get(parent), u32::from_str_radix(child, 16))
        {
            births.insert(*begun, child);
        }
    }
    births
}

fn number(argument: &str) -> u64 {
    let argument = argument.trim();
    match argument.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).unwrap_or(u64::MAX),
        None => argument.parse().unwrap_or(u64::MAX),
    }
}
