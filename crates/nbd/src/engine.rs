//! One I/O thread's connection to the server of one disk.
//!
//! ```text
//!              push            submit                      reap
//!   jobs ───────────▶ fresh ───────────▶ Outgoing ══▶ ··· ══▶ Incoming ──▶ done
//!                       ▲   one sendmsg for the turn     │ straight to the request's memory
//!                       └──── the connection has ended ──┘
//! ```
//!
//! The socket never blocks, and the engine never connects: a thread of the disk's does ([`connector`](crate::connector)), and
//! leaves a connection in the engine's [`Line`], whose bell is watched as the socket is. Both stand behind one descriptor, which
//! stays the same.

mod commands;
mod incoming;
mod outgoing;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use egret_disk::{Engine, EngineError, Job, Op};
use egret_event_loop::{EventNotifier, Nanos, clock};
use rustix::event::epoll;
use rustix::io::Errno;

use self::commands::{Commands, Next};
use self::incoming::Incoming;
use self::outgoing::Outgoing;
use crate::channel::{ChannelError, Received};
use crate::connect::Connection;
use crate::disk::Shared;

/// What is sent in a turn, in bytes, and what is received: more waits for the next one.
const TURN: u64 = 1 << 20;
/// What a system call counts as: the server decides how few bytes it brings.
const CALL_WORK: u64 = 4 << 10;
/// How long an engine that is new waits for its connection at least.
const FIRST_PATIENCE: Duration = Duration::from_secs(10);
/// How long a server that is about to end has for what it was asked before.
const LAST_PATIENCE: Duration = Duration::from_secs(30);

/// Where a thread leaves a connection for an engine.
#[derive(Debug)]
pub(crate) struct Line {
    waiting: Mutex<Option<Connection>>,
    is_there: AtomicBool,
    bell: EventNotifier,
    /// The size that the engine's connection was made for. Of one that is to be made it may be any.
    size: AtomicU64,
}

impl Line {
    /// Has the engine go on over another connection: from here on it begins nothing over the one that it has.
    pub(crate) fn give(&self, connection: Connection) {
        self.size.store(connection.export.size, Ordering::Relaxed);
        // The engine is not to clear the bell before it has rung.
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        *waiting = Some(connection);
        self.is_there.store(true, Ordering::Release);
        self.bell.set();
    }

    pub(crate) fn knows_less_than(&self, size: u64) -> bool {
        self.size.load(Ordering::Relaxed) < size
    }

    fn take(&self) -> Option<Connection> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_there.store(false, Ordering::Relaxed);
        self.bell.clear();
        waiting.take()
    }
}

/// See the module's description.
pub(crate) struct NbdEngine {
    disk: Arc<Shared>,
    line: Arc<Line>,
    epoll: OwnedFd,
    link: Link,
    commands: Commands,
    /// Not looked at since there is a connection.
    fresh: VecDeque<u32>,
    done: VecDeque<Box<Job>>,
    has_left: bool,
}

enum Link {
    Up(Box<Up>),
    /// Jobs wait until then; later ones, and all if there is no time, fail.
    Down {
        until: Option<Nanos>,
    },
}

/// A connection in use.
struct Up {
    connection: Connection,
    outgoing: Outgoing,
    incoming: Incoming,
    /// There may be something to receive.
    is_readable: bool,
    /// The socket takes nothing, and it is watched for when it does.
    is_blocked: bool,
    /// It may take something again.
    is_announced: bool,
    /// What is used instead as soon as nothing is in flight over this one.
    next: Option<Connection>,
    /// The server is about to end: it is asked for nothing more, and has until then to answer what it was.
    until: Option<Nanos>,
}

