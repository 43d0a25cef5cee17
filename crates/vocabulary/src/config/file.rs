//! A configuration as a file: TOML, one `[[iothread]]`, `[[blockdev]]`, `[[export]]` and so on for each object.
//!
//! Keys are those of the objects, and values are typed as in JSON: `cache.direct = true`, `num-queues = 4`. Errors
//! begin with the file's name and the line of the key that they are about.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Config;
use crate::address::Address;
use crate::metrics;
use crate::nearest::hint;
use crate::schema::{
    Blockdev, Export, IoThread, MEMORY_MAX, NbdServer, Object, ObjectError, Problem, Secret, Spelling, ThrottleGroup,
    TlsCreds, memory_max,
};

/// The objects that a file names.
const KINDS: [&str; 6] =
    [Secret::NOUN, TlsCreds::NOUN, ThrottleGroup::NOUN, IoThread::NOUN, Blockdev::NOUN, Export::NOUN];

/// The table that says where metrics are served.
const METRICS: &str = "metrics";

/// The table that says where NBD is served.
const NBD_SERVER: &str = "nbd-server";

/// What is wrong with a file: `FILE:LINE: what`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FileError(String);

/// A file's objects, each checked by itself; whether they fit together, and with others, [`Config::new`] says.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// Keys and passphrases.
    pub secrets: Vec<Secret>,
    /// Certificates and keys for TLS.
    pub tls_creds: Vec<TlsCreds>,
    /// Limits that disks share.
    pub throttle_groups: Vec<ThrottleGroup>,
    /// Event loops.
    pub iothreads: Vec<IoThread>,
    /// Disks.
    pub blockdevs: Vec<Blockdev>,
    /// What is offered to virtual machines.
    pub exports: Vec<Export>,
    /// Where metrics are served; nowhere if it does not say.
    pub metrics: Option<Address>,
    /// How much guest memory is mapped at a time, at most, in bytes, if it says.
    pub memory_max: Option<u64>,
    /// Where NBD is served; nowhere if it does not say.
    pub nbd_server: Option<NbdServer>,
    /// Where each object is, by how errors call it.
    locations: Vec<(String, Location)>,
    name: String,
}

/// Where an object begins, and its keys.
#[derive(Clone, Debug)]
struct Location {
    line: usize,
    keys: Vec<(String, usize)>,
}

