"""The optimizers under DistributedDataParallel, Accelerate and bitsandbytes. Needs torch."""

import importlib.util
import os
import pathlib
import sys
import tempfile
import unittest

try:
    import torch
    import torch.distributed
    import torch.multiprocessing
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch: {error}")

from ballast import OffloadAdamW
from small_gpt import bits, loss_of, make_model, tokens

RANKS = 2
STEPS = 6
MICRO = 2


def join(rank: int, folder: str) -> None:
    """Joins a group of two ranks on the loopback interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank,
                                         world_size=RANKS)


def train_rank(rank: int, folder: str, own: bool, dtype: torch.dtype) -> None:
    """Each rank has its own tokens; gradients are averaged with the last micro-batch of a step."""
    join(rank, folder)
    plain = make_model(dtype)
    model = DistributedDataParallel(plain)
    if own:
        optimizer = OffloadAdamW(model, lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO):
            batch = tokens((step * MICRO + micro) * RANKS + rank)
            model.require_backward_grad_sync = micro == MICRO - 1
            loss = loss_of(model, batch) / MICRO
            loss.backward()
            losses.append(loss.item() * MICRO)
        if not own:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if own:
        optimizer.synchronize()
    torch.save({"losses": losses, "bits": bits(plain)}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def run_ranks(own: bool, dtype: torch.dtype) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_rank, (folder, own, dtype), nprocs=RANKS)
        return [torch.load(pathlib.Path(folder, f"{rank}.pt")) for rank in range(RANKS)]


@unittest.skipUnless(sys.platform == "linux" and torch.distributed.is_available(),
                     "this torch has no torch.distributed")
class Ranks(unittest.TestCase):
    def test_ddp_trains_as_with_the_optimizer_of_torch(self) -> None:
        ours, theirs = (run_ranks(own, torch.float32) for own in (True, False))
        self.assertTrue(ours[0]["bits"] == ours[1]["bits"], "the weights of ranks differ")
        self.assertNotEqual(ours[0]["losses"], ours[1]["losses"])  # separate tokens
        for mine, its in zip(ours, theirs):
            for a, b in zip(mine["losses"], its["losses"]):
                self.assertAlmostEqual(a, b, delta=1e-6 * b)

    def test_ddp_with_16_bit_weights_has_equal_ranks(self) -> None:
        first, second = run_ranks(True, torch.bfloat16)
        self.assertTrue(first["bits"] == second["bits"], "the weights of ranks differ")


@unittest.skipUnless(importlib.util.find_spec("accelerate"), "accelerate is not installed")
class Accelerate(unittest.TestCase):
    def run_accelerated(self, own: bool) -> tuple[list[float], torch.nn.Module]:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
        plain = make_model()
        optimizer = (OffloadAdamW(plain, lr=1e-3) if own
                     else torch.optim.AdamW(plain.parameters(), lr=1e-3))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        batches = [tokens(i) for i in range(STEPS * MICRO)]
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        model, optimizer, loader, scheduler = accelerator.prepare(plain, optimizer, loader, scheduler)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        accelerator.free_memory()
        return losses, plain

    def test_it_trains_as_with_the_optimizer_of_torch(self) -> None:
        (ours, trained), (theirs, _) = self.run_accelerated(True), self.run_accelerated(False)
        self.assertTrue(all(a != b for a, b in zip(bits(trained), bits(make_model()))))
        for a, b in zip(ours, theirs):
            self.assertAlmostEqual(a, b, delta=1e-6 * b)


@unittest.skipUnless(importlib.util.find_spec("bitsandbytes"), "bitsandbytes is not installed")
class FourBitBase(unittest.TestCase):
    """Adapters over linear layers whose frozen weights are packed in 4 bits (QLoRA)."""

    class Adapted(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            from bitsandbytes.nn import Linear4bit, Params4bit

            rows, columns = linear.weight.shape
            self.base = Linear4bit(columns, rows, bias=linear.bias is not None, quant_type="nf4")
            self.base.weight = Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4")
            self.base.bias = linear.bias
            self.down = torch.nn.Linear(columns, 4, bias=False)
            self.up = torch.nn.Linear(4, rows, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.base(rows) + self.up(self.down(rows))

    def adapted_model(self) -> torch.nn.Module:
        model = make_model()
        torch.manual_seed(5)
        for layer in model.layers:
            layer.mlp[0], layer.mlp[2] = map(self.Adapted, (layer.mlp[0], layer.mlp[2]))
        return model.to("cpu")  # packs the weights

    def train(self, own: bool) -> tuple[list[float], torch.nn.Module]:
        model = self.adapted_model()
        optimizer = (OffloadAdamW if own else torch.optim.AdamW)(model.parameters(), lr=1e-3)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    def test_it_trains_adapters_as_the_optimizer_of_torch(self) -> None:
        (ours, trained), (theirs, _) = self.train(True), self.train(False)
        packed = {name: parameter for name, parameter in trained.named_parameters()
                  if parameter.dtype == torch.uint8}
        self.assertTrue(packed)
        first = dict(self.adapted_model().named_parameters())
        for name, parameter in packed.items():
            self.assertTrue(torch.equal(parameter, first[name]), name)
        adapter = next(name for name in first if name.endswith("up.weight"))
        self.assertFalse(torch.equal(first[adapter], dict(trained.named_parameters())[adapter]))
        for a, b in zip(ours, theirs):
            self.assertAlmostEqual(a, b, delta=1e-6 * b)


if __name__ == "__main__":
    unittest.main()
