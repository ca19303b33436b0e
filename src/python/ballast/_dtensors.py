"""DTensors: the shard of a parameter on this rank, which the update changes, and states as DTensors.

Nothing here imports torch.distributed.tensor, which is slow, before a DTensor exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# Classes of parameters that behave as tensors do.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_dtensor(tensor: Any) -> bool:
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Any:
    """The shard of a DTensor on this rank, which shares its memory. Other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def like(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """`shard` as the values of a DTensor that is distributed like the parameter, if the parameter is
    a DTensor. The shard stays in host memory, also if the mesh is one of GPUs."""
    if not is_dtensor(parameter):
        return shard
    spec = parameter._spec
    meta = spec.tensor_meta._replace(dtype=shard.dtype)
    with torch.no_grad():
        made: torch.Tensor = type(parameter)(shard, dataclasses.replace(spec, tensor_meta=meta),
                                             requires_grad=False)
    return made


def misfit(parameter: Any, value: Any) -> str | None:
    """Describes `value` if it is not a tensor with the shape of the parameter and, for a DTensor,
    with its distribution."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if is_dtensor(value) != is_dtensor(parameter):
        return f"the placements {describe(value)}" if is_dtensor(value) else "no placements"
    if value.shape != parameter.shape:
        return f"the shape {tuple(value.shape)}"
    if is_dtensor(value) and distribution(value) != distribution(parameter):
        return f"the placements {describe(value)}"
    return None


def distribution(tensor: Any) -> tuple[Any, ...]:
    return tensor.device_mesh, tuple(tensor.placements)


def describe(tensor: Any) -> str:
    return f"{tuple(tensor.placements)} on {tensor.device_mesh}"


def place_of(parameter: Any) -> str:
    """Text that identifies the shard of a DTensor that this rank has; empty for other tensors."""
    if not is_dtensor(parameter):
        return ""
    mesh = parameter.device_mesh
    return f"{mesh.get_coordinate()} of {tuple(mesh.shape)}, {tuple(parameter.placements)}, " \
           f"{tuple(parameter.shape)}"


def check(parameter: Any, name: str) -> None:
    """Raises TypeError for a DTensor whose shard cannot be updated."""
    if any(placement.is_partial() for placement in parameter.placements):
        raise TypeError(f"{name}: is a DTensor with the placements {describe(parameter)}, which has "
                        "no values until it is reduced")
    if type(local(parameter)) not in PLAIN:
        raise TypeError(f"{name}: is a DTensor of {type(local(parameter)).__name__}; only shards that "
                        "are plain tensors are supported")


def shard_of_gradient(parameter: Any, gradient: Any, name: str) -> torch.Tensor:
    """The gradient of the parameter's shard. Raises TypeError for a gradient that is distributed in
    another way than the parameter."""
    if is_dtensor(parameter) and is_dtensor(gradient) and (
            distribution(gradient) == distribution(parameter)):
        shard: torch.Tensor = local(gradient)
        return shard
    has = f"the placements {describe(gradient)}" if is_dtensor(gradient) else "no placements"
    raise TypeError(f"{name}: the gradient has {has}, unlike the parameter; redistribute() it first")
