//! `egret ctl`: one QMP command from a shell.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use egret_lab::qmp::Qmp;
use egret_vocabulary::keyval;
use serde_json::Value;

/// How long a monitor may take to greet: a disk's socket, and that of metrics, never does.
const GREETING: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 10_000 });

/// What `egret ctl` is asked.
#[derive(Args, Debug)]
#[command(after_help = "docs/qmp.md lists the commands, and so does: egret ctl SOCKET query-commands")]
pub struct Ctl {
    /// The monitor's socket
    socket: PathBuf,
    /// A command, such as query-block-exports
    command: String,
    /// Its arguments: KEY=VALUE, dots leading into objects and lists, or one JSON object; a value is JSON if it looks
    /// like it, or a hexadecimal number (0x...), so that text of digits is in quotes: 'port="10809"'
    #[arg(value_name = "KEY=VALUE")]
    arguments: Vec<String>,
    /// Print the answer as it came, on one line
    #[arg(long)]
    json: bool,
}

/// Runs `egret ctl`.
pub fn run(asked: &Ctl) -> Result<()> {
    let arguments = arguments(&asked.arguments)?;
    let mut qmp = Qmp::connect(&asked.socket, Some(GREETING))?;
    qmp.wait_as_long_as_it_takes()?;
    let answer = qmp.run(&asked.command, arguments)?;
    crate::print(&if asked.json { format!("{answer}\n") } else { shown(&answer) })
}

/// The arguments as a command has them: what looks like JSON is JSON, and the rest is text.
fn arguments(words: &[String]) -> Result<Value> {
    match words {
        [object] if object.starts_with('{') => serde_json::from_str(object).context("not JSON"),
        words => {
            let doubled: Vec<String> = words.iter().map(|word| word.replace(',', ",,")).collect();
            Ok(typed(keyval::parse(&doubled.join(","), None)?))
        }
    }
}

fn typed(value: Value) -> Value {
    match value {
        Value::String(text) => match text.as_str() {
            "on" => true.into(),
            "off" => false.into(),
            // As options take it, though JSON does not.
            number if number.starts_with("0x") => {
                u64::from_str_radix(&number[2..], 16).map_or_else(|_| number.into(), Value::from)
            }
            _ => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        },
        Value::Array(list) => list.into_iter().map(typed).collect(),
        Value::Object(object) => Value::Object(object.into_iter().map(|(key, value)| (key, typed(value))).collect()),
        other => other,
    }
}

/// An answer for people: a list of objects as a table, nothing for an empty object, anything else as JSON.
fn shown(answer: &Value) -> String {
    match answer {
        Value::Object(object) if object.is_empty() => String::new(),
        Value::Array(list) if !list.is_empty() && list.iter().all(Value::is_object) => table(list),
        other => format!("{other:#}\n"),
    }
}

/// One row for each object; what lies in an object or a list is left to `--json`, which a last line says.
fn table(list: &[Value]) -> String {
    let (mut columns, mut left_out): (Vec<&String>, Vec<&String>) = Default::default();
    for (key, value) in list.iter().filter_map(Value::as_object).flatten() {
        let place = if value.is_object() || value.is_array() { &mut left_out } else { &mut columns };
        if !place.contains(&key) {
            place.push(key);
        }
    }
    // What names a thing comes first.
    columns.sort_by_key(|key| !matches!(key.as_str(), "id" | "name" | "node-name" | "device"));
    let cell = |row: &Value, key: &str| match &row[key] {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    };
    let mut rows: Vec<Vec<String>> = vec![columns.iter().map(|key| (*key).clone()).collect()];
    rows.extend(list.iter().map(|row| columns.iter().map(|key| cell(row, key)).collect()));
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    let table: String = rows.iter().map(line).collect();
    if left_out.is_empty() {
        return table;
    }
    let left_out: Vec<&str> = left_out.into_iter().map(String::as_str).collect();
    format!("{table}left out: {} (--json has it)\n", left_out.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_socket_on_which_nobody_greets_is_said_to_be_none_of_a_monitor() {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("disk.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let asked = Ctl { socket, command: "query-version".to_owned(), arguments: Vec::new(), json: false };
        let error = run(&asked).unwrap_err().to_string();
        assert!(error.contains("it does not greet: is it a monitor's socket?"), "{error}");
    }

    #[test]
    fn arguments_are_json_where_they_look_like_it() {
        let words = ["id=e0", "writable=on", "num-queues=4", "addr.type=unix", "addr.path=/a,b", "iothread.0=io0"];
        assert_eq!(
            arguments(&words.map(str::to_owned)).unwrap(),
            json!({"id": "e0", "writable": true, "num-queues": 4, "addr": {"type": "unix", "path": "/a,b"},
                   "iothread": ["io0"]})
        );
        assert_eq!(arguments(&["port=\"10809\"".to_owned()]).unwrap(), json!({"port": "10809"}));
        assert_eq!(arguments(&["{\"a\": [1]}".to_owned()]).unwrap(), json!({"a": [1]}));
        assert_eq!(arguments(&[]).unwrap(), json!({}));
        assert_eq!(
            arguments(&["wwn=0x5000c50015ea71ac".to_owned()]).unwrap(),
            json!({"wwn": 0x5000_c500_15ea_71ac_u64})
        );
        assert_eq!(arguments(&["name=0xyz".to_owned()]).unwrap(), json!({"name": "0xyz"}));
        assert!(arguments(&["id".to_owned()]).is_err());
    }

    #[test]
    fn a_list_of_objects_is_a_table_whose_first_column_names_them() {
        let list = json!([{"ready": true, "id": "longer", "more": {}}, {"id": "b", "count": 3}]);
        let table = "id      ready  count\nlonger  true   -\nb       -      3\n";
        assert_eq!(shown(&list), format!("{table}left out: more (--json has it)\n"));
        assert_eq!(shown(&json!([{"id": "b"}])), "id\nb\n");
        assert_eq!(shown(&json!({})), "");
        assert_eq!(shown(&json!(7)), "7\n");
    }
}
