"""`optimizer.state`: the states that native code keeps, as the mapping of a torch optimizer."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Callable

import torch

from . import _dtensors
from ._engine import Engine, Record, has_no_updates, zeros_for
from ._gradients import TYPES
from ._torch_states import fitting_master


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter. Values are read on access, as copies in host memory. Assigned
    values, and in-place changes of such a copy before the next step, are written back.

    It is an object like the dict of a torch optimizer: if it is taken away from its parameter, it
    keeps its values, and it may become the state of another parameter. It also keeps values of
    another shape than the parameter's, which the next step refuses."""

    def __init__(self, engine: Engine, parameter: torch.Tensor | None,
                 values: Mapping[str, Any] | None = None) -> None:
        self._engine = engine
        self._parameter = parameter  # None: it has its own values
        self._values = dict(values or {})

    def _record(self) -> Record | None:
        return None if self._parameter is None else self._engine.records.get(self._parameter)

    def __getitem__(self, name: str) -> Any:
        record = self._record()
        if self._parameter is None:
            return self._values[name]
        if record is None or name not in self._names(record):
            raise KeyError(name)
        if name in record.others:
            return record.others[name]
        value = (_steps_of(record) if name == "step"
                 else self._engine.read(record, [name])[name])

        def give_back(changed: torch.Tensor) -> None:
            write_value(self._engine, record, name, changed)

        lent = self._engine.loans.lend(record, value, give_back)
        whole = lent if name == "step" else _dtensors.like(record.key, lent)
        # A DTensor and its shard have a counter of changes each.
        return lent if whole is lent else self._engine.loans.lend(record, whole, give_back)

    def __setitem__(self, name: str, value: Any) -> None:
        if self._parameter is None:
            self._values[name] = value
            return
        record = self._engine.record(self._parameter)
        if record.view() is None:
            record.view = weakref.ref(self)
        # torch fills a new state entry by entry, and refuses a step without "step".
        starts = name in self._engine.moment_names() and not has_state(self._engine, record)
        if misfit(self._engine, record, {name: value}) is None and not starts:
            write_value(self._engine, record, name, value)
            return
        self.take_away()
        self._values[name] = value
        self._engine.wait_with(record, self)

    def __delitem__(self, name: str) -> None:
        record = self._record()
        if self._parameter is None:
            del self._values[name]
            return
        if record is None or name not in self._names(record):
            raise KeyError(name)
        if name in record.others:
            del record.others[name]
        elif name == "step":
            self.take_away()
            del self._values[name]
            self._engine.wait_with(record, self)
        elif name == "master":
            self._engine.refresh(record)
        else:
            self._engine.write(record, {name: zeros_for(record)})

    def __iter__(self) -> Iterator[str]:
        if self._parameter is None:
            return iter(list(self._values))
        record = self._record()
        return iter(self._names(record) if record is not None else [])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<state of a parameter: {', '.join(self)}>"

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def clear(self) -> None:
        record = self._record()
        if self._parameter is None:
            self._values.clear()
        elif record is not None:
            self._engine.forget(record)

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self), None)
        if name is None:
            raise KeyError("popitem(): the state is empty")
        value = self[name]
        record = self._record()
        if record is not None:
            self.take_away()
            self._engine.wait_with(record, self)
        del self._values[name]
        return name, value

    def copy(self) -> dict[str, Any]:
        """A dict of the same values. Changes of its tensors before the next step change the state."""
        return {name: self[name] for name in self}

    def __or__(self, other: Any) -> dict[str, Any]:
        return self.copy() | dict(other) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other) | self.copy() if isinstance(other, Mapping) else NotImplemented

    def __ior__(self, other: Any) -> ParameterState:
        self.update(other)
        return self

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        record = self._record()
        if self._parameter is None:
            return copy.deepcopy(self._values, memo)
        return {} if record is None else independent(snapshot(self._engine, record), record, memo)

    def __reduce__(self) -> Any:
        return dict, (self._snapshot(),)

    def _snapshot(self) -> dict[str, Any]:
        """All values, as a dict that does not change with the optimizer."""
        if self._parameter is None:
            return dict(self._values)
        record = self._record()
        return {} if record is None else snapshot(self._engine, record)

    def take_away(self) -> None:
        """Copies the values out of the optimizer, which will have others for the parameter."""
        self._values = self._snapshot()
        self._parameter = None

    def give_to(self, record: Record) -> None:
        """Makes this the state of a parameter, which keeps its weights. Raises ValueError for moments
        of another shape and for missing ones. A master of another shape is left out."""
        values = dict(self._values)
        master = values.pop("master", None)
        wrong = misfit(self._engine, record, values) or missing(self._engine, record, values)
        if wrong is not None:
            raise ValueError(wrong)
        self._engine.forget(record)
        for name, value in values.items():
            write_value(self._engine, record, name, value)
        master = _dtensors.local(master) if isinstance(master, torch.Tensor) else None
        if (master is not None and master.shape == record.parameter.shape
                and record.dtype != torch.float32):
            self._engine.write(record, {"master": _master_of_weights(record, master)})
        self._parameter = record.key
        self._values = {}
        record.view = weakref.ref(self)

    def _names(self, record: Record) -> list[str]:
        own = ["step", *self._engine.names_of(record)] if has_state(self._engine, record) else []
        return [*own, *record.others]


