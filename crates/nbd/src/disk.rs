//! A disk that an NBD server has: how it is opened, and what its I/O threads share.

#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use egret_disk::{BlockLimits, Blocks, Engine, EngineError, FlushError, OpenCause, Remote, RemoteKind, Shape};
use egret_event_loop::EventNotifier;
use rustix::io::Errno;

use crate::channel::Channel;
use crate::connect::{self, Connection};
use crate::connector::{self, Message};
use crate::engine::{Line, NbdEngine};
use crate::handshake::Export;
use crate::protocol::{BlockSizes, Headers, export_flag};
use crate::target::{Address, Target};

/// Between two attempts to open a disk.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a flush waits that no guest has asked for.
const FLUSH_PATIENCE: Duration = Duration::from_secs(30);
/// What a guest is to align to is not more than that, whatever a server prefers.
const LARGEST_BLOCK: u32 = 64 << 10;

/// A disk that an NBD server has.
#[derive(Debug)]
pub struct NbdDisk {
    target: Target,
    opened: OnceLock<Arc<Shared>>,
}

/// What the engines of an open disk share, and those who do not run its requests.
pub(crate) struct Shared {
    pub(crate) target: Target,
    /// Set when the disk is closed: nobody waits for its server any more.
    pub(crate) stop: EventNotifier,
    connector: Sender<Message>,
    state: Mutex<State>,
    /// An engine has left.
    left: Condvar,
    /// Whether something has changed since it was last made stable by [`Remote::flush`]: one of those below. The connector alone
    /// sets others than [`CHANGED`].
    changes: AtomicU8,
}

/// Nothing that any flush would be for.
const NONE: u8 = 0;
/// Those that there were are being flushed.
const FLUSHING: u8 = 1;
const CHANGED: u8 = 2;

struct State {
    /// What the server says of the export.
    export: Export,
    /// A connection that no engine uses.
    idle: Option<Connection>,
    /// Where each is given a connection.
    engines: Vec<Weak<Line>>,
}

impl NbdDisk {
    /// For the export that `target` names; nothing happens yet.
    pub fn new(target: Target) -> Self {
        Self { target, opened: OnceLock::new() }
    }

    fn shared(&self) -> io::Result<&Arc<Shared>> {
        self.opened.get().ok_or_else(|| io::Error::other("it is not open"))
    }

    fn error(&self, why: impl ToString) -> OpenCause {
        OpenCause::Remote { name: self.target.uri.clone(), why: why.to_string() }
    }
}

impl Drop for NbdDisk {
    fn drop(&mut self) {
        if let Some(shared) = self.opened.get() {
            shared.stop.set();
            let idle = shared.state().idle.take();
            idle.into_iter().for_each(|idle| shared.tell(Message::Close(idle)));
        }
    }
}

impl Remote for NbdDisk {
    fn kind(&self) -> RemoteKind {
        RemoteKind::Nbd
    }

    fn name(&self) -> &str {
        &self.target.uri
    }

    fn is_like(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<Self>().is_some_and(|other| other.target == self.target)
    }

    fn open(&self) -> Result<Shape, OpenCause> {
        let stop = EventNotifier::new().map_err(|e| self.error(e))?;
        let no_thread = |e| self.error(format!("no thread to connect by: {e}"));
        let (connector, begin) = connector::start_connector().map_err(no_thread)?;
        let nothing = Export { size: 0, flags: 0, blocks: BlockSizes::default(), headers: Headers::Simple };
        let shared = Arc::new(Shared::new(self.target.clone(), stop, connector, nothing));
        begin(Arc::downgrade(&shared));
        let deadline = Instant::now() + self.target.open_timeout;
        let patience = self.target.open_timeout + connect::PATIENCE * 2;
        let opened = shared.run(patience, move |shared| {
            loop {
                match Connection::make(&shared.target, &shared.stop) {
                    Err(e) if Instant::now() + AGAIN > deadline => return Err(e.to_string()),
                    Err(_) => drop(connect::pause(AGAIN, &shared.stop)),
                    Ok(connection) => return Ok(connection),
                }
            }
        });
        let connection = opened.unwrap_or_else(|e| Err(e.to_string())).map_err(|e| self.error(e))?;
        let export = connection.export;
        if !self.target.read_only && export.has(export_flag::READ_ONLY) {
            return Err(self.error("the server has it for reading only; use read-only=on"));
        }
        *shared.state() = State { export, idle: Some(connection), engines: Vec::new() };
        let blocks = blocks(&export);
        let unlimited = BlockLimits::unlimited(blocks.physical);
        let max_discard = if export.has(export_flag::SEND_TRIM) { unlimited.max_discard } else { 0 };
        let _ = self.opened.set(shared);
        Ok(Shape { size: export.size, blocks, limits: BlockLimits { max_discard, ..unlimited } })
    }

    fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
        let shared = self.shared().map_err(|e| EngineError::Remote(e.to_string()))?;
        let mut state = shared.state();
        if shared.is_taken(&state) {
            return Err(EngineError::Remote(format!(
                "'{}': the server does not say that a flush on one connection is for what was written on others \
                 (NBD_FLAG_CAN_MULTI_CONN), so that one I/O thread has to serve all of the disk; name one iothread",
                self.target.uri
            )));
        }
        // The server may have ended it while nobody looked.
        if let Some(ended) = state.idle.take_if(|idle| !idle.is_alive()) {
            shared.tell(Message::Close(ended));
        }
        let engine = NbdEngine::new(Arc::clone(shared), state.idle.take())?;
        state.engines.push(Arc::downgrade(engine.line()));
        Ok(Box::new(engine))
    }

    fn ask_size(&self) -> io::Result<u64> {
        self.shared()?.run(connect::PATIENCE * 2, Shared::ask_size)?
    }

    fn flush(&self) -> Result<(), FlushError> {
        let shared = self.shared().ok().filter(|shared| shared.changes.load(Ordering::Acquire) != NONE);
        shared.map_or(Ok(()), |shared| shared.flush_alone())
    }
}

/// An engine over a connection that somebody else has made, and that is not made again: for what plays its server.
///
/// # Errors
/// No descriptors left.
#[doc(hidden)]
pub fn engine_over(socket: OwnedFd, export: Export) -> Result<Box<dyn Engine>, EngineError> {
    let shared = Shared::new(nowhere(), EventNotifier::new().map_err(EngineError::Event)?, channel().0, export);
    Ok(Box::new(NbdEngine::new(Arc::new(shared), Some(Connection { channel: Channel::new(socket), export }))?))
}

/// A target that nobody connects to.
fn nowhere() -> Target {
    Target {
        node_name: String::new(),
        uri: String::new(),
        address: Address::Unix(PathBuf::new()),
        encryption: None,
        export: String::new(),
        read_only: false,
        reconnect_delay: Duration::ZERO,
        open_timeout: Duration::ZERO,
    }
}

