"""Helpers that the tests of `ballast train` share: a tiny config and a directory to run it in."""

import hashlib
import json
import os
import pathlib
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from one_line import assert_one_line

TINY = {
    "model": {"family": "llama", "vocab_size": 256, "hidden_size": 64, "num_layers": 2,
              "num_heads": 4, "num_kv_heads": 2},
    "data": {"text": ["text.txt"], "sequence_length": 32},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"},
                          "sub_group_size": 16384},
    "aio": {"any_file_system": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 3,
                "out": "run", "save_weights": False},
}
TEXT = "the quick brown fox jumps over the lazy dog. " * 400
RUN_FILES = {"metrics.jsonl", "config.json", "run.json"}
RESUMABLE = 75  # status of a run that a signal has ended after a checkpoint


def without_notice(errors):
    """The lines of a run on stderr, except the one about its first signal."""
    return re.sub(r"(?m)^ballast: SIG(INT|TERM|HUP): the run ends .*; a second signal after 2 seconds "
                  r"ends it at once\n", "", errors)


class RunTest(unittest.TestCase):
    ballast = ""

    def setUp(self):
        self._directory = tempfile.TemporaryDirectory(prefix="ballast-e2e-")
        self.addCleanup(self._directory.cleanup)
        self.path = pathlib.Path(self._directory.name)
        (self.path / "text.txt").write_text(TEXT)

    def config(self, **sections):
        """Writes TINY with whole sections merged in. Returns its path."""
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
            [self.ballast, *map(str, arguments)], capture_output=True, text=True, timeout=240,
            cwd=self.path, check=False, env={**os.environ, **(environment or {})},
            preexec_fn=limits)

    def assert_fails(self, done, status, *words):
        """Expects one line on stderr with the usual prefix and `words`, and the exit status."""
        assert_one_line(self, done, status, words, ignored="ballast: warning:")
        self.assert_nothing_left()

    def assert_nothing_left(self):
        """Expects no swap file: the run directory contains only the files of a run."""
        for entry in (self.path / "run").glob("**/*"):
            self.assertIn(entry.name, RUN_FILES)

    def train(self, *arguments, environment=None, limits=None, **sections):
        return self.run_ballast("train", self.config(**sections), *arguments,
                                environment=environment, limits=limits)

    def rows(self, out="run"):
        lines = (self.path / out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def steps(self, out="run"):
        return [row["step"] for row in self.rows(out)]


class CheckpointTest(RunTest):
    """Runs with checkpoints. Their losses and weights are compared bit by bit."""

    STEPS = 20
    BALLAST = {**TINY["ballast"], "steps": STEPS, "checkpoint_every": 2, "save_weights": True,
               # Some blocks are written during the next steps, others are not copied.
               "placement": [{"blocks": 1, "optimizer": "host"}]}
    SAME = ("step", "loss", "lr", "grad_norm", "tokens", "skipped", "eval_loss")

    def results(self, out="run"):
        rows = [{key: row.get(key) for key in self.SAME} for row in self.rows(out)]
        [file] = (self.path / out / "weights").glob("*.safetensors")
        weights = file.read_bytes()
        return rows, hashlib.sha256(weights).hexdigest()  # a difference would be very long

    def reference(self, **sections):
        done = self.train("--out", "reference", **{"ballast": self.BALLAST, **sections})
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.results("reference")

    def checkpoints(self, out="run"):
        return sorted(entry.name for entry in (self.path / out / "checkpoints").glob("*"))

    def part_of_run(self, *arguments, steps=10, **sections):
        """The first steps of a run that the other calls resume."""
        done = self.train("--steps", steps, *arguments, **{"ballast": self.BALLAST, **sections})
        self.assertEqual(done.returncode, 0, done.stderr)

    def resume(self, *arguments, **sections):
        return self.train("--resume", *arguments, **{"ballast": self.BALLAST, **sections})

    def start(self, *arguments):
        process = subprocess.Popen([self.ballast, "train", "config.json", *arguments], cwd=self.path,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process):
        if process.poll() is None:
            process.kill()
            process.communicate()

    def wait_for_row(self, process, rows):
        metrics = self.path / "run/metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= rows:
                return
            time.sleep(0.005)

    def go_on_with(self, line):
        """Runs the command at the end of `line`."""
        return subprocess.run(shlex.split(line.split(": ")[-1]), cwd=self.path, capture_output=True,
                              text=True, timeout=240, check=False)


def write_file(path, tensors, metadata=None):
    """Writes a safetensors file. `tensors`: name to type, shape and bytes. Metadata are those of
    weights unless others are given."""
    header, data = {"__metadata__": metadata or {"format": "pt"}}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


SKIPPED = 77  # exit status of a test program that meson shows as skipped


def main_with_ranks(ballast, mpirun):
    """Runs the tests of the calling script, whose first two arguments are the program and mpirun."""
    version = subprocess.run([ballast, "--version"], capture_output=True, text=True, check=True)
    if not mpirun or "self, mpi" not in version.stdout:
        print("skipped: there is no mpirun, or ballast was built without MPI")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])


def main():
    """Runs the tests of the calling script, whose first argument is the program."""
    RunTest.ballast = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
