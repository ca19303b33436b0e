"""`ballast` and `python -m ballast` behave as the program does: words that are not UTF-8, closed and full
outputs, pipes, ignored signals, symbolic links."""

import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import unittest

from support import FolderTest

SCRIPT = pathlib.Path(sysconfig.get_path("scripts"), "ballast")
MODULE = f"{sys.executable} -m ballast"


class ConsoleScript(FolderTest):
    def setUp(self):
        super().setUp()
        self.programs = [MODULE] + ([str(SCRIPT)] if SCRIPT.exists() else [])

    def shell(self, command, program, **options):
        """Runs a bash command in which $P is the program. Returns status, output, errors."""
        environment = {**os.environ, "P": program, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(["bash", "-c", command], capture_output=True, env=environment, timeout=60,
                              cwd=self.path, check=False, **options)
        return done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr)

    def assert_each(self, command, status, output="", errors=""):
        for program in self.programs:
            with self.subTest(program=program, command=command):
                done = self.shell(command, program)
                self.assertEqual(done[0], status, done)
                self.assertIn(output, done[1])
                self.assertIn(errors, done[2])
                self.assertNotIn("Traceback", done[2])

    def test_words_that_are_not_utf8(self):
        self.assert_each(r"""cp text.txt $'t\xff.txt' && $P tokenize $'t\xff.txt' --out $'o\xff.bin' --overwrite >&2 &&
                             cmp text.txt $'t\xff.txt' && test -s $'o\xff.bin'""", 0)
        self.assert_each("LC_ALL=C $P tokenize text.txt --out ü.bin --overwrite && test -s ü.bin", 0)

    def test_prepare_belongs_to_the_package(self):
        self.assert_each("$P prepare --help", 0, "ballast prepare")
        self.assert_each("$P prepare text.txt --model nosuch --out o.safetensors", 2, "",
                         "ballast prepare: --model nosuch is not a folder")

    def test_the_mpi_module_lies_in_the_package(self):
        from ballast import _ballast

        module = pathlib.Path(_ballast.__file__).with_name("ballast_mpi.so")
        self.assert_each("$P --version", 0, f"mpi ({module})" if module.exists() else "ballast_mpi.so is not in ")

    def test_many_words(self):
        self.assert_each("$P tokenize $(yes text.txt | head -5000) --out t.bin --overwrite", 0, "from 5000 files")

    def test_outputs_that_are_closed_or_full(self):
        self.assert_each("$P tokenize text.txt --out t.bin --overwrite >&-", 0)
        self.assert_each("$P tokenize text.txt --out t.bin --overwrite >/dev/full", 1, "", "ballast: error: cannot write")
        self.assert_each("$P tokenize text.txt --out t.bin --overwrite <&- 2>&-", 0, "tokens")

    def test_the_reader_of_a_pipe_ends(self):
        # The help is written before the program handles SIGPIPE, so the status depends on which is
        # first.
        self.assert_each("$P train --help | true; test ${PIPESTATUS[0]} = 0 -o ${PIPESTATUS[0]} = 141", 0)

    def test_a_file_size_limit(self):
        self.assert_each("head -c 9000 text.txt >long.txt; ulimit -f 1; $P tokenize long.txt --out t.bin --overwrite; "
                         "echo status $?; test ! -e t.bin", 0, "status 1", "File too large")

    def test_a_symbolic_link(self):
        if not SCRIPT.exists():
            self.skipTest("the console script is not installed")
        os.symlink(SCRIPT, self.path / "trainer")
        self.assert_each("./trainer --version", 0, "ballast ")

    def test_signals_are_those_of_a_program(self):
        """While the program starts, SIGINT ends it without a traceback, unless the parent process
        ignores SIGINT."""
        from ballast import _ballast

        for ignored in (False, True):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
                _ballast.run_program([b"--help"], [b"ballast"])
                os.kill(os.getpid(), signal.SIGINT)
                os._exit(7)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 7 if ignored else -2)


if __name__ == "__main__":
    unittest.main()
