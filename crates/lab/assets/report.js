// Draws the report's charts, and answers the reader's constraints. Everything else was computed when it was written.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const charts = new Map();
const byId = id => document.getElementById(id);
const narrow = () => innerWidth < 640;
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = subject => style("--c" + Math.max(0, data.subjects.indexOf(subject)) % 8);

function escaped(text) {
  return String(text).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

// As Rust's figure().
function figure(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + " M";
  return size >= 1e4 ? +(value / 1e3).toPrecision(3) + " k" : String(+value.toPrecision(3));
}

// As Rust's runs_of().
const runsOf = (load, subject) => "#runs-" + `${load}--${subject}`.replace(/[^\p{Alphabetic}\p{N}]/gu, "-").replace(/[A-Z]/g, letter => letter.toLowerCase());

// What all charts have in common.
function base() {
  const ink = style("--ink"), quiet = style("--quiet");
  return {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: ink },
    tooltip: {
      confine: true, backgroundColor: style("--card"), borderColor: style("--line"), padding: [8, 12],
      textStyle: { color: ink, fontSize: 13 }, extraCssText: "box-shadow:0 4px 16px rgba(0,0,0,.18);border-radius:8px",
    },
    legend: { type: "scroll", bottom: 0, icon: "roundRect", itemWidth: 14, itemHeight: 8, textStyle: { color: quiet }, pageTextStyle: { color: quiet }, pageIconColor: quiet },
  };
}

function axis(name, more) {
  const quiet = style("--quiet");
  return {
    type: "value", name, nameLocation: "middle", nameGap: 30, nameTextStyle: { color: quiet },
    axisLabel: { color: quiet, formatter: short, hideOverlap: true }, axisLine: { lineStyle: { color: style("--line") } },
    splitLine: { lineStyle: { color: style("--grid") } }, axisTick: { show: false }, ...more,
  };
}

// What is clicked leads to its runs: `at` says whose they are, load and subject.
function draw(element, height, option, at) {
  element.style.height = height + "px";
  let chart = charts.get(element);
  if (!chart) charts.set(element, chart = echarts.init(element, null, { renderer: "svg" }));
  chart.resize();
  chart.setOption(option, true);
  chart.off("click");
  chart.on("click", clicked => { const whose = at(clicked); if (whose) location.hash = runsOf(...whose); });
  return chart;
}

const shortened = (text, limit) => text.length > limit ? text.slice(0, limit - 1) + "…" : text;

