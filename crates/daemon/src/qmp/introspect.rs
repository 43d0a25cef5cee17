//! The vocabulary for programs: what `query-qmp-schema` answers.
//!
//! The shapes of objects and commands, in the form that QEMU's introspection has: commands name object types, whose
//! members name types in turn. Names of types say what they hold, and are not to be relied on, as with QEMU.

use egret_vocabulary::schema::{Key, Shape, Unset, ValueType};
use serde_json::{Value, json};

use super::command::{Table, Takes};
use super::event::EVENTS;

/// These commands and every event, with the types that they lead to.
pub fn schema(commands: &Table) -> Value {
    let mut types = Types { entries: Vec::new() };
    for (name, json) in [("str", "string"), ("int", "int"), ("number", "number"), ("bool", "boolean"), ("any", "value")]
    {
        types.entries.push(json!({ "name": name, "meta-type": "builtin", "json-type": json }));
    }
    for command in commands.iter() {
        let argument = format!("{}-arg", command.name);
        match command.takes {
            Takes::Keys(shape) | Takes::Object { shape, .. } | Takes::AnyObject(shape) => {
                types.object(&argument, shape, &[]);
            }
            Takes::KeysAndValue(shape) => types.object(&argument, shape, &[("value", "any")]),
        }
        types.entries.push(json!({
            "name": command.name, "meta-type": "command", "arg-type": argument, "ret-type": "any", "allow-oob": false,
        }));
    }
    for (name, _, members, _) in EVENTS {
        let data = format!("{name}-arg");
        let members: Vec<Value> = members.iter().map(|(name, of)| json!({ "name": name, "type": of })).collect();
        types.entries.push(json!({ "name": data, "meta-type": "object", "members": members }));
        types.entries.push(json!({ "name": name, "meta-type": "event", "arg-type": data }));
    }
    types.entries.into()
}

struct Types {
    entries: Vec<Value>,
}