def misfit(engine: Engine, record: Record, values: Mapping[str, Any]) -> str | None:
    """Describes the first of these values that the parameter cannot have."""
    if has_no_updates(record.parameter):
        return None
    for name in (*engine.moment_names(), "master"):
        has = _dtensors.misfit(record.key, values[name]) if name in values else None
        if has is not None:
            kind = "DTensor like the parameter" if _dtensors.is_dtensor(record.key) else "tensor"
            return (f"{record.name}: {name!r} of its state must be a {kind} of the shape "
                    f"{tuple(record.key.shape)}, and has {has}")
    return None


def _master_of_weights(record: Record, master: torch.Tensor) -> torch.Tensor:
    """The master where it rounds to the present weight (in either direction for ties), and the weight
    elsewhere."""
    weights = record.parameter.detach().to("cpu")
    master = fitting_master(record, master)
    exact = weights.to(torch.float32)
    nearest = (master.to(weights.dtype).to(torch.float32) - master).abs()
    return torch.where((exact - master).abs() <= nearest, master, exact)


def missing(engine: Engine, record: Record, values: Mapping[str, Any]) -> str | None:
    """Describes the first value that these lack, if torch's optimizer of the same rule needs it."""
    needed = ("step", *engine.moment_names())
    if not engine.row["counts_steps"] or not any(name in values for name in needed):
        return None
    lacks = [name for name in needed if values.get(name) is None]
    return f"{record.name}: its state has no {lacks[0]!r}" if lacks else None


def write_value(engine: Engine, record: Record, name: str, value: Any) -> None:
    if has_no_updates(record.parameter):
        record.others[name] = value
    elif name == "step":
        engine.require([record])
        record.steps = int(value)
        record.begin_state()
    elif name in (*engine.moment_names(), "master"):
        engine.write(record, {name: value})
    else:
        record.others[name] = value


