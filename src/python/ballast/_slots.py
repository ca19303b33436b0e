"""The memory on the device for weights that come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Generic, TypeVar

import torch

GRAIN = 512  # slots begin and end at multiples of this many bytes, which suits the copies of GPUs

Owner = TypeVar("Owner")


@dataclass
class Slot(Generic[Owner]):
    """Bytes `start` to `end` of the pool."""

    start: int
    end: int
    owner: Owner
    storage: torch.UntypedStorage  # these bytes; the pool owns them


class Pool(Generic[Owner]):
    """Slots in one allocation, whose size never changes.

    A slot is a range of any size. A new one takes the place where it disturbs least, so slots of
    several sizes leave no gaps that cannot be used: a gap and its neighbours become free together.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.used = 0
        self.peak = 0  # the most bytes in use at any time
        self.device = device
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.slots: list[Slot[Owner]] = []  # sorted
        self._marks: list[tuple[int, int, Any]] = []  # ranges that work on the device may still use

    def find(self, nbytes: int, cost: Callable[[Owner], Any]) -> tuple[int, list[Owner]] | None:
        """The start of a range for a slot, and the owners of the slots there, which have to leave.
        None if there is none. `cost` of an owner: None if it has to stay, otherwise a value that is
        higher for owners that are better kept."""
        costs = [cost(slot.owner) for slot in self.slots]
        best: tuple[Any, int] | None = None
        leaving: list[Owner] = []
        for start in self._starts(nbytes):
            there = [i for i, s in enumerate(self.slots) if s.start < start + nbytes and start < s.end]
            if any(costs[i] is None for i in there):
                continue
            key = ((), start) if not there else ((1, max(costs[i] for i in there), len(there)), start)
            if best is None or key < best:
                best, leaving = key, [self.slots[i].owner for i in there]
        return None if best is None else (best[1], leaving)

    def take(self, start: int, nbytes: int, owner: Owner) -> tuple[Slot[Owner], list[Any]]:
        """A slot in a range of find(), whose owners have left, and the marks of work on the device
        that has to end before the slot is written."""
        end = start + nbytes
        storage: Any = torch._C._construct_storage_from_data_pointer(
            self._memory.data_ptr() + start, self._memory.device, nbytes)
        slot = Slot(start, end, owner, storage)
        self.slots = sorted([*self.slots, slot], key=lambda s: s.start)
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        marks = [mark for first, last, mark in self._marks if first < end and start < last]
        self._marks = [m for m in self._marks if not (start <= m[0] and m[1] <= end)]
        return slot, marks

    def bytes_of(self, slot: Slot[Owner]) -> torch.Tensor:
        return self._memory[slot.start:slot.end]

    def give(self, slot: Slot[Owner], marks: list[Any]) -> None:
        """Frees a slot. `marks`: work on the device that may still use its bytes."""
        self.slots.remove(slot)
        self.used -= slot.end - slot.start
        self._marks += [(slot.start, slot.end, mark) for mark in marks]

    def _starts(self, nbytes: int) -> list[int]:
        found = {0, self.nbytes // GRAIN * GRAIN - nbytes}
        for slot in self.slots:
            found |= {slot.start, slot.end, slot.start - nbytes}
        return sorted(s for s in found if 0 <= s and s + nbytes <= self.nbytes)
