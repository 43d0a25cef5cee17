//! Guest memory, rings and device models.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod memory;
