//! `cells.csv`: a row for each cell that was measured, units in the header.

use std::fmt::Write as _;

use crate::plan::Metric;
use crate::results::{Limit, Outcome, Run};

/// The table.
pub fn cells(run: &Run) -> String {
    let mut text = "load,subject,repetition,point,started_unix_s,seconds,reads,writes,bytes,offered_iops".to_owned();
    Metric::ALL.iter().for_each(|metric| text += &format!(",{}", metric.column()));
    text += ",load_cpu_s,host_busy_s,unaccounted_s,limit,functional_only\n";
    for cell in &run.cells {
        let Outcome::Measured(measured) = &cell.outcome else { continue };
        let requests = |of: &Option<crate::results::Operations>| of.as_ref().map(|of| of.requests.to_string());
        let seconds = |of: Option<u64>| of.map(|nanoseconds| format!("{:.6}", nanoseconds as f64 / 1e9));
        let mut fields = vec![
            quoted(&cell.id.load),
            quoted(&cell.id.subject),
            cell.id.repetition.to_string(),
            cell.id.point.to_string(),
            cell.started.to_string(),
            measured.seconds.to_string(),
            requests(&measured.reads).unwrap_or_default(),
            requests(&measured.writes).unwrap_or_default(),
            measured.bytes().to_string(),
            measured.offered_iops.map(|rate| rate.to_string()).unwrap_or_default(),
        ];
        fields.extend(Metric::ALL.iter().map(|metric| {
            let value = metric.of(measured);
            value.map(|value| format!("{value:.6}")).unwrap_or_default()
        }));
        fields.extend(
            [measured.cpu.load, measured.cpu.host_busy, measured.cpu.unaccounted()]
                .map(|of| seconds(of).unwrap_or_default()),
        );
        fields.push(match &measured.limit {
            Some(Limit::Load(why)) => quoted(&format!("load: {why}")),
            Some(Limit::Device(why)) => quoted(&format!("device: {why}")),
            None => String::new(),
        });
        fields.push(measured.functional_only.to_string());
        let _ = writeln!(text, "{}", fields.join(","));
    }
    text
}

/// As RFC 4180 has it.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_with_commas_or_quotes_is_one_field() {
        assert_eq!(["plain", "a, b", "a \"b\""].map(quoted), ["plain", "\"a, b\"", "\"a \"\"b\"\"\""]);
    }
}
