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
          "flops_per_second", "gemm_peak_flops_per_second", "percent_of_gemm_peak",
          "model_flops_per_second", "model_percent_of_gemm_peak", "compute_seconds",
          "compute_enqueueing_seconds", "passes", "loss"}
PASS_FIELDS = {"pass", "operations", "seconds", "flops", "flops_per_second",
               "percent_of_gemm_peak"}
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
        self.assert_share(row, row["flops_per_second"], row["percent_of_gemm_peak"])
        self.assertGreater(row["loss"], 0.0)
        self.assertLess(row["compute_seconds"], 1.05 * row["step_seconds"])
        self.assertGreater(row["compute_enqueueing_seconds"], 0.0)
        self.assertLess(row["compute_enqueueing_seconds"], row["compute_seconds"])

    def assert_passes(self, arguments, layer, last, head):
        """FLOPs of a micro-batch, forward: of a layer, of its last product, of the head. What is
        computed again of a layer is all but its last product."""
        for recompute, again in (("true", layer - last), ("false", 0)):
            row = self.row("--device", "host", *arguments, "--set",
                           f"ballast.recompute={recompute}")
            self.assert_passes_of(row, layer, again, head)
        return row

    def assert_passes_of(self, row, layer, again, head):
        self.assertEqual([p["pass"] for p in row["passes"]],
                         ["layer_forward", "layer_backward", "head"])
        # Layers and micro-batches, two of each; steps, of which TINY times one.
        self.assertEqual([p["operations"] for p in row["passes"]], [4, 4, 2])
        self.assertEqual([p["flops"] for p in row["passes"]],
                         [layer, 2 * layer + again, 3 * head])
        for figures in row["passes"]:
            self.assertEqual(set(figures), PASS_FIELDS)
            self.assertGreater(figures["seconds"], 0.0)
            self.assertLess(figures["seconds"], row["step_seconds"])
            self.assertAlmostEqual(figures["flops_per_second"] * figures["seconds"],
                                   figures["flops"], delta=1e-6 * figures["flops"])
            self.assert_share(row, figures["flops_per_second"], figures["percent_of_gemm_peak"])
        step = 2 * (2 * 3 * layer + 3 * head)
        for kind, flops in (("model_", step), ("", step + 2 * 2 * again)):
            rate = row[f"{kind}flops_per_second"]
            self.assertAlmostEqual(rate * row["step_seconds"], flops, delta=1e-6 * flops)
            self.assert_share(row, rate, row[f"{kind}percent_of_gemm_peak"])

    def assert_share(self, row, rate, percent):
        self.assertAlmostEqual(percent / 100 * row["gemm_peak_flops_per_second"], rate,
                               delta=1e-6 * rate)

    def test_products_of_gpt2(self):
        tokens = 4 * 32
        attention = 2 * tokens * 32 * 64  # scores and values, the causal half
        weights = 4 * 64 * 64 + 2 * 64 * 96
        self.assert_passes(("--intermediate", "96"), 2 * tokens * weights + attention,
                           2 * tokens * 96 * 64, 2 * tokens * 256 * 64)

    def test_products_of_llama(self):
        llama = ("--family", "llama", "--kv-heads", "1", "--intermediate", "160")
        tokens = 4 * 32
        attention = 2 * tokens * 32 * 64
        layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
        row = self.assert_passes(llama, 2 * tokens * layer + attention, 2 * tokens * 160 * 64,
                                 2 * tokens * 256 * 64)
        # Matrices that are not tied, two norms in a layer and one behind them.
        self.assertEqual(row["parameters"], 2 * 256 * 64 + 2 * (layer + 2 * 64) + 64)

    def test_the_table_tells_the_device_and_the_passes(self):
        done = self.bench("--device", "host", *TINY)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, re.compile(r"^  device +host device, .* threads?$", re.M))
        rate = r"[0-9.]+ [kMGTP]?FLOP/s"
        self.assertRegex(done.stdout, re.compile(rf"^  GEMM peak +{rate} ", re.M))
        for name in ("hardware", r"model \(MFU\)"):
            self.assertRegex(done.stdout, re.compile(rf"^  {name} +{rate} +[0-9.]+%  ", re.M))
        self.assertRegex(done.stdout, re.compile(
            r"^  compute +[0-9.]+ m?s busy per step, [0-9.]+ m?s to enqueue it$", re.M))
        for name in ("layer forward", "layer backward", "head, both"):
            self.assertRegex(done.stdout,
                             re.compile(rf"^  {name} +[0-9.]+ m?s +{rate} +[0-9.]+%$", re.M))

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

    def test_heads_that_do_not_fit(self):
        self.assert_fails(
            self.bench("--device", "host", *TINY, "--family", "llama", "--kv-heads", "3"), 2,
            "bench step", "model.num_kv_heads", "does not divide")

    def test_unknown_option(self):
        self.assert_fails(self.bench("--hiden", "64"), 2, "--hiden")


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
