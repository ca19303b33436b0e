#!/bin/sh
# Runs static analysis: clang-tidy with .clang-tidy, and all warnings of clang, over every library
# and tool source that the given build folder (made with clang) compiles. Headers take most of the
# time, so it is several times as fast in a folder that compiles several sources as one (unity=on).
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build-asan}
python3 - "$folder" <<'PY'
import json, os, re, sys

folder = sys.argv[1]
units, sources = {}, set()
for command in json.load(open(f"{folder}/compile_commands.json")):
    unit = os.path.relpath(os.path.join(command["directory"], command["file"]))
    parts = [unit]
    if re.search(r"-unity[0-9]+\.cpp$", unit):
        parts = [os.path.relpath(p) for p in re.findall("#include *[<\"](.*)[>\"]", open(unit).read())]
    parts = {p for p in parts if p.split("/")[0] in ("src", "aio", "cpu_adam", "tools")} - sources
    if parts:
        units[unit] = len(parts)
        sources |= parts
# The longest ones first, so that no core waits for the last one.
order = sorted(units, key=lambda unit: (-units[unit], unit))
open(f"{folder}/analysed", "w").write("".join(f"{unit}\n" for unit in order))
open(f"{folder}/analysed-sources", "w").write("".join(f"{source}\n" for source in sorted(sources)))
PY
# Builds the precompiled headers that no test has needed.
headers=$(ninja -C "$folder" -t targets all | sed -n 's/\.pch: .*/.pch/p')
[ -z "$headers" ] || ninja -C "$folder" $headers >/dev/null
xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p "$folder" <"$folder/analysed" \
  >"$folder/tidy.log" 2>/dev/null || {
  grep -E 'error|warning' "$folder/tidy.log" | sort -u | head -n 60 >&2
  exit 1
}
echo "clang-tidy: nothing found in $(wc -l <"$folder/analysed-sources") files"
