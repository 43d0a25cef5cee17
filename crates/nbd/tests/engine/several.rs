//! A disk of several I/O threads, and of none.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use egret_disk::{Disk, Op};
use egret_nbd::Target;
use egret_nbd::protocol::{BlockSizes, Request, command, export_flag};
use rustix::io::Errno;

use crate::refuse::refuse;
use crate::rig::{Rig, open};
use crate::server::{Peer, Says, Server};

fn opened(server: &Server, says: Says, target: Target) -> (Result<Arc<Disk>, String>, Peer) {
    std::thread::scope(|scope| {
        let disk = scope.spawn(|| open(target));
        let peer = server.accept(says);
        (disk.join().unwrap(), peer)
    })
}

#[test]
fn each_io_thread_has_a_connection_where_a_flush_on_one_is_for_all() {
    let server = Server::new();
    let (disk, mut peer) = opened(&server, Says::default(), server.target(60_000));
    let disk = disk.unwrap();
    let mut first = Rig::new(&disk).unwrap();
    let mut second = Rig::new(&disk).unwrap();
    let mut other = server.accept(Says::default());
    let ids = [first.write(0, &[1; 512]), second.write(512, &[2; 512])];
    let servers = [
        std::thread::spawn(move || {
            let (request, _) = peer.request();
            peer.done(&request);
            (request.offset, peer)
        }),
        std::thread::spawn(move || {
            let (request, _) = other.request();
            other.done(&request);
            (request.offset, other)
        }),
    ];
    assert_eq!((first.wait(ids[0]).0, second.wait(ids[1]).0), (Ok(()), Ok(())));
    let [a, b] = servers.map(|server| server.join().unwrap());
    assert_eq!((a.0, b.0), (0, 512));
}

#[test]
fn a_server_that_does_not_promise_it_has_one_io_thread_at_a_time() {
    let server = Server::new();
    let says = Says::default().without(export_flag::CAN_MULTI_CONN);
    let (disk, mut peer) = opened(&server, says, server.target(60_000));
    let disk = disk.unwrap();
    let mut first = Rig::new(&disk).unwrap();
    // The same thread may let go of it and take it in again, all in a turn.
    first.attach_again(&disk).unwrap();
    let Err(refused) = Rig::new(&disk) else { panic!("a second connection") };
    assert!(refused.contains("NBD_FLAG_CAN_MULTI_CONN") && refused.ends_with("name one iothread"), "{refused}");
    drop(first);
    // The connection goes over to the next.
    let mut next = Rig::new(&disk).unwrap();
    let write = next.write(0, &[1; 512]);
    let serving = std::thread::spawn(move || {
        let (request, _) = peer.request();
        peer.done(&request);
        peer
    });
    assert_eq!(next.wait(write).0, Ok(()));
    let mut peer = serving.join().unwrap();
    // So it does to who flushes the disk when nobody serves it.
    drop(next);
    let flushing = std::thread::spawn({
        let disk = Arc::clone(&disk);
        move || disk.flush().map_err(|e| e.to_string())
    });
    let (request, _) = peer.request();
    assert_eq!(request.command, command::FLUSH);
    peer.done(&request);
    assert_eq!(flushing.join().unwrap(), Ok(()));
    // There is nothing more to flush.
    disk.flush().unwrap();
    drop(disk);
    assert!(peer.is_left());
}

#[test]
fn a_server_that_takes_its_promise_back_is_left_for_as_long_as_several_io_threads_have_the_disk() {
    let server = Server::new();
    let (disk, peer) = opened(&server, Says::default(), server.target(60_000));
    let disk = disk.unwrap();
    let (mut first, mut second) = (Rig::new(&disk).unwrap(), Rig::new(&disk).unwrap());
    drop((peer, server.accept(Says::default())));
    let serving = std::thread::spawn(move || {
        let mut refused = server.accept(Says::default().without(export_flag::CAN_MULTI_CONN));
        assert!(refused.is_left());
        let offsets = [(); 2].map(|()| {
            let mut peer = server.accept(Says::default());
            let (request, _) = peer.request();
            peer.done(&request);
            (request.offset, peer)
        });
        offsets.map(|(offset, _)| offset)
    });
    // The second does not look for a connection before it has a turn.
    for (rig, at) in [(&mut first, 0), (&mut second, 512)] {
        let write = rig.write(at, &[1; 512]);
        assert_eq!(rig.wait(write).0, Ok(()));
    }
    assert_eq!(serving.join().unwrap(), [0, 512]);
}

