"""Random sequences of what users do with an offloaded model on NVMe, with the plain model as the oracle
(random_homes.py). Needs torch.

BALLAST_TEST_SEQUENCES is their number (default 8; 1000 after a change of homes), and BALLAST_TEST_SEED the first
seed.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("needs PyTorch")

PROGRAM = pathlib.Path(__file__).resolve().parent / "random_homes.py"
COUNT = int(os.environ.get("BALLAST_TEST_SEQUENCES", "8"))
FIRST = int(os.environ.get("BALLAST_TEST_SEED", "0"))


class RandomHomes(unittest.TestCase):
    def test_models_on_nvme_do_what_plain_ones_do(self):
        done = subprocess.run([sys.executable, PROGRAM, "--first", str(FIRST), "--count", str(COUNT)],
                              capture_output=True, text=True, timeout=60 + 10 * COUNT, check=False)
        seeds = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
        self.assertEqual(done.returncode, 0, done.stdout[-6000:] + done.stderr[-3000:])
        self.assertEqual(len(seeds), COUNT)


if __name__ == "__main__":
    unittest.main()
