"""Frozen weights in memory that the processes of a machine share.

The first rank of a machine fills an anonymous file for each block (memfd), and sends it to the others through a socket
without a name in any folder. So nothing is left behind, however the processes end.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
from types import TracebackType
from typing import Any, Sequence

import torch

from ._accelerator import HostMemory
from ._units import Member, same_bits
from .errors import UsageError

_SECONDS = 120.0  # for the ranks of a machine to connect, once all of them have called offload()
_FAILED = "shared: another rank of this machine has failed: {}"
_SIZE = struct.Struct("=Q")


class SharedMemory(HostMemory):
    """The home of a block in a file that several processes map.

    The device reads `bytes`, the pages that all of them have. The tensors of the model are in a second mapping, whose
    pages become private to the process when they are written: merged adapters, for example, change nothing elsewhere.
    """

    def __init__(self, file: int, nbytes: int) -> None:  # pylint: disable=super-init-not-called
        self.nbytes = nbytes
        self.pinned = False
        self.filled = True
        self._memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED)
        self._own = mmap.mmap(file, nbytes, flags=mmap.MAP_PRIVATE)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    @property
    def shared(self) -> bool:
        """Whether the device still reads what other processes read, too."""
        return self._memory is not self._own

    def part(self, start: int, end: int) -> torch.UntypedStorage:
        some = torch.frombuffer(self._own, dtype=torch.uint8, offset=start, count=end - start)
        return some.untyped_storage()

    def settle(self) -> None:
        own = torch.frombuffer(self._own, dtype=torch.uint8)
        if not self.shared or torch.equal(own, self.bytes):
            return
        pinned = self.pinned
        self.unpin()
        self._memory, self.bytes = self._own, own
        if pinned:
            self.pin()


class Sharing:
    """The ranks of torch.distributed on this machine, while they agree on homes. Use it as a context on all ranks.

    `memory()` is called for the same blocks in the same order on all ranks. If a rank leaves the context with an
    exception, so do the others of its machine. Raises UsageError.
    """

    def __init__(self) -> None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise UsageError("shared: True needs the ranks of torch.distributed; call init_process_group(), or make "
                             "the Accelerator or TrainingArguments, before offload()")
        name = f"\0ballast-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as entrance:
            entrance.bind(name)
            entrance.listen()
            entrance.settimeout(_SECONDS)
            found: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(found, (_machine(), name))
            ranks = [rank for rank, (machine, _) in enumerate(found) if machine == _machine()]
            self._first, self._rank = ranks[0], distributed.get_rank()
            if self._rank == self._first:
                self._others = [_accept(entrance) for _ in ranks[1:]]
            else:
                self._others = [_connect(found[self._first][1])]

    def __enter__(self) -> Sharing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        said = str(error).encode() if error is not None else b""
        others, self._others = self._others, []
        try:
            if self._rank == self._first:
                for other in others:  # the end of its blocks
                    _send(other, said)
                for other in others:
                    said = said or _heard(other)
                for other in others:
                    _send(other, said)
            else:
                said = said or _heard(others[0])
                _send(others[0], said)
                said = said or _heard(others[0])
        finally:
            for other in others:
                other.close()
        if said and error is None:
            raise UsageError(_FAILED.format(said.decode()))

    def memory(self, name: str, members: Sequence[Member], nbytes: int) -> HostMemory | None:
        """Memory with the values of these members, which are the same on all ranks; None if no other rank is on this
        machine."""
        if not self._others:
            return None
        about = json.dumps([name, nbytes, [[m.name, str(m.dtype), list(m.shape), list(m.stride)] for m in members]])
        if self._rank == self._first:
            return self._fill(about, members, nbytes)
        memory = self._receive(about, nbytes)
        for member in members:
            if not same_bits(_in_shared(memory, member), member.tensor.data):
                raise UsageError(f"{member.name}: has other values than on rank {self._first}; ranks that share "
                                 "weights load the same ones, or use shared=False")
        return memory

    def _fill(self, about: str, members: Sequence[Member], nbytes: int) -> SharedMemory:
        file = os.memfd_create("ballast-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, nbytes)
            memory = SharedMemory(file, nbytes)
            for member in members:
                _in_shared(memory, member).copy_(member.tensor.data)
            for other in self._others:
                if not _send(other, about.encode(), file):
                    raise UsageError(_FAILED.format(_heard(other).decode()))
        finally:
            os.close(file)
        return memory

    def _receive(self, about: str, nbytes: int) -> SharedMemory:
        said, files = _read(self._others[0])
        try:
            if not files:
                raise UsageError(_FAILED.format(said.decode() or "it has fewer blocks"))
            if said.decode() != about:
                raise UsageError(f"shared: rank {self._first} has {_difference(said.decode(), about)}; ranks that "
                                 "share weights have equal models")
            return SharedMemory(files[0], nbytes)
        finally:
            for file in files:
                os.close(file)

def _machine() -> tuple[Any, ...]:
    """Equal on ranks that can exchange files."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read()
    network = os.stat("/proc/self/ns/net")
    return boot, network.st_dev, network.st_ino, os.getuid()


def _accept(entrance: socket.socket) -> socket.socket:
    while True:
        other, _ = entrance.accept()
        if _is_own(other):
            return _without_timeout(other)
        other.close()


def _connect(name: str) -> socket.socket:
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.settimeout(_SECONDS)
    other.connect(name)
    if not _is_own(other):
        raise UsageError("shared: a process of another user answers for the first rank of this machine")
    return _without_timeout(other)


def _without_timeout(other: socket.socket) -> socket.socket:
    other.settimeout(None)  # a block may take long, and a process that ends closes its socket
    return other


def _is_own(other: socket.socket) -> bool:
    credentials = struct.Struct("=iII")  # process, user, group
    raw = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return bool(credentials.unpack(raw)[1] == os.getuid())


def _send(other: socket.socket, text: bytes, file: int | None = None) -> bool:
    """Returns whether the other rank may get it. Otherwise _read() says why not."""
    try:
        socket.send_fds(other, [_SIZE.pack(len(text))], [] if file is None else [file])
        other.sendall(text)
    except OSError:
        return False
    return True


def _read(other: socket.socket) -> tuple[bytes, list[int]]:
    """A message and the files sent with it."""
    try:
        head, files, _, _ = socket.recv_fds(other, _SIZE.size, 1)
        head += _exactly(other, _SIZE.size - len(head))
        return _exactly(other, _SIZE.unpack(head)[0]), list(files)
    except (OSError, EOFError):
        return b"its process has ended", []


def _heard(other: socket.socket) -> bytes:
    """Returns the message of another rank after its blocks: why it has failed, or nothing."""
    said, files = _read(other)
    for file in files:
        os.close(file)
    return b"it has more blocks" if files else said


def _exactly(other: socket.socket, count: int) -> bytes:
    text = b""
    while len(text) < count:
        some = other.recv(count - len(text))
        if not some:
            raise EOFError
        text += some
    return text


def _in_shared(memory: SharedMemory, member: Member) -> torch.Tensor:
    return member.view(memory.bytes.untyped_storage(), member.start)


def _difference(there: str, here: str) -> str:
    (name, nbytes, members), (own_name, own_nbytes, own_members) = json.loads(there), json.loads(here)
    if name != own_name or len(members) != len(own_members):
        return f"{name} with {len(members)} tensors where this rank has {own_name} with {len(own_members)}"
    for one, other in zip(members, own_members):
        if one != other:
            return f"{' '.join(map(str, one))} where this rank has {' '.join(map(str, other))}"
    return f"{nbytes} bytes of {name} where this rank has {own_nbytes}"
