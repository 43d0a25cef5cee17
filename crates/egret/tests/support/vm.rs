//! Whether this machine can boot a guest, and the scripts that do.

use std::env;
use std::path::{Path, PathBuf};

/// Where the scripts are that make and boot guests.
pub fn scripts_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").canonicalize().expect("scripts/ lies beside crates/")
}

/// Whether there is what a guest needs; if not, says so under the test's name.
pub fn can_boot_or_skips() -> bool {
    let Some(missing) = missing() else { return true };
    egret_needs::this_test_lacks(format_args!("{missing}: run scripts/install-test-deps"));
    false
}

fn missing() -> Option<&'static str> {
    let path = env::var_os("PATH").unwrap_or_default();
    if !env::split_paths(&path).any(|folder| folder.join("qemu-system-x86_64").is_file()) {
        return Some("QEMU");
    }
    (!cache().join("kernel/boot").is_dir()).then_some("a kernel for the guest")
}

/// Where the scripts keep what they have made.
pub fn cache() -> PathBuf {
    env::var_os("EGRET_CACHE").map_or_else(|| scripts_folder().join("../.cache"), PathBuf::from)
}
