//! A socket over which a disk is told what to do: an order a line, as JSON, and an answer a line.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;

use serde_json::json;

use crate::disk::{FaultDisk, Order};

/// Serves who connects, each on a thread of their own, until accepting fails.
///
/// # Errors
/// The socket's.
pub fn serve(disk: &Arc<FaultDisk>, listener: &UnixListener) -> io::Result<()> {
    loop {
        let (client, _) = listener.accept()?;
        let disk = Arc::clone(disk);
        // Who leaves early has nothing to be told.
        thread::spawn(move || drop(converse(&disk, &client)));
    }
}

fn converse(disk: &FaultDisk, mut client: &UnixStream) -> io::Result<()> {
    for line in BufReader::new(client).lines() {
        let answer = match serde_json::from_str::<Order>(&line?) {
            Ok(order) => disk.tell(order).map(|status| json!({ "status": status })),
            Err(error) => Ok(json!({ "error": format!("no order: {error}") })),
        };
        let answer = answer.unwrap_or_else(|error| json!({ "error": error.to_string() }));
        client.write_all(format!("{answer}\n").as_bytes())?;
    }
    Ok(())
}
