//! The file format, read. Whoever wrote the bytes is not trusted: memory is bounded by their number.

use thiserror::Error;

use super::text::{COLUMNS, MAGIC};
use super::{Ready, Record, Trace};
use crate::{BlockCost, EventKind, Nanos, Slot};

/// Why some bytes are not a trace this library reads; one line each.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TraceError {
    /// The bytes are something else altogether.
    #[error("not a trace of waits: it must begin with '{MAGIC} {this}'", this = Trace::VERSION)]
    NotATrace,
    /// A trace, from another version of the format.
    #[error("a trace of version {0}; this egret reads version {this}", this = Trace::VERSION)]
    OtherVersion(String),
    /// The trace ends before what it promises.
    #[error("truncated: {0}")]
    Truncated(String),
    /// A line that does not say what it must.
    #[error("line {line}: {wrong}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What was expected and what was found.
        wrong: String,
    },
}

impl Trace {
    /// Reads what [`to_string`](ToString::to_string) wrote.
    ///
    /// # Errors
    /// The first thing that is wrong, and in which line.
    pub fn parse(bytes: &[u8]) -> Result<Self, TraceError> {
        let mut lines = Lines { rest: bytes, line: 0 };
        let version = lines.next().ok().and_then(|first| first.strip_prefix(MAGIC)).ok_or(TraceError::NotATrace)?;
        match version.strip_prefix(' ') {
            Some(version) if version == Self::VERSION.to_string() => {}
            Some(version) => return Err(TraceError::OtherVersion(shown(version))),
            None => return Err(TraceError::NotATrace),
        }

        let note = lines.header("note")?;
        if note.len() > Self::LONGEST_NOTE {
            return Err(lines.wrong(format!("a note of {} bytes, at most {} fit", note.len(), Self::LONGEST_NOTE)));
        }
        let note = note.to_owned();
        let cpu = Nanos(lines.number("block-cpu-ns")?);
        let latency = Nanos(lines.number("wakeup-latency-ns")?);
        let lost = lines.number("lost")?;
        let promised = lines.number("waits")?;
        let promised = usize::try_from(promised)
            .ok()
            .filter(|&waits| waits <= Self::MOST_WAITS)
            .ok_or_else(|| lines.wrong(format!("{promised} waits, at most {} are read", Self::MOST_WAITS)))?;
        let columns = lines.header("columns")?;
        if columns != COLUMNS {
            return Err(lines.wrong(format!("columns must be '{COLUMNS}', got '{}'", shown(columns))));
        }

        // A promise is cheap and memory is not: the shortest record and its line end take twelve bytes.
        let mut waits = Vec::with_capacity(promised.min(lines.rest.len() / 12 + 1));
        while waits.len() < promised {
            if lines.rest.is_empty() {
                return Err(TraceError::Truncated(format!("{promised} waits promised, {} found", waits.len())));
            }
            let line = lines.next()?;
            waits.push(record(line).map_err(|wrong| lines.wrong(wrong))?);
        }
        if !lines.rest.is_empty() {
            lines.line += 1;
            return Err(lines.wrong(format!("more than the {promised} waits promised")));
        }
        Ok(Self { note, block: BlockCost { cpu, latency }, lost, waits })
    }
}

struct Lines<'a> {
    rest: &'a [u8],
    line: usize,
}

