"""The random sequences of random_offload.py on the emulated second device (package second_device): parameters change
between two types of device, and streams and copies run late. The same arguments. Needs torch and a compiler.

Optimizers are those of torch, and the norm for clipping is left out, because its sum depends on the devices.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from typing import Any

import second_device

second = second_device.activate()

import torch

import random_offload
from ballast import _accelerator, offloading
from second_device.offload_cases import DELAYS, pinned_homes


class SecondSide(random_offload.Side):
    device = torch.device("second:0")
    weights = {name: weight for name, weight in random_offload.WEIGHTS.items() if name != "clip"}

    @staticmethod
    def adapt(setup: random_offload.Setup) -> random_offload.Setup:
        kind = "SGD" if setup.optimizer == "SGD" else "AdamW"
        return dataclasses.replace(setup, strict=False, optimizer=kind, hooks=False)

    def make_handle(self, budget: int, trained: str) -> Any:
        rng = random.Random(self.setup.seed)
        device = _accelerator.Accelerator(self.device)
        device.pinning = rng.random() < 0.6
        second.set_delays(*rng.choice(DELAYS))
        return offloading.Offloaded(self.model, device, budget, self.setup.names, (), trained, self.setup.prefetch,
                                    small=1024)

    def make_optimizer(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = getattr(torch.optim, self.setup.optimizer)(parameters, lr=1e-2, foreach=False)

    def data(self, n: int) -> Any:
        return tuple(tensor.to(self.device) for tensor in super().data(n))

    def deepcopied(self, n: int) -> Any:
        """The copy of an offloaded model is on two devices, so it cannot run."""
        return dict(copy.deepcopy(self.model).state_dict())

    def pickled(self, n: int) -> Any:
        return self.deepcopied(n)

    def offload_again(self, n: int) -> Any:
        self.waiting.clear()
        if self.offloaded:
            self.remove()
            for parameter in self.model.parameters():
                assert parameter.is_cpu and (parameter.grad is None or parameter.grad.is_cpu)
            self.offload()
        self.make_optimizer()

    def chosen(self, n: int) -> Any:
        """Gradients of some weights alone."""
        weights = [self.block(n).mlp[2].weight, self.model.embed.weight, self.block(n + 1).modulation.bias]
        weights = [weight for weight in weights if weight.requires_grad]
        loss = self.model(*self.data(n)).mean()
        if n % 2 or self.setup.checkpoint:
            loss.backward()
        else:
            return torch.autograd.grad(loss, weights)


SecondSide.weights["chosen"] = 1


if __name__ == "__main__":
    with pinned_homes(second):
        sys.exit(random_offload.main(SecondSide))