impl ConfigFile {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, is no TOML, or has an object that cannot be had as it is written.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| FileError(format!("{name}: {error}")))?;
        Self::read(&name, &text)
    }

    /// Reads the text of a file, which errors call `name`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn read(name: &str, text: &str) -> Result<Self, FileError> {
        let line = |at: usize| 1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count();
        let complain = |at: usize, what: String| FileError(format!("{name}:{}: {what}", line(at)));
        let root = DeTable::parse(text).map_err(|error| {
            let what = error.message().lines().collect::<Vec<_>>().join(", ");
            complain(error.span().map_or(0, |span| span.start), format!("not TOML: {what}"))
        })?;
        let mut file = Self { name: name.to_owned(), ..Self::default() };
        for (key, value) in root.get_ref() {
            let (kind, at) = (key.get_ref().as_ref(), key.span().start);
            let is_single = [METRICS, NBD_SERVER].contains(&kind);
            file.locations.extend(is_single.then(|| (kind.to_owned(), Location { line: line(at), keys: Vec::new() })));
            if kind == METRICS {
                let read = read_table(METRICS, value, metrics::from_keys);
                file.metrics = Some(read.map_err(|(at, what)| complain(at, what))?);
                continue;
            }
            if kind == NBD_SERVER {
                let read = read_table(NBD_SERVER, value, NbdServer::from_value);
                file.nbd_server = Some(read.map_err(|(at, what)| complain(at, what))?);
                continue;
            }
            if kind == MEMORY_MAX {
                let bytes = memory_max(json(value.get_ref()), Spelling::Typed);
                file.memory_max = Some(bytes.map_err(|problem| complain(at, problem.to_string()))?);
                continue;
            }
            if !KINDS.contains(&kind) {
                let known = KINDS.into_iter().chain([METRICS, NBD_SERVER, MEMORY_MAX]);
                return Err(complain(at, format!("unknown key '{kind}'; {}", hint(kind, known))));
            }
            let tables = value.get_ref().as_array().filter(|list| list.iter().all(|item| item.get_ref().is_table()));
            let tables = tables.ok_or_else(|| complain(at, format!("{kind} must be tables: write [[{kind}]]")))?;
            for table in tables {
                let mut keys = Vec::new();
                collect_keys(table, "", &mut |path, span| keys.push((path, line(span.start))));
                let location = Location { line: line(table.span().start), keys };
                file.take(kind, json(table.get_ref()), location)?;
            }
        }
        Ok(file)
    }

    fn take(&mut self, kind: &str, value: Value, location: Location) -> Result<(), FileError> {
        fn read<T: Object>(value: Value) -> Result<(T, String), ObjectError> {
            let object = T::from_value(value, Spelling::Typed)?;
            let subject = object.subject();
            Ok((object, subject))
        }
        let subject = match kind {
            Secret::NOUN => read(value).map(|(object, subject)| (self.secrets.push(object), subject).1),
            TlsCreds::NOUN => read(value).map(|(object, subject)| (self.tls_creds.push(object), subject).1),
            ThrottleGroup::NOUN => read(value).map(|(object, subject)| (self.throttle_groups.push(object), subject).1),
            IoThread::NOUN => read(value).map(|(object, subject)| (self.iothreads.push(object), subject).1),
            Blockdev::NOUN => read(value).map(|(object, subject)| (self.blockdevs.push(object), subject).1),
            _ => read(value).map(|(object, subject)| (self.exports.push(object), subject).1),
        };
        match subject {
            Ok(subject) => self.locations.push((subject, location)),
            Err(error) => return Err(self.error_at(&location, &error)),
        }
        Ok(())
    }

    /// The objects, fitted together.
    ///
    /// # Errors
    /// As [`Config::new`].
    pub fn config(&self) -> Result<Config, FileError> {
        let Self { secrets, tls_creds, throttle_groups, iothreads, blockdevs, exports, nbd_server, .. } = self.clone();
        let objects = Config { secrets, tls_creds, throttle_groups, iothreads, ..Config::empty() };
        let mut config = Config { blockdevs, exports, nbd_server, ..objects };
        config.memory_max = self.memory_max.unwrap_or(config.memory_max);
        config.checked().map_err(|error| self.locate(&error))
    }

    /// An error about objects of which some came from this file, with its location if it has one here.
    pub fn locate(&self, error: &ObjectError) -> FileError {
        // Of two objects of one name the second is too many.
        let location = self.locations.iter().rev().find(|(subject, _)| *subject == error.subject);
        location.map_or_else(|| FileError(error.to_string()), |(_, location)| self.error_at(location, error))
    }

    fn error_at(&self, location: &Location, error: &ObjectError) -> FileError {
        let line = error.problem.key().map_or(location.line, |key| {
            // The key itself, or the nearest one above it that is there.
            let leads = |known: &str| key == known || key.strip_prefix(known).is_some_and(|rest| rest.starts_with('.'));
            let nearest = location.keys.iter().filter(|(known, _)| leads(known)).max_by_key(|(known, _)| known.len());
            nearest.map_or(location.line, |(_, line)| *line)
        });
        FileError(format!("{}:{line}: {error}", self.name))
    }
}

/// `config` as a file that reads back as what is in force: every default filled in.
pub fn effective(config: &Config) -> String {
    let config = config.filled_in();
    // What is in no table comes before all of them.
    let mut text = format!("{MEMORY_MAX} = {}\n\n", config.memory_max);
    let mut table = |noun: &str, object: Result<String, toml::ser::Error>| {
        let object = object.unwrap_or_else(|error| format!("# {error}\n"));
        let _ = writeln!(text, "[[{noun}]]\n{object}");
    };
    config.secrets.iter().for_each(|object| table(Secret::NOUN, flat(object)));
    config.tls_creds.iter().for_each(|object| table(TlsCreds::NOUN, flat(object)));
    config.throttle_groups.iter().for_each(|object| table(ThrottleGroup::NOUN, flat(object)));
    config.iothreads.iter().for_each(|object| table(IoThread::NOUN, flat(object)));
    config.blockdevs.iter().for_each(|object| table(Blockdev::NOUN, flat(object)));
    config.exports.iter().for_each(|object| table(Export::NOUN, flat(object)));
    if let Some(server) = &config.nbd_server {
        let server = flat(server).unwrap_or_else(|error| format!("# {error}\n"));
        let _ = writeln!(text, "[{NBD_SERVER}]\n{server}");
    }
    text
}

