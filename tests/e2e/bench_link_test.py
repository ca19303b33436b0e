#!/usr/bin/env python3
"""`ballast bench link` as a user meets it: rows, sums and mistakes. Asserts no time.

    bench_link_test.py PATH_OF_BALLAST
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import unittest

from one_line import assert_one_line

BALLAST = ""

FIELDS = {"device", "way", "bytes", "copies", "repeats", "median_seconds", "gb_per_second",
          "ceiling_gb_per_second", "percent_of_ceiling"}
WAYS = ["upload", "offload", "both"]
QUICK = ("--device", "host", "--repeats", "1", "--seconds", "0")


class BenchLink(unittest.TestCase):
    def bench(self, *arguments):
        return subprocess.run([BALLAST, "bench", "link", *arguments], capture_output=True,
                              text=True, timeout=300, check=False)

    def rows(self, *arguments):
        done = self.bench("--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def assert_fails(self, done, status, *words):
        assert_one_line(self, done, status, words)
        self.assertEqual(done.stdout, "")

    # What works.

    def test_every_size_goes_every_way(self):
        # An odd size, and lists both with commas and by repeating the option.
        rows = self.rows("--bytes", "1MiB,4097", "--bytes", "64KiB", *QUICK)
        self.assertEqual([(row["bytes"], row["way"]) for row in rows],
                         list(itertools.product([1 << 20, 4097, 1 << 16], WAYS)))
        for row in rows:
            self.assertEqual(set(row), FIELDS)
            self.assertEqual(row["device"], "host")
            self.assertEqual(row["repeats"], 1)
            self.assertGreaterEqual(row["copies"], 1)
            moved = row["bytes"] * row["copies"] * (2 if row["way"] == "both" else 1)
            self.assertAlmostEqual(row["gb_per_second"] * 1e9 * row["median_seconds"], moved,
                                   delta=1e-9 * moved)
            # One round: the median of the shares is the share of the medians.
            self.assertAlmostEqual(
                row["percent_of_ceiling"] * row["ceiling_gb_per_second"] / 100.0,
                row["gb_per_second"], delta=1e-9 * row["gb_per_second"])

    def test_the_default_sizes_are_those_of_blocks(self):
        rows = self.rows(*QUICK)
        self.assertEqual([row["bytes"] for row in rows],
                         [mib << 20 for mib in (1, 16, 64, 256) for _ in WAYS])

    def test_repeats_are_a_minimum(self):
        for row in self.rows("--device", "host", "--bytes", "1MiB", "--repeats", "5",
                             "--seconds", "0"):
            self.assertEqual(row["repeats"], 5)

    def test_the_table_tells_the_device_and_fits(self):
        done = self.bench("--bytes", "1MiB,3MiB", *QUICK)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith("host device, "), done.stdout)
        self.assertIn("NUMA node", done.stdout)
        found = re.findall(r"^ +(\S+ MiB) (\S+) +\d+ +1 +[\d.]+ +[\d.]+ +[\d.]+%$", done.stdout,
                           re.M)
        self.assertEqual(found, list(itertools.product(["1.00 MiB", "3.00 MiB"], WAYS)))
        for line in done.stdout.splitlines():
            self.assertLessEqual(len(line), 80, line)

    def test_auto_is_a_device_that_is_there(self):
        rows = self.rows("--device", "auto", "--bytes", "1MiB", "--repeats", "1", "--seconds", "0")
        self.assertIn(rows[0]["device"], ("host", "cuda"))
        named = self.bench("--device", "cuda", "--bytes", "1MiB", "--repeats", "1", "--seconds",
                           "0")
        self.assertEqual(named.returncode == 0, rows[0]["device"] == "cuda")

    # Mistakes.

    def test_cuda_where_there_is_none(self):
        done = self.bench("--device", "cuda", "--bytes", "1MiB", "--repeats", "1", "--seconds",
                          "0")
        if done.returncode == 0:
            self.skipTest("there is a GPU")
        self.assert_fails(done, 1, "bench link: --device cuda: ", "use --device host")

    def test_unknown_device(self):
        self.assert_fails(self.bench("--device", "hots"), 2, "'hots'", "did you mean 'host'",
                          "auto", "cuda")

    def test_unknown_option(self):
        self.assert_fails(self.bench("--bites", "1MiB"), 2, "--bites")

    def test_size_that_is_none(self):
        self.assert_fails(self.bench("--bytes", "many"), 2, "'many'")
        self.assert_fails(self.bench("--bytes", "1MiB,0"), 2, "--bytes 0", "at least 1")

    def test_size_beyond_the_memory_names_one_that_fits(self):
        done = self.bench("--bytes", "1MiB,100TiB", "--device", "host")
        self.assert_fails(done, 1, "--bytes 100TiB", "would fit")
        fitting = re.search(r"--bytes (\d+)MiB would fit", done.stderr)
        self.assertGreater(int(fitting.group(1)), 0)

    def test_no_repeats(self):
        self.assert_fails(self.bench("--repeats", "0"), 2, "--repeats")

    def test_interrupt_between_rounds(self):
        process = subprocess.Popen(
            [BALLAST, "bench", "link", "--device", "host", "--bytes", "64KiB", "--seconds", "600"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        # The first line comes when the signal handlers are in place.
        self.assertNotEqual(process.stdout.readline(), "")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(errors, "ballast: error: interrupted\n")
        self.assertEqual(process.returncode, 1)


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
