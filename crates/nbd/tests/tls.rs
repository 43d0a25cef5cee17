//! TLS between two ends of a socket: data as it was, who is believed, and ends that are none.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use egret_nbd::tls::{ClientCredentials, CredentialsError, ServerCredentials};
use egret_nbd::{Channel, ChannelError, Received};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tempfile::TempDir;

/// Certificates of several kinds.
struct Authorities(TempDir);

impl Authorities {
    /// `None` where there is nothing to make them with.
    fn new() -> Option<Self> {
        let new = Self(tempfile::tempdir().unwrap());
        if Command::new("openssl").arg("version").output().is_err() {
            egret_needs::this_test_lacks("openssl");
            return None;
        }
        Some(new)
    }

    /// Makes a CA, and what it has certified.
    fn make(&self, name: &str, more: &[&str]) -> PathBuf {
        let path = self.0.path().join(name);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/make-certificates");
        let made = Command::new(script).arg(&path).args(more).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        path
    }

    /// Adds a list of the CA's of those of its certificates that are revoked.
    fn revoke(&self, dir: &Path, revoked: &[&str]) {
        std::fs::write(dir.join("index"), "").unwrap();
        // With what RFC 5280 wants of such a list.
        std::fs::write(dir.join("number"), "01\n").unwrap();
        let config = "[ca]\ndefault_ca = a\n[a]\ndatabase = index\ncrlnumber = number\ndefault_md = sha256\n\
                      default_crl_days = 1\ncrl_extensions = e\n[e]\nauthorityKeyIdentifier = keyid\n";
        std::fs::write(dir.join("ca.conf"), config).unwrap();
        let ca = |words: &[&str]| {
            let mut command = Command::new("openssl");
            command.args("ca -config ca.conf -cert ca-cert.pem -keyfile ca-key.pem".split(' ')).args(words);
            let done = command.current_dir(dir).output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        revoked.iter().for_each(|who| ca(&["-revoke", &format!("{who}-cert.pem")]));
        ca(&["-gencrl", "-out", "ca-crl.pem"]);
    }

    /// A directory with some of another's files.
    fn part(&self, name: &str, of: &Path, files: &[&str]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::create_dir(&path).unwrap();
        for file in files {
            std::fs::copy(of.join(file), path.join(file)).unwrap();
        }
        path
    }
}

/// Two ends, of which the first is the client's.
fn ends(server: &ServerCredentials, client: &ClientCredentials, name: Option<&str>) -> [Channel; 2] {
    ends_of(SocketType::STREAM, server, client, name)
}

/// Two ends of such a socket.
fn ends_of(
    kind: SocketType,
    server: &ServerCredentials,
    client: &ClientCredentials,
    name: Option<&str>,
) -> [Channel; 2] {
    let (one, other) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    let [mut one, mut other] = [one, other].map(Channel::new);
    one.encrypt(client.session(name).unwrap());
    other.encrypt(server.session().unwrap());
    [one, other]
}

/// What a channel says when it need not be waited for.
fn now<T>(result: Result<T, ChannelError>) -> Result<Option<T>, ChannelError> {
    match result {
        Err(ChannelError::System(Errno::AGAIN | Errno::INTR)) => Ok(None),
        other => other.map(Some),
    }
}

/// Has both agree, and one byte go each way: what each makes of it.
fn meet([one, other]: &mut [Channel; 2]) -> [Result<(), String>; 2] {
    let mut outcomes = [Ok(()), Ok(())];
    let mut done = [(false, false); 2];
    for _ in 0..1000 {
        for (at, end) in [&mut *one, &mut *other].into_iter().enumerate() {
            if outcomes[at].is_err() {
                continue;
            }
            let mut step = || -> Result<(), ChannelError> {
                now(end.flush())?;
                let mut byte = [0];
                if !done[at].0 {
                    done[at].0 = now(end.receive(&mut [IoSliceMut::new(&mut byte)]))?.is_some_and(|got| got.bytes == 1);
                }
                if !done[at].1 {
                    done[at].1 = now(end.send(&[IoSlice::new(&[7])]))?.is_some();
                }
                Ok(())
            };
            outcomes[at] = step().map_err(|e| e.to_string());
        }
        if done == [(true, true); 2] || outcomes.iter().all(Result::is_err) {
            return outcomes;
        }
    }
    outcomes
}

#[test]
fn who_is_believed_is_who_has_a_certificate_of_the_cas_for_that_name() {
    let Some(authorities) = Authorities::new() else { return };
    let [good, other] = ["good", "other"].map(|name| authorities.make(name, &[]));
    let expired = authorities.make("expired", &["-1"]);
    let nobody = authorities.part("nobody", &good, &["ca-cert.pem"]);
    let identity = ["server-cert.pem", "server-key.pem"];
    let lax = authorities.part("lax", &good, &identity);
    let server = |dir: &Path, verify| ServerCredentials::read(dir, verify).unwrap();
    let client = |dir: &Path, verify| ClientCredentials::read(dir, verify).unwrap();
    let meets = |server: &ServerCredentials, client: &ClientCredentials, name| meet(&mut ends(server, client, name));
    for name in [Some("localhost"), Some("127.0.0.1"), Some("::1"), None] {
        assert_eq!(meets(&server(&good, true), &client(&good, true), name), [Ok(()), Ok(())], "{name:?}");
    }
    // Who asks nothing needs no CA.
    assert_eq!(meets(&server(&lax, false), &client(&nobody, true), Some("localhost")), [Ok(()), Ok(())]);
    assert_eq!(meets(&server(&other, false), &client(&lax, false), Some("elsewhere")), [Ok(()), Ok(())]);
    for (of_server, of_client, name, [theirs, ours]) in [
        (server(&good, true), client(&good, true), Some("elsewhere"), ["not valid for name", "alert"]),
        (server(&other, false), client(&good, true), Some("localhost"), ["UnknownIssuer", "alert"]),
        (server(&other, false), client(&good, true), None, ["UnknownIssuer", "alert"]),
        (server(&expired, false), client(&expired, true), None, ["Expired", "alert"]),
        (server(&good, true), client(&nobody, true), None, ["CertificateRequired", "peer sent no certificates"]),
        (
            server(&good, true),
            client(&authorities.part("alien", &other, &["client-cert.pem", "client-key.pem"]), false),
            None,
            ["alert", "UnknownIssuer"],
        ),
    ] {
        let [client, server] = meets(&of_server, &of_client, name).map(|outcome| outcome.unwrap_err());
        assert!(client.contains(theirs), "{client}");
        assert!(server.contains(ours), "{server}");
    }
}

#[test]
fn whose_certificate_is_revoked_is_not_believed() {
    let Some(authorities) = Authorities::new() else { return };
    for (name, revoked, unbelieving) in
        [("nobody", [].as_slice(), None), ("server", &["server"], Some(0)), ("client", &["client"], Some(1))]
    {
        let dir = authorities.make(name, &[]);
        authorities.revoke(&dir, revoked);
        let server = ServerCredentials::read(&dir, true).unwrap();
        let client = ClientCredentials::read(&dir, true).unwrap();
        let outcomes = meet(&mut ends(&server, &client, Some("localhost")));
        match unbelieving {
            None => assert_eq!(outcomes, [Ok(()), Ok(())]),
            Some(end) => assert!(outcomes[end].as_ref().is_err_and(|e| e.contains("Revoked")), "{name}: {outcomes:?}"),
        }
    }
}

#[test]
fn what_is_missing_from_a_directory_is_said_with_its_name() {
    let Some(authorities) = Authorities::new() else { return };
    let good = authorities.make("good", &[]);
    let part = |name: &str, files: &[&str]| authorities.part(name, &good, files);
    let said = |error: CredentialsError| error.to_string();
    let server = |dir: &Path| said(ServerCredentials::read(dir, true).unwrap_err());
    let client = |dir: &Path| said(ClientCredentials::read(dir, true).unwrap_err());
    let empty = part("empty", &[]);
    let none = "ca-cert.pem': No such file or directory (os error 2)";
    assert!(server(&empty).ends_with(none) && client(&empty).ends_with(none));
    let half = client(&part("half", &["ca-cert.pem", "client-key.pem"]));
    assert!(
        half.ends_with("client-key.pem' is there, and 'client-cert.pem' is not: a client has both or none"),
        "{half}"
    );
    let strange = part("strange", &["ca-cert.pem", "server-cert.pem"]);
    std::fs::copy(good.join("client-key.pem"), strange.join("server-key.pem")).unwrap();
    assert!(server(&strange).contains("is of no use: "), "{}", server(&strange));
    std::fs::write(
        strange.join("server-key.pem"),
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
    )
    .unwrap();
    assert!(server(&strange).contains("holds no private key in PEM; one that is encrypted"), "{}", server(&strange));
    std::fs::write(strange.join("ca-crl.pem"), "nothing").unwrap();
    assert!(
        server(&strange).ends_with("ca-crl.pem' holds no list of revoked certificates in PEM"),
        "{}",
        server(&strange)
    );
    std::fs::write(strange.join("ca-cert.pem"), "nothing").unwrap();
    assert!(client(&strange).ends_with("ca-cert.pem' holds no certificate in PEM"), "{}", client(&strange));
    let name = ClientCredentials::read(&good, true).unwrap().session(Some("no name")).unwrap_err().to_string();
    assert!(name.contains("tls-hostname is no name of a host"), "{name}");
}

/// Waits until one of two ends has something to do.
fn rest(ends: &[Channel; 2]) {
    let wants = |end: &Channel| if end.is_flushed() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
    let mut fds = [PollFd::new(&ends[0], wants(&ends[0])), PollFd::new(&ends[1], wants(&ends[1]))];
    let _ = poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
}

#[test]
fn data_is_what_was_sent_however_it_is_cut() {
    let Some(authorities) = Authorities::new() else { return };
    let dir = authorities.make("good", &[]);
    let server = ServerCredentials::read(&dir, true).unwrap();
    let client = ClientCredentials::read(&dir, true).unwrap();
    let data: Vec<u8> = (0..300_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (piece, room) in [(1 << 20, 1 << 20), (16 << 10, 4096), (100_000, 70_001), (333, 1 << 20), (65_537, 511)] {
        let mut ends = ends(&server, &client, None);
        let (mut sent, mut got) = ([0; 2], [Vec::<u8>::new(), Vec::new()]);
        while got.iter().any(|got| got.len() < data.len()) {
            for at in 0..2 {
                let rest = &data[sent[at]..];
                let (first, second) = rest[..rest.len().min(piece)].split_at(rest.len().min(piece) / 3);
                let slices = [IoSlice::new(first), IoSlice::new(&[]), IoSlice::new(second)];
                sent[at] += now(ends[at].send(&slices)).unwrap().unwrap_or_default();
                let mut more = true;
                while more {
                    let (mut front, mut back) = (vec![0; 7], vec![0; room]);
                    let mut slices = [IoSliceMut::new(&mut front), IoSliceMut::new(&mut back)];
                    let received = now(ends[at].receive(&mut slices)).unwrap();
                    let Received { bytes, more: goes_on } = received.unwrap_or(Received { bytes: 0, more: false });
                    got[at].extend([front, back].concat().iter().take(bytes));
                    more = goes_on;
                }
            }
            rest(&ends);
        }
        assert!(got.iter().all(|got| *got == data), "{piece} {room}");
    }
}

#[test]
fn an_end_that_was_not_said_in_tls_is_no_end() {
    let Some(authorities) = Authorities::new() else { return };
    let dir = authorities.make("good", &[]);
    let server = ServerCredentials::read(&dir, true).unwrap();
    let client = ClientCredentials::read(&dir, true).unwrap();
    let pair = || {
        let mut ends = ends(&server, &client, None);
        assert_eq!(meet(&mut ends), [Ok(()), Ok(())]);
        ends
    };
    let mut byte = [0; 10];
    let [one, mut other] = pair();
    drop(one);
    // A process that another test starts has the socket, too, until it is another program.
    let cut = loop {
        match now(other.receive(&mut [IoSliceMut::new(&mut byte)])) {
            Ok(None) => std::thread::yield_now(),
            received => break received.unwrap_err(),
        }
    };
    assert_eq!(cut.to_string(), "the connection was cut off inside of TLS");
    let [mut one, mut other] = pair();
    one.send(&[IoSlice::new(b"last")]).unwrap();
    one.say_goodbye();
    drop(one);
    let mut receive = |into: &mut [u8]| other.receive(&mut [IoSliceMut::new(into)]).unwrap();
    assert_eq!(receive(&mut byte), Received { bytes: 4, more: false });
    assert_eq!(&byte[..4], b"last");
    assert_eq!(receive(&mut byte), Received { bytes: 0, more: false });
}

#[test]
fn who_does_not_read_is_kept_no_more_than_a_little_for() {
    let Some(authorities) = Authorities::new() else { return };
    let dir = authorities.make("good", &[]);
    let server = ServerCredentials::read(&dir, true).unwrap();
    let client = ClientCredentials::read(&dir, true).unwrap();
    let mut ends = ends(&server, &client, None);
    assert_eq!(meet(&mut ends), [Ok(()), Ok(())]);
    let data = vec![3; 4 << 20];
    let mut sent = 0;
    while let Some(count) = now(ends[0].send(&[IoSlice::new(&data)])).unwrap() {
        sent += count;
    }
    assert!(!ends[0].is_flushed());
    let taken = |ends: &mut [Channel; 2]| {
        let mut room = vec![0; 8 << 20];
        let mut taken = 0;
        while let Some(got) = now(ends[1].receive(&mut [IoSliceMut::new(&mut room)])).unwrap() {
            taken += got.bytes;
        }
        taken
    };
    // What the system has of it is there; the rest is what it keeps.
    let kept = sent - taken(&mut ends);
    assert!(kept <= 9 * (16 << 10), "{kept}");
    ends[0].flush().unwrap();
    assert_eq!(taken(&mut ends), kept);
}

#[test]
fn who_sends_a_byte_at_a_time_has_the_socket_asked_a_few_times_a_call() {
    let Some(authorities) = Authorities::new() else { return };
    let dir = authorities.make("good", &[]);
    let server = ServerCredentials::read(&dir, true).unwrap();
    let client = ClientCredentials::read(&dir, true).unwrap();
    // Of such a socket each system call brings one message, which is a record.
    let mut ends = ends_of(SocketType::SEQPACKET, &server, &client, None);
    assert_eq!(meet(&mut ends), [Ok(()), Ok(())]);
    for _ in 0..100 {
        assert_eq!(ends[0].send(&[IoSlice::new(&[7])]).unwrap(), 1);
    }
    let (mut got, mut room) = (0, [0; 1000]);
    while got < 100 {
        let Received { bytes, more } = ends[1].receive(&mut [IoSliceMut::new(&mut room)]).unwrap();
        assert!((1..=4).contains(&bytes) && more, "{bytes} of {got}");
        got += bytes;
    }
}

/// A client that does as it likes.
fn strange_client(dir: &Path, version: &'static rustls::SupportedProtocolVersion) -> rustls::ClientConnection {
    use rustls::pki_types::pem::PemObject as _;
    let mut roots = rustls::RootCertStore::empty();
    let ca = rustls::pki_types::CertificateDer::pem_file_iter(dir.join("ca-cert.pem")).unwrap();
    roots.add_parsable_certificates(ca.flatten());
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    rustls::ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap()
}

#[test]
fn who_sends_records_without_end_that_hold_nothing_is_hung_up_on() {
    let Some(authorities) = Authorities::new() else { return };
    let dir = authorities.make("good", &[]);
    let (mut peer, end) = UnixStream::pair().unwrap();
    let mut end = Channel::new(end.into());
    end.encrypt(ServerCredentials::read(&dir, false).unwrap().session().unwrap());
    let mut tls = strange_client(&dir, &rustls::version::TLS13);
    let (read, was_read) = std::sync::mpsc::channel();
    let flooding = std::thread::spawn(move || {
        rustls::Stream::new(&mut tls, &mut peer).write_all(b"x").unwrap();
        // What comes in one piece with the flood is dropped with it.
        was_read.recv().unwrap();
        for _ in 0..1000 {
            tls.refresh_traffic_keys().unwrap();
            // Nobody may be there any more.
            let _ = tls.write_tls(&mut peer);
        }
        peer
    });
    let mut byte = [0];
    let said = loop {
        match now(end.receive(&mut [IoSliceMut::new(&mut byte)])) {
            Ok(Some(got)) if got.bytes == 1 => read.send(()).unwrap(),
            Ok(_) => {
                let mut fd = [PollFd::new(&end, PollFlags::IN)];
                let _ = poll(&mut fd, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
            }
            Err(error) => break error.to_string(),
        }
    };
    drop((end, read)); // a peer that is still waiting ends
    let flooded = flooding.join();
    assert!(said.contains("TooManyKeyUpdateRequests"), "{said}");
    assert!(flooded.is_ok() && byte == *b"x");
}

#[test]
fn what_is_no_tls_ends_the_connection_and_1_2_will_do() {
    let Some(authorities) = Authorities::new() else { return };
    let dir = authorities.make("good", &[]);
    let server = ServerCredentials::read(&dir, false).unwrap();
    let end = || {
        let (peer, end) = UnixStream::pair().unwrap();
        let mut end = Channel::new(end.into());
        end.encrypt(server.session().unwrap());
        (peer, end)
    };
    let mut byte = [0];
    let (mut peer, mut channel) = end();
    peer.write_all(b"IHAVEOPT\0\0\0\x03\0\0\0\0").unwrap();
    let refused = channel.receive(&mut [IoSliceMut::new(&mut byte)]).unwrap_err();
    assert!(matches!(refused, ChannelError::Tls(_)), "{refused}");
    drop(channel);
    let mut alert = Vec::new();
    peer.read_to_end(&mut alert).unwrap();
    assert_eq!(alert[0], 21, "it is told so, by an alert");
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let (mut peer, mut channel) = end();
        let mut tls = strange_client(&dir, version);
        let asking = std::thread::spawn(move || {
            let mut stream = rustls::Stream::new(&mut tls, &mut peer);
            let mut answer = [0; 2];
            for byte in &mut answer {
                stream.write_all(b"x").unwrap();
                stream.read_exact(std::slice::from_mut(byte)).unwrap();
                if version.version == rustls::ProtocolVersion::TLSv1_3 {
                    stream.conn.refresh_traffic_keys().unwrap();
                }
            }
            answer
        });
        while !asking.is_finished() {
            let got = now(channel.receive(&mut [IoSliceMut::new(&mut byte)])).unwrap_or(None);
            if got.is_some_and(|got| got.bytes == 1) {
                assert_eq!(channel.send(&[IoSlice::new(b"y")]).unwrap(), 1);
            }
            let _ = now(channel.flush());
            let mut fd = [PollFd::new(&channel, PollFlags::IN)];
            let _ = poll(&mut fd, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
        }
        assert_eq!(asking.join().unwrap(), *b"yy");
    }
}
