//! Commands about I/O threads, secrets and TLS credentials, which are objects of QEMU's object model under `/objects`.

use egret_polling::Property;
use egret_vocabulary::Config;
use egret_vocabulary::options;
use egret_vocabulary::schema::{IoThread, Object, Secret, Shape, Spelling, TlsCreds, ValueType, untagged};
use serde_json::{Map, Value, json};

use super::QmpError;
use super::command::{Command, Run, Takes, nothing, typed};

options! {
    struct Delete {
        /// Name of the object.
        id: String, ValueType::Text(0, usize::MAX);
    }
}

options! {
    struct List {
        /// `/objects/ID`, or `ID` alone.
        path: String, ValueType::Text(0, usize::MAX);
    }
}

options! {
    struct OneProperty {
        /// `/objects/ID`, or `ID` alone.
        path: String, ValueType::Text(0, usize::MAX);
        /// A property of the object.
        property: String, ValueType::Text(0, usize::MAX);
    }
}

static DELETE: Shape = Shape::of(Delete::KEYS);
static LIST: Shape = Shape::of(List::KEYS);
static PROPERTY: Shape = Shape::of(OneProperty::KEYS);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "object-add",
        takes: Takes::IOTHREAD,
        returns: "{}",
        about: "Start an I/O thread; `qom-type` is `iothread`. Or read credentials for TLS, with the keys of \
                [tls-creds-x509](options.md#tls-creds-x509), which is `qom-type` then.",
        run: Run::Mutate(|context, arguments| {
            if arguments.get("qom-type").and_then(Value::as_str) == Some(TlsCreds::NOUN) {
                context.daemon.add_tls_creds(untagged(arguments.into(), Spelling::Typed)?)?;
                return Ok(nothing());
            }
            let object = IoThread::from_user_object(arguments.into(), Spelling::Typed)?;
            context.daemon.add_io_thread(object)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "object-del",
        takes: Takes::Keys(&DELETE),
        returns: "{}",
        about: "End an I/O thread that no export runs on, or forget credentials for TLS that nobody names.",
        run: Run::Mutate(|context, arguments| {
            let Delete { id } = typed(arguments)?;
            match context.daemon.config().tls_creds.iter().any(|creds| creds.id == id) {
                true => context.daemon.remove_tls_creds(&id)?,
                false => context.daemon.remove_io_thread(&id)?,
            }
            Ok(nothing())
        }),
    },
    Command {
        name: "qom-list",
        takes: Takes::Keys(&LIST),
        returns: r#"[{"name", "type"}]"#,
        about: "The properties of an object, or the objects under `/` and `/objects`. Of secrets and of credentials for TLS \
                none is shown but their type.",
        run: Run::Query(|view, arguments| {
            let List { path } = typed(arguments)?;
            list(view.config(), &path)
        }),
    },
    Command {
        name: "qom-get",
        takes: Takes::Keys(&PROPERTY),
        returns: "the value",
        about: "A property as it is in force.",
        run: Run::Query(|view, arguments| {
            let OneProperty { path, property } = typed(arguments)?;
            if let Some(of) = type_of_quiet(view.config(), &path) {
                let unknown = || QmpError::generic(format!("Property '{of}.{property}' not found"));
                return if property == "type" { Ok(of.into()) } else { Err(unknown()) };
            }
            let object = find(view.config(), &path)?;
            if property == "type" {
                return Ok(IoThread::NOUN.into());
            }
            known(&property)?;
            Ok(in_force(object).remove(&property).unwrap_or(Value::Null))
        }),
    },
    Command {
        name: "qom-set",
        takes: Takes::KeysAndValue(&PROPERTY),
        returns: "{}",
        about: "Change a property of an I/O thread while it runs. 0 stores the default where the property says so, \
                and null whatever is so without the property; a change of policy forgets the properties that the new one has no use for.",
        run: Run::Mutate(|context, mut arguments| {
            let value = arguments.remove("value").unwrap_or_default();
            let OneProperty { path, property } = typed(arguments)?;
            known(&property)?;
            let changed = find(context.daemon.config(), &path)?.with(&property, value)?;
            context.daemon.change_io_thread(changed)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "query-iothreads",
        takes: Takes::NOTHING,
        returns: r#"[{"id", "thread-id", "poll-max-ns", ...}]"#,
        about: "Every I/O thread: the number of its thread, and its properties as they are in force.",
        run: Run::Query(|view, _| {
            let show = |object: &IoThread| {
                let mut shown = in_force(object);
                let thread_id = view.watched().io_threads.get(&object.id).map(|thread| thread.thread_id);
                shown.insert("thread-id".to_owned(), json!(thread_id));
                Value::from(shown)
            };
            Ok(view.config().iothreads.iter().map(show).collect())
        }),
    },
];

/// The objects whose properties nobody is shown.
fn quiet(config: &Config) -> impl Iterator<Item = (&String, &'static str)> {
    let secrets = config.secrets.iter().map(|object| (&object.id, Secret::NOUN));
    secrets.chain(config.tls_creds.iter().map(|object| (&object.id, TlsCreds::NOUN)))
}

fn type_of_quiet(config: &Config, path: &str) -> Option<&'static str> {
    quiet(config).find(|(id, _)| *id == id_in(path)).map(|(_, of)| of)
}

fn id_in(path: &str) -> &str {
    path.strip_prefix("/objects/").unwrap_or(path)
}

fn find<'a>(config: &'a Config, path: &str) -> Result<&'a IoThread, QmpError> {
    let found = config.iothreads.iter().find(|object| object.id == id_in(path));
    found.ok_or_else(|| QmpError::no_device(path))
}

