"""Units: the weights of a block, which move between host memory and the device as one."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

import torch

from . import _dtensors, _guards
from ._accelerator import Copy
from ._homes import HostHome, NvmeHome
from ._slots import GRAIN, Slot
from .errors import UsageError


class Member:
    """A tensor of a unit: a parameter, a buffer, or a plain tensor inside a quantised one.

    `owner` is the parameter or buffer that the module has. `home` is its place in host memory,
    `away` its view of the device, which exists after the first load.
    """

    def __init__(self, name: str, tensor: torch.Tensor, owner: torch.Tensor, start: int) -> None:
        self.name = name
        self.tensor = tensor
        self.owner = owner
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.start = start
        self.end = start + span(tensor)
        self.home: torch.Tensor
        self.away: torch.Tensor | None = None
        self.on_device = False
        self.sum: torch.Tensor | None = None  # see Departures
        self.guardable = type(tensor) in (torch.Tensor, torch.nn.Parameter)

    @property
    def trained(self) -> bool:
        """Whether a backward pass gives it a gradient, at present."""
        return isinstance(self.tensor, torch.nn.Parameter) and self.tensor.requires_grad

    def view(self, storage: torch.UntypedStorage, start: int = 0) -> torch.Tensor:
        """The member at byte `start` of a storage."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, start // self.dtype.itemsize, self.shape, self.stride)

    def copy_home(self) -> None:
        """Gives the home the values of the tensor."""
        self.home.copy_(self.tensor.data)

    def begin(self) -> None:
        """Makes the tensor one at home."""
        if self.tensor.is_meta:
            become(self.tensor, self.home)
        self.point(self.home, False)

    def point(self, data: torch.Tensor, on_device: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.tensor.data = data
        self.on_device = on_device


class Unit:
    """Members that move together.

    On the device, all members are views of `storage`, the same one for the life of the unit. While
    the unit has a slot, the storage has the slot's address; otherwise it is empty and each access
    raises an error that names the unit. So views that autograd has saved are valid again after the
    next load, at whatever address.
    """

    def __init__(self, name: str, members: list[Member], home: HostHome | NvmeHome,
                 device: torch.device, fill: Callable[[Member], None]) -> None:
        """`fill` gives a member's home its values."""
        self.name = name
        self.members = members
        self.home = home
        self.nbytes = home.nbytes
        self.storage = torch.UntypedStorage(0, device=device)  # type: ignore[no-untyped-call]
        self.slot: Slot[Unit] | None = None
        self.ready: Copy | None = None  # the copy to the device
        self.running = 0  # calls of its module and uses elsewhere that have not returned
        self.in_graph = False  # a graph that will be walked backward has its trained members
        self.exposed = False  # members are unguarded at home, so the home may change uncounted
        self.last_use = 0
        self.marks: dict[Any, Any] = {}  # by stream: the end of the last use
        self.unmarked = False  # work with the unit may have been issued since
        self.place: _guards.Place  # for its members while they are guarded
        self._hide()
        with torch.no_grad():
            for member in members:
                member.home = member.view(home.part(member.start, member.end))
                if not home.filled:
                    fill(member)
                member.begin()
        home.begin()
        home.close()
        self.versions = self.present_versions()

    @property
    def on_device(self) -> bool:
        """Whether a tensor of the model is on the device."""
        return any(member.on_device for member in self.members)

    def present_versions(self) -> list[int]:
        """PyTorch's counts of in-place changes of the members."""
        with torch._C.DisableTorchFunctionSubclass():
            return [member.tensor._version for member in self.members]

    def is_changed(self) -> bool:
        """Whether a member may have changed since it was last sent to the other side."""
        return self.exposed or self.versions != self.present_versions()

    def adopt(self) -> None:
        """Takes values that a user gave at home by `parameter.data = other` into the home."""
        for member in self.members if self.home.is_open else ():
            if _guards.is_guarded(member.tensor) or member.on_device:
                continue
            data = member.tensor.detach()
            if data.data_ptr() != member.home.data_ptr():
                if data.shape != member.shape or data.dtype != member.dtype:
                    raise UsageError(
                        f"{member.name}: was replaced by a tensor of another shape or type while its "
                        "module is offloaded; call remove() on the handle first")
                member.home.copy_(data)
                member.point(member.home, False)
        self.exposed = False
        self.settle()
        self.versions = self.present_versions()

    def settle(self) -> None:
        """Has the next copy to the device read what is at home now."""
        if self.home.shared and self.ready is not None:
            self.ready.finish()  # memory that is not shared any more is not pinned any more
        self.home.settle()

    def lend(self, slot: Slot[Unit]) -> None:
        """Gives the storage a slot."""
        torch._C._clear_storage_data_ptr_access_error_msg(
            self.storage._cdata)
        self.slot = slot
        self.storage._swap_data_ptr_(slot.storage)  # type: ignore[attr-defined]
        for member in self.members:
            if member.away is None:
                member.away = member.view(self.storage, member.start)

    def take_back(self) -> Slot[Unit]:
        slot, self.slot = self.slot, None
        assert slot is not None
        self.storage._swap_data_ptr_(slot.storage)  # type: ignore[attr-defined]
        self._hide()
        return slot

    def point_away(self) -> None:
        for member in self.members:
            if member.guardable:
                _guards.return_from(member.tensor)
            if not member.on_device:
                assert member.away is not None
                member.point(member.away, True)

    def _hide(self) -> None:
        torch._C._set_storage_data_ptr_access_error_msg(
            self.storage._cdata, f"{self.name}: its weights were used when they were not on the "
            "device; use them in a forward pass of the model, or in handle.on_device()")


def become(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Makes a tensor on the device meta one with this memory. It stays the same object."""
    made: torch.Tensor = data.detach()
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of a parameter or buffer: those inside a wrapper subclass, as of torchao, and
    the scales of bitsandbytes' 4-bit weights."""
    if hasattr(tensor, "__tensor_flatten__"):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from parts_of(f"{name}.{inner}", getattr(tensor, inner))
        return
    yield name, tensor
    for state, field in _scales_of(tensor):
        yield f"{name}.{field}", getattr(state, field)


def _scales_of(tensor: torch.Tensor) -> Iterator[tuple[Any, str]]:
    """The objects and names of the scales of a 4-bit weight of bitsandbytes, and of their scales."""
    state = getattr(tensor, "quant_state", None)
    while state is not None:
        for field in ("absmax", "code", "offset"):
            scale = getattr(state, field, None)
            if isinstance(scale, torch.Tensor) and scale.dim() > 0:
                yield state, field
        state = getattr(state, "state2", None)


def own_scales(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Gives each weight its own copy of scales that bitsandbytes shares between all, since weights of
    several units are not on the device at the same times."""
    for _, tensor in tensors:
        for state, field in _scales_of(tensor):
            if field == "code":
                setattr(state, field, getattr(state, field).clone())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares tensors of the same shape and type, `one` in host memory."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size())
    other = other.cpu()
    return torch.equal(one, other) if whole is None else torch.equal(one.view(whole), other.view(whole))


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of tensors, with the parts of quantised ones."""
    return sum(part.numel() * part.element_size() for t in tensors for _, part in parts_of("", t))


def lay_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Member], int]:
    """Members for these parameters and buffers, and the bytes of a unit of them. Each member begins
    at a multiple of GRAIN."""
    members: list[Member] = []
    end = 0
    for name, tensor in tensors:
        for part_name, part in parts_of(name, tensor):
            if part.numel() > 0:
                start = -(-end // GRAIN) * GRAIN
                members.append(Member(part_name, part, tensor, start))
                end = members[-1].end
    return members, -(-end // GRAIN) * GRAIN


def check_tensor(name: str, tensor: torch.Tensor, has_source: bool = False) -> None:
    """Raises UsageError naming a tensor that cannot be offloaded. `has_source`: its values are in a
    file."""
    if _dtensors.is_dtensor(tensor):
        raise UsageError(f"{name}: is a DTensor, as of FSDP2 or tensor parallelism, which move weights "
                         "themselves")
    for part_name, part in parts_of(name, tensor):
        problem = None if has_source and part.is_meta else _problem_of(part)
        if problem:
            raise UsageError(f"{part_name}: {problem}")
    inner = hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "quant_state")
    if inner and tensor.requires_grad:
        raise UsageError(f"{name}: is a trained {type(tensor).__name__}; only frozen weights may be "
                         "quantised, so call requires_grad_(False)")


def _problem_of(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "is on the device meta, so it has no values; name a folder in weights=, or load it on the CPU first"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "is sparse, nested or of another layout than torch.strided; name it in keep="
    if tensor.is_inference():
        return "was made in torch.inference_mode(); use a clone() made outside of it"
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape)):
        return "is expanded, so several elements share memory; use a contiguous() copy"
    if type(tensor).__name__ == "Int8Params" and getattr(tensor, "CB", None) is None:
        return ("is an Int8Params of bitsandbytes that is not quantised yet; move its module to the "
                "device first, then back")
    return None
