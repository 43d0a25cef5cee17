//! How much a server can have an I/O thread do in one turn: counted in what it took, never in time.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_disk::{Discard, Disk, Driver, Op, Options, RemoteDisk};
use egret_nbd::handshake::Export;
use egret_nbd::protocol::{BlockSizes, Headers, Reply, Request, chunk, export_flag};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};

use crate::connected::Connected;
use crate::rig::Rig;
use crate::server::HANGS;

const SIZE: u64 = 1 << 20;

/// A disk, and the server's end of its connection, which takes much that nobody reads.
fn connected(kind: SocketType, headers: Headers) -> (Rig, UnixStream) {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    sockopt::set_socket_send_buffer_size(&theirs, 1 << 20).unwrap();
    let flags = export_flag::HAS_FLAGS | export_flag::SEND_WRITE_ZEROES;
    let export = Export { size: SIZE, flags, blocks: BlockSizes::default(), headers };
    let remote = RemoteDisk::new(Connected::new(export, ours));
    let options = Options { discard: Discard::Unmap, ..Options::new("d0", Driver::Remote(remote)) };
    let rig = Rig::new(&Arc::new(Disk::open(&options).unwrap())).unwrap();
    let theirs = UnixStream::from(theirs);
    theirs.set_read_timeout(Some(HANGS)).unwrap();
    (rig, theirs)
}

/// So many requests, which came in one system call.
fn requests(server: &mut UnixStream, headers: Headers, count: usize) -> Vec<Request> {
    let mut bytes = vec![0; count * headers.request_len()];
    server.read_exact(&mut bytes).unwrap();
    bytes.chunks(headers.request_len()).map(|bytes| Request::read(headers, bytes).unwrap().unwrap()).collect()
}

/// Sends `messages` one by one until the socket takes no more; returns how many it took, and of the next how many bytes.
fn fill(server: &mut UnixStream, messages: &[Vec<u8>]) -> (usize, usize) {
    server.set_nonblocking(true).unwrap();
    let mut taken = 0;
    let mut part = 0;
    while taken < messages.len() {
        match server.write(&messages[taken][part..]) {
            Ok(count) if part + count < messages[taken].len() => part += count,
            Ok(_) => (taken, part) = (taken + 1, 0),
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => panic!("{e}"),
        }
    }
    server.set_nonblocking(false).unwrap();
    (taken, part)
}

/// Has `messages` be there when the thread of the loop looks: how many it takes in one turn, and how many there were. Those
/// that had no room come later, and `ids` have all ended when this returns.
fn taken_in_a_turn(rig: &mut Rig, mut server: UnixStream, messages: Vec<Vec<u8>>, ids: &[u64]) -> (usize, usize) {
    let (there, part) = fill(&mut server, &messages);
    rig.turn(Duration::ZERO);
    let taken = ids.iter().filter(|id| rig.is_done(**id)).count();
    let rest = std::thread::spawn(move || {
        let rest = messages.iter().skip(there).enumerate();
        rest.for_each(|(at, message)| server.write_all(&message[if at == 0 { part } else { 0 }..]).unwrap());
        server
    });
    let begun = Instant::now();
    while !ids.iter().all(|id| rig.is_done(*id)) {
        assert!(begun.elapsed() < HANGS);
        rig.turn(HANGS);
    }
    rest.join().unwrap();
    (taken, there)
}

fn chunk_of(request: &Request, flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
    let mut header = [0; 32];
    let reply = Reply::Chunk { flags, kind, cookie: request.cookie, offset: None, length: data.len() as u64 };
    let len = reply.write(&mut header);
    [&header[..len], data].concat()
}

