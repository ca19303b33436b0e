#!/usr/bin/env python3
"""tools/gpu_check.sh counts what passed, failed and was skipped, with fake programs.

    gpu_check_test.py
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "gpu_check.sh"
PROGRAMS = ("ballast", "gpu_device", "gpu_kernels", "gpu_sum", "gpu_pytorch_parity_on_cuda",
            "gpu_families_on_cuda", "gpu_invariance_on_cuda")
PASSES = "echo '[       OK ] A.B (1 ms)'; echo '[  PASSED  ] 1 test.'"
SKIPS = "echo 'a.cpp:1: Skipped'; echo 'there is no GPU'; exit 77"


class GpuCheck(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-gpu-check-")
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)
        (self.path / "bundle" / "tools").mkdir(parents=True)
        (self.path / "bundle" / "bin").mkdir()
        shutil.copy(SCRIPT, self.path / "bundle" / "tools")
        for name in PROGRAMS:
            self.program(name, PASSES)

    def program(self, name, script):
        file = self.path / "bundle" / "bin" / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def check(self, part, **environment):
        """Returns the status, the verdicts by name, and the last line."""
        done = subprocess.run(
            ["bash", self.path / "bundle" / "tools" / "gpu_check.sh", part], capture_output=True,
            text=True, timeout=120, check=False, cwd=self.path,
            env={"PATH": os.environ["PATH"], "OUT": str(self.path / "out"), **environment})
        lines = done.stdout.splitlines()
        checks = [re.match(r"(.{30,}?) (ok|FAILED|skipped) +(\d+) s  (.*)", line) for line in lines]
        self.texts = {check[1].strip(): check[4] for check in checks if check}
        verdicts = {check[1].strip(): check[2] for check in checks if check}
        return done.returncode, verdicts, (lines or [done.stderr])[-1]

    def test_all_that_passes_is_ok(self):
        status, verdicts, last = self.check("correct")
        self.assertEqual(set(verdicts.values()), {"ok"}, verdicts)
        self.assertEqual(status, 0)
        self.assertIn(f"correct: {len(verdicts)} ok, 0 failed, 0 skipped", last)
        for name in ("GPU", "kernels", "PyTorch's runs", "families", "invariance", "doctor", "link"):
            self.assertIn(name, verdicts)

    def test_without_a_gpu_all_is_skipped_and_the_status_says_so(self):
        for name in PROGRAMS[1:]:
            self.program(name, SKIPS)
        self.program("ballast", "[ $1 = --version ]")
        for part in ("correct", "speed", "offload", "sanitize"):
            status, verdicts, last = self.check(part)
            self.assertEqual(set(verdicts.values()), {"skipped"}, verdicts)
            self.assertGreater(len(verdicts), 5)
            self.assertEqual(set(self.texts.values()), {"there is no GPU"})
            self.assertEqual(status, 77)
            self.assertIn(f"{part}: 0 ok, 0 failed, {len(verdicts)} skipped", last)

    def test_a_failure_stops_nothing_and_is_the_status(self):
        self.program("gpu_kernels", "echo '[  FAILED  ] Attention.IsRight'; exit 1")
        self.program("gpu_invariance_on_cuda", SKIPS)
        self.program("gpu_sum", "kill -SEGV $$")
        status, verdicts, last = self.check("correct")
        self.assertEqual(status, 1)
        self.assertEqual(verdicts["kernels"], "FAILED")
        self.assertIn("Attention.IsRight", self.texts["kernels"])
        self.assertEqual(verdicts["sums over ranks"], "FAILED")
        self.assertEqual(verdicts["invariance"], "skipped")
        self.assertEqual(verdicts["link"], "ok")
        self.assertIn("3 failed, 1 skipped", last)  # two checks use gpu_kernels

    def test_tests_that_are_all_skipped_are_not_ok_whatever_the_status(self):
        self.program("gpu_pytorch_parity_on_cuda", "echo 'a.cpp:1: Skipped'; echo 'no device'; "
                     "echo '[  SKIPPED ] A.B (0 ms)'; echo '[  PASSED  ] 0 tests.'")
        status, verdicts, _ = self.check("correct")
        self.assertEqual(verdicts["PyTorch's runs"], "skipped")
        self.assertEqual(self.texts["PyTorch's runs"], "no device")
        self.assertEqual(status, 0)

    def test_tests_that_are_partly_skipped_are_counted(self):
        self.program("gpu_kernels", "echo '[       OK ] A.A (1 ms)'; echo 'a.cpp:1: Skipped'; "
                     "echo 'no engine'; echo '[  SKIPPED ] A.B (0 ms)'; "
                     "echo '[  PASSED  ] 7 tests.'; echo '[  SKIPPED ] 2 tests, listed below:'")
        _, verdicts, _ = self.check("correct")
        self.assertEqual(verdicts["kernels"], "ok")
        self.assertEqual(self.texts["kernels"], "7 tests passed, 2 skipped: no engine")

    def test_a_program_that_hangs_is_ended_and_the_rest_has_no_time(self):
        self.program("gpu_kernels", "sleep 60")
        status, verdicts, _ = self.check("correct", GPU_CHECK_SECONDS="6")
        self.assertEqual(status, 1)
        self.assertEqual(verdicts["kernels"], "FAILED")
        self.assertIn("not done after", self.texts["kernels"])
        self.assertEqual(verdicts["invariance"], "skipped")
        self.assertIn("no time is left", self.texts["invariance"])

    def test_a_program_that_does_not_start_is_a_failure(self):
        for name in PROGRAMS:
            self.program(name, "echo 'libx.so.1: cannot open shared object file' >&2; exit 127")
        status, verdicts, _ = self.check("offload")
        self.assertEqual(status, 1)
        self.assertEqual(verdicts["the program starts"], "FAILED")
        self.assertIn("libx.so.1", self.texts["the program starts"])

    def test_the_figure_of_a_step_is_in_its_line(self):
        self.program("ballast", """[ "$1" = --version ] || echo '[{"tokens_per_second": 12345.6,
            "step_seconds": 0.5, "model_percent_of_gemm_peak": 41.25, "loss": 10.5}]'""")
        _, verdicts, _ = self.check("speed")
        self.assertEqual(verdicts["GPT-2 124M"], "ok")
        self.assertEqual(self.texts["GPT-2 124M"],
                         "12,346 tok/s, 0.500 s per step, 41.2% of the GEMM peak, loss 10.5000")

    def test_another_part_is_refused(self):
        status, verdicts, last = self.check("everything")
        self.assertEqual((status, verdicts), (2, {}))
        self.assertIn("name one of correct, speed, offload, sanitize", last)


if __name__ == "__main__":
    unittest.main()
