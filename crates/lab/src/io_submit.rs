//! How long threads sleep in `io_submit`.
//!
//! Linux AIO is to return at once, and does not where a file system has to find a block first, or a queue is full: then all
//! that the I/O thread serves waits. The kernel says in `/proc/PID/syscall` which system call a thread sleeps in, and
//! that it runs where it does not sleep; a look every millisecond costs the thread nothing, and finds the share of the time.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

/// Between two looks.
const PERIOD: Duration = Duration::from_millis(1);

/// Looks at threads until it is ended.
pub struct Watch {
    ended: Arc<AtomicBool>,
    watcher: JoinHandle<Looks>,
}

/// How often threads were looked at, and found asleep in the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Looks {
    all: u64,
    asleep: u64,
}

impl Watch {
    /// Begins to look at threads, by their numbers.
    pub fn begin(threads: impl IntoIterator<Item = u32>) -> Self {
        Self::of(libc::SYS_io_submit, threads)
    }

    fn of(call: libc::c_long, threads: impl IntoIterator<Item = u32>) -> Self {
        let files: Vec<File> =
            threads.into_iter().filter_map(|tid| File::open(format!("/proc/{tid}/syscall")).ok()).collect();
        let ended = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ended);
        let watcher = spawn(move || {
            let mut looks = Looks::default();
            // At least once, however soon it is over.
            loop {
                files.iter().for_each(|file| looks.look(file, call));
                if until.load(Ordering::Relaxed) {
                    return looks;
                }
                sleep(PERIOD);
            }
        });
        Self { ended, watcher }
    }

    /// The share of the time that the threads slept in the call, as a mean; `None` where nobody may look, which takes
    /// root, or `kernel.yama.ptrace_scope=0` and a server that lets its user look.
    pub fn end(self) -> Option<f64> {
        self.ended.store(true, Ordering::Relaxed);
        let looks = self.watcher.join().ok().filter(|looks| looks.all > 0)?;
        Some(looks.asleep as f64 / looks.all as f64)
    }
}

impl Looks {
    fn look(&mut self, file: &File, call: libc::c_long) {
        let mut line = [0; 256];
        let Ok(len @ 1..) = file.read_at(&mut line, 0) else { return };
        self.all += 1;
        // `running`, or the number of the call and its arguments, or `-1` where it sleeps in none.
        let number = line[..len].split(|byte| *byte == b' ').next().and_then(|word| std::str::from_utf8(word).ok());
        if number.and_then(|word| word.parse::<libc::c_long>().ok()) == Some(call) {
            self.asleep += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;

    #[test]
    fn a_thread_that_sleeps_in_a_call_is_seen_to_and_in_no_other() {
        let (mut here, there) = UnixStream::pair().unwrap();
        let (tell, told) = mpsc::channel();
        let thread = spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            // Until the other end is gone.
            let _ = here.read(&mut [0]);
        });
        let tid = told.recv().unwrap();
        let syscall = || std::fs::read_to_string(format!("/proc/{tid}/syscall")).unwrap();
        let call = loop {
            // The number is this machine's.
            if let Some(number) =
                syscall().split(' ').next().and_then(|word| word.parse().ok()).filter(|call| *call > 0)
            {
                break number;
            }
        };
        let share = |call| {
            let watch = Watch::of(call, [tid]);
            while !watch.watcher.is_finished() {
                sleep(PERIOD * 20);
                watch.ended.store(true, Ordering::Relaxed);
            }
            watch.end()
        };
        assert!(share(call).unwrap() > 0.0);
        assert_eq!(share(libc::SYS_io_submit), Some(0.0));
        drop(there);
        thread.join().unwrap();
    }

    #[test]
    fn of_nobody_nothing_is_known() {
        assert_eq!(Watch::begin([]).end(), None);
        assert_eq!(Watch::begin([u32::MAX]).end(), None);
    }
}