#[test]
fn nothing_that_is_only_read_needs_the_promise() {
    let server = Server::new();
    let says = Says::default().without(export_flag::CAN_MULTI_CONN);
    let (disk, _peer) = opened(&server, says, Target { read_only: true, ..server.target(0) });
    let disk = disk.unwrap();
    let _first = Rig::new(&disk).unwrap();
    let _second = Rig::new(&disk).unwrap();
    server.accept(says);
}

/// A disk that has done this over this connection, and that nobody serves any more.
fn changed(server: &Server, says: Says, op: Op) -> (Arc<Disk>, Peer) {
    changed_by(server, says, op, &[])
}

/// The same, where the server is asked for these as well.
fn changed_by(server: &Server, says: Says, op: Op, more: &[u16]) -> (Arc<Disk>, Peer) {
    let (disk, mut peer) = opened(server, says, server.target(0));
    let disk = disk.unwrap();
    let mut rig = Rig::new(&disk).unwrap();
    let data = if matches!(op, Op::Write { .. }) { vec![1; 512] } else { Vec::new() };
    let change = rig.push(op, 0, 512, data);
    let peer = std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let (request, _) = peer.request();
            peer.done(&request);
            for expected in more {
                let (request, _) = peer.request();
                assert_eq!(request.command, *expected);
                peer.done(&request);
            }
            peer
        });
        assert_eq!(rig.wait(change).0, Ok(()));
        serving.join().unwrap()
    });
    (disk, peer)
}

type Errand = fn(&Disk) -> io::Result<()>;

const FLUSH: Errand = Disk::flush;
const ASK: Errand = |disk| disk.refresh_size().map(drop);

fn one_connection() -> Says {
    Says::default().without(export_flag::CAN_MULTI_CONN)
}

/// The next request is to be a flush.
fn flush_of(peer: &mut Peer) -> Request {
    let (request, _) = peer.request();
    assert_eq!(request.command, command::FLUSH);
    request
}

#[test]
fn whatever_has_changed_is_flushed_again_after_a_flush_that_failed_and_not_after_one_that_has_succeeded() {
    let write = Op::Write { fua: false };
    for (op, says, first) in [
        (write, Says::default(), FLUSH),
        (Op::WriteZeroes { unmap: false, fua: false }, Says::default(), FLUSH),
        (Op::Discard, Says::default(), FLUSH),
        // Who asks for the size makes stable what the next connection need not.
        (write, one_connection(), ASK),
    ] {
        let server = Server::new();
        let (disk, mut peer) = changed(&server, says, op);
        let mut next = std::thread::scope(|scope| {
            let failing = scope.spawn(|| first(&disk).map_err(|e| e.raw_os_error()));
            flush_of(&mut peer);
            // It is gone, and who comes next is no server.
            drop(peer);
            drop(server.accept_silently());
            assert_eq!(failing.join().unwrap(), Err(Some(libc::EIO)), "{op:?}");
            let flushing = scope.spawn(|| disk.flush().map_err(|e| e.raw_os_error()));
            let mut next = server.accept(says);
            let request = flush_of(&mut next);
            next.done(&request);
            assert_eq!(flushing.join().unwrap(), Ok(()), "{op:?}");
            next
        });
        disk.flush().unwrap();
        assert!(!disk.has_lost_writes());
        drop(disk);
        assert!(next.is_left(), "{op:?}: it was asked for nothing more");
    }
}

#[test]
fn what_was_to_be_stable_and_is_need_not_be_flushed_again() {
    let by_flush = Says::default().without(export_flag::SEND_FUA);
    for (says, more) in [(Says::default(), &[][..]), (by_flush, &[command::FLUSH])] {
        for op in [Op::Write { fua: true }, Op::WriteZeroes { unmap: false, fua: true }] {
            let server = Server::new();
            let (disk, mut peer) = changed_by(&server, says, op, more);
            disk.flush().unwrap();
            drop(disk);
            assert!(peer.is_left(), "{op:?}: it was asked for nothing more");
        }
    }
}

