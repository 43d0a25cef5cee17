//! Directories and images that vanish when the test ends, however it ends.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use egret_faultdisk::FaultDisk;

/// One test's own places: a short one for sockets, and one on a real file system for images.
pub struct Scratch {
    sockets: tempfile::TempDir,
    images: tempfile::TempDir,
}

impl Scratch {
    /// Makes both.
    pub fn new() -> Self {
        let builder = || {
            let mut builder = tempfile::Builder::new();
            builder.prefix("egret-");
            builder
        };
        Self {
            // A socket's path has 107 bytes, and a target directory may lie deep.
            sockets: builder().tempdir().expect("a directory for sockets"),
            // A temporary directory may be a tmpfs, which knows no direct I/O before Linux 6.6.
            images: builder().tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for images"),
        }
    }

    /// A path, for a socket or a pidfile, where nothing is yet.
    pub fn path(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// A new image of `len` zero bytes.
    pub fn image(&self, name: &str, len: u64) -> PathBuf {
        let path = self.image_path(name);
        File::create(&path).and_then(|file| file.set_len(len)).expect("an image file");
        path
    }

    /// A disk of `len` zero bytes that fails as it is told to. It needs root and FUSE.
    pub fn fault_disk(&self, len: u64) -> FaultDisk {
        let folder = self.path("faulty");
        fs::create_dir(&folder).expect("our own directory");
        let image = File::options().read(true).write(true).open(self.image("faulty", len)).expect("an image file");
        FaultDisk::mount(image, &folder).expect("FUSE")
    }

    /// Where [`image`](Self::image) puts an image of that name.
    pub fn image_path(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// The names of everything in the directory for sockets.
    pub fn left_behind(&self) -> Vec<String> {
        let entries = fs::read_dir(self.sockets.path()).expect("our own directory");
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
    }
}

/// Writes a program of the shell.
pub fn write_script(path: &Path, text: &str) {
    // By another process: who forks here meanwhile would have it open for writing, and nobody could execute it.
    let write = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    let written = Command::new("sh").args(["-c", write]).arg(path).arg(text).status();
    assert!(written.expect("a shell").success());
}

/// Whether this process may do what needs root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether this process may do what needs root; if not, says so under the test's name, and what for.
pub fn is_root_or_skips(what: &str) -> bool {
    let root = is_root();
    if !root {
        egret_needs::this_test_lacks(format_args!("root {what}"));
    }
    root
}
