"""Homes: where the weights of a block are while they are not on the device, in host memory or on NVMe."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Sequence

import torch

from . import _ballast
from ._accelerator import Copy, HostMemory
from .errors import Error, OutOfMemoryError

PAGE = 4096


class HostHome:
    """A home in host memory."""

    on_nvme = False
    is_open = True

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes

    def part(self, start: int, end: int) -> torch.UntypedStorage:
        """A storage of bytes `start` to `end`, which tensors of the model have."""
        return self.memory.part(start, end)

    def open(self, read: bool = True) -> None:
        """Makes the storages usable. Host memory always is."""

    def open_for_user(self) -> None:
        """Opens the home for uses between passes, which may open all homes."""

    def close(self) -> None:
        """Called when nobody uses the storages any more."""

    def begin(self) -> None:
        """Called once, when all tensors of the model have their storages."""

    def settle(self) -> None:
        """Called when the storages may have changed, before source() is read again."""
        self.memory.settle()

    def is_ready(self) -> bool:
        """Whether source() returns at once."""
        return True

    def read_ahead(self) -> None:
        """Starts to bring the values to host memory, if there is room."""

    def source(self) -> HostMemory:
        """Memory with the present values, for a copy to the device."""
        return self.memory

    def copied_by(self, copy: Copy) -> None:
        """Records that `copy` reads the memory of source()."""

    @property
    def pinned(self) -> bool:
        return self.memory.pinned

    @property
    def shared(self) -> bool:
        """Whether other processes have the same memory."""
        return self.memory.shared

    @property
    def filled(self) -> bool:
        """Whether it has the values of the tensors that get parts of it."""
        return self.memory.filled

    def unpin(self) -> None:
        self.memory.unpin()


class NvmeHome:
    """A home on NVMe.

    Tensors of the model have the same storages for life. While the home is open, these have host memory
    with the values, which may be changed. Otherwise they are empty and each access raises an error that
    names the block.
    """

    on_nvme = True
    pinned = False
    shared = False
    filled = False

    def __init__(self, space: NvmeSpace, extent: int, nbytes: int, name: str) -> None:
        self.nbytes = nbytes
        self.name = name
        self.extent = extent
        self._space = space
        self._parts: list[tuple[torch.UntypedStorage, int, int]] = []
        self._memory: HostMemory | None = HostMemory(space.extent_bytes(nbytes))
        space.opened.add(self)
        self._lent: list[torch.UntypedStorage] = []  # memory of the storages while the home is closed
        self._owners: list[int] = []  # numbers of owners of the storages, the model's tensors alone
        self._checksum: int | None = None  # of the values on NVMe; None: they are not valid

    @property
    def is_open(self) -> bool:
        return self._memory is not None

    def part(self, start: int, end: int) -> torch.UntypedStorage:
        """A storage of bytes `start` to `end`, which tensors of the model have. The home is open."""
        assert self._memory is not None
        storage = self._memory.part(start, end)
        self._parts.append((storage, start, end))
        self._lent.append(_empty_storage())
        return storage

    def open_for_user(self) -> None:
        """Like open(). Raises OutOfMemoryError if all open homes would take more than half of the free
        memory."""
        if self._memory is None:
            self._space.check_room(self)
            self.open()

    def open(self, read: bool = True) -> None:
        """Reads the values into newly allocated host memory. Raises FileError or Error if they cannot be
        read. Without `read`, the caller gives all values."""
        if self._memory is not None:
            return
        memory = HostMemory(self._space.extent_bytes(self.nbytes))
        if read:
            self._space.read(self, memory)
        else:
            self._checksum = None
        for i, (storage, start, end) in enumerate(self._parts):
            torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
            own = memory.part(start, end)
            storage._swap_data_ptr_(own)  # type: ignore[attr-defined]
            self._lent[i] = own
        self._memory = memory
        self._space.opened.add(self)

    def close(self) -> None:
        """Writes the values if they have changed, and frees the memory. If other tensors share it, as
        those of an older state_dict() do, the home stays open. Raises FileError if the values cannot be
        written; the home is open then, too."""
        memory = self._memory
        if memory is None or self._has_other_owners():
            return
        present = _ballast.checksum(memory.bytes.data_ptr(), memory.nbytes)
        if present != self._checksum:
            self._checksum = None
            self._space.write(self, memory)
            self._checksum = present
        for i, (storage, _, _) in enumerate(self._parts):
            storage._swap_data_ptr_(self._lent[i])  # type: ignore[attr-defined]
            self._lent[i] = _empty_storage()  # frees what the storage had
            torch._C._set_storage_data_ptr_access_error_msg(
                storage._cdata, f"{self.name}: its weights are on NVMe; use the parameters of the model "
                "itself, or a clone() of them")
        self._memory = None
        self._space.opened.discard(self)

    def begin(self) -> None:
        """Called once, when all tensors of the model have their storages."""
        self._owners = [_owners_of(storage) for storage, _, _ in self._parts]

    def settle(self) -> None:
        """Changes are written by close()."""

    def _has_other_owners(self) -> bool:
        return any(_owners_of(storage) > owners
                   for (storage, _, _), owners in zip(self._parts, self._owners))

    def is_ready(self) -> bool:
        return self._memory is not None or self._space.is_ready(self)

    def read_ahead(self) -> None:
        if self._memory is None:
            self._space.stage(self, ahead=True)

    def source(self) -> HostMemory:
        if self._memory is not None:
            return self._memory.first(self.nbytes)
        return self._space.staged(self)

    def copied_by(self, copy: Copy) -> None:
        if self._memory is None:
            self._space.note_copy(self, copy)

    def unpin(self) -> None:
        """Only the staging buffers are pinned, which the homes share."""


class _Buffer:
    """A staging buffer, with the values of one home."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.home: NvmeHome | None = None
        self.reading: Any = None
        self.copy: Copy | None = None  # the last copy to the device
        self.awaited = False  # read ahead, and not used yet
        self.used = 0

    def is_free(self) -> bool:
        return ((self.reading is None or self.reading.done())
                and (self.copy is None or self.copy.ended()))

    def finish(self) -> None:
        """Returns when no transfer uses the memory."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.finish()
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.finish()


class NvmeSpace:
    """The files of the homes on NVMe, and the staging buffers through which they come to the device.

    A buffer keeps its values until another home needs it, so blocks that are used again soon are not
    read again.
    """

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], buffers: int,
                 make_memory: Callable[[int], HostMemory], any_file_system: bool) -> None:
        """`sizes`: bytes of each home. Raises FileError naming a path that is not suited or too small."""
        self.opened: weakref.WeakSet[NvmeHome] = weakref.WeakSet()
        self._native = _ballast.WeightHomes(list(paths), [self.extent_bytes(n) for n in sizes],
                                            any_file_system)
        largest = max(self.extent_bytes(n) for n in sizes)
        self._buffers = [_Buffer(make_memory(largest)) for _ in range(min(buffers, len(sizes)))]
        self._clock = 0
        self.bytes_read = 0
        self.bytes_written = 0

    @staticmethod
    def extent_bytes(nbytes: int) -> int:
        return -(-nbytes // PAGE) * PAGE

    @property
    def nvme_bytes(self) -> int:
        return self._native.nvme_bytes

    @property
    def staging_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @property
    def open_bytes(self) -> int:
        """Host memory of homes that are open."""
        return sum(self.extent_bytes(home.nbytes) for home in self.opened)

    def unpin(self) -> None:
        """Call it when no copy is under way."""
        for buffer in self._buffers:
            buffer.memory.unpin()

    def check_room(self, home: NvmeHome) -> None:
        opened, free = self.open_bytes, free_host_bytes()
        if free is not None and opened + home.nbytes > (free + opened) // 2:
            raise OutOfMemoryError(
                f"{home.name}: its weights are on NVMe, and in host memory all weights that are used between "
                f"passes would take more than half of the {free + opened} free bytes; use handle.save() instead "
                "of state_dict(), and OffloadAdamW instead of an optimizer of PyTorch")

    def write(self, home: NvmeHome, memory: HostMemory) -> None:
        """Writes a home. Raises FileError; the values on NVMe are invalid then."""
        for buffer in self._buffers:
            if buffer.home is home:
                _ignoring_errors(buffer.finish)
                buffer.home = None
        with _naming(home):
            self._native.write(home.extent, memory.bytes.data_ptr(), memory).finish()
        self.bytes_written += memory.nbytes

    def read(self, home: NvmeHome, memory: HostMemory) -> None:
        with _naming(home):
            self._native.read(home.extent, memory.bytes.data_ptr(), False, memory).finish()
        self.bytes_read += memory.nbytes

    def is_ready(self, home: NvmeHome) -> bool:
        buffer = self._find(home)
        return buffer is not None and (buffer.reading is None or buffer.reading.done())

    def stage(self, home: NvmeHome, ahead: bool) -> _Buffer | None:
        """A buffer that has the values of a home, or gets them. `ahead`: None if none is free."""
        self._clock += 1
        buffer = self._find(home)
        if buffer is None:
            buffer = self._choose(ahead)
            if buffer is None:
                return None
            _ignoring_errors(buffer.finish)  # of a read that nobody has waited for
            buffer.home = None
            with _naming(home):
                buffer.reading = self._native.read(home.extent, buffer.memory.bytes.data_ptr(), ahead,
                                                   buffer.memory)
            self.bytes_read += self.extent_bytes(home.nbytes)
            buffer.home = home
            buffer.awaited = True
        buffer.used = self._clock
        return buffer

    def staged(self, home: NvmeHome) -> HostMemory:
        """A buffer with the values of a home, for one copy; see note_copy()."""
        buffer = self.stage(home, ahead=False)
        assert buffer is not None
        reading, buffer.reading = buffer.reading, None
        if reading is not None:
            try:
                with _naming(home):
                    reading.finish()
            except BaseException:
                buffer.home = None
                raise
        buffer.awaited = False
        return buffer.memory.first(home.nbytes)

    def note_copy(self, home: NvmeHome, copy: Copy) -> None:
        buffer = self._find(home)
        if buffer is not None:
            buffer.copy = copy

    def _find(self, home: NvmeHome) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.home is home), None)

    def _choose(self, ahead: bool) -> _Buffer | None:
        unused = [b for b in self._buffers if b.home is None or (not b.awaited and b.is_free())]
        some = unused if ahead else unused or self._buffers
        return min(some, key=lambda b: (b.home is not None, b.awaited, b.used), default=None)


class _naming:
    """Puts the block's name before the message of an error."""

    def __init__(self, home: NvmeHome) -> None:
        self._name = home.name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Error):
            named = type(error)(f"{self._name}: {error}")
            named.__dict__.update(error.__dict__)
            raise named from None


def _empty_storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device="cpu")  # type: ignore[no-untyped-call]


def _owners_of(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _ignoring_errors(finish: Callable[[], None]) -> None:
    try:
        finish()
    except Error:
        pass


def free_host_bytes() -> int | None:
    """Host memory that programs can still take, as Linux estimates it; None if it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
