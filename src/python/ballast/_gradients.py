"""Gradients in transit from the backward pass to the update."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence

import torch

from . import _dtensors

if TYPE_CHECKING:
    from . import _ballast
    from ._engine import Record

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class TakenGradient(torch.Tensor):
    """Placeholder in `parameter.grad` for a gradient that a hook has moved to host memory.

    It has the shape of the gradient and no values. Autograd can add to it, which sums in fp32, and
    it can be set to zero or None. Its norm can be computed, and multiplying it by 1 does nothing, so
    clip_grad_norm_(parameters, inf) returns the norm. Anything else, such as clipping, raises
    RuntimeError, because it would not change the gradient of the update.
    """

    _landed: torch.Tensor | None
    _sum: torch.Tensor | None
    _to_host: Callable[[torch.Tensor], torch.Tensor]
    _settle: Callable[[], None]

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, to_host: Callable[[torch.Tensor], torch.Tensor],
                settle: Callable[[], None]) -> "TakenGradient":
        taken = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device)
        taken._to_host = to_host  # may return before the copy is complete
        taken._settle = settle  # waits for such copies
        taken._sum = None
        taken._landed = to_host(gradient)
        return taken

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Adds the gradient of another backward pass, in fp32."""
        if self._landed is not None:
            self._settle()
            if self._sum is None:
                self._sum = self._landed.to(torch.float32, copy=True)
            else:
                self._sum.add_(self._landed)
        self._landed = self._to_host(gradient.detach())

    def value(self) -> torch.Tensor:
        """The sum of the gradients, in host memory."""
        if self._landed is None:
            return torch.zeros(self.shape, dtype=torch.float32, device="cpu")
        self._settle()
        return self._landed if self._sum is None else self._sum + self._landed

    def forget(self) -> None:
        self._landed = None
        self._sum = None

    def __repr__(  # type: ignore[override]
            self, *, tensor_contents: Any = None) -> str:
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        first: Any = args[0] if args else None
        if func in (aten.add.Tensor, aten.add_.Tensor) and not kwargs and len(args) == 2:
            taken, other = args if isinstance(first, TakenGradient) else (args[1], first)
            if not isinstance(other, TakenGradient):
                taken.add_gradient(other)
                return taken
        if func in (aten.detach.default, aten.alias.default):
            return first
        if func is aten.linalg_vector_norm.default:
            return _norm(first, *args[1:], **(kwargs or {}))
        if func is aten._foreach_norm.Scalar:
            return [_norm(one, *args[1:], **(kwargs or {})) for one in first]
        if func in _PRODUCTS and bool((torch.as_tensor(args[1]) == 1).all()):
            return first if func._schema.returns else None  # foreach operations return nothing
        if func in (aten.zero_.default, aten._foreach_zero_.default):
            for taken in first if isinstance(first, (list, tuple)) else [first]:
                taken.forget() if isinstance(taken, TakenGradient) else taken.zero_()
            return first if func._schema.returns else None
        raise RuntimeError(
            "gradient_hooks: the optimizer has taken this gradient out of .grad during the backward "
            "pass; clip with max_grad_norm, or set gradient_hooks=False to read and change .grad")


_PRODUCTS = (torch.ops.aten.mul_.Tensor, torch.ops.aten.mul_.Scalar,
             torch.ops.aten._foreach_mul_.Tensor, torch.ops.aten._foreach_mul_.Scalar,
             torch.ops.aten._foreach_mul_.ScalarList)


def _norm(gradient: torch.Tensor, order: float = 2.0, *dims: Any, **options: Any) -> torch.Tensor:
    """The norm of a gradient, on its device."""
    values = gradient.value() if isinstance(gradient, TakenGradient) else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(values, order, *dims, **options)
    return norm.to(gradient.device)


_TOO_EARLY = ("gradient_hooks: True would take gradients before the ranks of this process group have "
              "averaged them; use False")


def _has_ranks() -> bool:
    distributed = torch.distributed
    return (distributed.is_available() and distributed.is_initialized()
            and distributed.get_world_size() > 1)


def arrays_of(tensors: Sequence[torch.Tensor]) -> _ballast.Arrays:
    """Contiguous tensors in host memory, for native code."""
    return ([t.data_ptr() for t in tensors], [t.numel() for t in tensors],
            [TYPES[t.dtype] for t in tensors])


class Collected(dict[torch.Tensor, torch.Tensor]):
    """The gradients of a step by parameter, contiguous and in host memory."""

    _arrays: _ballast.Arrays | None = None

    def arrays(self, places: Sequence[int] | None = None) -> _ballast.Arrays:
        """The gradients for native code; only those at these places of the order if given."""
        if self._arrays is None:
            self._arrays = arrays_of(list(self.values()))
        if places is None or len(places) == len(self):
            return self._arrays
        addresses, elements, types = self._arrays
        return ([addresses[i] for i in places], [elements[i] for i in places],
                [types[i] for i in places])


