"""Device memory, the streams and copies of a device, and host memory that they read.

Everything here goes through torch.Stream, torch.Event and torch.accelerator, so it serves every
device that PyTorch knows as an accelerator. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import Any, Sequence

import torch

from . import _ballast
from ._slots import Pool
from .errors import UsageError

_STAGED_BYTES = 32 << 20  # of one of the two buffers for host memory that cannot be pinned


class HostMemory:
    """Bytes in host memory that begin at a page. `pinned`: the device copies them without help of
    the host."""

    def __init__(self, nbytes: int) -> None:
        self._memory: Any = _ballast.empty(nbytes)
        self.nbytes = nbytes
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.pinned = False
        self.filled = False  # it has the values of the tensors that get parts of it

    @property
    def shared(self) -> bool:
        """Whether other processes have the same memory."""
        return False

    def settle(self) -> None:
        """Called when the parts may have changed, before the device reads `bytes` again."""

    def part(self, start: int, end: int) -> torch.UntypedStorage:
        """A storage of bytes `start` to `end`, which keeps the whole memory alive. Tensors with a
        storage each are saved and copied one by one."""
        some = torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=end - start)
        return some.untyped_storage()

    def first(self, nbytes: int) -> HostMemory:
        """The first bytes of this memory, for a copy."""
        some = HostMemory.__new__(HostMemory)
        some._memory, some.pinned, some.filled = self._memory, self.pinned, self.filled
        some.nbytes, some.bytes = nbytes, self.bytes[:nbytes]
        return some

    def pin(self) -> None:
        """Pins the memory of a CUDA program, as far as the driver and the limit of locked memory
        allow."""
        address, runtime = self.bytes.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(address, self.nbytes, 0)
        self.pinned = result == runtime.cudaError.success
        if self.pinned:
            self._unpin = weakref.finalize(self, _unpin, self._memory, address)
            self._unpin.atexit = False

    def unpin(self) -> None:
        """Call it when no copy is under way."""
        if self.pinned:
            self.pinned = False
            self._unpin()


def _unpin(memory: Any, address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    del memory


class Copy:
    """A copy under way. It keeps its memory alive."""

    def __init__(self, *memory: torch.Tensor) -> None:
        self._memory = memory
        self._issued = threading.Event()
        self._event: Any = None
        self._error: BaseException | None = None

    def issued(self, event: Any, error: BaseException | None = None) -> None:
        """`event` follows the copy in its stream."""
        self._event, self._error = event, error
        self._issued.set()

    def ended(self) -> bool:
        return self._issued.is_set() and self._error is None and bool(self._event.query())

    def wait(self) -> None:
        """Makes later work in the current stream follow the copy."""
        self._passed().wait()

    def finish(self) -> None:
        """Returns when the copy has ended."""
        self._passed().synchronize()

    def _passed(self) -> Any:
        self._issued.wait()
        if self._error is not None:
            raise self._error
        return self._event


class Accelerator:
    """Copies between host memory and a device, on one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device
        self.pinning = device.type == "cuda"  # whether pinning has not been refused yet
        self._in = torch.Stream(device)
        self._out = torch.Stream(device)
        self._staging: _Staging | None = None

    def free_bytes(self) -> int | None:
        """Free memory of the device; None if it does not say."""
        information = getattr(torch.accelerator, "get_memory_info", None)
        return None if information is None else int(information(self.device)[0])

    def pool(self, nbytes: int) -> Pool[Any]:
        """Memory on the device for weights that come and go."""
        return Pool(nbytes, self.device)

    def host_memory(self, nbytes: int, memory: HostMemory | None = None) -> HostMemory:
        """Host memory for weights, or the given one made ready for copies. Once pinning has been
        refused, as by the limit of locked memory or by WSL, the rest is copied through two pinned
        buffers."""
        memory = memory or HostMemory(nbytes)
        if self.pinning:
            memory.pin()
            self.pinning = memory.pinned
            if not memory.pinned:
                self._clear_error()
        if not memory.pinned and self._staging is None:
            self._staging = _Staging(self._in, self.pinned)
            weakref.finalize(self, self._staging.end)
        return memory

    def _clear_error(self) -> None:
        """Otherwise PyTorch would raise the driver's refusal at its next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(0)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """A buffer for copies, from PyTorch's pool of pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def landing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for a copy of a tensor on the device."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def mark(self) -> tuple[Any, Any]:
        """The current stream, and a mark of the work in it so far."""
        stream = torch.accelerator.current_stream(self.device)
        return stream, stream.record_event()

    def copy_in(self, target: torch.Tensor, source: HostMemory, after: Sequence[Any]) -> Copy:
        """Starts a copy of all bytes of `source`, behind all such copies before it and the marks
        `after`."""
        copy = Copy(target, source.bytes)
        if self._staging is not None:  # also if this memory is pinned: copies stay in order
            self._staging.copy(copy, target, source, after)
            return copy
        for mark in after:
            self._in.wait_event(mark)
        with self._in:
            target.copy_(source.bytes, non_blocking=True)
        copy.issued(self._in.record_event())
        return copy

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Starts a copy to host memory, behind the work of the current stream."""
        copy = Copy(target, source)
        self._out.wait_stream(torch.accelerator.current_stream(self.device))
        with self._out:
            target.copy_(source, non_blocking=True)
        copy.issued(self._out.record_event())
        return copy

    def before_reuse(self, copy: Copy) -> None:
        """Called before the slot of a copy gets other bytes. They come in the same stream."""

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Returns when all copies have ended."""
        if self._staging is not None:
            self._staging.drain()
        self._in.synchronize()
        self._out.synchronize()

    def close(self) -> None:
        self.synchronize()
        if self._staging is not None:
            self._staging.end()
            self._staging = None


