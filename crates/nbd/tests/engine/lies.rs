//! Servers that break the protocol: each costs its own connection, and nothing is believed.

use egret_nbd::protocol::{Headers, chunk};

use crate::requests::connected;
use crate::server::{Peer, Says};

/// What a server does that was asked for `request`, a read of a mebibyte's second half.
type Lie = fn(&mut Peer, &egret_nbd::protocol::Request);

/// The one after which there is nothing more to be done.
const DONE: &str = "a whole reply, and then another";

const HALF: u64 = 512 << 10;

fn chunk_of(len: u64) -> Vec<u8> {
    [&HALF.to_be_bytes()[..], &vec![0x66; len as usize]].concat()
}

const LIES: &[(&str, Lie)] = &[
    ("no reply at all", |peer, _| peer.send(&[0x13; 64])),
    ("a cookie that was never given", |peer, request| {
        let other = egret_nbd::protocol::Request { cookie: request.cookie ^ 1 << 40, ..*request };
        peer.data(&other, &[0x66; HALF as usize]);
    }),
    ("a place that has no request", |peer, request| {
        peer.data(&egret_nbd::protocol::Request { cookie: request.cookie + 1000, ..*request }, &[0; 512]);
    }),
    ("more than was asked for", |peer, request| peer.part(request, 1, HALF, &[0x66; (HALF + 512) as usize])),
    ("data from before", |peer, request| peer.part(request, 1, HALF - 512, &[0x66; 1024])),
    ("data from behind", |peer, request| peer.part(request, 1, 2 * HALF - 512, &[0x66; 1024])),
    ("data from nowhere", |peer, request| peer.part(request, 1, u64::MAX - 100, &[0x66; 1024])),
    ("less than was asked for", |peer, request| peer.part(request, 1, HALF, &[0x66; 512])),
    ("nothing, as if it were all", |peer, request| peer.done(request)),
    ("the same twice", |peer, request| {
        peer.part(request, 0, HALF, &[0x66; HALF as usize]);
        peer.part(request, 1, HALF, &[0x66; 512]);
    }),
    ("the same hole for ever", |peer, request| {
        peer.hole(request, 0, HALF, HALF as u32);
        peer.hole(request, 0, HALF, HALF as u32);
    }),
    ("a hole that is too long", |peer, request| peer.hole(request, 1, HALF, u32::MAX)),
    ("a hole of nothing", |peer, request| peer.hole(request, 0, HALF, 0)),
    ("half a hole", |peer, request| peer.chunk(request, 0, chunk::OFFSET_HOLE, &[0; 11])),
    ("data of nothing", |peer, request| peer.chunk(request, 0, chunk::OFFSET_DATA, &HALF.to_be_bytes())),
    ("an empty chunk that is not the last", |peer, request| peer.chunk(request, 0, chunk::NONE, &[])),
    ("a chunk of another command", |peer, request| peer.chunk(request, 1, chunk::BLOCK_STATUS, &[0; 12])),
    ("a chunk that nobody knows", |peer, request| peer.chunk(request, 1, 77, &chunk_of(512))),
    ("an error that is none", |peer, request| peer.chunk(request, 1, chunk::ERROR, &[0; 6])),
    ("an error without a number", |peer, request| peer.chunk(request, 1, chunk::ERROR, &[0; 3])),
    ("an error that is a book", |peer, request| peer.chunk(request, 1, chunk::ERROR, &[1; 9000])),
    (DONE, |peer, request| {
        peer.data(request, &[0x66; HALF as usize]);
        peer.data(request, &[0x66; HALF as usize]);
    }),
];

#[test]
fn a_server_that_lies_loses_its_connection_and_the_request_is_done_by_the_next() {
    std::thread::scope(|scope| {
        for headers in [Headers::Structured, Headers::Extended] {
            scope.spawn(move || lie_with(headers));
        }
    });
}

fn lie_with(headers: Headers) {
    for (what, lie) in LIES {
        let (mut rig, mut peer, server) = connected(Says::default().with(headers));
        let read = rig.read(HALF, HALF as usize);
        let other = rig.read(0, 512);
        rig.submit();
        let [request, _] = [peer.request().0, peer.request().0];
        let thread = std::thread::spawn({
            let lie = *lie;
            move || {
                lie(&mut peer, &request);
                let mut next = server.accept(Says::default().with(headers));
                drop(peer);
                // What was done is not asked for again.
                let mut requests = vec![next.request().0];
                if requests[0].offset != 0 {
                    requests.push(next.request().0);
                }
                for request in &requests {
                    next.data(request, &vec![0x77; request.length as usize]);
                }
                (requests.len(), next, server)
            }
        });
        let (ended, data) = rig.wait(read);
        assert_eq!(ended, Ok(()), "{what}");
        assert_eq!(rig.wait(other), (Ok(()), vec![0x77; 512]), "{what}");
        let (again, ..) = thread.join().unwrap();
        let (expected, requests) = if *what == DONE { (0x66, 1) } else { (0x77, 2) };
        assert_eq!(again, requests, "{what}");
        assert!(data.iter().all(|byte| *byte == expected), "{what}");
    }
}

#[test]
fn a_simple_reply_with_data_is_a_lie_where_chunks_were_agreed_on() {
    let (mut rig, mut peer, server) = connected(Says::default());
    let read = rig.read(0, 512);
    rig.submit();
    let (request, _) = peer.request();
    peer.simple(&request, 0, &[0x66; 512]);
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says::default().with(Headers::Simple));
        let (request, _) = next.request();
        next.simple(&request, 0, &[0x77; 512]);
        (next, server)
    });
    assert_eq!(rig.wait(read), (Ok(()), vec![0x77; 512]));
    next.join().unwrap();
    assert!(peer.is_left());
}

#[test]
fn an_answer_to_what_was_not_wholly_sent_is_a_lie() {
    let (mut rig, mut peer, server) = connected(Says { size: 64 << 20, ..Says::default() });
    let write = rig.write(0, &vec![1; 16 << 20]);
    rig.submit();
    // Its header alone is read.
    let header = peer.take(28);
    let request = egret_nbd::protocol::Request::read(peer.headers(), &header).unwrap().unwrap();
    peer.done(&request);
    let next = std::thread::spawn(move || {
        let mut next = server.accept(Says { size: 64 << 20, ..Says::default() });
        let mut bytes = 0;
        while bytes < 16 << 20 {
            let (request, data) = next.request();
            bytes += data.len();
            next.done(&request);
        }
        (next, server)
    });
    assert_eq!(rig.wait(write).0, Ok(()));
    next.join().unwrap();
}
