//! The command that answers with every counter.

use egret_vocabulary::options;
use egret_vocabulary::schema::{Shape, ValueType};

use super::QmpError;
use super::command::{Command, Run, Takes, typed};
use crate::snapshot::Snapshot;

options! {
    struct Query {
        /// An export: it alone, and queue by queue.
        export: Option<String>, ValueType::Text(0, usize::MAX), unset "everything";
    }
}

static QUERY: Shape = Shape::of(Query::KEYS);

pub(super) static COMMANDS: &[Command] = &[Command {
    name: "egret-query-stats",
    takes: Takes::Keys(&QUERY),
    returns: r#"{"time-ns", "iothreads": [...], "exports": [{"id", "total": {...}, "queues": [...]}]}"#,
    about: "Every counter of I/O threads and exports, each since its beginning: what `egret top` shows as rates, and \
            [watching.md](watching.md) explains. Egret's own.",
    run: Run::Query(|view, arguments| {
        let Query { export } = typed(arguments)?;
        let snapshot = match export.as_deref().unwrap_or_default() {
            "" => Snapshot::of(view),
            id => {
                Snapshot::of_export(view, id).ok_or_else(|| QmpError::generic(format!("Export '{id}' is not found")))?
            }
        };
        serde_json::to_value(snapshot).map_err(|e| QmpError::generic(e.to_string()))
    }),
}];

#[cfg(test)]
mod tests {
    use egret_vocabulary::Config;
    use egret_vocabulary::schema::{self, Addr, Blockdev, Driver, Image, UnixAddr};
    use serde_json::Value;

    use super::*;
    use crate::Daemon;
    use crate::process::Inherited;
    use crate::qmp::Descriptors;
    use crate::qmp::command::{Arguments, Context};
    use crate::qmp::commands::COMMANDS;

    fn ask(daemon: &mut Daemon, arguments: Value) -> Result<Value, QmpError> {
        let arguments: Arguments = arguments.as_object().cloned().unwrap();
        COMMANDS
            .find("egret-query-stats")
            .unwrap()
            .call(&mut Context { daemon, descriptors: &mut Descriptors::default(), commands: &COMMANDS }, arguments)
    }

    #[test]
    fn an_export_that_is_named_is_told_of_queue_by_queue() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
        std::fs::File::create(at("image")).unwrap().set_len(1 << 20).unwrap();
        let mut daemon = Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap();
        daemon.add_blockdev(Blockdev::new("d0", Driver::File(Image::new(at("image"))))).unwrap();
        for id in ["e0", "e1"] {
            let mut export = schema::Export::new(id, "d0", Addr::Unix(UnixAddr { path: at(id) }));
            export.vhost_user_mut().unwrap().num_queues = 3;
            daemon.add_export(export).unwrap();
        }
        let all: Snapshot = serde_json::from_value(ask(&mut daemon, serde_json::json!({})).unwrap()).unwrap();
        assert_eq!(all.iothreads.iter().map(|thread| &*thread.id).collect::<Vec<_>>(), ["io"]);
        assert!(all.iothreads[0].turns > 0 && all.iothreads[0].poll_policy == "low-regret");
        let told = |snapshot: &Snapshot| -> Vec<_> {
            snapshot.exports.iter().map(|export| (export.id.clone(), export.queues.len())).collect()
        };
        assert_eq!(told(&all), [("e0".to_owned(), 0), ("e1".to_owned(), 0)]);
        let one = ask(&mut daemon, serde_json::json!({ "export": "e1" })).unwrap();
        let one: Snapshot = serde_json::from_value(one).unwrap();
        assert_eq!(told(&one), [("e1".to_owned(), 3)]);
        assert_eq!(one.exports[0].queues[2].iothread, "io");
        assert!(one.iothreads.is_empty());
        let error = ask(&mut daemon, serde_json::json!({ "export": "e9" })).unwrap_err();
        assert!(format!("{error:?}").contains("Export 'e9' is not found"), "{error:?}");
    }
}
