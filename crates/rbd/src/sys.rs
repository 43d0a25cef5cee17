//! librados and librbd as they are: what is called of them, and how they are loaded when they are first needed.
//!
//! Written after `rados/librados.h` and `rbd/librbd.h` of Ceph 16.2, whose functions later releases have unchanged.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t`, `rbd_completion_t`.
pub(crate) type Handle = *mut c_void;

/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub(crate) const EXCLUSIVE: c_int = 0;
/// `EVENT_TYPE_EVENTFD`.
pub(crate) const EVENTFD: c_int = 2;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
pub(crate) const THICK: c_int = 1;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
pub(crate) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;

/// `rbd_image_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ImageInfo {
    size: u64,
    pub(crate) object_size: u64,
    objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

impl ImageInfo {
    pub(crate) const NONE: Self = Self {
        size: 0,
        object_size: 0,
        objects: 0,
        order: 0,
        block_name_prefix: [0; 24],
        parent_pool: 0,
        parent_name: [0; 96],
    };
}

/// `rbd_image_watcher_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Watcher {
    pub(crate) address: *mut c_char,
    pub(crate) id: i64,
    pub(crate) cookie: u64,
}

/// `rbd_encryption_luks1_format_options_t`, and that of LUKS2, which is the same.
#[repr(C)]
pub(crate) struct LuksOptions {
    pub(crate) algorithm: c_int,
    pub(crate) passphrase: *const c_char,
    pub(crate) length: usize,
}

/// Declares the functions of a library that are called.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident of $file:literal in $package:literal {$(
        $function:ident($($argument:ty),*) $(-> $result:ty)?;
    )+}) => {
        $(#[$doc])*
        pub(crate) struct $name {$(
            pub(crate) $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,
        )+}

        impl $name {
            fn load() -> Result<Self, LoadError> {
                let library = Library::open($file, $package)?;
                Ok(Self {$(
                    // SAFETY: the library has the function as its header declares it.
                    $function: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                            library.symbol(stringify!($function))?,
                        )
                    },
                )+})
            }
        }
    };
}

functions! {
    /// librados: clusters.
    Rados of "librados.so.2" in "librados2" {
        rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
        rados_conf_read_file(Handle, *const c_char) -> c_int;
        rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
        rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
        rados_connect(Handle) -> c_int;
        rados_shutdown(Handle);
        rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
        rados_ioctx_set_namespace(Handle, *const c_char);
        rados_ioctx_destroy(Handle);
        rados_wait_for_latest_osdmap(Handle) -> c_int;
    }
}

functions! {
    /// librbd: images.
    Rbd of "librbd.so.1" in "librbd1" {
        rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_close(Handle) -> c_int;
        rbd_stat(Handle, *mut ImageInfo, usize) -> c_int;
        rbd_get_size(Handle, *mut u64) -> c_int;
        rbd_get_features(Handle, *mut u64) -> c_int;
        rbd_resize2(Handle, u64, bool, unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int, *mut c_void) -> c_int;
        rbd_flush(Handle) -> c_int;
        rbd_update_watch(Handle, *mut u64, unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;
        rbd_update_unwatch(Handle, u64) -> c_int;
        rbd_watchers_list(Handle, *mut Watcher, *mut usize) -> c_int;
        rbd_watchers_list_cleanup(*mut Watcher, usize);
        rbd_metadata_get(Handle, *const c_char, *mut c_char, *mut usize) -> c_int;
        rbd_metadata_set(Handle, *const c_char, *const c_char) -> c_int;
        rbd_invalidate_cache(Handle) -> c_int;
        rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
        rbd_lock_acquire(Handle, c_int) -> c_int;
        rbd_lock_release(Handle) -> c_int;
        rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
        rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
        rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
        rbd_set_image_notification(Handle, c_int, c_int) -> c_int;
        rbd_poll_io_events(Handle, *mut Handle, c_int) -> c_int;
        rbd_aio_create_completion(*mut c_void, Option<unsafe extern "C" fn(Handle, *mut c_void)>, *mut Handle) -> c_int;
        rbd_aio_get_return_value(Handle) -> isize;
        rbd_aio_get_arg(Handle) -> *mut c_void;
        rbd_aio_release(Handle);
        rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
        rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
        rbd_aio_flush(Handle, Handle) -> c_int;
        rbd_encryption_load(Handle, c_int, *mut c_void, usize) -> c_int;
    }
}

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// There is none.
    #[error(
        "driver=rbd needs {file}, which cannot be loaded ({why}); install it, on Debian from the package {package}"
    )]
    Missing {
        /// The library.
        file: &'static str,
        /// What the loader says.
        why: String,
        /// What has it.
        package: &'static str,
    },
    /// One that is too old.
    #[error(
        "driver=rbd needs {function}, which this {file} has not: it is of a Ceph before 16.2; install a newer {package}"
    )]
    Lacks {
        /// The library.
        file: &'static str,
        /// What it lacks.
        function: &'static str,
        /// What has it.
        package: &'static str,
    },
}

/// A library that is loaded, for good.
struct Library {
    handle: *mut c_void,
    file: &'static str,
    package: &'static str,
}

impl Library {
    fn open(file: &'static str, package: &'static str) -> Result<Self, LoadError> {
        let name = CString::new(file).unwrap_or_default();
        // SAFETY: the name ends with a zero. What its constructors do is the library's business.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: it returns text of the loader's that is valid until its next error on this thread, or nothing.
            let why = unsafe { libc::dlerror().as_ref().map(|text| CStr::from_ptr(text)) };
            let why = why.map_or_else(|| "no reason given".to_owned(), |text| text.to_string_lossy().into_owned());
            return Err(LoadError::Missing { file, why, package });
        }
        Ok(Self { handle, file, package })
    }

    fn symbol(&self, function: &'static str) -> Result<*mut c_void, LoadError> {
        let Self { handle, file, package } = *self;
        let name = CString::new(function).unwrap_or_default();
        // SAFETY: the handle is one of `dlopen`'s, and the name ends with a zero.
        let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
        if found.is_null() { Err(LoadError::Lacks { file, function, package }) } else { Ok(found) }
    }
}

/// Both libraries.
pub(crate) struct Ceph {
    pub(crate) rados: Rados,
    pub(crate) rbd: Rbd,
}

/// The libraries, loaded now if they are not yet.
pub(crate) fn ceph() -> Result<&'static Ceph, LoadError> {
    static LOADED: OnceLock<Result<Ceph, LoadError>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| Ok(Ceph { rados: Rados::load()?, rbd: Rbd::load()? }));
    loaded.as_ref().map_err(Clone::clone)
}

/// Loads the libraries, as the first image does.
///
/// # Errors
///
/// They are not there, or too old.
pub fn load() -> Result<(), LoadError> {
    ceph().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_the_package_that_has_it() {
        let Err(error) = Library::open("librbd.so.99", "librbd99") else { panic!("it is there") };
        let line = error.to_string();
        assert!(line.starts_with("driver=rbd needs librbd.so.99, which cannot be loaded (librbd.so.99: "), "{line}");
        assert!(line.ends_with("; install it, on Debian from the package librbd99"), "{line}");
    }

    #[test]
    fn a_library_that_is_too_old_is_told_what_it_lacks() {
        let library = Library::open("libc.so.6", "libc6").unwrap_or_else(|error| panic!("{error}"));
        assert!(library.symbol("getpid").is_ok());
        assert_eq!(
            library.symbol("rbd_open").unwrap_err().to_string(),
            "driver=rbd needs rbd_open, which this libc.so.6 has not: it is of a Ceph before 16.2; install a newer libc6"
        );
    }
}
