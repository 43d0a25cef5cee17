//! Who may connect to a UNIX socket: keys that exports, monitors and metrics have alike.

use serde::{Deserialize, Serialize};

use super::key::{Key, Kind};

/// Who may connect, as it was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Access {
    /// The permissions of the socket's file.
    #[serde(default, with = "octal", skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// The user that it belongs to, by name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The group that it belongs to, by name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The users of whom clients are let in, by name or number; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_uid: Vec<String>,
}

/// The key of the permissions, which are `default` where nobody says.
pub(crate) const fn mode(default: &'static &'static str) -> Key {
    let about = "Permissions of the UNIX socket: who may write may connect. Egret's own.";
    Key::optional("mode", Kind::Mode, default, about)
}

pub(crate) const USER: Key = Key::optional(
    "user",
    Kind::Text(1, 255),
    &"the daemon's",
    "User that the UNIX socket belongs to, by name or number; to give it away takes privileges. Egret's own.",
);

pub(crate) const GROUP: Key = Key::optional(
    "group",
    Kind::Text(1, 255),
    &"the daemon's",
    "Group of the UNIX socket, by name or number, which the daemon must be in; goes with a `mode` of `0660`, say. \
     Egret's own.",
);

pub(crate) const ALLOW_UID: Key = Key::optional(
    "allow-uid",
    Kind::Users,
    &"everybody who may connect",
    "User, or list of users (`allow-uid.0=a,allow-uid.1=b`), whose processes are let in on the UNIX socket, by name or \
     number: others, root too, are hung up on. Egret's own.",
);

impl Access {
    /// The keys that are about a socket's file, as far as they were given.
    pub(crate) fn about_its_file(&self) -> impl Iterator<Item = &'static str> {
        let given = [("mode", self.mode.is_some()), ("user", self.user.is_some()), ("group", self.group.is_some())];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| key)
    }
}

mod octal {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(mode: &Option<u32>, serializer: S) -> Result<S::Ok, S::Error> {
        mode.map(|mode| format!("{mode:04o}")).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
        let text = String::deserialize(deserializer)?;
        u32::from_str_radix(&text, 8).map(Some).map_err(serde::de::Error::custom)
    }
}