/// Why there is no connection any more.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("the server has ended the connection")]
    Ended,
    #[error("the connection has failed: {0}")]
    Failed(#[source] ChannelError),
    #[error("the server breaks the protocol: {0}")]
    Lie(#[from] incoming::Lie),
    #[error("the server is about to end")]
    Shutdown,
}

impl NbdEngine {
    /// On the I/O thread.
    pub(crate) fn new(disk: Arc<Shared>, connection: Option<Connection>) -> Result<Self, EngineError> {
        let event = |e: io::Error| EngineError::Event(e);
        let bell = EventNotifier::new().map_err(event)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| event(e.into()))?;
        epoll::add(&epoll, &bell, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(|e| event(e.into()))?;
        let size = connection.as_ref().map_or(u64::MAX, |connection| connection.export.size).into();
        let line = Arc::new(Line { waiting: Mutex::default(), is_there: AtomicBool::new(false), bell, size });
        let patience = disk.target.reconnect_delay.max(FIRST_PATIENCE);
        let mut new = Self {
            disk,
            line,
            epoll,
            link: Link::Down { until: Some(clock::now() + nanos(patience)) },
            commands: Commands::default(),
            fresh: VecDeque::new(),
            done: VecDeque::new(),
            has_left: false,
        };
        match connection {
            Some(connection) => new.connected(connection),
            None => new.disk.wish(&new.line),
        }
        Ok(new)
    }

    pub(crate) const fn line(&self) -> &Arc<Line> {
        &self.line
    }

    fn connected(&mut self, connection: Connection) {
        let data = epoll::EventData::new_u64(1);
        if let Err(e) = epoll::add(&self.epoll, &connection.channel, data, epoll::EventFlags::IN) {
            tracing::warn!("blockdev '{}': a connection cannot be watched: {e}", self.disk.target.node_name);
            return self.disk.wish(&self.line);
        }
        self.link = Link::Up(Box::new(Up {
            connection,
            outgoing: Outgoing::default(),
            incoming: Incoming::new(),
            is_readable: true,
            is_blocked: false,
            is_announced: false,
            next: None,
            until: None,
        }));
    }

    /// The connection is of no use any more: all that is in flight waits for another, or fails.
    #[cold]
    fn lose(&mut self, why: &Lost, now: Nanos) {
        tracing::warn!("blockdev '{}': {why}", self.disk.target.node_name);
        let left = self.leave_connection(now);
        if matches!(why, Lost::Shutdown) {
            left.into_iter().for_each(Connection::close);
        }
        if matches!(self.link, Link::Down { until: None }) {
            self.fail_fresh();
        }
        self.line.size.store(u64::MAX, Ordering::Relaxed);
        self.disk.wish(&self.line);
    }

    /// Leaves the connection: all that was pushed waits for another, for as long as the user says. Returns it, unless a message
    /// is begun.
    #[cold]
    fn leave_connection(&mut self, now: Nanos) -> Option<Connection> {
        let delay = self.disk.target.reconnect_delay;
        let until = (!delay.is_zero()).then(|| now + nanos(delay));
        self.fresh = self.commands.rewind().into();
        let Link::Up(up) = std::mem::replace(&mut self.link, Link::Down { until }) else { return None };
        // It is closed by another thread, later than the next may be here.
        let _ = epoll::delete(&self.epoll, &up.connection.channel);
        up.outgoing.is_empty().then_some(up.connection)
    }

    /// Goes over to the connection that is there instead, or leaves a server that is about to end, when all that the server was
    /// asked is answered: what it has not answered it may still do, after what is done over the next.
    fn move_on(&mut self, now: Nanos) {
        let Link::Up(up) = &mut self.link else { return };
        let is_quiet = up.outgoing.is_empty() && !self.commands.awaits_replies();
        let is_over = up.until.is_some_and(|until| until <= now);
        if up.begins() || !is_quiet && !is_over {
            return;
        }
        match up.next.take() {
            Some(next) => {
                self.leave_connection(now).into_iter().for_each(Connection::close);
                self.connected(next);
            }
            None => self.lose(&Lost::Shutdown, now),
        }
    }

    /// Jobs that have waited for too long, or for which there is no waiting.
    #[cold]
    fn fail_fresh(&mut self) {
        while let Some(place) = self.fresh.pop_front() {
            finish(&mut self.commands, &mut self.done, place, Err(Errno::IO));
        }
    }

    fn send(&mut self, now: Nanos) {
        let Link::Up(up) = &mut self.link else { return };
        let begins = up.begins() && !self.line.is_there.load(Ordering::Acquire);
        let Up { connection, outgoing, is_blocked, is_announced, .. } = &mut **up;
        while begins && let Some(place) = self.fresh.pop_front() {
            match self.commands.begin(place, &connection.export) {
                Next::Send => outgoing.push(place),
                Next::Over => finish(&mut self.commands, &mut self.done, place, Ok(())),
            }
        }
        if *is_blocked && !std::mem::take(is_announced) {
            return;
        }
        let mut budget = TURN;
        let failed = loop {
            if outgoing.is_empty() && connection.channel.is_flushed() || budget == 0 {
                break None;
            }
            match outgoing.send(&mut connection.channel, &mut self.commands, budget) {
                Ok(sent) => budget = budget.saturating_sub(CALL_WORK + sent),
                Err(ChannelError::System(Errno::INTR)) => {}
                Err(ChannelError::System(Errno::FAULT)) => {
                    budget = budget.saturating_sub(CALL_WORK);
                    if let Some(place) = outgoing.give_up(&mut self.commands) {
                        finish(&mut self.commands, &mut self.done, place, Err(Errno::FAULT));
                    }
                }
                Err(e) => break Some(e),
            }
        };
        let blocks = matches!(failed, Some(ChannelError::System(Errno::AGAIN)));
        if blocks != *is_blocked {
            *is_blocked = blocks;
            let out = if blocks { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let flags = epoll::EventFlags::IN | out;
            let _ = epoll::modify(&self.epoll, &connection.channel, epoll::EventData::new_u64(1), flags);
        }
        match failed {
            None | Some(ChannelError::System(Errno::AGAIN)) => {}
            Some(e) => self.lose(&Lost::Failed(e), now),
        }
    }

    fn receive(&mut self, now: Nanos) {
        let Link::Up(up) = &mut self.link else { return };
        let mut budget = TURN;
        while up.is_readable && budget > 0 {
            match up.receive(&mut self.commands, &mut self.done, &self.disk, now) {
                Ok(work) => budget = budget.saturating_sub(work),
                Err(why) => return self.lose(&why, now),
            }
        }
    }
}

impl Engine for NbdEngine {
    fn push(&mut self, job: Box<Job>) {
        let place = self.commands.insert(job);
        self.fresh.push_back(place);
    }

    fn submit(&mut self, now: Nanos) {
        match self.link {
            Link::Up(_) => self.send(now),
            Link::Down { until: Some(_) } => {}
            Link::Down { until: None } => self.fail_fresh(),
        }
    }

    fn has_completions(&mut self) -> bool {
        let is_readable = matches!(&self.link, Link::Up(up) if up.is_readable);
        is_readable || !self.done.is_empty() || self.line.is_there.load(Ordering::Relaxed)
    }

    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        if self.line.is_there.load(Ordering::Relaxed)
            && let Some(connection) = self.line.take()
        {
            match &mut self.link {
                Link::Up(up) => up.next = Some(connection),
                Link::Down { .. } => self.connected(connection),
            }
        }
        self.receive(now);
        self.move_on(now);
        if let Link::Down { until } = &mut self.link
            && until.take_if(|until| *until <= now).is_some()
        {
            self.fail_fresh();
        }
        self.done.drain(..).for_each(done);
    }

    fn deadline(&self) -> Option<Nanos> {
        match &self.link {
            // What comes of replies, and what a turn had no room for.
            Link::Up(up) if up.has_output() && !up.is_blocked => Some(Nanos::ZERO),
            Link::Up(up) if !self.fresh.is_empty() && up.begins() => Some(Nanos::ZERO),
            Link::Up(up) => up.until,
            Link::Down { until } => *until,
        }
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.epoll.as_raw_fd())
    }

    fn announced(&mut self) {
        if let Link::Up(up) = &mut self.link {
            (up.is_readable, up.is_announced) = (true, true);
        }
    }

    fn end(mut self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        self.leave();
        let commands = std::mem::take(&mut self.commands);
        self.done.drain(..).chain(commands.into_jobs()).for_each(left);
    }
}

