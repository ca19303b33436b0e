"""A device for tests of ballast.offload() on a machine without one. It has a limited part of the CPU's memory, its
copies are late by random times, memory that no unit has is NaN, and `Strict` finds what a device would refuse: operations
that mix weights in host memory with other tensors. Needs torch."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ballast import offloading
from ballast._accelerator import Copy, HostMemory
from ballast._home_plan import HomePlan
from ballast._slots import Pool

NAN = 255  # each byte of a NaN, in every floating type


class Ended:
    """An event that has passed."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    synchronize = wait


class PoisonedPool(Pool):
    def take(self, start: int, nbytes: int, owner: Any) -> Any:
        self._memory[start:start + nbytes].fill_(NAN)
        return super().take(start, nbytes, owner)

    def give(self, slot: Any, marks: Any) -> None:
        super().give(slot, marks)
        self.bytes_of(slot).fill_(NAN)


class FakeDevice:
    """Replaces ballast._accelerator.Accelerator. `delay`: seconds by which a copy is late at most."""

    def __init__(self, delay: float = 0.0, seed: int = 0, free: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.free = free
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._jobs, delay, random.Random(seed)), daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._jobs, thread)

    def free_bytes(self) -> int | None:
        return self.free

    def pool(self, nbytes: int) -> Pool:
        return PoisonedPool(nbytes, self.device)

    def host_memory(self, nbytes: int, memory: HostMemory | None = None) -> HostMemory:
        return memory or HostMemory(nbytes)

    def landing(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor).fill_(float("nan"))

    def mark(self) -> tuple[Any, Any]:
        return "stream", Ended()

    def copy_in(self, target: torch.Tensor, source: HostMemory, after: Any) -> Copy:
        return self._start(target, source.bytes)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        return self._start(target, source)

    def before_reuse(self, copy: Copy) -> None:
        copy.finish()

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        none = torch.empty(0)
        self._start(none, none).finish()

    close = synchronize

    def _start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        copy = Copy(target, source)
        self._jobs.put((copy, target.detach(), source.detach()))
        return copy


def _end(jobs: Any, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _run(jobs: Any, delay: float, rng: random.Random) -> None:
    while (job := jobs.get()) is not None:
        if delay:
            time.sleep(rng.random() * delay)
        copy, target, source = job
        try:
            with torch.no_grad():
                target.copy_(source)
            copy.issued(Ended())
        except BaseException as error:  # for whoever waits
            copy.issued(None, error)
        del job, copy, target, source  # which would stay until the next one


def offload(model: nn.Module, device_bytes: int | str, *, delay: float = 0.0, seed: int = 0, blocks: Any = "auto",
            keep: Any = (), trained: str = "stream", prefetch: int = 1, small: int = 1024,
            device: FakeDevice | None = None, shared: bool = False, weights: Any = None, nvme: Any = None,
            host_bytes: int | str = "auto", homes: HomePlan | None = None) -> offloading.Offloaded:
    """ballast.offload() to a fake device, with small limits for small models."""
    homes = homes or HomePlan(nvme, host_bytes, any_file_system=nvme is not None)
    return offloading.Offloaded(model, device or FakeDevice(delay, seed), device_bytes, blocks, keep, trained,
                                prefetch, shared, small, weights=weights, homes=homes)


class Strict(TorchDispatchMode):
    """Notes operations in passes that a device would refuse."""

    def __init__(self, handle: offloading.Offloaded) -> None:
        super().__init__()
        self.handle = handle
        self.faults: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        passes = self.handle.passes
        if passes._depth > 0 or passes._backward:
            found = [t.untyped_storage()._cdata for t in tree_leaves((args, kwargs))
                     if type(t) in (torch.Tensor, nn.Parameter)]
            homes = {member.home.untyped_storage()._cdata: member.name for unit in passes.units
                     for member in unit.members}
            at_home = [homes[cdata] for cdata in found if cdata in homes]
            if at_home and len(at_home) < len(found):
                self.faults.append(f"{func} used {at_home[0]} in its home")
        return func(*args, **(kwargs or {}))


def strict(handle: offloading.Offloaded, wanted: bool = True) -> Any:
    return Strict(handle) if wanted else contextlib.nullcontext()


def budget_of(model: nn.Module, blocks: float) -> int:
    """Bytes for this number of the largest blocks."""
    from ballast._blocks import bytes_under

    largest = max(bytes_under(child) for module in model.modules()
                  if isinstance(module, (nn.ModuleList, nn.Sequential)) for child in module.children())
    return int((largest + 16384) * blocks)
