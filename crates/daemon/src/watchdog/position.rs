//! Where a thread of this process is, as the kernel shows it to others: `/proc/self/task/TID`.
//!
//! Of a thread that sleeps that is the system call, the function of the kernel that it sleeps in, and the address to which
//! it will return; of one that runs, that it does. The functions of the program above that are in its stack, which only a
//! debugger or a core file shows.

use std::fmt::Write as _;
use std::fs;

/// Whether a thread sleeps where no signal wakes it, as nothing that waits for events does.
pub(super) fn is_uninterruptible(thread_id: i32) -> bool {
    read(thread_id, "stat").is_ok_and(|stat| state(&stat) == Some('D'))
}

/// Where a thread is, in words.
pub(super) fn of(thread_id: i32) -> String {
    let state = read(thread_id, "stat").ok().and_then(|stat| state(&stat)).unwrap_or('?');
    let mut text = match read(thread_id, "syscall") {
        Ok(call) => {
            let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
            in_words(call.trim_end(), &maps)
        }
        Err(e) => format!("nobody knows where (/proc/self/task/{thread_id}/syscall: {e})"),
    };
    let _ = write!(text, " (state {state}");
    // Zero, where the kernel does not tell.
    if let Ok(function) = read(thread_id, "wchan")
        && !matches!(function.as_str(), "" | "0")
    {
        let _ = write!(text, ", kernel function {function}");
    }
    text + ")"
}

fn read(thread_id: i32, file: &str) -> std::io::Result<String> {
    fs::read_to_string(format!("/proc/self/task/{thread_id}/{file}"))
}

/// The state that follows the thread's name, which may hold anything.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// What `/proc/PID/syscall` says: `running`, or the number of a call (-1 outside of one), its arguments, the stack pointer
/// and the program counter.
fn in_words(call: &str, maps: &str) -> String {
    let mut words = call.split(' ');
    let counter = words.clone().next_back().and_then(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    match (words.next().map(str::parse::<i64>), counter) {
        (Some(Ok(-1)), Some(counter)) => format!("asleep outside of system calls at {}", place(counter, maps)),
        (Some(Ok(number)), Some(counter)) => {
            let name = name(number).map_or_else(String::new, |name| format!(" ({name})"));
            format!("in system call {number}{name}, called at {}", place(counter, maps))
        }
        _ => "running".to_owned(),
    }
}

/// An address as `FILE+OFFSET`, which `addr2line -e FILE OFFSET` takes, if it is in one.
fn place(address: u64, maps: &str) -> String {
    let range = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    let file = |line: &str| line.find('/').map(|at| line[at..].to_owned());
    let here = maps.lines().find(|line| range(line).is_some_and(|range| range.contains(&address)));
    let Some(file_here) = here.and_then(file) else { return format!("{address:#x}") };
    let first = maps.lines().find(|line| file(line).as_ref() == Some(&file_here)).and_then(range);
    format!("{file_here}+{:#x}", address - first.map_or(0, |range| range.start))
}

/// The calls that an I/O thread makes, or may be held up in.
fn name(number: i64) -> Option<&'static str> {
    Some(match number {
        libc::SYS_read => "read",
        libc::SYS_write => "write",
        libc::SYS_preadv2 => "preadv2",
        libc::SYS_io_submit => "io_submit",
        libc::SYS_io_getevents => "io_getevents",
        libc::SYS_io_uring_enter => "io_uring_enter",
        libc::SYS_io_uring_register => "io_uring_register",
        libc::SYS_epoll_pwait2 => "epoll_pwait2",
        libc::SYS_epoll_ctl => "epoll_ctl",
        libc::SYS_ppoll => "ppoll",
        libc::SYS_futex => "futex",
        libc::SYS_mmap => "mmap",
        libc::SYS_munmap => "munmap",
        libc::SYS_close => "close",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const MAPS: &str = "\
55d0c0000000-55d0c0010000 r--p 00000000 08:01 42 /usr/bin/egret\n\
55d0c0010000-55d0c0020000 r-xp 00010000 08:01 42 /usr/bin/egret\n\
7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n";

    #[test]
    fn what_the_kernel_shows_is_put_into_words() {
        let submit = libc::SYS_io_submit;
        for (call, words) in [
            ("running", "running".to_owned()),
            ("-1 0x7ffd0 0x55d0c0010123", "asleep outside of system calls at /usr/bin/egret+0x10123".to_owned()),
            (
                &format!("{submit} 0x1 0x2 0x3 0x0 0x0 0x0 0x7ffd0 0x7f0000000010"),
                format!("in system call {submit} (io_submit), called at 0x7f0000000010"),
            ),
            (
                "9999 0x1 0x2 0x3 0x0 0x0 0x0 0x7ffd0 0x55d0c0000010",
                "in system call 9999, called at /usr/bin/egret+0x10".to_owned(),
            ),
        ] {
            assert_eq!(in_words(call, MAPS), words);
        }
        assert_eq!(state("12 (a ) R) D 1 2"), Some('D'));
    }

    #[test]
    fn a_thread_that_sleeps_is_found_where_it_does() {
        let (release, held) = channel::<()>();
        let (sender, receiver) = channel();
        let thread = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _ = held.recv();
        });
        let id = receiver.recv().unwrap();
        while !of(id).contains("(futex)") {
            std::thread::yield_now();
        }
        assert!(!is_uninterruptible(id));
        drop(release);
        thread.join().unwrap();
    }
}
