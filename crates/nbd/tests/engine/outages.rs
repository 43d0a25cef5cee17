//! Connections that end, and what becomes of requests meanwhile.

use std::time::{Duration, Instant};

use egret_disk::Op;
use egret_event_loop::{Backend as _, clock};
use egret_nbd::protocol::{BlockSizes, command, export_flag};
use egret_vring::memory::IoVec;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::{Errno, pwrite};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::requests::connected;
use crate::rig::{Rig, open};
use crate::server::{HANGS, Peer, Says, Server};

/// As [`connected`], with a delay in milliseconds.
fn connected_for(says: Says, delay: u64) -> (Rig, Peer, Server) {
    let server = Server::new();
    let target = server.target(delay);
    let (disk, peer) = std::thread::scope(|scope| {
        let disk = scope.spawn(|| open(target).unwrap());
        let peer = server.accept(says);
        (disk.join().unwrap(), peer)
    });
    (Rig::new(&disk).unwrap(), peer, server)
}

#[test]
fn requests_are_sent_again_in_order_when_there_is_a_connection_again() {
    let (mut rig, mut peer, server) = connected(Says::default());
    let ids: Vec<u64> = (0..20).map(|at| rig.write(at * 512, &[at as u8; 512])).collect();
    rig.submit();
    let requests: Vec<_> = (0..20).map(|_| peer.request().0).collect();
    for answered in [3, 7] {
        peer.done(&requests[answered]);
        assert_eq!(rig.wait(ids[answered]).0, Ok(()));
    }
    // In the middle of a reply.
    peer.send(&[0x66, 0x8e]);
    drop(peer);
    let later = rig.read(0, 512);
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says::default());
        let mut offsets = Vec::new();
        for _ in 0..19 {
            let (request, data) = next.request();
            if request.command == command::READ {
                next.data(&request, &[0x77; 512]);
            } else {
                assert_eq!(data, [(request.offset / 512) as u8; 512]);
                next.done(&request);
            }
            offsets.push((request.command, request.offset / 512));
        }
        (offsets, next, server)
    });
    assert_eq!(rig.wait(later), (Ok(()), vec![0x77; 512]));
    ids.iter().filter(|id| **id != ids[3] && **id != ids[7]).for_each(|id| assert_eq!(rig.wait(*id).0, Ok(())));
    let again: Vec<(u16, u64)> = (0..20).filter(|at| ![3, 7].contains(at)).map(|at| (command::WRITE, at)).collect();
    assert_eq!(next.join().unwrap().0, [again, vec![(command::READ, 0)]].concat());
}

#[test]
fn a_connection_that_ends_while_nothing_is_asked_for_is_made_again_by_itself() {
    let (mut rig, peer, server) = connected(Says::default());
    drop(peer);
    let accepted = std::thread::spawn(move || (server.accept(Says::default()), server));
    let begun = Instant::now();
    while !accepted.is_finished() {
        assert!(begun.elapsed() < HANGS);
        rig.turn(Duration::from_millis(10));
    }
    let (mut peer, _server) = accepted.join().unwrap();
    let read = rig.read(0, 512);
    rig.turn(Duration::ZERO);
    rig.submit();
    let server = std::thread::spawn(move || {
        let (request, _) = peer.request();
        peer.data(&request, &[5; 512]);
        peer
    });
    assert_eq!(rig.wait(read), (Ok(()), vec![5; 512]));
    server.join().unwrap();
}

#[test]
fn without_a_reconnect_delay_requests_fail_at_once_until_there_is_a_connection_again() {
    let (mut rig, mut peer, server) = connected_for(Says::default(), 0);
    let first = rig.read(0, 512);
    rig.submit();
    peer.request();
    drop(peer);
    assert_eq!(rig.wait(first).0, Err(Errno::IO));
    let second = rig.read(0, 512);
    assert_eq!(rig.wait(second).0, Err(Errno::IO));
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says::default());
        let (request, _) = next.request();
        next.data(&request, &[5; 512]);
        (next, server)
    });
    let begun = Instant::now();
    loop {
        let read = rig.read(0, 512);
        match rig.wait(read) {
            (Ok(()), data) => break assert_eq!(data, [5; 512]),
            (Err(e), _) => assert_eq!(e, Errno::IO),
        }
        assert!(begun.elapsed() < HANGS);
        rig.turn(Duration::from_millis(10));
    }
    next.join().unwrap();
}

