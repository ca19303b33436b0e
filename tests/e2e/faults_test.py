#!/usr/bin/env python3
"""Provokes faults of long runs: loss spikes, damaged swap files, a second process, a stopped
process, a lack of memory.

    faults_test.py PATH_OF_BALLAST [PATH_OF_MPIRUN]

A run that continues after a fault has the bits of a run without it.
"""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest

import runs

MPIRUN = sys.argv.pop(2) if len(sys.argv) > 2 and not sys.argv[2].startswith("-") else ""


class FaultTest(runs.CheckpointTest):
    def warnings(self, done, *words):
        """The lines of warning. Each must contain `words`."""
        lines = [line for line in done.stderr.splitlines() if "aio: injecting faults" not in line]
        for line in lines:
            self.assertTrue(line.startswith("ballast: warning: "), done.stderr)
            for word in words:
                self.assertIn(word, line)
        return lines

    def assert_error(self, done, status, *words):
        """The only line of error."""
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        line, = [line for line in done.stderr.splitlines() if line.startswith("ballast: error: ")]
        self.assertEqual(done.stderr.splitlines()[-1], line)
        for word in words:
            self.assertIn(word, line)
        return line


class Intervals(FaultTest):
    def test_a_time_instead_of_steps(self):
        for every, expected in (("1000h", ["step-4"]), ("4 steps", ["step-4"]),
                                ("0.000001s", ["step-2", "step-3", "step-4"])):
            done = self.train("--overwrite", "--steps", "4", ballast={
                **self.BALLAST, "checkpoint_every": every, "checkpoint_keep": 9})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.checkpoints(), expected, every)

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_ranks_agree_on_the_time(self):
        self.config(ballast={**self.BALLAST, "checkpoint_every": "0.01s",
                             "steps": 10, "checkpoint_keep": 20})
        done = subprocess.run([MPIRUN, "-n", "2", self.ballast, "train", "config.json"],
                              cwd=self.path, capture_output=True, text=True, timeout=240,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreater(len(self.checkpoints()), 1)


class Spikes(FaultTest):
    """The text repeats itself after 64 bytes, and a step takes 128 of them in order. So a run that
    skips the step whose bytes are noise has the bits of a run without noise."""

    SAME = tuple(key for key in runs.CheckpointTest.SAME if key != "eval_loss")
    STEPS = 60
    BAD_STEP = 44
    BALLAST = {**runs.CheckpointTest.BALLAST, "steps": STEPS, "checkpoint_every": 10}
    SPIKE = {"action": "rollback", "window": 10, "factor": 6}

    def sections(self, spike=None, **more):
        spike = self.SPIKE if spike is None else spike
        return {"data": {"text": ["text.txt"], "sequence_length": 32, "shuffle": False},
                "ballast": {**self.BALLAST, **({"spike": spike} if spike else {}), **more}}

    PERIOD = b"sphinx of black quartz, judge my vow while 5 wizards jump high. "

    def text(self, *bad_steps, bytes_of_step=128, period=PERIOD):
        text = bytearray(period * 400)
        for step in bad_steps:
            for i in range((step - 1) * bytes_of_step + 1, step * bytes_of_step):
                text[i] = 128 + (i * 37) % 128
        (self.path / "text.txt").write_bytes(text)

    def expected(self):
        self.text()
        return self.reference(**self.sections(spike={}))

    def noisy(self, *arguments, bad=(BAD_STEP,), **sections):
        self.text(*bad)
        shutil.rmtree(self.path / "run", ignore_errors=True)
        return self.train(*arguments, **self.sections(**sections))

    def test_warn_changes_nothing(self):
        self.assertEqual(self.noisy(spike={}).returncode, 0)
        quiet = self.results()
        done = self.noisy(spike={**self.SPIKE, "action": "warn"}, bad=(44, 45, 46))
        self.assertEqual(len(self.warnings(done, "step 44: loss ", "is above")), 1, done.stderr)
        done = self.noisy(spike={**self.SPIKE, "action": "warn"})
        self.assertEqual(self.results(), quiet)
        self.assertEqual(done.returncode, 0)

    def test_stop_names_step_loss_and_checkpoint(self):
        done = self.noisy(spike={**self.SPIKE, "action": "stop"})
        loss = self.rows()[-1]["loss"]
        line = self.assert_error(done, 1, "step 44: loss %.4f" % loss, "lower the learning rate",
                                 "to continue from " + str(self.path / "run/checkpoints/step-40: "))
        self.assertEqual(self.steps(), list(range(1, 45)))
        self.assertEqual(self.checkpoints(), ["step-30", "step-40"])
        again = self.go_on_with(line)
        self.assertIn("step 44: ", again.stderr)

    def test_rollback_skips_the_data(self):
        expected = self.expected()
        done = self.noisy()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.warnings(
            done, "step 44: loss ", "rollback 1 of at most 3", "step-40",
            "without the data of the 4 steps since then")), 1)
        self.assertIn("went back to a checkpoint 1 time", done.stdout)
        self.assertEqual(self.results(), expected)
        skipped = [row.get("skipped_batches", 0) for row in self.rows()]
        self.assertEqual(skipped, [0] * 40 + [4] * 20)

    def test_resuming_after_a_rollback_has_the_same_bits(self):
        self.text(self.BAD_STEP, period=runs.TEXT[:45].encode())  # no two batches are equal
        self.assertIn("rollback", self.train("--out", "reference", **self.sections()).stderr)
        for steps in ("47", "50"):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            done = self.train("--steps", steps, **self.sections())
            self.assertEqual(done.returncode, 0, done.stderr)
            done = self.train("--resume", **self.sections())
            self.assertEqual(self.warnings(done), [])
            self.assertEqual(self.results(), self.results("reference"))

    def test_the_window_outlives_the_process(self):
        expected = self.expected()
        done = self.noisy("--steps", "42")
        self.assertEqual(self.warnings(done), [])
        done = self.train("--resume", **self.sections())
        self.assertEqual(len(self.warnings(done, "step 44: ", "step-42")), 1)
        self.assertEqual(self.results(), expected)

    def test_most_rollbacks(self):
        bad = (44, 45, 46)  # each rollback finds the next one
        for most in (3, 2):
            done = self.noisy(bad=bad, spike={**self.SPIKE, "most_rollbacks": most},
                              checkpoint_every=43)
            if most == 3:
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(len(self.warnings(done, "rollback")), 3)
                self.assertEqual([row.get("skipped_batches", 0) for row in self.rows()],
                                 [0] * 43 + [3] * 17)
            else:
                self.assert_error(done, 1, "step 44: ", "ballast.spike.most_rollbacks",
                                  "2 times", "step-43")

    def test_without_a_checkpoint_it_stops(self):
        done = self.noisy(checkpoint_every=50)
        self.assert_error(done, 1, "step 44: ", "there is no checkpoint yet to go back to")

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_ranks_roll_back_together(self):
        rows = []
        for bad in ((), (self.BAD_STEP,)):
            self.text(*bad, bytes_of_step=256)
            shutil.rmtree(self.path / "run", ignore_errors=True)
            self.config(**self.sections())
            done = subprocess.run([MPIRUN, "-n", "2", self.ballast, "train", "config.json"],
                                  cwd=self.path, capture_output=True, text=True, timeout=240,
                                  check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("rollback 1 of"), len(bad), done.stderr)
            rows.append(self.results())
        self.assertEqual(rows[0], rows[1])


