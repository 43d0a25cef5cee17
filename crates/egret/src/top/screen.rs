//! The picture.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Table, TableState};

use super::rates::{Rates, ThreadRates};
use super::table::{FLOWS, THREADS, flow_cells, is_number, thread_cells};
use super::view::{Pane, View};

/// How wide the bar of a thread's time is.
const BAR: usize = 20;

/// What the parts of a bar look like, and what they are.
const PARTS: [(&str, Color, &str); 4] = [
    ("█", Color::Green, "work"),
    ("▓", Color::Cyan, "spin that found"),
    ("░", Color::Yellow, "spin wasted"),
    ("·", Color::DarkGray, "sleep"),
];

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, socket: &str, rates: &Rates, view: &View) {
    let most = frame.area().height.saturating_sub(6) / 2;
    let threads = (rates.threads.len() as u16 + 3).min(most.max(4));
    let [head, above, below, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(threads),
        Constraint::Min(4),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_head(frame, head, socket, rates);
    draw_threads(frame, above, rates, view);
    draw_flows(frame, below, rates, view);
    let keys = "q quit  Tab pane  s sort  Enter queues  Esc back  p policy  +/- window";
    let text = if view.said.is_empty() { keys.to_owned() } else { format!("{}   {keys}", view.said) };
    frame.render_widget(Paragraph::new(text).style(Style::new().add_modifier(Modifier::DIM)), foot);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, socket: &str, rates: &Rates) {
    let sum = |of: fn(&super::rates::Flow) -> f64| rates.exports.iter().map(of).sum::<f64>();
    let mut legend: Vec<Span<'_>> = Vec::new();
    for (symbol, color, name) in PARTS {
        legend.push(Span::styled(symbol, Style::new().fg(color)));
        legend.push(Span::raw(format!(" {name}   ")));
    }
    let totals = format!(
        "egret {}  {socket}   {:.0} IOPS  {:.1} MB/s",
        env!("CARGO_PKG_VERSION"),
        sum(|flow| flow.iops),
        sum(|flow| flow.bytes) / 1e6
    );
    frame.render_widget(Paragraph::new(vec![Line::from(totals), Line::from(legend)]), area);
}

fn draw_threads(frame: &mut Frame<'_>, area: Rect, rates: &Rates, view: &View) {
    let rows = rates.threads.iter().map(|thread| {
        let cells = cells(&thread_cells(thread), &THREADS);
        Row::new(cells.into_iter().chain([Cell::from(bar(thread))]))
    });
    let mut heads = cells(&THREADS.map(str::to_owned), &THREADS);
    heads.push(Cell::from("of the time"));
    let mut widths = [9, 17, 9, 9, 6, 7, 8, 7, 6, 8].map(Constraint::Length).to_vec();
    widths.push(Constraint::Min(BAR as u16));
    let row = view.row(Pane::Threads, rates.threads.len());
    draw_table(frame, area, "I/O threads", rows.collect(), heads, widths, row, view.pane == Pane::Threads);
}

fn draw_flows(frame: &mut Frame<'_>, area: Rect, rates: &Rates, view: &View) {
    let flows = view.flows(rates);
    let title = match &view.export {
        Some(export) => format!("queues of {export}, by {}", view.sort.as_str()),
        None => format!("exports, by {}", view.sort.as_str()),
    };
    let rows = flows.iter().map(|flow| Row::new(cells(&flow_cells(flow), &FLOWS)));
    let mut names = FLOWS.map(str::to_owned);
    if view.export.is_some() {
        names[0] = "queue".to_owned();
    }
    let heads = cells(&names, &FLOWS);
    let mut widths = [16, 6, 17, 9, 9, 9, 10, 10, 8].map(Constraint::Length).to_vec();
    widths[0] = Constraint::Min(12);
    let row = view.row(Pane::Flows, flows.len());
    draw_table(frame, area, &title, rows.collect(), heads, widths, row, view.pane == Pane::Flows);
}

#[expect(clippy::too_many_arguments, reason = "a table has that many sides")]
fn draw_table(
    frame: &mut Frame<'_>,
    area: Rect,
    title: &str,
    rows: Vec<Row<'_>>,
    heads: Vec<Cell<'_>>,
    widths: Vec<Constraint>,
    row: Option<usize>,
    has_cursor: bool,
) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let title = Span::styled(format!(" {title} "), if has_cursor { bold } else { Style::new() });
    let block = Block::new().borders(Borders::TOP | Borders::BOTTOM).title(title);
    let cursor = if has_cursor { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
    let table = Table::new(rows, widths).header(Row::new(heads).style(bold)).block(block).row_highlight_style(cursor);
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(row));
}

fn cells(texts: &[String], columns: &[&str]) -> Vec<Cell<'static>> {
    let cell = |(at, text): (usize, &String)| {
        let side = if is_number(at, columns) { Alignment::Right } else { Alignment::Left };
        Cell::from(Line::from(text.clone()).alignment(side))
    };
    texts.iter().enumerate().map(cell).collect()
}

/// A thread's time, part by part.
fn bar(thread: &ThreadRates) -> Line<'static> {
    let shares = [thread.work, thread.found, thread.wasted, 1.0];
    let (mut until, mut spans, mut drawn) = (0.0, Vec::new(), 0);
    for (share, (symbol, color, _)) in shares.into_iter().zip(PARTS) {
        until += share;
        let end = ((until * BAR as f64).round() as usize).clamp(drawn, BAR);
        spans.push(Span::styled(symbol.repeat(end - drawn), Style::new().fg(color)));
        drawn = end;
    }
    Line::from(spans)
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::top::rates::{rates, tests::snapshot};

    fn picture(width: u16, height: u16, view: &View) -> Vec<String> {
        let rates = rates(&snapshot(1), &snapshot(2));
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, "/run/qmp", &rates, view)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    #[test]
    fn threads_are_above_exports_and_keys_below() {
        let lines = picture(120, 16, &View::default());
        assert!(lines[0].ends_with("/run/qmp   21000 IOPS  86.0 MB/s"), "{}", lines[0]);
        assert!(lines[2].starts_with(" I/O threads ─"), "{}", lines[2]);
        assert!(lines[4].ends_with("██████▓▓▓▓▓░········"), "{}", lines[4]);
        assert!(lines[4].starts_with("io0       low-regret             50.0      12.0   30.0    25.0"), "{}", lines[4]);
        assert!(lines[6].starts_with(" exports, by IOPS ─"), "{}", lines[6]);
        assert!(lines[8].starts_with("e1 ") && lines[9].starts_with("e0 "), "{lines:#?}");
        assert!(lines[15].starts_with("q quit"), "{}", lines[15]);
    }

    #[test]
    fn queues_take_the_place_of_exports_and_what_was_said_that_of_silence() {
        let mut view = View::default();
        (view.export, view.said) = (Some("e0".into()), "no such policy".into());
        let lines = picture(100, 16, &view);
        assert!(lines[6].starts_with(" queues of e0, by IOPS "), "{}", lines[6]);
        assert!(lines.iter().any(|line| line.starts_with("e0 0 ")), "{lines:#?}");
        assert!(lines[15].starts_with("no such policy   q quit"), "{}", lines[15]);
    }

    #[test]
    fn no_terminal_is_too_small() {
        for (width, height) in [(1, 1), (10, 3), (40, 5), (300, 100)] {
            assert_eq!(picture(width, height, &View::default()).len(), usize::from(height));
        }
    }
}
