//! What there is to open: directories of images and sockets, what the kernel tells of itself, ports.

#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort, PathBeneath, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use crate::missing::Missing;

/// What is asked of the kernel where it has it: files (1), renames (2), truncation (3), ports (4), ioctls of devices (5),
/// abstract sockets and signals (6).
const NEWEST: ABI = ABI::V6;

/// Why files cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A directory that was named.
    #[error("--sandbox-dir {dir}: {source}", dir = dir.display())]
    Directory {
        /// It.
        dir: PathBuf,
        /// What is wrong with it.
        source: std::io::Error,
    },
    /// The kernel refuses what it says it can.
    #[error("the sandbox's files: {0}")]
    Landlock(#[from] RulesetError),
}

/// What the daemon may open. Everything else is out of reach, whoever it runs as.
#[derive(Debug, Default)]
pub struct Files {
    places: Vec<(PathBuf, BitFlags<AccessFs>)>,
    ports: Vec<(u16, AccessNet)>,
    speaks_to_abstract_sockets: bool,
    connects: bool,
}

/// What the daemon wants to do at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To open an image.
    Image,
    /// To make a socket.
    Socket,
    /// To read a file, and put another in its place.
    Replace,
}

impl Use {
    fn access(self) -> BitFlags<AccessFs> {
        match self {
            Self::Image => AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev,
            // The directory is locked meanwhile, and read for that.
            Self::Socket => AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir,
            // The directory is opened, to have its new entry on stable storage.
            Self::Replace => {
                AccessFs::MakeReg
                    | AccessFs::RemoveFile
                    | AccessFs::ReadDir
                    | AccessFs::ReadFile
                    | AccessFs::WriteFile
                    | AccessFs::Truncate
            }
        }
    }
}

/// The places that the daemon was given, for messages.
static REACH: OnceLock<Vec<(PathBuf, BitFlags<AccessFs>)>> = OnceLock::new();

/// What rules are about in /proc, kept open: a directory there that nobody has open is made anew when it is next looked
/// up, and is then another than the one that the rule is about.
static KEPT: OnceLock<Vec<File>> = OnceLock::new();

impl Files {
    /// An image: the directory that it is in, for one that takes its place; of a device the device alone.
    pub fn image(&mut self, path: &Path) {
        // What cannot be found cannot be opened, which is for others to say.
        let Ok(path) = path.canonicalize() else { return };
        let is_device = path.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
        match path.parent() {
            Some(directory) if !is_device => self.add(directory.to_owned(), Use::Image.access()),
            _ => self.add(path, Use::Image.access()),
        }
    }

    /// A socket that is made: its directory, to remove it from.
    pub fn socket(&mut self, path: &Path) {
        self.beside(path, Use::Socket.access());
    }

    /// A file that is written, and made if it is not there, or others that are named after it: its directory, and where a link
    /// leads.
    pub fn written(&mut self, path: &Path) {
        let access = AccessFs::MakeReg | AccessFs::WriteFile | AccessFs::Truncate;
        self.beside(path, access);
        self.beside(&target(path), access);
    }

    /// A file that is read, and that others take the place of: its directory, where a link leads.
    pub fn replaced(&mut self, path: &Path) {
        self.beside(&target(path), Use::Replace.access());
    }

    /// A file that is removed at the end: its directory.
    pub fn removed(&mut self, path: &Path) {
        self.beside(path, AccessFs::RemoveFile.into());
    }

    /// A file that is read: itself alone.
    pub fn read(&mut self, path: &Path) {
        self.add(path.to_owned(), AccessFs::ReadFile.into());
    }

    /// TCP connections, to whatever port: a cluster's daemons have theirs by chance.
    pub fn connections(&mut self) {
        self.connects = true;
    }

    /// A TCP port that is listened on.
    pub fn port(&mut self, port: u16) {
        self.ports.push((port, AccessNet::BindTcp));
    }

    /// A TCP port that is connected to, of any host.
    pub fn server(&mut self, port: u16) {
        self.ports.push((port, AccessNet::ConnectTcp));
    }

    /// Sockets without a file, of whoever there is: one is the service manager's.
    pub fn abstract_sockets(&mut self) {
        self.speaks_to_abstract_sockets = true;
    }

    /// A directory for images, sockets and reservations that come at run time.
    ///
    /// # Errors
    /// There is none.
    pub fn directory(&mut self, dir: &Path) -> Result<(), FilesError> {
        let failed = |source| FilesError::Directory { dir: dir.to_owned(), source };
        let found = dir.canonicalize().map_err(failed)?;
        if !found.is_dir() {
            return Err(failed(std::io::Error::from(std::io::ErrorKind::NotADirectory)));
        }
        self.add(found, Use::Image.access() | Use::Socket.access() | Use::Replace.access());
        Ok(())
    }

    fn beside(&mut self, path: &Path, access: BitFlags<AccessFs>) {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if let Some(Ok(directory)) = path.parent().map(Path::canonicalize) {
            self.add(directory, access);
        }
    }

    fn add(&mut self, place: PathBuf, access: BitFlags<AccessFs>) {
        self.places.push((place, access));
    }

