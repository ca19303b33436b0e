"""Gradients on their way from the backward pass to the update."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable

import torch


class Gradients:
    """Takes the gradients of some parameters as soon as autograd has completed them.

    A hook moves the gradient out of `parameter.grad`: on a GPU to pinned memory, on a stream of its
    own, beside the rest of the backward pass. Gradients of further backward passes before the next
    step are added in fp32. Parameters without a hook keep `.grad`, as with torch's optimizers.
    """

    def __init__(self) -> None:
        self._hooks: dict[torch.Tensor, Any] = {}
        self._landing: dict[torch.Tensor, torch.Tensor] = {}
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._pinned: dict[torch.Tensor, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def hook(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hooks those parameters that have no hook yet."""
        taker = weakref.WeakMethod(self._take)

        def take(parameter: torch.Tensor) -> None:
            method = taker()
            if method is not None:
                method(parameter)

        for parameter in parameters:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(take)

    def unhook(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def clear(self) -> None:
        """Forgets all gradients that were taken."""
        self.synchronize()
        self._landing.clear()
        self._sums.clear()

    def synchronize(self) -> None:
        """Waits for the copies from GPUs."""
        for stream in self._streams.values():
            stream.synchronize()

    def collect(self, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of those parameters that have one, contiguous and in host memory."""
        found = {}
        for parameter in parameters:
            if parameter in self._landing:
                if parameter.grad is not None:  # set by hand, or before the hook
                    self._take(parameter)
            elif parameter.grad is not None:
                found[parameter] = self._to_host(parameter, parameter.grad)
        self.synchronize()
        for parameter, landed in self._landing.items():
            total = self._sums.get(parameter)
            found[parameter] = landed if total is None else total.add_(landed)
        self._landing = {}
        self._sums = {}
        return found

    def _take(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        landed = self._landing.get(parameter)
        if landed is not None:
            self.synchronize()
            total = self._sums.get(parameter)
            if total is None:
                self._sums[parameter] = landed.to(torch.float32, copy=True)
            else:
                total.add_(landed)
        self._landing[parameter] = self._to_host(parameter, gradient)

    def _to_host(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns at once; after synchronize() the result is complete."""
        gradient = gradient.detach()
        if gradient.layout != torch.strided:
            raise TypeError("params: sparse gradients are not supported")
        if gradient.device.type == "cpu":
            return gradient.contiguous()
        pinned = self._pinned.get(parameter)
        if pinned is None or pinned.dtype != gradient.dtype:
            pinned = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            self._pinned[parameter] = pinned
        stream = self._streams.get(gradient.device)
        if stream is None:
            stream = self._streams[gradient.device] = torch.cuda.Stream(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            pinned.copy_(gradient, non_blocking=True)
        gradient.record_stream(stream)
        return pinned


def parameters_to_hook(parameters: Iterable[torch.Tensor], mode: str | bool) -> list[torch.Tensor]:
    """The parameters whose gradients are taken during the backward pass.

    "auto": those on a GPU and those with 16-bit gradients, whose sums over micro-batches would lose
    bits. None of them in a process group of several ranks, because DistributedDataParallel averages
    gradients after the hooks.
    """
    if mode is False:
        return []
    wants: Callable[[torch.Tensor], bool] = lambda parameter: True
    if mode == "auto":
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            if distributed.get_world_size() > 1:
                return []
        wants = lambda p: p.device.type != "cpu" or p.dtype != torch.float32
    return [p for p in parameters if p.requires_grad and p.is_leaf and wants(p)]