#[test]
fn what_a_server_has_refused_to_flush_for_no_guest_is_lost_until_somebody_who_was_told_opens_the_disk_again() {
    for (says, first) in [(Says::default(), FLUSH), (one_connection(), FLUSH), (one_connection(), ASK)] {
        let server = Server::new();
        let (disk, mut peer) = changed(&server, says, Op::Write { fua: false });
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| first(&disk).map_err(|e| e.raw_os_error()));
            let request = flush_of(&mut peer);
            peer.fail(&request, 5);
            assert_eq!(failing.join().unwrap(), Err(Some(libc::EIO)));
        });
        let reopened = || {
            let (next, peer) = opened(&server, says, server.target(0));
            let next = next.unwrap();
            next.follow(&disk);
            (next, peer)
        };
        let (early, _early) = reopened();
        // No server is asked.
        assert!(disk.flush().is_err() && early.flush().is_err());
        let mut rig = Rig::new(&disk).unwrap();
        let _peer = server.accept(says);
        let flush = rig.push(Op::Flush, 0, 0, Vec::new());
        assert_eq!(rig.wait(flush).0, Err(Errno::IO));
        let (late, _late) = reopened();
        late.flush().unwrap();
    }
}

/// Waits until a thread of this process, which says which it is, waits for something; false if it has ended.
fn is_asleep<T>(tid: i32, thread: &ScopedJoinHandle<'_, T>) -> bool {
    while !thread.is_finished() {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap_or_default();
        if stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S')) {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn who_flushes_a_disk_while_another_does_hears_what_comes_of_that_and_so_does_who_has_opened_it_anew() {
    let same: fn(&Server, &Arc<Disk>) -> Arc<Disk> = |_, disk| Arc::clone(disk);
    let anew: fn(&Server, &Arc<Disk>) -> Arc<Disk> = |server, disk| {
        let (next, _peer) = opened(server, Says::default(), server.target(0));
        let next = next.unwrap();
        next.follow(disk);
        next
    };
    for second in [same, anew] {
        let server = Server::new();
        let (disk, mut peer) = changed(&server, Says::default(), Op::Write { fua: false });
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| disk.flush().map_err(|e| e.raw_os_error()));
            let request = flush_of(&mut peer);
            let second = second(&server, &disk);
            let (tell, told) = channel();
            let waiting = scope.spawn(move || {
                tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                second.flush().map_err(|e| e.raw_os_error())
            });
            assert!(is_asleep(told.recv().unwrap(), &waiting), "{:?}", waiting.join());
            peer.fail(&request, 5);
            assert_eq!([failing, waiting].map(|flush| flush.join().unwrap()), [Err(Some(libc::EIO)); 2]);
        });
        assert!(!server.has_visitor(), "there is nothing to ask again");
    }
}

#[test]
fn a_disk_is_as_its_server_says() {
    let server = Server::new();
    let read_only = Says { flags: export_flag::HAS_FLAGS | export_flag::READ_ONLY, size: 1_000_000, ..Says::default() };
    let (refused, _) = opened(&server, read_only, server.target(0));
    assert!(refused.unwrap_err().ends_with("the server has it for reading only; use read-only=on"));
    let (disk, _peer) = opened(&server, read_only, Target { read_only: true, ..server.target(0) });
    let disk = disk.unwrap();
    assert_eq!((disk.size(), disk.supports_discard()), (999_936, false), "whole sectors");
    let (disk, _peer) = opened(&server, Says::default(), server.target(0));
    let disk = disk.unwrap();
    assert_eq!((disk.logical_block_size(), disk.physical_block_size(), disk.supports_discard()), (512, 4096, true));
    // Whoever asks for its size is told what it is by then.
    std::thread::scope(|scope| {
        let size = scope.spawn(|| disk.refresh_size().unwrap());
        server.accept(Says { size: 2 << 20, ..Says::default() });
        assert_eq!(size.join().unwrap(), 2 << 20);
    });
    assert_eq!(disk.size(), 2 << 20);
}

#[test]
fn opening_is_tried_for_as_long_as_it_was_told_and_else_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd");
    let server = Server::new();
    let target = Target { address: egret_nbd::Address::Unix(path.clone()), ..server.target(0) };
    let refused = open(target).unwrap_err();
    let expected =
        "blockdev 'd0': cannot open 'nbd+unix:///disk': cannot connect: No such file or directory (os error 2)";
    assert_eq!(refused, expected);
    let patient = Target { open_timeout: crate::server::HANGS, ..server.target(0) };
    std::thread::scope(|scope| {
        let disk = scope.spawn(|| open(patient));
        // Who hangs up is no server.
        drop(server.accept_silently());
        server.accept(Says::default());
        assert!(disk.join().unwrap().is_ok());
    });
}

