"""Folders of Offloaded.save(): weights, the optimizer's states and the order of blocks, as one state.

A folder has safetensors files, the optimizer's folder and a description, each with the number of the
state in its name, and model.safetensors.index.json, which names them. Only the index gets its name by a
rename, at the end, so a process that is killed leaves either the old state or the new one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any, Iterator

import torch

from . import _arguments, _ballast, _guards, _units
from ._optimizer import OffloadOptimizer
from ._weight_folders import NAMES, Stored, WeightFolder, names_of
from .errors import Error, FileError, UsageError

if TYPE_CHECKING:
    from .offloading import Offloaded

INDEX = "model.safetensors.index.json"
_SHARD = 4 << 30  # bytes of a file, unless one tensor is larger
_OURS = re.compile(r"^(model|optimizer|ballast)-(\d{6})(-\d{5}\.safetensors|\.json|)$")


def save(handle: Offloaded, folder: Any, optimizer: Any, frozen: bool) -> None:
    """See Offloaded.save()."""
    folder = _arguments.path(folder, "folder")
    _check(handle, optimizer)
    tensors = list(_state_of(handle.model, frozen))
    os.makedirs(folder, exist_ok=True)
    before = _description_of(folder)
    if not before and any(os.path.exists(os.path.join(folder, name)) for name in (INDEX, "model.safetensors")):
        raise UsageError(f"{folder}: has another model; name a new folder")
    _remove_others(folder, before.get("state", 0))
    state = before.get("state", 0) + 1
    description: dict[str, Any] = {"state": state, "frozen": frozen, "optimizer": None,
                                   "order": handle.order()}
    if optimizer is not None:
        file = optimizer.save(os.path.join(folder, f"optimizer-{state:06d}"))
        handle.passes.close_homes()
        description["optimizer"] = _fingerprint(file)
    files, description["checksums"] = _write_weights(handle, folder, state, tensors)
    name = f"ballast-{state:06d}.json"
    text = json.dumps(description)
    _write(os.path.join(folder, name), text)
    size = sum(tensor.nbytes for _, tensor in tensors)
    index = {"metadata": {"total_size": size, "ballast": name, "ballast_checksum": _checksum_of_text(text)},
             "weight_map": files}
    _write(os.path.join(folder, INDEX), json.dumps(index, indent=1))
    _remove_others(folder, state)


def load(handle: Offloaded, folder: Any, optimizer: Any) -> None:
    """See Offloaded.load()."""
    folder = _arguments.path(folder, "folder")
    _check(handle, optimizer)
    description = _description_of(folder)
    if not description:
        raise UsageError(f"{folder}: has no state of Offloaded.save(); for other weights use offload(weights=)")
    source = WeightFolder(folder)
    try:
        tensors = dict(_state_of(handle.model, description["frozen"]))
        stored = source.match(handle.model)
        for name, tensor in tensors.items():
            if id(tensor) not in stored:
                raise UsageError(f"{name}: is not in {folder}; load it into the model that was saved")
        _verify(source, description["checksums"], stored)
        if optimizer is not None:
            where = os.path.join(folder, f"optimizer-{description['state']:06d}")
            _check_pair(folder, os.path.join(where, "optimizer.safetensors"), description["optimizer"])
            _repair(handle, source, stored)
            optimizer.load(where)
            handle.passes.close_homes()
        for tensor in _by_home(handle, tensors.values(), replaced=True):
            _read(source, stored[id(tensor)], tensor)
    finally:
        source.close()
    handle.learn_order(description["order"])


def _state_of(model: torch.nn.Module, frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that are saved, each once: parameters, or the trained ones, and persistent buffers."""
    names = names_of(model)
    persistent = {f"{prefix}.{name}".lstrip(".") for prefix, module in model.named_modules()
                  for name in module._buffers if name not in module._non_persistent_buffers_set}
    for tensor, own in names.values():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        if is_parameter and not (frozen or tensor.requires_grad):
            continue
        if is_parameter or own[0] in persistent:
            if tensor.dtype not in NAMES or any(part is not tensor for _, part in _units.parts_of("", tensor)):
                raise UsageError(f"{own[0]}: is a {type(tensor).__name__} of {tensor.dtype}, which a safetensors "
                                 "file of Ballast cannot have; use torch.save(), or frozen=False")
            yield own[0], tensor


def _repair(handle: Offloaded, source: WeightFolder, stored: dict[int, Stored]) -> None:
    """Gives blocks on NVMe that cannot be read the values of the folder."""
    for unit in handle.passes.units:
        if not unit.home.on_nvme or unit.home.is_open:
            continue
        try:
            unit.home.open()
            unit.home.close()
        except Error:
            owners = {id(member.owner): member.owner for member in unit.members}
            if not all(number in stored for number in owners):
                raise
            for tensor in _by_home(handle, owners.values(), replaced=True):
                _read(source, stored[id(tensor)], tensor)


def _by_home(handle: Offloaded, tensors: Any, replaced: bool = False) -> Iterator[torch.Tensor]:
    """Tensors block by block, ready for uses. Each block leaves host memory before the next one.
    `replaced`: their values are not needed, and may be damaged."""
    chosen = {id(tensor): tensor for tensor in tensors}
    for unit in handle.passes.units:
        if not any(id(member.owner) in chosen for member in unit.members):
            continue
        if replaced and all(id(member.owner) in chosen for member in unit.members):
            unit.home.open(read=False)
        for member in unit.members:
            tensor = chosen.pop(id(member.owner), None)
            if tensor is not None:
                _guards.wait_for(tensor)
                yield tensor
        handle.passes.close_home(unit)
    for tensor in chosen.values():
        _guards.wait_for(tensor)
        yield tensor


