//! The two layouts of a ring.

/// What there is of either. Whatever has one keeps its layout for life, so that the branch between the two is always
/// taken alike, and costs next to nothing.
pub(super) enum Either<S, P> {
    Split(S),
    Packed(P),
}

/// The same for either layout.
macro_rules! either {
    ($layout:expr, $half:ident => $what:expr) => {
        match $layout {
            Either::Split($half) => $what,
            Either::Packed($half) => $what,
        }
    };
}

pub(super) use either;
