//! `egret completions`: completion scripts for shells.

use std::io::Write as _;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Args, Command};
use clap_complete::Shell;

/// What `egret completions` is asked.
#[derive(Args, Debug)]
#[command(after_help = "For one session: source <(egret completions bash). docs/watching.md says how to keep them.")]
pub struct Completions {
    /// The shell
    #[arg(value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]))]
    shell: String,
}

/// Runs `egret completions` for the command line that `of` describes.
pub fn run(asked: &Completions, of: &mut Command) -> Result<()> {
    let shell = match asked.shell.as_str() {
        "zsh" => Shell::Zsh,
        "fish" => Shell::Fish,
        _ => Shell::Bash,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, of, "egret", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}
