"""Which units are on the device: loads, copies ahead of use, and who leaves for whom."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any, Callable, TypeVar

import torch

from . import _guards
from ._accelerator import Accelerator, HostMemory
from ._departures import Departures
from ._order import Order
from ._slots import Pool
from ._units import Unit
from .errors import Error, OutOfMemoryError

Function = TypeVar("Function", bound=Callable[..., Any])


def plainly(function: Function) -> Function:
    """Makes the tensors of a function ordinary ones, also when it is called in inference mode or in
    the backward pass."""
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)
    return call  # type: ignore[return-value]


@dataclass
class Counts:
    loads: int = 0
    bytes_in: int = 0
    waits: int = 0  # uses that came before their copy had ended, as the host saw it
    wait_seconds: float = 0.0  # of the host
    read_waits: int = 0  # copies to the device that waited for NVMe
    read_wait_seconds: float = 0.0


class Residency:
    """Brings units to the device and sends them away.

    Units that leave are those that are not needed soon, the least recently used first. So at the turn
    from forward to backward the last units are still there, and the first ones are after the backward
    pass.
    """

    def __init__(self, device: Accelerator, pool: Pool[Unit], prefetch: int) -> None:
        self.device = device
        self.pool = pool
        self.order = Order()
        self.departures = Departures(device)
        self.counts = Counts()
        self.chain: tuple[Unit, ...] = ()  # units whose backward pass is under way, outermost first
        self._prefetch = prefetch
        self._postponed = False  # a copy ahead of use would have waited for an update
        self._clock = 0

    @plainly
    def use(self, unit: Unit, phase: str) -> None:
        """Makes the unit's tensors point to the device, in which its values are before any work that
        is issued later. The caller has set `running`, or another reason why the unit has to stay."""
        self.order.note(phase, unit)
        self.settle_home(unit)
        self._load(unit)
        self._wait(unit)
        if not unit.on_device:
            unit.versions = unit.present_versions()
        unit.point_away()
        unit.unmarked = True
        self._clock += 1
        unit.last_use = self._clock
        self._load_ahead(unit, waits=False)

    @plainly
    def end_use(self, unit: Unit) -> None:
        """Marks the end of the work with the unit in the current stream."""
        self._mark(unit)
        if self._postponed:
            self._load_ahead(unit, waits=True)

    def settle_home(self, unit: Unit) -> None:
        """Makes values that were changed at home, and their version, those of the unit. Drops the
        copy on the device, which is older then."""
        if not unit.on_device and unit.is_changed():
            unit.adopt()
            if unit.slot is not None:
                self.evict(unit)

    @plainly
    def rest(self, unit: Unit) -> None:
        """Sends the unit's tensors home, except trained ones that a graph refers to: autograd would
        make them a second node for their gradient if they changed their device now."""
        if unit.running or not unit.on_device:
            return
        self._write_back(unit)
        self._leave(unit)
        unit.versions = unit.present_versions()

    @plainly
    def evict(self, unit: Unit) -> None:
        """Frees the unit's slot."""
        if unit.exposed:
            unit.adopt()
        self.departures.collect(unit)
        self._write_back(unit)
        self._leave(unit)
        self._give_slot(unit)

    @plainly
    def bring_home(self, unit: Unit) -> None:
        """Makes the unit's tensors ordinary ones in host memory, which the caller may change."""
        if unit.exposed:
            self.settle_home(unit)
        if unit.slot is not None:
            self._write_back(unit)
        unit.home.open_for_user()
        unit.in_graph = False
        for member in unit.members:
            member.point(member.home, False)
            if member.guardable:
                _guards.return_from(member.tensor)
        unit.exposed = True

    def guard(self, unit: Unit) -> None:
        for member in unit.members:
            if member.guardable:
                _guards.leave_for(member.tensor, unit.place)

    def _leave(self, unit: Unit) -> None:
        for member in unit.members:
            if member.on_device and not (unit.in_graph and member.trained):
                member.point(member.home, False)
                self.departures.follow(member)
        self.guard(unit)

    def _give_slot(self, unit: Unit) -> None:
        if unit.unmarked or unit.running:
            self._mark(unit)
        assert unit.ready is not None
        self.device.before_reuse(unit.ready)
        self.pool.give(unit.take_back(), list(unit.marks.values()))
        unit.marks = {}

    def _mark(self, unit: Unit) -> None:
        stream, mark = self.device.mark()
        unit.marks[stream] = mark
        unit.unmarked = False

    def _write_back(self, unit: Unit) -> None:
        """Copies members home that were changed on the device."""
        if unit.slot is None or not unit.on_device:
            return
        assert unit.ready is not None
        present = unit.present_versions()
        copies = []
        with torch._C.DisableTorchFunctionSubclass():
            for member, before, now in zip(unit.members, unit.versions, present):
                if not member.on_device:
                    continue
                assert member.away is not None
                replaced = member.tensor.data_ptr() != member.away.data_ptr()
                if before != now or replaced:
                    unit.ready.wait()
                    unit.home.open()
                    copies.append(self.device.copy_out(member.home, member.tensor.detach()))
        for copy in copies:
            copy.finish()
        if copies:
            unit.settle()
        unit.versions = present
        if copies:
            unit.home.close()

    # Copies to the device

    def _load(self, unit: Unit, ahead: bool = False) -> bool:
        """Starts the copy to the device unless the unit is there. `ahead`: only if nothing has to
        leave that is needed soon. Returns whether the unit is there or comes."""
        if unit.slot is not None:
            return True
        if ahead and not unit.home.is_ready():
            unit.home.read_ahead()  # the copy is started when the values are there
            return True
        soon = set(self.order.ahead(self._prefetch)) if ahead else set()

        def cost(other: Unit) -> Any:
            near = other in self.chain or other in soon
            stays = other.running or other is unit or (unit in self.chain and other in self.chain)
            return None if stays or (ahead and near) else (near, other.last_use)

        found = self.pool.find(unit.nbytes, cost)
        if found is None and not ahead:
            self._compact(cost)
            found = self.pool.find(unit.nbytes, cost)
        if found is None:
            if ahead:
                return False
            raise OutOfMemoryError(self._too_small(unit))
        start, leaving = found
        for other in leaving:
            self.evict(other)
        for member in unit.members:
            _guards.wait_for_update(member.tensor)
        if not unit.on_device and unit.is_changed():
            unit.adopt()
        try:
            self._copy_in(unit, start)
        except Error:
            if ahead:  # the use itself reads again
                return False
            raise
        if ahead:
            self.guard(unit)  # a change at home has to be noticed
        return True

    def _copy_in(self, unit: Unit, start: int) -> None:
        source = self._source(unit)
        slot, marks = self.pool.take(start, unit.nbytes, unit)
        target = self.pool.bytes_of(slot)
        unit.lend(slot)
        unit.ready = self.device.copy_in(target, source, marks)
        unit.home.copied_by(unit.ready)
        self.counts.loads += 1
        self.counts.bytes_in += unit.nbytes

    def _source(self, unit: Unit) -> HostMemory:
        if unit.home.is_ready():
            return unit.home.source()
        start = time.perf_counter()
        source = unit.home.source()
        self.counts.read_waits += 1
        self.counts.read_wait_seconds += time.perf_counter() - start
        return source

    def _compact(self, cost: Callable[[Unit], Any]) -> None:
        """Loads units that have to stay again, at the beginning of the pool, if they leave no gap that
        is large enough."""
        start = 0
        for slot in list(self.pool.slots):
            unit = slot.owner
            stays = cost(unit) is None
            if stays:
                self._write_back(unit)
                self._give_slot(unit)
            else:
                self.evict(unit)
            if stays:
                self._copy_in(unit, start)
                start += unit.nbytes
                self._wait(unit)

    def _load_ahead(self, unit: Unit, waits: bool) -> None:
        """Starts copies of the units that are used next. `waits`: also of those that an update still
        writes."""
        self._postponed = False
        for following in self.order.ahead(self._prefetch):
            if following.slot is not None or following is unit:
                continue
            if not waits and any(_guards.is_updating(m.tensor) for m in following.members):
                self._postponed = True
                return
            if not self._load(following, ahead=True):
                return
        for following in self.order.ahead(2 * self._prefetch):
            if following.slot is None and following is not unit:
                following.home.read_ahead()

    def _wait(self, unit: Unit) -> None:
        assert unit.ready is not None
        if not unit.ready.ended():
            start = time.perf_counter()
            unit.ready.wait()
            self.counts.waits += 1
            self.counts.wait_seconds += time.perf_counter() - start
        else:
            unit.ready.wait()

    def _too_small(self, unit: Unit) -> str:
        others = [slot.owner for slot in self.pool.slots
                  if slot.owner.running or slot.owner in self.chain]
        names = ", ".join(other.name for other in others)
        least = unit.nbytes + sum(other.nbytes for other in others)
        return (f"device_bytes: {self.pool.nbytes} bytes cannot hold {unit.name} in addition to {names}, "
                f"which are in use at the same time; {least} bytes can")
