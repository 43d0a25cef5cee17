//! Who may connect to a UNIX socket: keys that exports, monitors and metrics have alike.

use std::io;

use egret_export as export;
use serde::{Deserialize, Serialize};

use super::key::{Key, Kind};
use crate::process::sys::{group_id, user_id};

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
pub(crate) const fn mode(default: &'static str) -> Key {
    let about = "Permissions of the UNIX socket: who may write may connect. Egret's own.";
    Key::optional("mode", Kind::Mode, default, about)
}

pub(crate) const USER: Key = Key::optional(
    "user",
    Kind::Text(1, 255),
    "the daemon's",
    "User that the UNIX socket belongs to, by name or number; to give it away takes privileges. Egret's own.",
);

pub(crate) const GROUP: Key = Key::optional(
    "group",
    Kind::Text(1, 255),
    "the daemon's",
    "Group of the UNIX socket, by name or number, which the daemon must be in; goes with a `mode` of `0660`, say. \
     Egret's own.",
);

pub(crate) const ALLOW_UID: Key = Key::optional(
    "allow-uid",
    Kind::Users,
    "everybody who may connect",
    "User, or list of users (`allow-uid.0=a,allow-uid.1=b`), whose processes are let in on the UNIX socket, by name or \
     number: others, root too, are hung up on. Egret's own.",
);

impl Access {
    /// The keys that are about a socket's file, as far as they were given.
    pub(crate) fn about_its_file(&self) -> impl Iterator<Item = &'static str> {
        let given = [("mode", self.mode.is_some()), ("user", self.user.is_some()), ("group", self.group.is_some())];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| key)
    }

    /// The same in the system's own terms.
    ///
    /// # Errors
    /// There is no such user or group.
    pub(crate) fn resolve(&self) -> io::Result<export::Access> {
        let user = |name: &String| find("user", name, user_id);
        Ok(export::Access {
            mode: self.mode,
            user: self.user.as_ref().map(user).transpose()?,
            group: self.group.as_ref().map(|name| find("group", name, group_id)).transpose()?,
            uids: self.allow_uid.iter().map(user).collect::<io::Result<_>>()?,
        })
    }
}

/// A user or group by its name, or else by its number.
fn find(noun: &str, name: &str, by_name: fn(&str) -> io::Result<Option<u32>>) -> io::Result<u32> {
    // The largest number means "none" to the system.
    let number = || name.parse().ok().filter(|number| *number < u32::MAX);
    by_name(name)?.or_else(number).ok_or_else(|| io::Error::other(format!("there is no {noun} '{name}'")))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_or_group_is_known_by_its_name_and_by_its_number() {
        let text = |text: &str| Some(text.to_owned());
        let access =
            Access { mode: None, user: text("root"), group: text("7"), allow_uid: vec!["0".into(), "9".into()] };
        let resolved = access.resolve().unwrap();
        assert_eq!((resolved.user, resolved.group, resolved.uids), (Some(0), Some(7), vec![0, 9]));
        for (access, line) in [
            (Access { user: text("no such user"), ..Access::default() }, "there is no user 'no such user'"),
            (Access { group: text("no such group"), ..Access::default() }, "there is no group 'no such group'"),
            (Access { allow_uid: vec!["4294967295".into()], ..Access::default() }, "there is no user '4294967295'"),
        ] {
            assert_eq!(access.resolve().unwrap_err().to_string(), line);
        }
    }
}
