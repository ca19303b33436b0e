#!/usr/bin/env python3
"""Fails where a source outside the folder of families names a family or includes a family's header,
and where the manual's table of families is not complete.

    family_names.py SOURCE_ROOT

Everything else asks a family, or the description of its layers (LayerSpec). The names are the rows
of BALLAST_FAMILIES. Comments may name families, for example as a source. tools/bench may, because it
compares Ballast with programs that compute two of them.
"""

import pathlib
import re
import sys

FAMILIES = pathlib.PurePath("src/model/description/families")
NOT_LOOKED_AT = (FAMILIES, pathlib.PurePath("tools/bench"))
SOURCES = {".h", ".cpp", ".cu", ".in"}
ROW = re.compile(r"^ +X\((\w+)\)", re.MULTILINE)
HEADER = re.compile(r'#include "[^"]*description/families/')
# A comment, or a string, which stays.
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(text: str) -> str:
    """The text without comments. Lines keep their numbers."""
    def kept(match: re.Match) -> str:
        found = match.group()
        return found if found.startswith('"') else "\n" * found.count("\n")
    return COMMENT.sub(kept, text)


def names_of(root: pathlib.Path) -> list[str]:
    """The registered families."""
    names = ROW.findall((root / FAMILIES / "families.h").read_text())
    assert len(names) > 20, "the rows of BALLAST_FAMILIES have another form"
    return names


def findings_in(text: str, name: re.Pattern) -> list[tuple[int, str]]:
    """The lines that name a family or include a header, and which."""
    found = []
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if HEADER.search(line):
            found.append((number, "includes a family's header"))
        found += [(number, f"names the family {match}") for match in name.findall(line)]
    return found


def findings_in_manual(root: pathlib.Path, names: list[str]) -> list[str]:
    """Families that the table of configs/models.md lacks or has in addition."""
    text = (root / "configs" / "models.md").read_text()
    table = text[text.index("| family | architecture |"):].split("\n\n")[0]
    described = [name for row in table.splitlines()[2:]
                 for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    return [f"configs/models.md: the table of families must have {name} once"
            for name in sorted({*names, *described})
            if names.count(name) != 1 or described.count(name) != 1]


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    names = names_of(root)
    name = re.compile(r"(?<![\w/])(" + "|".join(names) + r")(?![\w/])")
    files = 0
    findings = findings_in_manual(root, names)
    for folder in ("include", "src", "tools"):
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root)
            if path.suffix not in SOURCES or any(relative.is_relative_to(f) for f in NOT_LOOKED_AT):
                continue
            files += 1
            for number, what in findings_in(path.read_text(), name):
                findings.append(f"{relative}:{number}: {what}")
    assert files > 400, "the sources are elsewhere"
    print("\n".join(findings))
    print(f"{files} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
