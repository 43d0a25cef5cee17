//! How QEMU moved a window up to 11.0, once per thread and later once per source.

use crate::{Nanos, Parameters};

/// What a window starts from when it grows from nothing.
const FIRST: Nanos = Nanos(4_000);

/// What to do with the window after a wait so long that spinning for it is out of the question.
#[derive(Clone, Copy)]
enum Shrink {
    /// `poll-shrink` was left unset: QEMU started over.
    ToZero,
    By(u64),
}

/// The rule shared by `shared-window` and `per-source-window`.
#[derive(Clone, Copy)]
pub(crate) struct WindowRule {
    max: Nanos,
    grow: u64,
    shrink: Shrink,
}

impl WindowRule {
    pub(crate) fn new(parameters: &Parameters) -> Self {
        let shrink = match parameters.shrink {
            None => Shrink::ToZero,
            Some(_) => Shrink::By(parameters.shrink_or_default()),
        };
        Self { max: parameters.max.unwrap_or(Parameters::QEMU_MAX), grow: parameters.grow_or_default(), shrink }
    }

    /// The window that follows `window` after a wait of `length`.
    pub(crate) fn next(&self, window: Nanos, length: Nanos) -> Nanos {
        if length <= window {
            return window;
        }
        if length > self.max {
            return match self.shrink {
                Shrink::ToZero => Nanos::ZERO,
                Shrink::By(divisor) => Nanos(window.0 / divisor),
            };
        }
        let grown = if window == Nanos::ZERO { FIRST } else { Nanos(window.0.saturating_mul(self.grow)) };
        grown.min(self.max)
    }
}
