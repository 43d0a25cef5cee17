//! Calls of files that may hang, while the daemon serves others: each by a thread of its own, for a disk that hangs has
//! whoever asks it for anything wait, and nothing calls that off.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use egret_confine::{Bounds, ThreadKind};
use egret_disk::{Active, Disk, Driver, Image, Loss, OpenError, Options};

use super::StartError;

/// How long a call is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// So many calls hang before none begins any more but those that close an image, which count as well. Each costs a thread, and a
/// descriptor.
const MOST: usize = 8;

/// Why nobody waits for a call.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// It has not ended.
    #[error("'{path}' does not answer: {failed} in {seconds} s; try again when its disk is well", path = .path.display())]
    Hangs {
        /// The file.
        path: PathBuf,
        /// What could not be done.
        failed: &'static str,
        /// How long was waited for it.
        seconds: u64,
    },
    /// One that was given up before has not ended, and it has to be known how it ends.
    #[error(
        "'{path}' does not answer: what was written to it before is not stable yet; try again when its disk is well",
        path = .0.display()
    )]
    Unsettled(PathBuf),
    /// There is no room for one that might hang.
    #[error(
        "{MOST} calls of disks that hang have not ended, and there is no room for another; try again when one of those \
         disks is well"
    )]
    OthersHang,
    /// Nobody is there to make it.
    #[error("no thread to wait for its disk: {0}")]
    NoThread(std::io::Error),
}

/// What a disk has lost when what was written to it has been made stable, or could not be: to be asked for when nobody has the
/// disk any more.
#[derive(Clone, Default)]
pub(super) struct Settling(Arc<OnceLock<Option<Loss>>>);

impl Settling {
    /// What it is; pending until that has ended.
    pub(super) fn loss(&self) -> Poll<Option<Loss>> {
        self.0.get().map_or(Poll::Pending, |loss| Poll::Ready(*loss))
    }
}

/// What is being waited for.
#[derive(Default)]
pub(super) struct Calls {
    /// How long a call is waited for; before the daemon serves anybody, as long as it takes.
    patience: Option<Duration>,
    /// Each call that has not ended has one more of it.
    going: Arc<()>,
}

impl Calls {
    /// Has a call waited for no longer than that, from here on.
    pub(super) fn limit(&mut self, patience: Duration) {
        self.patience = Some(patience);
    }

    /// Opens an image, or gives it up. What was given up goes on, and closes what it has opened when that is open.
    pub(super) fn open(&self, options: &Options, handed: Option<File>) -> Result<Image, StartError> {
        let (name, of) = (options.node_name.clone(), options.clone());
        let opened = self.run(&options.driver, "it could not be opened", move || Image::open(&of, handed));
        Ok(opened.map_err(|why| StartError::Unanswered(name, why))??)
    }

    /// Sees to it that what was written is on stable storage, before an image is closed. An image that is given up is open
    /// until that has ended.
    pub(super) fn make_stable(&self, name: &str, disk: &Arc<Disk>) -> Result<(), StartError> {
        let room = self.look_for_room(file_of(&disk.options().driver));
        room.map_err(|why| StartError::Unanswered(name.to_owned(), why))?;
        self.settle(name, disk, &Settling::default())
    }

    /// The same of an image that is closed, however long that takes and however many others hang: to close it here would be to
    /// wait for it.
    pub(super) fn settle(&self, name: &str, disk: &Arc<Disk>, settling: &Settling) -> Result<(), StartError> {
        let (of, called, Settling(loss)) = (Arc::clone(disk), name.to_owned(), settling.clone());
        let flush = move || {
            let flushed = of.flush();
            let _ = loss.set(of.loss());
            if let Err(e) = flushed {
                tracing::error!("blockdev '{called}': the last flush failed: {e}");
            }
        };
        let flushed = self.call(file_of(&disk.options().driver), "what was written could not be made stable", flush);
        flushed.map_err(|why| StartError::Unanswered(name.to_owned(), why))
    }

    /// Has an image active, or gives it up. What was given up is active for a moment, at most, when its disk is well.
    pub(super) fn activate(&self, disk: &Arc<Disk>) -> Result<Result<Active, OpenError>, Unanswered> {
        let of = Arc::clone(disk);
        self.run(&disk.options().driver, "it could not be locked", move || of.activate())
    }

