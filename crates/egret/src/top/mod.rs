//! `egret top`: what a daemon does, live.
//!
//! | module | owns |
//! |---|---|
//! | [`mod@rates`] | two snapshots and their difference |
//! | [`view`] | what is shown, and the handling of keys |
//! | [`table`] | rates as text |
//! | [`screen`] | the picture |

mod rates;
mod screen;
mod table;
mod view;

use std::io::{ErrorKind, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use egret_daemon::snapshot::Snapshot;
use egret_lab::qmp::Qmp;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event;
use serde_json::{Value, json};

use rates::{Rates, rates};
use view::{Action, View};

/// How long a daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What `egret top` is asked.
#[derive(Args, Debug)]
#[command(after_help = "docs/watching.md explains the columns.")]
pub struct Top {
    /// The monitor's socket
    socket: PathBuf,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
    /// Look twice, print what happened in between as plain text, and end
    #[arg(long)]
    once: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "it must be 0.1..=3600".to_owned())
}

/// Runs `egret top`.
pub fn run(asked: &Top) -> Result<()> {
    let mut daemon = Daemon::connect(&asked.socket)?;
    let interval = Duration::from_secs_f64(asked.interval);
    if asked.once {
        let before = daemon.look(None)?;
        std::thread::sleep(interval);
        return crate::print(&table::plain(&rates(&before, &daemon.look(None)?)));
    }
    if !std::io::stdout().is_terminal() {
        bail!("top draws on a terminal, and its output is none; --once prints plain text");
    }
    // Before the terminal is switched to the alternate screen, so that the error stays visible.
    let before = daemon.look(None)?;
    let mut terminal = ratatui::try_init().context("the terminal; --once needs none")?;
    let shown = watch(&mut terminal, &mut daemon, before, interval, &asked.socket.display().to_string());
    ratatui::restore();
    shown
}

/// The daemon at the other end.
struct Daemon {
    socket: PathBuf,
    qmp: Qmp,
}

impl Daemon {
    fn connect(socket: &Path) -> Result<Self> {
        Ok(Self { qmp: Qmp::connect(socket, Some(PATIENCE))?, socket: socket.to_owned() })
    }

    /// Everything, and of the export that is looked at its queues.
    fn look(&mut self, export: Option<&str>) -> Result<Snapshot> {
        let mut snapshot = self.ask(json!({}))?;
        if let Some(id) = export {
            // It may have gone since; then there is nothing to see.
            if snapshot.exports.iter().any(|export| export.id == id) {
                let queues = self.ask(json!({ "export": id }))?.exports.pop().map(|export| export.queues);
                if let Some(export) = snapshot.exports.iter_mut().find(|export| export.id == id) {
                    export.queues = queues.unwrap_or_default();
                }
            }
        }
        Ok(snapshot)
    }

    fn ask(&mut self, arguments: Value) -> Result<Snapshot> {
        let answer = self.qmp.run("egret-query-stats", arguments)?;
        serde_json::from_value(answer).context("the daemon is another version's: its counters are not understood")
    }

    /// Changes a property; returns the line to show.
    fn set(&self, thread: &str, property: &str, value: &Value) -> String {
        let arguments = json!({ "path": format!("/objects/{thread}"), "property": property, "value": value });
        let changed =
            format!("{thread}: {property}={}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        // A change waits for those before it, and whatever a client asks for then waits for that: so it is another client's.
        let asked = Qmp::connect(&self.socket, Some(PATIENCE)).and_then(|mut qmp| qmp.run("qom-set", arguments));
        match asked {
            Ok(_) => changed,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                format!("{changed} has to wait, and may come yet: the daemon has another change in work")
            }
            Err(error) => error.to_string(),
        }
    }
}

fn watch(
    terminal: &mut DefaultTerminal,
    daemon: &mut Daemon,
    mut before: Snapshot,
    interval: Duration,
    socket: &str,
) -> Result<()> {
    let mut view = View::default();
    let mut shown = Rates::default();
    // The first picture comes soon, of a short while.
    let mut next = Instant::now() + interval.min(Duration::from_millis(200));
    loop {
        terminal.draw(|frame| screen::draw(frame, socket, &shown, &view))?;
        let asked = match event::poll(next.saturating_duration_since(Instant::now()))? {
            false => Action::Look,
            true => event::read()?.as_key_event().map_or(Action::Nothing, |key| view.key(key, &shown)),
        };
        match asked {
            Action::Quit => return Ok(()),
            Action::Look => {}
            Action::Set { thread, property, value } => view.said = daemon.set(&thread, property, &value),
            // Keys do not delay the next refresh.
            Action::Nothing if Instant::now() < next => continue,
            Action::Nothing => {}
        }
        let now = daemon.look(view.export.as_deref())?;
        shown = rates(&before, &now);
        before = now;
        next = Instant::now() + interval;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_change_that_comes_to_nothing_is_told_and_what_is_watched_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let monitor = std::thread::spawn(move || {
            let greeting =
                json!({"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 2}}, "capabilities": []}});
            let mut clients = Vec::new();
            // Who watches, and who changes something.
            for _ in 0..2 {
                let (mut client, _) = listener.accept().unwrap();
                writeln!(client, "{greeting}").unwrap();
                let mut asked = BufReader::new(client.try_clone().unwrap());
                asked.read_line(&mut String::new()).unwrap();
                writeln!(client, "{}", json!({"return": {}})).unwrap();
                clients.push((client, asked));
            }
            let (_, mut asked) = clients.pop().unwrap();
            let mut order = String::new();
            asked.read_line(&mut order).unwrap();
            assert!(order.contains("qom-set"), "{order}");
            drop(asked);
            let (mut client, mut asked) = clients.pop().unwrap();
            asked.read_line(&mut String::new()).unwrap();
            let nothing = json!({"time-ns": 1, "iothreads": [], "exports": []});
            writeln!(client, "{}", json!({ "return": nothing })).unwrap();
        });
        let mut daemon = Daemon::connect(&socket).unwrap();
        assert_eq!(daemon.set("io0", "poll-max-ns", &json!(1)), "the server has hung up");
        assert!(daemon.look(None).unwrap().exports.is_empty());
        monitor.join().unwrap();
    }
}
