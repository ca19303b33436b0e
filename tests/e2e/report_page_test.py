#!/usr/bin/env python3
"""Tests in a browser the pages of `ballast report` and `ballast plan --html`.

    report_page_test.py PATH_OF_BALLAST

Needs Debian's package chromium; without it the test is skipped. BALLAST_TEST_PICTURES=DIR keeps a
picture of each page, width and colour scheme there.
"""

import json
import os
import pathlib
import re
import sys

import browser
from bench_test import STEP
from plan_test import RATES
from report_test import ReportTest, data_of
from runs import main

# The text of each label that is outside its picture or on another one. A text's box is higher than
# its letters, so boxes may touch.
LABELS = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const outer = svg.getBoundingClientRect(), found = [];
  const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent)
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  boxes.forEach(([text, box], i) => {
    if (box.left < outer.left - 1 || box.right > outer.right + 1 || box.top < outer.top - 1 ||
        box.bottom > outer.bottom + 1) found.push('outside: ' + text);
    for (const [other, b] of boxes.slice(i + 1)) {
      const width = Math.min(box.right, b.right) - Math.max(box.left, b.left);
      const height = Math.min(box.bottom, b.bottom) - Math.max(box.top, b.top);
      if (width > 1 && height > 4) found.push(text + ' on ' + other);
    }
  });
  return found;
})"""
# Elements whose text is cut off, except those that scroll.
CLIPPED = """
[...document.querySelectorAll(['h1,h2,h3,p,dt,dd,button,label,li,figcaption,summary,.stack span',
                               '.words,.tier,output,select'].join())]
  .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)
  .filter(e => getComputedStyle(e).display !== 'inline')
  .map(e => e.tagName + ': ' + e.textContent.slice(0, 60))"""
# For each chart of the report: drawn paths, unit in the title, label of the steps.
CHARTS = """
Object.fromEntries([...document.querySelectorAll('#curves figure')].map(f => [f.id, {
  points: [...f.querySelectorAll('path.line, path.area')]
    .map(p => (p.getAttribute('d').match(/[ML]/g) || []).length),
  unit: f.querySelector('.unit').textContent, ticks: f.querySelectorAll('line.grid').length,
  axis: [...f.querySelectorAll('text')].some(t => t.textContent === 'step')}]))"""
# Content of a benchmark's page: points of each chart's lines, bars, figures of this run.
BENCH = """
({charts: [...document.querySelectorAll('#curves figure')].map(f =>
    [...f.querySelectorAll('path.line')].map(p => (p.getAttribute('d').match(/[ML]/g) || []).length)),
  dashed: [...document.querySelectorAll('#curves figure')].map(f =>
    f.querySelectorAll('path.line[stroke-dasharray]').length),
  bars: document.querySelectorAll('#shares i').length,
  figures: [...document.querySelectorAll('tbody tr')].map(r => r.children[1].textContent)})"""
# Labels that a line is drawn over. They have no edge in the paper's colour, or come before the
# line.
CROSSED = """
[...document.querySelectorAll('svg .reftext, svg .group')].filter(text =>
  !getComputedStyle(text).paintOrder.startsWith('stroke') ||
  [...text.ownerSVGElement.querySelectorAll('line.ref, line.grid')].some(line =>
    line.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_PRECEDING))
  .map(text => text.textContent)"""
# Marks across a bar of memory: those with a colour at the height of a part's text.
MARKED = """
[...document.querySelectorAll('#memory .limit, #memory .peak')]
  .filter(mark => getComputedStyle(mark).borderLeftWidth !== '0px').map(mark => mark.className)"""
FOCUS = "document.activeElement.id || document.activeElement.tagName"
# Controls without a name.
UNNAMED = """
[...document.querySelectorAll('button, select, input, svg[tabindex], [role=img]')].filter(e => {
  const label = e.labels && e.labels.length > 0 ? e.labels[0].textContent : '';
  return !(e.getAttribute('aria-label') || e.textContent || label).trim();
}).map(e => e.outerHTML.slice(0, 80))"""
CHOOSE_SECOND = """{
  const run = document.getElementById('run');
  run.value = '1';
  run.dispatchEvent(new Event('change'));
}"""
READ = """
Object.fromEntries([...document.querySelectorAll('#loss-values [data-series]')]
  .map(e => [e.dataset.series, e.dataset.value]))"""


class Page(ReportTest):
    @classmethod
    def setUpClass(cls):
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        super().setUp()
        self.browser.problems.clear()

    def open(self, name, width=1400, dark=False):
        self.browser.size(width, dark=dark)
        self.browser.open((self.path / name).as_uri())
        self.assertEqual(self.browser.problems, [])

    def real_run(self, out="run"):
        self.small_run("--steps", "24", "--set", "ballast.eval_every=6",
                       "--set", "ballast.checkpoint_every=8",
                       "--trace", f"{out}.trace", "--trace-steps", "3", out=out)

    def look_at(self, page):
        """Checks labels, and that no word is cut off, for each width and colour scheme."""
        for width in (400, 800, 1400):
            for dark in (False, True):
                self.open(page, width, dark)
                case = f"{page} at {width} px, {'dark' if dark else 'light'}"
                self.assertEqual(self.browser.run(LABELS), [], case)
                self.assertEqual(self.browser.run(CLIPPED), [], case)
                self.assertEqual(self.browser.run(CROSSED), [], case)
                self.assertEqual(self.browser.run(MARKED), [], case)
                needed = self.browser.run("document.documentElement.scrollWidth")
                self.assertLessEqual(needed, width, case)
                paper = self.browser.run("getComputedStyle(document.body).backgroundColor")
                self.assertEqual(paper == "rgb(255, 255, 255)", not dark, case)
                self.keep_picture(f"{page}-{width}-{'dark' if dark else 'light'}.png", width)

    def keep_picture(self, name, width):
        folder = os.environ.get("BALLAST_TEST_PICTURES")
        if not folder:
            return
        height = self.browser.run("document.documentElement.scrollHeight")
        (pathlib.Path(folder) / name.replace("/", "-")).write_bytes(
            self.browser.picture(clip=(0, 0, width, min(height, 9000))))

    def test_every_chart_shows_something_with_units(self):
        self.real_run()
        self.reported("run")
        self.open("page.html")
        charts = self.browser.run(CHARTS)
        self.assertEqual(list(charts), ["loss", "norm", "lr", "speed", "time", "busy", "bytes", "wear"])
        for name, chart in charts.items():
            self.assertGreater(len(chart["points"]), 0, name)
            for points in chart["points"]:
                self.assertGreater(points, 3, name)
            self.assertRegex(chart["unit"], r"^\(\S.*\)$", name)
            self.assertGreater(chart["ticks"], 1, name)
            self.assertTrue(chart["axis"], name)
        drawn = self.browser.run("document.querySelectorAll('#timeline-plot rect[fill]').length")
        self.assertGreater(drawn, 20)
        critical = self.browser.run("document.querySelectorAll('#timeline-plot .crit').length")
        self.assertGreater(critical, 3)
        self.assertGreater(self.browser.run("document.querySelectorAll('#speed .shade').length"), 0)
        self.assertGreater(self.browser.run("document.querySelectorAll('#loss .mark').length"), 1)
        self.assertEqual(self.browser.run("document.querySelectorAll('#placement i').length"), 4 * 4)
        self.assertIn("finished", self.browser.run("document.getElementById('state').textContent"))
        self.assertEqual(self.browser.problems, [])

    def test_the_keyboard_reads_the_values_of_the_metrics(self):
        self.real_run()
        self.reported("run")
        self.open("page.html")
        rows = {row["step"]: row for row in self.rows()}
        self.browser.run("document.getElementById('loss-plot').focus()")
        read = {}
        for _ in rows:
            self.browser.press("ArrowRight")
            step = int(self.browser.run("document.querySelector('#loss-values b').dataset.step"))
            read[step] = self.browser.run(READ)
        self.assertEqual(sorted(read), sorted(rows))
        for step, values in read.items():
            self.assertEqual(float(values["loss"]), rows[step]["loss"])
            if "eval_loss" in rows[step]:
                self.assertEqual(float(values["held-out loss"]), rows[step]["eval_loss"])
        shown = "document.getElementById('from').value + '-' + document.getElementById('to').value"
        self.browser.press("+", "+")
        self.assertEqual(self.browser.run(shown), "13-24")
        self.browser.press("0", "0")
        self.assertEqual(self.browser.run(shown), "1-24")
        self.browser.run("document.getElementById('timeline-plot').focus()")
        self.browser.press("ArrowRight")
        self.browser.press("ArrowDown")
        self.assertRegex(self.browser.run("document.getElementById('timeline-values').textContent"),
                         r"^measured \w+: .*, [\d.]+ .s, .*begins at ")
        self.assertEqual(self.browser.problems, [])

    def test_the_keyboard_reaches_every_control(self):
        for name in ("a", "b"):
            self.real_run(name)
        self.reported("a", "b")
        self.open("page.html", 800)
        controls = set(self.browser.run(
            "[...document.querySelectorAll('button, select, input, summary, svg[tabindex]')]"
            ".map(e => e.id || e.tagName)"))
        self.assertLessEqual({"theme", "from", "to", "zoom-in", "zoom-all", "run", "loss-log",
                              "speed-refs", "loss-plot", "timeline-plot", "timeline-step",
                              "timeline-next", "SUMMARY"}, controls)
        reached = set()
        for _ in range(120):
            self.browser.press("Tab")
            reached.add(self.browser.run(FOCUS))
        self.assertEqual(controls - reached, set())
        self.assertEqual(self.browser.run(UNNAMED), [])

    def test_controls_do_what_they_say(self):
        self.real_run("a")
        self.real_run("b")
        self.reported("a", "b")
        self.open("page.html")
        self.assertEqual(self.browser.run("document.querySelectorAll('#loss path.line').length"), 4)
        line = "document.querySelector('#loss path.line').getAttribute('d')"
        before = self.browser.run(line)
        self.browser.run("document.getElementById('loss-log').click()")
        self.assertNotEqual(self.browser.run(line), before)
        self.browser.run(CHOOSE_SECOND)
        self.assertTrue(self.browser.run("document.getElementById('loss-log').checked"))
        self.assertIn("of b", self.browser.run("document.querySelector('#bytes h3').textContent"))
        self.browser.run("document.getElementById('zoom-in').click()")
        self.assertEqual(self.browser.run("document.getElementById('from').value"), "7")
        self.browser.run("document.getElementById('timeline-next').click()")
        title = "document.querySelector('#timeline-plot .group').textContent"
        self.assertIn("step 3", self.browser.run(title))
        for colours, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
            self.browser.run("document.getElementById('theme').click()")
            self.assertIn(colours, self.browser.run("document.getElementById('theme').textContent"))
            self.assertEqual(self.browser.run("getComputedStyle(document.body).backgroundColor"), paper)
        self.assertEqual(self.browser.problems, [])

    def test_no_label_is_cut_off_or_covered(self):
        self.real_run()
        (self.path / "rates.json").write_text(json.dumps(RATES))
        planned = self.run_ballast("plan", "config.json", "--rates", "rates.json",
                                   "--trace", "plan.trace", "--html", "plan.html")
        self.assertEqual(planned.returncode, 0, planned.stderr)
        self.report("run", "--trace", "run.trace", "--trace", "plan.trace", "--out", "report.html")
        self.look_at("report.html")
        # Paper is light, whatever the colours of the screen.
        self.browser.call("Emulation.setEmulatedMedia", media="print", features=[
            {"name": "prefers-color-scheme", "value": "dark"}])
        for name, light in (("--paper", "#fff"), ("--c0", "#0b62c4"), ("--compute", "#2468c0")):
            shown = self.browser.run(f"getComputedStyle(document.documentElement).getPropertyValue('{name}')")
            self.assertEqual(shown.strip(), light, name)
        self.browser.call("Emulation.setEmulatedMedia", media="")
        self.look_at("plan.html")
        # The timeline of a plan shows the step whose time the page names.
        step = self.browser.run("document.querySelector('.tile dd').firstChild.textContent")
        shown = self.browser.run("document.querySelector('#timeline-plot .group').textContent")
        self.assertRegex(shown, rf"^Predicted, step \d+: {re.escape(step)}$")

    def bench_page(self, *arguments):
        done = self.run_ballast("bench", *arguments, "--html", "bench.html",
                                environment={"XDG_CACHE_HOME": str(self.path / "cache")})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_benchmarks(self):
        sweep = ("io", "--path", self.path, "--size", "4MiB", "--block", "4KiB,64KiB,256KiB", "--depth",
                 "1,4", "--pattern", "read,write")
        quick = ("--repeats", "1", "--seconds", "0")
        adam = ("adam", "--params", "64Ki,256Ki", "--variant", "adamw-bf16,adamw-fp32", *quick)
        for command, charts in ((sweep, 4), (adam, 1)):
            self.bench_page(*command)
            self.look_at("bench.html")  # first run, without earlier figures
            self.bench_page(*command)
            self.look_at("bench.html")
            shown = self.browser.run(BENCH)
            self.assertEqual(len(shown["charts"]), charts + 1)  # plus the chart of all runs
            self.assertTrue(all(points > 1 for chart in shown["charts"] for points in chart))
            # Each line of a sweep is next to that of the earlier run.
            self.assertEqual([len(chart) for chart in shown["charts"][:-1]],
                             [2 * count for count in shown["dashed"][:-1]])
            rows = data_of(self.path / "bench.html")["rows"]
            self.assertEqual(shown["bars"], len(rows))
            figures = [f"{row['gb_per_second']:.4g}" for row in rows]
            self.assertEqual([float(text) for text in shown["figures"]], [float(f) for f in figures])
            self.browser.run("document.querySelector('#curves svg[tabindex]').focus()")
            self.browser.press("ArrowRight")
            self.assertRegex(
                self.browser.run("document.querySelector('#curves output').textContent"), r" [\d.]+$")
            self.browser.press("+", "+")
            self.assertEqual(self.browser.run(UNNAMED), [])
            self.assertEqual(self.browser.problems, [])

    def test_benchmark_of_a_step(self):
        self.bench_page("step", *STEP)
        self.bench_page("step", *STEP)
        self.look_at("bench.html")
        row, = data_of(self.path / "bench.html")["rows"]
        shares = self.browser.run("[...document.querySelectorAll('#shares i')].map(i => Number(i.dataset.value))")
        self.assertEqual(shares, [row["percent_of_gemm_peak"], row["model_percent_of_gemm_peak"]] +
                         [one["percent_of_gemm_peak"] for one in row["passes"]])
        self.assertEqual(self.browser.run(BENCH)["charts"], [[2]])  # both runs

    def test_experts(self):
        self.made_run([{"loss": 3.0 - i / 10, "experts": {
            "balance_loss": 2.0 + i / 100, "router_z_loss": 5.0, "largest_load": 1.5, "idle": i % 3}}
            for i in range(20)])
        self.reported("made")
        self.look_at("page.html")
        charts = self.browser.run(CHARTS)
        for name, unit in (("balance", "(without its coefficient)"), ("router-z", "(without its"),
                           ("load", "(times the mean"), ("idle", "(experts of all layers)")):
            self.assertIn(unit, charts[name]["unit"])
            self.assertEqual(charts[name]["points"], [20])
        self.made_run([{"loss": 1.0}, {"loss": 2.0}], "dense")
        self.reported("dense")
        self.open("page.html")
        self.assertEqual(list(self.browser.run(CHARTS)), ["loss"])

    def test_a_plan_and_a_run_of_two_devices(self):
        devices = ("--set", "pipeline.stages=2", "--set", "model.vocabulary_tiles=1")
        self.small_run("--steps", "6", *devices, "--trace", "run.trace", "--trace-steps", "3")
        (self.path / "rates.json").write_text(json.dumps(RATES))
        planned = self.run_ballast("plan", "config.json", *devices, "--rates", "rates.json",
                                   "--html", "plan.html")
        self.assertEqual(planned.returncode, 0, planned.stderr)
        self.report("run", "--trace", "run.trace", "--out", "report.html")
        names = "[...document.querySelectorAll('#timeline-plot .rowname')].map(t => t.textContent)"
        for page in ("report.html", "plan.html"):
            self.look_at(page)
            rows = self.browser.run(names)
            for lane in ("upload", "compute", "pass", "offload"):
                at = rows.index(f"{lane}, device 0")
                self.assertEqual(rows[at + 1], f"{lane}, device 1")
            places = self.browser.run("[...document.querySelectorAll('#memory .tier')].map(e => e.textContent)")
            self.assertEqual(places, ["device 0", "device 1", "host", "NVMe"])
            table = self.browser.run("document.querySelector('[aria-label=\"Lanes of a step\"]').textContent")
            self.assertIn("device 1", table)
        self.assertEqual(self.browser.problems, [])

    def test_devices(self):
        def lanes(compute):
            return {"compute": {"busy_seconds": compute, "stalled_seconds": 1 - compute},
                    "upload": {"busy_seconds": compute / 4, "stalled_seconds": 0.1}}
        self.made_run([{"loss": 3.0 - i / 10, "step_seconds": 1.0, "peak_bytes": {"device": 30},
                        "lanes": {**lanes(0.5), "update": {"busy_seconds": 0.25, "stalled_seconds": 0}},
                        "devices": {"0": {"lanes": lanes(0.4 + i / 100), "peak_bytes": 20},
                                    "1": {"lanes": lanes(0.7 - i / 100), "peak_bytes": 30}}}
                       for i in range(21)])
        self.reported("made")
        self.look_at("page.html")
        charts = self.browser.run(CHARTS)
        self.assertEqual(charts["devices"]["points"], [21, 21])
        self.assertEqual(charts["busy"]["points"], [21, 21, 21], "means")
        rows = self.browser.run(
            "[...document.querySelectorAll('[aria-label=\"Lanes of a step\"] tbody tr')]"
            ".map(row => row.cells[0].textContent + ' ' + row.cells[2].textContent)")
        self.assertEqual(rows, ["upload 12.5%", "device 0 12.5%", "device 1 15%", "compute 50%",
                                "device 0 50%", "device 1 60%", "update 25%"])

    def test_pairs_of_completions(self):
        self.made_run([{"loss": 0.7 - i / 100, "rewards": {
            "chosen": 0.1 * i, "rejected": -0.1 * i, "accuracy": 0.5, "margin": 0.2 * i}}
            for i in range(4)])
        self.reported("made")
        self.open("page.html")
        charts = self.browser.run(CHARTS)
        self.assertEqual(list(charts), ["loss", "margin", "accuracy"])
        self.assertIn("nats per pair", charts["loss"]["unit"])

    def test_fifty_thousand_steps_and_several_runs(self):
        rows = [{"loss": 2 + i % 97 / 97, "grad_norm": 1.0 + i % 7, "lr": 1e-3 / (1 + i),
                 "tokens_per_second": 3e5 + i % 13, "step_seconds": 0.29, "skipped": i % 500 == 7,
                 "rolled_back": i % 300 == 5} for i in range(50_000)]
        rows[100]["loss"] = None
        self.made_run(rows, "a-run-with-a-long-name", 100_000)
        self.small_run()
        self.reported("a-run-with-a-long-name", "run", out="several.html")
        self.look_at("several.html")
        charts = self.browser.run(CHARTS)
        self.assertGreater(max(charts["loss"]["points"]), 500)
        self.browser.run("document.getElementById('zoom-in').click()")
        self.assertEqual(self.browser.problems, [])

    def test_a_run_without_a_step_or_with_nothing_finite(self):
        self.made_run([], "none")
        self.made_run([{"loss": None, "grad_norm": None, "lr": 0.0}] * 3, "bad")
        self.made_run([{"loss": 1.5}, {"loss": None}], "worse")
        self.made_run([{"loss": 2.5, "grad_norm": 0.0, "lr": 0.001, "tokens_per_second": 10.0}],
                      "one")
        for name, loss in (("none", "-"), ("bad", "not finite"), ("worse", "not finite"), ("one", "2.5")):
            self.reported(name)
            self.look_at("page.html")
            shown = self.browser.run("[...document.querySelectorAll('.tile')]"
                                     ".find(t => t.firstChild.textContent === 'Loss')"
                                     ".lastChild.firstChild.textContent")
            self.assertEqual(shown, loss, name)
        # One of several losses is of pairs, which the table says.
        self.made_run([{"loss": 0.5, "rewards": {"accuracy": 1.0, "margin": 0.5}}], "pairs")
        self.reported("worse", "pairs")
        self.open("page.html")
        head = self.browser.run("document.querySelector('thead').textContent")
        self.assertIn("Loss (nats per token or pair)", head)

    def test_watch_shows_what_is_added(self):
        folder = self.made_run([{"loss": 3.0}, {"loss": 2.0}], steps=5)
        process, address, _ = self.serve("made")
        self.browser.size(800)
        self.browser.open(address)
        self.assertIn("step 2 of 5", self.browser.run("document.getElementById('state').textContent"))
        self.browser.run("document.getElementById('loss-log').click()")
        self.browser.run("document.getElementById('loss-log').focus()")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "loss": 1.0}\n')
        self.browser.wait_for("document.getElementById('state').textContent.includes('step 3 of 5')")
        self.assertTrue(self.browser.run("document.getElementById('loss-log').checked"))
        self.assertEqual(self.browser.run(FOCUS), "loss-log")
        self.assertEqual(self.browser.problems, [])
        process.terminate()
        process.wait(timeout=60)
        self.browser.wait_for("document.getElementById('lost') !== null")


if __name__ == "__main__":
    if not browser.find_chromium():
        print("skipped: chromium is not installed (Debian: apt-get install chromium)")
        sys.exit(77)
    main()
