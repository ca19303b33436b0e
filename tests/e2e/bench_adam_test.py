#!/usr/bin/env python3
"""`ballast bench adam` as a user meets it: results, sums and mistakes. Asserts no time.

    bench_adam_test.py PATH_OF_BALLAST
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

FIELDS = {"variant", "isa", "threads", "params", "bytes_per_param", "repeats", "median_seconds",
          "min_seconds", "p99_seconds", "gparams_per_second", "gb_per_second",
          "ceiling_gb_per_second", "percent_of_ceiling", "checked"}
OPTIMIZERS = ("adamw", "adam", "adagrad", "lion", "sgd")
LAYOUTS = ("bf16", "fp32", "master-bf16", "master-fp16", "bf16-m16", "bf16-8bit")
VARIANTS = [f"{optimizer}-{layout}" for optimizer, layout in itertools.product(OPTIMIZERS, LAYOUTS)
            if (optimizer, layout) != ("adagrad", "bf16-m16")]
QUICK = ("--repeats", "1", "--seconds", "0")


def bytes_per_param(variant):
    """Added up by hand, apart from the program's way."""
    optimizer, layout = variant.split("-", 1)
    weights = {"bf16": 4 + 4, "fp32": 4 + 4, "master-bf16": 4 + 4 + 2, "master-fp16": 4 + 4 + 2,
               "bf16-m16": 4 + 4, "bf16-8bit": 4 + 4}[layout]
    gradient = 4 if layout == "fp32" else 2
    first = {"bf16-m16": 2, "bf16-8bit": 1}.get(layout, 4)
    second = {"bf16-8bit": 1}.get(layout, 4)
    return (weights + gradient + 2 * first * (optimizer != "adagrad")
            + 2 * second * (optimizer not in ("lion", "sgd")))


