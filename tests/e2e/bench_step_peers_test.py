#!/usr/bin/env python3
"""tools/bench/step_peers.py as a user meets it: help, mistakes, what it makes of a peer's figures.
Asserts no time. PyTorch is not needed: a stand-in gives the peer's figures, and what needs the real
one is skipped without it.

    bench_step_peers_test.py PATH_OF_BALLAST
"""

import importlib.util
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

BALLAST = ""
TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"
SCRIPT = "step_peers.py"
TINY = ("--preset", "tiny", "--rounds", "1", "--steps", "1")
TINY_PARAMETERS = 131392  # 2 x 256 x 64, two layers of 49280, 64 in the last norm

# Figures of a peer that takes 2 s for a step. What {change} does to `row` is the test's.
PEER = """
import json, sys
job = json.loads(sys.argv[1])
row = {{"parameters": {parameters}, "seconds": [1.0, 2.0, 9.0], "first_loss": {loss},
       "loss": {loss}, "gemm_peak_flops_per_second": 1e9, "device_bytes": None, "version": "0.0"}}
{change}
print("some library's word")
print(json.dumps(row))
"""
# Ballast's, for tests that are not about them.
FIGURES = """#!/bin/sh
echo '[{{"parameters": {parameters}, "loss": {loss}, "tokens_per_second": 256.0,
        "step_seconds": 1.0, "gemm_peak_flops_per_second": 1e9}}]'
"""


