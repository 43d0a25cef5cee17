//! A disk that an NBD server has: how it is opened, and what its I/O threads share.

#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use egret_disk::{BlockLimits, Blocks, Engine, EngineError, OpenCause, Remote, RemoteKind, Shape};
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
    /// Whether something has changed since it was last made stable by [`Remote::flush`].
    is_changed: AtomicBool,
}

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
        let shared = Arc::new(Shared {
            target: self.target.clone(),
            stop,
            connector,
            state: Mutex::new(State { export: nothing, idle: None, engines: Vec::new() }),
            left: Condvar::new(),
            is_changed: AtomicBool::new(false),
        });
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

    fn flush(&self) -> Result<(), Errno> {
        let Ok(shared) = self.shared() else { return Ok(()) };
        if !shared.is_changed.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        shared.flush_alone().map_err(|e| {
            shared.note_change();
            Errno::from_io_error(&e).unwrap_or(Errno::IO)
        })
    }
}

/// An engine over a connection that somebody else has made, and that is not made again: for what plays its server.
///
/// # Errors
/// No descriptors left.
#[doc(hidden)]
pub fn engine_over(socket: OwnedFd, export: Export) -> Result<Box<dyn Engine>, EngineError> {
    let target = Target {
        node_name: String::new(),
        uri: String::new(),
        address: Address::Unix(PathBuf::new()),
        encryption: None,
        export: String::new(),
        read_only: false,
        reconnect_delay: Duration::ZERO,
        open_timeout: Duration::ZERO,
    };
    let shared = Shared {
        target,
        stop: EventNotifier::new().map_err(EngineError::Event)?,
        connector: channel().0,
        state: Mutex::new(State { export, idle: None, engines: Vec::new() }),
        left: Condvar::new(),
        is_changed: AtomicBool::new(false),
    };
    Ok(Box::new(NbdEngine::new(Arc::new(shared), Some(Connection { channel: Channel::new(socket), export }))?))
}

impl Shared {
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
        // It may be the only one that the server takes.
        let mut spare = state.idle.take();
        // A flush on the next one need not be for what was written on this.
        let is_owed =
            spare.is_some() && !self.takes_several(&state.export) && state.export.has(export_flag::SEND_FLUSH);
        drop(state);
        if is_owed && self.is_changed.swap(false, Ordering::AcqRel) {
            let flushed = self.flush_over(spare, Instant::now() + connect::PATIENCE);
            spare = Some(flushed.inspect_err(|_| self.note_change())?);
        }
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
    fn flush_alone(&self) -> io::Result<()> {
        let deadline = Instant::now() + FLUSH_PATIENCE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let must_wait = |state: &mut State| self.is_taken(state) && state.export.has(export_flag::SEND_FLUSH);
        loop {
            // Its connection comes back with the engine. Not on the connector's thread, which connects that engine meanwhile.
            let waited = self.left.wait_timeout_while(self.state(), left(), must_wait);
            if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.run(left(), move |shared| shared.flush(deadline))? {
                // There is another engine.
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
                flushed => return flushed,
            }
        }
    }

    fn flush(&self, deadline: Instant) -> io::Result<()> {
        let mut state = self.state();
        if !state.export.has(export_flag::SEND_FLUSH) {
            return Ok(());
        }
        if self.is_taken(&state) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let idle = state.idle.take();
        drop(state);
        let connection = self.flush_over(idle, deadline)?;
        let mut state = self.state();
        let is_apart = !state.engines.is_empty() && !self.takes_several(&connection.export);
        if state.engines.is_empty() && self.accept_in(&mut state, &connection.export).is_ok() {
            state.idle = Some(connection);
        } else {
            drop(state);
            connection.close();
        }
        if is_apart { Err(apart()) } else { Ok(()) }
    }

    /// Flushes over a connection that is there, or, where there is none or the server has ended it, over another: as an engine
    /// does that has lost its own.
    fn flush_over(&self, idle: Option<Connection>, deadline: Instant) -> io::Result<Connection> {
        if let Some(mut connection) = idle {
            match connection.flush(deadline, &self.stop) {
                Ok(()) => return Ok(connection),
                Err(e) if is_ended(&e) => {}
                Err(e) => return Err(e),
            }
        }
        let mut connection = Connection::make(&self.target, &self.stop).map_err(io::Error::other)?;
        connection.flush(deadline, &self.stop)?;
        Ok(connection)
    }

    /// Something was changed that is to be made stable.
    pub(crate) fn note_change(&self) {
        if !self.is_changed.load(Ordering::Relaxed) {
            self.is_changed.store(true, Ordering::Release);
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

/// Whether that is what is said of a connection whose other end is gone, or by one that is about to go.
fn is_ended(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(e.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) || Errno::from_io_error(e) == Some(Errno::SHUTDOWN)
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
