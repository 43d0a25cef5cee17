//! What a hall does about those who come, and one of them about what it hears.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use egret_nbd::protocol::{answer, option};
use egret_nbd::tls::ClientCredentials;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{Shutdown, shutdown};

use super::*;
use crate::nbd::handshake::tests::{kinds, said};

/// One who has come just now, and its end of the socket.
fn guest(has_tls: bool, since: Instant) -> (Guest, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    [&ours, &theirs].into_iter().for_each(|end| end.set_nonblocking(true).unwrap());
    let (channel, handshake) = (Channel::new(theirs.into()), Handshake::new(has_tls));
    (Guest { channel, handshake, begins_tls: false, has_input: false, since, deadline: None }, ours)
}

/// One to which nobody can come: the system has it that its socket does not listen.
fn hall() -> Hall {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    shutdown(&listener, Shutdown::Both).unwrap();
    Hall {
        listener: Listener::Tcp(listener),
        registry: Registry::open(),
        log: PeerLog::about("NBD server: "),
        most: usize::MAX,
        patience: Duration::ZERO,
        tls: None,
        rests_until: None,
        guests: Vec::new(),
    }
}

#[test]
fn where_the_system_lets_nobody_in_the_server_asks_again_when_it_has_rested() {
    let mut hall = hall();
    let now = Instant::now();
    assert_eq!(hall.look_ahead(now), (true, None));
    hall.let_in();
    let until = hall.rests_until.expect("that it cannot");
    assert!(until >= now + REST);
    for early in [now, until - Duration::from_nanos(1)] {
        assert_eq!(hall.look_ahead(early), (false, Some(until)));
    }
    assert_eq!(hall.look_ahead(until), (true, None));
    assert!(hall.rests_until.is_none());
}

#[test]
fn of_a_port_that_may_not_be_had_it_is_said_that_the_sandbox_may_be_why_and_of_no_other() {
    let of = |kind: io::ErrorKind| NbdServerError::of_port("::1", 10809, kind.into()).to_string();
    assert!(of(io::ErrorKind::PermissionDenied).contains("the sandbox leaves the port"));
    let other = of(io::ErrorKind::AddrInUse);
    assert!(other.contains("host '::1', port 10809") && !other.contains("sandbox"), "{other}");
}

#[test]
fn who_comes_over_tcp_is_not_waited_for_and_no_program_has_his_socket_that_is_started() {
    let listener = Listener::open(&NbdAddress::Tcp("127.0.0.1".into(), 0)).unwrap();
    let Listener::Tcp(socket) = &listener else { panic!("it is one of TCP") };
    let _client = TcpStream::connect(socket.local_addr().unwrap()).unwrap();
    poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
    let log = PeerLog::about("");
    let accepted = listener.accept(&log).unwrap().expect("he has come");
    assert!(fcntl_getfl(&accepted).unwrap().contains(OFlags::NONBLOCK));
    assert!(fcntl_getfd(&accepted).unwrap().contains(FdFlags::CLOEXEC));
    assert!(listener.accept(&log).unwrap().is_none(), "nobody else has");
}

#[test]
fn a_hall_that_is_full_has_room_when_its_first_guest_was_undisturbed_for_so_long() {
    let (mut hall, now) = (hall(), Instant::now());
    let (mut guests, _clients): (Vec<_>, Vec<_>) = (0..MOST_GUESTS).map(|_| guest(false, now)).unzip();
    let last = guests.pop().unwrap();
    hall.guests = guests;
    assert_eq!(hall.look_ahead(now), (true, None));
    hall.guests.push(last);
    let room_at = now + UNDISTURBED;
    for early in [now, room_at - Duration::from_nanos(1)] {
        assert_eq!(hall.look_ahead(early), (false, Some(room_at)));
    }
    assert_eq!(hall.look_ahead(room_at), (true, None));
    // Who is to leave before that, and who has said more than was heard, wake it.
    hall.guests[1].deadline = Some(now + Duration::from_millis(1));
    assert_eq!(hall.look_ahead(now), (false, hall.guests[1].deadline));
    hall.guests[2].has_input = true;
    assert!(hall.look_ahead(now).1.is_some_and(|at| at > now), "it has not read its greeting yet");
    hall.guests[2].handshake.output().clear();
    assert_eq!(hall.look_ahead(now), (false, Some(now)));
}

