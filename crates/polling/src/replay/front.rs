//! CPU against latency, drawn.

use std::fmt::{self, Display, Write as _};

use super::{Contender, Row};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
/// The plot within the picture; the legend is to its right.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 500.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 380.0;
/// Dots nearer to each other than this share a label.
const APART: f64 = 30.0;

/// Draws one trace's rows as an SVG picture: CPU per wait to the right, added latency per wait upwards, both better
/// towards the corner.
///
/// `rows` are what [`replay`](super::replay) gave for one trace and setting. `fixed`, from
/// [`fixed_windows`](super::fixed_windows), is the line that every fixed window lies on; a policy below it has learned
/// something.
pub fn front_svg(rows: &[Row], fixed: &[Row]) -> String {
    let mut svg = String::new();
    draw(&mut svg, rows, fixed).expect("a String takes whatever is written to it");
    svg
}

fn draw(svg: &mut String, rows: &[Row], fixed: &[Row]) -> fmt::Result {
    let all = || rows.iter().chain(fixed);
    let x = LogAxis::around(all().map(Row::cpu_us_per_wait));
    let y = LinearAxis::around(all().map(Row::latency_us_per_wait));
    let place = |row: &Row| (x.place(row.cpu_us_per_wait()), y.place(row.latency_us_per_wait()));

    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    )?;
    if let Some(row) = rows.first() {
        let title = format!(
            "{}: K = {} us at price {}, poll-max-ns {}",
            row.trace,
            row.k_ns as f64 / 1_000.0,
            row.price,
            row.poll_max_ns.map_or_else(|| "unset".to_owned(), |max| max.to_string())
        );
        text(svg, (LEFT, 28.0), "start", "font-size=\"15\"", &title)?;
    }
    axes(svg, &x, &y)?;

    let line: Vec<_> = fixed.iter().map(place).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"#999\" stroke-dasharray=\"4 3\"/>", line.join(" "))?;

    for row in rows {
        let (x, y) = place(row);
        let colour = colour(row);
        writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>")?;
    }
    for cluster in clusters(rows.iter().map(place)) {
        let numbers: Vec<_> = cluster.iter().map(|(row, _)| (row + 1).to_string()).collect();
        let left = cluster.iter().map(|dot| dot.1.0).fold(f64::MAX, f64::min);
        let top = cluster.iter().map(|dot| dot.1.1).fold(f64::MAX, f64::min);
        let words = numbers.join(" ");
        text(svg, (left + 5.0, top - 7.0), "start", "font-weight=\"bold\"", &words)?;
    }
    legend(svg, rows)?;
    svg.write_str("</svg>\n")
}

fn axes(svg: &mut String, x: &LogAxis, y: &LinearAxis) -> fmt::Result {
    for tick in x.ticks() {
        let at = x.place(tick);
        writeln!(svg, "<path d=\"M{at:.1} {TOP}V{BOTTOM}\" stroke=\"#ddd\"/>")?;
        text(svg, (at, BOTTOM + 18.0), "middle", "", &tick)?;
    }
    for tick in y.ticks() {
        let at = y.place(tick);
        writeln!(svg, "<path d=\"M{LEFT} {at:.1}H{RIGHT}\" stroke=\"#ddd\"/>")?;
        text(svg, (LEFT - 8.0, at + 4.0), "end", "", &tick)?;
    }
    writeln!(svg, "<path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\" fill=\"none\" stroke=\"black\"/>")?;
    let middle = (LEFT + RIGHT) / 2.0;
    text(svg, (middle, BOTTOM + 40.0), "middle", "", &"CPU per wait, us (log scale)")?;
    let middle = (TOP + BOTTOM) / 2.0;
    let turned = format!("transform=\"rotate(-90 20 {middle})\"");
    text(svg, (20.0, middle), "middle", &turned, &"latency added per wait, us")
}

fn legend(svg: &mut String, rows: &[Row]) -> fmt::Result {
    let left = RIGHT + 20.0;
    let mut top = TOP + 10.0;
    text(svg, (left, top), "start", "fill=\"#666\"", &"cost over the offline optimum's")?;
    for (index, row) in rows.iter().enumerate() {
        top += 22.0;
        writeln!(svg, "<circle cx=\"{left}\" cy=\"{:.1}\" r=\"4\" fill=\"{}\"/>", top - 4.0, colour(row))?;
        text(svg, (left + 12.0, top), "start", "", &format_args!("{}  {}", index + 1, row.contender))?;
        text(svg, (WIDTH - 16.0, top), "end", "", &format_args!("{:.2}", row.competitive_ratio))?;
    }
    text(svg, (left, top + 30.0), "start", "fill=\"#666\"", &"- - -  every fixed window")
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, style: &str, words: &dyn Display) -> fmt::Result {
    let words = words.to_string().replace('&', "&amp;").replace('<', "&lt;");
    writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {style}>{words}</text>")
}

