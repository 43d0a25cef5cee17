//! QEMU's syntax of an option's argument: `driver=file,node-name=d0,cache.direct=on`, or JSON.
//!
//! A reader hands over the text and the key that its first value may leave out, and gets a tree:
//!
//! | written | means |
//! |---|---|
//! | `a=1,b=2` | `{"a": "1", "b": "2"}` |
//! | `file,b=2` with the implied key `driver` | `{"driver": "file", "b": "2"}` |
//! | `a.b=1,a.c=2` | `{"a": {"b": "1", "c": "2"}}` |
//! | `a.0=x,a.1=y` | `{"a": ["x", "y"]}` |
//! | `a=1,,2` | `{"a": "1,2"}` |
//! | `a=1,a=2` | `{"a": "2"}`: the last one counts |
//! | `{"a": 1}` | itself |
//! | `{"a": 1, "a": 2}` | an error |
//!
//! Text has no types: every leaf of a `key=value` argument is a string, and what it stands for is decided by the key
//! it belongs to (see [`Spelling`]). Key fragments are a letter followed by letters, digits,
//! `-` and `_`, or decimal digits for a place in a list; lists have no gaps.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use thiserror::Error;

use crate::schema::Spelling;

/// Longest fragment of a key, in bytes, as in QEMU.
const LONGEST_FRAGMENT: usize = 127;

/// How many fragments a key may have; no object here is half as deep.
const DEEPEST: usize = 16;

/// Why an argument is no tree.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KeyvalError {
    /// A key that is not fragments joined by dots.
    #[error("'{0}' is not a key: letters, digits, '-' and '_', parts joined by '.'")]
    Key(String),
    /// A key without a value.
    #[error("expected '=' after '{0}'")]
    NoValue(String),
    /// A word that QEMU takes without a value, spelled with one.
    #[error("words without a value are not taken; write {0}")]
    Bare(String),
    /// A fragment of more than 127 bytes, or a key of too many fragments.
    #[error("key '{0}...' is too long")]
    TooLong(String),
    /// `a=1,a.b=2`, or `a.0=1,a.b=2`.
    #[error("'{0}' cannot hold both a value and keys, or both keys and list places")]
    Inconsistent(String),
    /// `a.1=x` without `a.0`.
    #[error("'{0}' is missing: list places are counted from 0 without gaps")]
    Gap(String),
    /// It begins with `{` and is not JSON.
    #[error("not JSON: {0}")]
    Json(String),
}

/// Reads an option's argument: JSON if it begins with `{`, `key=value,...` otherwise.
///
/// `implied` is the key that the first value may leave out (`driver` for `--blockdev`). The [`Spelling`] tells whether
/// leaves are typed or still text.
///
/// # Errors
/// The text is neither.
pub fn read(text: &str, implied: &str) -> Result<(Value, Spelling), KeyvalError> {
    if text.starts_with('{') {
        let value = crate::json::read(text.as_bytes()).map_err(|error| KeyvalError::Json(error.to_string()))?;
        return Ok((value, Spelling::Typed));
    }
    Ok((parse(text, Some(implied))?, Spelling::Text))
}

/// Reads `key=value,...`; the result is always an object whose leaves are strings.
///
/// # Errors
/// The text breaks a rule of the [syntax](self).
pub fn parse(text: &str, implied: Option<&str>) -> Result<Value, KeyvalError> {
    let mut root = BTreeMap::new();
    let mut rest = text;
    let mut implied = implied;
    while !rest.is_empty() {
        let head = rest.find(['=', ',']).unwrap_or(rest.len());
        let has_value = rest[head..].starts_with('=');
        if let Some(implied) = implied.take().filter(|_| head > 0 && !has_value) {
            // A bare value ends at its first comma: only after a '=' are there doubled ones.
            put(&mut root, implied, rest[..head].to_owned())?;
            rest = rest.get(head + 1..).unwrap_or_default();
            continue;
        }
        let key = &rest[..head];
        check_key(key)?;
        if !has_value {
            return Err(KeyvalError::NoValue(key.to_owned()));
        }
        let (value, after) = take_value(&rest[head + 1..]);
        put(&mut root, key, value)?;
        rest = after;
    }
    let mut object = Map::new();
    for (name, node) in root {
        let value = node.into_value(&name)?;
        object.insert(name, value);
    }
    Ok(Value::Object(object))
}

