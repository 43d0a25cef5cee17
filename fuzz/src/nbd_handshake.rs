//! What a client may say to an NBD server before it has an export.

use std::sync::{Arc, LazyLock};

use egret_disk::{Disk, Driver, Options};
use egret_event_loop::Nanos;
use egret_export::{Haggled, haggle};
use egret_nbd::protocol::{ANSWER_MAGIC, OPTION_MAGIC, answer, option};

use crate::input::Input;

static DISK: LazyLock<Arc<Disk>> = LazyLock::new(|| {
    let driver = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
    Arc::new(Disk::open(&Options::new("d0", driver)).expect("a disk"))
});

/// A program: options, true or not, and bytes that are none.
///
/// # Panics
/// When an answer is not whole, depends on how the bytes arrive, or tells something to a client that has yet to encrypt.
pub fn nbd_handshake(data: &[u8]) {
    let mut input = Input(data);
    let has_tls = input.u8().is_multiple_of(4);
    let mut pieces = vec![vec![0, 0, 0, input.u8() % 5]];
    while !input.is_over() && pieces.len() < 256 {
        let known = [
            option::EXPORT_NAME,
            option::ABORT,
            option::LIST,
            option::STARTTLS,
            option::INFO,
            option::GO,
            option::STRUCTURED_REPLY,
            option::LIST_META_CONTEXT,
            option::SET_META_CONTEXT,
            option::EXTENDED_HEADERS,
            77,
        ];
        let kind = input.one_of(&known);
        let name: &[u8] = input.one_of(&[&b"disk"[..], b"", b"d"]);
        let len = |bytes: &[u8]| (bytes.len() as u32).to_be_bytes().to_vec();
        let data = match input.u8() % 4 {
            0 => Vec::new(),
            1 => input.bytes(64).to_vec(),
            // A name, and kinds of information.
            2 => [&len(name)[..], name, &[0, 1, 0, input.u8() % 4]].concat(),
            // A name, and a context.
            _ => {
                let context: &[u8] = input.one_of(&[&b"base:allocation"[..], b"base:", b"qemu:allocation-depth", b""]);
                [&len(name)[..], name, &1u32.to_be_bytes(), &len(context), context].concat()
            }
        };
        // Now and then it says another length, or something else altogether.
        let said = if input.u8() == 0 { u32::from(input.u16()) << 8 } else { data.len() as u32 };
        let magic = if input.u8() == 255 { u64::from(input.u16()) } else { OPTION_MAGIC };
        pieces.push([&magic.to_be_bytes()[..], &kind.to_be_bytes(), &said.to_be_bytes(), &data].concat());
    }
    let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    let (said, haggled) = haggle(&DISK, has_tls, &pieces);
    holds(&said, haggled, has_tls);
    // What comes together with the request for TLS ends the connection, and what comes later is inside of TLS.
    if !has_tls {
        let whole = pieces.concat();
        let singly: Vec<&[u8]> = whole.chunks(1).collect();
        assert_eq!(haggle(&DISK, has_tls, &singly), (said.clone(), haggled));
        assert_eq!(haggle(&DISK, has_tls, &[&whole]), (said, haggled));
    }
}

/// That all that a server has said is answers, and refusals before TLS where that is due.
fn holds(said: &[u8], haggled: Haggled, has_tls: bool) {
    let mut rest = &said[18..];
    let mut begun = false;
    while let Some((header, more)) = rest.split_first_chunk::<20>() {
        if header[..8] != ANSWER_MAGIC.to_be_bytes() {
            break;
        }
        let [option, kind, len] =
            [8, 12, 16].map(|at| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]));
        let is_refusal = kind == answer::TLS_REQUIRED || kind == answer::INVALID && option == option::STARTTLS;
        let begins = kind == answer::ACK && option == option::STARTTLS;
        let ends = kind == answer::ACK && option == option::ABORT;
        assert!(!has_tls || begun || is_refusal || begins || ends, "option {option} is answered {kind} before TLS");
        begun |= begins;
        rest = more.get(len as usize..).expect("a whole answer");
    }
    // An old client's choice is answered by size and flags, with zeroes behind.
    let chose_by_name = haggled == Haggled::Chose && matches!(rest.len(), 10 | 134);
    assert!(rest.is_empty() || chose_by_name, "{} bytes that are no answer", rest.len());
    assert!(!has_tls || begun || haggled != Haggled::Chose, "an export without TLS");
}
