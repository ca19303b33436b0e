#!/usr/bin/env python3
"""Prints how many lines of the project's headers the sources read, and which headers cost most.

    closures.py [--headers COUNT] [--sources COUNT] [--readers HEADER] [--edges COUNT] [SOURCE_ROOT]

A source's closure is the set of the project's headers that it includes, directly or through others.
Its size is the number of their lines, which is what a compiler reads beyond the source itself and
the libraries. A header's cost is its lines times the number of its readers. Conditions of the
preprocessor are ignored.

--readers lists the headers that include HEADER, with the number of sources that read it only through
each of them. --edges ranks includes of a header by a header: the lines that all sources together would
not read without this one include.
"""

import argparse
import collections
import pathlib
import re
import statistics

FOLDERS = ("src", "aio", "cpu_adam", "tools")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


class Graph:
    """Includes among the project's files, as paths below the root."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.lines: dict[str, int] = {}
        self.includes: dict[str, list[str]] = {}
        paths = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
        self.sources = sorted(str(path.relative_to(root)) for path in paths
                              if path.suffix in (".cpp", ".cu"))
        pending = list(self.sources)
        while pending:
            file = pending.pop()
            if file in self.includes:
                continue
            text = (root / file).read_text(encoding="utf-8")
            self.lines[file] = text.count("\n")
            found = (self.find(file, name) for name in INCLUDE.findall(text))
            self.includes[file] = sorted({target for target in found if target})
            pending += self.includes[file]

    def find(self, file: str, name: str) -> str | None:
        """The project's file that `file` includes by this name, or none for one of a library."""
        for folder in (self.root / "include", self.root, (self.root / file).parent):
            path = folder / name
            if path.is_file():
                return str(path.resolve().relative_to(self.root.resolve()))
        return None

    def closure(self, file: str, without: tuple[str, str] | None = None) -> set[str]:
        """The headers that `file` reads, if one include (`without`) is left out."""
        seen: set[str] = set()
        pending = [file]
        while pending:
            reader = pending.pop()
            for target in self.includes[reader]:
                if target not in seen and (reader, target) != without:
                    seen.add(target)
                    pending.append(target)
        seen.discard(file)
        return seen

    def size(self, headers: set[str]) -> int:
        return sum(self.lines[header] for header in headers)


def print_readers(graph: Graph, closures: dict[str, set[str]], header: str) -> None:
    reading = [source for source in graph.sources if header in closures[source]]
    print(f"{header}: {graph.lines[header]} lines, {len(reading)} readers")
    rows = []
    for file, targets in graph.includes.items():
        if header in targets:
            only = sum(header not in graph.closure(source, (file, header)) for source in reading)
            if file not in graph.sources:
                rows.append((only, file))
    for only, file in sorted(rows, reverse=True):
        print(f"{only:6} only through {file}")
    direct = [source for source in reading if header in graph.includes[source]]
    print(f"{len(direct):6} sources include it themselves")


def print_edges(graph: Graph, closures: dict[str, set[str]], count: int) -> None:
    rows = []
    for file, targets in graph.includes.items():
        if file in graph.sources:
            continue
        readers = [source for source in graph.sources if file in closures[source]]
        for target in targets:
            saved = [graph.size(closures[source] - graph.closure(source, (file, target)))
                     for source in readers]
            rows.append((sum(saved), len(readers), file, target))
    print("lines saved  readers  include")
    for lines, readers, file, target in sorted(rows, reverse=True)[:count]:
        print(f"{lines:11}  {readers:7}  {file} -> {target}")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parents[2], type=pathlib.Path)
    parser.add_argument("--headers", type=int, default=20)
    parser.add_argument("--sources", type=int, default=10)
    parser.add_argument("--edges", type=int)
    parser.add_argument("--readers")
    options = parser.parse_args()
    graph = Graph(options.root)
    closures = {source: graph.closure(source) for source in graph.sources}
    if options.readers:
        print_readers(graph, closures, options.readers)
        return
    if options.edges:
        print_edges(graph, closures, options.edges)
        return

    sizes = {source: graph.size(headers) for source, headers in closures.items()}
    print(f"{len(sizes)} sources read {sum(sizes.values())} lines of headers: "
          f"mean {statistics.mean(sizes.values()):.0f}, median {statistics.median(sizes.values()):.0f}, "
          f"most {max(sizes.values())}")
    print("\nlargest closures")
    for source in sorted(graph.sources, key=lambda source: -sizes[source])[:options.sources]:
        print(f"{sizes[source]:6}  {source}")
    readers = collections.Counter(header for headers in closures.values() for header in headers)
    print("\nheaders by lines x readers")
    for header in sorted(readers, key=lambda h: -graph.lines[h] * readers[h])[:options.headers]:
        print(f"{graph.lines[header] * readers[header]:7} = {graph.lines[header]:4} x {readers[header]:3}"
              f"  {header}")


if __name__ == "__main__":
    main()
