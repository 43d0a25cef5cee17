//! What is measured: names, units, and which way is better.

use strum::VariantArray;

use crate::plan::Metric;
use crate::results::{Measurement, Polling};

impl Metric {
    /// All of them.
    pub const ALL: [Self; Self::VARIANTS.len()] = *Self::VARIANTS.first_chunk().expect("all of them");

    /// Its value, in its [`unit`](Self::unit); `None` where the stack could not tell, or nothing was done.
    pub fn of(self, measurement: &Measurement) -> Option<f64> {
        let seconds = measurement.seconds;
        let requests = measurement.requests() as f64;
        let serving = || measurement.cpu.serving().map(|nanoseconds| nanoseconds as f64);
        let windows = |of: fn(&Polling) -> Option<f64>| measurement.polling.as_ref().and_then(of);
        let value = match self {
            Self::Latency => measurement.mean_latency()? / 1e3,
            Self::LatencyP99 => measurement.latency(|latency| latency.p99)? / 1e3,
            Self::LatencyP999 => measurement.latency(|latency| latency.p999)? / 1e3,
            Self::Iops => requests / seconds,
            Self::Throughput => measurement.bytes() as f64 / seconds / 1e6,
            Self::CpuPerIo => serving()? / 1e3 / requests,
            Self::IoThreadCpu => measurement.cpu.io_threads()? as f64 / 1e3 / requests,
            Self::ServerCpu => measurement.cpu.all_of_server()? as f64 / 1e3 / requests,
            Self::BackendCpu => measurement.cpu.backend? as f64 / 1e3 / requests,
            Self::LoadCpu => measurement.cpu.load? as f64 / 1e3 / requests,
            Self::HostBusy => measurement.cpu.host_busy? as f64 / 1e9 / seconds,
            Self::CpuPerGigabyte => serving()? / measurement.bytes() as f64,
            Self::Cpus => serving()? / 1e9 / seconds,
            Self::IoThreadCores => measurement.io_thread_cores?.into(),
            Self::InIoSubmit => measurement.in_io_submit? * 100.0,
            Self::IoThreads => measurement.cpu.io_threads()? as f64 / 1e9 / seconds,
            Self::Duration => seconds,
            Self::Transactions => measurement.transactions?,
            Self::Window => windows(|polling| polling.mean_window_ns)?,
            Self::WindowsReset => windows(|polling| polling.windows_reset)? * 100.0,
            Self::WindowsNearMax => windows(|polling| polling.windows_near_max)? * 100.0,
        };
        (value.is_finite() && (value > 0.0 || self.better().is_none())).then_some(value)
    }

    /// As a heading has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Latency => "mean latency",
            Self::LatencyP99 => "p99 latency",
            Self::LatencyP999 => "p99.9 latency",
            Self::Iops => "IOPS",
            Self::Throughput => "throughput",
            Self::CpuPerIo => "CPU per I/O",
            Self::IoThreadCpu => "I/O threads' CPU per I/O",
            Self::ServerCpu => "server's CPU per I/O",
            Self::BackendCpu => "CPU per I/O behind the disk",
            Self::LoadCpu => "load's CPU per I/O",
            Self::HostBusy => "host busy",
            Self::CpuPerGigabyte => "CPU per gigabyte",
            Self::Cpus => "CPUs",
            Self::IoThreadCores => "I/O threads' physical cores",
            Self::InIoSubmit => "asleep in io_submit",
            Self::IoThreads => "I/O threads' CPUs",
            Self::Duration => "duration",
            Self::Transactions => "transactions",
            Self::Window => "mean window",
            Self::WindowsReset => "resets",
            Self::WindowsNearMax => "time near the maximum",
        }
    }

    /// What its values are in.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Latency | Self::LatencyP99 | Self::LatencyP999 => "µs",
            Self::CpuPerIo | Self::IoThreadCpu | Self::ServerCpu => "µs",
            Self::BackendCpu | Self::LoadCpu => "µs",
            Self::Iops => "IOPS",
            Self::Transactions => "1/s",
            Self::Throughput => "MB/s",
            Self::CpuPerGigabyte => "s/GB",
            Self::Cpus | Self::IoThreads | Self::HostBusy => "CPUs",
            Self::IoThreadCores => "cores",
            Self::Duration => "s",
            Self::Window => "ns",
            Self::InIoSubmit | Self::WindowsReset | Self::WindowsNearMax => "%",
        }
    }

    /// A value with its unit.
    pub fn say(self, value: f64) -> String {
        format!("{} {}", figure(value), self.unit())
    }

    /// Its name and unit, as an axis has them.
    pub fn label(self) -> String {
        if self.name() == self.unit() { self.name().into() } else { format!("{}, {}", self.name(), self.unit()) }
    }

    /// A column of a table for programs: name and unit.
    pub fn column(self) -> &'static str {
        match self {
            Self::Latency => "latency_mean_us",
            Self::LatencyP99 => "latency_p99_us",
            Self::LatencyP999 => "latency_p999_us",
            Self::Iops => "iops",
            Self::Throughput => "throughput_mb_per_s",
            Self::CpuPerIo => "cpu_per_io_us",
            Self::IoThreadCpu => "cpu_io_threads_per_io_us",
            Self::ServerCpu => "cpu_server_per_io_us",
            Self::BackendCpu => "cpu_backend_per_io_us",
            Self::LoadCpu => "cpu_load_per_io_us",
            Self::HostBusy => "host_busy_cpus",
            Self::CpuPerGigabyte => "cpu_per_gb_s",
            Self::Cpus => "cpus",
            Self::IoThreadCores => "io_threads_cores",
            Self::InIoSubmit => "in_io_submit_percent",
            Self::IoThreads => "io_threads_cpus",
            Self::Duration => "duration_s",
            Self::Transactions => "transactions_per_s",
            Self::Window => "window_mean_ns",
            Self::WindowsReset => "windows_reset_percent",
            Self::WindowsNearMax => "windows_near_max_percent",
        }
    }

    /// Which way is better, in words; `None` where neither is, and where a value of 0 is one.
    pub fn better(self) -> Option<&'static str> {
        match self {
            Self::IoThreadCores | Self::InIoSubmit => None,
            Self::Window | Self::WindowsReset | Self::WindowsNearMax => None,
            _ if self.more_is_better() => Some("more is better"),
            _ => Some("less is better"),
        }
    }

    /// Whether more of it is better.
    pub fn more_is_better(self) -> bool {
        matches!(self, Self::Iops | Self::Throughput | Self::Transactions)
    }
}

