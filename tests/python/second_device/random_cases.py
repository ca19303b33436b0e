"""Random sequences of actions (random_offload.py) with a model that is offloaded to the emulated device. The plain model
is on the CPU, whose bits are those of the device.

    PYTHONPATH=tests/python python -m second_device.random_cases --first 0 --count 500
"""

import contextlib
import copy
import dataclasses
import io
import random
import sys
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import fake_device
import offload_models
import random_offload
from ballast import offloading
from second_device import activate, device_test
from second_device.offload_cases import DEVICE, DELAYS, pinned_homes

SEQUENCES = 12


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return [on_cpu(one) for one in value]
    if isinstance(value, dict):
        return {key: on_cpu(one) for key, one in value.items()}
    return value


def condition(model, t):
    return model.time(torch.cos(t[:, None] * torch.arange(16, device=t.device)).to(t.dtype))


class Side(random_offload.Side):
    """A side whose inputs are on its device. Actions that would mix devices move their tensors first."""

    handle = None

    def offload(self):
        setup = self.setup
        rng = random.Random(setup.seed)
        self.modes.enter_context(pinned_homes(activate()) if rng.random() < 0.7 else contextlib.nullcontext())
        budget = fake_device.budget_of(self.model, setup.blocks) + 32768
        frozen = any(not p.requires_grad for p in self.model.blocks.parameters())
        activate().set_delays(*rng.choice(DELAYS))
        self.handle = offloading.Offloaded(
            self.model, offloading.accelerator(DEVICE), budget, setup.names, (),
            setup.trained if frozen else "stream", setup.prefetch, small=1024)

    def check_handle(self):
        report = self.handle.report()
        assert report.peak_bytes <= report.pool_bytes

    def make_optimizer(self):
        kind = torch.optim.SGD if self.setup.optimizer == "SGD" else torch.optim.AdamW
        self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad], lr=1e-2, foreach=False)

    @property
    def device(self):
        return "cpu" if self.handle is None else DEVICE

    def data(self, n):
        return tuple(t.to(self.device) for t in super().data(n))

    def on_device(self, n):
        block = self.block(n)
        with self.handle.on_device(block) if self.handle else contextlib.nullcontext():
            ones = torch.ones(8, offload_models.WIDTH, dtype=self.setup.dtype, device=self.device)
            loss = F.linear(self.data(n)[0] @ ones, block.mlp[0].weight).mean()
            if loss.requires_grad:
                loss.backward()
        return loss.detach()

    def deepcopied(self, n):
        twin = copy.deepcopy(self.model)
        assert type(twin) is offload_models.DiT and all(type(p) is nn.Parameter for p in twin.parameters())
        return twin.cpu()(*(t.cpu() for t in self.data(n)))

    def pickled(self, n):
        file = io.BytesIO()
        torch.save(self.model, file)
        file.seek(0)
        return torch.load(file, weights_only=False).cpu()(*(t.cpu() for t in self.data(n)))

    def averaged(self, n):
        parameters = {name: p.detach().cpu() for name, p in self.model.named_parameters()}
        if self.average is None or self.average.keys() != parameters.keys():
            self.average = {name: p.clone() for name, p in parameters.items()}
        for name, p in parameters.items():
            self.average[name].lerp_(p, 0.1)
        return self.average

    def norm(self, n):
        gradients = [p.grad.cpu().float().norm() for p in self.model.parameters() if p.grad is not None]
        return torch.stack(gradients) if gradients else None

    def offload_again(self, n):
        """States of torch's optimizers do not follow a parameter to another device."""
        result = super().offload_again(n)
        self.make_optimizer()
        return result

    def add_adapter(self, n):
        """A recomputation would find the new adapter on the CPU, as without offload()."""
        self.waiting.clear()
        return super().add_adapter(n)

    def replace_parameter(self, n):
        """A recomputation would find the new parameter in host memory, where the old one was."""
        self.waiting.clear()
        return super().replace_parameter(n)

    def fail(self, n):
        """In the forward pass. For the backward pass, see raising_cases.py."""
        return super().fail(n | 1)

    def clip(self, n):
        """Groups of devices have another order of sums."""


_run = random_offload.run


def run(seed, actions, kind):
    """Runs the actions on both sides. Returns the error, or None."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        try:
            return _run(seed, actions, kind)
        finally:
            activate().set_delays(kernel=0.0, copy=0.0)


def prepare():
    """Puts the emulated device into the functions of random_offload.py."""
    plain = random_offload.same
    random_offload.same = lambda one, other, what: plain(on_cpu(one), on_cpu(other), what)
    offload_models.DiT.condition = condition
    draw = random_offload.draw_setup

    def draw_setup(seed):
        setup = draw(seed)
        optimizer = "SGD" if setup.optimizer == "SGD" else "AdamW"
        return dataclasses.replace(setup, optimizer=optimizer, hooks=False, strict=False)

    random_offload.draw_setup = draw_setup


class Random(device_test()):
    def test_sequences_of_actions(self):
        prepare()
        for seed in range(SEQUENCES):
            with self.subTest(seed=seed):
                self.assertIsNone(run(seed, random_offload.draw(seed), Side))


if __name__ == "__main__":
    activate()
    prepare()
    random_offload.run = run
    sys.exit(random_offload.main(Side))
