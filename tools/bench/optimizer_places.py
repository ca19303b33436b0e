#!/usr/bin/env python3
"""Times steps of training with optimizer states on NVMe against states in memory, in turn.

    optimizer_places.py FOLDER [--params 100] [--tokens 1024,4096] [--rounds 5] [--fp32]

Needs ballast and torch. FOLDER is on the drive for the states. The model is a stack of residual MLPs of
width 1024; a step is a forward and a backward pass on the CPU and OffloadAdamW's step, whose update
runs under the next forward pass. Prints medians, and the median of the ratios of each round.
"""

import argparse
import statistics
import time

import ballast
import torch

WIDTH = 1024


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Run:
    def __init__(self, millions: int, dtype: torch.dtype, **place) -> None:
        torch.manual_seed(0)
        layers = max(1, round(millions * 1e6 / (8 * WIDTH * WIDTH)))
        self.model = torch.nn.Sequential(*(Mlp() for _ in range(layers))).to(dtype)
        self.optimizer = ballast.OffloadAdamW(self.model, lr=1e-4, max_grad_norm=1.0, **place)

    def step(self, x: torch.Tensor) -> None:
        self.model(x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--params", type=int, default=100, help="millions of parameters")
    parser.add_argument("--tokens", default="1024,4096", help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fp32", action="store_true", help="fp32 weights and gradients")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.fp32 else torch.bfloat16
    memory = Run(arguments.params, dtype)
    nvme = Run(arguments.params, dtype, device="nvme", path=arguments.folder)
    count = sum(p.numel() for p in memory.model.parameters())
    print(f"{count / 1e6:.0f}M parameters, {dtype}, {torch.get_num_threads()} threads; "
          f"{nvme.optimizer.nvme_bytes / 1e9:.2f} GB on NVMe")
    for tokens in map(int, arguments.tokens.split(",")):
        x = torch.randn(tokens, WIDTH, dtype=dtype)
        times: dict[str, list[float]] = {"memory": [], "nvme": []}
        for number in range(arguments.rounds + 1):
            for name, run in (("memory", memory), ("nvme", nvme)):
                # The update of a step is part of the next step's time, so steps are alike after the
                # first.
                run.step(x)
                start = time.perf_counter()
                run.step(x)
                if number > 0:
                    times[name].append(time.perf_counter() - start)
                run.optimizer.synchronize()
        ratio = statistics.median(n / m for n, m in zip(times["nvme"], times["memory"]))
        print(f"{tokens} tokens: memory {statistics.median(times['memory']):.2f} s, NVMe "
              f"{statistics.median(times['nvme']):.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
