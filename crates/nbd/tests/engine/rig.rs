//! Plays the loop of an I/O thread: pushes, submits, waits for what is announced edge by edge, reaps.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_disk::{
    Discard, Disk, DiskSlot, Driver, EngineOptions, EngineSet, Op, Options, RemoteDisk, Request, RequestToken,
};
use egret_event_loop::{Backend, Nanos, clock};
use egret_nbd::{NbdDisk, Target};
use egret_vring::memory::{IoVec, Lent};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::server::HANGS;

pub fn open(target: Target) -> Result<Arc<Disk>, String> {
    let options = Options {
        read_only: target.read_only,
        discard: Discard::Unmap,
        ..Options::new("d0", Driver::Remote(RemoteDisk::new(NbdDisk::new(target))))
    };
    Disk::open(&options).map(Arc::new).map_err(|e| e.to_string())
}

pub struct Rig {
    pub engines: EngineSet,
    slot: DiskSlot,
    epoll: OwnedFd,
    memory: HashMap<u64, Vec<u8>>,
    done: HashMap<u64, Result<(), Errno>>,
    next: u64,
}

impl Rig {
    pub fn new(disk: &Arc<Disk>) -> Result<Self, String> {
        let mut engines = EngineSet::new(EngineOptions::default());
        let slot = engines.attach(disk).map_err(|e| e.to_string())?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for fd in engines.descriptors() {
            // SAFETY: the engine has it open.
            let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
            let (data, flags) = (epoll::EventData::new_u64(fd as u64), epoll::EventFlags::IN | epoll::EventFlags::ET);
            epoll::add(&epoll, borrowed, data, flags).unwrap();
        }
        Ok(Self { engines, slot, epoll, memory: HashMap::new(), done: HashMap::new(), next: 0 })
    }

    /// Lets go of the disk, and takes it in again.
    pub fn attach_again(&mut self, disk: &Arc<Disk>) -> Result<(), String> {
        self.engines.detach(self.slot);
        self.slot = self.engines.attach(disk).map_err(|e| e.to_string())?;
        Ok(())
    }

    /// Pushes a request over `data`, which is in pieces of up to 1000 bytes.
    pub fn push(&mut self, op: Op, offset: u64, len: u64, data: Vec<u8>) -> u64 {
        self.push_in(1000, op, offset, len, data)
    }

    /// As [`push`](Self::push), in pieces of up to `most` bytes.
    pub fn push_in(&mut self, most: usize, op: Op, offset: u64, len: u64, data: Vec<u8>) -> u64 {
        let data = self.memory.entry(self.next + 1).or_insert(data);
        let pieces = data.chunks_mut(most).map(|piece| {
            // SAFETY: the vector stays in the map, and as it is, until its request is done.
            unsafe { IoVec::new(piece.as_mut_ptr(), piece.len()) }
        });
        let pieces = pieces.collect();
        // SAFETY: as above.
        unsafe { self.push_pieces(op, offset, len, pieces) }
    }

    /// Pushes a request over memory that is not the rig's own.
    ///
    /// # Safety
    ///
    /// It must stay mapped, and nobody may refer to it, until the request is done.
    pub unsafe fn push_pieces(&mut self, op: Op, offset: u64, len: u64, pieces: Vec<IoVec>) -> u64 {
        self.next += 1;
        self.memory.entry(self.next).or_default();
        // SAFETY: as the caller promises.
        let buffers = unsafe { Lent::assume(pieces) };
        self.engines.push(self.slot, Request { op, offset, len, buffers, token: RequestToken(self.next) });
        self.next
    }

    pub fn read(&mut self, offset: u64, len: usize) -> u64 {
        self.push(Op::Read, offset, len as u64, vec![0xee; len])
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> u64 {
        self.push(Op::Write { fua: false }, offset, data.len() as u64, data.to_vec())
    }

    pub fn submit(&mut self) {
        self.engines.submit(clock::now());
    }

    /// One turn, which waits no longer than so.
    pub fn turn(&mut self, longest: Duration) {
        if self.engines.arm() {
            let due = self.engines.deadline().map(|at| Duration::from_nanos((at - clock::now().min(at)).0));
            let wait = due.map_or(longest, |due| due.min(longest));
            let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
            let mut events = Vec::with_capacity(8);
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout));
            events.iter().for_each(|event| self.engines.announced(event.data.u64() as i32));
        }
        let now: Nanos = clock::now();
        let done = &mut self.done;
        self.engines.reap(now, &mut |ended| {
            let before = done.insert(ended.completion.token.0, ended.completion.result);
            assert_eq!(before, None, "each request comes back once");
        });
        self.engines.submit(now);
    }

    /// How a request ended, and its memory.
    pub fn wait(&mut self, id: u64) -> (Result<(), Errno>, Vec<u8>) {
        self.submit();
        self.wait_only(id)
    }

    /// As [`wait`](Self::wait), for one that was submitted.
    pub fn wait_only(&mut self, id: u64) -> (Result<(), Errno>, Vec<u8>) {
        let begun = Instant::now();
        while !self.done.contains_key(&id) {
            assert!(begun.elapsed() < HANGS, "request {id} hangs");
            self.turn(HANGS);
        }
        (self.done[&id], self.memory.remove(&id).unwrap())
    }

    pub fn is_done(&self, id: u64) -> bool {
        self.done.contains_key(&id)
    }
}
