//! The file format, written.
//!
//! ```text
//! egret-waits 1
//! note 2-core virtual machine, null disk of 10 us, QD 1
//! block-cpu-ns 15000
//! wakeup-latency-ns 28000
//! lost 0
//! waits 2
//! columns length-ns spun-ns how in-flight ended-by ready...
//! 10342 10342 s 1 c c1
//! 38120 4000 b 0 q q0 c1 +3
//! ```
//!
//! `how` is `s` for a wait that ended while spinning and `b` for one that blocked. A source is its kind (`q` a guest's
//! queue, `c` completions, `o` other) and its slot; `+3` says that three more were ready.

use std::fmt::{self, Write as _};

use super::{Record, Trace};
use crate::EventKind;

/// What a trace begins with.
pub const MAGIC: &str = "egret-waits";
pub(super) const COLUMNS: &str = "length-ns spun-ns how in-flight ended-by ready...";

pub(super) const fn letter(kind: EventKind) -> char {
    match kind {
        EventKind::Queue => 'q',
        EventKind::Completion => 'c',
        EventKind::Other => 'o',
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{MAGIC} {}", Self::VERSION)?;
        f.write_str("note ")?;
        // Whatever the note holds, it stays one line that the reader accepts.
        let mut room = Self::LONGEST_NOTE;
        for c in self.note.trim().chars().map(|c| if c.is_control() { ' ' } else { c }) {
            match room.checked_sub(c.len_utf8()) {
                Some(left) => room = left,
                None => break,
            }
            f.write_char(c)?;
        }
        writeln!(f, "\nblock-cpu-ns {}", self.block.cpu.0)?;
        writeln!(f, "wakeup-latency-ns {}", self.block.latency.0)?;
        writeln!(f, "lost {}", self.lost)?;
        writeln!(f, "waits {}", self.waits.len())?;
        writeln!(f, "columns {COLUMNS}")?;
        self.waits.iter().try_for_each(|record| writeln!(f, "{record}"))
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.blocked { 'b' } else { 's' };
        let ended_by = letter(self.ended_by);
        write!(f, "{} {} {how} {} {ended_by}", self.length.0, self.spun.0, self.in_flight)?;
        for (slot, kind) in self.ready.iter() {
            write!(f, " {}{}", letter(kind), slot.0)?;
        }
        if self.ready.more() > 0 {
            write!(f, " +{}", self.ready.more())?;
        }
        Ok(())
    }
}
