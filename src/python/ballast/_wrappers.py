"""Modules around an offloaded model, such as PEFT's or Lightning's, and what DistributedDataParallel leaves alone."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterator

from torch import nn

from .errors import UsageError

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # of modules: names that DistributedDataParallel reads when it wraps one


class Wrappers:
    """Gives a model, and every module that contains it, the names of tensors that DistributedDataParallel must not
    touch: frozen weights in host memory, which it would broadcast.

    `names()`: these names in the model, at the time when DistributedDataParallel asks.
    """

    def __init__(self, model: nn.Module, names: Callable[[], list[str]]) -> None:
        self._names = names
        self._prefixes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._add(model, "")

    def learn(self, outer: nn.Module, name: str, inner: Any) -> None:
        """Called before any module gets another one as an attribute. Raises UsageError for DataParallel."""
        if not isinstance(inner, nn.Module) or outer in self._prefixes or inner not in self._prefixes:
            return
        if isinstance(outer, nn.DataParallel):
            raise UsageError("offload: torch.nn.DataParallel would copy the whole model to each GPU; set "
                             "CUDA_VISIBLE_DEVICES to one GPU, or start a process for each with torchrun")
        self._add(outer, f"{name}.{self._prefixes[inner]}")

    def forget(self) -> None:
        """Leaves the modules as they were."""
        for module in list(self._prefixes):
            ignored = module.__dict__.pop(_IGNORED, None)
            if isinstance(ignored, _Ignored) and ignored.before is not None:
                module.__dict__[_IGNORED] = ignored.before
        self._prefixes.clear()

    def _add(self, module: nn.Module, prefix: str) -> None:
        self._prefixes[module] = prefix
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            before = module.__dict__.get(_IGNORED, getattr(type(module), _IGNORED, None))
            module.__dict__[_IGNORED] = _Ignored(self._names, prefix, before)


class _Ignored:
    """An iterable of names, which are those of the moment when it is read."""

    def __init__(self, names: Callable[[], list[str]], prefix: str, before: Any) -> None:
        self.before = before  # what the user has set
        self._names, self._prefix = names, prefix

    def __iter__(self) -> Iterator[str]:
        yield from self.before or ()
        for name in self._names():
            yield self._prefix + name

    def __reduce__(self) -> Any:
        return list, (list(self.before or ()),)  # copies of the model are plain models
