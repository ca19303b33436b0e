"""Helpers that the tests of the Python package share."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

import ballast

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None

needs_numpy = unittest.skipIf(numpy is None, "numpy is not installed")
needs_torch = unittest.skipIf(torch is None, "torch is not installed")

ROOT = pathlib.Path(__file__).resolve().parents[2]
RATES = ROOT / "configs/rates/h100-node.json"
CONFIG = {
    "model": {"family": "llama", "vocab_size": 256, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
              "num_kv_heads": 2},
    "data": {"text": ["text.txt"], "sequence_length": 32},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}, "sub_group_size": 16384},
    "aio": {"any_file_system": True},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 3,
                "save_weights": False},
}


def same_rules(**settings):
    """Yields the classes of each optimizer that torch has, too, and those settings that it has."""
    for row in ballast._ballast.optimizer_rows().values():
        if row["in_torch"]:
            options = {name: value for name, value in settings.items() if name in row["parameters"]}
            yield getattr(ballast, f"Offload{row['title']}"), getattr(torch.optim, row["title"]), options


class FolderTest(unittest.TestCase):
    """Runs in a temporary folder, on the disk of BALLAST_TEST_FOLDER if that is set."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="ballast-python-",
                                             dir=os.environ.get("BALLAST_TEST_FOLDER"))
        self.addCleanup(folder.cleanup)
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(folder.name)
        self.path = pathlib.Path(folder.name)
        (self.path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)

    def run_python(self, program, *, timeout=60, status=0):
        """Runs a program in another interpreter. Returns its output."""
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True,
                              text=True, timeout=timeout, cwd=self.path, check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout

    def assert_names(self, argument, error, call):
        """Expects that `call` raises `error` with one line that begins with the argument."""
        with self.assertRaises(error) as caught:
            call()
        line = str(caught.exception)
        self.assertTrue(line.startswith(argument), line)
        self.assertNotIn("\n", line)
