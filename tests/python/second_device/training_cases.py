"""Training on the emulated device has the bits of the CPU, in any order of its threads."""

import unittest

import torch
from torch.utils.checkpoint import checkpoint

from second_device import device_test

DEVICE = "second"


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.inner = torch.nn.Linear(width, 3 * width)
        self.outer = torch.nn.Linear(3 * width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.outer(torch.nn.functional.gelu(self.inner(self.norm(x)))))


class Small(torch.nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList(Block(16) for _ in range(3))
        self.head = torch.nn.Linear(16, 32)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def train(device, steps=4, recompute=None, precision=None, optimizer=torch.optim.AdamW):
    """Returns losses and weights."""
    torch.manual_seed(1)
    model = Small(recompute).to(device)
    rule = optimizer(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 32, (4, 9)).to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision is not None):
            scores = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rule.step()
        rule.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]


class Training(device_test()):
    def same(self, **settings):
        losses, weights = train("cpu", **settings)
        for delays in ((0.0, 0.0), (0.0005, 0.002)):
            self.second.set_delays(*delays)
            found, other = train(DEVICE, **settings)
            self.assertEqual(found, losses)
            for one, two in zip(weights, other, strict=True):
                self.assertTrue(torch.equal(one, two))

    def test_a_small_model_trains_with_the_bits_of_the_cpu(self):
        self.same()
        self.same(optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, foreach=True))

    def test_recomputation(self):
        self.same(recompute=False)
        self.same(recompute=True)

    def test_autocast(self):
        with torch.autocast(DEVICE, torch.bfloat16):
            a = torch.ones(4, 4, device=DEVICE)
            self.assertEqual((a @ a).dtype, torch.bfloat16)
            self.assertEqual((a @ a).softmax(0).dtype, torch.float32)
        losses, weights = train(DEVICE, precision=torch.bfloat16)  # the CPU's lists are other ones
        self.second.set_delays(0.0005, 0.002)
        found, other = train(DEVICE, precision=torch.bfloat16)
        self.assertEqual(found, losses)
        self.assertTrue(all(map(torch.equal, weights, other)))

    def test_backward_runs_in_the_stream_of_its_forward_pass(self):
        """Autograd's thread of the device orders streams by events."""
        seen = []
        side = self.second.Stream()
        x = torch.ones(8, device=DEVICE, requires_grad=True)
        (x * 2).sum().backward()
        x.grad = None
        self.second.synchronize()
        self.second.set_delays(kernel=0.02, copy=0.0)
        with self.second.stream(side):
            y = x * 2
            y.register_hook(lambda _: seen.append(self.second.current_stream().stream_id))
        self.second.current_stream().wait_stream(side)
        y.sum().backward()
        self.assertEqual(seen, [side.stream_id])
        self.assertEqual(x.grad.sum().item(), 16.0)

    def test_gradients_cross_devices(self):
        x = torch.ones(8, requires_grad=True)
        y = (x.to(DEVICE) * 3).cpu() * 2
        y.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.full((8,), 6.0)))

    def test_frameworks_find_the_device(self):
        self.assertEqual(torch.accelerator.current_accelerator(), torch.device(DEVICE))
        self.assertTrue(torch.accelerator.is_available())
        self.assertEqual(torch.accelerator.device_count(), 1)
        self.assertIs(torch.get_device_module(DEVICE), self.second)
        torch.accelerator.synchronize()


if __name__ == "__main__":
    unittest.main()
