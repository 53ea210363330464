// Draws the curves of a report: axes, lines, bands and marks as SVG, from the numbers in the page.
//
//   numbers -> x axis, smoothing -> visible part -> scales -> paths      again at every change of the controls
//
// All charts share one x range: what is chosen in one by dragging is shown in all. Everything is a function of
// `state`; nothing is fetched or stored.
"use strict";

const page = JSON.parse(document.getElementById("numbers").textContent);
const state = { axis: "step", smoothing: 0, range: null, hidden: new Set(), log: new Set(), marks: true };
const several = page.runs.length > 1;
const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };
const SUFFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const PRINT_WIDTH = 680;
const SETTLED = 0.04;
const NUM_COLOURS = 8;
const charts = [];
let printing = false;

// ---- numbers as people read them

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function label(value, step) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 && !(step >= 1e-4)) return trim(value.toExponential(2).replace(/\.?0+e/, "e")).replace("e-", "e−");
  for (const [scale, suffix] of SUFFIXES)
    if (size >= scale * 0.9999 && (suffix !== "k" || size >= 9999.5))
      return trim((value / scale).toFixed(decimals(step / scale))) + suffix;
  return trim(value.toFixed(decimals(step)));
}

function decimals(step) {
  return Math.max(0, Math.min(8, Math.ceil(-Math.log10(step) - 1e-9)));
}

function exact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return label(value, size / 1000);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return trim(value.toFixed(size >= 1000 ? 0 : size >= 10 ? 2 : 4));
}

// ---- scales and ticks

function niceStep(span, count) {
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function linearTicks(low, high, count) {
  const step = niceStep(high - low, count);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(n * step);
  return { ticks, step };
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return linearTicks(low, high, count);
  const factors = decades <= 1.5 ? [1, 2, 3, 5, 7] : decades <= 3 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / Math.max(3, count)));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (factors.length === 1 && power % every) continue;
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push(tick);
    }
  }
  return { ticks, step: null };
}

function scale(low, high, from, to, log) {
  const warp = log ? Math.log : (value) => value;
  const start = warp(low);
  const factor = (to - from) / (warp(high) - start || 1);
  const forward = (value) => from + (warp(value) - start) * factor;
  forward.invert = (place) => {
    const value = start + (place - from) / factor;
    return log ? Math.exp(value) : value;
  };
  return forward;
}

// ---- the numbers of a line

function smooth(values, weight) {
  // An exponential mean that starts unbiased, as TensorBoard's.
  if (!weight) return values;
  let last = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = weight * last + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return last / mass;
  });
}

function numbersOf(line) {
  const run = page.runs[line.run];
  const found = line.points ? run.points[line.key] : run.series[line.key];
  const x = line.points ? found[state.axis] : run.x[state.axis];
  const y = line.points ? found.y : smooth(found.y, state.smoothing);
  return { x, y, raw: found.y, low: found.low, high: found.high };
}

function keysOf(lines) {
  // What a legend names: the lines of one run; of several, each run by its colour and each kind of line by its dashes.
  const kinds = [...new Map(lines.map((line) => [line.key, line])).values()];
  if (!several) return kinds.map((line) => ({ id: line.key, text: line.label, style: `c${line.color} d${line.dash}` }));
  const runs = [...new Map(lines.map((line) => [line.run, line])).values()];
  const found = runs.map((line) => ({ id: `run ${line.run}`, text: page.runs[line.run].name, style: `c${line.color}` }));
  if (kinds.length === 1) return found;
  return [...found, ...kinds.map((line) => ({ id: line.key, text: line.what, style: `plain d${line.dash}` }))];
}

function isHidden(line) {
  return state.hidden.has(line.key) || state.hidden.has(`run ${line.run}`);
}

// ---- SVG

