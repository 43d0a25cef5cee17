//! Certificates: of a CA, a server and a client, all in one directory.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::scratch::Scratch;

/// Makes a CA, and what it has certified; `more` as the script has it. `None` where there is nothing to make them with.
pub fn make(scratch: &Scratch, name: &str, more: &[&str]) -> Option<PathBuf> {
    if Command::new("openssl").arg("version").output().is_err() {
        egret_needs::this_test_lacks("openssl");
        return None;
    }
    let path = scratch.path(name);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/make-certificates");
    let made = Command::new(script).arg(&path).args(more).output().expect("our script");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(path)
}

/// A directory with some of another's files.
pub fn part(scratch: &Scratch, name: &str, of: &Path, files: &[&str]) -> PathBuf {
    let path = scratch.path(name);
    std::fs::create_dir(&path).expect("a new directory");
    for file in files {
        std::fs::copy(of.join(file), path.join(file)).expect("a file");
    }
    path
}