// Rows of bars, a heading above each group; the whole range as whiskers, and what the host reaches as a line across.
function bars(element, shown) {
  const rows = [], across = [];
  for (const group of shown.groups) {
    const heading = "g" + rows.length;
    rows.push({ key: heading, heading: group.load });
    for (const mark of group.marks) rows.push({ key: "b" + rows.length, mark, load: group.load });
    for (const { subject, value } of group.marks)
      if (value && data.hosts.includes(subject)) across.push([value.median, heading], [value.median, rows.at(-1).key], ["-", heading]);
  }
  const cut = text => shortened(text, narrow() ? 15 : 36);
  const label = (_, index) => rows[index].heading ? `{heading|${rows[index].heading}}` : cut(rows[index].mark.subject);
  const whiskers = rows.flatMap(row => row.mark?.value ? [[row.mark.value.low, row.key], [row.mark.value.high, row.key], ["-", row.key]] : []);
  const quiet = style("--quiet"), ink = style("--ink");
  const value = row => row.mark?.value ? {
    value: row.mark.value.median,
    itemStyle: { color: colour(row.mark.subject), opacity: row.mark.note ? .45 : 1, borderRadius: [0, 3, 3, 0] },
    label: { show: false },
  } : { value: 0, label: { show: !!row.mark, formatter: () => `{none|${shortened(row.mark.note || "not measured", narrow() ? 28 : 110)}}` } };
  const most = Math.max(0, ...rows.map(row => row.mark?.value?.high || 0));
  draw(element, 54 + 27 * rows.length, {
    ...base(), legend: undefined,
    tooltip: { ...base().tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: points => tip(shown, rows[points[0].dataIndex]) },
    grid: { left: 4, right: narrow() ? 52 : 80, top: 4, bottom: 36, containLabel: true },
    xAxis: axis(shown.label, { max: most > 0 ? undefined : 1, min: 0 }),
    yAxis: {
      type: "category", inverse: true, data: rows.map(row => row.key), axisTick: { show: false }, axisLine: { show: false },
      axisLabel: { interval: 0, formatter: label, color: ink, rich: { heading: { color: quiet, fontWeight: 600, fontSize: 12 } } },
    },
    series: [
      { type: "bar", barWidth: 15, data: rows.map(value), label: { position: "right", rich: { none: { color: quiet, fontStyle: "italic" } } } },
      { type: "line", data: whiskers, symbol: "rect", symbolSize: [1.5, 9], lineStyle: { color: ink, width: 1.5 }, itemStyle: { color: ink }, silent: true, tooltip: { show: false }, z: 3, connectNulls: false },
      { type: "line", name: "the host", data: across, symbol: "none", lineStyle: { color: quiet, width: 1, type: "dashed" }, silent: true, tooltip: { show: false }, connectNulls: false },
      { type: "scatter", symbolSize: 1, itemStyle: { color: "transparent" }, silent: true,
        data: rows.filter(row => row.mark?.value).map(row => ({ value: [row.mark.value.high, row.key], label: { show: true, position: "right", distance: 7, color: ink, formatter: short(row.mark.value.median) } })) },
    ],
  }, ({ seriesType, dataIndex }) => seriesType === "bar" && rows[dataIndex].mark && [rows[dataIndex].load, rows[dataIndex].mark.subject]);
}

// As Rust's differences(); null is infinite.
function differences([ratio, low, high]) {
  const percent = value => (value >= 1 ? "+" : "−") + Math.abs((value - 1) * 100).toFixed(1) + " %";
  const times = value => "×" + value.toFixed(2);
  const form = low >= 2 || ratio >= 2 || high >= 3 ? times : percent;
  const text = value => value == null ? "∞" : form(value);
  return `${text(ratio)} to the baseline [${text(low)}, ${text(high)}]`;
}

function tip(shown, row) {
  if (row.heading) return escaped(row.heading);
  const { mark } = row;
  const lines = [`<b>${escaped(mark.subject)}</b>`];
  if (mark.value) lines.push(`${figure(mark.value.median)} ${shown.unit}, median of ${mark.value.count}`, `range ${figure(mark.value.low)} … ${figure(mark.value.high)}`);
  if (mark.tail) lines.push(["p99", "p99.9"].map((name, index) => mark.tail[index] == null ? "" : `${name} ${figure(mark.tail[index])} µs`).filter(Boolean).join(", "));
  if (mark.ratio) lines.push(differences(mark.ratio));
  if (mark.note) lines.push(`<i>${escaped(mark.note)}</i>`);
  return lines.join("<br>");
}

const dashes = ["solid", "dashed", "dotted"];

