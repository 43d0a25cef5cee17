//! What is asked of a server for each request, and what is made of its answers.

use egret_disk::Op;
use egret_nbd::protocol::{BlockSizes, Headers, chunk, command, command_flag, export_flag};
use rustix::io::Errno;

use crate::rig::{Rig, open};
use crate::server::{Peer, Says, Server};

const HEADERS: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];

/// A disk at a server, and the server's end of its connection.
pub fn connected(says: Says) -> (Rig, Peer, Server) {
    let server = Server::new();
    let target = server.target(60_000);
    let (disk, peer) = std::thread::scope(|scope| {
        let disk = scope.spawn(|| open(target).unwrap());
        let peer = server.accept(says);
        (disk.join().unwrap(), peer)
    });
    (Rig::new(&disk).unwrap(), peer, server)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ (at as u8).wrapping_mul(3) ^ seed).collect()
}

#[test]
fn data_goes_to_the_server_and_comes_back_whatever_headers_are_agreed_on() {
    for headers in HEADERS {
        let (mut rig, mut peer, _server) = connected(Says::default().with(headers));
        for len in [512, 4096, 65536, 200 * 512, 1 << 20] {
            let data = pattern(len, 1);
            let write = rig.write(0, &data);
            let server = std::thread::spawn(move || {
                let (request, got) = peer.request();
                assert_eq!((request.command, request.offset, request.length), (command::WRITE, 0, len as u64));
                peer.done(&request);
                let (request, _) = peer.request();
                assert_eq!((request.command, request.offset, request.length), (command::READ, 0, len as u64));
                peer.data(&request, &got);
                (peer, got)
            });
            assert_eq!(rig.wait(write).0, Ok(()));
            let read = rig.read(0, len);
            assert_eq!(rig.wait(read), (Ok(()), data.clone()));
            let (back, got) = server.join().unwrap();
            assert_eq!(got, data);
            peer = back;
        }
    }
}

#[test]
fn replies_may_come_in_any_order_and_in_parts_between_one_another() {
    for headers in [Headers::Structured, Headers::Extended] {
        let (mut rig, mut peer, _server) = connected(Says::default().with(headers));
        let ids = [rig.read(0, 8192), rig.read(65536, 512), rig.read(100 << 10, 300 << 10)];
        rig.submit();
        let [a, b, c] = [peer.request().0, peer.request().0, peer.request().0];
        let (whole, small) = (pattern(300 << 10, 5), pattern(512, 9));
        peer.part(&a, 0, 4096, &whole[4096..6144]);
        let (server, large) = (
            std::thread::spawn({
                let (whole, small) = (whole.clone(), small.clone());
                move || {
                    peer.part(&c, 0, (100 << 10) + 1000, &whole[1000..]);
                    peer.hole(&a, 0, 6144, 2048);
                    peer.part(&c, chunk::FLAG_DONE, 100 << 10, &whole[..1000]);
                    peer.part(&b, 0, 65536, &small);
                    peer.part(&a, 0, 0, &whole[..4096]);
                    peer.chunk(&a, chunk::FLAG_DONE, chunk::NONE, &[]);
                    peer.chunk(&b, chunk::FLAG_DONE, chunk::NONE, &[]);
                    peer
                }
            }),
            rig.wait(ids[2]),
        );
        assert_eq!(large, (Ok(()), whole.clone()));
        assert_eq!(rig.wait(ids[0]), (Ok(()), [&whole[..6144], &[0; 2048]].concat()));
        assert_eq!(rig.wait(ids[1]), (Ok(()), small));
        server.join().unwrap();
    }
}

