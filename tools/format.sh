#!/bin/sh
# Formats all sources in place. With --check it only lists the sources that are not formatted, and
# fails; with --check --all also those that were formatted and have not changed.
set -eu
cd "$(dirname "$0")/.."
sources() {
  find include src aio cpu_adam tools tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' | sort
}
if [ "${1:-}" = "--check" ]; then
  exec python3 -B tools/dev/check_format.py ${2:+"$2"} $(sources)
fi
sources | xargs clang-format -i
