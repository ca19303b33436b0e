// Everything except curves: tiles, memory, placement, lanes of a plan, config, tables.

const tile = (name, value, small) => el("div", {class: "tile"}, el("dt", {}, name), el("dd", {}, value, small && el("small", {}, small)));
const tiles = list => el("dl", {class: "tiles"}, list.filter(Boolean));

/// `rows`: lists of cells; a cell is a text, an element, or {number: text}. Wide tables scroll.
function table(head, rows, label, codes = []) {
  const cell = (tag, content, column) => content && content.number !== undefined
    ? el(tag, {class: "number"}, content.number) : el(tag, {class: tag === "td" && codes.includes(column) ? "code" : null}, content);
  return el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": label}, el("table", {},
    el("thead", {}, el("tr", {}, head.map((content, i) => cell("th", content, i)))),
    el("tbody", {}, rows.map(row => el("tr", {}, row.map((content, i) => cell("td", content, i)))))));
}

const colourOfKind = (kinds, kind) => `var(--c${kinds.indexOf(kind) % 10})`;

/// The tier of a line of the ledger, or with several devices the device.
const placeOf = line => line.device === undefined ? TIER_NAMES[line.tier] : `device ${line.device}`;

/// The places that have a budget: tiers, or devices if there are several. `totals`: of a run, or null.
function placesOf(plan, totals) {
  const devices = [...new Set(plan.ledger.map(line => line.device).filter(device => device !== undefined))].sort((a, b) => a - b);
  const peakOf = (tier, device) => totals && (device === undefined ? totals.peak_bytes[tier] : ((totals.devices || [])[device] || {}).peak_bytes);
  return TIERS.flatMap(tier => (tier === "device" && devices.length > 0 ? devices : [undefined]).map(device =>
    ({tier, name: placeOf({tier, device}), peak: peakOf(tier, device) || 0, lines: plan.ledger.filter(line => line.tier === tier && line.device === device && line.bytes > 0)})));
}

/// A stack per place of the data that the plan puts there, with its budget and the measured peak.
function memoryChart(plan, totals) {
  const kinds = [...new Set(plan.ledger.map(line => line.kind))];
  const chart = el("div", {class: "memory", id: "memory"});
  for (const {tier, name, lines, peak} of placesOf(plan, totals)) {
    const used = lines.reduce((sum, line) => sum + line.bytes, 0), budget = (plan.budgets || {})[tier] || 0;
    const whole = Math.max(used, budget, peak);
    if (whole === 0 || used === 0) continue;
    const percent = bytes => `${(100 * bytes / whole).toFixed(3)}%`;
    const words = [`${formatBytes(used)} planned`, budget > 0 && `of ${formatBytes(budget)} (${digits(100 * used / budget, 3)}%)`, peak > 0 && `, ${formatBytes(peak)} measured at peak`].filter(Boolean).join(" ").replace(" ,", ",");
    const list = lines.map(line => `${line.kind} ${formatBytes(line.bytes)}`).join(", ");
    chart.append(el("div", {class: "tier"}, name), el("div", {},
      el("div", {class: "track", role: "img", "aria-label": `${name}: ${words}: ${list}`},
        el("div", {class: "stack", style: `width:${percent(used)}`}, lines.map(line => el("span", {"data-kind": line.kind, "data-bytes": line.bytes, title: `${line.kind}: ${formatBytes(line.bytes)}`,
          style: `width:${(100 * line.bytes / used).toFixed(3)}%;background:${colourOfKind(kinds, line.kind)}`}, line.kind))),
        budget > 0 && el("span", {class: "limit", style: `left:calc(${percent(budget)} - 2px)`}),
        peak > 0 && el("span", {class: "peak", style: `left:calc(${percent(peak)} - 2px)`})),
      el("div", {class: "words"}, words)));
  }
  const marks = [["budget", "var(--bad)", "thin"], ...(totals ? [["measured peak (dashed)", "var(--ink)", "thin"]] : [])];
  return el("figure", {class: "chart wide"}, el("h3", {}, "Memory of each tier ", el("span", {class: "unit"}, "(bytes at peak; each bar has its own scale)")),
    chart, legend([...kinds.map(kind => [kind, colourOfKind(kinds, kind)]), ...marks]));
}

