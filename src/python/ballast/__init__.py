"""Ballast for Python: asynchronous file I/O, plans and training runs in this process, and the program
itself as ``python -m ballast``."""

from . import aio
from .errors import ConfigError, Error, FileError, OutOfMemoryError, UsageError

__all__ = ["ConfigError", "Error", "FileError", "OutOfMemoryError", "UsageError", "aio"]
