#!/usr/bin/env python3
"""Runs a command if there are enough GPUs; otherwise exits 77, which Meson shows as SKIP.

    needs_gpus.py NUMBER COMMAND...
"""

import os
import subprocess
import sys


def gpus() -> int:
    """The number of GPUs that the driver lists."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def main() -> int:
    wanted, command = int(sys.argv[1]), sys.argv[2:]
    there = gpus()
    if there < wanted:
        print(f"skipped: {wanted} GPUs are needed, {there} are there")
        return 77
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
