//! The `throttle-group` object: limits that disks share, by a name.

use egret_disk::{LARGEST_LIMIT, Limit, Limits, Rates};
use serde_json::{Map, Value, json};

use super::key::{Shape, ValueType};
use super::object::object;
use super::{Object, ObjectError, Problem, Spelling};
use crate::options;

/// Each limit once, though it has two keys: the one of `limits`, and the one that lines written for QEMU have.
macro_rules! limits {
    ($($about:literal $key:ident $alias:ident $unit:literal, $unset:literal;)+) => {
        options! {
            /// What the disks of a group may do together. All limits zero, which is the default, limits nothing.
            #[derive(Copy, Default)]
            pub struct ThrottleLimits {$(
                #[doc = $about]
                $key: Option<u64>, ValueType::Number(0, LARGEST_LIMIT, $unit), unset $unset;
            )+}
        }

        options! {
            /// The same under the keys that lines written for QEMU have.
            #[derive(Copy, Default)]
            pub struct ThrottleAliases {$(
                /// Another spelling of the key of `limits` that has no `x-`.
                $alias: Option<u64>, ValueType::Number(0, LARGEST_LIMIT, $unit), unset "that of limits";
            )+}
        }
    };
}

limits! {
    "Requests a second, reads and writes together; 0 is no limit, as in all that follow."
        iops_total x_iops_total "requests/s", "0";
    "As `iops-total`, in bursts; at least `iops-total`." iops_total_max x_iops_total_max "requests/s", "0";
    "How long `iops-total-max` may last; so with those that follow." iops_total_max_length x_iops_total_max_length "s", "1";
    "Reads a second; not beside `iops-total`." iops_read x_iops_read "requests/s", "0";
    "As `iops-read`, in bursts." iops_read_max x_iops_read_max "requests/s", "0";
    "Of `iops-read-max`." iops_read_max_length x_iops_read_max_length "s", "1";
    "Writes a second; not beside `iops-total`." iops_write x_iops_write "requests/s", "0";
    "As `iops-write`, in bursts." iops_write_max x_iops_write_max "requests/s", "0";
    "Of `iops-write-max`." iops_write_max_length x_iops_write_max_length "s", "1";
    "Bytes a second, of reads and writes together." bps_total x_bps_total "bytes/s", "0";
    "As `bps-total`, in bursts; at least `bps-total`." bps_total_max x_bps_total_max "bytes/s", "0";
    "Of `bps-total-max`." bps_total_max_length x_bps_total_max_length "s", "1";
    "Bytes a second of reads; not beside `bps-total`." bps_read x_bps_read "bytes/s", "0";
    "As `bps-read`, in bursts." bps_read_max x_bps_read_max "bytes/s", "0";
    "Of `bps-read-max`." bps_read_max_length x_bps_read_max_length "s", "1";
    "Bytes a second of writes; not beside `bps-total`." bps_write x_bps_write "bytes/s", "0";
    "As `bps-write`, in bursts." bps_write_max x_bps_write_max "bytes/s", "0";
    "Of `bps-write-max`." bps_write_max_length x_bps_write_max_length "s", "1";
    "Size of a request that counts as one; a larger one counts as several. 0: each counts as one."
        iops_size x_iops_size "bytes", "0";
}

options! {
    /// Limits that disks share, by a name.
    ///
    /// Fields are as they were written; [`limits`](Self::limits()) is what they come to.
    #[serde(remote = "Self")]
    pub struct ThrottleGroup {
        /// Name of the object, and of the group.
        id: String, ValueType::Name(usize::MAX);
        /// What the disks of the group may do together.
        limits: ThrottleLimits, ValueType::Object(&LIMITS), unset "see its keys";
        /// The same under other keys.
        #[serde(flatten)]
        aliases: ThrottleAliases => ThrottleAliases::KEYS;
    }
}

static LIMITS: Shape = Shape::of(ThrottleLimits::KEYS);
static SHAPE: Shape = Shape::of(ThrottleGroup::KEYS);

object!(ThrottleGroup, "throttle-group", "id", &SHAPE);

impl ThrottleGroup {
    /// One that says all of its limits, in `limits`.
    pub fn new(id: impl Into<String>, limits: Limits) -> Self {
        Self { id: id.into(), limits: limits.into(), aliases: ThrottleAliases::default() }
    }

    fn own_name(&self) -> &str {
        &self.id
    }

