//! How a loop sleeps until one of its descriptors has something to say.
//!
//! ```text
//! io_uring   multishot polls on the loop's own ring: readiness shows in memory, sleeping submits the disks' requests
//! epoll      edge-triggered, nanosecond timeouts where the kernel has epoll_pwait2
//! ppoll      works everywhere; cost grows with the number of descriptors
//! ```
//!
//! They are interchangeable, and one suite of tests runs over all three.

mod epoll;
mod ppoll;
mod uring;

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::str::FromStr;

use egret_polling::Nanos;
use strum::VariantArray;

use crate::ring::{Ring, SharedRing};

/// What a watched descriptor is called; it says nothing to the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(pub u64);

/// Waits for descriptors.
///
/// A descriptor is watched *edge by edge*: each time it becomes ready (an eventfd: each time it is written) its key
/// is reported once, and nobody has to read from it. One that is ready when it is added is reported too. Reports may
/// be spurious, and a key may be reported once more in the wait after its removal: who gives out keys tells them apart.
pub(crate) trait Monitor {
    /// Begins to watch `fd`.
    fn add(&mut self, fd: RawFd, key: Key) -> io::Result<()>;

    /// Ends it. `fd` must still be open.
    fn remove(&mut self, fd: RawFd, key: Key);

    /// Whether a report is in reach without a system call; false where that cannot be told.
    fn has_reports(&mut self) -> bool;

    /// Sleeps until there is a report or `timeout` is over (`None`: no limit, zero: only looks), and appends the
    /// reports to `ready`.
    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Key>) -> io::Result<()>;
}

/// Which monitor to use, as `fd-monitor=` spells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, VariantArray)]
pub enum MonitorChoice {
    /// The best that works here: io_uring, else epoll, else ppoll.
    #[default]
    Auto,
    /// Multishot polls on the loop's ring.
    IoUring,
    /// Edge-triggered epoll.
    Epoll,
    /// ppoll(2).
    Ppoll,
}

impl MonitorChoice {
    /// Every choice: automatic, then the monitors in the order in which that tries them.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// The word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Epoll => "epoll",
            Self::Ppoll => "ppoll",
        }
    }

    /// Whether this thread can have it.
    ///
    /// # Errors
    ///
    /// What stands in the way.
    pub fn probe(self) -> io::Result<()> {
        open(self, "probe").map(drop)
    }
}

impl fmt::Display for MonitorChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for MonitorChoice {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().copied().find(|choice| choice.as_str() == name);
        found.ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|choice| choice.as_str()).collect();
            format!("fd-monitor must be one of {}, got '{name}'", known.join(", "))
        })
    }
}

/// A monitor, the ring that it shares with the engines if it has one, and its name.
pub(crate) struct Opened {
    pub monitor: Box<dyn Monitor>,
    pub ring: Option<SharedRing>,
    pub name: MonitorChoice,
}

/// Opens the monitor asked for; `auto` falls back and says why, once a loop.
pub(crate) fn open(choice: MonitorChoice, loop_name: &str) -> io::Result<Opened> {
    let of = |monitor: Box<dyn Monitor>| Opened { monitor, ring: None, name: choice };
    match choice {
        MonitorChoice::Auto => {
            let mut opened = open(MonitorChoice::ALL[1], loop_name);
            for &next in &MonitorChoice::ALL[2..] {
                let Err(why) = opened else { break };
                tracing::warn!("iothread '{loop_name}': fd-monitor falls back to {next}: {why}");
                opened = open(next, loop_name);
            }
            opened
        }
        MonitorChoice::IoUring => {
            let ring = Rc::new(RefCell::new(Ring::for_monitor().map_err(io::Error::other)?));
            let monitor = Box::new(uring::Uring::new(Rc::clone(&ring)));
            Ok(Opened { ring: Some(ring), ..of(monitor) })
        }
        MonitorChoice::Epoll => Ok(of(Box::new(epoll::Epoll::new()?))),
        MonitorChoice::Ppoll => Ok(of(Box::<ppoll::Ppoll>::default())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::EventNotifier;

    #[test]
    fn each_monitor_has_a_word_and_no_other_is_taken() {
        let words = ["auto", "io_uring", "epoll", "ppoll"];
        for (&choice, word) in MonitorChoice::ALL.iter().zip(words) {
            assert_eq!((choice.to_string().as_str(), word.parse()), (word, Ok(choice)));
        }
        let refused = "poll".parse::<MonitorChoice>().unwrap_err();
        assert_eq!(refused, "fd-monitor must be one of auto, io_uring, epoll, ppoll, got 'poll'");
    }

    #[test]
    fn what_was_removed_is_not_told_of_and_a_wait_for_nothing_is_as_long_as_it_was_to_be() {
        for &choice in &MonitorChoice::ALL[1..] {
            let mut opened = match open(choice, "test") {
                // As in a container.
                Err(e) if choice == MonitorChoice::IoUring => {
                    egret_needs::this_test_lacks(format_args!("io_uring: {e}"));
                    continue;
                }
                opened => opened.unwrap(),
            };
            assert_eq!((opened.name, opened.ring.is_some()), (choice, choice == MonitorChoice::IoUring));
            let events = [(); 3].map(|()| EventNotifier::new().unwrap());
            let monitor = &mut opened.monitor;
            for (event, key) in events.iter().zip(1..) {
                monitor.add(event.as_raw_fd(), Key(key)).unwrap();
            }
            let wait = |monitor: &mut Box<dyn Monitor>, timeout| {
                let mut ready = Vec::new();
                monitor.wait(timeout, &mut ready).unwrap();
                ready
            };
            for (event, key) in events.iter().zip(1..) {
                event.set();
                assert_eq!(wait(monitor, None), [Key(key)], "{choice}");
            }
            // The first goes, and the others are told of by their own names.
            monitor.remove(events[0].as_raw_fd(), Key(1));
            wait(monitor, Some(Nanos::ZERO));
            events[0].set();
            for (event, key) in events.iter().zip(1..).skip(1) {
                event.set();
                assert_eq!(wait(monitor, None), [Key(key)], "{choice}");
            }
            let begin = Instant::now();
            assert_eq!(wait(monitor, Some(Nanos::from_millis(2))), [], "{choice}");
            assert!(begin.elapsed() >= Duration::from_millis(2), "{choice}");
        }
    }
}
