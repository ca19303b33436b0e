#!/bin/sh
# Formats all sources in place. With --check it only lists the sources that are not formatted, and
# fails.
set -eu
cd "$(dirname "$0")/.."
mode=-i
[ "${1:-}" = "--check" ] && mode="--dry-run --Werror"
find include src aio cpu_adam tools tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' | sort |
  xargs clang-format $mode
