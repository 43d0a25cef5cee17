//! The thread that makes connections for a disk's engines, one after the other, for as long as it takes.

#![forbid(unsafe_code)]

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use egret_confine::{Bounds, ThreadKind};

use crate::connect::{Connection, pause};
use crate::disk::Shared;
use crate::engine::Line;

/// Before the first attempt to connect again; each that follows waits twice as long.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
/// A server is not hurried that keeps no connection for so long: nor does it fill the log.
const WELL: Duration = Duration::from_secs(10);

/// Who wants a connection, unless it is gone.
pub(crate) type Wish = Weak<Line>;

/// Starts it; it ends when its disk does.
pub(crate) fn start(disk: &Arc<Shared>) -> io::Result<Sender<Wish>> {
    let (sender, wishes) = channel();
    let (disk, bounds) = (Arc::downgrade(disk), Bounds::of_this_thread());
    let thread = std::thread::Builder::new().name("egret-nbd".to_owned()).stack_size(256 << 10);
    thread.spawn(move || {
        bounds.narrow(ThreadKind::Connector);
        run(&disk, &wishes);
    })?;
    Ok(sender)
}

fn run(disk: &Weak<Shared>, wishes: &Receiver<Wish>) {
    let (mut delay, mut succeeded) = (SHORTEST, Instant::now());
    let mut said = String::new();
    while let Ok(wish) = wishes.recv() {
        if succeeded.elapsed() > WELL {
            delay = SHORTEST;
        }
        loop {
            let (Some(disk), Some(_)) = (disk.upgrade(), wish.upgrade()) else { break };
            if !pause(delay, &disk.stop) {
                return;
            }
            delay = (delay * 2).min(LONGEST);
            let made = Connection::make(&disk.target, &disk.stop).map_err(|e| e.to_string());
            let made = made.and_then(|connection| disk.accept(&connection.export).map(|()| connection));
            let name = &disk.target.node_name;
            match (made, wish.upgrade()) {
                (Ok(connection), Some(line)) => {
                    tracing::info!("blockdev '{name}': connected to its server");
                    line.give(connection);
                    succeeded = Instant::now();
                    said.clear();
                    break;
                }
                (Ok(connection), None) => break connection.close(),
                (Err(why), _) if why != said => {
                    tracing::warn!("blockdev '{name}': {why}; trying on");
                    said = why;
                }
                (Err(_), _) => {}
            }
        }
    }
}
