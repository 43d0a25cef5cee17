//! Requests ("Request message"; "Extended request message").

use super::{Headers, command, command_flag, put, take_u16, take_u32, take_u64};

const COMPACT: u32 = 0x2560_9513;
const EXTENDED: u32 = 0x21e4_1c71;

/// What a client asks for: a request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How: of [`command_flag`].
    pub flags: u16,
    /// What: of [`command`].
    pub command: u16,
    /// Comes back with the reply.
    pub cookie: u64,
    /// Where, in bytes.
    pub offset: u64,
    /// How much, in bytes. Compact headers have 32 bits for it.
    pub length: u64,
}

/// What is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request begins with {expected:#x}, not with {got:#x}")]
pub struct RequestError {
    expected: u32,
    got: u32,
}

impl Request {
    /// Writes it to the front of `into`, and returns how many bytes it has. With extended headers a write's length is
    /// that of what follows, and its flags say so.
    pub fn write(&self, headers: Headers, into: &mut [u8; 32]) -> usize {
        let Self { mut flags, command, cookie, offset, length } = *self;
        let extended = headers == Headers::Extended;
        if extended && command == command::WRITE {
            flags |= command_flag::PAYLOAD_LEN;
        }
        let mut rest = &mut into[..];
        put(&mut rest, &(if extended { EXTENDED } else { COMPACT }).to_be_bytes());
        put(&mut rest, &flags.to_be_bytes());
        put(&mut rest, &command.to_be_bytes());
        put(&mut rest, &cookie.to_be_bytes());
        put(&mut rest, &offset.to_be_bytes());
        if extended {
            put(&mut rest, &length.to_be_bytes());
        } else {
            debug_assert!(u32::try_from(length).is_ok(), "a request of {length} bytes has an extended header");
            put(&mut rest, &(length as u32).to_be_bytes());
        }
        headers.request_len()
    }

    /// Reads one from the front of `bytes`; `None` if not all of it is there.
    ///
    /// # Errors
    /// It does not begin as one does.
    pub fn read(headers: Headers, mut bytes: &[u8]) -> Result<Option<Self>, RequestError> {
        let extended = headers == Headers::Extended;
        let expected = if extended { EXTENDED } else { COMPACT };
        match take_u32(&mut bytes) {
            Some(got) if got != expected => return Err(RequestError { expected, got }),
            _ => {}
        }
        let mut read = || {
            let [flags, command] = [take_u16(&mut bytes)?, take_u16(&mut bytes)?];
            let [cookie, offset] = [take_u64(&mut bytes)?, take_u64(&mut bytes)?];
            let length = if extended { take_u64(&mut bytes)? } else { take_u32(&mut bytes)?.into() };
            Some(Self { flags, command, cookie, offset, length })
        };
        Ok(read())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rustfmt::skip]
    #[test]
    fn a_request_is_sent_as_the_specification_has_it() {
        let request = Request {
            flags: command_flag::FUA,
            command: command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1112_1314_1516_1718,
            length: 0x2122_2324,
        };
        let mut bytes = [0xff; 32];
        assert_eq!(request.write(Headers::Structured, &mut bytes), 28);
        assert_eq!(bytes[..28], [
            0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1,
            1, 2, 3, 4, 5, 6, 7, 8,
            0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
            0x21, 0x22, 0x23, 0x24,
        ]);
        assert_eq!(request.write(Headers::Extended, &mut bytes), 32);
        assert_eq!(bytes, [
            0x21, 0xe4, 0x1c, 0x71, 0, 0b10_0001, 0, 1,
            1, 2, 3, 4, 5, 6, 7, 8,
            0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
            0, 0, 0, 0, 0x21, 0x22, 0x23, 0x24,
        ]);
    }

    #[test]
    fn a_request_reads_back_as_it_was_written_and_nothing_else_is_one() {
        for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
            let request = Request { flags: 2, command: command::TRIM, cookie: 7, offset: 1 << 40, length: 1 << 20 };
            let mut bytes = [0; 32];
            let len = request.write(headers, &mut bytes);
            assert_eq!(Request::read(headers, &bytes), Ok(Some(request)));
            assert!((0..len).all(|short| Request::read(headers, &bytes[..short]) == Ok(None)));
            bytes[3] ^= 1;
            assert!(Request::read(headers, &bytes[..4]).is_err());
        }
    }
}
