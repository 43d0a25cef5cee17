//! A logical unit with a disk of memory behind it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use egret_disk::Op;
use rustix::io::Errno;

use crate::{
    Command, DiscardConfig, DiskOp, Done, LogicalUnit, LunConfig, MAX_SCRATCH, Memory, Nexus, NexusId, Sense, Status,
    Step, Task,
};

/// Blocks of the disk, and bytes of a block.
pub(crate) const BLOCKS: usize = 1024;
pub(crate) const BLOCK: usize = 512;

/// The LUNs that the target says it has.
pub(crate) const LUNS: [u64; 2] = [0, 0x0001 << 48];

pub(crate) fn config() -> LunConfig {
    LunConfig {
        capacity_bytes: (BLOCKS * BLOCK) as u64,
        serial: "SN-1".into(),
        discard: Some(DiscardConfig {
            max_bytes: 64 << 10,
            granularity_bytes: 4096,
            alignment_bytes: 0,
            max_descriptors: 4,
            reads_zeroes: false,
        }),
        physical_block_bytes: 4096,
        max_write_zeroes_bytes: 128 << 10,
        max_write_same_bytes: 512 << 10,
        ..LunConfig::default()
    }
}

/// How a command ended, as its initiator sees it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: Status,
    pub(crate) sense: Option<Sense>,
    pub(crate) data: Vec<u8>,
    pub(crate) moved: u64,
}

pub(crate) struct Rig {
    pub(crate) unit: LogicalUnit,
    pub(crate) disk: Vec<u8>,
    pub(crate) nexus: Arc<Nexus>,
    pub(crate) command: Command,
    /// The operations that the disk was asked for since the last command began.
    pub(crate) ops: Vec<(Op, u64, u64)>,
    /// What becomes of operations on the disk from this one on.
    pub(crate) fails: Option<(usize, Errno)>,
}

impl Rig {
    pub(crate) fn new(config: LunConfig) -> Self {
        Self::of(LogicalUnit::new(config).unwrap())
    }

    pub(crate) fn of(unit: LogicalUnit) -> Self {
        let nexus = unit.attach(nexus(1));
        nexus.take_attention();
        static DISK: LazyLock<Vec<u8>> =
            LazyLock::new(|| (0..BLOCKS * BLOCK).map(|i| (i / BLOCK) as u8 ^ i as u8).collect());
        Self { unit, disk: DISK.clone(), nexus, command: Command::new(), ops: Vec::new(), fails: None }
    }

    /// Another initiator, which knows what there is to know.
    pub(crate) fn other(&self, initiator: u64) -> Arc<Nexus> {
        let other = self.unit.attach(nexus(initiator));
        other.take_attention();
        other
    }

    /// A command by another nexus.
    pub(crate) fn run_as(&mut self, nexus: &Arc<Nexus>, cdb: &[u8], out: &[u8], room: usize) -> Reply {
        let own = std::mem::replace(&mut self.nexus, nexus.clone());
        let reply = self.run(cdb, out, room);
        self.nexus = own;
        reply
    }

    /// A command, from beginning to end, with `room` bytes for data-in.
    #[track_caller]
    pub(crate) fn run(&mut self, cdb: &[u8], out: &[u8], room: usize) -> Reply {
        self.try_run(cdb, out, room).expect("buffers that are long enough")
    }

    /// How many bytes a command would need.
    #[track_caller]
    pub(crate) fn overrun(&mut self, cdb: &[u8], out: &[u8], room: usize) -> u64 {
        self.try_run(cdb, out, room).unwrap_err()
    }

    /// A command, from beginning to end; or how many bytes it would need.
    pub(crate) fn try_run(&mut self, cdb: &[u8], out: &[u8], room: usize) -> Result<Reply, u64> {
        let mut data = vec![0xaa; room];
        let Done { status, sense, moved } = self.steps(cdb, out, &mut data)?;
        let given = self.command.data_in();
        if status == Status::Good && !given.is_empty() {
            assert_eq!(given.len() as u64, moved);
            data[..given.len()].copy_from_slice(given);
        }
        data.truncate(moved as usize);
        Ok(Reply { status, sense, data, moved })
    }

