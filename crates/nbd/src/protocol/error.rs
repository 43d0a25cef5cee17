//! Errors, as they are sent ("Error values").

use rustix::io::Errno;

/// What an error that was sent means here. One that is not among NBD's is `EINVAL`, as the specification has it.
pub const fn errno(sent: u32) -> Errno {
    match sent {
        1 => Errno::PERM,
        5 => Errno::IO,
        12 => Errno::NOMEM,
        28 => Errno::NOSPC,
        75 => Errno::OVERFLOW,
        95 => Errno::NOTSUP,
        108 => Errno::SHUTDOWN,
        _ => Errno::INVAL,
    }
}

/// How an error is sent.
pub fn error_of(errno: Errno) -> u32 {
    match errno {
        Errno::PERM | Errno::ROFS | Errno::ACCESS => 1,
        Errno::NOMEM => 12,
        Errno::INVAL => 22,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => 28,
        Errno::OVERFLOW => 75,
        Errno::OPNOTSUPP => 95,
        Errno::SHUTDOWN => 108,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_back_as_they_were_sent_and_others_are_told_by_the_nearest() {
        for sent in [1, 5, 12, 22, 28, 75, 95, 108] {
            assert_eq!(error_of(errno(sent)), sent);
        }
        assert_eq!(errno(4711), Errno::INVAL);
        assert_eq!((error_of(Errno::ROFS), error_of(Errno::DQUOT), error_of(Errno::NXIO)), (1, 28, 5));
    }
}