/// Splits a value from what follows its comma; two commas stand for one.
fn take_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let Some(comma) = rest.find(',') else {
            value.push_str(rest);
            return (value, "");
        };
        value.push_str(&rest[..comma]);
        rest = &rest[comma + 1..];
        match rest.strip_prefix(',') {
            Some(after) => {
                value.push(',');
                rest = after;
            }
            None => return (value, rest),
        }
    }
}

fn check_key(key: &str) -> Result<(), KeyvalError> {
    for (depth, fragment) in key.split('.').enumerate() {
        let mut characters = fragment.chars();
        let is_name = characters.next().is_some_and(|first| first.is_ascii_alphabetic())
            && characters.all(|character| character.is_ascii_alphanumeric() || matches!(character, '-' | '_'));
        if !(is_name || depth > 0 && is_place(fragment)) {
            return Err(KeyvalError::Key(key.to_owned()));
        }
        if fragment.len() > LONGEST_FRAGMENT || depth >= DEEPEST {
            return Err(KeyvalError::TooLong(key.chars().take(32).collect()));
        }
    }
    Ok(())
}

fn is_place(fragment: &str) -> bool {
    !fragment.is_empty() && fragment.bytes().all(|byte| byte.is_ascii_digit())
}

/// A tree while it grows: whether a branch is a list is known only at the end.
enum Node {
    Leaf(String),
    Branch(BTreeMap<String, Node>),
}

impl Node {
    fn into_value(self, path: &str) -> Result<Value, KeyvalError> {
        let branch = match self {
            Self::Leaf(text) => return Ok(Value::String(text)),
            Self::Branch(branch) => branch,
        };
        let places = branch.keys().filter(|name| is_place(name)).count();
        if places == 0 {
            let mut object = Map::new();
            for (name, node) in branch {
                let value = node.into_value(&format!("{path}.{name}"))?;
                object.insert(name, value);
            }
            return Ok(Value::Object(object));
        }
        if places < branch.len() {
            return Err(KeyvalError::Inconsistent(path.to_owned()));
        }
        // `007` and `7` are one place; a number too long to be one is a gap in any case.
        let mut places: BTreeMap<usize, Node> =
            branch.into_iter().map(|(name, node)| (name.parse().unwrap_or(usize::MAX), node)).collect();
        let mut list = Vec::with_capacity(places.len());
        while !places.is_empty() {
            let place = format!("{path}.{}", list.len());
            let node = places.remove(&list.len()).ok_or_else(|| KeyvalError::Gap(place.clone()))?;
            list.push(node.into_value(&place)?);
        }
        Ok(Value::Array(list))
    }
}

