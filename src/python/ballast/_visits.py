"""Classes that notice uses of offloaded modules and of their parameters."""

from __future__ import annotations

import contextlib
import copyreg
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from torch import nn

from . import _guards
from ._passes import Passes, tensors_in
from ._units import Unit
from .errors import UsageError

if TYPE_CHECKING:
    from .offloading import Offloaded

ATTRIBUTE = "_ballast_offload"  # of modules: the handle and the module's units
_classes: dict[type, type] = {}


class UnitPlace:
    """The place of a unit's members for _guards."""

    def __init__(self, passes: Passes, unit: Unit) -> None:
        self._passes = weakref.ref(passes)
        self._unit = weakref.ref(unit)

    @classmethod
    def of_members(cls, passes: Passes, unit: Unit) -> UnitPlace:
        """A place that ends with the unit."""
        place = cls(passes, unit)
        numbers = [id(member.tensor) for member in unit.members]
        weakref.finalize(unit, _guards.forget, place, numbers).atexit = False
        return place

    @contextlib.contextmanager
    def using(self) -> Iterator[Callable[[Any], None]]:
        passes, unit = self._passes(), self._unit()
        if passes is None or unit is None:
            yield _nothing
        elif not passes.running:
            passes.bring_home(unit)
            yield _nothing
        else:
            with _visit(passes, unit) as follow:
                yield follow

    def bring_home(self) -> None:
        passes, unit = self._passes(), self._unit()
        if passes is not None and unit is not None:
            passes.bring_home(unit)

    @property
    def on_nvme(self) -> bool:
        unit = self._unit()
        return unit is not None and unit.home.on_nvme

    def put_back(self) -> None:
        passes, unit = self._passes(), self._unit()
        if passes is not None and unit is not None and not passes.running:
            passes.close_home(unit)


class _ViewPlace(UnitPlace):
    """The place of a view that other code has made of a member on the device. No tensor at home has
    the view's history in the graph, so each use brings the unit to the device."""

    def __init__(self, passes: Passes, unit: Unit, view: torch.Tensor) -> None:
        super().__init__(passes, unit)
        self._view = weakref.ref(view)

    @contextlib.contextmanager
    def using(self) -> Iterator[Callable[[Any], None]]:
        passes, unit = self._passes(), self._unit()
        if passes is None or unit is None or passes.ended:
            yield _nothing
        else:
            with _visit(passes, unit) as follow:
                yield follow

    def bring_home(self) -> None:
        view = self._view()
        if view is not None:
            _guards.return_from(view)


def _nothing(_: Any) -> None:
    pass


@contextlib.contextmanager
def _visit(passes: Passes, unit: Unit) -> Iterator[Callable[[Any], None]]:
    """Has the unit on the device during the context. The context's function gets the result."""
    passes.begin_visit(unit)
    try:
        yield lambda result: _follow(passes, unit, result)
    finally:
        passes.end_visit(unit)


def _follow(passes: Passes, unit: Unit, result: Any) -> None:
    """Brings the unit for the backward pass of the result, and for later uses of views in it."""
    passes.watch([unit], result)
    for tensor in tensors_in(result):
        if tensor.layout == torch.strided and type(tensor) is torch.Tensor and (
                tensor.untyped_storage()._cdata == unit.storage._cdata):
            place = _ViewPlace(passes, unit, tensor)
            _guards.leave_for(tensor, place)
            end = weakref.finalize(tensor, _guards.forget, place, [id(tensor)])
            end.atexit = False


class _OffloadedModule:
    """Members that are added to the class of modules with units, and of the model.

    The units come before everything else in the call: users' hooks, code compiled for the module and
    checkpointing by the class itself. Copies and pickles have the original class.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(ATTRIBUTE)
        if state is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        passes, units = state[0].passes, state[1]
        passes.enter(units)
        result = None
        try:
            result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            passes.leave(units, result)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = object.__new__(original_class(type(self)))
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k != ATTRIBUTE})
        made, *rest = plain.__reduce_ex__(protocol)
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            # pickle would compare the class with that of this object
            made = copyreg._reconstructor  # type: ignore[attr-defined]
            rest[0] = (type(plain), object, None)
        return (made, *rest)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts, as .to(), .cuda() and .half() ask for. Those that would change nothing do
        nothing. A move to the CPU moves what stays on the device."""
        state = self.__dict__.get(ATTRIBUTE)
        if state is None:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        handle = state[0]
        device = _device_after(fn, _floating_types(self))  # type: ignore[arg-type]
        whole = handle.model is self
        if device != handle.device and not (whole and device.type == "cpu"):
            raise UsageError(_UNCHANGEABLE.format(device))
        if whole:
            handle.park(device != handle.device)
        return self


_UNCHANGEABLE = ("offload: an offloaded model cannot be changed to {}; call remove() on the handle first, and "
                 "offload() again after the change")


def _floating_types(module: nn.Module) -> set[torch.dtype]:
    return {t.dtype for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()}


def _device_after(fn: Callable[[torch.Tensor], torch.Tensor], dtypes: set[torch.dtype]) -> torch.device:
    """The device to which `fn` moves tensors. Raises UsageError if it changes one of these types."""
    device = torch.device("cpu")
    for dtype in dtypes or {torch.float32}:
        with torch.no_grad():
            moved = fn(torch.empty(0, dtype=dtype, device="cpu"))
        if moved.dtype != dtype:
            raise UsageError(_UNCHANGEABLE.format(moved.dtype))
        device = moved.device
    return device


def original_class(kind: type) -> type:
    """The class that a module had before its class was changed."""
    return kind.__mro__[2] if kind.__mro__[1] is _OffloadedModule else kind


def attach(module: nn.Module, handle: Offloaded, units: list[Unit]) -> None:
    """Makes calls of the module bring these units."""
    if ATTRIBUTE not in module.__dict__:
        kind = type(module)
        if kind not in _classes:
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            _classes[kind] = type(kind.__name__, (_OffloadedModule, kind), names)
        module.__class__ = _classes[kind]
    module.__dict__[ATTRIBUTE] = (handle, units)


def units_of(module: nn.Module) -> list[Unit]:
    state = module.__dict__.get(ATTRIBUTE)
    return [] if state is None else state[1]


def detach(module: nn.Module) -> None:
    if module.__dict__.pop(ATTRIBUTE, None) is not None:
        module.__class__ = original_class(type(module))
