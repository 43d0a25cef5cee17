//! Commands at a logical unit, as any transport could carry them.

use std::sync::Arc;
use std::task::Waker;

use egret_disk::Op;
use egret_scsi::{
    Command, DataOut, DiskOp, Done, LogicalUnit, MAX_SCRATCH, Memory, Nexus, NexusId, Status, Step, Task,
};
use rustix::io::Errno;

use crate::input::Input;
use crate::seeds;
use crate::woken::Woken;

/// The most commands that are under way at a time.
const MOST: usize = 4;

/// As many disk operations are the most that any one command here can take.
const PATIENCE: usize = 1 << 20;

/// Data that notices who reads past its end.
struct Given(Vec<u8>);

impl DataOut for Given {
    fn read_at(&self, at: u64, into: &mut [u8]) {
        let at = usize::try_from(at).expect("within the data");
        into.copy_from_slice(&self.0[at..at + into.len()]);
    }
}

struct Running {
    command: Command,
    nexus: Arc<Nexus>,
    given: Given,
    data_in: u64,
    step: Step,
}

struct Bench {
    unit: LogicalUnit,
    nexuses: [Arc<Nexus>; 2],
    running: Vec<Running>,
    woken: Arc<Woken>,
    waker: Waker,
}

/// A program: what the unit is, and then commands that begin, operations that end, and what happens to the unit.
///
/// # Panics
/// When the unit does what it must not.
pub fn scsi_commands(data: &[u8]) {
    let mut input = Input(data);
    let unit = LogicalUnit::new(seeds::unit(input.u8(), "s")).expect("the configuration is good");
    let nexuses = [1, 2].map(|initiator| unit.attach(NexusId { initiator, port: 1 }));
    let woken = Arc::<Woken>::default();
    let mut bench = Bench { unit, nexuses, running: Vec::new(), waker: Arc::clone(&woken).into(), woken };
    while !input.is_over() {
        match input.u8() % 10 {
            0..5 => bench.begin(&mut input),
            5..7 => bench.go_on(input.u8().into(), if input.u8().is_multiple_of(4) { Err(Errno::IO) } else { Ok(()) }),
            7 => bench.retry(),
            8 => bench.abort(input.u8().into()),
            _ => bench.happen(&mut input),
        }
    }
    bench.drain();
}

impl Bench {
    fn begin(&mut self, input: &mut Input<'_>) {
        if self.running.len() == MOST {
            self.go_on(0, Ok(()));
        }
        if self.running.len() == MOST {
            return;
        }
        let nexus = Arc::clone(&self.nexuses[usize::from(input.u8() % 2)]);
        let cdb = seeds::cdb(input);
        let data_in = u64::from(input.u16());
        let len = usize::from(input.u16() % 8192);
        let pattern = input.bytes(len);
        let given = Given((0..len).map(|at| pattern.get(at).copied().unwrap_or_default()).collect());
        let mut command = Command::new();
        let (luns, data_out, waker) = (&[0, 1 << 48], len as u64, &self.waker);
        let task = Task { cdb: &cdb, nexus: &nexus, luns, data_in, data_out, lane: 0, waker };
        let step = self.unit.begin(&mut command, &task, &given);
        let running = Running { command, nexus, given, data_in, step };
        if self.goes_on(&running) {
            self.running.push(running);
        }
    }

    /// One operation ends.
    fn go_on(&mut self, which: usize, result: Result<(), Errno>) {
        if self.running.is_empty() {
            return;
        }
        let which = which % self.running.len();
        let Running { command, nexus, given, step, .. } = &mut self.running[which];
        *step = match step {
            Step::Disk(op) => {
                if op.memory == Memory::Scratch {
                    let scratch = command.scratch(given);
                    assert_eq!(scratch.len() as u64, op.len);
                    if op.op == Op::Read {
                        // What the disk holds: sometimes what the initiator compares it with.
                        let len = scratch.len().min(given.0.len());
                        scratch[..len].copy_from_slice(&given.0[..len]);
                    }
                }
                self.unit.step(command, result, given, nexus, &self.waker)
            }
            _ => self.unit.retry(command, nexus, &self.waker),
        };
        if !self.goes_on(&self.running[which]) {
            self.running.swap_remove(which);
        }
    }

