#!/usr/bin/env python3
"""Runs the program like a user, with correct and wrong input.

    command_line_test.py PATH_OF_BALLAST

Every mistake must give one clear line on stderr, the exit status of the README (1: the work failed,
2: bad usage or config), and leave nothing behind.
"""

import json
import os
import pathlib
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from one_line import assert_one_line

BALLAST = ""

TINY = {
    "model": {"family": "llama", "vocab_size": 256, "hidden_size": 64, "num_layers": 2,
              "num_heads": 4, "num_kv_heads": 2},
    "data": {"text": ["text.txt"], "sequence_length": 32},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}},
    "aio": {"any_file_system": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 3,
                "out": "run"},
}
TEXT = "the quick brown fox jumps over the lazy dog. " * 400


class CommandLine(unittest.TestCase):
    def setUp(self):
        self._directory = tempfile.TemporaryDirectory(prefix="ballast-e2e-")
        self.addCleanup(self._directory.cleanup)
        self.path = pathlib.Path(self._directory.name)
        (self.path / "text.txt").write_text(TEXT)

    def config(self, **sections):
        """Writes TINY with whole sections merged in; returns its path."""
        config = json.loads(json.dumps(TINY))
        for name, value in sections.items():
            if isinstance(value, dict) and isinstance(config.get(name), dict):
                config[name].update(value)
            else:
                config[name] = value
        file = self.path / "config.json"
        file.write_text(json.dumps(config))
        return file

    def run_ballast(self, *arguments, environment=None, limits=None):
        return subprocess.run(
            [BALLAST, *map(str, arguments)], capture_output=True, text=True, timeout=240,
            cwd=self.path, check=False, env={**os.environ, **(environment or {})},
            preexec_fn=limits)

    def assert_fails(self, done, status, *words):
        """Expects one line on stderr with the usual prefix and `words`, and the exit status."""
        assert_one_line(self, done, status, words, ignored="ballast: warning:")
        self.assert_nothing_left()

    def assert_nothing_left(self):
        """Expects no swap file: the run directory contains only the metrics."""
        for entry in (self.path / "run").glob("**/*"):
            self.assertEqual(entry.name, "metrics.jsonl")

    def train(self, *arguments, environment=None, limits=None, **sections):
        return self.run_ballast("train", self.config(**sections), *arguments,
                                environment=environment, limits=limits)

    # Successful commands.

    def test_training_writes_metrics_and_a_summary(self):
        done = self.train()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        lines = (self.path / "run/metrics.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["step"] for line in lines], [1, 2, 3])
        last = json.loads(lines[-1])
        for field in ("loss", "lr", "grad_norm", "tokens", "step_seconds", "tokens_per_second"):
            self.assertIn(field, last)
        self.assertGreater(last["lanes"]["fetch"]["busy_seconds"], 0)
        self.assertGreater(last["bytes"]["writeback"], 0)
        self.assertGreater(last["peak_bytes"]["nvme"], 0)
        for line in done.stdout.splitlines():
            if not line.startswith(("ballast train ", "metrics in ")):  # these end in a path
                self.assertLessEqual(len(line), 80, line)
        self.assertIn("3/3", done.stdout)
        self.assertIn("held-out loss", done.stdout)
        seconds = sum(json.loads(line)["step_seconds"] for line in lines)
        shown = f"{1e3 * seconds:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"
        self.assertRegex(done.stdout, rf"(?m)^done in \S+ \({shown} of steps\): 3 steps, ")
        self.assertRegex(done.stdout, r"(?m)^last loss \d+\.\d{4}$")
        self.assert_nothing_left()

    def test_the_printed_config_is_itself_a_config_and_a_fixed_point(self):
        first = self.train("--print-config", "--set", "gradient_clipping=0.5")
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertEqual(json.loads(first.stdout)["gradient_clipping"], 0.5)
        printed = self.path / "printed.json"
        printed.write_text(first.stdout)
        second = self.run_ballast("train", printed, "--print-config")
        self.assertEqual(second.stdout, first.stdout)

    def test_every_optimizer_trains(self):
        for kind, params in (("AdamW", {"betas": [0.9, 0.95]}), ("Adam", {"adam_w_mode": False}),
                             ("Adagrad", {"eps": 1e-9}), ("Lion", {"betas": [0.9, 0.98]}),
                             ("sgd", {"momentum": 0.9, "nesterov": True})):
            done = self.train("--overwrite", optimizer={"type": kind, "params": params})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("results differ", done.stdout)

    def test_other_arithmetic_of_the_states_is_said_once_before_the_run(self):
        for states, words in (("8bit", "in 8 bits"), ("bf16_first", "first in bf16")):
            done = self.train("--set", f"ballast.optimizer_states={states}", "--overwrite")
            self.assertEqual(done.returncode, 0, done.stderr)
            plan = done.stdout[:done.stdout.index("1/3")].splitlines()
            said = [line for line in plan if words in line and "results differ" in line]
            self.assertEqual(len(said), 1, done.stdout)
            self.assertLessEqual(len(said[0]), 80)

    def test_same_seed_same_losses_serial_or_lanes(self):
        losses = []
        for arguments in ([], ["--serial"]):
            done = self.train(*arguments, "--overwrite")
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = (self.path / "run/metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line)["loss"] for line in lines])
        self.assertEqual(losses[0], losses[1])

    def test_tokenize_makes_a_token_file_that_trains(self):
        done = self.run_ballast("tokenize", "text.txt", "--out", "text.bin")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.path / "text.bin").stat().st_size, 2 * len(TEXT))
        done = self.train(data={"tokens": ["text.bin"], "text": []})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_version_lists_what_is_built_in(self):
        done = self.run_ballast("--version")
        self.assertEqual(done.returncode, 0)
        for word in ("devices", "communicators", "I/O backends", "instruction sets", "scalar"):
            self.assertIn(word, done.stdout)

    def test_device_auto_says_in_one_line_why_the_host_device_where_cuda_is_built_in(self):
        version = self.run_ballast("--version")
        self.assertEqual(version.stderr, "")
        with_cuda = re.search(r"devices +host, cuda$", version.stdout, re.M) is not None
        done = self.train("--set", "ballast.device=auto")
        self.assertEqual(done.returncode, 0, done.stderr)
        if with_cuda:
            self.assertRegex(done.stderr, re.compile(
                r"\Aballast: device: using the host device; .*cuda.*\n\Z", re.I))
        else:
            self.assertEqual(done.stderr, "")

    # Mistakes in the command line and the config.

    def test_unknown_command(self):
        self.assert_fails(self.run_ballast("trian", "x.json"), 2, "trian", "did you mean 'train'")

    def test_unknown_command_below_another(self):
        self.assert_fails(self.run_ballast("bench", "stp"), 2, "'stp'", "did you mean 'step'")

    def test_config_named_without_a_directory(self):
        self.config()
        done = self.run_ballast("train", "config.json", "--print-config")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_unknown_option(self):
        self.assert_fails(self.train("--stepps", "3"), 2, "stepps")

    def test_number_that_an_option_does_not_take(self):
        config = self.config()
        for arguments, message in (
                (["train", config, "--steps", "0"], "--steps: must be at least 1, got 0"),
                (["train", config, "--steps=-1"], "--steps: must be at least 1, got -1"),
                (["train", config, "--steps", "99999999999999999999"],
                 "--steps: must be at most 1099511627776, got 99999999999999999999"),
                (["train", config, "--steps", "1e3"],
                 "--steps: must be a whole number, got '1e3'"),
                (["train", config, "--steps", ""], "--steps: must be a whole number, got ''"),
                (["bench", "adam", "--threads", "0"], "--threads: must be at least 1, got 0"),
                (["bench", "step", "--kv-heads=-1"], "--kv-heads: must be at least 0, got -1"),
                (["bench", "step", "--kv-heads", "99999999999999999999"],
                 "--kv-heads: must be at most 18446744073709551615, got 99999999999999999999"),
                (["bench", "io", "--seconds", "0"], "--seconds: must be at least 0.01, got 0"),
                (["bench", "io", "--seconds", "nan"],
                 "--seconds: must be a finite number, got 'nan'"),
                (["tune", "io", "--path", ".", "--tflops", "100,0"],
                 "--tflops: must be greater than 0, got 0")):
            with self.subTest(message):
                done = self.run_ballast(*arguments)
                self.assert_fails(done, 2)
                self.assertEqual(done.stderr,
                                 f"ballast: error: {message}; see ballast --help\n")

    def test_empty_path(self):
        for arguments, name in ((["train", ""], "CONFIG"), (["plan", ""], "CONFIG"),
                                (["train", self.config(), "--out", ""], "--out")):
            self.assert_fails(self.run_ballast(*arguments), 2, f"{name}: must not be empty")

    def test_missing_config(self):
        self.assert_fails(self.run_ballast("train", "nowhere.json"), 2, "nowhere.json",
                          "No such file")

    def test_config_that_is_no_json(self):
        file = self.path / "broken.json"
        file.write_text('{\n  "model": {,}\n}\n')
        self.assert_fails(self.run_ballast("train", file), 2, "broken.json", "2")

    def test_unknown_key(self):
        self.assert_fails(self.train(gradient_clipp1ng=1.0), 2, "gradient_clipp1ng",
                          "did you mean 'gradient_clipping'")

    def test_unknown_nested_key(self):
        self.assert_fails(self.train(zero_optimization={"offload_optimzer": {}}), 2,
                          "zero_optimization.offload_optimzer", "did you mean 'offload_optimizer'")

    def test_wrong_type(self):
        self.assert_fails(self.train(train_micro_batch_size_per_gpu="two"), 2,
                          "train_micro_batch_size_per_gpu")

    def test_unknown_optimizer(self):
        self.assert_fails(self.train(optimizer={"type": "Adagard"}), 2, "optimizer.type",
                          "AdamW, Adam, Adagrad, Lion, SGD", "did you mean 'Adagrad'")

    def test_parameter_of_another_optimizer(self):
        self.assert_fails(
            self.train(optimizer={"type": "Lion", "params": {"lr": 1e-4, "eps": 1e-8}}), 2,
            "optimizer.params.eps", "is not a parameter of the optimizer \"Lion\"")

    def test_dampening(self):
        self.assert_fails(
            self.train(optimizer={"type": "SGD", "params": {"momentum": 0.9, "dampening": 0.1}}), 2,
            "optimizer.params.dampening", "must be 0")

    def test_adamw_without_its_mode(self):
        self.assert_fails(self.train(optimizer={"params": {"adam_w_mode": False}}), 2,
                          "optimizer.params.adam_w_mode", "Adam")

    def test_unknown_format_of_optimizer_states(self):
        self.assert_fails(self.train("--set", "ballast.optimizer_states=8bits"), 2,
                          "ballast.optimizer_states", "did you mean '8bit'")

    def test_first_moment_in_bf16_where_there_is_none(self):
        self.assert_fails(
            self.train("--set", "ballast.optimizer_states=bf16_first",
                       optimizer={"type": "Adagrad", "params": {}}), 2,
            "ballast.optimizer_states", "Adagrad", "8bit")

    def test_numa_node_that_is_not_there(self):
        self.assert_fails(self.train("--set", "ballast.update_numa_node=1000"), 2, "NUMA node",
                          "1000")

    def test_batch_sizes_that_do_not_agree(self):
        self.assert_fails(self.train(train_batch_size=5), 2, "train_batch_size")

    def test_no_number_of_steps(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "steps": 0}), 2, "ballast.steps")

    def test_cuda_where_there_is_none(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "device": "cuda"}), 1, "cuda")

    # Budgets.

    def test_device_budget_too_small_names_the_ledger_line(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "device_bytes": "200KiB"}), 1,
                          "device budget", "too small", "'", "ballast.device_bytes")

    def test_host_budget_too_small_names_the_ledger_line(self):
        self.assert_fails(self.train(ballast={**TINY["ballast"], "host_bytes": "100KiB"}), 1,
                          "host budget", "too small", "'", "ballast.host_bytes")

    def test_what_a_refusal_advises_fits(self):
        lowest = {"zero_optimization": {"offload_optimizer": {"device": "nvme"},
                                        "offload_param": {"device": "nvme"}},
                  "ballast": {**TINY["ballast"], "host_bytes": "100KiB"}}
        refused = self.train(**lowest)
        self.assert_fails(refused, 1, "host budget", "it would fit with --set ")
        advice = refused.stderr.strip().split("it would fit with ")[1]
        self.assertNotIn("nvme", advice)
        for way in advice.split(", or with "):
            done = self.train(*way.split(), "--overwrite", **lowest)
            self.assertEqual(done.returncode, 0, done.stderr)

    # Data.

    def test_missing_data_file(self):
        self.assert_fails(self.train(data={"text": ["nothing.txt"]}), 1, "nothing.txt")

    def test_data_file_cut_in_mid_token(self):
        (self.path / "odd.bin").write_bytes(b"\1\0\2")
        self.assert_fails(self.train(data={"tokens": ["odd.bin"], "text": []}), 1, "odd.bin")

    def test_token_id_beyond_the_vocabulary(self):
        (self.path / "big.bin").write_bytes(struct.pack("<2000H", *([5] * 1000 + [300] + [5] * 999)))
        self.assert_fails(
            self.train(data={"tokens": ["big.bin"], "text": [], "held_out": 0, "shuffle": False},
                       ballast={**TINY["ballast"], "steps": 40}), 1, "big.bin", "300", "256")

    def test_sequence_longer_than_the_data(self):
        (self.path / "text.txt").write_text("short")
        self.assert_fails(self.train(), 1, "33")

    def test_held_out_data_too_short_for_an_evaluation(self):
        # An evaluation needs 2 sequences of 32 tokens and 1; a single sequence needs 33.
        for tokens, held, help in ((100, 5, "give more data or "), (600, 30, ", a larger share"),
                                   (1280, 64, ", a larger share"), (1300, 65, None)):
            (self.path / "text.txt").write_text(TEXT[:tokens])
            done = self.train("--overwrite")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("held-out loss" in done.stdout, help is None)
            if help is None:
                self.assertEqual(done.stderr, "")
                continue
            self.assertRegex(done.stderr, r"\Aballast: warning: .*\n\Z")
            for words in ("no held-out loss", f"data.held_out 0.05 of {tokens} tokens is {held},",
                          "needs 65 ", help, "a smaller sequence_length"):
                self.assertIn(words, done.stderr)
        (self.path / "text.txt").write_text(TEXT[:600])
        self.assertEqual(self.train("--overwrite", "--set", "data.held_out=0").stderr, "")

    # Run directories.

    def unnamed(self):
        """TINY without a run directory, and the folder in which a run makes one."""
        self.state = self.path / "state/ballast"
        return {"ballast": {**TINY["ballast"], "out": None},
                "environment": {"XDG_STATE_HOME": str(self.state.parent)}}

    def steps(self, directory):
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def test_runs_of_the_same_second_have_directories_of_their_own(self):
        unnamed = self.unnamed()
        command = [BALLAST, "train", str(self.config(ballast=unnamed["ballast"]))]
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

    # Swap space.

    def offload_to(self, path):
        return {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(path)}}

    def test_swap_path_missing(self):
        self.assert_fails(self.train(zero_optimization=self.offload_to(self.path / "no/where")), 1,
                          "no/where", "No such file")

    def test_swap_path_is_a_file(self):
        self.assert_fails(self.train(zero_optimization=self.offload_to(self.path / "text.txt")), 1,
                          "text.txt", "directory")

    def test_swap_path_not_writable(self):
        self.assert_fails(self.train(zero_optimization=self.offload_to("/proc/self")), 1,
                          "/proc/self")

    def test_swap_file_beyond_the_file_size_limit(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
        self.assert_fails(self.train(limits=limit), 1, "run", "file-size limit")

    def test_swap_disk_full(self):
        disk = self.path / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)],
                                 capture_output=True, check=False)
        if mounted.returncode != 0:
            self.skipTest("may not mount")
        self.addCleanup(subprocess.run, ["umount", str(disk)], check=True)
        done = self.train(zero_optimization=self.offload_to(disk))
        self.assert_fails(done, 1, "disk")
        self.assertEqual(list(disk.iterdir()), [])

    # I/O backends.

    def test_io_uring_denied_falls_back_and_says_why(self):
        environment = {"BALLAST_IO_DISABLE": "io_uring"}
        done = self.run_ballast("-v", "train", self.config(), environment=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("io_uring", done.stderr)
        self.assertIn("NVMe by threads", done.stdout)

    def test_io_uring_denied_by_name_is_an_error(self):
        done = self.train(aio={"backend": "io_uring"},
                          environment={"BALLAST_IO_DISABLE": "io_uring"})
        self.assert_fails(done, 1, "io_uring")

    # Failures of the run itself.

    def test_gradients_that_are_never_finite_stop_the_run(self):
        for limit, words in ((3, "not finite in 3 steps in a row"),
                             (1, "not finite in 1 step in a row")):
            # No loss is a number after the first step.
            done = self.train(
                "--overwrite", "--set", "model.init_stddev=1e30",
                optimizer={"type": "AdamW", "params": {"lr": 1e37}},
                ballast={**TINY["ballast"], "steps": 30, "max_skipped_steps": limit})
            self.assert_fails(done, 1, words, "ballast.max_skipped_steps")
            # The last step is shown and recorded before the error.
            lines = (self.path / "run/metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            self.assertEqual([step["skipped"] for step in steps[-limit - 1:]],
                             [False] + limit * [True])
            self.assertIn(f"error: step {len(steps)}: ", done.stderr)
            self.assertIn(f" {len(steps)}/30 ", done.stdout)
            self.assertIn(" nan ", done.stdout)
            self.assertNotIn("-nan", done.stdout)

    def test_no_skipped_step_allowed_is_said_with_1(self):
        self.assert_fails(self.train("--set", "ballast.max_skipped_steps=0"), 2,
                          "ballast.max_skipped_steps", "must be at least 1, got 0")

    def interrupt(self, *arguments):
        """Starts a long run, sends SIGINT in the middle of a step, returns how it ended."""
        config = self.config(
            model={**TINY["model"], "hidden_size": 256},
            data={"text": ["text.txt"], "sequence_length": 256},
            train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=8,
            ballast={**TINY["ballast"], "steps": 1000, "device_bytes": "1GiB",
                     "host_bytes": "256MiB"})
        process = subprocess.Popen([BALLAST, "train", str(config), *arguments], cwd=self.path,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        metrics = self.path / "run/metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and metrics.stat().st_size > 0:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def test_interrupt_in_mid_step(self):
        self.assert_fails(self.interrupt(), 1, "interrupted")
        for line in (self.path / "run/metrics.jsonl").read_text().splitlines():
            json.loads(line)

    def test_interrupt_in_mid_step_when_serial(self):
        self.assert_fails(self.interrupt("--serial"), 1, "interrupted")

    def test_full_disk_under_the_metrics(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
        done = self.train(zero_optimization={"offload_optimizer": {"device": "none"}}, limits=limit,
                          ballast={**TINY["ballast"], "steps": 30})
        self.assert_fails(done, 1, "metrics.jsonl")


if __name__ == "__main__":
    BALLAST = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
