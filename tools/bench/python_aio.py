#!/usr/bin/env python3
"""Times ballast.aio and `ballast bench io` in turn: 1 MiB blocks, 32 in flight, one pass over a
file per measurement. Prints medians and the ratio.

    python_aio.py FOLDER [--size MiB] [--rounds N] [--tensor]

`--tensor`: memory with the alignment of PyTorch's tensors (64 bytes), which goes through the page
cache.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import time

from ballast import aio

BLOCK = 1 << 20
DEPTH = 32


def program(folder: str, size: int) -> dict[str, float]:
    """GB/s of the program, by pattern."""
    command = [sys.executable, "-m", "ballast", "bench", "io", "--path", folder, "--size", f"{size}MiB",
               "--pattern", "read,write", "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {row["pattern"]: row["gb_per_second"] for row in rows}


def one_pass(start, blocks: int, buffers: list[memoryview]) -> float:
    begun = time.perf_counter()
    flying = collections.deque()
    for block in range(blocks):
        if len(flying) == DEPTH:
            flying.popleft().result()
        flying.append(start(buffers[block % DEPTH], block * BLOCK))
    for future in flying:
        future.result()
    return blocks * BLOCK / (time.perf_counter() - begun) / 1e9


def package(folder: str, size: int, shift: int) -> dict[str, float]:
    """GB/s of the package, by pattern. The file is written once before, as by the program."""
    memory = aio.empty((DEPTH + 1) * BLOCK)
    for i in range(0, len(memory), 4096):
        memory[i:i + 8] = os.urandom(8)
    buffers = [memory[shift + i * BLOCK:shift + (i + 1) * BLOCK] for i in range(DEPTH)]
    path = os.path.join(folder, "python_aio.bin")
    try:
        with aio.File(path, "w", size=size * BLOCK) as file:
            one_pass(file.write_from, size, buffers)
            return {"read": one_pass(file.read_into, size, buffers),
                    "write": one_pass(file.write_from, size, buffers)}
    finally:
        os.unlink(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensor", action="store_true")
    asked = parser.parse_args()
    rates = collections.defaultdict(list)
    for _ in range(asked.rounds):
        for pattern, rate in program(asked.folder, asked.size).items():
            rates[pattern, "program"].append(rate)
        for pattern, rate in package(asked.folder, asked.size, 64 if asked.tensor else 0).items():
            rates[pattern, "package"].append(rate)
    for pattern in ("read", "write"):
        one, other = rates[pattern, "program"], rates[pattern, "package"]
        print(f"{pattern}: program {statistics.median(one):.3f} GB/s {[round(r, 3) for r in one]}, "
              f"package {statistics.median(other):.3f} GB/s {[round(r, 3) for r in other]}, "
              f"ratio {statistics.median(other) / statistics.median(one):.3f}")


if __name__ == "__main__":
    main()