impl Shared {
    const fn new(target: Target, stop: EventNotifier, connector: Sender<Message>, export: Export) -> Self {
        let state = Mutex::new(State { export, idle: None, engines: Vec::new() });
        Self { target, stop, connector, state, left: Condvar::new(), changes: AtomicU8::new(NONE) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there may be several connections at a time.
    fn takes_several(&self, export: &Export) -> bool {
        self.target.read_only || export.has(export_flag::CAN_MULTI_CONN)
    }

    /// Whether an engine has the one connection that there may be.
    fn is_taken(&self, state: &State) -> bool {
        !state.engines.is_empty() && !self.takes_several(&state.export)
    }

    /// Has a connection made for an engine.
    pub(crate) fn wish(&self, line: &Arc<Line>) {
        self.tell(Message::Connect(Arc::downgrade(line)));
    }

    fn tell(&self, message: Message) {
        let _ = self.connector.send(message);
    }

    /// Has the connector do something, and waits for it so long.
    fn run<T: Send + 'static>(
        &self,
        patience: Duration,
        errand: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> io::Result<T> {
        let (sender, done) = channel();
        self.tell(Message::Errand(Box::new(move |shared| drop(sender.send(errand(shared))))));
        done.recv_timeout(patience).map_err(|_| io::ErrorKind::TimedOut.into())
    }

    fn ask_size(&self) -> io::Result<u64> {
        let mut state = self.state();
        if self.is_taken(&state) {
            // The server takes no other connection, and says it when there is a new one.
            return Ok(state.export.size);
        }
        // A flush on the next one need not be for what was written on this.
        let is_apart = !self.takes_several(&state.export) && state.export.has(export_flag::SEND_FLUSH);
        if is_apart && state.idle.is_some() && self.changes.load(Ordering::Acquire) != NONE {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        // It may be the only one that the server takes.
        let spare = state.idle.take();
        drop(state);
        spare.into_iter().for_each(Connection::close);
        let connection = Connection::make(&self.target, &self.stop).map_err(io::Error::other)?;
        let export = connection.export;
        let size = export.size;
        let mut made = Some(connection);
        let mut state = self.state();
        if state.engines.is_empty() {
            // The next engine goes on over this one, with as many bytes as there are.
            self.adopt(&mut state, &export).map_err(io::Error::other)?;
        }
        state.export.size = size;
        // A server goes by what it has told on each connection: no guest is to know of more than its own.
        let engines: Vec<_> = state.engines.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        for line in engines.iter().filter(|line| line.knows_less_than(size)) {
            let next = made.take().map_or_else(|| Connection::make(&self.target, &self.stop), Ok);
            let next = next.map_err(io::Error::other)?;
            if !self.takes_several(&next.export) {
                return Err(apart());
            }
            self.accept(&next.export).map_err(io::Error::other)?;
            line.give(next);
        }
        let mut state = self.state();
        // One that an engine has left meanwhile may know less.
        let left = state.idle.take().filter(|left| left.export.size >= size);
        state.idle = if state.engines.is_empty() { made.take().or(left) } else { left };
        drop(state);
        made.into_iter().for_each(Connection::close);
        Ok(size)
    }

    /// Has the connector flush what was written, as soon as no engine keeps it from that.
    fn flush_alone(&self) -> Result<(), FlushError> {
        let deadline = Instant::now() + FLUSH_PATIENCE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let must_wait = |state: &mut State| self.is_taken(state) && state.export.has(export_flag::SEND_FLUSH);
        loop {
            // Its connection comes back with the engine. Not on the connector's thread, which connects that engine meanwhile.
            let waited = self.left.wait_timeout_while(self.state(), left(), must_wait);
            if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
                return Err(FlushError::again(Errno::IO));
            }
            // One that has begun ends soon after the deadline, and says whether it has lost something.
            let flushed = self.run(left() + connect::PATIENCE, move |shared| shared.flush(deadline));
            match flushed.unwrap_or(Err(FlushError::again(Errno::IO))) {
                // There is another engine.
                Err(FlushError { errno: Errno::BUSY, .. }) => {}
                flushed => return flushed,
            }
        }
    }

    /// On the connector's thread.
    fn flush(&self, deadline: Instant) -> Result<(), FlushError> {
        // Who has given it up is not to lose a connection for it.
        if deadline <= Instant::now() {
            return Err(FlushError::again(Errno::IO));
        }
        let mut state = self.state();
        if !state.export.has(export_flag::SEND_FLUSH) {
            self.changes.store(NONE, Ordering::Release);
            return Ok(());
        }
        if self.is_taken(&state) {
            return Err(FlushError::again(Errno::BUSY));
        }
        let idle = state.idle.take();
        drop(state);
        self.changes.store(FLUSHING, Ordering::Release);
        let flushed = self.flush_idle(idle, deadline);
        match flushed {
            Err(FlushError { is_loss: false, .. }) => self.note_change(),
            // No other flush is for what was lost. What has changed meanwhile is left for the next.
            _ => drop(self.changes.compare_exchange(FLUSHING, NONE, Ordering::AcqRel, Ordering::Relaxed)),
        }
        flushed
    }

    /// Flushes over a connection that no engine uses, and leaves it for one.
    fn flush_idle(&self, idle: Option<Connection>, deadline: Instant) -> Result<(), FlushError> {
        let connection = self.flush_over(idle, deadline)?;
        let mut state = self.state();
        if state.engines.is_empty() && self.accept_in(&mut state, &connection.export).is_ok() {
            state.idle = Some(connection);
        } else {
            drop(state);
            connection.close();
        }
        Ok(())
    }

    /// Flushes over a connection that is there, or, where there is none or it is gone, over another: as an engine does that has
    /// lost its own.
    fn flush_over(&self, mut idle: Option<Connection>, deadline: Instant) -> Result<Connection, FlushError> {
        loop {
            let is_last = idle.is_none();
            let connection = idle.take().or_else(|| self.make_another());
            let mut connection = connection.ok_or(FlushError::again(Errno::IO))?;
            // Who cannot flush has nothing to flush.
            if !connection.export.has(export_flag::SEND_FLUSH) {
                return Ok(connection);
            }
            match connection.flush(deadline, &self.stop) {
                Ok(Ok(())) => return Ok(connection),
                // A server that is about to end has not looked.
                Ok(Err(errno)) if errno != Errno::SHUTDOWN => return Err(FlushError { errno, is_loss: true }),
                _ if is_last || deadline <= Instant::now() => return Err(FlushError::again(Errno::IO)),
                _ => {}
            }
        }
    }

    /// Another connection in the place of one that is gone, over which a flush is for what was written: to an export that can go
    /// on as the one that there was.
    fn make_another(&self) -> Option<Connection> {
        let made = Connection::make(&self.target, &self.stop).ok()?;
        let mut state = self.state();
        // No flush over this one is for what was written over the one that an engine has.
        let is_apart = !state.engines.is_empty() && !self.takes_several(&made.export);
        if !is_apart && self.accept_in(&mut state, &made.export).is_ok() {
            return Some(made);
        }
        drop(state);
        made.close();
        None
    }

    /// Something was changed that is to be made stable.
    pub(crate) fn note_change(&self) {
        if self.changes.load(Ordering::Relaxed) != CHANGED {
            self.changes.store(CHANGED, Ordering::Release);
        }
    }

    /// Looks whether an export that was connected to again can go on in the place of what there was.
    ///
    /// # Errors
    /// A line that says what has become of it.
    pub(crate) fn accept(&self, new: &Export) -> Result<(), String> {
        self.accept_in(&mut self.state(), new)
    }

    fn accept_in(&self, state: &mut State, new: &Export) -> Result<(), String> {
        if new.size < state.export.size {
            return Err(format!("the export has {} bytes now, and had {}", new.size, state.export.size));
        }
        self.adopt(state, new)
    }

    /// The same, of whatever size it is.
    fn adopt(&self, State { export, engines, .. }: &mut State, new: &Export) -> Result<(), String> {
        if blocks(new).logical > blocks(export).logical {
            return Err(format!("the export has blocks of {} bytes now", blocks(new).logical));
        }
        if !self.target.read_only && new.has(export_flag::READ_ONLY) {
            return Err("the export is for reading only now".to_owned());
        }
        if engines.len() > 1 && !self.takes_several(new) {
            return Err("the server takes one connection now, and several I/O threads have the disk".to_owned());
        }
        // What guests were told of blocks, though the server takes smaller ones by now.
        let minimum = export.blocks.minimum.max(new.blocks.minimum);
        *export = Export { blocks: BlockSizes { minimum, ..new.blocks }, ..*new };
        Ok(())
    }

    /// An engine leaves, and its connection if it still has one that is idle.
    pub(crate) fn leave(&self, line: &Arc<Line>, idle: Option<Connection>) {
        let mut state = self.state();
        state.engines.retain(|engine| engine.as_ptr() != Arc::as_ptr(line));
        if let Some(connection) = idle {
            match &state.idle {
                None => state.idle = Some(connection),
                Some(_) => self.tell(Message::Close(connection)),
            }
        }
        self.left.notify_all();
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("target", &self.target).finish_non_exhaustive()
    }
}

/// No flush over the connection that there is would be for what was written over the one that an engine has.
fn apart() -> io::Error {
    io::Error::other("the server takes one connection now, and an I/O thread has one")
}

/// Block sizes as a guest should be told them.
fn blocks(export: &Export) -> Blocks {
    let logical = export.blocks.minimum.max(512);
    Blocks { logical, physical: export.blocks.preferred.clamp(logical, LARGEST_BLOCK.max(logical)) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::mpsc::Receiver;

    use super::*;
    use crate::protocol::Reply;

    const LONG: Duration = Duration::from_secs(60);

    /// A disk that was written over a connection which no engine uses any more, the server's end of that, and what the
    /// connector is told, which is this thread.
    fn written(flags: u16) -> (NbdDisk, UnixStream, Receiver<Message>) {
        written_to(nowhere(), flags)
    }

    fn written_to(target: Target, flags: u16) -> (NbdDisk, UnixStream, Receiver<Message>) {
        let (peer, socket) = UnixStream::pair().unwrap();
        let flags = flags | export_flag::SEND_FLUSH;
        let export = Export { size: 1 << 20, flags, blocks: BlockSizes::default(), headers: Headers::Simple };
        let (connector, told) = channel();
        let shared = Shared::new(target, EventNotifier::new().unwrap(), connector, export);
        shared.state().idle = Some(Connection { channel: Channel::new(socket.into()), export });
        shared.note_change();
        (NbdDisk { target: nowhere(), opened: OnceLock::from(Arc::new(shared)) }, peer, told)
    }

    fn has_connection(shared: &Shared) -> bool {
        shared.state().idle.is_some()
    }

    fn await_flush(peer: &mut UnixStream) {
        peer.read_exact(&mut [0; 28]).unwrap();
    }

    fn answer(peer: &mut UnixStream, error: u32) {
        let mut reply = [0; 32];
        let len = Reply::Simple { error, cookie: u64::MAX }.write(&mut reply);
        peer.write_all(&reply[..len]).unwrap();
    }

    #[test]
    fn who_has_given_up_a_flush_before_it_began_loses_no_connection_for_it() {
        let (disk, ..) = written(0);
        let shared = disk.shared().unwrap();
        assert_eq!(shared.flush(Instant::now()), Err(FlushError::again(Errno::IO)));
        assert!(has_connection(shared) && shared.changes.load(Ordering::Relaxed) == CHANGED);
    }

    #[test]
    fn what_is_not_flushed_before_its_connection_is_given_up_is_left_for_the_next_flush_however_many_the_server_takes()
    {
        for flags in [0, export_flag::CAN_MULTI_CONN] {
            for is_answered in [true, false] {
                let (disk, mut peer, _told) = written(flags);
                let shared = disk.shared().unwrap();
                if is_answered {
                    // No reply.
                    peer.write_all(&[0; 16]).unwrap();
                } else {
                    // As if the time were over.
                    shared.stop.set();
                }
                assert_eq!(shared.flush(Instant::now() + LONG), Err(FlushError::again(Errno::IO)));
                assert!(!has_connection(shared) && shared.changes.load(Ordering::Relaxed) == CHANGED);
            }
        }
    }

    #[test]
    fn who_was_not_answered_in_time_connects_to_nobody_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (disk, _peer, _told) = written_to(Target { address: Address::Unix(path), ..nowhere() }, 0);
        let failed = disk.shared().unwrap().flush(Instant::now() + Duration::from_millis(100));
        assert_eq!(failed, Err(FlushError::again(Errno::IO)));
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn what_was_written_while_a_flush_went_on_is_left_for_the_next_however_it_ended() {
        for (error, expected) in [(0, Ok(())), (5, Err(FlushError { errno: Errno::IO, is_loss: true }))] {
            let (disk, mut peer, _told) = written(0);
            let shared = Arc::clone(disk.shared().unwrap());
            let flushing = std::thread::spawn({
                let shared = Arc::clone(&shared);
                move || shared.flush(Instant::now() + LONG)
            });
            await_flush(&mut peer);
            // It may be none of what is flushed.
            shared.note_change();
            answer(&mut peer, error);
            assert_eq!(flushing.join().unwrap(), expected);
            assert_eq!(shared.changes.load(Ordering::Relaxed), CHANGED);
        }
    }

    #[test]
    fn the_one_connection_over_which_something_was_written_is_not_closed_before_it_is_flushed_though_somebody_is_about_to()
     {
        let (disk, mut peer, told) = written(0);
        let shared = disk.shared().unwrap();
        std::thread::scope(|scope| {
            let flushing = scope.spawn(|| disk.flush());
            let Ok(Message::Errand(errand)) = told.recv() else { panic!("it is asked to flush") };
            assert_eq!(shared.ask_size().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
            assert!(has_connection(shared));
            let serving = scope.spawn(move || {
                await_flush(&mut peer);
                answer(&mut peer, 0);
                peer
            });
            errand(shared);
            assert_eq!(flushing.join().unwrap(), Ok(()));
            let _peer = serving.join().unwrap();
        });
        assert_eq!(disk.flush(), Ok(()), "there is nothing to flush");
    }
}
