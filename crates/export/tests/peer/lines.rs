//! What was written to the log.

use std::fmt::Debug;
use std::sync::{Mutex, Once};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The lines that all tests of this process have had written.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Takes lines down.
struct Recorder;

impl Visit for Recorder {
    fn record_debug(&mut self, _field: &Field, value: &dyn Debug) {
        LINES.lock().unwrap().push(format!("{value:?}"));
    }
}

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
        event.record(&mut Self);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

pub fn record_lines() {
    static ONCE: Once = Once::new();
    let record = || tracing::subscriber::set_global_default(Recorder).expect("no other test of this process has one");
    ONCE.call_once(record);
}

/// How many begin so.
pub fn lines(beginning: &str) -> usize {
    LINES.lock().unwrap().iter().filter(|line| line.starts_with(beginning)).count()
}
