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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_waits_for_more_or_ends_with_a_choice_or_without_one() {
        let null = egret_disk::Driver::Null { size: 512, latency: egret_event_loop::Nanos::ZERO, read_zeroes: true };
        let disk = Arc::new(Disk::open(&egret_disk::Options::new("null", null)).unwrap());
        let flags = [0, 0, 0, 3];
        let list = [&b"IHAVEOPT"[..], &[0, 0, 0, 3], &[0; 4]].concat();
        let choose = [&b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0, 0, 0, 4], b"disk"].concat();
        // A greeting, a list of one export with its description, and what is told of it.
        let (greeting, listed, told) = (18, 20 + 4 + 4 + 6 + 20, 10);
        for (pieces, expected) in [
            (vec![], (0, Haggled::Waits)),
            (vec![&flags[..3]], (greeting, Haggled::Waits)),
            (vec![&flags[..], &list], (greeting + listed, Haggled::Waits)),
            (vec![&flags[..], &list[..5], &list[5..], &choose], (greeting + listed + told, Haggled::Chose)),
            (vec![&flags[..], &choose[..4], &list], (greeting, Haggled::Ended)),
            (vec![&[0, 0, 0, 4][..]], (greeting, Haggled::Ended)),
        ] {
            let (said, how) = haggle(&disk, false, &pieces);
            assert_eq!((said.len(), how), expected, "{pieces:?}");
        }
        // More than waits for who reads nothing.
        let (said, how) = haggle(&disk, false, &[&flags, &list.repeat(2000)]);
        assert_eq!((said.len(), how), (greeting + 2000 * listed, Haggled::Waits));
        // Inside of TLS it goes on.
        let start = [&b"IHAVEOPT"[..], &[0, 0, 0, 5], &[0; 4]].concat();
        assert_eq!(haggle(&disk, true, &[&flags, &start, &choose]).1, Haggled::Chose);
        assert_eq!(haggle(&disk, true, &[&flags, &choose]).1, Haggled::Ended);
    }
}
