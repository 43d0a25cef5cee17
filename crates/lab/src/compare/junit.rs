//! Verdicts as a CI reads them.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use super::Comparison;
use crate::analysis::{Analysis, CellKey, Status};
use crate::statistics::{Overall, Verdict};

impl Comparison {
    /// A test for each row that decides: failed where something was lost or has failed, skipped where nobody can tell; one
    /// more that is skipped where something is not there, and one with an error where the runs cannot be compared. A CI so
    /// sees what [`overall`](Self::overall) says.
    ///
    /// # Errors
    /// What was measured has a name that XML cannot hold.
    pub fn junit(&self, force: bool) -> Result<String, quick_junit::SerializeError> {
        if self.overall(force) == Overall::NotComparable {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
            status.set_message(match self.objections.is_empty() || force {
                true => "nothing that both measured decides anything".into(),
                false => self.objections.join("; "),
            });
            return report("egret compare", [TestCase::new("the runs can be compared", status)]);
        }
        let cases = self.rows.iter().filter_map(|row| {
            let verdict = row.decision.clone().ok()?;
            // What failed or is missing has a row beside those of what was measured.
            let metric = row.ratio.map_or("measured", |_| row.metric.name());
            Some(case(&row.place(), &row.subject, metric, verdict, row.sentence()))
        });
        let gaps = (!self.gaps.is_empty()).then(|| skipped("the runs are whole".into(), "", &self.gaps.join("; ")));
        report("egret compare", cases.chain(gaps))
    }
}

/// A test for each comparison of a run that decides, and one for each cell that failed; skipped is what was not measured, or
/// in some repetitions only, the run as a whole where it is not finished, and its plan where nothing decides.
///
/// # Errors
/// What was measured has a name that XML cannot hold.
pub fn of_run(analysis: &Analysis<'_>) -> Result<String, quick_junit::SerializeError> {
    let cases = analysis.judged.iter().filter_map(|judged| {
        let verdict = judged.decision.clone().ok()?;
        Some(case(&judged.place(), &judged.subject, judged.metric.name(), verdict, judged.sentence()))
    });
    let failed = analysis.run.cells.iter().filter_map(|cell| {
        let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
        status.set_message(cell.failure()?);
        Some(test(format!("{}: repetition {}", cell.id.load, cell.id.repetition + 1), &cell.id.subject, status))
    });
    let absent = analysis.absent().into_iter().map(|id| {
        let why = match analysis.table.status(CellKey::of(&id)) {
            Status::Impossible(reason) => format!("cannot run here: {reason}"),
            _ => "not measured".into(),
        };
        skipped(format!("{}: measured", id.place()), &id.subject, &why)
    });
    let sparse = analysis.sparse().into_iter().map(|(id, of, asked)| {
        skipped(format!("{}: in all repetitions", id.place()), &id.subject, &format!("measured in {of} of {asked}"))
    });
    let plan = &analysis.run.plan.name;
    let unfinished = analysis.run.ended.is_none().then(|| skipped("the run has ended".into(), plan, "not finished"));
    let mut cases: Vec<_> = cases.chain(failed).chain(absent).chain(sparse).chain(unfinished).collect();
    if cases.is_empty() {
        // A report without a test is green.
        cases.push(skipped("the plan decides something".into(), plan, &analysis.verdict()));
    }
    report("egret bench", cases)
}

fn skipped(name: String, class: &str, why: &str) -> TestCase {
    let mut status = TestCaseStatus::skipped();
    status.set_message(why);
    test(name, class, status)
}

fn test(name: String, class: &str, status: TestCaseStatus) -> TestCase {
    let mut test = TestCase::new(name, status);
    test.set_classname(class).set_time(Duration::ZERO);
    test
}

fn report(name: &str, cases: impl IntoIterator<Item = TestCase>) -> Result<String, quick_junit::SerializeError> {
    let mut suite = TestSuite::new(name);
    cases.into_iter().for_each(|case| {
        suite.add_test_case(case);
    });
    let mut report = Report::new(name);
    report.add_test_suite(suite);
    report.to_string()
}

/// A comparison that decides.
fn case(place: &str, subject: &str, metric: &str, verdict: Verdict, sentence: String) -> TestCase {
    let mut status = match verdict {
        Verdict::Pass => TestCaseStatus::success(),
        Verdict::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Verdict::CantTell { .. } => TestCaseStatus::skipped(),
    };
    if verdict != Verdict::Pass {
        status.set_message(sentence);
    }
    test(format!("{place}: {metric}"), subject, status)
}
