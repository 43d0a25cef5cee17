//! The one vocabulary: options as QEMU spells them, read, checked, shown and documented.
//!
//! It is a pure library: it starts nothing, and asks the system for nothing but the text of a file. The daemon makes what
//! is asked for, and the lab knows without a daemon what one would take.
//!
//! ```text
//!   key=value,... or JSON ── keyval ──┐
//!   a file ─────── config::ConfigFile ┼──► schema: objects, each right by itself ──► Config: objects that fit together
//!   QMP, a plan ── serde ─────────────┘                                                 └──► disk::Disk: what is in force
//! ```
//!
//! | module | owns |
//! |---|---|
//! | [`schema`] | the three objects: their keys, ranges and defaults, checked one by one |
//! | [`schema::options`] | how an option is declared, once: [`options!`] |
//! | [`json`] | JSON, from text to a tree of values |
//! | [`keyval`] | QEMU's `key=value,...` syntax, from text to a tree of values |
//! | [`config`] | a set of objects that fit together: [`Config`] |
//! | [`disk`] | what a blockdev comes to when it is looked at from an export |
//! | [`address`] | where monitors and metrics are found |
//! | [`chardev`] | `--chardev` and `--monitor` |
//! | [`metrics`] | `--metrics` |
//! | [`nearest`](mod@nearest) | the known name that is nearest to an unknown one |

#![forbid(unsafe_code)]

// What `options!` makes names this crate, wherever it is used.
extern crate self as egret_vocabulary;

pub mod address;
pub mod chardev;
pub mod config;
pub mod disk;
pub mod json;
pub mod keyval;
pub mod metrics;
pub mod nearest;
pub mod schema;

pub use address::Address;
pub use config::Config;
