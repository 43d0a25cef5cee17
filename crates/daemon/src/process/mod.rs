//! A daemon's life as a process: one of its name, in the background if asked, stopped by a signal.
//!
//! In order: [`Inherited::take_over`] before anything is opened; [`background()`] while there is one thread; [`Signals::block`] before there are more, because threads
//! inherit what is blocked; [`Pidfile::create`]; [`Sandbox::begin`]; the daemon's objects; [`Readiness::ready`]; then
//! [`Signals::wait`] until somebody wants it to end.

mod abort;
mod background;
mod inherited;
mod manager;
mod output;
mod patience;
mod pidfile;
mod sandbox;
mod signals;
pub(crate) mod sys;

pub(crate) use abort::abort;
pub use abort::abort_on_panic;
pub use background::{BackgroundError, LaunchError, Launched, Readiness, Side, background};
pub use inherited::{InheritError, Inherited};
pub(crate) use manager::{Heartbeat, forget_sessions, keep_session, keeps_sessions};
pub use manager::{Progress, notify_service_manager};
pub use output::Output;
pub use patience::Patience;
pub use pidfile::{Pidfile, PidfileError};
pub use sandbox::{Places, Sandbox, SandboxError, give};
pub use signals::{Signal, Signals};
