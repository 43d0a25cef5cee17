//! Who may connect to a UNIX socket, in the system's own terms.

use std::io;

use egret_export as export;
use egret_vocabulary::schema::{Access, Mode};

use crate::process::sys::{group_id, user_id};

/// Looks up the users and groups that `access` names.
///
/// # Errors
/// There is no such user or group.
pub(crate) fn resolve(access: &Access) -> io::Result<export::Access> {
    let Access { mode, user: owner, group, allow_uid } = access;
    let user = |name: &String| find("user", name, user_id);
    Ok(export::Access {
        mode: mode.map(|Mode(mode)| mode),
        user: owner.as_ref().map(user).transpose()?,
        group: group.as_ref().map(|name| find("group", name, group_id)).transpose()?,
        uids: allow_uid.iter().map(user).collect::<io::Result<_>>()?,
    })
}

/// The number of a user or group, which need not have a name.
pub(crate) fn number(text: &str) -> Option<u32> {
    // The largest means "none" to the system.
    text.parse().ok().filter(|number| *number < u32::MAX)
}

/// A user or group by its name, or else by its number.
fn find(noun: &str, name: &str, by_name: fn(&str) -> io::Result<Option<u32>>) -> io::Result<u32> {
    by_name(name)?.or_else(|| number(name)).ok_or_else(|| io::Error::other(format!("there is no {noun} '{name}'")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_or_group_is_known_by_its_name_and_by_its_number() {
        let text = |text: &str| Some(text.to_owned());
        let access =
            Access { mode: None, user: text("root"), group: text("7"), allow_uid: vec!["0".into(), "9".into()] };
        let resolved = resolve(&access).unwrap();
        assert_eq!((resolved.user, resolved.group, resolved.uids), (Some(0), Some(7), vec![0, 9]));
        for (access, line) in [
            (Access { user: text("no such user"), ..Access::default() }, "there is no user 'no such user'"),
            (Access { group: text("no such group"), ..Access::default() }, "there is no group 'no such group'"),
            (Access { allow_uid: vec!["4294967295".into()], ..Access::default() }, "there is no user '4294967295'"),
        ] {
            assert_eq!(resolve(&access).unwrap_err().to_string(), line);
        }
    }
}
