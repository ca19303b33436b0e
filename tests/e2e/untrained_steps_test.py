#!/usr/bin/env python3
"""Tests steps of which no token is trained on: they have no loss, in every output of a run.

    untrained_steps_test.py PATH_OF_BALLAST [MPIRUN]
"""

import csv
import json
import re
import struct
import subprocess
import sys
import unittest

from runs import RunTest, main, write_file

MPIRUN = sys.argv.pop(2) if len(sys.argv) > 2 and not sys.argv[2].startswith("-") else ""
LENGTH = 20
MODEL = {"family": "llama", "vocab_size": 97, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
CSV = {"enabled": True, "output_path": "logs", "job_name": "csv"}


def write_documents(path, trained, **metadata):
    """Writes documents of LENGTH tokens. `trained` says which of them are trained on."""
    count = len(trained) * LENGTH
    write_file(path, {
        "tokens": ("U16", [count], struct.pack(f"<{count}H", *(i * 7 % 97 for i in range(count)))),
        "documents": ("I64", [len(trained) + 1],
                      struct.pack(f"<{len(trained) + 1}q", *range(0, count + 1, LENGTH))),
        "mask": ("U8", [count], b"".join(bytes([bit]) * LENGTH for bit in trained))},
        {"format": "ballast documents", "version": "1", **metadata})


class UntrainedStepsTest(RunTest):
    def sections(self, trained, batch=1, **more):
        write_documents(self.path / "d.safetensors", trained)
        sections = {"model": MODEL, "train_batch_size": batch, "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 1},
                    "data": {"text": [], "documents": ["d.safetensors"], "sequence_length": LENGTH,
                             "held_out": 0, "shuffle": False}}
        ballast = {"steps": len(trained) // batch, "eval_every": 0, **more.pop("ballast", {})}
        for name, value in more.items():
            sections[name] = sections[name] | value if isinstance(sections.get(name), dict) else value
        return sections | {"ballast": ballast}

    def losses(self, trained, ranks=1, **more):
        config = self.config(**self.sections(trained, **more))
        launcher = [MPIRUN, "-n", str(ranks)] if ranks > 1 else []
        done = subprocess.run([*launcher, self.ballast, "train", str(config), "--overwrite"], cwd=self.path,
                              capture_output=True, text=True, timeout=240, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done, [row["loss"] for row in self.rows()]

    def table(self, name):
        with (self.path / name).open() as file:
            return list(csv.reader(file))

    def test_a_step_without_a_target_has_no_loss_in_any_output(self):
        done, losses = self.losses([1, 0, 0, 1, 0], csv_monitor=CSV)
        self.assertEqual([loss is None for loss in losses], [False, True, True, False, True])
        self.assertEqual([row.get("targets") for row in self.rows()], [None, 0, 0, None, 0])
        self.assertEqual([row["grad_norm"] == 0 for row in self.rows()], [False, True, True, False, True])
        self.assertEqual(re.findall(r"step (\d+): no token of its batch is trained on", done.stderr), ["2"])
        self.assertIn("3 of 5 steps had no loss", done.stdout)
        self.assertRegex(done.stdout, r"(?m)^ *2/5 +- ")
        self.assertIn("last loss -", done.stdout)
        cells = self.table("logs/csv/Train_Samples_train_loss.csv")
        self.assertEqual([row[1] != "" for row in cells[1:]], [True, False, False, True, False])
        table = self.run_ballast("report", "run", "--csv", "out.csv")
        self.assertEqual(table.returncode, 0, table.stderr)
        names, *written = self.table("out.csv")
        at = names.index("loss")
        self.assertEqual([row[at] != "" for row in written], [True, False, False, True, False])
        page = self.run_ballast("report", "run", "--out", "out.html")
        self.assertEqual(page.returncode, 0, page.stderr)
        self.assertIn('"ends_not_finite":false', (self.path / "out.html").read_text())

    def test_spikes_ignore_steps_without_a_target(self):
        trained = [1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 1]
        for action in ("warn", "stop"):
            done, losses = self.losses(trained, ballast={
                "spike": {"action": action, "window": 4, "factor": 50}})
            self.assertEqual([loss is not None for loss in losses], list(map(bool, trained)))
            self.assertNotIn("standard deviations", done.stderr)

    def test_the_updates_are_those_of_a_zero_gradient(self):
        def weights(trained, **params):
            self.losses(trained, optimizer={"type": "SGD", "params": {"lr": 0.1, **params}},
                        ballast={"save_weights": True})
            return (self.path / "run/weights/model.safetensors").read_bytes()
        self.assertEqual(weights([1, 0, 0]), weights([1]))
        self.assertNotEqual(weights([1, 0, 0], weight_decay=0.1), weights([1], weight_decay=0.1))

    def test_evaluations_without_a_target_have_no_loss(self):
        write_documents(self.path / "e.safetensors", [0, 0, 1])
        done, _ = self.losses([1, 1], data={"eval": ["e.safetensors"]},
                              ballast={"eval_every": 1, "eval_batches": 2, "save_weights": True})
        self.assertEqual([row.get("eval_loss") for row in self.rows()], [None, None])
        write_documents(self.path / "n.safetensors", [0, 0])
        for data in ("e", "n"):
            found = self.run_ballast("eval", "run", "--data", f"{data}.safetensors", "--json")
            if data == "e":
                self.assertEqual(json.loads(found.stdout)["targets"], LENGTH - 1)
            else:
                self.assertEqual((found.returncode, found.stdout), (1, ""))
                self.assertRegex(found.stderr, r"n\.safetensors.*no token is trained on")

    @unittest.skipUnless(MPIRUN, "without mpirun")
    def test_ranks_agree_on_steps_without_a_target(self):
        # In step 1 only the other rank has a target, in step 3 none has.
        trained = [0, 1, 1, 1, 0, 0, 1, 0]
        ballast = {"spike": {"action": "stop", "window": 4}}
        for sections in ({}, {"sequence_parallel_size": 2}):
            done, losses = self.losses(trained, 2, batch=2, ballast=ballast, **sections)
            self.assertEqual([loss is None for loss in losses], [False, False, True, False])
            self.assertEqual(done.stderr.count("no token of its batch is trained on"), 1)
        self.assertEqual(self.losses(trained, batch=2, ballast=ballast)[1][2], None)


if __name__ == "__main__":
    main()
