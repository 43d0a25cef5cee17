//! Loop devices that nobody has to detach.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::path::{Path, PathBuf};

/// A loop device over a file; the kernel detaches it when its last descriptor closes, even that of a killed process.
pub struct LoopDevice {
    path: PathBuf,
    device: File,
}

// From linux/loop.h.
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LOOP_SET_CAPACITY: libc::Ioctl = 0x4C07;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const CONTROL: &str = "/dev/loop-control";

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

const _: () = assert!(size_of::<LoopConfig>() == 304);

/// Whether this process may attach one.
pub(super) fn may_be_had() -> bool {
    rustix::process::geteuid().is_root() && open(Path::new(CONTROL)).is_ok()
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

impl LoopDevice {
    /// Attaches `backing` to a free loop device, with direct I/O to it where its file system can.
    ///
    /// # Errors
    /// No root, or what the kernel has against it.
    pub fn over(backing: &Path) -> io::Result<Self> {
        Self::with_sectors_of(512, backing)
    }

    /// [`over`](Self::over), with sectors of so many bytes.
    ///
    /// # Errors
    /// As there.
    #[allow(unsafe_code)]
    pub fn with_sectors_of(bytes: u32, backing: &Path) -> io::Result<Self> {
        let (control, backing) = (open(Path::new(CONTROL))?, open(backing)?);
        loop {
            // SAFETY: this request takes no argument.
            let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) })?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path)?;
            let direct = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
            let attached = configure(&device, backing.as_raw_fd(), bytes, direct)
                .or_else(|_| configure(&device, backing.as_raw_fd(), bytes, LO_FLAGS_AUTOCLEAR));
            match attached {
                Ok(()) => return Ok(Self { path, device }),
                // Somebody else took it between the two requests.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Has it be as large as what it is over is now.
    ///
    /// # Errors
    /// What the kernel has against it.
    #[allow(unsafe_code)]
    pub fn take_size(&self) -> io::Result<()> {
        // SAFETY: this request takes no argument.
        check(unsafe { libc::ioctl(self.device.as_raw_fd(), LOOP_SET_CAPACITY) }).map(drop)
    }

    /// The device's node.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[allow(unsafe_code)]
fn configure(device: &File, backing: RawFd, block_size: u32, flags: u32) -> io::Result<()> {
    let config = LoopConfig {
        fd: backing as u32,
        block_size,
        ids: [0; 5],
        number_and_encryption: [0; 3],
        flags,
        names_and_reserved: [0; 30],
    };
    // SAFETY: the kernel only reads a `loop_config`, and `config` is one.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) }).map(drop)
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
