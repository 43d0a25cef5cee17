//! `egret completions`: completion scripts for shells.
//!
//! Options and words are in the scripts. What may follow in an argument that is made of keys a script asks, by
//! `egret completions SHELL -- OPTION TEXT`: so much depends on the keys before that no shell is to work it out.

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::serve::keys::{self, ARGUMENTS};

/// What each shell asks by.
const BASH: &str = include_str!("completions/keys.bash");
const ZSH: &str = include_str!("completions/keys.zsh");
const FISH: &str = include_str!("completions/keys.fish");

/// What `egret completions` is asked.
#[derive(Args, Debug)]
#[command(after_help = "For one session: source <(egret completions bash). docs/install.md says how to keep them.")]
pub struct Completions {
    /// The shell
    #[arg(value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]))]
    shell: String,
    /// What a script asks: an option of `egret serve` without its dashes, and its argument so far
    #[arg(last = true, hide = true)]
    argument: Vec<String>,
}

/// Runs `egret completions` for the command line that `of` describes.
pub fn run(asked: &Completions, of: &mut Command) -> Result<()> {
    if let [option, text @ ..] = asked.argument.as_slice() {
        let all = keys::complete(option, text.first().map_or("", String::as_str));
        return crate::print(&all.iter().map(|one| format!("{one}\n")).collect::<String>());
    }
    crate::print(&script(&asked.shell, of))
}

fn script(shell: &str, of: &mut Command) -> String {
    let mut script = Vec::new();
    let mut generate = |shell: Shell| clap_complete::generate(shell, of, "egret", &mut script);
    match shell {
        "zsh" => generate(Shell::Zsh),
        "fish" => generate(Shell::Fish),
        _ => generate(Shell::Bash),
    }
    let script = String::from_utf8_lossy(&script).into_owned();
    let mut options: Vec<&str> = ARGUMENTS.iter().map(|argument| argument.option).collect();
    options.dedup();
    match shell {
        "zsh" => {
            let with_keys = |line: &str| match options.iter().find(|option| line.contains(&format!("--{option}=["))) {
                Some(option) => line.replace(":_default'", &format!(": _egret_keys {option}'")),
                None => line.to_owned(),
            };
            // The first line says what it is that zsh is to load when it is needed.
            let (first, rest) = script.split_once('\n').unwrap_or((&script, ""));
            let rest: Vec<String> = rest.lines().map(with_keys).collect();
            format!("{first}\n{ZSH}{}\n", rest.join("\n"))
        }
        "fish" => {
            let line = |option: &&str| {
                format!(
                    "complete -c egret -n \"__fish_egret_using_subcommand serve\" -l {option} -r -a '(__egret_keys {option})'\n"
                )
            };
            script + FISH + &options.iter().map(line).collect::<String>()
        }
        _ => script + "\n" + BASH,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn each_shell_asks_for_the_keys_of_each_option_that_has_some() {
        let of = |shell: &str| script(shell, &mut Cli::command());
        let (zsh, fish) = (of("zsh"), of("fish"));
        for argument in &ARGUMENTS {
            let option = argument.option;
            // What clap makes of an option is where its keys are asked for.
            assert_eq!(zsh.matches(&format!(": _egret_keys {option}'")).count(), 1, "{option}: {zsh}");
            assert_eq!(fish.matches(&format!("'(__egret_keys {option})'")).count(), 1, "{option}");
            assert!(fish.contains(&format!("__fish_egret_using_subcommand serve\" -l {option} ")), "{option}: {fish}");
        }
        assert!(zsh.starts_with("#compdef egret\n"), "{zsh}");
        let bash = of("bash");
        assert!(bash.starts_with("_egret() {") && bash.trim_end().ends_with(" egret"), "{bash}");
    }
}
