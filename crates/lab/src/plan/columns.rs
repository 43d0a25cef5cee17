//! Loads by what they ask for, whatever they are called.

use serde::{Deserialize, Serialize};

use super::units::{Bytes, OneOrMany};
use super::{Application, Load};

/// What some loads have in common: of each key that is given, one of its values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Columns {
    /// As fio spells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rw: Option<OneOrMany<String>>,
    /// The length of a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bs: Option<OneOrMany<Bytes>>,
    /// Requests in flight, for each job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iodepth: Option<OneOrMany<u16>>,
    /// Jobs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numjobs: Option<OneOrMany<u16>>,
    /// Disks under load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<OneOrMany<u16>>,
    /// Disks that are connected and idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_disks: Option<OneOrMany<u16>>,
    /// An application in a guest; without this none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub application: Option<OneOrMany<Application>>,
    /// Whether latency is measured as load rises.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub curve: Option<bool>,
}

impl Columns {
    /// Whether a load has them. One with a job file of its own has none that are known.
    pub fn hold(&self, load: &Load) -> bool {
        let application = match (&self.application, &load.keys.application) {
            (None, own) => own.is_none(),
            (wanted, Some(own)) => among(wanted, own),
            (Some(_), None) => false,
        };
        application
            && load.keys.jobfile.is_none()
            && among(&self.rw, &load.rw)
            && among(&self.bs, &load.bs)
            && among(&self.iodepth, &load.iodepth)
            && among(&self.numjobs, &load.numjobs)
            && among(&self.disks, &load.disks)
            && among(&self.idle_disks, &load.idle_disks)
            && self.curve.is_none_or(|curve| curve == load.keys.curve.is_some())
    }
}

fn among<T: PartialEq>(wanted: &Option<OneOrMany<T>>, value: &T) -> bool {
    wanted.as_ref().is_none_or(|wanted| wanted.all().contains(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Loads;

    #[test]
    fn loads_are_found_by_what_they_ask_for() {
        #[derive(Deserialize)]
        struct Plan {
            load: Loads,
        }
        let loads = "[[load]]\nrw = ['read', 'write']\nbs = ['4k', '1M']\n[[load]]\niodepth = 8\nnumjobs = 2\n\
            [[load]]\niodepth = 8\ncurve = { from = 10, to = 90, points = 3 }\n\
            [[load]]\ndisks = 2\nidle_disks = 9\n[[load]]\njobfile = 'x.fio'\n\
            [[load]]\napplication = 'pgbench'\niodepth = 8\n";
        let loads = toml::from_str::<Plan>(loads).unwrap().load;
        let found = |columns: &str| {
            let columns: Columns = toml::from_str(columns).unwrap();
            loads.iter().filter(|load| columns.hold(load)).map(|load| load.name.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(found("").len(), 7, "all but the application and the job file");
        assert_eq!(found("rw = ['read', 'write']\nbs = '1M'"), ["read 1M QD1", "write 1M QD1"]);
        assert_eq!(found("iodepth = 8"), ["randread 4k QD8 2 jobs", "randread 4k QD8 curve"]);
        assert_eq!(found("iodepth = 8\ncurve = false"), ["randread 4k QD8 2 jobs"]);
        assert_eq!(found("numjobs = 2"), ["randread 4k QD8 2 jobs"]);
        assert_eq!(found("disks = 2"), ["randread 4k QD1 2 disks 9 idle disks"]);
        assert_eq!(found("idle_disks = [1, 9]"), ["randread 4k QD1 2 disks 9 idle disks"]);
        assert_eq!(found("application = ['rsync', 'pgbench']"), ["pgbench 8 clients"]);
    }
}
