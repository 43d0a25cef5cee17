//! What the clients of one export may cost it: one after the other, and all of them together.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use crate::peer_fd::PeerFd;
use crate::protocol_error::{ProtocolError, invalid};
use crate::sys;

/// What a client may order at once: more than a front-end of 256 queues says while it sets its device up.
const BURST: u32 = 4096;
/// After that, one order in so long.
const INTERVAL: Duration = Duration::from_millis(1);

/// In-flight records on their way to clients at a time.
const MOST_RECORDS: usize = 4;

/// What an export's clients may cost it. It is kept while they come and go: who connects anew goes on where the last one
/// was.
pub(crate) struct ClientBudget {
    pub(crate) pace: Pace,
    pub(crate) records: Records,
}

impl ClientBudget {
    pub(crate) fn new() -> Self {
        Self { pace: Pace::new(), records: Records::default() }
    }
}

/// In-flight records that were sent and may not have been received.
///
/// Descriptors on their way through sockets count against this process's user, and beyond his limit (RLIMIT_NOFILE) the
/// kernel lets no export of the process send any. A socket's last reader may also be gone: it stays here until nothing is
/// on its way any more.
#[derive(Default)]
pub(crate) struct Records {
    /// By the client that is connected, since it had last received all.
    sent: usize,
    /// Sockets of clients whose session is over.
    left: Vec<PeerFd>,
}

impl Records {
    /// Counts one that is about to be sent.
    ///
    /// # Errors
    ///
    /// Too many are on their way.
    pub(crate) fn send(&mut self, client: impl AsFd + Copy) -> Result<(), ProtocolError> {
        self.left.retain(|client| is_unreceived(client));
        if !is_unreceived(client) {
            self.sent = 0;
        }
        if self.sent + self.left.len() >= MOST_RECORDS {
            return invalid(format!(
                "GET_INFLIGHT_FD before this client, or one before it, has received the last {MOST_RECORDS}"
            ));
        }
        self.sent += 1;
        Ok(())
    }

    /// The session is over.
    pub(crate) fn leave(&mut self, client: PeerFd) {
        self.left.retain(|client| is_unreceived(client));
        if std::mem::take(&mut self.sent) > 0 && is_unreceived(&client) {
            let _ = shutdown(&client, Shutdown::Both);
            self.left.push(client);
        }
    }
}

impl Drop for Records {
    /// Who waits for the export to end is not to wait for its clients.
    fn drop(&mut self) {
        self.left.drain(..).for_each(PeerFd::close_uncounted);
    }
}

fn is_unreceived(client: impl AsFd) -> bool {
    sys::unreceived(client).is_ok_and(|bytes| bytes > 0)
}

/// How fast the clients of one export may give orders.
///
/// Many orders are carried out by I/O threads, or change memory maps, which interrupts every processor that runs one. A
/// client that never pauses has its own conversation slowed down.
pub(crate) struct Pace {
    orders: u32,
    since: Instant,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self { orders: BURST, since: Instant::now() }
    }

    /// Takes `cost` orders' worth; how long the client has to wait before they are carried out.
    pub(crate) fn take(&mut self, cost: u32, now: Instant) -> Duration {
        let refilled = now.saturating_duration_since(self.since).as_nanos() / INTERVAL.as_nanos();
        let refilled = u32::try_from(refilled).unwrap_or(BURST).min(BURST);
        self.orders = (self.orders + refilled).min(BURST);
        self.since = if self.orders == BURST { now } else { self.since + INTERVAL * refilled };
        let missing = cost.saturating_sub(self.orders);
        self.orders = self.orders.saturating_sub(cost);
        // What is missing is not taken out: it is waited for.
        self.since += INTERVAL * missing;
        INTERVAL * missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_that_clients_do_not_receive_are_few_however_many_clients_there_are() {
        use std::io::Read;
        use std::os::unix::net::UnixStream;
        let mut records = Records::default();
        let mut readers = Vec::new();
        let mut refusals = 0;
        for _ in 0..100 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let ours = PeerFd::new(ours.into());
            while records.send(&ours).is_ok() {
                rustix::io::write(&ours, &[1]).unwrap();
            }
            refusals += 1;
            records.leave(ours);
            readers.push(theirs);
        }
        assert_eq!(refusals, 100);
        assert!(records.left.len() <= MOST_RECORDS);
        // Some are received, and the others' readers go.
        readers[0].read_exact(&mut [0; 1]).unwrap();
        drop(readers);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ours = PeerFd::new(ours.into());
        for _ in 0..100 {
            records.send(&ours).unwrap();
            rustix::io::write(&ours, &[1]).unwrap();
            theirs.read_exact(&mut [0; 1]).unwrap();
        }
        assert!(records.left.is_empty());
    }

    #[test]
    fn a_client_that_leaves_takes_a_place_for_records_that_it_has_not_received_and_for_nothing_else() {
        use std::os::unix::net::UnixStream;
        for (sends, is_received, is_kept) in
            [(true, false, true), (true, true, false), (false, false, false), (false, true, false)]
        {
            let mut records = Records::default();
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let ours = PeerFd::new(ours.into());
            if sends {
                records.send(&ours).unwrap();
            }
            if !is_received {
                rustix::io::write(&ours, &[1]).unwrap();
            }
            records.leave(ours);
            assert_eq!((records.left.len(), records.sent), (is_kept.into(), 0), "{sends} {is_received}");
        }
    }

    #[test]
    fn orders_beyond_a_burst_come_at_the_pace_and_no_faster() {
        let begun = Instant::now();
        let mut pace = Pace { orders: BURST, since: begun };
        assert!((0..BURST).all(|_| pace.take(1, begun).is_zero()));
        let mut now = begun;
        for cost in [1, 16, 1, 1, 16] {
            let wait = pace.take(cost, now);
            assert_eq!(wait, INTERVAL * cost);
            now += wait;
        }
        assert!(pace.take(1, now + INTERVAL).is_zero());
        now += INTERVAL * 2 * BURST;
        assert!((0..BURST).all(|_| pace.take(1, now).is_zero()));
        assert_eq!(pace.take(2, now), INTERVAL * 2);
    }
}