// Lines: a curve over what was reached, a ladder over what there is in number.
function lines(element, shown) {
  const loads = [...new Set(shown.groups.map(group => group.load))];
  const names = [...new Set(shown.groups.map(group => group.line))];
  const hue = line => data.subjects.includes(line) ? colour(line) : style("--c" + names.indexOf(line) % 8);
  const line = group => ({
    name: group.line, symbolSize: 7, emphasis: { focus: "series" }, color: hue(group.line), itemStyle: { color: hue(group.line) },
    lineStyle: { type: dashes[loads.indexOf(group.load) % 3], width: 2 },
  });
  const points = (group, closed) => group.marks.filter(mark => mark.value && mark.x != null && (shown.form === "curve" && mark.closed) === closed)
    .map(mark => ({ value: [mark.x, mark.value.median], mark, load: mark.load ?? group.load }));
  const series = shown.groups.flatMap(group => [
    { ...line(group), type: "line", data: points(group, false) },
    // A closed loop waits for itself: its latency is not on the line of the open ones.
    { ...line(group), type: "scatter", symbol: "diamond", symbolSize: 12, data: points(group, true) },
  ]).filter(one => one.data.length);
  const values = series.flatMap(one => one.data.map(point => point.value[1]));
  const end = shown.zoom && Math.min(...values) * shown.zoom;
  const wide = !end && shown.form === "curve" && Math.max(...values) > 20 * Math.min(...values);
  const slider = {
    type: "slider", filterMode: "none", showDataShadow: false, brushSelect: false, borderColor: style("--line"), backgroundColor: "transparent",
    fillerColor: style("--accent") + "22", moveHandleSize: 0, handleStyle: { color: style("--card"), borderColor: style("--accent") }, textStyle: { color: style("--quiet") },
  };
  const ladder = shown.form === "ladder";
  draw(element, narrow() ? 340 : 420, {
    ...base(),
    tooltip: { ...base().tooltip, trigger: "item", formatter: point => `${tip(shown, { mark: { ...point.data.mark, subject: `${point.seriesName} · ${point.data.load}` } })}<br>at ${figure(point.value[0])} ${escaped(shown.across)}` },
    grid: { left: 12, right: 24, top: 24, bottom: 100, containLabel: true },
    xAxis: axis(shown.across, ladder ? { minInterval: 1, scale: true } : {}),
    yAxis: axis(shown.label, { type: wide ? "log" : "value", max: end || undefined, nameLocation: "end", nameGap: 8, nameTextStyle: { color: style("--quiet"), align: "left" } }),
    dataZoom: [
      { type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl" },
      { ...slider, bottom: 34, height: 16, labelFormatter: short },
      { ...slider, yAxisIndex: 0, right: 0, width: 14, showDetail: false },
    ],
    series,
  }, ({ data }) => [data.load, data.mark.subject]);
}

function ledger(element) {
  const rows = data.ledgers.map((one, index) => ({ ...one, key: String(index) }));
  const stacked = data.parts.slice(0, -1).map((name, index) => ({ name, index })).filter(part => rows.some(row => row.parts[part.index] != null));
  const quiet = style("--quiet"), ink = style("--ink");
  const name = row => shortened(row.subject, narrow() ? 14 : 30);
  const first = index => index === 0 || rows[index - 1].load !== rows[index].load;
  const hues = [0, 2, 4, 5, 3, 0, 6, 8, 1, 7];
  const hue = part => part.name === "unaccounted" ? style("--line") : part.name === "the load" ? quiet : style("--c" + hues[part.index]);
  const other = data.parts.indexOf("unaccounted"), all = data.parts.length - 1;
  const dwarfs = rows.some(row => row.parts[other] > row.parts[all] / 2);
  draw(element, 110 + 36 * rows.length, {
    ...base(), legend: { ...base().legend, selected: { unaccounted: !dwarfs } },
    tooltip: { ...base().tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: points => {
      const row = rows[points[0].dataIndex];
      const parts = stacked.filter(part => row.parts[part.index] != null).map(part => `<span class="swatch" style="background:${hue(part)}"></span>${escaped(part.name)}: ${row.parts[part.index].toFixed(2)} µs`);
      return [`<b>${escaped(row.subject)}</b>, ${escaped(row.load)}`, ...parts].join("<br>");
    } },
    grid: { left: 4, right: 24, top: 8, bottom: 74, containLabel: true },
    xAxis: axis("CPU time per I/O, µs", { min: 0 }),
    yAxis: {
      type: "category", inverse: true, data: rows.map(row => row.key), axisTick: { show: false }, axisLine: { show: false },
      axisLabel: { interval: 0, color: ink, formatter: (_, index) => (first(index) ? `{load|${rows[index].load}}\n` : "") + name(rows[index]), rich: { load: { color: quiet, fontWeight: 600, fontSize: 11 } }, lineHeight: 15 },
    },
    series: stacked.map(part => ({ name: part.name, type: "bar", stack: "all", barWidth: 15, itemStyle: { color: hue(part) }, data: rows.map(row => row.parts[part.index] ?? "-") })),
  }, ({ dataIndex }) => [rows[dataIndex].load, rows[dataIndex].subject]);
}

// The reader's constraints.
const chosen = { workload: null, cores: Infinity, latency: Infinity };

// A slider's place, 0 to 100, on a logarithmic scale from the least to the most that was measured.
function onScale(points, key, place) {
  const values = points.map(point => point[key]);
  const least = Math.min(...values), most = Math.max(...values);
  return place >= 100 ? Infinity : least * Math.pow(most / least, place / 100) * 1.0001;
}

// The fastest first. At a rate that both reach how many there were is chance: then whose latency is lower.
const speed = point => point.rate ?? point.iops;
const bySpeed = (a, b) => speed(b) - speed(a) || a.latency - b.latency;

function constrain() {
  const points = data.points.filter(point => point.workload === chosen.workload);
  chosen.cores = onScale(points, "cpus", +byId("cores").value);
  chosen.latency = onScale(points, "latency", +byId("latency").value);
  byId("cores-shown").value = chosen.cores === Infinity ? "any" : "up to " + figure(chosen.cores);
  byId("latency-shown").value = chosen.latency === Infinity ? "any" : "up to " + figure(chosen.latency) + " µs";
  const fits = point => point.cpus <= chosen.cores && point.latency <= chosen.latency;
  const best = data.subjects.map(subject => points.filter(point => point.subject === subject && fits(point)).sort(bySpeed)[0]);
  recommend(best.filter(Boolean).sort(bySpeed));
  front(points, fits);
}

// Whether two points are known to be alike in speed, or known not to be; of different loads there are no pairs.
function areAlike(a, b) {
  const same = a.load === b.load && a.point === 0 && b.point === 0;
  return same ? data.relations.find(one => one.load === a.load && one.options.includes(a.subject) && one.options.includes(b.subject))?.alike : undefined;
}

// Whether one's p99 is known to be better than another's.
function hasBetterTail(one, other) {
  return one.load === other.load && one.point === other.point
    && data.tails.some(known => known.load === one.load && known.point === one.point && known.better === one.subject && known.worse === other.subject);
}

function recommend(fastest) {
  // Of those that are alike the first leads whose tail nobody's among them is known to be better than.
  const peers = fastest.filter((point, index) => !index || areAlike(fastest[0], point));
  const top = peers.find(point => !peers.some(other => hasBetterTail(other, point))) ?? fastest[0];
  const best = [top, ...fastest.filter(point => point !== top)].filter(Boolean), table = byId("recommended");
  table.hidden = !top;
  // One measurement has no range.
  const isOne = point => point.iops_range[0] === point.iops_range[1];
  const overlaps = point => isOne(point) || isOne(top) || point.iops_range[1] >= top.iops_range[0];
  const alike = best.slice(1).filter(point => areAlike(top, point) && !hasBetterTail(top, point));
  const shorter = best.slice(1).filter(point => hasBetterTail(point, top));
  const close = best.slice(1).filter(point => areAlike(top, point) === undefined && overlaps(point));
  const names = points => points.map(point => escaped(point.subject)).join(", ");
  byId("answer").innerHTML = !top ? "Nothing that was measured fits. Spend more CPUs, or allow more latency."
    : `${close.length ? "Perhaps" : "Choose"} <b>${escaped(top.subject)}</b>${shorter.length ? `, or ${names(shorter)} for p99` : ""}: ${figure(top.iops)} IOPS at ${figure(top.latency)} µs, with ${figure(top.cpus)} CPUs.`
      + (alike.length ? ` No meaningful difference: ${names(alike)}.` : "") + (close.length ? ` Can’t tell, as ranges overlap or are not known: ${names(close)}.` : "");
  table.tBodies[0].innerHTML = best.map((point, index) => `<tr${index ? "" : ' class="best"'}>
    <td><span class="swatch" style="background:${colour(point.subject)}"></span><a class="trace" href="${runsOf(point.load, point.subject)}">${escaped(point.subject)}</a></td>
    ${[point.iops, point.latency, point.p99, point.p999, point.cpus, point.cpu_per_io].map(value => `<td class="number">${value == null ? "–" : figure(value)}</td>`).join("")}
    <td>${escaped(point.load)}${point.point ? ", point " + point.point : ""}${point.limit ? ", " + escaped(point.limit) : ""}</td></tr>`).join("");
}

function front(points, fits) {
  const most = Math.max(...points.map(point => point.cpus));
  const size = point => 9 + 22 * Math.sqrt(point.cpus / most);
  const series = data.subjects.map(subject => ({
    name: subject, type: "scatter", color: colour(subject), itemStyle: { color: colour(subject) },
    data: points.filter(point => point.subject === subject).map(point => ({
      value: [point.iops, point.latency], point, symbolSize: size(point),
      itemStyle: { opacity: fits(point) ? .85 : .15, borderColor: point.on_front ? style("--ink") : "transparent", borderWidth: 2 },
    })),
  })).filter(one => one.data.length);
  const wide = key => Math.max(...points.map(point => point[key])) > 20 * Math.min(...points.map(point => point[key]));
  draw(byId("front"), narrow() ? 320 : 380, {
    ...base(),
    tooltip: { ...base().tooltip, trigger: "item", formatter: ({ data: { point } }) => `<b>${escaped(point.subject)}</b><br>${escaped(point.load)}${point.point ? ", point " + point.point : ""}<br>${figure(point.iops)} IOPS, ${figure(point.latency)} µs${point.p99 == null ? "" : `, p99 ${figure(point.p99)} µs`}${point.p999 == null ? "" : `, p99.9 ${figure(point.p999)} µs`}<br>${figure(point.cpus)} CPUs, ${figure(point.cpu_per_io)} µs per I/O` },
    grid: { left: 12, right: 24, top: 32, bottom: 76, containLabel: true },
    xAxis: axis("IOPS", { type: wide("iops") ? "log" : "value", scale: true }),
    yAxis: axis("mean latency, µs", { type: wide("latency") ? "log" : "value", nameLocation: "end", nameGap: 10, nameTextStyle: { color: style("--quiet"), align: "left" } }),
    series,
  }, ({ data: { point } }) => [point.load, point.subject]);
}

function drawAll() {
  for (const element of document.querySelectorAll("[data-figure]")) {
    const shown = data.figures.find(one => one.anchor === element.dataset.figure);
    if (shown.groups.length) (shown.form === "bars" ? bars : lines)(element, shown);
  }
  if (byId("ledger")) ledger(byId("ledger"));
  if (byId("constraints")) constrain();
}

function start() {
  if (byId("constraints")) {
    const workloads = [...new Set(data.points.map(point => point.workload))];
    byId("workload").innerHTML = workloads.map(name => `<option>${escaped(name)}</option>`).join("");
    chosen.workload = workloads[0];
    byId("workload").addEventListener("change", event => { chosen.workload = event.target.value; constrain(); });
    for (const id of ["cores", "latency"]) byId(id).addEventListener("input", constrain);
    document.querySelector(".controls").hidden = false;
  }
  drawAll();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // Paper is light.
  const paper = is => () => { document.documentElement.classList.toggle("paper", is); drawAll(); };
  addEventListener("beforeprint", paper(true));
  addEventListener("afterprint", paper(false));
}

start();
