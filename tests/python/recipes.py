"""Runs the recipes of src/python/README.md, each a block of code that begins with its name as a comment, with a plain
model and with an offloaded one. Needs torch."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ballast
import fake_device
from offload_models import same, state
from support import ROOT

MANUAL = ROOT / "src/python/README.md"


def recipe(name: str) -> str:
    """The block of code with this name, without that line."""
    manual = MANUAL.read_text(encoding="utf-8")
    blocks = re.findall(rf"^```python\n# {re.escape(name)}\n(.*?)^```$", manual, re.MULTILINE | re.DOTALL)
    if len(blocks) != 1:
        raise AssertionError(f"src/python/README.md has {len(blocks)} recipes that are named {name}")
    return blocks[0]


class Plain:
    """Stands for a handle where the model is not offloaded."""

    def on_host(self) -> Any:
        return contextlib.nullcontext()


class Door:
    """Replaces the module ballast in a recipe: offload() is to a fake device with room for `blocks` blocks, or does
    nothing."""

    def __init__(self, offloaded: bool, blocks: float = 2, **options: Any) -> None:
        self.offloaded, self.blocks, self.options = offloaded, blocks, options
        self.handles: list[Any] = []
        self.module = types.SimpleNamespace(offload=self.offload, OffloadAdamW=ballast.OffloadAdamW)

    def offload(self, model: nn.Module, device: Any) -> Any:
        self.handles.append(fake_device.offload(model, fake_device.budget_of(model, self.blocks), **self.options)
                            if self.offloaded else Plain())
        return self.handles[-1]

    def run(self, name: str, names: dict[str, Any]) -> dict[str, Any]:
        """Runs the recipe with these names. Returns all names after it."""
        names = {**names, "ballast": self.module}
        exec(compile(recipe(name), f"recipe {name}", "exec"), names)  # pylint: disable=exec-used
        return names


def check(loop: Callable[[Door, str], tuple[nn.Module, Any]], blocks: float = 2, **options: Any) -> None:
    """Calls `loop(door, folder)` without and with offload(); it returns the trained model and anything else. Raises
    Differs unless both have the same bits, AssertionError if no block has left the device."""
    found = []
    for offloaded in (False, True):
        door = Door(offloaded, blocks, **options)
        torch.manual_seed(3)
        with tempfile.TemporaryDirectory() as folder:
            model, seen = loop(door, folder)
        found.append((seen, state(model)))
    same(*found)
    report = door.handles[0].report()
    if report.loads <= len(report.units):
        raise AssertionError(f"blocks came to the device {report.loads} times, which is once each")


def quietly(test: type[unittest.TestCase]) -> type[unittest.TestCase]:
    """Keeps progress bars and warnings of frameworks out of a test's output."""
    run = test.run

    def silent(self: unittest.TestCase, result: Any = None) -> Any:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return run(self, result)

    test.run = silent  # type: ignore[method-assign]
    return test
