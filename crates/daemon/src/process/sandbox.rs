//! What the process is to be left with: the files of its configuration, and whoever it is to run as.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use egret_confine::{ConfineError, Confinement, Files, Identity, Missing};
use egret_vocabulary::Address;
use egret_vocabulary::Config;
use egret_vocabulary::disk::Bottom;
use egret_vocabulary::schema::{NbdAddr, NbdEndpoint, NbdPlace};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid, chownat};
use thiserror::Error;

use super::sys::{self, User};
use crate::access::number;

/// What the command line says of it.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Whether files and system calls are confined.
    pub on: bool,
    /// Directories for images and sockets that come at run time.
    pub directories: Vec<PathBuf>,
    /// The user to run as, by name or number.
    pub user: Option<String>,
    /// The user's group, if it is not its own.
    pub group: Option<String>,
}

/// What a daemon uses beside the objects of its configuration.
#[derive(Clone, Debug, Default)]
pub struct Places<'a> {
    /// Where monitors and metrics are served.
    pub addresses: Vec<&'a Address>,
    /// The pidfile, which is there already and removed at the end.
    pub pidfile: Option<&'a Path>,
    /// A file that is written, and others that are named after it.
    pub written: Option<&'a Path>,
}

/// Why a daemon is not confined.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// Nobody has this name or number.
    #[error("--user {0}: there is no such user")]
    User(String),
    /// Likewise.
    #[error("--group {0}: there is no such group")]
    Group(String),
    /// Users cannot be looked up.
    #[error("--user, --group: {0}")]
    LookUp(#[from] io::Error),
    /// A socket or the pidfile cannot be given away.
    #[error("cannot give '{path}' to --user: {source}", path = path.display())]
    Give {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What confines.
    #[error(transparent)]
    Confine(#[from] ConfineError),
}

impl Sandbox {
    /// Looks up what `config` and `places` name, for as long as that takes: some may be where nobody answers.
    ///
    /// # Errors
    /// A directory, a user or a group does not exist.
    pub fn look_up(&self, config: &Config, places: &Places<'_>) -> Result<Confinement, SandboxError> {
        let identity = self.identity()?;
        Ok(Confinement { files: self.on.then(|| self.files(config, places)).transpose()?, identity })
    }

    /// Confines the process, before it has threads, to what was [looked up](Self::look_up). Returns who it is to be, which
    /// each thread becomes when it says what it is ([`Bounds::narrow`](egret_confine::Bounds::narrow)), and what the
    /// kernel cannot do.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn begin(confinement: Confinement) -> Result<(Option<Identity>, Missing), SandboxError> {
        let identity = confinement.identity.clone();
        if confinement.files.is_none() && identity.is_none() {
            return Ok((None, Missing::default()));
        }
        Ok((identity, confinement.begin()?))
    }

    fn identity(&self) -> Result<Option<Identity>, SandboxError> {
        let group = match &self.group {
            Some(name) => {
                let known = sys::group_id(name)?.or_else(|| number(name));
                Some(known.ok_or_else(|| SandboxError::Group(name.clone()))?)
            }
            None => None,
        };
        let Some(name) = &self.user else { return Ok(None) };
        if let Some(User { uid, gid }) = sys::user(name)? {
            let gid = group.unwrap_or(gid);
            return Ok(Some(Identity { uid, gid, groups: sys::groups_of(name, gid)? }));
        }
        // A number that nobody has a name for has no group of its own either.
        match (number(name), group) {
            (Some(uid), Some(gid)) => Ok(Some(Identity { uid, gid, groups: vec![gid] })),
            _ => Err(SandboxError::User(name.clone())),
        }
    }

    fn files(&self, config: &Config, places: &Places<'_>) -> Result<Files, SandboxError> {
        let mut files = Files::default();
        for disk in config.node_names().into_iter().filter_map(|name| config.disk(name)) {
            match disk.bottom {
                Bottom::File(image) | Bottom::HostDevice(image) => files.image(Path::new(&image.filename)),
                Bottom::Nbd(nbd) => {
                    if let Ok(NbdPlace { server: NbdEndpoint::Inet(_, port), .. }) = nbd.place() {
                        files.server(port);
                    }
                }
                Bottom::Rbd(rbd) => {
                    // Loads the libraries as well, which is not to be done any more when files are confined. What is
                    // missing is said when the image is opened.
                    let cluster = crate::daemon::cluster_of(rbd);
                    cluster.files().unwrap_or_default().iter().for_each(|path| files.read(Path::new(path)));
                    // Of what decrypts images.
                    ["/dev/random", "/dev/urandom"].iter().for_each(|path| files.read(Path::new(path)));
                    files.connections();
                }
                Bottom::Null(_) => {}
            }
        }
        for lun in config.exports.iter().flat_map(|export| export.luns()).filter(|lun| !lun.pr_file.is_empty()) {
            files.replaced(Path::new(&lun.pr_file));
        }
        for socket in sockets(config, places) {
            files.socket(socket);
        }
        for address in &places.addresses {
            if let Address::Tcp { port, .. } = address {
                files.port(*port);
            }
        }
        if let Some(NbdAddr::Inet(inet)) = config.nbd_server.as_ref().map(|server| &server.addr)
            && let Ok(port) = inet.number()
        {
            files.port(port);
        }
        if let Some(pidfile) = places.pidfile {
            files.removed(pidfile);
        }
        if let Some(written) = places.written {
            files.written(written);
        }
        if std::env::var_os("NOTIFY_SOCKET").is_some_and(|place| place.as_encoded_bytes().starts_with(b"@")) {
            files.abstract_sockets();
        }
        for directory in &self.directories {
            files.directory(directory).map_err(ConfineError::from)?;
        }
        Ok(files)
    }
}

/// Gives what the process has made so far to whom it is about to become, who is to remove it: sockets and the pidfile,
/// unless they were given to somebody already.
///
/// # Errors
/// The file system refuses.
pub fn give(identity: &Identity, config: &Config, places: &Places<'_>) -> Result<(), SandboxError> {
    for path in sockets(config, places).chain(places.pidfile) {
        give_one(identity, path).map_err(|source| SandboxError::Give { path: path.to_owned(), source })?;
    }
    Ok(())
}

/// The UNIX sockets that are made.
fn sockets<'a>(config: &'a Config, places: &Places<'a>) -> impl Iterator<Item = &'a Path> {
    let others = places.addresses.clone().into_iter().filter_map(Address::path);
    config.sockets().map(|(_, path)| path).chain(others)
}

fn give_one(identity: &Identity, path: &Path) -> io::Result<()> {
    // The file itself and no link to another: whoever may write in the directory may have put something in its place.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let found = file.metadata()?;
    let is_made_here = found.file_type().is_socket() || found.file_type().is_file();
    let [our_uid, our_gid] = [rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()];
    if !is_made_here || found.nlink() != 1 || found.uid() != our_uid {
        return Ok(());
    }
    let gid = (found.gid() == our_gid).then(|| Gid::from_raw(identity.gid));
    Ok(chownat(file.as_fd(), "", Some(Uid::from_raw(identity.uid)), gid, AtFlags::EMPTY_PATH)?)
}

#[cfg(test)]
mod tests {
    use egret_confine::ThreadKind;
    use egret_confine::rules::RULES;

    use super::*;

    fn sandbox(user: Option<&str>, group: Option<&str>) -> Sandbox {
        let [user, group] = [user, group].map(|name| name.map(str::to_owned));
        Sandbox { on: true, directories: Vec::new(), user, group }
    }

    #[test]
    fn a_user_is_found_by_name_or_number_with_the_groups_that_it_is_in() {
        let identity = |user, group| sandbox(Some(user), group).identity().unwrap().unwrap();
        let root = identity("root", None);
        assert_eq!((root.uid, root.gid), (0, 0));
        assert!(root.groups.contains(&0));
        assert_eq!(identity("root", Some("12345")).gid, 12345);
        assert_eq!(identity("54321", Some("12345")), Identity { uid: 54321, gid: 12345, groups: vec![12345] });
        assert_eq!(sandbox(None, None).identity().unwrap(), None);
    }

    #[test]
    fn somebody_who_does_not_exist_is_named() {
        let line = |user: Option<&str>, group| sandbox(user, group).identity().unwrap_err().to_string();
        assert_eq!(line(Some("no-such-user"), None), "--user no-such-user: there is no such user");
        // Whose group would it be?
        assert_eq!(line(Some("54321"), None), "--user 54321: there is no such user");
        assert_eq!(line(Some("root"), Some("no-such-group")), "--group no-such-group: there is no such group");
        // To the system it means that nothing changes.
        assert_eq!(line(Some("4294967295"), Some("12345")), "--user 4294967295: there is no such user");
        assert_eq!(line(Some("54321"), Some("4294967295")), "--group 4294967295: there is no such group");
    }

    #[test]
    fn the_page_on_confinement_holds_every_rule() {
        let mut text = String::from("| call | made by | what for |\n|---|---|---|\n");
        // What a debug build makes beyond that is nobody's business.
        for rule in RULES.iter().filter(|rule| !rule.why.ends_with("in a debug build")) {
            let who: Vec<_> = rule.who.iter().map(ToString::to_string).collect();
            let who = if rule.who.len() == ThreadKind::ALL.len() { "all".to_owned() } else { who.join(", ") };
            let shown = if rule.shown.is_empty() { String::new() } else { format!(": {}", rule.shown) };
            text += &format!("| `{}`{shown} | {who} | {} |\n", rule.call, rule.why);
        }
        if cfg!(target_arch = "x86_64") {
            crate::docs::hold("sandbox.md", "from the table of rules", &text);
        }
    }
}
