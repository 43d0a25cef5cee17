//! A load generator in fio's vocabulary, on queues of our own.
//!
//! | file | what it is |
//! |---|---|
//! | `spec.rs` | what to do, in fio's words |
//! | `job.rs` | one thread's load: closed or open loop, polling or blocking |
//! | `lane.rs` | one disk of a job: addresses, slots, what is in flight |
//! | `arrivals.rs` | the intended start times of an open loop |
//! | `verify.rs` | stamped blocks, and the generation of each that was written last |
//! | `waiter.rs` | sleeping until a server notifies |
//! | `tally.rs` | what was measured |
//!
//! In an open loop a request's latency counts from its *intended* start. A stall of the server delays every request that
//! is due during it, and all their latencies show it: there is no coordinated omission (Gil Tene).

mod arrivals;
mod job;
mod lane;
mod spec;
mod tally;
mod verify;
mod waiter;

use thiserror::Error;

use crate::client::{ClientError, Connection, Op, Shape};

pub use job::{Edge, Job, Span};
pub use spec::{Rate, RateProcess, Rw, Spec, SpecError, Waiting};
pub use tally::{OpenLoop, Tally};
pub use verify::{Mismatch, Stamp};

/// Why a load failed.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The spec does not fit the disk.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The connection failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A request failed.
    #[error("a {op:?} at {offset} ended with status {status}")]
    Failed {
        /// Its operation.
        op: Op,
        /// Its offset, in bytes.
        offset: u64,
        /// The device's status.
        status: u8,
    },
    /// A block does not hold what was written.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
}

impl Spec {
    /// The shape of a disk that these jobs share.
    pub fn shape(&self) -> Shape {
        // With writes in the mix a shared buffer would be read into while another request writes from it.
        let own = self.verify.is_some() || (self.rw.reads && self.rw.writes);
        let room = self.memory.filter(|_| !own).unwrap_or(u64::MAX) / u64::from(self.numjobs.max(1));
        let buffers = room / u64::from(self.bs.max(1));
        Shape {
            queues: self.numjobs,
            depth: self.iodepth,
            bytes: self.bs,
            buffers: buffers.clamp(1, u64::from(u16::MAX)) as u16,
        }
    }

    /// The jobs on one disk: a thread and a queue for each.
    ///
    /// # Errors
    /// The disk cannot be used as described, or has too few queues running.
    pub fn jobs(&self, disk: Connection) -> Result<Vec<Job>, LoadError> {
        let Connection { info, queues } = disk;
        (0..self.numjobs).zip(queues).map(|(number, queue)| Job::new(self, number, vec![(info, queue)])).collect()
    }

    /// How long each of them runs.
    pub fn span(&self) -> Span {
        Span { ramp: self.ramp_time, length: self.runtime }
    }
}

/// Runs jobs side by side, each in a thread of its own, and adds them up. `edge` is called by the first of them.
///
/// # Errors
/// The first job's that failed.
pub fn run(jobs: &mut [Job], span: Span, edge: &mut (dyn FnMut(Edge) + Send)) -> Result<Option<Tally>, LoadError> {
    let tallies: Vec<Result<Tally, LoadError>> = std::thread::scope(|scope| {
        let mut edge = Some(edge);
        let threads: Vec<_> = jobs
            .iter_mut()
            .map(|job| {
                let edge = edge.take();
                scope.spawn(move || {
                    let mut tally = job.tally();
                    match edge {
                        Some(edge) => job.run(span, &mut tally, edge)?,
                        None => job.run(span, &mut tally, &mut |_| ())?,
                    }
                    Ok(tally)
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    let mut all: Option<Tally> = None;
    for tally in tallies {
        let tally = tally?;
        match &mut all {
            Some(all) => all.join(&tally),
            None => all = Some(tally),
        }
    }
    Ok(all)
}
