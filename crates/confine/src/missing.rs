//! What the kernel lacks.

use std::fmt;

/// What this kernel cannot do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Missing(Vec<String>);

impl Missing {
    /// Whether it can do everything.
    pub fn is_nothing(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn add(&mut self, what: impl Into<String>) {
        self.0.push(what.into());
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}
