// Puts the page together. Data: kind "report" (live, runs, differing), "plan" (plan, timelines, text) or
// "bench" (bench, rows, machine, earlier; see bench.js).

const kept = {charts: {}, run: 0, timeline: {}};
let data = JSON.parse(document.getElementById("data").textContent);
let drawn = [];

const STATES = {
  "finished": ["good", "finished"], "under way": ["warn", "under way"], "ended": ["", "ended"], "not started": ["warn", "no step has finished yet"],
  "ended early": ["bad", "ended before its last step"],
};
function stateOf(run, short = false) {
  const [kind, words] = STATES[run.state] || ["", run.state];
  return el("span", {class: `state whole ${kind}`}, short ? run.state : words);
}
const stepsOf = run => run.rows === 0 ? "no steps" : `step ${run.last_step.toLocaleString("en")}${run.planned_steps > 0 ? ` of ${run.planned_steps.toLocaleString("en")}` : ""}`;
const lastOf = (run, key) => run.totals.last[key] === null ? "-" : digits(run.totals.last[key]);
const lastLoss = run => run.totals.ends_not_finite ? "not finite" : lastOf(run, "loss");

/// Tokens per second at the GEMM peak. A run that was faster proves that other work slowed the
/// measurement of the peak.
function rooflineOf(run) {
  const plan = (run.run || {}).plan;
  if (!plan || !plan.gemm_peak_flops || !plan.flops_per_step) return null;
  const seen = run.series.tokens_per_second.values.reduce((most, value) => Math.max(most, value || 0), 0);
  return Math.max(plan.gemm_peak_flops / plan.flops_per_step * plan.tokens_per_step, seen);
}
/// FLOP/s at the roofline.
const peakOf = run => rooflineOf(run) * run.run.plan.flops_per_step / run.run.plan.tokens_per_step;

/// The lanes that a run has: pass exists only with several devices.
const lanesOf = run => LANES.filter(lane => run.means.lanes[lane]);

/// Groups of steps with the lane that was busy for most of them.
function boundsOf(run) {
  const shade = [], {first, last, lanes} = run.means;
  first.forEach((from, i) => {
    let lane = null, most = 0;
    for (const name of lanesOf(run)) { const busy = lanes[name].busy_seconds[i] || 0; if (busy > most) { most = busy; lane = name; } }
    const before = shade[shade.length - 1];
    if (lane === null) return;
    if (before && before.lane === lane) before.to = last[i]; else shade.push({from, to: last[i], lane});
  });
  return shade;
}

// With pairs of completions (DPO), a loss belongs to a pair.
const hasPairs = run => run.series["rewards.margin"].values.length > 0;
const lossUnit = run => hasPairs(run) ? "nats per pair" : "nats per token";
const unitOfLoss = runs => runs.every(run => lossUnit(run) === lossUnit(runs[0])) ? lossUnit(runs[0]) : "nats per token or pair";

/// A line for each distinct roofline.
function rooflines(runs) {
  const lines = [];
  runs.forEach((run, i) => {
    const value = rooflineOf(run), same = value && lines.find(line => Math.abs(line.value / value - 1) < 0.02);
    if (same) { same.runs.push(run.name); same.colour = null; } else if (value) lines.push({value, runs: [run.name], colour: runs.length > 1 ? runColour(i) : null});
  });
  for (const line of lines) line.name = `roofline ${runs.length > 1 ? `${line.runs.join(", ")}: ` : ""}${formatCount(line.value)} tokens/s`;
  return lines;
}

