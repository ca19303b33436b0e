#!/usr/bin/env python3
"""`ballast bench plan` as a user meets it, on a tiny model. Asserts no time and no accuracy.

    bench_plan_test.py PATH_OF_BALLAST
"""

import json
import subprocess
import sys
import tempfile
import unittest

from one_line import assert_one_line

BALLAST = ""

TINY = ("--set", "model.hidden_size=32", "--set", "model.num_heads=2", "--set",
        "model.vocab_size=131", "--set", "data.sequence_length=16", "--set",
        "aio.any_file_system=true", "--set", "ballast.device_bytes=64MiB", "--set",
        "ballast.host_bytes=64MiB", "--steps", "2")


class BenchPlan(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)

    def bench(self, *arguments, path=None):
        path = path or self.directory.name
        return subprocess.run([BALLAST, "bench", "plan", "--path", path, *arguments],
                              capture_output=True, text=True, timeout=300, check=False)

    def cases(self):
        done = self.bench("--list")
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line.split()[0] for line in done.stdout.splitlines()]

    def test_lists_cases_of_every_bound(self):
        cases = self.cases()
        self.assertGreaterEqual(len(cases), 8)
        self.assertEqual(len(set(cases)), len(cases))

    def test_every_case_is_predicted_and_runs(self):
        done = self.bench("--json", *TINY)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)
        self.assertEqual([row["case"] for row in rows], self.cases())
        for row in rows:
            with self.subTest(case=row["case"]):
                self.assertGreater(row["predicted_step_seconds"], 0)
                self.assertGreater(row["step_seconds"], 0)
                self.assertEqual(row["ledger_bytes"], row["allocated_bytes"])
                self.assertIn(row["bottleneck"], row["lanes"])
                for name, lane in row["lanes"].items():
                    # A lane that is predicted to work does, and the other way round.
                    self.assertEqual(lane["predicted_busy_seconds"] > 0, lane["busy_seconds"] > 0,
                                     name)

    def test_the_planner_is_compared_with_choices_made_by_hand(self):
        done = self.bench("--choice", *TINY)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertTrue(lines[1].startswith("planner "), done.stdout)
        self.assertRegex(lines[-1], r"^best of 2\d by hand: \S+, .* as fast$")

    def test_takes_the_cases_that_are_named(self):
        done = self.bench("--json", "--only", "link,compute", *TINY)
        self.assertEqual([row["case"] for row in json.loads(done.stdout)], ["link", "compute"])

    def test_mistakes_are_one_line(self):
        assert_one_line(self, self.bench("--only", "nothing"), 2, ["nothing", "--list"])
        assert_one_line(self, self.bench("--only", "nvme-all", path="/nowhere/at/all"), 1,
                        ["/nowhere/at/all"])
        assert_one_line(self, self.bench("--only", "compute", "--set", "model.hiden_size=3"), 2,
                        ["hiden_size", "hidden_size"])
        assert_one_line(self, self.bench("--steps", "0"), 2, ["--steps"])
        assert_one_line(self, self.bench("--choice", "--json"), 2, ["--choice"])


if __name__ == "__main__":
    BALLAST = sys.argv.pop(1)
    unittest.main()
