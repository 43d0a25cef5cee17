//! The thread of a disk that waits for its server, so that no other has to: it connects for engines, again and again, and runs
//! errands.

#![forbid(unsafe_code)]

use std::io;
use std::sync::Weak;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use egret_confine::{Starter, ThreadKind};

use crate::connect::Connection;
use crate::disk::Shared;
use crate::engine::Line;

/// Before the first attempt to connect again; each that follows waits twice as long.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
/// A server is not hurried that keeps no connection for so long: nor does it fill the log.
const WELL: Duration = Duration::from_secs(10);

/// What it is told.
pub(crate) enum Message {
    /// Somebody wants a connection, unless it is gone by then.
    Connect(Weak<Line>),
    /// Something to do.
    Errand(Errand),
    /// A connection that nobody needs.
    Close(Connection),
}

pub(crate) type Errand = Box<dyn FnOnce(&Shared) + Send>;

/// Started before the daemon is confined.
static STARTER: Starter = Starter::new(ThreadKind::Connector, "nbd");

/// Starts what starts the threads that connect to servers. To be called before the calling thread is confined; the first disk
/// does it, too.
///
/// # Errors
/// There are no threads left.
pub fn start() -> io::Result<()> {
    STARTER.begin()
}

/// Starts it; it ends with what it is told by.
pub(crate) fn start_connector() -> io::Result<(Sender<Message>, impl FnOnce(Weak<Shared>))> {
    let (sender, messages) = channel();
    let (give, take) = channel();
    STARTER.run(move || {
        if let Ok(disk) = take.recv() {
            Connector { disk, waiting: Vec::new(), next: None, pace: Pace::new(), said: String::new() }.run(&messages);
        }
    })?;
    Ok((sender, move |disk| drop(give.send(disk))))
}

struct Connector {
    disk: Weak<Shared>,
    waiting: Vec<Weak<Line>>,
    /// When it is tried next.
    next: Option<Instant>,
    pace: Pace,
    /// Why it did not succeed last, which is said once.
    said: String,
}

/// How fast attempts follow one another.
///
/// Where a server is there for one engine it is there for all that wait with it: they are connected in one go, a round. Who
/// comes meanwhile waits for the next, or a server that keeps no connection would be asked for others without end.
struct Pace {
    delay: Duration,
    /// How many are left of the round.
    round: usize,
    succeeded: Option<Instant>,
}

impl Pace {
    const fn new() -> Self {
        Self { delay: SHORTEST, round: 0, succeeded: None }
    }

    /// Somebody comes to wait: until when at most, if nobody else does.
    fn enqueue(&mut self, now: Instant) -> Instant {
        if self.succeeded.is_some_and(|at| now.saturating_duration_since(at) > WELL) {
            self.delay = SHORTEST;
        }
        now + self.delay
    }

    /// An attempt begins for one of so many.
    fn begin(&mut self, waiting: usize) {
        if self.round == 0 || self.round > waiting {
            self.round = waiting;
        }
    }

    /// It has ended, and there are so many who wait yet: when the next one is.
    fn end(&mut self, is_connected: bool, waiting: usize, now: Instant) -> Option<Instant> {
        self.round = if is_connected { (self.round - 1).min(waiting) } else { 0 };
        if is_connected {
            self.succeeded = Some(now);
        }
        if self.round > 0 {
            return Some(now);
        }
        self.delay = (self.delay * 2).min(LONGEST);
        (waiting > 0).then(|| now + self.delay)
    }
}

impl Connector {
    fn run(mut self, messages: &Receiver<Message>) {
        loop {
            let message = match self.next {
                None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => messages.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            if let Ok(Message::Close(connection)) = message {
                connection.close();
                continue;
            }
            let Some(disk) = self.disk.upgrade() else { return };
            match message {
                Ok(Message::Close(_)) => {}
                Ok(Message::Connect(line)) => self.enqueue(line),
                Ok(Message::Errand(errand)) => errand(&disk),
                Err(RecvTimeoutError::Timeout) => self.attempt(&disk),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn enqueue(&mut self, line: Weak<Line>) {
        self.waiting.push(line);
        let soon = self.pace.enqueue(Instant::now());
        self.next.get_or_insert(soon);
    }

    fn attempt(&mut self, disk: &Shared) {
        self.next = None;
        self.waiting.retain(|line| line.strong_count() > 0);
        self.pace.begin(self.waiting.len());
        if self.waiting.is_empty() {
            return;
        }
        let made = Connection::make(&disk.target, &disk.stop).map_err(|e| e.to_string());
        let made = made.and_then(|connection| disk.accept(&connection.export).map(|()| connection));
        let name = &disk.target.node_name;
        let is_connected = made.is_ok();
        match made {
            Ok(connection) => {
                tracing::info!("blockdev '{name}': connected to its server");
                self.said.clear();
                match self.waiting.remove(0).upgrade() {
                    Some(line) => line.give(connection),
                    None => connection.close(),
                }
            }
            Err(why) => {
                if why != self.said {
                    tracing::warn!("blockdev '{name}': {why}; trying on");
                    self.said = why;
                }
            }
        }
        self.next = self.pace.end(is_connected, self.waiting.len(), Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many are connected in one go; when the next attempt is.
    fn round(pace: &mut Pace, count: usize, now: Instant) -> Option<Instant> {
        (0..count).rev().fold(None, |_, left| {
            pace.begin(left + 1);
            pace.end(true, left, now)
        })
    }

    #[test]
    fn however_many_wait_they_are_connected_in_one_go_and_slow_down_the_next_no_more_than_one_does() {
        let now = Instant::now();
        let after = |count| {
            let mut pace = Pace::new();
            pace.enqueue(now);
            assert_eq!(round(&mut pace, count, now), None);
            pace.enqueue(now)
        };
        assert_eq!(after(1), now + SHORTEST * 2);
        assert_eq!(after(8), after(1));
    }

    #[test]
    fn a_server_that_keeps_no_connection_is_asked_ever_more_slowly_by_several_who_want_one_at_once() {
        let now = Instant::now();
        let mut pace = Pace::new();
        pace.enqueue(now);
        // The first has lost its own, and waits again, before the second is connected.
        pace.begin(2);
        assert_eq!(pace.end(true, 2, now), Some(now));
        pace.begin(2);
        assert_eq!(pace.end(true, 2, now), Some(now + SHORTEST * 2));
        pace.begin(2);
        assert_eq!(pace.end(true, 2, now), Some(now));
        pace.begin(2);
        assert_eq!(pace.end(true, 2, now), Some(now + SHORTEST * 4));
        assert_eq!(pace.enqueue(now + WELL * 2), now + WELL * 2 + SHORTEST, "it has been well since");
    }

    #[test]
    fn a_server_that_is_not_there_is_asked_half_as_often_each_time_up_to_five_seconds() {
        let now = Instant::now();
        let mut pace = Pace::new();
        let delays = (0..8).map(|_| {
            pace.begin(3);
            pace.end(false, 3, now).unwrap() - now
        });
        let expected = [200, 400, 800, 1600, 3200, 5000, 5000, 5000].map(Duration::from_millis);
        assert_eq!(delays.collect::<Vec<_>>(), expected);
    }
}
