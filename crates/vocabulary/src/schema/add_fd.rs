//! `--add-fd`: a descriptor that the daemon is started with, for a set.

use serde::Deserialize;

use super::blockdev::{FdSetNumber, LARGEST_FD_SET};
use super::descriptor::Descriptor;
use super::fit::fit;
use super::key::{Key, Kind, Shape};
use super::{ObjectError, Problem};
use crate::keyval;

/// A descriptor and its set.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct AddFd {
    /// The descriptor.
    pub fd: Descriptor,
    /// The set that it is added to.
    pub set: FdSetNumber,
    /// What to say of it.
    pub opaque: Option<String>,
}

static SHAPE: Shape = Shape {
    keys: &[
        Key::needed("fd", Kind::Descriptor, "The descriptor."),
        Key::needed("set", Kind::Number(0, LARGEST_FD_SET, ""), "The set that it is added to."),
        Key::optional("opaque", Kind::Text(0, 4096), &"none", "What to say of it in `query-fdsets`."),
    ],
    variants: None,
    foreign: &[],
};

impl AddFd {
    /// Reads the argument of an option.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn read(text: &str) -> Result<Self, ObjectError> {
        let read = || {
            let together = |error: &dyn std::fmt::Display| Problem::Together(error.to_string());
            let (value, spelling) = keyval::read(text, "fd").map_err(|error| together(&error))?;
            serde_json::from_value(fit(value, &SHAPE, spelling)?).map_err(|error| together(&error))
        };
        read().map_err(|problem| ObjectError { subject: format!("--add-fd {text}"), problem })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_added_by_its_number_or_name_and_what_is_wrong_is_said() {
        let read = |text| AddFd::read(text).map_err(|error| error.to_string());
        let (three, opaque) = (Descriptor::Number(3), Some("rw:/a".to_owned()));
        assert_eq!(read("fd=3,set=2,opaque=rw:/a"), Ok(AddFd { fd: three, set: 2, opaque }));
        let named = Descriptor::Name("disk0".to_owned());
        assert_eq!(read("fd=disk0,set=0"), Ok(AddFd { fd: named, set: 0, opaque: None }));
        for (text, line) in [
            ("fd=3", "set is missing"),
            ("set=3", "fd is missing"),
            ("fd=3,set=-1", "set must be 0..=9223372036854775807, got -1"),
            ("fd=3,set=1,opaq=x", "unknown key 'opaq'; known are fd, set, opaque"),
        ] {
            assert_eq!(read(text), Err(format!("--add-fd {text}: {line}")));
        }
    }
}
