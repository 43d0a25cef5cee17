//! `--chardev` and `--monitor`: where monitors are found.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::address::{Address, Listen};
use crate::keyval::{self, KeyvalError};
use crate::schema::{Foreign, Harmless, Problem, Shape, ValueType, read_options};
use crate::{options, variants};

/// Where bytes come from and go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chardev {
    /// Its name.
    pub id: String,
    /// What it is.
    pub backend: Backend,
}

impl Chardev {
    /// Where it listens, if it is a socket.
    pub fn address(&self) -> Option<&Address> {
        match &self.backend {
            Backend::Socket(address) => Some(address),
            Backend::Stdio => None,
        }
    }
}

/// What a chardev is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// A socket on which the daemon listens.
    Socket(Address),
    /// The daemon's standard input and output.
    Stdio,
}

/// A monitor: QMP on a chardev.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Monitor {
    /// Where.
    pub chardev: Chardev,
    /// Whether answers take several lines.
    pub pretty: bool,
}

/// Why there is no monitor.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MonitorError {
    /// The text is none of `key=value,...` and JSON.
    #[error("{0}: {1}")]
    Syntax(String, KeyvalError),
    /// A key or value.
    #[error("{0}: {1}")]
    Problem(String, Problem),
    /// Two chardevs of one name.
    #[error("chardev '{0}': there is another chardev of this name")]
    Duplicate(String),
    /// A monitor where no chardev is.
    #[error(
        "--monitor: there is no chardev '{0}'; make one with: --chardev socket,id={0},path=PATH,server=on,wait=off"
    )]
    NoChardev(String),
    /// Two monitors on one chardev.
    #[error("--monitor: chardev '{0}' has a monitor already")]
    Taken(String),
    /// A chardev without a monitor.
    #[error("--chardev: chardev '{0}' has no monitor, and nothing else would use it; add --monitor {0}")]
    Unused(String),
    /// Two monitors on the standard streams.
    #[error("--monitor: chardev '{0}' is stdio, which another monitor has")]
    Stdio(String),
}

options! {
    /// What `--chardev` says.
    struct ChardevOptions {
        /// Name of the chardev.
        id: String, ValueType::Name(usize::MAX);
        /// What it is.
        #[serde(flatten)]
        backend: BackendOptions => &[];
    }
}

variants! {
    /// Kinds of chardev.
    enum BackendOptions by "backend", "What it is." {
        /// A socket.
        "socket" => Socket(SocketOptions);
        /// The daemon's standard input and output.
        "stdio" => Stdio;
    }
    foreign &["null", "file", "pipe", "pty", "ringbuf", "serial", "udp", "vc", "memory", "parallel", "hub"],
    because "a monitor is on a socket, or on standard input and output"
}

options! {
    /// A socket of the daemon's.
    struct SocketOptions {
        /// `on`: the daemon listens, and does not connect to others.
        server: bool, ValueType::Flag;
        /// Where.
        #[serde(flatten)]
        listen: Listen => Listen::KEYS;
    }
}

/// The keys of `--chardev`.
pub static CHARDEV: Shape = Shape {
    keys: ChardevOptions::KEYS,
    variants: Some(BackendOptions::VARIANTS),
    foreign: &[
        Foreign { name: "wait", harmless: Harmless::Off, because: "disks are served without waiting for a monitor" },
        Foreign { name: "signal", harmless: Harmless::Any, because: "it concerns terminals" },
        Foreign { name: "abstract", harmless: Harmless::Off, because: "clients find a socket by its path" },
        Foreign { name: "tight", harmless: Harmless::Any, because: "it concerns abstract addresses" },
        Foreign { name: "nodelay", harmless: Harmless::Any, because: "an answer never waits to be sent" },
        Foreign { name: "delay", harmless: Harmless::Any, because: "an answer never waits to be sent" },
        Foreign { name: "to", harmless: Harmless::No, because: "name one port" },
        Foreign { name: "ipv4", harmless: Harmless::Any, because: "host says it: 127.0.0.1, or ::1" },
        Foreign { name: "ipv6", harmless: Harmless::Any, because: "host says it: 127.0.0.1, or ::1" },
        Foreign { name: "tls-creds", harmless: Harmless::No, because: NO_TLS },
        Foreign { name: "tls-authz", harmless: Harmless::No, because: NO_TLS },
        Foreign { name: "tn3270", harmless: Harmless::Off, because: "monitors speak QMP alone" },
        Foreign { name: "telnet", harmless: Harmless::Off, because: "monitors speak QMP alone" },
        Foreign { name: "websocket", harmless: Harmless::Off, because: "monitors speak QMP alone" },
        Foreign { name: "reconnect", harmless: Harmless::Zero, because: "Egret listens and does not connect" },
        Foreign { name: "reconnect-ms", harmless: Harmless::Zero, because: "Egret listens and does not connect" },
        Foreign { name: "mux", harmless: Harmless::Off, because: "a monitor has its chardev to itself" },
        Foreign { name: "logfile", harmless: Harmless::No, because: "what monitors say is not written down" },
        Foreign { name: "logappend", harmless: Harmless::Any, because: "it concerns logfile" },
    ],
};

