//! Checks a tree of values against a [`Shape`] and gives every leaf its type.
//!
//! Text (`key=value,...`) has strings for leaves, typed sources (JSON, TOML) have numbers and bools. What comes out is
//! the same for both: typed, within its range, every key known, every needed key there.

use serde_json::{Map, Value};

use super::cpus::Cpus;
use super::descriptor::Descriptor;
use super::key::{Foreign, Harmless, Shape, Unset, ValueType, Variants, one_of};
use super::problem::Problem;
use super::scalar::{parse_bytes, parse_flag, parse_name, parse_number};
use crate::nearest::hint;

/// Whether leaves are still text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// `key=value,...`: every leaf is a string, and its key decides what it stands for.
    Text,
    /// JSON or TOML: a number is a number, a bool a bool, and a string neither.
    Typed,
}

/// Checks the arguments of a command, which is no object of the vocabulary but is described like one.
pub fn validate_arguments(
    arguments: Map<String, Value>,
    shape: &Shape,
    spelling: Spelling,
) -> Result<Map<String, Value>, Problem> {
    match validate(arguments.into(), shape, spelling)? {
        Value::Object(valid) => Ok(valid),
        _ => Ok(Map::new()),
    }
}

/// Checks `value` against `shape`.
pub(super) fn validate(value: Value, shape: &Shape, spelling: Spelling) -> Result<Value, Problem> {
    Validator { spelling }.object("", value, shape)
}

struct Validator {
    spelling: Spelling,
}

impl Validator {
    /// `path` is the key that leads here; empty at the top.
    fn object(&self, path: &str, value: Value, shape: &Shape) -> Result<Value, Problem> {
        let Value::Object(given) = value else {
            let place = if path.is_empty() { "it" } else { path };
            return Err(Problem::must(place, "an object of keys", shown(&value)));
        };
        let tag = match &shape.variants {
            Some(variants) => Some(variant(path, &given, variants)?),
            None => None,
        };
        let keys = shape.keys_of(tag);
        let mut valid = Map::new();
        for (name, value) in given {
            let at = join(path, &name);
            if shape.variants.as_ref().is_some_and(|variants| variants.tag == name) {
                valid.insert(name, value);
            } else if let Some(key) = keys.clone().find(|key| key.name == name) {
                valid.insert(name, self.value(&at, value, &key.kind)?);
            } else if let Some(foreign) = shape.foreign.iter().find(|foreign| foreign.name == name) {
                self.harmless(&at, &value, foreign)?;
            } else {
                return Err(unknown(&at, &name, shape, tag));
            }
        }
        for key in keys {
            let at = || join(path, key.name);
            match key.unset {
                _ if valid.contains_key(key.name) => {}
                Unset::Refused => return Err(Problem::Missing { key: at() }),
                Unset::Default(value) => {
                    // A default is spelled as text, whatever the object is.
                    let value = Self { spelling: Spelling::Text }.value(&at(), value.to_string().into(), &key.kind)?;
                    valid.insert(key.name.to_owned(), value);
                }
                Unset::Means(_) => {}
            }
        }
        Ok(Value::Object(valid))
    }

    fn value(&self, at: &str, value: Value, kind: &ValueType) -> Result<Value, Problem> {
        let valid = match (kind, value) {
            (ValueType::Object(shape), value) => return self.object(at, value, shape),
            (ValueType::Child(_, shape), value @ Value::Object(_)) => return self.object(at, value, shape()),
            (ValueType::List(shape), Value::Array(list)) => {
                let items = list.into_iter().enumerate();
                let valid = items.map(|(place, value)| self.object(&format!("{at}.{place}"), value, shape));
                return valid.collect::<Result<Vec<_>, _>>().map(Value::from);
            }
            (_, value) => self.leaf(&value, kind).ok_or(value),
        };
        valid.map_err(|value| {
            let got = match (kind, &value) {
                (ValueType::Hidden(..), _) => "something else".to_owned(),
                // Where numbers are numbers, the text is what is wrong.
                (_, Value::String(text)) if self.spelling == Spelling::Typed => format!("'{text}'"),
                _ => shown(&value),
            };
            Problem::must(at, self.allowed(kind, &value), got)
        })
    }