    /// Makes a call of an image, and waits for what it returns.
    pub(super) fn run<T: Send + 'static>(
        &self,
        driver: &Driver,
        failed: &'static str,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        self.run_on(file_of(driver), failed, call)
    }

    /// The same of a file, if it is of one.
    pub(super) fn run_on<T: Send + 'static>(
        &self,
        file: Option<&Path>,
        failed: &'static str,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        self.look_for_room(file)?;
        self.call(file, failed, call)
    }

    /// Whether there is room for a call that might hang, if it might.
    fn look_for_room(&self, file: Option<&Path>) -> Result<(), Unanswered> {
        let is_full = Arc::strong_count(&self.going) > MOST;
        if is_full && self.patience.and(file).is_some() { Err(Unanswered::OthersHang) } else { Ok(()) }
    }

    /// As [`run_on`](Self::run_on), whether there is room or not.
    fn call<T: Send + 'static>(
        &self,
        file: Option<&Path>,
        failed: &'static str,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        let Some((patience, file)) = self.patience.zip(file) else { return Ok(call()) };
        let bounds = Bounds::of_this_thread();
        let (ended, received) = channel();
        let going = Arc::clone(&self.going);
        let thread = move || {
            bounds.narrow(ThreadKind::Control);
            let _ = ended.send(call());
            drop(going);
        };
        let spawned = std::thread::Builder::new().name("egret-call".to_owned()).stack_size(256 << 10).spawn(thread);
        spawned.map_err(Unanswered::NoThread)?;
        received.recv_timeout(patience).map_err(|e| match e {
            RecvTimeoutError::Timeout => {
                Unanswered::Hangs { path: file.to_owned(), failed, seconds: patience.as_secs() }
            }
            RecvTimeoutError::Disconnected => panic!("a call of '{}' has panicked", file.display()),
        })
    }
}

/// What a call of an image might hang with: other images than files have a patience of their own.
fn file_of(driver: &Driver) -> Option<&Path> {
    match driver {
        Driver::File { filename } | Driver::HostDevice { filename } => Some(filename),
        Driver::Null { .. } | Driver::Remote(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refuse::refuse_threads;

    #[test]
    fn what_hangs_is_given_up_and_so_many_may_hang_until_one_is_well() {
        let (mut calls, file) = (Calls::default(), Driver::File { filename: "/x".into() });
        let here = std::thread::current().id();
        let runs_here = |calls: &Calls, driver| calls.run(driver, "", || std::thread::current().id()).unwrap() == here;
        assert!(runs_here(&calls, &file));
        calls.limit(Duration::MAX);
        let null = Driver::Null { size: 0, latency: egret_event_loop::Nanos::ZERO, read_zeroes: true };
        assert!(runs_here(&calls, &null) && !runs_here(&calls, &file));
        calls.limit(Duration::from_millis(1));
        let hung: Vec<_> = (0..MOST)
            .map(|_| {
                let (well, is_well) = channel::<()>();
                let error = calls.run(&file, "it could not be had", move || is_well.recv()).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "'/x' does not answer: it could not be had in 0 s; try again when its disk is well"
                );
                well
            })
            .collect();
        calls.limit(Duration::MAX);
        let error = calls.run(&file, "", || ()).unwrap_err().to_string();
        assert!(error.starts_with("8 calls of disks that hang have not ended"), "{error}");
        // What is closed finds room, and what might stay open does not.
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(512).unwrap();
        let disk = Disk::open(&Options::new("d", Driver::File { filename: image.path().to_owned() }));
        let disk = Arc::new(disk.unwrap());
        assert!(calls.settle("d", &disk, &Settling::default()).is_ok() && calls.make_stable("d", &disk).is_err());
        drop(hung);
        while calls.run(&file, "", || ()).is_err() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn where_no_thread_can_be_had_the_caller_hears_of_it_and_nothing_of_the_call_is_left() {
        let (mut calls, file) = (Calls::default(), Driver::File { filename: "/x".into() });
        calls.limit(Duration::MAX);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse_threads();
                // More often than calls may hang.
                for _ in 0..=MOST {
                    let error = calls.run(&file, "", || ()).unwrap_err().to_string();
                    assert_eq!(error, "no thread to wait for its disk: Resource temporarily unavailable (os error 11)");
                }
            });
        });
        assert!(calls.run(&file, "", || ()).is_ok());
    }
}