#[test]
fn an_error_is_its_requests_alone_and_is_told_as_what_it_is() {
    for headers in HEADERS {
        let (mut rig, mut peer, _server) = connected(Says::default().with(headers));
        let ids = [rig.write(0, &[1; 512]), rig.read(0, 512), rig.read(512, 512)];
        rig.submit();
        let requests = [peer.request().0, peer.request().0, peer.request().0];
        peer.fail(&requests[0], 28);
        peer.fail(&requests[1], 4711);
        peer.data(&requests[2], &[7; 512]);
        assert_eq!(rig.wait(ids[0]).0, Err(Errno::NOSPC));
        assert_eq!(rig.wait(ids[1]).0, Err(Errno::INVAL));
        assert_eq!(rig.wait(ids[2]), (Ok(()), vec![7; 512]));
    }
    // Data may come before the error, and after it.
    let (mut rig, mut peer, _server) = connected(Says::default());
    let id = rig.read(0, 2048);
    rig.submit();
    let (request, _) = peer.request();
    peer.part(&request, 0, 0, &[1; 512]);
    let at = [&5_u32.to_be_bytes()[..], &[0, 0], &1024_u64.to_be_bytes()].concat();
    peer.chunk(&request, 0, chunk::ERROR_OFFSET, &at);
    // An error that is not known is one.
    peer.chunk(&request, 0, chunk::IS_ERROR | 99, &[&12_u32.to_be_bytes()[..], &[0, 0]].concat());
    peer.part(&request, chunk::FLAG_DONE, 512, &[1; 512]);
    assert_eq!(rig.wait(id).0, Err(Errno::IO));
}

#[test]
fn each_operation_is_asked_for_as_the_server_knows_it() {
    let all = Says::default();
    let zeroes = |unmap, fua| Op::WriteZeroes { unmap, fua };
    let nothing = [].as_slice();
    let (fua, hole) = (command_flag::FUA, command_flag::NO_HOLE);
    // What the server is asked for, with flags.
    type Case<'a> = (Says, Op, &'a [(u16, u16)]);
    let cases: &[Case<'_>] = &[
        (all, Op::Flush, &[(command::FLUSH, 0)]),
        (all.without(export_flag::SEND_FLUSH), Op::Flush, nothing),
        (all, Op::Discard, &[(command::TRIM, 0)]),
        (all.without(export_flag::SEND_TRIM), Op::Discard, nothing),
        (all, Op::Write { fua: true }, &[(command::WRITE, fua)]),
        (all.without(export_flag::SEND_FUA), Op::Write { fua: true }, &[(command::WRITE, 0), (command::FLUSH, 0)]),
        (all.without(export_flag::SEND_FUA | export_flag::SEND_FLUSH), Op::Write { fua: true }, &[(command::WRITE, 0)]),
        (all, zeroes(true, false), &[(command::WRITE_ZEROES, 0)]),
        (all, zeroes(false, true), &[(command::WRITE_ZEROES, hole | fua)]),
        (all.without(export_flag::SEND_FUA), zeroes(true, true), &[(command::WRITE_ZEROES, 0), (command::FLUSH, 0)]),
        (all.without(export_flag::SEND_WRITE_ZEROES), zeroes(true, true), &[(command::WRITE, fua)]),
    ];
    for (says, op, expected) in cases {
        for headers in HEADERS {
            let (mut rig, mut peer, _server) = connected(says.with(headers));
            let (len, data) = match op {
                Op::Flush => (0, Vec::new()),
                Op::Write { .. } => (4096, pattern(4096, 3)),
                _ => (4096, Vec::new()),
            };
            let id = rig.push(*op, if len == 0 { 0 } else { 8192 }, len, data.clone());
            rig.submit();
            let count = expected.len();
            let server = std::thread::spawn(move || {
                let mut seen = Vec::new();
                for _ in 0..count {
                    let (request, data) = peer.request();
                    peer.done(&request);
                    seen.push((request, data));
                }
                (seen, peer)
            });
            assert_eq!(rig.wait(id).0, Ok(()));
            let (seen, _peer) = server.join().unwrap();
            let payload = if headers == Headers::Extended { command_flag::PAYLOAD_LEN } else { 0 };
            for ((request, sent), (command, flags)) in seen.iter().zip(*expected) {
                let is_write = *command == command::WRITE;
                let flags = flags | if is_write { payload } else { 0 };
                assert_eq!((request.command, request.flags), (*command, flags), "{op:?} {headers:?}");
                let place = if *command == command::FLUSH { (0, 0) } else { (8192, 4096) };
                assert_eq!((request.offset, request.length), place, "{op:?} {headers:?}");
                let expected = if *op == (Op::Write { fua: true }) { data.clone() } else { vec![0; 4096] };
                assert!(!is_write || *sent == expected, "{op:?} {headers:?}");
            }
        }
    }
}

