#!/usr/bin/env python3
"""Cuts the power at any moment of runs with checkpoints and resumes from the content of the disk.

    power_cut_test.py PATH_OF_BALLAST PATH_OF_RECORDER

A run is recorded once. For each state of the disk that power_cut.py draws from the log, `--resume`
must start from the newest checkpoint that was complete before the cut, or from the one that was
being written, without a warning, and end with the bits of a run that was not stopped.
"""

import collections
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

import power_cut
import runs

RECORDER = os.path.abspath(sys.argv.pop(2))
# BALLAST_TEST_POWER_CUTS=1000 draws more states, BALLAST_TEST_SEED=7 repeats those of a failure.
STATES = int(os.environ.get("BALLAST_TEST_POWER_CUTS", "20"))
SEED = int(os.environ.get("BALLAST_TEST_SEED", random.randrange(1 << 30)))
SCENARIOS = 4
WORKERS = 3
SAME = ("step", "loss", "lr", "grad_norm", "tokens", "skipped")
BASE = {
    **runs.TINY,
    "model": {**runs.TINY["model"], "hidden_size": 32},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}},
    "ballast": {**runs.TINY["ballast"], "steps": 6, "checkpoint_every": 2, "save_weights": True,
                "out": "place/run", "placement": [{"blocks": 1, "optimizer": "host"}]},
}
# io_uring's writes are not calls of the C library.
ENVIRONMENT = {**os.environ, "BALLAST_IO_DISABLE": "io_uring"}
# name: shares of the unsynced writes and of the unsynced changes of entries that are on the disk
EXTREMES = {"nothing": (0, 0), "all": (1, 1), "data": (1, 0), "entries": (0, 1)}
Moment = collections.namedtuple("Moment", "complete writing")


def moments(records, disk, before=0):
    """For each record, the state when it had ended: the newest complete checkpoint (0: none; its
    writing has returned) and the one that was being written (0: none). `before`: records of a run
    that is overwritten."""
    complete = writing = named = 0
    metrics = None
    for number, record in enumerate(records, 1):
        disk.apply(record)
        if number == before:
            complete = writing = named = 0
        if record.kind == "create" and record.name == "metrics.jsonl":
            metrics = record.inode
        if record.kind == "mkdir" and record.name.startswith(".incomplete-step-"):
            if named == writing:  # published just before the next one
                complete = writing
            writing = int(record.name.removeprefix(".incomplete-step-"))
        if record.kind == "rename" and record.new_name == f"step-{writing}":
            named = writing
        next_row = record.kind == "write" and record.inode == metrics
        if writing and named == writing and (next_row or record.kind == "end"):
            complete, writing = writing, 0
        yield number, Moment(complete, writing)


def steps_of(tree):
    """The steps of the checkpoints in a tree of `place`."""
    names = tree.get("run", {}).get("checkpoints", {})
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