class BenchStepPeers(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-peers-")
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)

    def run_script(self, script, *arguments, options=(), environment=None):
        return subprocess.run([sys.executable, "-B", *options, script, "--ballast", BALLAST,
                               *arguments], capture_output=True, text=True, timeout=300,
                              check=False, env={**os.environ, **(environment or {})})

    def with_stand_in(self, change, *arguments, ballast=False):
        """The script beside a peer whose figures a test makes, and Ballast's unless it is asked
        for."""
        for name in (SCRIPT, "step_options.py"):
            shutil.copy(TOOLS / name, self.path)
        (self.path / "torch.py").touch()
        figures = {"parameters": TINY_PARAMETERS, "loss": math.log(256)}
        (self.path / "step_torch.py").write_text(PEER.format(change=change, **figures))
        program = self.path / "ballast"
        program.write_text(FIGURES.format(**figures))
        program.chmod(0o755)
        return self.run_script(self.path / SCRIPT, *TINY, *arguments,
                               *(() if ballast else ("--ballast", program)))

    def assert_fails(self, done, *words):
        """The last line on stderr says what is wrong; lines before it tell of rounds."""
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stdout, "")
        *rounds, line = done.stderr.splitlines()
        for before in rounds:
            self.assertTrue(before.startswith("round "), done.stderr)
        self.assertTrue(line.startswith("step_peers: error: "), done.stderr)
        for word in words:
            self.assertIn(word, line)

    def test_help(self):
        done = self.run_script(TOOLS / SCRIPT, "--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in ("--peer", "--preset", "1.5b", "8b-offload", "--recompute", "--device-bytes"):
            self.assertIn(word, done.stdout)

    def test_without_torch_it_says_what_to_install(self):
        # -S: without what is installed beside the standard library.
        for peer, packages in (("torch", "pip install torch"),
                               ("deepspeed", "pip install torch deepspeed ninja")):
            done = self.run_script(TOOLS / SCRIPT, *TINY, "--peer", peer, options=("-S",))
            self.assert_fails(done, "no module torch", packages)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_mistakes_are_one_line(self):
        for arguments, words in (
                (("--pear", "torch"), ("--pear",)),
                (("--peer", "jax"), ("--peer", "'jax'")),
                (("--preset", "huge"), ("--preset", "'huge'", "8b-offload")),
                (("--layers", "0"), ("--layers", "'0'")),
                (("--rounds", "-1"), ("--rounds",)),
                (("--device-bytes", "24G"), ("--device-bytes", "'24G'")),
                (("--device-bytes", "24GiB"), ("--device-bytes", "--device cuda")),
                (("--heads", "3"), ("--heads",)),
                (("--precision", "fp16"), ("'fp16'", "bf16, amp")),
                (("--precision", "amp", "--dtype", "fp32"), ("--precision", "--dtype bf16")),
                (("--offload", "all"), ("--offload", "--peer deepspeed")),
                (("--peer", "deepspeed", "--offload", "none"), ("--offload none",)),
                (("--peer", "deepspeed", "--compile", "yes"), ("--compile",)),
                (("--compile", "yes", "--model", "transformers"), ("--compile",))):
            done = self.run_script(TOOLS / SCRIPT, *TINY, *arguments)
            self.assert_fails(done, *words)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_a_program_that_is_not_there(self):
        done = self.run_script(TOOLS / SCRIPT, *TINY, "--ballast", str(self.path / "none"))
        self.assert_fails(done, "none is not there", "--ballast")

    # With a stand-in for the peer.

    def test_figures_fit_together(self):
        done = self.with_stand_in("", "--json", "--rounds", "2", "--recompute", "both",
                                  "--precision", "bf16,amp", ballast=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        ours, *theirs = json.loads(done.stdout)
        self.assertEqual(ours["program"], "ballast")
        self.assertEqual([row["program"] for row in theirs],
                         ["torch bf16", "torch bf16 recompute", "torch amp", "torch amp recompute"])
        self.assertEqual(ours["ratio"], 1.0)
        for row in theirs:
            self.assertEqual(row["tokens"], 2 * 4 * 32)  # micro-batches, sequences, length
            self.assertEqual(row["step_seconds"], 2.0)
            self.assertEqual(row["tokens_per_second"], 128.0)
            self.assertEqual(row["parameters"], ours["parameters"])
            self.assertEqual(len(row["rounds"]), 2)
            for index, pair in enumerate(row["rounds"]):
                self.assertAlmostEqual(pair["ratio"] * 128.0,
                                       ours["rounds"][index]["tokens_per_second"])
            self.assertLessEqual(row["ratio_min"], row["ratio"])
            self.assertLessEqual(row["ratio"], row["ratio_max"])
            self.assertGreater(row["host_bytes"], 2**20)
        # The same work at another pace has its share of the same peak.
        self.assertAlmostEqual(
            ours["model_flops_share"] / theirs[0]["model_flops_share"],
            ours["tokens_per_second"] / 128.0, delta=0.5 * ours["tokens_per_second"] / 128.0)
        # One line for each measurement, in an order that rotates.
        self.assertEqual([line.split(":")[0] for line in done.stderr.splitlines()],
                         [f"round 1/2 {row['program']}" for row in (ours, *theirs)] +
                         [f"round 2/2 {row['program']}" for row in (*theirs, ours)])

    def test_what_the_peer_is_asked_for(self):
        done = self.with_stand_in(
            "assert [job[k] for k in ('family', 'kv_heads', 'intermediate', 'tied', 'offload')] == "
            "['llama', 2, 192, False, 'none'], job\n"
            "assert (job['recompute'], job['precision']) == (True, 'amp'), job",
            "--recompute", "yes", "--precision", "amp")
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        self.assertRegex(done.stdout, "torch amp recompute +2.000 +128")

    def test_another_model_is_noticed(self):
        done = self.with_stand_in("row['parameters'] += 64", "--recompute", "no")
        self.assert_fails(done, "torch bf16", str(TINY_PARAMETERS), str(TINY_PARAMETERS + 64))

    def test_losses_that_cannot_be_are_noticed(self):
        for change, word in (("row['first_loss'] += 1", "first loss"),
                             ("row['first_loss'] = float('nan')", "first loss"),
                             ("row['loss'] -= 1", "last step"),
                             ("row['loss'] = float('nan')", "last step")):
            self.assert_fails(self.with_stand_in(change, "--recompute", "no"), "torch bf16", word)

    def test_a_peer_that_fails_is_a_line_of_the_table(self):
        done = self.with_stand_in("if job['recompute']: sys.exit('out of memory: 5 GiB wanted')",
                                  "--rounds", "2")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stdout, r"torch bf16 +2\.000")
        self.assertIn("failed: out of memory: 5 GiB wanted", done.stdout)
        self.assertEqual(done.stderr.count("round "), 5)  # it is not tried again

    def test_a_peer_that_cannot_fit_is_not_started(self):
        done = self.with_stand_in("raise AssertionError", "--layers", "99999999", "--recompute",
                                  "no")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stdout, r"torch bf16 +failed: its states take about \d+\.\d GiB .*; "
                                      r"--layers \d+ would")
        self.assertRegex(done.stdout, r"ballast +1\.000")

    # With the real one, where it is.

    def test_the_real_peer(self):
        if importlib.util.find_spec("torch") is None:
            self.skipTest("no torch")
        for family in ("llama", "gpt2"):
            done = self.run_script(TOOLS / SCRIPT, *TINY, "--family", family, "--recompute", "both",
                                   "--precision", "bf16,amp", "--json")
            self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
            rows = json.loads(done.stdout)
            self.assertEqual(len(rows), 5)
            losses = [row["loss"] for row in rows[1:]]
            self.assertLess(max(losses) - min(losses), 0.01)


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
