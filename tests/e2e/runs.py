"""What the tests of `ballast train` share: a tiny config and a directory to run it in."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from one_line import assert_one_line

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
                "out": "run", "save_weights": False},
}
TEXT = "the quick brown fox jumps over the lazy dog. " * 400
RUN_FILES = {"metrics.jsonl", "config.json", "run.json"}


class RunTest(unittest.TestCase):
    ballast = ""

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
            [self.ballast, *map(str, arguments)], capture_output=True, text=True, timeout=240,
            cwd=self.path, check=False, env={**os.environ, **(environment or {})},
            preexec_fn=limits)

    def assert_fails(self, done, status, *words):
        """Expects one line on stderr with the usual prefix and `words`, and the exit status."""
        assert_one_line(self, done, status, words, ignored="ballast: warning:")
        self.assert_nothing_left()

    def assert_nothing_left(self):
        """Expects no swap file: the run directory contains only what a run leaves."""
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


def main():
    """Runs the tests of the calling script, whose first argument is the program."""
    RunTest.ballast = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=1)
