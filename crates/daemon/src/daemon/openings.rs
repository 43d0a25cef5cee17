//! Images that are opened while the daemon serves others: each by a thread of its own, for a disk that hangs has whoever
//! opens it wait, and nothing calls that off.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use egret_confine::{Bounds, ThreadKind};
use egret_disk::{Driver, Image, Options};

use super::StartError;

/// How long an image is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Attempts that may hang at a time. Each costs a thread, and a descriptor.
pub(super) const MOST: usize = 8;

/// What is being opened.
#[derive(Default)]
pub(super) struct Openings {
    /// How long an image is waited for; before the daemon serves anybody, as long as it takes.
    patience: Option<Duration>,
    /// Each attempt that has not ended has one more of it.
    going: Arc<()>,
}

impl Openings {
    /// Has an image waited for no longer than that, from here on.
    pub(super) fn limit(&mut self, patience: Duration) {
        self.patience = Some(patience);
    }

    /// Opens an image, or gives it up. What was given up goes on, and closes what it has opened when that is open.
    pub(super) fn open(&self, options: &Options, handed: Option<File>) -> Result<Image, StartError> {
        let path = match &options.driver {
            Driver::File { filename } | Driver::HostDevice { filename } => filename.display().to_string(),
            // Theirs are opened elsewhere, and by their own patience.
            Driver::Null { .. } | Driver::Remote(_) => return Ok(Image::open(options, handed)?),
        };
        let options = options.clone();
        Ok(self.run(&options.node_name.clone(), &path, move || Image::open(&options, handed))??)
    }

    /// Has `open` run, and waits for what it returns.
    fn run<T: Send + 'static>(
        &self,
        node: &str,
        path: &str,
        open: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StartError> {
        let Some(patience) = self.patience else { return Ok(open()) };
        if Arc::strong_count(&self.going) > MOST {
            return Err(StartError::OthersHang(node.to_owned()));
        }
        let bounds = Bounds::of_this_thread();
        let (opened, received) = channel();
        let going = Arc::clone(&self.going);
        let thread = move || {
            bounds.narrow(ThreadKind::Control);
            let _ = opened.send(open());
            drop(going);
        };
        let spawned = std::thread::Builder::new().name("egret-opening".to_owned()).stack_size(256 << 10).spawn(thread);
        spawned.map_err(|e| StartError::NoThread(node.to_owned(), e))?;
        received.recv_timeout(patience).map_err(|e| match e {
            RecvTimeoutError::Timeout => {
                StartError::Hangs { node: node.to_owned(), path: path.to_owned(), seconds: patience.as_secs() }
            }
            RecvTimeoutError::Disconnected => panic!("whoever opened '{path}' has panicked"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_is_given_up_and_so_many_may_hang_until_one_is_well() {
        let mut openings = Openings::default();
        assert_eq!(openings.run("d", "/x", || std::thread::current().id()).unwrap(), std::thread::current().id());
        openings.limit(Duration::from_millis(1));
        let hung: Vec<_> = (0..MOST)
            .map(|_| {
                let (well, is_well) = channel::<()>();
                let error = openings.run("d", "/x", move || is_well.recv()).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "blockdev 'd': '/x' does not answer: it could not be opened in 0 s; try again when its disk is well"
                );
                well
            })
            .collect();
        openings.limit(Duration::MAX);
        let error = openings.run("d", "/x", || ()).unwrap_err().to_string();
        assert!(error.starts_with("blockdev 'd': 8 attempts to open disks that hang have not ended"), "{error}");
        drop(hung);
        while openings.run("d", "/x", || ()).is_err() {
            std::thread::yield_now();
        }
    }
}
