"use strict";
// Draws the curves of a run. All charts share one horizontal range and one cursor.

const { charts, clock } = JSON.parse(document.getElementById("data").textContent);
const MARGIN = { left: 58, right: 14, top: 8, bottom: 38 };
const INSET = 6; // pixels between an end of the range and the edge: points there stay whole
const NARROWEST = 1e-3; // of the whole range
const MANY = 100; // points from which training curves are smoothed at first
const DOTS = 40; // points up to which each is marked
const FEW = 3; // points up to which the marks are large
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
const view = { byTime: false, range: null, cursor: null, smoothing: 0 };
const tools = Object.fromEntries(
  ["smoothing", "smoothing-value", "axis", "zoom-in", "zoom-out", "reset", "charts"].map((id) => [
    id, document.getElementById(id),
  ]),
);

// -- numbers and times
function number(value) {
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-4)) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

function duration(seconds) {
  const whole = Math.round(seconds);
  const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]].map(([size, unit], i, sizes) => [
    Math.floor((i ? whole % sizes[i - 1][0] : whole) / size), unit,
  ]);
  const first = parts.findIndex(([count]) => count > 0);
  if (first < 0) return "0s";
  const shown = parts.slice(first, first + 2).filter(([count], i) => i === 0 || count > 0);
  return shown.map(([count, unit]) => count + unit).join("");
}

const least = (values) => values.reduce((a, b) => Math.min(a, b));
const most = (values) => values.reduce((a, b) => Math.max(a, b));
const position = (x) => (view.byTime ? duration(x) : number(Math.round(x)));

/** Seconds of training until a step, between the steps that the log has times of. */
function seconds(step) {
  const after = clock.findIndex((point) => point[0] >= step);
  if (after < 0) return clock.length ? clock[clock.length - 1][1] : 0;
  const [end, [start, from]] = [clock[after], after ? clock[after - 1] : [0, 0]];
  return from + ((end[1] - from) * (step - start)) / (end[0] - start || 1);
}

// -- scales
function ticks([low, high], count, isTime) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const decimal = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const step = (isTime && SECONDS.find((s) => s >= rough)) || decimal;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function logTicks([low, high], count) {
  const decades = Math.log10(high / low);
  const each = Math.ceil(decades / count);
  const found = [];
  for (let e = Math.floor(Math.log10(low)); 10 ** e <= high; e += 1)
    for (const m of decades < 3 ? [1, 2, 5] : [1])
      if (e % each === 0 && m * 10 ** e >= low && m * 10 ** e <= high) found.push(m * 10 ** e);
  return found.length > 1 ? found : ticks([low, high], count);
}

function scale([low, high], [from, to], log) {
  const f = log ? Math.log : (v) => v;
  const factor = (to - from) / (f(high) - f(low));
  return (value) => from + (f(value) - f(low)) * factor;
}

