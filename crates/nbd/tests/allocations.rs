//! Nothing is allocated per request: in a process of its own, whose allocator counts what the thread of the loop does.

#[path = "../../virtio/tests/counting/mod.rs"]
mod counting;
#[path = "engine/server.rs"]
#[allow(dead_code, reason = "the engine's tests use more of it")]
mod server;

use std::sync::Arc;

use egret_disk::{Disk, Driver, EngineOptions, EngineSet, Op, Options, RemoteDisk, Request, RequestToken};
use egret_event_loop::{Backend, clock};
use egret_nbd::NbdDisk;
use egret_nbd::protocol::{Headers, command};
use egret_vring::memory::{IoVec, Lent};
use rustix::event::{PollFd, PollFlags, poll};

use counting::ALLOCATIONS_HERE;
use server::{Says, Server};

const DEPTH: usize = 16;

#[test]
fn nothing_is_allocated_per_request() {
    for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
        let server = Server::new();
        let remote = RemoteDisk::new(NbdDisk::new(server.target(0)));
        let serving = std::thread::spawn(move || {
            let mut peer = server.accept(Says::default().with(headers));
            let data = vec![5; 32 << 10];
            loop {
                let (request, _) = peer.request();
                match request.command {
                    command::READ => peer.data(&request, &data[..request.length as usize]),
                    command::DISCONNECT => break,
                    _ => peer.done(&request),
                }
            }
        });
        let disk = Arc::new(Disk::open(&Options::new("d0", Driver::Remote(remote))).unwrap());
        let mut engines = EngineSet::new(EngineOptions::default());
        let slot = engines.attach(&disk).unwrap();
        let fd = engines.descriptors()[0];
        // Some replies are worth a copy, and some are not.
        let mut memory = vec![0u8; DEPTH * (32 << 10)];
        let buffers = memory.chunks_mut(32 << 10).enumerate().map(|(at, chunk)| {
            let len = if at % 3 == 0 { 32 << 10 } else { 4096 };
            let pieces = [&mut chunk[..len]].map(|piece| {
                // SAFETY: the memory outlives the requests, and nobody looks at it.
                unsafe { IoVec::new(piece.as_mut_ptr(), piece.len()) }
            });
            // SAFETY: as above.
            (unsafe { Lent::assume(pieces.to_vec()) }, len as u64)
        });
        let mut free: Vec<_> = buffers.collect();
        let ops = [Op::Read, Op::Write { fua: true }, Op::WriteZeroes { unmap: true, fua: false }];
        let (mut sent, mut before) = (0, 0);
        while sent < 20_000 || free.len() < DEPTH {
            if before == 0 && sent >= 5_000 {
                before = ALLOCATIONS_HERE.get();
            }
            while sent < 20_000
                && let Some((buffers, len)) = free.pop()
            {
                let op = ops[sent % ops.len()];
                engines.push(slot, Request { op, offset: 4096, len, buffers, token: RequestToken(len) });
                sent += 1;
            }
            engines.submit(clock::now());
            if engines.arm() {
                // SAFETY: the engine has it open.
                let descriptor = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
                poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], None).unwrap();
                engines.announced(fd);
            }
            engines.reap(clock::now(), &mut |ended| {
                assert_eq!(ended.completion.result, Ok(()));
                free.push((ended.completion.buffers, ended.completion.token.0));
            });
        }
        // None belongs to a request: what is left is the lists' growth to the depth, whenever all of it first ends at once.
        let made = ALLOCATIONS_HERE.get() - before;
        assert!(before > 0 && made < 4 * DEPTH, "{headers:?}: {made} allocations in 15,000 requests");
        drop(engines);
        drop(disk);
        serving.join().unwrap();
    }
}
