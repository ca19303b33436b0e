"""Safetensors folders as the source of a model's weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _arguments, _ballast, _units, aio
from .errors import UsageError

_PIECE = 16 << 20  # bytes that are read at a time for a conversion
_LISTED = 5  # names in a message

# By the name of the type in files.
DTYPES = {name: getattr(torch, dtype) for name, dtype in (
    ("F64", "float64"), ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"),
    ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("I64", "int64"), ("I32", "int32"),
    ("I16", "int16"), ("I8", "int8"), ("U8", "uint8"), ("U16", "uint16"), ("U32", "uint32"),
    ("U64", "uint64"), ("BOOL", "bool")) if hasattr(torch, dtype)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    name: str
    file: str
    dtype: torch.dtype | None  # None: PyTorch has no such type
    type: str  # in the file
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightFolder:
    """The tensors of a safetensors file, an index or a folder. Reads and checks the heads of all files.
    Raises FileError or Error that names the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        for name, file, kind, shape, offset, nbytes in _ballast.stored_tensors(path):
            self.tensors[name] = Stored(name, file, DTYPES.get(kind), kind, tuple(shape), offset, nbytes)
        self._files: dict[str, aio.File] = {}

    def match(self, model: nn.Module) -> dict[int, Stored]:
        """The stored tensor of each parameter and buffer, by id(). Tensors of the model that have values
        may be missing in the folder. Raises UsageError naming tensors that are missing, that the model
        does not have, or that have another shape or an unlike type."""
        names = names_of(model)
        found: dict[int, Stored] = {}
        used: set[str] = set()
        missing: list[str] = []
        for number, (tensor, own) in names.items():
            stored = [name for name in own if name in self.tensors]
            used.update(stored)
            if stored:
                self._check(stored[0], tensor)
                found[number] = self.tensors[stored[0]]
            elif tensor.is_meta and isinstance(tensor, nn.Parameter):
                missing.append(own[0])
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        unexpected = [name for name in self.tensors if name not in used
                      and not any(re.search(pattern, name) for pattern in ignored)]
        if missing or unexpected:
            raise UsageError(f"weights: {self.path}: {_differences(missing, unexpected)}")
        return found

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        stored = self.tensors[name]
        if stored.shape != tuple(tensor.shape):
            raise UsageError(f"weights: {name}: has the shape {stored.shape} in {stored.file}, and "
                             f"{tuple(tensor.shape)} in the model")
        if stored.dtype is None or (stored.dtype != tensor.dtype and not (
                stored.dtype.is_floating_point and tensor.dtype.is_floating_point)):
            raise UsageError(f"weights: {name}: is {stored.type} in {stored.file}, and {tensor.dtype} in the "
                             "model; only floating types are converted")
        if hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "quant_state"):
            raise UsageError(f"weights: {name}: is a {type(tensor).__name__}, which cannot be filled from a "
                             "file; load the model on the CPU first")

    def read(self, stored: Stored, target: torch.Tensor) -> None:
        """Reads a tensor into one in host memory, of any floating type for floating types. Raises
        FileError."""
        file = self._files.get(stored.file)
        if file is None:
            file = self._files[stored.file] = aio.File(stored.file)
        if target.numel() == 0:
            return
        if target.dtype == stored.dtype and target.is_contiguous():
            file.read_into(target.detach().reshape(-1).view(torch.uint8), stored.offset).result()
            return
        assert stored.dtype is not None
        if not target.is_contiguous():
            whole = torch.empty(stored.shape, dtype=target.dtype)
            self.read(stored, whole)
            target.copy_(whole)
            return
        flat = target.detach().reshape(-1)
        size = stored.dtype.itemsize
        buffer = aio.empty(min(_PIECE, stored.nbytes))
        for first in range(0, flat.numel(), _PIECE // size):
            count = min(_PIECE // size, flat.numel() - first)
            piece = buffer[:count * size]
            file.read_into(piece, stored.offset + first * size).result()
            flat[first:first + count].copy_(torch.frombuffer(piece, dtype=stored.dtype))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}


class Source:
    """Where the homes of a model's tensors get their values: from a folder, or from the tensors
    themselves."""

    def __init__(self, model: nn.Module, weights: Any) -> None:
        """Checks that the folder and the model fit, before anything changes."""
        self._folder: WeightFolder | None = None
        self._stored: dict[int, Stored] = {}
        if weights is not None:
            self._folder = WeightFolder(_arguments.path(weights, "weights"))
            self._stored = self._folder.match(model)
            compute_buffers(model, self._stored)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises UsageError naming a tensor that cannot be offloaded."""
        _units.check_tensor(name, tensor, has_source=id(tensor) in self._stored)

    def fill(self, member: _units.Member) -> None:
        """Gives a member's home its values."""
        stored = self._stored.get(id(member.owner))
        if stored is None:
            member.copy_home()
        else:
            assert self._folder is not None
            self._folder.read(stored, member.home)

    def fill_staying(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Gives a tensor that stays on the device its values."""
        stored = self._stored.get(id(tensor))
        if stored is None:
            return
        assert self._folder is not None
        values = torch.empty_like(tensor, device="cpu", requires_grad=False)
        self._folder.read(stored, values)
        if tensor.is_meta:
            _units.become(tensor, values.to(device))
        else:
            tensor.data.copy_(values)

    def end(self) -> None:
        """The values are those of the model from now on."""
        if self._folder is not None:
            self._folder.close()
        self._folder, self._stored = None, {}


def names_of(model: nn.Module) -> dict[int, tuple[torch.Tensor, list[str]]]:
    """The parameters and buffers of a model with all their names, by id(). Tied ones have several."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False),
                         *model.named_buffers(remove_duplicate=False)]:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return found


def compute_buffers(model: nn.Module, stored: dict[int, Stored]) -> None:
    """Gives values to buffers on meta that no folder stores, such as tables of rotary embeddings, by the
    initialisation that their modules have. Raises UsageError naming one that has none."""
    for prefix, module in model.named_modules():
        missing = {name: buffer for name, buffer in module._buffers.items()
                   if buffer is not None and buffer.is_meta and id(buffer) not in stored}
        if not missing:
            continue
        for name, buffer in missing.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        before = {name: module._buffers[name] for name in missing}
        versions = {name: _version(module, name) for name in missing}
        with torch.no_grad():
            _initialise(model, prefix, module)
        for name, buffer in missing.items():
            if module._buffers[name] is before[name] and _version(module, name) == versions[name]:
                module._buffers[name] = buffer
                where = f"{prefix}.{name}".lstrip(".")
                raise UsageError(f"{where}: is a buffer on the device meta that the files do not have; make "
                                 "buffers on the CPU, or give the module a reset_parameters() that fills it")


def _version(module: nn.Module, name: str) -> int:
    buffer: Any = module._buffers[name]
    return int(buffer._version)


def _initialise(model: nn.Module, prefix: str, module: nn.Module) -> None:
    """Runs the module's own initialisation, or that of a model of transformers around it. It does nothing
    to parameters on meta."""
    if any(not p.is_meta for p in module.parameters(recurse=False)):
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    around = [model.get_submodule(".".join(prefix.split(".")[:n])) for n in range(len(prefix.split(".")))]
    for outer in reversed(around):
        initialise = getattr(outer, "_init_weights", None)
        if initialise is not None:
            initialise(module)
            return


def _differences(missing: list[str], unexpected: list[str]) -> str:
    parts = []
    for names, what in ((missing, "lacks"), (unexpected, "has, unlike the model,")):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            parts.append(f"{what} {', '.join(names[:_LISTED])}{more}")
    return "; ".join(parts)
