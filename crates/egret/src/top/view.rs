//! The state of the display and the handling of keys, without a terminal.

use egret_vocabulary::schema::{PolicyKind, words};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde_json::{Value, json};

use super::rates::{Flow, Rates, ThreadRates};

/// Which of the two tables has the cursor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    /// The I/O threads.
    Threads,
    /// The exports, or one's queues.
    #[default]
    Flows,
}

/// What exports come in the order of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    #[default]
    Iops,
    Bandwidth,
    InFlight,
    P99,
    Name,
}

impl Sort {
    const ALL: [Self; 5] = [Self::Iops, Self::Bandwidth, Self::InFlight, Self::P99, Self::Name];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::Bandwidth => "MB/s",
            Self::InFlight => "in flight",
            Self::P99 => "p99",
            Self::Name => "name",
        }
    }

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

/// What a key asks the daemon, or the program, to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing but to show the view again.
    Nothing,
    /// To end.
    Quit,
    /// Another export is shown, or all: the last snapshot cannot be compared with.
    Look,
    /// To change a property of an I/O thread.
    Set { thread: String, property: &'static str, value: Value },
}

/// What is shown.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub pane: Pane,
    pub sort: Sort,
    /// The export whose queues are looked at.
    pub export: Option<String>,
    /// The rows of the cursor, in either pane.
    thread: usize,
    flow: usize,
    /// What came of the last change.
    pub said: String,
}

impl View {
    /// The exports, or the queues of the one that is looked at, in their order.
    pub fn flows<'a>(&self, rates: &'a Rates) -> Vec<&'a Flow> {
        let of = if self.export.is_some() { &rates.queues } else { &rates.exports };
        let mut flows: Vec<&Flow> = of.iter().collect();
        match self.sort {
            // As they come.
            Sort::Name => {}
            Sort::Iops => flows.sort_by(|a, b| b.iops.total_cmp(&a.iops)),
            Sort::Bandwidth => flows.sort_by(|a, b| b.bytes.total_cmp(&a.bytes)),
            Sort::InFlight => flows.sort_by_key(|flow| std::cmp::Reverse(flow.in_flight)),
            Sort::P99 => flows.sort_by_key(|flow| std::cmp::Reverse(flow.p99_ns)),
        }
        flows
    }

    /// The row of the cursor in `pane`, of `rows`.
    pub fn row(&self, pane: Pane, rows: usize) -> Option<usize> {
        let at = if pane == Pane::Threads { self.thread } else { self.flow };
        rows.checked_sub(1).map(|last| at.min(last))
    }

    fn thread<'a>(&self, rates: &'a Rates) -> Option<&'a ThreadRates> {
        Some(&rates.threads[self.row(Pane::Threads, rates.threads.len())?])
    }

    /// Obeys a key.
    pub fn key(&mut self, key: KeyEvent, rates: &Rates) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Nothing;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Action::Quit,
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Tab => {
                self.pane = if self.pane == Pane::Threads { Pane::Flows } else { Pane::Threads };
            }
            KeyCode::Up | KeyCode::Char('k') => self.step(rates, false),
            KeyCode::Down | KeyCode::Char('j') => self.step(rates, true),
            KeyCode::Enter if self.pane == Pane::Flows && self.export.is_none() => {
                let flows = self.flows(rates);
                if let Some(row) = self.row(Pane::Flows, flows.len()) {
                    self.export = Some(flows[row].name.clone());
                    self.flow = 0;
                    return Action::Look;
                }
            }
            KeyCode::Esc | KeyCode::Backspace if self.export.is_some() => {
                self.export = None;
                self.flow = 0;
                return Action::Look;
            }
            KeyCode::Char('p' | '+' | '=' | '-') if self.pane != Pane::Threads => {
                self.said = "Tab to an I/O thread first".to_owned();
            }
            KeyCode::Char('p') => return self.set(rates, "poll-policy", |thread| next_policy(&thread.policy)),
            KeyCode::Char('+' | '=') => {
                return self.set(rates, "poll-max-ns", |thread| json!(longer(thread.poll_max_ns)));
            }
            KeyCode::Char('-') => return self.set(rates, "poll-max-ns", |thread| json!(shorter(thread.poll_max_ns))),
            _ => {}
        }
        Action::Nothing
    }

    fn step(&mut self, rates: &Rates, down: bool) {
        let rows = if self.pane == Pane::Threads { rates.threads.len() } else { self.flows(rates).len() };
        let Some(row) = self.row(self.pane, rows) else { return };
        let to = if down { (row + 1).min(rows - 1) } else { row.saturating_sub(1) };
        *(if self.pane == Pane::Threads { &mut self.thread } else { &mut self.flow }) = to;
    }

    fn set(&self, rates: &Rates, property: &'static str, value: impl Fn(&ThreadRates) -> Value) -> Action {
        self.thread(rates).map_or(Action::Nothing, |thread| Action::Set {
            thread: thread.id.clone(),
            property,
            value: value(thread),
        })
    }
}

