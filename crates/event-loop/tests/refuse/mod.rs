//! A kernel that refuses a system call, for the tests beside the code too.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

/// Has the kernel refuse a system call to this thread.
pub(crate) fn refuse(call: libc::c_long, errno: libc::c_int) {
    let rules = BTreeMap::from([(call, Vec::new())]);
    let refuse = SeccompAction::Errno(errno as u32);
    let arch = std::env::consts::ARCH.try_into().expect("a machine with seccomp");
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).expect("a sound filter");
    let filter: BpfProgram = filter.try_into().expect("a sound filter");
    apply_filter(&filter).expect("a kernel with seccomp");
}

/// Has it refuse this thread others.
#[allow(dead_code, reason = "not all who include this need it")]
pub(crate) fn refuse_threads() {
    [libc::SYS_clone3, libc::SYS_clone].into_iter().for_each(|call| refuse(call, libc::EAGAIN));
}
