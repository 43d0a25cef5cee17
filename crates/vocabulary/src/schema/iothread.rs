//! The `iothread` object.

use egret_event_loop::{MonitorChoice, Nanos};
use egret_polling::{Parameters, PolicyKind, Property};
use serde_json::{Value, json};

use super::key::{Shape, ValueType, one_of};
use super::object::object;
use super::words::{as_word, words};
use super::{Cpus, Object, ObjectError, Problem, Secret, Spelling, ThrottleGroup, TlsCreds};
use crate::options;

/// QEMU holds these in an `int64_t`.
const LARGEST: u64 = Parameters::LARGEST;
const LARGEST_POOL: u64 = 65_536;

const DEFAULT_GROW: u64 = 2;
const DEFAULT_SHRINK: u64 = 2;
const DEFAULT_WEIGHT: u64 = 3;
const DEFAULT_PRICE: u64 = 1;

options! {
    /// An event loop on a thread of its own.
    ///
    /// Where 0 stands for the default, as in QEMU, it is kept as 0.
    #[serde(remote = "Self")]
    pub struct IoThread {
        /// Name of the object, and of its thread in `top -H`.
        id: String, ValueType::Name(usize::MAX);
        /// No wait spins longer than this; 0 never spins. The policy `busy` ignores it. Left unset, it is the policy's own:
        /// 32768 for those of QEMU, and for `low-regret` what a request costs decides.
        poll_max_ns: Option<u64>, ValueType::Number(0, LARGEST, "ns"), unset "the policy's own";
        /// What a polling window is multiplied by when it grows; 0 is the default.
        poll_grow: Option<u64>, ValueType::Number(0, LARGEST, ""), unset DEFAULT_GROW;
        /// What a polling window is divided by when it shrinks; 0 is the default. Where it is 0 or left unset,
        /// `shared-window` and `per-source-window` start over from 0, as the QEMU versions they come from do.
        poll_shrink: Option<u64>, ValueType::Number(0, LARGEST, ""), unset DEFAULT_SHRINK;
        /// A new interval counts 2^-weight in a source's average (`weighted`); 0 is the default.
        poll_weight: Option<u32>, ValueType::Number(0, Parameters::LARGEST_WEIGHT as u64, ""), unset DEFAULT_WEIGHT;
        /// Most requests of `aio=native` handed to the kernel in one system call; 0 leaves it to the engine.
        aio_max_batch: u64, ValueType::Number(0, LARGEST, "requests"), default 0;
        /// Worker threads that are kept even when idle; at most `thread-pool-max`. The first that was needed is kept in any
        /// case.
        thread_pool_min: u32, ValueType::Number(0, LARGEST_POOL, "threads"), default 0;
        /// Most worker threads: for `aio=threads`, and for what other engines cannot do. Of several disks on the I/O
        /// thread none has more of them than it leaves free, so that one that hangs leaves half. A disk that is alone
        /// leaves one of more than two.
        thread_pool_max: u32, ValueType::Number(1, LARGEST_POOL, "threads"), default 64;
        /// When to spin and for how long. Left unset, it is `weighted` where one of QEMU's `poll-grow`, `poll-shrink` and
        /// `poll-weight` is set. Egret's own.
        #[serde(with = "as_word::optional")]
        poll_policy: Option<PolicyKind>, ValueType::Word(words::<PolicyKind>), unset IoThread::DEFAULT_POLICY;
        /// Nanoseconds of CPU that one nanosecond of latency is worth (`low-regret`). Egret's own.
        poll_price: Option<u32>, ValueType::Number(0, Parameters::LARGEST_PRICE as u64, ""), unset DEFAULT_PRICE;
        /// A queue without a hit for this long is no longer spun on, only waited for. Egret's own.
        poll_idle_ms: u32, ValueType::Number(1, 3_600_000, "ms"), default 7_000;
        /// How file descriptors are waited for. Egret's own.
        #[serde(with = "as_word")]
        fd_monitor: MonitorChoice, ValueType::Word(words::<MonitorChoice>), default MonitorChoice::Auto;
        /// Where the thread may run. In `key=value` text its commas are doubled: `0-3,,8`. Egret's own.
        cpu_affinity: Option<Cpus>, ValueType::Cpus, unset "the daemon's own";
        /// Reads the clock for each request of a guest's that begins and for each that ends, instead of once for all that a
        /// turn takes in and once for all that have ended. An experiment, to see what that costs. Egret's own.
        x_clock_per_request: bool, ValueType::Flag, default "off";
    }
}

static SHAPE: Shape = Shape::of(IoThread::KEYS);

/// What else qemu-storage-daemon makes with `--object`.
const FOREIGN_OBJECTS: &[&str] = &[
    "authz-list",
    "authz-list-file",
    "authz-pam",
    "authz-simple",
    "main-loop",
    "pr-manager-helper",
    "secret_keyring",
    "tls-cipher-suites",
];

/// QEMU's other credentials for TLS.
const FOREIGN_CREDENTIALS: &[&str] = &["tls-creds-anon", "tls-creds-psk"];

object!(IoThread, "iothread", "id", &SHAPE);

impl IoThread {
    /// `poll-policy` where it is left unset, and none of QEMU's properties asks for QEMU's own.
    pub const DEFAULT_POLICY: PolicyKind = PolicyKind::LowRegret;

    /// An I/O thread with every property left at its default.
    pub fn new(id: impl Into<String>) -> Self {
        Self::from_value(json!({ "id": id.into() }), Spelling::Typed).expect("its name is all that an I/O thread needs")
    }

