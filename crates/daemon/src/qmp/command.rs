//! The commands: a table, from which they run, and from which help, reference and introspection are made.

use serde_json::{Map, Value};

use super::{QmpError, block, luns, objects, own};
use crate::daemon::Daemon;
use crate::schema::{Blockdev, Export, IoThread, Key, Object, Shape, Spelling, fit_arguments};

/// What a command may use.
pub struct Context<'a> {
    /// The objects.
    pub daemon: &'a mut Daemon,
    /// Set by a command that ends the daemon.
    pub quit: bool,
}

/// A command's arguments, which have been checked.
pub type Arguments = Map<String, Value>;

/// A command of the protocol.
#[derive(Debug)]
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// What it takes.
    pub takes: Takes,
    /// What it returns, in JSON as far as it is fixed.
    pub returns: &'static str,
    /// What it does, in one sentence.
    pub about: &'static str,
    pub(super) run: fn(&mut Context<'_>, Arguments) -> Result<Value, QmpError>,
}

/// What a command takes.
#[derive(Clone, Copy, Debug)]
pub enum Takes {
    /// These keys, and any value under those keys that a shape cannot describe.
    Keys(&'static Shape),
    /// These keys, and `value`, which is anything.
    KeysAndValue(&'static Shape),
    /// An object of the vocabulary: its shape, and the key in front that says what it is, if that is not its own.
    Object(&'static Shape, Option<&'static str>),
}

pub(super) const fn keys(keys: &'static [Key]) -> Shape {
    Shape { keys, variants: None, foreign: &[] }
}

static NOTHING: Shape = keys(&[]);

impl Takes {
    pub(super) const NOTHING: Self = Self::Keys(&NOTHING);
    pub(super) const IOTHREAD: Self = Self::Object(IoThread::SHAPE, Some("qom-type"));
    pub(super) const BLOCKDEV: Self = Self::Object(Blockdev::SHAPE, None);
    pub(super) const EXPORT: Self = Self::Object(Export::SHAPE, None);
}

/// Every command, in the order of the reference.
pub fn commands() -> impl Iterator<Item = &'static Command> + Clone {
    own::COMMANDS.iter().chain(objects::COMMANDS).chain(block::COMMANDS).chain(luns::COMMANDS)
}

/// The command of this name.
pub fn find(name: &str) -> Option<&'static Command> {
    commands().find(|command| command.name == name)
}

impl Command {
    /// Checks the arguments and runs.
    ///
    /// # Errors
    /// The arguments are not its own, or it fails; then everything is as it was.
    pub fn call(&self, context: &mut Context<'_>, mut arguments: Arguments) -> Result<Value, QmpError> {
        let checked = match self.takes {
            Takes::Keys(shape) => fit_arguments(arguments, shape, Spelling::Typed)?,
            Takes::KeysAndValue(shape) => {
                let value = arguments.remove("value");
                let mut checked = fit_arguments(arguments, shape, Spelling::Typed)?;
                let missing = || QmpError::generic("Parameter 'value' is missing");
                checked.insert("value".to_owned(), value.ok_or_else(missing)?);
                checked
            }
            // The object checks itself.
            Takes::Object(..) => arguments,
        };
        (self.run)(context, checked)
    }
}

/// A text argument that its shape has checked.
pub(super) fn text<'a>(arguments: &'a Arguments, key: &str) -> &'a str {
    arguments.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// The answer of a command that has nothing to say.
pub(super) fn nothing() -> Value {
    Value::Object(Map::new())
}
