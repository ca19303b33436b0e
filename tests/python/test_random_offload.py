"""Random sequences of what users do with an offloaded model, with the plain model as the oracle
(random_offload.py). Needs torch.

BALLAST_TEST_SEQUENCES is their number (default 12; 2000 after a change of ballast.offload), and
BALLAST_TEST_SEED the first seed.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("needs PyTorch")

PROGRAM = pathlib.Path(__file__).resolve().parent / "random_offload.py"
COUNT = int(os.environ.get("BALLAST_TEST_SEQUENCES", "12"))
FIRST = int(os.environ.get("BALLAST_TEST_SEED", "0"))


class RandomOffload(unittest.TestCase):
    def test_offloaded_models_do_what_plain_ones_do(self):
        done = subprocess.run([sys.executable, PROGRAM, "--first", str(FIRST), "--count", str(COUNT)],
                              capture_output=True, text=True, timeout=60 + 10 * COUNT, check=False)
        seeds = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
        self.assertEqual(done.returncode, 0, done.stdout[-6000:] + done.stderr[-3000:])
        self.assertEqual(len(seeds), COUNT)


if __name__ == "__main__":
    unittest.main()
