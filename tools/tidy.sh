#!/bin/sh
# Static analysis: clang-tidy with .clang-tidy, and all warnings of clang, over every library and tool
# source that the given build folder (made with clang) compiles.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build-asan}
python3 - "$folder" <<'PY' >"$folder/analysed"
import json, os, sys
folder = sys.argv[1]
done = set()
for command in json.load(open(f"{folder}/compile_commands.json")):
    source = os.path.relpath(os.path.join(command["directory"], command["file"]))
    if source.split("/")[0] in ("src", "aio", "cpu_adam", "tools") and source not in done:
        done.add(source)
        print(source)
PY
# Precompiled headers that no test has needed.
headers=$(ninja -C "$folder" -t targets all | sed -n 's/\.pch: .*/.pch/p')
[ -z "$headers" ] || ninja -C "$folder" $headers >/dev/null
xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p "$folder" <"$folder/analysed" \
  >"$folder/tidy.log" 2>/dev/null || {
  grep -E 'error|warning' "$folder/tidy.log" | sort -u | head -n 60 >&2
  exit 1
}
echo "clang-tidy: nothing found in $(wc -l <"$folder/analysed") files"
