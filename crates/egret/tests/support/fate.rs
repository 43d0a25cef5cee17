//! System calls of a daemon that fail, or never return: by a seccomp filter that it is started with, so that there need be
//! nothing in the daemon for it.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// What becomes of a system call, of whichever thread.
#[derive(Clone, Debug)]
pub struct Fate {
    call: libc::c_long,
    /// The number of an argument, and what it must be.
    argument: Option<(u32, u32)>,
    /// The error; without one it does not return.
    errno: Option<u16>,
}

impl Fate {
    /// It fails.
    pub fn fails(call: libc::c_long, errno: libc::c_int) -> Self {
        Self { call, argument: None, errno: Some(errno as u16) }
    }

    /// It never returns, as where a device does not answer.
    pub fn never(call: libc::c_long) -> Self {
        Self { call, argument: None, errno: None }
    }

    /// Only where this argument, counted from 0, is that number.
    pub fn where_is(self, argument: u32, number: u32) -> Self {
        Self { argument: Some((argument, number)), ..self }
    }

    pub(super) fn befall(&self, command: &mut Command) {
        let verdict = match self.errno {
            Some(errno) => libc::SECCOMP_RET_ERRNO | u32::from(errno),
            // The notification goes to this process itself, which never answers: the call blocks.
            None => libc::SECCOMP_RET_USER_NOTIF,
        };
        let flags = if self.errno.is_none() { libc::SECCOMP_FILTER_FLAG_NEW_LISTENER } else { 0 };
        let program = self.program(verdict);
        let install = move || {
            let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
            // SAFETY: the calls take numbers, and a filter that lives as long as they run.
            let made = unsafe {
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
                libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
            };
            if made < 0 {
                return Err(io::Error::last_os_error());
            }
            if made > 0 {
                // SAFETY: as above. Once the listener is closed, its calls fail.
                unsafe { libc::fcntl(made as libc::c_int, libc::F_SETFD, 0) };
            }
            Ok(())
        };
        // SAFETY: between fork and exec it makes system calls, and nothing else.
        unsafe { command.pre_exec(install) };
    }

    /// The filter (linux/seccomp.h, `struct seccomp_data`): this call, and this argument if there is one; else allowed.
    fn program(&self, verdict: u32) -> Vec<libc::sock_filter> {
        let load = |at| (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at);
        let mut tests = vec![(load(0), self.call as u32)];
        if let Some((argument, number)) = self.argument {
            // Its two halves.
            tests.extend([(load(16 + argument * 8), number), (load(20 + argument * 8), 0)]);
        }
        let statement = |(code, k): (u32, u32), jf| libc::sock_filter { code: code as u16, jt: 0, jf, k };
        let mut program = Vec::new();
        for (at, (load, value)) in tests.iter().enumerate() {
            // Past what is left of the tests, and the verdict.
            let other = 2 * (tests.len() - at - 1) + 1;
            program.push(statement(*load, 0));
            program.push(statement((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *value), other as u8));
        }
        program.push(statement((libc::BPF_RET | libc::BPF_K, verdict), 0));
        program.push(statement((libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW), 0));
        program
    }
}
