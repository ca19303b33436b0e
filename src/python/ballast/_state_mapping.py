"""`optimizer.state`: the states that native code keeps, as the mapping of a torch optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ._engine import Engine, Record, zeros_for


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter. Values are read on access, as copies in host memory. Assigned
    values, and in-place changes of such a copy before the next step, are written back."""

    def __init__(self, engine: Engine, parameter: torch.Tensor) -> None:
        self._engine = engine
        self._parameter = parameter

    def __getitem__(self, name: str) -> Any:
        record = self._engine.records.get(self._parameter)
        if record is None or name not in self._names(record):
            raise KeyError(name)
        if name in record.others:
            return record.others[name]
        value = (_steps_of(record) if name == "step"
                 else self._engine.read(record, [name])[name])
        return self._engine.loans.lend(
            record, value, lambda changed: self._engine_write(record, name, changed))

    def __setitem__(self, name: str, value: Any) -> None:
        record = self._engine.record(self._parameter)
        self._engine_write(record, name, value)

    def __delitem__(self, name: str) -> None:
        record = self._engine.records.get(self._parameter)
        if record is None or name not in self._names(record):
            raise KeyError(name)
        if name in record.others:
            del record.others[name]
        elif name == "step":
            record.steps = 0
        elif name == "master":
            self._engine.refresh(record)
        else:
            self._engine.write(record, {name: zeros_for(record)})

    def __iter__(self) -> Iterator[str]:
        record = self._engine.records.get(self._parameter)
        return iter(self._names(record) if record is not None else [])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<state of a parameter: {', '.join(self)}>"

    def copy(self) -> dict[str, Any]:
        """All values, as a dict that does not change with the optimizer."""
        return snapshot(self._engine, self._engine.records[self._parameter])

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict) -> dict[str, Any]:
        return self.copy()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def _names(self, record: Record) -> list[str]:
        own = ["step", *self._engine.names_of(record)] if has_state(self._engine, record) else []
        return [*own, *record.others]

    def _engine_write(self, record: Record, name: str, value: Any) -> None:
        engine = self._engine
        if name == "step":
            record.steps = int(value)
            record.has_state = True
        elif name in (*engine.moment_names(), "master"):
            if not isinstance(value, torch.Tensor) or value.shape != record.parameter.shape:
                raise ValueError(f"{record.name}: {name!r} must be a tensor of the shape "
                                 f"{tuple(record.parameter.shape)}")
            engine.write(record, {name: value})
        else:
            record.others[name] = value


class StateMapping(MutableMapping[Any, Any]):
    """States by parameter. As in torch, a parameter without a state has an empty one, and the user
    may add entries with other keys."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._extra: dict[Any, Any] = {}
        self._copies = False

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, torch.Tensor):
            return self._extra[key]
        if self._copies:
            return snapshot(self._engine, self._engine.records[key])
        return ParameterState(self._engine, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, torch.Tensor):
            self._extra[key] = value
            return
        if isinstance(value, ParameterState):
            value = value.copy()
        if not isinstance(value, Mapping):
            raise TypeError(f"state: the state of a parameter is a mapping, not "
                            f"{type(value).__name__}")
        self._engine.forget(self._engine.record(key))
        ParameterState(self._engine, key).update(value)

    def __delitem__(self, key: Any) -> None:
        if not isinstance(key, torch.Tensor):
            del self._extra[key]
        elif key in self:
            self._engine.forget(self._engine.records[key])
        else:
            raise KeyError("this parameter has no state")

    def __contains__(self, key: Any) -> bool:
        if not isinstance(key, torch.Tensor):
            return key in self._extra
        record = self._engine.records.get(key)
        return record is not None and (has_state(self._engine, record) or bool(record.others))

    def __iter__(self) -> Iterator[Any]:
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
        value = value.copy() if isinstance(value, ParameterState) else value
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

    def __deepcopy__(self, memo: dict) -> dict[Any, Any]:
        with self.as_copies():
            return dict(self.items())

    def __reduce__(self) -> Any:
        return dict, (self.__deepcopy__({}),)


def has_state(engine: Engine, record: Record) -> bool:
    """torch.optim.Adagrad has a state for each parameter from the start, and needs it."""
    return record.has_state or engine.rule == "adagrad"


def snapshot(engine: Engine, record: Record) -> dict[str, Any]:
    """The state of a parameter as a dict."""
    if not has_state(engine, record):
        return dict(record.others)
    values = engine.read(record, engine.names_of(record))
    return {"step": _steps_of(record), **values, **record.others}


def _steps_of(record: Record) -> torch.Tensor:
    return torch.tensor(float(record.steps), dtype=torch.float32, device="cpu")
