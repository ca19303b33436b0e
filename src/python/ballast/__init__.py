"""Ballast for Python: optimizers for PyTorch whose states live in host memory or on NVMe,
asynchronous file I/O, plans and training runs in this process, and the program itself as
``python -m ballast``."""

from typing import Any

from . import aio
from .errors import ConfigError, Error, FileError, OutOfMemoryError, UsageError

_OPTIMIZERS = ["OffloadAdagrad", "OffloadAdamW", "OffloadLion", "OffloadOptimizer", "OffloadSGD"]

__all__ = ["ConfigError", "Error", "FileError", "OutOfMemoryError", "UsageError", "aio",
           *_OPTIMIZERS]


def __getattr__(name: str) -> Any:
    # Only those who use an optimizer need torch.
    if name in _OPTIMIZERS:
        from . import optim

        return getattr(optim, name)
    raise AttributeError(f"module 'ballast' has no attribute {name!r}")
