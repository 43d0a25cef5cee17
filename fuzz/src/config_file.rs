//! The text of a configuration file.

use egret_vocabulary::config::{ConfigFile, effective};

/// Text of a configuration file, or bytes that are none.
///
/// # Panics
/// When an error has no line, or what is in force does not read back as itself.
pub fn config_file(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let config = match ConfigFile::read("file", &text).and_then(|file| file.config()) {
        Ok(config) => config,
        Err(error) => {
            let error = error.to_string();
            let line = error.strip_prefix("file:").and_then(|rest| rest.split(':').next()?.parse().ok());
            let line: usize = line.unwrap_or_else(|| panic!("{error:?} has no line"));
            assert!(line <= 1 + text.matches('\n').count(), "{error:?} is about a line behind the end");
            return;
        }
    };
    let text = effective(&config);
    let again = ConfigFile::read("again", &text).and_then(|file| file.config());
    let again = again.unwrap_or_else(|error| panic!("{error} in {text}"));
    assert_eq!(effective(&again), text);
}
