#!/usr/bin/env python3
"""Writes adamw_trace.bin: what torch.optim.AdamW (fp32, CPU, one tensor at a time) does to a few
hundred parameters over some steps. The test cpu_adam reads it.

Usage: make_adamw_trace.py [OUT]     needs PyTorch; the committed file was made with 2.15.0 (CPU).

Little-endian: u32 cases; per case u32 elements n, u32 steps, f64 beta1, beta2, epsilon,
weight_decay, gradient_scale, f32[n] weights at the start; per step f64 learning rate, f32[n]
gradient before scaling, then f32[n] weight, first moment, second moment after the step.
"""

import pathlib
import struct
import sys

import torch

ELEMENTS = 211  # not a multiple of any vector length
STEPS = 25
CASES = [
    # beta1, beta2, epsilon, weight_decay, gradient_scale, peak learning rate
    (0.9, 0.999, 1e-8, 0.1, 1.0, 3e-3),
    (0.4, 0.95, 1e-6, 0.01, 0.37, 1e-2),
]


def gradients(generator: torch.Generator) -> torch.Tensor:
    """Of many magnitudes, a tenth of them exactly zero."""
    exponent = torch.randint(-12, 3, (ELEMENTS,), generator=generator)
    values = torch.ldexp(torch.randn(ELEMENTS, generator=generator), exponent)
    return values * (torch.rand(ELEMENTS, generator=generator) > 0.1)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4").tobytes()


def case(number: int, beta1, beta2, epsilon, weight_decay, scale, peak) -> bytes:
    generator = torch.Generator().manual_seed(number)
    weight = torch.nn.Parameter(torch.randn(ELEMENTS, generator=generator))
    optimizer = torch.optim.AdamW([weight], lr=peak, betas=(beta1, beta2), eps=epsilon,
                                  weight_decay=weight_decay, foreach=False, fused=False)
    out = struct.pack("<II5d", ELEMENTS, STEPS, beta1, beta2, epsilon, weight_decay, scale)
    out += raw(weight)
    for step in range(1, STEPS + 1):
        rate = peak * min(step / 5, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        gradient = gradients(generator)
        weight.grad = gradient * torch.tensor(scale, dtype=torch.float32)
        optimizer.step()
        state = optimizer.state[weight]
        out += struct.pack("<d", rate) + raw(gradient) + raw(weight)
        out += raw(state["exp_avg"]) + raw(state["exp_avg_sq"])
    return out


def main() -> None:
    default = pathlib.Path(__file__).with_name("adamw_trace.bin")
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    torch.set_num_threads(1)
    body = b"".join(case(number, *values) for number, values in enumerate(CASES, 1))
    out.write_bytes(struct.pack("<I", len(CASES)) + body)


if __name__ == "__main__":
    main()