/** A range with some room around it; never empty. */
function padded(low, high, log, zero) {
  if (zero && !log && low >= 0) return [0, high * 1.05 || 1];
  if (log) return high > low ? [low / (high / low) ** 0.05, high * (high / low) ** 0.05] : [low / 2, high * 2];
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// -- the horizontal range, of all charts
function place() {
  for (const chart of charts)
    for (const series of chart.series)
      series.xs = series.points.map(([step]) => (view.byTime ? seconds(step) : step));
  const ends = charts.flatMap((c) => c.series.flatMap((s) => [s.xs[0], s.xs[s.xs.length - 1]]));
  // From the start of the run, but not far from what a run that started elsewhere has.
  const high = most(ends);
  const low = least(ends) * 2 > high ? least(ends) : 0;
  view.all = high > low ? [low, high] : [low - 1, high + 1];
}

const range = () => view.range || view.all;

function zoom(low, high) {
  const [first, last] = view.all;
  const [from, to] = [Math.max(first, low), Math.min(last, high)];
  if (to - from < (last - first) * NARROWEST) return;
  view.range = from <= first && to >= last ? null : [from, to];
  drawAll();
}

function zoomBy(factor) {
  const [low, high] = range();
  const inside = view.cursor !== null && view.cursor >= low && view.cursor <= high;
  const middle = inside ? view.cursor : (low + high) / 2;
  zoom(middle - (middle - low) * factor, middle + (high - middle) * factor);
}

// -- drawing
function element(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

/** The points in the range, and one more on either side: [x, value, low, high]. */
function visible(series) {
  const [low, high] = range();
  const first = series.xs.findIndex((x) => x >= low);
  const past = series.xs.findIndex((x) => x > high);
  if (first < 0) return [];
  return series.points
    .map(([, value, low = value, high = value], i) => [series.xs[i], value, low, high])
    .slice(Math.max(0, first - 1), past < 0 ? undefined : past + 1);
}

/** Exponential moving average of all values, without the bias towards its start. */
function smoothed(series) {
  let [sum, weight] = [0, 0];
  return series.points.map(([, value]) => {
    sum = sum * view.smoothing + value * (1 - view.smoothing);
    weight = weight * view.smoothing + (1 - view.smoothing);
    return sum / weight;
  });
}

const path = (points, x, y) =>
  points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");

function draw(chart) {
  const { svg } = chart;
  const { width, height } = svg.getBoundingClientRect();
  const size = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const shown = chart.series.map(visible);
  const lows = shown.flatMap((points) => points.map((p) => p[2]));
  const highs = shown.flatMap((points) => points.map((p) => p[3]));
  const log = chart.log && lows.length > 0;
  const yRange = lows.length ? padded(least(lows), most(highs), log, chart.zero) : [0, 1];
  chart.x = scale(range(), [INSET, size[0] - INSET]);
  const y = scale(yRange, [size[1], 0], log);
  const outer = element(svg, "g", { transform: `translate(${MARGIN.left} ${MARGIN.top})` });
  const marks = log ? logTicks(yRange, 5) : ticks(yRange, 5);
  axes(outer, chart.x, y, size, chart.whole ? marks.filter(Number.isInteger) : marks);
  // A nested svg cuts off what lies outside.
  chart.plot = element(outer, "svg", { width: size[0], height: size[1] });
  chart.series.forEach((series, i) => curve(chart.plot, series, shown[i], i, chart.x, y));
  chart.cursor = element(chart.plot, "line", { class: "cursor", y1: 0, y2: size[1], visibility: "hidden" });
  chart.selected = element(chart.plot, "rect", { class: "selected", y: 0, height: size[1], width: 0 });
  point(chart);
}

function axes(parent, x, y, [width, height], yTicks) {
  for (const value of yTicks) {
    element(parent, "line", { class: "grid", x1: 0, x2: width, y1: y(value), y2: y(value) });
    element(parent, "text", { x: -8, y: y(value) + 4, "text-anchor": "end" }, number(value));
  }
  const count = Math.max(4, Math.floor(width / 70));
  for (const value of ticks(range(), count, view.byTime)) {
    if (!view.byTime && !Number.isInteger(value)) continue;
    element(parent, "line", { class: "grid", x1: x(value), x2: x(value), y1: height, y2: height + 4 });
    const anchor = x(value) > width - 20 ? "end" : "middle";
    element(parent, "text", { x: x(value), y: height + 17, "text-anchor": anchor }, position(value));
  }
  const name = view.byTime ? "training time" : "optimizer step";
  element(parent, "text", { class: "axis", x: width / 2, y: height + 33, "text-anchor": "middle" }, name);
}

function curve(parent, series, points, index, x, y) {
  const group = element(parent, "g", { class: `c${index % 6}` });
  if (points.some(([, , low, high]) => low !== high)) {
    const upper = points.map(([a, , , high]) => [a, high]);
    const lower = points.map(([a, , low]) => [a, low]).reverse();
    element(group, "path", { class: "band", d: `${path([...upper, ...lower], x, y)}Z` });
  }
  const smooth = series.smooth && view.smoothing > 0;
  const kind = series.dashed ? "curve dashed" : "curve";
  element(group, "path", { class: smooth ? "curve raw" : kind, d: path(points, x, y) });
  if (smooth) {
    const values = smoothed(series).map((value, i) => [series.xs[i], value]);
    element(group, "path", { class: "curve", d: path(values, x, y) });
  } else if (points.length <= DOTS && !series.dashed) {
    const r = points.length <= FEW ? 4 : 2.5;
    for (const [a, b] of points) element(group, "circle", { cx: x(a), cy: y(b), r });
  }
}

/** The cursor's line, and the values there; the last ones where there is no cursor. */
function point(chart) {
  const at = view.cursor ?? range()[1];
  const shown = view.cursor !== null && chart.cursor;
  if (chart.cursor) chart.cursor.setAttribute("visibility", shown ? "visible" : "hidden");
  if (shown) for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.x(at));
  const place = document.createElement("b");
  place.textContent = view.byTime ? `at ${duration(at)}` : `step ${number(Math.round(at))}`;
  chart.values.replaceChildren(place);
  chart.series.forEach((series, i) => {
    const nearest = nearestIndex(series.xs, at);
    const [, value, low, high] = series.points[nearest];
    const item = chart.values.appendChild(document.createElement("span"));
    item.className = `c${i % 6}`;
    const between = low === undefined ? "" : ` (${number(low)} to ${number(high)})`;
    item.textContent = `${series.label} ${number(value)}${between}`;
  });
}

const nearestIndex = (xs, at) =>
  xs.reduce((best, x, i) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? i : best), 0);

function drawAll() {
  charts.forEach(draw);
}

