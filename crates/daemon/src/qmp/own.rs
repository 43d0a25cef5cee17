//! Commands about the monitor itself.

use egret_vocabulary::options;
use egret_vocabulary::schema::{Shape, ValueType};
use serde_json::{Value, json};

use super::QmpError;
use super::command::{Arguments, Command, Run, Takes, nothing, typed};
use super::introspect::schema;

/// The QEMU whose vocabulary this is.
const VOCABULARY: (u32, u32, u32) = (10, 0, 0);

options! {
    struct Capabilities {
        /// None is offered.
        enable: Option<Vec<String>>, ValueType::Words(|| vec!["oob"]), unset "none";
    }
}

pub(super) static CAPABILITIES: Shape = Shape::of(Capabilities::KEYS);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "qmp_capabilities",
        takes: Takes::Keys(&CAPABILITIES),
        returns: "{}",
        about: "Begin: a client says this first, and once.",
        // The session takes it.
        run: Run::Describe(|_| nothing()),
    },
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
        run: Run::Describe(|commands| commands.iter().map(|command| json!({ "name": command.name })).collect()),
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

/// Takes what a client says it can do, once its keys have been checked.
///
/// # Errors
/// It wants what is not offered.
pub(super) fn enable(arguments: Arguments) -> Result<(), QmpError> {
    let Capabilities { enable } = typed(arguments)?;
    match enable.unwrap_or_default().first() {
        Some(capability) => Err(QmpError::generic(format!("Capability \"{capability}\" is not offered"))),
        None => Ok(()),
    }
}