    /// What would be right, where this was given.
    fn allowed(&self, kind: &ValueType, given: &Value) -> String {
        let is_text = given.is_string();
        let quotes = if is_text { " without quotes" } else { "" };
        match kind {
            _ if self.spelling == Spelling::Text => kind.to_string(),
            ValueType::Flag => format!("true or false{quotes}"),
            ValueType::Number(..)
            | ValueType::Bytes(..)
            | ValueType::PowerOfTwo(..)
            | ValueType::PowerOfTwoBytes(..)
                if is_text =>
            {
                format!("a number{quotes}, {kind}")
            }
            ValueType::Text(..)
            | ValueType::Hidden(..)
            | ValueType::Mode
            | ValueType::Name(..)
            | ValueType::Descriptor
                if given.is_number() || given.is_boolean() =>
            {
                format!("{kind}, in quotes")
            }
            _ => kind.to_string(),
        }
    }

    fn leaf(&self, value: &Value, kind: &ValueType) -> Option<Value> {
        Some(match *kind {
            ValueType::Flag => self.flag(value)?.into(),
            ValueType::Number(least, most, _) => self.number(value, least, most)?.into(),
            ValueType::PowerOfTwo(least, most) => {
                self.number(value, least, most).filter(|number| number.is_power_of_two())?.into()
            }
            ValueType::Bytes(least, most) => self.bytes(value, least, most)?.into(),
            ValueType::PowerOfTwoBytes(least, most) => {
                self.bytes(value, least, most).filter(|bytes| bytes.is_power_of_two())?.into()
            }
            ValueType::Word(words) => value.as_str().filter(|text| words().contains(text))?.into(),
            ValueType::Words(words) => {
                let known = |value: &Value| value.as_str().is_some_and(|text| words().contains(&text));
                value.as_array().filter(|list| list.iter().all(known))?.clone().into()
            }
            ValueType::Settings => {
                let text = |value: &Value| match value {
                    Value::String(text) if !text.contains('\0') => Some(text.clone()),
                    Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
                    _ => None,
                };
                let pairs = value.as_object()?.iter().map(|(name, value)| Some((name.clone(), text(value)?.into())));
                Value::Object(pairs.collect::<Option<Map<_, _>>>()?)
            }
            ValueType::Text(least, most) | ValueType::Hidden(least, most) => {
                // A NUL would end a path early.
                let fits = |text: &&str| (least..=most).contains(&text.len()) && !text.contains('\0');
                value.as_str().filter(fits)?.into()
            }
            ValueType::Mode => {
                let digits =
                    |text: &str| (1..=4).contains(&text.len()) && text.bytes().all(|b| matches!(b, b'0'..=b'7'));
                let is_mode =
                    |text: &&str| digits(text) && u32::from_str_radix(text, 8).is_ok_and(|mode| mode <= 0o777);
                value.as_str().filter(is_mode)?.into()
            }
            ValueType::Name(most) | ValueType::Child(most, _) => parse_name(value.as_str()?, most)?.into(),
            ValueType::Names => self.names(value)?,
            ValueType::Descriptor => value.as_str()?.parse::<Descriptor>().ok()?.to_string().into(),
            ValueType::Users => self.users(value)?,
            ValueType::Cpus => self.cpus(value)?.to_string().into(),
            ValueType::Numbers(least, most) => {
                let numbers = value.as_array()?.iter().map(|value| self.number(value, least, most));
                numbers.collect::<Option<Vec<_>>>()?.into()
            }
            ValueType::Object(_) | ValueType::List(_) => return None,
        })
    }

    fn flag(&self, value: &Value) -> Option<bool> {
        match self.spelling {
            Spelling::Typed => value.as_bool(),
            Spelling::Text => parse_flag(value.as_str()?),
        }
    }

    fn number(&self, value: &Value, least: u64, most: u64) -> Option<u64> {
        let number = match self.spelling {
            Spelling::Typed => value.as_u64(),
            Spelling::Text => parse_number(value.as_str()?),
        };
        number.filter(|number| (least..=most).contains(number))
    }

    fn bytes(&self, value: &Value, least: u64, most: u64) -> Option<u64> {
        let bytes = match self.spelling {
            Spelling::Typed => value.as_u64(),
            Spelling::Text => parse_bytes(value.as_str()?),
        };
        bytes.filter(|bytes| (least..=most).contains(bytes))
    }

