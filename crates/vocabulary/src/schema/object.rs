//! What the three kinds of object have in common.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{IoThread, ObjectError, Problem, Secret, Shape, Spelling, ThrottleGroup, TlsCreds, Variants};

/// A kind of object.
pub trait Object: Sized {
    /// What it is called: `iothread`.
    const NOUN: &'static str;
    /// The key that holds its name: `id`.
    const NAME: &'static str;
    /// Its keys.
    const SHAPE: &'static Shape;

    /// Its name; empty for a blockdev inside another that has none.
    fn name(&self) -> &str;

    /// Reads an object from a tree of values, checking every key and value.
    ///
    /// # Errors
    /// The first thing that is wrong, naming the object, the key, what would be right and what was given.
    fn from_value(value: Value, spelling: Spelling) -> Result<Self, ObjectError>;

    /// How errors call it: `iothread 'io0'`.
    fn subject(&self) -> String {
        subject(Self::NOUN, Self::NAME, Some(self.name()))
    }

    /// An error about it.
    fn error(&self, problem: Problem) -> ObjectError {
        ObjectError { subject: self.subject(), problem }
    }
}

/// What `object-add` takes.
pub static OBJECT: Shape = Shape {
    keys: &[],
    variants: Some(Variants {
        tag: "qom-type",
        about: "What the object is.",
        of: &[
            (IoThread::NOUN, IoThread::KEYS),
            (Secret::NOUN, Secret::KEYS),
            (ThrottleGroup::NOUN, ThrottleGroup::KEYS),
            (TlsCreds::NOUN, TlsCreds::KEYS),
        ],
        foreign: &[],
        because: "",
    }),
    foreign: &[],
};

fn subject(noun: &str, key: &str, name: Option<&str>) -> String {
    match name {
        None | Some("") => format!("{noun} without {key}"),
        Some(name) => format!("{noun} '{name}'"),
    }
}

/// Reads an object: shape first, then the struct, then what its values must agree on among themselves.
pub(super) fn read<T: Object>(
    value: Value,
    spelling: Spelling,
    deserialize: impl FnOnce(Value) -> Result<T, serde_json::Error>,
    check: impl FnOnce(&T) -> Result<(), Problem>,
) -> Result<T, ObjectError> {
    let subject = subject(T::NOUN, T::NAME, value.get(T::NAME).and_then(Value::as_str));
    let object = super::validate::validate(value, T::SHAPE, spelling)
        .and_then(|valid| deserialize(valid).map_err(|error| Problem::Together(error.to_string())))
        .and_then(|object| check(&object).map(|()| object));
    object.map_err(|problem| ObjectError { subject, problem })
}

/// Reads an object from the arguments of `--object` or `object-add`, of which `qom-type` has been looked at.
///
/// # Errors
/// As [`from_value`](Object::from_value).
pub fn untagged<T: Object>(mut value: Value, spelling: Spelling) -> Result<T, ObjectError> {
    value.as_object_mut().map(|object| object.remove("qom-type"));
    T::from_value(value, spelling)
}

/// Reads the keys of `shape`, which are those of `T`.
///
/// # Errors
/// The first thing that is wrong with them.
pub fn read_options<T: DeserializeOwned>(value: Value, shape: &Shape, spelling: Spelling) -> Result<T, Problem> {
    let valid = super::validate::validate(value, shape, spelling)?;
    serde_json::from_value(valid).map_err(|error| Problem::Together(error.to_string()))
}

/// What `needed` comes to with every other key of `shape` at its default.
pub(super) fn with_defaults<T: DeserializeOwned>(needed: Value, shape: &Shape) -> T {
    read_options(needed, shape, Spelling::Typed).expect("what is needed is there")
}

/// Makes a struct with `#[serde(remote = "Self")]` an [`Object`] that cannot be deserialised without its checks.
///
/// The struct brings `own_name` and `check`; its derived `serialize` and `deserialize` are inherent functions, and the
/// traits' go through the checks to them.
macro_rules! object {
    ($type:ident, $noun:literal, $name:literal, $shape:expr) => {
        impl $crate::schema::Object for $type {
            const NOUN: &'static str = $noun;
            const NAME: &'static str = $name;
            const SHAPE: &'static $crate::schema::Shape = $shape;

            fn name(&self) -> &str {
                self.own_name()
            }

            fn from_value(
                value: serde_json::Value,
                spelling: $crate::schema::Spelling,
            ) -> Result<Self, $crate::schema::ObjectError> {
                $crate::schema::object::read(value, spelling, |valid| $type::deserialize(valid), $type::check)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let value = <serde_json::Value as serde::Deserialize>::deserialize(deserializer)?;
                <$type as $crate::schema::Object>::from_value(value, $crate::schema::Spelling::Typed)
                    .map_err(serde::de::Error::custom)
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $type::serialize(self, serializer)
            }
        }
    };
}

pub(super) use object;
