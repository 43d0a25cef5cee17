//! A whole handshake with bytes that a fuzzer has made up.

use std::sync::{Arc, Mutex};

use egret_disk::Disk;

use super::export::{NbdOptions, Offer};
use super::handshake::{Fed, Handshake};

/// How it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haggled {
    /// The client is to say more.
    Waits,
    /// It has chosen an export.
    Chose,
    /// It was hung up on.
    Ended,
}

/// What a server that offers `disk` says to a client that sends `pieces` and reads all that it is told, and how that goes;
/// where TLS begins it goes on as if that were there.
pub fn haggle(disk: &Arc<Disk>, has_tls: bool, pieces: &[&[u8]]) -> (Vec<u8>, Haggled) {
    let options = NbdOptions {
        name: "disk".into(),
        description: Some("a disk".into()),
        writable: true,
        writethrough: false,
        max_connections: 0,
    };
    let offer = Arc::new(Offer::without_lanes(options, disk));
    let offers = Mutex::new([("disk".to_owned(), offer)].into());
    let (mut handshake, mut said) = (Handshake::new(has_tls), Vec::new());
    for piece in pieces {
        let mut input = *piece;
        loop {
            let fed = handshake.feed(input, &offers);
            let was_answered = handshake.has_output();
            said.append(handshake.output());
            match fed {
                // It looks no further than there is room for answers.
                Ok(Fed::Waits | Fed::StartsTls) if was_answered => input = &[],
                Ok(Fed::Waits | Fed::StartsTls) => break,
                Ok(Fed::Chose(chosen)) => {
                    said.extend(chosen.output);
                    return (said, Haggled::Chose);
                }
                Err(_) => return (said, Haggled::Ended),
            }
        }
    }
    (said, Haggled::Waits)
}
