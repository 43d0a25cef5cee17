//! What monitoring scrapes: every counter, as Prometheus reads it, from a thread that does nothing else.
//!
//! | module | owns |
//! |---|---|
//! | `families` | the metrics: names, units, where their numbers come from |
//! | `text` | the format |
//! | `http` | as much of a server as a scrape needs |
//!
//! A scrape reads counters and asks nobody, so I/O threads do not know that there is one.

mod families;
mod http;
mod text;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use egret_confine::Bounds;
use egret_event_loop::EventNotifier;
use egret_export::Rights;
use egret_vocabulary::Address;

pub use families::{FAMILIES, Family, reference, scrape};
pub use text::MetricType;

use crate::daemon::CounterRegistry;
use crate::listen::Socket;
use crate::process::Inherited;

/// A server of metrics on a thread of its own. Dropping it ends it.
#[derive(Debug)]
pub struct Metrics {
    stop: EventNotifier,
    /// It returns the socket, which it could not remove.
    thread: Option<JoinHandle<Socket>>,
}

impl Metrics {
    /// Serves what `registry` has at `address`, which may be a socket of what is `inherited`.
    ///
    /// # Errors
    /// Somebody else listens at the address, there is no such group, host or socket, or there is no thread to be had.
    pub fn serve(registry: Arc<CounterRegistry>, address: &Address, inherited: &mut Inherited) -> io::Result<Self> {
        let explain = |e: io::Error| io::Error::new(e.kind(), format!("metrics: cannot listen on {address}: {e}"));
        let socket = Socket::open(address, inherited, Rights::Refused).map_err(explain)?;
        let stop = EventNotifier::new()?;
        let theirs = stop.clone();
        let thread = std::thread::Builder::new().name("egret-metrics".to_owned()).stack_size(256 << 10);
        let bounds = Bounds::of_this_thread();
        let thread = thread.spawn(move || {
            bounds.narrow(egret_confine::ThreadKind::Metrics);
            http::serve(&socket, &theirs, &|| scrape(&registry.read()));
            socket
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
