#!/usr/bin/env python3
"""Writes a C++ source with a hash of the sources of all kernels, so that rates are measured again
when a kernel changes. src/calibrate/calibration.h declares it.

    kernel_hash.py OUT DEPFILE FOLDER...
"""

import hashlib
import pathlib
import sys


def main() -> None:
    out, depfile, *folders = (pathlib.Path(word) for word in sys.argv[1:])
    digest = hashlib.sha256()
    inputs = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            inputs.append(path)  # folders too: their times change with new and removed files
            if path.is_file() and path.suffix in (".cpp", ".cu", ".h", ".in"):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
                digest.update(path.read_bytes())
    out.write_text('#include "src/calibrate/calibration.h"\n\n'
                   "namespace ballast::calibrate {\n\n"
                   "std::string_view kernel_hash() noexcept {\n"
                   f'  return "{digest.hexdigest()[:16]}";\n'
                   "}\n\n"
                   "}  // namespace ballast::calibrate\n", encoding="utf-8")
    names = " ".join(str(path).replace(" ", "\\ ") for path in inputs)
    depfile.write_text(f"{out}: {names}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
