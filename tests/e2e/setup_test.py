#!/usr/bin/env python3
"""Tests tools/setup.sh: its commands for each distribution, with stand-ins for package managers.

    setup_test.py PATH_OF_SETUP
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SETUP = pathlib.Path(sys.argv.pop(1)).resolve()
DISTRIBUTIONS = {
    "debian": "ID=debian\n", "ubuntu": 'ID="ubuntu"\nID_LIKE=debian\n', "fedora": "ID=fedora\n",
    "rocky": 'ID="rocky"\nID_LIKE="rhel centos fedora"\n', "other": "ID=arch\n"}


class Setup(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        for name, text in DISTRIBUTIONS.items():
            (self.path / name).write_text(text)

    def stand_in(self, name, script):
        file = self.path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def run_setup(self, distribution, *words):
        environment = {**os.environ, "TMPDIR": str(self.path), "OS_RELEASE": str(self.path / distribution),
                       "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(["sh", SETUP, *words], capture_output=True, text=True, env=environment,
                              timeout=60, check=False)
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    def test_missing_packages_are_named_as_the_distribution_names_them(self):
        wanted = ("libfmt-dev", "g++", "nlohmann-json3-dev")
        apt, dnf = "apt-get install g++ libfmt-dev nlohmann-json3-dev", "dnf install fmt-devel gcc-c++ json-devel"
        for name, command in (("debian", apt), ("ubuntu", apt), ("fedora", dnf), ("rocky", dnf)):
            self.assertEqual(self.run_setup(name, "--command", *wanted), (0, command, ""))
        self.assertIn("Debian calls g++ libfmt-dev", self.run_setup("other", "--command", *wanted)[1])

    def test_only_what_is_missing_is_installed(self):
        self.stand_in("id", "echo 0")
        self.stand_in("rpm", '[ "$2" != fmt-devel ]')
        self.stand_in("dnf", f'echo "$@" > {self.path}/called')
        status, output, _ = self.run_setup("fedora")
        self.assertEqual((status, output.splitlines()[0]), (0, "setup: installing fmt-devel"))
        self.assertIn("module load mpi", output)
        self.assertEqual((self.path / "called").read_text().split()[-1], "fmt-devel")
        self.stand_in("dnf", "echo no space left; exit 1")
        status, output, error = self.run_setup("fedora")
        self.assertEqual(status, 1)
        self.assertIn("no space left\nsetup: error: dnf failed; its whole output is in ", error)

    def test_without_root_the_command_is_named(self):
        self.stand_in("id", "echo 1000")
        self.stand_in("dpkg-query", 'case "$3" in libtbb-dev) ;; *) echo install ok installed ;; esac')
        if subprocess.run(["sh", "-c", "command -v sudo"], capture_output=True, check=False).returncode == 0:
            self.skipTest("there is a sudo")
        self.assertEqual(self.run_setup("debian"),
                         (1, "", "setup: error: not root and no sudo; as root run: apt-get install libtbb-dev"))

    def test_other_distributions_are_refused_with_all_names(self):
        status, output, error = self.run_setup("other")
        self.assertEqual((status, output, error.count("\n")), (1, "", 0))
        for name in ("Debian, Ubuntu and Fedora", "libtbb-dev", "python3-venv"):
            self.assertIn(name, error)


if __name__ == "__main__":
    unittest.main()
