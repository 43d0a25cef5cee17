//! Recorded and generated waits, replayed under every policy.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use egret_polling::builtin::{Builtin, UnknownBuiltin};
use egret_polling::replay::{Setting, fixed_windows, front_svg, replay};
use egret_polling::trace::{Trace, TraceError};
use egret_polling::{BlockCost, ParameterError, Parameters};
use egret_vocabulary::nearest::did_you_mean;
use thiserror::Error;

pub use egret_polling::replay::{Contender, Row};
pub use egret_polling::{Nanos, PolicyKind};

/// What generated traces are asked for by, and files cannot be called.
pub const BUILTIN: &str = "builtin:";

/// The longest file that can be a trace, in bytes: the most waits there may be, and a hundred bytes for each.
const LONGEST: u64 = 100 * Trace::MOST_WAITS as u64;

/// Why nothing was replayed; each is one line.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("{path}: {why}")]
    Io {
        /// The file.
        path: String,
        /// Why not.
        why: io::Error,
    },
    /// The file is longer than any trace.
    #[error("{path}: longer than the {LONGEST} bytes that a trace can have")]
    TooLong {
        /// The file.
        path: String,
    },
    /// The file is no trace.
    #[error("{path}: {why}")]
    Trace {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: TraceError,
    },
    /// No such generated trace.
    #[error("{0}{1}")]
    Builtin(UnknownBuiltin, String),
    /// A property that cannot be.
    #[error(transparent)]
    Parameter(#[from] ParameterError),
}

/// A trace, and what its reader calls it.
#[derive(Clone, Debug)]
pub struct Named {
    /// As it was asked for.
    pub name: String,
    /// The waits.
    pub trace: Trace,
}

impl Named {
    /// What `word` asks for: a file, `builtin:NAME`, or `builtin:all`, which is several.
    ///
    /// # Errors
    /// A file that cannot be read or is no trace, or a name that nothing generated has.
    pub fn find(word: &str) -> Result<Vec<Self>, ReplayError> {
        let generated =
            |builtin: Builtin| Self { name: format!("{BUILTIN}{}", builtin.name()), trace: builtin.generate() };
        match word.strip_prefix(BUILTIN) {
            Some("all") => Ok(Builtin::ALL.map(generated).into()),
            Some(name) => {
                let known = || did_you_mean(name, Builtin::ALL.map(Builtin::name));
                Ok(vec![generated(name.parse().map_err(|why| ReplayError::Builtin(why, known()))?)])
            }
            None => Ok(vec![Self { name: word.to_owned(), trace: read(Path::new(word))? }]),
        }
    }
}

/// The generated traces: what they are asked for by, and what they stand for.
pub fn generated() -> impl Iterator<Item = (String, &'static str)> {
    Builtin::ALL.into_iter().map(|builtin| (format!("{BUILTIN}{}", builtin.name()), builtin.note()))
}

fn read(path: &Path) -> Result<Trace, ReplayError> {
    let shown = || path.display().to_string();
    let mut bytes = Vec::new();
    let file = File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes));
    file.map_err(|why| ReplayError::Io { path: shown(), why })?;
    if bytes.len() as u64 > LONGEST {
        return Err(ReplayError::TooLong { path: shown() });
    }
    Trace::parse(&bytes).map_err(|why| ReplayError::Trace { path: shown(), why })
}

/// What traces are replayed under.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// What a block costs at price 1; none is what the trace says.
    pub k: Option<Nanos>,
    /// `poll-price`.
    pub price: Option<u32>,
    /// `poll-max-ns`.
    pub max: Option<Nanos>,
    /// Which policies; none of them is all but `fixed`.
    pub policies: Vec<PolicyKind>,
}

impl Terms {
    fn setting(&self, trace: &Trace) -> Setting {
        Setting {
            block: self.k.map_or(trace.block, BlockCost::from_total),
            parameters: Parameters { price: self.price, max: self.max, ..Parameters::default() },
        }
    }

    /// A row for the offline optimum, one for the best fixed window, and one for each policy.
    ///
    /// # Errors
    /// A property out of its range.
    pub fn replay(&self, named: &Named) -> Result<Vec<Row>, ReplayError> {
        // The best fixed window has a row of its own.
        let all = || PolicyKind::ALL.iter().copied().filter(|&kind| kind != PolicyKind::Fixed).collect();
        let policies = if self.policies.is_empty() { all() } else { self.policies.clone() };
        Ok(replay(&named.name, &named.trace, &self.setting(&named.trace), &policies)?)
    }

    /// Those rows as a picture (SVG): CPU to the right, latency upwards, and the line of every fixed window.
    pub fn picture(&self, named: &Named, rows: &[Row]) -> String {
        front_svg(rows, &fixed_windows(&named.name, &named.trace, &self.setting(&named.trace)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_generated_traces_can_be_asked_for_at_once_and_one_by_one() {
        let all: Vec<_> = Named::find("builtin:all").unwrap().into_iter().map(|named| named.name).collect();
        assert_eq!(all, generated().map(|(name, _)| name).collect::<Vec<_>>());
        assert_eq!(Named::find(&all[3]).unwrap()[0].name, all[3]);
        let error = Named::find("builtin:mixtur").unwrap_err().to_string();
        assert!(error.ends_with("got 'mixtur', did you mean 'mixture'?"), "{error}");
    }

    #[test]
    fn what_a_block_costs_is_the_traces_own_unless_it_is_said() {
        let named = &Named::find("builtin:mixture").unwrap()[0];
        let terms = Terms { policies: vec![PolicyKind::Off], ..Terms::default() };
        assert_eq!(terms.replay(named).unwrap()[0].k_ns, named.trace.block.total(1).0);
        let terms = Terms { k: Some(Nanos(5_000)), price: Some(2), ..terms };
        let rows = terms.replay(named).unwrap();
        assert_eq!(
            (rows.len(), rows[0].k_ns),
            (3, 8_000),
            "two fifths of K are CPU, and the price multiplies the rest"
        );
    }
}
