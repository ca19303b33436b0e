#!/usr/bin/env python3
"""`ballast bench step` as a user meets it: devices, figures that fit together, mistakes. Asserts no
time.

    bench_step_test.py PATH_OF_BALLAST
"""

import json
import os
import re
import subprocess
import sys
import unittest

from one_line import assert_one_line

BALLAST = ""

FIELDS = {"device", "family", "dtype", "parameters", "tokens", "step_seconds", "tokens_per_second",
          "flops_per_second", "gemm_peak_flops_per_second", "percent_of_gemm_peak", "loss"}
TINY = ("--vocab", "256", "--hidden", "64", "--layers", "2", "--heads", "2", "--sequence", "32",
        "--steps", "1", "--set", "ballast.device_bytes=256MiB", "--set",
        "ballast.host_bytes=64MiB")


class BenchStep(unittest.TestCase):
    def bench(self, *arguments):
        return subprocess.run([BALLAST, "bench", "step", *arguments], capture_output=True,
                              text=True, timeout=300, check=False)

    def row(self, *arguments):
        done = self.bench("--json", *arguments, *TINY)
        self.assertEqual(done.returncode, 0, done.stderr)
        (row,) = json.loads(done.stdout)
        return row

    def assert_fails(self, done, status, *words):
        assert_one_line(self, done, status, words)
        self.assertEqual(done.stdout, "")

    def test_figures_fit_together(self):
        row = self.row("--device", "host", "--family", "llama", "--dtype", "fp32")
        self.assertEqual(set(row), FIELDS)
        self.assertEqual((row["device"], row["family"], row["dtype"]), ("host", "llama", "fp32"))
        self.assertEqual(row["tokens"], 2 * 4 * 32)  # micro-batches, sequences, length
        self.assertAlmostEqual(row["tokens_per_second"] * row["step_seconds"], row["tokens"],
                               delta=1e-6 * row["tokens"])
        self.assertAlmostEqual(
            row["percent_of_gemm_peak"] / 100 * row["gemm_peak_flops_per_second"],
            row["flops_per_second"], delta=1e-6 * row["flops_per_second"])
        self.assertGreater(row["loss"], 0.0)

    def test_the_table_tells_the_device(self):
        done = self.bench("--device", "host", *TINY)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, re.compile(r"^  device +host device, .* threads?$", re.M))

    def test_auto_is_a_device_that_is_there(self):
        row = self.row("--device", "auto")
        self.assertIn(row["device"], ("host", "cuda"))
        self.assertEqual(self.row()["device"], row["device"])
        named = self.bench("--device", "cuda", *TINY)
        self.assertEqual(named.returncode == 0, row["device"] == "cuda")

    # Mistakes.

    def test_cuda_where_there_is_none(self):
        done = self.bench("--device", "cuda", *TINY)
        if done.returncode == 0:
            self.skipTest("there is a GPU")
        self.assert_fails(done, 1, "bench step: --device cuda: ", "use --device host")

    def test_unknown_device(self):
        self.assert_fails(self.bench("--device", "cudo"), 2, "bench step", "'cudo'",
                          "did you mean 'cuda'", "auto", "host")

    def test_unknown_option(self):
        self.assert_fails(self.bench("--hiden", "64"), 2, "--hiden")


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