class Gradients:
    """Takes the gradients of some parameters as soon as autograd has completed them.

    A hook moves the gradient out of `parameter.grad`: on a GPU to pinned memory, on a separate
    stream, during the rest of the backward pass. A TakenGradient remains there. Parameters without
    a hook keep `.grad`, as with torch's optimizers.
    """

    def __init__(self, mode: str | bool) -> None:
        self._mode = mode  # see parameters_to_hook
        self._hooks: dict[torch.Tensor, Any] = {}
        self._pinned: dict[torch.Tensor, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def hook(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hooks those parameters that have no hook yet."""
        taker = weakref.WeakMethod(self._take)

        def take(parameter: torch.Tensor) -> None:
            method = taker()
            if method is not None:
                method(parameter)

        for parameter in parameters:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    take)

    def drop(self, parameter: torch.Tensor) -> None:
        handle = self._hooks.pop(parameter, None)
        if handle is not None:
            handle.remove()
        self._pinned.pop(parameter, None)

    def unhook(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._pinned.clear()

    def synchronize(self) -> None:
        """Waits for the copies from GPUs."""
        for stream in self._streams.values():
            stream.synchronize()

    def collect(self, records: Iterable[Record]) -> Collected:
        """The gradients of those parameters that have one. Raises TypeError naming the first
        parameter whose gradient is sparse or has another type, ValueError naming one whose gradient
        has another number of elements."""
        found = Collected()
        elsewhere = []  # those whose gradient is not yet contiguous and in host memory
        for record in records:
            parameter = record.key
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise TypeError(f"{record.name}: sparse gradients are not supported")
            dtype = gradient.dtype
            if dtype not in TYPES:
                raise TypeError(f"{record.name}: a gradient of {dtype} is not float32, bfloat16 or "
                                "float16")
            elements = record.elements if parameter is record.parameter else parameter.numel()
            if gradient.numel() != elements:
                raise ValueError(f"{record.name}: the gradient has {gradient.numel()} elements, the "
                                 f"parameter {elements}")
            if parameter is not record.parameter or _dtensors.is_dtensor(gradient):
                gradient = _dtensors.shard_of_gradient(parameter, gradient, record.name)
            found[parameter] = gradient
            if not (type(gradient) is torch.Tensor and gradient.is_cpu and gradient.is_contiguous()):
                elsewhere.append(parameter)
        for parameter in elsewhere:
            gradient = found[parameter]
            found[parameter] = (gradient.value() if isinstance(gradient, TakenGradient)
                                else self._to_host(parameter, gradient.detach()))
        self.synchronize()
        return found

    def _take(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, TakenGradient):
            return
        if gradient.layout != torch.strided:
            return  # step() will refuse it
        if _has_ranks():
            if self._mode == "auto":
                return
            raise ValueError(_TOO_EARLY)
        reference = weakref.ref(parameter)

        def to_host(another: torch.Tensor) -> torch.Tensor:
            owner = reference()
            return another if owner is None else self._to_host(owner, another)

        with torch.no_grad():
            parameter.grad = TakenGradient(gradient.detach(), to_host, self.synchronize)

    def _to_host(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns at once. The result is complete after synchronize()."""
        if gradient.device.type == "cpu":
            return gradient.contiguous()
        pinned = self._pinned.get(parameter)
        if pinned is None or pinned.dtype != gradient.dtype or pinned.shape != gradient.shape:
            pinned = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu",
                                 pin_memory=gradient.device.type == "cuda")
            self._pinned[parameter] = pinned
        stream = self._streams.get(gradient.device)
        if stream is None:
            stream = self._streams[gradient.device] = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            pinned.copy_(gradient, non_blocking=True)
        gradient.record_stream(stream)
        return pinned


def parameters_to_hook(parameters: Iterable[torch.Tensor], mode: str | bool) -> list[torch.Tensor]:
    """The parameters whose gradients are taken during the backward pass.

    "auto": those on a GPU and those with 16-bit gradients, whose sums over micro-batches would lose
    bits. In a process group of several ranks it is none, because DistributedDataParallel averages
    gradients after the hooks, and True raises ValueError.
    """
    if mode is False:
        return []
    if _has_ranks():
        if mode is True:
            raise ValueError(_TOO_EARLY)
        return []
    parameters = [p for p in parameters if not _dtensors.is_dtensor(p)]
    wants: Callable[[torch.Tensor], bool] = lambda parameter: True
    if mode == "auto":
        wants = lambda p: p.device.type != "cpu" or p.dtype != torch.float32
    return [p for p in parameters if p.requires_grad and p.is_leaf and wants(p)]
