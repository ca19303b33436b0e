"""Predictions of offloaded modules, before the first step and without memory for the model.

    plan = ballast.plan_module(model, sample, device_bytes=24 << 30, rates={"link": 25e9, "flops": 100e12})
    print(plan)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
from torch import nn

from . import _arguments, _blocks, _units, _visits
from ._fake_pass import FakePass, measure
from ._slots import GRAIN
from .errors import UsageError

__all__ = ["ModulePlan", "plan_module"]

# Bytes that OffloadAdamW keeps in host memory per trained parameter, in addition to a weight of this
# type: two moments, and the rest of the fp32 master.
_STATES = {torch.bfloat16: 10, torch.float16: 12, torch.float32: 8}


@dataclass(frozen=True)
class ModulePlan:
    """Bytes and seconds of a training step with `ballast.offload()` and `OffloadAdamW`. print() gives a
    table. Seconds are None without rates, and all figures of a pass are 0 without a sample."""

    units: Mapping[str, int]  #: bytes that move with each block
    device: Mapping[str, int]  #: bytes by kind on the device
    host: Mapping[str, int]  #: bytes by kind in host memory
    device_bytes: int  #: what the device has
    host_bytes: int | None  #: what host memory has, if it was given
    pool_bytes: int  #: for device_bytes= of offload()
    upload_bytes: int  #: of blocks to the device, in a step
    download_bytes: int  #: of gradients to host memory, in a step
    forward_flops: int
    backward_flops: int  #: with recomputation
    upload_seconds: float | None = None
    download_seconds: float | None = None
    compute_seconds: float | None = None
    problems: Sequence[str] = field(default=())  #: why it does not fit, one line each

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def step_seconds(self) -> float | None:
        """The longest of uploads, downloads and computation, which run at the same time. The update of
        weights is not part of it."""
        times = (self.upload_seconds, self.download_seconds, self.compute_seconds)
        return None if None in times else max(time for time in times if time is not None)

    @property
    def copy_share(self) -> float | None:
        """The part of a step in which the link to the device is busy in its busier direction."""
        total = self.step_seconds
        if total is None or self.upload_seconds is None or self.download_seconds is None:
            return None
        return max(self.upload_seconds, self.download_seconds) / total if total else 0.0

    @property
    def bound(self) -> str | None:
        """The slower of both: "link" or "compute"."""
        total = self.step_seconds
        return None if total is None else "compute" if total == self.compute_seconds else "link"

    def __str__(self) -> str:
        rows = [("blocks that move", f"{size_text(sum(self.units.values()))} in {len(self.units)} blocks, the "
                                     f"largest {size_text(max(self.units.values()))}")]
        for place, kinds, limit in (("device", self.device, self.device_bytes),
                                    ("host memory", self.host, self.host_bytes)):
            rows += [(f"{place}: {kind}", size_text(nbytes)) for kind, nbytes in kinds.items() if nbytes]
            of = f" of {size_text(limit)}" if limit is not None else ""
            rows.append((f"{place}: total", size_text(sum(kinds.values())) + of))
        rows += [("to the device per step", size_text(self.upload_bytes)),
                 ("to host memory per step", size_text(self.download_bytes))]
        if self.forward_flops:
            rows.append(("operations", f"{self.forward_flops:.3g} forward, {self.backward_flops:.3g} backward"))
        if self.step_seconds is not None and self.copy_share is not None:
            rows += [("copies", f"{self.upload_seconds:.3g} s to the device, {self.download_seconds:.3g} s back"),
                     ("computation", f"{self.compute_seconds:.3g} s"),
                     ("step", f"{self.step_seconds:.3g} s, bound by the {self.bound}; the link is busy for "
                              f"{self.copy_share:.0%} of it")]
        rows += [("does not fit", line) for line in self.problems] or [("fits", "yes")]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def plan_module(model: nn.Module, sample: Any = None, *, device_bytes: int, host_bytes: int | None = None,
                rates: Mapping[str, float] | None = None, blocks: Any = "auto",
                keep: Sequence[str] | str = (), trained: str = "auto", prefetch: int = 2) -> ModulePlan:
    """Predicts memory and speed of training `model` with ballast.offload(), without running it.

    Memory for the model is not needed: it may be on the device meta. It is not changed.

    Args:
        model: the model before offload(), with the parameters that are trained marked by requires_grad.
        sample: one micro-batch: a tensor, a list of arguments or a dict of keywords of the model, on any
            device, such as meta. Its shapes and types count. The result's loss, or the sum of the result,
            is what the backward pass begins with. None: no activations, operations and seconds.
        device_bytes: the memory of the device in bytes, for everything. The plan's `pool_bytes` is what
            offload() takes as device_bytes.
        host_bytes: the memory of the host in bytes. None: it is enough.
        rates: {"link": bytes per second between host memory and the device, in each direction, "flops":
            operations per second of the device}.
        blocks, keep, trained, prefetch: as for offload().

    Raises TypeError, ValueError; UsageError naming what cannot be offloaded or computed, and why. A model
    that does not fit is a plan whose `fits` is False and whose `problems` say why."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, not {type(model).__name__}")
    if any(_visits.ATTRIBUTE in module.__dict__ for module in model.modules()):
        raise UsageError("model: is offloaded already, and its handle's report() has its bytes; plan before "
                         "offload()")
    device_bytes = _arguments.whole(device_bytes, "device_bytes", 1)
    if host_bytes is not None:
        host_bytes = _arguments.whole(host_bytes, "host_bytes", 1)
    _arguments.choice(trained, "trained", ("auto", "stream", "keep"))
    layout = _Layout(model, blocks, _blocks.Rules(
        _blocks.parse_patterns(keep, "keep"), trained == "keep", 0 if trained == "stream" else _blocks.SMALL),
        trained == "auto", _arguments.whole(prefetch, "prefetch"))
    link, flops = _rates(rates)
    layout.arrange(None)
    found = FakePass() if sample is None else measure(model, sample, layout.modules)
    first = layout.modules
    layout.fit(device_bytes, found.peak_bytes)
    if sample is not None and layout.modules != first:  # smaller blocks
        found = measure(model, sample, layout.modules)
    return _plan(layout, found, device_bytes, host_bytes, link, flops)


