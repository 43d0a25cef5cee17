//! The commands as text for people: the tables of `docs/qmp.md`.

use std::fmt::Write as _;

use egret_vocabulary::schema::{Shape, reference as table};

use super::command::Takes;
use super::commands::COMMANDS;
use super::event::EVENTS;

/// Commands and events as Markdown; `docs/qmp.md` holds exactly this, a test says so, and
/// `EGRET_BLESS=1` writes it anew.
pub fn reference() -> String {
    let mut text = String::from("## Commands\n\n");
    for command in COMMANDS.iter() {
        let _ = writeln!(text, "### `{}`\n\n{}\n", command.name, command.about);
        let takes = match command.takes {
            Takes::Keys(Shape { keys: [], .. }) => String::new(),
            Takes::Keys(shape) => format!("{}\n", table(shape)),
            Takes::KeysAndValue(shape) => format!("{}| `value` | any | needed | The value. |\n\n", table(shape)),
            Takes::Object { noun, .. } => format!("Takes the keys of [options.md](options.md#{noun}).\n\n"),
            Takes::AnyObject(shape) => shape.variants.as_ref().map_or_else(String::new, |kinds| {
                let links = kinds.of.iter().map(|(kind, _)| format!("[{kind}](options.md#{kind})"));
                let (tag, links) = (kinds.tag, links.collect::<Vec<_>>().join(", "));
                format!("Takes `{tag}` and the keys of what that says: {links}.\n\n")
            }),
        };
        let _ = writeln!(text, "{takes}Returns `{}`.\n", command.returns);
    }
    text.push_str("## Events\n\n| event | data | when |\n|---|---|---|\n");
    for (name, data, _, about) in EVENTS {
        let _ = writeln!(text, "| `{name}` | `{data}` | {about} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_in_the_docs_is_the_table_of_commands() {
        let text = reference();
        assert!(!text.contains(&format!("{} bytes", usize::MAX)), "what has no limit has none in the reference");
        crate::docs::hold("qmp.md", "from the table of commands", &text);
    }
}
