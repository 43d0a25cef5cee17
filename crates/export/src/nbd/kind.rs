//! What a client's request asks for, and whether it may.

use egret_nbd::protocol::{DEFAULT_PAYLOAD, Headers, Request, command, command_flag};
use egret_virtio::RequestType;
use rustix::io::Errno;

use super::client::{Contexts, PART};
use super::lane::Core;

/// What is done for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write { fua: bool },
    Flush,
    Trim { fua: bool },
    WriteZeroes { unmap: bool, fua: bool },
    Cache,
    Status { one: bool },
}

impl Kind {
    /// What it counts as.
    pub(super) const fn request_type(self) -> RequestType {
        match self {
            Self::Read => RequestType::Read,
            Self::Write { .. } => RequestType::Write,
            Self::Flush => RequestType::Flush,
            Self::Trim { .. } => RequestType::Discard,
            Self::WriteZeroes { .. } => RequestType::WriteZeroes,
            Self::Cache | Self::Status { .. } => RequestType::Other,
        }
    }

    /// What a request counts as that is refused.
    pub(super) const fn request_type_of(command: u16) -> RequestType {
        match command {
            command::READ => RequestType::Read,
            command::WRITE => RequestType::Write,
            command::FLUSH => RequestType::Flush,
            command::TRIM => RequestType::Discard,
            command::WRITE_ZEROES => RequestType::WriteZeroes,
            _ => RequestType::Other,
        }
    }

    /// What a request asks for, if it may.
    ///
    /// # Errors
    /// As the client is to be told.
    pub(super) fn of(request: &Request, headers: Headers, contexts: Contexts, core: &Core) -> Result<Self, Errno> {
        use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
        let Request { flags, command, offset, length, .. } = *request;
        let fua = flags & FUA != 0 || core.terms.writethrough;
        let knows = |known: u16| if flags & !(known | FUA) == 0 { Ok(()) } else { Err(Errno::INVAL) };
        let may_write = || if core.terms.writable { Ok(()) } else { Err(Errno::PERM) };
        let within = |otherwise: Errno| {
            let is_within = offset.checked_add(length).is_some_and(|end| end <= core.disk.size());
            let is_aligned = (offset | length).is_multiple_of(512);
            if !is_within {
                Err(otherwise)
            } else if is_aligned {
                Ok(())
            } else {
                Err(Errno::INVAL)
            }
        };
        Ok(match command {
            command::READ => {
                knows(if headers == Headers::Simple { 0 } else { DF })?;
                within(Errno::INVAL)?;
                if length > DEFAULT_PAYLOAD.into() {
                    return Err(Errno::INVAL);
                }
                if flags & DF != 0 && length > PART {
                    return Err(Errno::OVERFLOW);
                }
                Self::Read
            }
            command::WRITE => {
                knows(if headers == Headers::Extended { PAYLOAD_LEN } else { 0 })?;
                may_write()?;
                within(Errno::NOSPC)?;
                Self::Write { fua }
            }
            command::FLUSH => {
                knows(0)?;
                if offset | length != 0 {
                    return Err(Errno::INVAL);
                }
                Self::Flush
            }
            command::TRIM => {
                knows(0)?;
                may_write()?;
                within(Errno::INVAL)?;
                Self::Trim { fua }
            }
            command::WRITE_ZEROES => {
                knows(NO_HOLE | FAST_ZERO)?;
                may_write()?;
                within(Errno::NOSPC)?;
                let unmap = flags & NO_HOLE == 0;
                if flags & FAST_ZERO != 0 && !core.disk.zeroes_fast(unmap) {
                    return Err(Errno::OPNOTSUPP);
                }
                Self::WriteZeroes { unmap, fua }
            }
            command::CACHE => {
                knows(0)?;
                within(Errno::INVAL)?;
                Self::Cache
            }
            command::BLOCK_STATUS => {
                knows(REQ_ONE)?;
                within(Errno::INVAL)?;
                if length == 0 || contexts == Contexts::default() || headers == Headers::Simple {
                    return Err(Errno::INVAL);
                }
                Self::Status { one: flags & REQ_ONE != 0 }
            }
            _ => return Err(Errno::INVAL),
        })
    }
}