class _Staging:
    """Copies host memory that is not pinned through two pinned buffers, on a thread."""

    def __init__(self, stream: torch.Stream, pinned: Any, nbytes: int = _STAGED_BYTES) -> None:
        self._stream = stream
        self._buffers = [pinned(nbytes), pinned(nbytes)]
        self._read: list[Any] = [None, None]  # events behind the last copies from the buffers
        self._turn = 0
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ballast-offload-copies")
        self._thread.start()

    def copy(self, copy: Copy, target: torch.Tensor, source: HostMemory, after: Sequence[Any]) -> None:
        self._jobs.put(lambda: self._copy(copy, target, source, after))

    def drain(self) -> None:
        """Returns when all copies are in the stream."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def end(self) -> None:
        """Ends the thread after the copies that are waiting. A thread that the interpreter's end meets
        inside PyTorch would end the process."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and its memory, before the next one comes

    @torch.no_grad()
    def _copy(self, copy: Copy, target: torch.Tensor, source: HostMemory,
              after: Sequence[Any]) -> None:
        try:
            for mark in after:
                self._stream.wait_event(mark)
            if source.pinned:
                with self._stream:
                    target.copy_(source.bytes, non_blocking=True)
            else:
                for start in range(0, source.nbytes, len(self._buffers[0])):
                    self._copy_slice(target, source.bytes, start)
            copy.issued(self._stream.record_event())
        except BaseException as error:  # for whoever waits
            copy.issued(None, error)

    def _copy_slice(self, target: torch.Tensor, source: torch.Tensor, start: int) -> None:
        turn = self._turn = 1 - self._turn
        if self._read[turn] is not None:
            self._read[turn].synchronize()
        some = source[start:start + len(self._buffers[turn])]
        staged = self._buffers[turn][:len(some)]
        staged.copy_(some)
        with self._stream:
            target[start:start + len(some)].copy_(staged, non_blocking=True)
        self._read[turn] = self._stream.record_event()


def accelerator(device: Any) -> Accelerator:
    """The device layer for an argument `device`. Raises TypeError, UsageError."""
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"device: must be a device such as \"cuda\", not {type(device).__name__}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device: {str(error).splitlines()[0]}") from None
    present = torch.accelerator.current_accelerator()
    if present is None or present.type != found.type:
        raise UsageError(f"device: {found} is not an accelerator of this PyTorch and machine "
                         f"({present or 'none was found'})")
    return Accelerator(found)
