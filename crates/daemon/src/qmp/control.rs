//! The thread that serves all monitors, and owns the daemon meanwhile.
//!
//! What a client may cost is bounded: it has one command in work and one buffer of input, and gives no more while its
//! answers wait for it to read; events that it does not read cut it off; and there are so many clients and no more,
//! the others wait to be let in. Each runs one command in turn, so a client that floods takes its turn like the others.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::chardev::{Monitor, Place};
use super::client::Client;
use super::command::Context;
use super::event::Event;
use super::socket::Socket;
use crate::daemon::{Daemon, Departed};

/// Clients on sockets that are served at a time.
const MOST_CLIENTS: usize = 64;
/// How long a place rests where a client could not be let in (no descriptors left, say).
const REST: Duration = Duration::from_secs(1);
/// How long clients are given to read their last words.
const FAREWELL: Duration = Duration::from_millis(200);

/// Why [`Control::attend`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// The descriptor that was given is readable.
    Descriptor,
    /// The time is over.
    Timeout,
    /// A client wants the daemon to end.
    Quit,
}

/// A daemon, and the monitors through which it is told what to do.
pub struct Control {
    daemon: Daemon,
    places: Vec<(Socket, bool)>,
    clients: Vec<Client>,
    resting_until: Option<Instant>,
}

impl Control {
    /// Opens every monitor's place.
    ///
    /// # Errors
    /// A socket that cannot be made; the message names its path.
    pub fn new(daemon: Daemon, monitors: &[Monitor]) -> io::Result<Self> {
        let mut new = Self { daemon, places: Vec::new(), clients: Vec::new(), resting_until: None };
        for monitor in monitors {
            match &monitor.chardev.place {
                Place::Stdio => new.clients.push(Client::stdio(monitor.pretty)),
                Place::Socket { path, mode } => {
                    let explain = |e: io::Error| {
                        let (id, path) = (&monitor.chardev.id, path.display());
                        io::Error::new(e.kind(), format!("chardev '{id}': cannot listen on socket '{path}': {e}"))
                    };
                    new.places.push((Socket::open(path, *mode).map_err(explain)?, monitor.pretty));
                }
            }
        }
        Ok(new)
    }

    /// The daemon.
    pub const fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Serves monitors until `until` is readable, `timeout` is over, or a client wants the daemon to end.
    ///
    /// # Errors
    /// The system cannot wait for descriptors.
    pub fn attend(&mut self, until: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<Woken> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if self.wait(until, deadline)? {
                return Ok(Woken::Descriptor);
            }
            if self.turn() {
                return Ok(Woken::Quit);
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(Woken::Timeout);
            }
        }
    }

    /// Tells monitors that the daemon ends, gives them a moment to read that, and returns the daemon.
    pub fn shut_down(mut self, reason: &'static str) -> Daemon {
        self.announce(&Event::Shutdown { reason });
        let end = Instant::now() + FAREWELL;
        self.clients.retain_mut(|client| {
            client.write();
            client.is_owed()
        });
        while !self.clients.is_empty() && Instant::now() < end {
            let mut fds = Vec::new();
            self.clients.iter().for_each(|client| fds.extend(writing(client)));
            let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok();
            if poll(&mut fds, left.as_ref()).is_err() {
                break;
            }
            drop(fds);
            self.clients.retain_mut(|client| {
                client.write();
                client.is_owed()
            });
        }
        self.daemon
    }

    /// Sleeps until there is something to do; says whether `until` is readable.
    fn wait(&mut self, until: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<bool> {
        let now = Instant::now();
        self.resting_until = self.resting_until.filter(|end| *end > now);
        let sockets = self.clients.iter().filter(|client| client.is_socket()).count();
        let mut fds = vec![
            PollFd::from_borrowed_fd(until, PollFlags::IN),
            PollFd::from_borrowed_fd(self.daemon.departures(), PollFlags::IN),
        ];
        if self.resting_until.is_none() && sockets < MOST_CLIENTS {
            fds.extend(self.places.iter().map(|(socket, _)| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)));
        }
        for client in &self.clients {
            fds.extend(client.interest().into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        }
        let ready = self.clients.iter().any(Client::is_ready);
        let end = if ready { Some(now) } else { [deadline, self.resting_until].into_iter().flatten().min() };
        let timeout = end.and_then(|end| Timespec::try_from(end.saturating_duration_since(now)).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => Ok(fds[0].revents().contains(PollFlags::IN)),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes in who comes, runs a command for each client, and tells what happened; says whether to quit.
    fn turn(&mut self) -> bool {
        self.accept();
        let mut quit = false;
        for at in 0..self.clients.len() {
            let client = &mut self.clients[at];
            client.read();
            let mut context = Context { daemon: &mut self.daemon, quit: false };
            client.obey(&mut context);
            quit |= context.quit;
            client.write();
            // Before the next command, which may depend on what is free now.
            self.tell_departures();
        }
        self.tell_departures();
        self.clients.retain(|client| !client.is_over());
        quit
    }

    fn accept(&mut self) {
        if self.resting_until.is_some() {
            return;
        }
        for (socket, pretty) in &self.places {
            if self.clients.iter().filter(|client| client.is_socket()).count() >= MOST_CLIENTS {
                return;
            }
            match socket.accept() {
                Ok(client) => self.clients.extend(client.map(|client| Client::socket(client, *pretty))),
                Err(e) => {
                    tracing::warn!("a monitor's client cannot be let in: {e}");
                    self.resting_until = Some(Instant::now() + REST);
                }
            }
        }
    }

    fn tell_departures(&mut self) {
        for departed in self.daemon.departed() {
            self.announce(&match departed {
                Departed::Export { id } => Event::BlockExportDeleted { id },
                Departed::Lun { export: id, at, node_name } => Event::LunDeleted { id, at, node_name },
            });
        }
    }

    fn announce(&mut self, event: &Event) {
        self.clients.retain_mut(|client| {
            let reads = client.tell(event);
            if !reads {
                tracing::warn!("a monitor's client is cut off: it does not read what it is told");
            }
            client.write();
            reads
        });
    }
}

fn writing(client: &Client) -> impl Iterator<Item = PollFd<'_>> {
    let interest = client.interest().into_iter().filter(|(_, flags)| flags.contains(PollFlags::OUT));
    interest.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags))
}