impl Types {
    fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| entry["name"] == name)
    }

    fn object(&mut self, name: &str, shape: &'static Shape, more: &[(&str, &str)]) {
        if self.has(name) {
            return;
        }
        // The name is taken before its members are looked at, because a blockdev may lie in a blockdev.
        let place = self.entries.len();
        self.entries.push(json!({ "name": name, "meta-type": "object" }));
        let mut members: Vec<Value> = more.iter().map(|(name, of)| json!({ "name": name, "type": of })).collect();
        members.extend(shape.keys.iter().map(|key| self.member(name, key)));
        let mut entry = json!({ "name": name, "meta-type": "object" });
        if let Some(variants) = &shape.variants {
            let tags = format!("{name}-{}", variants.tag);
            let words: Vec<&str> = variants.of.iter().map(|(word, _)| *word).collect();
            self.word(&tags, &words);
            members.push(json!({ "name": variants.tag, "type": tags }));
            let cases = variants.of.iter().map(|(case, keys)| {
                let of = format!("{name}-{case}");
                let members: Vec<Value> = keys.iter().map(|key| self.member(name, key)).collect();
                self.entries.push(json!({ "name": of, "meta-type": "object", "members": members }));
                json!({ "case": case, "type": of })
            });
            entry["variants"] = cases.collect();
            entry["tag"] = variants.tag.into();
        }
        entry["members"] = members.into();
        self.entries[place] = entry;
    }

    fn word(&mut self, name: &str, words: &[&str]) {
        if !self.has(name) {
            let members: Vec<Value> = words.iter().map(|word| json!({ "name": word })).collect();
            self.entries.push(json!({ "name": name, "meta-type": "enum", "members": members, "values": words }));
        }
    }

    fn list(&mut self, of: &str) -> String {
        let name = format!("[{of}]");
        if !self.has(&name) {
            self.entries.push(json!({ "name": name, "meta-type": "array", "element-type": of }));
        }
        name
    }

    fn alternate(&mut self, name: &str, of: &[&str]) -> String {
        if !self.has(name) {
            let members: Vec<Value> = of.iter().map(|of| json!({ "type": of })).collect();
            self.entries.push(json!({ "name": name, "meta-type": "alternate", "members": members }));
        }
        name.to_owned()
    }

    fn member(&mut self, owner: &str, key: &'static Key) -> Value {
        let name = format!("{owner}-{}", key.name);
        let of = match key.kind {
            ValueType::Flag => "bool".to_owned(),
            ValueType::Number(..)
            | ValueType::PowerOfTwo(..)
            | ValueType::Bytes(..)
            | ValueType::PowerOfTwoBytes(..) => "int".to_owned(),
            ValueType::Text(..)
            | ValueType::Hidden(..)
            | ValueType::Mode
            | ValueType::Name(_)
            | ValueType::Descriptor => "str".to_owned(),
            ValueType::Word(words) => {
                self.word(&name, &words());
                name
            }
            ValueType::Words(words) => {
                self.word(&name, &words());
                self.list(&name)
            }
            ValueType::Settings => "any".to_owned(),
            ValueType::Numbers(..) => self.list("int"),
            ValueType::Names => {
                let list = self.list("str");
                self.alternate("one-or-more-names", &["str", &list])
            }
            ValueType::Users => {
                let either = self.alternate("user", &["str", "int"]);
                let list = self.list(&either);
                self.alternate("one-or-more-users", &["str", "int", &list])
            }
            ValueType::Cpus => {
                let list = self.list("int");
                self.alternate("processors", &["str", &list])
            }
            ValueType::Object(shape) => {
                self.object(&name, shape, &[]);
                name
            }
            ValueType::List(shape) => {
                self.object(&name, shape, &[]);
                self.list(&name)
            }
            ValueType::Child(..) => self.alternate("blockdev-ref", &["str", "blockdev-add-arg"]),
        };
        let mut member = json!({ "name": key.name, "type": of });
        if !matches!(key.unset, Unset::Refused) {
            member["default"] = Value::Null;
        }
        member
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use egret_disk::{Action, Failure};
    use egret_event_loop::Nanos;
    use egret_virtio::scsi::LunAddress;

    use super::*;
    use crate::qmp::event::Event;
    use crate::watchdog::Stall;
    use crate::{BrokenQueue, DiskFailure, RequestTimeout};

    #[test]
    fn a_member_that_may_be_left_out_has_a_default_and_no_other() {
        let schema = schema(&crate::qmp::commands::COMMANDS);
        let object = |name| schema.as_array().unwrap().iter().find(|entry| entry["name"] == name).unwrap();
        let members = object("object-add-arg-iothread")["members"].as_array().unwrap();
        let has_default = |name| members.iter().find(|member| member["name"] == name).unwrap().get("default").is_some();
        assert!(has_default("poll-max-ns") && has_default("poll-grow") && !has_default("id"));
    }

    #[test]
    fn programs_are_told_which_objects_can_be_added_and_what_each_has() {
        let schema = schema(&crate::qmp::commands::COMMANDS);
        let object = |name| schema.as_array().unwrap().iter().find(|entry| entry["name"] == name).unwrap();
        let added = object("object-add-arg");
        assert_eq!(added["tag"], "qom-type");
        let cases = added["variants"].as_array().unwrap().iter().map(|variant| &variant["case"]);
        assert_eq!(cases.collect::<Vec<_>>(), ["iothread", "secret", "throttle-group", "tls-creds-x509"]);
        let limits = object("object-add-arg-limits")["members"].as_array().unwrap();
        assert!(limits.iter().any(|member| member["name"] == "iops-total-max-length"));
    }

    #[test]
    fn an_event_carries_what_it_is_said_to() {
        let schema = schema(&crate::qmp::commands::COMMANDS);
        let entry = |name: &str| schema.as_array().unwrap().iter().find(|entry| entry["name"] == name).unwrap();
        let stall = |over| {
            let phase = egret_event_loop::Phase::Waiting;
            Event::Stall(Stall { id: "io".into(), thread_id: 1, phase, stood: Duration::ZERO, over })
        };
        let (export, op, errno) = ("e".into(), egret_disk::Op::Read, rustix::io::Errno::IO);
        let failure = Failure { export, op, errno, action: Action::Report, has_lost_writes: false };
        let at = LunAddress { target: 0, lun: 0 };
        let events = [
            Event::BlockExportDeleted { id: "e".into() },
            Event::BlockIoError(DiskFailure { node_name: "d".into(), failure }),
            stall(true),
            stall(false),
            Event::LunDeleted { id: "e".into(), at, node_name: "d".into() },
            Event::QueueBroken(BrokenQueue { export: "e".into(), queue: 0, reason: "r".into() }),
            Event::RequestTimeout(RequestTimeout { export: "e".into(), requests: 1, oldest: Nanos(1) }),
            Event::Shutdown { reason: "host-signal" },
        ];
        assert_eq!(events.len(), EVENTS.len());
        for (event, (name, ..)) in events.iter().zip(EVENTS) {
            let told = event.to_json();
            assert_eq!(told["event"], *name);
            let of = entry(entry(name)["arg-type"].as_str().unwrap());
            let members = of["members"].as_array().unwrap().iter().map(|member| {
                let of = entry(member["type"].as_str().unwrap())["json-type"].as_str().unwrap();
                (member["name"].as_str().unwrap(), of)
            });
            let carried = told["data"].as_object().unwrap().iter().map(|(name, value)| {
                let of = match value {
                    Value::String(_) => "string",
                    Value::Bool(_) => "boolean",
                    Value::Number(number) if number.is_f64() => "number",
                    Value::Number(_) => "int",
                    _ => "value",
                };
                (name.as_str(), of)
            });
            assert_eq!(carried.collect::<BTreeSet<_>>(), members.collect(), "{name}");
        }
        assert_eq!(entry("qmp_capabilities")["meta-type"], "command");
    }

    #[test]
    fn every_type_that_is_named_is_there_and_no_name_is_given_twice() {
        let schema = schema(&crate::qmp::commands::COMMANDS);
        let entries = schema.as_array().unwrap();
        let names: BTreeSet<&str> = entries.iter().map(|entry| entry["name"].as_str().unwrap()).collect();
        assert_eq!(names.len(), entries.len());
        fn named<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
            for key in ["type", "arg-type", "ret-type", "element-type"] {
                found.extend(value[key].as_str());
            }
            match value {
                Value::Object(object) => object.values().for_each(|value| named(value, found)),
                Value::Array(list) => list.iter().for_each(|value| named(value, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        named(&schema, &mut found);
        assert!(found.len() > 50);
        for name in found {
            assert!(names.contains(name), "{name}");
        }
    }
}
