"""Checks of arguments. Each error names the argument."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any


def whole(value: Any, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """`value` as an int from `least` to `most`. Raises TypeError, ValueError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: must be a whole number, not {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: must be from {least} to {most}, got {number}")
    return number


def real(value: Any, name: str, least: float, most: float) -> float:
    """`value` as a float from `least` to `most`. Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: must be a number, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: must be from {least:g} to {most:g}, got {value:g}")
    return float(value)


def path(value: Any, name: str) -> str:
    """`value`, a str or os.PathLike, as str. Raises TypeError, ValueError if it is empty."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError(f"{name}: must be str or os.PathLike, not {type(value).__name__}")
    if not text or "\0" in text:
        raise ValueError(f"{name}: {text!r} is not a path")
    return text


def texts(value: Any, name: str) -> list[str]:
    """`value`, an iterable of str, as a list. Raises TypeError."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: must be a list of str, not {type(value).__name__}")
    listed = list(value)
    for text in listed:
        if not isinstance(text, str):
            raise TypeError(f"{name}: must be a list of str, but has {type(text).__name__}")
    return listed


def config(value: Any, name: str = "config") -> tuple[str, str | None]:
    """The file of a config and, if it is not a file, its JSON. Raises TypeError, ValueError."""
    if not isinstance(value, Mapping):
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"{name}: must be a dict, str or os.PathLike, not {type(value).__name__}")
        return path(value, name), None
    try:
        return name, json.dumps(value, allow_nan=False)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def number(value: Any, name: str, below: float = float("inf")) -> Any:
    """`value`, a number of at least 0 and less than `below`, or a tensor with one such number.
    Raises TypeError, ValueError."""
    if not hasattr(value, "item") and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{name}: must be a number, not {type(value).__name__}")
    if hasattr(value, "numel") and value.numel() != 1:
        raise ValueError(f"{name}: must be one number, but has {value.numel()}")
    if not 0 <= float(value) < below:
        bound = "" if below == float("inf") else f" and less than {below:g}"
        raise ValueError(f"{name}: must be at least 0{bound}, got {float(value):g}")
    return value


def choice(value: Any, name: str, choices: Iterable[Any]) -> Any:
    """`value` if it is one of `choices`. Raises ValueError."""
    known = list(choices)
    for one in known:
        if type(value) is type(one) and value == one:
            return value
    raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, known))}")


def paths(value: Any, name: str) -> list[str]:
    """`value`, a path or an iterable of paths, as absolute paths. Raises TypeError, ValueError."""
    if isinstance(value, (str, os.PathLike)):
        value = [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: must be str, os.PathLike or a list of them, not "
                        f"{type(value).__name__}")
    found = [os.path.abspath(path(one, name)) for one in value]
    if not found:
        raise ValueError(f"{name}: is an empty list; name at least one directory")
    if len(set(found)) != len(found):
        raise ValueError(f"{name}: names a directory twice")
    return found
