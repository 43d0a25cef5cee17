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
            Connector { disk, waiting: Vec::new(), next: None, delay: SHORTEST, said: String::new(), succeeded: None }
                .run(&messages);
        }
    })?;
    Ok((sender, move |disk| drop(give.send(disk))))
}

struct Connector {
    disk: Weak<Shared>,
    waiting: Vec<Weak<Line>>,
    /// When it is tried next.
    next: Option<Instant>,
    delay: Duration,
    /// Why it did not succeed last, which is said once.
    said: String,
    succeeded: Option<Instant>,
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
        if self.succeeded.is_some_and(|at| at.elapsed() > WELL) {
            self.delay = SHORTEST;
        }
        self.next.get_or_insert_with(|| Instant::now() + self.delay);
    }

    fn attempt(&mut self, disk: &Shared) {
        self.next = None;
        self.waiting.retain(|line| line.strong_count() > 0);
        if self.waiting.is_empty() {
            return;
        }
        let made = Connection::make(&disk.target, &disk.stop).map_err(|e| e.to_string());
        let made = made.and_then(|connection| disk.accept(&connection.export).map(|()| connection));
        self.delay = (self.delay * 2).min(LONGEST);
        let name = &disk.target.node_name;
        match made {
            Ok(connection) => {
                tracing::info!("blockdev '{name}': connected to its server");
                self.said.clear();
                self.succeeded = Some(Instant::now());
                match self.waiting.remove(0).upgrade() {
                    Some(line) => line.give(connection),
                    None => connection.close(),
                }
                // It is there for the others, too.
                self.next = (!self.waiting.is_empty()).then(Instant::now);
            }
            Err(why) => {
                if why != self.said {
                    tracing::warn!("blockdev '{name}': {why}; trying on");
                    self.said = why;
                }
                self.next = Some(Instant::now() + self.delay);
            }
        }
    }
}