    fn names(&self, value: &Value) -> Option<Value> {
        let name = |value: &Value| Some(Value::from(parse_name(value.as_str()?, usize::MAX)?));
        match value {
            Value::Array(names) if names.is_empty() => None,
            Value::Array(names) => names.iter().map(name).collect::<Option<Vec<_>>>().map(Value::from),
            one => name(one).map(|name| vec![name].into()),
        }
    }

    fn users(&self, value: &Value) -> Option<Value> {
        let user = |value: &Value| match value {
            Value::Number(number) => Some(u32::try_from(number.as_u64()?).ok()?.to_string().into()),
            text => self.leaf(text, &ValueType::Text(1, 255)),
        };
        match value {
            Value::Array(users) if users.is_empty() => None,
            Value::Array(users) => users.iter().map(user).collect::<Option<Vec<_>>>().map(Value::from),
            one => user(one).map(|user| vec![user].into()),
        }
    }

    fn cpus(&self, value: &Value) -> Option<Cpus> {
        let cpu = |value| u16::try_from(self.number(value, 0, Cpus::LARGEST.into())?).ok();
        match value {
            Value::Array(list) => Cpus::new(list.iter().map(cpu).collect::<Option<Vec<_>>>()?),
            Value::String(text) => text.parse().ok(),
            value => Cpus::new(vec![cpu(value)?]),
        }
    }

    fn harmless(&self, at: &str, value: &Value, foreign: &Foreign) -> Result<(), Problem> {
        let is_harmless = match foreign.harmless {
            Harmless::No => false,
            Harmless::On => self.flag(value) == Some(true),
            Harmless::Off => self.flag(value) == Some(false),
            Harmless::Zero => self.number(value, 0, 0).is_some(),
            Harmless::Any => true,
        };
        if is_harmless {
            return Ok(());
        }
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Err(Problem::NotDone { what: format!("{at}={value}"), because: foreign.because.to_owned() })
    }
}

fn variant(path: &str, given: &Map<String, Value>, variants: &Variants) -> Result<&'static str, Problem> {
    let key = join(path, variants.tag);
    let value = given.get(variants.tag).ok_or_else(|| Problem::Missing { key: key.clone() })?;
    let known = variants.of.iter().map(|(name, _)| *name);
    if let Some(name) = known.clone().find(|name| value == name) {
        return Ok(name);
    }
    if variants.foreign.iter().any(|name| value == name) {
        let what = format!("{key} {}", shown(value));
        return Err(Problem::NotDone { what, because: variants.because.to_owned() });
    }
    Err(Problem::must(key, one_of(&known.collect::<Vec<_>>()), shown(value)))
}

/// A key that is not this object's: a sibling's, or nobody's.
fn unknown(at: &str, name: &str, shape: &Shape, tag: Option<&'static str>) -> Problem {
    if let (Some(variants), Some(this)) = (&shape.variants, tag) {
        let owners: Vec<_> = variants
            .of
            .iter()
            .filter(|(_, keys)| keys.iter().any(|key| key.name == name))
            .map(|(owner, _)| *owner)
            .collect();
        if !owners.is_empty() {
            let owners = format!("{} {}", variants.tag, one_of(&owners));
            return Problem::Elsewhere { key: at.to_owned(), owners, this: this.to_owned() };
        }
    }
    if let Some((outer, inner)) = name.split_once('.') {
        let hint = format!("dots are for key=value text, here it is {{\"{outer}\": {{\"{inner}\": ...}}}}");
        return Problem::UnknownKey { key: at.to_owned(), hint };
    }
    let mut known: Vec<String> = shape.variants.iter().map(|variants| variants.tag.to_owned()).collect();
    for key in shape.keys_of(tag) {
        match key.kind {
            ValueType::Object(nested) if nested.variants.is_none() => {
                known.extend(nested.keys_of(None).map(|inner| join(key.name, inner.name)));
            }
            _ => known.push(key.name.to_owned()),
        }
    }
    Problem::UnknownKey { key: at.to_owned(), hint: hint(name, known.iter().map(String::as_str)) }
}

/// A value as an error shows it: numbers bare, text in quotes.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) if text.parse::<i128>().is_ok() => text.clone(),
        Value::String(text) => format!("'{text}'"),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}
