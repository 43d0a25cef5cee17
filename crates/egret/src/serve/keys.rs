//! Options whose arguments are made of keys: what help, completions and the manual know of them.

use egret_vocabulary::chardev::{CHARDEV, MONITOR};
use egret_vocabulary::metrics;
use egret_vocabulary::schema::{
    self, AddFd, Blockdev, Export, IoThread, NBD_SERVER, Object, Secret, Shape, ThrottleGroup, TlsCreds, ValueType,
};

use super::Serve;

/// What the argument of an option may be.
#[derive(Debug)]
pub struct Argument {
    /// The option, without its dashes.
    pub option: &'static str,
    /// What it begins with, and the key whose value that is where it is written without one.
    first: &'static str,
    implied: &'static str,
    /// What it makes, in a line.
    about: &'static str,
    /// Its keys.
    pub shape: &'static Shape,
}

/// The key of `--object` that says what kind of object it is: its keys are no object's own.
const KIND: &str = "qom-type";

/// All of them.
pub static ARGUMENTS: [Argument; 11] = [
    object(IoThread::NOUN, "an event loop on a thread of its own", IoThread::SHAPE),
    object(Secret::NOUN, "a key or a passphrase, by a name", Secret::SHAPE),
    object(ThrottleGroup::NOUN, "limits that disks share", ThrottleGroup::SHAPE),
    object(TlsCreds::NOUN, "certificates and keys for TLS, by a name", TlsCreds::SHAPE),
    Argument {
        option: "blockdev",
        first: "DRIVER",
        implied: "driver",
        about: "a disk, or a layer over one",
        shape: Blockdev::SHAPE,
    },
    Argument {
        option: "export",
        first: "TYPE",
        implied: "type",
        about: "disks offered to virtual machines, or over NBD",
        shape: Export::SHAPE,
    },
    Argument {
        option: "nbd-server",
        first: "KEY=VALUE",
        implied: "",
        about: "where clients of exports of type nbd connect",
        shape: &NBD_SERVER,
    },
    Argument {
        option: "chardev",
        first: "BACKEND",
        implied: "backend",
        about: "a place for a monitor",
        shape: &CHARDEV,
    },
    Argument { option: "monitor", first: "ID", implied: "chardev", about: "QMP on a chardev", shape: &MONITOR },
    Argument { option: "add-fd", first: "fd=N", implied: "fd", about: "a descriptor for a set", shape: AddFd::SHAPE },
    Argument {
        option: "metrics",
        first: "PLACE",
        implied: "path",
        about: "where metrics are served",
        shape: metrics::SHAPE,
    },
];

const fn object(kind: &'static str, about: &'static str, shape: &'static Shape) -> Argument {
    Argument { option: "object", first: kind, implied: KIND, about, shape }
}

impl Argument {
    /// How it is written, and what it makes.
    pub fn head(&self) -> String {
        format!("--{} {},KEY=VALUE,...: {}", self.option, self.first, self.about)
    }

    /// What its keys stand under, where those of others do as well.
    pub fn heading(&self) -> String {
        let kind = if self.implied == KIND { format!(" {}", self.first) } else { String::new() };
        format!("KEYS OF --{}{kind}", self.option)
    }

    /// What it may begin with, as far as that is known.
    fn words(&self) -> Vec<&'static str> {
        match &self.shape.variants {
            _ if self.implied == KIND => vec![self.first],
            Some(variants) => variants.of.iter().map(|(word, _)| *word).collect(),
            None => Vec::new(),
        }
    }
}

/// What to print if any of the options asks for help.
pub fn help(arguments: &Serve) -> Option<String> {
    let nbd_server: Vec<String> = arguments.nbd_server.iter().cloned().collect();
    let Serve { object, blockdev, export, chardev, .. } = arguments;
    let options = [
        ("object", object),
        ("blockdev", blockdev),
        ("export", export),
        ("nbd-server", &nbd_server),
        ("chardev", chardev),
    ];
    let asks = |texts: &[String]| texts.iter().any(|text| text == "help" || text.ends_with(",help"));
    let (option, _) = options.into_iter().find(|(_, texts)| asks(texts))?;
    let arguments = ARGUMENTS.iter().filter(|argument| argument.option == option);
    let texts: Vec<String> =
        arguments.map(|argument| format!("{}\n{}", argument.head(), schema::help(argument.shape))).collect();
    Some(texts.join("\n"))
}

