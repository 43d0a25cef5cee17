//! Who may connect to a UNIX socket: keys that exports, monitors and metrics have alike.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::key::{Key, Unset, ValueType};
use super::options::join;
use crate::options;

options! {
    /// Who may connect, as it was asked for.
    #[derive(Default)]
    pub struct Access {
        /// Permissions of the UNIX socket: who may write may connect. Egret's own.
        mode: Option<Mode>, ValueType::Mode, unset "as the umask leaves";
        /// User that the UNIX socket belongs to, by name or number; to give it away takes privileges. Egret's own.
        user: Option<String>, ValueType::Text(1, 255), unset "the daemon's";
        /// Group of the UNIX socket, by name or number, which the daemon must be in; goes with a `mode` of `0660`, say.
        /// Egret's own.
        group: Option<String>, ValueType::Text(1, 255), unset "the daemon's";
        /// User, or list of users (`allow-uid.0=a,allow-uid.1=b`), whose processes are let in on the UNIX socket, by name
        /// or number: others, root too, are hung up on. Egret's own.
        allow_uid: Vec<String>, ValueType::Users, unset "everybody who may connect";
    }
}

impl Access {
    /// Its keys where an unset `mode` means `default`.
    pub(crate) const fn keys(default: &'static (dyn fmt::Display + Sync)) -> [Key; 4] {
        let [mode, rest @ ..] = Self::KEYS else { unreachable!() };
        join(&[&[Key { unset: Unset::Means(default), ..*mode }], rest])
    }

    /// The keys that are about a socket's file, as far as they were given.
    pub(crate) fn about_its_file(&self) -> impl Iterator<Item = &'static str> {
        let given = [("mode", self.mode.is_some()), ("user", self.user.is_some()), ("group", self.group.is_some())];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| key)
    }
}

/// A file's permissions, spelled in octal: `0600`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mode(pub u32);

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl TryFrom<String> for Mode {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        u32::from_str_radix(&text, 8).map(Self)
    }
}

impl From<Mode> for String {
    fn from(mode: Mode) -> Self {
        mode.to_string()
    }
}