    fn retry(&mut self) {
        for at in (0..self.running.len()).rev() {
            if self.running[at].step == Step::Wait {
                self.go_on(at, Ok(()));
            }
        }
    }

    fn abort(&mut self, which: usize) {
        if !self.running.is_empty() {
            let mut gone = self.running.swap_remove(which % self.running.len());
            self.unit.abort(&mut gone.command);
        }
    }

    fn happen(&mut self, input: &mut Input<'_>) {
        match input.u8() % 4 {
            0 => {
                (0..self.running.len()).for_each(|_| self.abort(0));
                self.unit.reset();
            }
            1 => self.unit.reset_nexus(self.nexuses[0].id()),
            2 => drop(self.unit.set_capacity(seeds::CAPACITY / u64::from(input.u8() % 4 + 1))),
            _ => self.nexuses[1] = self.unit.attach(NexusId { initiator: u64::from(input.u8() % 3), port: 1 }),
        }
    }

    /// Everything ends, if every operation does: those that wait are tried again when they are woken, and not before.
    fn drain(&mut self) {
        let mut operations = 0;
        while !self.running.is_empty() {
            if self.woken.take() {
                self.retry();
                continue;
            }
            let out = self.running.iter().position(|running| running.step != Step::Wait);
            let Some(which) = out else { panic!("commands wait, and nobody wakes them") };
            assert!(operations < PATIENCE, "a command never ends: {:?}", self.running[which].step);
            operations += 1;
            self.go_on(which, Ok(()));
        }
    }

    /// Checks a step; says whether the command is still under way.
    fn goes_on(&self, running: &Running) -> bool {
        let Running { command, given, data_in, step, .. } = running;
        let data_out = given.0.len() as u64;
        match *step {
            Step::Wait => true,
            Step::Disk(op) => {
                self.check(&op, *data_in, data_out);
                true
            }
            Step::Done(Done { status, sense, moved }) => {
                assert!(moved <= (*data_in).max(data_out), "{moved} bytes moved of {data_in} and {data_out}");
                assert_eq!(sense.is_some(), status == Status::CheckCondition, "sense comes with CHECK CONDITION alone");
                let data = command.data_in();
                if status == Status::Good && !data.is_empty() {
                    assert!(data.len() as u64 == moved && moved <= *data_in, "{} bytes answered", data.len());
                }
                false
            }
            Step::Overrun { needed } => {
                assert!(needed > *data_in || needed > data_out, "{needed} bytes are there");
                false
            }
        }
    }

    fn check(&self, op: &DiskOp, data_in: u64, data_out: u64) {
        let DiskOp { op: what, offset, len, memory } = *op;
        let end = offset.checked_add(len).expect("within the disk");
        // It may have shrunk since.
        assert!(end <= seeds::CAPACITY, "{op:?} is outside the disk");
        let config = self.unit.config();
        assert!(offset.is_multiple_of(u64::from(config.logical_block_bytes)), "{op:?} is not of whole blocks");
        assert!(!config.read_only || matches!(what, Op::Read | Op::Flush), "{op:?} changes a disk that is read only");
        match memory {
            Memory::None => assert!(matches!(what, Op::Flush | Op::Discard | Op::WriteZeroes { .. })),
            Memory::DataIn => assert!(what == Op::Read && len <= data_in, "{op:?} with room for {data_in}"),
            Memory::DataOut(at) => assert!(at + len <= data_out, "{op:?} with {data_out} bytes"),
            Memory::Scratch => assert!(matches!(what, Op::Read | Op::Write { .. }) && len <= MAX_SCRATCH),
        }
    }
}