/// Removes labels that their part of a stack is too narrow for.
function fitLabels() {
  for (const part of document.querySelectorAll(".stack span")) if (part.scrollWidth > part.clientWidth || part.clientWidth < 24) part.textContent = "";
}

function ledgerTable(plan) {
  const rows = plan.ledger.filter(line => line.bytes > 0).map(line => {
    const budget = (plan.budgets || {})[line.tier];
    return [placeOf(line), line.kind, {number: formatBytes(line.bytes)}, {number: line.bytes.toLocaleString("en")}, {number: budget ? `${digits(100 * line.bytes / budget, 3)}%` : "-"}];
  });
  return table(["Tier", "Kind", {number: "Size"}, {number: "Bytes"}, {number: "Of the budget"}], rows, "Memory ledger");
}

/// Tiers of each block's data, with a column per block.
function placementChart(plan) {
  const kinds = [["weights", "weights"], ["optimizer", "optimizer states"], ["activations", "activations"], ["gradients", "gradients"]];
  const counts = key => TIERS.map(tier => [tier, plan.placement.filter(block => block[key] === tier).length]).filter(([, count]) => count > 0)
    .map(([tier, count]) => `${plural(count, "block")} on ${TIER_NAMES[tier]}`).join(", ");
  const kept = plan.placement.filter(block => !block.recompute).length;
  return el("figure", {class: "chart wide blocks", id: "placement"}, el("h3", {}, "Where each block has its data ", el("span", {class: "unit"}, `(${plural(plan.placement.length, "block")}, in order: embedding, layers, head)`)),
    el("table", {}, el("tbody", {}, kinds.map(([key, name]) => el("tr", {title: `${name}: ${counts(key)}`}, el("th", {scope: "row"}, name, el("span", {class: "skip"}, `: ${counts(key)}`)),
      plan.placement.map(block => el("td", {}, el("i", {"data-tier": block[key], style: `background:var(--${TIERS.includes(block[key]) ? block[key] : "c7"})`}))))))),
    legend(TIERS.map(tier => [TIER_NAMES[tier], `var(--${tier})`])),
    el("figcaption", {}, `${kinds.map(([key, name]) => `${name}: ${counts(key)}`).join("; ")}${kept > 0 ? `; ${plural(kept, "block")} with intermediates kept for the backward pass` : ""}.`));
}

/// An explanation of lanes for readers who meet the word for the first time.
const laneGloss = devices => el("p", {class: "soft"}, "A lane does one kind of work, while the others do theirs: compute runs the model, update the optimizer, upload and offload copy to and from the device, fetch and writeback read and write NVMe, gather and reduce exchange data between ranks.",
  devices > 1 && ` Each of the ${devices} devices has its own lanes, except update, fetch and writeback; pass copies from a device to another one. Times of a lane are means over the devices, and bytes are sums.`);

/// Lanes of a step, measured and predicted. `measured`: busy, stalled and bytes by lane, or null. If
/// each of several devices has the lane, a row with the means is followed by a row per device, from
/// `devices` of a measured lane and `busy_seconds_by_device` of a planned one.
function laneTable(plan, measured, stepSeconds) {
  const head = ["Lane"], rows = [];
  if (measured) head.push({number: "Busy"}, {number: "Of the step"}, {number: "Waiting"}, {number: "Bytes per step"});
  if (plan && plan.lanes) head.push({number: measured ? "Predicted busy" : "Busy"}, {number: "Of the step"}, ...(measured ? [] : [{number: "Waiting"}, {number: "Bytes per step"}]));
  const share = (part, whole) => ({number: whole > 0 ? `${digits(100 * part / whole, 3)}%` : "-"});
  const bytes = value => ({number: value > 0 ? formatBytes(value) : "-"});
  for (const lane of LANES) {
    const was = measured && measured[lane], will = plan && plan.lanes && plan.lanes[lane];
    if (!(was && was.busy > 0) && !(will && will.busy_seconds > 0)) continue;
    const row = [el("span", {class: "whole"}, swatch(laneColour(lane)), lane)];
    if (measured) row.push({number: formatSeconds(was.busy)}, share(was.busy, stepSeconds), {number: formatSeconds(was.stalled)}, bytes(was.bytes));
    if (will) row.push({number: formatSeconds(will.busy_seconds)}, share(will.busy_seconds, plan.predicted_step_seconds), ...(measured ? [] : [{number: formatSeconds(will.stalled_seconds)}, bytes(will.bytes)]));
    rows.push(row);
    const seen = (was && was.devices) || [], planned = (will && will.busy_seconds_by_device) || [], none = {number: ""};
    for (let device = 0; device < Math.max(seen.length, planned.length); ++device) {
      const own = [el("span", {class: "soft of-device"}, `device ${device}`)], one = seen[device], busy = planned[device];
      if (measured) own.push(...(one ? [{number: formatSeconds(one.busy)}, share(one.busy, stepSeconds), {number: formatSeconds(one.stalled)}, none] : [none, none, none, none]));
      if (will) own.push(...(busy === undefined ? [none, none] : [{number: formatSeconds(busy)}, share(busy, plan.predicted_step_seconds)]), ...(measured ? [] : [none, none]));
      rows.push(own);
    }
  }
  return rows.length > 0 ? table(head, rows, "Lanes of a step") : null;
}