/// What `text`, the argument of an option so far, may be continued to; nothing where that is for others to know, as with
/// names and files.
///
/// Keys come up to their next dot: an object has many, and most lie in others.
pub fn complete(option: &str, text: &str) -> Vec<String> {
    let (before, part) = text.split_at(text.rfind(',').map_or(0, |comma| comma + 1));
    let mut known = Known { part, ..Known::default() };
    for argument in ARGUMENTS.iter().filter(|argument| argument.option == option) {
        let words = argument.words();
        if before.is_empty() && !words.is_empty() {
            known.found.extend(words.iter().map(|word| format!("{word},")));
            known.offer(argument.implied, &words);
            continue;
        }
        let parts = before.split_terminator(',').enumerate();
        known.given = parts
            .filter_map(|(at, part)| part.split_once('=').or((at == 0).then_some((argument.implied, part))))
            .collect();
        if argument.implied != KIND || known.value(KIND) == Some(argument.first) {
            known.gather(argument.shape, "");
        }
    }
    let mut all: Vec<String> = Vec::new();
    for (one, rest) in known.found.iter().filter_map(|one| Some((one, one.strip_prefix(part)?))) {
        let end = if part.contains('=') { None } else { rest.find(['.', '=']) };
        let one = format!("{before}{}", end.map_or(one.as_str(), |end| &one[..=part.len() + end]));
        if !all.contains(&one) {
            all.push(one);
        }
    }
    all
}

/// What is known of an argument.
#[derive(Default)]
struct Known<'a> {
    /// The keys that it has, with their values.
    given: Vec<(&'a str, &'a str)>,
    /// The beginning of the next one.
    part: &'a str,
    /// What that may become.
    found: Vec<String>,
}

