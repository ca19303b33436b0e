#!/usr/bin/env python3
"""Fails where files of the project include each other in a circle.

    file_cycles.py SOURCE_ROOT

A header and the source of the same name in the same module are one node, so a header that declares
what another source needs closes a circle even if headers alone do not.
"""

import collections
import pathlib
import re
import sys

# Modules that still have circles. Remove a module here when its last one is gone.
OPEN = {"config", "model", "planning", "python", "schedule"}

SOURCES = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def node_of(path: pathlib.PurePath) -> str:
    """module/name of a file: include/ballast/engine/engine.h and src/engine/engine.cpp are one."""
    parts = path.with_suffix("").parts
    if parts[:2] == ("include", "ballast"):
        parts = parts[2:]
    elif parts[0] in ("src", "ballast"):
        parts = parts[1:]
    return "/".join(parts)


def circles_of(texts: dict[pathlib.PurePath, str]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan, "Depth-first search and linear
    graph algorithms", 1972)."""
    edges: dict[str, set[str]] = collections.defaultdict(set)
    for path, text in texts.items():
        own = node_of(path)
        edges[own].update(node_of(pathlib.PurePath(name)) for name in INCLUDE.findall(text))
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges[node]):
            if target not in edges:
                continue
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] != index[node]:
            return
        circle = stack[stack.index(node):]
        del stack[stack.index(node):]
        if len(circle) > 1:
            found.append(sorted(circle))

    sys.setrecursionlimit(10000)
    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    files = [p for folder in ("include", "src", "aio", "cpu_adam", "tools")
             for p in sorted((root / folder).rglob("*"))
             if p.suffix in SOURCES and p.parent.name != "pch"]
    circles = circles_of({p.relative_to(root): p.read_text() for p in files})
    breaches = [f"{len(circle)} files in a circle: {', '.join(circle)}" for circle in circles
                if not {node.split("/")[0] for node in circle} <= OPEN]
    still = {node.split("/")[0] for circle in circles for node in circle}
    breaches += [f"{module} has no circles: remove it from OPEN" for module in OPEN - still]
    # The check must be able to fail.
    probe = {pathlib.PurePath("src/a/x.h"): "",
             pathlib.PurePath("src/a/x.cpp"): '#include "src/a/y.h"',
             pathlib.PurePath("src/a/y.h"): '#include "src/a/x.h"'}
    if not circles_of(probe):
        breaches.append("the check for circles misses one")
    for breach in sorted(breaches):
        print(breach)
    print(f"{len(files)} files, {len(breaches)} breaches")
    return 1 if breaches or not files else 0


if __name__ == "__main__":
    sys.exit(main())