#[test]
fn what_a_disk_has_grown_by_is_asked_for_over_connections_that_know_of_it() {
    let server = Server::new();
    let (disk, mut peer) = opened(&server, Says::default(), server.target(0));
    let disk = disk.unwrap();
    let (mut first, mut second) = (Rig::new(&disk).unwrap(), Rig::new(&disk).unwrap());
    let mut other = server.accept(Says::default());
    let write = second.write(512, &[2; 512]);
    let serving = std::thread::spawn(move || {
        let (request, _) = other.request();
        other.done(&request);
        other
    });
    assert_eq!(second.wait(write).0, Ok(()));
    let other = serving.join().unwrap();
    // It is in flight, and is answered where it was asked for.
    let before = first.write(0, &[1; 512]);
    first.submit();
    let (request, _) = peer.request();
    let grown = std::thread::scope(|scope| {
        let size = scope.spawn(|| disk.refresh_size().unwrap());
        let grown = [(); 2].map(|()| server.accept(Says { size: 2 << 20, ..Says::default() }));
        assert_eq!(size.join().unwrap(), 2 << 20);
        grown
    });
    let after = [first.write(3 << 19, &[3; 512]), second.write(3 << 19, &[4; 512])];
    first.turn(Duration::ZERO);
    assert!(!first.is_done(before));
    peer.done(&request);
    let serving = grown.map(|mut peer| {
        std::thread::spawn(move || {
            let (request, data) = peer.request();
            peer.done(&request);
            (request.offset, data[0], peer)
        })
    });
    assert_eq!([before, after[0]].map(|id| first.wait(id).0), [Ok(()); 2]);
    assert_eq!(second.wait(after[1]).0, Ok(()));
    let served = serving.map(|serving| serving.join().unwrap());
    assert_eq!(served.each_ref().map(|(offset, data, _)| (*offset, *data)), [(3 << 19, 3), (3 << 19, 4)]);
    for mut old in [peer, other] {
        assert_eq!(old.request().0.command, command::DISCONNECT);
        assert!(old.is_left());
    }
}

#[test]
fn a_better_connection_that_cannot_be_watched_has_what_waits_for_it_wait_on() {
    let server = Server::new();
    let (disk, mut peer) = opened(&server, Says::default(), server.target(60_000));
    let disk = disk.unwrap();
    let mut rig = Rig::new(&disk).unwrap();
    let before = rig.write(0, &[1; 512]);
    rig.submit();
    let (request, _) = peer.request();
    let _grown = std::thread::scope(|scope| {
        let size = scope.spawn(|| disk.refresh_size().unwrap());
        let grown = server.accept(Says { size: 2 << 20, ..Says::default() });
        assert_eq!(size.join().unwrap(), 2 << 20);
        grown
    });
    let after = rig.write(3 << 19, &[2; 512]);
    // It is there.
    rig.turn(Duration::ZERO);
    // As `fs.epoll.max_user_watches` has it.
    refuse(libc::SYS_epoll_ctl, libc::ENOSPC);
    peer.done(&request);
    assert_eq!(rig.wait(before).0, Ok(()));
    rig.turn(Duration::ZERO);
    assert!(peer.is_left());
    assert!(!rig.is_done(after), "it waits for the reconnect-delay");
}

/// How a connection may go while something is flushed over it.
const ENDS: [fn(&mut Peer, &Request); 3] =
    [|_, _| (), |peer, request| peer.fail(request, 108), |peer, _| peer.send(&[0; 32])];

#[test]
fn what_is_flushed_while_nobody_serves_it_is_flushed_over_another_connection_where_this_one_is_gone_or_given_up() {
    for says in [Says::default(), one_connection()] {
        for end in ENDS {
            let server = Server::new();
            let (disk, mut peer) = changed(&server, says, Op::Write { fua: false });
            std::thread::scope(|scope| {
                let flushing = scope.spawn(|| disk.flush().map_err(|e| e.to_string()));
                let request = flush_of(&mut peer);
                end(&mut peer, &request);
                drop(peer);
                let mut next = server.accept(says);
                let request = flush_of(&mut next);
                next.done(&request);
                assert_eq!(flushing.join().unwrap(), Ok(()));
            });
        }
    }
}

