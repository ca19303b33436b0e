"""Guards parameters whose values are not there yet, so that every use waits for them or brings them.

There are two reasons, and a parameter may have both: an update is still writing the values, or
ballast.offload() keeps them in another memory. As long as one of them holds, the class of the
parameter is a guard, a subclass of the parameter's own class with `__torch_function__`. So every use
from Python is noticed: operations, `state_dict()`, `detach()`, `data_ptr()`, `numpy()`, copies,
printing. Without a reason the parameter gets its own class back.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from typing import Any, Callable, ContextManager, Iterable, Iterator, Protocol

import torch
from torch._compile import _disable_dynamo

# Functions that wait for a parameter, by its id(). With None, they wait for all parameters of the
# same optimizer.
_waits: dict[int, Callable[[torch.Tensor | None], None]] = {}
_places: dict[int, "Place"] = {}  # the places of parameters whose values are elsewhere, by id()
_guards: dict[type, type] = {}
_lock = threading.RLock()
_forward_hook: Any = None

# Attributes of a parameter that can be used without reading its values.
_NAMES = ("requires_grad_", "size", "dim", "numel", "nelement", "ndimension", "element_size", "stride",
          "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "register_hook",
          "register_post_accumulate_grad_hook", "is_inference", "get_device", "is_same_size",
          "is_pinned", "__len__", "__hash__")
_PROPERTIES = ("grad", "requires_grad", "shape", "dtype", "device", "layout", "is_leaf", "_version",
               "grad_fn", "output_nr", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
               "is_nested", "is_mkldnn", "is_sparse_csr", "is_xpu", "is_mps", "is_xla", "is_ipu",
               "ndim", "name", "names", "itemsize", "nbytes", "_base", "_backward_hooks",
               "_post_accumulate_grad_hooks", "retains_grad", "grad_dtype", "_grad", "_cdata")


class Place(Protocol):
    """Another memory, in which the values of some parameters are while nobody uses them."""

    def using(self) -> ContextManager[Callable[[Any], None]]:
        """Brings the values to where code may use them, during the context. The context's function
        gets the result of the use. The parameters may stay guarded."""

    def bring_home(self) -> None:
        """Makes the parameters ordinary ones in host memory. Calls return_from() for each."""

    @property
    def on_nvme(self) -> bool:
        """Whether the values are on NVMe while nobody uses them."""

    def put_back(self) -> None:
        """Ends bring_home(): the values go back to NVMe."""


def _values_unread() -> frozenset[Any]:
    found = {getattr(torch.Tensor, name) for name in _NAMES if hasattr(torch.Tensor, name)}
    for name in _PROPERTIES:
        attribute = getattr(torch.Tensor, name, None)
        for way in ("__get__", "__set__", "__delete__"):
            if hasattr(attribute, way):
                found.add(getattr(attribute, way))
    return frozenset(found)


_UNREAD = _values_unread()
# Functions that look for parameters in a graph, which refers to them where they are now.
_OF_GRAPHS = frozenset((torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward))


class _Guard:
    """Members that guards add to the class of a parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNREAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        guarded = _guarded_in((args, kwargs))
        for parameter in guarded:
            wait_for_update(parameter)
        places = {id(p): p for p in map(_place_of, guarded) if p is not None}
        if not places:
            return func(*args, **kwargs)
        if func in _OF_GRAPHS:
            with _unguarded(guarded):
                return func(*args, **kwargs)
        with contextlib.ExitStack() as uses:
            ends = [uses.enter_context(place.using()) for place in places.values()]
            again = any(isinstance(parameter, _Guard) for parameter in guarded)
            with torch._C.DisableTorchFunctionSubclass() if again else contextlib.nullcontext():
                result = func(*args, **kwargs)
            for end in ends:
                end(result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for(self)
        return self.__reduce_ex__(protocol)


def guard(parameters: Iterable[torch.Tensor], wait: Callable[[torch.Tensor | None], None]) -> None:
    """Makes later uses of the parameters call `wait` first, because of an update. `wait` calls
    release()."""
    global _forward_hook
    with _lock:
        for parameter in list(parameters):
            _waits[id(parameter)] = wait
            try:
                parameter.__class__ = _guard_of(type(parameter))
            except TypeError:  # a class of another layout, such as one with slots
                wait(parameter)
        if _forward_hook is None and _waits:
            _forward_hook = torch.nn.modules.module.register_module_forward_pre_hook(_before_forward)
    _watch_compiler()


def release(parameter: torch.Tensor) -> None:
    """Records that the parameter is updated. Does nothing for one that is not guarded."""
    global _forward_hook
    with _lock:
        _waits.pop(id(parameter), None)
        _give_class_back(parameter)
        if not _waits and _forward_hook is not None:
            _forward_hook.remove()
            _forward_hook = None


def leave_for(parameter: torch.Tensor, place: Place) -> None:
    """Makes later uses of the parameter ask `place` for its values."""
    with _lock:
        _places[id(parameter)] = place
        parameter.__class__ = _guard_of(type(parameter))


def return_from(parameter: torch.Tensor) -> None:
    """Records that the values are where they can be used. An update may still write them."""
    with _lock:
        _places.pop(id(parameter), None)
        _give_class_back(parameter)


def forget(place: Place, numbers: Iterable[int]) -> None:
    """Ends a place whose parameters may not exist any more. Their id() may be that of others then."""
    for number in numbers:
        if _places.get(number) is place:
            del _places[number]


def is_guarded(parameter: Any) -> bool:
    return isinstance(parameter, _Guard)


def is_updating(parameter: torch.Tensor) -> bool:
    """Whether an update may be writing the parameter."""
    return id(parameter) in _waits


def any_guarded() -> bool:
    """Whether an update of any optimizer may be writing a parameter, or values are elsewhere."""
    return bool(_waits) or bool(_places)


def wait_for_update(parameter: Any) -> None:
    """Returns when no update writes the parameter."""
    wait = _waits.get(id(parameter))
    if wait is None:
        if isinstance(parameter, _Guard):
            release(parameter)  # type: ignore[arg-type]
        return
    place = _places.pop(id(parameter), None)  # an update ends in host memory, where the values are
    try:
        wait(parameter)
        release(parameter)
    finally:
        if place is not None:
            leave_for(parameter, place)


def wait_for(parameter: Any) -> None:
    """Returns when the parameter is an ordinary one that no update writes."""
    wait_for_update(parameter)
    place = _place_of(parameter)
    if place is not None:
        place.bring_home()
        return_from(parameter)  # also if the place has ended


def nvme_place_of(parameter: torch.Tensor) -> Place | None:
    """The place of a parameter whose values are on NVMe now."""
    place = _place_of(parameter)
    return place if place is not None and place.on_nvme else None


def _place_of(parameter: Any) -> Place | None:
    return _places.get(id(parameter)) if isinstance(parameter, _Guard) else None


def _give_class_back(parameter: torch.Tensor) -> None:
    kind = type(parameter)
    number = id(parameter)
    if issubclass(kind, _Guard) and number not in _waits and number not in _places:
        parameter.__class__ = kind.__mro__[2]


@contextlib.contextmanager
def _unguarded(parameters: list[torch.Tensor]) -> Iterator[None]:
    places = {p: place for p in parameters if (place := _place_of(p)) is not None}
    for parameter in places:
        return_from(parameter)
    try:
        yield
    finally:
        for parameter, place in places.items():
            leave_for(parameter, place)


def code_is_compiled() -> bool:
    """Whether torch.compile has compiled anything, since compiled code reads parameters
    unguarded."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


def _guard_of(kind: type) -> type:
    if issubclass(kind, _Guard):
        return kind
    found = _guards.get(kind)
    if found is None:
        found = _guards[kind] = type(kind.__name__, (_Guard, kind), {"__module__": kind.__module__})
    return found


def _guarded_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if isinstance(value, _Guard) else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [parameter for one in value for parameter in _guarded_in(one)]
    return []


@_disable_dynamo
def _before_forward(module: torch.nn.Module, _: Any) -> None:
    """C++ code reads parameters unguarded: that of a module's own forward pass, of TorchScript, and
    torch's fast paths for evaluation, which also check the class of parameters."""
    whole = not module.training or isinstance(module, torch.jit.ScriptModule)
    for parameter in module.parameters(recurse=whole):
        if isinstance(parameter, _Guard):
            wait_for_update(parameter)


def _wait_for_everything(*_: Any) -> None:
    for wait in set(_waits.values()):
        wait(None)


def _watch_compiler() -> None:
    """Waits for all updates before torch.compile reads parameters."""
    if "torch._dynamo" not in sys.modules:
        return
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:  # an older torch
        return
    # torch._dynamo.reset() removes the callback.
    if _wait_for_everything not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_wait_for_everything)
