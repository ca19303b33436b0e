#!/usr/bin/env python3
"""Runs the program as several ranks, including wrong input and killed ranks.

    ranks_test.py PATH_OF_BALLAST [PATH_OF_MPIRUN]

However a run of several ranks ends, it prints one line and leaves nothing: no process, no shared
memory, no swap file. mpirun's environment comes from Meson.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import runs

BALLAST = str(pathlib.Path(sys.argv[1]).resolve())
MPIRUN = sys.argv[2] if len(sys.argv) > 2 else ""
PATIENCE = 240  # seconds within which anything must be over, even on slow machines

TINY = {
    **{section: runs.TINY[section] for section in ("model", "data", "optimizer", "aio")},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
    "bf16": {"enabled": False},
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 1,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 4,
                "eval_every": 2, "out": "run"},
}
# BALLAST_TEST_KILLS=20 kills more often.
KILLS = int(os.environ.get("BALLAST_TEST_KILLS", "3"))
ENDLESS = ("--set", "ballast.steps=1000000", "--set", "ballast.eval_every=0")


def errors_of(text):
    """The program's own lines about a failure, without those of mpirun."""
    return [line for line in text.splitlines() if line.startswith("ballast: error: ")]


def environment_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # the process has ended


class RanksTest(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory(prefix="ballast-ranks-")
        self.addCleanup(self._directory.cleanup)
        self.path = pathlib.Path(self._directory.name)
        (self.path / "text.txt").write_text(runs.TEXT)
        self.config = self.path / "config.json"
        self.config.write_text(json.dumps(TINY))
        # Replaces /dev/shm, which other runs use.
        self.shared_memory = self.path / "shm"
        self.shared_memory.mkdir()
        # Marks this test's processes, so that left-over ones can be found.
        self.token = f"ballast-ranks-test-{os.getpid()}-{random.getrandbits(48)}"
        self.environment = {**os.environ, "BALLAST_RANKS_TEST": self.token,
                            "XDG_CACHE_HOME": str(self.path / "cache"),
                            "XDG_STATE_HOME": str(self.path / "state"),
                            "OMPI_MCA_btl_vader_backing_directory": str(self.shared_memory)}

    def command(self, ranks, *arguments, other=None):
        """Runs `ballast ARGUMENTS` as this number of ranks. `other`: (environment, arguments) of
        one more rank."""
        command = [MPIRUN, "-n", str(ranks), BALLAST, *map(str, arguments)]
        if other:
            environment, more = other
            command += [":", "-n", "1"]
            for name, value in environment.items():
                command += ["-x", f"{name}={value}"]
            command += [BALLAST, *map(str, more)]
        return command

    def start(self, command):
        shutil.rmtree(self.path / "run", ignore_errors=True)  # see wait_for_steps()
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                cwd=self.path, env=self.environment, start_new_session=True)

    def finish(self, process, killed=None):
        """Waits for the end. `killed`: a rank that was killed before its first step."""
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            out, err = process.communicate()
            self.fail(f"not over after {PATIENCE} s\n{out}{err}")
        # Open MPI forgets the memory of a rank that dies inside MPI_Init.
        for segment in self.shared_memory.glob(f"vader_segment.*.{killed}"):
            segment.unlink()
        self.assert_nothing_left()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_ranks(self, ranks, *arguments, other=None):
        return self.finish(self.start(self.command(ranks, *arguments, other=other)))

    def train(self, ranks, *arguments, other=None):
        return self.run_ranks(ranks, "train", self.config, *arguments, other=other)

    def processes(self, rank=None):
        """PIDs of this test's running processes. `rank`: only those of that rank."""
        wanted = [f"BALLAST_RANKS_TEST={self.token}".encode()]
        if rank is not None:
            wanted.append(f"OMPI_COMM_WORLD_RANK={rank}".encode())
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()
                and all(word in environment_of(entry) for word in wanted)]

    def assert_nothing_left(self):
        deadline = time.monotonic() + PATIENCE
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)  # mpirun may end just before the processes that it has killed
        self.assertEqual(self.processes(), [])
        self.assertEqual(list(self.shared_memory.iterdir()), [])
        for entry in self.path.glob("**/*"):
            self.assertNotIn("swap", entry.name)

    def losses(self, run="run"):
        lines = (self.path / run / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        return [(step["loss"], step["grad_norm"], step.get("eval_loss")) for step in steps]

    def assert_one_error(self, done, status, *words):
        errors = errors_of(done.stderr)
        self.assertEqual(len(errors), 1, done.stderr)
        for word in words:
            self.assertIn(word, errors[0])
        self.assertEqual(done.returncode, status, done.stderr)

    def wait_for_steps(self, process, steps=1):
        """Waits until `steps` are done."""
        metrics = self.path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + PATIENCE
        while not metrics.exists() or metrics.read_text().count("\n") < steps:
            if process.poll() is not None or time.monotonic() > deadline:
                out, err = process.communicate()
                self.fail(f"no step was done\n{out}{err}")
            time.sleep(0.01)


class Working(RanksTest):
    def test_every_stage_learns_the_same_bits_and_what_one_rank_learns(self):
        for stage in range(4):
            done = self.train(2, "--set", f"zero_optimization.stage={stage}", "--out",
                              f"stage{stage}")
            self.assertEqual(done.returncode, 0, done.stderr)
        learned = [self.losses(f"stage{stage}") for stage in range(4)]
        self.assertEqual(len(learned[0]), 4)
        self.assertIsNotNone(learned[0][-1][2])
        for stage in range(1, 4):
            self.assertEqual(learned[stage], learned[0])
        self.assertEqual(self.train(1, "--out", "alone").returncode, 0)
        for several, alone in zip(learned[0], self.losses("alone"), strict=True):
            for a, b in zip(several, alone, strict=True):
                if b is None:
                    self.assertIsNone(a)
                else:
                    self.assertAlmostEqual(a, b, delta=1e-5 * abs(b))

    def test_packed_documents_do_not_depend_on_the_number_of_ranks(self):
        file = pathlib.Path(__file__).parents[1] / "data/documents/conversations.safetensors"
        rows = {}
        for ranks in (1, 2, 3):
            done = self.train(ranks, "--set", "data.text=[]", "--set", f"data.documents={file}",
                              "--set", f"data.eval={file}", "--set", "ballast.eval_batches=12",
                              "--set", "data.sequence_length=64", "--out", str(ranks))
            self.assertEqual(done.returncode, 0, done.stderr)
            rows[ranks] = [json.loads(line) for line in
                           (self.path / str(ranks) / "metrics.jsonl").read_text().splitlines()]
        for ranks in (2, 3):
            for several, alone in zip(rows[ranks], rows[1], strict=True):
                self.assertEqual(several["tokens"], alone["tokens"])
                for key in ("loss", "grad_norm", "eval_loss"):
                    if alone.get(key) is not None:
                        self.assertAlmostEqual(several[key], alone[key], delta=1e-5 * alone[key])
        self.assertIn("eval_loss", rows[1][-1])
        self.assertLess(sum(row["tokens"] for row in rows[1]), 4 * 12 * 64)  # some are padding

    def test_one_rank_prints_for_all(self):
        done = self.train(3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        self.assertNotIn("\r", done.stdout.replace("\r\n", "\n"))
        lines = done.stdout.splitlines()
        self.assertEqual(sum(line.startswith("ballast train ") for line in lines), 1)
        self.assertEqual(sum(" 4/4 " in line for line in lines), 1)
        self.assertIn("3 ranks, ZeRO stage 3", done.stdout)
        self.assertIn("384 tokens per step", done.stdout)
        for lane in ("gather", "reduce"):
            self.assertTrue(any(line.startswith(f"  {lane} ") for line in lines), done.stdout)
        metrics = [json.loads(line) for line in
                   (self.path / "run/metrics.jsonl").read_text().splitlines()]
        self.assertEqual([step["step"] for step in metrics], [1, 2, 3, 4])
        for step in metrics:
            self.assertEqual(step["tokens"], 12 * 32)
            self.assertGreater(step["bytes"]["gather"], 0)
            self.assertGreater(step["bytes"]["reduce"], 0)

    def test_drives_wear_by_the_bytes_of_all_ranks(self):
        """Three ranks share the swap directory and the run directory, and write equal amounts."""
        done = self.train(3, "--set", "ballast.steps=12", "--set", "ballast.eval_every=0")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(" by rank 0; all ranks of this machine:", done.stdout)
        rows = [json.loads(line) for line in
                (self.path / "run/metrics.jsonl").read_text().splitlines()]
        own = sum(row["bytes"]["writeback"] for row in rows)
        found = re.search(r"done in ([\d.]+)(ms|s) ", done.stdout)
        seconds = float(found[1]) / (1e3 if found[2] == "ms" else 1)
        pace = float(re.search(r"([\d.]+) TB a day", done.stdout)[1])
        ranks = pace * 1e12 / 86400 * seconds / own
        self.assertGreater(ranks, 2.5)
        self.assertLess(ranks, 3.8)  # the last updates come after the last row

    def test_a_run_directory_that_is_not_named_is_the_same_for_all(self):
        done = self.train(3, "--set", "ballast.out=null")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(list((self.path / "state/ballast").iterdir())), 1)

    def test_the_first_rank_measures_and_plans_for_all_however_long_it_takes(self):
        done = self.train(2, "--set", "zero_optimization.offload_optimizer.device=auto",
                          "--set", "zero_optimization.offload_param.device=auto",
                          "--set", "ballast.comm_timeout_seconds=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("planner: "), 1, done.stderr)
        self.assertEqual(len(self.losses()), 4)

    def test_a_trace_is_that_of_the_first_rank(self):
        done = self.train(2, "--trace", self.path / "trace.json", "--trace-steps", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("gather", (self.path / "trace.json").read_text())
        self.assertEqual(done.stdout.count("trace in "), 1)

    def test_the_config_is_printed_once_and_for_all_ranks(self):
        done = self.train(2, "--print-config")
        self.assertEqual(done.returncode, 0, done.stderr)
        printed = json.loads(done.stdout)
        self.assertEqual(printed["gradient_accumulation_steps"], 6)

    def test_other_commands_run_once(self):
        done = self.run_ranks(2, "tokenize", "text.txt", "--out", "tokens.bin")
        self.assertEqual(done.returncode, 0, done.stderr)
        alone = subprocess.run([BALLAST, "tokenize", "text.txt", "--out", "again.bin"],
                               capture_output=True, text=True, cwd=self.path, check=True)
        self.assertEqual(len(done.stdout.splitlines()), len(alone.stdout.splitlines()))


class Mistakes(RanksTest):
    def test_of_all_ranks_are_printed_once(self):
        (self.path / "used").mkdir()
        (self.path / "used/metrics.jsonl").write_text("")
        for status, words, arguments in (
                (2, ["modle", "unknown key"], ["--set", "modle.x=1"]),
                (2, ["ballast.steps is missing or 0"], ["--set", "ballast.steps=0"]),
                (2, ["not divisible"], ["--set", "train_batch_size=13"]),
                (2, ["--stepz"], ["--stepz", "3"]),
                (2, ["used/metrics.jsonl", "--overwrite"], ["--out", "used"]),
                (1, ["the device budget of 100 KiB"], ["--set", "ballast.device_bytes=100KiB"]),
                (1, ["data.text: cannot read", "text.txt"],
                 ["--set", f"data.text={self.path}/no/text.txt"]),
                (1, ["model.weights: cannot read", "none.safetensors: No such file"],
                 ["--set", "model.weights=none.safetensors"])):
            done = self.train(3, *arguments)
            self.assert_one_error(done, status, *words)
            self.assertNotIn(f" on {os.uname().nodename}: ", done.stderr)

    def test_of_one_rank_are_printed_with_its_number(self):
        done = self.train(1, other=({}, ["train", self.config, "--set", "modle.x=1"]))
        self.assert_one_error(done, 2, f"rank 1 on {os.uname().nodename}: ", "modle")
        done = self.train(1, other=({}, ["train", self.config, "--stepz", "1"]))
        self.assert_one_error(done, 2, f"rank 1 on {os.uname().nodename}: ", "--stepz")


    def test_processes_of_another_launcher_are_refused_once(self):
        """torchrun starts them so. Without MPI, each would train the whole run."""
        processes = [subprocess.Popen(
            [BALLAST, "train", self.config], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=self.path, env={**self.environment, "RANK": str(rank),
                                           "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                                           "MASTER_ADDR": "127.0.0.1"}) for rank in range(2)]
        texts = [process.communicate(timeout=PATIENCE)[1] for process in processes]
        self.assertEqual([process.returncode for process in processes], [2, 2])
        self.assertIn(f"mpirun -n 2 {BALLAST} train {self.config}", texts[0])
        self.assertEqual(texts[1], "")
        self.assertFalse((self.path / "run").exists())

    def test_a_rank_without_the_mpi_module_is_named(self):
        done = self.train(1, other=({"BALLAST_MPI_MODULE": "/none/ballast_mpi.so"},
                                    ["train", self.config]))
        self.assert_one_error(done, 1, f"rank 1 on {os.uname().nodename}: ", "/none")

    def test_warnings_of_all_ranks_are_printed_once(self):
        (self.path / "lines.jsonl").write_text('{"text": "abc def"}\n' * 400)
        done = self.train(3, "--set", f"data.text={self.path}/lines.jsonl")
        self.assertEqual(done.returncode, 0, done.stderr)
        warnings = [line for line in done.stderr.splitlines()
                    if line.startswith("ballast: warning: ")]
        self.assertEqual(len(warnings), 1, done.stderr)
        self.assertNotIn("warning: rank", warnings[0])

    def test_a_warning_of_one_rank_has_its_number(self):
        done = self.train(1, other=({"BALLAST_IO_FAULTS": "eio:on=read:after=1000000:times=1"},
                                    ["train", self.config]))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr.count("warning: rank 1: aio: injecting faults"), 1,
                         done.stderr)


class Failures(RanksTest):
    def assert_named(self, faults, stage, cause, more=()):
        done = self.train(2, *ENDLESS, *more, other=({"BALLAST_IO_FAULTS": faults},
                                                     ["train", self.config, *ENDLESS, *more]))
        self.assert_one_error(done, 1, f"rank 2 on {os.uname().nodename}: ", stage, cause)

    def test_of_one_rank_in_a_step_end_all(self):
        self.assert_named("enospc:on=write:after=60:times=1", "writeback", "No space left")
        self.assertGreater(len(self.losses()), 0)

    def test_of_one_rank_in_the_first_fill_end_all(self):
        # Moments begin as zeros, which are not written.
        self.assert_named("eio:on=write:times=1", "writeback", "Input/output error",
                          ("--set", "zero_optimization.offload_param.device=nvme"))
        self.assertFalse((self.path / "run/metrics.jsonl").exists())

    def test_of_all_ranks_at_once_are_printed_once(self):
        self.environment["BALLAST_IO_FAULTS"] = "eio:on=read:after=5:times=1"
        self.assert_one_error(self.train(3, *ENDLESS), 1, "rank ", "Input/output error")

    def test_a_stopped_rank_is_detected(self):
        for rank in (0, 2):
            process = self.start(self.command(3, "train", self.config, *ENDLESS, "--set",
                                              "ballast.comm_timeout_seconds=3"))
            self.wait_for_steps(process)
            stopped, = self.processes(rank)
            os.kill(stopped, signal.SIGSTOP)
            done = self.finish(process)  # mpirun kills stopped processes, too
            teller = 1 if rank == 0 else 0
            self.assert_one_error(done, 1, f"rank {teller} on ", "not all ranks took part within 3")

    def test_a_rank_that_is_killed_takes_all_with_it(self):
        # Kills before the first step and in the middle of any step, in each lane.
        dice = random.Random(20260)
        for _ in range(KILLS):
            stage, ranks = dice.randrange(4), dice.choice([2, 3])
            process = self.start(self.command(
                ranks, "train", self.config, *ENDLESS, "--set", f"zero_optimization.stage={stage}",
                "--set", "ballast.comm_timeout_seconds=20"))
            victims = []
            while not victims and process.poll() is None:
                rank = dice.randrange(ranks)
                victims = self.processes(rank)
            time.sleep(dice.uniform(0.0, 2.5))
            started = (self.path / "run/metrics.jsonl").exists()
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            done = self.finish(process, None if started else rank)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("Killed", done.stderr)
            self.assertLessEqual(len(errors_of(done.stderr)), 1, done.stderr)

    def test_an_interrupt_of_the_launcher_ends_all_silently(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.start(self.command(3, "train", self.config, *ENDLESS))
            self.wait_for_steps(process)
            process.send_signal(number)
            done = self.finish(process)
            self.assertNotEqual(done.returncode, 0)
            self.assertEqual(errors_of(done.stderr), [])

    def test_a_signal_to_any_rank_ends_all_with_a_checkpoint_and_the_command(self):
        for ranks, number, settings in (((1,), signal.SIGTERM, ("zero_optimization.stage=1",)),
                                        ((0, 1), signal.SIGHUP, ("zero_optimization.stage=2",))):
            process = self.start(self.command(2, "train", self.config, "--out", "run", "--set",
                                              "ballast.checkpoint_every=100000", *ENDLESS, "--set", *settings,
                                              "--set", "zero_optimization.offload_optimizer.device=cpu"))
            self.wait_for_steps(process)
            for rank in ranks:
                for pid in self.processes(rank):
                    os.kill(pid, number)
            done = self.finish(process)
            self.assertEqual((done.returncode, errors_of(done.stderr)), (runs.RESUMABLE, []))
            command = done.stdout.splitlines()[-1]
            self.assertRegex(command, r"^to continue: mpirun -n 2 \S+ train .* --resume$")
            words = [MPIRUN, *command.removeprefix("to continue: mpirun ").split()]
            last = json.loads((self.path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"]
            done = self.finish(subprocess.Popen(
                [*words, "--steps", str(last + 2)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                cwd=self.path, env=self.environment, start_new_session=True))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"states of step {last} from ", done.stdout)

    def test_an_interrupt_of_every_rank_is_printed_once(self):
        process = self.start(self.command(3, "train", self.config, *ENDLESS))
        self.wait_for_steps(process)
        for rank in (0, 1, 2):
            for pid in self.processes(rank):
                os.kill(pid, signal.SIGINT)
        self.assert_one_error(self.finish(process), 130, "interrupted")


if __name__ == "__main__":
    runs.main_with_ranks(BALLAST, MPIRUN)
