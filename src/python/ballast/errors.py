"""The exceptions of the package. `str()` of each is one line: what failed, where, and what to do."""


class Error(RuntimeError):
    """Any error of Ballast. `category` is the word for its kind: usage, config, data, io, memory,
    device, comm, state, numeric or interrupted."""

    category: str = "state"


class UsageError(Error, ValueError):
    """A wrong argument, or an object in the wrong state, such as a closed file. The message names it."""


class ConfigError(UsageError):
    """A wrong config. The message names the file and the key."""


class FileError(OSError, Error):
    """A file or disk has failed. `errno` is set if a system call has."""


class OutOfMemoryError(Error, MemoryError):
    """A memory budget is too small. The message names the tier and the largest part."""
