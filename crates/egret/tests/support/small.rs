//! A file system that fills up.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::scratch::Scratch;

/// A file system in memory with so many bytes, until it is dropped.
pub struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    /// Mounts it. That needs root.
    pub fn mount(scratch: &Scratch, bytes: u64) -> Self {
        let at = scratch.image_path("small");
        fs::create_dir(&at).expect("our own directory");
        let options = format!("size={bytes}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&at).status();
        assert!(mounted.expect("mount").success());
        Self(at)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Takes up so many bytes until the file is removed.
    pub fn fill(&self, bytes: u64) -> PathBuf {
        let ballast = self.0.join("ballast");
        fs::write(&ballast, vec![1; bytes as usize]).expect("there is room");
        ballast
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
