//! Users, groups and capabilities, thread by thread: in Linux each has its own.

#![forbid(unsafe_code)]

use std::io;

use rustix::process::{DumpableBehavior, Gid, Uid, getgid, getuid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use crate::rules::ThreadKind;

/// The user and groups that the daemon runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The other groups.
    pub groups: Vec<u32>,
}

impl Identity {
    /// Whether the process has this user and group without having been root.
    fn is_mine(&self) -> bool {
        self.uid != 0 && (self.uid, self.gid) == (getuid().as_raw(), getgid().as_raw())
    }
}

/// What control threads of a daemon that stays root keep: they open images and give sockets to groups.
const OF_CONTROL: CapabilitySet = CapabilitySet::CHOWN.union(CapabilitySet::DAC_OVERRIDE);

/// Nothing that this process executes has more rights than it, or any of root's.
pub(crate) fn forbid_more() -> io::Result<()> {
    set_no_new_privs(true)?;
    // A process that is refused these calls has none of the capabilities that they would remove.
    let _ = clear_ambient_capability_set();
    for capability in (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        if capability_is_in_bounding_set(capability).unwrap_or(false) {
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    Ok(())
}

/// Makes the calling thread one of `identity`, with what `kind` needs and no more.
pub(crate) fn assume(identity: Option<&Identity>, kind: ThreadKind) -> io::Result<()> {
    if let Some(identity) = identity.filter(|identity| !identity.is_mine()) {
        let groups: Vec<Gid> = identity.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
        set_thread_groups(&groups)?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        // The kernel takes it for a set-uid program, which leaves no core; guests' memory is not in one.
        set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    }
    keep_for(kind)
}

/// Gives up the capabilities that threads of `kind` do not need.
pub(crate) fn keep_for(kind: ThreadKind) -> io::Result<()> {
    let needed = if kind == ThreadKind::Control { OF_CONTROL } else { CapabilitySet::empty() };
    let kept = capabilities(None)?.permitted & needed;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() })?;
    Ok(())
}