/// An object as `key = value` lines; nested tables stay on their line, because a header would end the object's own.
fn flat(object: &impl serde::Serialize) -> Result<String, toml::ser::Error> {
    let mut text = String::new();
    if let toml::Value::Table(table) = toml::Value::try_from(object)? {
        for (key, value) in table {
            let _ = writeln!(text, "{key} = {value}");
        }
    }
    Ok(text)
}

/// What a table of this name says, or what is wrong and where.
fn read_table<T>(
    name: &str,
    value: &Spanned<DeValue<'_>>,
    read: impl Fn(Value, Spelling) -> Result<T, Problem>,
) -> Result<T, (usize, String)> {
    let at = value.span().start;
    let given = json(value.get_ref());
    if !given.is_object() {
        return Err((at, format!("{name} must be a table: write [{name}]")));
    }
    read(given, Spelling::Typed).map_err(|problem| {
        let mut keys = Vec::new();
        collect_keys(value, "", &mut |path, span| keys.push((path, span.start)));
        let location = keys.into_iter().find(|(path, _)| problem.key() == Some(path));
        (location.map_or(at, |(_, at)| at), format!("{name}: {problem}"))
    })
}

fn collect_keys(value: &Spanned<DeValue<'_>>, path: &str, found: &mut impl FnMut(String, Range<usize>)) {
    let join = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    match value.get_ref() {
        DeValue::Table(table) => {
            for (key, value) in table {
                let path = join(key.get_ref());
                found(path.clone(), key.span());
                collect_keys(value, &path, found);
            }
        }
        DeValue::Array(list) => {
            for (index, item) in list.iter().enumerate() {
                let path = join(&index.to_string());
                found(path.clone(), item.span());
                collect_keys(item, &path, found);
            }
        }
        _ => {}
    }
}

fn json(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => text.as_ref().into(),
        DeValue::Boolean(flag) => (*flag).into(),
        // What does not fit is left as text, which no number takes.
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) if u64::try_from(number).is_ok() => Value::from(number as u64),
            Ok(number) if i64::try_from(number).is_ok() => Value::from(number as i64),
            _ => number.as_str().into(),
        },
        DeValue::Float(number) => number.as_str().parse::<f64>().map_or(Value::Null, Value::from),
        DeValue::Datetime(date) => date.to_string().into(),
        DeValue::Array(list) => list.iter().map(|item| json(item.get_ref())).collect(),
        DeValue::Table(table) => {
            let pairs = table.iter().map(|(key, value)| (key.get_ref().to_string(), json(value.get_ref())));
            Value::Object(pairs.collect::<Map<_, _>>())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Access, Mode};

    const GOOD: &str = "\
# Two disks on one thread.
[[iothread]]
id = \"io0\"
poll-max-ns = 0x4000

[[blockdev]]
node-name = \"disk0\"
driver = \"file\"
filename = \"disk.img\"
cache.direct = true

