//! A job's parameters, in fio's words.

use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use crate::client::Info;

/// Reads, writes or both; in order or at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rw {
    /// Whether there are reads.
    pub reads: bool,
    /// Whether there are writes.
    pub writes: bool,
    /// Whether addresses are random.
    pub random: bool,
}

impl FromStr for Rw {
    type Err = SpecError;

    /// By fio's names.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (reads, writes, random) = match text {
            "read" => (true, false, false),
            "write" => (false, true, false),
            "rw" | "readwrite" => (true, true, false),
            "randread" => (true, false, true),
            "randwrite" => (false, true, true),
            "randrw" => (true, true, true),
            other => return Err(SpecError::Rw(other.to_owned())),
        };
        Ok(Self { reads, writes, random })
    }
}

/// How completions are awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// By polling: takes a core, and adds no wake-up to the latencies.
    Polling,
    /// By sleeping until the server notifies, as a guest does.
    Blocking,
}

/// How requests are spaced when there is a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateProcess {
    /// Equal gaps.
    Fixed,
    /// Exponential gaps: a Poisson process, as of many independent users.
    Poisson,
}

/// An open loop: requests start at their intended times, however many are still in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Requests per second and job. Its disks have equal parts of them.
    pub iops: f64,
    /// How they are spaced.
    pub process: RateProcess,
}

/// A job's parameters. Fields are fio's options unless they say otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The operations and the order of their addresses.
    pub rw: Rw,
    /// Their length in bytes.
    pub bs: u32,
    /// Requests in flight on each disk of a job: exactly so many in a closed loop, at most so many in an open one.
    pub iodepth: u16,
    /// Threads.
    pub numjobs: u16,
    /// The share of reads where there are both, in percent.
    pub rwmixread: u8,
    /// The open loop's rate; none is a closed loop.
    pub rate_iops: Option<Rate>,
    /// Whether random addresses may come twice before all have come once.
    pub norandommap: bool,
    /// Where the first block is, in bytes.
    pub offset: u64,
    /// How much of the disk is used, in bytes; none is all of it.
    pub size: Option<u64>,
    /// Every block written says where it belongs and by whom it was written, and is checked when it is read: the seed
    /// of its pattern on a job's first disk, and the numbers behind it on the others.
    pub verify: Option<u64>,
    /// The warm-up, which is not measured.
    pub ramp_time: Duration,
    /// The measured time.
    pub runtime: Duration,
    /// The same addresses for the same number.
    pub randseed: u64,
    /// How completions are awaited. Not fio's, whose engines have it as `hipri`.
    pub waiting: Waiting,
    /// Bytes that buffers may take on each disk before requests share them, unless they verify, or some read and some
    /// write; none gives every request its own.
    pub memory: Option<u64>,
    /// The cores of the jobs, assigned round robin (`cpus_allowed_policy=split`); with none, jobs are not pinned.
    pub cpus_allowed: Vec<usize>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            rw: Rw { reads: true, writes: false, random: true },
            bs: 4096,
            iodepth: 1,
            numjobs: 1,
            rwmixread: 50,
            rate_iops: None,
            norandommap: true,
            offset: 0,
            size: None,
            verify: None,
            ramp_time: Duration::from_millis(200),
            runtime: Duration::from_secs(1),
            randseed: 0x0E67_E700,
            waiting: Waiting::Polling,
            memory: None,
            cpus_allowed: Vec::new(),
        }
    }
}

/// What is wrong with a [`Spec`].
#[derive(Clone, Debug, Error, PartialEq)]
pub enum SpecError {
    /// No such `rw`.
    #[error("rw must be read, write, rw, randread, randwrite or randrw; got '{0}'")]
    Rw(String),
    /// Not a multiple of the disk's block size.
    #[error("bs must be a multiple of the disk's block size, {block} bytes; got {got}")]
    Bs {
        /// The disk's.
        block: u32,
        /// What was asked for.
        got: u32,
    },
    /// There would be no requests.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// Not as many requests, or not such long ones.
    #[error("the queue takes {depth} requests of {longest} bytes: not enough for this load")]
    Queue {
        /// How many it takes.
        depth: u16,
        /// How long they may be.
        longest: u32,
    },
    /// More than all of them.
    #[error("rwmixread must be 0..=100, got {0}")]
    Mix(u8),
    /// No such rate.
    #[error("rate_iops must be above 0, got {0}")]
    Rate(f64),
    /// The part of the disk that is used lies beyond its end, or is too small.
    #[error("{got} bytes at {offset} of a disk of {capacity}: too little for {blocks} blocks of {bs}")]
    Room {
        /// How much was to be used.
        got: u64,
        /// From where.
        offset: u64,
        /// How large the disk is.
        capacity: u64,
        /// How many blocks are needed.
        blocks: u64,
        /// How long they are.
        bs: u32,
    },
    /// The disk refuses writes.
    #[error("the disk is read-only, and rw writes")]
    ReadOnly,
    /// A block must hold its header.
    #[error("verify needs bs of at least 512 bytes, got {0}")]
    TooSmallToVerify(u32),
    /// Verification keeps a generation for every block.
    #[error("verify keeps track of at most {most} blocks, and {got} were to be used")]
    TooManyToVerify {
        /// How many can be.
        most: u64,
        /// How many there are.
        got: u64,
    },
}

/// The most blocks that are verified: four bytes are kept for each.
const MOST_VERIFIED: u64 = 1 << 28;

