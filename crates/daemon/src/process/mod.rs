//! A daemon's life as a process: one of its name, in the background if asked, stopped by a signal.
//!
//! In order: [`background()`] while there is one thread; [`Signals::block`] before there are more, because threads
//! inherit what is blocked; [`Pidfile::create`]; the daemon's objects; [`Readiness::ready`]; then
//! [`Signals::wait`] until somebody wants it to end.

mod background;
mod manager;
mod pidfile;
mod signals;
pub(crate) mod sys;

pub use background::{BackgroundError, LaunchError, Launched, Readiness, Side, background};
pub use manager::{Progress, tell_service_manager};
pub use pidfile::{Pidfile, PidfileError};
pub use signals::{Signal, Signals};
