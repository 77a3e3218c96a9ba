"use strict";
const data = JSON.parse(document.getElementById("run-data").textContent);
const root = document.documentElement;
const RANKS = ["#3d7ab8", "#c2693d", "#3f9c7c", "#9a62b3", "#b39a2f", "#c0517f", "#4a8f9f", "#7d7d7d"];
const WHO = data.who;
const ofRank = (rank) => RANKS[rank % RANKS.length];
let current = 0;
let zoom = null;

/* Curves ------------------------------------------------------------------------------------------------ */
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 40));
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

function drawCurves() {
  for (const section of document.querySelectorAll("section[data-curves]")) {
    const names = section.dataset.curves.split(",").filter((name) => (data.curves[name] || []).length);
    section.hidden = names.length === 0;
    if (section.hidden) continue;
    const bytes = names[0] === "resident_bytes";
    // Held-out loss is the same on every rank, evaluated together.
    const curves = (name) => (name === "held_out_loss" ? data.curves[name].slice(0, 1) : data.curves[name]);
    const series = names.flatMap((name) => curves(name).flatMap((curve) => {
      const held = name === "held_out_loss";
      const line = {
        x: curve.x, y: bytes ? curve.y.map((value) => value / 1e6) : curve.y, dash: held,
        name: held ? "held out" : `${WHO} ${curve.rank}`, colour: held ? "var(--ink)" : ofRank(curve.rank),
      };
      // A noisy loss is drawn twice: faintly as it is, and smoothed, so that its course can be seen.
      if (!["loss", "seen_loss"].includes(name) || curve.y.length < 60) return [line];
      return [{ ...line, faint: true }, { ...line, y: smooth(curve.y) }];
    }));
    lines(section.querySelector(".curve"), series, {
      xTitle: data.curves[names[0]][0].by_step ? "step" : "seconds",
      fromZero: bytes || names[0] === "tokens_per_s",
      format: bytes ? (value) => brief(value) + " MB" : brief,
      marks: data.curves[names[0]][0].by_step ? [] : data.marks,
    });
  }
}

/* Totals ------------------------------------------------------------------------------------------------ */
function drawTimes() {
  const holder = document.getElementById("times");
  if (!holder) return;
  const kinds = ["forward", "backward", "optimizer", "waiting", "other"];
  bars(holder, data.times.map((one) => ({
    label: `${WHO} ${one.rank}`, end: `${(one.total / 1e9).toFixed(1)} s`,
    parts: kinds.map((kind) => ({
      kind, value: one.total ? one[kind] / one.total : 0,
      words: `${WHO} ${one.rank}, ${kind}: ${((100 * one[kind]) / (one.total || 1)).toFixed(1)} %, ${(one[kind] / 1e6).toFixed(0)} ms`,
    })),
  })), kinds.map((kind) => [kind, kind]));
}

function drawLateness() {
  const holder = document.getElementById("late");
  if (!holder) return;
  bars(holder, data.lateness.map((late) => ({
    label: `${WHO} ${late.rank}`, end: `${(late.caused_ns / 1e9).toFixed(2)} s`,
    parts: [{
      kind: "rank", value: late.caused_ns, colour: ofRank(late.rank),
      words: `${WHO} ${late.rank} kept the others waiting for ${(late.caused_ns / 1e9).toFixed(2)} s in all;\nlast in ` +
        `${(100 * late.share_last).toFixed(0)} % of passes, ${(late.mean_ns / 1e6).toFixed(2)} ms late on average`,
    }],
  })), []);
}

