//! A file that says which process the daemon is, and that there is no other.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt as _, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use thiserror::Error;

/// How long its owner may take to die.
const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 3000 });
/// How often one looks meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A file that holds this process's number, locked as long as it lives and removed when dropped.
///
/// A file that a killed daemon left behind has no lock on it and is taken over.
#[derive(Debug)]
pub struct Pidfile {
    path: PathBuf,
    file: File,
}

/// Why there is no pidfile.
#[derive(Debug, Error)]
pub enum PidfileError {
    /// A daemon that lives has it.
    #[error("pidfile {path}: process {owner} is alive and holds it; stop it, or use another file", path = path.display())]
    Taken {
        /// The file.
        path: PathBuf,
        /// What it says: a process number, as a rule.
        owner: String,
    },
    /// It cannot be made.
    #[error("pidfile {path}: {error}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

impl Pidfile {
    /// Makes the file, or takes over one that nobody holds, or is about to hold no more: a process that was killed takes
    /// its time to die, as its disks do with what it asked of them.
    ///
    /// # Errors
    /// Another process holds it, or the file cannot be made.
    pub fn create(path: &Path) -> Result<Self, PidfileError> {
        // An absolute path is still the right one when the working directory has changed.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let patience_ends = Instant::now() + PATIENCE;
        let locked = loop {
            match Self::lock(&path) {
                Ok(None) if Instant::now() < patience_ends => thread::sleep(LOOK_AGAIN),
                locked => break locked,
            }
        };
        match locked {
            Ok(Some(file)) => Ok(Self { path, file }),
            Ok(None) => {
                let owner = std::fs::read_to_string(&path).unwrap_or_default();
                let owner = owner.lines().next().filter(|line| !line.is_empty()).unwrap_or("?").to_owned();
                Err(PidfileError::Taken { path, owner })
            }
            Err(error) => Err(PidfileError::Io { path, error }),
        }
    }

    /// `None` if another process holds it.
    fn lock(path: &Path) -> io::Result<Option<File>> {
        loop {
            let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            // /dev/null would be removed in the end, which is everybody's.
            if !file.metadata()?.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file; use another name"));
            }
            if !may_be_pidfile(&file)? {
                let text = "it holds something other than a process's number, and is left as it is; use another name";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            // The last owner may have removed the file between our opening and our locking it.
            if is_at(&file, path) {
                let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
                // An empty one would be taken for a process's.
                written.inspect_err(|_| drop(std::fs::remove_file(path)))?;
                return Ok(Some(file));
            }
        }
    }

    /// Removes the file, which stays locked.
    pub fn remove(&self) {
        // Only if it is still ours: an operator may have put another in its place.
        if is_at(&self.file, &self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Whether there is a process's number in it, or nothing: no image or other file that was named by mistake, which would be
/// emptied and removed.
fn may_be_pidfile(file: &File) -> io::Result<bool> {
    let mut start = [0; 32];
    let count = file.read_at(&mut start, 0)?;
    Ok(count < start.len() && start[..count].trim_ascii().iter().all(u8::is_ascii_digit))
}

/// Whether `path` leads to `file`.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::refuse::refuse;

    fn content(path: &Path) -> String {
        let mut text = String::new();
        File::open(path).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_pidfile_holds_the_process_number_and_goes_with_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let pidfile = Pidfile::create(&path).unwrap();
        assert_eq!(content(&path), format!("{}\n", std::process::id()));
        drop(pidfile);
        assert!(!path.exists());
    }

    #[test]
    fn a_pidfile_that_there_is_no_room_for_is_not_left_behind_without_a_number() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let refused = std::thread::scope(|scope| {
            let create = || {
                refuse(libc::SYS_write, libc::ENOSPC);
                Pidfile::create(&path).map(drop)
            };
            scope.spawn(create).join().unwrap()
        });
        assert!(matches!(refused, Err(PidfileError::Io { error, .. }) if error.kind() == io::ErrorKind::StorageFull));
        assert!(!path.exists());
    }

    #[test]
    fn a_pidfile_whose_owner_lives_is_left_alone_and_its_owner_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let _owner = Pidfile::create(&path).unwrap();
        let error = Pidfile::create(&path).unwrap_err().to_string();
        let expected = format!("pidfile {}: process {} is alive", path.display(), std::process::id());
        assert!(error.starts_with(&expected), "{error}");
        assert!(path.exists());
    }

    #[test]
    fn a_pidfile_that_nobody_holds_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        std::fs::write(&path, "12345678901234567890\n").unwrap();
        let _pidfile = Pidfile::create(&path).unwrap();
        assert_eq!(content(&path), format!("{}\n", std::process::id()));
    }

    #[test]
    fn a_pidfile_that_was_replaced_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let pidfile = Pidfile::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "somebody else's").unwrap();
        drop(pidfile);
        assert_eq!(content(&path), "somebody else's");
    }

    #[test]
    fn what_is_no_regular_file_is_no_pidfile_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        let [null, pipe] = ["null", "pipe"].map(|name| directory.path().join(name));
        std::os::unix::fs::symlink("/dev/null", &null).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [null, pipe] {
            let error = Pidfile::create(&path).unwrap_err().to_string();
            assert_eq!(error, format!("pidfile {}: it is no regular file; use another name", path.display()));
            assert!(path.symlink_metadata().is_ok(), "{}", path.display());
        }
    }

    #[test]
    fn a_file_that_holds_anything_but_a_number_is_refused_and_stays_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        for content in [&[0; 1 << 20][..], &[b'1'; 512], b"not a pid\n", b"1 2\n"] {
            std::fs::write(&path, content).unwrap();
            let error = Pidfile::create(&path).unwrap_err().to_string();
            assert!(error.contains("it holds something other than a process's number"), "{error}");
            assert!(std::fs::read(&path).unwrap() == content);
        }
    }

    #[test]
    fn a_pidfile_in_no_directory_says_where() {
        let error = Pidfile::create(Path::new("/nonexistent/pid")).unwrap_err().to_string();
        assert_eq!(error, "pidfile /nonexistent/pid: No such file or directory (os error 2)");
    }
}
