#!/usr/bin/env python3
"""Fails if a source is not formatted.

    check_format.py [--all] FILES...

A file that was formatted is looked at again only if it or .clang-format has changed; --all looks at all.
build-test/format.json remembers them, once tools/test.sh has made that folder.
"""

import pathlib
import subprocess
import sys

import green
from green import ROOT


def main() -> int:
    files = [pathlib.Path(name).resolve() for name in sys.argv[1:] if name != "--all"]
    folder = ROOT / "build-test"
    memory = green.Memory(folder / "format.json")
    rules = green.contents(path for path in green.tree() if path.name == ".clang-format")
    keys = {file: green.key_of(rules, green.digest(file)) for file in files}
    left = [file for file in files if "--all" in sys.argv or not memory.has(str(file), keys[file])]
    if left and subprocess.run(["clang-format", "--dry-run", "--Werror", *left], check=False).returncode != 0:
        return 1
    for file in left:
        memory.add(str(file), keys[file])
    if folder.is_dir():
        memory.save()
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main())
