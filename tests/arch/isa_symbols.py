#!/usr/bin/env python3
"""Fails when an object compiled for one instruction set could leak code into another's.

The linker keeps one copy of every inline function or template instance (a weak symbol). If a copy
compiled with -mavx512f survives, the program dies with SIGILL on a CPU without it. So whatever the
objects of a vector instruction set export must carry that instruction set in its name.

Usage: isa_symbols.py NM TAG=ARCHIVE...     TAG: scalar, neon, avx2, avx512; unoptimised archives, since
an optimiser inlines what would otherwise be a symbol
"""

import subprocess
import sys

# Parts of the mangled names of each instruction set. AVX2 is the lowest AVX that is built, so plain
# "avx" belongs to it.
OWN = {"neon": ("neon",), "avx2": ("avx2", "3avx"), "avx512": ("avx512",)}


def exported(nm: str, archive: str) -> list[tuple[str, str]]:
    """(name, type) of every symbol that `archive` defines for other objects: weak or global."""
    command = [nm, "--format=posix", "--defined-only", archive]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    fields = [line.split() for line in listing.splitlines() if not line.endswith(":")]
    return [(f[0], f[1]) for f in fields if len(f) >= 2 and (f[1].isupper() or f[1] in "uvw")]


def main() -> int:
    nm, archives = sys.argv[1], sys.argv[2:]
    problems = []
    for entry in archives:
        tag, _, archive = entry.partition("=")
        symbols = exported(nm, archive)
        if not symbols:
            problems.append(f"{archive} exports nothing: is it the right archive?")
        if tag not in OWN:
            continue
        problems += [f"{archive} ({tag}) exports {name} ({kind}), which does not name {tag}"
                     for name, kind in symbols
                     if not any(own in name.lower() for own in OWN[tag])]
        print(f"{tag}: {len(symbols)} exported symbols in {archive}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems or not archives else 0


if __name__ == "__main__":
    sys.exit(main())