function curves(runs, chosen) {
  const several = runs.length > 1, whole = view.whole;
  const lines = (key, name, more = {}) => runs.map((run, i) => ({name: several ? `${run.name}${name ? `, ${name}` : ""}` : name || "value", colour: several ? runColour(i) : "var(--c0)", ...run.series[key], ...more}))
    .filter(s => s.values.length > 0);
  const marks = chosen.marks.list, per = chosen.series.loss.rows_per_group;
  const grouped = per > 1 ? `Pale: the least and the greatest value of each ${per.toLocaleString("en")} steps; the line is a mean.` : null;
  const roofs = rooflines(runs);
  const shade = boundsOf(chosen), groups = chosen.means;
  const used = lanesOf(chosen).filter(lane => groups.lanes[lane].busy_seconds.some(v => v > 0)), moved = lanesOf(chosen).filter(lane => groups.lanes[lane].bytes.some(v => v > 0));
  const own = several ? ` of ${chosen.name}` : "";
  const percent = values => values.map((v, i) => groups.step_seconds[i] > 0 && v !== null ? 100 * v / groups.step_seconds[i] : null);
  const devices = groups.devices, means = devices.length > 1 ? `Means over the ${devices.length} devices. ` : "";
  const busiest = Math.max(0, ...used.flatMap(lane => groups.lanes[lane].busy_seconds.map((v, i) => 100 * v / (groups.step_seconds[i] || Infinity))));
  const held = lines("eval_loss", "held-out loss", several ? {dash: "5 3"} : {colour: "var(--c1)", dots: true});
  return [
    {id: "loss", title: "Loss", kind: unitOfLoss(runs), series: [...lines("loss", several ? "" : "loss"), ...held], named: true, dashed: "dashed: held-out loss", marks, log: true, caption: grouped},
    {id: "norm", title: "Gradient norm", kind: "L2, before clipping", series: lines("grad_norm", several ? "" : "gradient norm"), log: true, marks: marks.filter(m => m.kind !== "checkpoint")},
    {id: "scale", title: "Loss scale", kind: "factor of the gradients in fp16", series: lines("loss_scale", several ? "" : "loss scale"), log: true, marks: marks.filter(m => m.kind === "update skipped")},
    {id: "lr", title: "Learning rate", kind: "per update", series: lines("lr", several ? "" : "learning rate"), zero: true},
    {id: "speed", title: "Speed", kind: "tokens/s", series: lines("tokens_per_second", several ? "" : "tokens/s"), zero: true, shade, refs: roofs, refsName: "show the roofline", named: true,
      caption: roofs.length > 0 ? `Roofline: all matrix products of a step at the measured GEMM peak${several ? "" : ` (${formatFlops(peakOf(chosen))})`}. Shaded: the lane that was busy longest${own}.`
        : "The run has not recorded its GEMM peak, so there is no roofline."},
    {id: "time", title: "Step time", kind: "seconds", series: lines("step_seconds", several ? "" : "step time"), zero: true, log: true},
    {id: "busy", title: `Busy time of each lane${own}`, kind: "%", per: "of the step", grouped: true, caption: busiest > 101 ? `${means}More than 100%: older versions of ballast counted an evaluation for the step after it.` : means || null, zero: true, named: true,
      series: used.map(lane => ({name: lane, colour: laneColour(lane), steps: groups.first, values: percent(groups.lanes[lane].busy_seconds)}))},
    {id: "devices", title: `Computing time of each device${own}`, kind: "%", per: "of the step", grouped: true, zero: true, named: true,
      series: devices.map((device, d) => ({name: `device ${d}`, colour: runColour(d), steps: groups.first, values: percent(device.compute.busy_seconds)}))},
    {id: "bytes", title: `Bytes moved by each lane${own}`, kind: "bytes", per: "per step", stack: true, ends: groups.last, named: true,
      series: moved.map(lane => ({name: lane, colour: laneColour(lane), steps: groups.first, values: groups.lanes[lane].bytes}))},
    {id: "wear", title: "Written to NVMe since the start", kind: "bytes", series: lines("nvme_bytes_written", several ? "" : "written").filter(s => s.values.some(v => v > 0)), zero: true, caption: chosen.totals.wear ? `${chosen.name}: ${chosen.totals.wear}.` : null},
    {id: "balance", title: "Load-balancing loss of the routers", kind: "without its coefficient", series: lines("experts.balance_loss", several ? "" : "load-balancing loss"), log: true},
    {id: "router-z", title: "Router z-loss", kind: "without its coefficient", series: lines("experts.router_z_loss", several ? "" : "z-loss"), log: true},
    {id: "load", title: "Largest load of an expert", kind: "times the mean of its layer", series: lines("experts.largest_load", several ? "" : "largest load"), zero: true, caption: "1: all experts of a layer have equal numbers of tokens. Measured on rank 0."},
    {id: "idle", title: "Experts without tokens", kind: "experts", per: "of all layers", series: lines("experts.idle", several ? "" : "without tokens"), zero: true},
    {id: "margin", title: "Reward margin", kind: "chosen less rejected", series: lines("rewards.margin", several ? "" : "margin")},
    {id: "accuracy", title: "Reward accuracy", kind: "share of pairs", series: lines("rewards.accuracy", several ? "" : "accuracy"), zero: true, caption: "Pairs whose chosen completion has the larger reward."},
  ].filter(spec => spec.series.some(s => s.values.some(v => v !== null))).map(spec => ({...spec, whole: spec.ends || spec.grouped ? [chosen.first_step, chosen.last_step] : whole}));
}

