//! Replies ("Simple reply message", "Structured reply chunk message", "Extended reply chunk message").

use super::{Headers, put, take_u16, take_u32, take_u64};

const SIMPLE: u32 = 0x6744_6698;
const STRUCTURED: u32 = 0x668e_33ef;
const EXTENDED: u32 = 0x6e8a_278c;

/// The header of a reply, or of a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// All of a reply; what was to be read follows, if there is no error.
    Simple {
        /// What went wrong; 0 if nothing did.
        error: u32,
        /// The request's.
        cookie: u64,
    },
    /// A part of a reply.
    Chunk {
        /// Whether it is the last.
        flags: u16,
        /// What it is: of [`chunk`](super::chunk).
        kind: u16,
        /// The request's.
        cookie: u64,
        /// The request's, where headers are extended.
        offset: Option<u64>,
        /// Bytes that follow.
        length: u64,
    },
}

/// What is no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no reply begins with {0:#x}, as headers were agreed on")]
pub struct ReplyError(u32);

impl Reply {
    /// Reads one from the front of `bytes`, and says how long it is; `None` if not all of it is there.
    ///
    /// # Errors
    /// It does not begin as one does.
    pub fn read(headers: Headers, mut bytes: &[u8]) -> Result<Option<(Self, usize)>, ReplyError> {
        let Some(magic) = take_u32(&mut bytes) else { return Ok(None) };
        let read = match (magic, headers) {
            (SIMPLE, Headers::Simple | Headers::Structured) => take_u32(&mut bytes)
                .zip(take_u64(&mut bytes))
                .map(|(error, cookie)| (Self::Simple { error, cookie }, 16)),
            (STRUCTURED, Headers::Structured) => Self::read_chunk(&mut bytes, false).map(|chunk| (chunk, 20)),
            (EXTENDED, Headers::Extended) => Self::read_chunk(&mut bytes, true).map(|chunk| (chunk, 32)),
            _ => return Err(ReplyError(magic)),
        };
        Ok(read)
    }

    fn read_chunk(bytes: &mut &[u8], extended: bool) -> Option<Self> {
        let [flags, kind] = [take_u16(bytes)?, take_u16(bytes)?];
        let cookie = take_u64(bytes)?;
        let offset = if extended { Some(take_u64(bytes)?) } else { None };
        let length = if extended { take_u64(bytes)? } else { take_u32(bytes)?.into() };
        Some(Self::Chunk { flags, kind, cookie, offset, length })
    }

    /// Writes it to the front of `into`, and returns how many bytes it has.
    pub fn write(&self, into: &mut [u8; 32]) -> usize {
        let mut rest = &mut into[..];
        match *self {
            Self::Simple { error, cookie } => {
                put(&mut rest, &SIMPLE.to_be_bytes());
                put(&mut rest, &error.to_be_bytes());
                put(&mut rest, &cookie.to_be_bytes());
            }
            Self::Chunk { flags, kind, cookie, offset, length } => {
                put(&mut rest, &(if offset.is_some() { EXTENDED } else { STRUCTURED }).to_be_bytes());
                put(&mut rest, &flags.to_be_bytes());
                put(&mut rest, &kind.to_be_bytes());
                put(&mut rest, &cookie.to_be_bytes());
                match offset {
                    Some(offset) => {
                        put(&mut rest, &offset.to_be_bytes());
                        put(&mut rest, &length.to_be_bytes());
                    }
                    None => put(&mut rest, &(length as u32).to_be_bytes()),
                }
            }
        }
        let left = rest.len();
        into.len() - left
    }
}

#[cfg(test)]
mod tests {
    use super::super::chunk;
    use super::*;

    #[rustfmt::skip]
    #[test]
    fn replies_are_read_as_the_specification_has_them() {
        let simple = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5, 1, 2, 3, 4, 5, 6, 7, 8];
        let read = Reply::Simple { error: 5, cookie: 0x0102_0304_0506_0708 };
        assert_eq!(Reply::read(Headers::Simple, &simple), Ok(Some((read, 16))));
        assert_eq!(Reply::read(Headers::Structured, &simple), Ok(Some((read, 16))));

        let structured = [0x66, 0x8e, 0x33, 0xef, 0, 1, 0x80, 2, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 1, 0];
        let read = Reply::Chunk { flags: 1, kind: chunk::ERROR_OFFSET, cookie: 9, offset: None, length: 256 };
        assert_eq!(Reply::read(Headers::Structured, &structured), Ok(Some((read, 20))));

        let extended = [
            0x6e, 0x8a, 0x27, 0x8c, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9,
            0, 0, 0, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0,
        ];
        let read = Reply::Chunk { flags: 0, kind: chunk::OFFSET_DATA, cookie: 9, offset: Some(512), length: 1 << 56 };
        assert_eq!(Reply::read(Headers::Extended, &extended), Ok(Some((read, 32))));

        // Each where it was not agreed on.
        assert_eq!(Reply::read(Headers::Extended, &simple), Err(ReplyError(SIMPLE)));
        assert_eq!(Reply::read(Headers::Simple, &structured), Err(ReplyError(STRUCTURED)));
        assert_eq!(Reply::read(Headers::Extended, &structured), Err(ReplyError(STRUCTURED)));
        assert_eq!(Reply::read(Headers::Structured, &extended), Err(ReplyError(EXTENDED)));
    }

    #[test]
    fn a_reply_reads_back_as_it_was_written_and_is_awaited_to_its_last_byte() {
        let offset = Some(4096);
        for (headers, reply) in [
            (Headers::Simple, Reply::Simple { error: 0, cookie: 1 }),
            (Headers::Structured, Reply::Chunk { flags: 1, kind: 1, cookie: 2, offset: None, length: 520 }),
            (Headers::Extended, Reply::Chunk { flags: 1, kind: 2, cookie: 3, offset, length: 12 }),
        ] {
            let mut bytes = [0; 32];
            let len = reply.write(&mut bytes);
            assert_eq!(len, headers.reply_len());
            assert_eq!(Reply::read(headers, &bytes), Ok(Some((reply, len))));
            assert!((0..len).all(|short| Reply::read(headers, &bytes[..short]) == Ok(None)));
        }
    }
}
