//! The files that persistent reservations are kept in (`pr-file`).
//!
//! A change is written to a new file, which takes the place of the one before when it is on stable storage; and it has
//! happened when that is so of the directory, too. A thread of each file's own does this, so that nobody else waits for a
//! file system that hangs.
//!
//! The file is JSON. Whoever has it holds a lock on it, and on the one that is to follow it before that takes its place:
//! no two units can have the same.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use egret_confine::{Bounds, ThreadKind, Use, refusal};
use egret_disk::{LOCK_PATIENCE, LOOK_AGAIN};
use egret_export::{Change, Keeper, LunConfig, Naa, NexusId, Registered};
use rustix::fs::{CWD, FlockOperation, flock, renameat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// The format that this version writes, and the only one that it reads.
const VERSION: u32 = 1;

/// More than any file of reservations has, in bytes.
const LONGEST: u64 = 1 << 20;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Why a unit cannot have its reservations from a file, or keep them there.
#[derive(Debug, thiserror::Error)]
#[error("pr-file '{path}' {cause}", path = path.display())]
pub struct PrFileError {
    path: PathBuf,
    cause: Cause,
}

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("cannot be {0}: {1}")]
    Io(&'static str, io::Error),
    #[error("cannot be {0}: {1}")]
    Confined(&'static str, String),
    #[error("cannot be written: its thread has died")]
    NoThread,
    #[error("is not a regular file")]
    NotAFile,
    #[error("is another unit's, of this daemon or another")]
    Locked,
    #[error(
        "is damaged ({0}); put back a copy of it, or remove it to let everybody in who was fenced and have nobody \
         registered"
    )]
    Damaged(String),
    #[error("is of format {0}, and this egret knows format {VERSION} alone: start the one that wrote it")]
    Version(u64),
    #[error("has the reservations of unit '{found}', and this is unit '{wanted}'")]
    AnotherUnit { found: String, wanted: String },
}

impl PrFileError {
    /// Of a file whose contents make no sense.
    pub(super) fn damaged(path: &Path, why: impl ToString) -> Self {
        Self { path: path.to_owned(), cause: Cause::Damaged(why.to_string()) }
    }
}

