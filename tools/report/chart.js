// Curves and stacked areas over training steps. All charts share one range of steps.

/// The steps that are shown; `null`: all of them.
const view = {from: null, to: null, listeners: [], set(from, to) {
  this.from = from; this.to = to;
  for (const listener of this.listeners) listener();
}};

const MARKS = {
  "checkpoint": {shape: "M0 -5L4 0L0 5L-4 0Z", colour: "var(--good)"},
  "update skipped": {shape: "M-4 -4L4 -4L0 4Z", colour: "var(--bad)"},
  "loss not finite": {shape: "M-4 -4L4 4M-4 4L4 -4", colour: "var(--bad)", open: true},
  "updates repeated": {shape: "M-4 4L4 4L0 -4Z", colour: "var(--c4)"},
  "data left out": {shape: "M-4 -4H4V4H-4Z", colour: "var(--c3)"},
};

let chartCount = 0;

/// Puts a new drawing into `holder`; the keyboard stays on it.
function replacePlot(holder, plot) {
  const focused = holder.contains(document.activeElement);
  holder.replaceChildren(plot);
  if (focused) plot.focus({preventScroll: true});
}

/// `spec`: id, title, kind (unit, or "bytes", "seconds"), per ("per step"), series (name, colour, steps,
/// values, dash, dots), whole (smallest and greatest step of all data); optional: stack, log (offer it),
/// names (of the places 0, 1, ... on an axis that has no steps and does not zoom) and axis
/// (its name), zero (begin at 0), refs (name, value), marks (step, kind), shade (from, to, lane), strips (of several
/// runs), caption.
class Chart {
  constructor(spec, kept) {
    this.spec = spec;
    this.kept = kept;  // what outlives a new drawing: log, refs
    this.number = ++chartCount;
    const largest = Math.max(0, ...spec.series.map(s => s.values.reduce((m, v) => v !== null && Math.abs(v) > m ? Math.abs(v) : m, 0)));
    this.unit = unitFor(spec.kind, largest);
    if (kept.log === undefined) kept.log = Boolean(spec.logDefault);
    if (kept.refs === undefined) kept.refs = (spec.refs || []).some(ref => ref.value <= 4 * largest);
    this.steps = [...new Set(spec.series.flatMap(s => s.steps))].sort((a, b) => a - b);
    this.output = el("output", {"aria-live": "polite", id: `${spec.id}-values`});
    this.holder = el("div");
    this.element = el("figure", {id: spec.id, class: "chart"}, this.head(), this.holder, this.output,
      this.legend(), spec.caption && el("figcaption", {}, spec.caption));
  }

  head() {
    const option = (name, key) => el("label", {}, el("input", {type: "checkbox", id: `${this.spec.id}-${key}`, checked: this.kept[key],
      onchange: event => { this.kept[key] = event.target.checked; this.draw(); }}), name);
    const unit = [this.unit.name, this.spec.per].filter(Boolean).join(" ");
    return el("div", {class: "head"},
      el("h3", {}, this.spec.title, " ", el("span", {class: "unit"}, `(${unit})`)),
      el("span", {}, this.spec.log && option("log scale", "log"), " ",
        (this.spec.refs || []).length > 0 && option(this.spec.refsName, "refs")));
  }

  legend() {
    const entries = this.spec.series.length > 1 || this.spec.named
      ? this.spec.series.filter(s => !s.dash).map(s => [s.name, s.colour, this.spec.stack ? "" : "thin"]) : [];
    if (this.spec.series.some(s => s.dash)) entries.push([this.spec.dashed, "repeating-linear-gradient(90deg, var(--soft) 0 3px, transparent 3px 5px)", "thin"]);
    for (const lane of new Set((this.spec.shade || []).map(s => s.lane))) entries.push([`most busy: ${lane}`, `color-mix(in srgb, ${laneColour(lane)} 45%, var(--paper))`]);
    const list = legend(entries);
    for (const kind of new Set((this.spec.marks || []).map(m => m.kind))) {
      list.append(el("li", {}, svg("svg", {width: 12, height: 12, viewBox: "-6 -6 12 12", style: "display:inline-block;vertical-align:-1px;margin-right:5px", "aria-hidden": "true"}, this.mark(kind)), kind));
    }
    return list.children.length > 0 ? list : null;
  }