impl<'a> Lines<'a> {
    /// The next line. One without its end is not taken: its last number may have lost digits.
    fn next(&mut self) -> Result<&'a str, TraceError> {
        self.line += 1;
        let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') else {
            return Err(TraceError::Truncated(format!("line {} has no end", self.line)));
        };
        let (line, rest) = self.rest.split_at(end);
        self.rest = &rest[1..];
        std::str::from_utf8(line).map_err(|_| self.wrong("not text".to_owned()))
    }

    fn header(&mut self, key: &str) -> Result<&'a str, TraceError> {
        if self.rest.is_empty() {
            return Err(TraceError::Truncated(format!("no '{key}' line")));
        }
        let line = self.next()?;
        match line.strip_prefix(key).and_then(|value| value.strip_prefix(' ')) {
            Some(value) => Ok(value),
            None => Err(self.wrong(format!("expected '{key} ...', got '{}'", shown(line)))),
        }
    }

    fn number(&mut self, key: &str) -> Result<u64, TraceError> {
        let value = self.header(key)?;
        number(value, key).map_err(|wrong| self.wrong(wrong))
    }

    fn wrong(&self, wrong: String) -> TraceError {
        TraceError::Line { line: self.line, wrong }
    }
}

fn record(line: &str) -> Result<Record, String> {
    let mut words = line.split(' ');
    let mut word =
        |what: &str| words.next().filter(|word| !word.is_empty()).ok_or_else(|| format!("{what} is missing"));
    let length = Nanos(number(word("length-ns")?, "length-ns")?);
    let spun = Nanos(number(word("spun-ns")?, "spun-ns")?);
    let blocked = match word("how")? {
        "s" => false,
        "b" => true,
        other => return Err(format!("how must be s or b, got '{}'", shown(other))),
    };
    if spun > length {
        return Err(format!("spun for {spun} in a wait of {length}"));
    }
    let in_flight = number(word("in-flight")?, "in-flight")?;
    let ended_by = match word("ended-by")? {
        "q" => EventKind::Queue,
        "c" => EventKind::Completion,
        "o" => EventKind::Other,
        other => {
            return Err(format!("ended-by must be q, c or o, got '{}'", shown(other)));
        }
    };
    let mut ready = Ready::default();
    for word in words {
        source(word, &mut ready)
            .ok_or_else(|| format!("a ready source is like q0, c1 or +3, got '{}'", shown(word)))?;
    }
    Ok(Record { length, spun, blocked, in_flight, ended_by, ready })
}

/// Adds what `word` names to `ready`, or nothing if it names nothing.
fn source(word: &str, ready: &mut Ready) -> Option<()> {
    if ready.more() > 0 {
        return None;
    }
    if let Some(more) = word.strip_prefix('+') {
        ready.set_more(number(more, "").ok().filter(|&more: &u16| more > 0)?);
        return Some(());
    }
    let (kind, slot) = if let Some(slot) = word.strip_prefix('q') {
        (EventKind::Queue, slot)
    } else if let Some(slot) = word.strip_prefix('c') {
        (EventKind::Completion, slot)
    } else {
        (EventKind::Other, word.strip_prefix('o')?)
    };
    let slot = number(slot, "").ok().filter(|&slot| slot < Ready::MOST_SLOTS)?;
    (ready.iter().count() < Ready::KEPT).then(|| ready.push(Slot(slot), kind))
}

/// Digits only: Rust's own parser would also take a sign.
fn number<N: std::str::FromStr>(word: &str, what: &str) -> Result<N, String> {
    Some(word)
        .filter(|word| word.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|word| word.parse().ok())
        .ok_or_else(|| format!("{what} must be a number, got '{}'", shown(word)))
}

