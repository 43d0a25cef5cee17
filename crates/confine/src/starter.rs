//! Threads that may do what those may not that ask for them.
//!
//! A thread that starts another lends it its own filter, so it must be allowed whatever the other is. Control threads
//! would be allowed to reach other machines for those few that do. A starter is there before control threads are
//! confined, is of the kind that it starts, and does nothing else.

#![forbid(unsafe_code)]

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use crate::{Bounds, ThreadKind};

type Task = Box<dyn FnOnce() + Send>;

/// See the module's description.
pub struct Starter {
    kind: ThreadKind,
    name: &'static str,
    tasks: OnceLock<Sender<Task>>,
}

impl Starter {
    /// Of threads of this kind and name.
    pub const fn new(kind: ThreadKind, name: &'static str) -> Self {
        Self { kind, name, tasks: OnceLock::new() }
    }

    /// Has it there from here on. To be called before the calling thread is confined; the first task does it, too.
    ///
    /// # Errors
    ///
    /// The calling thread is confined, or there are no threads left.
    pub fn begin(&self) -> io::Result<()> {
        if self.has_begun() {
            return Ok(());
        }
        let bounds = Bounds::of_this_thread();
        if bounds.is_confined() {
            let why = format!("no thread of the kind '{}' was there when the daemon was confined", self.kind);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let (sender, tasks) = channel::<Task>();
        let (kind, name) = (self.kind, self.name);
        let starter = move || {
            bounds.narrow(kind);
            let bounds = Bounds::of_this_thread();
            for task in tasks {
                let thread = move || {
                    bounds.narrow(kind);
                    task();
                };
                // What the task was to answer by is gone with it.
                let _ = std::thread::Builder::new().name(name.to_owned()).spawn(thread);
            }
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(starter)?;
        let _ = self.tasks.set(sender);
        Ok(())
    }

    /// Whether it is there.
    pub fn has_begun(&self) -> bool {
        self.tasks.get().is_some()
    }

    /// Has a thread run a task.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    pub fn run(&self, task: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.begin()?;
        if let Some(tasks) = self.tasks.get() {
            let _ = tasks.send(Box::new(task));
        }
        Ok(())
    }
}
