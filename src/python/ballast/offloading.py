"""Runs and trains modules of PyTorch that are larger than the memory of their device.

    handle = ballast.offload(model, "cuda")
    loss = model(inputs.to(handle.device)).mean()
    loss.backward()
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
import weakref
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from . import _arguments, _blocks, _guards, _saved_models, _shared_homes, _units, _visits
from ._accelerator import Accelerator, HostMemory, accelerator
from ._home_plan import HomePlan
from ._offload_report import Report, Stay
from ._passes import Passes
from ._residency import Residency, plainly
from ._slots import GRAIN, Pool
from ._units import Unit
from ._weight_folders import Source
from ._wrappers import Wrappers
from .errors import OutOfMemoryError, UsageError

__all__ = ["Offloaded", "Report", "offload"]


def offload(model: nn.Module, device: str | int | torch.device = "cuda", *,
            device_bytes: int | str = "auto", blocks: Any = "auto", keep: Sequence[str] | str = (),
            trained: str = "auto", prefetch: int = 2, shared: bool = False,
            weights: str | os.PathLike[str] | None = None, nvme: Any = None,
            host_bytes: int | str = "auto", any_file_system: bool = False) -> Offloaded:
    """Runs or trains `model` on a device that cannot hold its weights. Losses, gradients and weights
    have the same bits as without.

    The weights of each block are in host memory or on NVMe. They come to the device when the block
    runs, forward or backward, some blocks ahead, and leave by the order in which blocks are used.
    Between passes every offloaded parameter is a tensor in host memory, and optimizers, state_dict(),
    copies and merges use it there. Inputs belong on `handle.device`. `model.to(handle.device)` does
    nothing, and `model.cpu()` moves what stays on the device until then.

    Args:
        model: any module with its weights loaded, or on the device meta with `weights`. It is changed
            in place, and stays the same object with the same parameters.
        device: an accelerator of PyTorch, such as "cuda:1".
        device_bytes: bytes of device memory for weights that come and go. "auto": the largest block
            `prefetch` + 2 times, but at most 80% of what is free. What stays on the device comes in
            addition; report() has both.
        blocks: what is fetched as one: modules, or patterns of their names ("layers.*"). "auto": the
            elements of ModuleList, ModuleDict and Sequential, and inside blocks of more than
            device_bytes / (prefetch + 1) again.
        keep: patterns of names of parameters and buffers that stay on the device.
        trained: where trained parameters of blocks are. "stream": they come and go. "keep": on the
            device. "auto": on the device those of less than 1 MiB, and all if they take less than a
            tenth of device_bytes, as adapters do.
        prefetch: how many blocks are fetched ahead of their use.
        shared: whether the ranks of torch.distributed on a machine keep blocks without trained parameters once,
            in memory that they share. Then all ranks call offload() together, with equal models. A change of such
            weights stays within its process.
        weights: a safetensors file, its index or a folder, whose tensors have the names of the model.
            They are read block by block into their homes and converted to the model's types.
        nvme: one or several directories for blocks that do not fit in host_bytes. Checksums are compared
            at each read. Weights that the program uses between passes are in host memory until the next
            pass.
        host_bytes: with `nvme`, host memory for blocks, and for `prefetch` + 2 buffers of the largest
            block on NVMe. The first blocks are in host memory. "auto": half of what is free.
        any_file_system: accept directories for `nvme` on file systems that are not suited.

    Raises TypeError; UsageError naming what cannot be offloaded and why, or a tensor that `weights` and
    the model do not share; OutOfMemoryError if a block is larger than device_bytes, or host_bytes cannot
    hold the buffers; FileError naming a file or directory."""
    _check_torch()
    if shared and (weights is not None or nvme is not None):
        raise UsageError("shared: True does not work with weights= or nvme= yet; load the model on the CPU, or use "
                         "shared=False, with which each process has its own weights")
    plan = HomePlan(nvme, host_bytes, any_file_system)
    return Offloaded(model, accelerator(device), device_bytes, blocks, keep, trained, prefetch,
                     shared, weights=weights, homes=plan)


class Offloaded:
    """The handle of an offloaded model; see offload(). One thread at a time uses the model."""

    def __init__(self, model: nn.Module, memory: Accelerator, device_bytes: int | str, blocks: Any,
                 keep: Sequence[str] | str, trained: str, prefetch: int,
                 shared: bool = False, small: int = _blocks.SMALL, weights: Any = None,
                 homes: HomePlan | None = None) -> None:
        _check_model(model)
        _arguments.choice(trained, "trained", ("auto", "stream", "keep"))
        _arguments.choice(shared, "shared", (False, True))
        prefetch = _arguments.whole(prefetch, "prefetch")
        if device_bytes != "auto":
            device_bytes = _arguments.whole(device_bytes, "device_bytes", 1)
        self.model = model
        self.device: torch.device = memory.device
        self._memory = memory
        self._chosen = blocks
        self._rules = _blocks.Rules(_blocks.parse_patterns(keep, "keep"), trained == "keep",
                                    0 if trained == "stream" else small, small)
        self._changed = False
        self._on_host = False
        self._parked = False  # model.cpu() was called
        self._known: set[int] = set()
        self._staying: dict[str, tuple[torch.Tensor, str]] = {}
        self._warned_of_casts = False
        self._largest_split: int | None = None
        self._sharing: _shared_homes.Sharing | None = None
        self._homes = homes or HomePlan()
        self._source = Source(model, weights)
        pool = self._make_pool(device_bytes, trained == "auto", prefetch)
        self._residency = Residency(memory, pool, prefetch)
        self.passes = Passes(self._residency, self._before_pass)
        try:
            self._arrange_first(shared, prefetch)
        except BaseException:
            self._take_apart()
            raise
        _visits.attach(model, self, _visits.units_of(model))
        own = weakref.WeakMethod(self._left_to_ddp)
        self._wrappers = Wrappers(model, lambda: [] if (names := own()) is None else names())
        self._end = weakref.finalize(self, memory.synchronize)  # its memory is freed, so no copy may be under way
        self._end.atexit = False
        _handles.add(self)
        _watch_registrations()

    # Use

    def report(self) -> Report:
        """Bytes per place, copies, waits and guesses so far. print() gives a table."""
        counts, order = self._residency.counts, self._residency.order
        units: dict[str, int] = {}
        nvme_units: dict[str, int] = {}
        for unit in self.passes.units:  # a block has a second one for what it got later
            units[unit.name] = units.get(unit.name, 0) + unit.nbytes
            if unit.home.on_nvme:
                nvme_units[unit.name] = unit.nbytes
        space = self._homes.space
        return Report(
            device=str(self.device), pool_bytes=self._residency.pool.nbytes,
            peak_bytes=self._residency.pool.peak,
            units=units,
            pinned_bytes=sum(u.nbytes for u in self.passes.units if u.home.pinned),
            shared_bytes=sum(u.nbytes for u in self.passes.units if u.home.shared),
            staying={name: Stay(_units.bytes_of([tensor]), reason)
                     for name, (tensor, reason) in self._staying.items()},
            loads=counts.loads, bytes_in=counts.bytes_in,
            bytes_out=self._residency.departures.bytes_out, waits=counts.waits,
            wait_seconds=counts.wait_seconds, visits=self.passes.visits, right_guesses=order.right,
            wrong_guesses=order.wrong, nvme_units=nvme_units, staging_bytes=space.staging_bytes if space else 0,
            bytes_read=space.bytes_read if space else 0, bytes_written=space.bytes_written if space else 0,
            read_waits=counts.read_waits, read_wait_seconds=counts.read_wait_seconds)

    @contextlib.contextmanager
    def on_device(self, *modules: nn.Module) -> Iterator[None]:
        """Keeps the blocks of these modules on the device, where code outside of the model can use
        their parameters. All of them have to fit into device_bytes at once. Raises UsageError naming a
        module that the model does not have."""
        own = set(self.model.modules())
        for module in modules:
            if module not in own:
                raise UsageError(f"on_device: a {type(module).__name__} is not a module of the model")
        units = {unit: None for module in modules for part in module.modules()
                 for unit in _visits.units_of(part)}
        self.passes.enter(list(units))
        try:
            for unit in units:
                self._residency.guard(unit)
            yield
        finally:
            self.passes.leave(list(units), None)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Moves what stays on the device to host memory, too, so that adapters can be merged with
        offloaded weights. The model cannot run meanwhile."""
        if self.passes.running or self._on_host:
            raise UsageError("on_host: a pass, or another on_host(), is under way")
        self._move_staying(torch.device("cpu"))
        self._on_host = True
        try:
            yield
        finally:
            self._on_host = False
            if not self._parked:
                self._move_staying(self.device)

    def park(self, parked: bool) -> None:
        """Moves what stays on the device to host memory until the model is moved to the device again, as
        model.cpu() and model.to(handle.device) ask for."""
        if parked and self.passes.running:
            raise UsageError("offload: the model cannot be moved to the CPU in a pass")
        if parked != self._parked:
            self._parked = parked
            if not self._on_host:
                self._move_staying(torch.device("cpu") if parked else self.device)

    def synchronize(self) -> None:
        """Returns when all copies have ended."""
        self._memory.synchronize()

    def save(self, folder: str | os.PathLike[str], optimizer: Any = None, *, frozen: bool = True) -> None:
        """Writes the model's parameters and persistent buffers to safetensors files with an index in
        `folder`, and with `optimizer`, one of Ballast's, its states and settings: block by block, as one
        state. A state that the folder has is replaced when the new one is complete on the disk. Without
        `frozen`, frozen parameters are left out. Raises TypeError, UsageError naming a tensor that
        cannot be saved, FileError."""
        _saved_models.save(self, folder, optimizer, frozen)

    def load(self, folder: str | os.PathLike[str], optimizer: Any = None) -> None:
        """Reads a state of save() into the model, and into `optimizer`. Nothing changes if a tensor is
        missing, damaged or of another shape, or if the states of the optimizer do not fit or are not
        those that were saved with the weights: raises UsageError or FileError naming it."""
        _saved_models.load(self, folder, optimizer)

    def order(self) -> list[list[list[str]]]:
        """The learnt order of blocks, by their names, for save()."""
        return self._residency.order.described()

    def learn_order(self, described: list[list[list[str]]]) -> None:
        """Takes over a result of order(), as far as the blocks have the same names."""
        self._residency.order.learn(described, {unit.name: unit for unit in self.passes.units})

    def remove(self) -> None:
        """Makes the model an ordinary one in host memory, and ends the handle. Raises OutOfMemoryError
        if its blocks on NVMe would take more than half of the free host memory."""
        if not self._end.alive:
            return
        self.passes.end_backward()
        for unit in self.passes.units:  # all of them or none
            unit.home.open_for_user()
        self.passes.ended = True
        self._take_apart()
        self._wrappers.forget()
        _handles.discard(self)
        self._end()

    def _take_apart(self) -> None:
        self._source.end()
        self._memory.synchronize()
        for unit in self.passes.units:
            unit.running = 0
            unit.in_graph = False
            if unit.slot is not None:
                self._residency.evict(unit)
            self._residency.bring_home(unit)
            unit.adopt()
        self._memory.close()
        for unit in self.passes.units:
            unit.home.unpin()
        if self._homes.space is not None:
            self._homes.space.unpin()
        self._move_staying(torch.device("cpu"))
        for module in self.model.modules():
            _visits.detach(module)

    # Arrangement

    def _make_pool(self, device_bytes: int | str, auto_trained: bool, prefetch: int) -> Pool[Unit]:
        """Decides which tensors stay, and the size of the pool."""
        if device_bytes != "auto":
            self._largest_split = int(device_bytes) // (prefetch + 1)
        tensors, sizes = self._sort()
        if not sizes:
            raise UsageError(_blocks.say_none(self.model, bool(self._find_blocks())))
        nbytes = (prefetch + 2) * max(sizes.values()) if device_bytes == "auto" else int(device_bytes)
        if auto_trained:
            trained = sum(_units.bytes_of([t]) for some in tensors.moving.values() for _, t in some
                          if isinstance(t, nn.Parameter) and t.requires_grad)
            self._rules.keep_trained = trained < nbytes / 10
            tensors, sizes = self._sort()
        free = self._memory.free_bytes()
        if device_bytes == "auto" and free is not None:
            stays = _units.bytes_of([tensor for tensor, _ in tensors.staying.values()])
            most = max(int(0.8 * (free - stays)), GRAIN)
            if nbytes > most:
                nbytes, self._largest_split = most, most // (prefetch + 1)
                tensors, sizes = self._sort()
        name = max(sizes, key=lambda n: sizes[n])
        if sizes[name] > nbytes:
            raise OutOfMemoryError(
                f"device_bytes: {nbytes} bytes cannot hold {name}, which needs {sizes[name]}; allow "
                "more, or name smaller modules in blocks=")
        return self._memory.pool(max(min(nbytes, sum(sizes.values())), GRAIN))

    def _find_blocks(self) -> list[_blocks.Block]:
        if isinstance(self._chosen, str) and self._chosen == "auto":
            return _blocks.find(self.model, self._largest_split)
        return _blocks.chosen(self.model, self._chosen)

    def _sort(self) -> tuple[_blocks.Sorted, dict[str, int]]:
        """The tensors of the model, and the bytes that those of each block take on the device."""
        found = self._find_blocks()
        tensors = _blocks.sort(self.model, found, self._rules, self._known)
        return tensors, {found[i].name: _units.lay_out(some)[1] for i, some in tensors.moving.items()}

    def _arrange_first(self, shared: bool, prefetch: int) -> None:
        with _shared_homes.Sharing() if shared else contextlib.nullcontext() as self._sharing:
            self._arrange(prefetch)
            if shared and not any(self._shares(unit.members) for unit in self.passes.units):
                raise UsageError("shared: each block has trained parameters, which ranks do not share; call "
                                 "requires_grad_(False) on frozen ones before offload()")
        self._sharing = None
        self._source.end()

    @plainly
    def _arrange(self, prefetch: int | None = None) -> None:
        """Makes units of tensors that have none, and moves what stays to the device. Later, without
        `prefetch`, it does so for what was added since, and drops units whose tensors are gone."""
        found = self._find_blocks()
        tensors = _blocks.sort(self.model, found, self._rules, self._known)
        self._drop_units(tensors.all)
        for some in tensors.moving.values():
            for name, tensor in some:
                self._source.check(name, tensor)
        for name, (tensor, _) in tensors.staying.items():
            if tensor.is_meta:
                self._source.check(name, tensor)
        if prefetch is not None:
            self._plan_homes(found, tensors, prefetch)
        for number, some in sorted(tensors.moving.items()):
            self._make_unit(found[number], some)
        self._staying = tensors.staying
        for tensor, _ in tensors.staying.values():
            self._source.fill_staying(tensor, self.device)
            self._move(tensor, self.device)

    def _plan_homes(self, found: list[_blocks.Block], tensors: _blocks.Sorted, prefetch: int) -> None:
        sizes, fixed = {}, set()
        for number, some in sorted(tensors.moving.items()):
            members, sizes[found[number].name] = _units.lay_out(some)
            if not all(member.guardable for member in members):
                fixed.add(found[number].name)
        self._homes.begin(sizes, fixed, prefetch, self._memory)

    def _make_unit(self, block: _blocks.Block, tensors: Sequence[_blocks.Named]) -> None:
        if isinstance(block.module, torch.jit.ScriptModule):
            raise UsageError(f"{block.name}: is a ScriptModule, whose weights cannot be offloaded; "
                             "name them in keep=")
        _units.own_scales(tensors)
        members, nbytes = _units.lay_out(tensors)
        if nbytes > self._residency.pool.nbytes:
            raise OutOfMemoryError(f"device_bytes: {self._residency.pool.nbytes} bytes cannot hold what "
                                   f"{block.name} got in addition, which needs {nbytes}")
        home = self._homes.make(block.name, nbytes, self._memory, self._shared_memory(block, members, nbytes))
        unit = Unit(block.name, members, home, self.device, self._source.fill)
        unit.place = _visits.UnitPlace.of_members(self.passes, unit)
        for member in members:
            self._residency.departures.follow(member)
        _trim()
        self._known |= {id(tensor) for _, tensor in tensors}
        self.passes.units.append(unit)
        self._residency.guard(unit)
        _visits.attach(block.module, self, [*_visits.units_of(block.module), unit])

    def _shared_memory(self, block: _blocks.Block, members: Sequence[_units.Member],
                       nbytes: int) -> HostMemory | None:
        if self._sharing is None or not self._shares(members):
            return None
        return self._sharing.memory(block.name, members, nbytes)

    @staticmethod
    def _shares(members: Sequence[_units.Member]) -> bool:
        return not any(member.trained for member in members)

    def _drop_units(self, present: set[int]) -> None:
        gone = {unit for unit in self.passes.units
                if not any(id(member.owner) in present for member in unit.members)}
        if not gone:
            return
        for unit in gone:
            if unit.slot is not None:
                self._residency.evict(unit)
            self._residency.bring_home(unit)
            self._known -= {id(member.owner) for member in unit.members}
        self._residency.order.forget(gone)
        self._residency.departures.forget(gone)
        self.passes.units = [unit for unit in self.passes.units if unit not in gone]
        for module in self.model.modules():
            if gone & set(_visits.units_of(module)):
                left = [unit for unit in _visits.units_of(module) if unit not in gone]
                _visits.attach(module, self, left)

    def _move_staying(self, device: torch.device) -> None:
        for tensor, _ in self._staying.values():
            self._move(tensor, device)

    @staticmethod
    def _move(tensor: torch.Tensor, device: torch.device) -> None:
        """Moves a tensor that stays, and its gradient."""
        for _, part in _units.parts_of("", tensor):
            if part.device != device:
                with torch.inference_mode(False), torch.no_grad():
                    part.data = part.data.to(device)
        if tensor.grad is not None and tensor.grad.device != device:
            tensor.grad = tensor.grad.to(device)

    def _before_pass(self) -> None:
        if self._on_host:
            raise UsageError("offload: the model cannot run inside handle.on_host()")
        if self._parked:
            raise UsageError("offload: the model was moved to the CPU; model.to(handle.device) brings it back")
        if getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
            self._check_averaged()
        if self._changed:
            self._changed = False
            self._arrange()
        if not self._warned_of_casts and torch.is_autocast_enabled(self.device.type):
            self._warn_of_casts()

    def _warn_of_casts(self) -> None:
        self._warned_of_casts = True
        cast = sum(m.end - m.start for unit in self.passes.units for m in unit.members
                   if m.dtype == torch.float32 and isinstance(m.tensor, nn.Parameter))
        if cast and torch.is_grad_enabled():
            warnings.warn(f"offload: under autocast the graph keeps up to {cast // 2} bytes of 16-bit "
                          "copies of fp32 weights on the device; use bf16 weights, or checkpoint the "
                          "blocks", stacklevel=2)

    def _check_averaged(self) -> None:
        for member in (m for unit in self.passes.units for m in unit.members):
            if member.trained:
                raise UsageError(f"{member.name}: is trained and offloaded, so DistributedDataParallel "
                                 'cannot average its gradient; use trained="keep"')

    def _left_to_ddp(self) -> list[str]:
        """Names of frozen tensors in host memory, for DistributedDataParallel, which is about to wrap the model."""
        if self._changed and not (self.passes.running or self._on_host or self._parked):
            self._changed = False
            self._arrange()
        self._check_averaged()
        return [name for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]
                if id(tensor) in self._known]


