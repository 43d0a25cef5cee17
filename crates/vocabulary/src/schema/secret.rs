//! The `secret` object: keys and passphrases, by a name.

use std::fs::File;
use std::io::{self, Read as _};

use super::key::{Foreign, Harmless, Shape, ValueType};
use super::object::object;
use super::{Object as _, ObjectError, Problem};
use crate::{choices, options};

/// The longest, in bytes, as it is written: a file may have no end.
const LONGEST: usize = 65_536;

options! {
    /// A key or a passphrase, by a name.
    #[serde(remote = "Self")]
    pub struct Secret {
        /// Name of the object.
        id: String, ValueType::Name(usize::MAX);
        /// The secret itself: whoever sees the command line, or what a monitor is sent, sees it.
        data: Option<String>, ValueType::Hidden(0, LONGEST), unset "file's";
        /// Path of a file that holds it, in at most 65536 bytes. It is read once: when the daemon starts, or by object-add.
        file: Option<String>, ValueType::Text(1, super::blockdev::LONGEST_PATH), unset "data";
        /// Whether it is written as it is, or in base64.
        format: Option<SecretFormat>, ValueType::Word(SecretFormat::words), unset "raw";
    }
}

choices! {
    /// How a secret is written.
    pub enum SecretFormat {
        /// As it is.
        "raw" => Raw;
        /// In base64.
        "base64" => Base64;
    }
}

const BECAUSE: &str = "secrets are not encrypted by one another; use file";

static SHAPE: Shape = Shape {
    keys: Secret::KEYS,
    variants: None,
    foreign: &[
        Foreign { name: "keyid", harmless: Harmless::No, because: BECAUSE },
        Foreign { name: "iv", harmless: Harmless::No, because: BECAUSE },
    ],
};

object!(Secret, "secret", "id", &SHAPE);

impl Secret {
    fn own_name(&self) -> &str {
        &self.id
    }

    fn check(&self) -> Result<(), Problem> {
        if self.data.is_some() == self.file.is_some() {
            return Err(Problem::Together("one of data and file is needed, and not both".to_owned()));
        }
        Ok(())
    }

    /// Itself, with what is in its file read, so that nobody needs the file any more.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes).
    pub fn read(self) -> Result<Self, ObjectError> {
        let text = self.base64().map_err(|why| self.error(Problem::Together(why)))?;
        Ok(Self { id: self.id, data: Some(text), file: None, format: Some(SecretFormat::Base64) })
    }

    /// What it holds. Reads its file.
    ///
    /// # Errors
    /// The file cannot be read, or what it holds is not what `format` says: one line's end.
    pub fn bytes(&self) -> Result<Vec<u8>, String> {
        let Self { id: _, data, file, format } = self;
        let bytes = match (data, file) {
            (Some(data), _) => data.clone().into_bytes(),
            (None, Some(file)) => read_file(file).map_err(|e| format!("'{file}': {e}"))?,
            (None, None) => Vec::new(),
        };
        match format {
            None | Some(SecretFormat::Raw) => Ok(bytes),
            Some(SecretFormat::Base64) => {
                let text: Vec<u8> = bytes.into_iter().filter(|byte| !byte.is_ascii_whitespace()).collect();
                data_encoding::BASE64.decode(&text).map_err(|e| format!("it is not base64: {e}"))
            }
        }
    }

    /// What it holds, in base64: as Ceph takes keys.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes).
    pub fn base64(&self) -> Result<String, String> {
        self.bytes().map(|bytes| data_encoding::BASE64.encode(&bytes))
    }
}

fn read_file(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LONGEST as u64 + 1).read_to_end(&mut bytes)?;
    match bytes.len() <= LONGEST {
        true => Ok(bytes),
        false => Err(io::Error::other(format!("it has more than {LONGEST} bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyval;
    use crate::schema::untagged;

    fn read(text: &str) -> Result<Secret, String> {
        let (value, spelling) = keyval::read(text, "qom-type").unwrap();
        untagged::<Secret>(value, spelling).map_err(|error| error.to_string())
    }

    #[test]
    fn a_secret_is_written_as_it_is_or_in_base64_here_or_in_a_file() {
        assert_eq!(read("secret,id=s,data=words").unwrap().bytes().unwrap(), b"words");
        let coded = read("secret,id=s,data=d29yZHM=,format=base64").unwrap();
        assert_eq!((coded.bytes().unwrap(), coded.base64().unwrap().as_str()), (b"words".to_vec(), "d29yZHM="));
        let file = std::env::temp_dir().join(format!("egret-secret-{}", std::process::id()));
        std::fs::write(&file, "d29y\nZHM=\n").unwrap();
        let filed = read(&format!("secret,id=s,format=base64,file={}", file.display())).unwrap();
        assert_eq!(filed.bytes().unwrap(), b"words");
        let kept = filed.clone().read().unwrap();
        std::fs::remove_file(file).unwrap();
        assert_eq!((kept.bytes().unwrap(), kept.file), (b"words".to_vec(), None));
        assert!(filed.bytes().unwrap_err().ends_with("No such file or directory (os error 2)"));
    }

    #[test]
    fn of_a_file_without_an_end_no_more_is_read_than_a_secret_may_have() {
        let line = read("secret,id=s,file=/dev/zero").unwrap().read().unwrap_err().to_string();
        assert_eq!(line, "secret 's': '/dev/zero': it has more than 65536 bytes");
    }

    #[test]
    fn what_is_wrong_with_a_secret_is_said_without_it() {
        assert_eq!(read("secret,id=s").unwrap_err(), "secret 's': one of data and file is needed, and not both");
        assert_eq!(
            read("secret,id=s,data=x,keyid=k").unwrap_err(),
            "secret 's': keyid=k is QEMU's and not done here: secrets are not encrypted by one another; use file"
        );
        let line = read("secret,id=s,data=hidden!,format=base64").unwrap().bytes().unwrap_err();
        assert!(line.starts_with("it is not base64: ") && !line.contains("hidden"), "{line}");
        for (data, quotes) in [("31337", ", in quotes"), ("{\"a\": 31337}", ""), ("\"3\\u00001337\"", "")] {
            let line = read(&format!("{{\"qom-type\": \"secret\", \"id\": \"s\", \"data\": {data}}}")).unwrap_err();
            assert_eq!(
                line,
                format!("secret 's': data must be text of at most 65536 bytes{quotes}, got something else")
            );
        }
    }
}