fn colour(row: &Row) -> &'static str {
    match row.contender {
        Contender::OfflineOptimum | Contender::BestFixed(_) | Contender::Fixed(_) => "#888",
        Contender::Policy(crate::PolicyKind::LowRegret) => "#d55e00",
        Contender::Policy(_) => "#0072b2",
    }
}

/// A row's number and where its dot is.
type Dot = (usize, (f64, f64));

/// Dots that lie too close for a label each, together.
fn clusters(places: impl Iterator<Item = (f64, f64)>) -> Vec<Vec<Dot>> {
    let mut clusters: Vec<Vec<Dot>> = Vec::new();
    for dot in places.enumerate() {
        let near = |other: &Dot| (other.1.0 - dot.1.0).hypot(other.1.1 - dot.1.1) < APART;
        match clusters.iter_mut().find(|cluster| cluster.iter().any(near)) {
            Some(cluster) => cluster.push(dot),
            None => clusters.push(vec![dot]),
        }
    }
    clusters
}

/// Left to right, in decades.
struct LogAxis {
    low: f64,
    high: f64,
}

impl LogAxis {
    fn around(values: impl Iterator<Item = f64> + Clone) -> Self {
        // A wait cheaper than 10 ns is not worth another decade.
        let low = values.clone().fold(f64::MAX, f64::min).max(0.01);
        let high = values.fold(low, f64::max);
        Self { low: low / 1.3, high: high * 1.3 }
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value.max(self.low) / self.low).ln() / (self.high / self.low).ln();
        LEFT + share * (RIGHT - LEFT)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let decades = -3..=9;
        let (low, high) = (self.low, self.high);
        decades
            .flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(decade)))
            .map(|tick: f64| if tick < 1.0 { (tick * 1_000.0).round() / 1_000.0 } else { tick.round() })
            .filter(move |tick| (low..high).contains(tick))
    }
}

/// Bottom to top, from zero.
struct LinearAxis {
    step: f64,
    high: f64,
}