class BenchAdam(unittest.TestCase):
    def bench(self, *arguments, environment=None):
        return subprocess.run([BALLAST, "bench", "adam", *arguments], capture_output=True,
                              text=True, timeout=300, check=False,
                              env={**os.environ, **(environment or {})})

    def rows(self, *arguments, environment=None):
        done = self.bench("--json", *arguments, environment=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def assert_fails(self, done, status, *words):
        assert_one_line(self, done, status, words)
        self.assertEqual(done.stdout, "")

    # What works.

    def test_default_variants_have_the_promised_fields_and_are_right(self):
        rows = self.rows("--params", "1Mi", *QUICK)
        self.assertEqual(list(dict.fromkeys(row["variant"] for row in rows)),
                         ["adamw-bf16", "adamw-fp32", "adamw-master-bf16", "adamw-bf16-m16",
                          "adamw-bf16-8bit"])
        for row in rows:
            self.assertEqual(set(row), FIELDS)
            self.assertEqual(row["params"], 1 << 20)
            self.assertIs(row["checked"], True)
            self.assertLessEqual(row["min_seconds"], row["median_seconds"])
            self.assertLessEqual(row["median_seconds"], row["p99_seconds"])
            self.assertAlmostEqual(row["gparams_per_second"] * row["bytes_per_param"],
                                   row["gb_per_second"], delta=1e-9 * row["gb_per_second"])

    def test_every_variant_is_right_on_every_instruction_set(self):
        # No multiple of any vector, tile or chunk.
        rows = []
        for isa in ("scalar", "avx2", "avx512"):
            done = self.bench("--json", "--params", "70001", "--isa", isa, "--variant",
                              ",".join(VARIANTS), *QUICK)
            if "is not available here" in done.stderr:
                continue
            self.assertEqual(done.returncode, 0, done.stderr)
            rows += json.loads(done.stdout)
            self.assertEqual([row["variant"] for row in rows[-len(VARIANTS):]], VARIANTS)
        self.assertGreaterEqual(len(rows), len(VARIANTS))
        for row in rows:
            self.assertIs(row["checked"], True, row)
            self.assertEqual(row["bytes_per_param"], bytes_per_param(row["variant"]), row)

    def test_lists_make_a_sweep(self):
        rows = self.rows("--variant", "lion-bf16,sgd-fp32", "--isa", "scalar", "--threads", "1",
                         "--threads", "2", "--params", "1k,2Ki", *QUICK)
        self.assertEqual(
            [(row["variant"], row["params"], row["threads"]) for row in rows],
            list(itertools.product(("lion-bf16", "sgd-fp32"), (1000, 2048), (1, 2))))

    def test_repeats_are_a_minimum(self):
        row, = self.rows("--variant", "sgd-bf16", "--isa", "scalar", "--params", "1k",
                         "--repeats", "13", "--seconds", "0")
        self.assertEqual(row["repeats"], 13)

    def test_without_the_check_nothing_is_called_checked(self):
        for row in self.rows("--variant", "adamw-bf16", "--params", "64Ki", "--no-check", *QUICK):
            self.assertIs(row["checked"], False)

    def test_a_hidden_instruction_set_is_not_measured(self):
        rows = self.rows("--variant", "adamw-bf16", "--params", "64Ki", *QUICK,
                         environment={"BALLAST_ISA_MASK": "scalar"})
        self.assertEqual([row["isa"] for row in rows], ["scalar"])

    def test_the_table_tells_the_machine_and_sums_that_are_right(self):
        done = self.bench("--variant", ",".join(VARIANTS), "--isa", "scalar", "--params", "4Ki",
                          *QUICK)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("NUMA node", done.stdout)
        self.assertIn("huge pages", done.stdout)
        formulas = re.findall(r"^(\S+): read (.*) \+ write (.*) = (\d+) bytes/parameter$",
                              done.stdout, re.M)
        self.assertEqual([formula[0] for formula in formulas], VARIANTS)
        for variant, reads, writes, total in formulas:
            terms = [int(term[1:]) for term in (reads + " " + writes).split()]
            self.assertEqual(sum(terms), int(total), variant)
            self.assertEqual(int(total), bytes_per_param(variant), variant)
        self.assertEqual(done.stdout.count(" ok\n"), len(VARIANTS))
        for line in done.stdout.splitlines():
            self.assertLessEqual(len(line), 80, line)

    # Mistakes.

    def test_unknown_variant(self):
        self.assert_fails(self.bench("--variant", "adamw-bf17"), 2, "'adamw-bf17'",
                          "did you mean 'adamw-bf16'", "lion", "master-fp16")

    def test_unknown_variant_in_a_list(self):
        self.assert_fails(self.bench("--variant", "adamw-bf16,adagrad-bf16-m16"), 2,
                          "'adagrad-bf16-m16'")

    def test_unknown_instruction_set(self):
        self.assert_fails(self.bench("--isa", "avx521"), 2, "'avx521'", "did you mean 'avx512'",
                          "scalar")

    def test_instruction_set_that_is_not_there(self):
        done = self.bench("--isa", "avx2", environment={"BALLAST_ISA_MASK": "scalar"})
        self.assert_fails(done, 2, "avx2", "not available", "scalar")

    def test_size_that_is_none(self):
        self.assert_fails(self.bench("--params", "many"), 2, "'many'")
        self.assert_fails(self.bench("--params", "1"), 2, "at least 256")

    def test_size_beyond_the_memory_names_one_that_fits(self):
        for params in ("100Ti", "8000000Ti"):
            done = self.bench("--params", "1Mi," + params)
            self.assert_fails(done, 1, "needs", "TiB of memory", "would fit")

    def test_numa_node_that_is_not_there(self):
        self.assert_fails(self.bench("--numa-node", "4095"), 2, "NUMA node 4095")

    def test_no_threads_and_no_repeats(self):
        self.assert_fails(self.bench("--threads", "0"), 2, "--threads")
        self.assert_fails(self.bench("--repeats", "0"), 2, "--repeats")

    def test_interrupt_between_repeats(self):
        process = subprocess.Popen(
            [BALLAST, "bench", "adam", "--params", "64Ki", "--variant", "sgd-bf16", "--seconds",
             "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        # The first line comes when the signal handlers are in place.
        first = process.stdout.readline()
        self.assertNotEqual(first, "")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(errors, "ballast: error: interrupted\n")
        self.assertEqual(process.returncode, 1)


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