/// A number with three or four digits that mean something, as a table shows it.
pub fn figure(value: f64) -> String {
    let digits = match value.abs() {
        1000.0.. => return grouped(value.round() as i64),
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Thousands apart, by a space that does not break.
fn grouped(value: i64) -> String {
    let digits = value.abs().to_string();
    let mut text = if value < 0 { "-".to_owned() } else { String::new() };
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A ratio as a difference: `+12.3 %`, and from double on `×2.40`.
pub fn difference(ratio: f64) -> String {
    if ratio < 2.0 { percent(ratio) } else { times(ratio) }
}

/// A ratio with its interval, all three in one form: `−3.1 % [−5.0 %, −1.2 %]`.
pub fn differences([ratio, low, high]: [f64; 3]) -> String {
    if high / low > 100.0 {
        return format!("{} [too few pairs]", difference(ratio));
    }
    let form = if low >= 2.0 || ratio >= 2.0 || high >= 3.0 { times } else { percent };
    format!("{} [{}, {}]", form(ratio), form(low), form(high))
}

fn percent(ratio: f64) -> String {
    if ratio.is_finite() { format!("{:+.1}\u{a0}%", (ratio - 1.0) * 100.0).replace('-', "−") } else { "∞".into() }
}

fn times(ratio: f64) -> String {
    if ratio.is_finite() { format!("×{ratio:.2}") } else { "∞".into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Latency, Ledger, Operations};

    #[test]
    fn a_metric_that_the_stack_cannot_tell_is_absent_and_not_zero() {
        let mut measurement = Measurement { seconds: 2.0, ..Measurement::default() };
        assert_eq!(Metric::Iops.of(&measurement), None);
        let latency = Latency { mean: 50_000.0, ..Latency::default() };
        measurement.reads = Some(Operations { requests: 1000, bytes: 4_096_000, latency });
        assert_eq!(Metric::Iops.of(&measurement), Some(500.0));
        assert_eq!(Metric::Latency.of(&measurement), Some(50.0));
        assert_eq!(Metric::CpuPerIo.of(&measurement), None);
        measurement.cpu = Ledger { server: Some(10_000_000), load: Some(1), ..Ledger::default() };
        assert_eq!(Metric::CpuPerIo.of(&measurement), Some(10.0));
        assert_eq!(Metric::Cpus.of(&measurement), Some(0.005));
    }

    #[test]
    fn every_metric_has_its_value_its_unit_and_the_way_that_is_better() {
        let operations = |requests| Some(Operations { requests, bytes: requests * 4096, latency: Latency::default() });
        let ms = |time: u64| Some(time * 1_000_000);
        let measurement = Measurement {
            seconds: 2.0,
            reads: operations(600),
            writes: operations(400),
            latency: Some(Latency { mean: 50e3, p99: 70e3, p999: 90e3, ..Latency::default() }),
            transactions: Some(77.0),
            cpu: Ledger {
                io_thread_work: ms(1),
                io_thread_spin_found: ms(2),
                io_thread_spin_wasted: ms(3),
                io_thread_system: ms(4),
                server_other: ms(5),
                server: ms(1),
                guest: ms(7),
                backend: ms(11),
                kernel_threads: ms(8),
                interrupts: ms(9),
                stolen: ms(1000),
                load: ms(13),
                host_busy: ms(100),
            },
            io_thread_cores: Some(3),
            in_io_submit: Some(0.25),
            polling: Some(Polling {
                mean_window_ns: Some(1234.0),
                windows_reset: Some(0.5),
                windows_near_max: Some(0.125),
                ..Polling::default()
            }),
            ..Measurement::default()
        };
        let (more, less) = (Some("more is better"), Some("less is better"));
        let expected = [
            (Metric::Latency, 50.0, "µs", less),
            (Metric::LatencyP99, 70.0, "µs", less),
            (Metric::LatencyP999, 90.0, "µs", less),
            (Metric::Iops, 500.0, "IOPS", more),
            (Metric::Throughput, 2.048, "MB/s", more),
            (Metric::CpuPerIo, 40.0, "µs", less),
            (Metric::IoThreadCpu, 10.0, "µs", less),
            (Metric::ServerCpu, 16.0, "µs", less),
            (Metric::BackendCpu, 11.0, "µs", less),
            (Metric::LoadCpu, 13.0, "µs", less),
            (Metric::HostBusy, 0.05, "CPUs", less),
            (Metric::CpuPerGigabyte, 9.765_625, "s/GB", less),
            (Metric::Cpus, 0.02, "CPUs", less),
            (Metric::IoThreadCores, 3.0, "cores", None),
            (Metric::InIoSubmit, 25.0, "%", None),
            (Metric::IoThreads, 0.005, "CPUs", less),
            (Metric::Duration, 2.0, "s", less),
            (Metric::Transactions, 77.0, "1/s", more),
            (Metric::Window, 1234.0, "ns", None),
            (Metric::WindowsReset, 50.0, "%", None),
            (Metric::WindowsNearMax, 12.5, "%", None),
        ];
        assert_eq!(expected.map(|one| one.0), Metric::ALL);
        for (metric, value, unit, better) in expected {
            let found = metric.of(&measurement).unwrap();
            assert!((found / value - 1.0).abs() < 1e-12, "{metric:?}: {found}, and not {value}");
            assert_eq!((metric.unit(), metric.better()), (unit, better), "{metric:?}");
            assert_eq!(metric.more_is_better(), better == more, "{metric:?}");
            assert!(metric.say(value).ends_with(&format!(" {unit}")));
        }
        for text in [Metric::name, Metric::column] {
            let mut all = Metric::ALL.map(text).to_vec();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), Metric::ALL.len(), "{all:?}");
        }
        assert_eq!((Metric::Iops.label(), Metric::Duration.label()), ("IOPS".into(), "duration, s".into()));

        // What may be none at all is 0 then; of the others 0 is what nobody could tell.
        let nothing = Measurement {
            seconds: 2.0,
            transactions: Some(0.0),
            in_io_submit: Some(0.0),
            io_thread_cores: Some(0),
            polling: Some(Polling { windows_reset: Some(0.0), ..Polling::default() }),
            ..Measurement::default()
        };
        let known = Metric::ALL.into_iter().filter_map(|metric| Some((metric, metric.of(&nothing)?)));
        assert_eq!(
            known.collect::<Vec<_>>(),
            [
                (Metric::IoThreadCores, 0.0),
                (Metric::InIoSubmit, 0.0),
                (Metric::Duration, 2.0),
                (Metric::WindowsReset, 0.0)
            ]
        );
    }

    #[test]
    fn figures_are_as_exact_as_they_are_worth() {
        let texts = [1_234_567.8, 1000.0, 123.4, 12.34, 1.234, 0.1234].map(figure);
        assert_eq!(texts, ["1\u{202f}234\u{202f}568", "1\u{202f}000", "123", "12.3", "1.23", "0.123"]);
        assert_eq!([1.0512, 0.9, 2.5].map(difference), ["+5.1\u{a0}%", "−10.0\u{a0}%", "×2.50"]);
        assert_eq!(differences([0.97, 0.95, 1.0]), "−3.0\u{a0}% [−5.0\u{a0}%, +0.0\u{a0}%]");
        assert_eq!(differences([2.5, 1.9, 3.0]), "×2.50 [×1.90, ×3.00]");
        for (of, text) in [
            ([1.9, 1.8, 2.9], "+90.0\u{a0}% [+80.0\u{a0}%, +190.0\u{a0}%]"),
            ([1.9, 1.8, 3.0], "×1.90 [×1.80, ×3.00]"),
            ([2.0, 1.9, 2.1], "×2.00 [×1.90, ×2.10]"),
            ([1.5, 2.0, 2.1], "×1.50 [×2.00, ×2.10]"),
            ([1.0, 0.1, 10.1], "+0.0\u{a0}% [too few pairs]"),
            ([1.0, 0.1, 10.0], "×1.00 [×0.10, ×10.00]"),
            ([f64::INFINITY, 1.0, 2.0], "∞ [×1.00, ×2.00]"),
        ] {
            assert_eq!(differences(of), text);
        }
        assert_eq!([1.99, 2.0, f64::INFINITY].map(difference), ["+99.0\u{a0}%", "×2.00", "∞"]);
        assert_eq!([-1234.0, 0.0, 100_000.0, 999.4].map(figure), ["-1\u{202f}234", "0.000", "100\u{202f}000", "999"]);
    }
}