class Scenario:
    """Runs in separate directories. Their output is below `places`, the first of which is
    `place` of the working directory, where the run directory is `place/run`."""

    def __init__(self, test, elsewhere=None, **ballast):
        self.test = test
        self.elsewhere = elsewhere
        config = {**BASE, "ballast": {**BASE["ballast"], **ballast}}
        if elsewhere:
            offload = {"device": "nvme", "nvme_path": elsewhere}
            config = {**config, "zero_optimization": {"stage": 1, "offload_optimizer": offload},
                      "aio": {"buffered": True, "any_file_system": True}}
        self.config = config
        self.record = self.directory("record")
        self.log = self.record / "log"

    def directory(self, name):
        path = self.test.path / name
        (path / "place").mkdir(parents=True)
        (path / "text.txt").write_text(runs.TEXT)
        (path / "config.json").write_text(json.dumps(self.config))
        return path

    def places(self, directory):
        return [directory / "place", *([self.elsewhere] if self.elsewhere else [])]

    def train(self, directory, *arguments, recorded=False):
        environment = dict(ENVIRONMENT)
        if recorded:
            environment |= {"LD_PRELOAD": RECORDER, "BALLAST_TEST_RECORD": str(self.log)}
        return subprocess.run([self.test.ballast, "train", "config.json", *map(str, arguments)],
                              cwd=directory, env=environment, capture_output=True, text=True,
                              timeout=240, check=False)

    def run_recorded(self, *arguments):
        done = self.train(self.record, *arguments, recorded=True)
        self.test.assertEqual(done.returncode, 0, done.stderr)

    def results(self, directory):
        run = directory / "place/run"
        rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
        weights = (run / "weights/model.safetensors").read_bytes()
        return ([{key: row[key] for key in SAME} for row in rows],
                hashlib.sha256(weights).hexdigest())

    def names(self, directory):
        """Covers everything that a run has left."""
        return sorted(str(path.relative_to(place)) for place in self.places(directory)
                      for path in pathlib.Path(place).rglob("*"))

    def check_model(self, records):
        """With everything that is not flushed, the model equals the real content."""
        disk = self.disk()
        for record in records:
            disk.apply(record)
        found = disk.draw(lambda number: number, lambda: True)
        real = [power_cut.read_tree(place) for place in self.places(self.record)]
        self.test.assertTrue(found == real, "the recorder has missed a change")

    def disk(self):
        return power_cut.Disk(self.places(self.record))

    def states(self, records, number, dice, before):
        """Yields `number` times the trees, the moment and a description of a state."""
        writing = [n for n, moment in moments(records, self.disk(), before) if moment.writing]
        anywhere = range(before + 1, len(records) + 1)
        writing = [at for at in writing if at in anywhere]
        cuts = sorted(dice.choice(writing if dice.random() < 0.6 else anywhere)
                      for _ in range(number))
        disk = self.disk()
        for at, moment in moments(records, disk, before):
            for _ in range(cuts.count(at)):
                name = dice.choice([*EXTREMES, *["random"] * 6])
                data, entries = EXTREMES.get(name) or (dice.random(), dice.random())
                def content(versions, share=data):
                    if share in (0, 1):
                        return versions * share
                    return dice.randint(0, versions) if dice.random() < 0.5 else (
                        versions if dice.random() < share else 0)
                trees = disk.draw(content, lambda share=entries: dice.random() < share)
                what = f"cut after {at} of {len(records)} records, {name} unsynced"
                found = steps_of(trees[0])
                if len(found) > 1 and not self.elsewhere and dice.random() < 0.5:
                    # Older checkpoints must be intact, too.
                    for _ in range(dice.randrange(1, len(found))):
                        del trees[0]["run"]["checkpoints"][f"step-{found.pop()}"]
                    left = Moment(found[-1] if moment.complete else 0, 0)
                    yield trees, left, what + f", then only up to step {found[-1]}"
                    continue
                yield trees, moment, what

    def check(self, directory, trees, moment, what, expected, strict):
        places = self.places(directory)
        for place, tree in zip(places, trees):
            self.clear(place, tree)
            power_cut.write_tree(tree, place)
        done = self.train(directory, "--resume")
        test = self.test
        test.found[self.outcome(done)] += 1
        said = f"seed {SEED}: {what}: {moment}: {done.stdout[-300:]}{done.stderr}"
        if not moment.complete and done.returncode == 1:
            test.assertIn("has no complete checkpoint to resume from", done.stderr, said)
            return
        if not strict(moment):
            test.assertIn(done.returncode, (0, 1, 2), said)
            return
        test.assertNotIn("skipped a checkpoint", done.stderr, said)
        test.assertEqual(done.returncode, 0, said)
        allowed = [f"states of step {step} from" for step in moment if step]
        test.assertTrue(any(line in done.stdout for line in allowed), said)
        results, names = expected
        test.assertTrue(self.results(directory) == results, said)
        test.assertEqual(self.names(directory), names, said)

    def clear(self, place, tree):
        """Removes everything except folders of the tree, because a run directory keeps its inode
        when the power is cut, by which its swap files elsewhere know it."""
        for entry in os.scandir(place):
            if not entry.is_dir():
                os.unlink(entry.path)
            elif entry.name in tree:
                self.clear(entry.path, tree[entry.name])
            else:
                shutil.rmtree(entry.path)

    @staticmethod
    def outcome(done):
        if "states of step " in done.stdout:
            return "from step " + done.stdout.split("states of step ")[1].split()[0]
        return "no checkpoint"

    def check_states(self, before=0, strict=lambda moment: True):
        """Draws states from the log. `strict`: whether a moment must lead to the recorded
        results."""
        records = power_cut.read_log(self.log)
        self.check_model(records)
        expected = self.results(self.record), self.names(self.record)
        number = max(1, STATES // SCENARIOS)
        states = self.states(records, number, random.Random(f"{SEED} {self.test.id()}"), before)
        # Names elsewhere are absolute and depend on the run directory.
        directories = [self.record] if self.elsewhere else [
            self.directory(f"resumed-{n}") for n in range(WORKERS)]
        count = len(directories)
        free = collections.deque(directories)
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            running = set()
            def collect(most):
                while len(running) > most:
                    done, _ = concurrent.futures.wait(
                        running, return_when=concurrent.futures.FIRST_COMPLETED)
                    for one in done:
                        running.discard(one)
                        free.append(one.directory)
                        one.result()
            for state in states:
                collect(count - 1)
                directory = free.popleft()
                future = pool.submit(self.check, directory, *state, expected, strict)
                future.directory = directory
                running.add(future)
            collect(0)
        print(f"{self.test.id()}: {len(records)} records, {number} states,"
              f" {dict(sorted(self.test.found.items()))}", file=sys.stderr)


class PowerCutTest(runs.RunTest):
    def setUp(self):
        super().setUp()
        self.found = collections.Counter()

    def test_one_checkpoint_is_kept(self):
        scenario = Scenario(self, checkpoint_keep=1)
        scenario.run_recorded()
        scenario.check_states()

    def test_two_are_kept_and_the_run_was_resumed(self):
        scenario = Scenario(self, checkpoint_keep=2, steps=8)
        scenario.run_recorded("--steps", 4)
        scenario.run_recorded("--resume")
        whole = scenario.directory("whole")
        self.assertEqual(scenario.train(whole).returncode, 0)
        self.assertTrue(scenario.results(whole) == scenario.results(scenario.record))
        scenario.check_states()

    def test_swap_files_are_on_another_file_system(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
            if os.stat(other).st_dev == os.stat(self.path).st_dev:
                self.skipTest("one file system")
            scenario = Scenario(self, elsewhere=other, checkpoint_keep=1)
            scenario.run_recorded()
            scenario.check_states()

    def test_another_run_was_overwritten(self):
        scenario = Scenario(self, checkpoint_keep=2)
        scenario.run_recorded("--set", "optimizer.params.lr=2e-3", "--steps", 8)
        before = len(power_cut.read_log(scenario.log))
        scenario.run_recorded("--overwrite")
        scenario.check_states(before, lambda moment: moment.complete)


if __name__ == "__main__":
    runs.main()
