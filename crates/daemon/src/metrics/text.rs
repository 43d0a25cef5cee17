//! The text that Prometheus scrapes, version 0.0.4 of its format.
//!
//! It is written here and not by a library, because those at hand write OpenMetrics alone, which `promtool` does not
//! check, and take their labels apart for every sample: a scrape has some twenty thousand.

use std::fmt::{Display, Write as _};

use egret_event_loop::Nanos;

/// What Prometheus asks for, and is told that it gets.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What kind of number a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricType {
    /// It only grows.
    Counter,
    /// It comes and goes.
    Gauge,
    /// Counts by size.
    Histogram,
}

impl MetricType {
    /// As the format has it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A time as a metric has it: in seconds, every nanosecond kept.
#[derive(Clone, Copy)]
pub(super) struct Seconds(pub(super) Nanos);

impl Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Nanos(ns) = self.0;
        write!(f, "{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
    }
}

/// Labels that are ready to be written: `name="value",...`.
#[derive(Clone, Debug, Default)]
pub(super) struct Labels(String);

impl Labels {
    pub(super) fn and(&self, name: &str, value: impl Display) -> Self {
        let mut labels = self.0.clone();
        if !labels.is_empty() {
            labels.push(',');
        }
        let _ = write!(labels, "{name}=\"");
        for c in value.to_string().chars() {
            match c {
                '\\' => labels.push_str("\\\\"),
                '"' => labels.push_str("\\\""),
                '\n' => labels.push_str("\\n"),
                c => labels.push(c),
            }
        }
        labels.push('"');
        Self(labels)
    }
}

/// Samples of one metric, as they are written.
pub(super) struct Samples<'a> {
    text: &'a mut String,
    name: &'static str,
}

impl<'a> Samples<'a> {
    /// Begins a metric.
    pub(super) fn begin(text: &'a mut String, name: &'static str, kind: MetricType, help: &str) -> Self {
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {}\n", kind.as_str());
        Self { text, name }
    }

    /// One sample.
    pub(super) fn put(&mut self, labels: &Labels, value: impl Display) {
        self.line("", &labels.0, None, value);
    }

    /// One sample with another label.
    pub(super) fn put_with(&mut self, labels: &Labels, name: &str, word: &str, value: impl Display) {
        self.line("", &labels.0, Some((name, &word)), value);
    }

    /// A histogram: how many were at most so large, ever more; how many there are, and what they come to.
    pub(super) fn put_histogram<L: Display>(
        &mut self,
        labels: &Labels,
        buckets: impl Iterator<Item = (L, u64)>,
        count: u64,
        sum: impl Display,
    ) {
        for (limit, seen) in buckets {
            self.line("_bucket", &labels.0, Some(("le", &limit)), seen);
        }
        self.line("_bucket", &labels.0, Some(("le", &"+Inf")), count);
        self.line("_sum", &labels.0, None, sum);
        self.line("_count", &labels.0, None, count);
    }

    fn line(&mut self, suffix: &str, labels: &str, more: Option<(&str, &dyn Display)>, value: impl Display) {
        let text = &mut *self.text;
        text.push_str(self.name);
        text.push_str(suffix);
        if !labels.is_empty() || more.is_some() {
            text.push('{');
            text.push_str(labels);
            if let Some((name, word)) = more {
                let comma = if labels.is_empty() { "" } else { "," };
                let _ = write!(text, "{comma}{name}=\"{word}\"");
            }
            text.push('}');
        }
        let _ = writeln!(text, " {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_written_as_the_format_has_it() {
        let mut text = String::new();
        let labels = Labels::default().and("export", "a\"b\\c\nd");
        let mut samples = Samples::begin(&mut text, "egret_x_total", MetricType::Counter, "Things.");
        samples.put(&Labels::default(), 1);
        samples.put(&labels, Seconds(Nanos(1_000_000_001)));
        samples.put_with(&labels, "operation", "read", 3);
        let expected = "# HELP egret_x_total Things.\n# TYPE egret_x_total counter\negret_x_total 1\n\
                        egret_x_total{export=\"a\\\"b\\\\c\\nd\"} 1.000000001\n\
                        egret_x_total{export=\"a\\\"b\\\\c\\nd\",operation=\"read\"} 3\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_histogram_ends_with_everything_its_sum_and_its_count() {
        let mut text = String::new();
        let mut samples = Samples::begin(&mut text, "egret_y", MetricType::Histogram, "Sizes.");
        samples.put_histogram(&Labels::default(), [(1, 2), (3, 5)].into_iter(), 6, 17);
        assert!(text.ends_with(
            "egret_y_bucket{le=\"1\"} 2\negret_y_bucket{le=\"3\"} 5\negret_y_bucket{le=\"+Inf\"} 6\n\
             egret_y_sum 17\negret_y_count 6\n"
        ));
    }
}
