#!/usr/bin/env python3
"""Fails where a README names a file or folder that does not exist.

    readme_names.py SOURCE_ROOT

Checks what is in backticks and looks like a source or a folder: `x.h`, `folder/x.cpp`, `x_*.cpp`,
`folder/x`. A name must be the end of the path of a file or folder of the project. The manual in configs names files of users instead.
"""

import pathlib
import re
import sys

NAME = re.compile(r"`([\w.{},*-]*(?:/[\w.{},*-]+)*/?)`")
STEM = re.compile(r"[a-z_]+(?:/[a-z_0-9]+)+/?")  # `step/layout`: of a source or a folder
SUFFIXES = (".h", ".cpp", ".cu", ".py", ".js", ".sh", ".css", ".html")


def expanded(name: str) -> list[str]:
    """`layer.{h,cpp}` names two files."""
    braces = re.fullmatch(r"(.*)\{([\w,]+)\}(.*)", name)
    if braces is None:
        return [name]
    return [braces.group(1) + part + braces.group(3) for part in braces.group(2).split(",")]


def is_there(name: str, paths: set[str]) -> bool:
    ending = re.compile("(?:^|/)" + re.escape(name.rstrip("/")).replace(r"\*", "[^/]*") + "$")
    return any(ending.search(path) for path in paths)


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    paths = set()
    for folder in ("include", "src", "aio", "cpu_adam", "tools", "tests", "configs"):
        for path in (root / folder).rglob("*"):
            if "__pycache__" not in path.parts:
                paths.add(str(path.relative_to(root)))
                paths.add(str(path.relative_to(root).with_suffix("")))
    readmes = [path for folder in ("src", "aio", "cpu_adam", "tools")
               for path in sorted((root / folder).rglob("*.md"))]
    assert len(readmes) > 10, "the READMEs are elsewhere"
    checked = 0
    findings = []
    for readme in readmes:
        for number, line in enumerate(readme.read_text().splitlines(), 1):
            for match in NAME.finditer(line):
                for name in expanded(match.group(1)):
                    if not name.endswith(SUFFIXES) and not STEM.fullmatch(name):
                        continue
                    checked += 1
                    if not is_there(name, paths):
                        findings.append(f"{readme.relative_to(root)}:{number}: {name} does not exist")
    print("\n".join(findings))
    print(f"{checked} names, {len(findings)} of files that do not exist")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