fn put(root: &mut BTreeMap<String, Node>, key: &str, value: String) -> Result<(), KeyvalError> {
    let mut branch = root;
    let mut end = 0;
    let mut fragments = key.split('.').peekable();
    while let Some(fragment) = fragments.next() {
        end += fragment.len();
        let clash = || KeyvalError::Inconsistent(key[..end].to_owned());
        if fragments.peek().is_none() {
            return match branch.insert(fragment.to_owned(), Node::Leaf(value)) {
                Some(Node::Branch(_)) => Err(clash()),
                _ => Ok(()),
            };
        }
        branch = match branch.entry(fragment.to_owned()).or_insert_with(|| Node::Branch(BTreeMap::new())) {
            Node::Branch(next) => next,
            Node::Leaf(_) => return Err(clash()),
        };
        end += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_mean_the_same_tree_as_in_qemu() {
        for (text, implied, tree) in [
            ("", None, json!({})),
            ("", Some("driver"), json!({})),
            ("a=1,b=2", None, json!({"a": "1", "b": "2"})),
            ("a=1,", None, json!({"a": "1"})),
            ("a=", None, json!({"a": ""})),
            ("a==b", None, json!({"a": "=b"})),
            ("file", Some("driver"), json!({"driver": "file"})),
            ("file,", Some("driver"), json!({"driver": "file"})),
            ("driver=file,a=1", Some("driver"), json!({"driver": "file", "a": "1"})),
            ("a=1,driver=file", Some("driver"), json!({"a": "1", "driver": "file"})),
            ("with space,a=1", Some("driver"), json!({"driver": "with space", "a": "1"})),
            ("a=1,a=2", None, json!({"a": "2"})),
            ("a=1,,2", None, json!({"a": "1,2"})),
            ("a=,,,,", None, json!({"a": ",,"})),
            ("a=1,,,b=2", None, json!({"a": "1,", "b": "2"})),
            ("a.b=1,a.c=2", None, json!({"a": {"b": "1", "c": "2"}})),
            ("a.0=x,a.1=y", None, json!({"a": ["x", "y"]})),
            ("a.1=y,a.0=x", None, json!({"a": ["x", "y"]})),
            ("a.00=x", None, json!({"a": ["x"]})),
            ("a.0.b=x,a.0.c=z,a.1.b=y", None, json!({"a": [{"b": "x", "c": "z"}, {"b": "y"}]})),
            ("a_b-C9=1", None, json!({"a_b-C9": "1"})),
            ("p=/tmp/ä.img", None, json!({"p": "/tmp/ä.img"})),
        ] {
            assert_eq!(parse(text, implied), Ok(tree), "{text:?}");
        }
    }

    #[test]
    fn what_breaks_the_syntax_is_named() {
        use KeyvalError::{Gap, Inconsistent, Key, NoValue, TooLong};
        let text = String::from;
        for (argument, implied, error) in [
            ("a", None, NoValue(text("a"))),
            ("file,node-name", Some("driver"), NoValue(text("node-name"))),
            ("=x", None, Key(text(""))),
            (",a=1", Some("driver"), Key(text(""))),
            ("file,,a", Some("driver"), Key(text(""))),
            ("a.=1", None, Key(text("a."))),
            (".a=1", None, Key(text(".a"))),
            ("a..b=1", None, Key(text("a..b"))),
            ("0=1", None, Key(text("0"))),
            ("1a=1", None, Key(text("1a"))),
            ("a.1b=1", None, Key(text("a.1b"))),
            ("a b=1", None, Key(text("a b"))),
            ("a=1,a.b=2", None, Inconsistent(text("a"))),
            ("a.b=1,a=2", None, Inconsistent(text("a"))),
            ("a.b.c=1,a.b=2", None, Inconsistent(text("a.b"))),
            ("a.0=1,a.b=2", None, Inconsistent(text("a"))),
            ("a.1=1", None, Gap(text("a.0"))),
            ("a.0=1,a.2=1", None, Gap(text("a.1"))),
            ("a.99999999999999999999999=1", None, Gap(text("a.0"))),
            ("a.b.0.c.1=x", None, Gap(text("a.b.0.c.0"))),
        ] {
            assert_eq!(parse(argument, implied), Err(error), "{argument:?}");
        }
        let long = "k".repeat(128);
        assert_eq!(parse(&format!("{long}=1"), None), Err(TooLong("k".repeat(32))));
        assert!(matches!(parse(&format!("{}=1", ["a"; 17].join(".")), None), Err(TooLong(_))));
        assert!(parse(&format!("{}=1", "k".repeat(127)), None).is_ok());
    }

    #[test]
    fn json_is_read_as_it_is_and_keeps_its_types() {
        let (value, spelling) = read(r#"{"driver": "null-co", "size": 5}"#, "driver").unwrap();
        assert_eq!(value, json!({"driver": "null-co", "size": 5}));
        assert_eq!(spelling, Spelling::Typed);
        assert_eq!(read("null-co,size=5", "driver").unwrap().1, Spelling::Text);
        assert!(matches!(read("{", "driver"), Err(KeyvalError::Json(_))));
        assert!(matches!(read("{} x", "driver"), Err(KeyvalError::Json(_))));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*") {
            let _ = read(&text, "driver");
        }

        #[test]
        fn no_near_miss_makes_the_reader_panic(text in "[a-c0-2.,={}]{0,40}") {
            let _ = read(&text, "driver");
        }

        #[test]
        fn any_value_survives_when_its_commas_are_doubled(value in "\\PC*") {
            let parsed = parse(&format!("k={},z=1", value.replace(',', ",,")), None).unwrap();
            prop_assert_eq!(&parsed["k"], &Value::String(value));
        }
    }
}
