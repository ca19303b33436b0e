"""The arguments that all optimizers share, for type checkers, and in the signatures and docstrings
of the optimizers at run time."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import Any, TypedDict

import torch


class Options(TypedDict, total=False):
    """Keyword arguments of OffloadOptimizer, which documents them."""

    device: str
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None
    host_bytes: int | None
    max_grad_norm: float | None
    skip_non_finite: bool
    model: torch.nn.Module | None
    overlap: bool | str
    gradient_hooks: bool | str
    optimizer_states: str
    minimal_size: int
    threads: int
    any_file_system: bool
    process_group: torch.distributed.ProcessGroup | None
    amsgrad: bool
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


def spell_out(optimizer: type[Any], base: type[Any]) -> None:
    """Puts the keyword arguments of `base` into the signature and the docstring of an optimizer whose
    constructor passes `**options` to it."""
    constructor: Any = vars(optimizer).get("__init__")
    if constructor is None:
        return
    shared = [p for p in inspect.signature(base.__init__).parameters.values()
              if p.kind is p.KEYWORD_ONLY and not p.name.startswith("_")]
    own = [p for p in inspect.signature(constructor).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own}
    constructor.__signature__ = inspect.Signature([*own, *(p for p in shared if p.name not in names)],
                                                  return_annotation=None)
    first = f"        {shared[0].name}: "
    if optimizer.__doc__ and base.__doc__ and "    Args:\n" in optimizer.__doc__:
        arguments = base.__doc__.partition(first)[2]
        optimizer.__doc__ = f"{optimizer.__doc__.rstrip()}\n{first}{arguments}"
