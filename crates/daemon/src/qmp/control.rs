//! The thread that serves all monitors, and owns the daemon whenever no change is in work.
//!
//! What only looks is answered at once, an export that is stopped goes on at once, and what fails is told at once. Changes
//! wait for one another, and for nothing else: a disk that takes its time holds up who changes something, and who gave that
//! order, and nobody else.
//!
//! What a client may cost is bounded: it has one command in work and one buffer of input, and gives no more while its
//! answers wait for it to read; events that it does not read cut it off; and each socket has so many clients and no more,
//! the others wait to be let in. Each runs one command in turn, so a client that floods takes its turn like the others.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_export::Rights;
use egret_vocabulary::chardev::{Backend, Monitor};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::changes::{Change, Changes, Done};
use super::client::Client;
use super::command::{Run, nothing};
use super::commands::COMMANDS;
use super::event::Event;
use super::session::Order;
use crate::daemon::{CounterRegistry, Daemon, Failures, TornDown, View};
use crate::listen::Socket;
use crate::process::{Inherited, Output, Patience};
use crate::watchdog::Stalls;

/// Clients of one socket that are served at a time. Those of another have nothing to do with them: it may be there for
/// somebody else.
const MOST_CLIENTS: usize = 32;
/// How long a place rests where a client could not be let in (no descriptors left, say).
const REST: Duration = Duration::from_secs(1);
/// How long clients are given, at the end, to receive what they have not read yet.
const DRAIN_LIMIT: Duration = Duration::from_millis(200);

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
    /// Here, unless a change is in work.
    daemon: Option<Daemon>,
    /// How it was after the last change.
    view: View,
    registry: Arc<CounterRegistry>,
    failures: Arc<Failures>,
    changes: Changes,
    /// Orders of clients that wait for a change in work, the oldest first.
    orders: VecDeque<(ClientId, Order)>,
    /// Who gave the order that is in work, and which, if anybody did.
    ordered_by: Option<(ClientId, &'static str)>,
    /// Exports have gone, and what they used is to be closed.
    has_teardowns: bool,
    /// The last client has left, and what it sent is to be closed.
    deserted: bool,
    /// Somebody has been let in since there was nobody.
    attended: bool,
    places: Vec<(Socket, bool)>,
    stalls: Option<Stalls>,
    clients: Vec<(ClientId, Client)>,
    next_client: ClientId,
    resting_until: Option<Instant>,
}

/// Tells clients apart, those that have left too.
type ClientId = u64;

impl Control {
    /// A daemon without a monitor.
    ///
    /// # Errors
    /// There is no room for a thread.
    pub fn new(daemon: Daemon) -> io::Result<Self> {
        Ok(Self {
            view: daemon.view(),
            registry: Arc::clone(daemon.registry()),
            failures: Arc::clone(daemon.failures()),
            daemon: Some(daemon),
            changes: Changes::start()?,
            orders: VecDeque::new(),
            ordered_by: None,
            has_teardowns: false,
            deserted: false,
            attended: false,
            places: Vec::new(),
            stalls: None,
            clients: Vec::new(),
            next_client: 0,
            resting_until: None,
        })
    }

    /// Opens every monitor's place, which may be a socket of what is `inherited`, or `output`.
    ///
    /// # Errors
    /// A socket that cannot be made; the message names its chardev and its address. Those before it are open.
    pub fn open(&mut self, monitors: &[Monitor], output: &Output, inherited: &mut Inherited) -> io::Result<()> {
        for monitor in monitors {
            match &monitor.chardev.backend {
                Backend::Stdio => self.let_in(Client::stdio(output.clone(), monitor.pretty)),
                Backend::Socket(address) => {
                    let explain = |e: io::Error| {
                        let id = &monitor.chardev.id;
                        io::Error::new(e.kind(), format!("chardev '{id}': cannot listen on {address}: {e}"))
                    };
                    self.places
                        .push((Socket::open(address, inherited, Rights::Taken).map_err(explain)?, monitor.pretty));
                }
            }
        }
        Ok(())
    }

    /// Tells monitors, from here on, which I/O threads are stuck.
    pub fn announce_stalls_of(&mut self, stalls: Stalls) {
        self.stalls = Some(stalls);
    }