function controls() {
  const box = (id, name, value, use) => el("label", {}, `${name} `, el("input", {type: "number", id, min: view.whole[0], max: view.whole[1], value, onchange: event => use(Number(event.target.value))}));
  const from = view.from ?? view.whole[0], to = view.to ?? view.whole[1];
  return el("div", {class: "bar-controls", id: "range"},
    box("from", "Steps from", Math.round(from), value => zoomTo(value, Math.max(value + 1, view.to ?? view.whole[1]))),
    box("to", "to", Math.round(to), value => zoomTo(Math.min(value - 1, view.from ?? view.whole[0]), value)),
    el("button", {type: "button", id: "zoom-in", onclick: () => zoomBy(0.5)}, "Zoom in"), el("button", {type: "button", id: "zoom-out", onclick: () => zoomBy(2)}, "Zoom out"),
    el("button", {type: "button", id: "zoom-all", onclick: () => zoomTo(null, null)}, "All steps"),
    el("span", {class: "soft", id: "keys"}, "In a chart: drag or + and − zoom, 0 shows all, arrow keys read values."));
}

function overview(runs) {
  if (runs.length === 1) {
    const [run] = runs, t = run.totals, plan = (run.run || {}).plan, roof = rooflineOf(run), most = boundsOf(run).pop();
    return tiles([
      tile("Steps", run.rows === 0 ? "0" : run.last_step.toLocaleString("en"), run.planned_steps > 0 && `of ${run.planned_steps.toLocaleString("en")}, ${formatCount(t.tokens)} tokens`),
      tile("Loss", lastLoss(run), t.ends_not_finite ? `last step; ${lastOf(run, "loss")} ${lossUnit(run)} before` : `${lossUnit(run)}, last step`),
      t.last.eval_loss !== null && tile("Held-out loss", lastOf(run, "eval_loss"), hasPairs(run) ? lossUnit(run) : `nats per token, perplexity ${digits(Math.exp(t.last.eval_loss), 4)}`),
      tile("Speed", `${formatCount(t.median_tokens_per_second)} tokens/s`, roof ? `median; ${digits(100 * t.median_tokens_per_second / roof, 3)}% of the roofline` : "median"),
      tile("Step time", formatSeconds(t.median_step_seconds), plan && plan.predicted_step_seconds ? `median; predicted ${formatSeconds(plan.predicted_step_seconds)}` : "median"),
      tile("Training", formatSeconds(t.training_seconds), "all steps, without evaluations"),
      most && tile("Most busy lane", most.lane, "in the last steps"),
      t.nvme_bytes_written > 0 && tile("Written to NVMe", formatBytes(t.nvme_bytes_written), "since the start")]);
  }
  return table(["Run", "State", {number: "Steps"}, {number: `Loss (${unitOfLoss(runs)})`}, {number: "Held-out loss"}, {number: "Median tokens/s"}, {number: "Median step"}, {number: "Written to NVMe"}],
    runs.map((run, i) => [el("span", {class: "whole"}, swatch(runColour(i)), run.name), stateOf(run, true), {number: stepsOf(run).replace(/^step /, "")}, {number: lastLoss(run)}, {number: lastOf(run, "eval_loss")},
      {number: digits(run.totals.median_tokens_per_second, 4)}, {number: formatSeconds(run.totals.median_step_seconds)}, {number: run.totals.nvme_bytes_written > 0 ? formatBytes(run.totals.nvme_bytes_written) : "-"}]), "Runs");
}

