//! Threads say what they are, and are that from then on.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::thread;

use seccompiler::{BpfProgram, apply_filter};

use crate::files::{Files, FilesError};
use crate::filter::compile;
use crate::missing::Missing;
use crate::rights::{self, Identity};
use crate::rules::ThreadKind;

/// The kernel that the table of calls is about, or a newer one.
const OLDEST: (u32, u32) = (5, 11);

/// What holds for threads from [`Confinement::begin`] on.
struct Settled {
    /// By [`ThreadKind`]; none where threads may make any call.
    programs: Option<Vec<BpfProgram>>,
    identity: Option<Identity>,
}

static SETTLED: OnceLock<Settled> = OnceLock::new();

thread_local! {
    static KIND: Cell<Option<ThreadKind>> = const { Cell::new(None) };
}

/// How the daemon is to be confined.
#[derive(Debug)]
pub struct Confinement {
    /// The files that it may open, unless it may open all; threads have filters then.
    pub files: Option<Files>,
    /// The user that its threads become, if not the one that started it.
    pub identity: Option<Identity>,
}

/// Why the daemon is not confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// What it may open.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The table of calls.
    #[error("no filter of system calls for {0} threads: {1}")]
    Rules(ThreadKind, #[source] seccompiler::BackendError),
    /// It may not become whom it is to be.
    #[error("cannot become another user: {0}; only root may, with CAP_SETUID and CAP_SETGID")]
    Identity(#[source] io::Error),
    /// It cannot give up what it was started with.
    #[error("cannot give up privileges: {0}")]
    Rights(#[source] io::Error),
}

impl Confinement {
    /// Confines the calling thread to its files, and has every thread say from here on what it is. Call it once, before
    /// there are other threads.
    ///
    /// # Errors
    /// A place that it is to reach does not exist, or privileges cannot be given up. What the kernel cannot do is no
    /// error, and returned.
    pub fn begin(self) -> Result<Missing, ConfineError> {
        let mut missing = Missing::default();
        let mut programs = None;
        rights::forbid_more().map_err(ConfineError::Rights)?;
        // rustix asks the kernel for what the process was started with when a clock is first read, which a thread that is
        // confined may not.
        let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        if let Some(files) = self.files {
            files.restrict(&mut missing)?;
            programs = compile_all(&mut missing)?;
        }
        if let Some(identity) = self.identity.clone() {
            // On a thread that has nothing else to do: those that are to do something end the process if they are refused.
            let trial = move || rights::assume(Some(&identity), ThreadKind::Log);
            let tried = thread::Builder::new().spawn(trial).map_err(ConfineError::Rights)?;
            tried.join().unwrap_or(Ok(())).map_err(ConfineError::Identity)?;
        }
        let _ = SETTLED.set(Settled { programs, identity: self.identity });
        Ok(missing)
    }
}

/// The programs, if this kernel takes one.
fn compile_all(missing: &mut Missing) -> Result<Option<Vec<BpfProgram>>, ConfineError> {
    // An older one has not all of these calls, and does it by others.
    let version = rustix::system::uname();
    let mut numbers =
        version.release().to_str().unwrap_or_default().split(['.', '-']).map_while(|part| part.parse().ok());
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
        missing.add("threads may make any system call (the kernel is older than Linux 5.11)");
        return Ok(None);
    }
    let programs = ThreadKind::ALL.map(|kind| compile(kind).map_err(|e| ConfineError::Rules(kind, e)));
    let programs = programs.into_iter().collect::<Result<Vec<_>, _>>()?;
    // On a thread that has nothing else to do.
    let trial = programs[ThreadKind::Control as usize].clone();
    match std::thread::spawn(move || apply_filter(&trial).map_err(|e| e.to_string())).join() {
        Ok(Err(e)) => {
            missing.add(format!("threads may make any system call (no seccomp filters: {e})"));
            Ok(None)
        }
        _ => Ok(Some(programs)),
    }
}

/// What binds a thread, for those that it starts; by default nothing, as before confinement.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds(Option<ThreadKind>);

impl Bounds {
    /// Of the calling thread, to be taken along by one that it starts.
    pub fn of_this_thread() -> Self {
        Self(KIND.get())
    }

    /// Whether they are those of a thread that the kernel keeps from calls that it does not make.
    pub fn is_confined(self) -> bool {
        self.0.is_some() && SETTLED.get().is_some_and(|settled| settled.programs.is_some())
    }

    /// The calling thread, started by whom these bounds are of, is of this kind from here on, for good.
    ///
    /// # Panics
    /// The kernel refuses what it did not refuse when confinement began: it has no memory left. A thread that is not
    /// confined must not go on.
    pub fn narrow(self, kind: ThreadKind) {
        KIND.set(Some(kind));
        let Some(Settled { programs, identity }) = SETTLED.get() else { return };
        // A filter comes on top of those that are there: a worker that is started by a worker, and so on, has one.
        if self.0 == Some(kind) {
            return;
        }
        let confined = match self.0 {
            None => rights::assume(identity.as_ref(), kind),
            Some(ThreadKind::Control) => rights::keep_for(kind),
            Some(_) => Ok(()),
        };
        if let Err(e) = confined {
            panic!("a {kind} thread cannot give up privileges: {e}");
        }
        if let Some(programs) = programs
            && let Err(e) = apply_filter(&programs[kind as usize])
        {
            panic!("a {kind} thread cannot be confined: {e}");
        }
    }
}
