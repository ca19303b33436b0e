"""A program that `mypy --strict` accepts, except for the lines that are marked as mistakes. It is not run."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

import ballast
import ballast.optim
from ballast import OffloadAdamW, aio


def fit(model: torch.nn.Module, folder: str) -> float | None:
    optimizer = OffloadAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, model=model,
                             overlap=True, max_grad_norm=1.0, device="nvme", path=[folder],
                             host_bytes=1 << 30)
    other: torch.optim.Optimizer = ballast.OffloadSGD(model.parameters(), lr=0.1, momentum=0.9)
    base: ballast.OffloadOptimizer = ballast.optim.OffloadLion(model.parameters(), threads=1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    other.zero_grad(set_to_none=True)
    base.synchronize()
    saved: str = optimizer.save(folder)
    optimizer.load(folder)
    print(saved, optimizer.host_bytes + optimizer.nvme_bytes, optimizer.skipped_steps)
    return optimizer.grad_norm


def swap(path: os.PathLike[str]) -> int:
    with aio.File(path, "w", size=4096) as file:
        return file.write_from(aio.empty(4096)).result(timeout=1.0)


def on_step(record: Mapping[str, object]) -> bool:
    return record["step"] != 3


def train() -> float | None:
    plan: ballast.Plan = ballast.plan({}, world=2, rates="rates.json")
    seconds: float = plan.forecast.step_seconds
    try:
        run: ballast.Run = ballast.train("config.json", out="run", callback=on_step)
    except ballast.FileError as error:
        number: int | None = error.errno
        print(ballast.__version__, number, error.category)
        return seconds
    return run.held_out_loss


def mistakes(model: torch.nn.Module) -> None:
    ballast.OffloadAdamw(model)  # mistake: attr-defined
    OffloadAdamW(model.parameters(), lr="fast")  # mistake: arg-type
    OffloadAdamW(model.parameters(), host_byte=3)  # mistake: call-arg
    OffloadAdamW(model.parameters()).host_bytes = 3  # mistake: misc
    OffloadAdamW(model.parameters()).synchronise()  # mistake: attr-defined
    ballast.train("config.json", step=3)  # mistake: call-arg
    aio.File(3)  # mistake: arg-type
