//! An I/O thread's engine against servers that are right, wrong, slow and gone.

mod connected;
mod lies;
mod outages;
#[path = "../../../event-loop/tests/refuse/mod.rs"]
mod refuse;
mod requests;
mod rig;
mod server;
mod several;
mod turns;
