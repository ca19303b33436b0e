#!/usr/bin/env python3
"""Checks that a build without tests cannot inject faults: it compiles nothing of aio/faults, and
nothing that it compiles reads the environment variable.

    release.py SOURCE_ROOT MESON...
"""

import json
import pathlib
import subprocess
import sys
import tempfile

VARIABLE = "BALLAST_IO_FAULTS"


def compiled_files(root: pathlib.Path, meson: list[str]) -> list[pathlib.Path]:
    with tempfile.TemporaryDirectory() as build:
        subprocess.run([*meson, "setup", build, str(root), "-Dtests=false", "-Dlibraries_only=true"],
                       check=True, capture_output=True)
        targets = json.loads(subprocess.run([*meson, "introspect", "--targets", build], check=True,
                                            capture_output=True, text=True).stdout)
    files = [pathlib.Path(file) for target in targets for source in target["target_sources"]
             for file in source.get("sources", [])]
    return [file for file in files if root in file.parents]


def main() -> int:
    root = pathlib.Path(sys.argv[1]).resolve()
    faults = root / "aio" / "faults"
    files = compiled_files(root, sys.argv[2:])
    wrong = [str(file) for file in files if faults in file.parents or
             VARIABLE in file.read_text(errors="replace")]
    # The check must be able to fail.
    if not any(VARIABLE in file.read_text() for file in faults.glob("*.cpp")):
        wrong.append("nothing reads the variable at all")
    for problem in wrong:
        print(problem)
    print(f"{len(files)} files, {len(wrong)} of them inject faults")
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    sys.exit(main())
