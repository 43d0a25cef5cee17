//! Keys and passphrases that come and go while the daemon serves.

use std::path::PathBuf;

use egret_confine::{Use, refusal};
use egret_vocabulary::schema::{Blockdev, Driver, Object as _, ObjectError, Problem, Secret};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{ChangeError, Daemon, StartError};

impl Daemon {
    /// Adds a secret, whose file is read if it is in one.
    ///
    /// # Errors
    /// Its name is taken, or it cannot be had, or its file does not answer.
    pub fn add_secret(&mut self, object: Secret) -> Result<(), ChangeError> {
        if self.config.has_object(&object.id) {
            return Err(ChangeError::DuplicateObject(object.id));
        }
        let (id, file) = (object.id.clone(), object.file.as_deref().map(PathBuf::from));
        let read = self.calls.run_on(file.as_deref(), "it could not be read", move || read(object));
        let read = read.map_err(|why| StartError::ObjectUnanswered(Secret::NOUN, id, why))?;
        self.config.secrets.push(read?);
        Ok(())
    }

    /// Forgets a secret.
    ///
    /// # Errors
    /// There is none of this name, or a blockdev names it: its image is opened anew as exports come and go.
    pub fn remove_secret(&mut self, id: &str) -> Result<(), ChangeError> {
        if !self.config.secrets.iter().any(|secret| secret.id == id) {
            return Err(ChangeError::NoObject(id.to_owned()));
        }
        let names = |blockdev: &Blockdev| matches!(&blockdev.driver, Driver::Rbd(rbd) if rbd.secrets().any(|(_, name)| name == id));
        if self.config.layers().any(names) {
            return Err(ChangeError::ObjectInUse(id.to_owned()));
        }
        self.config.secrets.retain(|secret| secret.id != id);
        Ok(())
    }
}

/// Reads a secret, or says that the sandbox keeps it out of reach.
fn read(object: Secret) -> Result<Secret, ObjectError> {
    let (subject, file) = (object.subject(), object.file.clone());
    object.read().map_err(|error| {
        // Of one that could be read something else is wrong. A pipe is not waited for.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let is_denied = |file: &String| rustix::fs::open(file, flags, Mode::empty()).is_err_and(|e| e == Errno::ACCESS);
        let refusal = |file: String| Some(format!("'{file}': {}", refusal(file.as_ref(), Use::Image)?));
        let confined = file.filter(is_denied).and_then(refusal);
        confined.map_or(error, |why| ObjectError { subject, problem: Problem::Together(why) })
    })
}
