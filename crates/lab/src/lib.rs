//! Puts disks under load, measures them, and says what it means.
//!
//! The lab drives real processes through their sockets, as a virtual machine would, and knows nothing of their insides.
//! What loads them is [`egret_loadgen`], fio, or applications in a guest.
//!
//! | module | holds |
//! |---|---|
//! | [`analysis`] | what a run says: ratios, verdicts, ledgers, advice |
//! | [`compare`] | two runs beside each other |
//! | [`disks`] | the disks under test |
//! | [`fingerprint`] | what a reader must know of the machine |
//! | [`import`] | what fio measured elsewhere |
//! | [`cpu_meter`] | who spends CPU time meanwhile |
//! | [`machine`] | cores, and who has which |
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
pub mod compare;
pub mod cpu_meter;
pub mod disks;
pub mod fingerprint;
pub mod import;
mod io_submit;
pub mod machine;
pub mod plan;
pub mod process;
pub mod qmp;
pub mod replay;
pub mod report;
pub mod results;
pub mod runner;
pub mod stack;
pub mod statistics;
