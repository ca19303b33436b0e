#!/usr/bin/env python3
"""`ballast bench io` as a user meets it: results, sums, faults and mistakes. Asserts no time.

    bench_io_test.py PATH_OF_BALLAST
"""

import itertools
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from one_line import assert_one_line

BALLAST = ""
PROJECT = pathlib.Path(__file__).resolve().parent.parent.parent

FIELDS = {"pattern", "block_bytes", "depth", "paths", "backend", "gb_per_second", "median_ms",
          "p99_ms", "cpu_seconds_per_gb", "checked", "bound", "seconds", "bytes", "bytes_read",
          "bytes_written", "cpu_seconds", "blocks_per_submit"}
MIB = 1 << 20
SMALL = ("--size", "8MiB", "--block", "64KiB", "--depth", "8")


class BenchIo(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ballast-bench-")
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)
        self.swap = self.path / "swap"
        self.swap.mkdir()

    def bench(self, *arguments, environment=None, limits=None):
        done = subprocess.run([BALLAST, "bench", "io", *map(str, arguments)], capture_output=True,
                              text=True, timeout=300, check=False, preexec_fn=limits,
                              cwd=self.path, env={**os.environ, **(environment or {})})
        self.assertEqual(list(self.swap.iterdir()), [], "something was left behind")
        return done

    def rows(self, *arguments, environment=None):
        done = self.bench("--json", *arguments, environment=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def assert_fails(self, done, status, *words, table=False):
        assert_one_line(self, done, status, words, ignored="injecting faults")
        if not table:
            self.assertEqual(done.stdout, "")

    # What works.

    def test_all_patterns_have_the_promised_fields_and_move_each_block_once(self):
        rows = self.rows("--path", self.swap, *SMALL)
        self.assertEqual([row["pattern"] for row in rows], ["read", "write", "mixed"])
        for row, read, written in zip(rows, (8, 0, 8), (0, 8, 8)):
            self.assertEqual(set(row), FIELDS)
            self.assertEqual(row["paths"], [str(self.swap)])
            self.assertEqual((row["block_bytes"], row["depth"]), (65536, 8))
            self.assertIn(row["backend"], ("io_uring", "threads"))
            self.assertEqual(row["bound"], "size")
            self.assertIs(row["checked"], False)
            self.assertEqual((row["bytes_read"], row["bytes_written"]), (read * MIB, written * MIB))
            self.assertEqual(row["bytes"], row["bytes_read"] + row["bytes_written"])
            self.assertAlmostEqual(row["gb_per_second"] * row["seconds"] * 1e9, row["bytes"],
                                   delta=1e-6 * row["bytes"])
            self.assertAlmostEqual(row["cpu_seconds_per_gb"] * row["bytes"],
                                   row["cpu_seconds"] * 1e9, delta=1.0)
            self.assertLessEqual(row["median_ms"], row["p99_ms"])
            self.assertGreaterEqual(row["blocks_per_submit"], 1.0)

    def test_bound_by_time_goes_round_and_round(self):
        # Enough for many rounds over a megabyte.
        for row in self.rows("--path", self.swap, "--size", "1MiB", "--block", "4KiB", "--depth",
                             "4", "--seconds", "0.5", "--check"):
            self.assertEqual(row["bound"], "time")
            self.assertGreaterEqual(row["seconds"], 0.5)
            self.assertGreater(row["bytes"], 2 * MIB)
            self.assertEqual(row["bytes"] % 4096, 0)

    def test_every_backend_is_right_at_every_depth(self):
        rows = self.rows("--path", self.swap, "--backend", "io_uring,threads", "--size", "4MiB",
                         "--block", "4KiB,96KiB", "--depth", "1,2,7,40", "--check")
        self.assertEqual(
            [(row["backend"], row["pattern"], row["block_bytes"], row["depth"]) for row in rows],
            list(itertools.product(("io_uring", "threads"), ("read", "write", "mixed"),
                                   (4096, 98304), (1, 2, 7, 40))))
        for row in rows:
            self.assertIs(row["checked"], True)

    def test_several_paths_are_driven_at_once(self):
        other = self.path / "other \"path\""
        other.mkdir()
        rows = self.rows("--path", self.swap, "--path", other, *SMALL, "--check")
        for row, megabytes in zip(rows, (16, 16, 32)):
            self.assertEqual(row["paths"], [str(self.swap), str(other)])
            self.assertEqual(row["bytes"], megabytes * MIB)
        self.assertEqual(list(other.iterdir()), [])

    def test_the_null_backend_needs_no_path_and_moves_nothing(self):
        rows = self.rows("--backend", "null", *SMALL)
        self.assertEqual([row["backend"] for row in rows], ["null"] * 3)
        self.assertEqual([row["paths"] for row in rows], [[]] * 3)
        self.assertEqual([row["bytes"] for row in rows], [8 * MIB, 8 * MIB, 16 * MIB])
        # Beside a real one it takes the same sweep.
        rows = self.rows("--path", self.swap, "--backend", "null,threads", "--pattern", "read",
                         *SMALL)
        self.assertEqual([row["backend"] for row in rows], ["null", "threads"])

    def test_through_the_page_cache_with_a_warning(self):
        done = self.bench("--path", self.swap, "--buffered", "--check", "--json", *SMALL)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn("warning", done.stderr)
        self.assertIn("page cache", done.stderr)

    def test_the_table_says_what_bounds_it_and_fits_a_terminal(self):
        for extra, words in (((), "one pass"), (("--seconds", "0.05"), "bound by time"),
                             (("--check",), "every byte checked")):
            done = self.bench("--path", self.swap, *SMALL, *extra)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(words, done.stdout)
            for line in done.stdout.splitlines()[2:]:
                self.assertLessEqual(len(line), 80, line)
        self.assertEqual(done.stdout.count(" ok\n"), 3)

    def test_backends_are_listed_with_reasons(self):
        environment = {"BALLAST_IO_DISABLE": "io_uring"}
        done = self.bench("--backends", environment=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [line.split(None, 2) for line in done.stdout.splitlines()]
        self.assertEqual([line[0] for line in lines], ["io_uring", "threads", "null"])
        self.assertEqual([line[1] for line in lines], ["refused", "usable", "usable"])
        self.assertIn("BALLAST_IO_DISABLE", lines[0][2])
        rows = self.rows("--backends", environment=environment)
        self.assertEqual([(row["backend"], row["usable"]) for row in rows],
                         [("io_uring", False), ("threads", True), ("null", True)])

    # Job files.

    def test_a_job_file_stands_for_options_and_the_command_line_wins(self):
        job = self.path / "jobs" / "job.ini"
        job.parent.mkdir()
        job.write_text("# a sweep\npath = ../swap\npattern = write, mixed\nblock=64KiB,128KiB\n"
                       "depth = 4  # few\nsize = \"4MiB\"\ncheck = true\n")
        rows = self.rows("--job", job, "--pattern", "read", "--depth", "2,3")
        self.assertEqual([(row["pattern"], row["block_bytes"], row["depth"]) for row in rows],
                         list(itertools.product(("read",), (65536, 131072), (2, 3))))
        for row in rows:
            self.assertIs(row["checked"], True)
            self.assertEqual(row["bytes"], 4 * MIB)
            self.assertTrue(os.path.samefile(row["paths"][0], self.swap))

    def test_the_example_job_file_works(self):
        rows = self.rows("--job", PROJECT / "configs/io_sweep.ini", "--path", self.swap, "--size",
                         "64MiB", "--seconds", "0.01", "--depth", "2")
        self.assertGreater(len(rows), 3)

    def test_mistakes_in_job_files_name_file_and_key(self):
        for text, status, words in (
                ("blokc = 1MiB\n", 2, ("job.ini", "'blokc'", "did you mean 'block'")),
                ("depth = 0\n", 2, ("job.ini", "depth")),
                ("depth = 1\ncheck\ndepth = 2\n", 2, ("job.ini", "depth", "twice")),
                ("check = maybe\n", 2, ("job.ini", "check", "maybe")),
                ("[first]\ndepth = 1\n", 2, ("job.ini", "[first]")),
                ("job = other.ini\n", 2, ("job.ini", "'job'")),
                ("x\n", 2, ("job.ini", "line 1", "'x'")),
                ("block = big\n", 2, ("'big'", "--block"))):
            (self.path / "job.ini").write_text(text)
            self.assert_fails(self.bench("--path", self.swap, "--job", "job.ini"), status, *words)
        self.assert_fails(self.bench("--job", "none.ini"), 2, "none.ini", "no such file")
        self.assert_fails(self.bench("--job", self.swap), 2, "swap", "no such file")

    # Disks that fail.

    def faulty(self, faults, *arguments):
        return self.bench("--path", self.swap, *SMALL, *arguments,
                          environment={"BALLAST_IO_FAULTS": faults})

    def test_the_check_finds_a_flipped_bit(self):
        done = self.faulty("flip:on=read:after=20:times=1", "--check")
        self.assert_fails(done, 1, "bench io", str(self.swap), "offset=", "bit", "flipped",
                          table=True)

    def test_the_check_finds_a_lost_and_a_torn_write(self):
        # The file is filled in 8 blocks, so these are writes of the measured part.
        for pattern, kind in itertools.product(("write", "mixed"), ("lost", "torn")):
            done = self.faulty(f"{kind}:after=30:times=1", "--check", "--pattern", pattern)
            self.assert_fails(done, 1, str(self.swap), "offset=",
                              "holds what write 1 put there instead of write 2", table=True)

    def test_without_the_check_such_faults_pass(self):
        done = self.faulty("flip:on=read:after=20:times=1")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_error_names_direction_file_offset_length_and_cause(self):
        for backend in ("io_uring", "threads"):
            done = self.faulty("eio:on=write:after=30:times=1", "--backend", backend)
            self.assert_fails(done, 1, f"bench io: write {self.swap} offset=", "length=65536",
                              "Input/output error", table=True)

    def test_one_path_that_fails_ends_all(self):
        other = self.path / "other"
        other.mkdir()
        done = self.faulty("enospc:after=30", "--path", other, "--pattern", "write",
                           "--seconds", "600")
        self.assert_fails(done, 1, "No space left on device", table=True)

    def test_faults_that_the_queue_mends_do_not_show(self):
        done = self.faulty("short:every=5,eintr,eagain,late:every=3,reorder:every=4", "--check")
        self.assertEqual(done.returncode, 0, done.stderr)

    # Mistakes.

    def test_paths_that_cannot_be_measured(self):
        file = self.path / "file"
        file.touch()
        self.assert_fails(self.bench(), 2, "--path")
        self.assert_fails(self.bench("--path", self.path / "none"), 1, "none", "no such directory")
        self.assert_fails(self.bench("--path", file), 1, "not a directory")
        self.assert_fails(self.bench("--path", self.swap, "--path", f"{self.swap}/"), 2, "twice")

    def test_sizes_that_cannot_be(self):
        for arguments, status, words in (
                (("--size", "8MiB", "--depth", "9"), 2, ("--size", "9.00 MiB")),
                (("--size", "31TiB"), 1, (str(self.swap), "needs", "free")),
                (("--size", "33TiB"), 2, ("--size", "33TiB")),
                (("--size", "much"), 2, ("--size", "'much'")),
                (("--block", "5000"), 2, ("--block", "4 KiB")),
                (("--block", "0"), 2, ("--block",)),
                (("--block", "2GiB"), 2, ("--block",)),
                (("--depth", "0"), 2, ("--depth",)),
                (("--seconds", "0"), 2, ("--seconds",)),
                (("--block", "1GiB", "--depth", "16384", "--size", "32TiB"), 1,
                 ("memory", "--depth"))):
            self.assert_fails(self.bench("--path", self.swap, *arguments), status, *words)

    def test_names_that_are_none(self):
        self.assert_fails(self.bench("--path", self.swap, "--pattern", "reed"), 2, "'reed'",
                          "did you mean 'read'")
        self.assert_fails(self.bench("--path", self.swap, "--backend", "treads"), 2, "'treads'",
                          "did you mean 'threads'")
        done = self.bench("--path", self.swap, "--backend", "io_uring",
                          environment={"BALLAST_IO_DISABLE": "io_uring"})
        self.assert_fails(done, 1, "io_uring", "BALLAST_IO_DISABLE")

    def test_options_that_exclude_each_other(self):
        self.assert_fails(self.bench("--path", self.swap, "--iopoll", "--buffered"), 2, "--iopoll")
        self.assert_fails(self.bench("--backend", "null", "--check"), 2, "--check", "null")

    def test_file_size_limit(self):
        def limits():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
        self.assert_fails(self.bench("--path", self.swap, *SMALL, limits=limits), 1,
                          str(self.swap), "file-size limit")

    def test_interrupt_while_measuring(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = subprocess.Popen(
                [BALLAST, "bench", "io", "--path", self.swap, *SMALL, "--seconds", "600"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.kill)
            # The first line comes when the signal handlers are in place.
            self.assertNotEqual(process.stdout.readline(), "")
            time.sleep(0.2)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            self.assertEqual(errors, "ballast: error: interrupted\n")
            self.assertEqual(process.returncode, 1)
            self.assertEqual(list(self.swap.iterdir()), [])


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
