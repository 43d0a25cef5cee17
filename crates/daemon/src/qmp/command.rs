//! What a command is, and what a table of them: from it they run, and help, reference and introspection are made.

use egret_vocabulary::schema::{Blockdev, Export, OBJECT, Object, Shape, Spelling, validate_arguments};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{Descriptors, QmpError};
use crate::daemon::{Daemon, View};

/// What a change may use.
pub struct Context<'a> {
    /// The objects.
    pub daemon: &'a mut Daemon,
    /// What the client has sent beside its commands.
    pub descriptors: &'a mut Descriptors,
    /// The commands that there are.
    pub commands: &'static Table,
}

/// How a command runs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Run {
    /// It changes no object, and is answered at once, whatever change is in work: it looks, or has an export go on.
    Query(fn(&View, Arguments) -> Result<Value, QmpError>),
    /// It changes objects, or asks them, and waits for the changes before it.
    Mutate(fn(&mut Context<'_>, Arguments) -> Result<Value, QmpError>),
    /// It tells of the commands themselves.
    Describe(fn(&Table) -> Value),
    /// It ends the daemon.
    Quit,
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
    pub(super) run: Run,
}

/// What a command takes.
#[derive(Clone, Copy, Debug)]
pub enum Takes {
    /// These keys, and any value under those keys that a shape cannot describe.
    Keys(&'static Shape),
    /// These keys, and `value`, which is anything.
    KeysAndValue(&'static Shape),
    /// An object of the vocabulary.
    Object {
        /// What it is called.
        noun: &'static str,
        /// Its keys.
        shape: &'static Shape,
    },
    /// An object of one of the kinds that are variants of this shape.
    AnyObject(&'static Shape),
}

static NOTHING: Shape = Shape::of(&[]);

impl Takes {
    pub(super) const NOTHING: Self = Self::Keys(&NOTHING);
    pub(super) const ANY_OBJECT: Self = Self::AnyObject(&OBJECT);
    pub(super) const BLOCKDEV: Self = Self::object::<Blockdev>();
    pub(super) const EXPORT: Self = Self::object::<Export>();

    const fn object<T: Object>() -> Self {
        Self::Object { noun: T::NOUN, shape: T::SHAPE }
    }
}

/// Commands, by what they are about.
#[derive(Debug)]
pub struct Table(pub(super) &'static [&'static [Command]]);

impl Table {
    /// Every command, in the order of the reference.
    pub fn iter(&self) -> impl Iterator<Item = &'static Command> + use<> {
        self.0.iter().copied().flatten()
    }

    /// The command of this name.
    pub fn find(&self, name: &str) -> Option<&'static Command> {
        self.iter().find(|command| command.name == name)
    }
}

impl Command {
    /// Checks the arguments and runs, with the daemon at hand.
    ///
    /// # Errors
    /// The arguments are not its own, or it fails; then everything is as it was.
    pub fn call(&self, context: &mut Context<'_>, arguments: Arguments) -> Result<Value, QmpError> {
        self.run(context, self.check(arguments)?)
    }

    /// Runs with arguments that have been checked.
    pub(super) fn run(&self, context: &mut Context<'_>, checked: Arguments) -> Result<Value, QmpError> {
        match self.run {
            Run::Query(query) => query(&context.daemon.view(), checked),
            Run::Mutate(mutate) => mutate(context, checked),
            Run::Describe(describe) => Ok(describe(context.commands)),
            Run::Quit => Ok(nothing()),
        }
    }

    /// Checks the arguments.
    pub(super) fn check(&self, mut arguments: Arguments) -> Result<Arguments, QmpError> {
        Ok(match self.takes {
            Takes::Keys(shape) => validate_arguments(arguments, shape, Spelling::Typed)?,
            Takes::KeysAndValue(shape) => {
                let value = arguments.remove("value");
                let mut checked = validate_arguments(arguments, shape, Spelling::Typed)?;
                let missing = || QmpError::generic("Parameter 'value' is missing");
                checked.insert("value".to_owned(), value.ok_or_else(missing)?);
                checked
            }
            // The object checks itself.
            Takes::Object { .. } | Takes::AnyObject(_) => arguments,
        })
    }
}

/// Arguments that have been checked, as the struct whose keys they are.
pub(super) fn typed<T: DeserializeOwned>(arguments: Arguments) -> Result<T, QmpError> {
    serde_json::from_value(arguments.into()).map_err(|error| QmpError::generic(error.to_string()))
}

/// A text argument that its shape has checked.
pub(super) fn text<'a>(arguments: &'a Arguments, key: &str) -> &'a str {
    arguments.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// The answer of a command that has nothing to say.
pub(super) fn nothing() -> Value {
    Value::Object(Map::new())
}