_handles: weakref.WeakSet[Offloaded] = weakref.WeakSet()


@functools.cache
def _watch_registrations() -> None:
    """Has handles look again when any module gets a parameter, buffer or module. The hooks stay: the end of a handle
    may come while PyTorch walks through them."""
    def mark(*_: Any) -> None:
        for handle in _handles:
            handle._changed = True

    def mark_module(outer: nn.Module, name: str, inner: Any) -> None:
        for handle in _handles:
            handle._changed = True
            handle._wrappers.learn(outer, name, inner)

    module: Any = nn.modules.module
    module.register_module_parameter_registration_hook(mark)
    module.register_module_module_registration_hook(mark_module)
    module.register_module_buffer_registration_hook(mark)


def _trim() -> None:
    """Gives free memory back to the system. Otherwise glibc may keep that of the weights that have moved
    to their homes, which would need the model's size once more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, not {type(model).__name__}")
    if any(_visits.ATTRIBUTE in module.__dict__ for module in model.modules()):
        raise UsageError("model: is offloaded already; call remove() on its handle first")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UsageError(f"model: is a {type(model).__name__}; offload the module first, then wrap it")
    for name, tensor in model.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise UsageError(f"{name}: has no shape yet; run a forward pass before offload()")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("model: is a ScriptModule, whose weights cannot be offloaded")
    if type(model).__name__ == "OptimizedModule":
        raise UsageError("model: is a result of torch.compile(); offload the module itself, and compile "
                         "its blocks with block.compile()")


def _check_torch() -> None:
    for owner, name in ((torch.UntypedStorage, "_swap_data_ptr_"),
                        (torch._C, "_set_storage_data_ptr_access_error_msg"), (torch, "accelerator")):
        if not hasattr(owner, name):
            raise UsageError(f"offload: needs a newer PyTorch than {torch.__version__}, which lacks {name}")
