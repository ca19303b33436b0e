"""Measures a pass of a model on tensors without memory: its operations, activations and order of blocks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from .errors import UsageError


@dataclass
class FakePass:
    """Needs of one forward and, if anything is trained, one backward pass.

    Operations are those of PyTorch's counter, with recomputation: matrix products, convolutions and
    attention, where a multiplication and an addition are two.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    saved_bytes: int = 0  # of activations at the end of the forward pass
    peak_bytes: int = 0  # of activations, with their gradients
    order: list[int] = field(default_factory=list)  # of blocks, by number, in the forward pass


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made and of those that still exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self._add(tensor.untyped_storage())
        return result

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves out tensors that are counted elsewhere."""
        for tensor in tensors:
            self._storages[tensor.untyped_storage()._cdata] = None

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._remove(key, nbytes))
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, nbytes: int) -> None:
        self._storages.pop(key, None)
        self.now -= nbytes


def measure(model: nn.Module, sample: Any, blocks: Sequence[nn.Module]) -> FakePass:
    """Computes a pass of `model` with inputs of the shapes and types of `sample`: a tensor, a sequence
    of arguments or a mapping of keywords. Takes no memory for tensors; neither changes. Raises
    UsageError if the model cannot be computed without values."""
    args, kwargs = _arguments_of(sample)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, logger.disabled = logger.disabled, True  # it prints what is raised here
    try:
        with mode:
            tensors = _fake_tensors(model)
            args, kwargs = tree_map_only(torch.Tensor, _empty, (args, kwargs))
            return _run(model, tensors, args, kwargs, blocks)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"sample: the model cannot be computed with it and without values: {line}; "
                         "without sample=, plan_module() leaves out activations and speed") from error
    finally:
        logger.disabled = quiet


class _Pass(nn.Module):
    """Computes the backward pass in forward(), while the model has its stand-ins, which recomputation
    uses."""

    def __init__(self, model: nn.Module, live: _Live, counter: FlopCounterMode) -> None:
        super().__init__()
        self.model = model
        self.found = FakePass()
        self._live, self._counter = live, counter

    def forward(self, args: Any, kwargs: Any) -> None:
        loss = _loss_of(self.model(*args, **kwargs))
        self.found.saved_bytes = self._live.now
        self.found.forward_flops = self._counter.get_total_flops()
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            self.found.backward_flops = self._counter.get_total_flops() - self.found.forward_flops


def _run(model: nn.Module, tensors: dict[str, torch.Tensor], args: Any, kwargs: Any,
         blocks: Sequence[nn.Module]) -> FakePass:
    live, counter = _Live(), FlopCounterMode(display=False)
    whole, numbers = _Pass(model, live, counter), {id(block): i for i, block in enumerate(blocks)}
    live.ignore([*tensors.values(), *(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))])
    trained = [t for t in tensors.values() if t.requires_grad]
    for tensor in trained:  # the plan has the bytes of gradients
        tensor.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]

    def note(module: nn.Module, _: Any) -> None:
        number = numbers.get(id(module))
        if number is not None and torch._C._current_graph_task_id() == -1:
            whole.found.order.append(number)

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with live, counter, torch.set_grad_enabled(bool(trained)):
            torch.func.functional_call(whole, {f"model.{name}": t for name, t in tensors.items()},
                                       (args, kwargs))
    finally:
        hook.remove()
    whole.found.peak_bytes = live.peak
    return whole.found


def _drop_gradient(tensor: torch.Tensor) -> None:
    tensor.grad = None


def _fake_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Stand-ins of parameters and buffers. The mode of fake tensors is on."""
    made: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False),
                         *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in made:
            made[id(tensor)] = _empty(tensor).requires_grad_(tensor.requires_grad)
        tensors[name] = made[id(tensor)]
    return tensors


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "quant_state"):
        raise TypeError(f"{type(tensor).__name__} is a quantised tensor")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _arguments_of(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (list, tuple)):
        return tuple(sample), {}
    raise TypeError("sample: must be a tensor, a list of arguments or a dict of keywords of the model, "
                    f"not {type(sample).__name__}")


def _loss_of(result: Any) -> torch.Tensor | None:
    """The loss in a result, otherwise the sum of all its floating tensors."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    sums = [t.float().sum() for t in tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack(sums).sum() if sums else None