/// Why monitors do not encrypt.
const NO_TLS: &str = "monitors are for this host, and have no TLS; lead others through a tunnel (ssh)";

options! {
    /// What `--monitor` says.
    struct MonitorOptions {
        /// The chardev that it is on, or `stdio`.
        chardev: String, ValueType::Name(usize::MAX);
        /// Accepted; nothing needs it.
        id: Option<String>, ValueType::Name(usize::MAX), unset "none";
        /// QMP; there is no monitor for people.
        mode: String, ValueType::Word(|| vec!["control"]), default "control";
        /// Answers over several lines, for people to read.
        pretty: bool, ValueType::Flag, default "off";
    }
}

/// Those of `--monitor`.
pub static MONITOR: Shape = Shape::of(MonitorOptions::KEYS);

/// The monitors that `--chardev` and `--monitor` ask for.
///
/// # Errors
/// The first argument that makes no sense.
pub fn monitors(chardevs: &[String], monitors: &[String]) -> Result<Vec<Monitor>, MonitorError> {
    let mut known: Vec<Chardev> = Vec::new();
    for argument in chardevs {
        let options = read("--chardev", argument, "backend", &CHARDEV)?;
        let chardev =
            chardev(options).map_err(|problem| MonitorError::Problem(format!("--chardev {argument}"), problem))?;
        if known.iter().any(|other| other.id == chardev.id) {
            return Err(MonitorError::Duplicate(chardev.id));
        }
        known.push(chardev);
    }
    let mut taken = BTreeSet::new();
    let monitor = |argument: &String| {
        let MonitorOptions { chardev: name, id: _, mode: _, pretty } =
            read("--monitor", argument, "chardev", &MONITOR)?;
        let chardev = known.iter().find(|chardev| chardev.id == name).cloned();
        let stdio = || (name == "stdio").then(|| Chardev { id: name.clone(), backend: Backend::Stdio });
        let Some(chardev) = chardev.or_else(stdio) else { return Err(MonitorError::NoChardev(name)) };
        if !taken.insert(name.clone()) {
            return Err(MonitorError::Taken(name));
        }
        Ok(Monitor { chardev, pretty })
    };
    let monitors: Vec<Monitor> = monitors.iter().map(monitor).collect::<Result<_, _>>()?;
    if let Some(unused) = known.into_iter().find(|chardev| !taken.contains(&chardev.id)) {
        return Err(MonitorError::Unused(unused.id));
    }
    match monitors.iter().filter(|monitor| monitor.chardev.backend == Backend::Stdio).nth(1) {
        Some(second) => Err(MonitorError::Stdio(second.chardev.id.clone())),
        None => Ok(monitors),
    }
}

fn read<T: DeserializeOwned>(option: &str, argument: &str, implied: &str, shape: &Shape) -> Result<T, MonitorError> {
    let option = format!("{option} {argument}");
    let (value, spelling) =
        keyval::read(argument, implied).map_err(|error| MonitorError::Syntax(option.clone(), spelled_out(error)))?;
    read_options(value, shape, spelling).map_err(|problem| MonitorError::Problem(option, problem))
}

/// QEMU takes `server`, `wait` and their opposites without a value, too.
fn spelled_out(error: KeyvalError) -> KeyvalError {
    match error {
        KeyvalError::NoValue(word) if matches!(&*word, "server" | "wait" | "noserver" | "nowait") => {
            KeyvalError::Bare(match word.strip_prefix("no") {
                Some(word) => format!("{word}=off"),
                None => format!("{word}=on"),
            })
        }
        error => error,
    }
}

