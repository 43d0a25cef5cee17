//! One I/O thread's turn.

mod backend;
pub mod clock;
pub mod ring;

pub use backend::Backend;
pub use egret_polling::Nanos;
