#!/usr/bin/env python3
"""Fails where files of one module include each other in a circle.

    include_circles.py SOURCE_ROOT

A header and the source of the same name count as one file: who needs the header needs what the source
includes. KNOWN lists the circles that remain. A new one fails, and so does one that is listed but has
become smaller or is gone, so that the list can only become shorter.
"""

import pathlib
import sys

from include_rules import INCLUDE, SOURCES, module_of, module_of_include

# One line per circle: its module, then the files without folder of the module and without ending.
KNOWN: dict[str, list[str]] = {}


def file_of(name: pathlib.PurePath) -> str:
    """The path below its module's folder, without the extension."""
    parts = name.with_suffix("").parts
    skipped = 3 if parts[:2] == ("include", "ballast") else 2 if parts[0] in ("src", "ballast") else 1
    # The public headers of both parts of the model are in one folder.
    skipped += 1 if parts[:2] == ("src", "model") and parts[2] in ("spec", "compute") else 0
    return "/".join(parts[skipped:])


def graphs_of(root: pathlib.Path) -> dict[str, dict[str, set[str]]]:
    """For each module, the includes of each of its files."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for folder in ("include", "src", "aio", "cpu_adam", "tools"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            name = path.relative_to(root)
            graph = graphs.setdefault(module_of(name), {})
            included = graph.setdefault(file_of(name), set())
            for line in path.read_text().splitlines():
                match = INCLUDE.match(line)
                if not match or module_of_include(match.group(2)) != module_of(name):
                    continue
                target = file_of(pathlib.PurePath(match.group(2)))
                if target != file_of(name):
                    included.add(target)
    return graphs


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that all reach each other, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(file: str) -> None:
        number[file] = lowest[file] = len(number)
        stack.append(file)
        for target in sorted(graph.get(file, ())):
            if target not in number:
                visit(target)
                lowest[file] = min(lowest[file], lowest[target])
            elif target in stack:
                lowest[file] = min(lowest[file], number[target])
        if lowest[file] == number[file]:
            start = stack.index(file)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for file in sorted(graph):
        if file not in number:
            visit(file)
    return found


def compare(found: dict[str, list[list[str]]], known: dict[str, list[list[str]]]) -> list[str]:
    """One line for each circle that is in only one of both."""
    lines = []
    for module in sorted({*found, *known}):
        for circle in found.get(module, []):
            if circle not in known.get(module, []):
                lines.append(f"{module}: files include each other in a circle: {' '.join(circle)}")
        for circle in known.get(module, []):
            if circle not in found.get(module, []):
                lines.append(f"{module}: this circle has changed or is gone, so KNOWN must follow: "
                             f"{' '.join(circle)}")
    return lines


def main() -> int:
    graphs = graphs_of(pathlib.Path(sys.argv[1]))
    if not graphs:
        print("no sources")
        return 1
    known = {module: [sorted(line.split()) for line in lines] for module, lines in KNOWN.items()}
    lines = compare({module: circles_of(graph) for module, graph in graphs.items()}, known)
    # The test must be able to fail.
    if circles_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != [["a", "b", "c"]]:
        lines.append("a circle of three files is not found")
    for line in lines:
        print(line)
    print(f"{len(graphs)} modules, {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
