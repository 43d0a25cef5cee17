//! An I/O thread's engine against servers that are right, wrong, slow and gone.

mod connected;
mod lies;
mod outages;
mod requests;
mod rig;
mod server;
mod several;
mod turns;
