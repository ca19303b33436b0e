"""The program, as ``ballast`` and ``python -m ballast``."""

import importlib
import os
import sys

from . import _ballast


def main() -> int:
    """Runs the program with the words of the command line and returns its exit status. From then on
    the program handles the signals of the process, so call it last."""
    if sys.argv[1:2] == ["prepare"]:
        importlib.import_module("ballast.preparing.command").main(sys.argv[2:], "ballast prepare")
        return 0
    if sys.argv[1:2] == ["import-config"]:
        from .import_config import main as import_config  # programs that start often do without it
        return import_config(sys.argv[2:])
    called_as_module = os.path.basename(sys.argv[0]) == "__main__.py"
    name = [sys.executable, "-m", "ballast"] if called_as_module else [sys.argv[0]]
    if sys.stdout is not None:  # None: closed by the caller
        sys.stdout.flush()
    return _ballast.run_program([os.fsencode(word) for word in sys.argv[1:]],
                                [os.fsencode(word) for word in name])


if __name__ == "__main__":
    sys.exit(main())