/// "3, 7 to 12" for steps in ascending order.
function rangesOf(steps) {
  const ranges = [];
  for (const step of steps) {
    const last = ranges[ranges.length - 1];
    if (last && last.to === step - 1) last.to = step; else ranges.push({from: step, to: step});
  }
  return ranges.map(({from, to}) => from === to ? `${from}` : to === from + 1 ? `${from}, ${to}` : `${from} to ${to}`);
}

function events(run) {
  const counts = Object.entries(run.marks.counts).filter(([, count]) => count > 0);
  if (counts.length === 0) return [el("p", {class: "soft"}, "No update was skipped, nothing was repeated, and no checkpoint is kept.")];
  return [el("div", {id: "events"}, counts.map(([kind, count]) => {
    const steps = rangesOf(run.marks.list.filter(m => m.kind === kind).map(m => m.step)), most = 12;
    return el("p", {}, svg("svg", {width: 12, height: 12, viewBox: "-6 -6 12 12", style: "display:inline-block;vertical-align:-1px;margin-right:5px", "aria-hidden": "true"}, Chart.prototype.mark(kind)),
      `${kind}: ${plural(count, "step")} (${steps.slice(0, most).join(", ")}${steps.length > most || run.marks.list.filter(m => m.kind === kind).length < count ? ", ..." : ""})`);
  }))];
}

/// Medians of the steps.
const measuredLanes = run => Object.fromEntries(lanesOf(run).map(lane => {
  const {busy_seconds: busy, stalled_seconds: stalled, bytes} = run.totals.median_lanes[lane];
  const devices = run.totals.devices.map(device => device.median_lanes[lane]).filter(Boolean).map(times => ({busy: times.busy_seconds, stalled: times.stalled_seconds}));
  return [lane, {busy, stalled, bytes, devices}];
}));

/// "host 1.2 GiB" for each tier, and for each of several devices.
function measuredPeaks(run) {
  const {peak_bytes: peaks, devices} = run.totals;
  const ofTier = tier => tier === "device" && devices.length > 0 ? devices.map((device, d) => [`device ${d}`, device.peak_bytes]) : [[TIER_NAMES[tier], peaks[tier]]];
  return TIERS.flatMap(ofTier).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => `${name} ${formatBytes(bytes)}`);
}

function machineTable(run) {
  const facts = run.run;
  if (!facts) return el("p", {class: "soft"}, "The run directory has no run.json that can be read.");
  const rows = [["Started", facts.started], ["Host", facts.host], ["Processor", `${facts.cpu}, ${facts.cpus} usable`], ["Memory", facts.memory_bytes > 0 && formatBytes(facts.memory_bytes)], ["Device", facts.device], ["Ranks", facts.ranks],
    ["Update", facts.update_instruction_set], ["Disk I/O", facts.io_backend], ["Version of ballast", facts.version], ["Command", (facts.command || []).join(" ")], ["Directory", run.directory]].filter(([, value]) => value);
  return table(["What", "Value"], rows.map(([name, value]) => [name, String(value)]), "Machine and command", [1]);
}

