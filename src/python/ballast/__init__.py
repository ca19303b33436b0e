"""Ballast for Python: optimizers for PyTorch whose states live in host memory or on NVMe,
asynchronous file I/O, plans and training runs in this process, and the program itself as
``python -m ballast``."""

from typing import Any

from . import aio
from ._ballast import version as _version
from .errors import ConfigError, Error, FileError, OutOfMemoryError, UsageError
from .plans import Forecast, LedgerLine, Plan, plan
from .runs import Run, train

__version__ = _version()

_OPTIMIZERS = ["OffloadAdagrad", "OffloadAdamW", "OffloadLion", "OffloadOptimizer", "OffloadSGD"]

__all__ = ["ConfigError", "Error", "FileError", "Forecast", "LedgerLine", "OutOfMemoryError", "Plan",
           "Run", "UsageError", "aio", "plan", "train", *_OPTIMIZERS]


def __getattr__(name: str) -> Any:
    # Only those who use an optimizer need torch.
    if name in _OPTIMIZERS:
        from . import optim

        return getattr(optim, name)
    raise AttributeError(f"module 'ballast' has no attribute {name!r}")