class SwapErrors(FaultTest):
    """Each engine that follows a failed one meets the same fault, but later in the run."""

    def test_a_run_resumes_automatically(self):
        expected = self.reference()
        for faults, cause in (("eio:on=read:after=52:times=1", "Input/output error"),
                              ("flip:on=read:after=52:times=1", "checksum mismatch")):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            done = self.train(ballast={**self.BALLAST, "on_error": "resume"},
                              environment={"BALLAST_IO_FAULTS": faults})
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = self.warnings(done, cause, "fetch")
            back = [line for line in lines if "training continues from " in line]
            self.assertGreater(len(back), 0, done.stderr)
            self.assertIn(str(self.path / "run/checkpoints/step-"), back[0])
            for line in back:  # the swap file may have the name of a checkpoint, which is intact
                self.assertNotIn("checkpoints", line.split("; training continues")[0])
            self.assertIn(f"went back to a checkpoint {len(back)} time", done.stdout)
            self.assertEqual(self.results(), expected, faults)

    def test_or_names_the_checkpoint_and_the_command(self):
        expected = self.reference()
        done = self.train(ballast=self.BALLAST,
                          environment={"BALLAST_IO_FAULTS": "flip:on=read:after=52:times=1"})
        line = self.assert_error(done, 1, "checksum mismatch", "to continue from ", "checkpoints/step-",
                                 "or from the one before if this has damaged it: ", " --resume")
        self.assertEqual(self.go_on_with(line).returncode, 0)
        self.assertEqual(self.results(), expected)

    def test_it_gives_up_without_progress(self):
        self.part_of_run()
        done = self.resume(ballast={**self.BALLAST, "on_error": "resume"},
                           environment={"BALLAST_IO_FAULTS": "eio:on=read:after=2:times=1"})
        self.assertEqual(done.stderr.count("training continues from "), 3, done.stderr)
        self.assert_error(done, 1, "step 11: ", "3 times without a new checkpoint",
                          "Input/output error", "step-10")

    def test_without_an_intact_checkpoint_it_names_none(self):
        done = self.train(ballast={**self.BALLAST, "on_error": "resume"},
                          environment={"BALLAST_IO_FAULTS": "lost:on=write:after=20:times=1"})
        line = self.assert_error(done, 1, "checksum mismatch", "the run cannot go back: ",
                                 "its only checkpoint is damaged", "step-2/rank-0.swap-0")
        self.assertNotIn("to continue", line)
        self.assertNotIn("skipped", done.stderr)

    def test_without_a_checkpoint_it_stops(self):
        done = self.train(ballast={**self.BALLAST, "on_error": "resume", "checkpoint_every": 19},
                          environment={"BALLAST_IO_FAULTS": "eio:on=read:after=9:times=1"})
        line = self.assert_error(done, 1, "Input/output error")
        self.assertNotIn("to continue", line)

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_of_one_rank_end_the_run_and_name_the_checkpoint(self):
        config = self.config(ballast={**self.BALLAST, "on_error": "resume", "steps": 400,
                                      "comm_timeout_seconds": 20})
        command = [self.ballast, "train", config]
        faults = "BALLAST_IO_FAULTS=eio:on=read:after=75:times=1"
        done = subprocess.run([MPIRUN, "-n", "1", *command, ":", "-n", "1", "-x", faults, *command],
                              cwd=self.path, capture_output=True, text=True, timeout=240,
                              check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("is for a run of one rank", done.stderr)
        lines = [line for line in done.stderr.splitlines() if "ballast: error: " in line]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertIn("checkpoints/step-", lines[0])


class TwoProcesses(FaultTest):
    def test_only_one_trains_in_a_directory(self):
        self.config(ballast={**self.BALLAST, "steps": 100000, "save_weights": False})
        process = self.start()
        self.wait_for_row(process, 5)
        for arguments in (("--resume",), ("--resume=auto",), ("--overwrite",)):
            done = self.run_ballast("train", "config.json", *arguments)
            self.assert_error(done, 2, "another process trains in ", str(self.path / "run"), "--out")
            self.assertEqual(len(done.stderr.splitlines()), 1)
        self.assertIsNone(process.poll(), "the first one was disturbed")
        process.kill()
        process.communicate()
        killed = (self.path / "run/metrics.jsonl").read_text().count("\n")
        resumed = self.start("--resume")
        self.wait_for_row(resumed, killed + 1)  # only the resumed run can write it
        done = self.run_ballast("train", "config.json", "--resume")
        self.assert_error(done, 2, "another process trains in ")
        resumed.send_signal(signal.SIGTERM)
        out, err = resumed.communicate(timeout=120)
        self.assertEqual((resumed.returncode, runs.without_notice(err)), (runs.RESUMABLE, ""), out)
        self.assertEqual(self.steps(), list(range(1, len(self.steps()) + 1)))


class RunDirectory(FaultTest):
    """A run directory that is full, is renamed or is deleted during the run."""

    def begin(self, **sections):
        self.config(**sections, ballast={**self.BALLAST, "steps": 100000, "checkpoint_every": 1 << 30,
                                         "save_weights": False})
        process = self.start()
        self.wait_for_row(process, 3)
        return process

    def wait(self, process, ready):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None and not ready():
            time.sleep(0.005)

    def grow(self, process, out="run", rows=3):
        """Waits for more rows."""
        file = self.path / out / "metrics.jsonl"
        self.wait(process, file.exists)
        before = file.stat().st_size
        self.wait(process, lambda: file.stat().st_size > before + 500 * rows)

    def end_of(self, process):
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, runs.RESUMABLE, out + err)
        return out, runs.without_notice(err).splitlines()

    def test_that_is_full_for_a_while_gets_all_rows(self):
        csv = {"enabled": True, "output_path": str(self.path / "logs"), "job_name": "csv"}
        process = self.begin(csv_monitor=csv,
                             zero_optimization={"offload_optimizer": {"device": "none"}})
        # The file has reached its size limit. The CSV file is shorter, so its rows do not wait.
        limit = (self.path / "run/metrics.jsonl").stat().st_size + 5000
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        table = self.path / "logs/csv/Train_Samples_lr.csv"
        self.wait(process, lambda: (self.path / "run/metrics.jsonl").stat().st_size > limit - 2000)
        lines = table.read_text().count("\n")
        self.wait(process, lambda: table.read_text().count("\n") > lines + 20)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE,
                         (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.grow(process)
        _, lines = self.end_of(process)
        self.assertEqual(len(lines), 2, lines)
        self.assertIn("metrics.jsonl: File too large; rows wait in memory", lines[0])
        self.assertRegex(lines[1], r"^ballast: step \d+: rows can be written again")
        self.assertEqual(self.steps(), list(range(1, len(self.steps()) + 1)))

    def test_that_gets_another_name_is_followed(self):
        process = self.begin()
        (self.path / "run").rename(self.path / "other")
        self.grow(process, "other")
        out, (line,) = self.end_of(process)
        self.assertRegex(line, rf"step \d+: the run directory {self.path}/run is {self.path}/other now")
        self.assertIn("with --resume and --out " + str(self.path / "other"), out)
        self.assertFalse((self.path / "run").exists())
        steps = self.steps("other")
        self.assertEqual(steps, list(range(1, len(steps) + 1)))
        self.assertEqual(self.checkpoints("other"), [f"step-{steps[-1]}"])
        done = self.run_ballast("train", "config.json", "--resume", "--out", "other", "--steps",
                                steps[-1] + 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.steps("other"), list(range(1, steps[-1] + 3)))

    def test_that_is_deleted_is_made_again_with_a_checkpoint(self):
        process = self.begin()
        shutil.rmtree(self.path / "run", ignore_errors=True)
        self.grow(process)
        self.wait(process, lambda: len(self.checkpoints()) == 1)
        _, (line,) = self.end_of(process)
        self.assertRegex(line, rf"step \d+: the files of the run in {self.path}/run were deleted")
        steps = self.steps()
        self.assertGreater(steps[0], 3)
        self.assertEqual(steps, list(range(steps[0], steps[-1] + 1)))
        self.assertIn(f"step-{steps[-1]}", self.checkpoints())
        done = self.run_ballast("train", "config.json", "--resume", "--steps", steps[-1] + 2)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_that_is_replaced_by_another_ends_the_run(self):
        process = self.begin()
        (self.path / "new").mkdir()
        (self.path / "new/thesis.txt").write_text("mine")
        process.send_signal(signal.SIGSTOP)
        shutil.rmtree(self.path / "run")
        (self.path / "new").rename(self.path / "run")
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1, out + err)
        self.assertRegex(err, r"\Aballast: error: step \d+: the run directory \S+/run was deleted, and "
                         r"another one has its name now.*\n\Z")
        self.assertEqual([entry.name for entry in (self.path / "run").iterdir()], ["thesis.txt"])


