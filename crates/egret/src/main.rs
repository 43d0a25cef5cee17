//! The command: `egret serve`, `egret bench`, `egret compare`, `egret replay`, `egret config`, `egret ctl`, `egret top`.

mod bench;
mod cli;
mod compare;
mod completions;
mod config;
mod ctl;
mod qmp;
mod replay;
mod serve;
mod top;

use std::process::ExitCode;

use clap::Parser as _;

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
        Command::Serve(arguments) => serve::run(*arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Ctl(arguments) => ctl::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&format!("{error:#}")),
    }
}

fn complain(line: &str) -> ExitCode {
    eprintln!("egret: {line}");
    ExitCode::FAILURE
}
