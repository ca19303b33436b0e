#!/usr/bin/env python3
"""Turns conversations and texts into a file of documents: see preparing/command.py."""

import sys

sys.dont_write_bytecode = True  # the source tree stays as it is
from preparing.command import main  # noqa: E402

if __name__ == "__main__":
    main()
