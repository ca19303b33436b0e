#!/usr/bin/env python3
"""The program starts without MPI's and NVIDIA's libraries, and loads MPI when it needs it.

    mpi_module_test.py BALLAST [MPIRUN MODULE OTHER_MODULE]

MODULE: the MPI module of the build; OTHER_MODULE: that of another version.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

import runs

MPIRUN, MODULE, OTHER = (sys.argv[2:5] + ["", "", ""])[:3]
LOADED_LATER = re.compile(r"lib(mpi|open-rte|open-pal|pmix|nccl|cuda|cudart|cublas|cublasLt|cudnn"
                          r"|nvrtc)[._-]")


class MpiModule(runs.RunTest):
    def install(self, module="", folder="lib"):
        """Copies the program to bin, and `module` to `folder`."""
        (self.path / "bin").mkdir()
        self.program = self.path / "bin" / "ballast"
        shutil.copy2(self.ballast, self.program)
        if module:
            (self.path / folder).mkdir(exist_ok=True)
            shutil.copy2(module, self.path / folder / "ballast_mpi.so")

    def train_ranks(self, ranks):
        text = json.loads(self.config().read_text())
        text["zero_optimization"] = {"stage": 1}
        text["train_batch_size"] = 12
        text["train_micro_batch_size_per_gpu"] = 1
        del text["gradient_accumulation_steps"]
        self.config().write_text(json.dumps(text))
        launcher = [MPIRUN, "-n", str(ranks)] if ranks > 1 else []
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.path / "cache")}
        environment.pop("BALLAST_MPI_MODULE", None)
        return subprocess.run([*launcher, self.program, "train", self.path / "config.json"],
                              capture_output=True, text=True, timeout=240, cwd=self.path,
                              check=False, env=environment)

    def assert_refused(self, done, *words):
        errors = [line for line in done.stderr.splitlines() if line.startswith("ballast: ")]
        self.assertEqual(len(errors), 1, done.stderr)
        for word in ("ballast: error: mpirun (Open MPI) started 4 processes", *words):
            self.assertIn(word, errors[0])
        self.assertEqual(done.returncode, 1, done.stderr)

    @unittest.skipUnless(MODULE and shutil.which("ninja"), "needs MPI and ninja")
    def test_the_demo_builds_what_several_ranks_need(self):
        demo = (pathlib.Path(__file__).parents[2] / "tools/demo.sh").read_text()
        target = re.search(r"(?m)^ninja -C build (\S+) ", demo).group(1)
        build = pathlib.Path(self.ballast).parents[1]
        parts = subprocess.run(["ninja", "-C", build, "-t", "query", target], capture_output=True,
                               text=True, check=True).stdout
        self.assertIn("tools/ballast_mpi.so", parts.split())

    def test_the_program_links_neither_mpi_nor_a_library_of_nvidia(self):
        linked = subprocess.run(["ldd", self.ballast], capture_output=True, text=True, check=True)
        self.assertIn("libc.so", linked.stdout)
        self.assertEqual([line for line in linked.stdout.splitlines() if LOADED_LATER.search(line)],
                         [])

    def test_one_rank_needs_no_module(self):
        self.install()
        done = self.train_ranks(1)
        self.assertEqual(done.returncode, 0, done.stderr)

    @unittest.skipUnless(MPIRUN, "there is no MPI")
    def test_a_launch_without_the_module_is_refused_in_one_line(self):
        self.install()
        self.assert_refused(self.train_ranks(4), "its MPI module ballast_mpi.so is not in ",
                            str(self.path / "bin"), str(self.path / "lib"), "install an MPI library")

    @unittest.skipUnless(MPIRUN, "there is no MPI")
    def test_the_module_of_another_version_is_refused_in_one_line(self):
        self.install(OTHER)
        self.assert_refused(self.train_ranks(4), "lib/ballast_mpi.so cannot be used: it belongs "
                            "to ballast 0.0.0 (interface 0), but this program is ballast ")

    @unittest.skipUnless(MPIRUN, "there is no MPI")
    def test_doctor_names_the_folder_of_another_mpi(self):
        linked = subprocess.run(["ldd", MODULE], capture_output=True, text=True, check=True).stdout
        library = re.search(r"^\s*(libmpi\S*) => ", linked, re.M)[1]
        self.install(MODULE)
        (self.path / "other").mkdir()
        (self.path / "other" / library).write_text("not a library")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.path / "other")}
        environment.pop("BALLAST_MPI_MODULE", None)
        done = subprocess.run([self.program, "doctor"], capture_output=True, text=True, check=False,
                              cwd=self.path, env=environment)
        line = re.search(r"^MPI +hint +(.*)$", done.stdout, re.M)[1]
        for part in (f"other/{library}", "install the module that was built with this program",
                     f'LD_LIBRARY_PATH, which may contain another MPI, is "{self.path}/other"',
                     "only runs with several ranks need it"):
            self.assertIn(part, line)

    @unittest.skipUnless(MPIRUN, "there is no MPI")
    def test_four_ranks_find_it_next_to_the_program_and_in_lib(self):
        for folder in ("bin", "lib"):
            shutil.rmtree(self.path / "bin", ignore_errors=True)
            shutil.rmtree(self.path / "lib", ignore_errors=True)
            shutil.rmtree(self.path / "run", ignore_errors=True)
            self.install(MODULE, folder)
            version = subprocess.run([self.program, "--version"], capture_output=True, text=True,
                                     check=True).stdout
            self.assertIn(f"self, mpi ({self.path / folder / 'ballast_mpi.so'})", version)
            done = self.train_ranks(4)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.steps(), [1, 2, 3])


if __name__ == "__main__":
    sys.argv[2:] = []
    runs.main()
