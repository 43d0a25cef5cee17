//! The one vocabulary: three objects, spelled as QEMU spells them.
//!
//! | object | is | made by |
//! |---|---|---|
//! | [`IoThread`] | an event loop on a thread of its own | `--object iothread,id=...` |
//! | [`Blockdev`] | a disk, or a layer over one | `--blockdev file,node-name=...` |
//! | [`Export`] | a disk offered to virtual machines | `--export vhost-user-blk,id=...` |
//!
//! The command line, a configuration file and QMP all deserialise into these types, and there is no second schema.
//! Their [`Shape`]s say which keys exist; [`from_value`](Object::from_value) and serde's `Deserialize` both check
//! against them, so an object that exists has only known keys with values in their ranges. What concerns several
//! objects (a reference to an object that does not exist) [`Config`](crate::Config) checks.

mod access;
mod add_fd;
mod blockdev;
mod cpus;
mod descriptor;
mod export;
mod iothread;
mod key;
mod lun;
mod nbd;
mod nbd_client;
mod object;
pub mod options;
mod problem;
mod process;
mod rbd;
mod reference;
mod scalar;
mod secret;
mod throttle_group;
mod tls_creds;
mod validate;
mod words;

#[cfg(test)]
mod tests;

pub use access::{Access, Mode};
pub use add_fd::AddFd;
pub use blockdev::{
    Blkdebug, Blockdev, Cache, Child, Driver, FdSetNumber, Image, InjectError, LARGEST_FD_SET, Null, Raw, SetState,
    Throttle, fd_set_number,
};
pub use cpus::Cpus;
pub use descriptor::Descriptor;
pub use export::{
    Addr, BlkDevice, Device, Export, FdAddr, Kickless, LONGEST_SOCKET_PATH, MemoryFiles, NbdDevice, OnError,
    ScsiDevice, UnixAddr, VQ_MAPPING, VhostUser, VqMapping,
};
pub use iothread::IoThread;
pub use key::{Foreign, Harmless, Key, Shape, Unset, ValueType, Variants};
pub use lun::{Lun, LunAddress};
pub use nbd::{FOREIGN_NBD_ADDR, InetAddr, NBD_SERVER, NO_AUTHZ, NbdAddr, NbdServer};
pub use nbd_client::{Nbd, NbdEndpoint, NbdPlace, ServerAddr, SocketPath, TcpAddr};
pub use object::{OBJECT, Object, read_options, untagged};
pub use problem::{ObjectError, Problem};
pub use process::memory_max;
pub(crate) use process::{MEMORY_MAX, default_memory_max};
pub use rbd::{AuthMode, Encrypt, EncryptionFormat, MonitorAddress, Rbd};
pub use reference::{Row, help, reference, rows};
pub use secret::{Secret, SecretFormat};
pub use throttle_group::{ThrottleAliases, ThrottleGroup, ThrottleLimits, limits_by_name};
pub use tls_creds::{Endpoint, TlsCreds};
pub use validate::{Spelling, validate_arguments};
pub use words::{Word, words};

// The words that objects use, from where they mean something.
pub use egret_disk::{Aio, DetectZeroes, Discard, Locking};
pub use egret_event_loop::MonitorChoice;
pub use egret_polling::PolicyKind;
