//! Where the guest's files are, and whether KVM runs it.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::fingerprint;
use crate::stack::Unable;

/// The folder with the guest, in `scripts/`' words: its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    cache: PathBuf,
}

impl Image {
    /// `$EGRET_CACHE`, or the first `.cache` that has a guest, here and upwards or where this program lies and upwards.
    ///
    /// # Errors
    /// Nobody has made it.
    pub fn find() -> Result<Self, Unable> {
        let named = env::var_os("EGRET_CACHE").map(PathBuf::from);
        let found = match named {
            Some(cache) => Some(cache),
            None => [env::current_dir(), env::current_exe()]
                .into_iter()
                .flatten()
                .flat_map(|place| place.ancestors().map(|folder| folder.join(".cache")).collect::<Vec<_>>())
                .find(|cache| cache.join("guest/vmlinux").is_file()),
        };
        found.map(|cache| Self { cache }).filter(|image| image.kernel().is_file()).ok_or_else(|| {
            Unable::Impossible(
                "there is no guest: run scripts/make-guest in Egret's sources, or set EGRET_CACHE to where it is"
                    .into(),
            )
        })
    }

    /// The kernel.
    pub fn kernel(&self) -> PathBuf {
        self.cache.join("guest/vmlinux")
    }

    /// Its first root.
    pub fn initramfs(&self) -> PathBuf {
        self.cache.join("guest/initramfs.cpio")
    }

    /// The disk of applications.
    ///
    /// # Errors
    /// Nobody has made it.
    pub fn applications(&self) -> Result<PathBuf, Unable> {
        let path = self.cache.join("apps.img");
        if path.is_file() {
            return Ok(path);
        }
        Err(Unable::Impossible(
            "there is no disk with rsync and PostgreSQL: run scripts/make-apps in Egret's sources".into(),
        ))
    }
}

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The processor.
    Kvm,
    /// QEMU, one by one: it shows that something works, and says nothing of speed.
    Tcg,
}

impl Accel {
    /// What is to be used here, if that is known: said by `$EGRET_GUEST_ACCEL`, or plain as there is no KVM, or found out
    /// since this machine was started.
    pub fn known(image: &Image) -> Option<Self> {
        if let Some(said) = env::var_os("EGRET_GUEST_ACCEL") {
            return Some(if said == "kvm" { Self::Kvm } else { Self::Tcg });
        }
        if File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Some(Self::Tcg);
        }
        let found = fs::read_to_string(answer(&image.cache)?).ok()?;
        Some(if found.trim() == "kvm" { Self::Kvm } else { Self::Tcg })
    }

    /// Writes down what was found out, as `scripts/guest-accel` does.
    pub fn remember(self, image: &Image) {
        if let Some(path) = answer(&image.cache) {
            // Without it the next run finds out again.
            let _ = fs::write(path, if self == Self::Kvm { "kvm\n" } else { "tcg\n" });
        }
    }
}

fn answer(cache: &Path) -> Option<PathBuf> {
    Some(cache.join(format!("accel-{}", fingerprint::boot_id()?)))
}
