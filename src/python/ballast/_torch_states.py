"""Optimizer states in the form of torch.optim's state_dict."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from . import _dtensors
from ._engine import ROWS, Engine, Record, has_no_updates, zeros_for

# Settings of torch's optimizers that change results and that the update does not have.
_UNSUPPORTED = ("amsgrad", "maximize", "lr_decay", "dampening", "differentiable")

Values = dict[str, Any]


def torch_defaults(rule: str) -> dict[str, Any]:
    """All settings of torch's optimizer of the same rule, so that it can load a state_dict."""
    if not ROWS[rule]["in_torch"]:
        return {}
    return dict(getattr(torch.optim, ROWS[rule]["title"])([torch.zeros(1, device="cpu")]).defaults)


def check_group(group: Mapping[str, Any], place: str, rule: str) -> None:
    """Raises ValueError for a setting that the update does not have."""
    for name in _UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"{place}: {name}={group[name]!r} is not supported")
    if not group.get("bias_correction", True):
        raise ValueError(f"{place}: bias_correction=False is not supported")
    own = ROWS[rule]["decoupled"]
    other = group.get("decoupled_weight_decay", own)
    if bool(other) != own and group["weight_decay"]:
        raise ValueError(f"{place}: decoupled_weight_decay={other} is not supported: AdamW takes "
                         "weight_decay off the weights, Adam adds it to the gradients")


def parse(engine: Engine, own_groups: list[dict[str, Any]],
          state_dict: Any) -> tuple[list[dict[str, Any]], dict[Record, Values]]:
    """The groups and states of a state_dict. Raises TypeError, ValueError naming what does not
    fit."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: must be a dict, not {type(state_dict).__name__}")
    for name in ("state", "param_groups"):
        if name not in state_dict:
            raise ValueError(f"state_dict: has no {name!r}: it is not that of an optimizer")
    saved = copy.deepcopy(state_dict["param_groups"])
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in own_groups]:
        raise ValueError("state_dict: has parameter groups of other sizes than the optimizer")
    groups = []
    parameters: dict[Any, torch.Tensor] = {}
    steps: dict[Any, Any] = {}
    for number, (own, new) in enumerate(zip(own_groups, saved)):
        check_group({**own, **new}, f"state_dict: param_groups[{number}]", engine.rule)
        parameters.update(zip(new["params"], own["params"]))
        # apex, DeepSpeed and Transformer Engine keep the step in the group.
        steps.update(dict.fromkeys(new["params"], new.pop("step", None)))
        groups.append({**own, **new, "params": own["params"]})
    states = {}
    for number, state in state_dict["state"].items():
        if number in parameters and state:
            record = engine.record(parameters[number])
            given = {"step": steps[number], **state} if steps[number] is not None else state
            states[record] = _values(engine, record, given, f"state[{number}]")
    return groups, states


def _step_in(state: Mapping[str, Any], engine: Engine, place: str) -> int:
    """The number of updates. torch's SGD has none, and neither has Lion."""
    step = state.get("step")
    if step is None:
        if engine.row["counts_steps"]:
            raise ValueError(f"state_dict: {place} has no 'step', and neither has its group")
        return 1
    return int(step)


def _values(engine: Engine, record: Record, state: Mapping[str, Any], place: str) -> Values:
    if has_no_updates(record.parameter):  # torch.optim.Adagrad has states for all parameters
        return dict(state)
    names = engine.moment_names()
    values: Values = {"step": _step_in(state, engine, place)}
    for name in state:
        if name != "step" and name not in (*names, "master"):
            values[name] = state[name]
    for name in (*names, "master"):
        value = state.get(name)
        if value is None:
            if name == "master" or "momentum" in engine.row["parameters"]:
                continue
            raise ValueError(f"state_dict: {place} has no {name!r}: it is not one of {engine.rule}")
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"state_dict: {place}[{name!r}] is {type(value).__name__}, not a tensor")
        has = _dtensors.misfit(record.key, value)
        if has is not None:
            own = (f", {_dtensors.describe(record.key)}" if _dtensors.is_dtensor(record.key) else "")
            raise ValueError(f"state_dict: {place}[{name!r}] has {has}, the parameter "
                             f"{tuple(record.key.shape)}{own}")
        values[name] = value
    return values


@torch.no_grad()
def write(engine: Engine, states: dict[Record, Values]) -> None:
    """Replaces all states by the given ones. Parameters without one start with new states. Masters
    stay unless new ones are given, which do not change weights: the model may be loaded before or
    after. Memory for all states is allocated before anything changes."""
    updated = [record for record in states if not has_no_updates(record.parameter)]
    engine.follow(updated)
    engine.require(updated)
    for record in list(engine.records.values()):
        engine.part_from_view(record)
        values = states.get(record)
        if values is not None and has_no_updates(record.parameter):
            record.others = values
            continue
        if values is None:
            engine.forget(record)
            continue
        moments = {name: values.get(name) for name in engine.moment_names()}
        record.keeps_moments = any(value is not None for value in moments.values())
        known = {name: zeros_for(record) if value is None else value
                 for name, value in moments.items()}
        if "master" in values and record.dtype != torch.float32:
            known["master"] = fitting_master(record, values["master"])
        engine.write(record, known, sets_weights=False)
        record.steps = values["step"]
        record.others = {name: value for name, value in values.items()
                         if name not in ("step", "master", *moments)}


def fitting_master(record: Record, saved: torch.Tensor) -> torch.Tensor:
    """The saved master. Half way between two bf16 weights it rounds away from zero. If the model has
    the weight nearer to zero, as other programs round, the master becomes the next smaller one."""
    weights = record.parameter.detach().to("cpu", torch.float32)
    saved = _dtensors.local(saved).detach().to("cpu", torch.float32)
    if record.dtype != torch.bfloat16:
        return saved
    smaller = torch.nextafter(saved, weights)
    half_way = saved.contiguous().view(torch.int32).bitwise_and(0xFFFF) == 0x8000
    other = half_way & (weights.abs() < saved.abs()) & (smaller.to(torch.bfloat16) == weights)
    return torch.where(other, smaller, saved)
