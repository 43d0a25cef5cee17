//! Directories, images and loop devices that vanish when the test ends, however it ends.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

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

/// Whether this process may do what needs root; if not, says so under the test's name.
pub fn is_root_or_skips(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        // Not by `eprintln!`, which the test harness keeps to itself.
        let _ = writeln!(io::stderr(), "{test}: skipped, because it needs root for a loop device");
    }
    root
}

/// A loop device over a file; the kernel detaches it when its last descriptor closes, even that of a killed process.
pub struct LoopDevice {
    path: PathBuf,
    _open: File,
}

// From linux/loop.h.
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_config`, whose `struct loop_info64` is named only as far as its flags.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    ids: [u64; 5],
    number_and_encryption: [u32; 3],
    flags: u32,
    names_and_reserved: [u64; 30],
}

impl LoopDevice {
    /// Attaches `backing` to a free loop device, with direct I/O to it where its file system can.
    pub fn over(backing: &Path) -> io::Result<Self> {
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let (control, backing) = (open(Path::new("/dev/loop-control"))?, open(backing)?);
        loop {
            // SAFETY: this request takes no argument.
            let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path)?;
            let direct = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
            let attached = configure(&device, backing.as_raw_fd(), direct)
                .or_else(|_| configure(&device, backing.as_raw_fd(), LO_FLAGS_AUTOCLEAR));
            match attached {
                Ok(()) => return Ok(Self { path, _open: device }),
                // Somebody else took it between the two requests.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The device's node.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn configure(device: &File, backing: RawFd, flags: u32) -> io::Result<()> {
    let config = LoopConfig {
        fd: backing as u32,
        block_size: 512,
        ids: [0; 5],
        number_and_encryption: [0; 3],
        flags,
        names_and_reserved: [0; 30],
    };
    // SAFETY: the kernel only reads a `loop_config`, and `config` has its size: 304 bytes.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) }).map(drop)
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

const _: () = assert!(size_of::<LoopConfig>() == 304);
