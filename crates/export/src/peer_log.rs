//! What the peers of an export, or of another socket, may have written to the log.
//!
//! Whoever reaches a socket, and every guest, can do things that are worth a line as often as it likes. Each export has so
//! many lines, and each socket of others, of so many bytes; what is more is counted, and told with the next line.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::Level;

/// Lines that may come at once.
const BURST: u32 = 40;
/// After those, one comes in so long.
const REFILL: Duration = Duration::from_secs(5);

/// Bytes of a line beside what it begins with: what a peer names may be long.
const LONGEST: usize = 500;

/// Writes lines about the peers of an export, or of another socket, as many as one may have.
#[derive(Debug)]
pub struct PeerLog {
    /// What each line begins with.
    about: String,
    budget: Mutex<Budget>,
}

/// How many lines there may be.
#[derive(Debug)]
struct Budget {
    lines: u32,
    /// Since when they count.
    since: Instant,
    /// How many there were too many, and nobody was told.
    suppressed: u64,
}

impl Budget {
    /// Takes a line out; how many were suppressed before it. `None` if this one is, too.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let refilled = now.saturating_duration_since(self.since).as_nanos() / REFILL.as_nanos();
        if refilled > 0 {
            self.lines = self.lines.saturating_add(u32::try_from(refilled).unwrap_or(BURST)).min(BURST);
            self.since = now;
        }
        let Some(left) = self.lines.checked_sub(1) else {
            self.suppressed += 1;
            return None;
        };
        self.lines = left;
        Some(std::mem::take(&mut self.suppressed))
    }
}

impl PeerLog {
    pub(crate) fn new(id: &str) -> Self {
        Self::about(&format!("export '{id}': "))
    }

    /// With lines that begin so.
    pub fn about(about: &str) -> Self {
        let budget = Budget { lines: BURST, since: Instant::now(), suppressed: 0 };
        Self { about: about.to_owned(), budget: Mutex::new(budget) }
    }

    /// Says what a peer did that is worth knowing.
    pub(crate) fn info(&self, what: fmt::Arguments<'_>) {
        if tracing::enabled!(Level::INFO)
            && let Some(line) = self.line(what)
        {
            tracing::info!("{line}");
        }
    }

    /// Says what a peer did wrong.
    pub fn warn(&self, what: fmt::Arguments<'_>) {
        if tracing::enabled!(Level::WARN)
            && let Some(line) = self.line(what)
        {
            tracing::warn!("{line}");
        }
    }

    fn line(&self, what: fmt::Arguments<'_>) -> Option<String> {
        let suppressed = self.lock().take(Instant::now())?;
        let mut line = self.about.clone();
        let end = line.len() + LONGEST;
        // What a peer has a say in is shown on one line: it cannot make its own look like another's.
        for c in what.to_string().chars() {
            match c.is_control() {
                true => line.extend(c.escape_default()),
                false => line.push(c),
            }
            if line.len() >= end {
                line.push('…');
                break;
            }
        }
        if suppressed > 0 {
            line += &more(suppressed);
        }
        Some(line)
    }

    fn lock(&self) -> MutexGuard<'_, Budget> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PeerLog {
    fn drop(&mut self) {
        let suppressed = self.lock().suppressed;
        if suppressed > 0 {
            tracing::warn!("{}it ends{}", self.about, more(suppressed));
        }
    }
}

fn more(suppressed: u64) -> String {
    format!(" (… and {suppressed} more lines about its clients since the last)")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Takes lines down, each with its level.
    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<(Level, String)>>>);

    impl Subscriber for Recorder {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let mut said = Said(String::new());
            event.record(&mut said);
            self.0.lock().unwrap().push((*event.metadata().level(), said.0));
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    struct Said(String);

    impl Visit for Said {
        fn record_debug(&mut self, _field: &Field, value: &dyn fmt::Debug) {
            self.0 += &format!("{value:?}");
        }
    }

    /// The lines that this thread has written meanwhile.
    pub(crate) fn recorded(run: impl FnOnce()) -> Vec<(Level, String)> {
        let recorder = Recorder::default();
        // With one alone a line's place is asked about at whichever thread comes to it first, and that may have none.
        let _another = tracing::Dispatch::new(recorder.clone());
        tracing::subscriber::with_default(recorder.clone(), run);
        std::mem::take(&mut recorder.0.lock().unwrap())
    }

    #[test]
    fn lines_are_told_by_their_levels_and_when_a_log_ends_how_many_were_not() {
        for (written, suppressed) in [(2, None), (BURST, None), (BURST + 3, Some(3))] {
            let lines = recorded(|| {
                let log = PeerLog::new("e0");
                log.warn(format_args!("bad"));
                (1..written).for_each(|_| log.info(format_args!("good")));
            });
            let told = written.min(BURST) as usize;
            assert_eq!(lines[0], (Level::WARN, "export 'e0': bad".to_owned()));
            assert!(lines[1..told].iter().all(|line| *line == (Level::INFO, "export 'e0': good".to_owned())));
            let end = suppressed.map(|more| {
                (
                    Level::WARN,
                    format!("export 'e0': it ends (… and {more} more lines about its clients since the last)"),
                )
            });
            assert_eq!(lines[told..], Vec::from_iter(end), "{written} lines");
        }
    }

    #[test]
    fn lines_beyond_the_budget_are_counted_and_told_with_the_next() {
        let begun = Instant::now();
        let mut budget = Budget { lines: BURST, since: begun, suppressed: 0 };
        assert!((0..BURST).all(|_| budget.take(begun) == Some(0)));
        assert!((0..312).all(|_| budget.take(begun + REFILL / 2).is_none()));
        assert_eq!(budget.take(begun + REFILL), Some(312));
        assert_eq!(budget.take(begun + REFILL), None);
        // However long it was quiet, a flood has no more than its burst.
        let later = begun + REFILL * 1000;
        assert_eq!(budget.take(later), Some(1));
        assert!((1..BURST).all(|_| budget.take(later) == Some(0)));
        assert_eq!(budget.take(later), None);
    }

    #[test]
    fn a_line_says_how_many_were_too_many_before_it() {
        let log = PeerLog::about("it: ");
        let line = || log.line(format_args!("x"));
        assert!((0..BURST).all(|_| line().as_deref() == Some("it: x")));
        assert!((0..3).all(|_| line().is_none()));
        log.lock().lines = 2;
        assert_eq!(line().unwrap(), "it: x (… and 3 more lines about its clients since the last)");
        assert_eq!(line().unwrap(), "it: x");
    }

    #[test]
    fn a_line_ends_however_much_a_peer_has_to_say() {
        let log = PeerLog::new("e0");
        for name in ["x", "\n", "\u{1}", "ä"] {
            let line = log.line(format_args!("'{}' is no name", name.repeat(1 << 20))).unwrap();
            assert!(line.starts_with("export 'e0': '") && line.ends_with('…'), "{line}");
            assert!((500..530).contains(&line.len()), "{} bytes", line.len());
        }
    }

    #[test]
    fn what_a_peer_names_stays_on_its_line() {
        let log = PeerLog::new("e0");
        let line = log.line(format_args!("'{}' is no eventfd", "x\nERROR export 'e1': \u{1b}[2J")).unwrap();
        assert_eq!(line, "export 'e0': 'x\\nERROR export 'e1': \\u{1b}[2J' is no eventfd");
    }
}