/// Asks something of a disk whose server is another by now.
fn meanwhile<T: Send>(server: &Server, says: Says, ask: impl FnOnce() -> T + Send) -> (T, Peer) {
    std::thread::scope(|scope| {
        let asked = scope.spawn(ask);
        let peer = server.accept(says);
        (asked.join().unwrap(), peer)
    })
}

/// Flushes a disk whose server is another by now.
fn flush_again(disk: &Disk, server: &Server, says: Says) -> (Result<(), Option<i32>>, Peer) {
    meanwhile(server, says, || disk.flush().map_err(|e| e.raw_os_error()))
}

#[test]
fn a_flush_that_no_guest_asked_for_is_sent_to_no_server_that_knows_none_by_now_or_has_fewer_bytes() {
    let no_flush = Says::default().without(export_flag::SEND_FLUSH);
    let smaller = Says { size: Says::default().size / 2, ..Says::default() };
    for (says, expected) in [(no_flush, Ok(())), (smaller, Err(Some(libc::EIO)))] {
        let server = Server::new();
        let (disk, peer) = changed(&server, Says::default(), Op::Write { fua: false });
        drop(peer);
        let (flushed, mut next) = flush_again(&disk, &server, says);
        assert_eq!(flushed, expected);
        assert!(!disk.has_lost_writes());
        drop(disk);
        assert_eq!(next.request().0.command, command::DISCONNECT);
    }
}

#[test]
fn a_flush_that_no_guest_asked_for_fails_and_loses_nothing_where_another_connection_goes_as_well() {
    for end in ENDS {
        let server = Server::new();
        let (disk, mut peer) = changed(&server, one_connection(), Op::Write { fua: false });
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| disk.flush().map_err(|e| e.raw_os_error()));
            flush_of(&mut peer);
            drop(peer);
            let mut next = server.accept(one_connection());
            let request = flush_of(&mut next);
            end(&mut next, &request);
            drop(next);
            assert_eq!(failing.join().unwrap(), Err(Some(libc::EIO)));
        });
        assert!(!disk.has_lost_writes() && !server.has_visitor());
    }
}

#[test]
fn an_io_thread_is_connected_again_while_who_flushes_the_disk_waits_for_it_to_leave() {
    let server = Server::new();
    let says = Says::default().without(export_flag::CAN_MULTI_CONN);
    let serve = |mut peer: Peer, expected| {
        let (request, _) = peer.request();
        assert_eq!(request.command, expected);
        peer.done(&request);
        peer
    };
    let (disk, peer) = opened(&server, says, server.target(60_000));
    let disk = disk.unwrap();
    let mut rig = Rig::new(&disk).unwrap();
    let (before, after) = (rig.write(0, &[1; 512]), rig.write(512, &[2; 512]));
    rig.submit();
    let peer = serve(peer, command::WRITE);
    assert_eq!(rig.wait(before).0, Ok(()));
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| disk.flush().map_err(|e| e.to_string()));
        drop(peer);
        let serving = scope.spawn(|| serve(server.accept(says), command::WRITE));
        assert_eq!(rig.wait(after).0, Ok(()));
        let peer = serving.join().unwrap();
        drop(rig);
        let _peer = serve(peer, command::FLUSH);
        assert_eq!(flushing.join().unwrap(), Ok(()));
    });
}

#[test]
fn an_io_thread_that_comes_after_the_server_was_restarted_waits_for_a_connection_to_it() {
    let server = Server::new();
    let (disk, peer) = opened(&server, Says::default(), server.target(0));
    let disk = disk.unwrap();
    drop(peer);
    let mut rig = Rig::new(&disk).unwrap();
    let write = rig.write(0, &[1; 512]);
    rig.submit();
    let serving = std::thread::spawn(move || {
        let mut next = server.accept(Says::default());
        let (request, _) = next.request();
        next.done(&request);
        (next, server)
    });
    assert_eq!(rig.wait(write).0, Ok(()));
    serving.join().unwrap();
}

/// Asks for the size of a disk whose server is another by now.
fn ask_again(disk: &Disk, server: &Server, says: Says) -> (Result<u64, String>, Peer) {
    meanwhile(server, says, || disk.refresh_size().map_err(|e| e.to_string()))
}

