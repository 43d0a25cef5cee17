//! How options are declared: each once, as a field of a struct.
//!
//! ```text
//! options! {
//!     /// An event loop on a thread of its own.
//!     pub struct IoThread {
//!         /// Name of the object.                              what it does: the reference, help and rustdoc have it
//!         id: String, ValueType::Name(usize::MAX);             its type, and what it holds; it is needed
//!         /// No wait spins longer than this.
//!         poll_max_ns: u64, ValueType::Number(0, 9, "ns"), default 7;   left out, it is this value
//!         /// What a window is multiplied by.
//!         poll_grow: Option<u64>, ValueType::Number(0, 9, ""), unset 2; left out, it stays unset, which means this
//!         /// Who may connect.
//!         #[serde(flatten)]
//!         access: Access => Access::KEYS;                               a struct whose keys stand among these
//!     }
//! }
//! ```
//!
//! The key is the field's name with `-` for `_`. What comes of it is the struct, as serde reads and writes it, and
//! `KEYS`, the table that values are checked against.

use super::key::{Key, ValueType};

/// Declares a struct of options; [the module](self) shows how.
#[macro_export]
macro_rules! options {
    (
        $(#[$struct_meta:meta])*
        $vis:vis struct $name:ident {$(
            $(#[doc = $about:literal])+
            $(#[serde $serde:tt])*
            $field:ident: $type:ty
            $(, $kind:expr $(, default $default:expr)? $(, unset $unset:expr)?)?
            $(=> $keys:expr)?;
        )+}
    ) => {
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        $(#[$struct_meta])*
        #[serde(rename_all = "kebab-case")]
        $vis struct $name {$(
            $(#[doc = $about])+
            $(#[serde $serde])*
            $($(
                // It is false, and names $unset to say for which fields the next line is.
                #[cfg_attr(any(), unset($unset))]
                #[serde(default, skip_serializing_if = "egret_vocabulary::schema::options::is_unset")]
            )?)?
            pub $field: $type,
        )+}

        impl $name {
            /// Its keys.
            pub const KEYS: &'static [$crate::schema::Key] = {
                use $crate::schema::options::{count, join};
                const GROUPS: &[&[$crate::schema::Key]] = &[
                    $($crate::key!(
                        $field, concat!($($about),+)
                        $(, $kind $(, default $default)? $(, unset $unset)?)?
                        $(=> $keys)?
                    )),+
                ];
                &join::<{ count(GROUPS) }>(GROUPS)
            };
        }
    };
}

/// Declares an enum that a key decides: its values, and the struct of the keys that each adds, if it adds any.
#[macro_export]
macro_rules! variants {
    (
        $(#[$enum_meta:meta])*
        $vis:vis enum $name:ident by $tag:literal, $about:literal {$(
            $(#[$variant_meta:meta])*
            $word:literal => $variant:ident $(($options:ty))?;
        )+}
        foreign $foreign:expr, because $because:literal
    ) => {
        $(#[$enum_meta])*
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(tag = $tag)]
        $vis enum $name {$(
            $(#[$variant_meta])*
            #[serde(rename = $word)]
            $variant $(($options))?,
        )+}

        impl $name {
            /// Its values, and the keys that each adds.
            pub const VARIANTS: $crate::schema::Variants = $crate::schema::Variants {
                tag: $tag,
                about: $about,
                of: &[$(($word, $crate::keys_of!($($options)?))),+],
                foreign: $foreign,
                because: $because,
            };

            /// How it is spelled.
            #[allow(dead_code, reason = "not everyone who has variants asks which it is")]
            pub const fn word(&self) -> &'static str {
                match self {$(
                    $crate::pattern!($variant $($options)?) => $word,
                )+}
            }
        }
    };
}

/// Declares an enum that is a key's value, each variant by its word.
#[macro_export]
macro_rules! choices {
    (
        $(#[$enum_meta:meta])*
        $vis:vis enum $name:ident {$(
            $(#[$variant_meta:meta])*
            $word:literal => $variant:ident;
        )+}
    ) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        $(#[$enum_meta])*
        $vis enum $name {$(
            $(#[$variant_meta])*
            #[serde(rename = $word)]
            $variant,
        )+}

        impl $name {
            /// Every word.
            pub fn words() -> Vec<&'static str> {
                vec![$($word),+]
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {$(
                    Self::$variant => $word,
                )+})
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! keys_of {
    () => {
        &[]
    };
    ($options:ty) => {
        <$options>::KEYS
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! pattern {
    ($variant:ident) => {
        Self::$variant
    };
    ($variant:ident $options:ty) => {
        Self::$variant(_)
    };
}

/// The keys that one field stands for.
#[doc(hidden)]
#[macro_export]
macro_rules! key {
    ($field:ident, $about:expr => $keys:expr) => { $keys };
    ($field:ident, $about:expr, $kind:expr) => { $crate::key!(@ $field, $about, $kind, Refused) };
    ($field:ident, $about:expr, $kind:expr, default $value:expr) => { $crate::key!(@ $field, $about, $kind, Default(&$value)) };
    ($field:ident, $about:expr, $kind:expr, unset $value:expr) => { $crate::key!(@ $field, $about, $kind, Means(&$value)) };
    (@ $field:ident, $about:expr, $kind:expr, $($unset:tt)+) => {
        &[$crate::schema::Key {
            name: {
                const NAME: &[u8] = &$crate::schema::options::spelled::<{ stringify!($field).len() }>(stringify!($field));
                match str::from_utf8(NAME) {
                    Ok(name) => name,
                    Err(_) => unreachable!(),
                }
            },
            kind: $kind,
            unset: $crate::schema::Unset::$($unset)+,
            about: $about.trim_ascii_start(),
        }]
    };
}

/// A field's name as a key.
pub const fn spelled<const N: usize>(field: &str) -> [u8; N] {
    let mut name = [0; N];
    let mut at = 0;
    while at < N {
        name[at] = match field.as_bytes()[at] {
            b'_' => b'-',
            other => other,
        };
        at += 1;
    }
    name
}

/// How many keys there are in `groups`.
pub const fn count(groups: &[&[Key]]) -> usize {
    let (mut keys, mut at) = (0, 0);
    while at < groups.len() {
        keys += groups[at].len();
        at += 1;
    }
    keys
}

/// The keys of `groups`, one after the other; there are `N`.
pub const fn join<const N: usize>(groups: &[&[Key]]) -> [Key; N] {
    let mut keys = [Key::needed("", ValueType::Flag, ""); N];
    let (mut to, mut group) = (0, 0);
    while group < groups.len() {
        let mut at = 0;
        while at < groups[group].len() {
            keys[to] = groups[group][at];
            to += 1;
            at += 1;
        }
        group += 1;
    }
    keys
}

/// Whether a value is left out when an object is written.
pub fn is_unset<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
