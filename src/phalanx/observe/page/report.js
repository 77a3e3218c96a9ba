"use strict";
const data = JSON.parse(document.getElementById("run-data").textContent);
const root = document.documentElement;
const RANKS = ["#3d7ab8", "#c2693d", "#3f9c7c", "#9a62b3", "#b39a2f", "#c0517f", "#4a8f9f", "#7d7d7d"];
const options = { displayModeBar: false, responsive: true };

const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
let current = 0;
const ofRank = (rank) => RANKS[rank % RANKS.length];
const show = (element, traces, layout) => Plotly.react(element, traces, layout, options);

function layout(extra) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
    margin: { l: 48, r: 12, t: 8, b: 42 }, hoverlabel: { font: { size: 13 } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
  };
  const merged = { ...base, ...extra };
  merged.xaxis = { ...axis, ...(extra.xaxis || {}) };
  merged.yaxis = { ...axis, ...(extra.yaxis || {}) };
  if (merged.xaxis.title) merged.xaxis.title = { ...merged.xaxis.title, standoff: 8, font: { size: 13, color: colour("soft") } };
  return merged;
}

function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 40));
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

/* Curves ------------------------------------------------------------------------------------------------ */
function drawCurves() {
  for (const section of document.querySelectorAll("section[data-curves]")) {
    const names = section.dataset.curves.split(",").filter((name) => (data.curves[name] || []).length);
    section.hidden = names.length === 0;
    if (section.hidden) continue;
    const bytes = names[0] === "resident_bytes";
    // Held-out loss is the same on every rank, evaluated together.
    const curves = (name) => (name === "held_out_loss" ? data.curves[name].slice(0, 1) : data.curves[name]);
    const traces = names.flatMap((name) => curves(name).flatMap((curve) => {
      const line = {
        x: curve.x, y: bytes ? curve.y.map((value) => value / 1e6) : curve.y, mode: "lines",
        name: name === "held_out_loss" ? "held out" : "rank " + curve.rank, legendgroup: name + curve.rank,
        line: name === "held_out_loss" ? { color: colour("ink"), width: 2.5, dash: "dot" } : { color: ofRank(curve.rank), width: 2 },
        hovertemplate: "%{y:.4~g} at %{x}<extra>rank " + curve.rank + "</extra>",
      };
      // A noisy loss is drawn twice: faintly as it is, and smoothed, so that its course can be seen.
      if (name !== "loss" || curve.y.length < 60) return [line];
      const faint = { ...line, opacity: 0.28, showlegend: false, hoverinfo: "skip", hovertemplate: null, line: { ...line.line, width: 1 } };
      return [faint, { ...line, y: smooth(curve.y), hovertemplate: "smoothed " + line.hovertemplate }];
    }));
    const byStep = data.curves[names[0]][0].by_step;
    show(section.querySelector(".curve"), traces, layout({
      xaxis: { title: { text: byStep ? "step" : "seconds" } },
      yaxis: { rangemode: bytes || names[0] === "tokens_per_s" ? "tozero" : "normal" },
      showlegend: traces.length > 1 && traces.length <= 16,
    }));
  }
}

/* Totals ------------------------------------------------------------------------------------------------ */
function drawTimes() {
  const element = document.getElementById("times");
  if (!element) return;
  const y = data.times.map((one) => "rank " + one.rank);
  const traces = ["forward", "backward", "optimizer", "waiting", "other"].map((part) => ({
    type: "bar", orientation: "h", name: part, y,
    x: data.times.map((one) => (one.total ? (100 * one[part]) / one.total : 0)),
    customdata: data.times.map((one) => one[part] / 1e6),
    hovertemplate: part + " %{x:.1f} %, %{customdata:,.0f} ms<extra>%{y}</extra>",
    marker: { color: colour(part) },
  }));
  show(element, traces, layout({
    barmode: "stack", height: Math.max(250, 110 + 26 * y.length), bargap: 0.35,
    xaxis: { ticksuffix: " %", range: [0, 100] }, yaxis: { autorange: "reversed" },
  }));
}

function drawLateness() {
  const element = document.getElementById("late");
  if (!element) return;
  const y = data.lateness.map((late) => "rank " + late.rank);
  show(element, [{
    type: "bar", orientation: "h", y, x: data.lateness.map((late) => late.mean_ns / 1e6),
    customdata: data.lateness.map((late) => 100 * late.share_last),
    marker: { color: data.lateness.map((late) => ofRank(late.rank)) },
    hovertemplate: "%{x:.2f} ms late on average, last in %{customdata:.0f} % of passes<extra>%{y}</extra>",
  }], layout({
    height: Math.max(250, 110 + 26 * y.length), bargap: 0.45,
    xaxis: { title: { text: "ms after the first rank, mean" }, rangemode: "tozero" },
    yaxis: { autorange: "reversed" },
  }));
}

