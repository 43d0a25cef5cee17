//! What may be written after `egret`.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::bench::Bench;
use crate::compare::Compare;
use crate::completions::Completions;
use crate::config::ConfigArguments;
use crate::ctl::Ctl;
use crate::doctor::Doctor;
use crate::manual::Manual;
use crate::replay::Replay;
use crate::report::Report;
use crate::serve::Serve;
use crate::top::Top;

/// Serves disks to virtual machines over vhost-user, and polls only when polling pays.
#[derive(Debug, Parser)]
#[command(name = "egret", version, propagate_version = true, infer_long_args = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve disks until told to stop.
    #[command(display_name = "egret")]
    Serve(Box<Serve>),
    /// Measure I/O modes side by side.
    Bench(Box<Bench>),
    /// Replay recorded waits under every polling policy.
    Replay(Replay),
    /// Put two runs of the lab beside each other.
    Compare(Compare),
    /// Write the report of a run anew, or a page of several runs over time.
    Report(Report),
    /// Look at configuration files.
    Config(ConfigArguments),
    /// Give a running daemon a command.
    Ctl(Ctl),
    /// Watch what a running daemon does, and change how its I/O threads poll.
    Top(Top),
    /// Say what this host offers, and whether a daemon can serve here.
    Doctor(Doctor),
    /// Print the completions of a shell.
    Completions(Completions),
    /// Write the pages of the manual.
    Man(Manual),
}

/// The arguments as they are meant: a program called `...qemu-storage-daemon` (a link to this one) serves.
pub fn arguments(given: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = given.into_iter().collect();
    let name = arguments.first().and_then(|program| Path::new(program).file_name());
    if name.is_some_and(|name| name.to_string_lossy().ends_with("qemu-storage-daemon")) {
        arguments.insert(1, "serve".into());
    }
    arguments
}

/// A message of clap's in one line: the error, and its tip if it has one.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // The text is help, and names each on a line of its own.
        let commands = text.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        let names: Vec<_> = commands.filter_map(|line| line.split_whitespace().next()).collect();
        return format!("name a command: {}", names.join(", "));
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let complaint = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    let more = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    // A list of missing arguments continues the line; a tip is appended with a semicolon.
    more.fold(complaint, |line, more| match more.strip_prefix("tip: ") {
        Some(tip) => format!("{line}; {tip}"),
        None => format!("{line} {more}"),
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn complaint(line: &str) -> String {
        one_line(&Cli::try_parse_from(line.split(' ')).unwrap_err())
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_is_in_the_reference() {
        let reference = include_str!("../../../docs/options.md");
        let command = Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        for option in serve.get_arguments().filter_map(|argument| argument.get_long()) {
            assert!(reference.contains(&format!("--{option}")), "--{option}");
        }
    }

    #[test]
    fn complaints_take_one_line_and_carry_their_tip() {
        assert_eq!(
            complaint("egret serve --blokdev file"),
            "unexpected argument '--blokdev' found; a similar argument exists: '--blockdev'"
        );
        assert_eq!(
            complaint("egret serve d --fd-monitor kqueue"),
            "invalid value 'kqueue' for '--fd-monitor <MONITOR>' [possible values: auto, io_uring, epoll, ppoll]"
        );
        assert_eq!(
            complaint("egret serve d --blockdev null-co"),
            "the argument '[DISK]' cannot be used with '--blockdev <BLOCKDEV>'"
        );
        assert!(complaint("egret serve --read-only").contains("DISK"));
        assert!(complaint("egret").starts_with("name a command: serve, bench, "));
        assert!(complaint("egret config").starts_with("name a command: "));
    }

    #[test]
    fn a_program_named_as_qemus_daemon_serves() {
        let given = ["/usr/bin/qemu-storage-daemon", "--pidfile", "p"].map(OsString::from);
        assert_eq!(arguments(given)[..2], ["/usr/bin/qemu-storage-daemon", "serve"]);
        let given = ["egret", "serve"].map(OsString::from);
        assert_eq!(arguments(given.clone()), given);
    }
}
