//! The vocabulary as data: which keys an object has, what they hold, and what leaving one out means.
//!
//! Values are checked against these tables ([`validate`](mod@super::validate)); help texts, the reference in
//! `docs/options.md` and QMP's introspection are made from them. [`options!`](crate::options) makes each table and the
//! struct that holds its values from one declaration.

use std::fmt;

/// The keys of one kind of object.
#[derive(Debug)]
pub struct Shape {
    /// Keys that every object of this kind has.
    pub keys: &'static [Key],
    /// Keys that depend on the value of one key (`driver`, `type`).
    pub variants: Option<Variants>,
    /// Keys that QEMU has and that are not done here.
    pub foreign: &'static [Foreign],
}

/// Keys that depend on another key's value.
#[derive(Debug)]
pub struct Variants {
    /// The key that decides.
    pub tag: &'static str,
    /// What it decides, in one sentence.
    pub about: &'static str,
    /// Its values, and the keys that each adds.
    pub of: &'static [(&'static str, &'static [Key])],
    /// Values that QEMU knows and that are not done here.
    pub foreign: &'static [&'static str],
    /// Why they are not.
    pub because: &'static str,
}

/// One key of an object.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// How it is spelled.
    pub name: &'static str,
    /// What it holds.
    pub kind: ValueType,
    /// What leaving it out means.
    pub unset: Unset,
    /// What it does, in one sentence.
    pub about: &'static str,
}

