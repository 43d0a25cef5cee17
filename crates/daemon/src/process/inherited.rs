//! Sockets that the process is started with: those that a service manager hands over, as sd_listen_fds(3) has it, and
//! others that options name by their numbers.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{OwnedFd, RawFd};

use egret_vocabulary::nearest::hint;
use egret_vocabulary::schema::{AddFd, Descriptor};
use thiserror::Error;

use super::manager::KEPT;
use super::sys;
use crate::daemon::Credentials;

/// The number of the first socket that is handed over; the others follow (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;

/// Whose sockets they are, how many, and what they are called.
const VARIABLES: [&str; 3] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// Descriptors that the process was started with, until they are taken.
#[derive(Debug, Default)]
pub struct Inherited {
    names: Vec<(String, RawFd)>,
    /// `None` is what somebody has taken.
    descriptors: BTreeMap<RawFd, Option<OwnedFd>>,
    /// What a service manager has kept of clients' sessions.
    sessions: Vec<OwnedFd>,
    /// Which of them are for sets.
    sets: Vec<AddFd>,
    /// Read before the process was confined.
    credentials: Option<Credentials>,
}

/// Why a descriptor cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InheritError {
    /// There is no such number.
    #[error("it is not open")]
    NotOpen,
    /// It is one of the first three.
    #[error("it is a standard stream")]
    StandardStream,
    /// There is no such name.
    #[error("no socket of this name was handed over (in $LISTEN_FDNAMES); {0}")]
    Unknown(String),
    /// There are several: a systemd unit with several sockets gives all of them its one name.
    #[error("several sockets of this name were handed over; give each a socket unit of its own")]
    Ambiguous,
    /// Something else uses it.
    #[error("something else uses it already")]
    Taken,
}

impl Inherited {
    /// Takes over what was handed to this process, and those that are open of what `wanted` numbers.
    ///
    /// To be called before the process opens descriptors of its own, which it could not tell from those, and while it
    /// has one thread: the variables that hand over are removed, so that no process it starts believes them.
    ///
    /// # Errors
    /// The variables are for this process and make no sense, or there are other threads.
    pub fn take_over<'a>(wanted: impl IntoIterator<Item = &'a Descriptor>) -> io::Result<Self> {
        let mut new = Self::default();
        let [pid, count, names] = VARIABLES.map(|name| std::env::var(name).ok());
        if pid.and_then(|pid| pid.parse().ok()) == Some(std::process::id()) {
            sys::remove_variables(&VARIABLES)?;
            let count = count.unwrap_or_default();
            let wrong = || io::Error::other(format!("LISTEN_FDS must be a number of open sockets, got '{count}'"));
            for at in 0..count.parse::<RawFd>().map_err(|_| wrong())? {
                let socket = sys::inherit(FIRST + at).map_err(|_| wrong())?;
                new.descriptors.insert(FIRST + at, Some(socket));
            }
            let names = names.iter().flat_map(|names| names.split(':')).map(str::to_owned);
            let all: Vec<_> = names.zip(new.descriptors.keys().copied()).collect();
            let (kept, names) = all.into_iter().partition(|(name, _)| name == KEPT);
            new.names = names;
            let take = |(_, number): (String, RawFd)| new.descriptors.get_mut(&number)?.take();
            new.sessions = Vec::into_iter(kept).filter_map(take).collect();
        }
        for wanted in wanted {
            if let Descriptor::Number(number) = wanted
                && *number >= FIRST
                && !new.descriptors.contains_key(number)
                && let Ok(descriptor) = sys::inherit(*number)
            {
                new.descriptors.insert(*number, Some(descriptor));
            }
        }
        Ok(new)
    }

    /// What a service manager has kept of clients' sessions.
    pub(crate) fn take_sessions(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.sessions)
    }

    /// Says which of them are for sets, through which images are opened.
    #[must_use]
    pub fn with_sets(self, sets: Vec<AddFd>) -> Self {
        Self { sets, ..self }
    }

    /// Brings credentials along, whose files nobody needs any more.
    #[must_use]
    pub fn with_credentials(self, credentials: Credentials) -> Self {
        Self { credentials: Some(credentials), ..self }
    }

    /// Those that were.
    pub(crate) fn take_credentials(&mut self) -> Option<Credentials> {
        self.credentials.take()
    }

    /// Those that are for sets.
    pub(crate) fn take_sets(&mut self) -> Vec<AddFd> {
        std::mem::take(&mut self.sets)
    }

    /// Gives one away.
    ///
    /// # Errors
    /// There is none of this number or name, or it was given away before.
    pub(crate) fn take(&mut self, wanted: &Descriptor) -> Result<OwnedFd, InheritError> {
        let number = match wanted {
            Descriptor::Number(0..FIRST) => return Err(InheritError::StandardStream),
            Descriptor::Number(number) => *number,
            Descriptor::Name(name) => {
                let mut found = self.names.iter().filter(|(known, _)| known == name).map(|(_, number)| *number);
                let number = found.next().ok_or_else(|| InheritError::Unknown(hint(name, self.names())))?;
                if found.next().is_some() {
                    return Err(InheritError::Ambiguous);
                }
                number
            }
        };
        self.descriptors.get_mut(&number).ok_or(InheritError::NotOpen)?.take().ok_or(InheritError::Taken)
    }

    /// The names of the sockets that were handed over and that nobody has taken.
    pub fn unused(&self) -> impl Iterator<Item = &str> {
        let is_there = |number| self.descriptors.get(number).is_some_and(Option::is_some);
        self.names.iter().filter(move |(_, number)| is_there(number)).map(|(name, _)| name.as_str())
    }

    fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.names.iter().map(|(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_given_to_one_and_by_one_name() {
        let descriptor = || Some(OwnedFd::from(std::io::pipe().unwrap().0));
        let names = ["qmp", "twice", "twice"].map(str::to_owned).into_iter().zip(FIRST..).collect();
        let mut inherited = Inherited {
            names,
            descriptors: (FIRST..=6).map(|number| (number, descriptor())).collect(),
            sessions: Vec::new(),
            sets: Vec::new(),
            credentials: None,
        };
        let mut take = |wanted: &str| inherited.take(&wanted.parse().unwrap()).map(|_| ());
        assert_eq!(take("qmp"), Ok(()));
        assert_eq!(take("3"), Err(InheritError::Taken));
        assert_eq!(take("qpm"), Err(InheritError::Unknown("did you mean 'qmp'?".to_owned())));
        assert_eq!(take("twice"), Err(InheritError::Ambiguous));
        assert_eq!(take("4"), Ok(()));
        assert_eq!(take("6"), Ok(()));
        assert_eq!(take("7"), Err(InheritError::NotOpen));
        assert_eq!(take("1"), Err(InheritError::StandardStream));
        assert_eq!(inherited.unused().collect::<Vec<_>>(), ["twice"]);
    }
}
