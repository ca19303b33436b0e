#!/usr/bin/env python3
"""Replaces the tables of keys in configs/keys.md by those of the program.

    write_key_tables.py BALLAST

A table stands between `<!-- keys: SECTIONS -->` and `<!-- end -->`.
"""

import pathlib
import re
import subprocess
import sys

HEAD = "| key | meaning | default | range |\n| --- | --- | --- | --- |\n"
PAGE = pathlib.Path(__file__).resolve().parents[2] / "configs/keys.md"


def main() -> None:
    program = sys.argv[1]

    def table(match: re.Match) -> str:
        sections = match[1].split()
        rows = subprocess.run([program, "config-keys", "--markdown", *sections], check=True,
                              capture_output=True, text=True).stdout
        return f"<!-- keys: {match[1]} -->\n{HEAD}{rows}<!-- end -->\n"

    text = PAGE.read_text(encoding="utf-8")
    tables = re.compile(r"<!-- keys: ([a-z0-9_ ]+) -->\n.*?<!-- end -->\n", re.DOTALL)
    PAGE.write_text(tables.sub(table, text), encoding="utf-8")


if __name__ == "__main__":
    main()
