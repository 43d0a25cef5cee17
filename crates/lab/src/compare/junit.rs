//! A comparison as a CI reads it.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use super::{Comparison, Row};
use crate::statistics::Verdict;

impl Comparison {
    /// A test for each row that decides: failed where something was lost, skipped where nobody can tell.
    ///
    /// # Errors
    /// What was measured has a name that XML cannot hold.
    pub fn junit(&self, force: bool) -> Result<String, quick_junit::SerializeError> {
        let mut suite = TestSuite::new("egret compare");
        if !force && !self.objections.is_empty() {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
            status.set_message(self.objections.join("; "));
            suite.add_test_case(TestCase::new("the runs can be compared", status));
        } else {
            self.rows.iter().filter_map(case).for_each(|case| {
                suite.add_test_case(case);
            });
        }
        let mut report = Report::new("egret compare");
        report.add_test_suite(suite);
        report.to_string()
    }
}

fn case(row: &Row) -> Option<TestCase> {
    let verdict = row.verdict()?;
    let mut status = match verdict {
        Verdict::Pass => TestCaseStatus::success(),
        Verdict::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Verdict::CantTell { .. } => TestCaseStatus::skipped(),
    };
    if verdict != Verdict::Pass {
        status.set_message(row.sentence());
    }
    let mut case = TestCase::new(format!("{}: {}", row.load, row.metric.name()), status);
    case.set_classname(&row.subject).set_time(Duration::ZERO);
    Some(case)
}
