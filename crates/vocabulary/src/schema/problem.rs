//! What is wrong with an object, in one line.

use thiserror::Error;

/// An object that cannot be had as it was written: which one, and why.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{subject}: {problem}")]
pub struct ObjectError {
    /// The object as an operator knows it: `iothread 'io0'`.
    pub subject: String,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// A key that neither we nor QEMU know.
    #[error("unknown key '{key}'; {hint}")]
    UnknownKey {
        /// The key, with the keys that lead to it: `cache.dirct`.
        key: String,
        /// The nearest known key, or all of them.
        hint: String,
    },
    /// A key of this object's siblings: `latency-ns` on a `file`.
    #[error("key '{key}' belongs to {owners}, and this is {this}")]
    Elsewhere {
        /// The key.
        key: String,
        /// Whom it belongs to: `driver null-co, null-aio`.
        owners: String,
        /// What this object is: `file`.
        this: String,
    },
    /// A key that has to be there and is not.
    #[error("{key} is missing")]
    Missing {
        /// The key.
        key: String,
    },
    /// A value of the wrong kind, or outside its range.
    #[error("{key} must be {allowed}, got {got}")]
    Must {
        /// The key.
        key: String,
        /// What would be right: `0..=63`, `on or off`.
        allowed: String,
        /// What was given.
        got: String,
    },
    /// Something that QEMU has and that is left out here on purpose.
    #[error("{what} is QEMU's and not done here: {because}")]
    NotDone {
        /// The key and value.
        what: String,
        /// Why, or what to use in its place.
        because: String,
    },
    /// Values that are right one by one and wrong together.
    #[error("{0}")]
    Together(String),
    /// A name that no object has.
    #[error("{key}: there is no {noun} '{name}'; {hint}")]
    Unknown {
        /// The key that holds the name.
        key: String,
        /// What it should name: `iothread`.
        noun: &'static str,
        /// The name.
        name: String,
        /// The nearest of those that exist, or all of them.
        hint: String,
    },
    /// A name that another object has already.
    #[error("there is another {0} of this name")]
    Duplicate(&'static str),
}

impl Problem {
    /// The key that it is about, if it is about one.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey { key, .. }
            | Self::Elsewhere { key, .. }
            | Self::Missing { key }
            | Self::Must { key, .. }
            | Self::Unknown { key, .. } => Some(key),
            Self::NotDone { what, .. } => what.split(['=', ' ']).next(),
            Self::Together(line) => line.split(['=', ' ', ':']).next(),
            Self::Duplicate(_) => None,
        }
    }

    /// A value that is not what its key allows.
    pub(crate) fn must(key: impl Into<String>, allowed: impl Into<String>, got: impl ToString) -> Self {
        Self::Must { key: key.into(), allowed: allowed.into(), got: got.to_string() }
    }
}
