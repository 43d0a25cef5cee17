//! What `qemu-storage-daemon` says of itself, and what is said of it here.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use egret_vocabulary::schema::{Blockdev, Export, IoThread, Object as _, Secret, Shape, TlsCreds, ValueType};
use serde_json::{Value, json};

use support::has_or_skips;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

/// What a daemon that does nothing answers to a query.
fn asked(program: &Program, query: &str) -> Vec<Value> {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let _server = Server::start(program, &Options::new().monitor("m", &socket));
    Qmp::connect(&socket).run(query, json!({})).as_array().unwrap().clone()
}

/// QEMU's; `None`, where this is no CI, if it is not installed.
fn asked_of_qemu(query: &str) -> Option<Vec<Value>> {
    let name = "qemu-storage-daemon";
    has_or_skips(name).then(|| asked(&Program::peer(name), query))
}

#[test]
fn each_command_of_qemu_s_daemon_is_here_or_on_the_page_of_what_is_not() {
    let Some(theirs) = asked_of_qemu("query-commands") else { return };
    let names = |commands: Vec<Value>| -> BTreeSet<String> {
        commands.iter().map(|command| command["name"].as_str().unwrap().to_owned()).collect()
    };
    let (theirs, ours) = (names(theirs), names(asked(&Program::egret(), "query-commands")));
    let page = include_str!("../../../docs/migrate.md");
    let words = page.split("\nNor are these commands").nth(1).unwrap().split('`').skip(1).step_by(2);
    let words: Vec<&str> = words.collect();
    let is =
        |command: &str, word: &str| word.strip_suffix('*').map_or(command == word, |begin| command.starts_with(begin));
    let forgotten = theirs.difference(&ours).filter(|command| !words.iter().any(|word| is(command, word)));
    assert_eq!(forgotten.collect::<Vec<_>>(), [""; 0], "docs/migrate.md names them");
    let here = ours.iter().filter(|command| words.iter().any(|word| is(command, word)));
    assert_eq!(here.collect::<Vec<_>>(), [""; 0], "docs/migrate.md says that they are not here");
}

/// QEMU's introspection, by the names of types.
struct Introspection(BTreeMap<String, Value>);

impl Introspection {
    fn entry(&self, name: &Value) -> &Value {
        &self.0[name.as_str().unwrap()]
    }

    /// The keys of an object of theirs of which ours, of this shape, says nothing.
    fn unheard(&self, of: &Value, shape: &Shape, path: &str, into: &mut Vec<String>) {
        let entry = self.entry(of);
        match entry["meta-type"].as_str() {
            Some("array") => return self.unheard(&entry["element-type"], shape, path, into),
            Some("object") => {}
            // A name, or what may be one.
            _ => return,
        }
        let common = entry["members"].as_array().unwrap();
        let variants = entry["variants"].as_array().map(Vec::as_slice).unwrap_or_default();
        let of_case = |case: &Value| self.entry(&case["type"])["members"].as_array().unwrap();
        match &shape.variants {
            None => {
                let members = common.iter().chain(variants.iter().flat_map(of_case));
                members.for_each(|member| self.look_at(member, shape, None, path, into));
            }
            Some(ours) => {
                for case in variants {
                    let tag = case["case"].as_str().unwrap();
                    if ours.of.iter().any(|(name, _)| *name == tag) {
                        let members = common.iter().chain(of_case(case));
                        members.for_each(|member| self.look_at(member, shape, Some(tag), path, into));
                    }
                }
            }
        }
    }

    fn look_at(&self, member: &Value, shape: &Shape, tag: Option<&str>, path: &str, into: &mut Vec<String>) {
        let name = member["name"].as_str().unwrap();
        let at = format!("{path}{name}");
        let decides = shape.variants.as_ref().is_some_and(|variants| variants.tag == name);
        match shape.keys_of(tag).find(|key| key.name == name).map(|key| &key.kind) {
            Some(ValueType::Object(inner) | ValueType::List(inner)) => {
                self.unheard(&member["type"], inner, &format!("{at}."), into);
            }
            Some(_) => {}
            None if decides || shape.foreign.iter().any(|foreign| foreign.name == name) => {}
            // The error says whose it is.
            None if shape.all_keys().iter().any(|(key, _)| key.name == name) => {}
            None => into.push(at),
        }
    }
}

#[test]
fn each_key_that_qemu_s_daemon_takes_for_what_is_here_is_known() {
    let Some(schema) = asked_of_qemu("query-qmp-schema") else { return };
    let named = |entry: Value| (entry["name"].as_str().unwrap().to_owned(), entry);
    let qemu = Introspection(schema.into_iter().map(named).collect());
    let mut unheard = Vec::new();
    for (command, shape) in [("blockdev-add", Blockdev::SHAPE), ("block-export-add", Export::SHAPE)] {
        qemu.unheard(&qemu.0[command]["arg-type"], shape, "", &mut unheard);
    }
    let objects = qemu.entry(&qemu.0["object-add"]["arg-type"]);
    for (noun, shape) in
        [(IoThread::NOUN, IoThread::SHAPE), (Secret::NOUN, Secret::SHAPE), (TlsCreds::NOUN, TlsCreds::SHAPE)]
    {
        let case = objects["variants"].as_array().unwrap().iter().find(|case| case["case"] == noun).unwrap();
        qemu.unheard(&case["type"], shape, "", &mut unheard);
    }
    assert_eq!(unheard, [""; 0]);
}
