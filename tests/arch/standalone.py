#!/usr/bin/env python3
"""Compiles the program in a library's README against the library alone, runs it and checks its
output.

    standalone.py README PACKAGE EXPECTED PKG_CONFIG_DIRECTORY COMPILER...
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile


def main() -> int:
    readme, package, expected, pkg_config_path, *compiler = sys.argv[1:]
    program = re.search(r"```cpp\n(.*?)```", pathlib.Path(readme).read_text(), re.S).group(1)
    environment = {**os.environ, "PKG_CONFIG_PATH": pkg_config_path}
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", f"{package}-uninstalled"],
        check=True, capture_output=True, text=True, env=environment).stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "program.cpp"
        source.write_text(program)
        executable = source.with_suffix("")
        subprocess.run([*compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", str(source), "-o",
                        str(executable), *flags], check=True)
        printed = subprocess.run([executable], check=True, capture_output=True, text=True).stdout
    print(printed, end="")
    return 0 if printed == expected + "\n" else 1


if __name__ == "__main__":
    sys.exit(main())
