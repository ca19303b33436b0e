"""Forward and backward passes through units: when each has to be on the device."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Callable, Iterator

import torch
from torch._compile import _disable_dynamo

from . import _guards
from ._residency import Function, Residency, plainly
from ._units import Unit
from .errors import UsageError


def untraced(function: Function) -> Function:
    """Keeps torch.compile from tracing a function, without importing torch._dynamo, which takes seconds
    and 100 MB."""
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def in_backward() -> bool:
    """Whether this thread is in a backward pass of autograd."""
    return bool(torch._C._current_graph_task_id() != -1)


class Passes:
    """Follows a model through its passes.

    A pass is the outermost call of a module with units until it returns, or a backward pass from its
    first unit to its end. Between passes, the parameters of units are tensors in host memory.
    """

    def __init__(self, residency: Residency, before: Callable[[], None]) -> None:
        self.residency = residency
        self.units: list[Unit] = []
        self.visits = 0  # uses of members outside of their modules
        self._before = before  # called before an outermost call
        self._depth = 0  # calls that have not returned
        self._stack: list[Unit] = []  # units of these calls, outermost first
        self._backward = False
        self._process = os.getpid()
        self.ended = False  # the handle was removed
        _watch_engine()

    @property
    def running(self) -> bool:
        """Whether a pass is under way in this thread."""
        return self._depth > 0 or in_backward()

    # Forward

    @untraced
    def enter(self, units: list[Unit]) -> None:
        """Brings the units of a module that is called."""
        if not self.running:
            self._begin()
        elif in_backward() and not self._backward:
            self._begin_backward()
        self._depth += 1
        self._stack += units
        for unit in units:
            unit.running += 1
        try:
            for unit in units:
                self._use(unit)
        except BaseException:
            self.leave(units, None)
            raise

    @untraced
    def leave(self, units: list[Unit], result: Any) -> None:
        """Called when the module returns `result`, or None if it raises."""
        self._depth -= 1
        del self._stack[len(self._stack) - len(units):]
        self.watch(units, result)
        recomputes = in_backward()
        for unit in units:
            unit.running -= 1
            if unit.running == 0 and not recomputes:
                self.residency.end_use(unit)
                self.residency.rest(unit)
        if self._depth == 0 and not recomputes:
            for unit in self.units:
                self.residency.rest(unit)

    def watch(self, units: list[Unit], result: Any) -> None:
        """Brings these units, and those around them, when the backward pass reaches a tensor of the
        result."""
        if not units or result is None or not torch.is_grad_enabled():
            return
        outputs = [t for t in tensors_in(result) if t.requires_grad and not t.is_leaf]
        if outputs:
            for unit in units:
                unit.in_graph = True
            chain = (*self._stack, *units)
            torch.autograd.graph.register_multi_grad_hook(
                outputs, functools.partial(self._before_backward, chain), mode="any")

    def _begin(self) -> None:
        """Before an outermost call."""
        if os.getpid() != self._process:
            raise UsageError("offload: the model was offloaded in another process; a child process after "
                             "fork() cannot use its device memory")
        if self._backward:  # the last backward pass has raised
            self.end_backward()
        if self.residency.device.is_capturing():
            raise UsageError("offload: CUDA graphs cannot be captured, because weights change their "
                             "addresses; capture what is outside of the offloaded modules")
        self._before()
        self.close_homes()

    def close_homes(self) -> None:
        """Takes over what was changed at home between passes, and guards what is at home."""
        for unit in self.units:
            self.close_home(unit)

    @plainly
    def close_home(self, unit: Unit) -> None:
        """Ends uses of one unit between passes. A home on NVMe is written if it has changed, and leaves host
        memory."""
        if unit.exposed:
            self.residency.settle_home(unit)
            self.residency.guard(unit)
        if unit.home.on_nvme and unit.home.is_open:
            for member in unit.members:
                _guards.wait_for_update(member.tensor)
            unit.home.close()
        unit.exposed = False

    def _use(self, unit: Unit) -> None:
        backward = in_backward()
        phase = "backward" if backward else "forward" if torch.is_grad_enabled() else "no_grad"
        self.residency.use(unit, phase)
        if backward:
            self.residency.departures.hold(unit)

    # Backward

    def _begin_backward(self) -> None:
        self._backward = True
        _begun.add(self)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(_End(self))

    @untraced
    def _before_backward(self, chain: tuple[Unit, ...], _: Any) -> None:
        """Called when the backward pass reaches units. An outer unit still has work to do after those
        inside it, so the whole chain is brought."""
        if self.ended:
            raise UsageError(f"offload: the backward pass reaches {chain[-1].name}, whose handle was removed "
                             "after the forward pass; run backward passes before remove()")
        if not self._backward:
            self._begin_backward()
        if torch.is_grad_enabled():
            raise UsageError("offload: create_graph=True is not supported through offloaded modules such "
                             f"as {chain[-1].name}, because a second backward pass would not find its "
                             "weights")
        residency = self.residency
        for unit in residency.chain:
            if unit not in chain:
                residency.departures.collect(unit)
        residency.chain = chain
        for unit in chain:
            self._use(unit)

    @plainly
    def end_backward(self) -> None:
        """Called at the end of a backward pass, also of one that has raised. May be called several times
        in one, for the parts of reentrant checkpointing."""
        if not self._backward:
            return
        self._backward = False
        _begun.discard(self)
        residency = self.residency
        residency.chain = ()
        for unit in self.units:
            residency.departures.collect(unit)
            unit.in_graph = False
            if unit.running == 0:
                residency.rest(unit)
        residency.departures.finish()

    # Uses outside of the unit's module

    def begin_visit(self, unit: Unit) -> None:
        """Brings a unit for other code."""
        if not self.running:
            self._begin()
        elif in_backward() and not self._backward:
            self._begin_backward()
        self.visits += 1
        self._depth += 1
        unit.running += 1
        try:
            self._use(unit)
            self.residency.guard(unit)  # the next use has to be seen, too
        except BaseException:
            self.end_visit(unit)
            raise

    def end_visit(self, unit: Unit) -> None:
        self._depth -= 1
        unit.running -= 1
        if unit.running == 0:
            self.residency.end_use(unit)
            if not self.running:
                self.residency.rest(unit)

    def bring_home(self, unit: Unit) -> None:
        if self._backward and not in_backward():  # the backward pass has raised
            self.end_backward()
        self.residency.bring_home(unit)


class _End:
    """Ends a backward pass. The engine drops it when a pass raises, on a thread of the device that may still run
    when the exception has reached the program; see _watch_engine()."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def __call__(self) -> None:
        self._passes.end_backward()

    def __del__(self) -> None:
        if _engine is None:  # this PyTorch calls its engine by another name
            self._passes.end_backward()


_engine: Any = None  # PyTorch's function that runs backward passes, once _watch_engine() has replaced it
_begun: weakref.WeakSet[Passes] = weakref.WeakSet()  # in a backward pass


def _watch_engine() -> None:
    """Ends backward passes that raise before the exception reaches the program, on the program's thread."""
    global _engine
    if _engine is not None or not hasattr(torch.autograd, "_engine_run_backward"):
        return
    _engine = run = torch.autograd._engine_run_backward

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException:
            if not in_backward():  # otherwise a pass inside of another one, as of reentrant checkpointing
                for passes in list(_begun):
                    passes.end_backward()
            raise

    torch.autograd._engine_run_backward = call


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses, and in types registered as pytrees."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from tensors_in(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
    elif type(value) in torch.utils._pytree.SUPPORTED_NODES:
        for one in torch.utils._pytree.tree_leaves(value):
            yield from tensors_in(one)