    /// Confines the calling thread, and those that it starts from now on.
    pub(crate) fn restrict(self, missing: &mut Missing) -> Result<(), FilesError> {
        let mut scopes = BitFlags::from(Scope::Signal);
        if !self.speaks_to_abstract_sockets {
            scopes |= Scope::AbstractUnixSocket;
        }
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(if self.connects { AccessNet::BindTcp.into() } else { AccessNet::from_all(NEWEST) })?
            .scope(scopes)?
            .create()?;
        let always = OF_EVERY_DAEMON.map(|(place, need)| (PathBuf::from(place), need.access()));
        let mut kept = Vec::new();
        for (place, access) in self.places.iter().chain(&always) {
            // What is not there is missed by whoever opens it.
            let Ok(found) = File::options().read(true).custom_flags(libc::O_PATH).open(place) else { continue };
            let access = if place.is_dir() { *access } else { *access & AccessFs::from_file(NEWEST) };
            rules = rules.add_rule(PathBeneath::new(&found, access))?;
            if place.starts_with("/proc") {
                kept.push(found);
            }
        }
        let _ = KEPT.set(kept);
        // What is not asked for of the kernel needs no leave.
        let connects = |access| self.connects && access == AccessNet::ConnectTcp;
        for (port, access) in self.ports.iter().filter(|(_, access)| !connects(*access)) {
            rules = rules.add_rule(NetPort::new(*port, *access))?;
        }
        let status = rules.restrict_self()?;
        if let Some(what) = lacking(&status.landlock) {
            missing.add(what);
        }
        if status.ruleset != RulesetStatus::NotEnforced {
            let _ = REACH.set(self.places);
        }
        Ok(())
    }
}

/// What a daemon needs whatever it serves.
const OF_EVERY_DAEMON: [(&str, Need); 8] = [
    // Limits of block devices; /sys/dev/block leads here.
    ("/sys/devices", Need::Read),
    // How I/O threads fare.
    ("/proc/self", Need::Read),
    // Why there is no io_uring.
    ("/proc/sys/kernel/io_uring_disabled", Need::Read),
    // Whether the host has lost its power since reservations were stored.
    ("/proc/sys/kernel/random/boot_id", Need::Read),
    // Users and groups by name.
    ("/etc/nsswitch.conf", Need::Read),
    ("/etc/passwd", Need::Read),
    ("/etc/group", Need::Read),
    ("/dev/null", Need::ReadAndWrite),
];

#[derive(Clone, Copy)]
enum Need {
    Read,
    ReadAndWrite,
}

impl Need {
    fn access(self) -> BitFlags<AccessFs> {
        match self {
            Self::Read => AccessFs::ReadFile.into(),
            Self::ReadAndWrite => AccessFs::ReadFile | AccessFs::WriteFile,
        }
    }
}

/// Where a link leads; the file may not be there yet.
fn target(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// What this kernel's Landlock lacks of what is asked for.
fn lacking(status: &LandlockStatus) -> Option<String> {
    let has = match status {
        LandlockStatus::Available { effective_abi, .. } => *effective_abi,
        LandlockStatus::NotEnabled => {
            return Some("files and ports are not confined (Landlock is not enabled: lsm=)".into());
        }
        _ => return Some("files and ports are not confined (this kernel has no Landlock)".into()),
    };
    let later = [
        (ABI::V3, "truncating files (Linux 6.2)"),
        (ABI::V4, "TCP ports (Linux 6.7)"),
        (ABI::V5, "ioctls of devices (Linux 6.10)"),
        (ABI::V6, "abstract sockets and signals (Linux 6.12)"),
    ];
    let lacks: Vec<_> = later.into_iter().filter(|(since, _)| has < *since).map(|(_, what)| what).collect();
    (!lacks.is_empty()).then(|| format!("Landlock does not confine {}", lacks.join(", ")))
}

/// Why it cannot be done at a path, if it is the sandbox that forbids it: one line's end.
pub fn refusal(path: &Path, what: Use) -> Option<String> {
    let reach = REACH.get()?;
    // A device may be within reach without its directory.
    let place = match (path.canonicalize(), what) {
        (Ok(image), Use::Image) => image,
        _ => std::path::absolute(path).ok()?.parent()?.canonicalize().ok()?,
    };
    if reach.iter().any(|(reached, access)| place.starts_with(reached) && access.contains(what.access())) {
        return None;
    }
    let directory = if what == Use::Image { place.parent()? } else { &place }.display();
    Some(format!("the sandbox keeps '{directory}' out of reach; start egret with --sandbox-dir {directory}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_lacks_is_said_once_for_each_kind_of_thing() {
        let available = |abi| LandlockStatus::Available { effective_abi: abi, kernel_abi: None };
        assert_eq!(lacking(&available(ABI::V6)), None);
        let line =
            "Landlock does not confine ioctls of devices (Linux 6.10), abstract sockets and signals (Linux 6.12)";
        assert_eq!(lacking(&available(ABI::V4)).unwrap(), line);
        let line = "files and ports are not confined (this kernel has no Landlock)";
        assert_eq!(lacking(&LandlockStatus::NotImplemented).unwrap(), line);
    }
}
