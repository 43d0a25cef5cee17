//! `--add-fd`: a descriptor that the daemon is started with, for a set.

use super::blockdev::{FdSetNumber, LARGEST_FD_SET};
use super::descriptor::Descriptor;
use super::key::{Shape, ValueType};
use super::object::read_options;
use super::{ObjectError, Problem};
use crate::keyval;
use crate::options;

options! {
    /// A descriptor and its set.
    pub struct AddFd {
        /// The descriptor.
        fd: Descriptor, ValueType::Descriptor;
        /// The set that it is added to.
        set: FdSetNumber, ValueType::Number(0, LARGEST_FD_SET, "");
        /// What to say of it in `query-fdsets`.
        opaque: Option<String>, ValueType::Text(0, 4096), unset "none";
    }
}

static SHAPE: Shape = Shape::of(AddFd::KEYS);

impl AddFd {
    /// Its keys.
    pub const SHAPE: &Shape = &SHAPE;

    /// Reads the argument of an option.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn read(text: &str) -> Result<Self, ObjectError> {
        let read = || {
            let read = keyval::read(text, "fd");
            let (value, spelling) = read.map_err(|error| Problem::Together(error.to_string()))?;
            read_options(value, &SHAPE, spelling)
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
