//! A change, as `cargo mutants --list --json` tells of it.

use proc_macro2::LineColumn;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
pub(crate) struct Change {
    /// Where and what: `crates/disk/src/lock.rs:12:5: replace + with - in lock`.
    pub(crate) name: String,
    /// From the workspace's root.
    pub(crate) file: String,
    pub(crate) genre: Genre,
    pub(crate) span: Span,
    /// What is there instead.
    pub(crate) replacement: String,
}

impl Change {
    /// A file's text with the change in it.
    pub(crate) fn applied(&self, source: &str) -> String {
        let [start, end] = [self.span.start, self.span.end].map(|position| offset(source, position.into()));
        format!("{}{}{}", &source[..start], self.replacement, &source[end..])
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Hash)]
pub(crate) enum Genre {
    FnValue,
    BinaryOperator,
    UnaryOperator,
    MatchArm,
    MatchArmGuard,
    StructField,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Span {
    pub(crate) start: Position,
    pub(crate) end: Position,
}

/// Both count from 1; columns are characters.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Position {
    line: usize,
    column: usize,
}

impl From<Position> for LineColumn {
    fn from(position: Position) -> Self {
        Self { line: position.line, column: position.column - 1 }
    }
}

/// Where that is in a text, in bytes.
pub(crate) fn offset(source: &str, at: LineColumn) -> usize {
    let begin: usize = source.split_inclusive('\n').take(at.line - 1).map(str::len).sum();
    let line = &source[begin..];
    begin + line.char_indices().nth(at.column).map_or(line.len(), |(offset, _)| offset)
}
