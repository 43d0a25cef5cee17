//! A descriptor that the daemon is started with.

use std::fmt;
use std::os::fd::RawFd;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A socket that somebody made for the daemon.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Descriptor {
    /// By the number that it has in this process.
    Number(RawFd),
    /// By the name that it has in `$LISTEN_FDNAMES` (sd_listen_fds(3)).
    Name(String),
}

/// As QEMU tells the two apart: what begins with a digit is a number.
impl FromStr for Descriptor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with(|first: char| first.is_ascii_digit()) {
            let number = text.parse().map_err(|_| format!("'{text}' is not the number of a file descriptor"));
            return number.map(Self::Number);
        }
        // What systemd takes for a name (FileDescriptorName= in systemd.socket(5)).
        let fits = (1..=255).contains(&text.len()) && text.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b':');
        if fits { Ok(Self::Name(text.to_owned())) } else { Err(format!("'{text}' is not the name of a socket")) }
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl TryFrom<String> for Descriptor {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Descriptor> for String {
    fn from(descriptor: Descriptor) -> Self {
        descriptor.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_a_number_or_a_name_that_systemd_takes() {
        assert_eq!("3".parse(), Ok(Descriptor::Number(3)));
        for name in ["qmp", "egret.socket", "disk@a b", "-1", "+3"] {
            assert_eq!(name.parse(), Ok(Descriptor::Name(name.to_owned())));
        }
        for neither in ["", "3a", "4294967296", "a:b", "a\n", "\u{e9}", &"x".repeat(256)] {
            assert!(neither.parse::<Descriptor>().is_err(), "{neither}");
        }
    }
}