/// Enough of somebody else's text to recognise it, fit for a terminal.
fn shown(text: &str) -> String {
    const MOST: usize = 40;
    let mut shown: String = text.chars().take(MOST).collect::<String>().escape_debug().collect();
    if text.chars().nth(MOST).is_some() {
        shown.push_str("...");
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMALL: &str = "egret-waits 1\nnote two cores\nblock-cpu-ns 15000\nwakeup-latency-ns 28000\nlost 7\nwaits 2\n\
                         columns length-ns spun-ns how in-flight ended-by ready...\n10342 10342 s 1 c c1\n\
                         38120 4000 b 0 q q0 c1\n";

    fn error(text: &str) -> String {
        Trace::parse(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_trace_reads_and_writes_back_the_same() {
        let trace = Trace::parse(SMALL.as_bytes()).unwrap();
        assert_eq!(trace.lost, 7);
        assert_eq!(
            trace.waits[1].ready.iter().collect::<Vec<_>>(),
            [(Slot(0), EventKind::Queue), (Slot(1), EventKind::Completion)]
        );
        assert_eq!(trace.true_lengths().collect::<Vec<_>>(), [Nanos(10_342), Nanos(10_120)]);
        assert_eq!(trace.to_string(), SMALL);
    }

    #[test]
    fn what_is_no_trace_is_called_so() {
        for text in ["", "\n", "GIF89a", "egret-waits", "egret-waitsome 1\n"] {
            assert_eq!(error(text), "not a trace of waits: it must begin with 'egret-waits 1'", "{text:?}");
        }
    }

    #[test]
    fn another_version_is_named() {
        assert_eq!(error("egret-waits 2\n\0\0"), "a trace of version 2; this egret reads version 1");
    }

    #[test]
    fn a_truncated_trace_says_what_is_missing() {
        assert_eq!(error("egret-waits 1\nnote x\n"), "truncated: no 'block-cpu-ns' line");
        assert_eq!(
            error(SMALL.strip_suffix("38120 4000 b 0 q q0 c1\n").unwrap()),
            "truncated: 2 waits promised, 1 found"
        );
        assert_eq!(error(SMALL.strip_suffix("\n").unwrap()), "truncated: line 9 has no end");
    }

    #[test]
    fn garbage_is_named_with_its_line() {
        let with = |from: &str, to: &str| error(&SMALL.replace(from, to));
        assert_eq!(with("10342 s", "x s"), "line 8: spun-ns must be a number, got 'x'");
        assert_eq!(with("10342 s", "10343 s"), "line 8: spun for 10343 ns in a wait of 10342 ns");
        assert_eq!(with(" s ", " z "), "line 8: how must be s or b, got 'z'");
        assert_eq!(with(" 1 c c1", ""), "line 8: in-flight is missing");
        assert_eq!(with("q0 c1", "q0 c99999"), "line 9: a ready source is like q0, c1 or +3, got 'c99999'");
        assert_eq!(with("lost 7", "lost -7"), "line 5: lost must be a number, got '-7'");
        assert_eq!(with("lost 7", "last 7"), "line 5: expected 'lost ...', got 'last 7'");
        assert_eq!(with("waits 2", "waits 1"), "line 9: more than the 1 waits promised");
        assert_eq!(with("waits 2", "waits 99999999"), "line 6: 99999999 waits, at most 4194304 are read");
        assert_eq!(with("waits 2", "waits 4194305"), "line 6: 4194305 waits, at most 4194304 are read");
        assert_eq!(with("waits 2", "waits 4194304"), "truncated: 4194304 waits promised, 2 found");
        assert_eq!(
            with("spun-ns", "spun"),
            "line 7: columns must be 'length-ns spun-ns how in-flight ended-by ready...', got 'length-ns spun how in-flight \
             ended-by re...'"
        );
        assert_eq!(with("b 0 q", "b 0 z"), "line 9: ended-by must be q, c or o, got 'z'");
        assert_eq!(with("waits 2", "waits "), "line 6: waits must be a number, got ''");
    }

    #[test]
    fn sources_that_no_loop_writes_are_refused() {
        let read = |ready: &str| Trace::parse(SMALL.replace("q0 c1\n", &format!("{ready}\n")).as_bytes());
        for good in ["q0", "q65535", "q0 c1 o2 q3 c4 o5", "q0 +1", "+65535", "q0 c1 o2 q3 c4 o5 +3"] {
            assert_eq!(read(good).unwrap().to_string(), SMALL.replace("q0 c1", good));
        }
        for (bad, word) in [
            ("q65536", "q65536"),
            ("x1", "x1"),
            ("q", "q"),
            ("q-1", "q-1"),
            ("+0", "+0"),
            ("+65536", "+65536"),
            ("+1 q0", "q0"),
            ("+1 +1", "+1"),
            ("q0 c1 o2 q3 c4 o5 q6", "q6"),
            ("q0  c1", ""),
        ] {
            let expected = format!("line 9: a ready source is like q0, c1 or +3, got '{word}'");
            assert_eq!(read(bad).unwrap_err().to_string(), expected, "{bad}");
        }
    }

    #[test]
    fn of_a_long_text_forty_characters_are_shown_and_none_that_a_terminal_would_heed() {
        let forty = "é".repeat(40);
        assert_eq!(shown(&forty), forty);
        assert_eq!(shown(&format!("{forty}x")), format!("{forty}..."));
        assert_eq!(shown("\u{1b}[2J"), "\\u{1b}[2J");
    }

    #[test]
    fn a_note_of_a_thousand_bytes_is_read_and_a_longer_one_is_not() {
        let noted = |bytes| SMALL.replace("two cores", &"n".repeat(bytes));
        assert_eq!(Trace::parse(noted(1_000).as_bytes()).unwrap().note.len(), 1_000);
        assert_eq!(error(&noted(1_001)), "line 2: a note of 1001 bytes, at most 1000 fit");
        let long = Trace { note: "n".repeat(1_001), ..Trace::parse(SMALL.as_bytes()).unwrap() };
        assert_eq!(long.to_string(), noted(1_000));
    }

    #[test]
    fn a_note_that_would_break_the_format_is_made_one_line() {
        let mut trace = Trace::parse(SMALL.as_bytes()).unwrap();
        trace.note = format!("a\nb{}", "é".repeat(Trace::LONGEST_NOTE));
        let read = Trace::parse(trace.to_string().as_bytes()).unwrap();
        assert!(read.note.starts_with("a bé") && read.note.len() <= Trace::LONGEST_NOTE);
        trace.note.clear();
        assert_eq!(Trace::parse(trace.to_string().as_bytes()).unwrap().note, "");
    }

    fn any_record() -> impl Strategy<Value = Record> {
        let kind = || prop_oneof![Just(EventKind::Queue), Just(EventKind::Completion), Just(EventKind::Other)];
        let sources = prop::collection::vec((0..1_000_u32, kind()), 0..10);
        (any::<u64>(), any::<u64>(), any::<bool>(), any::<u32>(), kind(), sources).prop_map(
            |(length, spun, blocked, in_flight, ended_by, sources)| {
                let mut ready = Ready::default();
                sources.into_iter().for_each(|(slot, kind)| ready.push(Slot(slot), kind));
                Record { length: Nanos(length), spun: Nanos(spun.min(length)), blocked, in_flight, ended_by, ready }
            },
        )
    }

    proptest! {
        #[test]
        fn whatever_is_written_reads_back_the_same(
            waits in prop::collection::vec(any_record(), 0..40),
            cpu: u64,
            latency: u64,
            lost: u64,
        ) {
            let block = BlockCost { cpu: Nanos(cpu), latency: Nanos(latency) };
            let trace = Trace { note: "any".to_owned(), block, lost, waits };
            prop_assert_eq!(Trace::parse(trace.to_string().as_bytes()), Ok(trace));
        }

        #[test]
        fn a_damaged_trace_never_panics_and_never_grows(at in 0..SMALL.len(), byte: u8, cut in 0..SMALL.len()) {
            let mut bytes = SMALL.as_bytes().to_vec();
            bytes[at] = byte;
            bytes.truncate(cut);
            if let Ok(trace) = Trace::parse(&bytes) {
                prop_assert!(trace.waits.len() <= 2);
            } else {
                prop_assert!(!Trace::parse(&bytes).unwrap_err().to_string().contains('\n'));
            }
        }
    }
}
