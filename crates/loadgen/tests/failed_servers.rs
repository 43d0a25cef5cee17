//! A server that fails or lies is an error within a client's patience, never a hang.

mod support;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use egret_loadgen::client::{Client, ClientError, ClientOptions, Shape};
use egret_loadgen::load::{Job, LoadError, Mismatch, Span, Spec, Waiting};
use support::{Device, PATIENCE, Puppet, PuppetOptions, job};

const IMPATIENT: ClientOptions = ClientOptions { patience: PATIENCE, event_idx: true, packed: false };
const BOTH: [Waiting; 2] = [Waiting::Polling, Waiting::Blocking];

fn complaint(puppet: &Puppet) -> String {
    let connected =
        Client::connect(&puppet.socket, ClientOptions::default()).and_then(|client| client.start(Shape::default()));
    connected.err().expect("nothing to connect to").to_string()
}

/// Loads a server until that fails.
fn load(puppet: &Puppet, spec: &Spec) -> LoadError {
    run(&mut job(puppet, spec)).expect_err("the server has failed")
}

fn run(job: &mut Job) -> Result<(), LoadError> {
    let forever = Span { ramp: Duration::ZERO, length: Duration::from_secs(3600) };
    let mut tally = job.tally();
    job.run(forever, &mut tally, &mut |_| ())
}

#[test]
fn a_socket_that_nobody_listens_at_is_named() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("nobody");
    let error = Client::connect(&path, IMPATIENT).err().unwrap().to_string();
    assert_eq!(error, format!("cannot connect to {}: No such file or directory (os error 2)", path.display()));
}

#[test]
fn a_listener_that_never_accepts_is_given_up_on() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("full");
    let _listener = UnixListener::bind(&path).unwrap();
    // Either its queue is full, or it says nothing: there is no telling how many wait already.
    let clients: Vec<_> = (0..3).map(|_| Client::connect(&path, IMPATIENT).err().unwrap()).collect();
    assert!(matches!(clients[0], ClientError::Silent("GET_FEATURES")), "{}", clients[0]);
}

#[test]
fn a_server_that_hangs_up_is_said_to_have() {
    let puppet = Puppet::saying(drop);
    let complaint = complaint(&puppet);
    assert!(complaint.starts_with("the server hung up "), "{complaint}");
}

#[test]
fn an_answer_that_makes_no_sense_is_refused() {
    let hears = |stream: &mut std::os::unix::net::UnixStream| stream.read_exact(&mut [0; 24]).unwrap();
    let puppet = Puppet::saying(move |mut stream| {
        hears(&mut stream);
        stream.write_all(&[1, 0, 0, 0, 5, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).unwrap();
    });
    assert_eq!(complaint(&puppet), "the server answered GET_FEATURES with request 1, flags 0x5, 4294967295 bytes");
    let puppet = Puppet::saying(move |mut stream| {
        hears(&mut stream);
        stream.write_all(&[1, 0, 0, 0, 5, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0]).unwrap();
    });
    assert_eq!(complaint(&puppet), "the server answered GET_FEATURES with 3 bytes instead of a number");
}

#[test]
fn what_a_server_lacks_is_named() {
    let puppet = Puppet::with(PuppetOptions { features: 1 << 30, ..PuppetOptions::default() }, drop);
    assert_eq!(complaint(&puppet), "the server does not offer VIRTIO_F_VERSION_1");
    let puppet = Puppet::with(PuppetOptions { protocol: 8, ..PuppetOptions::default() }, drop);
    assert_eq!(complaint(&puppet), "the server does not offer VHOST_USER_PROTOCOL_F_CONFIG");
}

#[test]
fn a_refusal_says_what_was_refused() {
    let puppet = Puppet::with(PuppetOptions { ack: 7, ..PuppetOptions::default() }, drop);
    assert_eq!(complaint(&puppet), "the server refused SET_FEATURES (7)");
}

#[test]
fn more_than_the_disk_has_is_refused_before_anything_starts() {
    let puppet = Puppet::with(PuppetOptions::default(), drop);
    let client = Client::connect(&puppet.socket, ClientOptions::default()).unwrap();
    let error = client.start(Shape { queues: 2, ..Shape::default() }).err().unwrap().to_string();
    assert_eq!(error, "2 queues asked for, and the disk has 1 at most");
}

#[test]
fn a_server_without_acknowledgements_and_memory_slots_serves_as_well() {
    let puppet = Puppet::with(PuppetOptions { protocol: 1 << 9, ..PuppetOptions::default() }, Device::serve);
    let spec = Spec { iodepth: 4, ..Spec::default() };
    let mut job = job(&puppet, &spec);
    let mut tally = job.tally();
    let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(20) };
    while tally.requests() == 0 {
        job.run(span, &mut tally, &mut |_| ()).unwrap();
    }
}

