"""Offloaded.save() and load(), processes that are killed, and faults of drives under homes on NVMe. A fake device stands
for the accelerator."""

import importlib.util
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import unittest

from support import FolderTest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("needs PyTorch")

import torch

import ballast
import fake_device
from offload_models import data, dit, same, state, train
from test_offload_homes import nvme, on_meta

KILLS = int(os.environ.get("BALLAST_TEST_KILLS", "4"))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class Saved(FolderTest):
    def offload(self, model, on_nvme, **options):
        if on_nvme:
            return nvme(model, self.path, resident=1, **options)
        return fake_device.offload(model, fake_device.budget_of(model, 2), **options)

    def test_weights_optimizer_and_order_continue_to_the_bit(self):
        for on_nvme in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(on_nvme=on_nvme, dtype=dtype):
                    folder = self.path / f"saved-{on_nvme}-{dtype}"
                    plain = dit(dtype=dtype)()
                    train(plain, 4, reference := ballast.OffloadAdamW(plain, lr=1e-2))
                    first = dit(dtype=dtype)()
                    handle = self.offload(first, on_nvme)
                    train(first, 2, optimizer := ballast.OffloadAdamW(first, lr=1e-2))
                    handle.save(folder, optimizer)
                    train(first, 1, optimizer)
                    handle.save(folder, optimizer)  # replaces the first state
                    self.assertEqual(len(list(folder.glob("model-*"))), 1)
                    other = on_meta(dit(dtype=dtype))
                    handle = self.offload(other, on_nvme, weights=folder)
                    same(weights(first), weights(other))
                    handle.load(folder, again := ballast.OffloadAdamW(other, lr=1e-2))
                    same(weights(first), weights(other))
                    same(train(first, 1, optimizer), train(other, 1, again))
                    self.assertGreater(handle.report().right_guesses, 8)  # the order is known
                    same(train(first, 2, optimizer), train(other, 2, again))
                    same(weights(first), weights(other))
                    del reference

    def test_frozen_parameters_may_be_left_out(self):
        ours = dit(True)()
        handle = self.offload(ours, True, trained="keep")
        train(ours, 2, optimizer := ballast.OffloadAdamW([p for p in ours.parameters() if p.requires_grad], lr=1e-2))
        handle.save(self.path / "saved", optimizer, frozen=False)
        size = sum(f.stat().st_size for f in (self.path / "saved").glob("model-*"))
        self.assertLess(size, sum(p.nbytes for p in ours.parameters()) / 2)
        other = dit(True)()
        handle = self.offload(other, True, trained="keep")
        again = ballast.OffloadAdamW([p for p in other.parameters() if p.requires_grad], lr=1e-2)
        handle.load(self.path / "saved", again)
        same(weights(ours), weights(other))
        same(train(ours, 2, optimizer), train(other, 2, again))

    def test_what_does_not_fit_is_named_and_nothing_changes(self):
        folder = self.path / "saved"
        ours = dit()()
        handle = self.offload(ours, True)
        train(ours, 1, optimizer := ballast.OffloadAdamW(ours, lr=1e-2))
        handle.save(folder, optimizer)
        train(ours, 1, optimizer)
        expected = weights(ours)

        def refused(error, what, load=lambda: handle.load(folder, optimizer)):
            with self.assertRaisesRegex(error, what) as caught:
                load()
            self.assertNotIn("\n", str(caught.exception))
            same(expected, weights(ours))

        smaller = dit(layers=7)()
        with self.assertRaisesRegex(ballast.UsageError, "unlike the model.*blocks.7"):
            self.offload(smaller, False).load(folder)
        larger = dit(layers=9)()
        with self.assertRaisesRegex(ballast.UsageError, "blocks.8"):
            self.offload(larger, False).load(folder)
        refused(ballast.UsageError, "no state", lambda: handle.load(self.path))
        refused(TypeError, "optimizer: ", lambda: handle.load(folder, torch.optim.SGD(ours.parameters(), 0.1)))
        (self.path / "other").mkdir()
        (self.path / "other/model.safetensors").write_text("")
        refused(ballast.UsageError, "another model", lambda: handle.save(self.path / "other"))
        shard = next(folder.glob("model-*.safetensors"))
        original = shard.read_bytes()
        shard.write_bytes(original[:-5000] + bytes([original[-5000] ^ 1]) + original[-4999:])
        refused(ballast.FileError, "is damaged")
        shard.write_bytes(original)
        states = next(folder.glob("optimizer-*/optimizer.safetensors"))
        train(ours, 1, optimizer)
        optimizer.save(states.parent)
        expected = weights(ours)
        refused(ballast.UsageError, "not the optimizer that was saved")
        described = next(folder.glob("ballast-*.json"))
        described.write_text(described.read_text().replace("0", "1", 1))
        refused(ballast.FileError, "is damaged")

    def test_a_killed_process_leaves_a_whole_state(self):
        """A process that saves after each step is killed at random moments, some inside of save(), and
        continues from what is there."""
        losses = train(plain := dit(layers=5)(), 400, ballast.OffloadAdamW(plain, lr=1e-2))
        seen = {}
        rng = random.Random(0)
        for _ in range(KILLS):
            with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "FOLDER": str(self.path)},
                                  cwd=pathlib.Path(__file__).parent) as process:
                lines = [process.stdout.readline()]
                self.assertTrue(lines[0].startswith("begins"), lines)
                lines += [process.stdout.readline() for _ in range(rng.randrange(4))]  # it has saved all but the last
                time.sleep(rng.random() * 0.2)
                process.send_signal(signal.SIGKILL)
                lines += process.stdout.read().splitlines()
            for line in lines:
                step, _, loss = line.strip().partition(" ")
                if loss.endswith(";"):
                    self.assertEqual(seen.setdefault(step, loss), loss)
        self.assertGreater(len(seen), 1)
        for step, loss in seen.items():
            self.assertEqual(loss, f"{losses[int(step)].item().hex()};")