#[test]
fn who_has_taken_too_long_is_hung_up_on_however_much_he_says() {
    let now = Instant::now();
    for (deadline, stays) in [(None, true), (Some(now), false)] {
        let (mut hall, (mut guest, _client)) = (hall(), guest(false, now));
        guest.handshake.output().clear();
        (guest.has_input, guest.deadline) = (true, deadline);
        hall.guests.push(guest);
        hall.serve_guests(&[true]);
        assert_eq!(!hall.guests.is_empty(), stays);
    }
}

#[test]
fn who_wants_no_more_is_answered_and_hung_up_on() {
    let (mut hall, (mut guest, mut client)) = (hall(), guest(false, Instant::now()));
    guest.handshake.output().clear();
    client.write_all(&[&3u32.to_be_bytes()[..], &said(option::ABORT, &[])].concat()).unwrap();
    hall.guests.push(guest);
    hall.serve_guests(&[true]);
    let mut told = Vec::new();
    // Who closes it need not have done that yet.
    client.set_nonblocking(false).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.read_to_end(&mut told).unwrap();
    assert_eq!(kinds(&told), [answer::ACK]);
}

#[test]
fn what_is_wrong_with_a_connection_is_said_as_the_system_or_tls_says_it() {
    assert_eq!(describe(ChannelError::System(Errno::NOBUFS)), std::io::Error::from(Errno::NOBUFS).to_string());
    assert_eq!(describe(ChannelError::Tls("it is too old".to_owned())), "TLS: it is too old");
}

/// What there is to be read: all of it, or an error that is none of waiting.
fn hear(client: &mut Channel) -> Vec<u8> {
    let mut heard = Vec::new();
    loop {
        let mut bytes = [0; 4096];
        match client.receive(&mut [IoSliceMut::new(&mut bytes)]) {
            Ok(got) => heard.extend(&bytes[..got.bytes]),
            Err(ChannelError::System(Errno::AGAIN)) => return heard,
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn a_guest_encrypts_when_all_is_sent_that_is_not_to_be_and_is_heard_to_the_end_of_what_it_says_then() {
    if Command::new("openssl").arg("version").output().is_err() {
        return egret_needs::this_test_lacks("openssl");
    }
    let scratch = tempfile::tempdir().unwrap();
    let (dir, script) = (scratch.path().join("tls"), Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts"));
    let made = Command::new(script.join("make-certificates")).arg(&dir).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let server = ServerCredentials::read(&dir, false).unwrap();
    let client = ClientCredentials::read(&dir, true).unwrap();

    let (mut guest, ours) = guest(true, Instant::now());
    let offers = Mutex::default();
    // What its socket takes at a time is less than all the answers.
    set_socket_send_buffer_size(&guest.channel, 0).unwrap();
    let mut ours = Channel::new(ours.into());
    let step = |guest: &mut Guest| {
        let fed = guest.step(Some(&server), &offers);
        assert!(matches!(fed, Ok(Fed::Waits | Fed::StartsTls)), "{:?}", fed.err());
    };
    step(&mut guest);
    assert_eq!(hear(&mut ours), b"NBDMAGICIHAVEOPT\0\x03");
    let early = [&3u32.to_be_bytes()[..], &said(option::LIST, &[]).repeat(100), &said(option::STARTTLS, &[])].concat();
    assert_eq!(ours.send(&[IoSlice::new(&early)]).unwrap(), early.len());
    let mut heard = Vec::new();
    while !guest.channel.is_encrypted() {
        step(&mut guest);
        assert!(!guest.channel.is_encrypted() || !guest.handshake.has_output());
        heard.extend(hear(&mut ours));
    }
    assert!(!guest.begins_tls);
    assert_eq!(kinds(&heard), [&[answer::TLS_REQUIRED; 100][..], &[answer::ACK]].concat());

    ours.encrypt(client.session(Some("localhost")).unwrap());
    while let Err(e) = ours.shake_hands() {
        assert!(matches!(e, ChannelError::System(Errno::AGAIN)), "{e}");
        step(&mut guest);
    }
    // More than it reads at a time, in one record: the socket tells of it once.
    let said = said(option::LIST, &[]).repeat(INPUT / 16 * 3);
    assert_eq!(ours.send(&[IoSlice::new(&said)]).unwrap(), said.len());
    let mut heard = Vec::new();
    step(&mut guest);
    while guest.is_behind() || guest.has_output() {
        step(&mut guest);
        heard.extend(hear(&mut ours));
    }
    assert_eq!(kinds(&heard), vec![answer::ACK; INPUT / 16 * 3]);
}
