//! How replies begin: the header, and what stands between it and the data.

use egret_nbd::protocol::{Headers, Reply, chunk, error_of};
use rustix::io::Errno;

/// The beginning of a reply, or of a chunk of one; data comes behind it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    bytes: [u8; LONGEST],
    len: u8,
}

/// An extended header, and where an error was.
const LONGEST: usize = 32 + 14;

impl Head {
    fn put(mut self, bytes: &[u8]) -> Self {
        let at = usize::from(self.len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len() as u8;
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len.into()]
    }
}

impl From<Reply> for Head {
    fn from(reply: Reply) -> Self {
        let (mut bytes, mut header) = ([0; LONGEST], [0; 32]);
        let len = reply.write(&mut header) as u8;
        bytes[..header.len()].copy_from_slice(&header);
        Self { bytes, len }
    }
}

/// The request that a reply is to.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyTo {
    pub(super) headers: Headers,
    pub(super) cookie: u64,
    /// The request's.
    pub(super) offset: u64,
}

impl ReplyTo {
    fn chunk(self, is_last: bool, kind: u16, length: usize) -> Head {
        let flags = if is_last { chunk::FLAG_DONE } else { 0 };
        let offset = (self.headers == Headers::Extended).then_some(self.offset);
        Reply::Chunk { flags, kind, cookie: self.cookie, offset, length: length as u64 }.into()
    }

    /// All went well, and nothing more comes; but for the data of a read, with simple replies.
    pub(super) fn done(self) -> Head {
        match self.headers {
            Headers::Simple => Reply::Simple { error: 0, cookie: self.cookie }.into(),
            Headers::Structured | Headers::Extended => self.chunk(true, chunk::NONE, 0),
        }
    }

    /// It failed, and nothing more comes.
    pub(super) fn failed(self, why: Errno) -> Head {
        let error = error_of(why);
        match self.headers {
            Headers::Simple => Reply::Simple { error, cookie: self.cookie }.into(),
            Headers::Structured | Headers::Extended => {
                self.chunk(true, chunk::ERROR, 6).put(&error.to_be_bytes()).put(&[0; 2])
            }
        }
    }

    /// A read failed at `at`. Not with simple replies.
    pub(super) fn failed_at(self, is_last: bool, why: Errno, at: u64) -> Head {
        let head = self.chunk(is_last, chunk::ERROR_OFFSET, 14).put(&error_of(why).to_be_bytes());
        head.put(&[0; 2]).put(&at.to_be_bytes())
    }

    /// Data that was read at `at`, of which `len` bytes come behind it. Not with simple replies.
    pub(super) fn data(self, is_last: bool, at: u64, len: usize) -> Head {
        self.chunk(is_last, chunk::OFFSET_DATA, len + 8).put(&at.to_be_bytes())
    }

    /// `len` zeroes that were read at `at`. Not with simple replies.
    pub(super) fn hole(self, is_last: bool, at: u64, len: u32) -> Head {
        self.chunk(is_last, chunk::OFFSET_HOLE, 12).put(&at.to_be_bytes()).put(&len.to_be_bytes())
    }

    /// Extents as the context of this number has them, each with its length and flags. Not with simple replies.
    pub(super) fn status(self, is_last: bool, context: u32, extents: &[(u64, u32)]) -> (Head, Vec<u8>) {
        let mut bytes = Vec::with_capacity(extents.len() * 16);
        if self.headers == Headers::Extended {
            for (len, flags) in extents {
                bytes.extend(len.to_be_bytes());
                bytes.extend(u64::from(*flags).to_be_bytes());
            }
            let head = self.chunk(is_last, chunk::BLOCK_STATUS_EXT, bytes.len() + 8).put(&context.to_be_bytes());
            return (head.put(&(extents.len() as u32).to_be_bytes()), bytes);
        }
        for (len, flags) in extents {
            bytes.extend((*len as u32).to_be_bytes());
            bytes.extend(flags.to_be_bytes());
        }
        (self.chunk(is_last, chunk::BLOCK_STATUS, bytes.len() + 4).put(&context.to_be_bytes()), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_laid_out_as_the_specification_has_them() {
        let cookie = [1, 2, 3, 4, 5, 6, 7, 8];
        let of = |headers| ReplyTo { headers, cookie: u64::from_be_bytes(cookie), offset: 0x1000 };
        let at = [0, 0, 0, 0, 0, 0, 16, 0];
        let simple = [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5][..], &cookie].concat();
        assert_eq!(of(Headers::Simple).failed(Errno::IO).bytes(), simple);
        let structured = of(Headers::Structured);
        let chunk = |kind: [u8; 2], payload: &[&[u8]]| {
            [&[0x66, 0x8e, 0x33, 0xef, 0, 1][..], &kind, &cookie, &payload.concat()].concat()
        };
        assert_eq!(structured.data(true, 0x1000, 512).bytes(), chunk([0, 1], &[&[0, 0, 2, 8], &at]));
        let more = structured.data(false, 0x1000, 512);
        assert_eq!(more.bytes()[4..6], [0, 0], "it is not the last");
        assert_eq!(more.bytes()[6..], structured.data(true, 0x1000, 512).bytes()[6..]);
        assert_eq!(structured.done().bytes(), chunk([0, 0], &[&[0; 4]]));
        let well = [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0][..], &cookie].concat();
        assert_eq!(of(Headers::Simple).done().bytes(), well);
        assert_eq!(structured.hole(true, 0x1000, 512).bytes(), chunk([0, 2], &[&[0, 0, 0, 12], &at, &[0, 0, 2, 0]]));
        assert_eq!(
            structured.failed(Errno::INVAL).bytes(),
            chunk([0x80, 1], &[&[0, 0, 0, 6], &[0, 0, 0, 22], &[0, 0]])
        );
        let (status, extents) = structured.status(true, 9, &[(4096, 3)]);
        assert_eq!(status.bytes(), chunk([0, 5], &[&[0, 0, 0, 12], &[0, 0, 0, 9]]));
        assert_eq!(extents, [0, 0, 16, 0, 0, 0, 0, 3]);
        let extended = |kind: [u8; 2], payload: &[&[u8]]| {
            [&[0x6e, 0x8a, 0x27, 0x8c, 0, 1][..], &kind, &cookie, &at, &payload.concat()].concat()
        };
        assert_eq!(of(Headers::Extended).done().bytes(), extended([0, 0], &[&[0; 8]]));
        let (status, extents) = of(Headers::Extended).status(true, 9, &[(4096, 3)]);
        assert_eq!(status.bytes(), extended([0, 6], &[&24u64.to_be_bytes(), &[0, 0, 0, 9, 0, 0, 0, 1]]));
        assert_eq!(extents, [0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
        let failed = of(Headers::Extended).failed_at(true, Errno::IO, 0x1000);
        assert_eq!(failed.bytes(), extended([0x80, 2], &[&14u64.to_be_bytes(), &[0, 0, 0, 5], &[0, 0], &at]));
    }
}
