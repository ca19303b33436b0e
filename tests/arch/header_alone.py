#!/usr/bin/env python3
"""Compiles every public header alone and twice in one unit.

    header_alone.py SOURCE_ROOT COMPILER...
"""

import concurrent.futures
import pathlib
import subprocess
import sys


def compile_header(root: pathlib.Path, compiler: list[str], header: str) -> str:
    unit = f'#include "{header}"\n#include "{header}"\n'
    done = subprocess.run(
        [*compiler, "-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only",
         f"-I{root / 'include'}", "-x", "c++", "-"],
        input=unit, text=True, capture_output=True, check=False)
    return "" if done.returncode == 0 else f"{header}:\n{done.stderr}"


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    compiler = sys.argv[2:]
    base = root / "include"
    headers = [str(p.relative_to(base)) for p in sorted(base.rglob("*.h"))]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        failures = [f for f in pool.map(lambda h: compile_header(root, compiler, h), headers) if f]
    for failure in failures:
        print(failure)
    print(f"{len(headers)} headers, {len(failures)} do not stand alone")
    return 1 if failures or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
