"""Helpers that the tests of the Python package share."""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import traceback
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


def join_ranks(rank, ranks, folder, seconds=None):
    """Makes this process a rank of a group on the loopback interface, whose meeting place is in `folder`.
    `seconds`: until a rank that waits for another gives up; None: PyTorch's."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks,
                                         timeout=timeout)


def run_cases(rank, ranks, folder, cases, seconds):
    """Joins the ranks, calls each of `cases` with rank and folder, and writes its traceback or nothing to
    FOLDER/CASE.RANK. The first that fails ends the process, because the other ranks wait for it."""
    join_ranks(rank, ranks, folder, seconds)
    for case in cases:
        said = ""
        try:
            case(rank, folder)
        except BaseException:
            said = traceback.format_exc()
        pathlib.Path(folder, f"{case.__name__}.{rank}").write_text(said)
        if said:
            return
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class OnRanks:
    """Tests that call functions on two and on three ranks. Subclasses are unittest.TestCases and set `cases`,
    functions of their module, which all ranks call in the same order, and `seconds` as for join_ranks()."""

    def run_on(self, ranks):
        with tempfile.TemporaryDirectory() as folder:
            try:
                torch.multiprocessing.spawn(run_cases, (ranks, folder, self.cases, self.seconds), nprocs=ranks)
            except Exception as error:
                print(error)
            for case in self.cases:
                with self.subTest(case=case.__name__):
                    for rank in range(ranks):
                        file = pathlib.Path(folder, f"{case.__name__}.{rank}")
                        said = file.read_text() if file.exists() else "did not run"
                        self.assertEqual(said, "", f"rank {rank}")

    def test_two_ranks(self):
        self.run_on(2)

    def test_three_ranks(self):
        self.run_on(3)


class RandomSequences:
    """A test that runs a program of random sequences. Subclasses are unittest.TestCases and set `program` and
    `usual`, the number of sequences without BALLAST_TEST_SEQUENCES. BALLAST_TEST_SEED is the first seed."""

    def test_offloaded_models_do_what_plain_ones_do(self):
        count = int(os.environ.get("BALLAST_TEST_SEQUENCES", str(self.usual)))
        first = os.environ.get("BALLAST_TEST_SEED", "0")
        program = pathlib.Path(__file__).resolve().parent / self.program
        done = subprocess.run([sys.executable, program, "--first", first, "--count", str(count)],
                              capture_output=True, text=True, timeout=60 + 10 * count, check=False)
        seeds = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
        self.assertEqual(done.returncode, 0, done.stdout[-6000:] + done.stderr[-3000:])
        self.assertEqual(len(seeds), count)


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