    /// Reads an I/O thread from the arguments of `--object` or `object-add`, which say what kind of object is meant.
    ///
    /// # Errors
    /// As [`from_value`](Object::from_value); and another `qom-type`.
    pub fn from_user_object(mut value: Value, spelling: Spelling) -> Result<Self, ObjectError> {
        let id = value.get("id").and_then(Value::as_str).map(|id| format!("object '{id}'"));
        let error = |problem| ObjectError { subject: id.unwrap_or_else(|| "object without id".to_owned()), problem };
        match value.as_object_mut().and_then(|object| object.remove("qom-type")) {
            Some(kind) if kind == Self::NOUN => Self::from_value(value, spelling),
            Some(kind) if FOREIGN_CREDENTIALS.iter().any(|foreign| kind == *foreign) => Err(error(Problem::NotDone {
                what: format!("qom-type {kind}").replace('"', "'"),
                because: "the TLS library that Egret has (rustls) knows certificates alone; use tls-creds-x509"
                    .to_owned(),
            })),
            Some(kind) if FOREIGN_OBJECTS.iter().any(|foreign| kind == *foreign) => {
                let what = format!("qom-type {kind}").replace('"', "'");
                Err(error(Problem::NotDone {
                    what,
                    because: "of QEMU's objects Egret has iothread, secret, throttle-group and tls-creds-x509"
                        .to_owned(),
                }))
            }
            Some(kind) => {
                let known = one_of(&[Self::NOUN, Secret::NOUN, ThrottleGroup::NOUN, TlsCreds::NOUN]);
                Err(error(Problem::must("qom-type", known, kind.to_string().replace('"', "'"))))
            }
            None => Err(error(Problem::Missing { key: "qom-type".to_owned() })),
        }
    }

    /// The policy in force.
    pub fn policy(&self) -> PolicyKind {
        let unset = if self.asks_for_qemus() { PolicyKind::Weighted } else { Self::DEFAULT_POLICY };
        self.poll_policy.unwrap_or(unset)
    }

    /// Whether no policy is named, and a property is set that shapes QEMU's: a line that was written for QEMU means that one.
    pub fn asks_for_qemus(&self) -> bool {
        let is_set = [self.poll_grow.is_some(), self.poll_shrink.is_some(), self.poll_weight.is_some()];
        self.poll_policy.is_none() && is_set.contains(&true)
    }

    /// The same with one property changed; null takes back what was said of it. Another policy forgets the properties that it has no use for.
    ///
    /// # Errors
    /// The value is not the property's, or it does not go with the others.
    pub fn with(&self, property: &str, value: Value) -> Result<Self, ObjectError> {
        let mut object = serde_json::to_value(self).map_err(|e| self.error(Problem::Together(e.to_string())))?;
        if property == "poll-policy"
            && let Some(policy) = value.as_str().and_then(|word| word.parse::<PolicyKind>().ok())
            && let Some(object) = object.as_object_mut()
        {
            for property in [Property::Grow, Property::Shrink, Property::Weight, Property::Price] {
                if !policy.uses(property) {
                    object.remove(&property.to_string());
                }
            }
        }
        match object.as_object_mut().filter(|_| value.is_null()) {
            Some(object) => drop(object.remove(property)),
            None => object[property] = value,
        }
        Self::from_value(object, Spelling::Typed)
    }

    /// Sets what was left unset to what is in force, as far as the policy has a use for it.
    pub fn fill_in(&mut self) {
        let policy = self.policy();
        let in_force = |property: Property| {
            let value = self.effective(property);
            value.filter(|_| policy.uses(property))
        };
        let narrow = |value: Option<u64>| value.and_then(|value| u32::try_from(value).ok());
        let (grow, shrink) = (in_force(Property::Grow), in_force(Property::Shrink));
        let (weight, price) = (narrow(in_force(Property::Weight)), narrow(in_force(Property::Price)));
        (self.poll_grow, self.poll_shrink, self.poll_weight, self.poll_price) = (grow, shrink, weight, price);
        self.poll_policy = Some(policy);
    }

    /// A polling property as it is in force: 0 and unset are the default, except that a price of 0 is one, and that an
    /// unset `poll-shrink`, or 0, has no number where windows start over (`None`).
    pub fn effective(&self, property: Property) -> Option<u64> {
        let or = |value: Option<u64>, default| Some(value.filter(|&value| value != 0).unwrap_or(default));
        match property {
            Property::Max => Some(self.parameters().max_for(self.policy()).0.min(LARGEST)),
            Property::Grow => or(self.poll_grow, DEFAULT_GROW),
            Property::Shrink if self.poll_shrink.is_none_or(|by| by == 0) && self.policy().starts_over() => None,
            Property::Shrink => or(self.poll_shrink, DEFAULT_SHRINK),
            Property::Weight => or(self.poll_weight.map(u64::from), DEFAULT_WEIGHT),
            Property::Price => Some(self.poll_price.map_or(DEFAULT_PRICE, u64::from)),
        }
    }

    /// What the policy is built with.
    pub fn parameters(&self) -> Parameters {
        Parameters {
            max: self.poll_max_ns.map(Nanos),
            grow: self.poll_grow,
            shrink: self.poll_shrink,
            weight: self.poll_weight,
            price: self.poll_price,
        }
    }

    fn own_name(&self) -> &str {
        &self.id
    }

    fn check(&self) -> Result<(), Problem> {
        // A line written for QEMU names no policy, and may set what the one in force has no use for.
        let polling = match self.poll_policy {
            Some(policy) => self.parameters().validate(policy),
            None => self.parameters().validate_ranges(),
        };
        polling.map_err(|error| Problem::Together(error.to_string()))?;
        if self.thread_pool_min > self.thread_pool_max {
            let allowed = format!("at most thread-pool-max ({})", self.thread_pool_max);
            return Err(Problem::must("thread-pool-min", allowed, self.thread_pool_min));
        }
        Ok(())
    }
}
