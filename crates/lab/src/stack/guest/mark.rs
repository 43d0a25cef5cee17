//! How a guest tells the host where it is, and what time it is there.

use egret_loadgen::load::Edge;

/// Tells the host when what is measured begins and ends, with the guest's own account of its processors and its clock so
/// far.
pub const MARK: &str = r#"mark() { echo "mark $JOB $1 $(sed -n 1p /proc/stat) up $(cat /proc/uptime)" >&3; }"#;

/// Clocks that drift apart by more than this share are not those of one time.
const DRIFT: f64 = 0.02;
/// A mark may be on its way for as long, in seconds.
const LATE: f64 = 0.25;

/// The clock there, as marks tell it: by it fio and pgbench measure.
#[derive(Debug, Default)]
pub struct Clock {
    edges: [Option<f64>; 2],
}

impl Clock {
    /// A mark has come.
    pub fn hear(&mut self, edge: Edge, mark: &str) {
        let said = mark.rsplit_once(" up ").and_then(|(_, said)| said.split(' ').next()?.parse().ok());
        self.edges[usize::from(edge == Edge::End)] = said;
    }

    /// Whether as many seconds passed there as passed here.
    ///
    /// # Errors
    /// They did not.
    pub fn agrees(&self, here: f64) -> Result<(), String> {
        // Who has no such file is not Linux, and who sends no marks runs a job file of somebody's own.
        let [Some(begin), Some(end)] = self.edges else { return Ok(()) };
        let there: f64 = end - begin;
        if (here - there).abs() <= DRIFT * here + LATE {
            return Ok(());
        }
        Err(format!("the clock there is wrong: {there:.2} s were {here:.2} s here, so that its figures mean nothing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_clock_goes_wrong_nothing_is_a_measure_of_time() {
        let clock = |begin: &str, end: &str| {
            let mut clock = Clock::default();
            clock.hear(Edge::Begin, &format!("begin cpu  1 2 3 0 0{begin}"));
            clock.hear(Edge::End, &format!("end cpu  9 9 9 0 0{end}"));
            clock
        };
        let right = clock(" up 100.25 17.00", " up 105.25 18.00");
        assert_eq!(right.agrees(5.09), Ok(()));
        for here in [4.5, 6.0] {
            let error = right.agrees(here).unwrap_err();
            assert!(error.starts_with(&format!("the clock there is wrong: 5.00 s were {here:.2} s here")), "{error}");
        }
        assert_eq!(clock("", "").agrees(5.0), Ok(()), "it has not told");
        assert_eq!(clock(" up ", " up ").agrees(5.0), Ok(()), "nobody there knows");
    }
}
