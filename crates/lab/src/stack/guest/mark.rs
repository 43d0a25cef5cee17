//! How a guest tells the host where it is, and what time it is there.

use std::time::Instant;

/// Tells the host when what is measured begins and ends, with the guest's own account of its processors and its clock so
/// far.
pub const MARK: &str = r#"mark() { echo "mark $JOB $1 $(sed -n 1p /proc/stat) up $(cat /proc/uptime)" >&3; }"#;

/// Shell that tells the clock a few times, `edge` being `before` or `after` a load: of several marks one comes soon, though the
/// machine has much to do.
pub const CLOCK: &str = "tell_clock() { for _ in 1 2 3; do mark $1; done; }";

/// Clocks that drift apart by more than this share are not those of one time.
const DRIFT: f64 = 0.02;
/// The soonest of some marks may be on its way for as long, in seconds.
const LATE: f64 = 0.25;

/// The clock there, as marks tell it: by it fio and pgbench measure.
#[derive(Debug)]
pub struct Clock {
    begin: Instant,
    /// Here and there, in seconds: of the marks before the load or at its beginning, and of those at its end or after it, the
    /// one that was the least late.
    sides: [Option<(f64, f64)>; 2],
}

impl Default for Clock {
    fn default() -> Self {
        Self { begin: Instant::now(), sides: [None; 2] }
    }
}

impl Clock {
    /// A mark has come.
    pub fn hear(&mut self, mark: &str) {
        self.hear_at(self.begin.elapsed().as_secs_f64(), mark);
    }

    fn hear_at(&mut self, here: f64, mark: &str) {
        let side = match mark.split(' ').next() {
            Some("before" | "begin") => 0,
            Some("end" | "after") => 1,
            _ => return,
        };
        // Who has no such file is not Linux.
        let said = mark.rsplit_once(" up ").and_then(|(_, said)| said.split(' ').next()?.parse::<f64>().ok());
        let Some(there) = said else { return };
        // A mark that is late tells less of its clock than has passed here.
        self.sides[side] = self.sides[side].filter(|known| known.0 - known.1 <= here - there).or(Some((here, there)));
    }

    /// Whether as many seconds passed there as passed here.
    ///
    /// # Errors
    /// They did not.
    pub fn agrees(&self) -> Result<(), String> {
        // Who sends no marks runs a job file of somebody's own.
        let [Some(begin), Some(end)] = self.sides else { return Ok(()) };
        let (here, there) = (end.0 - begin.0, end.1 - begin.1);
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
        let clock = |marks: &[(f64, &str, &str)]| {
            let mut clock = Clock::default();
            marks.iter().for_each(|(here, edge, said)| clock.hear_at(*here, &format!("{edge} cpu  1 2 3 0 0{said}")));
            clock
        };
        let lasting = |here: f64| clock(&[(3.0, "begin", " up 100.25 17.00"), (3.0 + here, "end", " up 105.25 18.00")]);
        assert_eq!(lasting(5.09).agrees(), Ok(()));
        for here in [4.5, 6.0] {
            let error = lasting(here).agrees().unwrap_err();
            assert!(error.starts_with(&format!("the clock there is wrong: 5.00 s were {here:.2} s here")), "{error}");
        }
        assert_eq!(clock(&[(1.0, "begin", ""), (6.0, "end", "")]).agrees(), Ok(()), "it has not told");
        assert_eq!(clock(&[(1.0, "begin", " up "), (9.0, "end", " up ")]).agrees(), Ok(()), "nobody there knows");
        assert_eq!(clock(&[(1.0, "before", " up 1"), (9.0, "begin", " up 2")]).agrees(), Ok(()), "it has not ended");
    }

    #[test]
    fn a_mark_that_comes_late_makes_no_clock_wrong_where_another_is_in_time() {
        let all = [
            (1.0, "before", 10.0),
            (2.5, "begin", 11.0),
            (5.9, "end", 14.0),
            (5.1, "after", 14.05),
            (9.0, "after", 14.1),
        ];
        let heard = |marks: &[(f64, &str, f64)]| {
            let mut clock = Clock::default();
            marks.iter().for_each(|(here, edge, there)| clock.hear_at(*here, &format!("{edge} x up {there} 0")));
            clock.agrees()
        };
        assert_eq!(heard(&all), Ok(()));
        assert_eq!(heard(&all.into_iter().rev().collect::<Vec<_>>()), Ok(()));
        // Without those that were in time nobody knows better.
        let late = [all[0], all[1], all[2], all[4]];
        assert!(heard(&late).unwrap_err().contains("4.00 s were 4.90 s here"));
    }
}
