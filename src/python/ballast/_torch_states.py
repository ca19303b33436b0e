"""Optimizer states in the form of torch.optim's state_dict, and the settings of a saved state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .optim import OffloadOptimizer

# Names of the first and second moment in the states of torch's optimizers.
_NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg", None),
    "adagrad": (None, "sum"),
    "sgd": ("momentum_buffer", None),
}
_NOTE = "ballast.optimizer.settings"
# Settings of torch's optimizers that change results and that the update does not have.
_UNKNOWN = ("amsgrad", "maximize", "lr_decay", "dampening")

States = dict[torch.Tensor, dict[str, Any]]


def _addresses(values: dict[str, torch.Tensor], optimizer: "OffloadOptimizer") -> tuple[int, ...]:
    names = ("master", *_NAMES[optimizer._name])
    return tuple(values[n].data_ptr() if n is not None and n in values else 0 for n in names)


def read(optimizer: "OffloadOptimizer") -> States:
    """The states of all parameters that have had an update."""
    states: States = {}
    for parameter, number in optimizer._index.items():
        if optimizer._steps[parameter] == 0:
            continue
        names = [name for name in _NAMES[optimizer._name] if name is not None]
        if parameter.dtype != torch.float32:
            names.append("master")
        values = {name: torch.empty(parameter.shape, dtype=torch.float32) for name in names}
        optimizer._states.read(number, optimizer._weights(parameter).data_ptr(),
                               *_addresses(values, optimizer))
        states[parameter] = {"step": torch.tensor(float(optimizer._steps[parameter])), **values}
    return states


def check(optimizer: "OffloadOptimizer", state_dict: dict[str, Any]) -> States:
    """The states of a state_dict by parameter. Raises ValueError naming what does not fit."""
    groups = state_dict["param_groups"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
        raise ValueError("state_dict: has parameter groups of other sizes than the optimizer")
    for number, group in enumerate(groups):
        for name in _UNKNOWN:
            if group.get(name):
                raise ValueError(f"state_dict: param_groups[{number}][{name!r}] is not supported")
    numbers = [number for group in groups for number in group["params"]]
    states: States = {}
    for number, parameter in zip(numbers, optimizer._parameters()):
        state = state_dict["state"].get(number)
        if not state:
            continue
        names = [name for name in _NAMES[optimizer._name] if name is not None]
        values: dict[str, Any] = {"step": int(state.get("step", 1))}
        for name in (*names, "master"):
            value = state.get(name)
            if value is None:
                if name == "master" or optimizer._name == "sgd":
                    continue
                raise ValueError(f"state_dict: state[{number}] has no {name!r}: it is not one of "
                                 f"{optimizer._name}")
            if value.shape != parameter.shape:
                raise ValueError(f"state_dict: state[{number}][{name!r}] has the shape "
                                 f"{tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
            values[name] = value
        states[parameter] = values
    return states


@torch.no_grad()
def write(optimizer: "OffloadOptimizer", states: States) -> None:
    """Replaces all states by these; parameters without one begin anew."""
    for parameter, number in optimizer._index.items():
        state = states.get(parameter, {})
        optimizer._steps[parameter] = int(state.get("step", 0))
        values = {name: value.detach().to("cpu", torch.float32).contiguous()
                  for name, value in state.items() if name != "step"}
        for name in _NAMES[optimizer._name]:
            if name is not None and name not in values:
                values[name] = torch.zeros(parameter.shape)
        if "master" not in values:
            optimizer._refresh(parameter)
        elif parameter.dtype == torch.float32:
            del values["master"]
        weights = optimizer._weights(parameter)
        optimizer._states.write(number, weights.data_ptr(), *_addresses(values, optimizer))
        if parameter in optimizer._mirrors:
            parameter.data.copy_(weights)
    optimizer._remember_versions()


def notes(optimizer: "OffloadOptimizer") -> dict[str, str]:
    """The settings that belong to a saved state."""
    groups = []
    for group in optimizer.param_groups:
        kept = {name: value for name, value in group.items() if name != "params"}
        kept = {n: v.item() if isinstance(v, torch.Tensor) else v for n, v in kept.items()}
        groups.append({**kept, "parameters": len(group["params"])})
    steps = list(optimizer._steps.values())
    return {_NOTE: json.dumps({"param_groups": groups, "steps": steps,
                               "skipped_steps": optimizer.skipped_steps})}


def settings(optimizer: "OffloadOptimizer", found: dict[str, str]) -> dict[str, Any]:
    """The settings in the notes of a file. Raises ValueError if they are not of this optimizer."""
    if _NOTE not in found:
        raise ValueError("directory: the saved states have no settings")
    saved = json.loads(found[_NOTE])
    sizes = [group["parameters"] for group in saved["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        raise ValueError("directory: the saved states have parameter groups of other sizes")
    if len(saved["steps"]) != len(optimizer._index):
        raise ValueError("directory: the saved states are those of other parameters")
    return saved


def apply(optimizer: "OffloadOptimizer", saved: dict[str, Any]) -> None:
    for group, values in zip(optimizer.param_groups, saved["param_groups"]):
        for name, value in values.items():
            if name == "parameters":
                continue
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
    optimizer._steps = dict(zip(optimizer._index, saved["steps"]))
    optimizer.skipped_steps = saved["skipped_steps"]
