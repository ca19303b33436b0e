#!/usr/bin/env python3
"""Runs clang-tidy over every library and tool source that a build folder (made with clang) compiles.

    tidy.py FOLDER [--all]

A unit that was clean is analysed again only if it, a header of the project that it includes, .clang-tidy or
its command has changed; --all analyses all. FOLDER/tidy.json remembers clean units.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import green
from green import ROOT

FOLDERS = ("src", "aio", "cpu_adam", "tools")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.M)


@functools.cache
def includes_of(file: pathlib.Path, folder: pathlib.Path) -> frozenset[pathlib.Path]:
    """The files of the project that a file includes, under any condition. Libraries are not looked for."""
    text = file.read_text(errors="replace")
    places = (file.parent, ROOT / "include", ROOT, folder)
    return frozenset(place / name for name in INCLUDE.findall(text) for place in places if (place / name).is_file())


def closure_of(file: pathlib.Path, folder: pathlib.Path) -> set[pathlib.Path]:
    found, new = set(), [file]
    while new:
        path = pathlib.Path(os.path.normpath(new.pop()))
        if path not in found:
            found.add(path)
            new += includes_of(path, folder)
    return found


def units_of(folder: pathlib.Path) -> tuple[dict[pathlib.Path, str], set[pathlib.Path]]:
    """Units with their commands, and all sources in them. A source is analysed once, so units that only
    repeat sources are left out."""
    units, sources = {}, set()
    for command in json.loads((folder / "compile_commands.json").read_text()):
        unit = pathlib.Path(os.path.normpath(pathlib.Path(command["directory"], command["file"])))
        parts = {unit}
        if re.search(r"-unity[0-9]+\.cpp$", unit.name):
            parts = {pathlib.Path(os.path.normpath(folder / part)) for part in INCLUDE.findall(unit.read_text())}
        parts = {part for part in parts if part.is_relative_to(ROOT) and part.relative_to(ROOT).parts[0] in FOLDERS}
        if parts - sources:
            units[unit] = command["command"]
            sources |= parts
    return units, sources


def main() -> int:
    folder = pathlib.Path(sys.argv[1]).resolve()
    units, sources = units_of(folder)
    memory = green.Memory(folder / "tidy.json")
    common = [path for path in green.tree() if path.name == ".clang-tidy" or "pch" in path.parts]
    keys, sizes = {}, {}
    for unit, command in units.items():
        files = closure_of(unit, folder)
        sizes[unit] = sum(path.stat().st_size for path in files)
        keys[unit] = green.key_of(command, green.contents(sorted([*files, *common])))
    left = [unit for unit in units if "--all" in sys.argv or not memory.has(str(unit), keys[unit])]
    # The longest ones first, so that no core waits for the last one.
    left.sort(key=lambda unit: (-sizes[unit], unit))
    # Builds the precompiled headers that no test has needed.
    targets = subprocess.run(["ninja", "-C", folder, "-t", "targets", "all"], check=True, stdout=subprocess.PIPE,
                             text=True).stdout
    headers = re.findall(r"^(.*\.pch): ", targets, re.M)
    if headers and left:
        subprocess.run(["ninja", "-C", folder, *headers], check=True, stdout=subprocess.DEVNULL)

    def analyse(unit: pathlib.Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["clang-tidy", "--quiet", "-p", str(folder), str(unit)], check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    faults = set()
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for unit, done in zip(left, pool.map(analyse, left)):
            if done.returncode == 0:
                memory.add(str(unit), keys[unit])
            else:
                faults |= set(re.findall(r".*(?:error|warning).*", done.stdout)) or {f"{unit}: clang-tidy failed"}
    memory.save()
    for line in sorted(faults)[:60]:
        print(line, file=sys.stderr)
    if not faults:
        print(f"clang-tidy: nothing found in {len(sources)} files; "
              f"{len(left)} of {len(units)} units were analysed, the others are unchanged")
    return 1 if faults or not units else 0


if __name__ == "__main__":
    sys.exit(main())
