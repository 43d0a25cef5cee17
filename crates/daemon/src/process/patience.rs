//! How long the daemon's end may take.

use std::cell::Cell;
use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Signal, Signals};

/// The time there is to end what is to end: up to a moment, or as long as it takes; and in any case only until a signal that
/// [insists](Signal::insists) hurries it.
#[derive(Debug, Default)]
pub struct Patience<'a> {
    limit: Option<(Duration, Instant)>,
    signals: Option<&'a Signals>,
    /// Whether the next such signal is the first that asks for an end, and hurries nothing.
    unasked: Cell<bool>,
    hurried: Cell<bool>,
}

impl<'a> Patience<'a> {
    /// So long, from now on; as long as it takes if `limit` is `None`.
    pub fn new(limit: Option<Duration>, signals: &'a Signals) -> Self {
        let limit = limit.and_then(|limit| Some((limit, Instant::now().checked_add(limit)?)));
        Self { limit, signals: Some(signals), ..Self::default() }
    }

    /// For an end that was asked for by `signal`, or by no signal but a monitor's `quit`: only the second signal that insists
    /// hurries it, whatever else asked before the first.
    pub fn of_end(self, signal: Option<Signal>) -> Self {
        self.unasked.set(!signal.is_some_and(Signal::insists));
        self
    }

    /// Without an end, for whoever has a process that does other things.
    pub fn endless() -> Self {
        Self::default()
    }

    /// What is left of it; `None` if it takes as long as it takes.
    pub fn left(&self) -> Option<Duration> {
        let until = self.limit.map(|(_, until)| until.saturating_duration_since(Instant::now()));
        if self.hurried.get() { Some(Duration::ZERO) } else { until }
    }

    /// Sleeps until `bell` is readable; false if it is not when patience is over.
    pub(crate) fn wait(&self, bell: BorrowedFd<'_>) -> bool {
        loop {
            let mut fds = vec![PollFd::from_borrowed_fd(bell, PollFlags::IN)];
            fds.extend(self.signals.iter().map(|signals| PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)));
            let left = self.left();
            match poll(&mut fds, left.and_then(|left| Timespec::try_from(left).ok()).as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
            if !fds[0].revents().is_empty() {
                return true;
            }
            if fds.get(1).is_some_and(|signals| !signals.revents().is_empty()) {
                let insists = !matches!(self.signals.map(Signals::wait), Some(Ok(signal)) if !signal.insists());
                if insists && !self.unasked.replace(false) {
                    self.hurried.set(true);
                }
            }
            if left == Some(Duration::ZERO) {
                return false;
            }
        }
    }
}

/// How long it was, where something has not ended within it.
impl fmt::Display for Patience<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            Some((limit, _)) if !self.hurried.get() => write!(f, "in {} s", limit.as_secs()),
            _ => f.write_str("before another signal came"),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::super::signals::send_to_this_thread;
    use super::*;

    #[test]
    fn patience_ends_with_its_time_or_another_signal_and_not_because_a_terminal_is_gone() {
        let signals = Signals::block().unwrap();
        let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        send_to_this_thread(libc::SIGHUP);
        let patience = Patience::new(Some(Duration::from_millis(1)), &signals);
        assert!(!patience.wait(bell.as_fd()));
        assert!(!patience.hurried.get());

        let patience = Patience::new(None, &signals);
        send_to_this_thread(libc::SIGHUP);
        send_to_this_thread(libc::SIGTERM);
        assert!(!patience.wait(bell.as_fd()));
        assert_eq!(patience.left(), Some(Duration::ZERO));
        rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
        assert!(patience.wait(bell.as_fd()), "what has ended all the same is seen");
    }

    #[test]
    fn an_end_that_a_monitor_or_a_terminal_asked_for_is_hurried_by_the_second_signal_that_insists() {
        let signals = Signals::block().unwrap();
        let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for (by, first) in [
            (None, true),
            (Some(Signal::HangUp), true),
            (Some(Signal::Terminate), false),
            (Some(Signal::Interrupt), false),
        ] {
            let patience = Patience::new(Some(Duration::from_millis(1)), &signals).of_end(by);
            send_to_this_thread(libc::SIGTERM);
            assert!(!patience.wait(bell.as_fd()));
            assert_eq!(patience.hurried.get(), !first, "{by:?}");
            send_to_this_thread(libc::SIGINT);
            assert!(!patience.wait(bell.as_fd()));
            assert!(patience.hurried.get());
        }
    }
}