/// The contents.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Stored {
    egret_reservations: u32,
    /// What guests tell the unit by.
    unit: String,
    aptpl: bool,
    /// The host's boot during which this was written.
    boot: String,
    registrations: Vec<Registration>,
    reservation: Option<Reservation>,
    /// Of all the rest.
    checksum: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Registration {
    initiator: u64,
    port: u16,
    key: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reservation {
    r#type: u8,
    initiator: u64,
    port: u16,
}

impl Stored {
    fn new(unit: &str, boot: &str, table: &Registered) -> Self {
        let registration = |&(NexusId { initiator, port }, key): &(_, u64)| Registration { initiator, port, key };
        let reservation = |(r#type, NexusId { initiator, port })| Reservation { r#type, initiator, port };
        let mut stored = Self {
            egret_reservations: VERSION,
            unit: unit.to_owned(),
            aptpl: table.aptpl,
            boot: boot.to_owned(),
            registrations: table.registrations.iter().map(registration).collect(),
            reservation: table.reservation.map(reservation),
            checksum: 0,
        };
        stored.checksum = checksum(&stored.text());
        stored
    }

    fn text(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    fn parse(text: &str) -> Result<Self, Cause> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Version {
            egret_reservations: u64,
        }
        let damaged = |e: serde_json::Error| Cause::Damaged(e.to_string());
        let Version { egret_reservations: version } = serde_json::from_str(text).map_err(damaged)?;
        if version != u64::from(VERSION) {
            return Err(Cause::Version(version));
        }
        let mut stored: Self = serde_json::from_str(text).map_err(damaged)?;
        let found = std::mem::take(&mut stored.checksum);
        if checksum(&stored.text()) != found {
            return Err(Cause::Damaged("its checksum is of something else".to_owned()));
        }
        Ok(stored)
    }

    fn table(&self) -> Registered {
        let Self { egret_reservations: _, unit: _, aptpl, boot: _, registrations, reservation, checksum: _ } = self;
        Registered {
            aptpl: *aptpl,
            registrations: { registrations.iter() }
                .map(|&Registration { initiator, port, key }| (NexusId { initiator, port }, key))
                .collect(),
            reservation: { reservation.as_ref() }
                .map(|&Reservation { r#type, initiator, port }| (r#type, NexusId { initiator, port })),
        }
    }
}

/// FNV-1a.
fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The reservations that a file has for the unit of this configuration, and who keeps them there.
///
/// # Errors
///
/// It is damaged, another's, or cannot be written.
pub(super) fn open(path: &Path, config: &LunConfig) -> Result<(Registered, Arc<dyn Keeper>), PrFileError> {
    let unit = match config.naa {
        Some(Naa::Short(name)) => format!("{} {name:016x}", config.serial),
        Some(Naa::Long(name)) => format!("{} {name:032x}", config.serial),
        None => config.serial.clone(),
    };
    let boot = std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
    PrFile::open(path, unit, boot).map_err(|cause| PrFileError { path: path.to_owned(), cause })
}

/// A file that is ours.
struct PrFile {
    path: PathBuf,
    unit: String,
    boot: String,
    /// The file at `path`, locked.
    locked: Option<File>,
    /// Whether it has got its place, and the directory may not have it on stable storage.
    is_new: bool,
}

impl PrFile {
    fn open(path: &Path, unit: String, boot: String) -> Result<(Registered, Arc<dyn Keeper>), Cause> {
        // Where a link leads; the file may not be there yet.
        let path = std::path::absolute(path).map_err(|e| Cause::Io("found", e))?;
        let path = path.canonicalize().unwrap_or(path);
        let mut file = Self { path, unit, boot, locked: None, is_new: false };
        let table = file.load()?;
        let ((sender, changes), (began, begins)) = (channel(), channel());
        let (bounds, first) = (Bounds::of_this_thread(), table.clone());
        let thread = move || {
            bounds.narrow(ThreadKind::Reservations);
            // Notes that the host has started anew, and shows that the file can be written, by whom this thread is now.
            let stored = file.store(&first).map_err(|e| match file.locked {
                None if e.kind() == io::ErrorKind::WouldBlock => Cause::Locked,
                _ => file.explain("written", e),
            });
            let is_ours = stored.is_ok();
            let _ = began.send(stored);
            if is_ours {
                file.run(first, &changes);
            }
        };
        // Nobody waits for its end: it has none while its file system hangs.
        match std::thread::Builder::new().name("egret-reserved".to_owned()).stack_size(256 << 10).spawn(thread) {
            Ok(_) => begins.recv().unwrap_or(Err(Cause::NoThread))?,
            Err(e) => return Err(Cause::Io("written, for want of a thread", e)),
        }
        Ok((table, Arc::new(Pen(sender))))
    }

    /// Locks what is there, and reads it.
    fn load(&mut self) -> Result<Registered, Cause> {
        let Some(mut file) = self.lock()? else { return Ok(Registered::default()) };
        let mut text = String::new();
        let read = (&mut file).take(LONGEST).read_to_string(&mut text);
        read.map_err(|e| match e.kind() {
            io::ErrorKind::InvalidData => Cause::Damaged("it is not text".to_owned()),
            _ => self.explain("read", e),
        })?;
        self.locked = Some(file);
        let stored = Stored::parse(&text)?;
        if stored.unit != self.unit {
            return Err(Cause::AnotherUnit { found: stored.unit, wanted: self.unit.clone() });
        }
        // SPC-5, preserving persistent reservations and registrations: without APTPL they end with the power. A daemon that
        // dies is not the power.
        let has_lost_power = !self.boot.is_empty() && stored.boot != self.boot;
        if has_lost_power && !stored.aptpl && !stored.registrations.is_empty() {
            tracing::info!("unit '{}': the host was restarted, and without APTPL its reservations end", self.unit);
            return Ok(Registered::default());
        }
        Ok(stored.table())
    }

    /// The file, locked, if there is one.
    fn lock(&self) -> Result<Option<File>, Cause> {
        let end = Instant::now() + LOCK_PATIENCE;
        loop {
            let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
            let file = match OpenOptions::new().read(true).custom_flags(flags).open(&self.path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(self.explain("read", e)),
            };
            let found = file.metadata().map_err(|e| self.explain("read", e))?;
            if !found.is_file() {
                return Err(Cause::NotAFile);
            }
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Another may have taken its place before it was locked.
                Ok(()) if self.path.metadata().is_ok_and(|now| now.ino() == found.ino()) => return Ok(Some(file)),
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(LOOK_AGAIN),
                Err(Errno::WOULDBLOCK) => return Err(Cause::Locked),
                Err(e) => return Err(self.explain("locked", e.into())),
            }
        }
    }

    /// Puts a table in the file's place.
    fn store(&mut self, table: &Registered) -> io::Result<()> {
        let mut next = self.path.clone().into_os_string();
        next.push(".new");
        let next = PathBuf::from(next);
        // One that was left behind may be another's, and is cut off when it is locked.
        let options = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).to_owned();
        let mut file = options.clone().custom_flags(libc::O_NOFOLLOW).open(&next)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let text = Stored::new(&self.unit, &self.boot, table).text();
        file.set_len(0)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        let directory = File::open(self.path.parent().unwrap_or(Path::new("/")))?;
        renameat(CWD, &next, CWD, &self.path)?;
        (self.locked, self.is_new) = (Some(file), true);
        rustix::fs::fsync(directory.as_fd())?;
        self.is_new = false;
        Ok(())
    }

    /// Stores what comes, until there is nobody left to send it. `held` is what holds now.
    fn run(mut self, mut held: Registered, changes: &Receiver<(Registered, Change)>) {
        let mut failing = false;
        for (table, change) in changes {
            let stored = self.store(&table);
            // The change has failed, and the next daemon would find it done. If this fails, too, it may.
            if stored.is_err() && self.is_new {
                let _ = self.store(&held);
            }
            match &stored {
                Err(e) if !failing => tracing::error!(
                    "pr-file '{}' cannot be written: {e}; commands that change reservations of unit '{}' fail",
                    self.path.display(),
                    self.unit
                ),
                Ok(()) if failing => tracing::warn!("pr-file '{}' can be written again", self.path.display()),
                _ => {}
            }
            failing = stored.is_err();
            if stored.is_ok() {
                held = table;
                change.is_stored();
            }
        }
    }

    fn explain(&self, what: &'static str, e: io::Error) -> Cause {
        let denied = matches!(Errno::from_io_error(&e), Some(Errno::ACCESS | Errno::PERM));
        match refusal(&self.path, Use::Replace).filter(|_| denied) {
            Some(why) => Cause::Confined(what, why),
            None => Cause::Io(what, e),
        }
    }
}

/// Sends tables to the thread of a file.
#[derive(Debug)]
struct Pen(Sender<(Registered, Change)>);

impl Keeper for Pen {
    fn store(&self, table: Registered, change: Change) {
        // Without a thread the change is dropped, and has failed.
        let _ = self.0.send((table, change));
    }
}

#[cfg(test)]
mod tests;
