//! `egret man`: the manual's pages, from what the command line and the objects' keys are declared by.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use egret_vocabulary::schema::{self, Row};

use crate::serve::keys::{ARGUMENTS, Argument};

/// What `egret man` is asked.
#[derive(Args, Debug)]
#[command(after_help = "egret man . && man ./egret-serve.1")]
pub struct Manual {
    /// Where the pages go; it is made if it is not there
    dir: PathBuf,
}

/// Runs `egret man` for the command line that `of` describes.
pub fn run(asked: &Manual, of: Command) -> Result<()> {
    let shown = |path: &std::path::Path| path.display().to_string();
    fs::create_dir_all(&asked.dir).with_context(|| shown(&asked.dir))?;
    for (name, page) in pages(of)? {
        let path = asked.dir.join(format!("{name}.1"));
        fs::write(&path, page).with_context(|| shown(&path))?;
    }
    Ok(())
}

/// Each page by its name: `egret`, `egret-serve` and so on.
fn pages(of: Command) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut root = of.disable_help_subcommand(true);
    root.build();
    let mut pages = Vec::new();
    let mut left = vec![("egret".to_owned(), root)];
    while let Some((name, command)) = left.pop() {
        let inner = command.get_subcommands().filter(|inner| !inner.is_hide_set());
        left.extend(inner.map(|inner| (format!("{name}-{}", inner.get_name()), inner.clone())));
        let mut page = Vec::new();
        write(&name, command, &mut page)?;
        pages.push((name, page));
    }
    Ok(pages)
}

fn write(name: &str, command: Command, page: &mut Vec<u8>) -> io::Result<()> {
    let notes = command.get_after_help().map(ToString::to_string);
    let has_commands = command.has_subcommands();
    let man = Man::new(command.display_name(name.to_owned()));
    let man = man.source(concat!("egret ", env!("CARGO_PKG_VERSION"))).manual("Egret");
    man.render_title(page)?;
    man.render_name_section(page)?;
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    if name == "egret-serve" {
        ARGUMENTS.iter().try_for_each(|argument| keys(argument, page))?;
    }
    if has_commands {
        man.render_subcommands_section(page)?;
    }
    let mut end = Roff::new();
    if let Some(notes) = notes {
        end.control("SH", ["NOTES"]).text([roman(notes)]);
    }
    if name != "egret" {
        let above = name.rsplit_once('-').map_or("egret", |(above, _)| above);
        end.control("SH", ["SEE ALSO"]).text([bold(above), roman("(1)")]);
    }
    end.to_writer(page)
}

/// The keys of an option's argument, as `docs/options.md` has them.
fn keys(argument: &Argument, page: &mut dyn Write) -> io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", [argument.heading().as_str()]).text([roman(argument.head())]);
    for Row { key, owners, value, default, about } in schema::rows(argument.shape) {
        let owners = if owners.is_empty() { owners } else { format!(" ({owners})") };
        roff.control("TP", []).text([bold(key), roman(format!("={value}{owners}, default: {default}"))]);
        roff.text([roman(about.replace('`', ""))]);
    }
    roff.to_writer(page)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::Cli;

    /// What a reader sees of a page, roughly: without the font changes, and with hyphens for what prints as such.
    fn plain(page: &[u8]) -> String {
        let text = String::from_utf8(page.to_vec()).unwrap();
        let text = ["\\fB", "\\fI", "\\fR", "\\&"].iter().fold(text, |text, code| text.replace(code, ""));
        text.replace("\\-", "-").replace("\\*(Aq", "'")
    }

    #[test]
    fn every_command_has_a_page_with_all_of_its_options_and_that_of_serve_has_every_key() {
        let pages: BTreeMap<String, String> =
            pages(Cli::command()).unwrap().iter().map(|(name, page)| (name.clone(), plain(page))).collect();
        let command = Cli::command();
        for inner in command.get_subcommands() {
            let page = &pages[&format!("egret-{}", inner.get_name())];
            let options = inner.get_arguments().filter(|argument| !argument.is_hide_set());
            for option in options.filter_map(|option| option.get_long()) {
                assert!(page.contains(&format!("--{option}")), "{}: --{option}", inner.get_name());
            }
            assert!(pages["egret"].contains(&format!("egret-{}(1)", inner.get_name())), "{}", inner.get_name());
            assert!(page.contains(&format!("egret-{} - ", inner.get_name())), "{page}");
        }
        assert!(pages.contains_key("egret-config-check"));
        let serve = &pages["egret-serve"];
        for row in ARGUMENTS.iter().flat_map(|argument| schema::rows(argument.shape)) {
            assert!(serve.contains(&format!("\n{}={}", row.key, row.value)), "{}", row.key);
        }
    }
}
