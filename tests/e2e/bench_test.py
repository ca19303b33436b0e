#!/usr/bin/env python3
"""Every `ballast bench` subcommand runs with tiny sizes and prints valid --json. Asserts no time.

    bench_test.py PATH_OF_BALLAST
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from one_line import assert_one_line

BALLAST = ""
TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "bench"
QUICK = ("--repeats", "1", "--seconds", "0")
STEP = ("--device", "host", "--vocab", "256", "--hidden", "64", "--layers", "2", "--heads", "2",
        "--sequence", "32", "--steps", "1", "--set", "ballast.device_bytes=256MiB", "--set",
        "ballast.host_bytes=64MiB")
PLAN = ("--set", "model.hidden_size=32", "--set", "model.num_heads=2", "--set",
        "model.vocab_size=131", "--set", "data.sequence_length=16", "--set",
        "aio.any_file_system=true", "--set", "ballast.device_bytes=64MiB", "--set",
        "ballast.host_bytes=64MiB", "--rounds", "1", "--steps", "2")


class Bench(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-bench-")
        self.addCleanup(directory.cleanup)
        self.path = directory.name

    def bench(self, *arguments):
        return subprocess.run([BALLAST, "bench", *arguments], capture_output=True, text=True,
                              timeout=300, check=False)

    def rows(self, *arguments):
        done = self.bench(*arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_adam_checks_every_default_variant(self):
        rows = self.rows("adam", "--params", "64Ki", *QUICK)
        self.assertEqual({row["checked"] for row in rows}, {True})

    def test_attention(self):
        done = self.bench("attention", "--sequence", "256", "--micro-batch", "1", "--heads", "4",
                          "--kv-heads", "2", "--head-size", "64", "--json", *QUICK)
        if done.returncode == 0:
            self.assertEqual(json.loads(done.stdout)[0]["by"], "own")
        else:
            assert_one_line(self, done, done.returncode, ("bench attention",))

    def test_io_checks_what_it_reads(self):
        rows = self.rows("io", "--path", self.path, "--size", "4MiB", "--block", "64KiB",
                         "--depth", "2", "--check")
        self.assertEqual([row["pattern"] for row in rows], ["read", "write", "mixed"])
        self.assertEqual([row["bytes"] for row in rows], [4 << 20, 4 << 20, 8 << 20])
        self.assertEqual(os.listdir(self.path), [])

    def test_a_job_file_stands_for_options_and_the_command_line_wins(self):
        job = pathlib.Path(self.path) / "job.ini"
        job.write_text("# a sweep\npath = .\npattern = write, mixed\nblock=64KiB,128KiB\n"
                       "depth = 4  # few\nsize = \"4MiB\"\n")
        rows = self.rows("io", "--job", str(job), "--pattern", "read")
        self.assertEqual([(row["pattern"], row["block_bytes"], row["depth"]) for row in rows],
                         [("read", 65536, 4), ("read", 131072, 4)])
        job.write_text("blokc = 1MiB\n")
        assert_one_line(self, self.bench("io", "--path", self.path, "--job", str(job)), 2,
                        ("job.ini", "'blokc'", "did you mean 'block'"))

    def test_link(self):
        rows = self.rows("link", "--device", "host", "--bytes", "1MiB", *QUICK)
        self.assertEqual([row["way"] for row in rows], ["upload", "offload", "both"])

    def test_plan_allocates_what_its_ledger_says(self):
        cases = "compute,nvme-all,micro-major,activations-host"
        rows = self.rows("plan", "--path", self.path, "--only", cases, *PLAN)
        self.assertEqual(",".join(row["case"] for row in rows), cases)
        for row in rows:
            self.assertEqual(row["ledger_bytes"], row["allocated_bytes"], row["case"])

    def test_step_counts_the_products_of_its_passes(self):
        tokens, width, inner = 4 * 32, 64, 96
        attention = 2 * tokens * 32 * width  # the causal half of the square
        last = 2 * tokens * width * inner
        layer = 2 * tokens * (4 * width * width + 2 * width * inner) + attention
        head = 2 * tokens * width * 256
        (row,) = self.rows("step", *STEP, "--intermediate", "96", "--set",
                           "ballast.recompute=true")
        self.assertEqual([p["flops"] for p in row["passes"]],
                         [layer, 2 * layer + layer - last, 3 * head])

    def test_scripts_that_measure_peers_say_how_they_are_used(self):
        for name in ("adam_peers.py", "io_peers.py", "step_peers.py"):
            done = subprocess.run([sys.executable, "-B", TOOLS / name, "--help"],
                                  capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