function drawSharding() {
  const holder = document.getElementById("sharding");
  if (!holder) return;
  const widest = (kind) => Math.max(...data.memory.map((one) => one[kind] || 0));
  const before = { parameters: widest("parameters"), gradients: widest("gradients"), state: widest("unsharded_state") };
  const kinds = [["parameters", "parameters", "forward"], ["gradients", "gradients", "backward"], ["state", "optimizer state", "optimizer"]]
    .filter(([kind]) => before[kind] || widest(kind));
  const rows = [["unsharded", before], ...data.memory.map((one) => [`${WHO} ${one.rank}`, one])];
  bars(holder, rows.map(([label, held]) => ({
    label, soft: label === "unsharded",
    end: `${(kinds.reduce((sum, [kind]) => sum + (held[kind] || 0), 0) / 1e6).toFixed(1)} MB`,
    parts: kinds.map(([kind, name, shade]) => ({
      kind: shade, value: (held[kind] || 0) / 1e6, words: `${label}, ${name}: ${((held[kind] || 0) / 1e6).toFixed(2)} MB`,
    })),
  })), kinds.map(([, name, shade]) => [shade, name]));
}

/* Who was which rank when: a row per worker of an elastic run --------------------------------------------- */
const GONE = { lost: "M-4 -4L4 4M-4 4L4 -4", fenced: "M-5 0H5", left: "M-3 -4L3 0L-3 4" };

function drawWorkers() {
  const holder = document.getElementById("workers");
  if (!holder) return;
  const found = data.elastic, row = 20;
  const height = found.workers.length * row + 46;
  const plot = frame(holder, { height, x: [0, found.until || 1], y: [0, 1], xTitle: "seconds since the start", left: 74, yTicks: 0 });
  for (const at of found.changes) {
    const x = round(plot.across(at));
    node("line", { class: "change", x1: x, x2: x, y1: plot.box.top, y2: plot.box.bottom }, plot.svg);
  }
  found.workers.forEach((one, place) => {
    const y = plot.box.top + place * row;
    node("text", { class: "tick", x: plot.box.left - 8, y: y + 13, "text-anchor": "end" }, plot.svg, `worker ${one.worker}`);
    const bar = (from, until, attributes, words) => {
      const x = plot.across(from), wide = Math.max(1.5, plot.across(until) - x);
      node("rect", { x: round(x), y: y + 2, width: round(wide), height: row - 5, rx: 2, "data-words": words, ...attributes }, plot.svg);
      return [x, wide];
    };
    if (one.starting && one.starting[1] > one.starting[0]) {
      bar(...one.starting, { class: "starting" }, `worker ${one.worker} was starting: ${(one.starting[1] - one.starting[0]).toFixed(1)} s`);
    }
    for (const each of one.bars) {
      const [x, wide] = bar(each.from, each.until, { class: "member", fill: ofRank(each.rank) },
        `worker ${one.worker} was rank ${each.rank}\ngeneration ${each.generation}, from step ${each.step}\n` +
        `${each.from.toFixed(2)} s to ${each.until.toFixed(2)} s`);
      if (wide > 14) node("text", { class: "inside", x: round(x + wide / 2), y: y + 13, "text-anchor": "middle" }, plot.svg, String(each.rank));
    }
    if (one.end) {
      const at = `translate(${round(plot.across(one.end.at))} ${y + row / 2})`;
      node("path", { class: `gone ${one.end.kind}`, d: GONE[one.end.kind], transform: at, "data-words": one.end.words }, plot.svg);
    }
  });
}