function drawSharding() {
  const element = document.getElementById("sharding");
  if (!element) return;
  const widest = (kind) => Math.max(...data.memory.map((one) => one[kind] || 0));
  const before = { parameters: widest("parameters"), gradients: widest("gradients"), state: widest("unsharded_state") };
  const rows = [["unsharded", before], ...data.memory.map((one) => ["rank " + one.rank, one])];
  const kinds = [["parameters", "parameters", "forward"], ["gradients", "gradients", "backward"], ["state", "optimizer state", "optimizer"]];
  const traces = kinds.filter(([kind]) => widest(kind)).map(([kind, name, shade]) => ({
    type: "bar", orientation: "h", name, y: rows.map(([row]) => row), x: rows.map(([, held]) => (held[kind] || 0) / 1e6),
    marker: { color: colour(shade), opacity: rows.map(([row]) => (row === "unsharded" ? 0.55 : 1)) },
    hovertemplate: name + " %{x:,.2f} MB<extra>%{y}</extra>",
  }));
  show(element, traces, layout({
    barmode: "stack", height: Math.max(270, 110 + 26 * rows.length), bargap: 0.35,
    xaxis: { ticksuffix: " MB", rangemode: "tozero" }, yaxis: { autorange: "reversed" },
  }));
}

/* Every pass, as a strip: click one to see the drawn pass nearest to it ---------------------------------- */
function drawLengths() {
  const element = document.getElementById("lengths");
  if (!element) return;
  const lengths = data.timeline.lengths;
  const drawn = data.timeline.passes;
  const nearest = (index) => drawn.reduce((best, one, at) => (Math.abs(one.index - index) < Math.abs(drawn[best].index - index) ? at : best), 0);
  const sorted = lengths.map(([, ms]) => ms).sort((a, b) => a - b);
  // One slow first pass must not flatten all others.
  const top = Math.min(sorted[sorted.length - 1], 2.5 * sorted[Math.floor(sorted.length / 2)]) * 1.08;
  const bars = {
    type: "bar", x: lengths.map(([index]) => index), y: lengths.map(([, ms]) => ms), showlegend: false,
    marker: { color: lengths.map(([index]) => (index === drawn[current].index ? colour("accent") : colour("waiting"))) },
    hovertemplate: "pass %{x}: %{y:.2f} ms<extra></extra>",
  };
  const marks = {
    mode: "markers", x: drawn.map((one) => one.index), y: drawn.map(() => 0.95 * top), cliponaxis: false, showlegend: false,
    marker: { symbol: "triangle-down", size: drawn.map((_, at) => (at === current ? 11 : 6)), color: drawn.map((_, at) => colour(at === current ? "accent" : "soft")) },
    hovertemplate: "pass %{x} is drawn below<extra></extra>",
  };
  show(element, [bars, marks], layout({
    height: 96, margin: { l: 48, r: 12, t: 12, b: 18 }, bargap: lengths.length > 120 ? 0 : 0.2,
    yaxis: { range: [0, top], nticks: 3, ticksuffix: " ms", fixedrange: true }, xaxis: { fixedrange: true, showgrid: false, range: [-0.7, lengths[lengths.length - 1][0] + 0.7] },
  }));
  element.removeAllListeners("plotly_click");
  element.on("plotly_click", (event) => choose(nearest(event.points[0].x)));
}

/* Timeline ---------------------------------------------------------------------------------------------- */
const KINDS = [
  ["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"], ["waiting", "waiting"],
  ["reduce hidden", "hidden"], ["reduce exposed", "exposed"], ["gather", "gather"],
];