    /// The daemon, unless a change is in work.
    pub const fn daemon(&self) -> Option<&Daemon> {
        self.daemon.as_ref()
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

    /// Tells monitors that the daemon ends, gives them a moment to read that, and returns the daemon as soon as no change
    /// is in work. `None` if that has not ended within `patience`, of which the log has a line: it goes on, and has the
    /// daemon.
    pub fn shut_down(mut self, reason: &'static str, patience: &Patience<'_>) -> Option<Daemon> {
        // Before anything is waited for: a change in work may hang, and no export's client need wait for that.
        self.registry.stop_exports();
        if self.daemon.is_none()
            && let Some(done) = self.changes.wait(DRAIN_LIMIT)
        {
            self.finish(done);
        }
        self.announce(&Event::Shutdown { reason });
        self.drain_clients();
        let Self { daemon, changes, ordered_by, .. } = self;
        if let Some(daemon) = daemon.or_else(|| Some(changes.wait_within(patience)?.daemon)) {
            return Some(daemon);
        }
        // To drop it is to wait for it.
        std::mem::forget(changes);
        let command = ordered_by.map_or("a change", |(_, command)| command);
        tracing::error!("{command}: what a monitor ordered has not ended {patience}; no disk was made stable");
        None
    }

    /// Writes what clients have not received yet, for as long as they are given for that.
    fn drain_clients(&mut self) {
        let end = Instant::now() + DRAIN_LIMIT;
        loop {
            self.clients.retain_mut(|(_, client)| {
                client.write();
                client.is_owed()
            });
            let left = end.saturating_duration_since(Instant::now());
            if self.clients.is_empty() || left.is_zero() {
                return;
            }
            let mut fds = Vec::new();
            self.clients.iter().for_each(|(_, client)| fds.extend(writing(client)));
            if poll(&mut fds, Timespec::try_from(left).ok().as_ref()).is_err() {
                return;
            }
        }
    }

    /// Sleeps until there is something to do; says whether `until` is readable.
    fn wait(&mut self, until: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<bool> {
        let now = Instant::now();
        self.resting_until = self.resting_until.filter(|end| *end > now);
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![input(until), input(self.changes.as_fd()), input(self.failures.as_fd())];
        fds.extend(self.daemon.iter().map(|daemon| input(daemon.teardowns_bell())));
        fds.extend(self.stalls.iter().map(|stalls| input(stalls.as_fd())));
        if self.resting_until.is_none() {
            let open = (0..self.places.len()).filter(|place| self.has_room(*place));
            fds.extend(open.map(|place| input(self.places[place].0.as_fd())));
        }
        for (_, client) in &self.clients {
            fds.extend(client.interest().into_iter().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        }
        let ready = self.clients.iter().any(|(_, client)| client.is_ready());
        let ends = [deadline, self.resting_until, self.failures.due()];
        let end = if ready { Some(now) } else { ends.into_iter().flatten().min() };
        let timeout = end.and_then(|end| Timespec::try_from(end.saturating_duration_since(now)).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {
                self.has_teardowns |= self.daemon.is_some() && fds[3].revents().contains(PollFlags::IN);
                Ok(fds[0].revents().contains(PollFlags::IN))
            }
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes in who comes, hears each client once, and tells what happened; says whether to quit.
    fn turn(&mut self) -> bool {
        // Always, because its bell may come after what it rings for, which has been taken then.
        if let Some(done) = self.changes.take() {
            self.finish(done);
        }
        self.accept();
        let mut quit = false;
        for (id, client) in &mut self.clients {
            client.read();
            if let Some(mut order) = client.hear() {
                match order.command.run {
                    Run::Query(query) => {
                        let outcome = query(&self.view, std::mem::take(&mut order.arguments));
                        client.answer(&order.answer(outcome));
                    }
                    Run::Describe(describe) => client.answer(&order.answer(Ok(describe(&COMMANDS)))),
                    Run::Quit => {
                        quit = true;
                        client.answer(&order.answer(Ok(nothing())));
                    }
                    Run::Mutate(_) => {
                        order.descriptors = client.take_descriptors();
                        self.orders.push_back((*id, order));
                    }
                }
            }
            client.write();
        }
        self.announce_failures();
        self.announce_stalls();
        self.clients.retain(|(_, client)| !client.is_over());
        self.deserted |= self.clients.is_empty() && std::mem::take(&mut self.attended);
        if !quit {
            self.begin();
        }
        quit
    }

    /// Begins the next change, if none is in work: what exports leave behind comes first, because orders may depend on
    /// what is free then.
    fn begin(&mut self) {
        if self.daemon.is_none() {
            return;
        }
        let (ordered_by, what) = if std::mem::take(&mut self.has_teardowns) {
            (None, Change::Teardowns)
        } else if std::mem::take(&mut self.deserted) {
            (None, Change::Desertion)
        } else if let Some((by, order)) = self.orders.pop_front() {
            (Some((by, order.command.name)), Change::Order(order))
        } else {
            return;
        };
        self.ordered_by = ordered_by;
        if let Some(daemon) = self.daemon.take() {
            self.changes.begin(daemon, what);
        }
    }

    /// Takes the daemon back, and tells who ordered what was done, and everybody what happened.
    fn finish(&mut self, done: Done) {
        let Done { daemon, view, answer, torn_down } = done;
        (self.daemon, self.view) = (Some(daemon), view);
        if let (Some((by, _)), Some((answer, descriptors))) = (self.ordered_by.take(), answer)
            && let Some((_, client)) = self.clients.iter_mut().find(|(id, _)| *id == by)
        {
            client.put_back(descriptors);
            client.answer(&answer);
            client.write();
        }
        for torn_down in torn_down {
            self.announce(&match torn_down {
                TornDown::Export { id } => Event::BlockExportDeleted { id },
                TornDown::Lun { export: id, at, node_name } => Event::LunDeleted { id, at, node_name },
            });
        }
    }

    fn let_in(&mut self, client: Client) {
        self.clients.push((self.next_client, client));
        self.next_client += 1;
        self.attended = true;
    }

    /// Whether another client may be let in at a place.
    fn has_room(&self, place: usize) -> bool {
        self.clients.iter().filter(|(_, client)| client.is_at(place)).count() < MOST_CLIENTS
    }

    fn accept(&mut self) {
        if self.resting_until.is_some() {
            return;
        }
        for at in 0..self.places.len() {
            if !self.has_room(at) {
                continue;
            }
            let (socket, pretty) = &self.places[at];
            match socket.accept().map(|client| client.map(|client| Client::socket(client, at, *pretty))) {
                Ok(client) => client.into_iter().for_each(|client| self.let_in(client)),
                Err(e) => {
                    tracing::warn!("a monitor's client cannot be let in: {e}");
                    self.resting_until = Some(Instant::now() + REST);
                }
            }
        }
    }

    fn announce_failures(&mut self) {
        let failures = self.failures.take(Instant::now());
        if let Some(daemon) = &self.daemon {
            daemon.announce_sizes();
        }
        for failure in failures {
            tracing::warn!("{failure}");
            self.announce(&Event::BlockIoError(failure));
        }
        for timeout in self.registry.request_timeouts() {
            tracing::warn!("{timeout}");
            self.announce(&Event::RequestTimeout(timeout));
        }
        // The log was told where it happened.
        for broken in self.failures.take_broken(self.registry.broken_queues(), Instant::now()) {
            self.announce(&Event::QueueBroken(broken));
        }
    }

    fn announce_stalls(&mut self) {
        if let Some(stalls) = self.stalls.clone() {
            stalls.hear(|stall| self.announce(&Event::Stall(stall)));
        }
    }

    fn announce(&mut self, event: &Event) {
        self.clients.retain_mut(|(_, client)| {
            let reads = client.send_event(event);
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

#[cfg(test)]
mod tests {
    use egret_vocabulary::Config;

    use super::*;

    #[test]
    fn a_change_that_is_taken_before_its_bell_rings_leaves_nothing_to_wake_for() {
        let mut inherited = Inherited::default();
        let daemon = Daemon::start(&Config::empty(), &mut inherited).unwrap();
        let mut control = Control::new(daemon).unwrap();
        control.changes.begin(control.daemon.take().unwrap(), Change::Desertion);
        // It is taken without a look at the bell.
        let done = std::iter::repeat_with(|| control.changes.wait(REST)).flatten().next().unwrap();
        control.finish(done);
        let rings = |control: &Control, timeout: Option<&Timespec>| {
            poll(&mut [PollFd::from_borrowed_fd(control.changes.as_fd(), PollFlags::IN)], timeout).unwrap() == 1
        };
        assert!(rings(&control, None));
        control.turn();
        assert!(!rings(&control, Some(&Timespec::default())), "it would never sleep again");
    }
}
