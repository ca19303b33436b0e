#!/usr/bin/env python3
"""Tests what a run leaves in its directory, and how it ends.

    run_directory_test.py PATH_OF_BALLAST
"""

import json
import os
import re
import resource
import signal
import subprocess
import time

from one_line import assert_one_line
from runs import RUN_FILES, TINY, RunTest, main, without_notice

PATIENCE = 240


class Directory(RunTest):
    def unnamed(self):
        """TINY without a run directory, and the folder in which a run makes one."""
        self.state = self.path / "state/ballast"
        return {"ballast": {**TINY["ballast"], "out": None},
                "environment": {"XDG_STATE_HOME": str(self.state.parent)}}

    def test_runs_of_the_same_second_have_different_directories(self):
        unnamed = self.unnamed()
        command = [self.ballast, "train", str(self.config(ballast=unnamed["ballast"]))]
        runs = [subprocess.Popen(command, cwd=self.path, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, text=True,
                                 env={**os.environ, **unnamed["environment"]}) for _ in range(3)]
        for run in runs:
            _, err = run.communicate(timeout=240)
            self.assertEqual(run.returncode, 0, err)
        self.assertEqual([self.steps(made) for made in self.state.iterdir()], 3 * [[1, 2, 3]])

    def test_metrics_of_another_run_are_replaced_only_on_demand(self):
        run = self.path / "run"
        self.assertEqual(self.train().returncode, 0)
        before = (run / "metrics.jsonl").read_bytes()
        for arguments in ([], ["--out", "run"]):
            self.assert_fails(self.train(*arguments), 2, "run/metrics.jsonl", "--out",
                              "--overwrite")
        self.assert_fails(self.train("--overwrite", "--set", "ballast.device_bytes=100KiB"), 1,
                          "device budget")
        self.assertEqual((run / "metrics.jsonl").read_bytes(), before)
        done = self.train("--overwrite", "--steps", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.steps(run), [1, 2])

    def test_the_printed_config_does_not_name_a_new_directory(self):
        first = self.train("--print-config", **self.unnamed())
        self.assertIsNone(json.loads(first.stdout)["ballast"]["out"])
        self.assertFalse(self.state.exists())
        (self.path / "printed.json").write_text(first.stdout)
        done = self.run_ballast("train", "printed.json",
                                environment=self.unnamed()["environment"])
        self.assertEqual(done.returncode, 0, done.stderr)
        made, = self.state.iterdir()
        self.assertTrue(made.name.startswith("printed-"), made)

    def test_a_run_that_never_starts_leaves_no_new_directory(self):
        done = self.train("--set", "ballast.device_bytes=100KiB", **self.unnamed())
        self.assert_fails(done, 1, "device budget")
        self.assertEqual(list(self.state.iterdir()), [])

    def names(self, out="run"):
        return {entry.name for entry in (self.path / out).iterdir()}

    def test_config_and_origin_are_next_to_the_metrics(self):
        done = self.train("--steps", "2", "--set", "gradient_clipping=0.5")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.names(), RUN_FILES)
        run = json.loads((self.path / "run/run.json").read_text())
        version = self.run_ballast("--version").stdout.split()[1]
        self.assertEqual(run["version"], version)
        self.assertEqual(run["command"], [self.ballast, "train", str(self.path / "config.json"),
                                          "--steps", "2", "--set", "gradient_clipping=0.5"])
        self.assertEqual(run["working_directory"], os.path.realpath(self.path))
        self.assertRegex(run["started"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertEqual(run["host"], os.uname().nodename)
        self.assertEqual(run["ranks"], 1)
        self.assertIn(run["io_backend"], ("io_uring", "threads"))
        self.assertGreaterEqual(run["cpus"], 1)
        self.assertGreater(run["memory_bytes"], 1 << 20)
        for key in ("cpu", "device", "update_instruction_set"):
            self.assertNotEqual(run[key], "", key)

    def test_the_config_of_a_run_makes_the_same_run_elsewhere(self):
        self.assertEqual(self.train("--set", "gradient_clipping=0.5").returncode, 0)
        kept = {name: (self.path / "run" / name).read_bytes() for name in RUN_FILES}
        self.unnamed()
        done = self.run_ballast("train", "run/config.json",
                                environment={"XDG_STATE_HOME": str(self.state.parent)})
        self.assertEqual(done.returncode, 0, done.stderr)
        made, = self.state.iterdir()
        self.assertEqual([row["loss"] for row in self.rows(made)],
                         [row["loss"] for row in self.rows()])
        self.assertEqual((made / "config.json").read_bytes(), kept["config.json"])
        for name, content in kept.items():
            self.assertEqual((self.path / "run" / name).read_bytes(), content, name)
        for arguments in ([], ["--overwrite"]):
            done = self.run_ballast("train", "run/config.json", "--out", "run", *arguments)
            self.assert_fails(done, 2, "run/", "--out")

    def test_files_of_another_run_are_replaced_only_with_overwrite(self):
        for name in ("config.json", "run.json"):
            other = self.path / name.replace(".", "-")
            other.mkdir()
            (other / name).write_text("mine")
            done = self.train("--out", other)
            self.assert_fails(done, 2, f"{other.name}/{name} exists", "--overwrite")
            self.assertEqual([entry.name for entry in other.iterdir()], [name])
            self.assert_fails(self.train("--out", other, "--overwrite"), 2, name, "is not from a run")
            self.assertEqual([entry.name for entry in other.iterdir()], [name])
            self.assertEqual((other / name).read_text(), "mine")

    def test_overwriting_replaces_only_what_runs_have_written(self):
        run = self.path / "run"
        self.assertEqual(self.train().returncode, 0)
        before = {name: (run / name).read_bytes() for name in RUN_FILES}
        (self.path / "link").symlink_to(run)
        for out in ("link", "link/"):
            done = self.train("--overwrite", "--out", out)
            self.assert_fails(done, 2, "link", "is a symbolic link to", str(run))
        for name, words in (("config.json", "not the config of a run"), ("run.json", "not from a run"),
                            ("metrics.jsonl", "not from a run")):
            (run / name).write_text('{"model_type": "llama"}')
            self.assert_fails(self.train("--overwrite"), 2, name, words, "--out")
            (run / name).write_bytes(before[name])
        (run / "run.json").unlink()
        (run / "run.json").symlink_to(self.path / "text.txt")
        self.assert_fails(self.train("--overwrite"), 2, "run.json is a symbolic link")
        (run / "run.json").unlink()
        (run / "checkpoints").mkdir()
        (run / "checkpoints/thesis.txt").write_text("mine")
        assert_one_line(self, self.train("--overwrite"), 2, ["thesis.txt is not a checkpoint"])
        (run / "checkpoints/thesis.txt").rename(run / "thesis.txt")
        self.assertEqual((run / "metrics.jsonl").read_bytes(), before["metrics.jsonl"])
        done = self.train("--overwrite", data={"text": ["run/metrics.jsonl"]})
        assert_one_line(self, done, 2, ["metrics.jsonl is read by this run"])
        self.assertEqual((run / "metrics.jsonl").read_bytes(), before["metrics.jsonl"])
        done = self.train("--overwrite")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.names(), RUN_FILES | {"thesis.txt"})

    def test_one_of_several_runs_that_start_in_a_directory_is_accepted(self):
        # Opening many files takes long enough for all processes to have checked the directory
        # before.
        (self.path / "texts").mkdir()
        for i in range(3000):
            (self.path / f"texts/{i}").write_text("the quick brown fox. ")
        config = self.config(data={"text": ["texts"], "sequence_length": 32})
        command = [self.ballast, "train", str(config), "--out", "shared"]
        runs = [subprocess.Popen(command, cwd=self.path, text=True, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE) for _ in range(8)]
        ends = sorted((run.communicate(timeout=PATIENCE)[1], run.returncode) for run in runs)
        self.assertEqual(ends[0], ("", 0))
        for error, status in ends[1:]:
            self.assertEqual(status, 2, error)
            self.assertRegex(error, r"\Aballast: error: \S+/shared/metrics.jsonl exists: "
                             r"choose another run directory with --out, .*--overwrite.*\n\Z")
        self.assertEqual(self.steps("shared"), [1, 2, 3])

    def test_a_run_that_fails_before_its_first_row_leaves_no_files(self):
        faults = {"BALLAST_IO_FAULTS": "eio:on=write:times=1"}
        self.assert_fails(self.train(environment=faults), 1, "writeback")
        self.assertFalse((self.path / "run").exists())
        (self.path / "run").mkdir()
        self.assert_fails(self.train(environment=faults), 1, "writeback")
        self.assertEqual(self.names(), set())
        self.assertEqual(self.train().returncode, 0)
        kept = {name: (self.path / "run" / name).read_bytes() for name in RUN_FILES}
        self.assert_fails(self.train("--overwrite", environment=faults), 1, "writeback")
        for name, content in kept.items():
            self.assertEqual((self.path / "run" / name).read_bytes(), content, name)

    def test_a_run_that_cannot_write_one_of_its_files_leaves_none(self):
        (self.path / "run/run.json").mkdir(parents=True)
        self.assert_fails(self.train("--overwrite"), 2, "run.json", "is not from a run")
        self.assertEqual(self.names(), {"run.json"})

    def limited(self, size):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return self.train(zero_optimization={"offload_optimizer": {"device": "none"}}, limits=limit,
                          ballast={**TINY["ballast"], "steps": 30})

    def test_full_disk_under_the_metrics_does_not_end_the_run(self):
        done = self.limited(6000)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("done in", done.stdout)
        rows = len(self.steps())
        self.assertGreater(rows, 1)
        waits, missing = done.stderr.splitlines()
        self.assertRegex(waits, rf"^ballast: warning: step {rows + 1}: cannot write .*metrics.jsonl: "
                         "File too large; rows wait in memory")
        self.assertIn(f"warning: {30 - rows} rows from step {rows + 1} on are not in ", missing)

    def test_full_disk_under_the_other_files(self):
        self.assert_fails(self.limited(1000), 1, "config.json", "File too large")
        self.assertFalse((self.path / "run").exists())


class Interrupt(RunTest):
    def interrupt(self, number, *arguments, ready, **sections):
        """Starts a run, sends the signal when `ready` is true, and returns how it ended."""
        process = subprocess.Popen([self.ballast, "train", str(self.config(**sections)), *arguments],
                                   cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and process.poll() is None and not ready():
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def interrupt_step(self, number, *arguments, rows=1):
        """Interrupts a long run after `rows` steps, in the middle of a step."""
        metrics = self.path / "run/metrics.jsonl"
        return self.interrupt(
            number, *arguments,
            ready=lambda: metrics.exists() and metrics.read_text().count("\n") >= rows,
            model={**TINY["model"], "hidden_size": 256},
            data={"text": ["text.txt"], "sequence_length": 256, "held_out": 0},
            train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=8,
            ballast={**TINY["ballast"], "steps": 1000, "device_bytes": "1GiB",
                     "host_bytes": "256MiB"})

    def assert_summary(self, done, status, planned=1000):
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertEqual(done.stderr, f"ballast: {signal.Signals(status - 128).name}: the run ends in the step that "
                         "is running, without a checkpoint (ballast.checkpoint_every); a second "
                         "signal after 2 seconds ends it at once\n")
        steps = self.steps()
        self.assertEqual(steps, list(range(1, len(steps) + 1)))
        summary = done.stdout[done.stdout.index("\ninterrupted after"):].splitlines()[1:]
        self.assertRegex(summary[0], rf"^interrupted after step {len(steps)} of {planned}, in \S+ "
                         r"\(\S+ of steps\), \S+ tok/s, ")
        loss = f"{self.rows()[-1]['loss']:.4f}"
        self.assertEqual(summary[1], f"last loss {loss}")
        self.assertTrue(any(re.match(r"  written to NVMe +\d", line) for line in summary), summary)
        self.assertIn(f"metrics in {self.path}/run/metrics.jsonl", summary)
        self.assertNotIn("done in", done.stdout)
        self.assert_nothing_left()

    def test_in_mid_step_ends_with_a_summary(self):
        self.assert_summary(self.interrupt_step(signal.SIGINT), 130)

    def test_by_sigterm(self):
        self.assert_summary(self.interrupt_step(signal.SIGTERM, rows=2), 143)

    def test_by_sighup(self):
        self.assert_summary(self.interrupt_step(signal.SIGHUP), 129)

    def test_when_serial(self):
        self.assert_summary(self.interrupt_step(signal.SIGINT, "--serial"), 130)

    def test_in_an_evaluation_keeps_its_step(self):
        # The trace is written between the last step and its evaluation of thousands of batches.
        (self.path / "long.txt").write_text("the quick brown fox. " * 200000)
        trace = self.path / "trace.json"
        done = self.interrupt(
            signal.SIGINT, "--trace", str(trace), ready=trace.exists,
            data={"text": ["long.txt"], "sequence_length": 32, "held_out": 0.5},
            ballast={**TINY["ballast"], "steps": 2, "eval_batches": 1 << 30})
        self.assert_summary(done, 130, planned=2)
        self.assertEqual(self.steps(), [1, 2])
        self.assertNotIn("eval_loss", self.rows()[-1])

    def test_before_the_first_step_is_one_line_and_leaves_nothing(self):
        done = self.interrupt_step(signal.SIGINT, rows=0)
        self.assertTrue(done.stderr.startswith("ballast: SIGINT: the run ends "), done.stderr)
        done.stderr = without_notice(done.stderr)
        self.assert_fails(done, 130, "interrupted")
        self.assertNotIn("interrupted", done.stdout)
        self.assertFalse((self.path / "run").exists())


if __name__ == "__main__":
    main()