class _Layout:
    """Which tensors move with which block, for a size of the pool."""

    def __init__(self, model: nn.Module, blocks: Any, rules: _blocks.Rules, auto_trained: bool,
                 prefetch: int) -> None:
        self._model, self._chosen, self._rules = model, blocks, rules
        self._auto_trained = auto_trained
        self.prefetch = prefetch
        self.pool_bytes = 0
        self.modules: list[nn.Module] = []
        self.sizes: dict[int, int] = {}  # of units, by number of the block
        self.names: list[str] = []
        self.moving: dict[int, list[_blocks.Named]] = {}
        self.staying: list[torch.Tensor] = []

    def arrange(self, most: int | None) -> None:
        """Finds blocks, and smaller ones inside those of more than `most` bytes. Raises UsageError."""
        auto = isinstance(self._chosen, str) and self._chosen == "auto"
        found = _blocks.find(self._model, most) if auto else _blocks.chosen(self._model, self._chosen)
        tensors = _blocks.sort(self._model, found, self._rules, set())
        for some in tensors.moving.values():
            for name, tensor in some:
                if not tensor.is_meta:
                    _units.check_tensor(name, tensor)
        if not tensors.moving:
            raise UsageError("blocks: nothing to offload was found; name modules or patterns in blocks=")
        self.modules = [block.module for block in found]
        self.names = [block.name for block in found]
        self.moving = tensors.moving
        self.sizes = {i: _units.lay_out(some)[1] for i, some in tensors.moving.items()}
        self.staying = [tensor for tensor, _ in tensors.staying.values()]

    def fit(self, device_bytes: int, activations: int) -> None:
        """Chooses the pool: room for the largest block and those ahead of it, as far as the device has it."""
        for _ in range(2):  # the second time with the blocks of the first
            room = max(device_bytes - activations - sum(self.rest().values()), GRAIN)
            largest = max(self.sizes.values())
            self.pool_bytes = min((self.prefetch + 2) * largest, room, sum(self.sizes.values()))
            if self._auto_trained:
                self._rules.keep_trained = False
                self.arrange(room // (self.prefetch + 1))
                trained = sum(t.nbytes for t in self.trained())
                self._rules.keep_trained = trained < self.pool_bytes / 10
            self.arrange(room // (self.prefetch + 1))

    def trained(self) -> list[torch.Tensor]:
        """Trained tensors that move."""
        return [t for some in self.moving.values() for _, t in some if _is_trained(t)]

    def rest(self) -> dict[str, int]:
        """Bytes on the device in addition to the pool and activations."""
        gradients = sorted(sum(t.nbytes for _, t in some if _is_trained(t)) for some in self.moving.values())
        return {"what stays": _units.bytes_of(self.staying),
                "gradients of what stays": sum(t.nbytes for t in self.staying if _is_trained(t)),
                # one leaves while the next is computed
                "gradients of two blocks": sum(gradients[-2:])}


def _plan(layout: _Layout, found: FakePass, device_bytes: int, host_bytes: int | None, link: float | None,
          flops: float | None) -> ModulePlan:
    moving, resident = layout.trained(), [t for t in layout.staying if _is_trained(t)]
    units = {layout.names[i]: nbytes for i, nbytes in layout.sizes.items()}
    device = {"blocks": layout.pool_bytes, **layout.rest(), "activations": found.peak_bytes}
    host = {"blocks": sum(units.values()),
            "optimizer states": sum(t.numel() * _states_of(t) for t in [*moving, *resident]),
            "gradients": sum(t.nbytes for t in moving)}
    changing = {i for i, some in layout.moving.items() if any(_is_trained(t) for _, t in some)}
    order = [i for i in found.order if i in layout.sizes] or sorted(layout.sizes)
    upload = _traffic([*order, *reversed(order)] if moving or resident else order, layout.sizes, changing,
                      layout.pool_bytes, layout.prefetch)
    download = sum(t.nbytes for t in moving)
    problems = []
    largest = max(units, key=lambda name: units[name])
    if units[largest] > layout.pool_bytes:
        least = sum(device.values()) - layout.pool_bytes + units[largest]
        problems.append(f"device: {largest} needs {size_text(units[largest])}, and {size_text(layout.pool_bytes)} "
                        f"are left for blocks; {least} bytes do, or smaller blocks in blocks=")
    elif sum(device.values()) > device_bytes:
        problems.append(f"device: {size_text(sum(device.values()))} of {size_text(device_bytes)} are needed")
    if host_bytes is not None and sum(host.values()) > host_bytes:
        problems.append(f"host memory: {size_text(sum(host.values()))} of {size_text(host_bytes)} are needed")
    timed = link is not None and flops is not None and found.forward_flops > 0
    return ModulePlan(
        units, device, host, device_bytes, host_bytes, layout.pool_bytes, upload, download,
        found.forward_flops, found.backward_flops,
        upload / link if timed and link else None, download / link if timed and link else None,
        (found.forward_flops + found.backward_flops) / flops if timed and flops else None, tuple(problems))


def _traffic(step: Sequence[int], sizes: Mapping[int, int], changing: set[int], pool: int,
             prefetch: int) -> int:
    """Bytes to the device in a step after the first, which uses units in this order. Units that leave
    are those that are not among the next `prefetch` uses, the least recently used first. The update after
    a step makes the copies of `changing` units on the device old."""
    here: dict[int, int] = {}  # last use of units on the device
    loaded = 0

    def load(unit: int, ahead: Sequence[int], needed: bool) -> bool:
        nonlocal loaded
        while unit not in here and sum(sizes[u] for u in here) + sizes[unit] > pool:
            leaving = [u for u in here if u not in ahead]
            if not leaving and not needed:
                return False
            candidates = leaving or [u for u in here if u != unit]
            if not candidates:
                break
            del here[min(candidates, key=lambda u: here[u])]
        if unit not in here:
            loaded += sizes[unit]
            here[unit] = -1
        return True

    for turn in range(3):
        for unit in changing:
            here.pop(unit, None)
        if turn == 2:
            loaded = 0
        for i, unit in enumerate(step):
            ahead = [step[(i + k) % len(step)] for k in range(prefetch + 1)]
            load(unit, ahead, True)
            here[unit] = turn * len(step) + i
            for following in ahead[1:]:
                if not load(following, ahead, False):
                    break
    return loaded


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _states_of(tensor: torch.Tensor) -> int:
    if tensor.dtype not in _STATES:
        raise UsageError(f"model: a trained parameter is {tensor.dtype}; OffloadAdamW takes bf16, fp16 and fp32")
    return _STATES[tensor.dtype]


def _rates(rates: Any) -> tuple[float | None, float | None]:
    if rates is None:
        return None, None
    if not isinstance(rates, Mapping) or set(rates) != {"link", "flops"}:
        raise UsageError('rates: must be {"link": bytes per second, "flops": operations per second}')
    link, flops = (_arguments.real(rates[key], f'rates["{key}"]', 1, 1e30) for key in ("link", "flops"))
    return link, flops


def size_text(nbytes: int) -> str:
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
