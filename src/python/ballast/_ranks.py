"""The ranks that have parts of the gradients, and what they decide together about a step.

FSDP, ZeroRedundancyOptimizer and DTensors give each rank a part of the gradients. The norm and the
decision to skip a step are those of all parts, so all ranks of the process groups vote in each
step, also those without gradients. Gradients of other parameters, such as those of
DistributedDataParallel, are taken as equal on all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from . import _dtensors
from ._engine import Engine, Record
from ._gradients import Collected


# Most process groups of an optimizer. Votes have the same length on all ranks, so that also ranks
# that do not agree about the groups hear of each other's failures.
_MOST_GROUPS = 4
_VOTE = 2 + (1 << _MOST_GROUPS)


class _Shares(NamedTuple):
    """How the gradient of a parameter is distributed."""

    summed: tuple[Any, ...] = ()  # process groups whose ranks have different parts of it
    averaged: tuple[Any, ...] = ()  # those whose ranks have the same values
    unknown: str = ""  # why the norm of the gradient cannot be computed


class _Group:
    """A process group, and the device of its messages."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.ranks = ranks_of(group)
        on_host = "cpu" in torch.distributed.get_backend_config(group)
        self.device = "cpu" if on_host else torch.device("cuda", torch.cuda.current_device())

    def start_sum(self, values: list[float]) -> tuple[Any, torch.Tensor]:
        message = torch.tensor(values, dtype=torch.float64, device=self.device)
        return torch.distributed.all_reduce(message, group=self.group, async_op=True), message


class Ranks:
    """The process groups of an optimizer's parameters.

    Each record has a mask `summed`: bit i is set if the ranks of groups[i] have different parts of
    its gradient. The ranks of the other groups have equal gradients. All ranks must find the same
    groups in the same order.

    `process_group`: a group whose ranks have different parameters.
    """

    def __init__(self, process_group: Any, model: torch.nn.Module | None) -> None:
        self.groups: list[_Group] = []
        self.read_unguarded = False  # whether other code reads the parameters' memory, as FSDP does
        self._model = model
        self._masks: dict[_Shares, int] = {}
        self._unknown = ""
        self._owners: _Group | None = None  # of `process_group`
        self._votes = False
        if process_group is not None:
            self.read_unguarded = True
            if len(ranks_of(process_group)) > 1:
                self._owners = self._group(process_group)

    def learn(self, records: Iterable[Record]) -> None:
        """Finds the process groups of those records that are new."""
        new = [record for record in records if record.summed is None]
        if not new:
            return
        flat = [r for r in new if getattr(r.key, "_fsdp_flattened", False)]
        of_fsdp = _fsdp_shares(self._model) if flat else {}
        for record in new:
            shares = _Shares()
            if _dtensors.is_dtensor(record.key):
                shares = _dtensor_shares(record.key)
                self.read_unguarded = True
            elif getattr(record.key, "_fsdp_flattened", False):
                shares = of_fsdp.get(id(record.key)) or _Shares(unknown=(
                    f"{record.name}: the FullyShardedDataParallel that has sharded it was not "
                    "found; pass the wrapped model as the argument model"))
                self.read_unguarded = True
            if shares not in self._masks:
                self._masks[shares] = self._mask(shares, record.name)
            record.summed = self._masks[shares]

    def file_name(self, name: str) -> str:
        """`name` with the number of this rank, if the ranks have different states."""
        if not self.groups:
            return name
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return f"-rank-{rank}-of-{ranks}".join(os.path.splitext(name))

    def _mask(self, shares: _Shares, name: str) -> int:
        summed = [self._group(g) for g in shares.summed if len(ranks_of(g)) > 1]
        own = [*summed, *(self._group(g) for g in shares.averaged if len(ranks_of(g)) > 1)]
        if self._owners is not None and self._owners not in own:
            others = {rank for group in own for rank in group.ranks}
            if len(others.intersection(self._owners.ranks)) <= 1:
                summed.append(self._owners)
            elif _size(shares) != len(self._owners.ranks):
                shares = shares._replace(unknown=(
                    f"process_group: has some of the ranks that share {name}, and not all of them; "
                    "leave it out"))
        for other in self._masks:
            if not _agree(shares, other):
                shares = shares._replace(unknown=(
                    f"{name}: other ranks share it than share the other parameters, so the norm of "
                    "all gradients is not known; make an optimizer for each process group"))
        if len(self.groups) > _MOST_GROUPS:
            shares = shares._replace(unknown=(
                f"{name}: is shared in the {len(self.groups)}th process group; at most {_MOST_GROUPS} "
                "are supported"))
        self._unknown = self._unknown or shares.unknown
        return sum(1 << self.groups.index(group) for group in summed)

    def _group(self, group: Any) -> _Group:
        """The group with these ranks, which is the same for all process groups with these ranks."""
        for known in self.groups:
            if known.ranks == ranks_of(group):
                return known
        self.groups.append(_Group(group))
        return self.groups[-1]

    @contextlib.contextmanager
    def failing_together(self, votes: bool) -> Iterator[None]:
        """In this context, gradient_stats() may be called once. If it is left with an exception
        before that, the other ranks raise RuntimeError there instead of waiting. `votes`: whether
        gradient_stats() will be called; equal on all ranks."""
        self._votes = votes and not _called_to_make_states()
        try:
            yield
        except BaseException:
            if self._votes:
                # Nothing waits for the other ranks: they may be far from their votes.
                for group in self.groups:
                    group.start_sum([1.0] * _VOTE)
            raise
        finally:
            self._votes = False

    def gradient_stats(self, engine: Engine,
                       gradients: Collected) -> tuple[float, float]:
        """Sum of squares of all gradients, and whether they have non-finite values (more than 0).
        Returns the same on all ranks. Raises ValueError if the norm is not known, and RuntimeError
        if another rank has failed."""
        if self._unknown:
            raise ValueError(f"{self._unknown}; or clip before step(), with max_grad_norm=None and "
                             "skip_non_finite=False")
        if not self.groups or not self._votes:
            return engine.gradient_stats(gradients)
        parts: dict[int, list[torch.Tensor]] = {}
        for parameter, gradient in gradients.items():
            parts.setdefault(engine.records[parameter].summed or 0, []).append(gradient)
        values = [0.0] * _VOTE
        for mask, some in parts.items():
            values[2 + mask], non_finite = engine.gradient_stats(some)
            values[1] += non_finite
        failed, bad_values, *squares = self._vote(values)
        if failed:
            raise RuntimeError("step: another rank has failed before its update, so this rank has "
                               "changed nothing; see the error of that rank")
        return sum(squares), bad_values

    def _vote(self, values: list[float]) -> list[float]:
        """Adds the number of failures, the number of non-finite values and the sums of squares, one
        for each possible mask, of all ranks."""
        self._votes = False
        for number, group in enumerate(self.groups):
            share = 1.0 / len(group.ranks)
            message = [*values[:2], *(value if mask >> number & 1 else value * share
                                      for mask, value in enumerate(values[2:]))]
            work, answer = group.start_sum(message)
            work.wait()
            values = answer.tolist()
        return values


def ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def check_group(group: Any) -> Any:
    """Raises TypeError, ValueError for a `process_group` that is none of this rank."""
    if group is None:
        return None
    distributed = torch.distributed
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise TypeError("process_group: must be a torch.distributed.ProcessGroup, not "
                        f"{type(group).__name__}")
    if distributed.get_rank() not in ranks_of(group):
        raise ValueError(f"process_group: has not this rank {distributed.get_rank()}")
    return group


def group_of_zero() -> Any:
    """The process group of the ZeroRedundancyOptimizer that is calling, and gives this rank its
    part of the parameters. None if there is none."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame: Any = sys._getframe(1) if module is not None else None
    while frame is not None:
        if module is not None and frame.f_code.co_name == "_init_local_optimizer":
            caller = frame.f_locals.get("self")
            if isinstance(caller, module.ZeroRedundancyOptimizer):
                return caller.process_group
        frame = frame.f_back
    return None


def _called_to_make_states() -> bool:
    """Whether torch.distributed.checkpoint makes a step with zeros, which is to make states. It does
    so on those ranks alone that have no states."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame: Any = sys._getframe(1) if code is not None else None
    for _ in range(16):  # wrappers of step() and of contexts
        if frame is None or frame.f_code is code:
            return frame is not None
        frame = frame.f_back
    return False



def _dtensor_shares(parameter: Any) -> _Shares:
    mesh = parameter.device_mesh
    if mesh.get_coordinate() is None:
        return _Shares()
    summed: list[Any] = []
    averaged: list[Any] = []
    for number, placement in enumerate(parameter.placements):
        (averaged if placement.is_replicate() else summed).append(mesh.get_group(number))
    return _Shares(tuple(summed), tuple(averaged))


def _fsdp_shares(model: torch.nn.Module | None) -> dict[int, _Shares]:
    """The shares of all parameters of FullyShardedDataParallel in the process, by id(). A parameter
    does not lead to its module, so this looks through all objects."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    known = gc.get_objects() + list([] if model is None else model.modules())
    found: dict[int, _Shares] = {}
    for module in known:
        handle = (getattr(module, "_handle", None)
                  if issubclass(type(module), FullyShardedDataParallel) else None)
        if handle is None:
            continue
        flat = handle.flat_param
        groups = (module.process_group,)
        sharded = handle.uses_sharded_strategy
        shares = _Shares(summed=groups) if sharded else _Shares(averaged=groups)
        across = getattr(module, "_inter_node_pg", None)
        if across is not None and "HYBRID" in module.sharding_strategy.name:
            shares = shares._replace(averaged=(*shares.averaged, across))
        if any(extension is not None for extension in flat._param_extensions):
            shares = shares._replace(unknown=(
                "params: FullyShardedDataParallel over tensor-parallel parameters is not supported; "
                "use fully_shard (FSDP2)"))
        for parameter in (flat, *(flat._params or ()), *(flat._shared_params or ())):
            found[id(parameter)] = shares
    return found


def _size(shares: _Shares) -> int:
    size = 1
    for group in (*shares.summed, *shares.averaged):
        size *= len(ranks_of(group))
    return size


def _agree(one: _Shares, other: _Shares) -> bool:
    """Whether each rank gets the same norm of both: they cover equally many ranks, or the one is
    replicated on the further ranks of the other, as with tensor parallelism of some layers, or on
    all ranks."""
    if _size(one) == _size(other):
        return True
    first, second = ({ranks_of(g) for g in (*s.summed, *s.averaged) if len(ranks_of(g)) > 1}
                     for s in (one, other))
    return first <= second or second <= first
