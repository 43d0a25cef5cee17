//! One client's conversation: greeting, negotiation, then a command and its answer at a time.

use egret_vocabulary::json;
use egret_vocabulary::schema::{Spelling, validate_arguments};
use serde_json::{Map, Value, json};

use super::command::{self, Arguments, Command, Context};
use super::commands::COMMANDS;
use super::frame::FrameError;
use super::{Descriptors, QmpError, own};
use crate::daemon::Daemon;

/// How far a conversation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The client has been greeted, and has not said what it can do.
    Negotiating,
    /// Commands run and events are told.
    Commanding,
}

/// A conversation. What it says are JSON values; how they travel is somebody else's business.
#[derive(Debug)]
pub struct Session {
    stage: Stage,
}

/// What a message comes to.
pub enum Heard {
    /// Say this.
    Answer(Value),
    /// Run this, and say what comes of it.
    Order(Order),
}

/// A command that is to run, its arguments checked.
pub struct Order {
    pub(super) command: &'static Command,
    pub(super) arguments: Arguments,
    pub(super) descriptors: Descriptors,
    id: Option<Value>,
}

impl Order {
    /// What to say when it has run.
    pub(super) fn answer(self, outcome: Result<Value, QmpError>) -> Value {
        answer(self.id, outcome)
    }

    /// Runs it, with the daemon at hand; what to say then, and what is left of what its client sent beside it.
    pub fn run(mut self, daemon: &mut Daemon) -> (Value, Descriptors) {
        let mut context = Context { daemon, descriptors: &mut self.descriptors, commands: &COMMANDS };
        let outcome = self.command.run(&mut context, self.arguments);
        (answer(self.id, outcome), self.descriptors)
    }
}

fn answer(id: Option<Value>, outcome: Result<Value, QmpError>) -> Value {
    let mut answer = match outcome {
        Ok(value) => Map::from_iter([("return".to_owned(), value)]),
        Err(error) => Map::from_iter([("error".to_owned(), error.to_json())]),
    };
    answer.extend(id.map(|id| ("id".to_owned(), id)));
    answer.into()
}

/// A command as it was sent.
struct Sent {
    name: String,
    arguments: Map<String, Value>,
}

impl Session {
    /// A new conversation, and what it begins with.
    pub fn begin() -> (Self, Value) {
        let greeting = json!({ "QMP": { "version": own::version(), "capabilities": [] } });
        (Self { stage: Stage::Negotiating }, greeting)
    }

    /// Whether the client is told of events.
    pub fn hears_events(&self) -> bool {
        self.stage == Stage::Commanding
    }

    /// Takes one message, or what was to be one.
    pub fn hear(&mut self, message: Result<Vec<u8>, FrameError>) -> Heard {
        let mut id = None;
        let taken = message
            .map_err(|error| QmpError::generic(error.to_string()))
            .and_then(|bytes| read(&bytes))
            .and_then(|mut message| {
                id = message.remove("id");
                self.take(sent(message)?)
            });
        match taken {
            Ok(Some((command, arguments))) => {
                Heard::Order(Order { command, arguments, descriptors: Descriptors::default(), id })
            }
            Ok(None) => Heard::Answer(answer(id, Ok(command::nothing()))),
            Err(error) => Heard::Answer(answer(id, Err(error))),
        }
    }

    /// The command that is to run; `None` where there is nothing more to do.
    fn take(&mut self, sent: Sent) -> Result<Option<(&'static Command, Arguments)>, QmpError> {
        match (sent.name.as_str(), self.stage) {
            ("qmp_capabilities", Stage::Negotiating) => {
                own::enable(validate_arguments(sent.arguments, &own::CAPABILITIES, Spelling::Typed)?)?;
                self.stage = Stage::Commanding;
                Ok(None)
            }
            ("qmp_capabilities", Stage::Commanding) => {
                Err(QmpError::no_command("Capabilities negotiation is already complete, command ignored"))
            }
            (_, Stage::Negotiating) => {
                Err(QmpError::no_command("Expecting capabilities negotiation with 'qmp_capabilities'"))
            }
            (name, Stage::Commanding) => {
                let command = COMMANDS
                    .find(name)
                    .ok_or_else(|| QmpError::no_command(format!("The command {name} has not been found")))?;
                Ok(Some((command, command.check(sent.arguments)?)))
            }
        }
    }
}

fn read(bytes: &[u8]) -> Result<Map<String, Value>, QmpError> {
    match json::read(bytes) {
        Ok(Value::Object(message)) => Ok(message),
        Ok(_) => Err(QmpError::generic("QMP input must be a JSON object")),
        Err(error) => Err(QmpError::generic(format!("JSON parse error, {error}"))),
    }
}

fn sent(mut message: Map<String, Value>) -> Result<Sent, QmpError> {
    let name = message.remove("execute");
    let arguments = message.remove("arguments");
    if let Some(member) = message.keys().next() {
        let text = match member.as_str() {
            "exec-oob" => "QMP input member 'exec-oob' is unexpected: out-of-band execution is not offered".to_owned(),
            member => format!("QMP input member '{member}' is unexpected"),
        };
        return Err(QmpError::generic(text));
    }
    let name = match name {
        Some(Value::String(name)) => name,
        Some(_) => return Err(QmpError::generic("QMP input member 'execute' must be a string")),
        None => return Err(QmpError::generic("QMP input lacks member 'execute'")),
    };
    match arguments {
        None => Ok(Sent { name, arguments: Map::new() }),
        Some(Value::Object(arguments)) => Ok(Sent { name, arguments }),
        Some(_) => Err(QmpError::generic("QMP input member 'arguments' must be an object")),
    }
}

#[cfg(test)]
mod tests;
