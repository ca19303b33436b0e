"""Files of save() and load(): names, settings and the place of each state."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import torch

from . import _ballast
from ._engine import Engine, Record, array_of
from ._gradients import TYPES
from .errors import FileError, UsageError

_NOTE = "ballast.optimizer.settings"
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """The name of a parameter without the prefixes that DistributedDataParallel and torch.compile
    add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class _Saved:
    """A parameter in a file."""

    def __init__(self, key: str, entry: dict[str, Any]) -> None:
        self.key = key
        self.name: str | None = entry.get("name")
        self.shape: list[int] = entry["shape"]
        self.steps: int = entry["step"]
        self.has_state: bool = entry["state"]
        self.keeps_moments: bool = entry.get("moments", True)


def save(engine: Engine, groups: list[dict[str, Any]], names: dict[torch.Tensor, str], file: str,
         skipped_steps: int) -> None:
    engine.synchronize()
    engine.follow([r for r in engine.records.values() if r.states is not None])
    entries: list[dict[str, Any]] = []
    native = []
    for group in groups:
        for parameter in group["params"]:
            record = engine.record(parameter)
            engine.loans.flush(record)
            name = names.get(parameter)
            entry = {"shape": list(parameter.shape), "dtype": TYPES[parameter.dtype],
                     "step": record.steps, "state": record.has_state,
                     "moments": record.keeps_moments}
            if name is not None:
                entry["name"] = plain_name(name)
            if record.has_state and record.states is not None:
                native.append((_key(len(entries), entry), record.states, record.number,
                               array_of(engine.current_weights(record))))
            entries.append(entry)
    kept_groups = []
    for group in groups:
        kept = {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in group.items()
                if n not in ("params", "param_names")}
        kept_groups.append({**kept, "parameters": len(group["params"])})
    try:
        note = json.dumps({"param_groups": kept_groups, "parameters": entries, "rule": engine.rule,
                           "skipped_steps": skipped_steps})
    except TypeError as error:
        raise TypeError(f"param_groups: a setting cannot be saved: {error}; use state_dict()") from None
    _ballast.save_optimizer(native, file, {_NOTE: note})


def load(engine: Engine, groups: list[dict[str, Any]], names: dict[torch.Tensor, str],
         file: str) -> dict[str, Any]:
    """Reads the states, and returns the settings. Nothing changes if the file does not fit."""
    if not os.path.exists(file):
        missing = FileError(f"{file}: {os.strerror(errno.ENOENT)}")
        missing.errno = errno.ENOENT
        raise missing
    engine.synchronize()
    found = _ballast.read_optimizer_notes(file)
    if _NOTE not in found:
        raise UsageError(f"{file}: the saved states have no settings")
    settings = json.loads(found[_NOTE])
    rule = settings.get("rule", engine.rule)
    if rule != engine.rule:
        raise UsageError(f"{file}: has states of {rule}, not of {engine.rule}")
    if "parameters" not in settings:
        settings["parameters"] = _first_version(settings, groups, file)
    if len(settings["param_groups"]) != len(groups):
        raise UsageError(f"{file}: has {len(settings['param_groups'])} parameter groups, the "
                         f"optimizer has {len(groups)}")
    saved = [_Saved(_key(i, entry), entry) for i, entry in enumerate(settings["parameters"])]
    matched = _match(saved, groups, names, settings, file)
    records = {engine.record(parameter): one for parameter, one in matched.items()}
    with_state = {record: one for record, one in records.items() if one.has_state}
    engine.follow(with_state)
    engine.require(with_state)
    native = [(one.key, record.states, record.number, array_of(engine.current_weights(record)))
              for record, one in with_state.items() if record.states is not None]
    _ballast.load_optimizer(native, file)
    for record, one in records.items():
        _apply(engine, record, one)
    return settings


def _apply(engine: Engine, record: Record, saved: _Saved) -> None:
    if not saved.has_state:
        engine.forget(record)
        record.has_state = record.states is not None
        return
    record.steps = saved.steps
    record.has_state = True
    record.keeps_moments = saved.keeps_moments
    record.others = {}
    with torch.no_grad():
        engine.upload(record)
    engine.note_weights(record)


def _key(number: int, entry: dict[str, Any]) -> str:
    return entry.get("key") or entry.get("name") or str(number)


def _match(saved: list[_Saved], groups: list[dict[str, Any]], names: dict[torch.Tensor, str],
           settings: dict[str, Any], file: str) -> dict[torch.Tensor, _Saved]:
    """The saved parameter of each parameter: by name if both sides have names, otherwise by its
    place in the groups."""
    parameters = [p for group in groups for p in group["params"]]
    own = [plain_name(names[p]) if p in names else None for p in parameters]
    by_name = {one.name: one for one in saved}
    if None not in own and None not in by_name:
        for name in own:
            if name not in by_name:
                raise UsageError(f"{file}: has no parameter {name!r} of the optimizer")
        for name in by_name:
            if name not in own:
                raise UsageError(f"{file}: has a parameter {name!r}, the optimizer has not")
        matched = {p: by_name[name] for p, name in zip(parameters, own)}
    else:
        sizes = [group["parameters"] for group in settings["param_groups"]]
        if sizes != [len(group["params"]) for group in groups]:
            raise UsageError(f"{file}: has parameter groups of other sizes than the optimizer")
        matched = dict(zip(parameters, saved))
    for number, (parameter, one) in enumerate(matched.items()):
        if list(parameter.shape) != one.shape:
            label = one.name or f"parameter {number}"
            raise UsageError(f"{file}: {label} has the shape {tuple(one.shape)}, the optimizer's "
                             f"{tuple(parameter.shape)}")
    return matched


def _first_version(settings: dict[str, Any], groups: list[dict[str, Any]],
                   file: str) -> list[dict[str, Any]]:
    """Files of the first version numbered the parameters that required gradients."""
    parameters = [p for group in groups for p in group["params"]]
    trained = [p for p in parameters if p.requires_grad]
    if len(trained) != len(settings["steps"]):
        raise UsageError(f"{file}: has states of {len(settings['steps'])} parameters, "
                         f"{len(trained)} require gradients here")
    steps = dict(zip(trained, settings["steps"]))
    keys = {p: str(i) for i, p in enumerate(trained)}
    return [{"shape": list(p.shape), "step": steps.get(p, 0), "state": p in steps,
             "key": keys.get(p, "")} for p in parameters]