# Trains from the newest state and prints the loss of each step.
KILLED = """
import os, pathlib, torch, ballast, fake_device
from offload_models import dit, data
from test_offload_homes import nvme
folder = pathlib.Path(os.environ["FOLDER"])
torch.set_num_threads(1)
model = dit(layers=5)()
handle = nvme(model, folder, resident=1)
optimizer = ballast.OffloadAdamW(model, lr=1e-2)
saved = folder / "saved"
step = 0
if (saved / "model.safetensors.index.json").exists():
    handle.load(saved, optimizer)
    step = int(optimizer.state[next(model.parameters())]["step"])
print("begins", step, flush=True)
while True:
    x, t = data(step)
    optimizer.zero_grad()
    loss = (model(x, t) - x).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(f"{step} {loss.item().hex()};", flush=True)
    step += 1
    handle.save(saved, optimizer)
"""


class DamagedFiles(FolderTest):
    """The unnamed file of the homes is changed through /proc."""

    def test_damage_is_named_and_a_saved_state_repairs_it(self):
        plain, ours = (dit(dtype=torch.bfloat16)() for _ in range(2))
        handle = nvme(ours, self.path, prefetch=0)
        handle.save(self.path / "saved")
        file = next(f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")
                    if str(self.path) in os.readlink(f"/proc/self/fd/{n}"))
        x = data(0, dtype=torch.bfloat16)
        ours(*x)  # the staging buffers get other blocks
        before = pathlib.Path(file).read_bytes()
        for kind, damaged in (("flipped", bytes([before[0] ^ 4])), ("lost", bytes(4096)), ("torn", bytes(20480))):
            with self.subTest(kind=kind):
                with open(file, "r+b") as opened:
                    opened.write(damaged)
                with self.assertRaisesRegex(ballast.Error, "^blocks.0: ") as caught:
                    ours(*x)
                self.assertNotIn("\n", str(caught.exception))
                with self.assertRaisesRegex(ballast.Error, "^blocks.0: "):
                    ours.state_dict()
                with self.assertRaisesRegex(ballast.Error, "^blocks.0: "):
                    handle.save(self.path / "other")
                handle.load(self.path / "saved")
                same(plain(*x), ours(*x))
        same(weights(plain), weights(ours))