#[test]
fn a_request_is_made_in_parts_that_the_server_takes() {
    let blocks = Some(BlockSizes { minimum: 4096, preferred: 4096, maximum: 12288 + 4096 });
    let (mut rig, mut peer, _server) = connected(Says { blocks, ..Says::default() });
    let data = pattern(40960, 2);
    let ids = [rig.write(4096, &data), rig.read(65536, 20480)];
    // Not of whole blocks.
    let refused = rig.read(512, 512);
    assert_eq!(rig.wait(refused).0, Err(Errno::INVAL));
    let server = std::thread::spawn(move || {
        let (mut written, mut parts) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let (request, data) = peer.request();
            parts.push((request.command, request.offset, request.length));
            match request.command {
                command::READ => peer.data(&request, &pattern(request.length as usize, request.offset as u8)),
                _ => peer.done(&request),
            }
            written.extend(data);
        }
        (written, parts, peer)
    });
    assert_eq!(rig.wait(ids[0]).0, Ok(()));
    let read = [pattern(16384, 0), pattern(4096, 0)].concat();
    assert_eq!(rig.wait(ids[1]), (Ok(()), read));
    let (written, mut parts, _peer) = server.join().unwrap();
    assert_eq!(written, data);
    parts.sort_unstable();
    let expected = [
        (command::READ, 65536, 16384),
        (command::READ, 81920, 4096),
        (command::WRITE, 4096, 16384),
        (command::WRITE, 20480, 16384),
        (command::WRITE, 36864, 8192),
    ];
    assert_eq!(parts, expected);
}

#[test]
fn zeroes_that_the_server_cannot_write_are_sent_in_parts() {
    let says = Says { size: 8 << 20, ..Says::default().without(export_flag::SEND_WRITE_ZEROES) };
    let (mut rig, mut peer, _server) = connected(says);
    let id = rig.push(Op::WriteZeroes { unmap: true, fua: false }, 0, (2 << 20) + 512, Vec::new());
    let server = std::thread::spawn(move || {
        let mut lengths = Vec::new();
        while lengths.iter().sum::<u64>() < (2 << 20) + 512 {
            let (request, data) = peer.request();
            assert!(data.iter().all(|byte| *byte == 0));
            lengths.push(request.length);
            peer.done(&request);
        }
        (lengths, peer)
    });
    assert_eq!(rig.wait(id).0, Ok(()));
    assert_eq!(server.join().unwrap().0, [1 << 20, 1 << 20, 512]);
}

#[test]
fn a_server_that_reads_slowly_gets_all_of_it_in_the_end() {
    let (mut rig, mut peer, _server) = connected(Says { size: 64 << 20, ..Says::default() });
    let data: Vec<Vec<u8>> = (0..40).map(|seed| pattern(256 << 10, seed)).collect();
    let ids: Vec<u64> = data.iter().enumerate().map(|(at, data)| rig.write((at as u64) << 18, data)).collect();
    rig.turn(std::time::Duration::ZERO);
    rig.turn(std::time::Duration::ZERO);
    let server = std::thread::spawn(move || {
        let all: Vec<_> = (0..40).map(|_| peer.request()).collect();
        all.iter().rev().for_each(|(request, _)| peer.done(request));
        (all, peer)
    });
    for id in ids {
        assert_eq!(rig.wait(id).0, Ok(()));
    }
    for (at, (request, sent)) in server.join().unwrap().0.iter().enumerate() {
        assert_eq!(request.offset, (at as u64) << 18, "in order");
        assert!(*sent == data[at], "request {at}");
    }
}

#[test]
fn replies_of_few_bytes_may_stand_for_many() {
    let (mut rig, mut peer, _server) = connected(Says { size: 64 << 20, ..Says::default() });
    let ids: Vec<u64> = (0..20).map(|at| rig.read(at << 20, 1 << 20)).collect();
    rig.submit();
    let requests: Vec<_> = ids.iter().map(|_| peer.request().0).collect();
    requests.iter().for_each(|request| peer.hole(request, chunk::FLAG_DONE, request.offset, 1 << 20));
    for id in ids {
        let (ended, data) = rig.wait(id);
        assert!(ended.is_ok() && data.iter().all(|byte| *byte == 0));
    }
}
