#!/usr/bin/env python3
"""Writes a C++ source with the rows of the tables of keys in configs/README.md.

    embed_keys.py OUT README

config_keys.h declares the array.
"""

import json
import pathlib
import re
import sys

HEADER = "| key | meaning | default | range |"
# A pointer to a section of the same page, with the words that only lead to it.
POINTER = re.compile(r"[,;.]?\s*[Ss]ee \[(?:below|above)\]\([^)]*\)")


def plain(cell: str) -> str:
    """The text of a cell without Markdown."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", POINTER.sub("", cell))
    return text.replace("`", "").replace("\\|", "|").strip(" ,;")


def rows(readme: str) -> list[list[str]]:
    found = []
    for table in readme.split(HEADER)[1:]:
        for line in table.split("\n")[2:]:
            if not line.startswith("|"):
                break
            cells = [plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert cells[0] and len(cells) <= 4, line
            found.append(cells + [""] * (4 - len(cells)))
    return found


def main() -> None:
    out, readme = map(pathlib.Path, sys.argv[1:])
    lines = ['#include "tools/usage/config_keys.h"', "", "namespace ballast::tools {", "",
             "namespace {", "constexpr KeyText kKeyTexts[] = {"]
    for cells in rows(readme.read_text(encoding="utf-8")):
        lines.append(f"    {{{', '.join(json.dumps(cell) for cell in cells)}}},")
    lines += ["};", "}  // namespace", "", "std::span<const KeyText> key_texts() {",
              "  return kKeyTexts;", "}", "", "}  // namespace ballast::tools", ""]
    out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
