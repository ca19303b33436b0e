#!/usr/bin/env python3
"""Ranks that read different files, as from stale copies on the disks of several nodes.

    ranks_compare_test.py PATH_OF_BALLAST [PATH_OF_MPIRUN]

Each rank has another working directory with the same relative paths. One difference, in any
file that ranks read, must be refused with one line that names a rank and the file. Equal copies in
other places must train. BALLAST_TEST_DIFFERENCES=500 tries more differences, drawn from
BALLAST_TEST_SEED.
"""

import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

import runs

BALLAST = str(pathlib.Path(sys.argv[1]).resolve())
MPIRUN = sys.argv[2] if len(sys.argv) > 2 else ""
PATIENCE = 240
DIFFERENCES = int(os.environ.get("BALLAST_TEST_DIFFERENCES", "6"))
SEED = int(os.environ.get("BALLAST_TEST_SEED", "20266"))
DOCUMENTS = pathlib.Path(__file__).parents[1] / "data/documents/conversations.safetensors"

TINY = {
    "data": {"text": ["text.txt"], "sequence_length": 32, "eval": ["eval.txt"]},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "bf16": {"enabled": False},
    "train_batch_size": 6, "train_micro_batch_size_per_gpu": 1,
    "ballast": {"device": "host", "device_bytes": "64MiB", "host_bytes": "64MiB", "steps": 2,
                "eval_every": 2},
}
# Name of a config, its changes to TINY, and the files that all ranks read.
SETUPS = {
    "folder": ({"model": {"path": "folder"}},
               ["folder/config.json", "folder/model.safetensors", "text.txt", "eval.txt"]),
    "shards": ({"model": {"path": "shards"},
                "data": {"tokens": ["tokens.bin"], "sequence_length": 32}},
               ["shards/config.json", "shards/model.safetensors.index.json", "tokens.bin",
                "shards/model-00001-of-00002.safetensors",
                "shards/model-00002-of-00002.safetensors"]),
    "adapters": ({"model": {"path": "folder"},
                  "data": {"documents": ["conversations.safetensors"], "sequence_length": 64},
                  "ballast": {**TINY["ballast"], "train": "adapters",
                              "adapters": {"path": "adapters"}}},
                 ["folder/config.json", "folder/model.safetensors", "conversations.safetensors",
                  "folder/tokenizer.json",
                  "adapters/adapter_config.json", "adapters/adapter_model.safetensors"]),
    "resumed": ({"model": runs.TINY["model"], "ballast": {**TINY["ballast"], "steps": 4}},
                ["first/checkpoints/step-2/checkpoint.json",
                 "first/checkpoints/step-2/rank-0.json",
                 "first/checkpoints/step-2/rank-0.states", "text.txt", "eval.txt"]),
}
SETTINGS = [("ballast.seed=7", "ballast.seed"), ("optimizer.params.lr=0.5", "optimizer.params.lr"),
            ("ballast.steps=3", "ballast.steps"), ("data.shuffle=false", "data.shuffle"),
            ("gradient_clipping=2.0", "gradient_clipping")]


def run(*command, cwd):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          timeout=PATIENCE, check=False, cwd=cwd)


