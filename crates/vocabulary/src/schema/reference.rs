//! The vocabulary as text for people: help on a terminal, and the tables of `docs/options.md`.

use std::fmt::Write as _;

use super::key::{Key, Shape, ValueType, one_of};

/// The keys of an object as a Markdown table: key, value, default, meaning.
///
/// `docs/options.md` holds exactly these tables; a test says so.
pub fn reference(shape: &Shape) -> String {
    let mut table = String::from("| key | value | default | meaning |\n|---|---|---|---|\n");
    for row in rows(shape) {
        let Row { key, owners, value, default, about } = row;
        let about = if owners.is_empty() { about } else { format!("({owners}) {about}") };
        let _ = writeln!(table, "| `{key}` | {value} | {default} | {about} |");
    }
    for foreign in shape.foreign {
        let _ = writeln!(table, "| `{}` | | | QEMU's, not done here: {}. |", foreign.name, foreign.because);
    }
    table
}

/// The keys of an object as plain text, for `help` on the command line.
pub fn help(shape: &Shape) -> String {
    let mut text = String::new();
    for Row { key, owners, value, default, about } in rows(shape) {
        let owners = if owners.is_empty() { String::new() } else { format!(" ({owners})") };
        let _ = writeln!(text, "  {key}=<{value}>{owners}, default: {default}\n      {about}");
    }
    text.replace('`', "")
}

/// What there is to say of a key.
pub struct Row {
    /// It, with those that it lies in: `addr.path`.
    pub key: String,
    /// What has it: `file or host_device`; empty if all have.
    pub owners: String,
    /// What it holds.
    pub value: String,
    /// What leaving it out means.
    pub default: String,
    /// What it does.
    pub about: String,
}

/// The keys of an object, those within others behind them.
pub fn rows(shape: &Shape) -> Vec<Row> {
    rows_within(shape, "")
}

fn rows_within(shape: &Shape, path: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    if let Some(variants) = &shape.variants {
        let names: Vec<_> = variants.of.iter().map(|(name, _)| *name).collect();
        rows.push(Row {
            key: format!("{path}{}", variants.tag),
            owners: String::new(),
            value: one_of(&names),
            default: "needed".to_owned(),
            about: variants.about.to_owned(),
        });
    }
    // Where there is one variant there is nothing to tell apart.
    let has_variants = shape.variants.as_ref().is_some_and(|variants| variants.of.len() > 1);
    for (key, owners) in shape.all_keys() {
        let owners = if has_variants { owners } else { Vec::new() };
        let at = format!("{path}{}", key.name);
        match key.kind {
            ValueType::Settings => rows.push(row(format!("{at}.NAME"), key, &owners)),
            _ => rows.push(row(at.clone(), key, &owners)),
        }
        match key.kind {
            ValueType::Object(nested) => rows.extend(rows_within(nested, &format!("{at}."))),
            ValueType::List(nested) => rows.extend(rows_within(nested, &format!("{at}.N."))),
            _ => {}
        }
    }
    rows
}

fn row(at: String, key: &Key, owners: &[&str]) -> Row {
    let value = match key.kind {
        ValueType::Number(_, _, unit) if !unit.is_empty() => format!("{} {unit}", key.kind),
        _ => key.kind.to_string(),
    };
    Row { key: at, owners: one_of(owners), value, default: key.unset.to_string(), about: key.about.to_owned() }
}
