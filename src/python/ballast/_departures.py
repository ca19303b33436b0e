"""Gradients of units: they leave the device during the backward pass and are summed in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import torch

from ._accelerator import Accelerator, Copy
from ._gradients import TakenGradient
from ._units import Member, Unit


@dataclass
class _Departure:
    member: Member
    copy: Copy | None  # None: the gradient is in host memory
    landed: torch.Tensor


class Departures:
    """Takes gradients out of `.grad` while a backward pass runs, and gives the sums back at its end.

    Sums over several backward passes are in the type of the gradient, as on the device, so they have
    the same bits. Gradients that an optimizer's hook has taken stay as they are.
    """

    def __init__(self, device: Accelerator) -> None:
        self.bytes_out = 0
        self._device = device
        self._under_way: list[_Departure] = []
        self._holding: dict[Member, None] = {}

    def hold(self, unit: Unit) -> None:
        """Puts the sums of earlier backward passes aside, which are in host memory. For the rest of
        this backward pass, `.grad` has gradients on the device."""
        for member in unit.members:
            if member.trained and member not in self._holding:
                gradient = member.tensor.grad
                if isinstance(gradient, TakenGradient):
                    continue
                self._holding[member] = None
                if gradient is not None:
                    member.sum, member.tensor.grad = gradient, None

    def collect(self, unit: Unit) -> None:
        """Starts to move the unit's gradients to host memory."""
        for member in unit.members:
            if member not in self._holding:
                continue
            gradient = member.tensor.grad
            if gradient is None or isinstance(gradient, TakenGradient):
                continue
            member.tensor.grad = None
            self._under_way.append(self._depart(member, gradient.detach()))
        while self._under_way and self._has_landed(self._under_way[0]):
            self._add(self._under_way.pop(0))

    def finish(self) -> None:
        """Gives all sums back to `.grad`. The members are in host memory."""
        for departure in self._under_way:
            self._add(departure)
        self._under_way = []
        held, self._holding = self._holding, {}
        for member in held:
            gradient, member.sum = member.sum, None
            if gradient is None:
                continue
            if isinstance(member.tensor.grad, TakenGradient):
                member.tensor.grad.add_gradient(gradient)
            else:
                member.tensor.grad = gradient.to(member.tensor.device)

    def follow(self, member: Member) -> None:
        """Moves the gradient of a member that has moved, outside of a backward pass through it."""
        if member.trained and member not in self._holding:
            gradient = member.tensor.grad
            if gradient is not None and gradient.device != member.tensor.device and not isinstance(
                    gradient, TakenGradient):
                member.tensor.grad = gradient.to(member.tensor.device)

    def forget(self, units: Iterable[Unit]) -> None:
        for unit in units:
            for member in unit.members:
                self._holding.pop(member, None)

    def _depart(self, member: Member, gradient: torch.Tensor) -> _Departure:
        if gradient.layout is not torch.strided:
            return _Departure(member, None, gradient.cpu())
        landed = self._device.landing(gradient)
        self.bytes_out += gradient.nbytes
        return _Departure(member, self._device.copy_out(landed, gradient), landed)

    @staticmethod
    def _has_landed(departure: _Departure) -> bool:
        return departure.copy is None or departure.copy.ended()

    @staticmethod
    def _add(departure: _Departure) -> None:
        if departure.copy is not None:
            departure.copy.finish()
        member, landed = departure.member, departure.landed
        if member.sum is None:
            # The landing place is pinned memory, which is needed again.
            member.sum = landed.clone() if landed.is_pinned() else landed
        elif member.sum.layout is landed.layout is torch.strided:
            member.sum.add_(landed)
        else:
            dense_first = landed.layout is torch.strided
            member.sum = landed + member.sum if dense_first else member.sum + landed
