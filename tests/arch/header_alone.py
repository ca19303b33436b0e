#!/usr/bin/env python3
"""Compiles public headers alone and twice in one unit.

    header_alone.py INCLUDE [SOURCE_FOLDER...] -- COMPILER...

A source that includes a header first has already proved that the header compiles alone, if the build
compiles each source alone. Then the folders of sources are given, and such headers are left out. Builds
that join sources prove nothing, and all headers are compiled.

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


def proved_by(folders: list[str]) -> set[str]:
    """Headers that the sources in `folders` include first."""
    first = [re.search(r'^ *# *include *[<"]([^">]+)[">]', source.read_text(encoding="utf-8"), re.MULTILINE)
             for folder in folders for source in pathlib.Path(folder).rglob("*.cpp")]
    return {match.group(1) for match in first if match}


def chains_of(base: pathlib.Path, proved: set[str]) -> list[list[str]]:
    """Lists of headers without the proved ones, each of which includes whatever its predecessors in the list include."""

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

    headers = {str(p.relative_to(base)) for p in base.rglob("*.h")} - proved
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
    separator = sys.argv.index("--")
    base, *folders = sys.argv[1:separator]
    base = pathlib.Path(base)
    compiler = sys.argv[separator + 1:]
    proved = proved_by(folders)
    chains = chains_of(base, proved)
    # The longest ones first.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        compiled = pool.map(lambda chain: compile_chain(base, compiler, chain), reversed(chains))
        failures = [failure for failure in compiled if failure]
    for failure in failures:
        print(failure)
    print(f"{sum(map(len, chains))} headers, {len(failures)} units do not compile"
          f"{'; sources prove the others' if proved else ''}")
    return 1 if failures or not chains else 0


if __name__ == "__main__":
    sys.exit(main())
