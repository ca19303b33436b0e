#!/bin/sh
# Runs static analysis: clang-tidy with .clang-tidy, and all warnings of clang, over every library
# and tool source that the given build folder (made with clang) compiles. Headers take most of the
# time, so it is several times as fast in a folder that compiles several sources as one (unity=on).
# Units that were clean and are unchanged are left out, unless --all follows the folder.
set -eu
cd "$(dirname "$0")/.."
exec python3 -B tools/dev/tidy.py "${1:-build-asan}" ${2:+"$2"}