/* Every pass, as a strip: click one to see the drawn pass nearest to it ---------------------------------- */
function drawLengths() {
  const holder = document.getElementById("lengths");
  if (!holder) return;
  const lengths = data.timeline.lengths, drawn = data.timeline.passes;
  const sorted = lengths.map(([, ms]) => ms).sort((a, b) => a - b);
  // One slow first pass must not flatten all others.
  const top = Math.min(sorted[sorted.length - 1], 2.5 * sorted[Math.floor(sorted.length / 2)]) * 1.08 || 1;
  const last = lengths[lengths.length - 1][0];
  const plot = frame(holder, { height: 84, x: [-0.5, last + 0.5], y: [0, top], unit: " ms", left: 60, yTicks: 2 });
  const width = Math.max(1, (plot.across(1) - plot.across(0)) * (lengths.length > 120 ? 1 : 0.8));
  for (const [index, ms] of lengths) {
    const chosen = index === drawn[current].index;
    node("rect", { class: "pass" + (chosen ? " chosen" : ""), x: round(plot.across(index) - width / 2), width: round(width),
      y: round(plot.up(Math.min(ms, top))), height: round(plot.box.bottom - plot.up(Math.min(ms, top))), "data-words": `pass ${index}: ${ms.toFixed(2)} ms` }, plot.svg);
  }
  for (const index of data.timeline.changes) {
    const x = round(plot.across(index - 0.5));
    node("line", { class: "change", x1: x, x2: x, y1: plot.box.top, y2: plot.box.bottom, "data-words": "other ranks from here on" }, plot.svg);
  }
  for (const [at, one] of drawn.entries()) {
    const x = round(plot.across(one.index)), size = at === current ? 5 : 3;
    node("path", { class: "drawn" + (at === current ? " chosen" : ""), d: `M${x - size} 2h${2 * size}l${-size} ${size + 2}z` }, plot.svg);
  }
  holder.onclick = (event) => {
    const share = (event.clientX - holder.getBoundingClientRect().left - plot.box.left) / (plot.box.right - plot.box.left);
    choose(nearest(drawn.map((one) => one.index), share * (last + 1) - 0.5));
  };
}

/* Timeline ---------------------------------------------------------------------------------------------- */
const KINDS = [
  ["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"], ["waiting", "waiting"],
  ["hidden", "collective, hidden"], ["exposed", "collective, exposed"], ["gather", "parameter gather"], ["filled", "bucket filled"],
];
const LANE = 18, ROW = 12, LABEL = 17;

function drawTimeline() {
  const holder = document.getElementById("timeline");
  if (!holder || !data.timeline.passes.length) return;
  const shown = data.timeline.passes[current];
  const range = zoom || [0, shown.ms];
  const depth = (rank) => 1 + rank.communication.reduce((most, piece) => Math.max(most, piece[2]), 0);
  const height = shown.ranks.reduce((sum, rank) => sum + LABEL + LANE + 3 + depth(rank) * ROW + 6, 0) + 46;
  const plot = frame(holder, { height, x: range, y: [0, 1], xTitle: "ms since the pass began", left: 6, yTicks: 0 });
  const kinds = new Set();
  const bar = (kind, y, tall, start, end, words, text) => {
    const a = Math.max(start, range[0]), b = Math.min(end, range[1]);
    if (b < a) return;
    kinds.add(kind);
    const x = plot.across(a), wide = Math.max(0.6, plot.across(b) - x);
    node("rect", { class: "span k-" + kind, x: round(x), y, width: round(wide), height: tall, rx: 1.5, "data-words": words }, plot.svg);
    if (text && wide > 7 + 7 * text.length) node("text", { class: "inside", x: round(x + wide / 2), y: y + tall - 2.5, "text-anchor": "middle" }, plot.svg, text);
  };
  let y = 4;
  for (const rank of shown.ranks) {
    node("text", { class: "lane", x: plot.box.left, y: y + 12 }, plot.svg, rank.name);
    y += LABEL;
    for (const [name, start, end, bucket] of rank.compute) {
      const inside = bucket === null ? "" : " of bucket " + bucket;
      const thin = name === "waiting" ? 5 : 0;
      bar(name, y + thin, LANE - 2 * thin, start, end, `${rank.name}, ${name}${inside}: ${(end - start).toFixed(2)} ms`);
    }
    for (const [at, bucket] of rank.filled) {
      if (at < range[0] || at > range[1]) continue;
      const x = round(plot.across(at));
      kinds.add("filled");
      node("path", { class: "k-filled", d: `M${x - 4} ${y - 4}h8l-4 6z`, "data-words": `bucket ${bucket} filled at ${at.toFixed(2)} ms` }, plot.svg);
    }
    y += LANE + 3;
    for (const [name, bucket, row, start, end, hidden, bytes, whole] of rank.communication) {
      const size = bytes ? `, ${(bytes / 1e6).toFixed(2)} MB` : "";
      bar(name === "gather" ? "gather" : hidden ? "hidden" : "exposed", y + row * ROW, ROW - 1.5, start, end,
        `${rank.name}, ${name} of bucket ${bucket}${size}: ${whole.toFixed(2)} ms, this part ${hidden ? "hidden" : "exposed"}`,
        bucket === null ? "" : String(bucket));
    }
    y += depth(rank) * ROW + 6;
  }
  legend(holder, KINDS.filter(([kind]) => kinds.has(kind)).map(([kind, name]) => [name, kind, null]));
  dragToZoom(holder, plot, range);
  document.getElementById("pass").value = String(current);
  document.getElementById("previous").disabled = current === 0;
  document.getElementById("next").disabled = current === data.timeline.passes.length - 1;
  document.getElementById("whole").hidden = !zoom;
  document.getElementById("pass-length").textContent = `${shown.length.toFixed(1)} ms, the slowest rank`;
  const more = data.timeline.left_out_ranks ? ` ${data.timeline.left_out_ranks} more ranks are not drawn.` : "";
  document.getElementById("timeline-words").textContent = describe(shown) + more;
  drawLengths();
}