def has_faults(folder):
    """Whether this build can inject faults; that of a wheel cannot."""
    program = f"import ballast._ballast as b; b.WeightHomes([{str(folder)!r}], [4096], True)"
    return "BALLAST_IO_FAULTS" in subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, "BALLAST_IO_FAULTS": "nothing"}).stderr


class Faults(FolderTest):
    """Faults are injected into the queue of the homes by BALLAST_IO_FAULTS."""

    def setUp(self):
        super().setUp()
        if not has_faults(self.path):
            self.skipTest("this build cannot inject faults (meson: -Dtests=true)")

    def run_with(self, faults, program):
        code = FAULTY.format(folder=str(self.path), program=program)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
                              env={**os.environ, "BALLAST_IO_FAULTS": faults},
                              cwd=pathlib.Path(__file__).parent).stdout

    def test_flipped_torn_and_lost_blocks_are_found_and_named(self):
        for fault, program in (("flip:on=read:after=5:times=1", FROZEN), ("torn:after=3:times=1", FROZEN),
                               ("lost:after=3:times=1", FROZEN), ("flip:on=read:after=30:times=1", TRAINED),
                               ("torn:after=12:times=1", TRAINED), ("lost:after=12:times=1", TRAINED)):
            with self.subTest(fault=fault):
                out = self.run_with(fault, program)
                self.assertIn("found blocks.", out)
                self.assertIn("recovered", out)

    def test_a_drive_that_refuses_writes_loses_nothing(self):
        out = self.run_with("enospc:on=write:after=3", "")
        self.assertIn("refused blocks.", out)
        self.assertIn("kept", out)


FAULTY = """
import pathlib, torch, ballast, fake_device
from offload_models import dit, data, same, state, train
from test_offload_homes import nvme
folder = pathlib.Path({folder!r})
def weights(model):
    return {{n: v.clone() for n, v in model.state_dict().items()}}
model = dit(dtype=torch.bfloat16)()
expected = weights(model)
try:
    handle = nvme(model, folder, prefetch=0)
except ballast.FileError as error:
    print("refused", error)
    same(expected, weights(model))
    print("kept")
    raise SystemExit
{program}
"""

# Reads again until the fault is over; what is lost on the drive comes from a saved state.
FROZEN = """
plain = dit(dtype=torch.bfloat16)()
with torch.no_grad():
    result = plain(*data(0, dtype=torch.bfloat16))
    for attempt in range(3):
        try:
            same(result, model(*data(0, dtype=torch.bfloat16)))
            print("recovered")
            break
        except (RuntimeError, OSError) as error:
            print("found", error)
            if attempt == 1:
                other = fake_device.offload(plain, 1 << 20)
                other.save(folder / "saved")
                handle.load(folder / "saved")
"""
TRAINED = """
plain = dit(dtype=torch.bfloat16)()
reference = train(plain, 8, ballast.OffloadAdamW(plain, lr=1e-2))
optimizer = ballast.OffloadAdamW(model, lr=1e-2)
twin = dit(dtype=torch.bfloat16)()
twin_handle = fake_device.offload(twin, 1 << 20)
twin_handle.save(folder / "saved", other := ballast.OffloadAdamW(twin, lr=1e-2))
for attempt in range(4):
    try:
        if attempt > 0:  # load() reads files through another queue, which may have the same fault once
            handle.load(folder / "saved", optimizer)
        same(reference, train(model, 8, optimizer))
        print("recovered")
        break
    except (RuntimeError, OSError) as error:
        print("found", error)
"""
