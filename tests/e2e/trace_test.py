#!/usr/bin/env python3
"""Tests traces of real runs: their content, and the trace of a run that ends early.

    trace_test.py PATH_OF_BALLAST
"""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import runs
from one_line import assert_one_line

BALLAST = pathlib.Path(sys.argv.pop(1)).resolve()
STAGES = ["fetch", "upload", "gather", "compute", "reduce", "offload", "update", "writeback"]
PATIENCE = 240

TINY = {
    **runs.TINY,
    "model": {**runs.TINY["model"], "num_layers": 3},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"},
                          "offload_param": {"device": "cpu"}},
}


def nanoseconds(microseconds):
    return round(microseconds * 1000)


class Trace(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory(prefix="ballast-trace-")
        self.addCleanup(self._directory.cleanup)
        self.path = pathlib.Path(self._directory.name)
        self.file = self.path / "trace.json"
        (self.path / "text.txt").write_text(runs.TEXT)

    def config(self, **ballast):
        config = json.loads(json.dumps(TINY))
        config["ballast"].update(ballast)
        file = self.path / "config.json"
        file.write_text(json.dumps(config))
        return file

    def train(self, *arguments, faults=None, limits=None, **ballast):
        environment = {**os.environ, **({"BALLAST_IO_FAULTS": faults} if faults else {})}
        return subprocess.run([BALLAST, "train", self.config(**ballast), *arguments],
                              cwd=self.path, env=environment, capture_output=True, text=True,
                              timeout=PATIENCE, preexec_fn=limits, check=False)

    def read(self, stages=STAGES):
        """The trace's slices by track, after checks that apply to every trace."""
        events = json.loads(self.file.read_text())["traceEvents"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.assertEqual(list(names.values()), [s for s in stages if s in names.values()])
        tracks = {name: [] for name in names.values()}
        for event in events:
            if event["ph"] == "X":
                tracks[names[event["tid"]]].append(event)
        for slices in tracks.values():
            for one, next_one in zip(slices, slices[1:]):
                self.assertLessEqual(nanoseconds(one["ts"]) + nanoseconds(one["dur"]),
                                     nanoseconds(next_one["ts"]))
        starts = {e["id"]: e for e in events if e["ph"] == "s"}
        ends = {e["id"]: e for e in events if e["ph"] == "f"}
        self.assertEqual(set(starts), set(ends))
        for number, start in starts.items():
            self.assertLessEqual(start["ts"], ends[number]["ts"])
            for event in (start, ends[number]):
                self.assertTrue(any(
                    nanoseconds(s["ts"]) <= nanoseconds(event["ts"])
                    <= nanoseconds(s["ts"]) + nanoseconds(s["dur"])
                    for s in tracks[names[event["tid"]]]), event)
        self.assertTrue(not tracks or starts)
        for left in self.path.glob("*.tmp-*"):
            self.fail(f"{left} was left")
        return tracks

    def steps(self, tracks):
        return {s["args"]["step"] for slices in tracks.values() for s in slices}

    def losses(self):
        lines = (self.path / "run/metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def test_shows_every_operation_of_the_first_steps_with_their_updates(self):
        done = self.train("--trace", self.file, "--trace-steps", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(str(self.file), done.stdout)
        tracks = self.read()
        self.assertEqual(set(tracks), {"fetch", "upload", "compute", "offload", "update",
                                       "writeback"})
        self.assertEqual(self.steps(tracks), {1, 2})
        # 5 blocks, 2 micro-batches, 2 steps; the head's forward and backward are one.
        count = lambda track, kind: sum(s["cat"] == kind for s in tracks[track])
        self.assertEqual(count("compute", "forward"), 4 * 2 * 2)
        self.assertEqual(count("compute", "backward"), 4 * 2 * 2)
        self.assertEqual(count("compute", "forward and backward"), 2 * 2)
        self.assertEqual(count("update", "gate"), 2)
        self.assertEqual(count("update", "update"), 5 * 2)
        self.assertEqual(count("writeback", "writeback states"), 5 * 2)
        self.assertEqual(count("fetch", "fetch states"), 5 * 2)
        for one in tracks["writeback"]:
            self.assertGreater(one["args"]["bytes"], 0)

    def test_of_two_devices_has_the_tracks_of_each(self):
        self.assertEqual(self.train().returncode, 0)
        alone = self.losses()
        done = self.train("--trace", self.file, "--overwrite", "--set", "pipeline.stages=2",
                          "--set", "model.vocabulary_tiles=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.losses(), alone)
        both = lambda lane: [f"{lane}, device {device}" for device in (0, 1)]
        tracks = self.read(["fetch", *both("upload"), *both("gather"), *both("compute"),
                            *both("pass"), *both("reduce"), *both("offload"), "update", "writeback"])
        self.assertEqual(set(tracks), {"fetch", "update", "writeback", *both("upload"),
                                       *both("compute"), *both("pass"), *both("offload")})
        blocks = [{s["args"]["block_name"] for s in tracks[name]} for name in both("compute")]
        self.assertEqual(blocks[0] & blocks[1], set(), "each block is on one device")
        self.assertIn("2 devices: ", done.stdout)
        row = json.loads((self.path / "run/metrics.jsonl").read_text().splitlines()[-1])
        self.assertEqual(set(row["devices"]), {"0", "1"})
        for lane in ("compute", "pass"):
            seconds = [device["lanes"][lane]["busy_seconds"] for device in row["devices"].values()]
            self.assertGreater(min(seconds), 0)
            self.assertAlmostEqual(row["lanes"][lane]["busy_seconds"], sum(seconds) / 2, delta=1e-9)
        peaks = [device["peak_bytes"] for device in row["devices"].values()]
        self.assertEqual(row["peak_bytes"]["device"], max(peaks))

    def test_changes_nothing_of_the_run(self):
        self.assertEqual(self.train(eval_every=1).returncode, 0)
        plain = self.losses()
        done = self.train("--trace", self.file, "--trace-steps", "2", "--overwrite", eval_every=1)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.losses(), plain)
        self.read()

    def test_has_ten_steps_by_default(self):
        self.assertEqual(self.train("--trace", self.file, steps=12).returncode, 0)
        self.assertEqual(self.steps(self.read()), set(range(1, 11)))
        self.assertEqual(len(self.losses()), 12)

    def test_of_a_serial_run_has_no_two_operations_at_a_time(self):
        done = self.train("--trace", self.file, "--serial")
        self.assertEqual(done.returncode, 0, done.stderr)
        slices = sorted((s for track in self.read().values() for s in track),
                        key=lambda s: s["ts"])
        for one, next_one in zip(slices, slices[1:]):
            self.assertLessEqual(nanoseconds(one["ts"]) + nanoseconds(one["dur"]),
                                 nanoseconds(next_one["ts"]))

    def test_a_place_that_cannot_hold_a_trace_is_found_before_the_run(self):
        (self.path / "file").write_text("")
        (self.path / "notes").write_text("mine")
        for place, status in (("missing/trace.json", 2), ("file/trace.json", 2), (".", 2),
                              ("notes", 2), ("run/metrics.jsonl", 2), ("text.txt", 2)):
            done = self.train("--trace", place)
            assert_one_line(self, done, status, [place])
            self.assertFalse((self.path / "run").exists(), place)
        # Files that the run reads or writes are never replaced, even if asked for.
        for place in ("run/metrics.jsonl", "run/weights", "text.txt", "config.json"):
            assert_one_line(self, self.train("--overwrite", "--trace", place), 2, [place])
            self.assertFalse((self.path / "run").exists(), place)
        self.assertEqual((self.path / "notes").read_text(), "mine")
        # The run directory is made before.
        self.assertEqual(self.train("--trace", "run/trace.json").returncode, 0)
        self.assertTrue((self.path / "run/trace.json").exists())

    def test_traces_are_replaced_by_traces(self):
        for arguments in ([], ["--overwrite"]):
            self.assertEqual(self.train("--trace", self.file, *arguments).returncode, 0)
        self.file.write_text("mine")
        done = self.train("--trace", self.file, "--out", "other")
        assert_one_line(self, done, 2, ["trace.json", "--overwrite"])
        self.assertEqual(self.train("--trace", self.file, "--overwrite").returncode, 0)
        self.read()

    def test_a_disk_that_fills_up_is_a_warning_and_leaves_no_part(self):
        def limits():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        config = json.loads(json.dumps(TINY))
        config["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
        file = self.path / "on-host.json"
        file.write_text(json.dumps(config))
        done = subprocess.run([BALLAST, "train", file, "--trace", self.file], cwd=self.path,
                              capture_output=True, text=True, timeout=PATIENCE,
                              preexec_fn=limits, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"\Aballast: warning: there is no trace: cannot write "
                         rf"{self.file}: File too large\n\Z")
        self.assertNotIn("trace in", done.stdout)
        self.assertEqual(list(self.path.glob("trace*")), [])

    def test_trace_steps_alone_is_refused(self):
        assert_one_line(self, self.train("--trace-steps", "2"), 2, ["--trace"])

    def test_a_run_that_fails_leaves_what_it_has(self):
        # Writes to NVMe fail late enough for one step to finish.
        done = self.train("--trace", self.file, faults="eio:on=write:after=20:times=1", steps=9)
        assert_one_line(self, done, 1, ["writeback"], ignored="ballast: warning:")
        self.assertIn("compute", self.read())

    def test_an_interrupted_run_leaves_what_it_has(self):
        process = subprocess.Popen(
            [BALLAST, "train", self.config(steps=1000000), "--trace", self.file,
             "--trace-steps", "1000000"], cwd=self.path, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        self.addCleanup(lambda: process.poll() is not None or process.kill())
        metrics = self.path / "run/metrics.jsonl"
        end = time.monotonic() + PATIENCE
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        self.assertLessEqual({1, 2, 3}, self.steps(self.read()))


if __name__ == "__main__":
    unittest.main()
