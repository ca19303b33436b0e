#!/usr/bin/env python3
"""Writes a C++ source that holds the text of files.

    embed.py OUT FILE...

A file page.css becomes `const std::string_view kPageCss` in namespace ballast::tools::assets, which
page.h declares.
"""

import pathlib
import sys

END = "BALLAST"


def main() -> None:
    out, *files = map(pathlib.Path, sys.argv[1:])
    lines = ['#include "tools/report/page.h"', "", "namespace ballast::tools::assets {", ""]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert f"){END}\"" not in text, f"{file} has the end of a raw string"
        name = "k" + "".join(part.capitalize() for part in (file.stem, file.suffix[1:]))
        lines += [f'const std::string_view {name} = R"{END}({text}){END}";', ""]
    lines += ["}  // namespace ballast::tools::assets", ""]
    out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
