//! A guest's memory: how much it takes, and whether there are huge pages for it.

use std::fs;

use crate::fingerprint::number_behind;
use crate::plan::{Load, Pages};
use crate::stack::Unable;

/// The kernel, the agent, and a little for everybody.
const BASE: u64 = 640 << 20;
/// What the smallest guest has, in bytes.
pub const LEAST: u64 = BASE;
/// What a database and a file system's cache have beside that.
const APPLICATIONS: u64 = 512 << 20;
/// Memory comes in steps of this, so that huge pages fit in.
const STEP: u64 = 64 << 20;

/// How much memory a guest needs for a load, in bytes.
pub fn needed(load: &Load) -> u64 {
    let buffers = load.bs.0 * u64::from(load.iodepth) * u64::from(load.numjobs) * u64::from(load.disks.max(1));
    let applications = if load.keys.application.is_some() { APPLICATIONS } else { 0 };
    (BASE + applications + 2 * buffers).next_multiple_of(STEP)
}

/// QEMU's object for it. Shared, so that a vhost-user server sees it; QEMU's own devices get the same kind.
///
/// # Errors
/// There are too few huge pages.
pub fn backend(bytes: u64, pages: Pages) -> Result<String, Unable> {
    let object = format!("memory-backend-memfd,id=memory,size={bytes},share=on");
    match pages {
        Pages::Small => Ok(object),
        Pages::Huge => {
            let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
            HugePages::read(&meminfo).hold(bytes)?;
            Ok(object + ",hugetlb=on,prealloc=on")
        }
    }
}

/// Whether a guest may stand by with so much while others are measured: if as much is left for the next one.
pub fn may_be_held(bytes: u64, pages: Pages) -> bool {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match pages {
        Pages::Small => field(&meminfo, "MemAvailable") << 10 >= 2 * bytes,
        Pages::Huge => HugePages::read(&meminfo).hold(bytes).is_ok(),
    }
}

/// A number of `/proc/meminfo`; 0 if it is not there.
fn field(meminfo: &str, name: &str) -> u64 {
    number_behind(meminfo, &format!("{name}:")).unwrap_or(0)
}

/// What `/proc/meminfo` says of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HugePages {
    total: u64,
    /// That nobody has a claim to.
    free: u64,
    /// The length of one, in bytes.
    size: u64,
}

impl HugePages {
    fn read(meminfo: &str) -> Self {
        let field = |name| field(meminfo, name);
        let free = field("HugePages_Free").saturating_sub(field("HugePages_Rsvd"));
        Self { total: field("HugePages_Total"), free, size: field("Hugepagesize") << 10 }
    }

    fn hold(&self, bytes: u64) -> Result<(), Unable> {
        if self.size == 0 {
            return Err(Unable::Impossible("this kernel has no huge pages".into()));
        }
        let needed = bytes.div_ceil(self.size);
        if self.free >= needed {
            return Ok(());
        }
        Err(Unable::Impossible(format!(
            "the guest's memory needs {needed} huge pages of {} MiB and {} are free: sysctl vm.nr_hugepages={}",
            self.size >> 20,
            self.free,
            self.total + needed - self.free,
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{LoadKeys, expand};

    const MEMINFO: &str = "AnonHugePages:  151552 kB\nHugePages_Total:      20\nHugePages_Free:       12\n\
        HugePages_Rsvd:        2\nHugepagesize:       2048 kB\n";

    #[test]
    fn too_few_huge_pages_are_told_with_what_brings_them() {
        let pages = HugePages::read(MEMINFO);
        assert_eq!(pages, HugePages { total: 20, free: 10, size: 2 << 20 });
        assert_eq!(pages.hold(20 << 20), Ok(()));
        let Err(Unable::Impossible(reason)) = pages.hold((20 << 20) + 1) else { panic!("11 pages are not there") };
        assert!(
            reason.ends_with("needs 11 huge pages of 2 MiB and 10 are free: sysctl vm.nr_hugepages=21"),
            "{reason}"
        );
        assert!(HugePages::read("").hold(1).is_err());
    }

    #[test]
    fn a_guest_has_room_for_what_is_in_flight() {
        let needed_for = |keys: &str| needed(&expand(&toml::from_str::<LoadKeys>(keys).unwrap())[0]);
        assert_eq!(needed_for("bs = '4k'"), 704 << 20);
        assert!(needed_for("bs = '16M'\niodepth = 16\nnumjobs = 2") > 1 << 30);
        assert!(needed_for("application = 'rsync'") > needed_for("bs = '4k'"));
    }
}
