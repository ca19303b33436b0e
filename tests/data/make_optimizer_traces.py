#!/usr/bin/env python3
"""Writes optimizer_traces.bin: parameters over some steps of torch.optim.AdamW, Adam, Adagrad, SGD and
Adamax (fp32, CPU, one tensor at a time) and of Lion. The test cpu_adam_formats reads it.

Usage: make_optimizer_traces.py [OUT]     needs PyTorch; the committed file was made with 2.15.0.

Lion, which torch.optim lacks, is algorithm 2 of Chen et al., "Symbolic discovery of optimization
algorithms", NeurIPS 2023, in fp32 operations in the paper's order.

Little-endian: u32 cases; per case u32 optimizer (0 adamw, 1 adam, 2 adagrad, 3 lion, 4 sgd, 5 adamax),
elements n, steps, nesterov, f64 beta1, beta2, epsilon, momentum, weight_decay, gradient_scale,
f32[n] weights at the start; per step f64 learning rate, f32[n] gradient before scaling, then f32[n]
weight, first moment (not adagrad), second moment (not lion, sgd) after the step.
"""

import pathlib
import struct
import sys

import torch

ELEMENTS = 83  # not a multiple of any vector length
STEPS = 22
NUMBERS = {"adamw": 0, "adam": 1, "adagrad": 2, "lion": 3, "sgd": 4, "adamax": 5}
# Names in the state of torch.optim's optimizers.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"),
           "adagrad": ("sum",), "lion": ("exp_avg",), "sgd": ("momentum_buffer",),
           "adamax": ("exp_avg", "exp_inf")}
CASES = [
    dict(name="adamw", beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.1, peak=3e-3),
    dict(name="adamw", beta1=0.4, beta2=0.95, epsilon=1e-6, decay=0.01, scale=0.37, peak=1e-2),
    dict(name="adam", beta1=0.9, beta2=0.99, epsilon=1e-8, decay=0.03, scale=0.6, peak=2e-3),
    dict(name="adagrad", epsilon=1e-10, decay=0.02, scale=1.7, peak=1e-2),
    dict(name="lion", beta1=0.9, beta2=0.99, decay=0.3, scale=0.8, peak=1e-3),
    dict(name="sgd", momentum=0.9, decay=0.05, scale=0.9, peak=1e-2),
    dict(name="sgd", momentum=0.8, decay=0.01, nesterov=True, scale=0.45, peak=2e-2),
    dict(name="adamax", beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.04, scale=0.7, peak=4e-3),
    dict(name="adamax", beta1=0.4, beta2=0.8, epsilon=1e-4, decay=0.01, scale=1.3, peak=1e-2),
]


class Lion:
    """Algorithm 2 with the interface of torch.optim."""

    def __init__(self, weight, lr, betas, weight_decay):
        self.param_groups = [{"lr": lr}]
        self.weight, self.betas, self.decay = weight, betas, weight_decay
        self.state = {weight: {"exp_avg": torch.zeros_like(weight)}}

    @torch.no_grad()
    def step(self):
        beta1, beta2 = self.betas
        momentum, gradient = self.state[self.weight]["exp_avg"], self.weight.grad
        direction = beta1 * momentum + (1 - beta1) * gradient
        self.weight -= self.param_groups[0]["lr"] * (direction.sign() + self.decay * self.weight)
        momentum.copy_(beta2 * momentum + (1 - beta2) * gradient)


def optimizer_of(case: dict, weight: torch.nn.Parameter):
    name, rate, decay = case["name"], case["peak"], case["decay"]
    if name == "lion":
        return Lion(weight, rate, (case["beta1"], case["beta2"]), decay)
    single = dict(lr=rate, weight_decay=decay, foreach=False, fused=False)
    if name == "sgd":
        return torch.optim.SGD([weight], momentum=case["momentum"],
                               nesterov=case.get("nesterov", False), **single)
    if name == "adagrad":
        return torch.optim.Adagrad([weight], eps=case["epsilon"], **single)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adamax": torch.optim.Adamax}[name]
    if name == "adamax":
        single.pop("fused")
    return kind([weight], betas=(case["beta1"], case["beta2"]), eps=case["epsilon"], **single)


def gradients(generator: torch.Generator) -> torch.Tensor:
    """Numbers of many magnitudes, a tenth of them exactly zero."""
    exponent = torch.randint(-12, 3, (ELEMENTS,), generator=generator)
    values = torch.ldexp(torch.randn(ELEMENTS, generator=generator), exponent)
    return values * (torch.rand(ELEMENTS, generator=generator) > 0.1)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4").tobytes()


def trace(number: int, case: dict) -> bytes:
    generator = torch.Generator().manual_seed(number)
    weight = torch.nn.Parameter(torch.randn(ELEMENTS, generator=generator))
    optimizer = optimizer_of(case, weight)
    scale = case.get("scale", 1.0)
    out = struct.pack("<4I", NUMBERS[case["name"]], ELEMENTS, STEPS, case.get("nesterov", False))
    out += struct.pack("<6d", *(case.get(key, 0.0) for key in (
        "beta1", "beta2", "epsilon", "momentum", "decay")), scale)
    out += raw(weight)
    for step in range(1, STEPS + 1):
        rate = case["peak"] * min(step / 5, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        gradient = gradients(generator)
        weight.grad = gradient * torch.tensor(scale, dtype=torch.float32)
        optimizer.step()
        out += struct.pack("<d", rate) + raw(gradient) + raw(weight)
        for moment in MOMENTS[case["name"]]:
            out += raw(optimizer.state[weight][moment])
    return out


def main() -> None:
    default = pathlib.Path(__file__).with_name("optimizer_traces.bin")
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    torch.set_num_threads(1)
    body = b"".join(trace(number, case) for number, case in enumerate(CASES, 1))
    out.write_bytes(struct.pack("<I", len(CASES)) + body)


if __name__ == "__main__":
    main()