function dragToZoom(holder, plot, range) {
  const ms = (event) => {
    const share = (event.clientX - plot.svg.getBoundingClientRect().left - plot.box.left) / (plot.box.right - plot.box.left);
    return range[0] + Math.min(1, Math.max(0, share)) * (range[1] - range[0]);
  };
  let from = null;
  const chosen = node("rect", { class: "selection", y: 0, height: plot.box.bottom, width: 0, x: 0 }, plot.svg);
  plot.svg.onpointerdown = (event) => { if (event.pointerType === "mouse") from = ms(event); };
  plot.svg.onpointermove = (event) => {
    if (from === null) return;
    const [a, b] = [from, ms(event)].sort((one, other) => one - other);
    chosen.setAttribute("x", round(plot.across(a)));
    chosen.setAttribute("width", round(plot.across(b) - plot.across(a)));
  };
  plot.svg.onpointerup = (event) => {
    const [a, b] = [from === null ? 0 : from, ms(event)].sort((one, other) => one - other);
    const wide = from !== null && b - a > 0.01 * (range[1] - range[0]);
    from = null;
    if (wide) { zoom = [a, b]; drawTimeline(); }
  };
}

function describe(shown) {
  const words = shown.ranks.map((rank) => {
    const length = (keep) => rank.communication.filter(keep).reduce((sum, piece) => sum + piece[4] - piece[3], 0);
    const all = length(() => true);
    return all ? `${rank.name} hid ${Math.round((100 * length((piece) => piece[5])) / all)} %` : `${rank.name} moved nothing`;
  });
  return "Of its communication in this pass, " + words.join(", ") + ".";
}

function choose(index) {
  current = Math.min(Math.max(index, 0), data.timeline.passes.length - 1);
  zoom = null;
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
  document.getElementById("whole").addEventListener("click", () => choose(current));
}

/* Theme and size ---------------------------------------------------------------------------------------- */
function setTheme(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(dark));
  button.textContent = dark ? "☀ Light" : "☾ Dark";
}

function drawAll() { drawWorkers(); drawCurves(); drawTimes(); drawLateness(); drawSharding(); drawTimeline(); }

// What was raised is in the last lines of a traceback, and of a log.
for (const text of document.querySelectorAll("pre")) text.scrollTop = text.scrollHeight;
prepareTimeline();
const preferred = matchMedia("(prefers-color-scheme: dark)");
setTheme(preferred.matches);
preferred.addEventListener("change", () => setTheme(preferred.matches));
document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
drawAll();
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnWidth) { drawnWidth = innerWidth; requestAnimationFrame(drawAll); }
});
