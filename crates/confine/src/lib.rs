//! What the daemon may do, and what each kind of its threads may do of that.
//!
//! A guest or a peer that finds a mistake in the daemon and takes over one of its threads is to have gained nothing by it.
//! Three things of the kernel's see to that, each of which holds for a thread and for whatever that starts:
//!
//! | module | says | by |
//! |---|---|---|
//! | `rules` | which system calls each kind of thread makes: the table, and nothing else | seccomp, compiled by `filter` |
//! | `files` | which files, sockets and ports there are | Landlock |
//! | `rights` | who it is | users, groups, capabilities |
//!
//! Threads that reach other machines are started by a [`Starter`].
//!
//! [`Confinement::begin`] is called once, before there are threads. Each thread that the daemon starts then says what it
//! is, with the [`Bounds`] that its starter took. Where nothing has begun (a test, the lab, `--sandbox=off`) that does
//! nothing.

#![forbid(unsafe_code)]

mod bounds;
mod files;
mod filter;
mod missing;
mod rights;
pub mod rules;
mod starter;

pub use bounds::{Bounds, ConfineError, Confinement};
pub use files::{Files, Use, refusal};
pub use missing::Missing;
pub use rights::Identity;
pub use rules::ThreadKind;
pub use starter::Starter;