#[test]
fn a_server_that_never_answers_a_request_is_given_up_on() {
    for waiting in BOTH {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let puppet = Puppet::with(PuppetOptions::default(), move |device| {
            let _ = wait.recv();
            drop(device);
        });
        let mut job = job(&puppet, &Spec { waiting, ..Spec::default() });
        job.set_patience(PATIENCE);
        let error = run(&mut job).expect_err("the server has failed");
        assert!(matches!(error, LoadError::Client(ClientError::Stuck(_))), "{error}");
        drop(done);
    }
}

#[test]
fn a_server_that_leaves_under_load_is_noticed() {
    for waiting in BOTH {
        let puppet = Puppet::with(PuppetOptions::default(), |mut device| {
            (0..100).for_each(|_| assert!(device.serve_one(0)));
        });
        let error = load(&puppet, &Spec { waiting, iodepth: 8, ..Spec::default() });
        assert!(matches!(error, LoadError::Client(ClientError::HungUp(_))), "{error}");
    }
}

#[test]
fn a_queue_that_the_server_gives_up_is_noticed() {
    for waiting in BOTH {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let puppet = Puppet::with(PuppetOptions::default(), move |mut device| {
            assert!(device.serve_one(0));
            rustix::io::write(&device.err, &1u64.to_ne_bytes()).unwrap();
            let _ = wait.recv();
        });
        let error = load(&puppet, &Spec { waiting, ..Spec::default() });
        assert!(matches!(error, LoadError::Client(ClientError::Broken)), "{error}");
        drop(done);
    }
}

#[test]
fn a_request_that_fails_says_which_and_how() {
    let puppet = Puppet::with(PuppetOptions::default(), |mut device| {
        assert!(device.serve_one(0));
        device.serve_one(1);
    });
    let spec = Spec { rw: "read".parse().unwrap(), ..Spec::default() };
    assert_eq!(load(&puppet, &spec).to_string(), "a Read at 4096 ended with status 1");
}

#[test]
fn a_status_that_was_never_written_is_no_success() {
    let puppet = Puppet::with(PuppetOptions::default(), |mut device| {
        // The byte that the client has put there itself.
        device.serve_one(0xff);
    });
    let error = load(&puppet, &Spec::default());
    assert!(matches!(error, LoadError::Failed { status: 0xff, .. }), "{error}");
}

#[test]
fn a_chain_that_was_never_made_is_refused() {
    let puppet = Puppet::with(PuppetOptions::default(), |mut device| {
        // Once there is a request, the client has set its ring up and writes no more to this part of it.
        assert!(device.await_request());
        // An element that names descriptor 9, and the used index: one more than the client has seen.
        assert!(device.memory.write(device.config.used + 4, &9u64.to_le_bytes()));
        assert!(device.memory.write(device.config.used + 2, &1u16.to_le_bytes()));
    });
    let error = load(&puppet, &Spec::default());
    assert_eq!(error.to_string(), "device used descriptor chain 9, which is not available");
}

#[test]
fn blocks_that_are_not_what_was_written_are_noticed() {
    // This server answers every read without touching the buffer, where a slot's last write still is.
    let puppet = Puppet::with(PuppetOptions::default(), Device::serve);
    let spec = Spec { rw: "randrw".parse().unwrap(), iodepth: 8, verify: Some(1), ..Spec::default() };
    let error = load(&puppet, &spec);
    assert!(matches!(error, LoadError::Mismatch(Mismatch::Misplaced { .. } | Mismatch::Stale { .. })), "{error}");
}
