"""Runs each program of the documentation as its user would. Needs torch."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("needs PyTorch")

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"


def run(name: str, *arguments: str) -> str:
    result = subprocess.run([sys.executable, PROGRAMS / name, *arguments], capture_output=True,
                            text=True, timeout=600, check=False)
    if result.returncode != 0:
        raise AssertionError(f"{name}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


class Programs(unittest.TestCase):
    def test_plain_loop(self) -> None:
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run("plain_loop.py"))]
        self.assertLess(losses[-1], losses[0] - 1)

    @unittest.skipIf(importlib.util.find_spec("transformers") is None, "needs transformers")
    @unittest.skipIf(importlib.util.find_spec("accelerate") is None, "needs accelerate")
    def test_trainer(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            before, after = re.findall(r"loss (\S+) -> (\S+)", run("trainer.py", folder))[0]
        self.assertLess(float(after), float(before) - 0.5)

    def test_a_killed_fine_tuning_continues_with_the_same_bits(self) -> None:
        here = pathlib.Path(__file__).parent  # on a disk, for direct I/O
        with tempfile.TemporaryDirectory(dir=here) as whole, \
                tempfile.TemporaryDirectory(dir=here) as killed:
            expected = run("nvme_finetune.py", whole, "24").splitlines()
            first = subprocess.Popen([sys.executable, PROGRAMS / "nvme_finetune.py", killed, "1000"],
                                     stdout=subprocess.PIPE, text=True)
            with first:
                for line in first.stdout:
                    if line.startswith("step 13:"):
                        first.kill()
                        break
            resumed = run("nvme_finetune.py", killed, "24").splitlines()
        self.assertEqual(resumed, expected[10:])


if __name__ == "__main__":
    unittest.main()
