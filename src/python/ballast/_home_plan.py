"""Decides which blocks have their homes in host memory and which on NVMe."""

from __future__ import annotations

from typing import Any

from . import _arguments
from ._accelerator import Accelerator, HostMemory
from ._homes import HostHome, NvmeHome, NvmeSpace, free_host_bytes
from .errors import OutOfMemoryError, UsageError

class HomePlan:
    """Makes the homes of blocks. With `nvme`, host memory gets the first ones, as far as `host_bytes`
    allow in addition to the staging buffers, and NVMe the others. Homes of what is added later are in
    host memory."""

    def __init__(self, nvme: Any = None, host_bytes: int | str = "auto",
                 any_file_system: bool = False) -> None:
        """Raises TypeError, ValueError, UsageError naming a wrong argument."""
        self._paths = [] if nvme is None else _arguments.paths(nvme, "nvme")
        if host_bytes != "auto":
            if nvme is None:
                raise UsageError("host_bytes: only with nvme=, where the weights go that do not fit")
            host_bytes = _arguments.whole(host_bytes, "host_bytes")
        self._host_bytes = host_bytes
        self._any_file_system = any_file_system
        self._extents: dict[str, int] = {}  # by name of the block
        self.space: NvmeSpace | None = None

    def begin(self, sizes: dict[str, int], fixed: set[str], prefetch: int, memory: Accelerator) -> None:
        """`sizes`: bytes of the blocks, in the order of their homes. Those in `fixed` stay in host memory.
        Raises OutOfMemoryError, and FileError naming a path that is not suited or too small."""
        if not self._paths:
            return
        most = self._host_bytes
        if most == "auto":
            free = free_host_bytes()
            most = sum(sizes.values()) if free is None else free // 2
        on_nvme = self._choose(sizes, fixed, prefetch + 2, int(most))
        if not on_nvme:
            return
        self.space = NvmeSpace(self._paths, [sizes[name] for name in on_nvme], prefetch + 2,
                               memory.host_memory, self._any_file_system)
        self._extents = {name: number for number, name in enumerate(on_nvme)}

    @staticmethod
    def _choose(sizes: dict[str, int], fixed: set[str], buffers: int, most: int) -> list[str]:
        """The names of blocks on NVMe."""
        if sum(sizes.values()) <= most:
            return []
        movable = [name for name in sizes if name not in fixed]
        used = sum(sizes[name] for name in fixed)
        largest = max((name for name in movable), key=lambda name: sizes[name], default="")
        used += min(buffers, len(movable)) * NvmeSpace.extent_bytes(sizes.get(largest, 0))
        if used > most:
            kept = f" and {len(fixed)} blocks with quantised tensors, which stay in host memory" if fixed else ""
            raise OutOfMemoryError(f"host_bytes: {most} bytes cannot hold the buffers between NVMe and the device, "
                                   f"of the size of {largest}{kept}; {used} bytes can")
        for i, name in enumerate(movable):
            used += sizes[name]
            if used > most:
                return movable[i:]
        return []

    def make(self, name: str, nbytes: int, memory: Accelerator, shared: HostMemory | None) -> HostHome | NvmeHome:
        """`shared`: memory of several processes, which the home has then."""
        extent = self._extents.pop(name, None)  # later units of the block are not on NVMe
        if self.space is None or extent is None:
            return HostHome(memory.host_memory(nbytes, shared))
        return NvmeHome(self.space, extent, nbytes, name)
