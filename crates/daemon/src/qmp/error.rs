//! What a command answers when it fails.

use egret_vocabulary::schema::{ObjectError, Problem};
use serde_json::{Value, json};

use crate::daemon::{ChangeError, FdSetError};

/// QEMU's classes of errors; clients tell errors apart by them, and never by their text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Everything that is not one of the others.
    GenericError,
    /// There is no such command, or not now.
    CommandNotFound,
    /// There is no such object.
    DeviceNotFound,
}

/// An error: its class, and one line for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct QmpError {
    /// Its class.
    pub class: Class,
    /// One line.
    pub text: String,
}

impl QmpError {
    /// An error without a class of its own.
    pub fn generic(text: impl Into<String>) -> Self {
        Self { class: Class::GenericError, text: text.into() }
    }

    /// There is no such command, or not now.
    pub fn no_command(text: impl Into<String>) -> Self {
        Self { class: Class::CommandNotFound, text: text.into() }
    }

    /// There is no such object.
    pub fn no_device(path: &str) -> Self {
        Self { class: Class::DeviceNotFound, text: format!("Device '{path}' not found") }
    }

    /// As the protocol has it.
    pub fn to_json(&self) -> Value {
        json!({ "class": format!("{:?}", self.class), "desc": self.text })
    }
}

impl From<Problem> for QmpError {
    /// Where QEMU has words for it, they come first.
    fn from(problem: Problem) -> Self {
        Self::generic(match problem {
            Problem::Missing { key } => format!("Parameter '{key}' is missing"),
            Problem::UnknownKey { key, hint } => format!("Parameter '{key}' is unexpected; {hint}"),
            Problem::Must { key, allowed, got } => format!("Parameter '{key}' must be {allowed}, got {got}"),
            other => other.to_string(),
        })
    }
}

impl From<ObjectError> for QmpError {
    fn from(error: ObjectError) -> Self {
        match error.problem {
            problem @ (Problem::Missing { .. } | Problem::UnknownKey { .. }) => problem.into(),
            _ => Self::generic(error.to_string()),
        }
    }
}

impl From<FdSetError> for QmpError {
    fn from(error: FdSetError) -> Self {
        Self::generic(error.to_string())
    }
}

impl From<ChangeError> for QmpError {
    fn from(error: ChangeError) -> Self {
        let class = if let ChangeError::NoLun(..) = error { Class::DeviceNotFound } else { Class::GenericError };
        Self { class, text: error.to_string() }
    }
}
