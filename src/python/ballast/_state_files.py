"""Files of save() and load(): names, settings and the place of each state."""

from __future__ import annotations

import errno
import json
import os
from typing import Any, Callable

import torch

from . import _ballast
from ._engine import Engine, Record, array_of, no_view
from ._gradients import TYPES
from .errors import FileError, UsageError

_NOTE = "ballast.optimizer.settings"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that torch.compile and wrappers of submodules
    add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _unwrapped(name: str) -> str:
    """The name without the parts that DistributedDataParallel adds. A submodule of the model may
    have the same name."""
    return ".".join(part for part in name.split(".") if part != "module")


class _Saved:
    """A parameter in a file."""

    def __init__(self, key: str, entry: dict[str, Any], group: int) -> None:
        self.key = key
        self.group = group
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
    keys: set[str] = set()
    for group in groups:
        for parameter in group["params"]:
            record = engine.record(parameter)
            engine.loans.flush(record)
            name = names.get(parameter)
            lazy = torch.nn.parameter.is_lazy(parameter)
            entry = {"shape": [] if lazy else list(parameter.shape),
                     "dtype": TYPES.get(parameter.dtype, str(parameter.dtype)),
                     "step": record.steps, "state": record.has_state,
                     "moments": record.keeps_moments}
            if name is not None:
                entry["name"] = plain_name(name)
            key = _key(len(entries), entry)
            if key in keys:  # two modules with equal names
                key = entry["key"] = f"{key} {len(entries)}"
            keys.add(key)
            if record.has_state and record.states is not None:
                native.append((key, record.states, record.number,
                               array_of(engine.weights(record))))
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
    """Reads the states, and returns the settings: for each group, and "skipped_steps". Nothing
    changes if the file does not fit."""
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
    saved_groups = [number for number, group in enumerate(settings["param_groups"])
                    for _ in range(group["parameters"])]
    saved = [_Saved(_key(i, entry), entry, group)
             for i, (entry, group) in enumerate(zip(settings["parameters"], saved_groups))]
    matched = _match(saved, groups, names, settings, file)
    settings["param_groups"] = _settings_of_groups(groups, matched, settings["param_groups"], file)
    records = {engine.record(parameter): one for parameter, one in matched.items()}
    with_state = {record: one for record, one in records.items() if one.has_state}
    engine.follow(with_state)
    engine.require(with_state)
    for record in with_state:
        engine.part_from_view(record)
    native = [(one.key, record.states, record.number, array_of(engine.weights(record)))
              for record, one in with_state.items() if record.states is not None]
    _ballast.load_optimizer(native, file)
    for record, one in records.items():
        _apply(engine, record, one)
    return settings


def _apply(engine: Engine, record: Record, saved: _Saved) -> None:
    record.view, record.waiting = no_view, None
    if not saved.has_state:
        engine.forget(record)
        engine.refresh(record)
        record.has_state = record.states is not None
        return
    record.steps = saved.steps
    record.has_state = True
    record.keeps_moments = saved.keeps_moments
    record.others = {}
    with torch.no_grad():
        engine.upload(record)


def _key(number: int, entry: dict[str, Any]) -> str:
    return entry.get("key") or entry.get("name") or str(number)


def _match(saved: list[_Saved], groups: list[dict[str, Any]], names: dict[torch.Tensor, str],
           settings: dict[str, Any], file: str) -> dict[torch.Tensor, _Saved]:
    """The saved parameter of each parameter: by name if both sides have names, otherwise by its
    place in the groups."""
    parameters = [p for group in groups for p in group["params"]]
    own = [plain_name(names[p]) if p in names else None for p in parameters]
    by_name = _match_names(own, [one.name for one in saved], file)
    if by_name is not None:
        matched = {p: saved[number] for p, number in zip(parameters, by_name)}
    else:
        sizes = [group["parameters"] for group in settings["param_groups"]]
        if sizes != [len(group["params"]) for group in groups]:
            raise UsageError(f"{file}: has parameter groups of other sizes than the optimizer")
        for name, one in zip(own, saved):
            if name is not None and one.name is not None and _unwrapped(name) != _unwrapped(one.name):
                raise UsageError(f"{file}: has {one.name!r} where the optimizer has {name!r}, and names "
                                 "that several parameters have; give the groups in the saved order")
        matched = dict(zip(parameters, saved))
    for number, (parameter, one) in enumerate(matched.items()):
        if list(parameter.shape) != one.shape:
            label = one.name or f"parameter {number}"
            raise UsageError(f"{file}: {label} has the shape {tuple(one.shape)}, the optimizer's "
                             f"{tuple(parameter.shape)}")
    return matched


def _match_names(own: list[str | None], saved: list[str | None], file: str) -> list[int] | None:
    """For each own name the number of the saved parameter with this name. None if not all have names
    or several have the same one. Raises UsageError for a name that one side lacks."""
    forms: list[Callable[[str], str]] = [lambda name: name, _unwrapped]
    for form in forms:
        mine = [form(name) for name in own if name is not None]
        theirs = [form(name) for name in saved if name is not None]
        if len(mine) < len(own) or len(theirs) < len(saved):
            return None
        numbers = {name: number for number, name in enumerate(theirs)}
        unique = len(numbers) == len(theirs) and len(set(mine)) == len(mine)
        if unique and set(mine) == set(numbers):
            return [numbers[name] for name in mine]
    if not unique:
        return None
    for name in mine:
        if name not in numbers:
            raise UsageError(f"{file}: has no parameter {name!r} of the optimizer")
    missing = next(name for name in theirs if name not in mine)
    raise UsageError(f"{file}: has a parameter {missing!r}, the optimizer has not")


def _settings_of_groups(groups: list[dict[str, Any]], matched: dict[torch.Tensor, _Saved],
                        saved: list[dict[str, Any]], file: str) -> list[dict[str, Any]]:
    """The saved settings of the parameters of each group. An empty group keeps its own."""
    found = []
    for number, group in enumerate(groups):
        settings = [{k: v for k, v in saved[matched[p].group].items() if k != "parameters"}
                    for p in group["params"]]
        for other in settings[1:]:
            if other != settings[0]:
                raise UsageError(f"{file}: parameters of group {number} were in groups with other "
                                 "settings; group them as they were saved")
        found.append(settings[0] if settings else {})
    return found


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