function timelineTraces(shown) {
  const traces = new Map(KINDS.map(([kind, shade]) => [kind, {
    type: "bar", orientation: "h", name: kind, base: [], x: [], y: [], width: [], text: [], customdata: [],
    marker: { color: colour(shade), line: { width: 0.6, color: colour("card") } },
    textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none", cliponaxis: true,
    hovertemplate: "%{customdata}<extra></extra>",
  }]));
  const filled = { mode: "markers", name: "bucket filled", x: [], y: [], customdata: [], hovertemplate: "%{customdata}<extra></extra>",
    marker: { symbol: "triangle-down", size: 8, color: colour("ink") } };
  const ticks = [], labels = [];
  let y = 0;
  const bar = (kind, row, width, start, end, text, words) => {
    const trace = traces.get(kind);
    trace.base.push(start); trace.x.push(end - start); trace.y.push(row); trace.width.push(width);
    trace.text.push(text); trace.customdata.push(words);
  };
  for (const rank of shown.ranks) {
    ticks.push(y); labels.push("rank " + rank.rank);
    for (const [name, start, end, bucket] of rank.compute) {
      const inside = bucket === null ? "" : " of bucket " + bucket;
      bar(name, y, name === "waiting" ? 0.5 : 0.8, start, end, "", `${name}${inside}, ${(end - start).toFixed(2)} ms`);
    }
    for (const [at, bucket] of rank.filled) {
      filled.x.push(at); filled.y.push(y - 0.48); filled.customdata.push(`bucket ${bucket} filled at ${at.toFixed(2)} ms`);
    }
    const depth = 1 + rank.communication.reduce((most, piece) => Math.max(most, piece[2]), 0);
    const height = Math.max(0.32, 0.8 / depth);
    ticks.push(y + 0.95); labels.push("communication");
    for (const [name, bucket, row, start, end, hidden, bytes, whole] of rank.communication) {
      const kind = name === "gather" ? "gather" : hidden ? "reduce hidden" : "reduce exposed";
      const size = bytes ? `, ${(bytes / 1e6).toFixed(2)} MB` : "";
      bar(kind, y + 0.95 + row * height, height * 0.94, start, end, bucket === null ? "" : String(bucket),
        `${name} of bucket ${bucket}${size}: ${whole.toFixed(2)} ms, this part ${hidden ? "hidden" : "exposed"}`);
    }
    y += 1.6 + depth * height;
  }
  const bars = [...traces.values()].filter((trace) => trace.x.length);
  return { traces: filled.x.length ? [...bars, filled] : bars, ticks, labels, height: y };
}

function describe(shown) {
  const words = shown.ranks.map((rank) => {
    const length = (keep) => rank.communication.filter(keep).reduce((sum, piece) => sum + piece[4] - piece[3], 0);
    const all = length(() => true);
    return all ? `rank ${rank.rank} hid ${Math.round((100 * length((piece) => piece[5])) / all)} %` : `rank ${rank.rank} moved nothing`;
  });
  return "Of its communication in this pass, " + words.join(", ") + ".";
}

function drawTimeline() {
  const element = document.getElementById("timeline");
  if (!element || !data.timeline.passes.length) return;
  const shown = data.timeline.passes[current];
  const { traces, ticks, labels, height } = timelineTraces(shown);
  show(element, traces, layout({
    barmode: "overlay", height: 110 + 34 * height, uniformtext: { mode: "hide", minsize: 9 },
    xaxis: { title: { text: "ms since the pass began" }, range: [0, shown.ms] },
    yaxis: { tickvals: ticks, ticktext: labels, range: [height - 0.7, -0.9], showgrid: false, zeroline: false, fixedrange: true },
  }));
  document.getElementById("pass").value = String(current);
  document.getElementById("previous").disabled = current === 0;
  document.getElementById("next").disabled = current === data.timeline.passes.length - 1;
  document.getElementById("pass-length").textContent = `${shown.ms.toFixed(2)} ms`;
  const more = data.timeline.left_out_ranks ? ` ${data.timeline.left_out_ranks} more ranks are not drawn.` : "";
  document.getElementById("timeline-words").textContent = describe(shown) + more;
  drawLengths();
}

function choose(index) {
  current = Math.min(Math.max(index, 0), data.timeline.passes.length - 1);
  drawTimeline();
}

function prepareTimeline() {
  const select = document.getElementById("pass");
  if (!select) return;
  for (const [index, one] of data.timeline.passes.entries()) {
    select.append(new Option(`${one.index}${one.label ? " · " + one.label : ""}`, String(index)));
  }
  const typical = data.timeline.passes.findIndex((one) => one.label === "typical");
  current = typical >= 0 ? typical : 0;
  select.addEventListener("change", () => choose(Number(select.value)));
  document.getElementById("previous").addEventListener("click", () => choose(current - 1));
  document.getElementById("next").addEventListener("click", () => choose(current + 1));
}

/* Theme ------------------------------------------------------------------------------------------------- */
function setTheme(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(dark));
  button.textContent = dark ? "☀ Light" : "☾ Dark";
  drawCurves(); drawTimes(); drawLateness(); drawSharding(); drawTimeline();
}

// What was raised is in the last lines of a traceback.
const traceback = document.getElementById("traceback");
if (traceback) traceback.scrollTop = traceback.scrollHeight;
prepareTimeline();
const preferred = matchMedia("(prefers-color-scheme: dark)");
setTheme(preferred.matches);
preferred.addEventListener("change", () => setTheme(preferred.matches));
document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
