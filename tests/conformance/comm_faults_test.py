#!/usr/bin/env python3
"""Checks ranks that fail: every process of the run must end, soon and with one clear line.

    comm_faults_test.py MPIRUN PROGRAM [PROGRAM_ON_FAKES STEPS_ON_FAKES]

PROGRAM's ranks that do not fail would wait for ten minutes. mpirun's environment comes from Meson.
PROGRAM_ON_FAKES is the same program, linked with fakes of CUDA and NCCL. STEPS_ON_FAKES trains there.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

MPIRUN = sys.argv[1]
PROGRAM = sys.argv[2]
PROGRAM_ON_FAKES = sys.argv[3] if len(sys.argv) > 3 else None
STEPS_ON_FAKES = sys.argv[4] if len(sys.argv) > 4 else None
LIMIT_SECONDS = 120  # far below ten minutes, but enough for slow machines


def left_over(token: str) -> list[str]:
    """Command lines of processes that were started with `token`."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # the process has ended
        if token.encode() in line.split(b"\0"):
            found.append(line.replace(b"\0", b" ").decode())
    return found


def run(way: str, ranks: int, program: str = PROGRAM) -> tuple[int, str, str]:
    """Returns exit status, output and errors. ranks 0: without mpirun."""
    token = f"comm-faults-{os.getpid()}-{way}"
    command = [program, way, token]
    if ranks:
        command = [MPIRUN, "-n", str(ranks), *command]
    # Open MPI puts the memory that ranks share here.
    with (tempfile.TemporaryDirectory() as shared,
          subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           start_new_session=True,
                           env={**os.environ, "OMPI_MCA_btl_vader_backing_directory": shared},
                           ) as process):
        try:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{way}: not over after {LIMIT_SECONDS} s\n{out}{err}") from None
        left = left_over(token) + os.listdir(shared)
    if left:
        raise AssertionError(f"{way}: still there: {left}")
    return process.returncode, out, err


class Faults(unittest.TestCase):
    def expect_failure(self, way: str, *said: str, ranks: int = 2) -> None:
        status, out, err = run(way, ranks)
        self.assertNotEqual(status, 0, way)
        for line in said:
            self.assertIn(line, err.splitlines(), f"{way}: {out}{err}")

    def test_a_rank_that_does_not_come(self) -> None:
        advice = ("not all ranks took part within 500ms; check the other ranks' logs or raise "
                  "ballast.comm_timeout_seconds")
        self.expect_failure("timeout", f"comm error: all_reduce of 32.0 KiB: {advice}", ranks=3)
        self.expect_failure("host_timeout", f"comm error: barrier: {advice}", ranks=3)

    def test_nothing_works_after_a_timeout(self) -> None:
        self.expect_failure(
            "after_timeout",
            "comm error: barrier: aborted because another collective failed earlier: all_reduce "
            "of 32.0 KiB: not all ranks took part within 500ms; check the other ranks' logs or "
            "raise ballast.comm_timeout_seconds")

    def test_an_interrupt_ends_a_wait(self) -> None:
        self.expect_failure("interrupt", "interrupted error: interrupted in all_reduce of 32.0 KiB")

    def test_abort_ends_all_with_its_status_and_message(self) -> None:
        status, out, _ = run("abort", 3)
        self.assertEqual(status, 3)
        self.assertIn("rank 1 said why", out)

    def test_an_exception_ends_all(self) -> None:
        self.expect_failure("throw", "error: rank 1 threw", ranks=3)

    def test_a_killed_rank_ends_all(self) -> None:
        self.expect_failure("kill", ranks=3)

    def test_a_launcher_of_another_mpi_is_noticed(self) -> None:
        status, _, err = run("disagree", 2)
        self.assertNotEqual(status, 0)
        self.assertRegex(err, r"comm error: .* reports rank \d of 3, but .* reports rank \d of 2; "
                              r"start with the mpirun of that library")

    def test_channels_that_start_in_different_orders_time_out(self) -> None:
        if PROGRAM_ON_FAKES is None:
            self.skipTest("built without NCCL")
        self.assertEqual(run("two_channels", 2, PROGRAM_ON_FAKES), (0, "", ""))
        status, out, err = run("crossed_channels", 2, PROGRAM_ON_FAKES)
        self.assertNotEqual(status, 0)
        self.assertIn("comm error: all_gather of 8.00 KiB: not all ranks took part within 500ms; "
                      "check the other ranks' logs or raise ballast.comm_timeout_seconds",
                      err.splitlines(), out + err)

    def test_a_peer_that_never_comes_ends_every_collective_of_a_gpu(self) -> None:
        if PROGRAM_ON_FAKES is None:
            self.skipTest("built without NCCL")
        for collective in "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast":
            status, out, err = run(f"alone_in_{collective}", 2, PROGRAM_ON_FAKES)
            self.assertNotEqual(status, 0, collective)
            self.assertIn(f"comm error: {collective} of 8.00 KiB: not all ranks took part within "
                          "500ms; check the other ranks' logs or raise "
                          "ballast.comm_timeout_seconds", err.splitlines(), out + err)

    def test_a_gpu_that_hangs_in_a_step_ends_the_run(self) -> None:
        if STEPS_ON_FAKES is None:
            self.skipTest("built without NCCL")
        status, out, err = run("hang", 2, STEPS_ON_FAKES)
        self.assertNotEqual(status, 0)
        self.assertIn("step 1 is over", out)
        self.assertNotIn("step 2 is over", out)
        self.assertRegex(err, r"(?m)^comm error: .*: sum_terms of .*: not all ranks took part within "
                              r"5\.0s; check the other ranks' logs or raise "
                              r"ballast.comm_timeout_seconds$")

    def test_a_run_is_joined_once(self) -> None:
        self.expect_failure("twice",
                            "comm error: a process can join a run of several ranks only once")

    def test_one_rank_calls_nothing_of_mpi(self) -> None:
        self.assertEqual(run("alone", 0), (0, ", MPI started: 0\n", ""))
        status, out, err = run("alone", 1)
        self.assertEqual((status, err), (0, ""))
        self.assertRegex(out, r"^mp.*, MPI started: 0\n$")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
