#!/usr/bin/env python3
"""Copies, moves, deletes and continues runs whose states are in swap files, on one and on two file
systems, and kills some of them.

    copied_runs_test.py PATH_OF_BALLAST

After each action, the checkpoints of all other runs must be intact. All runs train the same, so a
checkpoint of step N has the same hash in all of them.
"""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from one_line import assert_one_line
import runs

# BALLAST_TEST_COPIES=500 draws more sequences, BALLAST_TEST_SEED=7 repeats those of a failure.
SEQUENCES = int(os.environ.get("BALLAST_TEST_COPIES", "2"))
SEED = int(os.environ.get("BALLAST_TEST_SEED", random.randrange(1 << 30)))
ACTIONS = 7
MOST_RUNS = 5
EVERY = 2
KEEP = 2
LAST = 100000
OTHER = pathlib.Path("/dev/shm")


class CopyTest(unittest.TestCase):
    ballast = ""

    def setUp(self):
        self.places = []
        for parent in (None, OTHER):
            if parent is not None and not os.access(parent, os.W_OK):
                continue
            directory = tempfile.TemporaryDirectory(prefix="ballast-copies-", dir=parent)
            self.addCleanup(directory.cleanup)
            self.places.append(pathlib.Path(directory.name))
        self.path = self.places[0]
        for place in self.places:
            (place / "text.txt").write_text(runs.TEXT)
            (place / "swap").mkdir()
        self.has_two = len({os.stat(place).st_dev for place in self.places}) == 2
        self.known = {}  # hash by step
        self.number = 0

    def config(self, swap):
        """Writes a config. `swap`: number of the place with its swap files; None: in the run."""
        offload = {"device": "nvme"}
        if swap is not None:
            offload["nvme_path"] = str(self.places[swap] / "swap")
        config = {**runs.TINY,
                  "model": {**runs.TINY["model"], "hidden_size": 32, "num_layers": 1},
                  "data": {"text": [str(self.path / "text.txt")], "sequence_length": 32},
                  "zero_optimization": {"stage": 1, "offload_optimizer": offload},
                  "aio": {"buffered": True, "any_file_system": True},
                  "gradient_accumulation_steps": 1,
                  "ballast": {**runs.TINY["ballast"], "checkpoint_every": EVERY,
                              "checkpoint_keep": KEEP}}
        file = self.path / f"config-{swap}.json"
        file.write_text(json.dumps(config))
        return file

    def call(self, *arguments):
        return subprocess.run([self.ballast, *map(str, arguments)], cwd=self.path,
                              capture_output=True, text=True, timeout=240, check=False)

    def well(self, *arguments):
        done = self.call(*arguments)
        self.assertEqual(done.returncode, 0, f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def train(self, out, swap, steps, *arguments):
        return self.well("train", self.config(swap), "--out", out, "--steps", steps, *arguments)

    def hashes(self, run):
        """The intact checkpoints of a run: hash by step."""
        done = self.call("inspect", run, "--hash", "--json")
        if not done.stdout.startswith("{"):
            return {}
        found = json.loads(done.stdout)
        return {one["step"]: one["xxh3"] for one in found.get("checkpoints", [])
                if "xxh3" in one}

    def steps(self, run):
        return sorted((int(folder.name.removeprefix("step-"))
                       for folder in (run / "checkpoints").glob("step-*")), reverse=True)

    def swap_files(self, run, step):
        ranges = json.loads((run / f"checkpoints/step-{step}/rank-0.json").read_text())
        return [pathlib.Path(file) for file in ranges["content"]["swap"]["files"]]

    def listed(self, place, *arguments):
        done = self.well("inspect", "--swap", place / "swap", "--json", *arguments)
        return json.loads(done.stdout)

    def fails(self, words, *arguments):
        self.one_line(self.call(*arguments), words)

    def one_line(self, done, words):
        self.assertIn(done.returncode, (1, 2), done.stderr)
        assert_one_line(self, done, done.returncode, words, ignored="ballast: warning:")


class KnownCasesTest(CopyTest):
    """The cases that lost data, one by one."""

    def setUp(self):
        super().setUp()
        if not self.has_two:
            self.skipTest(f"{OTHER} is not another file system that can be written to")
        self.run_a = self.path / "a"
        self.run_b = self.path / "b"

    def copy(self, source, to, *options):
        subprocess.run(["cp", *(options or ("-a",)), source, to], check=True)

    def test_a_copy_does_not_touch_the_original(self):
        for way in ("--resume", "--overwrite"):
            with self.subTest(way=way):
                shutil.rmtree(self.run_a, ignore_errors=True)
                shutil.rmtree(self.run_b, ignore_errors=True)
                self.train(self.run_a, 1, 4)
                before = self.hashes(self.run_a)
                self.assertEqual(sorted(before), [2, 4])
                self.copy(self.run_a, self.run_b)
                done = self.train(self.run_b, 1, 8, way)
                self.assertEqual(self.hashes(self.run_a), before)
                self.assertEqual(sorted(self.hashes(self.run_b)), [6, 8])
                if way == "--resume":
                    self.assertIn(f"they are in swap files of the run {self.run_a}", done.stderr)
                # The original still continues in its own files.
                done = self.train(self.run_a, 1, 8, "--resume")
                self.assertNotIn("copied to new swap files", done.stderr)
                self.assertEqual(self.hashes(self.run_a), self.hashes(self.run_b))

    def test_a_renamed_run_stays_the_owner(self):
        self.train(self.run_a, 1, 4)
        moved = self.path / "c"
        self.run_a.rename(moved)
        self.copy(moved, self.run_a)  # has the former name of the owner
        before = self.hashes(moved)
        self.train(self.run_a, 1, 8, "--resume")
        self.assertEqual(self.hashes(moved), before)
        done = self.train(moved, 1, 8, "--resume")
        self.assertNotIn("copied to new swap files", done.stderr)
        self.assertEqual(self.hashes(moved), self.hashes(self.run_a))
        self.assertEqual({file["run"] for file in self.listed(self.places[1])["files"]},
                         {str(moved), str(self.run_a)})

    def test_a_run_continues_on_another_file_system(self):
        self.train(self.run_a, 1, 4)
        before = self.hashes(self.run_a)
        moved = self.places[1] / "c"
        subprocess.run(["mv", self.run_a, moved], check=True)
        self.assertEqual(self.listed(self.places[1], "--remove")["removed"], [])
        self.assertEqual(self.hashes(moved), before)
        self.train(moved, 1, 8, "--resume")
        self.assertEqual(sorted(self.hashes(moved)), [6, 8])
        self.assertTrue(self.listed(self.places[1], "--remove")["removed"])
        self.assertEqual(self.listed(self.places[1])["files"], [])  # they are in the run now
        self.assertEqual(sorted(self.hashes(moved)), [6, 8])

    def test_hard_links_of_a_copy(self):
        for swap in (None, 0):
            with self.subTest(swap=swap):
                shutil.rmtree(self.run_a, ignore_errors=True)
                shutil.rmtree(self.run_b, ignore_errors=True)
                self.train(self.run_a, swap, 4)
                before = self.hashes(self.run_a)
                rows = (self.run_a / "metrics.jsonl").read_text()
                self.copy(self.run_a, self.run_b, "-al")
                self.train(self.run_b, swap, 8, "--resume")
                self.assertEqual(self.hashes(self.run_a), before)
                self.assertEqual((self.run_a / "metrics.jsonl").read_text(), rows)
                after = self.hashes(self.run_b)
                self.train(self.run_a, swap, 8, "--resume")
                self.assertEqual(self.hashes(self.run_b), after)
                self.assertEqual(self.hashes(self.run_a), after)

    def test_symbolic_links_of_a_copy(self):
        self.train(self.run_a, None, 4)
        before = self.hashes(self.run_a)
        rows = (self.run_a / "metrics.jsonl").read_text()
        self.copy(self.run_a, self.run_b, "-as")
        self.train(self.run_b, None, 8, "--resume")
        self.assertEqual(self.hashes(self.run_a), before)
        self.assertEqual((self.run_a / "metrics.jsonl").read_text(), rows)

    def test_monitor_files_outside_of_the_run(self):
        logs = self.path / "logs"
        monitor = ["--set", "csv_monitor.enabled=true", "--set", f"csv_monitor.output_path={logs}",
                   "--set", "csv_monitor.job_name=one"]
        self.train(self.run_a, None, 4, *monitor)
        self.copy(self.run_a, self.run_b)
        self.train(self.run_a, None, 8, "--resume", *monitor)
        before = {file: file.read_text() for file in logs.glob("one/*.csv")}
        self.assertTrue(before)
        self.fails([f"{logs}/one has the files of the run {self.run_a}", "csv_monitor.job_name"],
                   "train", self.config(None), "--out", self.run_b, "--resume", "--steps", 8,
                   *monitor)
        self.assertEqual({file: file.read_text() for file in logs.glob("one/*.csv")}, before)
        self.train(self.run_b, None, 8, "--resume", *monitor, "--set", "csv_monitor.job_name=two")

    def test_a_copied_link_to_the_folder_of_checkpoints(self):
        self.train(self.run_a, None, 4)
        elsewhere = self.path / "elsewhere"
        (self.run_a / "checkpoints").rename(elsewhere)
        (self.run_a / "checkpoints").symlink_to(elsewhere)
        before = self.hashes(self.run_a)
        self.copy(self.run_a, self.run_b)
        self.fails(["is a symbolic link to", "cp -a"],
                   "train", self.config(None), "--out", self.run_b, "--resume", "--steps", 8)
        self.assertEqual(self.hashes(self.run_a), before)
        self.train(self.run_a, None, 8, "--resume")
        self.assertEqual(sorted(self.hashes(self.run_a)), [6, 8])

    def test_another_file_system_for_swap_files(self):
        self.train(self.run_a, 1, 4)
        done = self.train(self.run_a, 0, 8, "--resume")
        self.assertIn("nvme_path or ballast.checkpoint_keep differ", done.stderr)
        self.assertEqual([file.name for file in self.swap_files(self.run_a, 8)], ["rank-0.swap-0"])
        self.assertEqual(self.listed(self.places[1])["files"], [])

    def test_a_copy_of_changed_states_is_refused_with_the_way_out(self):
        self.train(self.run_a, 1, 4)
        self.copy(self.run_a, self.run_b)
        self.train(self.run_a, 1, 12, "--resume")
        self.fails([f"{self.run_b} is a copy of the run {self.run_a}", "export", "--states"],
                   "train", self.config(1), "--out", self.run_b, "--resume", "--steps", 12)

    def test_a_damaged_record_removes_nothing(self):
        self.train(self.run_a, 1, 4)
        self.copy(self.run_a, self.run_b)
        before = self.hashes(self.run_a)
        [record] = (self.places[1] / "swap").glob("*.json")
        record.write_text("{}")
        self.train(self.run_b, 1, 8, "--resume")
        self.assertEqual(self.hashes(self.run_a), before)
        names = {self.swap_files(self.run_a, step)[0] for step in (2, 4)}
        shutil.rmtree(self.run_a)
        states = {pathlib.Path(file["path"]): file["state"]
                  for file in self.listed(self.places[1], "--remove")["files"]}
        self.assertEqual({states[name] for name in names}, {"unknown"})


class ListTest(CopyTest):
    """ballast inspect --swap."""

    def setUp(self):
        super().setUp()
        if not self.has_two:
            self.skipTest(f"{OTHER} is not another file system that can be written to")
        self.swap = self.places[1] / "swap"

    def states(self, *arguments):
        return [file["state"] for file in self.listed(self.places[1], *arguments)["files"]]

    def test_files_of_deleted_runs(self):
        for name in ("a", "b"):
            self.train(self.path / name, 1, 4)
        before = self.hashes(self.path / "b")
        self.assertEqual(self.states(), ["kept"] * 4)
        self.assertEqual(self.listed(self.places[1], "--remove")["removed_bytes"], 0)
        shutil.rmtree(self.path / "a")
        listed = self.listed(self.places[1])
        self.assertEqual(sorted(file["state"] for file in listed["files"]),
                         ["kept"] * 2 + ["unowned"] * 2)
        unowned = [file for file in listed["files"] if file["state"] == "unowned"]
        self.assertEqual({file["run"] for file in unowned}, {str(self.path / "a")})
        size = pathlib.Path(unowned[0]["path"]).stat().st_size
        self.assertEqual(listed["unowned_bytes"], size)  # two names of one file
        done = self.well("inspect", "--swap", self.swap)
        self.assertIn(f"its run {self.path / 'a'} does not exist", done.stdout)
        self.assertIn("--remove removes them", done.stdout)
        done = self.well("inspect", self.swap, "--swap", "--remove")
        self.assertIn("removed 2 files", done.stdout)
        self.assertEqual(self.states(), ["kept"] * 2)
        self.assertEqual(len(list(self.swap.glob("*.json"))), 1)
        self.assertEqual(self.hashes(self.path / "b"), before)

    def test_a_copy_and_a_process_keep_their_files(self):
        run_a, run_b = self.path / "a", self.path / "deep/below/b"
        self.train(run_a, 1, 4)
        run_b.parent.mkdir(parents=True)
        subprocess.run(["cp", "-a", run_a, run_b], check=True)
        before = self.hashes(run_b)
        shutil.rmtree(run_a)
        self.assertEqual(self.states("--remove"), ["kept"] * 2)
        self.assertEqual(self.hashes(run_b), before)
        process = subprocess.Popen([self.ballast, "train", self.config(1), "--out", run_b,
                                    "--resume", "--steps", str(LAST)], cwd=self.path,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while process.poll() is None and "in use" not in self.states():
                time.sleep(0.02)
            self.assertIsNone(process.poll())
            shutil.rmtree(run_b / "checkpoints", ignore_errors=True)
            self.assertNotIn("unowned", [file["state"] for file in self.listed(
                self.places[1], "--remove")["files"] if str(run_b) == file["run"]])
            self.assertIsNone(process.poll())
        finally:
            process.kill()
            process.wait()

    def test_names_that_a_killed_process_has_left(self):
        run = self.path / "a"
        self.train(run, 1, 4)
        left = self.swap / self.swap_files(run, 4)[0].name.replace("step-4", "step-3")
        left.write_bytes(b"left")
        self.assertEqual(self.states(), ["leftover", "kept", "kept"][1:2] + ["leftover", "kept"])
        self.train(run, 1, 6, "--resume")
        self.assertFalse(left.exists())

    def test_mistakes(self):
        self.fails(["--swap"], "inspect", self.swap, "--remove")
        self.fails(["no such file or folder"], "inspect", "--swap", self.path / "nothing")


class Run:
    """A run directory in the random test."""

    def __init__(self, path, swap):
        self.path = path
        self.swap = swap
        self.hashes = {}


class RandomTest(CopyTest):
    """Sequences of actions. States that a copy borrows from the original may be lost only when the
    original continues."""

    def test_sequences(self):
        dice = random.Random(SEED)
        for number in range(SEQUENCES):
            seed = dice.randrange(1 << 30)
            with self.subTest(sequence=number, seed=seed, BALLAST_TEST_SEED=SEED):
                self.sequence(random.Random(seed))

    def sequence(self, dice):
        self.dice = dice
        self.runs = []
        self.story = []
        try:
            self.act("start")
            for _ in range(ACTIONS):
                self.act(dice.choice(["start", "copy", "copy", "move", "delete", "resume", "resume",
                                      "resume", "overwrite", "go_back", "kill", "kill",
                                      "copy_while_training", "remove_unowned"]))
        except AssertionError as error:
            raise AssertionError(f"{error}\nafter {self.story}") from error
        finally:
            for run in self.runs:
                shutil.rmtree(run.path)
            for place in self.places:
                for file in (place / "swap").iterdir():
                    file.unlink()

    def act(self, name):
        if name != "start" and not self.runs:
            return
        if name in ("start", "copy", "copy_while_training") and len(self.runs) >= MOST_RUNS:
            name = "delete"
        run = self.dice.choice(self.runs) if self.runs else None
        self.story.append(f"{name} {run.path.name if run and name != 'start' else ''}")
        getattr(self, name)(run)
        self.check()

    def check(self):
        """Compares the checkpoints of all runs with what they were."""
        for run in self.runs:
            found = self.hashes(run.path)
            for step, value in found.items():
                self.assertEqual(self.known.setdefault(step, value), value, f"{run.path}: {step}")
            for step in run.hashes:
                self.assertIn(step, found, f"{run.path} has lost step {step}")
            run.hashes = found

    def new_path(self):
        self.number += 1
        place = self.dice.choice(self.places)
        return place / f"run-{self.number}"

    def swap_of(self):
        return self.dice.choice([None, *range(len(self.places))])

    def acts(self, run):
        """The run changes its files: its checkpoints, and those that other runs borrow from it.
        Forgets what may be lost."""
        run.hashes = {}
        own = self.own_names(run)
        for other in self.runs:
            if other is run:
                continue
            for step in list(other.hashes):
                if any(str(file).startswith("/") and file.name.split("-step-")[0] in own
                       for file in self.swap_files(other.path, step)):
                    del other.hashes[step]

    def own_names(self, run):
        """The beginnings of the names of swap files that belong to the directory of a run."""
        status = os.stat(run.path)
        own = set()
        for place in self.places:
            for record in (place / "swap").glob("ballast-run-*.json"):
                facts = json.loads(record.read_text())["content"]["run"]
                if (facts["device"], facts["inode"]) == (status.st_dev, status.st_ino):
                    own.add(record.stem)
        return own

    def start(self, _):
        run = Run(self.new_path(), self.swap_of())
        self.train(run.path, run.swap, 2 * self.dice.randint(1, 3))
        self.runs.append(run)

    def copy(self, run):
        path = self.new_path()
        ways = [["cp", "-a"], ["cp", "-r"], ["cp", "-a", "--reflink=auto"]]
        if os.stat(path.parent).st_dev == os.stat(run.path).st_dev:
            ways += [["cp", "-al"], ["cp", "-al"]]
        way = self.dice.choice(ways)
        self.story.append(" ".join(way))
        subprocess.run([*way, run.path, path], check=True)
        new = Run(path, run.swap)
        self.runs.append(new)
        new.hashes = dict(run.hashes)

    def copy_while_training(self, run):
        process = self.training(run)
        path = self.new_path()
        self.wait_a_moment()
        subprocess.run(["cp", "-a", run.path, path], check=False, capture_output=True)
        if self.dice.random() < 0.5:
            process.kill()
        else:
            process.terminate()
        process.wait()
        self.runs.append(Run(path, run.swap))  # perhaps without a whole checkpoint

    def move(self, run):
        path = self.new_path()
        subprocess.run(["mv", run.path, path], check=True)
        self.story.append(f"to {path}")
        run.path = path

    def delete(self, run):
        self.runs.remove(run)
        shutil.rmtree(run.path)

    def steps_to(self, run):
        newest = max(self.hashes(run.path), default=0)
        return newest + self.dice.randint(1, 5)

    def perhaps_other_swap(self, run):
        if self.dice.random() < 0.2:
            run.swap = self.swap_of()

    def resume(self, run):
        intact = self.hashes(run.path)
        steps = self.steps_to(run)
        self.perhaps_other_swap(run)
        self.acts(run)
        arguments = ["train", self.config(run.swap), "--out", run.path, "--steps", steps,
                     "--resume"]
        done = self.call(*arguments)
        if intact:
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(self.hashes(run.path), f"{done.stderr}")
        elif done.returncode != 0:  # perhaps after a line about a link
            self.assertIn(done.returncode, (1, 2), done.stderr)
            self.assertEqual(done.stderr.count("ballast: error: "), 1, done.stderr)

    def overwrite(self, run):
        self.acts(run)
        self.perhaps_other_swap(run)
        done = self.call("train", self.config(run.swap), "--out", run.path, "--steps",
                         2 * self.dice.randint(1, 2), "--overwrite")
        if done.returncode == 0:
            self.assertTrue(self.hashes(run.path))

    def go_back(self, run):
        intact = self.hashes(run.path)
        if not intact:
            return
        step = self.dice.choice(sorted(intact))
        self.acts(run)
        self.train(run.path, run.swap, step + self.dice.randint(1, 3),
                   f"--resume={run.path}/checkpoints/step-{step}")

    def training(self, run):
        self.acts(run)
        return subprocess.Popen([self.ballast, "train", self.config(run.swap), "--out", run.path,
                                 "--steps", str(LAST), "--resume"], cwd=self.path,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait_a_moment(self):
        time.sleep(self.dice.random() ** 2 * 0.5)

    def kill(self, run):
        intact = self.hashes(run.path)
        process = self.training(run)
        self.wait_a_moment()
        process.kill()
        process.wait()
        if intact:
            self.assertTrue(self.hashes(run.path), f"{run.path} has lost all checkpoints")

    def remove_unowned(self, _):
        for place in self.places:
            self.listed(place, "--remove")


if __name__ == "__main__":
    CopyTest.ballast = os.path.abspath(sys.argv.pop(1))
    unittest.main()