#[test]
fn what_has_become_something_else_while_nobody_served_it_is_not_taken_for_what_it_was() {
    let blocks = Some(BlockSizes { minimum: 4096, preferred: 4096, maximum: 1 << 20 });
    let read_only = Says { flags: Says::default().flags | export_flag::READ_ONLY, ..Says::default() };
    let server = Server::new();
    for (other, why) in [(read_only, "for reading only now"), (Says { blocks, ..Says::default() }, "blocks of 4096")] {
        let (disk, mut first) = opened(&server, Says::default(), server.target(0));
        let disk = disk.unwrap();
        let (size, mut refused) = ask_again(&disk, &server, other);
        assert!(size.as_ref().is_err_and(|e| e.contains(why)), "{size:?}");
        assert!(first.is_left() && refused.is_left());
        // Nor is it flushed.
        let mut rig = Rig::new(&disk).unwrap();
        let mut next = server.accept(Says::default());
        let write = rig.write(0, &[1; 512]);
        let serving = std::thread::spawn(move || {
            let (request, _) = next.request();
            next.done(&request);
            next
        });
        assert_eq!(rig.wait(write).0, Ok(()), "{why}");
        drop(rig);
        drop(serving.join().unwrap());
        let (flushed, mut other) = flush_again(&disk, &server, other);
        assert_eq!((flushed, other.request().0.command), (Err(Some(libc::EIO)), command::DISCONNECT), "{why}");
        assert!(!disk.has_lost_writes(), "{why}");
    }
}

#[test]
fn blocks_that_were_smaller_for_a_while_are_what_they_were_before() {
    let says = |minimum| {
        let blocks = Some(BlockSizes { minimum, preferred: 4096, maximum: 1 << 20 });
        Says { blocks, ..Says::default() }
    };
    let server = Server::new();
    let (disk, _first) = opened(&server, says(4096), server.target(0));
    let disk = disk.unwrap();
    for minimum in [512, 4096] {
        assert_eq!(ask_again(&disk, &server, says(minimum)).0, Ok(disk.size()), "{minimum}");
    }
}

#[test]
fn a_server_that_has_come_to_take_one_connection_is_asked_for_no_second() {
    let one = Says::default().without(export_flag::CAN_MULTI_CONN);
    let server = Server::new();
    let (disk, _first) = opened(&server, Says::default(), server.target(0));
    let disk = disk.unwrap();
    let (size, mut peer) = ask_again(&disk, &server, one);
    assert_eq!(size, Ok(disk.size()));
    let mut rig = Rig::new(&disk).unwrap();
    // Nobody would accept it.
    assert_eq!(disk.refresh_size().unwrap(), disk.size());
    let refused = Rig::new(&disk).err().expect("a second I/O thread is refused");
    assert!(refused.contains("NBD_FLAG_CAN_MULTI_CONN"), "{refused}");
    let write = rig.write(0, &[1; 512]);
    let serving = std::thread::spawn(move || {
        let (request, _) = peer.request();
        peer.done(&request);
        peer
    });
    assert_eq!(rig.wait(write).0, Ok(()));
    serving.join().unwrap();
}

#[test]
fn what_is_written_over_a_connection_is_flushed_over_it_where_the_server_has_grown_and_takes_one_now() {
    let server = Server::new();
    let (disk, mut peer) = opened(&server, Says::default(), server.target(0));
    let disk = disk.unwrap();
    let mut rig = Rig::new(&disk).unwrap();
    let write = rig.write(0, &[1; 512]);
    rig.submit();
    let (request, _) = peer.request();
    peer.done(&request);
    assert_eq!(rig.wait(write).0, Ok(()));
    let one = Says { size: 2 << 20, ..Says::default().without(export_flag::CAN_MULTI_CONN) };
    let (flushed, mut refused) = flush_again(&disk, &server, one);
    assert!(flushed.is_err());
    assert_eq!(refused.request().0.command, command::DISCONNECT, "a flush would be for nothing");
    let (size, mut refused) = ask_again(&disk, &server, one);
    assert!(size.is_err() && refused.is_left(), "{size:?}");
    let flush = rig.push(Op::Flush, 0, 0, Vec::new());
    let serving = std::thread::spawn(move || {
        let (request, _) = peer.request();
        peer.done(&request);
        peer
    });
    assert_eq!(rig.wait(flush).0, Ok(()));
    serving.join().unwrap();
}
