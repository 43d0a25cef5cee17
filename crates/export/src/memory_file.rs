//! Memory of our own that a client gets a descriptor of.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// Memory of that length, which it keeps whatever the client does; other seals may be put on it, too.
pub(crate) fn memory_file(name: &str, len: u64, more: SealFlags) -> io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | more)?;
    Ok(file)
}
