"""The program, as ``python -m ballast``."""

import os
import sys

from . import _ballast


def main() -> int:
    """Runs the program with the words of the command line. Returns its exit status."""
    called_as_module = os.path.basename(sys.argv[0]) == "__main__.py"
    name = [sys.executable, "-m", "ballast"] if called_as_module else [sys.argv[0]]
    sys.stdout.flush()
    return _ballast.run_program(sys.argv[1:], name)


if __name__ == "__main__":
    sys.exit(main())
