#!/usr/bin/env python3
"""`ballast bench attention` as a user meets it: rows and mistakes. Asserts no time.

    bench_attention_test.py PATH_OF_BALLAST
"""

import json
import os
import re
import subprocess
import sys
import unittest

from one_line import assert_one_line

BALLAST = ""

FIELDS = {"pass", "by", "sequences", "length", "heads", "kv_heads", "head_size", "repeats",
          "median_seconds", "tflop_per_second", "times_own"}
SMALL = ("--sequence", "256", "--micro-batch", "2", "--heads", "4", "--kv-heads", "2",
         "--head-size", "64", "--repeats", "3", "--seconds", "0")


class BenchAttention(unittest.TestCase):
    def bench(self, *arguments):
        return subprocess.run([BALLAST, "bench", "attention", *arguments], capture_output=True,
                              text=True, timeout=300, check=False)

    def on_gpu(self, *arguments):
        done = self.bench(*arguments)
        if done.returncode != 0 and "compares attentions of the CUDA device" in done.stderr:
            self.skipTest(done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def assert_fails(self, done, status, *words):
        assert_one_line(self, done, status, words)
        self.assertEqual(done.stdout, "")

    # What works, on a GPU.

    def test_rows(self):
        rows = json.loads(self.on_gpu("--json", *SMALL))
        passes = [(row["pass"], row["by"]) for row in rows]
        self.assertEqual(passes[:2], [("forward", "own"), ("backward", "own")])
        self.assertIn(passes[2:], ([], [("forward", "cudnn")]))
        for row in rows:
            self.assertEqual(set(row), FIELDS)
            self.assertEqual(row["repeats"], 3)
            flop = (10 if row["pass"] == "backward" else 4) * 2 * 4 * 256**2 * 64 / 2
            self.assertAlmostEqual(row["tflop_per_second"] * 1e12 * row["median_seconds"], flop,
                                   delta=1e-9 * flop)
            if row["by"] == "own":
                self.assertEqual(row["times_own"], 1.0)

    def test_the_table_fits_and_tells_what_is_missing(self):
        text = self.on_gpu(*SMALL)
        found = re.findall(r"^  (\w+) +(\w+) +3 +[\d.]+ +[\d.]+ +[\d.]+$", text, re.M)
        self.assertEqual(("forward", "cudnn") in found, "no cuDNN: " not in text)
        for line in text.splitlines():
            if not line.startswith("no cuDNN: "):
                self.assertLessEqual(len(line), 80, line)

    # Mistakes.

    def test_the_host_device_has_nothing_to_compare(self):
        self.assert_fails(self.bench("--device", "host"), 1, "--device host", "use --device cuda")

    def test_without_a_gpu(self):
        done = self.bench(*SMALL)
        if done.returncode == 0:
            self.skipTest("there is a GPU")
        self.assert_fails(done, 1, "bench attention: it compares attentions of the CUDA device: ")
        named = self.bench("--device", "cuda", *SMALL)
        self.assertEqual(named.stderr, done.stderr)

    def test_unknown_device(self):
        self.assert_fails(self.bench("--device", "cudaa"), 2, "did you mean 'cuda'")

    def test_extents_that_are_none(self):
        self.assert_fails(self.bench("--heads", "0"), 2, "--heads")
        self.assert_fails(self.bench("--sequence", "many"), 2, "--sequence")

    def test_no_repeats(self):
        self.assert_fails(self.bench("--repeats", "0"), 2, "--repeats")


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
