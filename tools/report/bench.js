// The page of `ballast bench NAME --html`: this run and earlier ones on the same machine.

const FIELDS = {
  pattern: String, backend: String, paths: list => (list || []).join(" and "), block_bytes: formatBytes, depth: value => `depth ${value}`,
  variant: String, isa: String, params: value => `${formatCount(value)} parameters`, threads: value => plural(value, "thread"),
  family: String, dtype: String, parameters: value => `${formatCount(value)} parameters`, tokens: value => `${value.toLocaleString("en")} tokens per step`, device: String,
};

/// Description of each benchmark: its title, the fields that distinguish its figures (`charts`: a chart per
/// value, `lines`: a line per value, `axes` with name and text: an axis if there are several values), the
/// figure and its unit, and its share of a ceiling in percent.
const BENCHES = {
  io: {title: "Swap throughput", charts: ["pattern", "backend", "paths"], lines: [], axes: {block_bytes: ["block size", formatBytes], depth: ["depth", String]}, figure: "gb_per_second", unit: "GB/s",
    ceiling: "of the best figure of this pattern and these folders, in this run and earlier ones", share: (row, all) => 100 * row.gb_per_second / Math.max(...all.filter(r => nameOf(r, ["pattern", "paths"]) === nameOf(row, ["pattern", "paths"])).map(r => r.gb_per_second))},
  adam: {title: "Optimizer updates", charts: [], lines: ["variant", "isa"], axes: {params: ["parameters", formatCount], threads: ["threads", String]}, figure: "gb_per_second", unit: "GB/s",
    ceiling: "of the memory bandwidth that was measured in the same rounds", share: row => row.percent_of_ceiling},
  step: {title: "Training steps", charts: [], lines: ["family", "dtype", "parameters", "tokens", "device"], axes: {}, figure: "tokens_per_second", unit: "tokens/s",
    ceiling: "of the GEMM peak that was measured in the same run", share: row => row.percent_of_gemm_peak},
};

const nameOf = (row, fields) => fields.filter(field => row[field] !== undefined && row[field] !== null).map(field => FIELDS[field](row[field])).filter(Boolean).join(", ");
const fieldsOf = bench => [...bench.charts, ...bench.lines, ...Object.keys(bench.axes)];
const shortDate = when => when.replace(/^\d+-| UTC$/g, "");

/// The row of an earlier run with the same fields.
const sameIn = (run, row, fields) => run.rows.find(other => nameOf(other, fields) === nameOf(row, fields));

/// For each axis with several values and each group of rows: a chart over that axis.
function sweepCharts(bench, rows, earlier) {
  const before = earlier[earlier.length - 1], fields = fieldsOf(bench), specs = [];
  for (const [axis, [axisName, textOf]] of Object.entries(bench.axes)) {
    const distinct = [...new Set(rows.map(row => row[axis]))].sort((a, b) => a - b);
    if (distinct.length < 2) continue;
    const others = fields.filter(field => field !== axis && !bench.charts.includes(field));
    for (const group of new Set(rows.map(row => nameOf(row, bench.charts)))) {
      const own = rows.filter(row => nameOf(row, bench.charts) === group), series = [];
      [...new Set(own.map(row => nameOf(row, others)))].forEach((name, i) => {
        const line = own.filter(row => nameOf(row, others) === name).sort((a, b) => a[axis] - b[axis]), steps = line.map(row => distinct.indexOf(row[axis]));
        const past = line.map(row => before && sameIn(before, row, fields));
        series.push({name, colour: runColour(i), steps, values: line.map(row => row[bench.figure]), dots: true});
        if (past.some(Boolean)) series.push({name: `${name}, ${before.when}`, colour: runColour(i), dash: "5 3", steps, values: past.map(row => row ? row[bench.figure] : null)});
      });
      specs.push({id: `sweep-${specs.length}`, title: `${group || bench.title} by ${axisName}`, kind: bench.unit, axis: axisName, names: distinct.map(textOf), series, named: true, zero: true,
        dashed: before && `dashed: ${before.when}`, whole: [0, distinct.length - 1]});
    }
  }
  return specs;
}