class OneProcess(FaultTest):
    def test_that_was_stopped_continues(self):
        # Stops for longer than a request may take, which is longer than a busy disk takes.
        aio = {"any_file_system": True, "stall_seconds": 3, "abandon_seconds": 4}
        expected = self.reference(aio=aio)
        self.config(ballast=self.BALLAST, aio=aio)
        for moment in (1, 7, 13):
            shutil.rmtree(self.path / "run", ignore_errors=True)
            process = self.start()
            self.wait_for_row(process, moment)
            process.send_signal(signal.SIGSTOP)
            time.sleep(5)
            process.send_signal(signal.SIGCONT)
            _, err = process.communicate(timeout=120)
            self.assertEqual((process.returncode, err), (0, ""))
            self.assertEqual(self.results(), expected)

    def test_without_memory_for_a_checkpoint_continues(self):
        self.config(ballast={**self.BALLAST, "steps": 100000, "checkpoint_every": 1 << 30})
        process = self.start()
        self.wait_for_row(process, 3)
        used = int(pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * 4096
        if used > 1 << 42:
            process.kill()
            self.skipTest("a sanitizer has reserved the address space")
        resource.prlimit(process.pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        process.send_signal(signal.SIGUSR1)
        rows = len(self.rows())
        self.wait_for_row(process, rows + 20)
        self.assertEqual(self.checkpoints(), [])
        resource.prlimit(process.pid, resource.RLIMIT_AS,
                         (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, runs.RESUMABLE, out + err)
        self.assertEqual(len(runs.without_notice(err).splitlines()), 1, err)
        self.assertIn("no checkpoint: ", err)
        self.assertIn("emory", err)
        self.assertIn("training continues", err)
        self.assertEqual(len(self.checkpoints()), 1)


if __name__ == "__main__":
    runs.main()
