"""Random sequences of users' actions with torch.optim as the oracle (random_actions.py). Needs torch.

BALLAST_TEST_SEQUENCES is their number (default 30; 2000 after a change of the optimizers), and
BALLAST_TEST_SEED the first seed.
"""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("needs PyTorch")

FOLDER = pathlib.Path(__file__).resolve().parent
PROGRAM = FOLDER / "random_actions.py"
COUNT = int(os.environ.get("BALLAST_TEST_SEQUENCES", "30"))
FIRST = int(os.environ.get("BALLAST_TEST_SEED", "0"))


def run(*words: object, program: pathlib.Path = PROGRAM) -> subprocess.CompletedProcess:
    """Runs in another process, so that a crash is noticed and its sequence can be shortened,
    too."""
    return subprocess.run([sys.executable, program, *map(str, words)], capture_output=True, text=True,
                          timeout=30 + 10 * COUNT, check=False)


def crashes(seed: int, actions: list) -> bool:
    from random_actions import draw

    numbers = [str(draw(seed).index(action)) for action in actions]
    return run("--first", seed, "--keep", ",".join(numbers)).returncode < 0


def shortened_crash(seed: int) -> str:
    from random_actions import describe, draw, shorten

    return describe(seed, shorten(draw(seed), lambda actions: crashes(seed, actions), tries=40))


class RandomActions(unittest.TestCase):
    def test_optimizers_do_what_those_of_torch_do(self) -> None:
        done = run("--first", FIRST, "--count", COUNT)
        seeds = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
        if done.returncode < 0:
            seed = int(seeds[-1].split()[1])
            self.fail(f"{signal.Signals(-done.returncode).name} with seed {seed}\n{done.stderr[-3000:]}\n"
                      f"{shortened_crash(seed)}")
        self.assertEqual(done.returncode, 0, done.stdout[-6000:] + done.stderr[-3000:])
        self.assertEqual(len(seeds), COUNT)

    def test_they_do_on_two_ranks(self) -> None:
        count = COUNT // 10 + 1
        done = run("--first", FIRST, "--count", count, program=FOLDER / "random_ranks.py")
        self.assertEqual(done.returncode, 0, done.stdout[-6000:] + done.stderr[-3000:])
        self.assertEqual(done.stdout.count("seed "), count)


if __name__ == "__main__":
    unittest.main()
