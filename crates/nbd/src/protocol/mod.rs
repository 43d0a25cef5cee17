//! NBD's numbers and headers, for a client and for a server: nothing here knows of sockets.
//!
//! The specification is NBD's `doc/proto.md`; extended headers are in that file of its branch `extension-ext-header`.
//! Numbers are sent with the most significant byte first.

#![forbid(unsafe_code)]

mod block_sizes;
mod error;
mod reply;
mod request;

pub use self::block_sizes::{BlockSizes, BlockSizesError};
pub use self::error::{errno, error_of};
pub use self::reply::{Reply, ReplyError};
pub use self::request::{Request, RequestError};

/// The longest string, in bytes: a name of an export, a message ("Conventions").
pub const LONGEST_STRING: usize = 4096;

/// The most bytes that one message carries where nobody has said otherwise ("Size constraints").
pub const DEFAULT_PAYLOAD: u32 = 1 << 25;

/// How a server greets ("Newstyle negotiation").
pub const GREETING_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// What follows: the server haggles over options. Each option begins with it, too.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// What follows instead where the server is of the old style.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// What the answer to an option begins with ("Fixed newstyle negotiation").
pub const ANSWER_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// What a server says of itself, and a client of itself, before options ("Handshake flags", "Client flags").
pub mod handshake_flag {
    /// Unknown options are answered.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No 124 zeroes after an export that was asked for by `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options ("Option types").
pub mod option {
    /// Ends the haggling; an export that is not there ends the connection.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends it all.
    pub const ABORT: u32 = 2;
    /// Which exports there are.
    pub const LIST: u32 = 3;
    /// Encrypts what follows.
    pub const STARTTLS: u32 = 5;
    /// What an export is like.
    pub const INFO: u32 = 6;
    /// The same, and ends the haggling.
    pub const GO: u32 = 7;
    /// Replies may come in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Which contexts of metadata there are.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Which of them are wanted.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Headers have 64 bits for lengths, and replies come in chunks.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Answers to options ("Option reply types").
pub mod answer {
    /// It is so.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// What an export is like.
    pub const INFO: u32 = 3;
    /// A context of metadata.
    pub const META_CONTEXT: u32 = 4;
    /// Errors have this bit.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known.
    pub const UNSUPPORTED: u32 = ERROR | 1;
    /// It is not allowed.
    pub const POLICY: u32 = ERROR | 2;
    /// It makes no sense.
    pub const INVALID: u32 = ERROR | 3;
    /// Not without encryption.
    pub const TLS_REQUIRED: u32 = ERROR | 5;
    /// There is no such export.
    pub const UNKNOWN: u32 = ERROR | 6;
    /// The server is about to end.
    pub const SHUTDOWN: u32 = ERROR | 7;
    /// Not without extended headers.
    pub const EXTENDED_HEADERS_REQUIRED: u32 = ERROR | 10;
}

/// What there is to know of an export (`NBD_REP_INFO`).
pub mod info {
    /// Its size and flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// What it is for, to people.
    pub const DESCRIPTION: u16 = 2;
    /// Its [block sizes](super::BlockSizes).
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do ("Transmission flags").
pub mod export_flag {
    /// The others mean something.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// It is not to be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// It knows `FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// It knows [`FUA`](super::command_flag::FUA).
    pub const SEND_FUA: u16 = 1 << 3;
    /// It knows `TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// It knows `WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// It knows [`DF`](super::command_flag::DF).
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection is for what was written on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// It knows `CACHE`.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// It knows [`FAST_ZERO`](super::command_flag::FAST_ZERO).
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands ("Request types").
pub mod command {
    /// Data comes back.
    pub const READ: u16 = 0;
    /// Data follows the header.
    pub const WRITE: u16 = 1;
    /// The end; nobody answers.
    pub const DISCONNECT: u16 = 2;
    /// Everything that was answered is to be stable.
    pub const FLUSH: u16 = 3;
    /// A range is not needed any more.
    pub const TRIM: u16 = 4;
    /// A range is needed soon.
    pub const CACHE: u16 = 5;
    /// A range is to read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// What is known of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// How a command is to be done ("Command flags").
pub mod command_flag {
    /// It is answered when it is stable.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes take storage.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Data comes in one chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent will do.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeroes, if that is faster than to write them.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is of what follows; with extended headers.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// What a chunk of a reply is ("Structured reply types").
pub mod chunk {
    /// No more comes: a flag of any chunk.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Nothing, and it is the last.
    pub const NONE: u16 = 0;
    /// Where data is for, and the data.
    pub const OFFSET_DATA: u16 = 1;
    /// Where zeroes are, and how many.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents whose lengths have 64 bits.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Errors have this bit.
    pub const IS_ERROR: u16 = 1 << 15;
    /// What went wrong.
    pub const ERROR: u16 = IS_ERROR | 1;
    /// What went wrong, and where.
    pub const ERROR_OFFSET: u16 = IS_ERROR | 2;
}

/// What headers client and server have agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Headers {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests; replies in chunks, or simple where they carry no data.
    Structured,
    /// Extended requests, and nothing but extended chunks.
    Extended,
}

impl Headers {
    /// Bytes of a request's header.
    pub const fn request_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 28,
            Self::Extended => 32,
        }
    }

    /// Bytes of the longest header of a reply.
    pub const fn reply_len(self) -> usize {
        match self {
            Self::Simple => 16,
            Self::Structured => 20,
            Self::Extended => 32,
        }
    }
}

/// Takes a number off the front of `bytes`.
macro_rules! take {
    ($name:ident, $type:ty) => {
        pub(crate) fn $name(bytes: &mut &[u8]) -> Option<$type> {
            let (number, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(<$type>::from_be_bytes(*number))
        }
    };
}

take!(take_u16, u16);
take!(take_u32, u32);
take!(take_u64, u64);

/// Puts bytes at the front of `into`, which has room for them, and leaves it what follows.
pub(crate) fn put(into: &mut &mut [u8], bytes: &[u8]) {
    let place = into.split_off_mut(..bytes.len()).expect("there is room for a header");
    place.copy_from_slice(bytes);
}
