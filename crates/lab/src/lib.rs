//! Puts disks under load, measures them, and says what it means.
//!
//! The lab drives real processes through their sockets, as a virtual machine would, and knows nothing of their insides.
//!
//! ```text
//!   Spec ── jobs ──► Job ── reads, writes ──► client::Queue ══ shared memory, eventfds ══ a vhost-user-blk process
//!                     │                                                                             │
//!                     └──► Tally (latency, own CPU) ──► Outcome          machine::cpu_time_ns ◄─────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`analysis`] | what a run says: ratios, verdicts, ledgers, advice |
//! | [`client`] | a vhost-user-blk front-end on the driver's half of a ring |
//! | [`compare`] | two runs beside each other |
//! | [`disks`] | the disks under test |
//! | [`fingerprint`] | what a reader must know of the machine |
//! | [`import`] | what fio measured elsewhere |
//! | [`ledger`] | who spends CPU time meanwhile |
//! | [`load`] | a load generator in fio's vocabulary |
//! | [`machine`] | cores, clocks, and what to say of the machine |
//! | [`plan`] | what to measure: subjects under loads |
//! | [`process`] | processes that end with the lab |
//! | [`qmp`] | a monitor's client, of any server that has one |
//! | [`results`] | what was found, as it is kept |
//! | [`replay`] | recorded waits, replayed under every polling policy |
//! | [`report`] | a page, a text and a table of a run |
//! | [`runner`] | runs a plan, cell by cell |
//! | [`stack`] | what can be put under load, and how it is started |
//! | [`statistics`] | medians, ratios of pairs, verdicts |

#![deny(unsafe_code)]

pub mod analysis;
pub mod client;
pub mod compare;
pub mod disks;
pub mod fingerprint;
pub mod import;
pub mod ledger;
pub mod load;
pub mod machine;
pub mod plan;
pub mod process;
pub mod qmp;
pub mod random;
pub mod replay;
pub mod report;
pub mod results;
pub mod runner;
pub mod stack;
pub mod statistics;
