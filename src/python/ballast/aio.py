"""Files that are read and written asynchronously, without the GIL, through one queue for the
process (io_uring, or a pool of threads): blocks of 1 MiB, 32 in flight. The queue starts at the
first transfer, and at the interpreter's exit it finishes what was started.

::

    memory = ballast.aio.empty(1 << 30)
    with ballast.aio.File("weights.bin") as file:
        file.read_into(memory, offset=4096).result()
    tensor = torch.frombuffer(memory, dtype=torch.bfloat16)
"""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import Generator, Iterable
from typing import Any

from . import _arguments, _ballast

__all__ = ["File", "Future", "bench", "empty", "tune"]


class Future:
    """A transfer that has been started. ``await`` it, or call `result()`. The buffer and the file
    stay alive until the transfer has ended, even if the future is dropped. Do not use the buffer
    before."""

    __slots__ = ("_transfer", "_what", "__weakref__")

    def __init__(self, transfer: _ballast.Future, what: str) -> None:
        self._transfer = transfer
        self._what = what

    def result(self, timeout: float | None = None) -> int:
        """Waits until the transfer has ended and returns the number of bytes transferred. `timeout`
        is in seconds. Raises TimeoutError after the timeout, ballast.FileError if the transfer has
        failed."""
        if timeout is not None:
            timeout = float(timeout)
            if not timeout >= 0:
                raise ValueError(f"timeout: must not be negative, got {timeout}")
            if timeout == float("inf"):
                timeout = None
        transferred = self._transfer.result(timeout)
        if transferred is None:
            raise TimeoutError(f"{self._what}: not finished after {timeout:g} s")
        return transferred

    def done(self) -> bool:
        """Whether the transfer has ended, with or without success."""
        return self._transfer.done()

    def __await__(self) -> Generator[Any, None, int]:
        if not self.done():
            yield from _Waiter.of(asyncio.get_running_loop()).wait(self._transfer).__await__()
        return self.result()

    def __repr__(self) -> str:
        return f"<ballast.aio.Future {self._what}, {'ended' if self.done() else 'in flight'}>"


class _Waiter:
    """Wakes an event loop when transfers end."""

    _of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiter] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._wakeup = _ballast.Wakeup()
        self._waiting: dict[asyncio.Future[None], _ballast.Future] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Waiter:
        if loop not in cls._of_loops:
            cls._of_loops[loop] = cls()
        return cls._of_loops[loop]

    async def wait(self, transfer: _ballast.Future) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        if not self._waiting:
            loop.add_reader(self._wakeup.fileno(), self._look)
        self._waiting[ended] = transfer
        transfer.notify(self._wakeup)
        try:
            await ended
        finally:
            self._waiting.pop(ended, None)
            if not self._waiting:
                loop.remove_reader(self._wakeup.fileno())

    def _look(self) -> None:
        try:
            os.eventfd_read(self._wakeup.fileno())
        except BlockingIOError:
            pass
        for ended, transfer in self._waiting.items():
            if transfer.done() and not ended.done():
                ended.set_result(None)