#[test]
fn a_server_that_answers_by_bytes_has_its_chunks_taken_a_few_thousand_a_turn_and_all_in_the_end() {
    const READS: usize = 40;
    const LEN: usize = 512;
    type Chunk = fn(u64) -> (u16, Vec<u8>);
    let byte: Chunk = |at| (chunk::OFFSET_DATA, [&at.to_be_bytes()[..], &[0x66]].concat());
    let hole: Chunk = |at| (chunk::OFFSET_HOLE, [&at.to_be_bytes()[..], &1_u32.to_be_bytes()].concat());
    let error: Chunk = |_| (chunk::ERROR, vec![0, 0, 0, 5, 0, 0]);
    // Where a place is looked for among many pieces each time, fewer are taken.
    let cases = [
        ("bytes", byte, LEN, 8, Ok(0x66)),
        ("bytes, into pieces", byte, 1, 1, Ok(0x66)),
        ("holes", hole, LEN, 8, Ok(0)),
        ("holes, into pieces", hole, 1, 1, Ok(0)),
        ("errors, of which none is the last", error, LEN, 8, Err(Errno::IO)),
    ];
    for (what, make, piece, most, expected) in cases {
        let (mut rig, mut server) = connected(SocketType::STREAM, Headers::Structured);
        let ids: Vec<u64> = (0..READS as u64)
            .map(|at| rig.push_in(piece, Op::Read, at * LEN as u64, LEN as u64, vec![0xee; LEN]))
            .collect();
        rig.submit();
        let replies = requests(&mut server, Headers::Structured, READS).into_iter().map(|request| {
            let chunks = (0..LEN as u64).map(|at| {
                let (kind, data) = make(request.offset + at);
                chunk_of(&request, 0, kind, &data)
            });
            chunks.chain([chunk_of(&request, chunk::FLAG_DONE, chunk::NONE, &[])]).flatten().collect()
        });
        let replies = replies.collect();
        let (taken, there) = taken_in_a_turn(&mut rig, server, replies, &ids);
        assert!(taken <= most && there >= 20, "{what}: {taken} replies of {LEN} chunks in a turn, of {there}");
        for id in ids {
            let (ended, data) = rig.wait_only(id);
            assert_eq!(ended, expected.map(drop), "{what}");
            assert!(expected.is_err() || data.iter().all(|byte| Ok(*byte) == expected), "{what}");
        }
    }
}

#[test]
fn a_server_that_sends_a_few_bytes_at_a_time_is_asked_a_few_hundred_times_a_turn() {
    const COUNT: usize = 400;
    // Of such a socket each system call brings one message, however little is in it.
    let (mut rig, mut server) = connected(SocketType::SEQPACKET, Headers::Simple);
    let zeroes = Op::WriteZeroes { unmap: true, fua: false };
    let ids: Vec<u64> = (0..COUNT as u64).map(|at| rig.push(zeroes, at * 512, 512, Vec::new())).collect();
    rig.submit();
    let replies = requests(&mut server, Headers::Simple, COUNT).into_iter().map(|request| {
        let mut header = [0; 32];
        let len = Reply::Simple { error: 0, cookie: request.cookie }.write(&mut header);
        header[..len].to_vec()
    });
    let replies = replies.collect();
    let (taken, there) = taken_in_a_turn(&mut rig, server, replies, &ids);
    assert!(taken <= 260 && there >= 300, "{taken} calls in a turn, of {there}");
    ids.into_iter().for_each(|id| assert_eq!(rig.wait_only(id).0, Ok(())));
}

#[test]
fn a_server_that_takes_as_much_as_there_is_gets_a_megabyte_a_turn_and_less_of_data_in_many_pieces() {
    // Of bytes a system call takes a thousand.
    for (piece, len, most) in [(256 << 10, 1 << 20, 1 << 20), (1, 128 << 10, 256 << 10)] {
        if let Err(e) = sent_in_turns(piece, len, most) {
            return egret_needs::this_test_lacks(format_args!("a socket that takes much: {e}"));
        }
    }
}

/// Writes `len` bytes in pieces four times, and sees that a turn sends no more than `most` bytes of them.
fn sent_in_turns(piece: usize, len: usize, most: usize) -> rustix::io::Result<()> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    sockopt::set_socket_send_buffer_size_force(&ours, 16 << 20)?;
    let flags = export_flag::HAS_FLAGS | export_flag::SEND_WRITE_ZEROES;
    let export = Export { size: 8 << 20, flags, blocks: BlockSizes::default(), headers: Headers::Simple };
    let options = Options::new("d0", Driver::Remote(RemoteDisk::new(Connected::new(export, ours))));
    let mut rig = Rig::new(&Arc::new(Disk::open(&options).unwrap())).unwrap();
    for at in 0..4 {
        rig.push_in(piece, Op::Write { fua: false }, (at * len) as u64, len as u64, vec![0x66; len]);
    }
    let mut all = 0;
    while all < 4 * len {
        rig.submit();
        let taken = rustix::io::ioctl_fionread(&theirs).unwrap() as usize;
        assert!((1..=most + 4 * Headers::Simple.request_len()).contains(&taken), "{taken} bytes in a turn");
        let mut read = vec![0; taken];
        all += rustix::io::read(&theirs, &mut read).unwrap();
    }
    Ok(())
}