/// The planner's choices and their reasons.
function choiceSection(plan, config, planned) {
  const parts = [];
  const at = key => key.split(".").reduce((value, part) => value === undefined || value === null ? undefined : value[part], config);
  const short = value => { const text = JSON.stringify(value); return text === undefined ? "-" : text.length > 160 ? `${text.slice(0, 157)}...` : text; };
  const chosen = Object.entries(plan.chosen || {});
  if (chosen.length > 0) parts.push(table(["Key", "In the config", "Chosen"], chosen.map(([key, value]) => [key, short(at(key)), short(value)]), "Keys that the planner has chosen", [0, 1, 2]));
  else if (planned) parts.push(el("p", {}, "The config left nothing to the planner: every placement and size in it was named or has a default."));
  if (plan.bounds && plan.bounds.length > 0) {
    const first = plan.bounds.find(bound => bound.lane === plan.bottleneck) || plan.bounds[0], second = plan.bounds.find(bound => bound !== first);
    parts.push(el("p", {}, `Among the plans that fit the budgets the planner takes the one with the most simulated tokens/s. Predicted: ${formatSeconds(plan.predicted_step_seconds)} per step. `
      + `No step can take less than what ${first.lane} needs, ${formatSeconds(first.seconds)}${second ? `; ${second.lane} needs ${formatSeconds(second.seconds)}` : ""}.`));
  }
  if (plan.buffers) parts.push(el("p", {class: "soft"}, `Micro-batches of ${plural(plan.micro_batch, "sequence")}, ${plan.accumulation} per step. Buffers: ${Object.entries(plan.buffers).filter(([, count]) => count > 0).map(([name, count]) => `${name.replace(/_/g, " ")} ${count}`).join(", ")}.`));
  return parts;
}

const jsonDetails = (title, value) => value && el("details", {}, el("summary", {}, title), el("pre", {tabindex: 0}, JSON.stringify(value, null, 2)));

/// `bars`: name, value, text; their length is relative to `most`.
function barChart(id, title, unit, bars, most) {
  return el("figure", {class: "chart wide", id}, el("h3", {}, `${title} `, el("span", {class: "unit"}, `(${unit})`)),
    el("div", {class: "helps", style: "margin-top:6px"}, bars.flatMap(({name, value, text, title: words}) => [el("span", {}, name),
      el("div", {}, el("i", {"data-value": value, style: `width:${(75 * value / most).toFixed(2)}%`}), el("b", {title: words}, text))])));
}

/// Changes that would help, as bars.
const helpChart = improvements => barChart("helps", "What would help", "times the tokens/s of this plan; one change at a time, simulated",
  improvements.map(({change, speedup, tokens_per_second, wear}) => ({name: wear ? `${change}; ${wear}` : change, value: speedup, text: `${speedup.toFixed(2)}x`, title: `${digits(tokens_per_second, 4)} tokens/s`})),
  Math.max(...improvements.map(i => i.speedup)));
