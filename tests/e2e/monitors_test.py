#!/usr/bin/env python3
"""Tests the files of `tensorboard` and `csv_monitor`: they have the numbers of metrics.jsonl, in
the form of DeepSpeed's monitors.

    monitors_test.py PATH_OF_BALLAST
"""

import csv
import math
import struct

from one_line import assert_one_line
from runs import TINY, CheckpointTest, RunTest, main

BATCH = 4  # samples per step of TINY
PREFIX = "Train/Samples/"
NAMES = {"train_loss": "loss", "lr": "lr", "grad_norm": "grad_norm",
         "tokens_per_second": "tokens_per_second", "nvme_bytes_written": "nvme_bytes_written"}
BOTH = {"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "tb"},
        "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "csv"}}


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def unmasked(crc):
    """Recovers the CRC from its masked form `crc`."""
    rotated = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return ((rotated << 15) | (rotated >> 17)) & 0xFFFFFFFF


def frames(data):
    """The messages of a file of TFRecords; fails if a checksum does not match."""
    messages, at = [], 0
    while at < len(data):
        length, crc = struct.unpack_from("<QI", data, at)
        assert unmasked(crc) == crc32c(data[at:at + 8])
        message = data[at + 12:at + 12 + length]
        assert len(message) == length
        assert unmasked(struct.unpack_from("<I", data, at + 12 + length)[0]) == crc32c(message)
        messages.append(message)
        at += 16 + length
    return messages


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def fields(data):
    """Pairs of field number and value of a protocol buffer."""
    found, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif key & 7 == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            assert key & 7 == 2, key
            length, at = varint(data, at)
            value, at = data[at:at + length], at + length
        found.append((key >> 3, value))
    return found


def read_events(file):
    """Per record: its step, and the scalars by name, "start" or the version."""
    events = []
    for message in frames(file.read_bytes()):
        event = dict(fields(message))
        if 3 in event:
            events.append((event.get(2, 0), event[3].decode()))
        elif 7 in event:
            assert dict(fields(event[7])) == {1: 1}
            events.append((event[2], "start"))
        else:
            values = [dict(fields(value)) for number, value in fields(event[5]) if number == 1]
            events.append((event[2], {value[1].decode(): value[2] for value in values}))
    return events


def as_float(value):
    """`value` rounded to 32 bits."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


class Reading:
    def events(self, folder="logs/tb"):
        return sorted((self.path / folder).glob("events.out.tfevents.*"))

    def scalars(self, folder="logs/tb"):
        """The valid values of all event files of a folder, as TensorBoard reads them."""
        found = {}
        for file in self.events(folder):
            for step, content in read_events(file):
                if content == "start":
                    found = {at: values for at, values in found.items() if at < step}
                elif isinstance(content, dict):
                    found[step] = content
        return found

    def table(self, name, folder="logs/csv"):
        with open(self.path / folder / f"Train_Samples_{name}.csv", newline="") as file:
            rows = list(csv.reader(file))
        self.assertEqual(rows[0], ["step", name])
        return [(int(step), float(value)) for step, value in rows[1:]]

    def assert_like_metrics(self, out="run"):
        rows = self.rows(out)
        scalars = self.scalars()
        self.assertEqual(list(scalars), [row["step"] * BATCH for row in rows])
        for name, key in NAMES.items():
            self.assertEqual(self.table(name), [(row["step"] * BATCH, row[key]) for row in rows])
            self.assertEqual([values[PREFIX + name] for values in scalars.values()],
                             [as_float(row[key]) for row in rows], name)
        held_out = [(row["step"] * BATCH, row["eval_loss"]) for row in rows if "eval_loss" in row]
        self.assertEqual(self.table("eval_loss"), held_out)
        self.assertEqual([(step, values[PREFIX + "eval_loss"]) for step, values in scalars.items()
                          if PREFIX + "eval_loss" in values],
                         [(step, as_float(value)) for step, value in held_out])


class Monitors(Reading, RunTest):
    def test_have_the_numbers_of_the_metrics(self):
        done = self.train("--set", "ballast.eval_every=2", "--steps", 5, **BOTH)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assert_like_metrics()
        file, = self.events()
        self.assertRegex(file.name, r"^events\.out\.tfevents\.\d{10}\.[^/]+\.\d+\.0$")
        contents = read_events(file)
        self.assertEqual(contents[:2], [(0, "brain.Event:2"), (BATCH, "start")])

    def test_are_in_the_run_directory_by_default(self):
        done = self.train(tensorboard={"enabled": True}, csv_monitor={"enabled": True})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.scalars("run/DeepSpeedJobName")), 3)
        self.assertEqual(len(self.table("lr", "run/DeepSpeedJobName")), 3)
        self.assertFalse((self.path / "run/DeepSpeedJobName/Train_Samples_experts_idle.csv").exists())

    def test_are_off_by_default(self):
        self.assertEqual(self.train(tensorboard={"output_path": "logs"}).returncode, 0)
        self.assertFalse((self.path / "logs").exists())

    def test_have_the_experts(self):
        done = self.train("--steps", 4, **BOTH, model={
            "family": "qwen3_moe", "vocab_size": 256, "hidden_size": 64, "num_layers": 2,
            "num_heads": 4, "num_kv_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32})
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("balance_loss", "router_z_loss", "largest_load", "idle"):
            wanted = [(row["step"] * BATCH, row["experts"][name]) for row in self.rows()]
            self.assertEqual(self.table("experts_" + name), wanted)
            self.assertEqual([values[f"{PREFIX}experts_{name}"] for values in self.scalars().values()],
                             [as_float(value) for _, value in wanted])

    def test_have_numbers_that_are_not_finite(self):
        done = self.train(**BOTH, optimizer={"params": {"lr": 1e30, "weight_decay": 0.01}}, gradient_clipping=0,
                          ballast={**TINY["ballast"], "steps": 12})
        rows = self.rows()
        self.assertTrue(any(row["skipped"] for row in rows), done.stderr)
        for (_, value), row in zip(self.table("grad_norm"), rows):
            self.assertEqual(math.isfinite(value), row["grad_norm"] is not None)

    def test_do_not_replace_the_files_of_another_run(self):
        self.assertEqual(self.train("--out", "first", **BOTH).returncode, 0)
        before = self.table("lr")
        assert_one_line(self, self.train(**BOTH), 2, ["logs/csv/Train_Samples_", "exists",
                                                      "--overwrite", "csv_monitor.job_name"])
        self.assertEqual(self.table("lr"), before)
        self.assertEqual(self.train("--overwrite", "--steps", 2, **BOTH).returncode, 0)
        self.assertEqual(len(self.table("lr")), 2)
        self.assertEqual(len(self.scalars()), 2)

    def test_folders_that_cannot_be_made(self):
        (self.path / "logs").write_text("a file")
        for name in BOTH:
            done = self.train(**{name: BOTH[name]})
            self.assert_fails(done, 1, f"{self.path}/logs", f"{name}.output_path")
            self.assertFalse((self.path / "run").exists())

    def test_a_full_disk(self):
        (self.path / "logs/csv").mkdir(parents=True)
        (self.path / "logs/csv/Train_Samples_lr.csv").symlink_to("/dev/full")
        done = self.train("--overwrite", **BOTH)
        assert_one_line(self, done, 1, ["logs/csv/Train_Samples_lr.csv", "No space left"],
                        ignored="ballast: warning:")
        self.assertEqual(self.steps(), [1])  # a run that cannot write its first row ends

    def test_wrong_values(self):
        for section, words in (({"enabled": 1}, ["tensorboard.enabled"]),
                               ({"job_name": ""}, ["tensorboard.job_name", "folder"]),
                               ({"job_name": "/x"}, ["tensorboard.job_name", "folder"]),
                               ({"outputpath": "x"}, ["tensorboard.outputpath", "output_path"])):
            self.assert_fails(self.train(tensorboard=section), 2, *words)


class Resumed(Reading, CheckpointTest):
    def test_a_resumed_run_appends_to_its_files(self):
        ballast = {**self.BALLAST, "eval_every": 5}
        self.part_of_run(steps=11, ballast=ballast, **BOTH)
        done = self.resume("--set", "ballast.checkpoint_every=100", "--steps", 16,
                           ballast=ballast, **BOTH)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.steps(), list(range(1, 17)))
        self.assertEqual(len(self.events()), 2)
        self.assert_like_metrics()

    def test_a_run_that_goes_back_drops_later_rows(self):
        ballast = {**self.BALLAST, "on_error": "resume", "checkpoint_every": 5}
        done = self.train("--steps", 14, ballast=ballast, **BOTH,
                          environment={"BALLAST_IO_FAULTS": "eio:on=read:after=52:times=1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("training continues from", done.stderr)
        file, = self.events()
        events = read_events(file)
        again = [i for i, (step, content) in enumerate(events)
                 if content == "start" and step <= events[i - 1][0]]
        self.assertGreater(len(again), 0, "no step was repeated")
        self.assert_like_metrics()


if __name__ == "__main__":
    main()
