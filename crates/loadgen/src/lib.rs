//! A client that puts disks under load, in open and closed loops, as a virtual machine would.
//!
//! It talks to any vhost-user-blk or vhost-user-scsi server through its socket, and knows nothing of its insides.
//!
//! ```text
//!   Spec ── jobs ──► Job ── reads, writes ──► client::Queue ══ shared memory, eventfds ══ a vhost-user process
//!                     │                                                                          │
//!                     └──► Tally (latency, own CPU)             machine::cpu_time_ns ◄───────────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`client`] | a vhost-user front-end on the driver's half of a ring |
//! | [`load`] | a load generator in fio's vocabulary |
//! | [`machine`] | cores and clocks: where a load and its server run, what time they spend |
//! | [`random`] | numbers, shuffles, and orders in which nothing comes twice |

#![deny(unsafe_code)]

pub mod client;
pub mod load;
pub mod machine;
pub mod random;
