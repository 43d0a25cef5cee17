//! The policies that came before: three constants and three generations of QEMU's adaptive polling.
//!
//! | file | `poll-policy` | from |
//! |---|---|---|
//! | `fixed.rs` | `off` | a loop that never spins |
//! | `fixed.rs` | `busy` | SPDK |
//! | `fixed.rs` | `fixed` | the lab |
//! | `shared_window.rs` | `shared-window` | QEMU up to 9.2 |
//! | `per_source_window.rs` | `per-source-window` | QEMU 10.0 to 11.0 |
//! | `weighted.rs` | `weighted` | QEMU 11.1 |

mod fixed;
mod per_slot;
mod per_source_window;
mod shared_window;
mod weighted;
mod window_rule;

pub(crate) use fixed::Fixed;
pub(crate) use per_source_window::PerSourceWindow;
pub(crate) use shared_window::SharedWindow;
pub(crate) use weighted::Weighted;

#[cfg(test)]
pub(crate) mod testing;