#[test]
fn a_request_that_cannot_even_be_sent_fails_without_anything_being_announced() {
    let (mut rig, peer, _server) = connected_for(Says::default(), 0);
    rig.turn(Duration::ZERO);
    drop(peer);
    let write = rig.write(0, &[1; 512]);
    rig.submit();
    assert!(rig.engines.has_completions());
    assert_eq!(rig.wait(write).0, Err(Errno::IO));
}

#[test]
fn requests_fail_when_the_reconnect_delay_is_over_and_not_before() {
    let (mut rig, mut peer, server) = connected_for(Says::default(), 300);
    let read = rig.read(0, 512);
    rig.submit();
    peer.request();
    drop(server);
    drop(peer);
    let begun = Instant::now();
    assert_eq!(rig.wait(read).0, Err(Errno::IO));
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let write = rig.write(0, &[1; 512]);
    assert_eq!(rig.wait(write).0, Err(Errno::IO));
}

#[test]
fn a_server_that_is_about_to_end_is_asked_again_when_it_is_there_again_however_often_it_says_so() {
    for times in [1, 3] {
        let (mut rig, mut peer, server) = connected(Says::default());
        let write = rig.write(512, &[9; 512]);
        rig.submit();
        let (request, _) = peer.request();
        (0..times).for_each(|_| peer.fail(&request, 108));
        let next = std::thread::spawn(move || {
            let mut next = server.accept(Says::default());
            let (request, data) = next.request();
            next.done(&request);
            (request.offset, data, next, server)
        });
        assert_eq!(rig.wait(write).0, Ok(()));
        let (offset, data, ..) = next.join().unwrap();
        assert_eq!((offset, data), (512, vec![9; 512]));
        assert!(peer.is_left());
    }
}

#[test]
fn what_a_server_that_is_about_to_end_was_asked_before_is_awaited_and_nothing_else_asked() {
    let (mut rig, mut peer, server) = connected(Says::default());
    let ids = [rig.write(0, &[1; 512]), rig.write(512, &[2; 512])];
    rig.submit();
    let [first, second] = [peer.request().0, peer.request().0];
    peer.fail(&second, 108);
    rig.turn(HANGS);
    let later = rig.write(0, &[3; 512]);
    rig.turn(Duration::ZERO);
    peer.done(&first);
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says::default());
        let writes = [(); 2].map(|()| {
            let (request, data) = next.request();
            next.done(&request);
            (request.offset, data[0])
        });
        (writes, next, server)
    });
    for id in [ids[0], ids[1], later] {
        assert_eq!(rig.wait(id).0, Ok(()));
    }
    assert_eq!(next.join().unwrap().0, [(512, 2), (0, 3)]);
    assert_eq!(peer.request().0.command, command::DISCONNECT);
    assert!(peer.is_left());
}

#[test]
fn a_server_that_is_about_to_end_and_leaves_something_unanswered_is_awaited_for_so_long() {
    let (mut rig, mut peer, server) = connected(Says::default());
    let ids = [rig.write(0, &[1; 512]), rig.write(512, &[2; 512])];
    rig.submit();
    let [_, second] = [peer.request().0, peer.request().0];
    peer.fail(&second, 108);
    rig.turn(HANGS);
    let due = rig.engines.deadline().unwrap();
    assert!(due > clock::now(), "nothing is looked at before");
    rig.engines.reap(due, &mut |ended| panic!("{ended:?}"));
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says::default());
        let offsets = [(); 2].map(|()| {
            let (request, _) = next.request();
            next.done(&request);
            request.offset
        });
        (offsets, next, server)
    });
    ids.iter().for_each(|id| assert_eq!(rig.wait(*id).0, Ok(())));
    assert_eq!(next.join().unwrap().0, [0, 512]);
}