    fn check(&self) -> Result<(), Problem> {
        let written = json!(self);
        let is_said = |value: &Value| !value.is_null();
        let mut names = ThrottleLimits::KEYS.iter().map(|key| key.name);
        if let Some(twice) =
            names.find(|name| is_said(&written["limits"][name]) && is_said(&written[format!("x-{name}")]))
        {
            let line = format!("x-{twice} and limits.{twice} say the same thing twice: use one of them");
            return Err(Problem::Together(line));
        }
        self.limits().check().map_err(|error| Problem::Together(error.to_string()))
    }

    /// What its disks may do together.
    pub fn limits(&self) -> Limits {
        let written = json!(self);
        let said = |name: &str| written["limits"][name].as_u64().or_else(|| written[format!("x-{name}")].as_u64());
        limits_by_name(["-total", "-read", "-write"], "-", said)
    }

    /// The same with some limits changed, as an object of them says; those that it leaves out stay.
    ///
    /// # Errors
    /// One is no limit, or they make no sense together.
    pub fn with_limits(&self, some: Value) -> Result<Self, ObjectError> {
        let mut limits = json!(ThrottleLimits::from(self.limits()));
        match (&mut limits, some) {
            (Value::Object(limits), Value::Object(some)) => limits.extend(some),
            (limits, no_object) => *limits = no_object,
        }
        Self::from_value(json!({ "id": self.id, "limits": limits }), Spelling::Typed)
    }

    /// Sets what was left unset to what is in force.
    pub fn fill_in(&mut self) {
        *self = Self::new(&*self.id, self.limits());
    }
}

/// Limits by the names that they have in one of QEMU's spellings: behind `bps` and `iops` one of `parts`, for both, reads and
/// writes, and `joint` between words.
pub fn limits_by_name(parts: [&str; 3], joint: &str, said: impl Fn(&str) -> Option<u64>) -> Limits {
    let limit = |name: String| Limit {
        average: said(&name).unwrap_or(0),
        burst: said(&format!("{name}{joint}max")).unwrap_or(0),
        burst_seconds: said(&format!("{name}{joint}max{joint}length")).unwrap_or(1),
    };
    let rates = |unit: &str| {
        let [total, read, write] = parts.map(|part| limit(format!("{unit}{part}")));
        Rates { total, read, write }
    };
    let request_bytes = said(&format!("iops{joint}size")).unwrap_or(0);
    Limits { bytes: rates("bps"), requests: rates("iops"), request_bytes }
}