    fn steps(&mut self, cdb: &[u8], out: &[u8], data: &mut [u8]) -> Result<Done, u64> {
        self.ops.clear();
        let mut command = std::mem::take(&mut self.command);
        let nexus = self.nexus.clone();
        let (data_in, data_out) = (data.len() as u64, out.len() as u64);
        let task = Task { cdb, nexus: &nexus, luns: &LUNS, data_in, data_out, lane: 0, waker: Waker::noop() };
        let moves = matches!(cdb, [0x08 | 0x0a | 0x28 | 0x2a | 0x88 | 0x8a | 0xa8 | 0xaa, ..]);
        // One of the medium may be a flush as well.
        let is_of_medium = matches!(cdb, [0x28 | 0x88 | 0xa8, flags, ..] if flags & 0x08 != 0);
        let is_transfer = moves && !is_of_medium && nexus.flags().is_clear();
        let transfer = self.transfer(&task);
        let mut step = self.unit.begin(&mut command, &task, &out);
        let one = if let Step::Disk(op) = step { Some(op).filter(|_| is_transfer) } else { None };
        assert_eq!(transfer, one, "what is a transfer is one either way, and nothing else is");
        let end = loop {
            step = match step {
                Step::Disk(op) => {
                    let result = self.disk(&mut command, op, out, data);
                    let next = self.unit.step(&mut command, result, &out, &nexus, Waker::noop());
                    assert_eq!(command.scratch.capacity(), 0, "a step gives back what its operation had");
                    next
                }
                Step::Wait => panic!("nobody else is there to wait for"),
                Step::Done(done) => break Ok(done),
                Step::Overrun { needed } => break Err(needed),
            }
        };
        self.command = command;
        end
    }

    /// The task as a transfer, if it is one.
    fn transfer(&self, task: &Task<'_>) -> Option<DiskOp> {
        let mut command = Command::new();
        let op = self.unit.begin_transfer(&mut command, task);
        if let Some(op) = op {
            assert!(command.is_transfer());
            assert_eq!((self.unit.end_transfer(&mut command), command.data_in()), (op.len, &[][..]));
        }
        op
    }

    /// Does what the disk would.
    pub(crate) fn disk(&mut self, command: &mut Command, op: DiskOp, out: &[u8], data: &mut [u8]) -> Result<(), Errno> {
        self.ops.push((op.op, op.offset, op.len));
        if let Some((from, errno)) = self.fails
            && self.ops.len() > from
        {
            return Err(errno);
        }
        assert!(op.memory != Memory::Scratch || op.len <= MAX_SCRATCH);
        let len = op.len as usize;
        let range = op.offset as usize..op.offset as usize + len;
        match (op.op, op.memory) {
            (Op::Read, Memory::DataIn) => data[..len].copy_from_slice(&self.disk[range]),
            (Op::Read, Memory::Scratch) => command.scratch(&out).copy_from_slice(&self.disk[range]),
            (Op::Write { .. }, Memory::DataOut(at)) => self.disk[range].copy_from_slice(&out[at as usize..][..len]),
            (Op::Write { .. }, Memory::Scratch) => self.disk[range].copy_from_slice(command.scratch(&out)),
            (Op::WriteZeroes { .. }, Memory::None) => self.disk[range].fill(0),
            // Whatever it is: what the disk has of it is undefined.
            (Op::Discard, Memory::None) => self.disk[range].fill(0xdd),
            (Op::Flush, Memory::None) => assert_eq!(len, 0),
            wrong => panic!("{wrong:?} makes no sense"),
        }
        Ok(())
    }

    /// Blocks of the disk, as they are.
    pub(crate) fn blocks(&self, from: usize, count: usize) -> &[u8] {
        &self.disk[from * BLOCK..(from + count) * BLOCK]
    }
}

/// A waker that counts.
#[derive(Default)]
pub(crate) struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Woken {
    /// How often it has been woken since it was last asked.
    pub(crate) fn take(&self) -> usize {
        self.0.swap(0, Ordering::SeqCst)
    }
}

struct OfThread(Thread);

impl Wake for OfThread {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A waker that ends this thread's [`await_wake`], or its next one.
pub(crate) fn waker_of_this_thread() -> Waker {
    Arc::new(OfThread(thread::current())).into()
}

#[track_caller]
pub(crate) fn await_wake() {
    let patience = Duration::from_secs(60);
    let begun = Instant::now();
    thread::park_timeout(patience);
    assert!(begun.elapsed() < patience, "nobody was woken");
}

pub(crate) fn nexus(initiator: u64) -> NexusId {
    NexusId { initiator, port: 1 }
}

impl Reply {
    /// Good, with this data-in.
    #[track_caller]
    pub(crate) fn good(self) -> Vec<u8> {
        assert_eq!(self.status, Status::Good, "{:?}", self.sense);
        self.data
    }

    /// CHECK CONDITION, with this sense.
    #[track_caller]
    pub(crate) fn sense(self) -> Sense {
        assert_eq!(self.status, Status::CheckCondition);
        assert_eq!(self.moved, 0);
        self.sense.unwrap()
    }
}

/// A CDB of ten bytes with address and length in the usual places.
pub(crate) fn cdb10(code: u8, flags: u8, lba: u32, blocks: u16) -> [u8; 10] {
    let ([a, b, c, d], [e, f]) = (lba.to_be_bytes(), blocks.to_be_bytes());
    [code, flags, a, b, c, d, 0, e, f, 0]
}

/// Likewise of twelve.
pub(crate) fn cdb12(code: u8, flags: u8, lba: u32, blocks: u32) -> [u8; 12] {
    let mut cdb = [0; 12];
    (cdb[0], cdb[1]) = (code, flags);
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[6..10].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

/// Likewise of sixteen.
pub(crate) fn cdb16(code: u8, flags: u8, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (code, flags);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}
