"""ballast.offload() with models on meta that are filled from a folder, homes on NVMe, and saved states. A fake device
stands for the accelerator."""

import gc
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import unittest
import unittest.mock

from support import FolderTest

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("needs PyTorch")

import torch
from torch import nn

import ballast
import fake_device
from ballast._weight_folders import NAMES
from offload_models import DiT, data, dit, llama, same, state, tokens, train, train_on_text

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def write_folder(folder: pathlib.Path, tensors, files: int = 1) -> str:
    """Writes tensors to safetensors files with an index."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for number in range(files):
        some = names[number::files]
        file = f"part-{number}.safetensors"
        values = {name: tensors[name].detach().contiguous() for name in some}
        entries = [(name, NAMES[t.dtype], list(t.shape), t.nbytes) for name, t in values.items()]
        writer = ballast._ballast.WeightsWriter(str(folder / file), entries, {})
        for name, tensor in values.items():
            writer.write(name, tensor.data_ptr(), tensor.nbytes)
        writer.finish()
        weight_map |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def nvme(model: nn.Module, folder, *, blocks: float = 2, resident: int = 0, **options):
    """offload() with `resident` blocks in host memory and the others on NVMe."""
    size = fake_device.budget_of(model, 1)
    options.setdefault("prefetch", 1)
    options.setdefault("host_bytes", (options["prefetch"] + 2 + resident) * size)
    handle = fake_device.offload(model, fake_device.budget_of(model, blocks), nvme=str(folder), **options)
    assert handle.report().nvme_units
    return handle


class MetaModels(FolderTest):
    def test_a_model_on_meta_gets_the_values_of_a_folder(self):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype):
                plain = dit(dtype=dtype)()
                folder = write_folder(self.path / f"weights-{dtype}", plain.state_dict(), files=3)
                ours = on_meta(dit(dtype=dtype))
                before = list(ours.parameters())
                handle = fake_device.offload(ours, fake_device.budget_of(plain, 2), weights=folder)
                self.assertTrue(all(a is b for a, b in zip(before, ours.parameters())))
                same(state(plain), state(ours))
                same(train(plain, 3), train(ours, 3))
                same(state(plain), state(ours))
                handle.remove()
                same(state(plain), state(ours))

    def test_floating_types_are_converted_as_pytorch_does(self):
        plain = dit()()
        folder = write_folder(self.path / "weights", plain.state_dict())
        ours = on_meta(dit(dtype=torch.bfloat16))
        fake_device.offload(ours, fake_device.budget_of(plain, 2), weights=folder)
        same(state(plain.bfloat16()), state(ours))

    def test_weights_of_a_model_with_values_are_replaced(self):
        plain, ours = dit()(), dit()()
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.zero_()
        folder = write_folder(self.path / "weights", plain.state_dict())
        fake_device.offload(ours, fake_device.budget_of(plain, 2), weights=folder)
        same(state(plain), state(ours))

    @unittest.skipUnless(HAS_TRANSFORMERS, "needs transformers")
    def test_a_model_of_transformers_with_tied_weights_and_tables(self):
        plain = llama()
        plain.save_pretrained(self.path / "llama")
        ours = on_meta(llama)
        fake_device.offload(ours, fake_device.budget_of(plain, 2), weights=self.path / "llama")
        self.assertIs(ours.lm_head.weight, ours.model.embed_tokens.weight)
        ids = tokens(0)
        same(plain(ids).logits, ours(ids).logits)
        same(train_on_text(plain, torch.optim.SGD(plain.parameters(), 0.1), range(3)),
             train_on_text(ours, torch.optim.SGD(ours.parameters(), 0.1), range(3)))

    def test_what_does_not_fit_is_named_and_changes_nothing(self):
        plain = dit()()
        values = plain.state_dict()
        name = "blocks.3.attn.q.weight"

        def refused(what, changed, make=dit()):
            folder = write_folder(self.path / what.replace(" ", "-"), changed)
            ours = on_meta(make)
            with self.assertRaisesRegex(ballast.UsageError, what) as caught:
                fake_device.offload(ours, fake_device.budget_of(plain, 2), weights=folder)
            self.assertIn("blocks.3" if make is not Table else "table", str(caught.exception))
            self.assertTrue(all(p.is_meta for p in ours.parameters()))

        refused("lacks", {n: v for n, v in values.items() if n != name})
        refused("unlike the model", values | {"blocks.3.other": torch.zeros(2)})
        refused("shape", values | {name: torch.zeros(3, 4)})
        refused("floating types", values | {name: torch.zeros(32, 32, dtype=torch.int32)})
        refused("buffer on the device meta", Table().state_dict(), Table)
        with self.assertRaisesRegex(ballast.UsageError, "meta.*weights="):
            fake_device.offload(on_meta(dit()), 1 << 20)

    def test_buffers_that_no_file_has_come_from_reset_parameters(self):
        class Filled(Table):
            def reset_parameters(self):
                self.table.fill_(7)

        plain = Table()
        ours = on_meta(Filled)
        fake_device.offload(ours, 1 << 20, weights=write_folder(self.path / "w", plain.state_dict()), small=0)
        self.assertTrue(torch.equal(ours.table, torch.full((4,), 7.0)))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.register_buffer("table", torch.ones(4), persistent=False)


class NvmeHomes(FolderTest):
    def test_lora_and_full_training_have_the_bits_of_the_plain_model(self):
        for lora, dtype, prefetch, resident, trained in (
                (True, torch.float32, 1, 0, "stream"), (True, torch.bfloat16, 2, 1, "auto"),
                (False, torch.float32, 1, 1, "stream"), (False, torch.bfloat16, 0, 0, "stream")):
            with self.subTest(lora=lora, dtype=dtype, trained=trained):
                plain, ours = dit(lora, dtype=dtype)(), dit(lora, dtype=dtype)()
                handle = nvme(ours, self.path, prefetch=prefetch, resident=resident, delay=0.0003,
                              trained=trained)
                with fake_device.strict(handle) as mode:
                    same(train(plain, 4), train(ours, 4))
                    self.assertEqual(mode.faults, [])
                same(state(plain), state(ours))
                report = handle.report()
                self.assertGreater(report.bytes_read, 0)
                self.assertIn("blocks on NVMe", str(report))
                same(train(plain, 1), train(ours, 1))
                handle.remove()
                same(state(plain), state(ours))

    def test_ballasts_optimizer_updates_block_by_block(self):
        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                plain, ours = (dit(dtype=torch.bfloat16)() for _ in range(2))
                handle = nvme(ours, self.path, resident=1)
                space = handle._homes.space
                most = []
                put = type(space).write

                def write(own, home, memory):
                    most.append(own.open_bytes)
                    put(own, home, memory)

                with unittest.mock.patch.object(type(space), "write", write):
                    same(train(plain, 4, ballast.OffloadAdamW(plain, lr=1e-2)),
                         train(ours, 4, ballast.OffloadAdamW(ours, lr=1e-2, overlap=overlap)))
                largest = max(space.extent_bytes(n) for n in handle.report().nvme_units.values())
                self.assertEqual(max(most), largest)  # one block at a time
                self.assertEqual(len(most), 4 * len(handle.report().nvme_units))
                plain.zero_grad()  # as steps with overlap do
                ours.zero_grad()
                same(state(plain), state(ours))

    def test_frozen_blocks_are_written_once(self):
        ours = dit(True)()
        handle = nvme(ours, self.path, trained="keep")
        written = handle.report().bytes_written
        train(ours, 3)
        copies = {name: value.clone() for name, value in ours.state_dict().items()}
        train(ours, 1)
        self.assertEqual(handle.report().bytes_written, written)
        self.assertEqual(len(copies), len(dit(True)().state_dict()))

    def test_tensors_that_share_memory_keep_it(self):
        ours = dit()()
        expected = {name: value.clone() for name, value in ours.state_dict().items()}
        handle = nvme(ours, self.path)
        kept = ours.blocks[0].attn.q.weight.detach().numpy()
        older = ours.state_dict()
        ours(*data(0))
        same(expected, older)
        self.assertTrue((kept == expected["blocks.0.attn.q.weight"].numpy()).all())
        self.assertGreater(handle._homes.space.open_bytes, 0)
        del older, kept
        gc.collect()
        ours(*data(0))
        self.assertEqual(handle._homes.space.open_bytes, 0)
        same(expected, ours.state_dict())

    def test_changes_at_home_and_in_a_pass_reach_nvme(self):
        def loop(model):
            with torch.no_grad():
                model.blocks[2].attn.q.weight.mul_(2)
                model.blocks[3].attn.q.weight.data.mul_(2)
                model.blocks[4].attn.q.weight.data = torch.ones(32, 32)
                results = [model(*data(0))]
            def triple(module, args):
                module.attn.q.weight.mul_(3)

            hook = model.blocks[5].register_forward_pre_hook(triple)
            with torch.no_grad():
                results += [model(*data(0)), model(*data(1))]
            hook.remove()
            return results, state(model)

        plain, ours = dit()(), dit()()
        nvme(ours, self.path, trained="stream")
        same(loop(plain), loop(ours))
        same(loop(plain), loop(ours))

    def test_meta_models_fill_homes_on_nvme(self):
        plain = dit(dtype=torch.bfloat16)()
        folder = write_folder(self.path / "weights", plain.state_dict())
        ours = on_meta(dit(dtype=torch.bfloat16))
        nvme(ours, self.path, weights=folder)
        same(train(plain, 3), train(ours, 3))
        same(state(plain), state(ours))

    @unittest.skipUnless(sys.platform == "linux", "reads /proc")
    def test_a_model_of_three_times_the_budget_stays_within_it(self):
        program = pathlib.Path(__file__).with_name("memory_of_homes.py")
        measured = {}
        for kind in ("write", "lora", "full"):
            done = subprocess.run([sys.executable, program, str(self.path), kind], capture_output=True, text=True,
                                  timeout=300, check=False,
                                  env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})  # free memory is returned
            self.assertEqual(done.returncode, 0, done.stderr)
            measured[kind] = json.loads(done.stdout or "{}")
        for kind in ("lora", "full"):
            with self.subTest(kind=kind):
                m = measured[kind]
                self.assertEqual(m["weights"] // 3, m["budget"])
                # One block for a conversion or an update, and what the allocator keeps.
                slack = 2 * m["block"] + (16 << 20)
                self.assertLess(m["filled"], m["budget"] + m["pool"] + slack)
                self.assertLess(m["trained"], m["budget"] + m["pool"] + m["gradients"] + m["states"] + 2 * slack)
                self.assertLess(m["budget"] + m["pool"] + slack, m["weights"] // 1.5)

    def test_arguments_are_checked(self):
        self.assert_names("host_bytes", ballast.UsageError,
                          lambda: fake_device.offload(dit()(), 1 << 20, host_bytes=5))
        self.assert_names("host_bytes", ballast.OutOfMemoryError,
                          lambda: fake_device.offload(dit()(), 1 << 20, nvme=str(self.path), host_bytes=5))
        model = dit()()
        expected = state(model)
        with self.assertRaisesRegex(ballast.FileError, "nvme.*missing"):
            nvme(model, self.path / "missing")
        same(expected, state(model))
        train(model, 1)
