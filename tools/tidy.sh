#!/bin/sh
# Static analysis of all sources: clang's warnings as errors, then clang-tidy with .clang-tidy.
set -eu
cd "$(dirname "$0")/.."
[ -f build-clang/build.ninja ] || CXX=clang++ meson setup build-clang --werror \
  -Dbuildtype=debug >build-clang.log 2>&1 || { cat build-clang.log >&2; exit 1; }
rm -f build-clang.log
ninja -C build-clang >build-clang/build.log 2>&1 || {
  grep -E -A20 'FAILED|error' build-clang/build.log | head -n 80 >&2
  exit 1
}
echo "clang: no warnings"
find src aio cpu_adam tools -name '*.cpp' | sort >build-clang/sources
# Sources that this configuration does not compile (absent backends) have no command to analyse.
python3 - build-clang <<'PY' >build-clang/compiled
import json, os, sys
folder = sys.argv[1]
commands = json.load(open(f"{folder}/compile_commands.json"))
compiled = {os.path.relpath(os.path.join(c["directory"], c["file"])) for c in commands}
for line in open(f"{folder}/sources"):
    if line.strip() in compiled:
        print(line.strip())
PY
xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p build-clang <build-clang/compiled \
  >build-clang/tidy.log 2>/dev/null || {
  grep -E 'error|warning' build-clang/tidy.log | sort -u | head -n 60 >&2
  exit 1
}
echo "clang-tidy: nothing found in $(wc -l <build-clang/compiled) files"
