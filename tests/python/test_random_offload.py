"""Random sequences of what users do with an offloaded model, with the plain model as the oracle: weights in host
memory (random_offload.py) and on NVMe (random_homes.py). Needs torch.

BALLAST_TEST_SEQUENCES is their number (2000 after a change of ballast.offload, 1000 after one of homes), and
BALLAST_TEST_SEED the first seed.
"""

import unittest

from support import RandomSequences, needs_torch


@needs_torch
class RandomOffload(RandomSequences, unittest.TestCase):
    program, usual = "random_offload.py", 12


@needs_torch
class RandomHomes(RandomSequences, unittest.TestCase):
    program, usual = "random_homes.py", 8


if __name__ == "__main__":
    unittest.main()