/// What leaving a key out means.
#[derive(Clone, Copy)]
pub enum Unset {
    /// An error.
    Refused,
    /// This value, which the check puts in its place.
    Default(&'static (dyn fmt::Display + Sync)),
    /// It stays unset, and whoever reads it knows what that means: this value, or what these words say.
    Means(&'static (dyn fmt::Display + Sync)),
}

/// What a key holds.
#[derive(Clone, Copy, Debug)]
pub enum ValueType {
    /// `on` or `off`; in typed sources a bool.
    Flag,
    /// A whole number, inclusive of both ends; the last field is its unit, or nothing.
    Number(u64, u64, &'static str),
    /// Bytes, inclusive of both ends; in text with an optional suffix (`64K`, `1.5G`).
    Bytes(u64, u64),
    /// As [`Bytes`](Self::Bytes), and a power of two.
    PowerOfTwoBytes(u64, u64),
    /// As [`Number`](Self::Number) without unit, and a power of two.
    PowerOfTwo(u64, u64),
    /// One of these words.
    Word(fn() -> Vec<&'static str>),
    /// A list of these words.
    Words(fn() -> Vec<&'static str>),
    /// Names and texts, whatever they are.
    Settings,
    /// Text of so many bytes, inclusive of both ends.
    Text(usize, usize),
    /// Likewise, and no error shows it.
    Hidden(usize, usize),
    /// A file's permissions, in octal: `0600`.
    Mode,
    /// A name of at most this many bytes: a letter, then letters, digits, `-`, `.` and `_`.
    Name(usize),
    /// A name, or a list of names.
    Names,
    /// A descriptor that the daemon was started with, as text: its number, or its name.
    Descriptor,
    /// A user, by name or number, or a list of users.
    Users,
    /// Processor numbers: `0-3,8`, or a list of numbers.
    Cpus,
    /// A list of numbers, inclusive of both ends.
    Numbers(u64, u64),
    /// Nested keys.
    Object(&'static Shape),
    /// A list of nested keys.
    List(&'static Shape),
    /// A name of at most this many bytes, or an object of its own: a function, since a blockdev may lie in a blockdev.
    Child(usize, fn() -> &'static Shape),
}

/// A key that QEMU has and that is not done here.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// How QEMU spells it.
    pub name: &'static str,
    /// The value that asks for nothing that we do not do, and so is accepted: mostly QEMU's default.
    pub harmless: Harmless,
    /// Why it is not done, or what to use.
    pub because: &'static str,
}

/// A value that changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harmless {
    /// There is none.
    No,
    /// `on`.
    On,
    /// `off`.
    Off,
    /// 0.
    Zero,
    /// Any: it asks for nothing that could matter here.
    Any,
}

impl Key {
    /// A key that cannot be left out.
    pub const fn needed(name: &'static str, kind: ValueType, about: &'static str) -> Self {
        Self { name, kind, unset: Unset::Refused, about }
    }

    /// A key that means `default` where it is left out.
    pub const fn optional(
        name: &'static str,
        kind: ValueType,
        default: &'static (dyn fmt::Display + Sync),
        about: &'static str,
    ) -> Self {
        Self { name, kind, unset: Unset::Means(default), about }
    }
}

/// As the reference says it.
impl fmt::Display for Unset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("needed"),
            Self::Default(value) | Self::Means(value) => value.fmt(f),
        }
    }
}

impl fmt::Debug for Unset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Shape {
    /// An object that has these keys and no others.
    pub const fn of(keys: &'static [Key]) -> Self {
        Self { keys, variants: None, foreign: &[] }
    }

    /// The keys of an object whose tag is `tag` (`None`: an object without one), those of every object first.
    pub fn keys_of(&self, tag: Option<&str>) -> impl Iterator<Item = &'static Key> + Clone {
        let of_variant = self
            .variants
            .as_ref()
            .and_then(|variants| variants.of.iter().find(|(name, _)| Some(*name) == tag).map(|(_, keys)| *keys));
        self.keys.iter().chain(of_variant.unwrap_or_default())
    }

    /// Every key of every variant, each once unless it means something else there, with the variants that have it; none means all of them.
    pub fn all_keys(&self) -> Vec<(&'static Key, Vec<&'static str>)> {
        let mut all: Vec<(&'static Key, Vec<&'static str>)> = self.keys.iter().map(|key| (key, Vec::new())).collect();
        for (variant, keys) in self.variants.iter().flat_map(|variants| variants.of) {
            for key in *keys {
                match all.iter_mut().find(|(known, _)| (known.name, known.about) == (key.name, key.about)) {
                    Some((_, owners)) => owners.push(variant),
                    None => all.push((key, vec![variant])),
                }
            }
        }
        all
    }
}

impl ValueType {
    /// Every value in text that it may have, where these are words.
    pub fn words(&self) -> Vec<&'static str> {
        match self {
            Self::Flag => vec!["on", "off"],
            Self::Word(words) => words(),
            _ => Vec::new(),
        }
    }
}

/// What would be right, as an error or a reference says it.
impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("on or off"),
            Self::Number(least, most, _) => write!(f, "{least}..={most}"),
            Self::Bytes(least, most) => write!(f, "{least}..={most} bytes"),
            Self::PowerOfTwoBytes(least, most) => write!(f, "a power of two in {least}..={most} bytes"),
            Self::PowerOfTwo(least, most) => write!(f, "a power of two in {least}..={most}"),
            Self::Word(words) => f.write_str(&one_of(&words())),
            Self::Words(words) => write!(f, "a list of {}", one_of(&words())),
            Self::Settings => f.write_str("names with their values"),
            Self::Text(0, usize::MAX) => f.write_str("text"),
            Self::Text(_, usize::MAX) => f.write_str("text that is not empty"),
            Self::Text(0, most) | Self::Hidden(0, most) => write!(f, "text of at most {most} bytes"),
            Self::Text(_, most) | Self::Hidden(_, most) => write!(f, "text of 1..={most} bytes"),
            Self::Mode => f.write_str("octal permissions (0600)"),
            Self::Name(usize::MAX) => f.write_str("a name (a letter, then letters, digits, '-', '.', '_')"),
            Self::Name(most) => {
                write!(f, "a name of at most {most} bytes (a letter, then letters, digits, '-', '.', '_')")
            }
            Self::Names => f.write_str("a name or a list of names"),
            Self::Descriptor => f.write_str("the number of an open file descriptor, or a name of $LISTEN_FDNAMES"),
            Self::Users => f.write_str("a user's name or number, or a list of them"),
            Self::Cpus => f.write_str("processor numbers (0-3,8) or a list of them"),
            Self::Numbers(least, most) => write!(f, "a list of numbers in {least}..={most}"),
            Self::Object(_) => f.write_str("an object"),
            Self::List(_) => f.write_str("a list of objects"),
            Self::Child(..) => f.write_str("a node-name or a blockdev of its own"),
        }
    }
}

/// `a`, `a or b`, `a, b or c`.
pub(crate) fn one_of(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [word] => (*word).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}