#[test]
fn what_was_to_be_stable_and_is_not_is_written_again() {
    let says = Says::default().without(export_flag::SEND_FUA);
    let (mut rig, mut peer, server) = connected(says);
    let write = rig.push(Op::Write { fua: true }, 0, 512, vec![4; 512]);
    rig.turn(Duration::ZERO);
    let (request, _) = peer.request();
    peer.done(&request);
    let dies = std::thread::spawn(move || assert_eq!(peer.request().0.command, command::FLUSH));
    let next = std::thread::spawn(move || {
        let mut next = server.accept(says);
        let commands = [(); 2].map(|()| {
            let (request, _) = next.request();
            next.done(&request);
            request.command
        });
        (commands, next, server)
    });
    assert_eq!(rig.wait(write).0, Ok(()));
    dies.join().unwrap();
    assert_eq!(next.join().unwrap().0, [command::WRITE, command::FLUSH]);
}

#[test]
fn a_write_of_several_parts_is_written_from_its_beginning_over_another_connection() {
    let blocks = Some(BlockSizes { minimum: 512, preferred: 4096, maximum: 16384 });
    for (op, data) in [
        (Op::Write { fua: false }, vec![4; 32768]),
        (Op::Write { fua: true }, vec![4; 32768]),
        (Op::WriteZeroes { unmap: false, fua: false }, Vec::new()),
    ] {
        let says = Says { blocks, ..Says::default().without(export_flag::SEND_WRITE_ZEROES) };
        let (mut rig, mut peer, server) = connected(says);
        let write = rig.push(op, 0, 32768, data);
        rig.turn(Duration::ZERO);
        let (first, _) = peer.request();
        peer.done(&first);
        // What it has of the first part goes with it, as it was not asked to flush.
        let dies = std::thread::spawn(move || peer.request().0.offset);
        let next = std::thread::spawn(move || {
            let mut next = server.accept(says);
            let offsets = [(); 2].map(|()| {
                let (request, _) = next.request();
                next.done(&request);
                request.offset
            });
            (offsets, next, server)
        });
        assert_eq!(rig.wait(write).0, Ok(()));
        assert_eq!((dies.join().unwrap(), next.join().unwrap().0), (16384, [0, 16384]), "{op:?}");
    }
}

#[test]
fn an_export_that_has_become_something_else_is_not_taken_for_what_it_was() {
    let (mut rig, mut peer, server) = connected(Says::default());
    let read = rig.read(0, 512);
    rig.submit();
    peer.request();
    drop(peer);
    let blocks = Some(BlockSizes { minimum: 4096, preferred: 4096, maximum: 1 << 20 });
    let next = std::thread::spawn(move || {
        let read_only = Says { flags: Says::default().flags | export_flag::READ_ONLY, ..Says::default() };
        for other in [Says { size: 4096, ..Says::default() }, read_only, Says { blocks, ..Says::default() }] {
            let mut refused = server.accept(other);
            assert!(refused.is_left());
        }
        // One that has grown goes on.
        let mut next = server.accept(Says { size: 2 << 20, ..Says::default() });
        let (request, _) = next.request();
        next.data(&request, &[5; 512]);
        (next, server)
    });
    assert_eq!(rig.wait(read), (Ok(()), vec![5; 512]));
    next.join().unwrap();
}

#[test]
fn a_server_that_says_nothing_is_left_when_nobody_waits_for_it_any_more() {
    let (mut rig, mut peer, server) = connected(Says::default());
    let read = rig.read(0, 512);
    rig.submit();
    peer.request();
    drop(peer);
    // Somebody takes the connection, and does not greet.
    let silent = std::thread::spawn(move || (server.accept_silently(), server));
    let begun = Instant::now();
    while !silent.is_finished() {
        assert!(begun.elapsed() < HANGS);
        rig.turn(Duration::from_millis(10));
    }
    assert!(!rig.is_done(read));
    drop(rig);
    let (mut stream, _server) = silent.join().unwrap();
    stream.set_read_timeout(Some(HANGS)).unwrap();
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut stream, &mut rest).unwrap();
}

