"""Fills a model on meta whose weights are three times the host budget, trains it, and prints host memory at its peak, in
bytes above what the process had before. Needs torch.

    memory_of_homes.py FOLDER lora|full
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from torch import nn

import ballast
import fake_device
from test_offload_homes import on_meta, write_folder

WIDTH, LAYERS = 1024, 24  # blocks of 8 MiB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.a = nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) + (x @ self.a.t() @ self.a)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def status(name: str) -> int:
    """VmRSS or VmHWM in bytes."""
    line = next(one for one in pathlib.Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def warm_up(folder: pathlib.Path) -> None:
    """Takes the memory that everything takes once."""
    small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    handle = fake_device.offload(small, 1 << 20, nvme=str(folder), host_bytes=3 << 12, prefetch=0, small=0)
    optimizer = ballast.OffloadSGD(small, lr=1e-3)
    small(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    handle.remove()


def main() -> int:
    folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    model = on_meta(lambda: Model().bfloat16())
    if not (folder / "weights").exists():
        made = Block().bfloat16()
        write_folder(folder / "weights", {f"blocks.{i}.{name}": t for i in range(LAYERS)
                                          for name, t in made.state_dict().items()}, files=4)
        return 0
    if kind == "lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(".a"))
    weights = sum(p.nbytes for p in model.parameters())
    warm_up(folder)
    x = torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    start = status("VmRSS")
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    handle = fake_device.offload(model, 2 * block + 65536, weights=folder / "weights", nvme=str(folder), prefetch=1,
                                 host_bytes=weights // 3, trained="stream", small=1 << 20)
    filled = status("VmHWM") - start
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    optimizer = ballast.OffloadSGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"weights": weights, "budget": weights // 3, "block": block, "filled": filled,
                      "trained": status("VmHWM") - start, "pool": handle.report().pool_bytes,
                      "gradients": sum(p.nbytes for p in model.parameters() if p.requires_grad),
                      "states": optimizer.host_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