fn next_policy(now: &str) -> Value {
    let policies = words::<PolicyKind>();
    let at = policies.iter().position(|policy| *policy == now).map_or(0, |at| at + 1);
    policies[at % policies.len()].into()
}

/// A step at which windows begin to be worth something, and where doubling has an end that makes sense.
const WINDOWS: std::ops::RangeInclusive<u64> = 1_000..=1_000_000_000;

fn longer(window: u64) -> u64 {
    window.saturating_mul(2).clamp(*WINDOWS.start(), *WINDOWS.end())
}

fn shorter(window: u64) -> u64 {
    (window / 2).clamp(*WINDOWS.start(), *WINDOWS.end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::rates::{rates, tests::snapshot};

    fn press(view: &mut View, keys: &[KeyCode]) -> Vec<Action> {
        let rates = rates(&snapshot(1), &snapshot(2));
        keys.iter().map(|key| view.key(KeyEvent::from(*key), &rates)).collect()
    }

    #[test]
    fn exports_are_sorted_by_the_column_that_s_chose() {
        let rates = rates(&snapshot(1), &snapshot(2));
        let mut view = View::default();
        let names = |view: &View| view.flows(&rates).iter().map(|flow| flow.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&view), ["e1", "e0"]);
        press(&mut view, &[KeyCode::Char('s'); 4]);
        assert_eq!((view.sort, names(&view)), (Sort::Name, vec!["e0".to_owned(), "e1".to_owned()]));
    }

    #[test]
    fn enter_looks_at_an_exports_queues_and_escape_at_all_again() {
        let mut view = View::default();
        assert_eq!(press(&mut view, &[KeyCode::Down, KeyCode::Enter])[1], Action::Look);
        assert_eq!(view.export.as_deref(), Some("e0"));
        assert_eq!(press(&mut view, &[KeyCode::Esc]), [Action::Look]);
        assert_eq!(view.export, None);
        assert_eq!(press(&mut view, &[KeyCode::Esc, KeyCode::Char('q')]), [Action::Nothing, Action::Quit]);
    }

    #[test]
    fn a_thread_is_given_the_next_policy_and_other_windows() {
        let mut view = View::default();
        let set = |property, value| Action::Set { thread: "io0".into(), property, value };
        assert_eq!(press(&mut view, &[KeyCode::Char('p'), KeyCode::Tab]), [Action::Nothing, Action::Nothing]);
        assert_eq!(view.said, "Tab to an I/O thread first", "the cursor must show what is changed");
        let done = press(&mut view, &['p', '+', '-'].map(KeyCode::Char));
        let policies = words::<PolicyKind>();
        assert_eq!(policies.last(), Some(&"low-regret"), "the first comes after the last");
        let expected = [
            set("poll-policy", policies[0].into()),
            set("poll-max-ns", 100_000.into()),
            set("poll-max-ns", 25_000.into()),
        ];
        assert_eq!(done, expected);
        assert_eq!((longer(0), shorter(1500), longer(u64::MAX)), (1000, 1000, 1_000_000_000));
    }

    #[test]
    fn the_cursor_stays_on_a_row_that_there_is() {
        let mut view = View::default();
        press(&mut view, &[KeyCode::Down; 9]);
        assert_eq!(
            (view.row(Pane::Flows, 2), view.row(Pane::Flows, 1), view.row(Pane::Flows, 0)),
            (Some(1), Some(0), None)
        );
        press(&mut view, &[KeyCode::Up; 9]);
        assert_eq!(view.row(Pane::Flows, 2), Some(0));
        let nothing = Rates::default();
        for key in [KeyCode::Down, KeyCode::Enter, KeyCode::Char('p'), KeyCode::Tab, KeyCode::Up] {
            assert_eq!(view.key(KeyEvent::from(key), &nothing), Action::Nothing);
        }
    }
}
