"use strict";
// Elements, numbers with units, and ticks.

// LANES, the names of all lanes in the order in which a parameter passes them, comes from page.cpp.
const TIERS = ["device", "host", "nvme"];
const TIER_NAMES = {device: "device", host: "host", nvme: "NVMe"};
/// A track is a lane, or with several devices the lane of one: "compute, device 1".
const kindOf = track => track.split(", ")[0];
const deviceOf = track => Number((track.split(", device ")[1]) || 0);
const laneColour = track => LANES.includes(kindOf(track)) ? `var(--${kindOf(track)})` : "var(--c7)";
const runColour = index => `var(--c${index % 8})`;

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") element.style.cssText = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const swatch = (colour, kind = "") => el("span", {class: `swatch ${kind}`, style: `background:${colour}`, "aria-hidden": "true"});
const legend = entries => el("ul", {class: "legend"},
  entries.map(([name, colour, kind]) => el("li", {}, swatch(colour, kind), name)));

/// Six significant digits without trailing zeros.
function digits(value, count = 6) {
  if (value === null || value === undefined) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(Math.max(0, count - 1)).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(count)));
}

function scaled(value, base, units, count) {
  let power = 0;
  while (Math.abs(value) >= base && power < units.length - 1) { value /= base; ++power; }
  return `${digits(value, count)}${units[power]}`;
}
const formatBytes = value => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"], 3);
const formatCount = value => scaled(value, 1000, ["", "k", "M", "B", "T"], 3);
const formatFlops = value => scaled(value, 1000, [" FLOP/s", " kFLOP/s", " MFLOP/s", " GFLOP/s", " TFLOP/s", " PFLOP/s"], 3);
const plural = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

function formatSeconds(value) {
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6, 3)} us`;
  if (value < 1) return `${digits(value * 1e3, 3)} ms`;
  if (value < 119.5) return `${digits(value, 3)} s`;
  if (value < 7170) return `${digits(value / 60, 3)} min`;
  const minutes = Math.round(value / 60);
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(minutes / 1440).toFixed(1)} days`;
}

/// The factor and the name of the unit in which values up to `largest` are drawn.
function unitFor(kind, largest) {
  const step = (base, names) => {
    let power = 0;
    while (largest >= base ** (power + 1) && power < names.length - 1) ++power;
    return {factor: base ** power, name: names[power]};
  };
  if (kind === "bytes") return step(1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  if (kind === "seconds") {
    if (largest < 1e-3) return {factor: 1e-6, name: "us"};
    if (largest < 120) return largest < 1 ? {factor: 1e-3, name: "ms"} : {factor: 1, name: "s"};
    return largest < 7200 ? {factor: 60, name: "min"} : {factor: 3600, name: "h"};
  }
  return {factor: 1, name: kind};
}

/// At most about `count` round numbers from `low` to `high`.
function ticksOf(low, high, count, whole = false) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map(k => k * power).find(k => k >= rough * 0.999) || power * 10;
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

/// Powers of ten, with 2 and 5 between them where there are few.
function logTicks(low, high) {
  const ticks = [];
  const few = Math.log10(high / low) < 2.5;
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power) {
    for (const k of few ? [1, 2, 5] : [1]) {
      const value = k * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  }
  return ticks.length >= 2 ? ticks : ticksOf(low, high, 4);
}

/// The first index at which `list` is not below `value`.
function lowerBound(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

const tickText = value => Math.abs(value) >= 10000 && Math.abs(value) < 1e15 ? formatCount(value) : digits(value, 4);
const stepText = value => value >= 100000 ? formatCount(value).replace(/\.0$/, "") : String(value);