function reportPage() {
  const runs = data.runs, chosen = runs[kept.run] || runs[0], plan = (chosen.run || {}).plan, several = runs.length > 1;
  const firsts = runs.filter(r => r.rows > 0);
  view.whole = firsts.length > 0 ? [Math.min(...firsts.map(r => r.first_step)), Math.max(...firsts.map(r => r.last_step))] : [0, 1];
  const specs = curves(runs, chosen);
  const charts = specs.map(spec => new Chart(spec, kept.charts[spec.id] ??= {}));
  const timeline = chosen.timelines.length > 0 ? new TimelineChart(chosen.timelines, kept.timeline) : null;
  drawn = [...charts, ...(timeline && timeline.groups.length > 0 ? [timeline] : [])];
  const chooser = several && el("p", {}, el("label", {}, "Lanes, memory and config of ", el("select", {id: "run", onchange: event => { kept.run = Number(event.target.value); kept.timeline = {}; build(); }},
    runs.map((run, i) => el("option", {value: i, selected: run === chosen}, run.name)))));
  return [
    several ? null : el("p", {id: "state"}, stateOf(chosen), chosen.rows > 0 ? `, ${stepsOf(chosen)}` : "", chosen.state === "ended early" ? ": it was interrupted or has failed" : "", data.live ? ". This page updates itself." : ""),
    runs.flatMap(run => run.notes.map(note => el("p", {class: "note"}, several ? `${run.name}: ` : "", note))),
    overview(runs), chooser,
    several && el("section", {}, el("h2", {}, "What differs"), data.differing.length > 0
      ? table(["Key", ...runs.map(run => run.name)], data.differing.map(({key, values}) => [key, ...values.map(value => value === null ? "-" : JSON.stringify(value))]), "Keys that differ", [0, ...runs.map((_, i) => i + 1)])
      : el("p", {class: "soft"}, "All keys of the configs are equal.")),
    el("section", {}, el("h2", {}, "Curves"), charts.length > 0 ? [controls(), el("div", {class: "charts", id: "curves"}, charts.map(c => c.element))] : el("p", {}, "No step has finished, so there is nothing to draw yet.")),
    el("section", {}, el("h2", {}, `Events${several ? ` of ${chosen.name}` : ""}`), events(chosen)),
    el("section", {}, el("h2", {}, `Lanes${several ? ` of ${chosen.name}` : ""}`), laneGloss(chosen.totals.devices.length), chosen.rows > 0 && laneTable(plan, measuredLanes(chosen), chosen.totals.median_step_seconds),
      timeline && timeline.groups.length > 0 ? timeline.element : el("p", {class: "soft", id: "no-timeline"}, "There is no timeline of this run: ballast train --trace records one, ballast plan --trace predicts one, and --trace shows them here.")),
    el("section", {}, el("h2", {}, `Memory${several ? ` of ${chosen.name}` : ""}`), plan && plan.ledger
      ? [memoryChart(plan, chosen.totals), placementChart(plan), el("h3", {}, "Ledger"), ledgerTable(plan)]
      : [el("p", {class: "soft"}, "The run has not recorded its plan. Measured at peak: ", measuredPeaks(chosen).join(", ") || "nothing", ".")]),
    el("section", {}, el("h2", {}, `Config${several ? ` of ${chosen.name}` : ""}`), plan && choiceSection(plan, chosen.config, true), jsonDetails("The config (config.json)", chosen.config)),
    el("section", {}, el("h2", {}, "Machine and command"), machineTable(chosen))];
}