function moveTo(x) {
  view.cursor = x;
  charts.forEach(point);
}

// -- what the reader does
function listen(chart) {
  const { svg } = chart;
  let start = null;
  const inPlot = (event) => {
    const [low, high] = range();
    const box = svg.getBoundingClientRect();
    const x = event.clientX - box.left - MARGIN.left - INSET;
    const share = x / (box.width - MARGIN.left - MARGIN.right - 2 * INSET);
    return low + Math.min(1, Math.max(0, share)) * (high - low);
  };
  svg.addEventListener("pointerdown", (event) => {
    start = inPlot(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    moveTo(inPlot(event));
    if (start === null) return;
    const [from, to] = [start, view.cursor].map(chart.x).sort((a, b) => a - b);
    chart.selected.setAttribute("x", from);
    chart.selected.setAttribute("width", to - from);
  });
  svg.addEventListener("pointerup", (event) => {
    const ends = [start, inPlot(event)].sort((a, b) => a - b);
    start = null;
    chart.selected.setAttribute("width", 0);
    if (chart.x(ends[1]) - chart.x(ends[0]) > 5) zoom(...ends);
  });
  svg.addEventListener("pointercancel", () => { start = null; chart.selected.setAttribute("width", 0); });
  svg.addEventListener("pointerleave", () => moveTo(null));
  svg.addEventListener("blur", () => moveTo(null));
  svg.addEventListener("dblclick", showAll);
  svg.addEventListener("keydown", (event) => {
    const action = KEYS[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action(chart.series[0].xs);
  });
}

function showAll() {
  view.range = null;
  drawAll();
}

/** To the next point of a series in the range, in a direction. */
function stepTo(xs, by) {
  const inside = xs.filter((x) => x >= range()[0] && x <= range()[1]);
  if (!inside.length) return;
  const now = view.cursor === null ? (by > 0 ? -1 : inside.length) : nearestIndex(inside, view.cursor);
  moveTo(inside[Math.min(inside.length - 1, Math.max(0, now + by))]);
}

const KEYS = {
  ArrowLeft: (xs) => stepTo(xs, -1),
  ArrowRight: (xs) => stepTo(xs, 1),
  PageUp: (xs) => stepTo(xs, -20),
  PageDown: (xs) => stepTo(xs, 20),
  Home: (xs) => stepTo(xs, -Infinity),
  End: (xs) => stepTo(xs, Infinity),
  "+": () => zoomBy(0.5),
  "=": () => zoomBy(0.5),
  "-": () => zoomBy(2),
  0: showAll,
  Escape: showAll,
};

function build(chart) {
  const figure = tools.charts.appendChild(document.createElement("figure"));
  const header = figure.appendChild(document.createElement("header"));
  const title = header.appendChild(document.createElement("h3"));
  title.textContent = chart.title;
  if (chart.unit) title.appendChild(document.createElement("small")).textContent = `, ${chart.unit}`;
  chart.positive = chart.series.every((s) => s.points.every(([, value, low = value]) => low > 0));
  chart.whole = chart.series.every((s) => s.points.every(([, value]) => Number.isInteger(value)));
  if (chart.positive) {
    const label = header.appendChild(document.createElement("label"));
    label.className = "log-scale";
    const box = label.appendChild(document.createElement("input"));
    Object.assign(box, { type: "checkbox", checked: chart.log });
    label.append(" log scale");
    box.addEventListener("change", () => { chart.log = box.checked; draw(chart); });
  }
  chart.values = figure.appendChild(document.createElement("output"));
  chart.values.className = "values";
  const names = chart.series.map((series) => series.label).join(", ");
  chart.svg = element(figure, "svg", { class: "chart", tabindex: 0, role: "application", "aria-roledescription": "chart",
    "aria-label": `${chart.title}: ${names}. Arrow keys read values, + and - zoom, 0 shows all steps.` });
  listen(chart);
}

function smooth() {
  view.smoothing = Number(tools.smoothing.value);
  tools["smoothing-value"].textContent = view.smoothing.toFixed(2);
}

tools.smoothing.addEventListener("input", () => { smooth(); drawAll(); });
tools.axis.addEventListener("change", () => {
  Object.assign(view, { byTime: tools.axis.value === "time", range: null, cursor: null });
  place();
  drawAll();
});
tools["zoom-in"].addEventListener("click", () => zoomBy(0.5));
tools["zoom-out"].addEventListener("click", () => zoomBy(2));
tools.reset.addEventListener("click", showAll);

const many = charts.some((c) => c.series.some((s) => s.smooth && s.points.length > MANY));
tools.smoothing.value = many ? 0.6 : 0;
smooth();
charts.forEach(build);
place();
new ResizeObserver(drawAll).observe(tools.charts);
drawAll();
