"""Predictions of runs, like ``ballast plan``."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _arguments, _ballast

__all__ = ["Forecast", "LedgerLine", "Plan", "plan"]


@dataclass(frozen=True)
class LedgerLine:
    """Peak memory of one kind of data on one tier."""

    tier: str  #: "device", "host" or "nvme"
    kind: str  #: such as "weights" or "staging"
    bytes: int
    device: int | None = None  #: on the tier "device": the number of the device, if a rank has several


@dataclass(frozen=True)
class Forecast:
    """Predicted speed. All members but tokens are per rank."""

    step_seconds: float
    tokens_per_second: float  #: of all ranks
    tokens_per_step: int  #: of all ranks
    bottleneck: str  #: the lane that bounds the step, such as "compute" or "fetch"
    peak_bytes: Mapping[str, int]  #: by tier, of all devices of the rank


class Plan:
    """A prediction that `plan()` has made. `str()` is what ``ballast plan`` prints."""

    def __init__(self, values: dict[str, Any], lines: list[str]) -> None:
        self._values = values
        self._lines = lines

    @property
    def ledger(self) -> list[LedgerLine]:
        """The memory of the run, exact, in the order of the tiers."""
        return [LedgerLine(**line) for line in self._values["ledger"]]

    @property
    def forecast(self) -> Forecast:
        values = self._values
        return Forecast(step_seconds=values["predicted_step_seconds"],
                        tokens_per_second=values["tokens_per_second"],
                        tokens_per_step=values["tokens_per_step"], bottleneck=values["bottleneck"],
                        peak_bytes=dict(values["peak_bytes"]))

    def to_dict(self) -> dict[str, Any]:
        """The object of ``ballast plan --json``, in seconds and bytes."""
        return copy.deepcopy(self._values)

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def __repr__(self) -> str:
        return f"<ballast.Plan\n{self}>"


def plan(config: Mapping[str, Any] | str | os.PathLike[str], *,
         rates: str | os.PathLike[str] | None = None, world: int = 1,
         overrides: Iterable[str] = ()) -> Plan:
    """Predicts memory and speed of a run without running it.

    `config`: a dict, or the path of a JSON file; paths in a dict are relative to the working directory.
    `rates`: a file with the rates of a machine (configs/rates); None measures this machine, once, which
    takes some seconds, and caches the result. `world`: the number of ranks, without `rates` all on this
    machine. `overrides`: like ``"ballast.steps=10"``.

    Raises ballast.ConfigError (a ValueError) that names the key, ballast.OutOfMemoryError if the run does
    not fit, KeyboardInterrupt.
    """
    file, text = _arguments.config(config)
    rates_file = "" if rates is None else _arguments.path(rates, "rates")
    values, lines = _ballast.plan(file, text, _arguments.texts(overrides, "overrides"), rates_file,
                                  _arguments.whole(world, "world", 1, 1 << 20))
    title = "ballast.plan" if text is not None else f"ballast plan {file}"
    return Plan(json.loads(values), [title, *lines])