impl Known<'_> {
    fn value(&self, key: &str) -> Option<&str> {
        self.given.iter().find(|(given, _)| *given == key).map(|(_, value)| *value)
    }

    /// A key that is not given yet, with the words that it may be.
    fn offer(&mut self, key: &str, words: &[&str]) {
        if self.value(key).is_some() {
            return;
        }
        match words {
            [] => self.found.push(format!("{key}=")),
            words => self.found.extend(words.iter().map(|word| format!("{key}={word}"))),
        }
    }

    /// All keys of what lies at `path`.
    fn gather(&mut self, shape: &'static Shape, path: &str) {
        let mut keys: Vec<_> = shape.all_keys().into_iter().map(|(key, _)| key).collect();
        if let Some(variants) = &shape.variants {
            let tag = format!("{path}{}", variants.tag);
            if let Some(variant) = self.value(&tag) {
                keys = shape.keys_of(Some(variant)).collect();
            }
            let words: Vec<&str> = variants.of.iter().map(|(word, _)| *word).collect();
            self.offer(&tag, &words);
        }
        for key in keys {
            let at = format!("{path}{}", key.name);
            let rest = self.part.strip_prefix(&at).and_then(|rest| rest.strip_prefix('.'));
            match key.kind {
                ValueType::Object(nested) => self.gather(nested, &format!("{at}.")),
                ValueType::List(nested) => {
                    let number = rest.and_then(|rest| rest.split_once('.')).map_or("0", |(number, _)| number);
                    self.gather(nested, &format!("{at}.{number}."));
                }
                // It may have one of its own, and so on.
                ValueType::Child(_, nested) if rest.is_some() => self.gather(nested(), &format!("{at}.")),
                ValueType::Child(..) => self.found.extend([format!("{at}="), format!("{at}.")]),
                ValueType::Settings => self.found.push(format!("{at}.")),
                kind => self.offer(&at, &kind.words()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use egret_polling::PolicyKind;
    use egret_vocabulary::schema::words;

    use super::*;

    /// What may follow `text` behind it.
    fn rests(option: &str, text: &str) -> Vec<String> {
        let all = complete(option, text);
        all.iter().map(|one| one.strip_prefix(text).unwrap_or_else(|| panic!("{text}: {one}")).to_owned()).collect()
    }

    #[test]
    fn help_is_there_for_every_kind_of_object() {
        for (option, key) in
            [("object", "poll-max-ns"), ("blockdev", "cache.direct"), ("export", "addr.path"), ("chardev", "server")]
        {
            for text in ["help", "x,help"] {
                let mut arguments = Serve::default();
                match option {
                    "object" => arguments.object.push(text.to_owned()),
                    "blockdev" => arguments.blockdev.push(text.to_owned()),
                    "chardev" => arguments.chardev.push(text.to_owned()),
                    _ => arguments.export.push(text.to_owned()),
                }
                assert!(help(&arguments).unwrap().contains(&format!("  {key}=<")));
            }
        }
        assert_eq!(help(&Serve { object: vec!["iothread,id=helper".to_owned()], ..Serve::default() }), None);
    }

    #[test]
    fn an_argument_is_continued_by_its_kind_then_by_keys_of_that_kind_and_by_the_words_of_a_key() {
        assert_eq!(complete("object", "i"), ["iothread,"]);
        assert_eq!(complete("blockdev", "null"), ["null-co,", "null-aio,"]);
        assert_eq!(complete("blockdev", "driver=ho"), ["driver=host_device"]);
        assert_eq!(rests("blockdev", "file,node-name=a,fi"), ["lename="]);
        assert_eq!(rests("blockdev", "null-co,fi"), [""; 0], "it has no file");
        assert_eq!(rests("object", "iothread,poll-policy="), words::<PolicyKind>());
        assert_eq!(rests("object", "secret,poll-policy="), [""; 0]);
        assert_eq!(rests("export", "vhost-user-blk,writable="), ["on", "off"]);
        assert_eq!(rests("monitor", "qmp,pret"), ["ty="]);
        assert_eq!(rests("chardev", "socket,server="), ["on", "off"]);
        // A key that is given is not needed again, and what is no option's has none.
        assert_eq!(rests("blockdev", "file,filename=/d,file"), [""; 0]);
        assert_eq!(rests("pidfile", ""), [""; 0]);
        assert_eq!(rests("blockdev", "{\"driver\""), [""; 0]);
    }

    #[test]
    fn what_lies_in_a_key_comes_when_that_is_there() {
        assert_eq!(rests("export", "vhost-user-blk,addr"), ["."]);
        assert_eq!(rests("export", "vhost-user-blk,addr."), ["type=", "path=", "str="]);
        assert_eq!(rests("export", "vhost-user-blk,addr.type=unix,addr."), ["path="]);
        assert_eq!(rests("blockdev", "raw,fi"), ["le=", "le."]);
        assert_eq!(rests("blockdev", "raw,file.driver=nul"), ["l-co", "l-aio"]);
        assert_eq!(rests("blockdev", "raw,file.driver=null-co,file.siz"), ["e="]);
        assert_eq!(rests("export", "vhost-user-scsi,luns.1.nod"), ["e-name="]);
    }

    #[test]
    fn every_key_that_an_option_has_is_completed() {
        for argument in &ARGUMENTS {
            let before = if argument.implied == KIND { argument.first } else { "x=y" };
            for row in schema::rows(argument.shape) {
                let key = row.key.replace(".N.", ".0.").replace(".NAME", "");
                let text = format!("{before},{}", &key[..key.len() - 1]);
                let is_it = |one: &String| one.trim_end_matches(['=', '.']) == format!("{before},{key}");
                assert!(complete(argument.option, &text).iter().any(is_it), "--{} {text}", argument.option);
            }
        }
    }
}