fn chardev(ChardevOptions { id, backend }: ChardevOptions) -> Result<Chardev, Problem> {
    let backend = match backend {
        BackendOptions::Stdio => Backend::Stdio,
        BackendOptions::Socket(SocketOptions { server: true, listen }) => Backend::Socket(listen.address()?),
        BackendOptions::Socket(_) => {
            let because = "Egret listens and does not connect: write server=on".to_owned();
            return Err(Problem::NotDone { what: "server=off".to_owned(), because });
        }
    };
    Ok(Chardev { id, backend })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Access, Mode};

    fn read(chardevs: &[&str], names: &[&str]) -> Result<Vec<Monitor>, String> {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        monitors(&owned(chardevs), &owned(names)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_monitor_is_on_a_socket_or_on_the_standard_streams() {
        let monitors = read(&["socket,id=c,path=/q,server=on,wait=off"], &["chardev=c", "stdio"]).unwrap();
        let socket = Backend::Socket(Address::Unix {
            path: "/q".into(),
            access: Access { mode: Some(Mode(0o600)), ..Access::default() },
        });
        assert_eq!(monitors[0], Monitor { chardev: Chardev { id: "c".into(), backend: socket }, pretty: false });
        assert_eq!(monitors[1].chardev.backend, Backend::Stdio);
        let words = "socket,id=c,path=/q,server=on,mode=0660,group=kvm,user=me,allow-uid.0=me,allow-uid.1=7";
        let monitors = read(&[words], &["c,pretty=on"]).unwrap();
        let (user, group) = (Some("me".to_owned()), Some("kvm".to_owned()));
        let access = Access { mode: Some(Mode(0o660)), user, group, allow_uid: vec!["me".into(), "7".into()] };
        let socket = Backend::Socket(Address::Unix { path: "/q".into(), access });
        assert!(monitors[0].pretty && monitors[0].chardev.backend == socket);
        // With what QEMU has beside, as far as it asks for nothing else.
        let words =
            "socket,id=c,host=localhost,port=4444,server=on,wait=off,ipv4=on,ipv6=off,delay=off,tn3270=off,telnet=off";
        let monitors = read(&[words], &["c"]).unwrap();
        let socket = Backend::Socket(Address::Tcp { host: "localhost".into(), port: 4444, remote: false });
        assert_eq!(monitors[0].chardev.backend, socket);
        let monitors = read(&["socket,id=c,fd=egret.socket,server=on,wait=off"], &["c"]).unwrap();
        let fd = "egret.socket".parse().unwrap();
        assert_eq!(
            monitors[0].chardev.backend,
            Backend::Socket(Address::Inherited { fd, access: Access::default(), remote: false })
        );
    }

    #[test]
    fn what_makes_no_monitor_is_said_in_one_line() {
        for (chardevs, names, line) in [
            (&["socket,id=c,server=on"][..], &[][..], "--chardev socket,id=c,server=on: path is missing"),
            (
                &["socket,id=c,path=q,server,nowait"],
                &[],
                "server,nowait: words without a value are not taken; write server=on",
            ),
            (&["socket,id=c,path=q,server=on,nowait"], &[], "words without a value are not taken; write wait=off"),
            (&["socket,id=c,path=q,server=on,mux=on"], &[], "mux=on is QEMU's and not done here: a monitor has"),
            (&["socket,id=c,host=::1,port=1,server=on,tls-creds=t"], &[], "tls-creds=t is QEMU's and not done here"),
            (&["socket,id=c,host=::1,port=1,server=on,tls-authz=a"], &[], "tls-authz=a is QEMU's and not done here"),
            (&["socket,id=c,path=q,server=on,tn3270=on"], &[], "tn3270=on is QEMU's and not done here: monitors speak"),
            (&["socket,id=c,path=q,server=on,logfile=x"], &[], "logfile=x is QEMU's and not done here"),
            (&["socket,id=c,path=q"], &[], "--chardev socket,id=c,path=q: server is missing"),
            (&["socket,id=c,path=q,server=off"], &[], "server=off is QEMU's and not done here"),
            (&["socket,id=c,path=q,server=on,wait=on"], &[], "wait=on is QEMU's and not done here: disks are served"),
            (&["socket,id=c,path=q,server=on,mode=07777"], &[], "mode must be octal permissions (0600)"),
            (&["socket,id=c,path=q,server=on,mode=0999"], &[], "mode must be octal permissions (0600), got 0999"),
            (&["socket,id=c,path=q,server=on,host=::1"], &[], "host does not go with path: it is about TCP"),
            (&["socket,id=c,host=::1,port=1,server=on,mode=0600"], &[], "mode does not go with host"),
            (&["socket,id=c,host=::1,server=on"], &[], "port is missing"),
            (&["socket,id=c,path=q,fd=3,server=on"], &[], "fd does not go with path: there is one place"),
            (&["socket,id=c,host=::1,port=0,server=on"], &[], "port must be 1..=65535, got 0"),
            (&["tcp,id=c"], &[], "backend must be socket or stdio, got 'tcp'"),
            (&["stdio,id=c", "stdio,id=c"], &[], "chardev 'c': there is another chardev of this name"),
            (&[], &["chardev=c"], "--monitor: there is no chardev 'c'; make one with: --chardev socket,id=c,path"),
            (&["stdio,id=c"], &["c", "c"], "--monitor: chardev 'c' has a monitor already"),
            (&["stdio,id=a", "stdio,id=b"], &["a", "b"], "--monitor: chardev 'b' is stdio, which another monitor has"),
            (&["stdio,id=a"], &["stdio", "a"], "--monitor: chardev 'a' is stdio, which another monitor has"),
            (&["stdio,id=a", "socket,id=b,path=q,server=on"], &["a"], "--chardev: chardev 'b' has no monitor"),
            (&["stdio,id=c"], &["c,mode=readline"], "mode must be control, got 'readline'"),
        ] {
            let error = read(chardevs, names).unwrap_err();
            assert!(error.contains(line), "{error}");
        }
    }
}
