// Lanes of one step over time: measured and predicted with the same scale.

/// The slices of a timeline by lane, and the time of each step.
function readTimeline(data) {
  const lanes = new Map(), steps = new Map();
  for (let i = 0; i < data.start.length; ++i) {
    const lane = data.names[data.lane[i]];
    const slice = {lane, name: data.names[data.name[i]], start: data.start[i] / 1e9, end: (data.start[i] + data.duration[i]) / 1e9,
      step: data.step[i], bytes: data.bytes[i], critical: data.critical[i] === 1};
    if (!lanes.has(lane)) lanes.set(lane, []);
    lanes.get(lane).push(slice);
  }
  for (const {step, from, to, whole} of data.steps) steps.set(step, {from: from / 1e9, to: to / 1e9, whole});
  for (const slices of lanes.values()) slices.sort((a, b) => a.start - b.start);
  const place = lane => LANES.indexOf(kindOf(lane)), known = [...lanes].filter(([lane]) => place(lane) >= 0);
  const ordered = new Map(known.sort(([a], [b]) => place(a) - place(b) || deviceOf(a) - deviceOf(b)));
  return {lanes: ordered, steps, predicted: data.predicted, source: data.source, leftOut: data.left_out, joined: data.joined};
}

class TimelineChart {
  /// `kept`: step and range of time, which outlive a new drawing.
  constructor(timelines, kept) {
    this.kept = kept;
    const all = timelines.map(readTimeline).filter(t => t.steps.size > 0);
    this.groups = [...all.filter(t => !t.predicted), ...all.filter(t => t.predicted)];
    const chosen = this.groups.find(t => !t.predicted) || this.groups[0];
    this.steps = chosen ? [...chosen.steps.keys()].sort((a, b) => a - b) : [];
    if (!this.steps.includes(kept.step)) { kept.step = this.steps[Math.min(1, this.steps.length - 1)]; kept.from = kept.to = null; }
    this.holder = el("div");
    this.output = el("output", {"aria-live": "polite", id: "timeline-values"});
    this.element = el("figure", {id: "timeline", class: "chart wide"}, this.head(), this.holder, this.output,
      legend([["on the critical path", "var(--ink)", "thin"], ["pale: of another step", "color-mix(in srgb, var(--compute) 35%, var(--paper))"]]),
      el("figcaption", {}, this.caption()));
  }

  caption() {
    const sources = this.groups.map(t => {
      const words = [t.leftOut > 0 && `${t.leftOut.toLocaleString("en")} operations of other steps are left out`, t.joined > 0 && `${t.joined.toLocaleString("en")} short ones are drawn in groups`].filter(Boolean);
      return `${t.predicted ? "Predicted" : "Measured"}: ${t.source}${words.length > 0 ? ` (${words.join("; ")})` : ""}.`;
    });
    return `${sources.join(" ")} A step lasts from the end of the computation before it to the end of its own. The critical path is the chain of operations that ends last, each after the one for which it waited longest.`;
  }

  head() {
    const turn = by => () => this.choose(this.steps[Math.max(0, Math.min(this.steps.length - 1, this.steps.indexOf(this.kept.step) + by))]);
    this.select = el("select", {id: "timeline-step", onchange: event => this.choose(Number(event.target.value))},
      this.steps.map(step => el("option", {value: step, selected: step === this.kept.step}, String(step))));
    return el("div", {class: "head"}, el("h3", {}, "Lanes of a step ", el("span", {class: "unit"}, "(time since the step began)")),
      el("span", {class: "bar-controls", style: "margin:0"},
        el("button", {type: "button", id: "timeline-previous", onclick: turn(-1)}, "Previous"),
        el("label", {}, "Step ", this.select),
        el("button", {type: "button", id: "timeline-next", onclick: turn(1)}, "Next"),
        el("button", {type: "button", id: "timeline-in", "aria-label": "Zoom into the timeline", onclick: () => this.zoom(0.5)}, "+"),
        el("button", {type: "button", id: "timeline-out", "aria-label": "Zoom out of the timeline", onclick: () => this.zoom(2)}, "−"),
        el("button", {type: "button", id: "timeline-all", onclick: () => this.zoom(null)}, "Whole step")));
  }

  choose(step) {
    Object.assign(this.kept, {step, from: null, to: null});
    this.select.value = step;
    this.picked = null;
    this.draw();
  }

  /// The time at which a group's step begins. A prediction is of any step in steady state: its middle one.
  windowOf(group) {
    const middle = [...group.steps.keys()].sort((a, b) => a - b)[Math.floor(group.steps.size / 2)];
    const step = group.predicted && group !== this.groups[0] ? middle : this.kept.step;
    return {step, ...(group.steps.get(step) || group.steps.get(middle))};
  }

