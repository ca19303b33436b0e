#!/usr/bin/env python3
"""Fails where two classes, structs or enums of the project have the same name.

    unique_names.py SOURCE_ROOT

Counts definitions at namespace scope, anonymous namespaces included, in all folders but tests.
Types inside a class are not counted: their full name contains that of the class. Nor is a type of
the host device and its counterpart of the CUDA device.
"""

import collections
import pathlib
import re
import sys

FOLDERS = ("include", "src", "aio", "cpu_adam", "tools")
SOURCES = {".h", ".cpp", ".cu", ".cuh"}

# The two devices implement the same interfaces in separate namespaces.
DEVICES = ("src/model/host/", "src/model/cuda/")

NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
                   r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", re.S | re.M)
TYPE = re.compile(r"\b(?:class|struct|enum(?:\s+class|\s+struct)?|union)\s+(?:alignas\([^)]*\)\s*)?"
                  r"(?:\[\[[^\]]*\]\]\s*)?(\w+)(?:\s+final)?\s*(?::(?!:)[^{;()]*)?$")
NAMESPACE = re.compile(r"\bnamespace(?:\s+[\w:]+)?\s*$|\bextern\s*$")


def types_of(text: str) -> list[str]:
    """Names of the types that a source defines at namespace scope."""
    text = NOISE.sub(" ", text)
    names = []
    closed = 0  # depth of braces that are not namespaces
    open_braces = []
    start = 0
    for match in re.finditer(r"[{};]", text):
        before = text[start:match.start()]
        start = match.end()
        if match.group() == "}":
            if open_braces and not open_braces.pop():
                closed -= 1
        elif match.group() == "{":
            is_namespace = NAMESPACE.search(before) is not None
            if not is_namespace:
                found = TYPE.search(before)
                if found and closed == 0:
                    names.append(found.group(1))
                closed += 1
            open_braces.append(is_namespace)
    return names


def is_of_both_devices(where: list[str]) -> bool:
    return len(where) == 2 and all(any(path.startswith(device) for path in where)
                                   for device in DEVICES)


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    places = collections.defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SOURCES or "pch" in path.parts:
                continue
            for name in types_of(path.read_text()):
                places[name].append(str(path.relative_to(root)))
    assert len(places) > 500, "the sources have another form"
    several = {name: where for name, where in places.items()
               if len(where) > 1 and not is_of_both_devices(where)}
    for name, where in sorted(several.items()):
        print(f"{name} is defined in {', '.join(where)}: give each thing its own name")
    return 1 if several else 0


if __name__ == "__main__":
    sys.exit(main())