def _write_weights(handle: Offloaded, folder: str, state: int, tensors: list[tuple[str, torch.Tensor]]
                   ) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the file and the checksum of each tensor."""
    names = {id(tensor): name for name, tensor in tensors}
    sized: list[list[tuple[str, str, list[int], int]]] = [[]]
    ordered = [t for unit in handle.passes.units for m in unit.members
               for t in [m.owner] if id(t) in names]
    ordered += [t for _, t in tensors if id(t) not in {id(one) for one in ordered}]
    for tensor in ordered:
        if sum(entry[3] for entry in sized[-1]) + tensor.nbytes > _SHARD and sized[-1]:
            sized.append([])
        sized[-1].append((names[id(tensor)], NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes))
    files: dict[str, str] = {}
    checksums: dict[str, str] = {}
    values = _by_home(handle, ordered)
    for number, entries in enumerate(sized, 1):
        file = f"model-{state:06d}-{number:05d}.safetensors"
        writer = _ballast.WeightsWriter(os.path.join(folder, file), entries, {"format": "pt"})
        for name, _, _, nbytes in entries:
            data = next(values).detach().cpu().contiguous()
            writer.write(name, data.data_ptr(), nbytes)
            files[name] = file
            checksums[name] = f"{_ballast.checksum(data.data_ptr(), nbytes):016x}"
            del data  # the block's memory
        writer.finish()
    for _ in values:
        pass
    return files, checksums


def _verify(source: WeightFolder, checksums: dict[str, str], stored: dict[int, Stored]) -> None:
    """Reads all tensors once, before anything changes. Raises FileError naming a damaged one."""
    for one in stored.values():
        values = torch.empty(one.shape, dtype=one.dtype)
        source.read(one, values)
        found = f"{_ballast.checksum(values.data_ptr(), values.nbytes):016x}"
        if checksums.get(one.name) != found:
            raise FileError(f"{one.file}: {one.name} is damaged: its checksum differs from that of save(); use "
                            "another copy of the folder")


@torch.no_grad()
def _read(source: WeightFolder, stored: Stored, tensor: torch.Tensor) -> None:
    if tensor.device.type == "cpu" and tensor.requires_grad:
        source.read(stored, tensor.data)
        torch.autograd.graph.increment_version([tensor])
        return
    values = torch.empty(stored.shape, dtype=tensor.dtype)
    source.read(stored, values)
    if not _units.same_bits(values, tensor.data):  # a write would make shared memory private
        tensor.copy_(values)


def _check(handle: Offloaded, optimizer: Any) -> None:
    if handle.passes.running:
        raise UsageError("offload: save() and load() cannot run in a forward or backward pass")
    handle.passes.end_backward()
    if optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
        raise TypeError(f"optimizer: must be one of Ballast's, not {type(optimizer).__name__}; save others with "
                        "torch.save(optimizer.state_dict())")


def _check_pair(folder: str, file: str, expected: str | None) -> None:
    if expected is None:
        raise UsageError(f"{folder}: was saved without an optimizer")
    if _fingerprint(file) != expected:
        raise UsageError(f"{file}: is not the optimizer that was saved with the weights in {folder}")


def _fingerprint(file: str) -> str:
    """Checksum of the settings and of the checksums of all states."""
    notes = json.dumps(_ballast.read_optimizer_notes(file), sort_keys=True)
    sums = next((s for s in _ballast.stored_tensors(file) if s[0] == "checksums"), None)
    content = b""
    if sums is not None:
        with open(file, "rb") as opened:
            opened.seek(sums[4])
            content = opened.read(sums[5])
    return _checksum_of_text(notes + content.hex())


def _description_of(folder: str) -> dict[str, Any]:
    """The description of the state in a folder; empty if there is none. Raises FileError if it is
    damaged."""
    path = os.path.join(folder, INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            metadata = json.load(file).get("metadata", {})
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError) as error:
        raise FileError(f"{path}: is not an index of safetensors files: {error}") from None
    if "ballast" not in metadata:
        return {}
    described = os.path.join(folder, os.path.basename(metadata["ballast"]))
    try:
        with open(described, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise FileError(f"{described}: {error.strerror}; the folder is incomplete") from None
    if _checksum_of_text(text) != metadata.get("ballast_checksum"):
        raise FileError(f"{described}: is damaged; use another copy of the folder")
    description: dict[str, Any] = json.loads(text)
    return description


def _remove_others(folder: str, state: int) -> None:
    """Removes files of unfinished saves and of older states."""
    for name in os.listdir(folder):
        if name.startswith(f"{INDEX}.tmp-"):
            os.unlink(os.path.join(folder, name))
        found = _OURS.match(name.split(".tmp-")[0])
        if found is not None and int(found.group(2)) != state:
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def _write(path: str, text: str) -> None:
    """Writes a file that is complete on the disk before it has its name."""
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _checksum_of_text(text: str) -> str:
    data = bytearray(text.encode() or b"\0")
    values = torch.frombuffer(data, dtype=torch.uint8)
    return f"{_ballast.checksum(values.data_ptr(), len(data)):016x}"
