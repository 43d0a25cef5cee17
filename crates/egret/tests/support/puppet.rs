//! A thread of another process that is made to do system calls, as by somebody who has taken it over.

#![cfg(target_arch = "x86_64")]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_long, c_void, pid_t, user_regs_struct};

/// A thread that is held, at a system call of its own. It goes on with that when this is dropped.
pub struct Puppet {
    thread: pid_t,
    own: user_regs_struct,
}

impl Puppet {
    /// Takes hold of a thread, when it is in a system call.
    ///
    /// # Errors
    /// This process may not trace it, or it is gone (`ESRCH`).
    pub fn take(thread: pid_t) -> io::Result<Self> {
        ask(libc::PTRACE_SEIZE, thread, 0)?;
        loop {
            ask(libc::PTRACE_INTERRUPT, thread, 0)?;
            await_stop(thread);
            let own = registers(thread);
            // SAFETY: reads a word of the other's memory.
            let code = unsafe { libc::ptrace(libc::PTRACE_PEEKTEXT, thread, own.rip - 2, 0) };
            if code as u16 == 0x050f {
                return Ok(Self { thread, own });
            }
            ask(libc::PTRACE_CONT, thread, 0)?;
        }
    }

    /// Puts a text where the thread can point to it, and returns where that is.
    pub fn put(&mut self, text: &str) -> u64 {
        // Where its stack will not be until it goes on.
        let place = (self.own.rsp - 4096) & !7;
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize((text.len() / 8 + 1) * 8, 0);
        for (at, word) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
            // SAFETY: writes a word of the other's memory, below all that it uses.
            let put = unsafe { libc::ptrace(libc::PTRACE_POKEDATA, self.thread, place + 8 * at as u64, word) };
            assert_eq!(put, 0, "{}", io::Error::last_os_error());
        }
        place
    }

    /// Has the thread do a system call: what that returns, which is a negated errno if it fails.
    pub fn call(&mut self, number: c_long, arguments: [u64; 6]) -> i64 {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        // The instruction that it has come to a stop behind, once more, and not as a restart of its own call.
        let (rip, rax, orig_rax) = (self.own.rip - 2, number as u64, u64::MAX);
        set_registers(self.thread, &user_regs_struct { rip, rax, orig_rax, rdi, rsi, rdx, r10, r8, r9, ..self.own });
        ask(libc::PTRACE_SINGLESTEP, self.thread, 0).expect("our tracee");
        await_stop(self.thread);
        registers(self.thread).rax as i64
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        set_registers(self.thread, &self.own);
        let _ = ask(libc::PTRACE_DETACH, self.thread, 0);
    }
}

fn ask(what: libc::c_uint, thread: pid_t, data: usize) -> io::Result<()> {
    // SAFETY: these requests take no memory of ours.
    let done = unsafe { libc::ptrace(what, thread, ptr::null_mut::<c_void>(), data) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn await_stop(thread: pid_t) {
    let mut status = 0;
    // SAFETY: the status is written to a number.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    assert!(waited == thread && libc::WIFSTOPPED(status), "{waited}: {}", io::Error::last_os_error());
}

fn registers(thread: pid_t) -> user_regs_struct {
    let mut registers = MaybeUninit::uninit();
    // SAFETY: the request writes all of them.
    unsafe {
        let got = libc::ptrace(libc::PTRACE_GETREGS, thread, ptr::null_mut::<c_void>(), registers.as_mut_ptr());
        assert_eq!(got, 0, "{}", io::Error::last_os_error());
        registers.assume_init()
    }
}

fn set_registers(thread: pid_t, registers: &user_regs_struct) {
    // SAFETY: the request reads all of them.
    let set =
        unsafe { libc::ptrace(libc::PTRACE_SETREGS, thread, ptr::null_mut::<c_void>(), ptr::from_ref(registers)) };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
}
