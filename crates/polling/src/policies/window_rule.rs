//! How QEMU moved a window up to 11.0, once per thread and later once per source.
//!
//! `util/aio-posix.c` of qemu.git: `aio_poll` at f2465433 has it for the thread, `adjust_polling_time` at 0462a32b for each
//! handler.

use crate::{Nanos, Parameters};

/// What a window starts from when it grows from nothing.
const FIRST: Nanos = Nanos(4_000);

/// What to do with the window after a wait so long that spinning for it is out of the question.
#[derive(Clone, Copy)]
enum Shrink {
    /// `poll-shrink` was left unset, or 0: QEMU started over.
    ToZero,
    By(u64),
}

/// The rule shared by `shared-window` and `per-source-window`.
#[derive(Clone, Copy)]
pub(crate) struct WindowRule {
    max: Nanos,
    grow: u64,
    shrink: Shrink,
    resets: u64,
}

impl WindowRule {
    pub(crate) fn new(parameters: &Parameters) -> Self {
        let shrink = match parameters.shrink {
            None | Some(0) => Shrink::ToZero,
            Some(divisor) => Shrink::By(divisor),
        };
        Self {
            max: parameters.max.unwrap_or(Parameters::QEMU_MAX),
            grow: parameters.grow_or_default(),
            shrink,
            resets: 0,
        }
    }

    /// How often a window has been set to nothing.
    pub(crate) fn resets(&self) -> u64 {
        self.resets
    }

    /// The window that follows `window` after a wait of `length`.
    pub(crate) fn next(&mut self, window: Nanos, length: Nanos) -> Nanos {
        // Where spinning is switched off QEMU adjusts nothing.
        if length <= window || self.max == Nanos::ZERO {
            return window;
        }
        if length > self.max {
            let shrunk = match self.shrink {
                Shrink::ToZero => Nanos::ZERO,
                Shrink::By(divisor) => Nanos(window.0 / divisor),
            };
            self.resets += u64::from(shrunk == Nanos::ZERO);
            return shrunk;
        }
        if length == self.max {
            return window;
        }
        let grown = if window == Nanos::ZERO { FIRST } else { Nanos(window.0.saturating_mul(self.grow)) };
        grown.min(self.max)
    }
}
