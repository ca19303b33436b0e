#!/usr/bin/env python3
"""Compiles every public header alone and twice in one unit.

    header_alone.py SOURCE_ROOT COMPILER...

A header that follows others in a unit is also alone if it includes all that was included before it.
So one unit has a chain of headers, each of which includes the previous ones, and half of the units
suffice.
"""

import concurrent.futures
import functools
import pathlib
import re
import subprocess
import sys


def chains_of(base: pathlib.Path) -> list[list[str]]:
    """Lists of headers, each of which includes whatever its predecessors in the list include."""

    @functools.cache
    def included(header: str) -> frozenset[str]:
        path = base / header
        if not path.is_file():
            return frozenset({header})
        text = path.read_text(encoding="utf-8")
        if re.search(r"^ *# *if", text, re.MULTILINE):
            raise SystemExit(f"{header}: what it includes could depend on a condition")
        direct = re.findall(r'^ *# *include *[<"]([^>"]+)[>"]', text, re.MULTILINE)
        return frozenset({header}).union(*map(included, direct))

    headers = [str(p.relative_to(base)) for p in base.rglob("*.h")]
    chains: list[list[str]] = []
    for header in sorted(headers, key=lambda h: (len(included(h)), h)):
        before = [chain for chain in chains if included(chain[-1]) < included(header)]
        if before:
            max(before, key=lambda chain: len(included(chain[-1]))).append(header)
        else:
            chains.append([header])
    return chains


def compile_chain(base: pathlib.Path, compiler: list[str], chain: list[str]) -> str:
    unit = "".join(f'#include "{header}"\n' for header in chain + chain)
    done = subprocess.run(
        [*compiler, "-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only",
         f"-I{base}", "-x", "c++", "-"],
        input=unit, text=True, capture_output=True, check=False)
    return "" if done.returncode == 0 else f"{', '.join(chain)}:\n{done.stderr}"


def main() -> int:
    base = pathlib.Path(sys.argv[1]) / "include"
    compiler = sys.argv[2:]
    chains = chains_of(base)
    # The longest ones first.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        compiled = pool.map(lambda chain: compile_chain(base, compiler, chain), reversed(chains))
        failures = [failure for failure in compiled if failure]
    for failure in failures:
        print(failure)
    print(f"{sum(map(len, chains))} headers, {len(failures)} units do not compile")
    return 1 if failures or not chains else 0


if __name__ == "__main__":
    sys.exit(main())