#[test]
fn a_reply_over_another_connection_to_what_was_not_asked_there_yet_is_a_lie() {
    let (mut rig, mut peer, server) = connected(Says::default());
    // One that is copied, and one that is received where it is to go.
    let ids = [rig.read(0, 512), rig.read(0, 64 << 10)];
    rig.submit();
    let requests = [peer.request().0, peer.request().0];
    drop(peer);
    // Until the end is seen, and everything waits for another.
    while rig.engines.deadline().is_none() {
        rig.turn(HANGS);
    }
    let mut lies = requests.map(|request| {
        let mut next = server.accept(Says::default());
        next.data(&request, &vec![6; request.length as usize]);
        rig.turn(HANGS);
        next
    });
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says::default());
        for _ in 0..2 {
            let (request, _) = next.request();
            next.data(&request, &vec![5; request.length as usize]);
        }
        (next, server)
    });
    assert_eq!(rig.wait(ids[0]), (Ok(()), vec![5; 512]));
    assert_eq!(rig.wait(ids[1]), (Ok(()), vec![5; 64 << 10]));
    next.join().unwrap();
    assert!(lies.iter_mut().all(Peer::is_left));
}

#[test]
fn the_end_of_a_connection_is_seen_behind_its_last_reply() {
    let (mut rig, mut peer, server) = connected(Says::default());
    let ids = [rig.read(0, 512), rig.read(512, 512)];
    rig.submit();
    let [request, _] = [peer.request().0, peer.request().0];
    // Both are there when the thread of the loop looks, and announced at once.
    peer.data(&request, &[5; 512]);
    drop(peer);
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says::default());
        let (request, _) = next.request();
        next.data(&request, &[6; 512]);
        (next, server)
    });
    assert_eq!(rig.wait(ids[0]), (Ok(()), vec![5; 512]));
    assert_eq!(rig.wait_only(ids[1]), (Ok(()), vec![6; 512]));
    next.join().unwrap();
}

#[test]
fn memory_that_was_taken_away_fails_its_own_write_and_neither_others_nor_the_connection() {
    const LEN: usize = 256 << 10;
    // Where none of it is there nothing is sent. Where some is, a message is begun, and ended.
    for (there, is_sent) in [(0, false), (LEN / 2, true)] {
        let (mut rig, mut peer, _server) = connected_for(Says::default(), 0);
        let file = memfd_create("torn", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, there as u64).unwrap();
        assert_eq!(pwrite(&file, &vec![0x55; there], 0), Ok(there));
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: it is mapped where there is nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), LEN, protection, MapFlags::SHARED, &file, 0) }.unwrap();
        let before = rig.write(0, &[1; 512]);
        // SAFETY: it is mapped until the test is over, and no more than an address here: the kernel says that it is torn.
        let torn = unsafe {
            let pieces = vec![IoVec::new(base.cast(), LEN)];
            rig.push_pieces(Op::Write { fua: false }, 4096, LEN as u64, pieces)
        };
        let after = rig.write(512, &[2; 512]);
        rig.submit();
        let serving = std::thread::spawn(move || {
            let mut requests: Vec<Vec<u8>> = Vec::new();
            while requests.last().is_none_or(|last| *last != [3; 512]) {
                let (request, data) = peer.request();
                peer.done(&request);
                requests.push(data);
            }
            (requests, peer)
        });
        assert_eq!(rig.wait(before).0, Ok(()), "{there}");
        assert_eq!(rig.wait(torn).0, Err(Errno::FAULT), "{there}");
        assert_eq!(rig.wait(after).0, Ok(()), "{there}");
        let later = rig.write(0, &[3; 512]);
        assert_eq!(rig.wait(later).0, Ok(()), "{there}");
        let (mut requests, _peer) = serving.join().unwrap();
        if is_sent {
            let data = requests.remove(1);
            assert!(data.len() == LEN, "{}", data.len());
            assert!(data.iter().all(|byte| [0, 0x55].contains(byte)));
            assert!(data[0] == 0x55 && data[there..].iter().all(|byte| *byte == 0));
        }
        assert_eq!(requests, [vec![1; 512], vec![2; 512], vec![3; 512]]);
        // SAFETY: nothing refers to it any more.
        unsafe { munmap(base, LEN) }.unwrap();
    }
}
