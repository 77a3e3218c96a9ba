"use strict";
/* Charts in plain SVG and HTML: lines, bars, ticks, and one tip for whatever carries `data-words`.
   Colours are CSS classes, so that a change of theme redraws nothing. */
const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function element(name, className, parent, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const round = (value) => Math.round(value * 100) / 100;

function brief(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + " k";
  if (size === 0 || (size >= 0.001 && size < 1e4)) return String(Number(value.toPrecision(4)));
  return value.toExponential(1);
}

/* Round numbers between two, about as many as asked for. */
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough) * power;
  const found = [];
  // Counted: to a number of 18 digits a small step adds nothing, and the loop would never come to its end.
  for (let at = Math.ceil(low / step) * step, left = wanted + 2; at <= high + step * 1e-6 && left > 0; at += step, left--) {
    found.push(Number(at.toPrecision(12)));
  }
  return found;
}

/* An empty picture with axes; `x` and `y` are [low, high]. Returns its scales. */
function frame(holder, { height, x, y, xTitle = "", left = 46, unit = "", yTicks = 4 }) {
  const width = Math.max(220, holder.clientWidth);
  const box = { left, right: width - 6, top: 8, bottom: height - (xTitle ? 36 : 20) };
  holder.replaceChildren();
  const svg = node("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, holder);
  const across = (value) => box.left + ((value - x[0]) / (x[1] - x[0] || 1)) * (box.right - box.left);
  const up = (value) => box.bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (box.bottom - box.top);
  for (const value of yTicks ? ticks(y[0], y[1], yTicks) : []) {
    node("line", { class: "grid", x1: box.left, x2: box.right, y1: round(up(value)), y2: round(up(value)) }, svg);
    node("text", { class: "tick", x: box.left - 6, y: round(up(value)) + 4, "text-anchor": "end" }, svg, brief(value) + unit);
  }
  for (const value of ticks(x[0], x[1], width / 90)) {
    // At the right edge a label in the middle of its tick would be cut off.
    const anchor = across(value) > box.right - 14 ? "end" : "middle";
    node("text", { class: "tick", x: round(across(value)), y: box.bottom + 15, "text-anchor": anchor }, svg, brief(value));
  }
  if (xTitle) node("text", { class: "tick", x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, svg, xTitle);
  return { svg, box, across, up, width };
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > high ? [0, 1] : [low, high];
}

/* Lines over one x axis: [{name, colour, x, y, faint, dash}], and marks [x, words]. The values under the pointer are told. */
function lines(holder, series, { xTitle, fromZero, format = brief, marks = [] }) {
  const told = series.filter((one) => !one.faint);
  let [low, high] = extent(series.flatMap((one) => one.y));
  if (fromZero) low = Math.min(0, low);
  if (low === high) high = low + (Math.abs(low) || 1) * 0.1;
  const span = extent(series.flatMap((one) => one.x));
  const plot = frame(holder, { height: 240, x: span, y: [low, high], xTitle });
  for (const [at, words] of marks) {
    if (at < span[0] || at > span[1]) continue;
    const x = round(plot.across(at));
    node("line", { class: "change", x1: x, x2: x, y1: plot.box.top, y2: plot.box.bottom, "data-words": words }, plot.svg);
  }
  for (const one of series) {
    let pen = "M";
    const path = one.x.map((at, k) => {
      if (one.y[k] === null) { pen = "M"; return ""; }
      const piece = `${pen}${round(plot.across(at))} ${round(plot.up(one.y[k]))}`;
      pen = "L";
      return piece;
    }).join("");
    node("path", { class: "line" + (one.faint ? " faint" : ""), d: path, stroke: one.colour, "stroke-dasharray": one.dash ? "3 4" : null }, plot.svg);
  }
  const mark = node("line", { class: "mark", y1: plot.box.top, y2: plot.box.bottom, x1: -9, x2: -9 }, plot.svg);
  holder.onpointermove = (event) => {
    const share = (event.clientX - holder.getBoundingClientRect().left - plot.box.left) / (plot.box.right - plot.box.left);
    const wanted = span[0] + share * (span[1] - span[0]);
    if (share < 0 || share > 1) { mark.setAttribute("x1", -9); mark.setAttribute("x2", -9); return hideTip(); }
    const values = told.slice(0, 9).map((one) => {
      const k = nearest(one.x, wanted);
      return [one.name, one.x[k], one.y[k]];
    });
    const at = plot.across(values[0][1]);
    mark.setAttribute("x1", at); mark.setAttribute("x2", at);
    showTip(event, `${xTitle} ${brief(values[0][1])}\n` + values.map(([name, , value]) => `${name}: ${value === null ? "not a number" : format(value)}`).join("\n"));
  };
  holder.onpointerleave = () => { mark.setAttribute("x1", -9); mark.setAttribute("x2", -9); hideTip(); };
  legend(holder, told.length > 1 && told.length <= 16 ? told.map((one) => [one.name, null, one.colour]) : []);
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] < sorted[low] - wanted ? low - 1 : low;
}

/* Horizontal bars of stacked parts: rows [{label, parts: [{kind, value, words}], end}]; kinds [[kind, name]]. */
function bars(holder, rows, kinds) {
  holder.replaceChildren();
  legend(holder, kinds.length > 1 ? kinds.map(([kind, name]) => [name, kind, null]) : []);
  const most = Math.max(1e-12, ...rows.map((row) => row.parts.reduce((sum, part) => sum + part.value, 0)));
  const table = element("div", "bars", holder);
  for (const row of rows) {
    element("span", "label", table, row.label);
    const bar = element("span", "bar" + (row.soft ? " soft" : ""), table);
    for (const part of row.parts) {
      if (part.value <= 0) continue;
      const piece = element("span", "part k-" + part.kind, bar);
      piece.style.width = (100 * part.value) / most + "%";
      if (part.colour) piece.style.background = part.colour;
      piece.dataset.words = part.words;
    }
    element("span", "end", table, row.end || "");
  }
}

function legend(holder, entries) {
  if (!entries.length) return;
  const list = element("ul", "legend", null);
  for (const [name, kind, colour] of entries) {
    const entry = element("li", "", list);
    const swatch = element("span", "swatch" + (kind ? " k-" + kind : ""), entry);
    if (colour) swatch.style.background = colour;
    entry.append(name);
  }
  holder.prepend(list);
}

/* The tip ------------------------------------------------------------------------------------------------ */
function showTip(event, words) {
  const tip = document.getElementById("tip");
  tip.textContent = words;
  tip.hidden = false;
  const width = tip.offsetWidth, left = Math.min(event.clientX + 14, innerWidth - width - 8);
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
}

function hideTip() { document.getElementById("tip").hidden = true; }

document.addEventListener("pointerover", (event) => {
  const told = event.target.closest && event.target.closest("[data-words]");
  if (told) showTip(event, told.dataset.words);
});
document.addEventListener("pointerout", (event) => {
  if (event.target.closest && event.target.closest("[data-words]")) hideTip();
});