fn known(property: &str) -> Result<(), QmpError> {
    match IoThread::SHAPE.keys.iter().any(|key| key.name == property) {
        true if property == "id" => Err(QmpError::generic("Property 'iothread.id' is the object's name")),
        true => Ok(()),
        false => Err(QmpError::generic(format!("Property 'iothread.{property}' not found"))),
    }
}

/// Every property as it is in force; one that has no value is null.
fn in_force(object: &IoThread) -> Map<String, Value> {
    let mut full = object.clone();
    full.fill_in();
    let mut shown = match serde_json::to_value(&full) {
        Ok(Value::Object(shown)) => shown,
        _ => Map::new(),
    };
    // QEMU shows these whatever the policy.
    for (key, property) in [
        ("poll-max-ns", Property::Max),
        ("poll-grow", Property::Grow),
        ("poll-shrink", Property::Shrink),
        ("poll-weight", Property::Weight),
        ("poll-price", Property::Price),
    ] {
        shown.insert(key.to_owned(), json!(object.effective(property).unwrap_or(0)));
    }
    shown
}

fn list(config: &Config, path: &str) -> Result<Value, QmpError> {
    let entry = |name: &str, of: &str| json!({ "name": name, "type": of });
    let kind = entry("type", "string");
    match path {
        "/" => Ok(json!([kind, entry("objects", "child<container>")])),
        "/objects" | "/objects/" => {
            let ids = config.iothreads.iter().map(|object| (&object.id, IoThread::NOUN)).chain(quiet(config));
            let ids = ids.map(|(id, of)| entry(id, &format!("child<{of}>")));
            Ok(std::iter::once(kind).chain(ids).collect())
        }
        path if type_of_quiet(config, path).is_some() => Ok(json!([kind])),
        path => {
            find(config, path)?;
            let properties = IoThread::SHAPE.keys.iter().filter(|key| key.name != "id");
            let properties = properties.map(|key| entry(key.name, type_of(&key.kind)));
            Ok(std::iter::once(kind).chain(properties).collect())
        }
    }
}

const fn type_of(kind: &ValueType) -> &'static str {
    match kind {
        ValueType::Number(..) | ValueType::Bytes(..) => "int",
        ValueType::Flag => "bool",
        _ => "string",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_every_kind_are_listed_and_of_secrets_their_type_alone_is_shown() {
        let mut config = Config::empty();
        config.iothreads = vec![IoThread::new("io0")];
        let secret = json!({"id": "s", "data": "hidden"});
        config.secrets = vec![Secret::from_value(secret, Spelling::Typed).unwrap()];
        let creds = json!({"id": "t", "dir": "/tls"});
        config.tls_creds = vec![TlsCreds::from_value(creds, Spelling::Typed).unwrap()];
        let listed = |path: &str| -> Vec<(String, String)> {
            let entries = list(&config, path).unwrap();
            let text = |entry: &Value, key: &str| entry[key].as_str().unwrap().to_owned();
            entries.as_array().unwrap().iter().map(|entry| (text(entry, "name"), text(entry, "type"))).collect()
        };
        let expected = [("io0", "iothread"), ("s", "secret"), ("t", "tls-creds-x509")];
        let expected = expected.map(|(id, of)| (id.to_owned(), format!("child<{of}>")));
        assert_eq!(listed("/objects")[1..], expected);
        for path in ["/objects/s", "s", "t"] {
            assert_eq!(listed(path), [("type".to_owned(), "string".to_owned())]);
        }
        assert!(list(&config, "/objects/u").is_err());
        for (name, of) in [("poll-max-ns", "int"), ("x-clock-per-request", "bool"), ("poll-policy", "string")] {
            assert!(listed("io0").contains(&(name.to_owned(), of.to_owned())), "{name}");
        }
    }
}
