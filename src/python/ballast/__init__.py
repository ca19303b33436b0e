"""Ballast for Python: asynchronous file I/O, plans and training runs in this process, and the program
itself as ``python -m ballast``."""

from . import aio
from ._ballast import version as _version
from .errors import ConfigError, Error, FileError, OutOfMemoryError, UsageError
from .plans import Forecast, LedgerLine, Plan, plan
from .runs import Run, train

__version__ = _version()
__all__ = ["ConfigError", "Error", "FileError", "Forecast", "LedgerLine", "OutOfMemoryError", "Plan",
           "Run", "UsageError", "aio", "plan", "train"]