impl Spec {
    /// Checks it against a disk.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self, info: &Info) -> Result<(), SpecError> {
        for (name, value) in [("bs", self.bs), ("iodepth", self.iodepth.into()), ("numjobs", self.numjobs.into())] {
            if value == 0 {
                return Err(SpecError::Zero(name));
            }
        }
        if info.block_size == 0 || !self.bs.is_multiple_of(info.block_size) {
            return Err(SpecError::Bs { block: info.block_size, got: self.bs });
        }
        if self.rwmixread > 100 {
            return Err(SpecError::Mix(self.rwmixread));
        }
        if let Some(Rate { iops, .. }) = self.rate_iops
            && !(iops > 0.0 && iops.is_finite())
        {
            return Err(SpecError::Rate(iops));
        }
        if self.rw.writes && info.read_only {
            return Err(SpecError::ReadOnly);
        }
        if self.verify.is_some() && self.bs < 512 {
            return Err(SpecError::TooSmallToVerify(self.bs));
        }
        self.part(0, info).map(drop)
    }

    /// The part of the disk that job `number` uses, in bytes: all jobs the same, unless they verify.
    ///
    /// # Errors
    /// It lies beyond the disk's end, or is too small.
    pub fn part(&self, number: u16, info: &Info) -> Result<Range<u64>, SpecError> {
        let (offset, capacity, bs) = (self.offset, info.capacity, self.bs);
        let got = self.size.unwrap_or(capacity.saturating_sub(offset));
        let shares = if self.verify.is_some() { u64::from(self.numjobs) } else { 1 };
        // Verification allows one request per block, and a free block must be found quickly.
        let blocks = shares * if self.verify.is_some() { 2 * u64::from(self.iodepth) } else { 1 };
        let room = SpecError::Room { got, offset, capacity, blocks, bs };
        let each = got / u64::from(bs) / shares;
        if offset.checked_add(got).is_none_or(|end| end > capacity) || each * shares < blocks || each == 0 {
            return Err(room);
        }
        if self.verify.is_some() && each > MOST_VERIFIED {
            return Err(SpecError::TooManyToVerify { most: MOST_VERIFIED, got: each });
        }
        let share = if shares > 1 { u64::from(number) } else { 0 };
        let begin = offset + share * each * u64::from(bs);
        Ok(begin..begin + each * u64::from(bs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Info =
        Info { capacity: 1 << 20, block_size: 512, most_segments: 1, queues: 1, read_only: false, flushes: true };

    fn complaint(spec: Spec) -> String {
        spec.check(&DISK).unwrap_err().to_string()
    }

    #[test]
    fn fios_names_mean_what_they_mean_there() {
        let rw: Rw = "randrw".parse().unwrap();
        assert_eq!(rw, Rw { reads: true, writes: true, random: true });
        assert_eq!("write".parse(), Ok(Rw { reads: false, writes: true, random: false }));
        assert!("trim".parse::<Rw>().unwrap_err().to_string().contains("got 'trim'"));
    }

    #[test]
    fn what_cannot_be_done_to_this_disk_is_said_in_one_line() {
        let spec = Spec::default;
        assert_eq!(spec().check(&DISK), Ok(()));
        assert_eq!(
            complaint(Spec { bs: 1000, ..spec() }),
            "bs must be a multiple of the disk's block size, 512 bytes; got 1000"
        );
        assert_eq!(complaint(Spec { iodepth: 0, ..spec() }), "iodepth must be at least 1");
        assert_eq!(complaint(Spec { rwmixread: 101, ..spec() }), "rwmixread must be 0..=100, got 101");
        let rate = Some(Rate { iops: 0.0, process: RateProcess::Fixed });
        assert_eq!(complaint(Spec { rate_iops: rate, ..spec() }), "rate_iops must be above 0, got 0");
        let room = "1048576 bytes at 512 of a disk of 1048576: too little for 1 blocks of 4096";
        assert_eq!(complaint(Spec { offset: 512, size: Some(1 << 20), ..spec() }), room);
        let writer = Spec { rw: "write".parse().unwrap(), ..spec() };
        let read_only = Info { read_only: true, ..DISK };
        assert_eq!(writer.check(&read_only), Err(SpecError::ReadOnly));
    }

    #[test]
    fn requests_share_buffers_when_memory_is_short_and_nobody_looks_at_the_data() {
        let spec = Spec { bs: 1 << 24, iodepth: 16, memory: Some(1 << 26), ..Spec::default() };
        let buffers = |spec: Spec| spec.shape().buffers.min(spec.iodepth);
        assert_eq!(buffers(spec.clone()), 4);
        assert_eq!(buffers(Spec { numjobs: 2, ..spec.clone() }), 2);
        assert_eq!(buffers(Spec { numjobs: 100, ..spec.clone() }), 1);
        for own in [
            Spec { bs: 4096, ..spec.clone() },
            Spec { memory: None, ..spec.clone() },
            Spec { verify: Some(1), ..spec.clone() },
            Spec { rw: "randrw".parse().unwrap(), ..spec },
        ] {
            assert_eq!(buffers(own), 16);
        }
    }

    #[test]
    fn jobs_that_verify_keep_off_each_others_blocks() {
        let spec = Spec { numjobs: 4, verify: Some(1), ..Spec::default() };
        let parts: Vec<_> = (0..4).map(|job| spec.part(job, &DISK).unwrap()).collect();
        assert_eq!(parts, [0..1 << 18, 1 << 18..1 << 19, 1 << 19..3 << 18, 3 << 18..1 << 20]);
        assert_eq!(Spec { verify: None, ..spec }.part(3, &DISK).unwrap(), 0..1 << 20);
    }
}
