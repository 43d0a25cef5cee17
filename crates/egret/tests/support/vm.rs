//! Whether this machine can boot a guest, and the scripts that do.

use std::env;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Where the scripts are that make and boot guests.
pub fn scripts_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").canonicalize().expect("scripts/ lies beside crates/")
}

/// Whether there is what a guest needs; if not, says so under the test's name.
///
/// # Panics
/// If not, and this is continuous integration, where nobody reads what a test that passes has to say.
pub fn can_boot_or_skips(test: &str) -> bool {
    let Some(missing) = missing() else { return true };
    assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing} is missing: run scripts/install-test-deps");
    // Not eprintln!, whose words are dropped when a test passes.
    let _ = writeln!(io::stderr(), "{test}: skipped, because {missing} is missing: run scripts/install-test-deps");
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
