#!/usr/bin/env python3
"""Tests the pages of `ballast report` and `ballast plan --html`: their content, bad input, the
server.

    report_test.py PATH_OF_BALLAST

report_page_test.py tests them in a browser.
"""

import csv
import fcntl
import json
import math
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request

from one_line import assert_one_line
from plan_test import RATES
from runs import TINY, RunTest, main

HEAD = "<!doctype html>\n<!-- A page of ballast. -->\n"


def data_of(page):
    """The data that a page shows."""
    text = page.read_text()
    assert text.startswith(HEAD)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


class ReportTest(RunTest):
    def report(self, *arguments):
        return self.run_ballast("report", *arguments)

    def reported(self, *runs, out="page.html"):
        done = self.report(*runs, "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return data_of(self.path / out)

    def small_run(self, *arguments, out="run", **sections):
        done = self.train("--out", out, *arguments, **sections)
        self.assertEqual(done.returncode, 0, done.stderr)

    def made_run(self, rows, name="made", steps=None):
        """A run directory with `rows`. Each row has a step's members without its number."""
        folder = self.path / name
        folder.mkdir()
        lines = [json.dumps({"step": i, **row}) for i, row in enumerate(rows, 1)]
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        config = {"ballast": {"steps": len(rows) if steps is None else steps}}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def serve(self, *arguments):
        process = subprocess.Popen([self.ballast, "report", "--watch", *arguments], cwd=self.path,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.stop, process)
        line = process.stdout.readline()
        found = re.match(r"report on (http://127\.0\.0\.1:(\d+)/) \(this machine only\); "
                         r"Ctrl-C ends it$", line)
        self.assertIsNotNone(found, line)
        return process, found[1], int(found[2])

    @staticmethod
    def stop(process):
        if process.poll() is None:
            process.kill()
        process.communicate()


class Report(ReportTest):
    def test_has_the_numbers_of_the_metrics(self):
        self.small_run("--steps", "7", "--set", "ballast.eval_every=3")
        done = self.report("run")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"^report in run/report.html \(\d+.* KiB\)\n$")
        run, = data_of(self.path / "run/report.html")["runs"]
        rows = self.rows()
        for key in ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds",
                    "nvme_bytes_written", "eval_loss"):
            have = [(row["step"], row[key]) for row in rows if key in row]
            self.assertGreater(len(have), 0)
            series = run["series"][key]
            self.assertEqual(list(zip(series["steps"], series["values"])), have, key)
        for i, row in enumerate(rows):
            for lane, times in row["lanes"].items():
                mean = run["means"]["lanes"][lane]
                self.assertAlmostEqual(mean["busy_seconds"][i], times["busy_seconds"],
                                       delta=1e-5 * times["busy_seconds"])
                self.assertAlmostEqual(mean["bytes"][i], row["bytes"][lane],
                                       delta=1e-5 * row["bytes"][lane])
        self.assertEqual(run["state"], "finished")
        self.assertEqual(run["notes"], [])
        self.assertEqual(run["totals"]["last"]["loss"], rows[-1]["loss"])
        for lane, median in run["totals"]["median_lanes"].items():
            busy = [row["lanes"][lane]["busy_seconds"] for row in rows]
            self.assertAlmostEqual(median["busy_seconds"], statistics.median(busy), delta=1e-12)
            self.assertLessEqual(max(b / row["step_seconds"] for b, row in zip(busy, rows)), 1.0, lane)
        self.assertEqual(run["totals"]["peak_bytes"], rows[-1]["peak_bytes"])
        self.assertEqual(run["config"], json.loads((self.path / "run/config.json").read_text()))

    def test_has_the_plan_and_its_roofline(self):
        self.small_run("--set", "zero_optimization.offload_optimizer.device=auto")
        plan = self.reported("run")["runs"][0]["run"]["plan"]
        peaks = {tier: sum(line["bytes"] for line in plan["ledger"] if line["tier"] == tier)
                 for tier in ("device", "host", "nvme")}
        self.assertEqual(peaks, plan["peak_bytes"])
        self.assertEqual(plan["budgets"], {"device": 64 << 20, "host": 64 << 20})
        self.assertEqual(len(plan["placement"]), 4)
        self.assertEqual(plan["tokens_per_step"], 2 * 2 * 32)
        self.assertGreater(plan["gemm_peak_flops"], 0)
        self.assertGreater(plan["flops_per_step"], 0)
        self.assertIn("zero_optimization.offload_optimizer.device", plan["chosen"])

    def test_is_one_file_without_the_network(self):
        self.small_run()
        self.report("run")
        page = (self.path / "run/report.html").read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`<>]+", page))
        self.assertEqual(addresses - {"http://www.w3.org/2000/svg"}, set())
        self.assertIsNone(re.search(r"(?i)<(link|img|iframe|script)[^>]+(src|href)=\"(?!data:)", page))

    def test_what_a_run_names_cannot_end_the_script(self):
        name = "<!--<script>x.txt"
        (self.path / name).write_text("the quick brown fox. " * 200)
        self.small_run(out="<b>run", data={"text": [name], "sequence_length": 32})
        data = self.reported("<b>run")
        self.assertIn(name, json.dumps(data["runs"][0]["config"]))
        page = (self.path / "page.html").read_text()
        self.assertEqual(page.count("<script"), 2)
        self.assertIn("<title>Run &lt;b>run</title>", page)

    def test_several_runs_are_compared(self):
        self.small_run(out="a/run")
        self.small_run("--set", "optimizer.params.lr=0.01", "--set", "gradient_clipping=0.5",
                       out="b/run")
        data = self.reported("a/run", "b/run")
        self.assertEqual([run["name"] for run in data["runs"]], ["a/run", "b/run"])
        differing = {row["key"]: row["values"] for row in data["differing"]}
        self.assertEqual(differing["optimizer.params.lr"], [0.001, 0.01])
        self.assertEqual(differing["gradient_clipping"][1], 0.5)
        self.assertLessEqual(set(differing), {"optimizer.params.lr", "gradient_clipping",
                                              "scheduler.params.warmup_max_lr"})

    def test_a_table_has_the_numbers_of_the_metrics(self):
        self.small_run("--steps", "4", "--set", "ballast.eval_every=2")
        done = self.report("run", "--csv", "metrics.csv")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertFalse((self.path / "run/report.html").exists())
        with (self.path / "metrics.csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        for line, row in zip(table, self.rows(), strict=True):
            self.assertEqual(int(line["step"]), row["step"])
            self.assertEqual(float(line["loss"]), row["loss"])
            self.assertEqual(float(line["lanes.compute.busy_seconds"]),
                             row["lanes"]["compute"]["busy_seconds"])
            self.assertEqual(line["eval_loss"], "" if "eval_loss" not in row else line["eval_loss"])
            self.assertEqual(float(line["bytes.fetch"]), row["bytes"]["fetch"])
        self.refused(["run", "--csv", "metrics.csv"], 2, "metrics.csv exists", "--overwrite")
        self.refused(["run", "--csv", "run/config.json", "--overwrite"], 2, "is an input")
        self.refused(["run", "--csv", "x.html", "--out", "./x.html"], 2, "two outputs")
        self.assertEqual(self.report("run", "--csv", "metrics.csv", "--overwrite").returncode, 0)
        piped = self.report("run", "--csv", "/dev/stdout").stdout
        self.assertEqual(piped, (self.path / "metrics.csv").read_text())
        self.refused(["run", "run", "--csv", "other.csv"], 2, "--csv belongs to one run")

    # Runs with missing or wrong files.

    def test_a_run_that_ended_early_says_so(self):
        folder = self.made_run([{"loss": 3.0}, {"loss": 2.0}], steps=10)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
        run, = self.reported("made")["runs"]
        self.assertEqual((run["state"], run["rows"], run["planned_steps"]), ("ended early", 2, 10))
        self.assertTrue(any("last line" in note for note in run["notes"]), run["notes"])
        self.assertTrue(any("run.json" in note for note in run["notes"]), run["notes"])

    def test_a_run_under_way_says_so(self):
        folder = self.made_run([{"loss": 3.0}], steps=10)
        with (folder / "metrics.jsonl").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertEqual(self.reported("made")["runs"][0]["state"], "under way")
        self.assertEqual(self.reported("made")["runs"][0]["state"], "ended early")

    def test_a_run_without_a_step_has_a_page(self):
        self.made_run([])
        run, = self.reported("made")["runs"]
        self.assertEqual((run["state"], run["rows"]), ("not started", 0))

    def test_losses_that_are_not_finite_are_marked(self):
        rows = [{"loss": 3.0, "skipped": False}, {"loss": None, "skipped": True},
                {"loss": 2.0, "skipped": False}, {"loss": 2.0, "skipped": False, "skipped_batches": 4}]
        self.made_run(rows)
        run, = self.reported("made")["runs"]
        self.assertEqual(run["series"]["loss"]["values"], [3.0, None, 2.0, 2.0])
        self.assertFalse(run["totals"]["ends_not_finite"])
        marks = {(mark["step"], mark["kind"]) for mark in run["marks"]["list"]}
        self.assertEqual(marks, {(2, "update skipped"), (2, "loss not finite"), (4, "data left out")})

    def test_a_line_that_cannot_be_read_is_left_out_and_named(self):
        folder = self.made_run([{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.0}])
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join([lines[0], "{\0", lines[2]]) + "\n")
        run, = self.reported("made")["runs"]
        self.assertEqual(run["series"]["loss"]["steps"], [1, 3])
        self.assertTrue(any("line 2" in note for note in run["notes"]), run["notes"])

    def test_each_of_several_devices_has_its_own_times(self):
        def lanes(compute):
            return {"compute": {"busy_seconds": compute, "stalled_seconds": 1 - compute},
                    "pass": {"busy_seconds": compute / 10, "stalled_seconds": 0.0}}
        self.made_run([{"step_seconds": 1.0, "lanes": {**lanes(0.5 + i / 10), "fetch": {
            "busy_seconds": 0.25, "stalled_seconds": 0.0}}, "peak_bytes": {"device": 30},
            "devices": {"0": {"lanes": lanes(0.4 + i / 10), "peak_bytes": 20},
                        "1": {"lanes": lanes(0.6 + i / 10), "peak_bytes": 30}}} for i in range(3)])
        run, = self.reported("made")["runs"]
        totals, means = run["totals"], run["means"]
        self.assertEqual(totals["median_lanes"]["compute"]["busy_seconds"], 0.6)
        self.assertEqual(totals["median_lanes"]["pass"]["busy_seconds"], 0.06)
        self.assertEqual([device["peak_bytes"] for device in totals["devices"]], [20, 30])
        own = [device["median_lanes"]["compute"] for device in totals["devices"]]
        self.assertEqual(own, [{"busy_seconds": 0.5, "stalled_seconds": 0.5},
                               {"busy_seconds": 0.7, "stalled_seconds": 1 - 0.7}])
        self.assertNotIn("fetch", totals["devices"][0]["median_lanes"])
        self.assertEqual([device["compute"]["busy_seconds"] for device in means["devices"]],
                         [[0.4, 0.5, 0.6], [0.6, 0.7, 0.8]])
        self.made_run([{"loss": 1.0}], "single")
        single, = self.reported("single", out="single.html")["runs"]
        self.assertEqual((single["totals"]["devices"], single["means"]["devices"]), ([], []))
        self.assertNotIn("pass", single["means"]["lanes"])

    def test_fifty_thousand_steps_keep_their_extremes_and_are_small(self):
        rows = [{"loss": 2 + math.sin(i / 100), "grad_norm": 1.0 + i % 7 / 7, "lr": 1e-3 / (1 + i),
                 "tokens_per_second": 3500.5 + i % 13, "step_seconds": 0.29 + i % 11 / 1e3,
                 "skipped": False,
                 "lanes": {lane: {"busy_seconds": 0.1 + i % 5 / 100, "stalled_seconds": 0.01}
                           for lane in ("fetch", "upload", "compute", "offload", "update", "writeback")},
                 "bytes": {"fetch": 1 << 20}, "peak_bytes": {"device": 1, "host": 2, "nvme": 3},
                 "nvme_bytes_written": i << 20} for i in range(50_000)]
        rows[31_415]["loss"], rows[27_182]["loss"], rows[16_180]["loss"] = 99.5, -7.25, None
        self.made_run(rows)
        run, = self.reported("made")["runs"]
        self.assertLess((self.path / "page.html").stat().st_size, 5 << 20)
        points = dict(zip(run["series"]["loss"]["steps"], run["series"]["loss"]["values"]))
        self.assertEqual((points[31_416], points[27_183], points[16_181]), (99.5, -7.25, None))
        self.assertEqual((run["first_step"], run["last_step"]), (1, 50_000))
        for step, value in points.items():
            self.assertEqual(value, rows[step - 1]["loss"])

    # Timelines.

    @staticmethod
    def inputs(trace, slices):
        """For each slice, those that it waited for, by arrows and by its lane."""
        index, arrows, last, found = -1, {}, {}, [[] for _ in slices]
        for event in trace:  # the ends of arrows follow their slice
            if event["ph"] == "X":
                index += 1
                lane = event["tid"]
                found[index] += [last[lane]] if lane in last else []
                last[lane] = index
            elif event["ph"] in "sf":
                arrows.setdefault(event["id"], {})[event["ph"]] = index
        for arrow in arrows.values():
            found[arrow["f"]].append(arrow["s"])
        return found

    def test_the_timeline_of_a_run_is_found_and_has_a_critical_path(self):
        self.small_run("--trace", "trace.json", "--trace-steps", "2")
        timeline = self.reported("run")["runs"][0]["timelines"][0]
        trace = json.loads((self.path / "trace.json").read_text())["traceEvents"]
        slices = [event for event in trace if event["ph"] == "X"]
        self.assertFalse(timeline["predicted"])
        self.assertEqual(len(timeline["start"]), len(slices))
        self.assertEqual(timeline["start"], [round(1000 * one["ts"]) for one in slices])
        self.assertEqual(timeline["step"], [one["args"].get("step", 0) for one in slices])
        ends = [start + long for start, long in zip(timeline["start"], timeline["duration"])]
        # A step is as long as in the metrics.
        last = timeline["steps"][-1]
        row = self.rows()[last["step"] - 1]
        self.assertLess((last["to"] - last["from"]) / 1e9, 1.01 * row["step_seconds"] + 1e-4)
        path = [i for i, on in enumerate(timeline["critical"]) if on]
        self.assertGreater(len(path), 5)
        self.assertIn(max(ends), [ends[i] for i in path])
        for before, after in zip(path, path[1:]):
            waited_for = [ends[i] for i in self.inputs(trace, slices)[after]]
            self.assertEqual(ends[before], max(waited_for))
        (self.path / "trace.json").unlink()
        run, = self.reported("run")["runs"]
        self.assertEqual(run["timelines"], [])
        self.assertTrue(any("trace.json" in note for note in run["notes"]), run["notes"])

    def test_a_predicted_timeline_next_to_the_measured_one(self):
        self.small_run("--trace", "trace.json", "--trace-steps", "2")
        (self.path / "rates.json").write_text(json.dumps(RATES))
        planned = self.run_ballast("plan", "config.json", "--rates", "rates.json",
                                   "--trace", "plan.json", "--html", "plan.html")
        self.assertEqual(planned.returncode, 0, planned.stderr)
        done = self.report("run", "--trace", "trace.json", "--trace", "plan.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        measured, predicted = data_of(self.path / "run/report.html")["runs"][0]["timelines"]
        self.assertEqual((measured["predicted"], predicted["predicted"]), (False, True))
        # The page of the plan has the same timeline without a file.
        own, = data_of(self.path / "plan.html")["timelines"]
        for column in ("start", "duration", "step", "critical", "bytes"):
            self.assertEqual(own[column], predicted[column], column)

    # Plans.

    def test_the_page_of_a_plan_has_what_its_json_has(self):
        config = self.config()
        (self.path / "rates.json").write_text(json.dumps(RATES))
        plan = ["plan", config, "--rates", "rates.json"]
        done = self.run_ballast(*plan, "--html", "plan.html")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.endswith("page in plan.html\n"))
        mine = self.path / "mine"
        mine.write_text("mine")
        for option in ("--html", "--trace"):
            assert_one_line(self, self.run_ballast(*plan, option, mine), 2, ["mine", "--overwrite"])
        assert_one_line(self, self.run_ballast(*plan, "--html", "rates.json", "--overwrite"), 2,
                        ["rates.json", "is an input"])
        self.assertEqual(mine.read_text(), "mine")
        data = data_of(self.path / "plan.html")
        self.assertEqual(data["kind"], "plan")
        self.assertEqual(data["plan"], json.loads(self.run_ballast(*plan, "--json").stdout))
        self.assertEqual(data["text"], done.stdout.splitlines()[1:-1])

    # Mistakes.

    def refused(self, arguments, status, *words):
        done = self.report(*arguments)
        assert_one_line(self, done, status, words)

    def test_what_is_not_a_run_is_refused(self):
        (self.path / "empty").mkdir()
        self.refused(["nowhere"], 2, "RUN: nowhere: no such directory")
        self.refused(["empty"], 2, "empty is not a run directory", "metrics.jsonl")
        self.refused(["text.txt"], 2, "RUN: text.txt is not a directory")
        self.assertEqual(list((self.path / "empty").iterdir()), [])
        (self.path / "empty/metrics.jsonl").mkdir()
        self.refused(["empty"], 1, "metrics.jsonl", "not a regular file")
        folder = self.made_run([], "text")
        (folder / "metrics.jsonl").write_text("no rows\nat all\n")
        self.refused(["text"], 1, "text/metrics.jsonl: line 1", "is this the metrics.jsonl of a run?")
        (folder / "metrics.jsonl").write_text('{"loss": 1}\n')
        self.refused(["text"], 1, "line 1 has no step")
        self.assertFalse((folder / "report.html").exists())

    def test_no_other_file_is_replaced(self):
        self.made_run([{"loss": 3.0}])
        (self.path / "mine.html").write_text("mine")
        self.refused(["made", "--out", "mine.html"], 2, "mine.html exists", "not a page of ballast")
        self.assertEqual((self.path / "mine.html").read_text(), "mine")
        self.refused(["made", "--out", "no/such/page.html"], 2, "no/such/page.html", "there is no folder no/such")
        self.refused(["made", "--out", "made"], 2, "made is a directory")
        (self.path / "rates.json").write_text(json.dumps(RATES))
        done = self.run_ballast("plan", self.config(), "--rates", "rates.json", "--html", "mine.html")
        assert_one_line(self, done, 2, ["mine.html exists"])
        for _ in range(2):  # its own page is replaced
            self.reported("made", out="page.html")
        self.assertEqual(list(self.path.glob("*.tmp-*")), [])

    def test_options_that_do_not_go_together(self):
        for name in ("a", "b"):
            self.made_run([{"loss": 3.0}], name)
        self.refused(["a", "b"], 2, "--out FILE")
        self.refused(["a", "b", "--trace", "text.txt", "--out", "page.html"], 2, "--trace belongs to one run")
        self.refused(["a", "--watch", "--out", "page.html"], 2, "--out")
        self.refused(["a", "--trace", "text.txt"], 1, "text.txt is not a trace of ballast train --trace")
        self.refused(["a", "--trace", "none.json"], 2, "none.json")


class Watch(ReportTest):
    """The server of --watch."""

    def get(self, address, **headers):
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        request = urllib.request.Request(address, headers=named)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, dict(reply.headers), reply.read().decode()
        except urllib.error.HTTPError as reply:
            return reply.code, dict(reply.headers), reply.read().decode()

    def test_follows_a_run(self):
        folder = self.made_run([{"loss": 3.0}], steps=3)
        _, address, _ = self.serve("made")
        status, headers, page = self.get(address)
        self.assertEqual((status, headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        self.assertTrue(page.startswith(HEAD))
        self.assertIn('"live":true', page)
        _, headers, text = self.get(address + "data.json")
        self.assertEqual(json.loads(text)["runs"][0]["rows"], 1)
        self.assertEqual(self.get(address + "data.json", If_None_Match=headers["ETag"])[::2], (304, ""))
        metrics = folder / "metrics.jsonl"
        with metrics.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write('{"step": 2, "loss"')
            file.flush()
            self.assertEqual(json.loads(self.get(address + "data.json")[2])["runs"][0]["rows"], 1)
            file.write(': 2.5}\n')
            file.flush()
            status, _, text = self.get(address + "data.json", If_None_Match=headers["ETag"])
            run, = json.loads(text)["runs"]
            self.assertEqual((status, run["rows"], run["state"]), (200, 2, "under way"))
            self.assertEqual(run["notes"], [run["notes"][0]])  # only a note that run.json is
                                                               # missing
        # A run that goes back to a checkpoint truncates its file.
        losses = enumerate((3.0, 9.0, 8.0), 1)
        metrics.write_text("".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in losses))
        run, = json.loads(self.get(address + "data.json")[2])["runs"]
        self.assertEqual(run["series"]["loss"]["values"], [3.0, 9.0, 8.0])
        self.assertEqual(run["state"], "finished")

    def test_answers_only_what_it_should(self):
        self.made_run([{"loss": 3.0}])
        _, address, port = self.serve("made")
        self.assertEqual(self.get(address + "config.json")[0], 404)
        self.assertEqual(self.get(address + "../../etc/passwd")[0], 404)
        for host in ("example.org", f"example.org:{port}", "localhost.example.org", "127.0.0.1.example"):
            self.assertEqual(self.get(address, Host=host)[0], 403, host)
        # Through ssh -L 9000:localhost:PORT the browser names the other end of the tunnel.
        for host in (f"localhost:{port}", "localhost:9000", "127.0.0.1:9000", "[::1]:9000", "localhost"):
            self.assertEqual(self.get(address, Host=host)[0], 200, host)
        for origin, status in (("http://localhost:9000", 200), ("http://example.org", 403), ("null", 403)):
            self.assertEqual(self.get(address + "data.json", Origin=origin)[0], status, origin)
        self.assertEqual(self.get(address + "data.json", Sec_Fetch_Site="cross-site",
                                  Sec_Fetch_Mode="no-cors")[0], 403)
        for words, status in ((b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx", 405),
                              (b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET / HTTP/1.0\r\n\r\n", 200),
                              (b"GET /" + b"x" * 60000, 431), (b"nonsense\r\n\r\n", 400),
                              (b"GET http://example.org/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400)):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(words)
                self.assertTrue(client.recv(4096).startswith(f"HTTP/1.1 {status} ".encode()), words[:40])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with client.makefile("rb") as file:
                head = file.read()
        self.assertTrue(head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n"), head)
        # Neither a silent client nor one that sends too much blocks the others.
        with socket.create_connection(("127.0.0.1", port), timeout=60), \
                socket.create_connection(("127.0.0.1", port), timeout=60) as loud:
            loud.sendall(b"GET /" + b"x" * 60000)
            self.assertEqual(self.get(address)[0], 200)
        self.assertEqual(self.get(address)[0], 200)

    def test_readers_that_stop_do_not_keep_others_waiting(self):
        self.made_run([{"loss": 3.0}])
        _, address, port = self.serve("made")
        slow = []
        for _ in range(100):  # more than are served at a time, none of which reads
            client = socket.socket()
            self.addCleanup(client.close)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            slow.append(client)
        self.assertEqual(self.get(address)[0], 200)

    def test_a_removed_directory_does_not_end_it(self):
        folder = self.made_run([{"loss": 3.0}, {"loss": 2.0}], steps=2)
        _, address, _ = self.serve("made")
        run = lambda: json.loads(self.get(address + "data.json")[2])["runs"][0]
        self.assertEqual(run()["rows"], 2)
        folder.rename(self.path / "elsewhere")
        gone = run()
        self.assertEqual(gone["rows"], 2)
        self.assertTrue(any("cannot be read any more" in note for note in gone["notes"]), gone["notes"])
        self.made_run([{"loss": 1.0}], steps=7)  # another run takes its place
        other = run()
        self.assertEqual((other["rows"], other["planned_steps"]), (1, 7))
        self.assertFalse(any("any more" in note for note in other["notes"]), other["notes"])

    def test_names_the_tunnel_for_another_machine(self):
        self.made_run([{"loss": 3.0}])
        process, _, port = self.serve("made")
        line = process.stdout.readline()
        self.assertIn(f"ssh -N -L {port}:127.0.0.1:{port} ", line)
        self.assertIn(socket.gethostname(), line)

    def test_listens_on_the_loopback_address_alone(self):
        self.made_run([{"loss": 3.0}])
        _, _, port = self.serve("made")
        sockets = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()]
        listening = [fields[1] for fields in sockets
                     if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")]
        self.assertEqual(listening, [f"0100007F:{port:04X}"])
        done = self.report("made", "--watch", "--port", port)
        assert_one_line(self, done, 1, [f"127.0.0.1:{port}", "--port"])

    def test_a_signal_ends_it(self):
        self.made_run([{"loss": 3.0}])
        for number in (signal.SIGINT, signal.SIGTERM):
            process, _, port = self.serve("made")
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            self.assertEqual((process.returncode, errors), (0, ""))
            with self.assertRaises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=60)

    def test_follows_a_real_run(self):
        config = self.config(ballast={**TINY["ballast"], "steps": 100000})
        run = subprocess.Popen([self.ballast, "train", str(config)], cwd=self.path,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        deadline = time.monotonic() + 120
        while not (self.path / "run/run.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        _, address, _ = self.serve("run")
        seen = []
        while len(set(seen)) < 3 and time.monotonic() < deadline:
            now, = json.loads(self.get(address + "data.json")[2])["runs"]
            self.assertEqual(now["state"], "under way")
            seen.append(now["rows"])
        self.assertEqual(sorted(seen), seen)
        self.assertGreater(len(set(seen)), 2)
        run.send_signal(signal.SIGINT)
        run.wait(timeout=60)
        ended, = json.loads(self.get(address + "data.json")[2])["runs"]
        self.assertEqual(ended["state"], "ended early")
        self.assertEqual({entry.name for entry in (self.path / "run").iterdir()},
                         {"metrics.jsonl", "config.json", "run.json"})


if __name__ == "__main__":
    main()
