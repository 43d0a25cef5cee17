//! Commands about descriptors, which a client sends beside them (SCM_RIGHTS): a daemon that is handed what it serves needs
//! no right to open it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};

use egret_event_loop::FromPeer;
use egret_vocabulary::options;
use egret_vocabulary::schema::{Descriptor, FdSetNumber, LARGEST_FD_SET, Shape, ValueType};
use serde_json::{Map, Value, json};

use super::QmpError;
use super::command::{Command, Run, Takes, nothing, typed};

/// Descriptors that one client may have names for.
const MOST_NAMED: usize = 64;

options! {
    struct Named {
        /// Name of the descriptor, not with a digit first.
        fdname: String, ValueType::Text(1, 255);
    }
}

options! {
    struct Add {
        /// The set that it is added to.
        fdset_id: Option<FdSetNumber>, SET, unset "the least that is free";
        /// What to say of it in `query-fdsets`.
        opaque: Option<String>, ValueType::Text(0, 4096), unset "none";
    }
}

options! {
    struct Remove {
        /// The set.
        fdset_id: FdSetNumber, SET;
        /// The descriptor, by its number.
        fd: Option<u64>, ValueType::Number(0, i32::MAX as u64, ""), unset "all of the set";
    }
}

const SET: ValueType = ValueType::Number(0, LARGEST_FD_SET, "");

static NAMED: Shape = Shape::of(Named::KEYS);
static ADD: Shape = Shape::of(Add::KEYS);
static REMOVE: Shape = Shape::of(Remove::KEYS);

/// What a client has sent beside its commands.
#[derive(Debug, Default)]
pub struct Descriptors {
    /// What came last and nothing has taken: a command takes the first.
    arrived: Vec<FromPeer>,
    /// What `getfd` gave a name.
    named: BTreeMap<String, FromPeer>,
}

impl Descriptors {
    /// As with QEMU, what nothing has taken makes room for what comes next.
    pub(super) fn arrive(&mut self, arrived: Vec<FromPeer>) {
        if !arrived.is_empty() {
            self.arrived = arrived;
        }
    }

    /// Puts back what a command has left; what has arrived meanwhile stays.
    pub(super) fn put_back(&mut self, Self { arrived, named }: Self) {
        self.named = named;
        if self.arrived.is_empty() {
            self.arrived = arrived;
        }
    }

    /// What came with a command; more than one are closed.
    fn sent(&mut self) -> Result<FromPeer, QmpError> {
        let first = std::mem::take(&mut self.arrived).into_iter().next();
        first.ok_or_else(|| QmpError::generic("No file descriptor supplied via SCM_RIGHTS"))
    }

    /// Another of one that has a name, which it keeps until it is [forgotten](Self::forget).
    pub(super) fn named(&self, wanted: &Descriptor) -> Result<OwnedFd, QmpError> {
        let missing = || QmpError::generic(format!("File descriptor named '{wanted}' has not been found"));
        let named = self.named.get(&wanted.to_string()).ok_or_else(missing)?;
        let another = named.as_fd().try_clone_to_owned();
        another.map_err(|e| QmpError::generic(format!("file descriptor named '{wanted}': {e}")))
    }

    /// Takes its name from one that was given away.
    pub(super) fn forget(&mut self, given: &Descriptor) {
        self.named.remove(&given.to_string());
    }
}

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "getfd",
        takes: Takes::Keys(&NAMED),
        returns: "{}",
        about: "Give the descriptor that came with this command a name, in the place of one that has it. It is the \
                client's own, and goes with it; `block-export-add` takes it by `addr.type=fd,addr.str=NAME`.",
        run: Run::Mutate(|context, arguments| {
            let Named { fdname: name } = typed(arguments)?;
            let own = &mut context.descriptors;
            let descriptor = own.sent()?;
            if !matches!(name.parse(), Ok(Descriptor::Name(_))) {
                return Err(QmpError::generic("Parameter 'fdname' expects a name not starting with a digit"));
            }
            if own.named.len() >= MOST_NAMED && !own.named.contains_key(&name) {
                return Err(QmpError::generic(format!("{MOST_NAMED} descriptors have names; closefd gives one back")));
            }
            own.named.insert(name, descriptor);
            Ok(nothing())
        }),
    },
    Command {
        name: "closefd",
        takes: Takes::Keys(&NAMED),
        returns: "{}",
        about: "Close a descriptor that has a name.",
        run: Run::Mutate(|context, arguments| {
            let Named { fdname: name } = typed(arguments)?;
            let missing = || QmpError::generic(format!("File descriptor named '{name}' not found"));
            context.descriptors.named.remove(&name).map(|_| nothing()).ok_or_else(missing)
        }),
    },
    Command {
        name: "add-fd",
        takes: Takes::Keys(&ADD),
        returns: r#"{"fdset-id", "fd"}"#,
        about: "Add the descriptor that came with this command to a set; `filename=/dev/fdset/N` of a blockdev is an \
                image that was opened for it. When the last client of all monitors has left, sets that no blockdev \
                names are closed.",
        run: Run::Mutate(|context, arguments| {
            let descriptor = context.descriptors.sent()?;
            let Add { fdset_id, opaque } = typed(arguments)?;
            let (id, number) = context.daemon.add_fd(fdset_id, descriptor.into_fd(), opaque)?;
            Ok(json!({ "fdset-id": id, "fd": number }))
        }),
    },
    Command {
        name: "remove-fd",
        takes: Takes::Keys(&REMOVE),
        returns: "{}",
        about: "Close a descriptor of a set, or all of them. What is open through it stays open.",
        run: Run::Mutate(|context, arguments| {
            let Remove { fdset_id, fd } = typed(arguments)?;
            context.daemon.remove_fd(fdset_id, fd)?;
            Ok(nothing())
        }),
    },
    Command {
        name: "query-fdsets",
        takes: Takes::NOTHING,
        returns: r#"[{"fdset-id", "fds": [{"fd", "opaque"}]}]"#,
        about: "Every set of descriptors.",
        run: Run::Query(|view, _| {
            let fd = |(number, opaque): &(i32, Option<String>)| {
                let mut shown = Map::from_iter([("fd".to_owned(), Value::from(*number))]);
                shown.extend(opaque.iter().map(|opaque| ("opaque".to_owned(), opaque.as_str().into())));
                Value::from(shown)
            };
            let set = |fds: &[_]| fds.iter().map(fd).collect::<Value>();
            Ok(view.fd_sets().iter().map(|shown| json!({ "fdset-id": shown.id, "fds": set(&shown.fds) })).collect())
        }),
    },
];
