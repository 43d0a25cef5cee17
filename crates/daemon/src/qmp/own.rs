//! Commands about the monitor itself.

use serde_json::{Value, json};

use super::command::{Command, Run, Takes};
use super::introspect::schema;

/// The QEMU whose vocabulary this is.
const VOCABULARY: (u32, u32, u32) = (10, 0, 0);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "query-version",
        takes: Takes::NOTHING,
        returns: r#"{"qemu": {"major", "minor", "micro"}, "package"}"#,
        about: "Which QEMU's vocabulary is spoken, and in `package` which Egret speaks it.",
        run: Run::Query(|_, _| Ok(version())),
    },
    Command {
        name: "query-commands",
        takes: Takes::NOTHING,
        returns: r#"[{"name"}]"#,
        about: "The names of all commands.",
        run: Run::Describe(|commands| {
            let names = ["qmp_capabilities"].into_iter().chain(commands.iter().map(|command| command.name));
            names.map(|name| json!({ "name": name })).collect()
        }),
    },
    Command {
        name: "query-qmp-schema",
        takes: Takes::NOTHING,
        returns: r#"[{"name", "meta-type", ...}]"#,
        about: "The commands, their arguments and the events, for programs.",
        run: Run::Describe(schema),
    },
    Command {
        name: "quit",
        takes: Takes::NOTHING,
        returns: "{}",
        about: "End the daemon: clients are cut off when what they have in flight has ended.",
        run: Run::Quit,
    },
];

/// What `query-version` answers, and the greeting tells.
pub(super) fn version() -> Value {
    let (major, minor, micro) = VOCABULARY;
    json!({
        "qemu": { "major": major, "minor": minor, "micro": micro },
        "package": concat!("egret-", env!("CARGO_PKG_VERSION")),
    })
}