def split_folder(source, target):
    """Writes the model of one file as two shards with an index."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    whole = (source / "model.safetensors").read_bytes()
    size, = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8:8 + size])
    header.pop("__metadata__", None)
    places = {}
    names = sorted(header)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        described, data = {}, b""
        for name in part:
            begin, end = header[name]["data_offsets"]
            tensor = whole[8 + size + begin:8 + size + end]
            described[name] = {**header[name], "data_offsets": [len(data), len(data) + len(tensor)]}
            data += tensor
            places[name] = f"model-{number:05}-of-00002.safetensors"
        text = json.dumps(described).encode()
        (target / f"model-{number:05}-of-00002.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text + data)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def change(file, kind, dice):
    """Makes a file differ from its copies."""
    content = bytearray(file.read_bytes())
    if kind == "bit":
        # JSON stays JSON: a letter changes its case.
        places = ([i for i, byte in enumerate(content) if chr(byte).isalpha()]
                  if file.suffix == ".json" else [len(content) - 1 - dice.randrange(64)])
        place = dice.choice(places)
        content[place] ^= 0x20 if file.suffix == ".json" else 1
    elif kind == "longer":
        content += b" \n"
    elif kind == "shorter":
        content = content[:len(content) - 1 - dice.randrange(min(64, len(content) - 1))]
    elif kind == "missing":
        file.unlink()
        return
    file.write_bytes(content)


class RanksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls._directory = tempfile.TemporaryDirectory(prefix="ballast-compare-")
        cls.addClassCleanup(cls._directory.cleanup)
        cls.path = pathlib.Path(cls._directory.name)
        cls.made = cls.path / "made"
        cls.made.mkdir()
        (cls.made / "text.txt").write_text(runs.TEXT)
        (cls.made / "eval.txt").write_text(runs.TEXT[7:4000])
        (cls.made / "tokens.bin").write_bytes(
            b"".join(struct.pack("<H", byte) for byte in runs.TEXT.encode()))
        shutil.copy(DOCUMENTS, cls.made)
        scratch = {**TINY, "model": runs.TINY["model"],
                   "ballast": {**TINY["ballast"], "checkpoint_every": 2}}
        cls.make("scratch.json", scratch, "train", "scratch.json", "--out", "first")
        cls.make("", None, "export", "first", "--out", "folder")
        (cls.made / "folder/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
        adapted = {**TINY, "model": {"path": "folder"},
                   "data": {**TINY["data"], "as_is": True},
                   "ballast": {**TINY["ballast"], "train": "adapters", "adapters": {"rank": 4, "targets": "all-linear"}}}
        cls.make("adapted.json", adapted, "train", "adapted.json", "--out", "second")
        cls.make("", None, "export", "second", "--out", "adapters")
        split_folder(cls.made / "folder", cls.made / "shards")
        for name, (changes, _) in SETUPS.items():
            config = {**TINY, **changes}
            if name == "folder":
                config["data"] = {**TINY["data"], "as_is": True}
            (cls.made / f"{name}.json").write_text(json.dumps(config))

    @classmethod
    def make(cls, name, config, *command):
        if config:
            (cls.made / name).write_text(json.dumps(config))
        done = run(BALLAST, *command, cwd=cls.made)
        assert done.returncode == 0, done.stderr

    def setUp(self):
        self.nodes = []
        self.count = 0

    def copies(self, ranks):
        for node in self.nodes:
            shutil.rmtree(node)
        self.nodes = [self.path / f"node{rank}" for rank in range(ranks)]
        for node in self.nodes:
            shutil.copytree(self.made, node)
        self.addCleanup(lambda: [shutil.rmtree(node, True) for node in self.nodes])

    def train(self, setup, stage, more=None, environment=None):
        """`more`, `environment`: additional arguments and variables by rank."""
        self.count += 1
        command = [MPIRUN]
        for rank, node in enumerate(self.nodes):
            if rank > 0:
                command.append(":")
            command += ["-n", "1", "-wdir", node]
            for name, value in (environment or {}).get(rank, {}).items():
                command += ["-x", f"{name}={value}"]
            command += [BALLAST, "train", f"{setup}.json", "--out", f"out{self.count}", "--set",
                        f"zero_optimization.stage={stage}", *(more or {}).get(rank, [])]
            if setup == "resumed":
                command += ["--resume=first/checkpoints/step-2"]
        return run(*command, cwd=self.path)

    def assert_named(self, done, ranks, *words):
        errors = [line for line in done.stderr.splitlines()
                  if line.startswith("ballast: error: ")]
        self.assertEqual(len(errors), 1, done.stderr)
        self.assertIn(done.returncode, (1, 2), done.stderr)
        named = "|".join(map(str, ranks))
        self.assertRegex(errors[0], rf"rank ({named}) on {re.escape(os.uname().nodename)}: ")
        for word in words:
            self.assertIn(word, errors[0])
        self.assertNotIn("metrics.jsonl", [file.name for node in self.nodes
                                           for file in node.glob(f"out{self.count}/*")])


class Differences(RanksTest):
    def test_equal_copies_in_other_places_train(self):
        self.copies(2)
        losses = []
        for setup in SETUPS:
            os.utime(self.nodes[1] / "folder/model.safetensors", (1, 1))
            done = self.train(setup, 1)
            self.assertEqual(done.returncode, 0, (setup, done.stderr))
            rows = (self.nodes[0] / f"out{self.count}/metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(row)["loss"] for row in rows])
        self.assertEqual(len(losses), len(SETUPS))

    def test_one_difference_is_named(self):
        dice = random.Random(SEED)
        for _ in range(DIFFERENCES):
            setup = dice.choice(list(SETUPS))
            ranks, stage = dice.choice([2, 3]), dice.randrange(4)
            odd = dice.randrange(ranks)
            file = dice.choice(SETUPS[setup][1])
            kind = dice.choice(["bit", "longer", "shorter", "missing"])
            with self.subTest(setup=setup, ranks=ranks, stage=stage, odd=odd, file=file,
                              kind=kind):
                self.copies(ranks)
                change(self.nodes[odd] / file, kind, dice)
                done = self.train(setup, stage)
                # With two ranks, either may be wrong.
                self.assert_named(done, {odd} if ranks > 2 else {odd, 1},
                                  file.split("/")[0].split(".")[0])

    def test_one_other_setting_is_named(self):
        self.copies(3)
        for odd, (setting, key) in enumerate(SETTINGS if DIFFERENCES > 10 else SETTINGS[:2]):
            odd %= 3
            done = self.train("folder", 1, {odd: ["--set", setting]})
            self.assert_named(done, {odd}, key, "folder.json")

    def test_another_instruction_set_is_named(self):
        self.copies(2)
        done = self.train("folder", 1, environment={1: {"BALLAST_ISA_MASK": "avx2"}})
        self.assert_named(done, {1}, "BALLAST_ISA_MASK", "avx2", "not set")

    def test_another_option_is_named(self):
        self.copies(2)
        done = self.train("folder", 1, {1: ["--resume=auto"]})
        self.assert_named(done, {1}, "--resume")


if __name__ == "__main__":
    runs.main_with_ranks(BALLAST, MPIRUN)