class StateMapping(MutableMapping[Any, Any]):
    """States by parameter. As in torch, a parameter without a state has an empty one, and the user
    may add entries with other keys."""

    def __init__(self, engine: Engine, groups: Callable[[], list[dict[str, Any]]]) -> None:
        self._engine = engine
        self._groups = groups  # those of the optimizer
        self._extra: dict[Any, Any] = {}
        self._copies = False

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, torch.Tensor):
            return self._extra[key]
        if self._copies:
            return snapshot(self._engine, self._engine.records[key])
        record = self._engine.records.get(key)
        if record is None and any(key is p for group in self._groups() for p in group["params"]):
            record = self._engine.record(key)
        if record is None:
            return ParameterState(self._engine, key)
        view = record.view() if record.waiting is None else record.waiting
        if view is None:
            view = ParameterState(self._engine, key)
            record.view = weakref.ref(view)
        return view

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, torch.Tensor):
            self._extra[key] = value
            return
        if not isinstance(value, Mapping):
            raise TypeError(f"state: the state of a parameter is a mapping, not "
                            f"{type(value).__name__}")
        record = self._engine.record(key)
        if value is record.waiting or value is record.view():
            return
        # An object that is the state of another parameter stays there.
        if isinstance(value, ParameterState) and value._parameter is None:
            state = value
        else:
            state = ParameterState(self._engine, None, dict(value))
        self._engine.part_from_view(record)
        moments = {name: one for name, one in state._values.items() if name != "master"}
        if (misfit(self._engine, record, moments) or missing(self._engine, record, moments)) is None:
            state.give_to(record)
        else:
            self._engine.wait_with(record, state)
        self.drop_unused()

    def __delitem__(self, key: Any) -> None:
        if not isinstance(key, torch.Tensor):
            del self._extra[key]
            return
        record = self._engine.records.get(key)
        # An empty state that was read is there, as in torch's defaultdict.
        if record is None or (key not in self and record.view() is None):
            raise KeyError("this parameter has no state")
        self._engine.part_from_view(record)
        self._engine.forget(record)
        self.drop_unused()

    def settle(self) -> None:
        """Moves states that were assigned with the shape of a later parameter into the optimizer.
        Raises ValueError naming a parameter whose state still has another shape or lacks values."""
        waiting, self._engine.waiting = self._engine.waiting, []
        for number, record in enumerate(waiting):
            if record.waiting is None or self._engine.records.get(record.key) is not record:
                continue
            try:
                self._find_step(record)
                record.waiting.give_to(record)
            except ValueError:
                self._engine.waiting = waiting[number:]
                raise
            record.waiting = None

    def _find_step(self, record: Record) -> None:
        """apex and Transformer Engine keep the step in the group, whose settings
        ZeroRedundancyOptimizer loads after the states."""
        values = record.waiting._values
        if "step" in values or not any(name in values for name in self._engine.moment_names()):
            return
        for group in self._groups():
            if group.get("step") is not None and any(p is record.key for p in group["params"]):
                values["step"] = group["step"]

    def drop_unused(self) -> None:
        """Frees what belongs to parameters that are in no group and have no state."""
        records = self._engine.records
        if not records:  # the optimizer may have no groups yet
            return
        used = {id(p) for group in self._groups() for p in group["params"]}
        unused = [r for p, r in records.items()
                  if id(p) not in used and (r.deleted or not has_state(self._engine, r))
                  and not r.others and r.waiting is None and r.view() is None]
        if unused:
            self._engine.drop(unused)

    def __contains__(self, key: Any) -> bool:
        if not isinstance(key, torch.Tensor):
            return key in self._extra
        record = self._engine.records.get(key)
        return record is not None and (has_state(self._engine, record) or bool(record.others)
                                       or record.waiting is not None)

    def __iter__(self) -> Iterator[Any]:
        self.drop_unused()  # they have a state with Adagrad
        yield from [key for key in self._engine.records if key in self]
        yield from self._extra

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            if default:
                return default[0]
            raise KeyError("this parameter has no state")
        value = self[key]
        del self[key]
        return value

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def replace(self, states: Mapping[Any, Any]) -> None:
        """Implements assigning to `optimizer.state`."""
        if states is self:
            return
        if not isinstance(states, Mapping):
            raise TypeError(f"state: must be a mapping, not {type(states).__name__}")
        copies = {k: dict(v) if isinstance(v, Mapping) else v for k, v in states.items()}
        self.clear()
        self.update(copies)

    @contextlib.contextmanager
    def as_copies(self) -> Iterator[None]:
        """In this context, states of parameters are dicts."""
        self._copies = True
        try:
            yield
        finally:
            self._copies = False

    def __repr__(self) -> str:
        return f"<states of {len(self)} parameters>"

    def __reversed__(self) -> Iterator[Any]:
        keys: list[Any] = list(self)
        return iter(keys[::-1])

    def popitem(self) -> tuple[Any, Any]:
        if len(self) == 0:
            raise KeyError("popitem(): there is no state")
        key = next(reversed(self))
        return key, self.pop(key)

    def copy(self) -> defaultdict[Any, Any]:
        """A dict of the same states, as torch's: a state that changes there changes here."""
        return defaultdict(dict, self)

    def __copy__(self) -> defaultdict[Any, Any]:
        return self.copy()

    def __or__(self, other: Any) -> defaultdict[Any, Any]:
        return self.copy() | dict(other) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> defaultdict[Any, Any]:
        if not isinstance(other, Mapping):
            return NotImplemented
        return defaultdict(dict, dict(other) | dict(self))

    def __ior__(self, other: Any) -> StateMapping:
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        made: defaultdict[Any, Any] = defaultdict(dict)
        for key in self:
            made[copy.deepcopy(key, memo)] = copy.deepcopy(self[key], memo)
        return made

    def __reduce__(self) -> Any:
        with self.as_copies():
            return defaultdict, (dict, dict(self.items()))


def has_state(engine: Engine, record: Record) -> bool:
    """torch.optim.Adagrad has a state for each parameter from the start, and needs it."""
    return record.has_state or (engine.row["has_states_at_once"] and record.dtype in TYPES
                                and not has_no_updates(record.parameter))


def snapshot(engine: Engine, record: Record) -> dict[str, Any]:
    """The state of a parameter as a dict."""
    if record.waiting is not None:
        waiting: ParameterState = record.waiting
        return waiting.copy()
    if not has_state(engine, record):
        return dict(record.others)
    values = {name: _dtensors.like(record.key, value)
              for name, value in engine.read(record, engine.names_of(record)).items()}
    return {"step": _steps_of(record), **values, **record.others}


def independent(state: dict[str, Any], record: Record, memo: dict[int, Any]) -> dict[str, Any]:
    """A snapshot whose further entries are deep copies. The others are copies already."""
    if record.waiting is not None:
        return copy.deepcopy(state, memo)
    return state | copy.deepcopy(record.others, memo)


def _steps_of(record: Record) -> torch.Tensor:
    return torch.tensor(float(record.steps), dtype=torch.float32, device="cpu")
