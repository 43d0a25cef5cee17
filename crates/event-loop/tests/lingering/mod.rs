//! A socket that takes long to close, for the tests beside the code too.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// One with data that nobody reads, which waits for an hour for it to be read when it is closed; and its other end, to be kept.
pub(crate) fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let ours = TcpStream::connect(listener.local_addr().expect("its own")).expect("it listens");
    let (theirs, _) = listener.accept().expect("the other end");
    ours.set_nonblocking(true).expect("our own socket");
    while let Ok(1..) = (&ours).write(&[0; 1 << 16]) {}
    set_socket_linger(&ours, Some(Duration::from_secs(3600))).expect("our own socket");
    (ours, theirs)
}
