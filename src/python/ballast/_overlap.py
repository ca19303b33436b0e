"""Modules of a model wait for their own parameters while an update is running."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .optim import OffloadOptimizer

_models: "weakref.WeakValueDictionary[int, ForwardOverlap]" = weakref.WeakValueDictionary()


class _Hook:
    """A hook of a module that refers weakly to its owner. A copy of the module has none of it."""

    def __init__(self, key: int, name: str) -> None:
        self.key = key
        self.name = name

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _note_compiled(self.key)
            return
        owner = _models.get(self.key)
        if owner is not None:
            getattr(owner, self.name)(module)

    def __deepcopy__(self, memo: dict) -> "_Hook":
        owner = _models.get(self.key)
        if owner is not None:
            owner.wait_for_all()
        return _Hook(0, self.name)

    def __reduce__(self) -> tuple:
        self.__deepcopy__({})
        return _Hook, (0, self.name)


@torch.compiler.assume_constant_result
def _note_compiled(key: int) -> int:
    """Runs while torch.compile traces a module: compiled code does not wait for parameters."""
    owner = _models.get(key)
    if owner is not None:
        owner.compiled = True
        owner.wait_for_all()
    return 0


class ForwardOverlap:
    """Makes each module wait, before its forward pass, for the parameters that it reads.

    A module reads its own parameters and those of modules below it whose forward is never called
    (torch.nn.MultiheadAttention reads the weights of its output projection in this way). The whole
    model is waited for before evaluation, after its forward pass and before its state_dict.
    """

    def __init__(self, model: torch.nn.Module, optimizer: "OffloadOptimizer") -> None:
        self.compiled = False
        self._optimizer = weakref.ref(optimizer)
        self._called: set[torch.nn.Module] = set()
        self._needs: dict[torch.nn.Module, list[torch.nn.Parameter]] = {}
        key = id(self)
        _models[key] = self
        self._handles = []
        for module in model.modules():
            name = "_before_model" if module is model else "_before_module"
            self._handles.append(module.register_forward_pre_hook(_Hook(key, name), prepend=True))
        self._handles.append(model.register_forward_hook(_Hook(key, "_after_model")))
        self._handles.append(model.register_state_dict_pre_hook(_Hook(key, "_after_model")))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def wait_for_all(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.synchronize()

    def _after_model(self, _: torch.nn.Module) -> None:
        self.wait_for_all()

    def _before_model(self, model: torch.nn.Module) -> None:
        if not model.training:
            self.wait_for_all()
        self._before_module(model)

    def _before_module(self, module: torch.nn.Module) -> None:
        if module not in self._called:
            self._called.add(module)
            self._needs.clear()
        optimizer = self._optimizer()
        if optimizer is None or not optimizer.updating:
            return
        needs = self._needs.get(module)
        if needs is None:
            needs = self._needs[module] = list(self._read_by(module))
        optimizer.wait_for(needs)

    def _read_by(self, module: torch.nn.Module):
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in self._called:
                yield from self._read_by(child)
