#!/bin/sh
# Compares what the passes of small models call, in two builds, as tests/unit/model/net_main.cpp
# writes it down:
#     tools/dev/compare_calls.sh OLD_BUILD NEW_BUILD [TABLE [NAME [COLUMN]]]
# TABLE: layer_calls.txt (the default), kernel_sizes.txt or block_specs.txt. Prints the first
# differing line of the named row, or of the first row that differs. Both builds read the fixtures
# of this source tree. Build the program before: ninja -C BUILD tests/unit/unit_model_net.
# The exit status is 1 if something differs.
set -eu
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
old=$1/tests/unit/unit_model_net
new=$2/tests/unit/unit_model_net
table=${3:-layer_calls.txt}
name=${4:-}
column=${5:-}
for program in "$old" "$new"; do
  [ -x "$program" ] || { echo "$program is missing; build it with ninja"; exit 2; }
done
export BALLAST_TEST_DATA="$PWD/tests/data"
before=$(mktemp)
after=$(mktemp)
trap 'rm -f "$before" "$after"' EXIT

if [ -z "$name" ]; then
  "$old" --table "$table" >"$before"
  "$new" --table "$table" >"$after"
  if cmp -s "$before" "$after"; then
    echo "all rows of $table are equal"
    exit 0
  fi
  name=$(diff "$before" "$after" | sed -n 's/^[<>] \([^ ]*\) .*/\1/p' | head -n 1)
  echo "$(diff "$before" "$after" | grep -c '^>') of $(wc -l <"$after") rows differ, first $name"
fi
"$old" --dump "$table" "$name" $column >"$before" || true
"$new" --dump "$table" "$name" $column >"$after" || true
cmp -s "$before" "$after" && { echo "$name is equal"; exit 0; }
line=$(diff "$before" "$after" | sed -n '1s/[^0-9].*//p')
echo "$name, $(head -n "$line" "$after" | grep '^# ' | tail -n 1 | cut -c 3-)," \
  "$(head -n "$line" "$after" | grep '^== ' | tail -n 1 | cut -c 4-), line $line:"
echo "old: $(sed -n "${line}p" "$before")"
echo "new: $(sed -n "${line}p" "$after")"
exit 1
