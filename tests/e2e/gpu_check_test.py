#!/usr/bin/env python3
"""tools/gpu_check.sh counts what passed, failed and was skipped, with fake programs. With the program
on a fake GPU, its commands also run in small.

    gpu_check_test.py [BALLAST_ON_FAKES]
"""

import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ON_FAKES = ""
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
        shutil.copy(ROOT / "tools" / "gpu_check.sh", self.path / "bundle" / "tools")
        shutil.copytree(ROOT / "tools" / "gpu_check", self.path / "bundle" / "tools" / "gpu_check",
                        ignore=shutil.ignore_patterns("__pycache__"))
        for name in PROGRAMS:
            self.program(name, PASSES)

    def program(self, name, script):
        file = self.path / "bundle" / "bin" / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def tool(self, name, script):
        """Puts a program of the machine first into PATH."""
        file = self.path / "tools" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def check(self, part, **environment):
        """Returns the status, the verdicts by name, and the last line."""
        done = subprocess.run(
            ["bash", self.path / "bundle" / "tools" / "gpu_check.sh", *part.split()],
            capture_output=True, text=True, timeout=500, check=False, cwd=self.path,
            env={"PATH": f"{self.path}/tools:{os.environ['PATH']}", "OUT": str(self.path / "out"),
                 "TMPDIR": str(self.path), **environment})
        self.output = done.stdout
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
        for part in ("correct", "speed", "offload", "sanitize", "first", "first 1", "first 2"):
            status, verdicts, last = self.check(part)
            self.assertEqual(set(verdicts.values()), {"skipped"}, verdicts)
            self.assertGreater(len(verdicts), 5)
            self.assertEqual(set(self.texts.values()), {"there is no GPU"})
            self.assertEqual(status, 77)
            self.assertIn(f"{part.split()[0]}: 0 ok, 0 failed, {len(verdicts)} skipped", last)

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
        self.assertEqual(self.texts["kernels"], "56 tests passed, 16 skipped: no engine")  # of 8 processes

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
        self.assertEqual(verdicts["1.5B, micro-batch 16 x 2"], "ok")
        self.assertEqual(self.texts["1.5B, micro-batch 16 x 2"],
                         "12,346 tok/s, 0.500 s per step, 41.2% of the GEMM peak, loss 10.5000")

    def test_another_part_is_refused(self):
        status, verdicts, last = self.check("everything")
        self.assertEqual((status, verdicts), (2, {}))
        self.assertIn("name one of first, first 1, first 2, correct, speed, offload, sanitize", last)
        self.assertEqual(self.check("first 3")[0], 2)

    def results(self):
        """The lines of JSON, without those about the machine."""
        lines = (self.path / "out" / "results.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if "check" in entry]

    def test_every_check_has_a_line_of_json_and_its_log(self):
        self.program("gpu_kernels", "echo '[  FAILED  ] A.B'; exit 1")
        _, verdicts, _ = self.check("correct")
        self.check("offload")
        results = self.results()
        self.assertEqual({entry["check"]: entry["verdict"] for entry in results
                          if entry["part"] == "correct"}, verdicts)
        self.assertEqual({entry["part"] for entry in results}, {"correct", "offload"})
        self.assertIn("bench link --json", next(e for e in results if e["check"] == "link")["command"])
        self.assertEqual(sorted(os.listdir(self.path / "out")),
                         ["correct-logs.tar.gz", "offload-logs.tar.gz", "results.jsonl"])
        with tarfile.open(self.path / "out" / "correct-logs.tar.gz") as logs:
            self.assertIn("correct/kernels.log.7", logs.getnames())

    def test_tests_are_shared_by_processes_that_run_at_once(self):
        # Each process waits for the others of its check.
        meeting = ("touch \"$TMPDIR/$GTEST_SHARD_INDEX\"; for i in {1..200}; do "
                   "[ $(ls $TMPDIR | grep -c '^[0-9]$') -ge $GTEST_TOTAL_SHARDS ] && break; sleep 0.1; "
                   "done; [ $i -lt 200 ] && ")
        self.program("gpu_kernels", "if [ -n \"${GTEST_TOTAL_SHARDS:-}\" ]; then " + meeting + PASSES + "; fi")
        _, verdicts, _ = self.check("correct", TMPDIR=str(self.path / "out"))
        self.assertEqual(verdicts["kernels"], "ok")
        self.assertEqual(self.texts["kernels"], "8 tests passed")
        self.program("gpu_kernels", "[ \"$GTEST_SHARD_INDEX\" = 5 ] && kill -SEGV $$; " + PASSES)
        _, verdicts, _ = self.check("correct")
        self.assertEqual(verdicts["kernels"], "FAILED")
        self.assertIn("in shard 5 of 8", self.texts["kernels"])

    def test_filters_name_tests_that_exist(self):
        tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.cpp"))
        names = {".".join(pair) for pair in re.findall(r"TEST(?:_F|_P)?\((\w+), (\w+)\)", tests)}
        self.tool("compute-sanitizer", "exit 0")
        self.tool("nvidia-smi", "if [ $1 = -L ]; then echo 'GPU 0: x'; echo 'GPU 1: x'; fi")
        self.tool("mpirun", "exit 0")
        for part in ("first", "correct", "sanitize"):
            self.check(part)
        patterns = {pattern for entry in self.results()
                    for filters in re.findall(r"--gtest_filter=(\S+)", entry["command"])
                    for pattern in re.split(r":-?|-", filters.replace("\\", "")) if pattern}
        self.assertGreater(len(patterns), 20)
        for pattern in patterns:
            # Names of parameters, as in "*CudaMixers*short*", are not known here.
            name = re.search(r"[A-Z]\w+(\*?\.\*?[A-Z]\w*)?", pattern)[0].replace("*.", "*.*")
            self.assertTrue(fnmatch.filter(names, f"*{name}*"), pattern)

    def test_with_two_gpus_their_checks_come_first(self):
        self.tool("nvidia-smi", "if [ $1 = -L ]; then echo 'GPU 0: x'; echo 'GPU 1: x'; fi")
        self.tool("mpirun", "exit 0")
        _, verdicts, _ = self.check("first 1")
        self.assertEqual(list(verdicts)[:5], ["GPU", "copies between GPUs", "collectives of 2 ranks",
                                              "tensor parallelism, 2 ranks", "1.5B on two GPUs"])

    def test_gpus_without_machine_code_get_time_to_compile_kernels(self):
        self.program("ballast", "echo '  GPU kernels       machine code for 8.0, 9.0; newer GPUs'")
        for capability, compiles in (("8.6", False), ("9.0", False), ("10.0", True), ("", False)):
            self.tool("nvidia-smi", f"case $1 in *compute_cap*) echo {capability} ;; esac")
            _, verdicts, _ = self.check("first 1")
            self.assertEqual("compiling kernels" in verdicts, compiles, capability)

    def test_bits_that_differ_between_numbers_of_devices_are_a_failure(self):
        row = ('[{"tokens_per_second": 1, "step_seconds": 1, "model_percent_of_gemm_peak": 1, '
               '"loss": %s}]')
        self.program("ballast", f"case \"$*\" in *'hidden 512'*stages*) echo '{row % 2.5}' ;; "
                     f"*) echo '{row % 2.0}' ;; esac")
        _, verdicts, _ = self.check("first 1")
        self.assertEqual(verdicts["heads of 128, equal bits"], "FAILED")
        self.program("ballast", f"echo '{row % 2.0}'")
        _, verdicts, _ = self.check("first 1")
        self.assertEqual(verdicts["heads of 128, equal bits"], "ok")

    def test_commands_run_on_a_fake_gpu(self):
        if not ON_FAKES:
            self.skipTest("built without CUDA")
        shutil.copy(ROOT / "tests" / "e2e" / "small_ballast.py", self.path / "bundle" / "bin" / "ballast")
        (self.path / "bundle" / "bin" / "ballast").chmod(0o755)
        self.tool("python3", f"case \"$*\" in -c*import*) exit 1 ;; esac; exec {sys.executable} \"$@\"")
        status, verdicts, _ = self.check("first", BALLAST_ON_FAKES=ON_FAKES)
        print(self.output)
        failed = {name: self.texts[name] for name, verdict in verdicts.items() if verdict == "FAILED"}
        self.assertEqual((failed, status), ({}, 0))
        skipped = {name for name, verdict in verdicts.items() if verdict == "skipped"}
        self.assertEqual(skipped, {"memcheck, new kernels", "racecheck, new kernels",
                                   "kernels of Qwen3.5's form", "LoRA by PEFT", "QLoRA by PEFT",
                                   "2.8B by FSDP2, all on the host"})
        figures = {entry["check"]: entry["rows"][0] for entry in self.results() if entry["rows"]}
        eight = figures["8B in 24 GiB, 16 x 2"]
        self.assertEqual((eight["micro_batch"], eight["accumulation"]), (2, 2))
        self.assertEqual(figures["8 layers, speculation"]["rolled_back"], 0)
        self.assertGreater(figures["8 layers, speculation, clipped"]["rolled_back"], 0)


if __name__ == "__main__":
    if len(sys.argv) > 1 and os.sep in sys.argv[1]:
        ON_FAKES = os.path.abspath(sys.argv.pop(1))
    unittest.main()