impl NbdEngine {
    /// Leaves the connection to the disk, if nothing is in flight on it, and ends it otherwise: nothing touches the jobs' memory
    /// any more.
    fn leave(&mut self) {
        if std::mem::replace(&mut self.has_left, true) {
            return;
        }
        let link = std::mem::replace(&mut self.link, Link::Down { until: None });
        let idle = match (self.line.take(), link) {
            (None, Link::Up(up)) if self.commands.is_empty() => {
                let _ = epoll::delete(&self.epoll, &up.connection.channel);
                Some(up.connection)
            }
            (given, _) => given,
        };
        self.disk.leave(&self.line, idle);
    }
}

impl Drop for NbdEngine {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Up {
    /// Whether what is pushed is sent over it.
    const fn begins(&self) -> bool {
        self.next.is_none() && self.until.is_none()
    }

    fn has_output(&self) -> bool {
        !self.outgoing.is_empty() || !self.connection.channel.is_flushed()
    }

    /// Receives once, and says how much work that was.
    fn receive(
        &mut self,
        commands: &mut Commands,
        done: &mut VecDeque<Box<Job>>,
        disk: &Shared,
        now: Nanos,
    ) -> Result<u64, Lost> {
        let Self { connection, outgoing, incoming, is_readable, until, .. } = self;
        let received = match incoming.is_full() {
            true => Ok(Some(Received { bytes: 0, more: true })),
            false => incoming.receive(&mut connection.channel, commands),
        };
        let work = match received {
            Ok(Some(Received { bytes, more })) => {
                incoming.digest(commands, &connection.export, |commands, place| {
                    let error = commands.get(place).and_then(|command| command.error);
                    match (commands.advance(place, &connection.export), error) {
                        (Next::Send, _) if until.is_some() => {}
                        (Next::Send, _) => outgoing.push(place),
                        (Next::Over, None) => {
                            if commands.get(place).is_some_and(|command| changes(command.job.request.op)) {
                                disk.note_change();
                            }
                            finish(commands, done, place, Ok(()));
                        }
                        // It waits for the next connection ("Terminating the transmission phase").
                        (Next::Over, Some(Errno::SHUTDOWN)) => {
                            until.get_or_insert_with(|| now + nanos(LAST_PATIENCE));
                            outgoing.keep_begun();
                        }
                        (Next::Over, Some(e)) => finish(commands, done, place, Err(e)),
                    }
                })?;
                // If replies are to come, the end of the connection could be there already, and nothing would announce it.
                *is_readable = more || incoming.is_full() || commands.awaits_replies();
                // Records that hold nothing cost time, too.
                let empty = if bytes == 0 && connection.channel.is_encrypted() { TURN } else { 0 };
                CALL_WORK + bytes as u64 + empty + incoming.work()
            }
            Ok(None) => {
                *is_readable = false;
                0
            }
            Err(None) => return Err(Lost::Ended),
            Err(Some(e)) => return Err(Lost::Failed(e)),
        };
        Ok(work)
    }
}

fn finish(commands: &mut Commands, done: &mut VecDeque<Box<Job>>, place: u32, result: Result<(), Errno>) {
    if let Some(command) = commands.remove(place) {
        done.push_back(command.job.ended(result));
    }
}

/// Whether there is something to be made stable after it: what was to be stable is.
const fn changes(op: Op) -> bool {
    match op {
        Op::Write { fua } | Op::WriteZeroes { fua, .. } => !fua,
        Op::Discard => true,
        Op::Read | Op::Flush => false,
    }
}

fn nanos(time: Duration) -> Nanos {
    Nanos(time.as_nanos().try_into().unwrap_or(u64::MAX / 2))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;
    use crate::channel::Channel;
    use crate::handshake::Export;
    use crate::protocol::{BlockSizes, Headers};

    #[test]
    fn the_bell_of_a_connection_is_silent_when_it_is_taken_however_soon() {
        let bell = EventNotifier::new().unwrap();
        let (waiting, is_there) = (Mutex::default(), AtomicBool::default());
        let line = &Line { waiting, is_there, bell, size: AtomicU64::default() };
        thread::scope(|scope| {
            let ((given, gives), (heard, goes_on)) = (channel(), channel());
            scope.spawn(move || {
                while goes_on.recv().is_ok() {
                    let export = Export { size: 0, flags: 0, blocks: BlockSizes::default(), headers: Headers::Simple };
                    line.give(Connection { channel: Channel::new(UnixStream::pair().unwrap().0.into()), export });
                    given.send(()).unwrap();
                }
            });
            for _ in 0..20_000 {
                heard.send(()).unwrap();
                while !line.is_there.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                assert!(line.take().is_some());
                gives.recv().unwrap();
                assert!(!line.bell.clear(), "nobody would clear it");
            }
        });
    }
}