class File:
    """A file for asynchronous transfers of any offset, length and address.

    `mode`: ``"r"`` reads; ``"r+"`` reads and writes a file that exists; ``"w"`` creates a file or
    empties the one that is there, and reads too. `size` in bytes: the space to allocate (``"w"``) or the
    new length (``"r+"``). Writes past the end make the file longer.

    Direct I/O is used where offset and length are multiples of 4096 bytes and the memory is aligned as
    that of `empty()`; other transfers go through the page cache, which is slower. Both see each other's
    data within one File. Whoever opens a file twice, or changes it by other means at the same time, has
    to order the accesses.

    Raises ballast.FileError (an OSError) that names the path.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "r", size: int | None = None) -> None:
        path = _arguments.path(path, "path")
        if not isinstance(mode, str):
            raise TypeError(f"mode: must be str, not {type(mode).__name__}")
        self._path = path
        self._mode = mode
        self._file = _ballast.open_file(path, mode, None if size is None else _arguments.whole(size, "size"))

    def read_into(self, buffer: Any, offset: int = 0) -> Future:
        """Starts to read the bytes [offset, offset + size of the buffer) into `buffer`: a CPU tensor or
        an array (DLPack), or an object with the buffer protocol; contiguous and writable. Raises
        ValueError for a range that ends after the file, for a closed file and for memory that cannot
        be used, TypeError for other objects."""
        return self._start(self._file.read_into, "read", buffer, offset)

    def write_from(self, buffer: Any, offset: int = 0) -> Future:
        """Starts to write `buffer` to the bytes [offset, offset + size of the buffer). Buffers and
        errors are those of `read_into`, but buffers may be read-only. The bytes are on the disk
        after
        `sync()`."""
        return self._start(self._file.write_from, "write", buffer, offset)

    def _start(self, start: Any, what: str, buffer: Any, offset: int) -> Future:
        offset = _arguments.whole(offset, "offset")
        return Future(start(buffer, offset), f"{what} of {self._path} at {offset}")

    def sync(self) -> None:
        """Returns when all finished writes are on the disk (fdatasync)."""
        self._file.sync()

    def close(self) -> None:
        """Waits for the transfers in flight and closes the file. Does nothing if it is closed."""
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened or last grown by this object."""
        return self._file.size

    @property
    def path(self) -> str:
        return self._path

    @property
    def mode(self) -> str:
        return self._mode

    @property
    def direct(self) -> bool:
        """Whether the file system has direct I/O, which aligned transfers use."""
        return self._file.direct

    def __enter__(self) -> File:
        if self.closed:
            raise ValueError(f"{self._path}: the file is closed")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.size} bytes"
        return f"<ballast.aio.File {self._path!r} mode={self._mode!r}, {state}>"


def empty(nbytes: int) -> memoryview:
    """`nbytes` of zeroed memory that begins at a page, for transfers at full speed, as a writable
    memoryview of bytes. ``torch.frombuffer(memory, dtype=...)`` and ``numpy.frombuffer`` make
    tensors and arrays of it without a copy. Raises MemoryError."""
    nbytes = _arguments.whole(nbytes, "nbytes")
    return _ballast.empty(nbytes) if nbytes > 0 else memoryview(bytearray())


def bench(path: str | os.PathLike[str], *, patterns: Iterable[str] = ("read", "write", "mixed"),
          blocks: Iterable[str] = ("1MiB",), depths: Iterable[int] = (32,), backend: str = "auto",
          size: str = "2GiB", seconds: float | None = None) -> list[dict[str, Any]]:
    """Measures the disk of the folder `path` as ``ballast bench io`` does: all combinations of `patterns`
    (read, write, mixed, copy), `blocks` and `depths`, with a temporary file of `size`. `backend`: auto,
    io_uring or threads. `seconds`: the time of each measurement; None: one pass over the file. Returns the objects of ``--json``, with
    ``gb_per_second`` in 10^9 bytes a second. Raises ballast.UsageError, ballast.FileError,
    KeyboardInterrupt."""
    listed = [_arguments.whole(depth, "depths", 1, 16384) for depth in depths]
    asked = None if seconds is None else _arguments.real(seconds, "seconds", 0.01, 86400.0)
    names = _arguments.texts([backend, size], "backend and size")
    rows: list[dict[str, Any]] = json.loads(_ballast.bench_io(
        _arguments.path(path, "path"), _arguments.texts(patterns, "patterns"),
        _arguments.texts(blocks, "blocks"), listed, names[0], names[1], asked))
    return rows


def tune(path: str | os.PathLike[str], *, seconds: float = 20.0, size: str = "1GiB") -> dict[str, Any]:
    """Finds block size, depth and backend for the folder `path` as ``ballast tune io`` does, in about
    `seconds` seconds with a temporary file of `size`. Returns the object of ``--json``. Raises
    ballast.UsageError, ballast.FileError, KeyboardInterrupt."""
    tuning: dict[str, Any] = json.loads(_ballast.tune_io(
        _arguments.path(path, "path"), _arguments.real(seconds, "seconds", 0.5, 86400.0),
        _arguments.texts([size], "size")[0]))
    return tuning
