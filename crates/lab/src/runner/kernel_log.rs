//! The kernel's log of crashes and hangs.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Words of messages that are reported at any priority.
const TELLING: [&str; 12] = [
    "BUG:",
    "Oops",
    "Call Trace",
    "hung_task",
    "blocked for more than",
    "segfault",
    "general protection",
    "soft lockup",
    "Out of memory",
    "I/O error",
    "traps:",
    "RCU stall",
];
/// Errors and worse.
const ERROR: u32 = 3;

/// Where the kernel has its messages.
pub const KMSG: &str = "/dev/kmsg";

/// Reads the kernel's messages from now on.
pub struct KernelLog(io::Result<File>);

impl KernelLog {
    /// From now on; nothing where the log may not be read.
    pub fn open(path: impl AsRef<Path>) -> Self {
        let flags = OFlags::NONBLOCK.bits() as i32;
        let log = File::options().read(true).custom_flags(flags).open(path);
        Self(log.and_then(|mut log| log.seek(SeekFrom::End(0)).map(|_| log)))
    }

    /// Why there are no messages, in one line, where the log may not be read.
    pub fn refusal(&self) -> Option<String> {
        let error = self.0.as_ref().err()?;
        Some(format!(
            "what the kernel says cannot be read ({error}), and would be in no report: as root, or with \
             kernel.dmesg_restrict=0, it would"
        ))
    }

    /// The messages since the last call that should be reported.
    pub fn news(&mut self) -> Vec<String> {
        let Ok(log) = &mut self.0 else { return Vec::new() };
        let mut news = Vec::new();
        let mut record = [0; 8192];
        loop {
            match log.read(&mut record) {
                Ok(len) if len > 0 => news.extend(telling(&String::from_utf8_lossy(&record[..len]))),
                // It was overwritten before it was read: the next one is there.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                _ => return news,
            }
        }
    }
}

/// The text of a record, `PRIORITY,NUMBER,TIME,FLAGS;TEXT`, if a reader should know.
fn telling(record: &str) -> Option<String> {
    let (head, text) = record.split_once(';')?;
    let text = text.lines().next()?;
    let priority = head.split(',').next()?.parse::<u32>().ok()? & 7;
    (priority <= ERROR || TELLING.iter().any(|word| text.contains(word))).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crashes_hangs_and_errors_are_told_and_the_rest_is_not() {
        let hang = "4,812,5140900,-;task qemu:12 blocked for more than 120 seconds.\n SUBSYSTEM=x\n";
        assert_eq!(telling(hang), Some("task qemu:12 blocked for more than 120 seconds.".into()));
        assert_eq!(telling("6,1,2,-;egret[7]: segfault at 0 ip 0\n"), Some("egret[7]: segfault at 0 ip 0".into()));
        assert_eq!(telling("3,1,2,-;blk_update: lost\n"), Some("blk_update: lost".into()));
        assert_eq!(telling("6,339,5140900,-;loop0: detected capacity change\n"), None);
        assert_eq!(telling("30,339,5140900,-;systemd: hello\n"), None);
    }
}
