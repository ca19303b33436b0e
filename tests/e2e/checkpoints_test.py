#!/usr/bin/env python3
"""Checkpoints on the command line: inspect, export --states and --resume=DIR.

    checkpoints_test.py PATH_OF_BALLAST [PATH_OF_MPIRUN]
"""

import hashlib
import json
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

import runs
from one_line import assert_one_line

MPIRUN = sys.argv.pop(2) if len(sys.argv) > 2 and not sys.argv[2].startswith("-") else ""
STEPS = 8
BALLAST = {**runs.TINY["ballast"], "steps": STEPS, "checkpoint_every": 2, "save_weights": True,
           "out": "reference"}
SAME = ("step", "loss", "lr", "grad_norm", "tokens", "skipped", "eval_loss")


class CheckpointsTest(runs.RunTest):
    kept = None  # made by the first test: a finished run, and the first 4 steps of one

    def setUp(self):
        super().setUp()
        self.config(ballast=BALLAST)
        if not CheckpointsTest.kept:
            CheckpointsTest.kept = tempfile.TemporaryDirectory(prefix="ballast-e2e-")
            for name, steps in (("reference", STEPS), ("run", 4)):
                self.well("train", "config.json", "--out",
                          pathlib.Path(CheckpointsTest.kept.name) / name, "--steps", steps)
        self.copy("reference")

    def copy(self, name):
        """Copies one of these runs to the directory of the test."""
        shutil.copytree(pathlib.Path(CheckpointsTest.kept.name) / name, self.path / name)

    def well(self, *arguments):
        done = self.run_ballast(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def fails(self, status, words, *arguments):
        """Returns the output of an earlier call."""
        done = self.run_ballast(*arguments)
        assert_one_line(self, done, status, words)
        return done.stdout

    def listed(self, path, *arguments):
        return json.loads(self.well("inspect", path, "--json", *arguments))

    def results(self, out):
        """Results of the steps after the fourth."""
        rows = [{key: row.get(key) for key in SAME} for row in self.rows(out) if row["step"] > 4]
        weights = (self.path / out / "weights/model.safetensors").read_bytes()
        return rows, hashlib.sha256(weights).hexdigest()

    def checkpoints(self, out):
        return sorted(entry.name for entry in (self.path / out / "checkpoints").iterdir())

    def damage(self, name, at):
        file = self.path / name
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    def test_inspect_describes_a_checkpoint(self):
        folder = self.path / "reference/checkpoints/step-8"
        out = self.well("inspect", "reference/checkpoints/step-8").splitlines()
        self.assertEqual(out[0], "reference/checkpoints/step-8")
        self.assertEqual(out[1], "step 8 (8 updates), 4 sequences of 32 tokens per step, "
                         "written by 1 rank")
        self.assertEqual([line.split()[0] for line in out[3:7]],
                         ["weights", "remainders", "first_moments", "second_moments"])
        self.assertIn(" in 4 files", out[-1])
        listed = self.listed("reference/checkpoints/step-8/")
        self.assertEqual((listed["step"], listed["updates"], listed["batch"], listed["ranks"],
                          listed["portable"]), (8, 8, 4, 1, False))
        sizes = {str(file): file.stat().st_size for file in folder.iterdir()}
        self.assertEqual({str(self.path / file["path"]): file["bytes"] for file in listed["files"]},
                         sizes)
        self.assertEqual(listed["bytes"], sum(sizes.values()))
        self.assertEqual(next(state["bytes"] for state in listed["states"]
                              if state["kind"] == "weights"),
                         sizes[str(folder / "rank-0.states")])  # the others are on NVMe
        self.assertNotIn("whole", listed)

    def test_inspect_lists_the_checkpoints_of_a_run(self):
        out = self.well("inspect", "reference", "--verify").splitlines()
        self.assertIn("tensors in 1 file", out[-5])  # its weights come first
        self.assertEqual(out[-4], "checkpoints in reference")
        self.assertRegex(out[-3], r"^  step-8 .* 1 rank +intact$")
        self.assertRegex(out[-2], r"^  step-6 .* 1 rank +intact$")
        self.assertRegex(out[-1], "^--resume takes reference/checkpoints/step-8$")
        listed = self.listed("reference", "--hash")
        self.assertEqual([entry["step"] for entry in listed["checkpoints"]], [8, 6])
        self.assertEqual(listed["resume"], "reference/checkpoints/step-8")
        self.assertEqual(len({entry["xxh3"] for entry in listed["checkpoints"]}), 2)
        self.assertGreater(len(listed["tensors"]), 3)
        shutil.rmtree(self.path / "reference/weights")
        self.assertNotIn("tensors", self.listed("reference"))
        self.assertIn("if it is intact", self.well("inspect", "reference"))

    def test_inspect_finds_damage(self):
        newest = "reference/checkpoints/step-8"
        self.damage(f"{newest}/rank-0.states", 5)
        words = (f"{newest}/rank-0.states: damaged: ", "at offset 0 ",
                 "another checkpoint of this run is ", "reference/checkpoints/step-6")
        self.assertIn("weights", self.fails(1, words, "inspect", newest, "--verify"))
        self.fails(1, words, "inspect", newest, "--hash")
        out = self.fails(1, ("reference: 1 of 2 checkpoints are damaged",), "inspect", "reference",
                         "--verify").splitlines()
        self.assertIn("step-8/rank-0.states: damaged", out[-3])
        self.assertTrue(out[-2].endswith(" intact"))
        self.assertEqual(out[-1], "--resume takes reference/checkpoints/step-6")
        listed = json.loads(self.fails(1, (), "inspect", "reference", "--verify", "--json"))
        self.assertEqual([entry["whole"] for entry in listed["checkpoints"]], [False, True])
        self.assertIn("rank-0.states", listed["checkpoints"][0]["damage"])
        (self.path / newest / "rank-0.json").unlink()
        self.fails(1, ("rank-0.json: No such file",), "inspect", newest)
        self.fails(2, ("has no checkpoints to --verify",), "inspect", "text.txt", "--verify")

    def test_exported_states_are_the_same(self):
        out = self.well("export", "reference", "--states", "--out", "states")
        self.assertIn("states: 16 tensors", out)
        self.assertEqual({file.name for file in (self.path / "states").iterdir()},
                         {"checkpoint.json", *(f"block-{b}.safetensors" for b in range(4))})
        first = self.listed("reference/checkpoints/step-8", "--hash")
        second = self.listed("states", "--hash")
        self.assertTrue(second["portable"])
        for key in ("xxh3", "step", "updates", "batch", "ranks", "states"):
            self.assertEqual(first[key], second[key])
        head = (self.path / "states/block-1.safetensors").read_bytes()
        tensors = json.loads(head[8:8 + struct.unpack("<Q", head[:8])[0]])
        self.assertEqual({name: value["dtype"] for name, value in tensors.items()},
                         {"layer.0.weights": "BF16", "layer.0.remainders": "U16",
                          "layer.0.first_moments": "F32", "layer.0.second_moments": "F32"})
        self.well("export", "reference/checkpoints/step-6", "--states", "--out", "older")
        self.assertEqual(self.listed("older")["step"], 6)
        self.fails(2, ("--dtype", "--states"), "export", "reference", "--states", "--out", "x",
                   "--dtype", "bf16")
        self.fails(2, ("states exists",), "export", "reference", "--states", "--out", "states")
        self.fails(1, ("reference/weights", "neither a checkpoint"), "export", "reference/weights",
                   "--states", "--out", "x")
        self.damage("states/block-2.safetensors", 5000)
        self.fails(1, ("states/block-2.safetensors: damaged", "ballast export --states"), "export",
                   "states", "--states", "--out", "x")
        self.assertFalse((self.path / "x").exists())

    def test_resume_from_another_run_a_checkpoint_or_a_portable_one(self):
        expected = self.results("reference")
        self.copy("run")
        self.well("export", "run", "--states", "--out", "states")
        before = {file: file.read_bytes() for file in (self.path / "run").rglob("*.*")
                  if file.is_file()}
        for source in ("run", "run/checkpoints/step-4/", "states"):
            out = self.well("train", "config.json", f"--resume={source}", "--out", "next")
            place = source if source == "states" else "run/checkpoints/step-4"
            self.assertRegex(out, rf"start +states of step 4 from \S*/{place}/? in ")
            self.assertEqual(self.results("next"), expected)
            self.assertEqual(self.steps("next"), [5, 6, 7, 8])
            self.assertEqual(self.checkpoints("next"), ["step-6", "step-8"])
            self.assertEqual(self.listed("next", "--hash")["checkpoints"][0]["xxh3"],
                             self.listed("reference", "--hash")["checkpoints"][0]["xxh3"])
            self.fails(2, ("exists", "--out", "--overwrite"), "train", "config.json",
                       f"--resume={source}", "--out", "next")
            if source != "states":
                shutil.rmtree(self.path / "next")
        self.well("train", "config.json", "--resume=run", "--out", "next", "--overwrite", "--steps",
                  "5")
        self.assertEqual(self.steps("next"), [5])
        self.assertEqual(self.checkpoints("next"), ["step-5"])
        for file, content in before.items():
            self.assertTrue(file.read_bytes() == content, file)

    def test_resume_of_the_run_itself(self):
        expected = self.results("reference")
        for source in ("", "=run", "=run/checkpoints/step-4"):
            self.copy("run")
            self.well("train", "config.json", f"--resume{source}", "--out", "run")
            self.assertEqual(self.steps("run"), list(range(1, STEPS + 1)))
            self.assertEqual(self.results("run"), expected)
            self.assertEqual(self.checkpoints("run"), ["step-6", "step-8"])
            shutil.rmtree(self.path / "run")

    def test_going_back_leaves_no_later_checkpoint(self):
        self.copy("run")
        self.well("train", "config.json", "--resume=run/checkpoints/step-2", "--out", "run",
                  "--set", "ballast.checkpoint_every=0", "--steps", 3)
        self.assertEqual(self.steps("run"), [1, 2, 3])
        self.assertEqual(self.checkpoints("run"), ["step-2"])

    def test_what_cannot_be_resumed_is_refused(self):
        self.copy("run")
        before = sorted(self.path.rglob("*"))
        self.damage("run/checkpoints/step-4/rank-0.states", 7)
        for status, source, words in (
                (2, "=nowhere", ("--resume: ", "nowhere: no such directory")),
                (2, "=text.txt", ("text.txt", "is not a directory")),
                (1, "=run/checkpoints", ("run/checkpoints", "neither a checkpoint nor a run")),
                (2, "=run/checkpoints/step-3", ("step-3: no such directory", "did you mean ",
                                                "run/checkpoints/step-")),
                (1, "=run/checkpoints/step-4", ("step-4/rank-0.states: damaged",
                                                "another checkpoint of this run is ", "step-2")),
                (2, "=reference", ("has 8 finished steps, but the run only 8", "--steps")),
                (2, "=", ("--resume=", "empty"))):
            self.fails(status, words, "train", "config.json", f"--resume{source}", "--out", "next")
        self.fails(2, ("--overwrite", "--resume"), "train", "config.json", "--resume=run", "--out",
                   "run", "--overwrite")
        self.fails(1, ("another model",), "train", "config.json", "--resume=run/checkpoints/step-2",
                   "--out", "next", "--set", "model.num_layers=3")
        self.assertEqual(sorted(self.path.rglob("*")), before)

    def test_an_error_of_the_system_is_not_damage(self):
        self.copy("run")
        states = self.path / "run/checkpoints/step-4/rank-0.states"
        states.rename(self.path / "away")
        states.symlink_to(states.name)  # ELOOP stops root too, unlike EACCES
        before = sorted(self.path.rglob("*"))
        words = (f"cannot open {states}: Too many levels of symbolic links", "this is not damage",
                 f"another checkpoint of this run is {self.path}/run/checkpoints/step-2")
        for arguments in (("--resume", "--out", "run"), ("--resume=auto", "--out", "run"),
                          ("--resume=run", "--out", "next"),
                          ("--resume=run/checkpoints/step-4", "--out", "next")):
            self.fails(1, words, "train", "config.json", *arguments)
        self.assertEqual(sorted(self.path.rglob("*")), before)
        out = self.fails(1, ("step-4/rank-0.states: Too many levels",), "inspect", "run", "--verify")
        self.assertIn("--resume ends at run/checkpoints/step-4, which cannot be read", out)
        listed = json.loads(self.fails(1, (), "inspect", "run", "--verify", "--json"))
        self.assertNotIn("damage", listed["checkpoints"][0])
        self.assertIsNone(listed["resume"])
        states.unlink()
        (self.path / "away").rename(states)
        self.well("train", "config.json", "--resume", "--out", "run")

    def test_the_resume_command_names_the_own_run(self):
        self.copy("run")
        process = subprocess.Popen(
            [self.ballast, "train", "config.json", "--resume=run", "--out", "next", "--steps",
             "100000"], cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        metrics = self.path / "next/metrics.jsonl"
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
        self.assertEqual((process.returncode, runs.without_notice(err)), (runs.RESUMABLE, ""))
        last = out.splitlines()[-1]
        self.assertTrue(last.endswith(" --out next --steps 100000 --resume"), last)
        self.assertNotIn("--resume=", last)

    def ranks(self, count, *arguments):
        done = subprocess.run([MPIRUN, "-n", str(count), self.ballast, "train", "config.json",
                               *arguments], cwd=self.path, capture_output=True, text=True,
                              timeout=240, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_ranks(self):
        sections = {"ballast": {**BALLAST, "out": "run"}, "train_batch_size": 4,
                    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto",
                    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}
        self.config(**sections)
        self.ranks(2)
        expected = self.results("run")
        shutil.rmtree(self.path / "run")
        self.ranks(2, "--steps", "4")
        self.well("export", "run", "--states", "--out", "states")
        listed = [self.listed(path, "--hash") for path in ("run/checkpoints/step-4", "states")]
        self.assertEqual([entry["ranks"] for entry in listed], [2, 2])
        self.assertEqual(listed[0]["xxh3"], listed[1]["xxh3"])
        self.assertEqual(len(listed[0]["files"]), 7)
        for world in (2, 1):  # of other numbers the losses are only close
            self.ranks(world, "--resume=states", "--out", "next")
            found = self.results("next")
            if world == 2:
                self.assertEqual(found, expected)
            for one, other in zip(found[0], expected[0]):
                self.assertAlmostEqual(one["loss"] / other["loss"], 1.0, delta=1e-3)
            self.assertEqual(len(found[0]), 4)
            shutil.rmtree(self.path / "next")

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_the_hash_does_not_depend_on_the_number_of_ranks(self):
        # Infinite gradients update nothing, so all runs have the same states.
        weights = bytearray((self.path / "reference/weights/model.safetensors").read_bytes())
        weights[-4:] = struct.pack("<f", 3e38)
        (self.path / "weights.safetensors").write_bytes(weights)
        self.config(ballast={**BALLAST, "out": "run", "save_weights": False},
                    model={**runs.TINY["model"], "weights": "weights.safetensors"},
                    train_batch_size=4, train_micro_batch_size_per_gpu=1,
                    gradient_accumulation_steps="auto")
        hashes = set()
        for world in (1, 2, 4):
            self.ranks(world, "--steps", "1")
            listed = self.listed("run/checkpoints/step-1", "--hash")
            self.assertEqual((listed["ranks"], listed["updates"]), (world, 0))
            hashes.add(listed["xxh3"])
            shutil.rmtree(self.path / "run")
        self.assertEqual(len(hashes), 1)


class VersionTest(runs.RunTest):
    def test_version_1_is_read(self):
        """Reads checkpoint_version_1.tar.gz: 4 steps of its config.json, states in memory and on
        NVMe, written by the first program with this format. Every later program must read it."""
        data = pathlib.Path(__file__).resolve().parents[1] / "data"
        with tarfile.open(data / "checkpoint_version_1.tar.gz") as archive:
            archive.extractall(self.path)
        done = self.run_ballast("inspect", "run/checkpoints/step-4", "--json", "--hash")
        self.assertEqual(done.returncode, 0, done.stderr)
        listed = json.loads(done.stdout)
        self.assertEqual((listed["step"], listed["updates"], listed["xxh3"]),
                         (4, 4, "5a6fb84e85d4e78e"))
        done = self.run_ballast("train", "config.json", "--resume", "--steps", 5)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("states of step 4 from", done.stdout)
        self.assertNotIn("copied", done.stdout + done.stderr)
        self.assertIn("older version has written it without the settings of its run", done.stderr)
        self.assertAlmostEqual(self.rows()[-1]["loss"], 5.504819310042904, delta=1e-4)


if __name__ == "__main__":
    runs.main()