function make(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function path(x, y, toX, toY, usable) {
  let text = "", pen = "M";
  for (let n = 0; n < x.length; n++) {
    if (!usable(y[n])) { pen = "M"; continue; }
    text += pen + toX(x[n]).toFixed(1) + " " + toY(y[n]).toFixed(1);
    pen = "L";
  }
  return text;
}

function area(x, low, high, toX, toY, usable) {
  let text = "";
  for (let n = 0; n < x.length; n++) {
    if (!usable(low[n]) || !usable(high[n])) continue;
    let end = n;
    while (end + 1 < x.length && usable(low[end + 1]) && usable(high[end + 1])) end++;
    const top = [], bottom = [];
    for (let k = n; k <= end; k++) {
      top.push(toX(x[k]).toFixed(1) + " " + toY(high[k]).toFixed(1));
      bottom.unshift(toX(x[k]).toFixed(1) + " " + toY(low[k]).toFixed(1));
    }
    text += "M" + top.join("L") + "L" + bottom.join("L") + "Z";
    n = end;
  }
  return text;
}

function wholeRange() {
  let low = Infinity, high = -Infinity;
  for (const run of page.runs) {
    for (const x of [run.x[state.axis], ...Object.values(run.points).map((each) => each[state.axis])]) {
      for (const value of x) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
    }
  }
  if (!(high > low)) { low -= 0.5; high += 0.5; }
  return [low, high];
}

function valueRange(lines, range, usable) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    for (let n = 0; n < line.x.length; n++) {
      if (line.x.length > 1 && (line.x[n] < range[0] || line.x[n] > range[1])) continue;
      for (const value of [line.y[n], line.raw[n]])
        if (usable(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }
  }
  return low <= high ? [low, high] : null;
}

function settled([low, high]) {
  // The first steps of a run fall from so high that nothing else would be seen: the whole of a main chart is scaled to
  // what follows them.
  return [low + SETTLED * (high - low), high];
}

function padded([low, high], log) {
  if (log) {
    const room = high > low ? (high / low) ** 0.06 : 1.3;
    return [low / room, high * room];
  }
  const room = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// ---- one chart

class Chart {
  constructor(figure, number) {
    this.figure = figure;
    this.spec = page.charts[number];
    this.holder = figure.querySelector(".plot");
    this.tip = make2("div", "tip", this.holder);
    this.tip.hidden = true;
    this.addLegend();
    const button = figure.querySelector("button.log");
    if (this.spec.log) state.log.add(this);
    button.setAttribute("aria-pressed", String(this.spec.log));
    button.addEventListener("click", () => {
      if (!state.log.delete(this)) state.log.add(this);
      button.setAttribute("aria-pressed", String(state.log.has(this)));
      this.draw();
    });
    this.listen();
  }

  addLegend() {
    const legend = this.figure.querySelector(".legend");
    if (this.spec.lines.length < 2) return;
    for (const { id, text, style } of keysOf(this.spec.lines)) {
      const button = make2("button", "key", legend);
      button.type = "button";
      button.dataset.key = id;
      const swatch = make("svg", { width: 24, height: 10, viewBox: "0 0 24 10", "aria-hidden": "true" }, button);
      make("line", { x1: 1, x2: 23, y1: 5, y2: 5, class: `line ${style}` }, swatch);
      make2("span", "", button).textContent = text;
      button.addEventListener("click", () => {
        if (!state.hidden.delete(id)) state.hidden.add(id);
        drawAll();
      });
    }
  }

  draw() {
    const width = printing ? PRINT_WIDTH : this.holder.clientWidth;
    const [least, most] = this.spec.main ? [270, 360] : [200, 240];
    const height = Math.round(Math.max(least, Math.min(most, 0.6 * width)));
    const log = state.log.has(this);
    const usable = (value) => value !== null && value !== undefined && (!log || value > 0);
    const lines = this.spec.lines.filter((line) => !isHidden(line)).map((line) => ({ ...line, ...numbersOf(line) }));
    const range = state.range || wholeRange();
    const values = valueRange(lines, this.spec.main && !state.range ? settled(range) : range, usable);
    const [low, high] = padded(values || [0.1, 1], log);
    const yTicks = (log ? logTicks : linearTicks)(low, high, Math.max(3, Math.round(height / 55)));
    const yLabels = yTicks.ticks.map((tick) => label(tick, yTicks.step || Math.abs(tick)));
    const left = 14 + 7 * Math.max(3, ...yLabels.map((text) => text.length));
    const box = { left, right: width - 20, top: 12, bottom: height - 40 };
    const toX = scale(range[0], range[1], box.left, box.right, false);
    const toY = scale(low, high, box.bottom, box.top, log);
    this.place = { box, toX, toY, range, lines };

    const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    svg.setAttribute("aria-label", this.spec.title);
    const clip = `clip-${charts.indexOf(this)}`;
    const frame = { x: box.left, y: box.top, width: Math.max(1, box.right - box.left), height: box.bottom - box.top };
    make("rect", frame, make("clipPath", { id: clip }, make("defs", {}, svg)));
    this.drawAxes(svg, box, toX, toY, range, yTicks.ticks, yLabels);
    const inside = make("g", { "clip-path": `url(#${clip})` }, svg);
    if (state.marks) this.drawMarks(svg, box, toX, range);
    for (const line of lines) this.drawLine(inside, line, toX, toY, usable);
    for (const line of lines) this.drawDots(svg, box, line, toX, toY, usable, range);
    if (state.marks && this.spec.main) this.drawSpikes(svg, box, lines, toX, toY, range);
    if (!values) make("text", { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, class: "none" }, svg,
      lines.length ? "nothing here" : "all lines are switched off");
    this.hover = make("g", {}, svg);
    this.choice = make("rect", { ...frame, width: 0, class: "choice" }, svg);
    this.svg?.remove();
    this.svg = svg;
    this.holder.prepend(svg);
    for (const key of this.figure.querySelectorAll(".key"))
      key.setAttribute("aria-pressed", String(!state.hidden.has(key.dataset.key)));
  }

  drawAxes(svg, box, toX, toY, range, yTicks, yLabels) {
    yTicks.forEach((tick, n) => {
      const y = toY(tick);
      make("line", { x1: box.left, x2: box.right, y1: y, y2: y, class: "grid" }, svg);
      make("text", { x: box.left - 8, y: y + 4, class: "tick end" }, svg, yLabels[n]);
    });
    const { ticks, step } = linearTicks(range[0], range[1], Math.max(2, Math.floor((box.right - box.left) / 90)));
    for (const tick of ticks) {
      const x = toX(tick);
      make("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom + 5, class: "axis" }, svg);
      make("text", { x, y: box.bottom + 18, class: "tick middle" }, svg, label(tick, step));
    }
    make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis" }, svg);
    make("text", { x: box.right, y: box.bottom + 34, class: "tick end name" }, svg, AXES[state.axis]);
  }

  drawMarks(group, box, toX, range) {
    page.runs.forEach((run, number) => {
      if (state.hidden.has(`run ${number}`)) return;
      const whose = several ? `own c${number % NUM_COLOURS}` : "";
      for (const mark of run.marks) {
        const at = mark[state.axis];
        if (at === null || at < range[0] || at > range[1]) continue;
        const x = toX(at);
        make("line", { x1: x, x2: x, y1: box.top, y2: box.bottom, class: `mark ${mark.kind} ${whose}` }, group);
        if (this.spec.main)
          make("path", { d: `M${x - 5} ${box.top}h10l-5 8z`, class: `flag ${mark.kind} ${whose}` }, group);
      }
    });
  }

  drawSpikes(svg, box, lines, toX, toY, range) {
    // A point may be the mean of many steps: the spike stands on it as a stem, up to where it went or the chart ends.
    for (const line of lines.filter((each) => each.key === "loss")) {
      const spikes = page.runs[line.run].spikes;
      spikes.y.forEach((value, n) => {
        const at = spikes[state.axis][n];
        const foot = toY(line.y[nearest(line.x, at)]);
        if (at < range[0] || at > range[1] || !(foot >= box.top && foot <= box.bottom)) return;
        const x = toX(at), y = Math.max(box.top + 9, toY(value));
        make("line", { x1: x, x2: x, y1: y, y2: foot, class: `stem c${line.color}` }, svg);
        make("path", { d: `M${x - 5} ${y}h10l-5 -9z`, class: `spike c${line.color}` }, svg);
      });
    }
  }

  drawLine(group, line, toX, toY, usable) {
    if (line.low && page.runs.length < 4)
      make("path", { d: area(line.x, line.low, line.high, toX, toY, usable), class: `band c${line.color}` }, group);
    if (state.smoothing && !line.points)
      make("path", { d: path(line.x, line.raw, toX, toY, usable), class: `line raw c${line.color}` }, group);
    make("path", { d: path(line.x, line.y, toX, toY, usable), class: `line c${line.color} d${line.dash}` }, group);
  }

  drawDots(svg, box, line, toX, toY, usable, range) {
    // Where a line has so few points that each can be told, most of all where it is only one; also at the very edge.
    const seen = [...line.x.keys()].filter((n) => usable(line.y[n]) && line.x[n] >= range[0] && line.x[n] <= range[1]);
    if (seen.length > (line.points ? (box.right - box.left) / 12 : 2)) return;
    for (const n of seen) {
      const y = toY(line.y[n]);
      if (y < box.top - 1 || y > box.bottom + 1) continue;
      const style = `dot c${line.color}${seen.length === 1 ? " lone" : ""}`;
      make("circle", { cx: toX(line.x[n]), cy: y, r: seen.length === 1 ? 6 : 3, class: style }, svg);
    }
  }

  // ---- pointing and choosing

  listen() {
    // A mouse chooses a range by dragging. A finger reads values; what it read last stays until it taps elsewhere.
    let start = null;
    const within = (event) => {
      const bounds = this.svg.getBoundingClientRect();
      const { box } = this.place;
      return Math.max(box.left, Math.min(box.right, event.clientX - bounds.left));
    };
    this.holder.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") point(this.place.toX.invert(within(event)), this);
      else if (event.button === 0) start = within(event);
    });
    this.holder.addEventListener("pointermove", (event) => {
      const x = within(event);
      if (start !== null && Math.abs(x - start) > 4) {
        this.choice.setAttribute("x", Math.min(start, x));
        this.choice.setAttribute("width", Math.abs(x - start));
      }
      point(this.place.toX.invert(x), this);
    });
    window.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [from, to] = [start, within(event)].sort((a, b) => a - b);
      start = null;
      if (to - from > 4) zoom([this.place.toX.invert(from), this.place.toX.invert(to)]);
    });
    this.holder.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") point(null, this);
    });
    this.holder.addEventListener("dblclick", () => zoom(null));
  }

  point(at, isUnderPointer) {
    this.hover.replaceChildren();
    this.tip.hidden = true;
    const { box, toX, toY, range, lines } = this.place;
    if (at === null || at < range[0] || at > range[1]) return;
    make("line", { x1: toX(at), x2: toX(at), y1: box.top, y2: box.bottom, class: "cross" }, this.hover);
    const told = [];
    for (const line of lines) {
      const n = nearest(line.x, at);
      const value = line.y[n];
      if (value === null || value === undefined || n < 0) continue;
      const x = toX(line.x[n]), y = toY(value);
      if (Math.abs(x - toX(at)) > (line.points ? 40 : 12)) continue;
      if (Number.isFinite(y) && y >= box.top - 3 && y <= box.bottom + 3)
        make("circle", { cx: x, cy: y, r: 3.5, class: `dot c${line.color}` }, this.hover);
      told.push([line, value]);
    }
    if (isUnderPointer) this.tell(at, told);
  }

  tell(at, told) {
    const { box, toX } = this.place;
    this.tip.replaceChildren();
    make2("b", "", this.tip).textContent = `${AXES[state.axis]} ${exact(state.axis === "hours" ? at : Math.round(at))}`;
    for (const [line, value] of told) {
      const row = make2("span", "", this.tip);
      make2("i", `c${line.color}`, row);
      row.append(`${line.label} `);
      make2("em", "", row).textContent = exact(value) + (this.spec.unit ? ` ${this.spec.unit}` : "");
    }
    for (const mark of state.marks ? near(at, toX) : []) make2("span", `said ${mark.kind}`, this.tip).textContent = mark.text;
    this.tip.hidden = false;
    const x = toX(at), width = this.tip.offsetWidth;
    const place = x + 14 + width > box.right + 10 ? x - width - 14 : x + 14;
    this.tip.style.left = `${Math.max(2, Math.min(place, this.holder.clientWidth - width - 2))}px`;
    this.tip.style.top = `${box.top + 6}px`;
  }
}

