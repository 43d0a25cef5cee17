//! What a loop counts about itself.

use egret_polling::{HABITS, HabitTimes, Nanos};

use crate::Counter;

/// What a loop is at, in the order of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// For something to do: it spins and looks, or sleeps. It has not begun, is so idle, or has ended.
    #[default]
    Waiting,
    /// Completions go to their sources.
    Reaping,
    /// Ready sources do what they have to, and commands run.
    Dispatching,
    /// The engines hand on what was pushed.
    Submitting,
    /// Touched sources tell the outside.
    Notifying,
}

impl Phase {
    const ALL: [Self; 5] = [Self::Waiting, Self::Reaping, Self::Dispatching, Self::Submitting, Self::Notifying];

    /// As one word.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Waiting => "wait",
            Self::Reaping => "reap",
            Self::Dispatching => "dispatch",
            Self::Submitting => "submit",
            Self::Notifying => "notify",
        }
    }
}

/// One loop's counters, as it counts them; any thread may [read](Self::read) them.
#[derive(Debug, Default)]
#[expect(missing_docs, reason = "each is described where it is read")]
pub struct LoopCounters {
    phase: Counter,
    pub turns: Counter,
    pub waits: Counter,
    pub hits: Counter,
    pub spin_found: Counter,
    pub spin_wasted: Counter,
    pub kicks: Counter,
    pub kicks_spared: Counter,
    pub blocks: Counter,
    pub asleep: Counter,
    pub window_sum: Counter,
    pub resets: Counter,
    pub habits: [Counter; HABITS.len()],
    pub near_max: Counter,
    pub elapsed: Counter,
    pub window: Counter,
}

impl LoopCounters {
    /// The loop enters a phase; only the loop calls this. One store, and nothing read: whoever wants to know whether it
    /// stands still looks twice.
    #[inline]
    pub fn enter(&self, phase: Phase) {
        self.phase.set(phase as u64);
    }

    /// What the loop is at.
    pub fn phase(&self) -> Phase {
        Phase::ALL[self.phase.get() as usize]
    }

    /// What they have come to, without asking the loop.
    pub fn read(&self) -> LoopStats {
        LoopStats {
            turns: self.turns.get(),
            waits: self.waits.get(),
            hits: self.hits.get(),
            spin_found: self.spin_found.time(),
            spin_wasted: self.spin_wasted.time(),
            kicks: self.kicks.get(),
            kicks_spared: self.kicks_spared.get(),
            blocks: self.blocks.get(),
            asleep: self.asleep.time(),
            window_sum: self.window_sum.time(),
            resets: self.resets.get(),
            habits: self.habits.each_ref().map(Counter::time),
            near_max: self.near_max.time(),
            elapsed: self.elapsed.time(),
            window: self.window.time(),
        }
    }
}

/// What one loop has counted since it started.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopStats {
    /// Turns taken.
    pub turns: u64,
    /// Times there was nothing to dispatch, and the loop waited.
    pub waits: u64,
    /// Waits that spinning ended.
    pub hits: u64,
    /// Time spun in waits that spinning ended; of a longer spin, the last 10 ms at most.
    pub spin_found: Nanos,
    /// Time spun in waits that spinning did not end, and for 10 ms or more without an end in others, counted while they last.
    pub spin_wasted: Nanos,
    /// Events of sources that the monitor reported: kicks, where sources are guests' queues.
    pub kicks: u64,
    /// Times that a poll found a source ready, so that no kick was needed.
    pub kicks_spared: u64,
    /// Times the loop slept.
    pub blocks: u64,
    /// Time asleep.
    pub asleep: Nanos,
    /// Sum of the windows of all waits, each counted as at most a second.
    pub window_sum: Nanos,
    /// Times that the interval of a source, or a window, started over from nothing.
    pub resets: u64,
    /// How long each habit of a policy that compares them was in use; of a wait, 17 ms at most.
    pub habits: HabitTimes,
    /// Time during which the window was at least 7/8 of the largest allowed.
    pub near_max: Nanos,
    /// All time, from the first wait to the last.
    pub elapsed: Nanos,
    /// The window of the last wait.
    pub window: Nanos,
}

impl LoopStats {
    /// The habits of a policy that compares them, by name, and how long each was in use.
    pub fn named_habits(&self) -> impl Iterator<Item = (&'static str, Nanos)> {
        HABITS.into_iter().zip(self.habits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_shown_as_it_was_entered_by_a_word_of_its_own() {
        let counters = LoopCounters::default();
        assert_eq!(counters.phase(), Phase::Waiting);
        for (phase, word) in Phase::ALL.into_iter().zip(["wait", "reap", "dispatch", "submit", "notify"]) {
            counters.enter(phase);
            assert_eq!((counters.phase(), phase.word()), (phase, word));
        }
    }
}
