//! What the loop knows before a wait, sorted into a few contexts.

use crate::{EventKind, Standing};

/// How many requests are in flight and what ended the last wait, coarsely.
///
/// With nothing in flight only a guest can end the wait, with one it is the disk's latency, with many it is the time
/// between completions: different waits altogether. So are the waits after a kick and after a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Context(usize);

/// How many requests are in flight, as far as it changes what a wait can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Depth {
    /// None: a guest ends the wait.
    None,
    /// One: the wait is the disk's latency.
    One,
    /// Several: a longer wait may end with more of them.
    Many,
}

impl Context {
    const DEPTHS: usize = 4;
    const KINDS: usize = 3;
    /// How many contexts there are.
    pub(super) const COUNT: usize = Self::DEPTHS * Self::KINDS;

    pub(super) fn of(before: &Standing) -> Self {
        let depth = match before.in_flight {
            0 => 0,
            1 => 1,
            2..=7 => 2,
            8.. => Self::DEPTHS - 1,
        };
        let kind = match before.last.kind {
            EventKind::Queue => 0,
            EventKind::Completion => 1,
            EventKind::Other => Self::KINDS - 1,
        };
        Self(depth * Self::KINDS + kind)
    }

    /// The depths of all contexts, by [`index`](Self::index).
    pub(super) fn depths() -> impl Iterator<Item = Depth> {
        (0..Self::COUNT).map(|index| match index / Self::KINDS {
            0 => Depth::None,
            1 => Depth::One,
            _ => Depth::Many,
        })
    }

    /// Below [`COUNT`](Self::COUNT).
    pub(super) fn index(self) -> usize {
        self.0
    }
}

/// How many classes there are.
pub(super) const CLASSES: usize = 6;

/// About how long a wait was: up to 2 us, 8 us, 32 us, 128 us, 512 us, or longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Class(usize);

impl Class {
    /// The class of a wait of `length` nanoseconds.
    pub(super) fn of(length: u64) -> Self {
        const UP_TO_2_US: u32 = 11;
        let octaves_above = (length | 1).ilog2().saturating_sub(UP_TO_2_US - 2);
        Self((octaves_above as usize / 2).min(CLASSES - 1))
    }

    /// Below [`CLASSES`].
    pub(super) fn index(self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LastWait;

    #[test]
    fn every_context_has_a_number_of_its_own() {
        let mut seen = [false; Context::COUNT];
        for in_flight in [0, 1, 2, 8] {
            for kind in [EventKind::Queue, EventKind::Completion, EventKind::Other] {
                let last = LastWait { kind, ..LastWait::default() };
                let index = Context::of(&Standing { in_flight, last, ..Standing::default() }).index();
                assert!(!std::mem::replace(&mut seen[index], true));
            }
        }
        assert!(seen.iter().all(|&seen| seen));
    }

    #[test]
    fn a_class_is_two_octaves() {
        let us: Vec<_> =
            [0, 2, 3, 8, 9, 32, 33, 131, 132, 524, 525].iter().map(|us| Class::of(us * 1_000).index()).collect();
        assert_eq!(us, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]);
        assert_eq!([1, u64::MAX].map(|length| Class::of(length).index()), [0, CLASSES - 1]);
    }

    #[test]
    fn how_many_are_in_flight_is_told_apart_as_far_as_it_changes_a_wait() {
        let of = |in_flight| Context::of(&Standing { in_flight, ..Standing::default() }).index() / Context::KINDS;
        assert_eq!([0, 1, 2, 7, 8, u32::MAX].map(of), [0, 1, 2, 2, 3, 3]);
        let depths: Vec<_> = Context::depths().step_by(Context::KINDS).collect();
        assert_eq!(depths, [Depth::None, Depth::One, Depth::Many, Depth::Many]);
        assert_eq!(Context::depths().filter(|&depth| depth == Depth::One).count(), Context::KINDS);
    }
}