impl LinearAxis {
    fn around(values: impl Iterator<Item = f64>) -> Self {
        let high = values.fold(0.01, f64::max) * 1.08;
        let decade = 10_f64.powf((high / 5.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|step| step * decade).find(|step| high / step <= 6.0);
        Self { step: step.unwrap_or(high), high }
    }

    fn place(&self, value: f64) -> f64 {
        BOTTOM - value / self.high * (BOTTOM - TOP)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let step = self.step;
        // Rounded for the eye: 0.6 and not 0.6000000000000001.
        (0..=(self.high / step) as u32).map(move |tick| (f64::from(tick) * step * 1e6).round() / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::Builtin;
    use crate::replay::{Setting, fixed_windows, replay};
    use crate::trace::Trace;
    use crate::{BlockCost, Nanos, Parameters, PolicyKind};

    fn picture(name: &str, trace: &Trace) -> String {
        let setting = Setting { block: BlockCost::default(), parameters: Parameters::default() };
        let rows = replay(name, trace, &setting, PolicyKind::ALL).unwrap();
        front_svg(&rows, &fixed_windows(name, trace, &setting))
    }

    #[test]
    fn the_picture_names_its_axes_its_units_and_everybody_in_it() {
        let svg = picture("a<b", &Builtin::Mixture.generate());
        for words in ["a&lt;b", "CPU per wait, us", "latency added per wait, us", "offline-optimum", "low-regret"] {
            assert!(svg.contains(words), "{words}");
        }
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn an_empty_trace_makes_an_empty_picture() {
        let trace = Trace { note: String::new(), block: BlockCost::default(), lost: 0, waits: Vec::new() };
        let svg = picture("empty", &trace);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    /// What somebody spent for each of ten waits, CPU and latency, in microseconds.
    fn row(contender: Contender, cpu: u64, latency: u64) -> Row {
        Row {
            trace: "a&b".to_owned(),
            contender,
            window_ns: None,
            k_ns: 30_000,
            price: 2,
            poll_max_ns: None,
            waits: 10,
            cost_ns: 0,
            competitive_ratio: 1.25,
            against_best_fixed: 1.0,
            spin_found_ns: 0,
            spin_wasted_ns: 0,
            blocks: 0,
            cpu_ns: cpu * 10_000,
            added_latency_ns: latency * 10_000,
            windows: None,
        }
    }

    #[test]
    fn everything_is_drawn_where_it_belongs() {
        let fixed = Contender::Fixed(Nanos(0));
        let rows = [
            row(Contender::OfflineOptimum, 5, 2),
            row(Contender::Policy(PolicyKind::LowRegret), 6, 3),
            row(Contender::Policy(PolicyKind::Off), 12, 18),
        ];
        assert_eq!(front_svg(&rows, &[row(fixed, 12, 18), row(fixed, 30, 0)]), PICTURE);
    }

    /// Three rows, worked out apart from the code.
    const PICTURE: &str = r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 440" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="70.0" y="28.0" text-anchor="start" font-size="15">a&amp;b: K = 30 us at price 2, poll-max-ns unset</text>
<path d="M118.7 50V380" stroke="#ddd"/>
<text x="118.7" y="398.0" text-anchor="middle" >5</text>
<path d="M247.4 50V380" stroke="#ddd"/>
<text x="247.4" y="398.0" text-anchor="middle" >10</text>
<path d="M376.0 50V380" stroke="#ddd"/>
<text x="376.0" y="398.0" text-anchor="middle" >20</text>
<path d="M70 380.0H500" stroke="#ddd"/>
<text x="62.0" y="384.0" text-anchor="end" >0</text>
<path d="M70 295.1H500" stroke="#ddd"/>
<text x="62.0" y="299.1" text-anchor="end" >5</text>
<path d="M70 210.2H500" stroke="#ddd"/>
<text x="62.0" y="214.2" text-anchor="end" >10</text>
<path d="M70 125.4H500" stroke="#ddd"/>
<text x="62.0" y="129.4" text-anchor="end" >15</text>
<path d="M70 50V380H500" fill="none" stroke="black"/>
<text x="285.0" y="420.0" text-anchor="middle" >CPU per wait, us (log scale)</text>
<text x="20.0" y="215.0" text-anchor="middle" transform="rotate(-90 20 215)">latency added per wait, us</text>
<polyline points="281.2,74.4 451.3,380.0" fill="none" stroke="#999" stroke-dasharray="4 3"/>
<circle cx="118.7" cy="346.0" r="4" fill="#888"/>
<circle cx="152.5" cy="329.1" r="4" fill="#d55e00"/>
<circle cx="281.2" cy="74.4" r="4" fill="#0072b2"/>
<text x="123.7" y="339.0" text-anchor="start" font-weight="bold">1</text>
<text x="157.5" y="322.1" text-anchor="start" font-weight="bold">2</text>
<text x="286.2" y="67.4" text-anchor="start" font-weight="bold">3</text>
<text x="520.0" y="60.0" text-anchor="start" fill="#666">cost over the offline optimum's</text>
<circle cx="520" cy="78.0" r="4" fill="#888"/>
<text x="532.0" y="82.0" text-anchor="start" >1  offline-optimum</text>
<text x="744.0" y="82.0" text-anchor="end" >1.25</text>
<circle cx="520" cy="100.0" r="4" fill="#d55e00"/>
<text x="532.0" y="104.0" text-anchor="start" >2  low-regret</text>
<text x="744.0" y="104.0" text-anchor="end" >1.25</text>
<circle cx="520" cy="122.0" r="4" fill="#0072b2"/>
<text x="532.0" y="126.0" text-anchor="start" >3  off</text>
<text x="744.0" y="126.0" text-anchor="end" >1.25</text>
<text x="520.0" y="156.0" text-anchor="start" fill="#666">- - -  every fixed window</text>
</svg>
"##;

    #[test]
    fn ticks_are_round_numbers_on_the_axis() {
        let ticks = |values: &[f64]| LogAxis::around(values.iter().copied()).ticks().collect::<Vec<_>>();
        assert_eq!(ticks(&[0.5, 2.0]), [0.5, 1.0, 2.0]);
        assert_eq!(ticks(&[0.016, 0.2]), [0.02, 0.05, 0.1, 0.2]);
        assert_eq!(ticks(&[0.001]), [0.01], "that is as far as it goes");
        let ticks = |value: f64| LinearAxis::around([value].into_iter()).ticks().collect::<Vec<_>>();
        assert_eq!(ticks(0.0), [0.0, 0.002, 0.004, 0.006, 0.008, 0.01]);
        assert_eq!(ticks(0.6), [0.0, 0.2, 0.4, 0.6]);
        assert_eq!(ticks(40.0), [0.0, 10.0, 20.0, 30.0, 40.0]);
    }

    #[test]
    fn dots_nearer_than_thirty_to_one_of_a_cluster_share_its_label() {
        let places = [(100.0, 100.0), (118.0, 124.0), (117.0, 124.0), (117.0, 153.0), (200.0, 100.0)];
        let numbers: Vec<Vec<_>> = clusters(places.into_iter())
            .into_iter()
            .map(|cluster| cluster.into_iter().map(|(number, _)| number).collect())
            .collect();
        assert_eq!(numbers, [vec![0, 2, 3], vec![1], vec![4]]);
    }
}