/// Every one of them.
impl From<Limits> for ThrottleLimits {
    fn from(limits: Limits) -> Self {
        let mut all = Map::new();
        for (unit, rates) in [("bps", limits.bytes), ("iops", limits.requests)] {
            for (part, limit) in [("total", rates.total), ("read", rates.read), ("write", rates.write)] {
                let Limit { average, burst, burst_seconds } = limit;
                all.insert(format!("{unit}-{part}"), average.into());
                all.insert(format!("{unit}-{part}-max"), burst.into());
                all.insert(format!("{unit}-{part}-max-length"), burst_seconds.into());
            }
        }
        all.insert("iops-size".to_owned(), limits.request_bytes.into());
        serde_json::from_value(all.into()).expect("these are its keys, and numbers")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::{Config, ConfigFile, effective};
    use crate::keyval;
    use crate::schema::untagged;

    fn read(text: &str) -> Result<ThrottleGroup, String> {
        let (value, spelling) = keyval::read(text, "qom-type").unwrap();
        untagged::<ThrottleGroup>(value, spelling).map_err(|error| error.to_string())
    }

    fn limits(keys: &str) -> Limits {
        read(&format!("throttle-group,id=g{keys}")).unwrap_or_else(|error| panic!("{keys}: {error}")).limits()
    }

    #[test]
    fn a_group_is_spelled_as_qemu_spells_it_in_both_of_its_ways() {
        assert_eq!(limits(""), Limits::default());
        let expected = Limits {
            requests: Rates { total: Limit { average: 500, burst: 5000, burst_seconds: 30 }, ..Rates::default() },
            request_bytes: 4096,
            ..Limits::default()
        };
        let x = ",x-iops-total=500,x-iops-total-max=5000,x-iops-total-max-length=30,x-iops-size=4096";
        for keys in [x, &x.replace(",x-", ",limits."), &x.replacen(",x-", ",limits.", 2)] {
            assert_eq!(limits(keys), expected, "{keys}");
        }
        let json = r#"{"qom-type": "throttle-group", "id": "g", "limits": {"bps-write": 7}}"#;
        assert_eq!(read(json).unwrap().limits().bytes.write.average, 7);
    }

    #[test]
    fn each_key_is_another_limit_under_either_of_its_names() {
        let mut seen = BTreeSet::new();
        for name in ThrottleLimits::KEYS.iter().map(|key| key.name) {
            // With what it needs.
            let rate = name.split("-max").next().unwrap_or(name);
            let needs = match name {
                "iops-size" => vec!["iops-total=1".to_owned()],
                _ if name.ends_with("-length") => vec![format!("{rate}=1"), format!("{rate}-max=2")],
                _ if name.ends_with("-max") => vec![format!("{rate}=1")],
                _ => Vec::new(),
            };
            let of = |prefix: &str, more: &[String]| {
                let keys = needs.iter().chain(more).map(|key| format!(",{prefix}{key}"));
                limits(&keys.collect::<String>())
            };
            let more = [format!("{name}=9")];
            assert_ne!(of("x-", &more), of("x-", &[]), "{name}");
            assert_eq!(of("x-", &more), of("limits.", &more), "{name}");
            assert!(seen.insert(format!("{:?}", of("x-", &more))), "{name}");
            assert_eq!(json!(ThrottleLimits::from(of("x-", &more)))[name], 9);
        }
        assert_eq!(seen.len(), 19);
    }

    #[test]
    fn limits_that_make_no_sense_are_refused_in_qemus_words() {
        for (keys, line) in [
            (",limits.iops-total-max=5", "bps_max/iops_max require corresponding bps/iops values"),
            (",x-iops-total=5,limits.iops-total-max=4", "bps_max/iops_max cannot be lower than bps/iops"),
            (
                ",x-bps-total=1,x-bps-read=1",
                "bps/iops/max total values and read/write values cannot be used at the same time",
            ),
            (",x-iops-total=1,x-iops-total-max-length=2", "burst length set without burst rate"),
            (",x-iops-size=1", "iops size requires an iops value to be set"),
            (
                ",x-iops-total=1,limits.iops-total=1",
                "x-iops-total and limits.iops-total say the same thing twice: use one of them",
            ),
            (",x-iops-total=-1", "x-iops-total must be 0..=1000000000000000, got -1"),
            (",limits.iops-totl=1", "unknown key 'limits.iops-totl'; did you mean 'iops-total'?"),
        ] {
            let refused = read(&format!("throttle-group,id=g{keys}")).unwrap_err();
            assert_eq!(refused, format!("throttle-group 'g': {line}"));
        }
    }

    #[test]
    fn a_change_of_some_limits_leaves_the_others_as_they_are() {
        let group = read("throttle-group,id=g,x-iops-total=500,limits.iops-total-max=5000").unwrap();
        let changed = group.with_limits(json!({"iops-total": 600, "bps-read": 7})).unwrap();
        let Limits { bytes, requests, .. } = changed.limits();
        assert_eq!((requests.total.average, requests.total.burst, bytes.read.average), (600, 5000, 7));
        for (some, line) in [
            (json!({"iops-total": 0}), "bps_max/iops_max require corresponding bps/iops values"),
            (json!({"iops-total": "1"}), "limits.iops-total must be a number without quotes, 0..=1000000000000000"),
            (json!({"x-iops-total": 1}), "unknown key 'limits.x-iops-total'"),
            (json!(null), "limits must be an object of keys, got null"),
        ] {
            let refused = group.with_limits(some).unwrap_err().to_string();
            assert!(refused.starts_with(&format!("throttle-group 'g': {line}")), "{refused}");
        }
    }

    #[test]
    fn a_group_in_a_file_reads_back_as_what_is_in_force() {
        let text = "[[throttle-group]]\nid = \"g\"\nlimits.iops-total = 500\nx-bps-total = 7\n";
        let config = ConfigFile::read("f", text).unwrap().config().unwrap();
        let shown = effective(&config);
        let again = ConfigFile::read("f", &shown).unwrap().config().unwrap();
        assert_eq!(again, config.filled_in(), "{shown}");
        let group = &again.throttle_groups[0];
        assert_eq!((group.limits.iops_total, group.limits.bps_total), (Some(500), Some(7)));
        assert_eq!(group.limits(), config.throttle_groups[0].limits());
        assert!(again.has_object("g") && !Config::empty().has_object("g"));
        let wrong = text.replace("500", "500\nx-iops-total = 1");
        assert_eq!(
            ConfigFile::read("f", &wrong).unwrap_err().to_string(),
            "f:4: throttle-group 'g': x-iops-total and limits.iops-total say the same thing twice: use one of them"
        );
    }
}