[[export]]
type = \"vhost-user-blk\"
id = \"e0\"
node-name = \"disk0\"
addr = { type = \"unix\", path = \"disk.sock\" }
writable = true
iothread = \"io0\"
";

    fn error(text: &str) -> String {
        let file = ConfigFile::read("egret.toml", text);
        file.and_then(|file| file.config()).unwrap_err().to_string()
    }

    #[test]
    fn a_file_means_the_same_objects_as_a_command_line() {
        let config = ConfigFile::read("egret.toml", GOOD).unwrap().config().unwrap();
        assert_eq!(config.iothreads[0].poll_max_ns, Some(0x4000));
        assert_eq!(config.blockdevs[0].cache.direct, Some(true));
        assert_eq!(config.exports[0].iothread, ["io0"]);
    }

    #[test]
    fn a_file_says_where_metrics_are_served() {
        assert_eq!(ConfigFile::read("egret.toml", GOOD).unwrap().metrics, None);
        let file = ConfigFile::read("egret.toml", "[metrics]\npath = \"/run/m\"\nmode = \"0660\"\n").unwrap();
        assert_eq!(
            file.metrics,
            Some(Address::Unix {
                path: "/run/m".into(),
                access: Access { mode: Some(Mode(0o660)), ..Access::default() }
            })
        );
    }

    #[test]
    fn a_file_says_how_much_guest_memory_there_may_be() {
        let config = |text: &str| ConfigFile::read("egret.toml", text).unwrap().config().unwrap();
        assert_eq!(config(&format!("memory-max = 0x100000\n{GOOD}")).memory_max, 1 << 20);
        assert_eq!(config(GOOD).memory_max, 64 << 40);
    }

    #[test]
    fn what_is_wrong_has_a_file_a_line_and_a_key() {
        for (from, to, line) in [
            ("0x4000", "-1", "egret.toml:4: iothread 'io0': poll-max-ns must be 0..=9223372036854775807, got -1"),
            (
                "poll-max-ns",
                "poll-max-sn",
                "egret.toml:4: iothread 'io0': unknown key 'poll-max-sn'; did you mean 'poll-max-ns'?",
            ),
            (
                "cache.direct = true",
                "cache.direct = 1",
                "egret.toml:10: blockdev 'disk0': cache.direct must be true or false, got 1",
            ),
            (
                "cache.direct",
                "cache.dirct",
                "egret.toml:10: blockdev 'disk0': unknown key 'cache.dirct'; did you mean 'direct'?",
            ),
            ("filename = \"disk.img\"\n", "", "egret.toml:6: blockdev 'disk0': filename is missing"),
            ("# Two", "metrics = 1 #", "egret.toml:1: metrics must be a table: write [metrics]"),
            (
                "# Two disks on one thread.",
                "[metrics]\nhost = \"localhost\"\nport = 0",
                "egret.toml:3: metrics: port must be 1..=65535, got 0",
            ),
            (
                "# Two disks on one thread.",
                "[nbd-server]\naddr = { type = \"unix\", path = \"/n\" }\ntls-creds = \"t\"",
                "egret.toml:1: nbd-server: tls-creds: there is no tls-creds-x509 't'; there are none",
            ),
            ("# Two", "memory-max = 1 #", "egret.toml:1: memory-max must be 1048576..=140737488355328 bytes, got 1"),
            ("[[iothread]]", "[[iothred]]", "egret.toml:2: unknown key 'iothred'; did you mean 'iothread'?"),
            ("[[iothread]]", "[iothread]", "egret.toml:2: iothread must be tables: write [[iothread]]"),
            (
                "iothread = \"io0\"",
                "iothread = \"io1\"",
                "egret.toml:18: export 'e0': iothread: there is no iothread 'io1'; did you mean 'io0'?",
            ),
            (
                "[[blockdev]]",
                "[[iothread]]\nid = \"io0\"\n[[blockdev]]",
                "egret.toml:6: iothread 'io0': there is another iothread of this name",
            ),
            (
                "path = \"disk.sock\"",
                "pth = \"disk.sock\"",
                "egret.toml:16: export 'e0': unknown key 'addr.pth'; did you mean 'path'?",
            ),
            ("writable = true", "writable = true\nwritable = true", "egret.toml:18: not TOML: duplicate key"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            assert_eq!(error(&GOOD.replacen(from, to, 1)), line);
        }
        assert!(
            ConfigFile::open(Path::new("/nonexistent.toml"))
                .unwrap_err()
                .to_string()
                .starts_with("/nonexistent.toml: ")
        );
    }

    #[test]
    fn the_effective_configuration_reads_back_as_itself_and_shows_every_default() {
        let config = ConfigFile::read("egret.toml", GOOD).unwrap().config().unwrap();
        let text = effective(&config);
        for line in [
            "poll-policy = \"low-regret\"",
            "poll-price = 1",
            "poll-idle-ms = 7000",
            "aio = \"threads\"",
            "queue-size = 128",
            "read-only = false",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        let again = ConfigFile::read("again", &text).unwrap().config().unwrap();
        assert_eq!(effective(&again), text);
        assert_eq!(again.disk("disk0"), config.disk("disk0"));
    }
}
