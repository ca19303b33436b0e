"""Finds the blocks of a model, and which tensors move with them."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch import nn

from . import _arguments
from ._units import bytes_of, span
from .errors import UsageError

SMALL = 1 << 20  # buffers and trained parameters of fewer bytes stay on the device

Named = tuple[str, torch.Tensor]


@dataclass
class Block:
    """A module whose tensors are fetched as one, except those of blocks inside it."""

    name: str
    module: nn.Module


@dataclass
class Rules:
    """Which tensors of blocks stay on the device."""

    keep: Sequence[str] = ()  # patterns of names
    keep_trained: bool = False  # all trained parameters
    trained_below: int = SMALL  # trained parameters of fewer bytes stay
    buffers_below: int = SMALL


@dataclass
class Sorted:
    """The tensors of a model."""

    moving: dict[int, list[Named]] = field(default_factory=dict)  # by number of the block
    staying: dict[str, tuple[torch.Tensor, str]] = field(default_factory=dict)  # with the reason
    all: set[int] = field(default_factory=set)  # id() of each


def bytes_under(module: nn.Module) -> int:
    return bytes_of([*module.parameters(), *module.buffers()])


def find(model: nn.Module, most: int | None) -> list[Block]:
    """The elements of lists of modules, and those classes that transformers and diffusers name as
    blocks: outermost ones, and those inside blocks of more than `most` bytes. None: no limit."""
    named = {name for module in model.modules() for attribute in ("_no_split_modules", "_repeated_blocks")
             for name in getattr(module, attribute, None) or ()}
    found: list[Block] = []

    def visit(module: nn.Module, prefix: str) -> None:
        in_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for name, child in module.named_children():
            is_block = (in_list or type(child).__name__ in named) and not isinstance(
                child, (nn.ModuleList, nn.ModuleDict))
            size = bytes_under(child) if is_block else 0
            if size > 0:
                found.append(Block(prefix + name, child))
            if size == 0 or (most is not None and size > most):
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


def chosen(model: nn.Module, blocks: Any) -> list[Block]:
    """The blocks that a user names by modules or by patterns. Raises TypeError, UsageError."""
    if isinstance(blocks, (str, nn.Module)):
        blocks = [blocks]
    if not isinstance(blocks, Iterable):
        raise TypeError('blocks: must be "auto", or modules or patterns of their names, not '
                        f"{type(blocks).__name__}")
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, str] = {}
    for one in blocks:
        if isinstance(one, nn.Module):
            if one not in names:
                raise UsageError(f"blocks: a {type(one).__name__} is not a module of the model")
            matches = {one: names[one]}
        elif isinstance(one, str):
            matches = {m: n for m, n in names.items() if n and fnmatch.fnmatchcase(n, one)}
        else:
            raise TypeError(f"blocks: {one!r} is neither a module nor a pattern of names")
        if not matches:
            raise UsageError(f"blocks: {one!r} matches no module; names are as of named_modules()")
        found.update(matches)
    return [Block(name, module) for module, name in names.items() if module in found]


def sort(model: nn.Module, blocks: list[Block], rules: Rules, known: set[int]) -> Sorted:
    """Decides for each tensor of the model whether it moves with a block. `known`: id() of tensors for
    which that was decided before, and which move."""
    numbers = {id(block.module): i for i, block in enumerate(blocks)}
    owners: dict[int, set[int]] = {}
    tensors: dict[int, Named] = {}
    seen: set[tuple[int, int]] = set()

    def visit(module: nn.Module, prefix: str, owner: int) -> None:
        owner = numbers.get(id(module), owner)
        if (id(module), owner) in seen:
            return
        seen.add((id(module), owner))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                owners.setdefault(id(tensor), set()).add(owner)
                tensors.setdefault(id(tensor), (prefix + name, tensor))
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", owner)

    visit(model, "", -1)
    result = Sorted(all=set(tensors))
    new = {number: named for number, named in tensors.items() if number not in known}
    sharing = set(_overlapping(tensor for _, tensor in new.values()))
    for number, (name, tensor) in new.items():
        found = owners[number]
        reason = "shares memory with another tensor" if number in sharing else _reason(
            name, tensor, sorted(found), blocks, rules)
        if reason:
            result.staying[name] = (tensor, reason)
        else:
            result.moving.setdefault(next(iter(found)), []).append((name, tensor))
    return result


def _reason(name: str, tensor: torch.Tensor, owners: list[int], blocks: list[Block],
            rules: Rules) -> str | None:
    """Why a tensor stays on the device, or None if it moves."""
    if -1 in owners:
        return "outside of all blocks" if len(owners) == 1 else f"shared with {blocks[owners[1]].name}"
    if len(owners) > 1:
        return f"shared by {blocks[owners[0]].name} and {blocks[owners[1]].name}"
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in rules.keep):
        return "keep"
    size = bytes_of([tensor])
    if not isinstance(tensor, nn.Parameter):
        return "small buffer" if size < rules.buffers_below else None
    if tensor.requires_grad and (rules.keep_trained or size < rules.trained_below):
        return "trained" if rules.keep_trained else "small trained parameter"
    return "empty" if size == 0 else None


def _overlapping(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """id() of tensors that have bytes in common with another one."""
    ranges = []
    for tensor in tensors:
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and (
                not tensor.is_meta and tensor.numel() > 0 and not nn.parameter.is_lazy(tensor)):
            start = tensor.data_ptr()
            ranges.append((str(tensor.device), start, start + span(tensor), id(tensor)))
    ranges.sort()
    for (device, _, end, one), (other_device, start, _, other) in zip(ranges, ranges[1:]):
        if device == other_device and start < end:
            yield one
            yield other


def parse_patterns(value: Any, name: str) -> tuple[str, ...]:
    """Patterns of names. Raises TypeError."""
    return (value,) if isinstance(value, str) else tuple(_arguments.texts(value, name))


def say_none(model: nn.Module, found: bool) -> str:
    """The message for a model without blocks, or, with `found`, whose blocks have nothing to offload."""
    if found:
        return ("blocks: nothing is left to offload, because the tensors of all blocks are small, shared, "
                "trained or kept; see trained= and keep=")
    largest = sorted(((bytes_under(m), n) for n, m in model.named_modules() if n),
                     reverse=True)[:10]
    names = ", ".join(f"{name} ({size} bytes)" for size, name in largest)
    return ("blocks: no lists of modules were found; name modules or patterns in blocks=. The largest "
            f"modules: {names}")