  mark(kind) {
    const {shape, colour, open} = MARKS[kind];
    return svg("path", {d: shape, fill: open ? "none" : colour, stroke: open ? colour : "none", "stroke-width": 2});
  }

  range() {
    const [low, high] = this.spec.whole;
    if (this.spec.names) return [low - 0.25, high + 0.25];
    const from = Math.max(low, view.from ?? low), to = Math.min(high, view.to ?? high);
    return from < to ? [from, to] : [low - 0.5, high + 0.5];
  }

  /// Indices of a series that are in the range, and the next one on each side.
  visible(series, [from, to]) {
    return [Math.max(0, lowerBound(series.steps, from) - 1), Math.min(series.steps.length, lowerBound(series.steps, to + 1e-9) + 1)];
  }

  values(range) {
    let low = Infinity, high = -Infinity;
    const use = value => { if (value !== null && (!this.kept.log || value > 0)) { low = Math.min(low, value); high = Math.max(high, value); } };
    if (this.spec.stack) {
      const [begin, end] = this.visible(this.spec.series[0], range);
      for (let i = begin; i < end; ++i) use(this.spec.series.reduce((sum, s) => sum + (s.values[i] || 0), 0));
    } else {
      for (const s of this.spec.series) { const [begin, end] = this.visible(s, range); for (let i = begin; i < end; ++i) use(s.values[i]); }
    }
    if (this.kept.refs) for (const ref of this.spec.refs || []) use(ref.value);
    if (low > high) { low = this.kept.log ? 1 : 0; high = this.kept.log ? 10 : 1; }
    if (this.kept.log) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
    if (this.spec.stack || this.spec.zero) low = Math.min(0, low);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === 0 ? 0 : low - room, high + room];
  }

  draw() {
    const spec = this.spec, width = Math.max(260, this.holder.clientWidth || 600), height = width < 420 ? 210 : 240;
    const range = this.range(), factor = this.unit.factor;
    const [low, high] = this.values(range).map(v => v / factor);
    const ticks = this.kept.log ? logTicks(low, high) : ticksOf(low, high, 5);
    const names = ticks.map(tickText);
    const left = Math.max(34, 14 + 6.6 * Math.max(...names.map(n => n.length), 1)), right = 14, bottom = 34;
    const kinds = [...new Set((spec.marks || []).map(m => m.kind))], top = 18 + 11 * Math.max(0, kinds.length - 1);
    const plot = {left, top, width: width - left - right, height: height - top - bottom};
    const x = step => plot.left + (step - range[0]) / (range[1] - range[0]) * plot.width;
    const scale = this.kept.log ? v => Math.log(Math.max(v, 1e-300)) : v => v;
    const y = value => plot.top + plot.height * (1 - (scale(value / factor) - scale(low)) / (scale(high) - scale(low)));
    Object.assign(this, {plot, x, y, shown: range});
    const clip = `clip${this.number}`;
    const root = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application", id: `${spec.id}-plot`,
      "aria-roledescription": "chart", "aria-label": this.summary(), "aria-describedby": "keys"},
      svg("clipPath", {id: clip}, svg("rect", {x: plot.left, y: plot.top - 3, width: plot.width, height: plot.height + 4})));
    const inside = svg("g", {"clip-path": `url(#${clip})`});
    this.drawShade(inside);
    ticks.forEach((tick, i) => root.append(
      svg("line", {class: "grid", x1: plot.left, x2: plot.left + plot.width, y1: y(tick * factor), y2: y(tick * factor)}),
      svg("text", {x: plot.left - 6, y: y(tick * factor) + 4, "text-anchor": "end"}, names[i])));
    this.drawSteps(root, range, width, height);
    root.append(inside);
    if (spec.stack) this.drawStack(inside, range); else spec.series.forEach(s => this.drawLine(inside, s, range));
    this.drawRefs(inside, root);
    const ends = new Map();  // where the last mark of each kind is
    for (const mark of spec.marks || []) {
      const row = kinds.indexOf(mark.kind);
      if (mark.step < range[0] || mark.step > range[1] || x(mark.step) - (ends.get(row) ?? -99) < 5) continue;
      ends.set(row, x(mark.step));
      root.append(svg("g", {class: "mark", transform: `translate(${x(mark.step).toFixed(1)} ${plot.top - 6 - 11 * row})`}, this.mark(mark.kind)));
    }
    this.layer = svg("g", {});
    root.append(this.layer);
    this.listen(root);
    replacePlot(this.holder, root);
    if (this.at !== undefined) this.show(this.at); else this.output.textContent = "";
  }

  drawSteps(root, range, width, height) {
    const plot = this.plot;
    root.append(svg("line", {class: "axis", x1: plot.left, x2: plot.left + plot.width, y1: plot.top + plot.height, y2: plot.top + plot.height}));
    const names = this.spec.names, text = tick => names ? names[tick] : stepText(tick);
    const room = names ? 16 + 6.6 * Math.max(...names.map(name => name.length)) : 90;
    const ticks = ticksOf(Math.ceil(range[0]), Math.floor(range[1]), plot.width / room, true).filter(t => t >= range[0] && t <= range[1]);
    for (const tick of ticks) {
      const at = this.x(tick), half = 3 * text(tick).length;
      root.append(svg("line", {class: "axis", x1: at, x2: at, y1: plot.top + plot.height, y2: plot.top + plot.height + 4}),
        svg("text", {x: Math.max(4 + half, Math.min(at, width - 4 - half)), y: plot.top + plot.height + 16, "text-anchor": "middle"}, text(tick)));
    }
    root.append(svg("text", {x: plot.left + plot.width / 2, y: height - 3, "text-anchor": "middle"}, this.spec.axis || "step"));
  }

  drawShade(inside) {
    const {top, height} = this.plot;
    for (const {from, to, lane} of this.spec.shade || []) {
      const begin = this.x(from - 0.5), end = this.x(to + 0.5);
      inside.append(svg("rect", {class: "shade", "data-lane": lane, x: begin, y: top, width: Math.max(0.5, end - begin), height, fill: laneColour(lane), opacity: 0.17}));
    }
  }

  /// Lines inside the plot, their names above everything that is drawn so far.
  drawRefs(inside, names) {
    if (!this.kept.refs) return;
    let below = -99;
    for (const ref of [...this.spec.refs || []].sort((a, b) => b.value - a.value)) {
      const at = this.y(ref.value), {left, width, top} = this.plot, words = Math.max(at < top + 14 ? at + 14 : at - 5, below + 14);
      below = words;
      inside.append(svg("line", {class: "ref", x1: left, x2: left + width, y1: at, y2: at, style: ref.colour ? `stroke:${ref.colour}` : null}));
      names.append(svg("text", {class: "reftext", x: left + width - 4, y: words, "text-anchor": "end"}, ref.name));
    }
  }

  /// For each pixel column first, least, greatest and last value, so that no peak is lost.
  drawLine(inside, series, range) {
    if (series.mean) {
      this.drawLine(inside, {...series, mean: null, pale: true}, range);
      return this.drawLine(inside, {...series, ...series.mean, mean: null, dots: false}, range);
    }
    const [begin, end] = this.visible(series, range);
    let path = "", open = false, column = null, shown = 0;
    const flush = () => {
      if (column === null) return;
      for (const value of column.values()) { path += `${open ? "L" : "M"}${column.x} ${this.y(value).toFixed(1)}`; open = true; }
      column = null;
    };
    for (let i = begin; i < end; ++i) {
      const value = series.values[i];
      if (value === null || (this.kept.log && value <= 0)) { flush(); open = false; continue; }
      const at = Math.round(this.x(series.steps[i]) * 2) / 2;
      if (column === null || column.x !== at) { flush(); column = new Column(at, value); } else column.add(value);
      ++shown;
    }
    flush();
    inside.append(svg("path", {class: "line", d: path || "M0 0", stroke: series.colour, "stroke-dasharray": series.dash, opacity: series.pale ? 0.35 : null}));
    if (series.pale || (!series.dots && shown > 40)) return;
    for (let i = begin; i < end; ++i) {
      if (series.values[i] === null || (this.kept.log && series.values[i] <= 0)) continue;
      inside.append(svg("circle", {cx: this.x(series.steps[i]), cy: this.y(series.values[i]), r: 2.6, fill: series.colour}));
    }
  }

  drawStack(inside, range) {
    const first = this.spec.series[0], [begin, end] = this.visible(first, range);
    const base = new Array(end).fill(0), ends = this.spec.ends;
    for (const series of this.spec.series) {
      let above = "", below = "";
      for (let i = begin; i < end; ++i) {
        const top = base[i] + (series.values[i] || 0), l = this.x(first.steps[i] - 0.5).toFixed(1), r = this.x(ends[i] + 0.5).toFixed(1);
        const high = this.y(top).toFixed(1), deep = this.y(base[i]).toFixed(1);
        above += `${above ? "L" : "M"}${l} ${high}L${r} ${high}`;
        below = `L${r} ${deep}L${l} ${deep}${below}`;
        base[i] = top;
      }
      inside.append(svg("path", {class: "area", d: `${above}${below}Z`, fill: series.colour, opacity: 0.85}));
    }
  }

  summary() {
    const words = this.spec.series.slice(0, 6).map(s => {
      const values = s.values.filter(v => v !== null);
      if (values.length === 0) return `${s.name}: no finite value`;
      const least = values.reduce((a, b) => Math.min(a, b)), most = values.reduce((a, b) => Math.max(a, b));
      return `${s.name}: ${this.text(values[0])} at ${this.place(s.steps[0])}, ${this.text(values[values.length - 1])} at ${this.place(s.steps[s.steps.length - 1])}, least ${this.text(least)}, greatest ${this.text(most)}`;
    });
    return `${this.spec.title}. ${words.join(". ")}`;
  }

  place(step) { return this.spec.names ? `${this.spec.axis} ${this.spec.names[step]}` : `step ${step}`; }

  text(value) {
    if (value === null) return "not finite";
    if (this.spec.kind === "bytes") return formatBytes(value);
    if (this.spec.kind === "seconds") return formatSeconds(value);
    return `${digits(value)}${this.spec.kind === "%" ? "%" : ""}`;
  }

  /// Shows the values of the drawn step that is nearest to `step`.
  show(step) {
    const i = lowerBound(this.steps, step);
    const near = [this.steps[i - 1], this.steps[i]].filter(s => s !== undefined).sort((a, b) => Math.abs(a - step) - Math.abs(b - step))[0];
    this.layer.replaceChildren();
    if (near === undefined) return;
    this.at = near;
    const parts = [];
    for (const series of this.spec.series) {
      const k = this.spec.stack || this.spec.grouped ? Math.max(0, lowerBound(series.steps, near + 0.5) - 1) : lowerBound(series.steps, near);
      if (k >= series.steps.length || (!this.spec.grouped && !this.spec.stack && series.steps[k] !== near)) continue;
      const value = series.values[k];
      parts.push(el("span", {"data-series": series.name, "data-value": String(value), style: "white-space:nowrap"}, " · ", swatch(series.colour, this.spec.stack ? "" : "thin"), `${series.name} ${this.text(value)}`));
      if (!this.spec.stack && value !== null && !(this.kept.log && value <= 0)) this.layer.append(svg("circle", {cx: this.x(near), cy: this.y(value), r: 3.5, fill: series.colour}));
    }
    const happened = (this.spec.marks || []).filter(m => m.step === near).map(m => m.kind);
    this.output.replaceChildren(el("b", {"data-step": near}, this.place(near)), ...parts, happened.length > 0 ? ` · ${happened.join(", ")}` : "");
    if (near < this.shown[0] || near > this.shown[1]) return;
    this.layer.append(svg("line", {class: "cursor", x1: this.x(near), x2: this.x(near), y1: this.plot.top, y2: this.plot.top + this.plot.height}));
  }

  listen(root) {
    const stepAt = event => {
      const box = root.getBoundingClientRect(), at = (event.clientX - box.left) * root.viewBox.baseVal.width / box.width;
      return this.shown[0] + (at - this.plot.left) / this.plot.width * (this.shown[1] - this.shown[0]);
    };
    let begun = null;
    const zooms = !this.spec.names;
    root.addEventListener("pointermove", event => {
      const at = stepAt(event);
      this.show(at);
      if (begun === null) return;
      const [a, b] = [Math.min(begun, at), Math.max(begun, at)].map(s => this.x(Math.min(this.shown[1], Math.max(this.shown[0], s))));
      this.layer.append(svg("rect", {class: "select", x: a, width: b - a, y: this.plot.top, height: this.plot.height}));
    });
    root.addEventListener("pointerdown", event => { if (zooms && event.pointerType === "mouse" && event.button === 0) { begun = stepAt(event); root.setPointerCapture(event.pointerId); } });
    root.addEventListener("pointerup", event => {
      const start = begun, end = stepAt(event);
      begun = null;
      if (start !== null && Math.abs(this.x(start) - this.x(end)) > 6) zoomTo(Math.min(start, end), Math.max(start, end));
    });
    root.addEventListener("dblclick", () => zooms && zoomTo(null, null));
    root.addEventListener("keydown", event => this.press(event));
  }

  press(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const inside = this.steps.slice(lowerBound(this.steps, this.shown[0]), lowerBound(this.steps, this.shown[1] + 1e-9));
    const last = inside.length - 1, jump = event.shiftKey ? 10 : 1;
    const at = this.at === undefined ? -1 : lowerBound(inside, this.at);
    const move = index => { if (last >= 0) this.show(inside[Math.max(0, Math.min(last, index))]); };
    const keys = {
      ArrowRight: () => move(at + jump), ArrowLeft: () => move(at < 0 ? last : at - jump), Home: () => move(0), End: () => move(last),
      "+": () => zoomBy(0.5, this.at), "=": () => zoomBy(0.5, this.at), "-": () => zoomBy(2, this.at), "0": () => zoomTo(null, null),
      Escape: () => { this.at = undefined; this.layer.replaceChildren(); this.output.textContent = ""; },
    };
    if (!keys[event.key] || (this.spec.names && "+=-0".includes(event.key))) return;
    event.preventDefault();
    keys[event.key]();
  }
}

class Column {
  constructor(x, value) { this.x = x; this.first = this.least = this.most = this.last = value; }
  add(value) { this.least = Math.min(this.least, value); this.most = Math.max(this.most, value); this.last = value; }
  values() { return [...new Set([this.first, this.least, this.most, this.last])]; }
}

/// Shows the steps `from` to `to` in all charts; null: all.
function zoomTo(from, to) {
  if (from === null) return view.set(null, null);
  from = Math.round(from); to = Math.round(to);
  view.set(from, Math.max(from + 1, to));
}

function zoomBy(factor, around) {
  const [low, high] = view.whole, from = view.from ?? low, to = view.to ?? high;
  const middle = around !== undefined && around >= from && around <= to ? around : (from + to) / 2;
  const begin = middle - (middle - from) * factor, end = middle + (to - middle) * factor;
  if (begin <= low && end >= high) return zoomTo(null, null);
  if (end - begin < 2 && factor < 1) return;
  zoomTo(Math.max(low, begin), Math.min(high, end));
}