function planPage() {
  const plan = data.plan, timeline = new TimelineChart(data.timelines, kept.timeline);
  drawn = timeline.groups.length > 0 ? [timeline] : [];
  const hide = Object.entries(plan.tokens_to_hide || {});
  return [
    el("p", {id: "state"}, "A prediction for ", el("b", {}, plan.machine), `: ${formatCount(plan.parameters)} parameters${plan.devices > 1 ? `, ${plan.devices} devices${plan.world > 1 ? " per rank" : ""}` : ""}${plan.world > 1 ? `, ${plan.world} ranks, ZeRO stage ${plan.stage}; memory and bytes are of one rank` : ""}. Nothing was run.`),
    tiles([tile("Step", formatSeconds(plan.predicted_step_seconds), `${plan.tokens_per_step.toLocaleString("en")} tokens`), tile("Speed", `${formatCount(plan.tokens_per_second)} tokens/s`, plan.bound_by ? `bound by ${plan.bound_by}` : "bound by no lane alone"),
      plan.bottleneck && tile("Bottleneck", plan.bottleneck, `busy ${digits(100 * plan.lanes[plan.bottleneck].busy_seconds / plan.predicted_step_seconds, 3)}% of the step`),
      plan.nvme_bytes_written > 0 && tile("Written to NVMe", formatBytes(plan.nvme_bytes_written), "per step"), data.wear && tile("Drive wear", ...data.wear.split(/ at this pace: /))]),
    el("section", {}, el("h2", {}, "Memory"), memoryChart(plan, null), placementChart(plan), el("details", {}, el("summary", {}, "Ledger"), ledgerTable(plan))),
    el("section", {}, el("h2", {}, "Time"), el("p", {class: "soft", id: "keys"}, "In the timeline: drag, + and − zoom, 0 shows the whole step, arrow keys go through operations and lanes."), timeline.groups.length > 0 && timeline.element, laneGloss(plan.devices || 1), laneTable(plan, null)),
    el("section", {}, el("h2", {}, "What would help"), (plan.improvements || []).length > 0 ? helpChart(plan.improvements) : el("p", {class: "soft"}, "No single change that was simulated makes the run 2% faster."),
      hide.length > 0 && [el("h3", {style: "margin-top:14px"}, "Tokens per step that hide transfers and updates"), table(["Resource", {number: "Tokens per step"}, "In this run"],
        hide.map(([what, tokens]) => [what, {number: formatCount(Math.ceil(tokens))}, tokens > plan.tokens_per_step ? `${digits(tokens / plan.tokens_per_step, 3)} times those of this run` : "hidden"]), "Tokens per step that hide transfers and updates")]),
    el("section", {}, el("h2", {}, "Config"), choiceSection(plan, plan.config, false), jsonDetails("The config with every choice", plan.config), el("details", {}, el("summary", {}, "As text"), el("pre", {tabindex: 0}, data.text.join("\n"))))];
}

function redraw() {
  for (const chart of drawn) chart.draw();
  for (const [id, value] of [["from", view.from ?? (view.whole || [])[0]], ["to", view.to ?? (view.whole || [])[1]]]) {
    const input = document.getElementById(id);
    if (input && document.activeElement !== input) input.value = Math.round(value);
  }
}

/// Draws everything from `data`. Focus and zoom do not change.
function build() {
  const focused = document.activeElement && document.activeElement.id;
  const main = document.getElementById("content");
  document.getElementById("title").textContent = document.title;
  main.replaceChildren(...({plan: planPage, bench: benchPage}[data.kind] || reportPage)().flat(Infinity).filter(Boolean));
  document.getElementById("footer").textContent = `Written by ballast ${data.version ?? ""} on ${data.written ?? ""}. This page is one file and needs no network.`;
  fitLabels();
  redraw();
  if (focused) { const again = document.getElementById(focused); if (again) again.focus({preventScroll: true}); }
}

/// Asks the server of `ballast report --watch` for what has changed.
async function follow() {
  let tag = null;
  while (true) {
    await new Promise(resolve => setTimeout(resolve, 2000));
    let words = null;
    try {
      const reply = await fetch("data.json", {cache: "no-store", headers: tag ? {"If-None-Match": tag} : {}});
      if (reply.status === 200) {
        tag = reply.headers.get("ETag");
        const {version, written} = data;
        data = {version, written, ...await reply.json()};
        build();
      }
    } catch (error) { words = "The server of this page does not answer; what is shown is the last that it sent."; }
    let note = document.getElementById("lost");
    if (words && !note) document.getElementById("content").prepend(el("p", {class: "note", id: "lost", role: "status"}, words));
    if (!words && note) note.remove();
  }
}

function setTheme(name) {
  if (name === "system") document.documentElement.removeAttribute("data-theme"); else document.documentElement.setAttribute("data-theme", name);
  const button = document.getElementById("theme");
  button.textContent = `Colours: ${name}`;
  button.setAttribute("aria-label", `Colours: ${name}. Press to change`);
}
const THEMES = ["system", "light", "dark"];
let theme = 0;
document.getElementById("theme").addEventListener("click", () => { theme = (theme + 1) % 3; setTheme(THEMES[theme]); });

view.listeners.push(redraw);
build();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; build(); } });
if (data.live) follow();