/// The figures of this run's first rows in all runs that have them.
function historyChart(bench, rows, earlier) {
  const fields = fieldsOf(bench), most = 8, runs = [...earlier, {when: data.when, rows}];
  if (earlier.length === 0) return [];
  const series = rows.slice(0, most).map((row, i) => ({name: nameOf(row, fields), colour: runColour(i), dots: true, steps: runs.map((_, at) => at),
    values: runs.map(run => { const same = sameIn(run, row, fields); return same ? same[bench.figure] : null; })}));
  return [{id: "history", title: "All runs on this machine", kind: bench.unit, axis: "run of", names: runs.map(run => shortDate(run.when)), series, named: true, zero: true, whole: [0, runs.length - 1],
    caption: rows.length > most ? `The first ${most} of ${rows.length} figures; all of them are in the table.` : null}];
}

function shareBars(bench, rows, earlier) {
  const all = [...rows, ...earlier.flatMap(run => run.rows)], bar = (name, value) => ({name, value, text: `${digits(value, 3)}%`});
  const bars = rows.flatMap(row => [bar(nameOf(row, fieldsOf(bench)), bench.share(row, all)),
    ...(row.model_percent_of_gemm_peak === undefined ? [] : [bar("without recomputation (MFU)", row.model_percent_of_gemm_peak)]),
    ...(row.passes || []).map(pass => bar(pass.pass.replace(/_/g, " "), pass.percent_of_gemm_peak))]);
  return barChart("shares", "Shares of the ceiling", `%, ${bench.ceiling}`, bars, Math.max(100, ...bars.map(b => b.value)));
}

function earlierTable(bench, rows, earlier) {
  const fields = fieldsOf(bench), text = value => ({number: value === undefined ? "-" : digits(value, 4)});
  return table(["Measurement", {number: `This run (${bench.unit})`}, {number: "Earlier"}, "On", {number: "Change"}, {number: "Best earlier"}, "On"], rows.map(row => {
    const past = earlier.map(run => ({when: run.when, row: sameIn(run, row, fields)})).filter(p => p.row && typeof p.row[bench.figure] === "number");
    const last = past[past.length - 1], best = past.reduce((a, b) => a && a.row[bench.figure] >= b.row[bench.figure] ? a : b, null);
    const figure = p => p ? p.row[bench.figure] : undefined, change = last && 100 * (row[bench.figure] / figure(last) - 1);
    return [nameOf(row, fields), text(row[bench.figure]), text(figure(last)), last ? el("span", {class: "whole"}, shortDate(last.when)) : "-", {number: last ? `${change >= 0 ? "+" : "−"}${digits(Math.abs(change), 2)}%` : "-"},
      text(figure(best)), best ? el("span", {class: "whole"}, shortDate(best.when)) : "-"];
  }), "This run and earlier ones");
}

function benchPage() {
  const bench = BENCHES[data.bench], {rows, earlier} = data, machine = data.machine;
  const specs = [...sweepCharts(bench, rows, earlier), ...historyChart(bench, rows, earlier)];
  drawn = specs.map(spec => new Chart(spec, kept.charts[spec.id] ??= {}));
  const best = rows.reduce((a, b) => b[bench.figure] > a[bench.figure] ? b : a);
  return [
    el("p", {id: "state"}, `${bench.title} of `, el("b", {}, machine.host), `: ${machine.cpu}, ${machine.cpus} usable CPUs. Measured on ${data.when}.`),
    tiles([tile("Measurements", String(rows.length), plural(earlier.length, "earlier run")), tile("Best", `${digits(best[bench.figure], 4)} ${bench.unit}`, nameOf(best, fieldsOf(bench)))]),
    drawn.length > 0 && el("section", {}, el("h2", {}, "Curves"), el("p", {class: "soft", id: "keys"}, "In a chart, arrow keys read values."), el("div", {class: "charts", id: "curves"}, drawn.map(chart => chart.element))),
    el("section", {}, el("h2", {}, "Ceilings"), shareBars(bench, rows, earlier)),
    el("section", {}, el("h2", {}, "Earlier runs"), earlier.length === 0 && el("p", {class: "soft"}, "There is none with --html on this machine."), earlierTable(bench, rows, earlier), data.kept && el("p", {class: "soft"}, `Figures of runs with --html are kept in ${data.kept}.`)),
    jsonDetails("All figures of this run", rows)];
}
