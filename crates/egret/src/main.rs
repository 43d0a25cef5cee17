//! The command: `egret serve`, `egret bench`, `egret compare`, `egret report`, `egret replay`, `egret config`, `egret ctl`,
//! `egret top`, `egret doctor`, `egret completions`, `egret man`.

#![forbid(unsafe_code)]
// It panics where it cannot be written, or nobody reads it any more: see `print`.
#![deny(clippy::print_stdout)]

mod bench;
mod cli;
mod compare;
mod completions;
mod config;
mod ctl;
mod doctor;
mod manual;
mod replay;
mod report;
mod serve;
mod top;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(cli::arguments(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            // Help and version are what was asked for.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => return complain(&cli::one_line(&error)),
    };
    let done = match cli.command {
        Command::Compare(arguments) => return compare::run(&arguments),
        Command::Bench(arguments) => {
            return bench::run(&arguments).unwrap_or_else(|error| complain(&in_one_line(&error)));
        }
        Command::Serve(arguments) => {
            let done = serve::run(*arguments);
            if let Err(error) = &done
                && egret_rbd::is_started()
            {
                complain(&in_one_line(error));
            }
            egret_rbd::leave_at_once(done.is_err().into());
            done
        }
        Command::Report(arguments) => report::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Ctl(arguments) => ctl::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments, &mut Cli::command()),
        Command::Man(arguments) => manual::run(&arguments, Cli::command()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&in_one_line(&error)),
    }
}

/// An error and its causes, each once: a message may contain its cause already.
fn in_one_line(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |line, cause| match line.as_str() {
        "" => cause,
        told if told.contains(&cause) => line,
        _ => format!("{line}: {cause}"),
    })
}

/// Prints what was asked for. Where nobody reads it any more, that is all.
///
/// # Errors
/// It cannot be written.
fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        done => done.context("standard output"),
    }
}

fn complain(line: &str) -> ExitCode {
    // Where it cannot be written the status says it still.
    let _ = writeln!(std::io::stderr(), "egret: {line}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use egret_daemon::Daemon;
    use egret_daemon::process::Inherited;
    use egret_vocabulary::config::ConfigFile;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let cause = || Err::<(), _>(std::io::Error::other("no room"));
        assert_eq!(in_one_line(&cause().context("--pidfile p").unwrap_err()), "--pidfile p: no room");
        // A library's message contains its cause already.
        let socket = "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=/nonexistent/s";
        let arguments = serve::Serve {
            blockdev: vec!["null-co,node-name=n".to_owned()],
            export: vec![socket.to_owned()],
            ..serve::Serve::default()
        };
        let config = serve::config(&arguments, ConfigFile::default()).unwrap();
        let error = Daemon::start(&config, &mut Inherited::default()).map(drop).unwrap_err();
        let line = "export 'e': cannot listen on socket '/nonexistent/s': No such file or directory (os error 2)";
        assert_eq!(in_one_line(&error.into()), line);
    }
}