function make2(name, style, parent) {
  const element = document.createElement(name);
  if (style) element.className = style;
  parent.appendChild(element);
  return element;
}

function nearest(sorted, at) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= at) low = middle; else high = middle;
  }
  return Math.abs(sorted[high] - at) < Math.abs(sorted[low] - at) ? high : low;
}

function near(at, toX) {
  // What is said of the marks and spikes here.
  const isNear = (place) => Math.abs(toX(place) - toX(at)) < 6;
  const shown = page.runs.filter((run, number) => !state.hidden.has(`run ${number}`));
  const marks = shown.flatMap((run) => run.marks).filter((mark) => isNear(mark[state.axis]));
  const spikes = shown.flatMap((run) => run.spikes.text.filter((text, n) => isNear(run.spikes[state.axis][n])));
  return [...marks, ...spikes.map((text) => ({ kind: "plain", text }))].slice(0, 6);
}

// ---- all of them

function drawAll() {
  for (const chart of charts) chart.draw();
}

function point(at, under) {
  for (const chart of charts) chart.point(at, chart === under);
}

function zoom(range) {
  state.range = range;
  for (const input of document.querySelectorAll('input[name="span"]')) input.checked = !range && input.value === "1";
  drawAll();
}

function showLast(share) {
  const [low, high] = wholeRange();
  state.range = share < 1 ? [high - share * (high - low), high] : null;
  drawAll();
}

function start() {
  document.querySelectorAll("figure[data-chart]").forEach((figure) => {
    charts.push(new Chart(figure, Number(figure.dataset.chart)));
  });
  document.querySelectorAll('input[name="axis"]').forEach((input) => {
    input.addEventListener("change", () => { state.axis = input.value; zoom(null); });
  });
  document.querySelectorAll('input[name="span"]').forEach((input) => {
    input.addEventListener("change", () => showLast(Number(input.value)));
  });
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) point(null, null); });
  document.getElementById("smoothing").addEventListener("input", (event) => {
    state.smoothing = Number(event.target.value) / 100;
    drawAll();
  });
  document.getElementById("marks").addEventListener("change", (event) => {
    state.marks = event.target.checked;
    drawAll();
  });
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); });
  window.addEventListener("beforeprint", () => { printing = true; drawAll(); });
  window.addEventListener("afterprint", () => { printing = false; drawAll(); });
  drawAll();
  document.documentElement.dataset.drawn = String(charts.length);
}

start();