  range() {
    const longest = Math.max(...this.groups.map(g => { const w = this.windowOf(g); return w.to - w.from; }));
    return [this.kept.from ?? -0.02 * longest, this.kept.to ?? 1.04 * longest];
  }

  zoom(factor, around) {
    if (factor === null) { this.kept.from = this.kept.to = null; return this.draw(); }
    const [from, to] = this.range(), middle = around ?? (this.picked ? this.pickedTime() : (from + to) / 2);
    Object.assign(this.kept, {from: middle - (middle - from) * factor, to: middle + (to - middle) * factor});
    this.draw();
  }

  pickedTime() { return (this.picked.slice.start + this.picked.slice.end) / 2 - this.windowOf(this.picked.group).from; }

  draw() {
    if (this.groups.length === 0) return;
    const width = Math.max(300, this.holder.clientWidth || 900), row = 19, gap = 6, head = 20, right = 10;
    const left = this.groups.some(g => [...g.lanes.keys()].some(lane => kindOf(lane) !== lane)) ? 118 : 70;
    const range = this.range(), lanesOf = g => [...g.lanes].filter(([, slices]) => slices.length > 0);
    const height = this.groups.reduce((sum, g) => sum + head + lanesOf(g).length * (row + gap) + 8, 0) + 34;
    const plot = this.plot = {left, width: width - left - right};
    const x = time => plot.left + (time - range[0]) / (range[1] - range[0]) * plot.width;
    const root = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application", id: "timeline-plot",
      "aria-roledescription": "timeline", "aria-label": this.summary(), "aria-describedby": "keys"},
      svg("clipPath", {id: "clip-timeline"}, svg("rect", {x: plot.left, y: 0, width: plot.width, height})));
    const unit = unitFor("seconds", range[1] - range[0]), bottom = height - 34;
    for (const tick of ticksOf(range[0] / unit.factor, range[1] / unit.factor, plot.width / 90)) {
      const at = x(tick * unit.factor);
      root.append(svg("line", {class: "grid", x1: at, x2: at, y1: head, y2: bottom}));
      if (at > plot.left + 8 && at < width - 18) root.append(svg("text", {x: at, y: bottom + 15, "text-anchor": "middle"}, digits(tick, 6)));
    }
    root.append(svg("text", {x: plot.left + plot.width / 2, y: height - 4, "text-anchor": "middle"}, `time (${unit.name})`));
    let top = 0;
    for (const group of this.groups) {
      const shown = this.windowOf(group);
      root.append(svg("text", {class: "group", x: 0, y: top + 14}, `${group.predicted ? "Predicted" : "Measured"}, step ${shown.step}: ${formatSeconds(shown.to - shown.from)}${shown.whole ? "" : " of computation"}`));
      top += head;
      for (const [lane, slices] of lanesOf(group)) {
        root.append(svg("text", {class: "rowname", x: left - 6, y: top + 14, "text-anchor": "end"}, lane));
        root.append(this.drawLane(group, shown, slices, {x, top, row, range}));
        top += row + gap;
      }
      top += 8;
    }
    this.x = x;
    this.listen(root, plot, range);
    replacePlot(this.holder, root);
    this.tell();
  }

  drawLane(group, shown, slices, {x, top, row, range}) {
    const lane = svg("g", {"clip-path": "url(#clip-timeline)"});
    let last = null;
    const flush = () => { if (last) lane.append(...this.drawSlice(last, top, row)); last = null; };
    for (const slice of slices) {
      const start = slice.start - shown.from, end = slice.end - shown.from;
      if (end < range[0] || start > range[1]) continue;
      const box = {group, slice, from: x(start), to: Math.max(x(end), x(start) + 0.4), other: slice.step !== shown.step, critical: slice.critical};
      const picked = this.picked && this.picked.slice === slice;
      box.picked = picked;
      const tiny = b => b.to - b.from < 1 && !b.picked;
      if (last && tiny(last) && tiny(box) && box.from - last.to < 0.7 && last.other === box.other) {
        last.to = box.to; last.critical = last.critical || box.critical;
        if (last.to - last.from >= 3) flush();
      } else { flush(); last = box; }
    }
    flush();
    return lane;
  }

  drawSlice(box, top, row) {
    const width = box.to - box.from;
    const rect = svg("rect", {x: box.from.toFixed(2), y: top, width: Math.max(0.4, width - (width > 3 ? 0.7 : 0)).toFixed(2), height: row, fill: laneColour(box.slice.lane),
      class: [box.other && "other", box.picked && "picked"].filter(Boolean).join(" ") || null}, svg("title", {}, this.words(box.slice)));
    rect.addEventListener("pointerenter", () => { this.tell(box.group, box.slice); });
    rect.addEventListener("click", () => { this.picked = {group: box.group, slice: box.slice}; this.draw(); });
    const fits = box.from >= this.plot.left && Math.min(box.to, this.plot.left + this.plot.width) - box.from > 12 + 6.6 * box.slice.name.length;
    return [rect, box.critical && svg("rect", {class: "crit", x: box.from.toFixed(2), y: top + row + 1, width: width.toFixed(2), height: 3}),
      fits && svg("text", {class: box.other ? "" : "on", x: box.from + 6, y: top + 14, "pointer-events": "none"}, box.slice.name)].filter(Boolean);
  }

  words(slice) {
    return `${slice.lane}: ${slice.name}, ${formatSeconds(slice.end - slice.start)}${slice.bytes > 0 ? `, ${formatBytes(slice.bytes)}` : ""}${slice.step > 0 ? `, step ${slice.step}` : ""}${slice.critical ? ", on the critical path" : ""}`;
  }

  tell(group, slice) {
    if (!slice && this.picked) ({group, slice} = this.picked);
    if (!slice) { this.output.textContent = ""; return; }
    const at = slice.start - this.windowOf(group).from;
    this.output.textContent = `${group.predicted ? "predicted" : "measured"} ${this.words(slice)}, begins at ${formatSeconds(Math.abs(at))}${at < 0 ? " before the step" : ""}`;
  }

  summary() {
    return this.groups.map(g => `${g.predicted ? "Predicted" : "Measured"} timeline with the lanes ${[...g.lanes.keys()].join(", ")}; ${[...g.lanes.values()].flat().filter(s => s.critical).length} operations on the critical path`).join(". ");
  }

  listen(root, plot, range) {
    const timeAt = event => {
      const box = root.getBoundingClientRect();
      return range[0] + ((event.clientX - box.left) * root.viewBox.baseVal.width / box.width - plot.left) / plot.width * (range[1] - range[0]);
    };
    let begun = null;
    root.addEventListener("pointerdown", event => { if (event.pointerType === "mouse" && event.button === 0) begun = timeAt(event); });
    root.addEventListener("pointerup", event => {
      const start = begun, end = timeAt(event);
      begun = null;
      if (start === null || Math.abs(this.x(start) - this.x(end)) < 6) return;
      Object.assign(this.kept, {from: Math.min(start, end), to: Math.max(start, end)});
      this.draw();
    });
    root.addEventListener("dblclick", () => this.zoom(null));
    root.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.8 : 1.25, timeAt(event));
    }, {passive: false});
    root.addEventListener("keydown", event => this.press(event));
  }

  press(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const pan = share => { const [from, to] = this.range(), by = share * (to - from); Object.assign(this.kept, {from: from + by, to: to + by}); this.draw(); };
    const keys = {
      ArrowRight: () => event.shiftKey ? pan(0.25) : this.move(1), ArrowLeft: () => event.shiftKey ? pan(-0.25) : this.move(-1),
      ArrowDown: () => this.changeLane(1), ArrowUp: () => this.changeLane(-1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.zoom(null),
      Escape: () => { this.picked = null; this.draw(); },
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  rows() { return this.groups.flatMap(group => [...group.lanes.values()].map(slices => ({group, slices}))); }

  pick(group, slice) {
    this.picked = {group, slice};
    const at = this.pickedTime(), [from, to] = this.range();
    if (at < from || at > to) Object.assign(this.kept, {from: at - (to - from) / 2, to: at + (to - from) / 2});
    this.draw();
  }

  move(by) {
    const row = this.rows().find(r => this.picked && r.slices.includes(this.picked.slice)) || this.rows()[0];
    const from = this.windowOf(row.group).from + this.range()[0];
    const at = this.picked ? row.slices.indexOf(this.picked.slice) + by : row.slices.findIndex(s => s.end >= from);
    this.pick(row.group, row.slices[Math.max(0, Math.min(row.slices.length - 1, at))]);
  }

  changeLane(by) {
    if (!this.picked) return this.move(0);
    const rows = this.rows(), index = rows.findIndex(r => r.slices.includes(this.picked.slice));
    const row = rows[Math.max(0, Math.min(rows.length - 1, index + by))], time = this.pickedTime() + this.windowOf(row.group).from;
    const distance = slice => Math.abs((slice.start + slice.end) / 2 - time);
    this.pick(row.group, row.slices.reduce((best, slice) => distance(slice) < distance(best) ? slice : best));
  }
}
